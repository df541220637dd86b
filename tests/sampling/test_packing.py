"""Packed models: one byte a weight, the same chain, and the same model to everybody else."""

import copy
import gc
import io
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, FixedPoint, QTensor, encode, native, pack, parse, quantize, unpack
from qlangevin.quantization.operators import Rounding

FORMATS = ["bfp8", "bfp8/tensor", "bfp8/32", "fixed8.6", "fp8_e4m3", "bfp4"]
ROUNDINGS: list[Rounding] = ["corrected", "stochastic", "nearest"]


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> Iterator[None]:
    """Packing looks for optimizers among all objects: among fewer, if those of imported modules are set aside."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Recurrent(nn.Module):
    """Words in, words out, one matrix for both."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.recurrent = recurrent
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.recurrent(self.embedding(words))[0])
        return output


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        *[nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, stride=2)],
        *[nn.GroupNorm(1, 2), nn.PReLU(), nn.Flatten(), nn.Linear(2 * 64, 3)],
    )


def attentive() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 6), layer, nn.Linear(6, 3))


WORDS = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
INPUT = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, INPUT),
    "convolutional": (convolutional, IMAGES),
    "lstm, tied": (lambda: Recurrent(nn.LSTM(6, 3, bidirectional=True, batch_first=True)), WORDS),
    "gru, tied": (lambda: Recurrent(nn.GRU(6, 6, batch_first=True)), WORDS),
    "attentive": (attentive, WORDS),
}


def build(name: str = "mlp") -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    make, x = MODELS[name]
    return make(), x


@cache
def _packed(format: str, name: str, rounding: Rounding) -> nn.Module:
    model, _ = build(name)
    pack(model, format, rounding=rounding, seed=5)
    return model  # type: ignore[no-any-return]


def packed(format: str = "bfp8", name: str = "mlp", rounding: Rounding = "stochastic") -> tuple[Any, Tensor]:
    return copy.deepcopy(_packed(format, name, rounding)), MODELS[name][1]


def sampler_of(model: nn.Module, **settings: Any) -> SGLD:
    given: dict[str, Any] = {"lr": 0.1, "num_data": 1000, "weight_decay": 1e-3, "gradients": "bfp8/tensor", "seed": 5}
    return SGLD(model.named_parameters(), **given | settings)


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


def run(model: nn.Module, x: Tensor, sampler: SGLD, steps: int = 10) -> None:
    for _ in range(steps):
        sampler.zero_grad()
        backward(model, x)
        sampler.step()


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """The weights, and whatever else the model carries."""
    return {name: t + 0 if isinstance(t, QTensor) else t.clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(type(b[k]) is Tensor and torch.equal(a[k], b[k]) for k in a)


# ---- packing and back


@pytest.mark.parametrize(
    ("name", "format"), [*(("mlp", format) for format in FORMATS), *((name, "bfp8") for name in list(MODELS)[1:])]
)
def test_packing_and_unpacking(name: str, format: str) -> None:
    model, x = build(name)
    before, names = numbers(model), [n for n, _ in model.named_parameters()]
    assert pack(model, format, rounding="nearest") is model
    assert [n for n, _ in model.named_parameters()] == names
    for key, p in model.named_parameters():
        assert isinstance(p, QTensor)
        assert isinstance(p, nn.Parameter)
        assert p.requires_grad
        assert p.format == parse(format)
        assert torch.equal(p, quantize(before[key], format))
    output = model(x)
    rounded = numbers(model)
    assert unpack(model) is model
    assert [n for n, _ in model.named_parameters()] == names
    assert all(type(p) is nn.Parameter and p.requires_grad for p in model.parameters())
    assert same(numbers(model), rounded)
    assert torch.equal(model(x), output)
    parameters = list(model.parameters())
    unpack(model)  # once more changes nothing
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))


@pytest.mark.parametrize("path", [native.disabled, torch.no_grad])
def test_stochastic_rounding_repeats_and_seeds_differ(path: Any) -> None:
    with path():
        models = [pack(build()[0], "bfp8", seed=seed) for seed in (3, 3, 4)]
    assert same(numbers(models[0]), numbers(models[1]))
    assert not same(numbers(models[0]), numbers(models[2]))
    assert not torch.equal(models[0][0].weight, quantize(build()[0][0].weight, "bfp8"))


