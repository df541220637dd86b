"""The driver of a step: any mixture of tensors in one call, on both paths, and its settings as text."""

import json

import pytest
import torch
from torch import Tensor

from qlangevin import FixedPoint, Key, encode, native, quantize
from qlangevin.quantization.backend import TensorStep
from qlangevin.quantization.qtensor import QTensor, decoded
from qlangevin.sampling.settings import FIELDS, StepSettings
from qlangevin.sampling.step import step_tensors
from qlangevin.sampling.update import update


def mixture(accumulator: bool) -> list[TensorStep]:
    """Plain and packed tensors of several formats, dtypes and layouts."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(6, 10, generator=generator) * 0.3
    thetas: list[Tensor] = [encode(start, format) for format in ("bfp8", "fixed8.6", "bfp4", "bfp16", "fp8_e4m3")]
    thetas += [quantize(start, "bfp8"), quantize(start, "bfp8").T.contiguous().T, quantize(start, "bfp8").double()]
    gradients = [torch.randn(6, 10, generator=generator) for _ in thetas]
    gradients[0], gradients[5] = gradients[0].T.contiguous().T, gradients[5].bfloat16()
    return [
        TensorStep(
            theta,
            g,
            Key(2**64 - 1, i, 7),
            decoded(theta).clone(memory_format=torch.contiguous_format) if accumulator else None,
        )
        for i, (theta, g) in enumerate(zip(thetas, gradients, strict=True))
    ]


@pytest.mark.parametrize("accumulator", [None, "fp32"])
def test_one_call_steps_any_mixture_as_the_update_says(accumulator: str | None) -> None:
    settings = StepSettings(0.1, 100, weights="bfp8", gradients="bfp8", accumulator=accumulator)
    steps = mixture(bool(accumulator))
    expected = []
    with native.disabled():
        for theta, gradient, key, kept, *_ in mixture(bool(accumulator)):
            format = accumulator or settings.weights_format(theta)
            expected.append(update(theta if kept is None else kept, gradient, settings, format, key))
    versions = [t.theta._version for t in steps]
    step_tensors(steps, settings)
    for t, new, version in zip(steps, expected, versions, strict=True):
        assert torch.equal(decoded(t.theta) if t.accumulator is None else t.accumulator, new)
        assert t.theta._version > version
    with native.disabled():
        again = mixture(bool(accumulator))
        step_tensors(again, settings)
    for a, b in zip(steps, again, strict=True):
        assert isinstance(a.theta, QTensor) == isinstance(b.theta, QTensor)
        assert torch.equal(decoded(a.theta), decoded(b.theta))


def test_no_tensors_are_no_step() -> None:
    step_tensors([], StepSettings(0.1, 100))


def test_a_gradient_of_another_shape_is_refused() -> None:
    for theta in (torch.zeros(4, dtype=torch.float64), encode(torch.zeros(4), "bfp4")):
        with pytest.raises(ValueError, match=r"the gradient must have theta's shape, \(4,\), got \(1,\)"):
            step_tensors([TensorStep(theta, torch.ones(1), Key(0))], StepSettings(0.1, 100))


def test_settings_survive_as_text() -> None:
    given = StepSettings(0.1, 3, 0.7, 1e-3, "bfp8/32", None, "fp32", "nearest", "paper", True, 2**64 - 1, 5)
    assert StepSettings(*json.loads(given.text)) == given
    assert given.variance == 2 * 0.1 * 0.7 / 3


def test_settings_of_a_group_are_normalized() -> None:
    defaults = StepSettings(0.25, 10.0)
    group = {name: getattr(defaults, name) for name in FIELDS}
    group |= {"lr": torch.tensor(0.25), "weights": FixedPoint(8, 3), "params": [], "other": 1}
    assert StepSettings.from_group(group) == StepSettings(0.25, 10, weights="fixed8.3")


@pytest.mark.parametrize(("rounding", "expected"), [("nearest", "nearest"), ("corrected", "stochastic")])
def test_rounding_without_noise(rounding: str, expected: str) -> None:
    assert StepSettings(0.1, 10, rounding=rounding).noise_free_rounding == expected  # type: ignore[arg-type]
