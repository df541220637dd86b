"""The table of methods, and what a run makes of each of them."""

import re
from dataclasses import astuple
from typing import get_args

import pytest
from torch import nn

from qlangevin import QTensor, lowering
from qlangevin.experiments import chain
from qlangevin.experiments.data import Data, load_dataset
from qlangevin.experiments.methods import METHODS, MethodName
from qlangevin.experiments.presets import Digits
from qlangevin.sampling.schedules import ConstantLR, CyclicalLR

# As the paper has them: noise, low precision, accumulator, rounding, cyclical.
PAPER = {
    "SGDFP": (False, False, None, "stochastic", False),
    "SGLDFP": (True, False, None, "stochastic", False),
    "cSGLDFP": (True, False, None, "stochastic", True),
    "SGDLP-F": (False, True, "fp32", "stochastic", False),
    "SGDLP-L": (False, True, None, "stochastic", False),
    "SGLDLP-F": (True, True, "fp32", "stochastic", False),
    "Naïve SGLDLP-L": (True, True, None, "stochastic", False),
    "VC SGLDLP-L": (True, True, None, "corrected", False),
    "cSGLDLP-F": (True, True, "fp32", "stochastic", True),
    "VC cSGLDLP-L": (True, True, None, "corrected", True),
    "SGDLP-L, nearest": (False, True, None, "nearest", False),
    "SGLDLP-L, nearest": (True, True, None, "nearest", False),
}


@pytest.fixture(scope="module")
def digits() -> Data:
    return load_dataset("digits", limit_train=100, limit_test=10)


def small(method: MethodName, **options: object) -> Digits:
    shape: dict[str, object] = {"epochs": 5, "batch": 50, "samples": 4, "burn_in": 0.5, "cycles": 2, "cycle_samples": 1}
    shape |= {"hidden": 6, "seed": 3, "format": "bfp8" if METHODS[method].low_precision else None}
    return Digits(method=method, **{**shape, **options})  # type: ignore[arg-type]


def lowered(model: nn.Module) -> set[str]:
    """The formats of activations and errors, over all layers."""
    return {name for text in lowering.settings(model).values() for name in re.findall(r"(?:ns|errors)=([^,]+),", text)}


def test_the_table_is_the_papers() -> None:
    assert {how.name: astuple(how)[1:6] for how in METHODS.values()} == PAPER
    assert get_args(MethodName) == tuple(METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_chain_begins_with_sgd_in_its_own_precision(name: str) -> None:
    how, first = METHODS[name], METHODS[METHODS[name].starts_from]
    assert not first.noise
    assert not first.cyclical
    if how.noise:
        assert (first.low_precision, first.accumulator) == (how.low_precision, how.accumulator)
        assert (first.rounding == "nearest") == (how.rounding == "nearest")


@pytest.mark.parametrize("name", get_args(MethodName))
def test_a_method_is_a_choice_of_the_samplers_settings(name: MethodName, digits: Data) -> None:
    config = small(name, temperature=0.25, lr=0.3, weight_decay=0.01)
    parts, (noise, low, accumulator, rounding, cyclical) = (
        chain.prepare_chain(config, digits),
        PAPER[METHODS[name].name],
    )
    (group,) = parts.sampler.param_groups
    assert group["temperature"] == (0.25 if noise else 0)
    assert [str(group[kind]) for kind in ("weights", "gradients")] == ["bfp8" if low else "None"] * 2
    assert str(group["accumulator"]) == str(accumulator)
    assert group["rounding"] == rounding
    assert (group["num_data"], group["weight_decay"], group["seed"]) == (100, 0.01, 3)
    assert (group["lr"], parts.loader.batch_size) == (0.3, 50)
    parameters = list(parts.model.parameters())
    assert {id(p) for p in group["params"]} == {id(p) for p in parameters}
    assert {isinstance(p, QTensor) for p in parameters} == {low}
    assert {"accumulator" in parts.sampler.state[p] for p in parameters} == {accumulator is not None}
    assert lowered(parts.model) == {"bfp8" if low else "fp32"}
    assert type(parts.schedule) is (CyclicalLR if cyclical else ConstantLR)
    assert parts.schedule.total_steps == 10
    assert parts.schedule.moments == ((5, 10) if cyclical else (6, 7, 8, 10) if noise else (10,))


@pytest.mark.parametrize(
    ("format", "activations", "packed", "inner"),
    [
        ("bfp8", "auto", True, "bfp8"),
        ("bfp8/tensor", "auto", True, "bfp8/tensor"),
        ("fixed8.6", "auto", True, "fp32"),  # errors of a mean loss are below its gap
        ("fixed8.6", "same", True, "fixed8.6"),
        ("fixed16.14", "auto", True, "fp32"),
        ("bfp8", "full", True, "fp32"),
        ("bfp8", "bfp16", True, "bfp16"),
        ("bfp4", "auto", False, "bfp4"),
        ("fixed4.2", "auto", False, "fp32"),
    ],
)
def test_weights_of_a_byte_or_more_are_packed_and_activations_follow(
    format: str, activations: str, packed: bool, inner: str, digits: Data
) -> None:
    parts = chain.prepare_chain(small("vc-sgldlp-l", format=format, activations=activations), digits)
    (group,) = parts.sampler.param_groups
    assert {isinstance(p, QTensor) for p in parts.model.parameters()} == {packed}
    assert (str(group["weights"]), str(group["gradients"])) == (format, format)
    assert lowered(parts.model) == {inner}


def test_full_precision_stays_so_whatever_is_asked_of_activations(digits: Data) -> None:
    parts = chain.prepare_chain(small("sgldfp", activations="bfp8"), digits)
    assert lowered(parts.model) == {"fp32"}
