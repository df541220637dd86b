"""`SGLD.diagnose`: shares and inflation against enumeration, all kinds of parameters, and advice that is followed."""

import copy
import json
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, pack
from qlangevin.quantization.formats import parse
from qlangevin.sampling.diagnosis import Diagnosis
from qlangevin.sampling.gradient_rows import KEPT, is_kept, keep_rows, some_rows
from tests.helpers.deferred_kernels import deferred_kernels
from tests.helpers.sgld import METHODS, backward, problem


def one_weight_each(gradients: list[float], **settings: Any) -> Diagnosis:
    """A vector on the grid of gap 1/4, learning rate 1, with these gradients."""
    p = nn.Parameter(torch.zeros(len(gradients)))
    given = {"lr": 1.0, "num_data": 1000, "weights": "fixed8.2", **settings}
    sampler = SGLD([p], **given)
    p.grad = torch.tensor(gradients)
    return sampler.diagnose()


def test_shares_and_inflation_by_hand() -> None:
    """v = 2/1000, Δ²/4 = 1/64; |δ| (Δ - |δ|) is v at |δ| = 0.00828."""
    found = one_weight_each([0.0, 0.005, -0.02, 0.1])
    v, gap = 2e-3, 0.25
    ratios = [max(v, d * (gap - d)) / v for d in (0.0, 0.005, 0.02, 0.1)]
    (part,) = found.parameters
    assert (part.above, part.between, part.below) == (0.0, 0.5, 0.5)
    assert part.inflation == pytest.approx(sum(ratios) / 4, rel=1e-5)
    assert part.resolution == pytest.approx(gap * 1000 * (0.005 + 0.02 + 0.1) / 4 / 2, rel=1e-5)
    assert part.noise == pytest.approx(math.sqrt(v) / gap, rel=1e-5)
    assert part.drift == pytest.approx(math.sqrt((0.005**2 + 0.02**2 + 0.1**2) / 4) / gap, rel=1e-5)
    assert (part.gap, part.saturated, part.zero_gradients, part.gap_over_width) == (gap, 0.0, None, None)


def test_noise_above_v0_needs_nothing() -> None:
    found = one_weight_each([0.3, -0.1], num_data=10)
    assert (found.total.above, found.total.inflation, found.advice) == (1.0, 1.0, ())
    assert found.sufficient
    assert "suffice" in found.summary


def test_weight_decay_and_ascent_are_part_of_the_drift() -> None:
    """θ = 1, decay 0.01: drift -0.02 - 0.01 descending, 0.02 - 0.01 ascending."""
    for maximize, size in ((False, 0.03), (True, 0.01)):
        p = nn.Parameter(torch.ones(3))
        sampler = SGLD([p], lr=1.0, num_data=1000, weight_decay=0.01, weights="fixed8.2", maximize=maximize)
        p.grad = torch.full((3,), 0.02)
        assert sampler.diagnose().total.drift == pytest.approx(size / 0.25, rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_all_methods(method: str, packed: bool) -> None:
    model, x, y = problem()
    settings = dict(METHODS[method])
    if packed and settings.get("weights"):
        pack(model, settings["weights"])
    sampler = SGLD(model.named_parameters(), lr=0.1, num_data=1000, **settings)
    backward(model, x, y)
    before = [p.detach().clone() for p in model.parameters()]
    found = sampler.diagnose()
    assert [part.name for part in found.parameters] == [name for name, _ in model.named_parameters()]
    assert found.total.size == sum(p.numel() for p in model.parameters())
    for part in (*found.parameters, found.total):
        assert sum(x for x in (part.above, part.between, part.below) if x is not None) == pytest.approx(1)
        assert (part.inflation is None) == (settings.get("temperature") == 0.0)
        assert (part.zero_gradients is None) == ("gradients" not in settings)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["total"]["size"] == found.total.size
    assert len(str(found).splitlines()) >= 2 + len(found.parameters)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [
        (torch.bfloat16, None),
        (torch.bfloat16, "bfp8"),
        (torch.float16, None),
        (torch.float16, "bfp8"),
        (torch.float64, None),
    ],
)
def test_dtypes(dtype: torch.dtype, weights: str | None) -> None:
    model, x, y = problem()
    model.to(dtype)
    sampler = SGLD(model.parameters(), lr=1e-3, num_data=10_000_000, weights=weights)
    nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
    found = sampler.diagnose(model)
    inflation = found.total.inflation
    assert inflation is not None
    assert inflation > 1.1 if dtype is not torch.float64 else inflation == 1.0
    for remedy in found.advice:
        if remedy.kind == "bits":
            parse(remedy.settings.split('"')[1])


def test_a_sampler_that_steps_in_backward_keeps_rows() -> None:
    """Small gradients are kept whole, so that the diagnosis is that of the gradients themselves."""
    model, x, y = problem()
    twin = copy.deepcopy(model)
    settings: dict[str, Any] = {"lr": 0.1, "num_data": 10**7, "weights": "bfp8"}
    inside, outside = (
        SGLD(model.named_parameters(), step_in_backward=True, **settings),
        SGLD(twin.named_parameters(), **settings),
    )
    backward(twin, x, y)
    before = outside.diagnose()
    backward(model, x, y)
    assert all(p.grad is None for p in model.parameters())
    after = inside.diagnose()
    assert after.total.drift == pytest.approx(before.total.drift, rel=0.05)
    assert after.total.resolution == pytest.approx(
        before.total.resolution, rel=0.2
    )  # gaps have changed with the weights


