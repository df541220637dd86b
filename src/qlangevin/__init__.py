"""Sample the posterior of a neural network in 8 bits: low-precision stochastic gradient Langevin dynamics."""

from . import lowering, native, theory
from .formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, BlockFloat, FixedPoint, Float, Format, parse
from .lowering import Quantize, lower, unlower
from .ops import corrected, quantize
from .packing import pack, unpack
from .qtensor import QTensor, encode
from .random import Key
from .samplers import SGLD

__version__ = "0.1.0"

__all__ = [
    "BF16",
    "FP8_E4M3",
    "FP8_E5M2",
    "FP16",
    "FP32",
    "SGLD",
    "BlockFloat",
    "FixedPoint",
    "Float",
    "Format",
    "Key",
    "QTensor",
    "Quantize",
    "corrected",
    "encode",
    "lower",
    "lowering",
    "native",
    "pack",
    "parse",
    "quantize",
    "theory",
    "unlower",
    "unpack",
]
