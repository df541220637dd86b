"""Packed models: one byte a weight, and the same model to the rest of PyTorch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import QLangevinWarning, QTensor, native, pack, parse, quantize, unpack
from tests.helpers.packing import INPUT, MODELS, backward, build, mlp, numbers, packed, run, same, sampler_of

FORMATS = ["bfp8", "bfp8/tensor", "bfp8/32", "fixed8.6", "fp8_e4m3", "bfp4"]


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
    assert not any(isinstance(v, Tensor) for v in sampler_of(layer).state[layer.weight].values())  # no other copy


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
def test_tied_weights_stay_tied_if_one_of_their_layers_is_chosen(options: dict[str, Any]) -> None:
    model, _ = build("lstm, tied")
    pack(model, "bfp8", **options)
    assert isinstance(model.decoder.weight, QTensor)
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
        pytest.raises(ValueError, match=r"'0.weight': torch.float16 cannot hold every number of bfp16"),
    ):
        pack(model, "bfp16")
    model, _ = build()
    model[2].half()
    with Unchanged(model), pytest.raises(ValueError, match=r"'2.weight': torch.float16 cannot hold"):
        pack(model, "bfp16")  # the first layer could have been
    model = pack(build()[0], "bfp16")
    with Unchanged(model), pytest.raises(ValueError, match=r"torch.float16 cannot hold every number of bfp16"):
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


# ---- other uses of a model


def test_gradients_are_clipped_and_zeroed_as_ever() -> None:
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


def test_utilities_of_torch_take_packed_parameters() -> None:
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


def test_a_vector_becomes_parameters() -> None:
    model, _ = packed()
    vector = torch.zeros(sum(p.numel() for p in model.parameters()))
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert all(isinstance(p, QTensor) and (p == 0).all() for p in model.parameters())


def test_evaluation_dtypes_and_meta_tensors() -> None:
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


def test_a_model_that_is_frozen_is_not_packed_in_silence() -> None:
    model = nn.Linear(4, 3).requires_grad_(False)
    with pytest.warns(QLangevinWarning, match=r"nothing was packed: .*frozen=True"):
        pack(model, "bfp8")
    assert all(isinstance(p, QTensor) for p in pack(model, "bfp8", frozen=True).parameters())
    pack(nn.ReLU(), "bfp8")  # has nothing to pack
