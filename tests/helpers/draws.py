"""Q^vc for given random numbers, so that tests can run through all of them."""

from torch import Tensor

from qlangevin import Format
from qlangevin.quantization import rounding
from qlangevin.quantization.format_base import Draws
from qlangevin.quantization.laws import Mean

__all__ = ["draw_exactly"]


def draw_exactly(mu: Tensor, v: Tensor, format: Format, h: Tensor, xi: Tensor) -> Tensor:
    """Return Q^vc(μ, v) for centered numbers h and normal numbers ξ; no block here is in need of a coin."""

    def no_coins() -> Tensor:
        raise AssertionError("a block with several coordinates at risk")

    return rounding.exact(Mean(mu), v, format, Draws(h, xi, no_coins))
