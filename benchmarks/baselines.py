"""Baselines: qtorch and torchao as installed, and quantizers in eager PyTorch, as fast as we could write them.

The eager quantizers draw random bits as 64-bit integers and view them as two words of 32 bits or four of 16, because torch's
generator takes as long for 64 bits as for fewer: ``uniform_`` takes longer for a number of 24 bits. They compute in place, and
round by adding and subtracting: x + c - c with c = 1.5 2^23 Δ is the multiple of Δ that is nearest to x.
"""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sysconfig
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

Quantizer = Callable[[Tensor], Tensor]


def import_baseline(name: str) -> ModuleType | str:
    """Return a baseline's module, or the reason why it cannot be imported.

    qtorch compiles itself when it is imported, which takes ninja and half a minute.
    """
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    logging.disable(logging.WARNING)  # torchao warns of extensions that it cannot load
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error).strip().splitlines()[0][:120]
    finally:
        logging.disable(logging.NOTSET)


def qtorch_quantizers(quant: ModuleType, rounding: str) -> dict[str, Quantizer]:
    """Return qtorch's quantizers under the names of our formats."""
    return {
        "fixed8.6": lambda x: quant.fixed_point_quantize(x, 8, 6, rounding=rounding),
        "bfp8": lambda x: quant.block_quantize(x, 8, dim=0, rounding=rounding),
        "fp8_e5m2": lambda x: quant.float_quantize(x, 5, 2, rounding=rounding),
    }


def random_words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw an integer, uniform over the dtype, for each element of x."""
    longs = torch.empty(x.numel() * dtype.itemsize // 8, dtype=torch.int64)
    return longs.random_(-(2**63), None).view(dtype).view(x.shape)


def draw_noise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Draw float32 numbers, uniform over ± half of 2^bits."""
    return random_words(x, dtype).float()


def quantize_fixed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round stochastically to fixed8.6."""
    gap = 2.0**-6
    u, c = draw_noise(x, dtype), 1.5 * 2**23 * gap
    torch.add(x, u, alpha=gap * 2.0 ** (-8 * dtype.itemsize), out=u)
    return u.add_(c).sub_(c).clamp_(-128 * gap, 127 * gap)


def quantize_block(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round the rows of a matrix stochastically to bfp8; outcomes beyond ±127 are clipped, as qtorch does."""
    most = torch.maximum(x.amax(1, True), x.amin(1, True).neg_())
    gap = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent - 7)
    u = draw_noise(x, dtype).mul_(2.0 ** (-8 * dtype.itemsize))
    return u.addcmul_(x, 1 / gap).round_().clamp_(-127, 127).mul_(gap)


def quantize_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round stochastically to fp8_e5m2 on the bits of a float: add random bits below the two that are kept, then mask them.

    Scaled by 2^-112 the format's subnormal numbers are those of float32, so that they need no case of their own.
    """
    low = (1 << 21) - 1
    y = x * 2.0**-112
    words, bits = random_words(x, dtype), y.view(torch.int32)
    if dtype == torch.int32:
        bits.add_(words.bitwise_and_(low)).bitwise_and_(~low)
    else:
        bits.add_(words.int(), alpha=32).add_(1 << 20).bitwise_and_(~low)
    return y.mul_(2.0**112).clamp_(-57344, 57344)


EAGER: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "fixed8.6": quantize_fixed,
    "bfp8": quantize_block,
    "fp8_e5m2": quantize_fp8,
}
