"""Data sets: files found or downloaded, read, and served as batches of examples."""

from .datasets import Data, DatasetName, load_dataset, make_loader
from .examples import Examples

__all__ = ["Data", "DatasetName", "Examples", "load_dataset", "make_loader"]
