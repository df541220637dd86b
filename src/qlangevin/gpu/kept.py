"""Tensors that a step keeps beside the weights, read element by element: numbers, or codes of any format.

A row of a table has, after the columns of `Row`, those of `Extra`. A tensor in any format takes thirteen: address, address of
exponents, lengths of lines and blocks, and the nine numbers of its grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import triton
import triton.language as tl

from .elements import BLOCK
from .laws import from_gaps, gap_of
from .step_kernels import Row, load_grid, load_theta, pointer

__all__ = ["EXTRA_WIDTH", "Extra", "Kept", "Reads", "divide_by_line", "load_kept"]

FIRST_GRID = tl.constexpr(4)  # where the grid begins among the columns of one tensor


class Extra(IntEnum):
    """Columns of a table of `dynamics` after those of `Row`."""

    MASK, MOVE, SPREAD, BASE, OLD, GAIN = range(Row.WIDTH, Row.WIDTH + 6)
    SCALE_AT, SCALE, FREEZE, VELOCITY_KEY, VELOCITY_STEP = range(Row.WIDTH + 6, Row.WIDTH + 11)
    THETA, CENTER, MOMENTS, VELOCITY, WIDTH = range(Row.WIDTH + 11, Row.WIDTH + 11 + 5 * 13, 13)


EXTRA_WIDTH = tl.constexpr(int(Extra.WIDTH))


@dataclass(frozen=True)
class Kept:
    """Memory and format of one tensor, as a kernel is compiled for them."""

    dtype: Any  # Triton's, of what is in memory
    kind: int  # of the grid
    codes: bool
    tiny: bool  # some gaps, or their inverses, are no normal numbers


@dataclass(frozen=True)
class Reads:
    """All that kernels of `dynamics_kernels` are compiled for; what is None is absent."""

    theta: Kept
    gradient: Any  # its dtype
    q_g: int  # the kind of Q_G's grid
    tiny_g: bool
    naive: bool  # rounding comes after the noise, which is part of the move
    masked: bool
    center: Kept | None = None
    moments: Kept | None = None
    velocity: Kept | None = None

    @property
    def each(self) -> bool:
        """True if every weight has its own variance."""
        return self.masked or self.moments is not None


@triton.jit
def load_kept(row, COLUMN: tl.constexpr, first, place, inside, KEPT: tl.constexpr):
    """Return elements of a tensor, at a number of places after its element ``first``, as float32."""
    numbers, at = pointer(row, COLUMN, KEPT.dtype, False), first + place
    if KEPT.codes and KEPT.kind == BLOCK:
        exponents = pointer(row, COLUMN + 1, tl.int8, False) + block_of(row, COLUMN, first, place)
        e = tl.load(exponents, mask=inside, other=0).to(tl.int32) - tl.load(row + COLUMN + FIRST_GRID).to(tl.int32)
        code = tl.load(numbers + at, mask=inside, other=0).to(tl.float32)
        return from_gaps(code, gap_of(e, KEPT.tiny), KEPT.tiny)
    else:
        return load_theta(numbers, at, inside, load_grid(row, COLUMN + FIRST_GRID), KEPT.kind, KEPT.codes, KEPT.tiny)


@triton.jit
def block_of(row, COLUMN: tl.constexpr, first, place):
    """Return the numbers of the blocks of elements. It divides in 32 bits, which is many times faster than in 64."""
    line, size = tl.load(row + COLUMN + 2).to(tl.uint32), tl.load(row + COLUMN + 3).to(tl.uint32)
    before, rest = divide_by_line(first, line)
    beyond = rest + place.to(tl.uint32)
    lines = beyond // line
    return (before + lines) * ((line + size - 1) // size) + (beyond - lines * line) // size


@triton.jit
def divide_by_line(first, line):
    """Return (quotient, rest) of an index below 2^33 by the length of a line, below 2^31: 2^31 at a time."""
    low, high, most = (first & 0x7FFFFFFF).to(tl.uint32), (first >> 31).to(tl.int32), line * 0 + 0x7FFFFFFF
    quotient, rest = low // line, low % line
    for i in tl.static_range(3):
        further = rest + (most % line + 1)
        over = further >= line
        quotient = tl.where(high > i, quotient + most // line + tl.where(over, 1, 0).to(tl.uint32), quotient)
        rest = tl.where(high > i, tl.where(over, further - line, further), rest)
    return quotient, rest
