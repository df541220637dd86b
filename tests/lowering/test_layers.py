"""`lower`: Algorithm 3 of the paper, the layers it fits, its random bits and its mistakes."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

import qlangevin as ql
from qlangevin import lowering, native
from qlangevin.lowering.handler import find_handler
from qlangevin.quantization import operators, random
from tests.helpers.networks import CASES, build, gradients, is_on_grid, same_gradients

FORMATS = ["bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4", "fp8_e5m2", "bfp16"]


@pytest.mark.parametrize("name", CASES)
def test_full_precision_is_the_plain_model_bit_for_bit(name: str) -> None:
    model, x, labels = build(name)
    plain = gradients(model, x, labels)
    model, x, labels = build(name)  # a new one: batch norm has updated its averages
    assert same_gradients(gradients(ql.lower(model, "fp32", "fp32"), x, labels), plain)


def quantized(x: Tensor, format: str, key: ql.Key, purpose: int) -> Tensor:
    y: Tensor = operators.quantize_op(x, format, "stochastic", *operators.key_bits(key), purpose)
    return y


@pytest.mark.parametrize("format", FORMATS)
def test_algorithm_3_line_by_line(format: str) -> None:
    x, labels = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
    model = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
    ql.lower(model, activations=format, errors=format, seed=3)
    loss, found = gradients(model, x, labels)

    handlers = [find_handler(layer) for layer in model]
    keys = [ql.Key(h.seed, h.stream, 1) for h in handlers if h is not None]
    (w1, b1), (w2, b2) = ([p.detach() for p in model[i].parameters()] for i in (0, 2))
    a1 = quantized(x @ w1.T + b1, format, keys[0], random.ACTIVATION)
    a2 = a1.clamp_min(0)
    a3 = quantized(a2 @ w2.T + b2, format, keys[2], random.ACTIVATION).requires_grad_()
    expected_loss = nn.functional.cross_entropy(a3, labels)
    (e3,) = torch.autograd.grad(expected_loss, a3)
    e3 = quantized(e3, format, keys[2], random.ERROR)
    e2 = quantized(e3 @ w2, format, keys[1], random.ERROR)
    e1 = e2 * (a1 > 0)
    torch.testing.assert_close(loss, expected_loss.detach())
    for got, wanted in zip(found, [e1.T @ x, e1.sum(0), e3.T @ a2.detach(), e3.sum(0)], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", ["bfp8", "fixed8.4"])
def test_every_layer_gives_and_gets_numbers_on_the_grid(name: str, format: str) -> None:
    model, x, labels = build(name)
    ql.lower(model, format, format)
    outputs: list[Tensor] = []
    errors: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        outputs.append(y.detach().clone())
        if not isinstance(module, nn.ReLU):  # rounds its error in its backward, after this hook
            y.register_hook(lambda e: errors.append(e.clone()))

    for module in model.modules():  # attention computes with the weights of its last linear layer, but does not call it
        if isinstance(module, lowering.LAYERS) and not isinstance(module, NonDynamicallyQuantizableLinear):
            module.register_forward_hook(record)
    nn.functional.cross_entropy(model(x), labels).backward()
    assert outputs
    for y in outputs:
        assert is_on_grid(y, format)
    assert errors
    for e in errors if native.available else []:  # like ReLU, the operator rounds errors in its backward
        assert is_on_grid(e, format)


def test_the_gradient_is_right_in_the_mean() -> None:
    # 400 seeds; each of 6 x 4 entries has a z-score; |z| < 4.5 for all fails by chance once in 6000 (two-sided, 24 entries)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    error = torch.randn(5, 4, generator=torch.Generator().manual_seed(3))
    drawn = []
    for seed in range(400):
        model = nn.Linear(6, 4, bias=False)
        model.weight.data.copy_(weight)
        ql.lower(model, "bfp8", "bfp4", seed=seed)
        model(x).backward(error)
        assert model.weight.grad is not None
        drawn.append(model.weight.grad)
    stack = torch.stack(drawn).double()
    z = (stack.mean(0) - (error.T @ x).double()) / (stack.std(0) / math.sqrt(len(drawn)))
    assert float(z.abs().max()) < 4.5
    assert float(stack.std(0).min()) > 0


def test_blocks_are_examples() -> None:
    small, big = (ql.lower(nn.Identity(), f, layers=nn.Identity).eval() for f in ("bfp4", "bfp4/tensor"))
    x = torch.tensor([[1.0, 0.26], [64.0, 1.0]])
    assert small(x).tolist() == [[1.0, 0.25], [64.0, 0.0]]
    assert big(x).tolist() == [[0.0, 0.0], [64.0, 0.0]]


def test_nearest_rounding_in_training() -> None:
    x = torch.randn(8, 6)
    layer = nn.Linear(6, 4)
    expected = ql.quantize(layer(x), "bfp8")
    assert torch.equal(ql.lower(layer, "bfp8", rounding="nearest")(x), expected)


def test_layers_are_chosen() -> None:
    def lowered(**choice: Any) -> list[str]:
        model, _, _ = build("resnet")
        ql.lower(model, "bfp8", **choice)
        return list(lowering.state_dict(model))

    assert all("conv" in name or "shortcut.0" in name for name in lowered(layers=nn.Conv2d))
    assert lowered(layers="blocks.0.*conv?") == ["blocks.0.conv1", "blocks.0.conv2"]
    assert lowered(layers=lambda name, module: name == "pool") == ["pool"]
    everything = lowered()
    assert set(lowered(skip=["classify", nn.BatchNorm2d])) == {
        name for name in everything if name != "classify" and "norm" not in name and "shortcut.1" not in name
    }
    model = nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1))
    assert list(lowering.state_dict(ql.lower(model, "bfp8"))) == ["0"]  # a log-likelihood belongs to the loss


def test_layers_of_one_model_can_be_lowered_separately() -> None:
    model, x, labels = build("mlp")
    other = copy.deepcopy(model)
    ql.lower(ql.lower(model, "bfp8", layers="1", rounding="nearest"), "bfp8", skip="1", rounding="nearest")
    ql.lower(other, "bfp8", rounding="nearest")
    assert same_gradients(gradients(model, x, labels), gradients(other, x, labels))
    assert not lowering.state_dict(ql.unlower(model))


# ---- random bits


def test_bits_are_counted_and_evaluation_is_rounded_to_nearest() -> None:
    model, x, _ = build("mlp")
    plain = copy.deepcopy(model)
    ql.lower(model, "bfp8", "bfp8")
    assert not torch.equal(model(x), model(x))
    counted = lowering.state_dict(model)
    assert counted == {"1": 2, "2": 2, "3": 2}
    model.eval()
    assert torch.equal(model(x), model(x))
    assert lowering.state_dict(model) == counted
    hidden = ql.quantize(plain[1](x.flatten(1)), "bfp8").relu()  # type: ignore[index]
    assert torch.equal(model(x), ql.quantize(plain[3](hidden), "bfp8"))  # type: ignore[index]


def test_the_global_generator_is_left_alone() -> None:
    model, x, labels = build("resnet")
    ql.lower(model, "bfp8", "bfp8")
    before = torch.get_rng_state()
    gradients(model, x, labels)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_restored_count_resumes_the_random_bits() -> None:
    model, x, _ = build("mlp")
    other = copy.deepcopy(model)
    ql.lower(model, "bfp8")
    model(x)
    model(x)
    ql.lower(other, "bfp8")
    lowering.load_state_dict(other, lowering.state_dict(model))
    assert torch.equal(model(x), other(x))


def test_random_bits_differ_between_seeds_layers_and_runs() -> None:
    x = torch.randn(64, 64)
    layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    ql.lower(layers, "fixed8.2", layers=nn.Identity, seed=1)
    first = nn.Identity()
    ql.lower(first, "fixed8.2", layers=nn.Identity, seed=2)
    drawn = [layers[0](x), layers[0](x), layers[1](x), first(x)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert 0.1 < float((a != b).float().mean()) < 0.9


def test_streams_and_replicas_have_random_bits_of_their_own() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def output(replica: int | None = None, **options: Any) -> Tensor:
        torch.manual_seed(0)
        model = ql.lower(nn.Sequential(nn.Linear(6, 5)), "bfp4", **options)
        if replica is not None:
            lowering.set_replica(model, replica)
            lowering.set_replica(model, replica)  # replaces the first, and is not folded into it
        y: Tensor = model(x).detach()
        return y

    plain = output(seed=2)
    assert torch.equal(plain, output(seed=2, stream=0, replica=0))
    others = [
        output(seed=2, stream=1),
        output(seed=2, replica=1),
        output(seed=2, replica=2),
        output(seed=2, stream=1, replica=1),
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate([plain, *others]) for b in others[i:])


def test_settings_name_the_stream_and_not_the_replica() -> None:
    models = [ql.lower(nn.Sequential(nn.Linear(2, 2)), "bfp8", seed=1, stream=stream) for stream in (0, 0, 4)]
    lowering.set_replica(models[1], 5)
    first, replica, stream = (lowering.settings(model)["0"] for model in models)
    assert first == replica == "activations=bfp8, errors=fp32, rounding=stochastic, seed=1"
    assert stream == f"{first}, stream=4"


# ---- mistakes


def test_lowering_twice_is_refused_and_changes_nothing() -> None:
    model, _, _ = build("mlp")
    ql.lower(model[1], "bfp8")  # type: ignore[index]
    before, hooks = repr(model), [len(m._forward_hooks) for m in model.modules()]
    with pytest.raises(ValueError, match=r"'1' is lowered already; unlower\(model\) first"):
        ql.lower(model, "bfp8")
    assert repr(model) == before
    assert [len(m._forward_hooks) for m in model.modules()] == hooks


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_scripted_modules_are_refused() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(3, 3)), nn.Linear(3, 3))
    with pytest.raises(TypeError, match="'0' is a scripted module"):
        ql.lower(model, "bfp8", layers=lambda name, module: name in "01" and name != "")
    assert not lowering.state_dict(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activations": "bfp99"}, "bits must be"),
        ({"activations": "nonsense"}, "unknown format 'nonsense'"),
        ({"activations": "bfp8", "rounding": "corrected"}, "rounding must be one of"),
        ({"activations": "bfp8", "layers": "convolution*"}, "the pattern 'convolution\\*' fits no layer"),
        ({"activations": "bfp8", "skip": "nothing.like.it"}, "fits no layer"),
        ({"activations": "bfp8", "seed": -1}, "seed must be"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    model, _, _ = build("mlp")
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        ql.lower(model, **arguments)
    assert repr(model) == before


def test_a_dtype_that_cannot_hold_the_format_is_named() -> None:
    model = ql.lower(nn.Linear(4, 4).half(), "bfp16")
    with pytest.raises(ValueError, match=r"torch.float16 cannot hold every number of bfp16"):
        model(torch.ones(2, 4, dtype=torch.float16))


def test_a_state_of_another_model_is_refused() -> None:
    model, _, _ = build("mlp")
    ql.lower(model, "bfp8", skip="3")
    with pytest.raises(ValueError, match="'3' in one only"):
        lowering.load_state_dict(model, {"1": 1, "2": 1, "3": 1})


def test_lowering_to_nothing_is_warned_of() -> None:
    with pytest.warns(ql.QLangevinWarning, match="lower rounds nothing") as caught:
        ql.lower(nn.Linear(2, 2))
    assert caught[0].filename == __file__
    ql.lower(nn.Linear(2, 2), "fp32", "fp32")
