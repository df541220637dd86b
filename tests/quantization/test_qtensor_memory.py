"""Packed models saved by safetensors: decoded floats under their names, and the same codes when they are loaded."""

from __future__ import annotations

import gc
import io
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import qlangevin as ql
from qlangevin.quantization import qtensor_memory
from tests.helpers.networks import Tied
from tests.helpers.strategies import NAMES


def packed(format: str = "bfp8") -> nn.Sequential:
    torch.manual_seed(0)
    return ql.pack(nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)), format)


def floats(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.decode() if isinstance(t, ql.QTensor) else t for name, t in model.state_dict().items()}


def same_codes(a: nn.Module, b: nn.Module) -> bool:
    """Return True if two packed models have the same codes and exponents, bit for bit."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    parts = [(getattr(p, part), getattr(q, part)) for p, q in pairs for part in ("codes", "exponents")]
    return all((x is None and y is None) or torch.equal(x, y) for x, y in parts)


@pytest.mark.parametrize("format", NAMES)
def test_safetensors_writes_decoded_floats(format: str, tmp_path: Path) -> None:
    model = packed(format)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    save_model(model, str(tmp_path / "b.safetensors"))
    for file in tmp_path.iterdir():
        found = load_file(file)
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(t, found[name]) and t.dtype == found[name].dtype for name, t in floats(model).items())


def test_floats_loaded_into_a_packed_model_are_its_codes(tmp_path: Path) -> None:
    """A chain that was saved as floats after some steps goes on from the same codes and exponents."""
    model = packed()
    sampler = ql.SGLD(model.parameters(), lr=0.01, num_data=50)
    for i in range(5):
        model(torch.randn(8, 5, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        sampler.step()
        sampler.zero_grad()
    save_model(model, str(tmp_path / "model.safetensors"))
    other = packed()
    assert not same_codes(model, other)
    load_model(other, tmp_path / "model.safetensors")
    assert same_codes(model, other)


def test_tied_weights_are_saved_once(tmp_path: Path) -> None:
    model = ql.pack(Tied(), "bfp8")
    with pytest.raises(RuntimeError, match="share memory"):  # as it is for floats
        save_file(model.state_dict(), tmp_path / "model.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    assert len(load_file(tmp_path / "model.safetensors")) < len(model.state_dict())
    other = ql.pack(Tied(), "bfp8")
    load_model(other, tmp_path / "model.safetensors")
    assert same_codes(model, other)


def test_a_packed_state_dict_goes_through_torch_save_to_the_byte() -> None:
    model, other, buffer = packed(), packed(), io.BytesIO()
    with torch.no_grad():
        other[0].get_parameter("weight").zero_()
    torch.save({"state_dict": model.state_dict(), "epoch": 1}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)["state_dict"]
    assert isinstance(state["0.weight"], ql.QTensor)
    other.load_state_dict(state)
    assert same_codes(model, other)


def test_parameters_themselves_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = packed()
    with pytest.raises(RuntimeError, match=r"save model\.state_dict\(\).*or make floats of all with qlangevin\.unpack"):
        save_file(dict(model.named_parameters()), tmp_path / "model.safetensors")
    assert next(model.parameters()).data_ptr() == 0
    save_file(dict(ql.unpack(model).named_parameters()), tmp_path / "model.safetensors")


def test_floats_live_no_longer_than_the_tensors_they_were_asked_of() -> None:
    model = packed()
    before = len(qtensor_memory._shared)
    state = model.state_dict()
    first, second = state["0.weight"].data_ptr(), state["2.weight"].data_ptr()
    assert 0 not in (first, second)
    assert first != second
    assert state["0.weight"].data_ptr() == first
    assert state["0.weight"][1].data_ptr() == first + 5 * 4
    assert model.state_dict()["0.weight"].data_ptr() == first  # equal addresses tell tied weights
    assert len(qtensor_memory._shared) == before + 2
    del state
    gc.collect()
    assert len(qtensor_memory._shared) == before


def test_what_was_written_since_is_saved(tmp_path: Path) -> None:
    model = packed()
    state = model.state_dict()
    save_file(state, tmp_path / "old.safetensors")
    with torch.no_grad():
        model[0].get_parameter("weight").zero_()
    save_file(state, tmp_path / "new.safetensors")
    assert load_file(tmp_path / "old.safetensors")["0.weight"].any()
    assert not load_file(tmp_path / "new.safetensors")["0.weight"].any()


def test_memory_is_neither_pickled_nor_copied() -> None:
    q, buffer = packed().state_dict()["0.weight"], io.BytesIO()
    torch.save(q, buffer)
    before = buffer.tell()
    assert q.data_ptr()
    again = io.BytesIO()
    torch.save(q, again)
    assert again.tell() == before
    assert "_memory" not in q.clone().__dict__
