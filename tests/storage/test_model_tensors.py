"""Samples hold every kind of tensor in every format, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, DamagedError, Key, QTensor, SampleStore, pack, parse, quantize
from qlangevin.experiments.models import ResNet18
from qlangevin.quantization import random
from qlangevin.storage.tensor_file import DTYPES
from tests.helpers.networks import Tied
from tests.helpers.strategies import NAMES


class Holder(nn.Module):
    """A module with just these parameters and buffers."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, t in tensors.items():
            if isinstance(t, nn.Parameter):
                self.register_parameter(name, t)
            else:
                self.register_buffer(name, t)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return random.normal(Key(seed), torch.Size(shape).numel()).view(shape)


def stored(path: Path, model: nn.Module, sampler: Any = None) -> dict[str, Tensor]:
    """Store a sample of the model, and return it as a new reader sees it."""
    with SampleStore.create(path, model, sampler) as store:
        store.append(model)
    return dict(SampleStore.open(path)[0].items())


def bits(t: Tensor) -> list[int]:
    plain = t.decode() if isinstance(t, QTensor) else t
    found: list[int] = plain.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
    return found


SHAPES = [(3, 5), (), (0,), (0, 3), (3, 0), (1,), (7,), (2, 3, 3)]


@pytest.mark.parametrize("name", NAMES)
def test_packed_parameters_come_back_as_the_codes_they_are(name: str, tmp_path: Path) -> None:
    model = Holder(**{f"p{i}": nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)})
    pack(model, name)
    found = stored(tmp_path, model)
    for n, p in model.named_parameters():
        assert isinstance(p, QTensor)
        got = found[n]
        assert got.shape == p.shape
        assert got.dtype == p.dtype
        assert bits(got) == bits(p)
        if parse(name).storage_bits < 32:
            assert isinstance(got, QTensor)
            assert torch.equal(got.codes.view(-1), p.codes.view(-1))
            assert got.format == p.format


