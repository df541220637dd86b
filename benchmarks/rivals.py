"""Who we are compared with: qtorch and torchao as installed, and quantizers in eager PyTorch, as fast as we could write them.

The eager ones take their random bits as 64-bit integers and look at them as two words of 32 bits or four of 16, because
torch's generator spends its time on calls rather than on bits: ``uniform_`` takes longer for a number of 24 bits. They
compute in place, and round by a detour: x + c - c with c = 1.5 2^23 Δ leaves the multiple of Δ that is nearest to x.
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


def module(name: str) -> ModuleType | str:
    """A rival's module, or why there is none. qtorch compiles itself when it is imported, which takes ninja and half a minute."""
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    logging.disable(logging.WARNING)  # torchao complains of what it cannot load, and we do not need
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError, subprocess.SubprocessError) as error:
        return str(error).strip().splitlines()[0][:120]
    finally:
        logging.disable(logging.NOTSET)


def qtorch_quantizers(quant: ModuleType, rounding: str) -> dict[str, Quantizer]:
    """qtorch's quantizers under our names."""
    return {
        "fixed8.6": lambda x: quant.fixed_point_quantize(x, 8, 6, rounding=rounding),
        "bfp8": lambda x: quant.block_quantize(x, 8, dim=0, rounding=rounding),
        "fp8_e5m2": lambda x: quant.float_quantize(x, 5, 2, rounding=rounding),
    }


def random_words(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A random integer of all the bits of a dtype for each element of x."""
    longs = torch.empty(x.numel() * dtype.itemsize // 8, dtype=torch.int64)
    return longs.random_(-(2**63), None).view(dtype).view(x.shape)


def noise(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Random words as float32, uniform over ± half of 2^bits."""
    return random_words(x, dtype).float()


def fixed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Stochastic fixed8.6."""
    gap = 2.0**-6
    u, c = noise(x, dtype), 1.5 * 2**23 * gap
    torch.add(x, u, alpha=gap * 2.0 ** (-8 * dtype.itemsize), out=u)
    return u.add_(c).sub_(c).clamp_(-128 * gap, 127 * gap)


def block(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Stochastic bfp8 of the rows of a matrix; outcomes beyond ±127 are clipped, as qtorch does."""
    most = torch.maximum(x.amax(1, True), x.amin(1, True).neg_())
    gap = torch.ldexp(torch.ones_like(most), torch.frexp(most).exponent - 7)
    u = noise(x, dtype).mul_(2.0 ** (-8 * dtype.itemsize))
    return u.addcmul_(x, 1 / gap).round_().clamp_(-127, 127).mul_(gap)


def fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Stochastic fp8_e5m2 on the bits of a float: add random bits below the two that are kept, then cut them off.

    Times 2^-112 the format's subnormal numbers become those of float32, so that they need no case of their own.
    """
    low = (1 << 21) - 1
    y = x * 2.0**-112
    words, bits = random_words(x, dtype), y.view(torch.int32)
    if dtype == torch.int32:
        bits.add_(words.bitwise_and_(low)).bitwise_and_(~low)
    else:
        bits.add_(words.int(), alpha=32).add_(1 << 20).bitwise_and_(~low)
    return y.mul_(2.0**112).clamp_(-57344, 57344)


EAGER: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {"fixed8.6": fixed, "bfp8": block, "fp8_e5m2": fp8}
