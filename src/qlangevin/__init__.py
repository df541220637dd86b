"""Sample the posterior of a neural network in 8 bits: low-precision stochastic gradient Langevin dynamics."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import lowering, native, theory
from .checkpoints import load_checkpoint, save_checkpoint
from .files import DamagedError
from .formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, BlockFloat, FixedPoint, Float, Format, parse
from .links import Uncertainty
from .loader import Loader
from .lowering import Quantize, lower, unlower
from .ops import corrected, quantize
from .packing import pack, unpack
from .posterior import Posterior
from .qtensor import QTensor, encode
from .random import Key
from .reading import Sample
from .samplers import SGLD
from .schedules import ConstantLR, CyclicalLR, LinearDecayLR, StepDecayLR
from .store import SampleStore
from .version import __version__

if TYPE_CHECKING:
    from . import diagnostics, distributed, metrics

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "SGLD",
    "BlockFloat",
    "ConstantLR",
    "CyclicalLR",
    "DamagedError",
    "FixedPoint",
    "Float",
    "Format",
    "Key",
    "LinearDecayLR",
    "Loader",
    "Posterior",
    "QTensor",
    "Quantize",
    "Sample",
    "SampleStore",
    "StepDecayLR",
    "Uncertainty",
    "__version__",
    "corrected",
    "diagnostics",
    "distributed",
    "encode",
    "load_checkpoint",
    "lower",
    "lowering",
    "metrics",
    "native",
    "pack",
    "parse",
    "quantize",
    "save_checkpoint",
    "theory",
    "unlower",
    "unpack",
]


def __getattr__(name: str) -> ModuleType:
    """Modules that bring large libraries along, or parts of PyTorch it may lack, are imported when they are first used."""
    if name in ("diagnostics", "distributed", "metrics"):
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