def test_one_byte_a_weight() -> None:
    model = pack(nn.Sequential(nn.Linear(64, 32), nn.Conv2d(4, 8, 3), nn.Embedding(10, 16)), "fixed8.6")
    assert sum(p.nbytes for p in model.parameters()) == sum(p.numel() for p in model.parameters())
    layer = pack(nn.Linear(64, 32), "bfp8")
    assert (layer.weight.nbytes, layer.bias.nbytes) == (64 * 32 + 32, 32 + 1)  # and an exponent a block
    assert pack(nn.Linear(64, 32), "bfp4").weight.nbytes == 64 * 32 // 2 + 32
    held = [v for v in sampler_of(layer).state[layer.weight].values() if isinstance(v, Tensor)]
    assert held == []  # the sampler has no other copy


def test_frozen_parameters_stay() -> None:
    model, x = build()
    frozen = model[0].weight.requires_grad_(False)
    before = frozen.clone()
    pack(model, "bfp8")
    assert model[0].weight is frozen
    assert isinstance(model[0].bias, QTensor)
    run(model, x, sampler_of(model), 2)
    assert torch.equal(frozen, before)
    model[2].weight.requires_grad_(False)  # frozen after packing, it is unpacked all the same
    unpack(model)
    assert model[0].weight is frozen
    assert [p.requires_grad for p in model.parameters()] == [False, True, False, True]


@pytest.mark.parametrize("name", ["lstm, tied", "gru, tied"])
def test_tied_weights_are_one_parameter_before_and_after(name: str) -> None:
    model, x = packed("bfp8", name)
    assert model.embedding.weight is model.decoder.weight
    assert sum(p is model.embedding.weight for p in model.parameters()) == 1
    for step_in_backward in (False, True):
        sampler = sampler_of(model, step_in_backward=step_in_backward)
        run(model, x, sampler, 2)
        assert model.embedding.weight is model.decoder.weight
        assert sampler.state[model.decoder.weight]["step"] == 2  # one step for both uses
        del sampler
    twin = copy.deepcopy(model)
    assert twin.embedding.weight is twin.decoder.weight
    unpack(model)
    assert model.embedding.weight is model.decoder.weight
    assert type(model.decoder.weight) is nn.Parameter


@pytest.mark.parametrize("options", [{"layers": nn.Embedding}, {"skip": "decoder"}])
def test_tied_weights_are_not_torn_apart(options: dict[str, Any]) -> None:
    model, _ = build("lstm, tied")
    before = model.decoder.weight
    try:
        pack(model, "bfp8", **options)
    except ValueError:
        assert model.decoder.weight is before
    assert model.embedding.weight is model.decoder.weight


def test_shared_modules() -> None:
    shared = nn.Linear(6, 6)
    model = pack(nn.Sequential(shared, nn.Tanh(), shared), "bfp8")
    assert model[0] is model[2] is shared
    assert isinstance(shared.weight, QTensor)
    run(model, INPUT, sampler := sampler_of(model), 1)
    assert sampler.state[shared.weight]["step"] == 1


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"layers": nn.Conv2d}, {"0"}),
        ({"layers": "0"}, {"0"}),
        ({"layers": [nn.Linear, "1"]}, {"1", "7"}),
        ({"layers": lambda name, module: name in ("3", "7")}, {"3", "7"}),
        ({"skip": (nn.BatchNorm2d, nn.GroupNorm, nn.PReLU)}, {"0", "3", "7"}),
        ({"layers": nn.Linear, "skip": "7"}, set()),
    ],
)
def test_which_layers(options: dict[str, Any], expected: set[str]) -> None:
    model, _ = build("convolutional")
    before = dict(model.named_parameters())
    pack(model, "bfp8", **options)
    for name, p in model.named_parameters():
        assert isinstance(p, QTensor) == (name.split(".")[0] in expected)
        assert isinstance(p, QTensor) or p is before[name]