def test_rows_are_few_and_keep_blocks_whole() -> None:
    assert [step for step in range(1, 400) if is_kept(step)] == [1, 101, 201, 301]
    for shape in [(), (3,), (100_000,), (512, 64, 3, 3), (10, 9000), (70_000, 16)]:
        gradient = torch.randn(shape)
        kept = keep_rows(gradient)
        row = gradient[:1].numel() if gradient.dim() > 1 else 1
        assert 0 < kept.gradient.numel() <= max(KEPT, row)
        assert len(range(*some_rows(torch.Size(shape), 10**9).indices(shape[0] if shape else 1))) == (
            shape[0] if shape else 1
        )


def test_a_whole_tensor_block_takes_its_gap_from_rows_that_are_not_measured() -> None:
    torch.manual_seed(0)
    weight = torch.randn(70_000, 16) * 0.01
    weight[1, 1] = 1.0  # not among the evenly spaced rows
    p = nn.Parameter(weight)
    sampler = SGLD([p], lr=1e-3, num_data=1000, weights="bfp8/tensor")
    p.grad = torch.randn(p.shape) * 1e-3
    assert sampler.diagnose().total.gap == 2.0**-6


def test_zero_gradients_and_saturation() -> None:
    p = nn.Parameter(torch.tensor([5.0, -5.0, 0.1, 0.2]))
    sampler = SGLD([p], lr=0.1, num_data=100, weights="fixed8.6", gradients="fixed8.2")
    p.grad = torch.tensor([1e-6, 1e-6, 1e-6, 3.0])
    found = sampler.diagnose()
    assert (found.total.saturated, found.total.zero_gradients) == (0.5, 0.75)
    assert not found.sufficient
    assert found.advice[0].kind == "range"
    assert 'weights="fixed8.5"' in found.advice[0].settings
    assert "range does not suffice" in found.summary


def test_parameters_of_another_device() -> None:
    """Kernels that the host does not wait for: rows are kept without waiting, `diagnose` waits."""
    with deferred_kernels():
        model, x, y = problem()
        sampler = SGLD(model.named_parameters(), lr=0.1, num_data=1000, weights="bfp8")
        for _ in range(3):
            backward(model, x, y)
            sampler.step()
        sampler.zero_grad()
        assert len(sampler.diagnose().parameters) == 4


def test_widths_of_the_posterior() -> None:
    model, x, y = problem()
    sampler = SGLD(model.parameters(), lr=0.1, num_data=1000, weights="fixed8.4")
    backward(model, x, y)
    widths = {name: torch.full(p.shape, 0.125) for name, p in model.named_parameters()}
    found = sampler.diagnose(model, widths)
    assert found.total.gap_over_width == found.parameters[0].gap_over_width == pytest.approx(0.5)
    with pytest.raises(ValueError, match="no parameter for 'odd'"):
        sampler.diagnose(model, {"odd": torch.ones(1)})


def test_a_number_is_the_width_of_all_weights_of_a_parameter() -> None:
    model, x, y = problem()
    sampler = SGLD(model.parameters(), lr=0.1, num_data=1000, weights="fixed8.4")
    backward(model, x, y)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    expected = sampler.diagnose(model, {name: torch.full(shape, 0.125) for name, shape in shapes.items()})
    for width in (0.125, torch.tensor(0.125)):
        assert sampler.diagnose(model, dict.fromkeys(shapes, width)) == expected


@pytest.mark.parametrize(
    ("widths", "error", "message"),
    [
        (0.5, TypeError, r"must be a mapping from the names of parameters, such as \{'0.weight': 0.1\}, got 0.5"),
        ({"0.weight": torch.ones(2, 4)}, ValueError, r"the width of 0.weight must be .* shape .*, got shape \(2, 4\)"),
        ({"0.weight": [0.5]}, TypeError, r"the width of 0.weight must be a tensor .*, or a number .*, got a list"),
        ({"0.weight": -1.0}, ValueError, r"the width of 0.weight must be a finite number that is not negative"),
    ],
)
def test_widths_that_are_none_are_refused(widths: Any, error: type[Exception], message: str) -> None:
    model, x, y = problem()
    sampler = SGLD(model.parameters(), lr=0.1, num_data=1000, weights="fixed8.4")
    backward(model, x, y)
    with pytest.raises(error, match=message):
        sampler.diagnose(model, widths)


# ---- advice


def train_for_advice(**settings: Any) -> tuple[Diagnosis, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 3))
    x, y = torch.randn(64, 20), torch.randint(0, 3, (64,))
    given = {"lr": 0.05, "num_data": 200_000, "weights": "bfp8", **settings}
    sampler = SGLD(model.named_parameters(), **given)
    backward(model, x, y)
    return sampler.diagnose(), given