@pytest.mark.parametrize("name", NAMES)
def test_unpacked_parameters_on_the_grid_are_stored_as_codes(name: str, tmp_path: Path) -> None:
    model = Holder(**{f"p{i}": nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)})
    found = stored(tmp_path, model, SGLD(model.parameters(), 0.1, 100, weights=name))
    for n, p in model.named_parameters():
        assert isinstance(found[n], QTensor) == (parse(name).storage_bits < 32)
        assert bits(found[n] + 0.0) == bits(p + 0.0)  # a zero may lose its sign


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [True, False])
def test_models_of_another_dtype(dtype: torch.dtype, packed: bool, tmp_path: Path) -> None:
    name = "bfp8" if dtype == torch.float64 else "fixed8.6"
    model = Holder(p=nn.Parameter(normal(5, 3).to(dtype)), b=normal(4).to(dtype))
    sampler = None
    if packed:
        pack(model, name)
    else:
        sampler = SGLD(model.parameters(), 0.1, 100, weights=name)
    found = stored(tmp_path, model, sampler)
    assert found["p"].dtype == found["b"].dtype == dtype
    assert isinstance(found["p"], QTensor)
    assert bits(found["p"] + 0.0) == bits(model.get_parameter("p") + 0.0)
    assert bits(found["b"]) == bits(model.get_buffer("b"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["buffer", "frozen"])
def test_every_dtype_that_is_stored_comes_back(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    t = (normal(4, 3) * 3).to(dtype)
    model = Holder(t=t if kind == "buffer" else nn.Parameter(t, requires_grad=False), empty=t[:0], one=t[0, 0].clone())
    found = stored(tmp_path, model)
    for name in ("t", "empty", "one"):
        expected = getattr(model, name)
        assert found[name].dtype == dtype
        assert found[name].shape == expected.shape
        assert bits(found[name]) == bits(expected)


def test_buffers_may_hold_infinities(tmp_path: Path) -> None:
    mask = torch.tensor([0.0, -torch.inf, torch.nan])
    assert bits(stored(tmp_path, Holder(mask=mask))["mask"]) == bits(mask)


@pytest.mark.parametrize(
    "view", [lambda t: t.t(), lambda t: t[::2], lambda t: t[0].expand(4, 3), lambda t: t.to(torch.complex64).conj()]
)
def test_tensors_that_are_views_are_stored_as_what_they_show(view: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    t = view(normal(5, 3))
    assert bits(stored(tmp_path, Holder(t=t))["t"]) == bits(t.resolve_conj())


def test_batch_norm_statistics_are_in_every_sample(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    kept = []
    with SampleStore.create(tmp_path, model) as store:
        for i in range(2):
            model(normal(6, 3, seed=i))
            store.append(model)
            kept.append({name: b.clone() for name, b in model.named_buffers()})
    for sample, wanted in zip(SampleStore.open(tmp_path), kept, strict=True):
        assert wanted.keys() == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
        for name, b in wanted.items():
            assert torch.equal(sample[name], b)
    assert not torch.equal(kept[0]["1.running_mean"], kept[1]["1.running_mean"])


def test_buffers_that_are_not_persistent_are_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_buffer("cache", torch.ones(3), persistent=False)
    model[0].register_buffer("kept", torch.ones(3))
    assert list(stored(tmp_path, model)) == ["0.weight", "0.bias", "0.kept"]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model = pack(Tied(), "bfp8")
    found = stored(tmp_path, model)
    assert "embed.weight" in found
    assert "out.weight" not in found
    other = pack(Tied(), "bfp8")
    SampleStore.open(tmp_path)[0].load_into(other)
    assert other.out.weight is other.embed.weight
    assert bits(other.out.weight) == bits(model.embed.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch of itself
def test_a_compiled_model_has_the_names_of_the_model(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    compiled: Any = torch.compile(model, backend="eager")
    with SampleStore.create(tmp_path, compiled) as store:
        store.append(model)
        store.append(compiled)
    assert list(store.manifest.tensors) == ["weight", "bias"]
    store[1].load_into(compiled)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch of itself
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("into_packed", [True, False])
def test_a_sample_is_loaded_into_packed_and_plain_models(packed: bool, into_packed: bool, tmp_path: Path) -> None:
    model, other = (nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(2))
    sampler = None
    if packed:
        pack(model, "bfp8", layers="0")
    else:
        sampler = SGLD(model.parameters(), 0.1, 100, weights="bfp8")
    stored(tmp_path, model, sampler)
    if into_packed:
        pack(other, "bfp8", layers="0")
    SampleStore.open(tmp_path)[0].load_into(other)
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert bits(a + 0) == bits(b + 0)


def test_names_may_hold_anything_that_unicode_has(tmp_path: Path) -> None:
    name = '\0/é😀"\\ {}'
    model = Holder(**{name: torch.ones(2), "long" * 10_000: torch.zeros(1)})
    assert torch.equal(stored(tmp_path, model)[name], torch.ones(2))


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_names_that_the_file_format_cannot_hold_are_refused_before_anything_is_stored(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises((ValueError, TypeError), match="name") as caught:
        SampleStore.create(tmp_path, Holder(**{name: torch.ones(2)}))
    assert not isinstance(caught.value, DamagedError)


@pytest.mark.parametrize("t", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_tensors_that_cannot_be_stored_are_named(t: Tensor, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'odd' is a .* tensor of .*, which cannot be stored"):
        SampleStore.create(tmp_path / "s", Holder(odd=t))
    assert not (tmp_path / "s").exists()


def test_extra_state_is_refused(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"x": 1}

    with pytest.raises(TypeError, match=r"'0' \(Extra\) has extra state"):
        SampleStore.create(tmp_path, nn.Sequential(Extra(1, 1)))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("weights", [None, "bfp8", "fixed8.3", "fp8_e4m3"])
def test_a_chain_that_has_diverged_is_not_stored(bad: float, weights: str | None, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with SampleStore.create(tmp_path, model, SGLD(model.parameters(), 0.1, 100, weights=weights)) as store:
        store.append(model)
        with torch.no_grad():
            model.weight[0, 0] = bad
        with pytest.raises(ValueError, match="'weight' holds"):
            store.append(model)
        assert len(store) == 1
    assert [p.name for p in (tmp_path / "samples").iterdir()] == ["000000.safetensors"]


@pytest.mark.parametrize(
    ("weights", "value"), [("fixed8.3", 0.3), ("fixed8.3", 100.0), ("bfp8", 0.3), ("fp8_e4m3", 0.3)]
)
def test_numbers_off_the_grid_are_counted(weights: str, value: float, tmp_path: Path) -> None:
    model = Holder(p=nn.Parameter(quantize(torch.ones(6), "fixed8.3")))
    with SampleStore.create(tmp_path, model, SGLD(model.parameters(), 0.1, 100, weights=weights)) as store:
        with torch.no_grad():
            model.get_parameter("p")[0] = value
        with pytest.raises(ValueError, match=r"'p' holds numbers that are not on the grid of .* \(1 of 6\)"):
            store.append(model)


def test_a_float64_number_that_float32_has_not_is_off_the_grid(tmp_path: Path) -> None:
    model = Holder(p=nn.Parameter(torch.ones(4, dtype=torch.float64)))
    with SampleStore.create(tmp_path, model, SGLD(model.parameters(), 0.1, 100, weights="bfp8")) as store:
        with torch.no_grad():
            model.get_parameter("p")[0] += 2**-50
        with pytest.raises(ValueError, match="not on the grid"):
            store.append(model)


def test_a_sample_of_resnet18_takes_little_more_than_a_byte_a_weight(tmp_path: Path) -> None:
    model = pack(ResNet18(), "bfp8", rounding="nearest")
    weights = sum(p.numel() for p in model.parameters())
    with SampleStore.create(tmp_path, model) as store:
        store.append(model)
    assert store.nbytes == (tmp_path / "samples" / "000000.safetensors").stat().st_size <= 1.02 * weights
