"""The methods of the paper, as a table of settings: one sampler does them all.

Methods with an F keep a full-precision accumulator, a second copy of the weights that takes the updates; those with an L keep
none. SGD is SGLD without noise; a small c stands for the cyclical schedule. The last two methods, with deterministic rounding,
are those of the paper's appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..quantization.operators import Rounding

__all__ = ["METHODS", "Method", "MethodName", "method_name"]

MethodName: TypeAlias = Literal[
    "sgdfp", "sgldfp", "csgldfp", "sgdlp-f", "sgdlp-l", "sgldlp-f", "naive-sgldlp-l", "vc-sgldlp-l", "csgldlp-f",
    "vc-csgldlp-l", "nearest-sgdlp-l", "nearest-sgldlp-l",
]  # fmt: skip


@dataclass(frozen=True)
class Method:
    """Settings that distinguish one method from another."""

    name: str
    """Name on pages: the paper's, where it has one; cSGLDLP-F is cSGLD-F there."""
    noise: bool = True
    """Add Langevin noise; without it the method is SGD."""
    low_precision: bool = True
    """Keep weights, gradients, activations and errors in low precision."""
    accumulator: str | None = None
    """Format of the accumulator; None if there is none."""
    rounding: Rounding = "stochastic"
    """Rounding of an update to the grid."""
    cyclical: bool = False
    """Use the schedule of cSGLD."""
    starts_from: MethodName = "sgdlp-l"
    """SGD in the same precision: the warm start of a chain on ImageNet."""


METHODS: dict[str, Method] = {
    "sgdfp": Method("SGDFP", noise=False, low_precision=False),
    "sgldfp": Method("SGLDFP", low_precision=False, starts_from="sgdfp"),
    "csgldfp": Method("cSGLDFP", low_precision=False, cyclical=True, starts_from="sgdfp"),
    "sgdlp-f": Method("SGDLP-F", noise=False, accumulator="fp32"),
    "sgdlp-l": Method("SGDLP-L", noise=False),
    "sgldlp-f": Method("SGLDLP-F", accumulator="fp32", starts_from="sgdlp-f"),
    "naive-sgldlp-l": Method("Naïve SGLDLP-L"),
    "vc-sgldlp-l": Method("VC SGLDLP-L", rounding="corrected"),
    "csgldlp-f": Method("cSGLDLP-F", accumulator="fp32", cyclical=True, starts_from="sgdlp-f"),
    "vc-csgldlp-l": Method("VC cSGLDLP-L", rounding="corrected", cyclical=True),
    "nearest-sgdlp-l": Method("SGDLP-L, nearest", noise=False, rounding="nearest"),
    "nearest-sgldlp-l": Method("SGLDLP-L, nearest", rounding="nearest", starts_from="nearest-sgdlp-l"),
}


def method_name(key: str) -> str:
    """Return the name of a method in the paper; of an unknown one, as in a file of another version, the key itself."""
    return METHODS[key].name if key in METHODS else key
