"""Sample the posterior of a neural network in 8 bits: low-precision stochastic gradient Langevin dynamics."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from . import gpu, lowering, native, theory
from ._version import __version__
from ._warnings import QLangevinWarning
from .lowering.layers import Quantize, lower, unlower
from .prediction.loss_scale import check_loss_scale
from .prediction.posterior import Posterior
from .prediction.predictive import Uncertainty
from .quantization.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, BlockFloat, FixedPoint, Float, Format, parse
from .quantization.operators import corrected, quantize
from .quantization.qtensor import QTensor, encode
from .quantization.random import Key
from .sampling.diagnosis import Diagnosis
from .sampling.loader import Loader
from .sampling.packing import pack, unpack
from .sampling.preconditioner import RMS
from .sampling.schedules import ConstantLR, CyclicalLR, LinearDecayLR, StepDecayLR
from .sampling.sghmc import SGHMC
from .sampling.sgld import SGLD
from .storage.checkpoint import load_checkpoint, save_checkpoint
from .storage.files import DamagedError
from .storage.sample import Sample
from .storage.store import SampleStore

if TYPE_CHECKING:
    from . import distributed, slt
    from .prediction import diagnostics, metrics

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "RMS",
    "SGHMC",
    "SGLD",
    "BlockFloat",
    "ConstantLR",
    "CyclicalLR",
    "DamagedError",
    "Diagnosis",
    "FixedPoint",
    "Float",
    "Format",
    "Key",
    "LinearDecayLR",
    "Loader",
    "Posterior",
    "QLangevinWarning",
    "QTensor",
    "Quantize",
    "Sample",
    "SampleStore",
    "StepDecayLR",
    "Uncertainty",
    "__version__",
    "check_loss_scale",
    "corrected",
    "diagnostics",
    "distributed",
    "encode",
    "gpu",
    "load_checkpoint",
    "lower",
    "lowering",
    "metrics",
    "native",
    "pack",
    "parse",
    "quantize",
    "save_checkpoint",
    "slt",
    "theory",
    "unlower",
    "unpack",
]


# Imported on first use: they need large libraries, or parts of PyTorch that some builds lack.
_LAZY = {
    "diagnostics": "prediction.diagnostics",
    "distributed": "distributed",
    "metrics": "prediction.metrics",
    "slt": "slt",
}


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return import_module(f".{_LAZY[name]}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
