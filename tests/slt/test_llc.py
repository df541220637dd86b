"""Estimates of known learning coefficients, and what they leave behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql
from tests.helpers.learning import DATA, HALF_SQUARE, exact, regression, two_layers

QUICK: dict[str, Any] = {"lr": 1e-3, "localization": 5.0, "chains": 2, "draws": 12, "burn_in": 4}
pytestmark = pytest.mark.filterwarnings("ignore::qlangevin.QLangevinWarning")  # chains as short as these disagree

CLASSES = ql.slt.supervised(nn.functional.cross_entropy)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "bf16", "bfp8", "bfp8/16"])
@pytest.mark.parametrize("sampler", ["sgld", "sghmc"])
def test_linear_regression_has_half_its_dimension(weights: str | None, sampler: str) -> None:
    model, loader = regression()
    more: dict[str, Any] = {"friction": 2.0} if sampler == "sghmc" else {}
    found = ql.slt.llc(
        model, loader, HALF_SQUARE, lr=2e-3, localization=5.0, weights=weights, sampler=sampler, draws=500, **more
    )
    if sampler == "sgld":  # a false alarm once in 16 000 runs
        assert abs(found.mean - exact(found.settings, 16)) < 4 * found.stderr
    else:
        assert abs(found.mean - 8 * found.settings.nbeta / (found.settings.nbeta + 5)) < 5 * found.stderr
    assert found.stderr < 0.5
    assert found.r_hat < 1.1
    assert found.per_chain.shape == (4,)
    assert found.remarks == []


def test_pairing_takes_the_noise_of_batches_away() -> None:
    settings: dict[str, Any] = {**QUICK, "draws": 60, "burn_in": 30, "weights": None}
    model, loader = regression(batch=20)
    paired = ql.slt.llc(model, loader, HALF_SQUARE, **settings)
    single = ql.slt.llc(model, loader, lambda m, b: HALF_SQUARE(m, b).mean(), **settings)
    assert np.array_equal(paired.losses, single.losses)
    assert (single.baselines == single.init_loss).all()
    assert paired.trace.std() < 0.7 * single.trace.std()


def test_the_loss_at_the_centre_may_be_measured_on_some_batches() -> None:
    model, loader = regression(batch=20)
    some = ql.slt.llc(model, loader, HALF_SQUARE, init_batches=3, **QUICK)
    assert (some.baselines == some.init_loss).all()
    assert some.init_loss != ql.slt.llc(model, loader, HALF_SQUARE, **QUICK).init_loss


def test_gains_of_rms_are_used() -> None:
    model, loader = regression()
    found = ql.slt.llc(model, loader, HALF_SQUARE, sampler="rms", **QUICK)
    assert found.settings.preconditioner == str(ql.RMS(eps=0.1, freeze_after=4))
    assert not np.array_equal(found.losses, ql.slt.llc(model, loader, HALF_SQUARE, **QUICK).losses)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """All that a user can see of a model."""
    return {
        "identities": [id(p) for p in model.parameters()],
        "places": {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)},
        "values": {name: t.detach().clone() for name, t in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "gradients": [None if p.grad is None else p.grad.clone() for p in model.parameters()],
        "moving": [p.requires_grad for p in model.parameters()],
        "generator": torch.get_rng_state(),
    }


def assert_unchanged(before: dict[str, Any], model: nn.Module) -> None:
    after = snapshot(model)
    for name in ("identities", "places", "modes", "moving"):
        assert before[name] == after[name]
    assert all(torch.equal(a, after["values"][name]) for name, a in before["values"].items())
    assert torch.equal(before["generator"], after["generator"])
    pairs = zip(before["gradients"], after["gradients"], strict=True)
    assert all(a is b or torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("weights", [None, "bf16", "bfp8"])
def test_the_model_is_as_before(weights: str | None) -> None:
    model, loader = two_layers()
    assert isinstance(model, nn.Sequential)
    model[1].eval()
    model[0].bias.requires_grad_(False)
    nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4, dtype=torch.long)).backward()
    before = snapshot(model)
    ql.slt.llc(model, loader, CLASSES, masks={"last": "4.*"}, weights=weights, **QUICK)
    ql.slt.llc(model, loader, CLASSES, weights=weights, **QUICK)
    assert_unchanged(before, model)


class FailingLoss:
    """A loss that does something at its n-th call with gradients."""

    def __init__(self, at: int, what: Any) -> None:
        self.at, self.what, self.calls = at, what, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        found = CLASSES(model, batch)
        if torch.is_grad_enabled():
            self.calls += 1
            if self.calls == self.at:
                return self.what(found)  # type: ignore[no-any-return]
        return found


def press_ctrl_c(found: Tensor) -> Tensor:
    os.kill(os.getpid(), signal.SIGINT)
    return found


def fail(found: Tensor) -> Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize(
    ("what", "error"),
    [(press_ctrl_c, KeyboardInterrupt), (fail, ZeroDivisionError), (lambda x: x * torch.nan, ql.slt.ChainLeftError)],
)
def test_the_model_is_as_before_also_after_errors(what: Any, error: type[BaseException]) -> None:
    model, loader = two_layers()
    before, handler = snapshot(model), signal.getsignal(signal.SIGINT)
    with pytest.raises(error):
        ql.slt.llc(model, loader, FailingLoss(5, what), **QUICK)
    assert_unchanged(before, model)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("sampler", ["sgld", "rms", "sghmc"])
@pytest.mark.parametrize("weights", [None, "bfp8"])
def test_an_interrupted_estimate_resumes_to_the_byte(tmp_path: Path, weights: str | None, sampler: str) -> None:
    model, loader = two_layers()
    settings: dict[str, Any] = {**QUICK, "weights": weights, "sampler": sampler, "keep_weights": True, "box": 0.3}
    settings |= {"observables": {"some": loader}, "masks": {"full": "*", "last": "4.*"}}
    whole = ql.slt.llc(model, loader, CLASSES, store=tmp_path / "whole", **settings)
    for at in (3, 14, 20):  # in the first chain, in its resumed rest, in the second
        with pytest.raises(KeyboardInterrupt):
            ql.slt.llc(model, loader, FailingLoss(at, press_ctrl_c), store=tmp_path / "parts", **settings)
    resumed = ql.slt.llc(model, loader, CLASSES, store=tmp_path / "parts", **settings)
    assert np.array_equal(whole.losses, resumed.losses)
    assert np.array_equal(whole.observables["some"], resumed.observables["some"])
    a, b = (
        {p.relative_to(tmp_path / name): p.read_bytes() for p in (tmp_path / name).rglob("*") if p.is_file()}
        for name in ("whole", "parts")
    )
    assert a == b
    assert sum(p.suffix == ".safetensors" for p in a) >= 4 + 4 * 12
    calls = FailingLoss(0, fail)
    again = ql.slt.llc(model, loader, calls, store=tmp_path / "parts", **settings)
    assert calls.calls == 0  # all of it was on the disk
    assert np.array_equal(again.losses, whole.losses)


def test_another_estimate_does_not_use_the_store(tmp_path: Path) -> None:
    model, loader = regression()
    ql.slt.llc(model, loader, HALF_SQUARE, store=tmp_path, **QUICK)
    with pytest.raises(ValueError, match=r"holds another estimate: settings.lr is 0.001 there and 0.002 here"):
        ql.slt.llc(model, loader, HALF_SQUARE, store=tmp_path, **{**QUICK, "lr": 2e-3})
    model.weight.data += 1
    with pytest.raises(ValueError, match="holds another estimate: weights"):
        ql.slt.llc(model, loader, HALF_SQUARE, store=tmp_path, **QUICK)


def test_a_store_is_of_one_mask_one_loss_and_the_same_data(tmp_path: Path) -> None:
    model, loader = regression()
    data = loader.dataset
    assert isinstance(data, TensorDataset)
    x, y = data.tensors
    good: dict[str, Any] = {"masks": {"a": {"weight": (0, slice(0, 8))}}, "observables": {"some": loader}, **QUICK}
    ql.slt.llc(model, loader, HALF_SQUARE, store=tmp_path, **good)

    def refuse(match: str, **changed: Any) -> None:
        given = {"model": model, "loader": loader, "loss": HALF_SQUARE, **good, **changed}
        with pytest.raises(ValueError, match=rf"holds another estimate: {match}"):
            ql.slt.llc(store=tmp_path, **given)

    half = DataLoader(TensorDataset(x[:250], y[:250]), batch_size=250)
    refuse("masks.a is", masks={"a": {"weight": (0, slice(8, 16))}})
    refuse("batch_size is 500 there and 100 here", loader=DataLoader(data, batch_size=100))
    refuse("the loss at w. is", loader=DataLoader(TensorDataset(2 * x, y), batch_size=500))
    refuse("the loss at w. is", loss=lambda m, b: 2 * HALF_SQUARE(m, b))
    refuse("observables.some is", observables={"some": half})
    refuse("observables.other is 'absent' there", observables={"some": loader, "other": half})
    refuse("init_batches is None there and 1 here", init_batches=1)
    again = ql.slt.llc(model, loader, lambda m, b: HALF_SQUARE(m, b) * (1 + 1e-6), store=tmp_path, **good)
    assert again.observables["some"].shape == (2, 12, 500)  # losses that differ by rounding are the same


def test_masks_move_what_they_select() -> None:
    model, loader = regression()
    some: Any = {
        "half": {"weight": (0, slice(0, 8))},
        "three": {"weight": torch.arange(16)[None] < 3},
        "all": ["weight"],
    }
    settings = {**QUICK, "draws": 300, "burn_in": 50, "lr": 4e-3}
    found = ql.slt.llc(model, loader, HALF_SQUARE, weights=None, masks=some, **settings)
    assert found.name == "half"
    assert [part.size for part in found.parts.values()] == [8, 3, 16]
    for part in found.parts.values():
        assert abs(part.mean - exact(part.settings, part.size)) < 5 * part.stderr
    assert len(found.plot().axes) == 3


@pytest.mark.parametrize("weights", [None, "bfp8"])
def test_draws_of_weights_are_kept(tmp_path: Path, weights: str | None) -> None:
    model, loader = two_layers()
    ql.slt.llc(model, loader, CLASSES, store=tmp_path, keep_weights=True, weights=weights, **QUICK)
    posterior = ql.Posterior.open(tmp_path / "part-0" / "weights", model.eval())
    assert [len(chain) for chain in posterior.chains] == [12, 12]
    assert posterior.predict(torch.randn(3, 6)).shape == (3, 2)


def test_observables_are_losses_of_each_example_at_each_draw() -> None:
    model, loader = two_layers()
    few = DataLoader(TensorDataset(*loader.dataset[:10]), batch_size=4)
    wrong = ql.slt.supervised(lambda out, y, reduction: (out.argmax(1) != y).float())
    found = ql.slt.llc(model, loader, CLASSES, observables={"few": few, "wrong": (few, wrong)}, **QUICK)
    assert found.observables["few"].shape == (2, 12, 10)
    assert set(np.unique(found.observables["wrong"])) <= {0.0, 1.0}
    assert len({tuple(draw) for draw in found.observables["few"].reshape(-1, 10).tolist()}) == 24


def test_half_precision_models_have_their_own_centre() -> None:
    model, loader = regression()
    model = model.bfloat16()
    loader = DataLoader(TensorDataset(*(t.bfloat16() for t in loader.dataset.tensors)), batch_size=DATA)  # type: ignore[attr-defined]
    found = [ql.slt.llc(model, loader, HALF_SQUARE, weights=w, **QUICK).losses for w in (None, "bf16", "bfp8")]
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_packed_models_are_their_own_centre() -> None:
    model, loader = regression()
    packed = ql.pack(model, "bfp8")
    before = packed.weight.detach().decode()  # type: ignore[attr-defined]
    own, named = (ql.slt.llc(packed, loader, HALF_SQUARE, weights=w, **QUICK) for w in (None, "bfp8"))
    assert own.settings.weights == "bfp8"
    assert np.array_equal(own.losses, named.losses)
    assert torch.equal(packed.weight.detach().decode(), before)  # type: ignore[attr-defined]


def test_estimates_do_not_mind_modes_of_autograd() -> None:
    model, loader = regression()
    expected = ql.slt.llc(model, loader, HALF_SQUARE, **QUICK).losses
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert np.array_equal(ql.slt.llc(model, loader, HALF_SQUARE, **QUICK).losses, expected)


def test_a_diagnosis_is_taken_from_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        summary = "The bits do not suffice: inflation 2."

        def to_dict(self) -> dict[str, Any]:
            return {"sufficient": False, "parts": ({"gap": float("inf")},)}

    monkeypatch.setattr(ql.SGLD, "diagnose", lambda self: Found(), raising=False)
    model, loader = regression()
    with pytest.warns(ql.QLangevinWarning, match=r"The bits do not suffice: inflation 2\. Take a finer format"):
        found = ql.slt.llc(model, loader, HALF_SQUARE, **QUICK)
    assert found.resolution == {"sufficient": False, "parts": [{"gap": None}], "summary": Found.summary}


def test_results_are_printed_and_written() -> None:
    model, loader = regression()
    found = ql.slt.llc(model, loader, HALF_SQUARE, **QUICK)
    assert str(found).startswith("LLC of full: ")
    assert "16 weights, bf16, 2 chains of 12 steps after 4, R-hat" in str(found)
    assert found.to_json()["settings"]["nbeta"] == DATA / np.log(DATA)
    assert len(found.plot().axes) == 2
