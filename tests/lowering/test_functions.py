"""Functions that a lowered model calls: rounded like layers, with their bits, and left alone where rounding would be wrong."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import lowering, native
from qlangevin.lowering.functions import ScopedForward, find_scope
from qlangevin.lowering.handler import find_handler
from qlangevin.quantization import operators, random
from tests.helpers.networks import gradients, is_on_grid, same_gradients

LABELS = torch.tensor([0, 1, 2, 0])


class Functional(nn.Module):
    """A residual network whose sum, activations and pooling are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.classify = nn.BatchNorm2d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.conv1(x)))
        y = self.conv2(x)
        y += x
        y = F.avg_pool2d(F.max_pool2d(F.relu(y), 2), 4)
        return self.classify(y.flatten(1))  # type: ignore[no-any-return]


class Modular(Functional):
    """The same network made of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.relu1, self.relu2, self.sum = nn.ReLU(), nn.ReLU(), ql.Quantize()
        self.max, self.mean = nn.MaxPool2d(2), nn.AvgPool2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.norm(self.conv1(x)))
        y = self.sum(self.conv2(x) + x)
        return self.classify(self.mean(self.max(self.relu2(y))).flatten(1))  # type: ignore[no-any-return]


def image() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def pair() -> tuple[nn.Module, nn.Module]:
    """Return the network of functions and that of modules, with the same weights."""
    torch.manual_seed(0)
    modular, functional = Modular(), Functional()
    functional.load_state_dict(modular.state_dict())
    return functional, modular


class Wrapped(nn.Module):
    """A linear layer and a function of its output."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.layer(x))  # type: ignore[no-any-return]


def names(model: nn.Module) -> set[str]:
    return {name for name in lowering.state_dict(model) if "/" in name}


# ---- numbers


@pytest.mark.parametrize("channels_last", [False, True])
def test_functions_compute_what_modules_compute(channels_last: bool) -> None:
    functional, modular = pair()
    x = image()
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
        functional.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        modular.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ql.lower(functional, "bfp8", "bfp8", rounding="nearest")
    ql.lower(modular, "bfp8", "bfp8", rounding="nearest", functions=False)
    found, expected = gradients(functional, x, LABELS), gradients(modular, x, LABELS)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor", "fixed8.4", "fp8_e5m2"])
def test_a_function_rounds_its_result_and_its_error_line_by_line(format: str) -> None:
    torch.manual_seed(0)
    model = Wrapped(lambda self, y: F.silu(y))
    x, error = torch.randn(5, 6), torch.randn(5, 6)
    ql.lower(model, format, format, seed=3)
    y = model(x)
    y.backward(error)

    scope = find_scope(model)
    assert scope is not None
    handler, layer = scope.handlers["silu/0"], find_handler(model.layer)
    assert layer is not None
    keys = [ql.Key(h.seed, h.stream, 1) for h in (layer, handler)]

    def quantized(t: Tensor, key: ql.Key, purpose: int) -> Tensor:
        return operators.quantize_op(t, format, "stochastic", *operators.key_bits(key), purpose)  # type: ignore[no-any-return]

    weight, bias = model.layer.weight.detach(), model.layer.bias.detach()
    a = quantized(x @ weight.T + bias, keys[0], random.ACTIVATION).requires_grad_()
    plain = F.silu(a)
    assert torch.equal(y, quantized(plain.detach(), keys[1], random.ACTIVATION))
    (e,) = torch.autograd.grad(plain, a, quantized(error, keys[1], random.ERROR))
    e = quantized(e, keys[0], random.ERROR)
    assert model.layer.weight.grad is not None
    torch.testing.assert_close(model.layer.weight.grad, e.T @ x)


def test_a_sum_is_right_in_the_mean() -> None:
    # 400 seeds, 5 x 6 entries: all |z| < 4.5 fails by chance once in 5000
    torch.manual_seed(0)
    plain = Wrapped(lambda self, y: y + self.layer.bias)
    x = torch.randn(5, 6)
    drawn = []
    for seed in range(400):
        model = ql.lower(copy.deepcopy(plain), "bfp4", skip="layer", seed=seed)
        drawn.append(model(x).detach())
    stack = torch.stack(drawn).double()
    z = (stack.mean(0) - plain(x).detach().double()) / (stack.std(0) / 20).clamp_min(1e-9)
    assert float(z[stack.std(0) > 0].abs().max()) < 4.5
    assert int((stack.std(0) > 0).sum()) > 15


