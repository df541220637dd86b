"""Chains of packed models: those of unpacked ones bit for bit, saved and resumed."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, FixedPoint, QTensor, encode, native, pack, quantize, unpack
from qlangevin.quantization.operators import Rounding
from tests.helpers.packing import INPUT, MODELS, backward, build, numbers, packed, run, same, sampler_of

FORMATS = ["bfp8", "bfp8/tensor", "bfp8/32", "fixed8.6", "fp8_e4m3", "bfp4"]
ROUNDINGS: list[Rounding] = ["corrected", "stochastic", "nearest"]


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


@pytest.mark.filterwarnings("ignore:.*weights of parameter 'embedding.weight' are at an end of the range of fixed8.6")
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
    given = copy.deepcopy(left_out)
    run(left_out, x, sampler_of(left_out), 3)
    run(given, x, sampler_of(given, weights=FixedPoint(8, 6)), 3)
    assert same(numbers(left_out), numbers(given))
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
def test_a_view_of_a_packed_tensor_is_refused(view: Callable[[Tensor], Tensor]) -> None:
    q = encode(torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "fixed8.6")
    p, before = nn.Parameter(view(q)), q.decode()
    with pytest.raises(ValueError, match="it is a view of a packed tensor; only all of it can be stepped"):
        SGLD([p], 0.01, 10**9, weights="fixed8.6")
    assert torch.equal(q.decode(), before)
