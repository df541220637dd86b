"""Kinds of modules with a handler of their own: pooling, attention, convolutions, recurrent modules."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering
from qlangevin.lowering import modules
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
    ql.lower(attention, "bfp4", layers=nn.MultiheadAttention)
    y, weights = attention(x, x, x)
    assert torch.equal(weights, plain)
    assert is_on_grid(y, "bfp4")


def test_pooling_whose_output_a_hook_changes_is_rounded() -> None:
    pool = nn.MaxPool1d(2)
    pool.register_forward_hook(lambda module, args, y: y * 0.3)
    model = ql.lower(nn.Sequential(nn.Linear(8, 8), pool), "bfp8")
    assert is_on_grid(model(torch.randn(4, 8)), "bfp8")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 9)),
        (nn.Conv2d(4, 6, (3, 2), dilation=2, bias=False), (3, 4, 9, 8)),
        (nn.Conv3d(2, 3, 2), (3, 2, 4, 5, 3)),
        (nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (3, 4, 9)),
        (nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2, bias=False), (3, 4, 5, 6)),
        (nn.ConvTranspose3d(2, 3, 2), (3, 2, 4, 5, 3)),
        (nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect"), (3, 4, 9, 8)),
        (nn.Conv2d(4, 6, 3), (4, 9, 8)),  # one example without a batch
    ],
    ids=lambda value: str(value) if isinstance(value, nn.Module) else "",
)
@pytest.mark.parametrize("frozen", ["nothing", "weight", "input"])
def test_convolutions_have_the_gradients_of_pytorch(layer: nn.Module, shape: tuple[int, ...], frozen: str) -> None:
    layer = copy.deepcopy(layer)
    x = torch.randn(shape, requires_grad=frozen != "input")
    layer.get_parameter("weight").requires_grad_(frozen != "weight")
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]

    def derivatives() -> list[Tensor]:
        y = layer(x)
        first = torch.autograd.grad(y.sin().sum(), wanted, retain_graph=True)
        again = torch.autograd.grad(y.sin().sum(), wanted, create_graph=True)
        second = torch.autograd.grad(torch.stack([g.square().sum() for g in again]).sum(), wanted, allow_unused=True)
        return [y, *first, *again, *(g for g in second if g is not None)]

    plain = derivatives()
    ql.lower(layer, activations="fp32", errors="fp32")
    torch.testing.assert_close(derivatives(), plain, rtol=1e-6, atol=1e-6)


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


STRIDED_POINTWISE = """
import torch, qlangevin as ql
torch.set_num_threads(1)
conv = torch.nn.Conv2d(6, 12, 1, stride=2, bias=False).to(memory_format=torch.channels_last)
model = ql.lower(torch.nn.Sequential(conv), "bfp8", "bfp8")
x = torch.randn(6, 6, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
for _ in range(60):
    model(x).sum().backward()
with ql.native.disabled():
    for _ in range(60):
        model(x).sum().backward()
"""


@pytest.mark.slow
def test_strided_pointwise_convolutions_stay_within_their_memory_without_avx512() -> None:
    """In plain PyTorch 2.13 this ends in "double free or corruption" or a segmentation fault."""
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MALLOC_PERTURB_": "7"}
    command = [sys.executable, "-W", "ignore", "-c", STRIDED_POINTWISE]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_the_weights_gradient_without_stride_is_the_one_with_it() -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 16, 1, 1).contiguous(memory_format=torch.channels_last)
    x = torch.randn(6, 16, 15, 17).contiguous(memory_format=torch.channels_last)
    e = torch.randn(6, 12, 8, 6)
    geometry = ((2, 3), (0, 0), (1, 1), False, (0, 0), 1)

    def gradient(x: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> Tensor:
        mask = [False, True, False]
        return cast(Tensor, torch.ops.aten.convolution_backward(e, x, weight, None, *geometry, mask)[1])

    few = weight[:, :6].contiguous(memory_format=torch.channels_last)
    pixels, unstrided = modules._without_stride(x[:, :6], few, geometry)
    assert unstrided[0] == (1, 1)
    torch.testing.assert_close(gradient(pixels, few, unstrided), gradient(x, weight, geometry)[:, :6])
    assert modules._without_stride(x, weight, geometry) == (x, geometry)  # 16 channels
