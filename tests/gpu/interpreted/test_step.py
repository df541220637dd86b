"""A step by the Triton kernels, against the PyTorch path: bit for bit, in few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import Key, QTensor, encode, parse
from qlangevin.gpu import launch, split, step
from qlangevin.gpu.functions import this_module
from qlangevin.quantization.backend import NO_ERROR, TensorStep, suspended
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import _step_by_pytorch

SHAPES = ((5, 40), (3,), (2, 130))
QUICK = [
    ("fixed8.6", None, None, "corrected", True),
    ("fixed8.2", "fixed8.6", None, "stochastic", False),
    ("bfp8", "bfp8", "fp32", "corrected", True),
    ("fp8_e4m3", None, None, "corrected", True),
    (None, None, None, "corrected", False),
]
SLOW = [
    ("bfp8", None, None, "corrected", True),
    ("bfp8", "bfp8", None, "stochastic", True),
    ("bfp8", "fixed8.6", None, "nearest", False),
    ("fixed8.6", None, "fp32", "corrected", True),
    ("bf16", None, None, "corrected", True),
    ("fp32", None, None, "stochastic", False),
    ("fixed8.6", "bfp8", "bfp16", "corrected", True),
    ("fixed16.12", "fp8_e5m2", None, "nearest", True),
    ("fixed8.6", "e4m3", "bf16", "stochastic", False),
    ("bfp8/tensor", "bfp8/tensor", "bfp16/tensor", "corrected", True),
]


def copy(t: Tensor) -> Tensor:
    if not isinstance(t, QTensor):
        return t.clone()
    return t.with_codes(t.codes.clone(), None if t.exponents is None else t.exponents.clone())


def make_tensors(settings: StepSettings, packed: str | None, dtype: torch.dtype) -> list[TensorStep]:
    generator, tensors = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        w = torch.randn(shape, generator=generator) * 0.5
        weights = settings.weights or "fp32"
        theta = encode(w, packed) if packed else ql.quantize(w, weights).to(dtype)
        accumulator = ql.quantize(w, settings.accumulator) if settings.accumulator else None
        tensors.append(TensorStep(theta, torch.randn(shape, generator=generator).to(dtype), Key(3, i, 5), accumulator))
    return tensors


def check(settings: StepSettings, packed: str | None, dtype: torch.dtype = torch.float32) -> int:
    """Compare one step with the PyTorch path; return the number of launches."""
    with suspended(this_module):
        here = make_tensors(settings, packed, dtype)
        there = [
            t._replace(theta=copy(t.theta), accumulator=None if t.accumulator is None else t.accumulator.clone())
            for t in here
        ]
        for t in there:
            _step_by_pytorch(t, settings)
    before, counts = launch.launches, torch.tensor([0, 4, 4, 4])
    flags, slots = torch.full((2,), NO_ERROR, dtype=torch.int32), [1, 2, 3]
    formats: dict[str, Any] = {
        name: parse(f) if (f := getattr(settings, name)) else None for name in ("weights", "gradients", "accumulator")
    }
    step.begin_step([t.gradient for t in here], slots, counts, flags)
    step.sgld(
        here, **formats, rounding=settings.rounding, lr=settings.lr, weight_decay=settings.weight_decay,
        variance=settings.variance, maximize=settings.maximize, slots=slots, counts=counts, flags=flags,
    )  # fmt: skip
    assert counts.tolist() == [0, 5, 5, 5]
    assert flags.tolist() == [NO_ERROR, NO_ERROR]
    for found, wanted in zip(here, there, strict=True):
        if isinstance(found.theta, QTensor) and isinstance(wanted.theta, QTensor):
            assert torch.equal(found.theta.codes, wanted.theta.codes)
            assert found.theta.exponents is None or torch.equal(found.theta.exponents, wanted.theta.exponents)  # type: ignore[arg-type]
        else:
            assert torch.equal(found.theta, wanted.theta)
        assert found.accumulator is None or torch.equal(found.accumulator, wanted.accumulator)  # type: ignore[arg-type]
    return launch.launches - before


@pytest.mark.parametrize(
    ("weights", "gradients", "accumulator", "rounding", "packed"),
    [*QUICK, *[pytest.param(*c, marks=pytest.mark.slow) for c in SLOW]],
)
def test_a_step(
    weights: str | None, gradients: str | None, accumulator: str | None, rounding: Any, packed: bool
) -> None:
    settings = StepSettings(
        0.1, 100, weight_decay=0.1, weights=None if packed else weights, gradients=gradients, accumulator=accumulator,
        rounding=rounding,
    )  # fmt: skip
    assert check(settings, weights if packed else None) <= 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters(dtype: torch.dtype) -> None:
    assert check(StepSettings(0.1, 100, weight_decay=0.1), None, dtype) == 2
    assert check(StepSettings(0.1, 100, weights="fixed8.6", maximize=True), None, dtype) == 2
    assert check(StepSettings(0.1, 100, weights="bfp8", accumulator="fp32"), None, dtype) <= 4
    assert check(StepSettings(0.1, 100, weight_decay=0.1), "bfp8", dtype) == 2


@pytest.mark.slow
def test_blocks_that_programs_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (split, step):
        monkeypatch.setattr(module, "LONGEST", 8)
    monkeypatch.setattr(split, "COUNTERS", 32)
    monkeypatch.setattr(split, "PIECE", 1)
    for rounding in ("corrected", "stochastic"):
        settings = StepSettings(0.1, 100, weight_decay=0.1, gradients="bfp8", rounding=rounding)
        check(settings, "bfp8/tensor")


def test_a_gradient_that_is_not_finite_turns_the_step_into_nothing() -> None:
    settings = StepSettings(0.1, 100)
    tensors = make_tensors(settings, "fixed8.6", torch.float32)
    before = [t.theta.codes.clone() for t in tensors if isinstance(t.theta, QTensor)]
    tensors[1].gradient[2] = torch.inf
    counts, flags, slots = torch.zeros(3, dtype=torch.int64), torch.full((2,), NO_ERROR, dtype=torch.int32), [0, 1, 2]
    for times, gradient in enumerate((torch.inf, torch.nan)):
        tensors[0].gradient[0, 0] = gradient if times else 1.0
        step.begin_step([t.gradient for t in tensors], slots, counts, flags)
        step.sgld(
            tensors, weights=None, gradients=None, accumulator=None, rounding="corrected", lr=0.1, weight_decay=0.0, variance=1.0,
            maximize=False, slots=slots, counts=counts, flags=flags,
        )  # fmt: skip
        assert flags.tolist() == [1, 1]  # the first one, whatever comes after it
        assert counts.tolist() == [1, 1, 1]
    for t, codes in zip(tensors, before, strict=True):
        assert isinstance(t.theta, QTensor)
        assert torch.equal(t.theta.codes, codes)


@pytest.mark.parametrize("weights", ["fixed8.6", pytest.param("bfp8", marks=pytest.mark.slow)])
def test_62_tensors_take_two_launches(weights: str) -> None:
    params = [nn.Parameter(torch.randn(2, 5, generator=torch.Generator().manual_seed(i))) for i in range(62)]
    sampler = ql.SGLD(params, lr=0.1, num_data=100, weights=weights)
    for p in params:
        p.grad = torch.ones_like(p)
    before = launch.launches
    sampler.step()
    assert launch.launches - before == 2