def test_parameters_in_lists_and_parametrizations() -> None:
    model: Any = nn.Linear(6, 6)
    model.extra = nn.ParameterList([nn.Parameter(torch.ones(3))])
    model.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(3))})
    nn.utils.parametrizations.weight_norm(model)
    pack(model, "bfp8")
    assert all(isinstance(p, QTensor) for p in model.parameters())
    twin = unpack(copy.deepcopy(model))
    assert torch.equal(model(INPUT), twin(INPUT))
    backward(model, INPUT)
    backward(twin, INPUT)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = pack(build()[0].to(dtype), "fixed8.6", seed=5)
    assert all(p.dtype == dtype for p in model.parameters())
    plain, x = build()[0].to(dtype), INPUT.to(dtype)
    settings: dict[str, Any] = {"gradients": "fixed8.6"}
    run(model, x, sampler_of(model, **settings), 3)
    run(plain, x, sampler_of(plain, weights="fixed8.6", **settings), 3)
    assert same(numbers(model), numbers(plain))
    assert all(p.dtype == dtype for p in unpack(model).parameters())


# ---- the chain


def equal_chains(name: str, format: str, rounding: Rounding, accumulator: str | None) -> None:
    """Unpacked, packed, and packed with steps in backward: the same numbers after ten steps."""
    plain, x = build(name)
    (after, _), (within, _) = (packed(format, name, "nearest" if rounding == "nearest" else "stochastic") for _ in "12")
    if accumulator:  # it begins with the weights as they are: packed ones are rounded already
        plain.load_state_dict(after.state_dict())
    settings: dict[str, Any] = {"rounding": rounding, "accumulator": accumulator}
    start = numbers(after)
    run(plain, x, sampler_of(plain, weights=format, **settings))
    run(after, x, sampler_of(after, **settings))
    run(within, x, sampler_of(within, step_in_backward=True, **settings))
    assert same(numbers(plain), numbers(after))
    assert same(numbers(plain), numbers(within))
    assert not same(start, numbers(after))
    assert all(p.grad is None for p in within.parameters())


@pytest.mark.parametrize("accumulator", [None, "fp32"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", FORMATS)
def test_the_packed_chain_is_the_unpacked_chain(format: str, rounding: Rounding, accumulator: str | None) -> None:
    equal_chains("mlp", format, rounding, accumulator)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "mlp"])
