"""Steps with a centre, a mask, gains and velocities by the Triton kernels: the bits of the PyTorch path, in few launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import qlangevin as ql
from qlangevin import Key, QTensor, encode
from qlangevin.gpu import launch, split, step
from qlangevin.gpu.check.comparing import same_bits
from qlangevin.gpu.functions import this_module
from qlangevin.gpu.kept import divide_by_line
from qlangevin.quantization.backend import NO_ERROR, Moments, TensorStep, Velocity, suspended
from qlangevin.sampling.kernel_step import Counters, step_by_kernels
from qlangevin.sampling.localization import hold
from qlangevin.sampling.masks import pack_mask
from qlangevin.sampling.preconditioner import begin_moments
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import _step_by_pytorch

SHAPES = ((3, 200), (7,))
STEP = 5


@dataclass(frozen=True)
class Case:
    """A kind of step; ``launches`` without those that round gradients or weights from an accumulator."""

    weights: str
    settings: dict[str, Any]
    packed: bool = True
    center: str | None = None
    mask: bool = False
    dtype: torch.dtype = torch.float32
    launches: int = 3

    @property
    def name(self) -> str:
        beside = [f"center {self.center}" if self.center else "", "mask" if self.mask else ""]
        words = [self.weights, "packed" if self.packed else "numbers", *beside]
        return ", ".join([*filter(None, words), *(f"{k} {v}" for k, v in self.settings.items())])


def rms(format: str = "fp8_e5m2", freeze_after: int | None = None) -> dict[str, Any]:
    return {"preconditioner": str(ql.RMS(decay=0.9, eps=0.01, format=format, freeze_after=freeze_after))}


QUICK = [
    Case("fixed8.6", {"rounding": "corrected", **rms()}, center="bf16", mask=True),
    Case("bfp8", {"rounding": "corrected", "gradients": "bfp8", **rms()}, center="bfp8/32", launches=4),
    Case("fp8_e4m3", {"rounding": "stochastic", "gradients": "fp8_e5m2"}, center="fp8_e4m3", mask=True),
    Case("fixed8.6", {"friction": 0.3, "velocity": "fixed8.4"}, center="fixed8.6", launches=5),
    Case("bfp8", {"friction": 0.3, "rounding": "stochastic", **rms()}, mask=True, launches=5),
    Case("bf16", {"friction": 0.3, "velocity": "bfp8", **rms("bf16")}, packed=False, mask=True, launches=5),
]
SLOW = [
    Case("fixed8.6", {"rounding": "nearest", **rms(freeze_after=4)}, mask=True),
    Case("fixed8.6", {"rounding": "corrected", "gradients": "fixed8.6", "maximize": True, **rms(freeze_after=5)}),
    Case("bfp8", {"rounding": "stochastic"}, center="bfp8", mask=True),
    Case("bfp8", {"rounding": "nearest", **rms("e4m3")}, center="fp32"),
    Case("bfp8/32", {"rounding": "corrected", "gradients": "fixed8.6"}, packed=False, center="bfp8/tensor", mask=True),
    Case("bfp8", {"accumulator": "fp32", **rms("fp32")}, center="fp16", launches=4),
    Case("fixed8.6", {"accumulator": "fixed16.12", "rounding": "stochastic", **rms()}, mask=True),
    Case("bfp8/tensor", {"accumulator": "bfp16/tensor", **rms("fp16")}, center="bfp4", launches=4),
    Case("fp32", {"rounding": "corrected", **rms()}, packed=False, center="bf16", mask=True),
    Case("fp32", {"rounding": "stochastic", "temperature": 0.0, **rms()}, packed=False, mask=True),
    Case("fp8_e4m3", {"rounding": "corrected", **rms()}, center="fixed4.2", mask=True),
    Case("fp16", {"rounding": "corrected"}, packed=False, center="fp16", dtype=torch.float16),
    Case("bfp8", {"rounding": "corrected", **rms()}, packed=True, mask=True, dtype=torch.bfloat16),
    Case("fixed8.6", {"friction": 2.0, "rounding": "nearest", **rms()}, center="fixed8.6", mask=True, launches=5),
    Case("bfp8", {"friction": 0.3, "velocity": "bfp8/tensor", "gradients": "bfp8", **rms()}, center="bfp8", launches=6),
    Case("bfp8", {"friction": 0.3, "accumulator": "fp32", "velocity": "fp8_e5m2"}, mask=True, launches=6),
    Case("fixed8.6", {"friction": 0.3, "accumulator": "fp32", "rounding": "stochastic"}, launches=5),
    Case("fp8_e4m3", {"friction": 0.3, "temperature": 0.0, "velocity": "fp32", **rms()}, mask=True, launches=5),
    Case("bfp8", {"friction": 0.3, "velocity": "bfp8"}, launches=5),
    Case("fp32", {"friction": 0.3, "rounding": "stochastic", "velocity": "fp8_e4m3"}, packed=False, launches=5),
]


def settings_of(case: Case) -> StepSettings:
    beside = {"localization": 30.0 if case.center else 0.0, "masked": case.mask}
    weights = None if case.packed else case.weights
    return StepSettings(0.1, 100, weight_decay=0.1, weights=weights, **beside, **case.settings)  # type: ignore[arg-type]


def make_tensors(case: Case, settings: StepSettings) -> list[TensorStep]:
    generator, tensors = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        w, w0, u, gradient = (torch.randn(shape, generator=generator) * size for size in (0.5, 0.5, 0.8, 1.0))
        gradient = gradient.to(case.dtype)
        theta = encode(w.to(case.dtype), case.weights) if case.packed else ql.quantize(w, case.weights).to(case.dtype)
        key, moments, velocity = Key(3, i, STEP), None, None
        if settings.rms is not None:
            g, size = torch.randn(shape, generator=generator), 0.5
            moments = Moments(hold(begin_moments(g, size, settings.rms, key.at(0)), str(settings.rms.format)), size)
        if settings.friction is not None:
            format = str(settings.velocity_format(theta))
            velocity = Velocity(hold(ql.quantize(u, format), format), 0.125, Key(3, 100 + i, STEP))
        center = hold(ql.quantize(w0, case.center), case.center) if case.center else None
        mask = pack_mask(w0 > -0.3, w.shape, w.device) if case.mask else None
        accumulator = ql.quantize(w, settings.accumulator) if settings.accumulator else None
        tensors.append(TensorStep(theta, gradient, key, accumulator, center, mask, moments, velocity))
    return tensors


def copy(t: Any) -> Any:
    """Return a copy of a tensor, or of a record of them."""
    if isinstance(t, QTensor):
        return t.with_codes(t.codes.clone(), None if t.exponents is None else t.exponents.clone())
    if isinstance(t, Tensor):
        return t.clone()
    return type(t)(*map(copy, t)) if isinstance(t, (TensorStep, Moments, Velocity)) else t


def written(t: TensorStep) -> dict[str, Tensor]:
    """Return all that a step writes, by name."""
    found = {"theta": t.theta, "accumulator": t.accumulator}
    found |= {} if t.moments is None else {"moments": t.moments.values}
    found |= {} if t.velocity is None else {"velocity": t.velocity.values}
    tensors = dict[str, Tensor]()
    for name, kept in found.items():
        if isinstance(kept, QTensor):
            tensors |= {f"{name} codes": kept.codes} | (
                {} if kept.exponents is None else {f"{name} exponents": kept.exponents}
            )
        elif kept is not None:
            tensors[name] = kept
    return tensors


def step_there(tensors: list[TensorStep], settings: StepSettings, before: int = STEP - 1) -> Tensor:
    """Take a step that is counted on the device; return the flags."""
    counts, flags, slots = torch.tensor([0, before, before]), torch.full((2,), NO_ERROR, dtype=torch.int32), [1, 2]
    step.begin_step([t.gradient for t in tensors], slots, counts, flags)
    asked = [t._replace(key=t.key.at(77)) for t in tensors]  # the host's count, which is not used
    if tensors[0].velocity is not None:
        asked = [t._replace(velocity=t.velocity._replace(key=t.velocity.key.at(77))) for t in asked if t.velocity]
    step_by_kernels(this_module, asked, settings, Counters(slots, counts, flags))
    assert counts.tolist() == [0, before + 1, before + 1]
    return flags


def check(case: Case) -> int:
    """Compare one step with the PyTorch path; return the number of launches."""
    settings = settings_of(case)
    with suspended(this_module):
        here = make_tensors(case, settings)
        there = [copy(t) for t in here]
        for t in there:
            _step_by_pytorch(t, settings)
    before = launch.launches
    assert step_there(here, settings).tolist() == [NO_ERROR, NO_ERROR]
    for found, wanted in zip(map(written, here), map(written, there), strict=True):
        assert {name: same_bits(t, wanted[name]) for name, t in found.items()} == dict.fromkeys(wanted, True)
    return launch.launches - before


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=[] if c in QUICK else [pytest.mark.slow]) for c in [*QUICK, *SLOW]],
)
def test_a_step(case: Case) -> None:
    assert check(case) == case.launches


@pytest.mark.slow
def test_blocks_that_programs_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (split, step):
        monkeypatch.setattr(module, "LONGEST", 8)
    monkeypatch.setattr(split, "COUNTERS", 32)
    monkeypatch.setattr(split, "PIECE", 1)
    for settings in ({**rms()}, {"friction": 0.3, "rounding": "stochastic", "velocity": "bfp8/tensor"}):
        check(Case("bfp8/tensor", settings, center="bfp8/tensor", mask=True))


def test_a_step_that_the_host_counts() -> None:
    """Shards of parameters step so: with numbers of steps, and scales, from the host."""
    case = Case("bfp8", {"friction": 0.3, **rms(freeze_after=STEP)})
    settings = settings_of(case)
    with suspended(this_module):
        here = make_tensors(case, settings)
        there = [copy(t) for t in here]
        for t in there:
            _step_by_pytorch(t, settings)
    step_by_kernels(this_module, here, settings)
    for found, wanted in zip(map(written, here), map(written, there), strict=True):
        assert {name: same_bits(t, wanted[name]) for name, t in found.items()} == dict.fromkeys(wanted, True)


@pytest.mark.parametrize("freeze_after", [STEP - 1, STEP])
def test_moments_freeze_by_the_count_on_the_device(freeze_after: int) -> None:
    case = Case("fixed8.6", {**rms(freeze_after=freeze_after)})
    settings = settings_of(case)
    with suspended(this_module):
        tensors = make_tensors(case, settings)
    before = [written(copy(t))["moments codes"] for t in tensors]
    step_there(tensors, settings)
    same = [torch.equal(written(t)["moments codes"], b) for t, b in zip(tensors, before, strict=True)]
    assert same == [freeze_after < STEP] * 2


def test_a_scale_on_the_device_is_that_of_the_host() -> None:
    case = Case("fixed8.6", {**rms()})
    settings = settings_of(case)
    with suspended(this_module):
        one = make_tensors(case, settings)
    two = [copy(t) for t in one]
    two = [t._replace(moments=t.moments._replace(scale=torch.tensor(t.moments.scale))) for t in two]
    for tensors in (one, two):
        step_there(tensors, settings)
    for a, b in zip(map(written, one), map(written, two), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("friction", [None, 0.3])
def test_a_gradient_that_is_not_finite_turns_the_step_into_nothing(friction: float | None) -> None:
    case = Case("bfp8", {"friction": friction, **rms()}, center="bf16", mask=True)
    settings = settings_of(case)
    with suspended(this_module):
        tensors = make_tensors(case, settings)
    before = [written(copy(t)) for t in tensors]
    tensors[1].gradient[2] = torch.nan
    assert step_there(tensors, settings).tolist() == [2, 2]
    for t, kept in zip(tensors, before, strict=True):
        assert all(torch.equal(now, kept[name]) for name, now in written(t).items())


@triton.jit
def divide(index, lines, out):  # type: ignore[no-untyped-def]
    line = tl.load(lines + tl.program_id(0)).to(tl.uint32)
    quotient, rest = divide_by_line(tl.load(index + tl.program_id(0)), line)
    tl.store(out + 2 * tl.program_id(0), quotient.to(tl.int64))
    tl.store(out + 2 * tl.program_id(0) + 1, rest.to(tl.int64))


def test_indices_beyond_32_bits_are_divided() -> None:
    indices = [0, 511, 2**31 - 1, 2**31, 2**31 + 512, 2**32 - 512, 2**32, 3 * 2**31 + 12345, 2**33 - 512]
    pairs = [(i, line) for i in indices for line in (7, 512, 2**16, 2**31 - 257) if i // line < 2**32]
    index, line = (torch.tensor(numbers) for numbers in zip(*pairs, strict=True))
    out = torch.empty(len(pairs), 2, dtype=torch.int64)
    divide[(len(pairs),)](index, line, out)
    assert torch.equal(out, torch.stack([index // line, index % line], 1))
