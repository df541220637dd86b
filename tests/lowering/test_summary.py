"""`lowering.summary`: what each layer and function keeps for backward, without a trace on the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering, native


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        x = F.relu(self.norm(self.conv(x)))
        x = self.drop(x).exp()
        x = x if scale is None else x * scale
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


def snapshot(model: nn.Module) -> Any:
    return lowering.state_dict(model), {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_the_model_is_as_before(kind: str) -> None:
    model = ql.lower(Net(), "bfp8", "bfp8")
    x = torch.randn(4, 3, 8, 8)
    other = copy.deepcopy(model)
    before = snapshot(model)
    batch = {"tensor": x, "tuple": (x, torch.ones(8, 1, 1)), "dict": {"x": x}}[kind]
    found = lowering.summary(model, batch)
    after = snapshot(model)
    assert before[0] == after[0]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert torch.equal(before[2], after[2])
    assert ("/mul/0" in {row.name for row in found.rows}) == (kind == "tuple")
    torch.manual_seed(0)
    y = model(x)
    torch.manual_seed(0)
    assert torch.equal(other(x), y)


def test_rows_say_what_is_lowered_and_why_not() -> None:
    model = ql.lower(Net(), "bfp8", "bfp8", skip="head")
    found = lowering.summary(model, torch.randn(4, 3, 8, 8))
    rows = {row.name: row for row in found.rows}
    assert {name for name, row in rows.items() if row.lowered} == {"conv", "norm", "drop", "/relu/0", "/mean/0"}
    assert rows["/exp/0"].reason == "no rule for it"
    assert rows["head"].reason == "skipped, or no layer"
    assert rows["/relu/0"].elements == rows["conv"].elements == 4 * 8 * 64
    assert rows["/exp/0"].float_bytes == 4 * 8 * 64 * 4  # its backward reads its result
    if native.available:
        assert rows["norm"].code_bytes >= 4 * 8 * 64
        assert rows["norm"].float_bytes < 1000  # averages
    assert found.code_bytes == sum(row.code_bytes for row in found.rows)
    assert found.float_bytes == sum(row.float_bytes for row in found.rows)


def test_the_table_can_be_read() -> None:
    model = ql.lower(Net(), "bfp8", "bfp8", skip="head")
    lines = str(lowering.summary(model, torch.randn(4, 3, 8, 8))).splitlines()
    assert lines[0].split() == [
        "layer",
        "or",
        "function",
        "what",
        "lowered",
        "elements",
        "codes,",
        "kB",
        "floats,",
        "kB",
    ]
    assert any("no: no rule for it" in line for line in lines)
    assert lines[-1].startswith("total")
    assert "5 of 7" in lines[-1]


def test_a_model_that_is_not_lowered_keeps_floats() -> None:
    found = lowering.summary(Net(), torch.randn(4, 3, 8, 8))
    assert not any(row.lowered for row in found.rows)
    assert found.float_bytes > 4 * 8 * 64 * 4


def test_a_batch_that_is_a_slice_counts_as_itself() -> None:
    data = torch.randn(1000, 3, 8, 8)
    model = ql.lower(Net(), "bfp8", "bfp8")
    kept = [lowering.summary(model, batch).float_bytes for batch in (data[:2], data[:2].clone())]
    assert kept[0] == kept[1]