def as_settings(text: str) -> dict[str, Any]:
    name, _, value = text.partition("=")
    return {name: value.strip('"') if '"' in value else float(value)}


STARTS: list[dict[str, Any]] = [
    {},
    {"weights": "fixed8.6"},
    {"weights": "bfp8/tensor"},
    {"weights": "e4m3"},
    {"weights": "fp8_e4m3"},
    {"weights": "bfp8", "accumulator": "bfp9/tensor", "num_data": 1_000_000},
    {"weights": "bfp8", "num_data": 20_000, "rounding": "stochastic"},
]


@pytest.mark.parametrize("start", STARTS)
def test_advice_repairs_what_it_says(start: dict[str, Any]) -> None:
    found, given = train_for_advice(**start)
    assert not found.sufficient
    kinds = [remedy.kind for remedy in found.advice]
    assert {"bits", "lr"} <= set(kinds)
    assert ("block" in kinds) <= given["weights"].startswith("bfp")
    for remedy in found.advice:
        again, _ = train_for_advice(**given | as_settings(remedy.settings))
        assert remedy.inflation is not None
        assert again.total.inflation is not None
        assert again.total.inflation == pytest.approx(remedy.inflation, rel=0.03)
        assert again.bytes_per_weight == pytest.approx(remedy.bytes_per_weight)
        assert remedy.kind == "rounding" or again.total.inflation < 1.1 * 1.03


def test_advice_is_the_least_that_does() -> None:
    found, given = train_for_advice()
    bits = next(remedy for remedy in found.advice if remedy.kind == "bits")
    format = parse(bits.settings.split('"')[1])
    less, _ = train_for_advice(**given | {"weights": f"bfp{format.digits}"})
    assert not less.sufficient
    assert bits.bytes_per_weight == pytest.approx(2.0, abs=0.1)
    assert found.bytes_per_weight == pytest.approx(1.0, abs=0.1)


def test_each_parameter_names_the_format_that_would_do() -> None:
    found, given = train_for_advice()
    for i, part in enumerate(found.parameters):
        assert part.suffices is not None
        again, _ = train_for_advice(**given | {"weights": part.suffices})
        inflation = again.parameters[i].inflation
        assert inflation is not None
        assert inflation < 1.15


def test_without_gradients_it_says_what_to_do() -> None:
    model, *_ = problem()
    with pytest.raises(
        RuntimeError, match=r"after backward\(\) and before zero_grad\(\).* A checkpoint holds no gradients"
    ):
        SGLD(model.parameters(), lr=0.1, num_data=100).diagnose()


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_the_first_step_after_a_load_keeps_rows(in_backward: bool, late: bool) -> None:
    model, x, y = problem()
    with deferred_kernels() if late else nullcontext():
        sampler = SGLD(model.parameters(), lr=0.1, num_data=1000, weights="bfp8", step_in_backward=in_backward)
        for resumed in (False, True):
            if resumed:
                sampler.load_state_dict(sampler.state_dict())
                with pytest.raises(RuntimeError, match="run one more forward and backward pass, then call diagnose"):
                    sampler.diagnose()
            for _ in range(2):
                backward(model, x, y)
                sampler.step()
                sampler.zero_grad()
            assert len(sampler.diagnose().parameters) == 4


def test_the_verdict_names_a_parameter_that_the_average_hides() -> None:
    large, small, tiny = (nn.Parameter(torch.zeros(n)) for n in (900, 100, 5))
    params = [("large", large), ("small", small), ("tiny", tiny)]
    sampler = SGLD(params, lr=1.0, num_data=1000, weights="fixed8.2")
    for (_, p), gradient in zip(params, (0.0, 0.012, 0.1), strict=True):
        p.grad = torch.full(p.shape, gradient)
    found = sampler.diagnose(tolerance=1.2)
    part = found.parameters[1]
    assert part.inflation is not None
    assert found.sufficient
    assert part.inflation > 1.2
    assert f"On average: small is at {part.inflation:.3g}, and needs {part.suffices}." in found.summary
    for p in (small, large):
        p.grad = torch.zeros(p.shape)  # what is left has less than a hundredth of the weights
    found = sampler.diagnose(tolerance=1.2)
    assert found.sufficient
    assert found.parameters[2].inflation > 1.2  # type: ignore[operator]
    assert "On average" not in found.summary


def test_tolerance_must_be_above_one() -> None:
    p = nn.Parameter(torch.ones(2))
    sampler = SGLD([p], lr=0.1, num_data=100)
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match="tolerance must be above 1"):
        sampler.diagnose(tolerance=0.5)


def test_long_tables_show_the_worst() -> None:
    params: list[Tensor] = [nn.Parameter(torch.zeros(4)) for _ in range(30)]
    sampler = SGLD(params, lr=1.0, num_data=1000, weights="fixed8.2")
    for i, p in enumerate(params):
        p.grad = torch.full((4,), 1e-3 * (i + 1))
    text = str(sampler.diagnose())
    assert "parameter 29" in text
    assert "parameter 3 " not in text
    assert "and 10 parameters with less inflation" in text
