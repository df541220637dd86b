"""The methods of the paper, as a table of settings: one sampler does them all.

An F keeps a second, full-precision copy of the weights that takes the updates; an L keeps none. SGD is SGLD without noise,
a method with a small c has the cyclical schedule. The last two are those of the appendix on deterministic rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..quantization.operators import Rounding

__all__ = ["METHODS", "Method", "MethodName"]

MethodName: TypeAlias = Literal[
    "sgdfp", "sgldfp", "csgldfp", "sgdlp-f", "sgdlp-l", "sgldlp-f", "naive-sgldlp-l", "vc-sgldlp-l", "csgldlp-f",
    "vc-csgldlp-l", "nearest-sgdlp-l", "nearest-sgldlp-l",
]  # fmt: skip


@dataclass(frozen=True)
class Method:
    """What distinguishes one method from another."""

    name: str
    """As the paper prints it."""
    noise: bool = True
    """Langevin noise; without it, it is SGD."""
    low: bool = True
    """Whether weights, gradients, activations and errors are in low precision."""
    accumulator: str | None = None
    """The format of the copy that takes the updates; None if there is none."""
    rounding: Rounding = "stochastic"
    """How an update gets onto the grid."""
    cyclical: bool = False
    """cSGLD's schedule instead of a single descent."""
    begins: MethodName = "sgdlp-l"
    """SGD in the same precision: what a chain on ImageNet begins with."""


METHODS: dict[str, Method] = {
    "sgdfp": Method("SGDFP", noise=False, low=False),
    "sgldfp": Method("SGLDFP", low=False, begins="sgdfp"),
    "csgldfp": Method("cSGLDFP", low=False, cyclical=True, begins="sgdfp"),
    "sgdlp-f": Method("SGDLP-F", noise=False, accumulator="fp32"),
    "sgdlp-l": Method("SGDLP-L", noise=False),
    "sgldlp-f": Method("SGLDLP-F", accumulator="fp32", begins="sgdlp-f"),
    "naive-sgldlp-l": Method("Naïve SGLDLP-L"),
    "vc-sgldlp-l": Method("VC SGLDLP-L", rounding="corrected"),
    "csgldlp-f": Method("cSGLDLP-F", accumulator="fp32", cyclical=True, begins="sgdlp-f"),
    "vc-csgldlp-l": Method("VC cSGLDLP-L", rounding="corrected", cyclical=True),
    "nearest-sgdlp-l": Method("SGDLP-L, nearest", noise=False, rounding="nearest"),
    "nearest-sgldlp-l": Method("SGLDLP-L, nearest", rounding="nearest", begins="nearest-sgdlp-l"),
}
