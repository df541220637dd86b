"""Kinds of modules with a handler of their own: pooling, attention, convolutions, recurrent modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from qlangevin import lowering
from qlangevin.lowering.handler import Handler
from qlangevin.lowering.modules import handler_for
from tests.helpers.networks import is_on_grid


def test_a_subclass_is_lowered_like_any_module_unless_its_kind_says_otherwise() -> None:
    class MyConv(nn.Conv2d):
        pass

    class MyLSTM(nn.LSTM):
        pass

    assert handler_for(MyConv(1, 1, 1)) is handler_for(nn.Softmax()) is Handler
    assert handler_for(MyLSTM(1, 1)) is handler_for(nn.GRU(1, 1)) is not Handler


def test_the_weights_of_attention_are_returned_unchanged() -> None:
    attention = nn.MultiheadAttention(8, 2).eval()
    x = torch.randn(5, 3, 8)
    _, plain = attention(x, x, x)
    ql.lower(attention, "bfp4", layers=nn.MultiheadAttention, functions=False)
    y, weights = attention(x, x, x)
    assert torch.equal(weights, plain)
    assert is_on_grid(y, "bfp4")


def test_pooling_whose_output_a_hook_changes_is_rounded() -> None:
    pool = nn.MaxPool1d(2)
    pool.register_forward_hook(lambda module, args, y: y * 0.3)
    model = ql.lower(nn.Sequential(nn.Linear(8, 8), pool), "bfp8")
    assert is_on_grid(model(torch.randn(4, 8)), "bfp8")


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 2, "batch_first": True},
        {"num_layers": 3, "bidirectional": True},
        {"num_layers": 2, "dropout": 0.5},
        {"num_layers": 1},
    ],
    ids=str,
)
def test_recurrent_modules_run_layer_by_layer_compute_the_same(kind: Any, options: dict[str, Any]) -> None:
    rnn, x = kind(4, 8, **options), torch.randn(5, 6, 4)
    start = torch.randn(rnn.num_layers * (2 if rnn.bidirectional else 1), 5 if rnn.batch_first else 6, 8)
    states = (start, start + 1) if kind is nn.LSTM else start
    torch.manual_seed(0)
    expected = rnn(x, states)
    ql.lower(rnn, "fp32", "fp32")
    torch.manual_seed(0)
    torch.testing.assert_close(rnn(x, states), expected, rtol=0, atol=0)
    if not rnn.batch_first and not rnn.dropout:
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 3, 2, 1, 1])
        wanted = ql.unlower(rnn)(packed)
        torch.testing.assert_close(ql.lower(rnn, "fp32")(packed), wanted, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
def test_every_layer_of_a_recurrent_module_is_rounded() -> None:
    rnn = nn.LSTM(4, 8, num_layers=3, proj_size=5)
    ql.lower(rnn, "bfp8/tensor", "bfp8/tensor")
    y, (h, c) = rnn(torch.randn(5, 6, 4))
    assert lowering.state_dict(rnn) == {"": 5}  # three layers and two final states
    for t in (y, h, c):
        assert is_on_grid(t, "bfp8/tensor")
