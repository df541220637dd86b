"""Search for settings that repair a chain whose bits do not suffice: the estimate of the diagnosis at other settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..quantization.formats import FP32, BlockFloat, FixedPoint, Float, Format, fit_dtype, parse
from ..quantization.operators import Rounding
from .diagnosis import MOST_SATURATED, Remedy, Sums
from .step_variance import Proposal, measure_step

__all__ = ["Case", "find_remedies", "finer_formats", "least_format", "total_sums"]

BLOCKS = (64, 32, 16, 8, 4)
HELD = 4  # bytes a weight of an accumulator: it is kept in float32, whatever its format
MOST_DOUBLINGS = 40  # of the learning rate


@dataclass(frozen=True, eq=False)
class Case:
    """One parameter to be measured: some of its rows, what a step proposes to them, and the grid they are on."""

    name: str
    size: int
    shape: torch.Size
    dtype: torch.dtype
    proposal: Proposal
    measured: int
    """Rows of the proposal that count; one more may follow, which holds the largest weight and sets gaps."""
    weights: str | None
    accumulator: str | None
    rounding: Rounding
    lr: float
    saturated: float
    """Share of weights at an end of their range."""
    kinetic: float | None = None
    """Temperature of the velocities over that asked for."""

    @property
    def grid(self) -> str | None:
        """Format that takes the steps."""
        return self.accumulator or self.weights

    @cached_property
    def sums(self) -> Sums:
        """Figures of a step, over all weights of the parameter."""
        step = measure_step(self.proposal, self.grid, self.rounding)
        return Sums.of(step._replace(**{name: t[: self.measured] for name, t in step._asdict().items()}), self.size)

    @property
    def nbytes(self) -> float:
        """Bytes of the packed weights and the accumulator."""
        if self.weights is None:
            return self.size * float(self.dtype.itemsize)
        format = parse(self.weights)
        packed = self.size * format.storage_bits / 8 + format.block_count(self.shape)
        return packed + (HELD * self.size if self.accumulator else 0)

    def on(self, format: Format) -> Case:
        """Return the case on another grid."""
        return replace(self, accumulator=str(format)) if self.accumulator else replace(self, weights=str(format))

    @cached_property
    def finer(self) -> list[Case]:
        """The case on ever finer grids of the same kind."""
        return [
            self.on(format) for format in finer_formats(self.grid, torch.float32 if self.accumulator else self.dtype)
        ]


def total_sums(cases: Sequence[Case]) -> Sums:
    """Return the figures over all weights."""
    total = cases[0].sums
    for case in cases[1:]:
        total = total + case.sums
    return total


def finer_formats(name: str | None, dtype: torch.dtype) -> list[Format]:
    """Return formats with one bit more, two bits more, ... that keep range or blocks, as far as a dtype holds them."""
    if name is None:
        return []
    format = parse(name)
    found: list[Format] = []
    for k in range(1, 24):
        try:
            found.append(fit_dtype(_with_bits(format, k), dtype))
        except ValueError:
            break
    return found


def _with_bits(format: Format, k: int) -> Format:
    """Return the format with k bits more for the resolution; raise ValueError if there is none."""
    if isinstance(format, FixedPoint):
        return replace(format, bits=format.bits + k, frac=format.frac + k)
    if isinstance(format, BlockFloat):
        return replace(format, bits=format.bits + k)
    assert isinstance(format, Float)
    if format.hardware is None:
        return replace(format, man=format.man + k)
    ladder = sorted((h.man, other) for other, h in Float.HARDWARE.items() if h.man > format.man and other[:3] != "fp8")
    if k > len(ladder):
        raise ValueError(f"there is no finer format of hardware than {format}")
    return parse(ladder[k - 1][1])


def least_format(case: Case, tolerance: float) -> str | None:
    """Return the coarsest format, this or a finer one, in which a parameter has no more inflation than that."""
    if _repaired([case], tolerance):
        return case.grid
    k = _first(len(case.finer), lambda i: _repaired([case.finer[i]], tolerance))
    return None if k is None else case.finer[k].grid


def find_remedies(cases: Sequence[Case], tolerance: float) -> list[Remedy]:
    """Return changes that bring the inflation over all weights below the tolerance, each alone, cheapest memory first."""
    found: list[Remedy] = []
    if sum(c.saturated * c.size for c in cases) > MOST_SATURATED * sum(c.size for c in cases):
        found += _wider(cases)
    if not _repaired(cases, tolerance):
        underdamped = any(case.proposal.noise is not None for case in cases)  # whose steps are not proportional to lr
        searches = [_rounding, *([_velocity] if underdamped else [_lr]), _block, _bits, _accumulator]
        remedies = [search(cases, tolerance) for search in searches]
        found += sorted((r for r in remedies if r is not None), key=lambda r: r.bytes_per_weight)
    return found


def _repaired(cases: Sequence[Case], tolerance: float) -> bool:
    return 1 / tolerance <= total_sums(cases).mean_inflation <= tolerance


def _first(count: int, good: Callable[[int], bool]) -> int | None:
    """Return the least index that is good, given that all after a good one are; None if the last is not."""
    if count == 0 or not good(count - 1):
        return None
    low, high = 0, count - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle + 1, high)
    return low


def _remedy(kind: str, settings: str, cases: Sequence[Case], note: str = "") -> Remedy:
    nbytes = sum(case.nbytes for case in cases) / sum(case.size for case in cases)
    return Remedy(kind, settings, total_sums(cases).mean_inflation, nbytes, note)


def _formats_text(before: Sequence[Case], after: Sequence[Case]) -> str:
    """Return the setting that turns some formats into others."""
    setting = "accumulator" if before[0].accumulator else "weights"
    changes = dict.fromkeys((b.grid, a.grid) for b, a in zip(before, after, strict=True) if b.grid != a.grid)
    if len(changes) == 1:
        return f'{setting}="{next(iter(changes))[1]}"'
    return ", ".join(f'{setting}="{new}" for "{old}"' for old, new in changes)


def _bits(cases: Sequence[Case], tolerance: float) -> Remedy | None:
    """Give all parameters as many bits more as it takes."""

    def finer(i: int) -> list[Case]:
        return [case.finer[min(i, len(case.finer) - 1)] if case.finer else case for case in cases]

    k = _first(max(len(case.finer) for case in cases), lambda i: _repaired(finer(i), tolerance))
    return None if k is None else _remedy("bits", _formats_text(cases, finer(k)), finer(k))


def _block(cases: Sequence[Case], tolerance: float) -> Remedy | None:
    """Give blocks of the same bits fewer elements."""

    def smaller(size: int) -> list[Case]:
        parsed = [(case, parse(case.grid or FP32)) for case in cases]
        return [case.on(replace(f, block=size)) if isinstance(f, BlockFloat) else case for case, f in parsed]

    sizes = [size for size in BLOCKS if any(_is_larger(case, size) for case in cases)]
    k = _first(len(sizes), lambda i: _repaired(smaller(sizes[i]), tolerance))
    return None if k is None else _remedy("block", _formats_text(cases, smaller(sizes[k])), smaller(sizes[k]))


def _is_larger(case: Case, size: int) -> bool:
    format = parse(case.grid or FP32)
    return isinstance(format, BlockFloat) and (not isinstance(format.block, int) or format.block > size)


def _accumulator(cases: Sequence[Case], tolerance: float) -> Remedy | None:
    """Let a full-precision copy take the steps."""
    kept = [case if case.weights in (None, "fp32") else replace(case, accumulator="fp32") for case in cases]
    if not _repaired(kept, tolerance):
        return None
    return _remedy("accumulator", 'accumulator="fp32"', kept, "the network still computes with the rounded weights")


def _rounding(cases: Sequence[Case], tolerance: float) -> Remedy | None:
    """Correct the variance."""
    if all(case.rounding == "corrected" for case in cases):
        return None
    corrected = [replace(case, rounding="corrected") for case in cases]
    less = abs(total_sums(corrected).mean_inflation - 1) < 0.9 * abs(total_sums(cases).mean_inflation - 1)
    return _remedy("rounding", 'rounding="corrected"', corrected) if less else None


def _velocity(cases: Sequence[Case], tolerance: float) -> Remedy | None:
    """Give velocities 16 bits: at any friction above 1e-5 they then have the variance asked for."""
    without = [replace(case, proposal=case.proposal._replace(warmer=None)) for case in cases]
    if not _repaired(without, tolerance):
        return None
    return _remedy("velocity", 'velocity="bf16"', without, "and one byte more for each velocity")


def _lr(cases: Sequence[Case], tolerance: float) -> Remedy | None:
    """Raise the learning rate until v exceeds v_0: below that Δ|∇U|/(2T) hardly depends on it.

    None if a step would have to move the weights by more than their norm.
    """
    norm, move = (_norm([getattr(case.proposal, name) for case in cases]) for name in ("theta", "drift"))
    most = math.floor(4 * math.log2(norm / move)) if 0 < move < norm else 4 * MOST_DOUBLINGS * (move == 0)
    least = None
    for i in range(4, min(most, 4 * MOST_DOUBLINGS) + 1, 4):  # larger ones need not do: drifts widen the gaps of blocks
        if _repaired(_faster(cases, i), tolerance):
            least = next(k for k in range(i - 3, i + 1) if _repaired(_faster(cases, k), tolerance))
            break
    if least is None:
        return None
    factor, rates = 2 ** (least / 4), {case.lr for case in cases}
    text = f"lr={rates.pop() * factor:.3g}" if len(rates) == 1 else f"lr times {factor:.3g}"
    note = f"a step then moves the weights by {move * factor / max(norm, 1e-300):.2g} of their norm"
    return _remedy("lr", text, _faster(cases, least), note)


def _faster(cases: Sequence[Case], quarters: int) -> list[Case]:
    """Return the cases with the learning rate raised by so many quarters of a doubling."""
    factor = 2 ** (quarters / 4)
    return [replace(case, proposal=case.proposal.scaled(factor), lr=case.lr * factor) for case in cases]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _wider(cases: Sequence[Case]) -> list[Remedy]:
    """Give saturated weights one integer bit more, in the same memory."""
    wider = [replace(case, weights=_with_range(case)) if case.saturated > 0 else case for case in cases]
    changes = dict.fromkeys((b.weights, a.weights) for b, a in zip(cases, wider, strict=True) if a.weights != b.weights)
    text = ", ".join(f'weights="{new}" for "{old}"' for old, new in changes)
    nbytes = sum(case.nbytes for case in wider) / sum(case.size for case in wider)
    note = "twice the range; diagnose again, for saturated weights may want to go further"
    return [Remedy("range", text, total_sums(wider).mean_inflation, nbytes, note)] if changes else []


def _with_range(case: Case) -> str | None:
    format = parse(case.weights or FP32)
    return str(replace(format, frac=format.frac - 1)) if isinstance(format, FixedPoint) else case.weights