@pytest.mark.parametrize("case", range(6))
def test_the_packed_chain_of_every_kind_of_layer(name: str, case: int) -> None:
    # Each model with every format, every rounding, and with and without an accumulator.
    equal_chains(name, FORMATS[case], ROUNDINGS[case % 3], [None, "fp32"][(case + case // 3) % 2])


@pytest.mark.parametrize("settings", [{"algorithm": "paper"}, {"accumulator": "bfp16"}, {"maximize": True}], ids=str)
def test_other_settings(settings: dict[str, Any]) -> None:
    model, x = packed("bfp8")
    plain = unpack(copy.deepcopy(model))
    run(model, x, sampler_of(model, **settings), 3)
    run(plain, x, sampler_of(plain, weights="bfp8", **settings), 3)
    assert same(numbers(model), numbers(plain))


def test_both_paths_give_the_same_packed_chain() -> None:
    models = [packed(format)[0] for format in ("bfp8", "bfp8")]
    run(models[0], INPUT, sampler_of(models[0]), 3)
    with native.disabled():
        run(models[1], INPUT, sampler_of(models[1]), 3)
    assert same(numbers(models[0]), numbers(models[1]))


def test_packed_and_plain_parameters_in_one_sampler() -> None:
    model = pack(pack(build()[0], "bfp8", layers="0", seed=5), "fixed8.6", layers="2", seed=5)
    assert {str(p.format) for p in model.parameters() if isinstance(p, QTensor)} == {"bfp8", "fixed8.6"}
    mixed, x = build()
    pack(mixed, "bfp8", layers="0", seed=5)
    plain, _ = build()
    run(mixed, x, sampler_of(mixed, weights="bfp8"), 4)
    run(plain, x, sampler_of(plain, weights="bfp8"), 4)
    assert same(numbers(mixed), numbers(plain))
    run(model, x, sampler_of(model), 4)  # each in its own format
    for p in model.parameters():
        assert isinstance(p, QTensor)
        assert p.format.is_representable(p.detach() + 0).all()


# ---- steps in backward


@pytest.mark.parametrize("pack_it", [True, False])
def test_there_is_never_more_than_one_gradient(pack_it: bool) -> None:
    model, x = packed() if pack_it else build()
    sampler, seen = sampler_of(model, step_in_backward=True), []

    def look(p: Tensor) -> None:
        seen.append([q.grad is None for q in model.parameters()])

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(look)
    before = numbers(model)
    backward(model, x)
    assert seen == [[True] * 4] * 4
    assert not same(numbers(model), before)
    stepped = numbers(model)
    sampler.step()  # has nothing left to do
    assert same(numbers(model), stepped)
    assert all(sampler.state[p]["step"] == 1 for p in model.parameters())


def test_schedulers_take_effect_in_backward() -> None:
    after, x = packed()
    within = copy.deepcopy(after)
    for model, flag in ((after, False), (within, True)):
        sampler = sampler_of(model, step_in_backward=flag)
        schedule = torch.optim.lr_scheduler.StepLR(sampler, 1, gamma=0.3)
        for _ in range(4):
            run(model, x, sampler, 1)
            schedule.step()
        sampler.param_groups[0]["lr"] = 0.5
        run(model, x, sampler, 1)
        sampler.param_groups[0].update(lr=0.0, temperature=0.0)
        still = numbers(model)
        run(model, x, sampler, 1)
        assert same(numbers(model), still)
    assert same(numbers(after), numbers(within))


def test_groups_in_backward() -> None:
    after, x = packed()
    within = copy.deepcopy(after)
    for model, flag in ((after, False), (within, True)):
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3, "temperature": 0.0}]
        sampler = SGLD(groups, 0.1, 1000, step_in_backward=flag)
        run(model, x, sampler, 3)
    assert same(numbers(after), numbers(within))


def test_closures_in_backward() -> None:
    after, x = packed()
    within = copy.deepcopy(after)
    a, b = sampler_of(after), sampler_of(within, step_in_backward=True)
    for _ in range(2):
        a.zero_grad()
        assert a.step(lambda: backward(after, x).item()) == b.step(lambda: backward(within, x).item())
    assert same(numbers(after), numbers(within))


def test_a_sampler_that_is_gone_no_longer_steps() -> None:
    model, x = packed()
    sampler = sampler_of(model, step_in_backward=True)
    backward(model, x)
    del sampler
    gc.collect()
    before = numbers(model)
    backward(model, x)
    assert same(numbers(model), before)
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad()
    again = sampler_of(model, step_in_backward=True)  # another may take its place
    backward(model, x)
    assert again.state[model[0].weight]["step"] == 1
    assert not same(numbers(model), before)


@pytest.mark.parametrize("pack_it", [True, False])
@pytest.mark.parametrize("flag", [True, False])
def test_one_parameter_has_one_sampler(pack_it: bool, flag: bool) -> None:
    model, x = packed() if pack_it else build()
    sampler = sampler_of(model, step_in_backward=True)
    before = numbers(model)
    with pytest.raises(ValueError, match=r"parameter '0.weight': another sampler steps it in backward; one parameter"):
        sampler_of(model, step_in_backward=flag, weights="bfp8" if pack_it else "bfp4")
    assert same(numbers(model), before)
    backward(model, x)
    assert sampler.state[model[0].weight]["step"] == 1  # the refused one left nothing behind


def test_two_samplers_that_do_not_know_of_each_other() -> None:
    model, _ = packed()
    first = sampler_of(model)
    second = sampler_of(model, step_in_backward=True)
    with pytest.raises(ValueError, match="another sampler steps it in backward"):
        first.step()
    del second


@pytest.mark.parametrize("pack_it", [True, False])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_in_backward(pack_it: bool, bad: float) -> None:
    model, x = packed() if pack_it else build()
    sampler = sampler_of(model, step_in_backward=True)
    model[0].bias.register_hook(lambda g: g * bad)
    before = numbers(model)
    with pytest.raises(FloatingPointError, match=r"gradient of parameter '0.bias' holds .* it was not changed"):
        backward(model, x)
    assert torch.equal(model[0].bias, before["0.bias"])
    assert sampler.state[model[0].bias]["step"] == 0


@pytest.mark.parametrize("move", ["to", "float", "double"])
@pytest.mark.parametrize("pack_it", [True, False])
def test_a_model_that_is_moved_is_stepped_all_the_same_or_cannot_be(pack_it: bool, move: str) -> None:
    model, x = packed() if pack_it else build()
    sampler, parameters = sampler_of(model, step_in_backward=True), list(model.parameters())
    try:
        model.to("cpu") if move == "to" else getattr(model, move)()
    except RuntimeError:
        assert pack_it  # plain parameters are moved under the sampler's eyes
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    backward(model, x.to(parameters[0].dtype))
    sampler.step()  # has nothing left to do, unless the hooks were lost on the way
    assert [sampler.state[p]["step"] for p in parameters] == [1] * 4
    assert all(p.grad is None for p in parameters)
    backward(model, x.to(parameters[0].dtype))
    assert [sampler.state[p]["step"] for p in parameters] == [2] * 4
    assert all(p.grad is None for p in parameters)


def test_hooks_of_others_are_left_alone() -> None:
    model, x = packed()
    sampler, seen = sampler_of(model, step_in_backward=True), []
    model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad is None))
    backward(model, x)
    model[0].bias.grad = torch.ones(7)  # a gradient of one's own, which step() takes
    sampler.step()
    assert sampler.state[model[0].bias]["step"] == 2
    backward(model, x)
    assert seen == [True, True]
    assert sampler.state[model[0].bias]["step"] == 3


