"""Reports of saved results: read, summarize, judge, draw, and lay out as a page."""

from ..results import load_results
from .build import Lead, write_report
from .claims import claims

__all__ = ["Lead", "claims", "load_results", "write_report"]
