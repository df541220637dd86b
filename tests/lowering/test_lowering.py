"""Q_A and Q_E on networks: what is rounded, with which bits, what is kept for backward, and that it can be undone."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering, native
from qlangevin.lowering import handler, operator, tensor_owners
from qlangevin.lowering.saved_tensors import SavedAsCodes, SavedCodes, SavedUnchanged
from qlangevin.quantization import operators, random
from tests.helpers.networks import CASES, build, gradients

FORMATS = ["bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4", "fp8_e5m2", "bfp16"]


def equal(a: tuple[Tensor, list[Tensor]], b: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


# ---- what is computed


@pytest.mark.parametrize("name", CASES)
def test_full_precision_is_the_plain_model_bit_for_bit(name: str) -> None:
    model, x, labels = build(name)
    plain = gradients(model, x, labels)
    model, x, labels = build(name)  # batch norm has moved its averages
    assert equal(gradients(ql.lower(model, "fp32", "fp32"), x, labels), plain)


def rounded(x: Tensor, format: str, key: ql.Key, purpose: int) -> Tensor:
    y: Tensor = operators.quantize_op(x, format, "stochastic", *operators.key_bits(key), purpose)
    return y


@pytest.mark.parametrize("format", FORMATS)
def test_algorithm_3_line_by_line(format: str) -> None:
    x, labels = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1])
    model = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))
    ql.lower(model, activations=format, errors=format, seed=3)
    loss, found = gradients(model, x, labels)

    keys = [h.next_spec(model[0]).key.at(1) for layer in model for h in handler.find_handlers(layer)]
    (w1, b1), (w2, b2) = ([p.detach() for p in model[i].parameters()] for i in (0, 2))
    a1 = rounded(x @ w1.T + b1, format, keys[0], random.ACTIVATION)
    a2 = a1.clamp_min(0)
    a3 = rounded(a2 @ w2.T + b2, format, keys[2], random.ACTIVATION).requires_grad_()
    expected_loss = nn.functional.cross_entropy(a3, labels)
    (e3,) = torch.autograd.grad(expected_loss, a3)
    e3 = rounded(e3, format, keys[2], random.ERROR)
    e2 = rounded(e3 @ w2, format, keys[1], random.ERROR)
    e1 = e2 * (a1 > 0)
    torch.testing.assert_close(loss, expected_loss.detach())
    for got, wanted in zip(found, [e1.T @ x, e1.sum(0), e3.T @ a2.detach(), e3.sum(0)], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", ["bfp8", "fixed8.4"])
def test_every_layer_gives_and_gets_numbers_on_the_grid(name: str, format: str) -> None:
    model, x, labels = build(name)
    ql.lower(model, format, format)
    seen: list[Tensor] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        seen.append(y.detach().clone())
        if not isinstance(module, nn.ReLU):  # rounds its error on the way through: it shows in the layer before
            y.register_hook(lambda e: errors.append(e.clone()))

    errors: list[Tensor] = []
    layers = ql.lowering.LAYERS
    for module in model.modules():
        if isinstance(module, layers) and not isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
            module.register_forward_hook(look)
    gradients_of = nn.functional.cross_entropy(model(x), labels)
    gradients_of.backward()
    assert len(seen) >= 1
    for y in seen:
        assert bool(ql.parse(format).is_representable(y).all())
    assert errors
    for e in errors if native.available else []:  # the operators round on the way through, like ReLU
        assert bool(ql.parse(format).is_representable(e).all())


def test_the_gradient_is_right_in_the_mean() -> None:
    # 400 keys; each of 6 x 4 entries has a z-score; |z| < 4.5 for all fails by chance once in 6000 (two-sided, 24 entries)
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


# ---- the two ways to compute it


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor", "fixed8.4"])
def test_the_kernels_and_the_operators_give_the_same_bits(name: str, format: str, threads: int) -> None:
    model, x, labels = build(name)
    ql.lower(model, format, format)
    other = copy.deepcopy(model)
    for _ in range(2):  # the second time, layers know what is saved
        fast = gradients(model, x, labels)
        with native.disabled():
            assert equal(gradients(other, x, labels), fast)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["resnet", "imagenet", "transformer", "lstm", "unet"])
def test_codes_kept_for_backward_change_nothing(name: str, format: str) -> None:
    model, x, labels = build(name)
    other = copy.deepcopy(model)
    ql.lower(model, format, format)
    ql.lower(other, format, format, save_codes=False)
    for _ in range(2):
        assert equal(gradients(model, x, labels), gradients(other, x, labels))


def test_channels_last_stays_channels_last() -> None:
    model, x, labels = build("resnet")
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = x.to(memory_format=torch.channels_last)
    ql.lower(model, "bfp8", "bfp8")
    layouts: list[bool] = []
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, ql.Quantize)):
            module.register_forward_hook(
                lambda m, a, y: layouts.append(y.is_contiguous(memory_format=torch.channels_last))
            )
    other = copy.deepcopy(model)
    first = gradients(model, x, labels)
    assert all(layouts)
    with native.disabled():
        assert equal(gradients(other, x, labels), first)


def saved_by(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    kept: list[Any] = []
    pack = SavedAsCodes.pack

    def look(self: SavedAsCodes, t: Tensor) -> Any:
        kept.append(pack(self, t))
        return kept[-1]

    monkeypatch.setattr(SavedAsCodes, "pack", look)
    model(x)
    return kept


def test_activations_are_kept_as_codes_once_and_relu_keeps_no_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
    model.append(nn.Linear(8 * 16, 5))
    ql.lower(model, "bfp8", "bfp8")
    x = torch.randn(8, 3, 8, 8)
    for _ in range(2):
        kept = saved_by(model, x, monkeypatch)
        monkeypatch.undo()
        others = [t.tensor for t in kept if isinstance(t, SavedUnchanged) and t.tensor.numel() >= 1024]
        floats = [t for t in others if t.dtype == torch.float32 and not t.requires_grad]
        codes = {c.codes.data_ptr() for c in kept if isinstance(c, SavedCodes)}
        assert [tuple(t.shape) for t in floats] == [(8, 3, 8, 8)]  # the input, which nobody rounded
        assert len(codes) == (
            3 if native.available else 4
        )  # what the first convolution gave, what relu gave, what the second convolution gave


def test_relu_lets_go_of_its_codes_after_backward() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    ql.lower(model, "bfp8", "bfp8")
    loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


# ---- random bits


def test_bits_are_counted_and_evaluation_is_rounded_to_nearest() -> None:
    model, x, _ = build("mlp")
    plain = copy.deepcopy(model)
    ql.lower(model, "bfp8", "bfp8")
    assert not torch.equal(model(x), model(x))
    counted = ql.lowering.state_dict(model)
    assert counted == {"1": 2, "2": 2, "3": 2}
    model.eval()
    assert torch.equal(model(x), model(x))
    assert ql.lowering.state_dict(model) == counted
    hidden = ql.quantize(plain[1](x.flatten(1)), "bfp8").relu()  # type: ignore[index]
    assert torch.equal(model(x), ql.quantize(plain[3](hidden), "bfp8"))  # type: ignore[index]


def test_the_global_generator_is_left_alone() -> None:
    model, x, labels = build("resnet")
    ql.lower(model, "bfp8", "bfp8")
    before = torch.get_rng_state()
    gradients(model, x, labels)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_restored_count_goes_on_with_the_same_bits() -> None:
    model, x, _ = build("mlp")
    other = copy.deepcopy(model)
    ql.lower(model, "bfp8")
    model(x)
    model(x)
    ql.lower(other, "bfp8")
    ql.lowering.load_state_dict(other, ql.lowering.state_dict(model))
    assert torch.equal(model(x), other(x))


def test_seeds_layers_and_the_uses_of_one_layer_differ() -> None:
    x = torch.randn(64, 64)
    layers = nn.ModuleList([nn.Identity(), nn.Identity()])
    ql.lower(layers, "fixed8.2", layers=nn.Identity, seed=1)
    first = nn.Identity()
    ql.lower(first, "fixed8.2", layers=nn.Identity, seed=2)
    drawn = [layers[0](x), layers[0](x), layers[1](x), first(x)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert 0.1 < float((a != b).float().mean()) < 0.9


def test_nearest_rounding_in_training() -> None:
    x = torch.randn(8, 6)
    layer = nn.Linear(6, 4)
    expected = ql.quantize(layer(x), "bfp8")
    assert torch.equal(ql.lower(layer, "bfp8", rounding="nearest")(x), expected)


# ---- a module like any other


def test_it_shows_and_can_be_undone() -> None:
    for name in CASES:
        model, _, _ = build(name)
        text, keys = repr(model), list(model.state_dict())
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
        attributes = [set(m.__dict__) for m in model.modules()]
        ql.lower(model, "bfp8", "fixed8.4")
        assert "activations=bfp8, errors=fixed8.4" in repr(model)
        assert list(model.state_dict()) == keys
        ql.unlower(model)
        assert repr(model) == text
        assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
        assert [set(m.__dict__) for m in model.modules()] == attributes
        ql.lower(model, "bfp8")


def test_a_deep_copy_counts_for_itself() -> None:
    for name in ["mlp", "lstm", "resnet"]:
        model, x, labels = build(name)
        ql.lower(model, "bfp8", "bfp8")
        other = copy.deepcopy(model)
        first = gradients(model, x, labels)
        assert set(ql.lowering.state_dict(other).values()) == {0}
        assert equal(gradients(other, x, labels), first)


@pytest.mark.parametrize("name", ["mlp", "resnet", "lstm", "transformer"])
def test_functional_call(name: str) -> None:
    model, x, _ = build(name)
    ql.lower(model, "bfp8")
    other = copy.deepcopy(model)
    values = {name: p.detach() * 1.5 for name, p in model.named_parameters()}
    expected = torch.func.functional_call(model, values, (x,))
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    assert torch.equal(other(x), expected)


def test_layers_are_chosen() -> None:
    def lowered(**choice: Any) -> list[str]:
        model, _, _ = build("resnet")
        ql.lower(model, "bfp8", **choice)
        return list(ql.lowering.state_dict(model))

    assert all("conv" in name or "shortcut.0" in name for name in lowered(layers=nn.Conv2d))
    assert lowered(layers="blocks.0.*conv?") == ["blocks.0.conv1", "blocks.0.conv2"]
    assert lowered(layers=lambda name, module: name == "pool") == ["pool"]
    everything = lowered()
    assert set(lowered(skip=["classify", nn.BatchNorm2d])) == {
        name for name in everything if name != "classify" and "norm" not in name and "shortcut.1" not in name
    }
    model = nn.Sequential(nn.Linear(3, 3), nn.LogSoftmax(1))
    assert list(ql.lowering.state_dict(ql.lower(model, "bfp8"))) == ["0"]  # a log-likelihood is no activation


def test_a_failing_forward_leaves_nothing_behind() -> None:
    model, x, _ = build("mlp")
    ql.lower(model, "bfp8")
    with pytest.raises(RuntimeError):
        model(x[:, :1])
    assert SavedAsCodes.innermost() is None
    saved: list[Tensor] = []
    y = torch.ones(2000, requires_grad=True) * torch.ones(2000)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        y.square()
    assert isinstance(saved[0], Tensor)


@pytest.mark.parametrize("name", [name for name in CASES if name != "imagenet"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # where torch cannot: LSTM
def test_it_compiles(name: str) -> None:
    model, x, labels = build(name)
    ql.lower(model, "bfp8", "bfp8")
    other = copy.deepcopy(model)
    compiled: Any = torch.compile(other, backend="aot_eager")
    for _ in range(2):
        assert equal(gradients(compiled, x, labels), gradients(model, x, labels))
    assert ql.lowering.state_dict(other) == ql.lowering.state_dict(model)
    assert name == "lstm" or not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.skipif(not native.available, reason="there may be no compiler")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # torch's own
def test_it_compiles_to_machine_code() -> None:
    model, x, labels = build("mlp")
    ql.lower(model, "bfp8", "bfp8")
    other = copy.deepcopy(model)
    compiled: Any = torch.compile(other)
    for _ in range(2):
        torch.testing.assert_close(gradients(compiled, x, labels), gradients(model, x, labels))
    torch._dynamo.reset()


# ---- other people's tensors


def test_errors_of_others_are_not_written_to() -> None:
    layer = ql.lower(nn.Linear(40, 40), errors="bfp4")
    mine = torch.randn(30, 40)
    before = mine.clone()
    layer(torch.randn(30, 40)).backward(mine)
    assert torch.equal(mine, before)

    seen: list[Tensor] = []
    x = torch.randn(30, 40)
    y = layer(x)
    z = y * 2.0
    z.register_hook(lambda e: seen.append(e))
    kept = torch.randn(30, 40)
    (z * kept).sum().backward()
    assert torch.equal(seen[0], kept)

    branches = ql.lower(nn.ModuleList([nn.Linear(40, 40, bias=False), nn.Linear(40, 40, bias=False)]), errors="bfp4")
    a, b = branches[0](x), branches[1](x)  # one error for two layers, each with its own random bits
    (a + b).backward(mine)
    grads = [layer.weight.grad for layer in branches]
    assert isinstance(grads[0], Tensor)
    assert isinstance(grads[1], Tensor)
    assert not torch.equal(grads[0], grads[1])
    assert torch.equal(mine, before)


def test_the_derivative_of_a_derivative() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    ql.lower(model, "bfp16", "bfp16")
    x = torch.randn(4, 6, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    ql.unlower(model).zero_grad()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    wanted = [p.grad for p in model.parameters() if p.grad is not None]
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def test_a_layer_that_needs_its_own_output_is_rounded_beside_it() -> None:
    class Gate(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).sigmoid()

    gate = Gate(5, 5)
    x = torch.randn(3, 5)
    s = gate(x).detach()
    ql.lower(gate, "fixed8.1")
    gate(x).sum().backward()
    assert gate.bias.grad is not None
    torch.testing.assert_close(gate.bias.grad, (s * (1 - s)).sum(0))


def test_what_is_changed_before_backward_is_noticed() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).sigmoid().mul_(2.0)  # type: ignore[no-any-return]

    x = torch.randn(64, 64)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ql.lower(Doubled(), "fixed16.12")(x).sum().backward()
    for pack in (False, True):
        model = ql.lower(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "bfp8", rounding="nearest")
        model = ql.pack(model, "bfp8") if pack else model
        y = model(x).sum()
        sampler = ql.SGLD(model.parameters(), 0.1, 100, weights="bfp8")
        for p in model.parameters():
            p.grad = torch.ones(p.shape)
        sampler.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


@pytest.mark.parametrize("kind", ["input", "constant", "sigmoid", "global", "forward"])
def test_what_somebody_else_has_seen_is_not_written_to(kind: str) -> None:
    layer, x, mine = nn.Linear(20, 20), torch.randn(20, 20), torch.randn(20, 20)
    before = (x.clone(), mine.clone())
    seen: list[tuple[Tensor, Tensor]] = []
    if kind == "forward":
        layer.forward = lambda input: mine  # type: ignore[method-assign]
    elif kind != "global":
        give = {"input": lambda m, a, y: a[0], "constant": lambda m, a, y: mine, "sigmoid": lambda m, a, y: y.sigmoid()}
        layer.register_forward_hook(give[kind])
    ql.lower(layer, "fixed8.1")
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, y: seen.append((y, y.detach().clone())))
    y = layer(x)
    handle.remove()
    assert torch.equal(x, before[0])
    assert torch.equal(mine, before[1])
    assert kind == "sigmoid" or all(torch.equal(*pair) for pair in seen)
    if kind == "sigmoid":
        s = torch.nn.functional.linear(x, layer.weight, layer.bias).sigmoid().detach()
        (found,) = torch.autograd.grad(y.sum(), layer.bias)
        torch.testing.assert_close(found, (s * (1 - s)).sum(0))


@pytest.mark.parametrize("format", ["bfp8", "fixed8.4", "fp8_e5m2"])
def test_a_nan_reaches_the_gradient(format: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    with torch.no_grad():
        model.get_parameter("0.bias")[3] = torch.nan
    ql.lower(model, format, format)
    other, x = copy.deepcopy(model), torch.randn(64, 64)
    for _ in range(2):
        for one in (model, other):
            one.zero_grad()
            with native.disabled() if one is other else contextlib.nullcontext():
                one(x).sum().backward()
        spoilt = [one.get_parameter("2.weight").grad for one in (model, other)]
        assert spoilt[0] is not None
        assert spoilt[1] is not None
        assert spoilt[0].isnan().any()
        assert torch.equal(spoilt[0].isnan(), spoilt[1].isnan())


def test_a_forward_of_ones_own_is_kept() -> None:
    layer = nn.Conv2d(3, 4, 3)
    layer.forward = MethodType(lambda self, x: torch.full((1, 4), 0.3), layer)  # type: ignore[method-assign]
    x = torch.randn(2, 3, 8, 8)
    assert ql.lower(layer, "fixed8.1").eval()(x).tolist() == [[0.5] * 4]
    assert ql.unlower(layer)(x).shape == (1, 4)


def test_inference_mode_and_disabled_hooks() -> None:
    model, x, _ = build("resnet")
    ql.lower(model, "bfp8", "bfp8").eval()
    expected = model(x)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        assert torch.equal(model(x), expected)


def test_layers_of_one_model_can_be_lowered_one_after_the_other() -> None:
    model, x, labels = build("mlp")
    other = copy.deepcopy(model)
    ql.lower(ql.lower(model, "bfp8", layers="1", rounding="nearest"), "bfp8", skip="1", rounding="nearest")
    ql.lower(other, "bfp8", rounding="nearest")
    assert equal(gradients(model, x, labels), gradients(other, x, labels))
    assert not ql.lowering.state_dict(ql.unlower(model))


def test_layers_of_one_model_in_different_formats() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    other = copy.deepcopy(model)
    for one, save_codes in ((model, True), (other, False)):
        ql.lower(one, "fixed8.1", layers="0", save_codes=save_codes)
        ql.lower(one, "bfp8", "bfp8", skip="0", seed=1, save_codes=save_codes)
    x, labels = torch.randn(64, 64), torch.randint(64, (64,))
    for _ in range(2):
        assert equal(gradients(model, x, labels), gradients(other, x, labels))


def test_pooling_that_somebody_changes_is_rounded() -> None:
    pool = nn.MaxPool1d(2)
    pool.register_forward_hook(lambda module, args, y: y * 0.3)
    model = ql.lower(nn.Sequential(nn.Linear(8, 8), pool), "bfp8")
    assert bool(ql.parse("bfp8").is_representable(model(torch.randn(4, 8)).detach()).all())


def test_a_pickled_model_computes_the_same() -> None:
    for name in ["resnet", "lstm"]:
        model, x, labels = build(name)
        ql.lower(model, "bfp8", "bfp8")
        other = pickle.loads(pickle.dumps(model))
        assert equal(gradients(other, x, labels), gradients(model, x, labels))


def test_transposed_outputs_keep_their_layout_compiled_and_not() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.here = ql.Quantize()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.here((x * 2).t())
            return y * 2

    model = ql.lower(Turned(), "bfp8", "bfp8")
    x = torch.randn(16, 32)
    with torch.no_grad():
        y = copy.deepcopy(model)(x)
        fake = torch.library.opcheck(
            operator.lower_op,
            ((x * 2).t(), "bfp8", "bfp8", "nearest", 0, 0, torch.tensor(1)),
            test_utils="test_faketensor",
        )
        assert fake == {"test_faketensor": "SUCCESS"}
        with native.disabled():
            assert torch.equal(model(x), y)
            assert y.stride() == (1, 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = ql.lower(nn.Sequential(nn.Tanh(), nn.LayerNorm(8), nn.ReLU()), "bfp8e7", "bfp8e7").to(dtype)
    x = torch.randn(4, 8, dtype=dtype, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == y.dtype == dtype
    assert bool(ql.parse("bfp8e7").is_representable(y.detach().float()).all())


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
def test_convolutions_have_the_gradients_they_had(layer: nn.Module, shape: tuple[int, ...], frozen: str) -> None:
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


# ---- recurrent layers


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
def test_recurrent_modules_are_the_same_layer_by_layer(kind: Any, options: dict[str, Any]) -> None:
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
    assert ql.lowering.state_dict(rnn) == {"": 5}  # three layers and two final states
    for t in (y, h, c):
        assert bool(ql.parse("bfp8/tensor").is_representable(t.detach()).all())


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
    assert not ql.lowering.state_dict(model)


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
def test_mistakes_are_named(arguments: dict[str, Any], message: str) -> None:
    model, _, _ = build("mlp")
    before = repr(model)
    with pytest.raises(ValueError, match=message):
        ql.lower(model, **arguments)
    assert repr(model) == before


def test_a_dtype_that_cannot_hold_the_format_is_named() -> None:
    model = ql.lower(nn.Linear(4, 4).half(), "bfp8")
    with pytest.raises(ValueError, match=r"torch.float16 cannot hold every number of bfp8"):
        model(torch.ones(2, 4, dtype=torch.float16))


def test_a_state_of_another_model_is_refused() -> None:
    model, _, _ = build("mlp")
    ql.lower(model, "bfp8", skip="3")
    with pytest.raises(ValueError, match="'3' in one only"):
        ql.lowering.load_state_dict(model, {"1": 1, "2": 1, "3": 1})


def test_a_tensor_is_overwritten_only_if_nobody_else_has_it() -> None:
    assert not tensor_owners.only_autograd_holds(torch.ones(3), "hook")
    assert not tensor_owners.only_autograd_holds(torch.ones(4, 4)[:2], "backward")


def test_streams_and_replicas_round_with_bits_of_their_own() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))

    def output(replica: int | None = None, **options: Any) -> Tensor:
        torch.manual_seed(0)
        model = ql.lower(nn.Sequential(nn.Linear(6, 5)), "bfp4", **options)
        if replica is not None:
            lowering.set_replica(model, replica)
            lowering.set_replica(model, replica)  # which is not added to
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


def test_how_a_model_is_lowered_says_the_stream_and_not_the_replica() -> None:
    models = [ql.lower(nn.Sequential(nn.Linear(2, 2)), "bfp8", seed=1, stream=stream) for stream in (0, 0, 4)]
    lowering.set_replica(models[1], 5)
    first, replica, stream = (lowering.settings(model)["0"] for model in models)
    assert first == replica == "activations=bfp8, errors=fp32, rounding=stochastic, seed=1"
    assert stream == f"{first}, stream=4"
