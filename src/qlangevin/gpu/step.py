"""An SGLD step of many tensors in a handful of launches: `begin_step` and `sgld` of `quantization.backend.Kernels`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..quantization.backend import TensorStep
from ..quantization.formats import BF16, FP16, FP32, Format, fit_dtype
from ..quantization.qtensor import QTensor
from ..quantization.random import Key
from . import means, step_kernels
from .grids import grid_of, is_tiny
from .launch import COUNTERS, ROUNDINGS, block_shape, check_blocks, check_memory, run
from .means import How
from .split import LONGEST, TYPES, round_split
from .step_kernels import GRADIENT_BITS, ROUNDING_BITS, WEIGHT_BITS
from .tables import Item, Table, make_table

__all__ = [
    "Counting",
    "StepRun",
    "begin_step",
    "find_targets",
    "is_block",
    "round_gradients",
    "round_weights",
    "sgld",
    "update",
]

_OF_DTYPE = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
_NO_KEY = Key(0)
CHECKED = 4096  # gradients that a program looks at


class Counting(NamedTuple):
    """Steps counted on the device: the numbers of the tensors there, their counts, and the flags; see `step_kernels`."""

    slots: Sequence[int]
    counts: Tensor
    flags: Tensor

    def address(self, i: int) -> int:
        """Return where the count of tensor i is."""
        return self.counts.data_ptr() + 8 * self.slots[i]


def begin_step(gradients: list[Tensor], slots: list[int], counts: Tensor, flags: Tensor) -> None:
    """Count a step of each tensor, and note in the flags if a gradient is not finite."""
    counting, groups = Counting(slots, counts, flags), defaultdict(list)
    for i, g in enumerate(gradients):
        groups[g.dtype].append(Item(g, _NO_KEY, None, g.shape, slot=slots[i], counted=counting.address(i)))
    for dtype, items in groups.items():
        table = make_table(items, [max(triton.cdiv(item.x.numel(), CHECKED), 1) for item in items])
        run(
            step_kernels.begin, table.programs, counts.device, table.rows, flags, table.tensors, TYPE=TYPES[dtype], E=CHECKED,
            ALIGNED=table.aligned,
        )  # fmt: skip


class StepRun(NamedTuple):
    """Settings of one call of `sgld`, as kernels take them."""

    rounding: str
    rate: float
    sign: float
    decay: float
    variance: float
    flags: Tensor | None

    @property
    def drift(self) -> int:
        """The kind of drift that blocks have: naive rounding adds the noise to it."""
        naive = self.rounding != "corrected" and self.variance > 0
        return int((means.NOISY if naive else means.GRADIENT).value)

    def launch(self, kernel: Any, table: Table, *numbers: float, warps: int = 4, **constants: Any) -> None:
        """Launch a kernel on a table; without flags another pointer stands in for them."""
        flags = table.rows if self.flags is None else self.flags
        constants["FLAGGED"] = self.flags is not None
        if "ALIGNED" in kernel.arg_names:
            constants["ALIGNED"] = table.aligned
        run(
            kernel,
            table.programs,
            table.rows.device,
            table.rows,
            flags,
            table.tensors,
            *numbers,
            warps=warps,
            **constants,
        )

    @property
    def numbers(self) -> tuple[float, ...]:
        return self.rate, self.sign, self.decay, self.variance


def sgld(
    tensors: Sequence[TensorStep], *, weights: Format | None, gradients: Format | None, accumulator: Format | None,
    rounding: str, lr: float, weight_decay: float, variance: float, maximize: bool, slots: Sequence[int] | None = None,
    counts: Tensor | None = None, flags: Tensor | None = None,
) -> None:  # fmt: skip
    """Take one SGLD step of several tensors in place; see `qlangevin.sampling.update` for the equation.

    Tensors are contiguous, numbers or codes with a byte or more for each. With slots, counts and flags the number of the step is
    that counted on the device, and nothing changes if there is a flag.
    """
    run_ = StepRun(rounding, -lr, -1.0 if maximize else 1.0, weight_decay, variance, flags)
    counting = None if slots is None or counts is None or flags is None else Counting(slots, counts, flags)
    items, targets = find_targets(tensors, weights, accumulator, counting)
    needs_scratch = gradients is not None and (is_block(gradients) or any(is_block(item.format) for item in targets))
    if gradients is not None and needs_scratch:
        targets = round_gradients(run_, targets, gradients)
    update(run_, targets, None if needs_scratch else gradients)
    round_weights(run_, tensors, items, targets)


def find_targets(
    tensors: Sequence[TensorStep], weights: Format | None, accumulator: Format | None, counting: Counting | None
) -> tuple[list[Item], list[Item]]:
    """Return the weights of tensors, and what a step updates: these, or their accumulators."""
    items = [_item(t, weights, counting, i) for i, t in enumerate(tensors)]
    targets = [
        item if t.accumulator is None else _accumulated(t, item, accumulator)
        for t, item in zip(tensors, items, strict=True)
    ]
    return items, targets


def is_block(format: Format | None) -> bool:
    return format is not None and format.has_exponents


def _item(t: TensorStep, weights: Format | None, counting: Counting | None, i: int) -> Item:
    """Return the weights of a tensor as a launch takes them."""
    theta, exponents, shape = t.theta, None, t.gradient.shape
    if isinstance(theta, QTensor):
        codes, exponents, format = theta.unpacked(), theta.exponents, fit_dtype(theta.format, theta.dtype)
        theta = codes.view(torch.float32) if format == FP32 else codes
    else:
        format = weights or _OF_DTYPE[theta.dtype]
    check_blocks(format, shape)
    check_memory(t.gradient, theta, t.accumulator)
    slot, count = (0, 0) if counting is None else (counting.slots[i], counting.address(i))
    return Item(theta, t.key, format, shape, t.gradient, None, exponents, slot=slot, counted=count)


def _accumulated(t: TensorStep, item: Item, accumulator: Format | None) -> Item:
    """Return the accumulator of a tensor in its place; if weights and accumulator stand alone, the weights are its ``out``."""
    assert t.accumulator is not None
    together = not is_block(item.format) and not is_block(accumulator)
    return item._replace(
        x=t.accumulator, format=accumulator, exponents=None, out=item.x if together else None,
        weights=item.format if together else None,
    )  # fmt: skip


def round_gradients(run_: StepRun, items: Sequence[Item], format: Format) -> list[Item]:
    """Return items with Q_G of their gradients."""
    made, groups = [torch.empty(i.shape, dtype=torch.float32, device=i.x.device) for i in items], defaultdict(list)
    for item, out in zip(items, made, strict=True):
        assert item.other is not None
        groups[item.other.dtype].append(item._replace(x=item.other, other=None, out=out, exponents=None, format=format))
    for group in groups.values():
        if is_block(format):
            _launch_blocks(run_, group, rounding="stochastic", purpose=GRADIENT_BITS.value, drift=0, codes=False)
        else:
            _launch_rounding(run_, group, "stochastic", GRADIENT_BITS.value)
    return [item._replace(other=g) for item, g in zip(items, made, strict=True)]


def update(run_: StepRun, items: Sequence[Item], gradients: Format | None, *, given: bool = False) -> None:
    """Update tensors in place: one launch for those of each kind. ``given``: with moves in the place of gradients."""
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        groups[_signature(item)].append(item)
    for group in groups.values():
        some = group[0]
        if is_block(some.format):
            in_place = [item._replace(out=item.x) for item in group]
            codes = not some.x.dtype.is_floating_point
            drift = int(means.MOVE.value) if given else run_.drift
            _launch_blocks(run_, in_place, run_.rounding, ROUNDING_BITS.value, drift, codes)
        else:
            _launch_elements(run_, [item._replace(gradients=gradients) for item in group], given)


def _signature(item: Item) -> tuple[Any, ...]:
    """Return all that a kernel is compiled for."""
    grids = [
        None if f is None else (grid_of(f, item.shape).kind, is_tiny(grid_of(f, item.shape)))
        for f in (item.format, item.weights)
    ]
    gradient = None if item.other is None else item.other.dtype
    return item.x.dtype, gradient, item.variances is None, None if item.out is None else item.out.dtype, *grids


def _launch_elements(run_: StepRun, items: Sequence[Item], given: bool) -> None:
    some = items[0]
    grids = [grid_of(f or FP32, some.shape) for f in (some.format, some.gradients, some.weights)]
    assert some.other is not None
    out = some.x if some.out is None else some.out
    table = make_table(items, [triton.cdiv(item.x.numel(), 4 * COUNTERS) for item in items])
    run_.launch(
        step_kernels.step_elements, table, *run_.numbers, TYPE=TYPES[some.x.dtype], CODES=not some.x.dtype.is_floating_point,
        GRADIENT_TYPE=TYPES[some.other.dtype], KIND=int(grids[0].kind), TINY=is_tiny(grids[0]), ROUNDING=ROUNDINGS[run_.rounding],
        Q_G=int(grids[1].kind), TINY_G=is_tiny(grids[1]), WEIGHTS_TYPE=TYPES[out.dtype],
        WEIGHTS_CODES=not out.dtype.is_floating_point, Q_W=int(grids[2].kind), TINY_W=is_tiny(grids[2]),
        THEN=some.out is not None, GIVEN=given, EACH=some.variances is not None, C=COUNTERS,
    )  # fmt: skip


def _launch_blocks(run_: StepRun, items: Sequence[Item], rounding: str, purpose: int, drift: int, codes: bool) -> None:
    """Round blocks: a launch for each shape of programs; more for blocks that programs share."""
    groups: dict[Any, list[Item]] = defaultdict(list)
    for item in items:
        size = grid_of(item.format or FP32, item.shape).size
        groups[None if size > LONGEST else block_shape(size)].append(item)
    _merge_short(groups)
    for shape, group in groups.items():
        some = group[0]
        assert some.format is not None
        assert some.out is not None
        how = How(
            ROUNDINGS[rounding], purpose, drift, is_tiny(grid_of(some.format, some.shape)), some.variances is not None,
            codes=codes and some.out is some.x, values=not codes, coded=codes,
        )  # fmt: skip
        if shape is None:
            shared = [item._replace(out=None, codes=item.out) if codes else item for item in group]
            round_split(run_.launch, shared, how, run_.numbers)
            continue
        blocks = [item.format.block_count(item.shape) for item in group if item.format is not None]
        table = make_table(group, [triton.cdiv(n, shape.rows) for n in blocks])
        other = some.x if some.other is None else some.other
        run_.launch(
            step_kernels.step_blocks, table, *run_.numbers, TYPE=TYPES[some.x.dtype], OTHER_TYPE=TYPES[other.dtype],
            OUT_TYPE=TYPES[some.out.dtype], HOW=how, R=shape.rows, C=shape.counters, warps=shape.warps,
        )  # fmt: skip


def _merge_short(groups: dict[Any, list[Item]]) -> None:
    """Have few short blocks, such as biases, share the launch of longer ones: it takes longer for them, and spares a launch."""
    short, longer = block_shape(1), block_shape(129)
    few = sum(item.x.numel() for item in groups.get(short, ())) < sum(item.x.numel() for item in groups.get(longer, ()))
    if few and short in groups and short != longer:
        groups[longer] += groups.pop(short)


def round_weights(run_: StepRun, tensors: Sequence[TensorStep], items: Sequence[Item], targets: Sequence[Item]) -> None:
    """Round weights from their accumulators where the update has not: blocks are among them."""
    rounding = "nearest" if run_.rounding == "nearest" else "stochastic"
    groups: dict[Any, list[Item]] = defaultdict(list)
    for t, item, target in zip(tensors, items, targets, strict=True):
        if t.accumulator is not None and target.out is None:
            later = item._replace(x=t.accumulator, other=None, out=item.x)
            groups[_signature(later)].append(later)
    for group in groups.values():
        some = group[0]
        assert some.out is not None
        if is_block(some.format):
            codes = not some.out.dtype.is_floating_point
            _launch_blocks(run_, group, rounding, WEIGHT_BITS.value, 0, codes)
        else:
            _launch_rounding(run_, group, rounding, WEIGHT_BITS.value)


def _launch_rounding(run_: StepRun, items: Sequence[Item], rounding: str, purpose: int) -> None:
    """Round elements that stand alone."""
    some = items[0]
    assert some.format is not None
    assert some.out is not None
    grid = grid_of(some.format, some.shape)
    table = make_table(items, [triton.cdiv(item.x.numel(), 4 * COUNTERS) for item in items])
    run_.launch(
        step_kernels.round_elements, table, TYPE=TYPES[some.x.dtype], OUT_TYPE=TYPES[some.out.dtype],
        OUT_CODES=not some.out.dtype.is_floating_point, KIND=int(grid.kind), TINY=is_tiny(grid), ROUNDING=ROUNDINGS[rounding],
        PURPOSE=purpose, C=COUNTERS,
    )  # fmt: skip
