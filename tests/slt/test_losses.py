"""Losses of models and batches: which batches they take, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql

IDS = torch.arange(12).view(2, 6) % 5


class Words(nn.Module):
    """Logits of the next of five words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)  # type: ignore[no-any-return]


@pytest.mark.parametrize("batch", [IDS, [IDS], (IDS,), IDS.int(), {"input_ids": IDS}], ids=lambda b: type(b).__name__)
def test_batches_of_tokens(batch: Any) -> None:
    model = Words()
    expected = nn.functional.cross_entropy(model(IDS[:, :-1]).flatten(0, 1), IDS[:, 1:].flatten(), reduction="none")
    assert torch.equal(ql.slt.token_losses(model, batch), expected.view(2, 5))


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ([IDS, IDS], "got a list"),
        (IDS.float(), "got a tensor of shape"),
        (IDS[0], r"got a tensor of shape \(6,\)"),
        ({"input_ids": IDS.tolist()}, r"got a dict.*with_format\('torch'\)"),
    ],
)
def test_other_batches_are_refused(batch: Any, got: str) -> None:
    with pytest.raises(TypeError, match=got):
        ql.slt.token_losses(Words(), batch)


def test_other_outputs_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 5), nn.Flatten())
    with pytest.raises(TypeError, match=r"returns a tensor of shape \(2, 30\), not logits .* give loss="):
        ql.slt.token_losses(model, IDS)


def test_criteria_are_functions_or_modules() -> None:
    model, x, y = nn.Linear(3, 4), torch.randn(5, 3), torch.tensor([0, 1, 2, 3, 0])
    expected = nn.functional.cross_entropy(model(x), y, reduction="none", label_smoothing=0.1)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert torch.equal(ql.slt.supervised(criterion)(model, (x, y)), expected)
    assert criterion.reduction == "mean"
    function = ql.slt.supervised(nn.functional.cross_entropy, label_smoothing=0.1)
    assert torch.equal(function(model, (x, y)), expected)


def test_a_criterion_is_no_loss() -> None:
    from tests.helpers.learning import regression

    model, loader = regression()
    for criterion in (nn.MSELoss(), nn.functional.mse_loss):
        with pytest.raises(TypeError, match=r"got a criterion; give ql.slt.supervised\(criterion\)"):
            ql.slt.llc(model, loader, criterion, lr=1e-3, localization=5.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="loss must be a function of model and batch, got a str"):
        ql.slt.llc(model, loader, "mse", lr=1e-3, localization=5.0)  # type: ignore[arg-type]
