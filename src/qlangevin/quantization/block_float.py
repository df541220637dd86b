"""Block floating point: integers times a power of two that a block of elements shares."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor

from .block_rounding import BlockGrid, draw_blocks, find_gaps
from .format_base import (
    FLOAT32_MIN_EXPONENT,
    Draws,
    DtypeLimits,
    Format,
    GridKind,
    KernelGrid,
    all_within,
    binade,
    bits_in_storage,
    check_field,
    on_grid,
    power_of_two,
)
from .laws import Mean

__all__ = ["BlockFloat"]

NAME = re.compile(r"bfp(\d+)(?:e(\d+))?(?:/(row|tensor|\d+))?(?:@(bf16|fp16))?")
HALF = {"bf16": DtypeLimits.of(torch.bfloat16), "fp16": DtypeLimits.of(torch.float16)}


@dataclass(frozen=True)
class BlockFloat(Format):
    """W-bit signed integers times a power of two shared by a block: Δ = 2^(E - W + 2), E = floor(log2 max|block|).

    E is clipped to the range of an ``exp_bits``-bit integer, -2^(F-1) .. 2^(F-1) - 1. ``block`` says which elements share it:
    ``"tensor"`` all (the paper's big block), ``"row"`` a slice along dim 0 (its small block; a tensor with fewer than
    two dimensions is one block), an integer g groups of g along the last dim (the last group may be shorter).

    The code of a number is the integer value / Δ; E is kept in the exponents, one int8 for each block in order. Codes are
    symmetric, -N .. N with N = 2^(W-1) - 1, as in the reference implementation. The code -2^(W-1) is not used: with it
    -2^(E+1) could be written with the exponent E and with E + 1, and quantizing would not be idempotent.

    ``inside`` clips E further, so that half precision, ``"bf16"`` or ``"fp16"``, holds every number: Δ is no less than its least
    number and N Δ no more than its greatest. Tensors of these dtypes are rounded to that grid whatever is asked for (`within`).
    """

    bits: int
    block: Literal["row", "tensor"] | int = "row"
    exp_bits: int = 8
    inside: Literal["bf16", "fp16"] | None = None

    narrower: ClassVar[str] = "fewer bits (bfp8, say)"
    has_exponents: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_field(self, "bits", 2, 24)
        check_field(self, "exp_bits", 1, 8)
        if isinstance(self.block, numbers.Integral):
            check_field(self, "block", 1, 2**31 - 1)
        elif self.block not in ("row", "tensor"):
            raise ValueError(f"block must be 'row', 'tensor' or a group size, got {self.block!r}")
        if self.inside is not None and (self.inside not in HALF or self.digits > HALF[self.inside].digits):
            raise ValueError(
                "inside must be None, 'bf16' for at most 9 bits or 'fp16' for at most 12, "
                f"got {self.inside!r} with {self.bits} bits"
            )
        if self.min_gap_exponent < FLOAT32_MIN_EXPONENT:
            raise ValueError(
                f"bits={self.bits} with exp_bits={self.exp_bits} needs numbers down to 2^{self.min_gap_exponent}, below "
                f"float32; use at most {self.bits - (FLOAT32_MIN_EXPONENT - self.min_gap_exponent)} bits or fewer exp_bits"
            )

    @classmethod
    def from_name(cls, name: str) -> BlockFloat | None:
        if not (match := NAME.fullmatch(name)):
            return None
        bits, exp_bits, block, inside = match[1], match[2] or 8, match[3] or "row", match[4]
        return cls(int(bits), int(block) if block.isdigit() else block, int(exp_bits), inside)  # type: ignore[arg-type]

    def __str__(self) -> str:
        exponent = "" if self.exp_bits == 8 else f"e{self.exp_bits}"
        block = "" if self.block == "row" else f"/{self.block}"
        return f"bfp{self.bits}{exponent}{block}" + (f"@{self.inside}" if self.inside else "")

    @property
    def top(self) -> int:
        """N, the largest code."""
        return (1 << (self.bits - 1)) - 1

    @property
    def largest_multiple(self) -> float:
        """N."""
        return self.top

    @property
    def min_gap_exponent(self) -> int:
        own = -(1 << (self.exp_bits - 1)) - self.bits + 2
        return max(own, HALF[self.inside].least) if self.inside else own

    @property
    def max_gap_exponent(self) -> int:
        own = (1 << (self.exp_bits - 1)) - 1 - self.bits + 2
        return min(own, math.frexp(HALF[self.inside].most / self.top)[1] - 1) if self.inside else own

    def within(self, limits: DtypeLimits) -> BlockFloat:
        if limits.digits < self.digits or (limits.least <= self.min_gap_exponent and self.high <= limits.most):
            return self
        inside = next((name for name, half in HALF.items() if half == limits), None)
        return self if inside is None else replace(self, inside=cast(Any, inside))

    @property
    def low(self) -> float:
        return -self.high

    @property
    def high(self) -> float:
        return float(self.top) * 2.0**self.max_gap_exponent

    @property
    def digits(self) -> int:
        return self.bits - 1

    @property
    def storage_bits(self) -> int:
        return bits_in_storage(self.bits)

    # ---- blocks of a tensor

    @property
    def group_size(self) -> int | None:
        """g, if blocks are groups along the last dim."""
        return self.block if isinstance(self.block, int) else None

    def layout(self, shape: torch.Size) -> tuple[int, int]:
        """Return (line, size): the elements of a tensor, in order, are lines cut into blocks of this size, the last shorter."""
        if isinstance(self.block, int) and len(shape):
            line = max(shape[-1], 1)
            return (self.block, self.block) if line % self.block == 0 else (line, min(self.block, line))
        rows = shape[0] if self.block == "row" and len(shape) > 1 else 1
        line = max(shape.numel() // max(rows, 1), 1)
        return line, line

    def block_count(self, shape: torch.Size) -> int:
        line, size = self.layout(shape)
        return shape.numel() // line * -(-line // size)

    def blocks(self, x: Tensor) -> Tensor:
        """Return x as a matrix with one block a row; short blocks are filled up with zeros."""
        line, size = self.layout(x.shape)
        lines = x.reshape(-1, line)
        return torch.nn.functional.pad(lines, (0, -line % size)).view(-1, size)

    def unblocks(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return the tensor of the given shape whose `blocks` are these rows."""
        line, size = self.layout(shape)
        return rows.reshape(-1, -(-line // size) * size)[:, :line].reshape(shape)

    def keeps_blocks(self, order: Sequence[int]) -> bool:
        if self.block == "tensor":
            return True
        return order[0] == 0 if self.block == "row" else order[-1] == len(order) - 1

    def cuts_blocks(self, shape: torch.Size, dims: Iterable[int | None]) -> bool:
        return self.block == "tensor" or len(shape) < 2 or any(dim != 0 for dim in dims)

    def stacked(self, shape: torch.Size) -> tuple[BlockFloat, torch.Size]:
        if self.block_count(shape[1:]) <= 1:
            return replace(self, block="row"), torch.Size((shape[0], shape[1:].numel()))
        return self, torch.Size((shape[0] * shape[1], *shape[2:])) if self.block == "row" else shape

    # ---- the grid

    def gap_exponent(self, rows: Tensor) -> Tensor:
        """Return log2 Δ of each block of `blocks(x)`, as an int32 column."""
        exponent = binade(rows.abs().amax(1, keepdim=True)) - self.bits + 2
        return exponent.clamp(self.min_gap_exponent, self.max_gap_exponent)

    def gap(self, x: Tensor) -> Tensor:
        """Return Δ at each element of x: that of its block; NaN in a block that holds a NaN."""
        rows = self.blocks(x)
        gap = power_of_two(self.gap_exponent(rows), x.dtype)
        gap = torch.where(rows.isnan().any(1, keepdim=True), torch.nan, gap)
        return self.unblocks(gap.expand_as(rows), x.shape)

    def is_representable(self, x: Tensor) -> Tensor:
        """Return a mask: True where an element of x lies on the grid that the largest element of its block sets."""
        gap = self.gap(x)
        return on_grid(x, gap) & (x.abs() <= self.top * gap)

    def kernel_grid(self, shape: torch.Size) -> KernelGrid:
        limits = (self.min_gap_exponent, self.max_gap_exponent, float(self.top), self.low, self.high)
        return KernelGrid(GridKind.BLOCK, self.bits - 2, *limits, *self.layout(shape))

    def _block_grid(self, mean: Mean) -> BlockGrid:
        return BlockGrid(self.gap_exponent(mean.total), self.max_gap_exponent, self.top)

    def drawn_gap(self, mu: Mean, v: Tensor) -> Tensor:
        """Return the finer gap of each block: a block is drawn on it unless an element at risk lands outside."""
        mean, shape = mu.map(self.blocks), mu.start.shape
        fine = find_gaps(self._block_grid(mean), mean, self.blocks(v.expand(shape)) if v.dim() else v).fine
        return self.unblocks(fine.expand_as(mean.start), shape)

    def draw(self, mu: Mean, v: Tensor, draws: Draws) -> Tensor:
        def rows(t: Tensor) -> Tensor:
            return self.blocks(t) if t.dim() else t

        mean, shape = mu.map(self.blocks), mu.start.shape
        grid = self._block_grid(mean)
        variance = rows(v.expand(shape) if v.dim() else v)
        return self.unblocks(
            draw_blocks(grid, mean, variance, rows(draws.h), rows(draws.xi), lambda: rows(draws.coins())), shape
        )

    # ---- codes

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.blocks(values)
        gap = self.gap_exponent(rows)
        codes = self.unblocks(rows / power_of_two(gap, torch.float32), values.shape)
        return codes.to(self.code_dtype), (gap + self.bits - 2).to(torch.int8).view(-1)

    def decode(self, codes: Tensor, exponents: Tensor | None) -> Tensor:
        assert exponents is not None
        gap = power_of_two(exponents.view(-1, 1).to(torch.int32) - self.bits + 2, torch.float32)
        return self.unblocks(self.blocks(codes).to(torch.float32) * gap, codes.shape).contiguous()

    def are_codes(self, codes: Tensor, exponents: Tensor | None) -> bool:
        assert exponents is not None
        limit = 1 << (self.exp_bits - 1)
        return all_within(codes, -self.top, self.top) and all_within(exponents, -limit, limit - 1)
