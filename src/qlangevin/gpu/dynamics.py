"""Steps with a centre, a mask, a preconditioner or velocities: the launches of `sgld` of `quantization.backend.Kernels`.

A step of SGLD is one launch that computes the moves of all tensors (`dynamics_kernels.prepare`), then the draws of a plain step;
one of SGHMC is `kick`, the draw of velocities, `follow`, and the draw of weights. Moves and variances pass through float32
scratch memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..quantization.backend import Dynamics, TensorStep
from ..quantization.formats import FP32, Format, KernelGrid, parse
from ..quantization.qtensor import QTensor
from . import dynamics_kernels, step
from .grids import grid_of, is_tiny
from .kept import Kept, Reads
from .launch import check_blocks, check_memory
from .split import TYPES
from .step import Counting, StepRun, find_targets, is_block, round_gradients, round_weights, update
from .tables import Item, Table, addresses_of, float_bits, grid_row, make_table

__all__ = ["sgld"]

COUNTERS = 128  # of a program: four elements a thread, which hold the bits of up to three purposes
ALIGNMENT = 64  # elements: where the scratch memory of a tensor begins
_ABSENT = (0,) * 13


class Memory(NamedTuple):
    """A tensor that is kept in any format, as kernels read it."""

    numbers: Tensor
    exponents: Tensor | None
    format: Format | None
    shape: torch.Size

    @property
    def grid(self) -> KernelGrid:
        return KernelGrid() if self.format is None else grid_of(self.format, self.shape)

    @property
    def kept(self) -> Kept:
        codes = not self.numbers.dtype.is_floating_point
        return Kept(TYPES[self.numbers.dtype], int(self.grid.kind), codes, is_tiny(self.grid))

    @property
    def columns(self) -> tuple[int, ...]:
        addresses = addresses_of(self.numbers, self.exponents)
        return (*addresses, self.grid.line, self.grid.size, *grid_row(self.format, self.shape))


class Beside(NamedTuple):
    """All that is read of one tensor but its gradient; in the order of `Extra`."""

    theta: Memory
    center: Memory | None
    moments: Memory | None
    velocity: Memory | None


class Scratch(NamedTuple):
    """Float32 memory of one tensor in a step, see `kept.Extra`; all but the move only if they are needed."""

    move: Tensor
    spread: Tensor | None = None
    base: Tensor | None = None
    old: Tensor | None = None
    gain: Tensor | None = None


class Part(NamedTuple):
    """One tensor of a step: what is updated, all that is read for it, and its scratch memory."""

    t: TensorStep
    target: Item
    beside: Beside
    reads: Reads
    scratch: Scratch

    def columns(self, last: int) -> tuple[int, ...]:
        """Return the columns of `Extra`; ``last`` is the last step that changes V, -1 if all do."""
        t, s = self.t, self.scratch
        key = t.key if t.velocity is None else t.velocity.key
        scale: float | Tensor = 1.0 if t.moments is None else t.moments.scale
        at, number = (scale.data_ptr(), 1.0) if isinstance(scale, Tensor) else (0, scale)
        low, high = key.bits
        words = [n - (n >> 63 << 64) for n in (low | high << 32, 0 if self.target.counted else key.step)]
        return (
            *addresses_of(t.mask, s.move, s.spread, s.base, s.old, s.gain), at, float_bits(number), last, *words,
            *(column for memory in self.beside for column in (_ABSENT if memory is None else memory.columns)),
        )  # fmt: skip

    @property
    def velocity(self) -> Item:
        """The velocities, as a draw takes them."""
        memory, velocity = self.beside.velocity, self.t.velocity
        assert memory is not None
        assert velocity is not None
        return Item(
            memory.numbers, velocity.key, memory.format, memory.shape, None, None, memory.exponents, slot=self.target.slot,
            counted=self.target.counted,
        )  # fmt: skip


def sgld(
    tensors: Sequence[TensorStep], *, weights: Format | None, gradients: Format | None, accumulator: Format | None,
    rounding: str, lr: float, weight_decay: float, variance: float, maximize: bool, dynamics: Dynamics | None = None,
    slots: Sequence[int] | None = None, counts: Tensor | None = None, flags: Tensor | None = None,
) -> None:  # fmt: skip
    """Take one step of several tensors in place; see `qlangevin.sampling.update` for the equations, `step.sgld` for the rest."""
    if dynamics is None:
        step.sgld(
            tensors, weights=weights, gradients=gradients, accumulator=accumulator, rounding=rounding, lr=lr,
            weight_decay=weight_decay, variance=variance, maximize=maximize, slots=slots, counts=counts, flags=flags,
        )  # fmt: skip
        return
    run = StepRun(rounding, -lr, -1.0 if maximize else 1.0, weight_decay, variance, flags)
    counting = None if slots is None or counts is None or flags is None else Counting(slots, counts, flags)
    items, targets = find_targets(tensors, weights, accumulator, counting)
    if gradients is not None and is_block(gradients):
        targets, gradients = round_gradients(run, targets, gradients), None
    for group in _groups(run, tensors, targets, gradients, dynamics):
        if group[0].t.velocity is None:
            _step_overdamped(run, group, dynamics)
        else:
            _step_underdamped(run, group, dynamics)
    round_weights(run, tensors, items, targets)


def _step_overdamped(run: StepRun, parts: Sequence[Part], dynamics: Dynamics) -> None:
    numbers = run.rate, run.sign, run.decay, dynamics.pull, run.variance, *_averaging(dynamics)
    _launch(run, dynamics_kernels.prepare, parts, _table(parts, dynamics), numbers)
    _draw(run, [part.target for part in parts], parts, run.variance, parts[0].reads.each)


def _step_underdamped(run: StepRun, parts: Sequence[Part], dynamics: Dynamics) -> None:
    velocity = parts[0].t.velocity
    assert velocity is not None
    fade, kick, carry, push, follow, velocity_variance, variance = dynamics.underdamped(velocity.unit)
    table, reads = _table(parts, dynamics), parts[0].reads
    coefficients = fade, kick, carry, push, velocity_variance
    numbers = run.sign, run.decay, dynamics.pull, *_averaging(dynamics), *coefficients
    _launch(run, dynamics_kernels.kick, parts, table, numbers)
    _draw(run, [part.velocity for part in parts], parts, velocity_variance, reads.masked)
    _launch(run, dynamics_kernels.follow, parts, table, (follow, variance))
    _draw(run, [part.target for part in parts], parts, variance, reads.each)


def _averaging(dynamics: Dynamics) -> tuple[float, float, float]:
    """Return decay, 1 - decay and eps of the preconditioner."""
    rms = dynamics.rms
    return (0.0, 0.0, 1.0) if rms is None else (rms.decay, 1 - rms.decay, rms.eps)


def _table(parts: Sequence[Part], dynamics: Dynamics) -> Table:
    rms = dynamics.rms
    last = -1 if rms is None or rms.freeze_after is None else rms.freeze_after
    programs = [triton.cdiv(part.target.x.numel(), 4 * COUNTERS) for part in parts]
    return make_table([part.target for part in parts], programs, [part.columns(last) for part in parts])


def _launch(run: StepRun, kernel: Any, parts: Sequence[Part], table: Table, numbers: Sequence[float]) -> None:
    run.launch(kernel, table, *numbers, HOW=parts[0].reads, C=COUNTERS)


def _draw(run: StepRun, items: Sequence[Item], parts: Sequence[Part], variance: float, each: bool) -> None:
    """Round tensors in place from the moves in scratch memory, and from variances there if Q^vc needs one for each element."""
    naive = run.rounding != "corrected"  # has the noise in the move
    scratch = [part.scratch for part in parts]
    moved = [
        item._replace(other=s.move, variances=s.spread if each and not naive else None)
        for item, s in zip(items, scratch, strict=True)
    ]
    update(run._replace(variance=0.0 if naive else variance), moved, None, given=True)


# ---- tensors as kernels see them


def _groups(
    run: StepRun, tensors: Sequence[TensorStep], targets: Sequence[Item], gradients: Format | None, dynamics: Dynamics
) -> list[list[Part]]:
    """Return the parts of a step, those together that share all launches but the draws."""
    beside = [_find_beside(t, item, dynamics) for t, item in zip(tensors, targets, strict=True)]
    reads = [_reads(run, t, targets[i], beside[i], gradients) for i, t in enumerate(tensors)]
    scratch = _allocate(reads, targets)
    groups: dict[Any, list[Part]] = defaultdict(list)
    for i, t in enumerate(tensors):
        part = Part(t, targets[i]._replace(gradients=gradients), beside[i], reads[i], scratch[i])
        groups[reads[i], None if t.velocity is None else t.velocity.unit].append(part)
    return [*groups.values()]


def _find_beside(t: TensorStep, item: Item, dynamics: Dynamics) -> Beside:
    center = moments = velocity = None
    if t.center is not None and dynamics.pull:
        center = _memory(t, t.center, None)
    if t.moments is not None and dynamics.rms is not None:
        moments = _memory(t, t.moments.values, parse(dynamics.rms.format))
    if t.velocity is not None and (name := dynamics.velocity_format(t.theta)) is not None:
        velocity = _memory(t, t.velocity.values, parse(name))
    return Beside(Memory(item.x, item.exponents, item.format, item.shape), center, moments, velocity)


def _memory(t: TensorStep, values: Tensor, format: Format | None) -> Memory:
    """Return the memory of numbers, or of codes, which have a format of their own."""
    exponents, shape = None, t.gradient.shape
    if isinstance(values, QTensor):
        numbers, exponents, format = values.unpacked(), values.exponents, values.format
        values = numbers.view(torch.float32) if format == FP32 else numbers
    if format is not None:
        check_blocks(format, shape)
    check_memory(t.gradient, values)
    return Memory(values, exponents, format, shape)


def _reads(run: StepRun, t: TensorStep, item: Item, beside: Beside, gradients: Format | None) -> Reads:
    assert item.other is not None
    grid = KernelGrid() if gradients is None else grid_of(gradients, item.shape)
    kept = [None if memory is None else memory.kept for memory in beside[1:]]
    return Reads(
        beside.theta.kept, TYPES[item.other.dtype], int(grid.kind), is_tiny(grid), run.rounding != "corrected",
        t.mask is not None, *kept,
    )  # fmt: skip


def _allocate(reads: Sequence[Reads], items: Sequence[Item]) -> list[Scratch]:
    """Return scratch memory for tensors, in one allocation."""
    wanted, sizes = [], list[int]()
    for r, item in zip(reads, items, strict=True):
        two = r.velocity is not None
        wanted.append((True, r.each and not r.naive, two, two, two and r.moments is not None))
        sizes += [-(-item.x.numel() // ALIGNMENT) * ALIGNMENT] * sum(wanted[-1])
    memory = iter(torch.empty(sum(sizes), dtype=torch.float32, device=items[0].x.device).split(sizes))
    return [Scratch(next(memory), *(next(memory) if is_wanted else None for is_wanted in more)) for _, *more in wanted]
