"""What cannot be estimated: errors that say what to do, and doubts that are said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import qlangevin as ql
from tests.helpers.learning import HALF_SQUARE, regression

QUICK: dict[str, Any] = {"lr": 1e-3, "localization": 5.0, "chains": 2, "draws": 12, "burn_in": 4}
pytestmark = pytest.mark.filterwarnings("ignore::qlangevin.QLangevinWarning")  # chains as short as these disagree


def test_too_large_steps_are_an_error_and_losses_are_kept(tmp_path: Path) -> None:
    model, loader = regression()
    for _ in range(2):  # the second time it is read from the disk
        with pytest.raises(ql.slt.ChainLeftError, match=r"chain 0.*smaller lr") as error:
            ql.slt.llc(model, loader, HALF_SQUARE, lr=1.0, localization=5.0, draws=200, weights=None, store=tmp_path)
        assert error.value.losses is not None
        assert len(error.value.losses) > 5
    assert (tmp_path / "part-0" / "chain-0.safetensors").exists()


class FiniteUntil:
    """A loss that is NaN from its n-th call with gradients on."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.left -= torch.is_grad_enabled()
        return HALF_SQUARE(model, batch) * (1.0 if self.left > 0 else torch.nan)


def test_losses_that_become_nan_leave_the_chains_before(tmp_path: Path) -> None:
    model, loader = regression()
    whole = ql.slt.llc(model, loader, HALF_SQUARE, **QUICK).losses
    with pytest.raises(
        ql.slt.ChainLeftError, match=r"the loss of chain 1 is nan at step 5; take a smaller lr"
    ) as error:
        ql.slt.llc(model, loader, FiniteUntil(16 + 5), store=tmp_path, **QUICK)
    assert list(error.value.finished) == [("full", 0)]
    assert error.value.finished["full", 0].tolist() == whole[0].tolist()
    assert error.value.losses is not None
    assert error.value.losses.tolist() == whole[1, :4].tolist()
    assert (tmp_path / "part-0" / "chain-0.safetensors").exists()


def test_a_loss_that_bounds_nothing_is_noticed_by_distance() -> None:
    model, loader = regression()
    with pytest.raises(
        ql.slt.ChainLeftError, match=r"left the neighbourhood.*localization=100 should keep them within 0.1"
    ):
        ql.slt.llc(model, loader, lambda m, b: HALF_SQUARE(m, b).tanh(), lr=0.1, localization=100.0, weights=None)


def test_a_loss_that_is_not_finite_at_the_beginning() -> None:
    model, loader = regression()
    with pytest.raises(FloatingPointError, match=r"the loss at w\* is not finite: 500 of 500"):
        ql.slt.llc(model, loader, lambda m, b: HALF_SQUARE(m, b) * torch.inf, **QUICK)


def test_a_negative_coefficient_is_said() -> None:
    model, loader = regression()
    model.weight.data += 0.5
    settings = {**QUICK, "localization": 0.1, "draws": 200, "burn_in": 200, "lr": 4e-3}
    with pytest.warns(ql.QLangevinWarning, match=r"is negative.*not a minimum of the loss.*Train longer"):
        found = ql.slt.llc(model, loader, HALF_SQUARE, **settings)
    assert found.mean < 0


def test_more_than_half_the_weights_is_said() -> None:
    model, loader = regression()
    with pytest.warns(ql.QLangevinWarning, match=r"above 8, the largest that 16 weights can have"):
        ql.slt.llc(model, loader, HALF_SQUARE, **{**QUICK, "lr": 0.04, "localization": 0.1, "draws": 400})


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


def test_bad_input_is_named() -> None:
    model, loader = regression()

    def refuse(error: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            ql.slt.llc(
                **({"model": model, "loader": loader, "loss": HALF_SQUARE} | {**QUICK} | changed)  # type: ignore[arg-type]
            )

    refuse(ValueError, "the pattern 'bias' fits no parameter; they are named weight", masks={"a": "bias"})
    refuse(ValueError, "mask 'a' selects no weight", masks={"a": {"weight": torch.zeros(1, 16, dtype=torch.bool)}})
    refuse(ValueError, "its mask", masks={"a": {"weight": torch.ones(16, dtype=torch.bool)}})
    refuse(ValueError, "is no index of weight", masks={"a": {"weight": (0, 99)}})
    refuse(TypeError, "masks must map names of parts", masks="weight")
    tiny = DataLoader(TensorDataset(torch.zeros(2, 16), torch.zeros(2)), batch_size=2)
    refuse(ValueError, "needs n >= 3 data, got n = 2", loader=tiny)
    refuse(TypeError, "loader must be a DataLoader", loader=[1, 2])
    refuse(TypeError, "order could not be resumed", loader=DataLoader(Endless(), batch_size=2))
    refuse(ValueError, "keep_weights=True needs a store", keep_weights=True)
    refuse(TypeError, "give loss=", loss=None)
    single = {"one": (loader, lambda m, b: HALF_SQUARE(m, b).mean())}
    refuse(ValueError, "'one' must have a number for each example", observables=single)
    refuse(ValueError, "box must be", box=-1.0)
    refuse(ValueError, "requires? gradients", model=nn.Linear(2, 2).requires_grad_(False))
    with torch.inference_mode():
        inference = nn.Linear(16, 1)
    refuse(ValueError, "'weight' was made in inference mode, and cannot move", model=inference)
    refuse(ValueError, "'weight' is on the meta device", model=nn.Linear(16, 1, device="meta"))
    refuse(
        ValueError, r"packed as bfp8, not bf16; give weights='bfp8', or unpack", model=ql.pack(regression()[0], "bfp8")
    )