def test_the_kernels_and_the_pytorch_path_agree() -> None:
    functional, _ = pair()
    ql.lower(functional, "bfp8", "bfp8")
    other = copy.deepcopy(functional)
    first = gradients(functional, image(), LABELS)
    with native.disabled():
        assert same_gradients(gradients(other, image(), LABELS), first)


def test_codes_change_no_number() -> None:
    functional, _ = pair()
    other = copy.deepcopy(functional)
    ql.lower(functional, "bfp8", "bfp8")
    ql.lower(other, "bfp8", "bfp8", save_codes=False)
    for _ in range(2):
        assert same_gradients(gradients(functional, image(), LABELS), gradients(other, image(), LABELS))


FUNCTIONS: dict[str, Any] = {
    "relu": lambda self, y: torch.relu(y),
    "relu in place": lambda self, y: F.relu(y, inplace=True),
    "gelu": lambda self, y: F.gelu(y),
    "sigmoid": lambda self, y: y.sigmoid(),
    "softmax": lambda self, y: y.softmax(-1),
    "product": lambda self, y: y * torch.tanh(y),
    "layer scale": lambda self, y: y * self.layer.bias,
    "sum": lambda self, y: torch.add(y, F.silu(y)),
    "sum in place": lambda self, y: y.add_(self.layer.bias),
    "difference": lambda self, y: y - F.silu(y),
    "cat": lambda self, y: torch.cat([y, F.silu(y)], 1),
    "stack": lambda self, y: torch.stack([y, F.silu(y)], 1),
    "matmul": lambda self, y: y @ self.layer.weight,
    "einsum": lambda self, y: torch.einsum("ni,oi->no", y, self.layer.weight),
    "baddbmm": lambda self, y: torch.baddbmm(y[:, None], y[:, None], y[:, :, None] * y[:, None]).squeeze(1),
    "linear": lambda self, y: F.linear(y, self.layer.weight, self.layer.bias),
    "layer_norm": lambda self, y: F.layer_norm(y, (6,)),
    "rms_norm": lambda self, y: F.rms_norm(y, (6,)),
    "batch_norm": lambda self, y: F.batch_norm(y, None, None, training=True),
    "pooling": lambda self, y: F.avg_pool1d(y[:, None], 2).flatten(1),
    "mean": lambda self, y: y.view(5, 2, 3).mean(1),
    "attention": lambda self, y: F.scaled_dot_product_attention(*[y.view(5, 1, 3, 2)] * 3).flatten(1),
    "dropout": lambda self, y: F.dropout(y, 0.3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_on_the_grid(name: str) -> None:
    torch.manual_seed(0)
    model = ql.lower(Wrapped(FUNCTIONS[name]), "bfp8", "bfp8")
    y = model(torch.randn(5, 6))
    assert is_on_grid(y, "bfp8")
    y.square().sum().backward()
    assert model.layer.weight.grad is not None
    assert bool(model.layer.weight.grad.isfinite().all())
    assert names(model)


def test_an_ignored_result_in_place_is_rounded_too() -> None:
    def add(self: Any, y: Tensor) -> Tensor:
        y.add_(self.layer.bias)
        return y

    for context in (native.disabled(), torch.enable_grad()):
        torch.manual_seed(0)
        model = ql.lower(Wrapped(add), "bfp8", "bfp8")
        with context:
            y = model(torch.randn(5, 6))
        assert is_on_grid(y, "bfp8")
        assert "/add/0" in names(model)


# ---- what is left alone


LEFT_ALONE: dict[str, Any] = {
    "views": lambda self, y: y.view(3, 10)[1:].transpose(0, 1),
    "numbers": lambda self, y: (y + 1.5) * 0.3 / 7,
    "masks": lambda self, y: y + torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, float("-inf")]),
    "positions": lambda self, y: y * torch.arange(6.0).cos(),
    "losses": lambda self, y: (y.sum(1) + y.mean(1)).mean(),
    "norms by hand": lambda self, y: y.pow(2).mean(-1, keepdim=True).sqrt(),
    "log-softmax": lambda self, y: F.log_softmax(y, 1),
    "dropout of nothing": lambda self, y: F.dropout(y, 0.5, training=False),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    model = Wrapped(LEFT_ALONE[name])
    x = torch.randn(5, 6)
    ql.lower(model, "bfp8", "bfp8", rounding="nearest")
    hidden = ql.quantize(F.linear(x, model.layer.weight, model.layer.bias), "bfp8")
    torch.testing.assert_close(model(x), LEFT_ALONE[name](model, hidden), rtol=0, atol=0)
    assert not names(model)


def test_masked_scores_are_not_rounded_until_their_softmax() -> None:
    mask = torch.full((6,), torch.finfo(torch.float32).min).where(torch.arange(6) > 3, 0.0)
    model = Wrapped(lambda self, y: F.softmax(y + (self.table(torch.arange(6)).T + mask), -1))
    model.table = nn.Embedding(6, 1)
    ql.lower(model, "bfp8", "bfp8")
    y = model(torch.randn(5, 6)).detach()
    assert names(model) == {"/softmax/0"}
    assert float(y[:, 4:].max()) == 0
    torch.testing.assert_close(y.sum(1), torch.ones(5), rtol=0, atol=0.05)
    assert float(y[:, :4].std()) > 0


def test_a_buffer_of_positions_is_a_constant_and_one_with_infinities_a_mask() -> None:
    for table, rounded in ((torch.ones(6), {"/add/0"}), (torch.full((6,), float("-inf")), set())):
        model = Wrapped(lambda self, y: y + self.table[:6])
        model.register_buffer("table", table)
        ql.lower(model, "bfp8")(torch.randn(5, 6))
        assert names(model) == rounded


# ---- which


def test_functions_are_chosen() -> None:
    def lowered(**choice: Any) -> set[str]:
        model = ql.lower(Functional(), "bfp8", **choice)
        model(image())
        return {name.split("/")[1] for name in names(model)}

    assert lowered() == {"relu", "add", "max_pool2d", "avg_pool2d"}
    assert lowered(functions=False) == set()
    assert lowered(functions=["add", F.relu]) == {"relu", "add"}
    assert lowered(functions=Tensor.add_) == {"add"}
    assert lowered(skip_functions="add") == {"relu", "max_pool2d", "avg_pool2d"}
    assert lowered(skip="") == set()  # the forward of the model itself
    assert lowered(layers=lowering.LAYERS) == set()
    with pytest.raises(
        ValueError, match="functions has 'fft', which is no function that can be lowered; known are linear"
    ):
        ql.lower(Functional(), "bfp8", functions="fft")


def test_the_documentation_names_every_function() -> None:
    table = (Path(__file__).parents[2] / "docs" / "lowering.md").read_text()
    assert [name for name in lowering.FUNCTIONS if f"`{name}`" not in table] == []


def test_functions_inside_a_layer_are_not_rounded_again() -> None:
    model = nn.Sequential(Functional(), nn.Linear(3, 3))
    ql.lower(model, "bfp8")
    model(image())
    assert {name.rsplit("/", 2)[0] for name in names(model)} == {"0"}
    counts = lowering.state_dict(model)
    assert all(counts[name] == 1 for name in counts)


def test_parts_with_formats_of_their_own() -> None:
    model = nn.ModuleDict({"a": Functional(), "b": Functional()})
    ql.lower(model, "bfp8", layers="a*")
    ql.lower(model, "bfp4", layers="b*")
    for name, format in (("a", "bfp8"), ("b", "bfp4")):
        scope = find_scope(model[name])
        assert scope is not None
        assert scope.settings.activations == format


def test_unlower_removes_everything() -> None:
    model = Functional()
    before = gradients(copy.deepcopy(model), image(), LABELS)
    ql.unlower(ql.lower(model, "bfp8", "bfp8"))
    assert same_gradients(gradients(model, image(), LABELS), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in m.__dict__ for m in model.modules())


# ---- random bits


def test_counts_are_saved_and_evaluation_is_not_counted() -> None:
    model = ql.lower(Functional(), "bfp8", "bfp8")
    assert "/relu/1" not in lowering.state_dict(model)
    model(image())
    assert lowering.state_dict(model)["/relu/1"] == 1
    model.eval()
    assert torch.equal(model(image()), model(image()))
    assert lowering.state_dict(model)["/relu/1"] == 1


def test_a_restored_count_resumes_functions_that_have_not_been_called_yet() -> None:
    model = Functional()
    other = copy.deepcopy(model)
    ql.lower(model, "bfp8", "bfp8")
    model(image())
    ql.lower(other, "bfp8", "bfp8")
    other.load_state_dict(model.state_dict())
    lowering.load_state_dict(other, lowering.state_dict(model))
    assert lowering.state_dict(other) == lowering.state_dict(model)
    assert torch.equal(model(image()), other(image()))
    lowering.load_state_dict(
        model, {n: 0 for n in lowering.state_dict(model) if "/" not in n}
    )  # a state without functions
    assert "/add/0" not in lowering.state_dict(model)
    with pytest.raises(ValueError, match="'block/' in one only"):
        lowering.load_state_dict(model, lowering.state_dict(model) | {"block/add/0": 1})


def test_settings_do_not_depend_on_which_functions_have_been_called() -> None:
    model = ql.lower(Functional(), "bfp8", "bfp8", stream=2)
    before = lowering.settings(model)
    model(image())
    assert lowering.settings(model) == before
    expected = "activations=bfp8, errors=bfp8, rounding=stochastic, seed=0, stream=2, functions: all functions"
    assert before["/"] == expected


def test_calls_replicas_and_seeds_have_bits_of_their_own() -> None:
    def draw(replica: int = 0, seed: int = 0) -> list[Tensor]:
        torch.manual_seed(0)
        model = Wrapped(lambda self, y: torch.stack([y + self.layer.bias, y + self.layer.bias]))
        ql.lower(model, "bfp4", skip="layer", skip_functions="stack", seed=seed)
        lowering.set_replica(model, replica)
        x = torch.randn(32, 6)
        return [*model(x).detach(), *model(x).detach()]

    drawn = [*draw(), *draw(1)[:1], *draw(seed=1)[:1]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    assert all(torch.equal(a, b) for a, b in zip(draw(1), draw(1), strict=True))


def test_copies_and_pickles_go_on_with_the_same_bits() -> None:
    model = ql.lower(Functional(), "bfp8", "bfp8")
    model(image())
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = model(image())
    assert all(torch.equal(other(image()), expected) for other in others)


# ---- surroundings


def test_a_part_can_be_called_alone() -> None:
    model = nn.ModuleDict({"part": Functional()})
    ql.lower(model, "bfp8")
    model["part"](image())
    assert "part/add/0" in names(model)


def test_an_error_inside_a_layer_leaves_no_mode_behind() -> None:
    model = ql.lower(Functional(), "bfp8")
    with pytest.raises(RuntimeError):
        model(torch.randn(4, 5, 8, 8))
    assert torch._C._len_torch_function_stack() == 0
    model(image())
    assert names(model)


def test_a_mode_of_the_user_keeps_its_place() -> None:
    model = ql.lower(Functional(), "bfp8")
    with torch.device("cpu"):
        depth = torch._C._len_torch_function_stack()
        model(image())
        assert torch._C._len_torch_function_stack() == depth
    assert "/avg_pool2d/0" in names(model)


def test_the_first_forward_may_be_without_gradients_or_in_vmap() -> None:
    model = ql.lower(Functional(), "bfp8")
    with torch.inference_mode():
        model(image())
    model(image()).sum().backward()
    model.eval()
    batch = torch.stack([image(), -image()])
    expected = torch.stack([model(x) for x in batch])
    torch.testing.assert_close(torch.vmap(model)(batch), expected, rtol=0, atol=0.02)


def test_functional_call_rounds_the_same_functions() -> None:
    model = Wrapped(lambda self, y: y + self.places)
    model.places = nn.Parameter(torch.randn(6))
    ql.lower(model, "bfp8").eval()
    state = {name: p.detach() for name, p in model.named_parameters()}
    x = torch.randn(5, 6)
    assert torch.equal(torch.func.functional_call(model, state, (x,)), model(x))


def test_compiled_code_leaves_functions_alone_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering.functions, "_warned", set())
    model = Wrapped(lambda self, y: F.silu(y))
    ql.lower(model, "bfp8", "bfp8", rounding="nearest")
    x = torch.randn(5, 6)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.warns(ql.QLangevinWarning, match="torch.compile does not see the functions"):
        y = compiled(x)
    compiled(x)
    assert torch.equal(y, F.silu(ql.quantize(model.layer(x), "bfp8")))
    assert not names(model)


def test_a_plain_sequence_needs_no_mode() -> None:
    model = ql.lower(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), "bfp8")
    assert not any(
        isinstance(m.__dict__.get("forward"), ScopedForward) or m._forward_pre_hooks for m in model.modules()
    )
