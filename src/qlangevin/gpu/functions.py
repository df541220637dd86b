"""The functions and attributes of `quantization.backend.Kernels`, for GPUs."""

from __future__ import annotations

import sys
from typing import cast

import torch

from ..quantization import backend
from .dynamics import sgld
from .launch import decode, encode, encode_exactly, first_not_finite, quantize, quantize_with_codes, relu_with_codes
from .step import begin_step

__all__ = [
    "begin_step", "decode", "deferred", "encode", "encode_exactly", "first_not_finite", "floats", "quantize",
    "quantize_with_codes", "relu_with_codes", "sgld",
]  # fmt: skip

deferred = True
floats = frozenset((torch.float32, torch.bfloat16, torch.float16))

this_module = cast(backend.Kernels, sys.modules[__name__])