@pytest.mark.parametrize("pack_it", [True, False])
def test_a_copy_of_a_sampler_works(pack_it: bool) -> None:
    model, x = packed() if pack_it else build()
    original = sampler_of(model)
    twin, sampler = copy.deepcopy((model, original))
    run(model, x, original, 2)
    run(twin, x, sampler, 2)
    assert same(numbers(model), numbers(twin))
    twin[0].bias.grad.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"'0.bias' holds .* no parameter was changed"):
        sampler.step()
    sampler.add_param_group({"params": [("new", nn.Parameter(torch.ones(2)))]})
    assert len(sampler.param_groups) == 2


# ---- saved and loaded


def test_state_dicts_have_the_same_keys_and_can_be_exchanged() -> None:
    plain, x = build("convolutional")
    model = pack(copy.deepcopy(plain), "bfp8")
    assert list(model.state_dict()) == list(plain.state_dict())
    other = pack(build("convolutional")[0], "bfp8", seed=9)
    assert not same(numbers(other), numbers(model))
    assert str(other.load_state_dict(model.state_dict())) == "<All keys matched successfully>"
    assert same(numbers(other), numbers(model))
    assert all(torch.equal(p.codes, q.codes) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    other[0].weight.data.zero_()
    assert not same(numbers(other), numbers(model))  # the codes were copied, not shared

    floats = numbers(plain)
    plain.load_state_dict(model.state_dict())
    assert all(type(p) is nn.Parameter for p in plain.parameters())
    assert same(numbers(plain), numbers(model))

    model.load_state_dict(floats)
    for name, p in model.named_parameters():
        assert isinstance(p, QTensor)
        assert torch.equal(p, quantize(floats[name], "bfp8"))
    narrow = pack(build("convolutional")[0], "bfp4")
    narrow.load_state_dict(model.state_dict())
    assert all(
        torch.equal(p, quantize(q + 0, "bfp4")) for p, q in zip(narrow.parameters(), model.parameters(), strict=True)
    )
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight"):
        model.load_state_dict(floats | {"0.weight": torch.zeros(1)})

    empty, _ = build("convolutional")
    empty.load_state_dict(model.state_dict(), assign=True)
    assert isinstance(empty[0].weight, QTensor)
    assert torch.equal(empty.eval()(x), model.eval()(x))


def test_nan_in_a_checkpoint_is_refused() -> None:
    model, _ = packed()
    state = numbers(model)
    state["0.bias"][1] = torch.nan
    with pytest.raises(RuntimeError, match="cannot encode NaN"):
        model.load_state_dict(state)
    assert model[0].bias.isfinite().all()


def test_a_packed_model_is_saved_and_loaded_like_any_other() -> None:
    model, _ = packed("bfp8", "lstm, tied")
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other, _ = packed("bfp8", "lstm, tied")
    other.load_state_dict(torch.load(buffer))
    assert same(numbers(other), numbers(model))


def test_a_deep_copy_is_a_model_of_its_own() -> None:
    for name in MODELS:
        model, x = packed("bfp8", name)
        before, twin = numbers(model), copy.deepcopy(model)
        assert all(isinstance(p, QTensor) and isinstance(p, nn.Parameter) for p in twin.parameters())
        run(twin, x, sampler_of(twin), 2)
        assert same(numbers(model), before)
        run(model, x, sampler_of(model), 2)
        assert same(numbers(model), numbers(twin))


@pytest.mark.parametrize("step_in_backward", [False, True])
@pytest.mark.parametrize("accumulator", [None, "fp32"])
@pytest.mark.parametrize("format", ["bfp8", "bfp4", "fixed8.6"])
def test_a_packed_run_resumes_to_the_byte(format: str, accumulator: str | None, step_in_backward: bool) -> None:
    settings: dict[str, Any] = {"accumulator": accumulator, "step_in_backward": step_in_backward}
    model, x = packed(format)
    sampler = sampler_of(model, **settings)
    run(model, x, sampler, 5)
    buffer = io.BytesIO()
    torch.save(sampler.state_dict(), buffer)
    weights = copy.deepcopy(model.state_dict())
    run(model, x, sampler, 5)
    for model_first in (True, False):
        other, _ = packed(format)
        resumed = sampler_of(other, **settings | {"seed": 77})  # the saved one counts
        run(other, x, resumed, 1)
        buffer.seek(0)
        for load_model in (model_first, not model_first):
            if load_model:
                other.load_state_dict(weights)
            else:
                resumed.load_state_dict(torch.load(buffer, weights_only=True))
                buffer.seek(0)
        run(other, x, resumed, 5)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(p.codes, q.codes)
            assert p.exponents is None or torch.equal(p.exponents, q.exponents)
            assert sampler.state[p]["step"] == resumed.state[q]["step"] == 10
            if accumulator:
                assert torch.equal(sampler.state[p]["accumulator"], resumed.state[q]["accumulator"])


# ---- the sampler's format


def test_the_packed_format_is_the_samplers() -> None:
    left_out, x = packed("fixed8.6")
    told = copy.deepcopy(left_out)
    run(left_out, x, sampler_of(left_out), 3)
    run(told, x, sampler_of(told, weights=FixedPoint(8, 6)), 3)
    assert same(numbers(left_out), numbers(told))
    model = pack(nn.Linear(3, 2), "fixed8.6")
    model.load_state_dict({"weight": torch.full((2, 3), 9.0), "bias": torch.tensor([-9.0, 1.0])})
    assert sampler_of(model).saturated() == 7


def test_another_format_is_refused() -> None:
    model, _ = packed("bfp8")
    before, words = numbers(model), r"parameter '0.weight': it is packed as bfp8, but weights='bfp4'; leave weights out"
    with pytest.raises(ValueError, match=words):
        sampler_of(model, weights="bfp4")
    sampler = sampler_of(model)
    sampler.param_groups[0]["weights"] = "bfp4"
    backward(model, INPUT)
    with pytest.raises(ValueError, match=words):
        sampler.step()
    assert same(numbers(model), before)


@pytest.mark.parametrize("view", [lambda q: q.t(), lambda q: q[1:3], lambda q: q.view(2, 8)])
def test_a_parameter_that_is_a_view_is_stepped_right_or_refused(view: Callable[[Tensor], Tensor]) -> None:
    q = encode(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "fixed8.6")
    plain, p = nn.Parameter(view(q.decode()).clone()), nn.Parameter(view(q))
    before = q.decode()
    for w in (plain, p):
        w.grad = torch.arange(1.0, w.numel() + 1).view(w.shape)
        try:
            SGLD([w], 0.01, 1e9, weights="fixed8.6", temperature=0.0, rounding="nearest").step()
        except (TypeError, ValueError):
            assert w is p
            assert torch.equal(q.decode(), before)
            return
    assert torch.equal(p, plain)


# ---- what is refused, and leaves the model as it was


class Unchanged:
    """The model has the same parameters with the same numbers as before."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.parameters, self.numbers = dict(self.model.named_parameters()), numbers(self.model)

    def __exit__(self, *_: object) -> None:
        after = dict(self.model.named_parameters())
        assert after.keys() == self.parameters.keys()
        assert all(after[name] is p for name, p in self.parameters.items())
        for name, t in numbers(self.model).items():
            assert torch.equal(t.nan_to_num(), self.numbers[name].nan_to_num())


def test_packing_twice() -> None:
    model, _ = packed()
    with (
        Unchanged(model),
        pytest.raises(ValueError, match=r"'0.weight' is packed already, as bfp8; unpack\(model\) first"),
    ):
        pack(model, "bfp4")
    model = pack(build()[0], "bfp8", layers="2")
    with Unchanged(model), pytest.raises(ValueError, match=r"'2.weight' is packed already"):
        pack(model, "bfp8")


@pytest.mark.parametrize("kind", ["SGD", "SGLD"])
def test_parameters_of_an_optimizer(kind: str) -> None:
    def owner() -> torch.optim.Optimizer:
        last = [model[2].bias]
        return torch.optim.SGD(last, 0.1) if kind == "SGD" else SGLD(last, 0.1, 100)

    model, _ = build()
    optimizer = owner()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # these two refer to each other
    with (
        Unchanged(model),
        pytest.raises(ValueError, match=f"'2.bias' belongs to a {kind} optimizer.*pack or unpack first"),
    ):
        pack(model, "bfp8")
    pack(model, "bfp8", layers="0")  # whose parameters it does not have
    del optimizer, schedule
    pack(model, "bfp8", layers="2")  # nobody has it any more
    optimizer = owner()
    with Unchanged(model), pytest.raises(ValueError, match=f"'2.bias' belongs to a {kind} optimizer"):
        unpack(model)
    del optimizer
    unpack(model)


def test_an_unknown_pattern_format_or_rounding() -> None:
    model, _ = build()
    with Unchanged(model), pytest.raises(ValueError, match="'encoder' fits no layer; layers are named '0', '1', '2'"):
        pack(model, "bfp8", layers="encoder")
    with Unchanged(model), pytest.raises(ValueError, match="unknown format 'int8'"):
        pack(model, "int8")
    with (
        Unchanged(model),
        pytest.raises(ValueError, match="rounding must be one of 'nearest', 'stochastic', got 'corr"),
    ):
        pack(model, "bfp8", rounding="corrected")
    with Unchanged(model), pytest.raises(ValueError, match="seed must be"):
        pack(model, "bfp8", seed=-1)


def test_a_dtype_that_cannot_hold_the_format() -> None:
    model = build()[0].half()
    with (
        Unchanged(model),
        pytest.raises(ValueError, match=r"'0.weight': torch.float16 cannot hold every number of bfp8"),
    ):
        pack(model, "bfp8")
    model, _ = build()
    model[2].half()
    with Unchanged(model), pytest.raises(ValueError, match=r"'2.weight': torch.float16 cannot hold"):
        pack(model, "bfp8")  # the first layer could have been
    model, _ = packed()
    with Unchanged(model), pytest.raises(ValueError, match=r"torch.float16 cannot hold every number of bfp8"):
        model.half()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite(bad: float) -> None:
    model, _ = build()
    model[2].bias.data[1] = bad
    with (
        Unchanged(model),
        pytest.raises(ValueError, match=r"'2.bias' holds an infinity or a NaN, for which bfp8 has no code"),
    ):
        pack(model, "bfp8")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_scripted_modules() -> None:
    script: Any = torch.jit.script
    scripted = script(mlp())
    model = nn.Sequential(nn.Linear(6, 6), scripted)
    for m, name in ((scripted, "0.weight"), (model, "1.0.weight")):
        with (
            Unchanged(m),
            pytest.raises(TypeError, match=f"'{name}' belongs to a scripted module.*pack before scripting"),
        ):
            pack(m, "bfp8")


def test_parameters_that_are_something_else() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))
    with pytest.raises(TypeError, match=r"'1.weight' is a UninitializedParameter; only plain parameters"):
        pack(model, "bfp8")
    assert type(model[0].weight) is nn.Parameter
    whole = nn.Linear(2, 2, dtype=torch.complex64)
    with Unchanged(whole), pytest.raises(TypeError, match=r"'weight': expected a real floating-point tensor"):
        pack(whole, "bfp8")


# ---- what people do with models


def test_what_people_do_with_gradients() -> None:
    model, x = packed()
    plain = unpack(copy.deepcopy(model))
    for m in (model, plain):
        backward(m, x)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01) for m in (model, plain)]
    assert torch.equal(*norms)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    model.zero_grad(set_to_none=False)
    assert all(p.grad.abs().sum() == 0 for p in model.parameters())
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_what_people_do_with_parameters() -> None:
    model, x = packed()
    plain = unpack(copy.deepcopy(model))
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(vector, nn.utils.parameters_to_vector(plain.parameters()))
    output = torch.func.functional_call(model, dict(model.named_parameters()), (x,))
    assert torch.equal(output, plain(x))
    doubled = torch.func.functional_call(model, {n: 2 * p for n, p in model.named_parameters()}, (x,))
    assert torch.equal(
        doubled, torch.func.functional_call(plain, {n: 2 * p for n, p in plain.named_parameters()}, (x,))
    )
    assert sum(p.square().sum() for p in model.parameters()) == sum(p.square().sum() for p in plain.parameters())
    with torch.no_grad():
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
    assert all((p == 0.5).all() and isinstance(p, QTensor) for p in model.parameters())


def test_a_vector_becomes_parameters_or_is_refused() -> None:
    model, _ = packed()
    before = numbers(model)
    vector = torch.zeros(sum(p.numel() for p in model.parameters()))
    try:
        nn.utils.vector_to_parameters(vector, model.parameters())
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        assert same(numbers(model), before)
    else:
        assert all((p == 0).all() for p in model.parameters())


def test_what_people_do_with_models() -> None:
    for name in MODELS:
        model, x = packed("bfp8", name)
        plain = unpack(copy.deepcopy(model))
        for m in (model.eval(), plain.eval()):
            m.requires_grad_(True)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        with torch.inference_mode():
            assert torch.allclose(model(x), plain(x), rtol=1e-5, atol=1e-6)  # torch takes another path to the product
    model, x = packed()
    model.double()
    assert all(isinstance(p, QTensor) and p.dtype == torch.float64 for p in model.parameters())
    assert torch.equal(model(x.double()), unpack(copy.deepcopy(model))(x.double()))
    model.float().to("meta")
    assert all(isinstance(p, QTensor) and p.is_meta for p in model.parameters())
    assert model(x.to("meta")).shape == (5, 3)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, SGLD])
def test_an_optimizer_that_was_never_finished_is_no_owner(kind: Any) -> None:
    model, _ = build()
    try:
        kind(model.parameters(), -1.0, 100)
    except ValueError as error:
        kept = error  # as an interactive session does, and with it the optimizer
    try:
        pack(model, "bfp8")
    finally:
        kept.__traceback__ = None
    assert isinstance(model[0].weight, QTensor)


def test_hooks_of_samplers_that_are_gone_do_not_pile_up() -> None:
    model, x = packed()
    for _ in range(5):
        sampler = sampler_of(model, step_in_backward=True)
        del sampler
    sampler = sampler_of(model, step_in_backward=True)
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    backward(model, x)
    assert sampler.state[model[0].bias]["step"] == 1


def test_a_packed_chain_is_the_unpacked_one_in_every_stream() -> None:
    ends = []
    for stream in (0, 3):
        packed_model, plain = pack(build()[0], "bfp8", seed=5, stream=stream), build()[0]
        for model, weights in ((packed_model, None), (plain, "bfp8")):
            run(model, INPUT, sampler_of(model, weights=weights, stream=stream))
        a, b = (torch.cat([t.flatten() for t in numbers(model).values()]) for model in (packed_model, plain))
        assert torch.equal(a, b)
        ends.append(a)
    assert not torch.equal(*ends)
