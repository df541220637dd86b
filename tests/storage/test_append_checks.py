"""Warnings while samples are collected: dropout that is active."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql

ACTIVE: dict[str, nn.Module] = {
    "dropout": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)),
    "pixels": nn.Sequential(nn.Conv2d(1, 1, 1), nn.Dropout2d(0.5)),
    "attention": nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1),
    "recurrent": nn.LSTM(3, 4, num_layers=2, dropout=0.2),
}
QUIET: dict[str, nn.Module] = {
    "rate of 0": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)),
    "evaluation mode": nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval(),
    "one layer": nn.GRU(3, 4, dropout=0.0),
}


def append_twice(path: Path, model: nn.Module, sampler: Any) -> list[str]:
    """Append two samples, and return the warnings given."""
    with warnings.catch_warnings(record=True) as found, ql.SampleStore.create(path, model, sampler) as store:
        warnings.simplefilter("always")
        for i in range(2):
            store.append(model, step=i)
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


@pytest.mark.parametrize("kind", ACTIVE)
def test_dropout_while_sampling_warns_once(kind: str, tmp_path: Path) -> None:
    model = ACTIVE[kind]
    found = append_twice(tmp_path, model, ql.SGLD(model.parameters(), 0.1, 10))
    assert len(found) == 1
    assert "dropout is active while sampling, in '" in found[0]
    assert "Set its rate to 0" in found[0]


@pytest.mark.parametrize("kind", QUIET)
def test_dropout_that_drops_nothing_does_not(kind: str, tmp_path: Path) -> None:
    model = QUIET[kind]
    assert append_twice(tmp_path, model, ql.SGLD(model.parameters(), 0.1, 10)) == []


def test_a_store_without_a_sampler_says_nothing(tmp_path: Path) -> None:
    """Weights of any origin may be stored; nobody need have trained the model as it is."""
    assert append_twice(tmp_path, ACTIVE["dropout"], None) == []


def test_the_remedy_is_heard(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.BatchNorm1d(4))
    model[1].eval()
    sampler = ql.SGLD(model.parameters(), 0.1, 10)
    model(torch.randn(3, 4)).sum().backward()
    sampler.step()
    assert append_twice(tmp_path, model, sampler) == []


class Dropping(nn.Module):
    """Calls dropout as a function."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.linear, self.rate = nn.Linear(4, 4), rate

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), self.rate, self.training)


@pytest.mark.parametrize(("rate", "training", "count"), [(0.1, True, 1), (0.0, True, 0), (0.1, False, 0)])
def test_dropout_as_a_function_of_a_lowered_model(rate: float, training: bool, count: int, tmp_path: Path) -> None:
    model = ql.lower(Dropping(rate), "bfp8", "bfp8").train(training)
    model(torch.randn(2, 4)).sum().backward()
    found = append_twice(tmp_path, model, ql.SGLD(model.parameters(), 0.1, 10))
    assert len(found) == count
    assert all("dropout is active while sampling, in '/dropout/0'" in message for message in found)
