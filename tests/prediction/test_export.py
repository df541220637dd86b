"""Samples exported as state dicts and files, and posteriors sent to other processes."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import qlangevin as ql
from tests.helpers.networks import Tied, build
from tests.helpers.posteriors import LABELS, Fill, X, small_model, store_draws


def double(model: nn.Module, batch: Any) -> Any:
    """A ``forward`` that other processes can import."""
    return 2 * model(batch["x"])


def predict(posterior: ql.Posterior, x: Any) -> Tensor:
    """Predict in a process that serves."""
    return posterior.predict(x)


@pytest.mark.parametrize("kind", ["plain", "packed"])
def test_an_export_is_the_state_dict_of_a_sample(kind: str, two: ql.Posterior, tmp_path: Path) -> None:
    model = small_model()
    store = store_draws(tmp_path / "run", model=ql.pack(model, "bfp8") if kind == "packed" else model)
    posterior = ql.Posterior.open(store, model)
    for i in (0, 4, -1):
        found = posterior.export(i)
        assert all(type(t) is Tensor for t in found.values())
        fresh = small_model()
        fresh.load_state_dict(found)
        torch.testing.assert_close(fresh(X).softmax(1), posterior.samples(X)[i])
    found["0.weight"].zero_()  # a copy
    assert bool(posterior.export(-1)["0.weight"].any())
    assert torch.equal(two.export(7)["0.bias"], two.chains[1].export(1)["0.bias"])


def test_what_a_state_dict_takes_of_a_sample(tmp_path: Path) -> None:
    """`load_state_dict` takes a sample as it is, packed or decoded, into packed and plain models."""
    store = store_draws(tmp_path, model=ql.pack(small_model(), "bfp8"))
    expected = ql.Posterior.open(store, small_model()).samples(X)[2]
    for model in (small_model(), ql.pack(small_model(), "bfp8")):
        for state in (store[2], store[2].decode()):
            model.load_state_dict(state)
            torch.testing.assert_close(model(X).softmax(1), expected)


def test_an_export_has_tied_weights_under_all_names_and_a_file_has_them_once(fill: Fill, tmp_path: Path) -> None:
    model = Tied()
    posterior = ql.Posterior.open(fill(model), model, link="identity")
    found = posterior.export(1, tmp_path / "model.safetensors")
    assert found.keys() == model.state_dict().keys()
    Tied().load_state_dict(found)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(t, found[name]) for name, t in written.items())
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_an_export_has_the_statistics_that_were_estimated(fill: Fill) -> None:
    model, x, _ = build("resnet")
    posterior = ql.Posterior.open(fill(model), model, batch_norm=[x], link="identity", vectorize=False)
    fresh = copy.deepcopy(model).eval()
    fresh.load_state_dict(posterior.export(1))
    torch.testing.assert_close(fresh(x), posterior.samples(x)[1])


def test_exports_that_are_refused(posterior: ql.Posterior, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="i must be at most 5, got 6"):
        posterior.export(6)
    with pytest.raises(ValueError, match="i must be an integer, at least -6, got -7"):
        posterior.export(-7)
    with pytest.raises(
        IsADirectoryError, match=r"is a folder; name a file in it, .*save_pretrained\(folder, state_dict="
    ):
        posterior.export(0, tmp_path)
    with pytest.raises(OSError, match="the sample was not exported"):
        posterior.export(0, tmp_path / "nowhere" / "model.safetensors")


# ---- other processes


def test_a_pickled_posterior_predicts_the_same(
    two: ql.Posterior, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    expected = two.samples(X)
    data = pickle.dumps(two[1:])
    monkeypatch.chdir("/")
    other = pickle.loads(data)
    assert repr(other) == repr(two[1:])
    assert [len(chain) for chain in other.chains] == [5, 3]
    assert torch.equal(other.samples(X), expected[[1, 2, 3, 4, 5, 7, 8, 9]])
    assert len(data) < 20_000  # the model and the manifests, no samples


def test_a_relative_path_is_found_from_other_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    posterior = ql.Posterior.open(store_draws(Path("run")), small_model())
    data = pickle.dumps(posterior)
    monkeypatch.chdir("/")
    assert pickle.loads(data).predict(X).shape == (23, 3)


def test_a_store_sent_to_another_process_is_a_reader(tmp_path: Path) -> None:
    model = small_model()
    with ql.SampleStore.create(tmp_path, model) as writer:
        writer.append(model)
        other = pickle.loads(pickle.dumps(writer))
        writer.append(model)
        assert len(other) == 2
        with pytest.raises(PermissionError, match="open for reading"):
            other.append(model)
        assert torch.equal(pickle.loads(pickle.dumps(other[1]))["0.weight"], writer[1]["0.weight"])


def test_what_was_estimated_goes_along(fill: Fill) -> None:
    model, x, _ = build("resnet")
    posterior = ql.Posterior.open(fill(model), model, batch_norm=[x], link="identity")
    expected = posterior.samples(x)
    other = pickle.loads(pickle.dumps(posterior))
    other._weights.batch_norm = []  # it is not read again
    assert torch.equal(other.samples(x), expected)


def test_a_forward_that_cannot_be_sent(posterior: ql.Posterior) -> None:
    other = ql.Posterior.open(posterior.members, small_model(), forward=lambda model, batch: model(batch))
    with pytest.raises(
        TypeError, match=r"cannot be sent to another process .*; define it with def at the top of a module"
    ):
        pickle.dumps(other)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "packed and lowered"])
def test_posteriors_in_processes_that_serve(kind: str, tmp_path: Path) -> None:
    model = small_model()
    if kind != "plain":
        ql.lower(ql.pack(model, "bfp8"), "bfp8", "bfp8")
    posterior = ql.Posterior.open(store_draws(tmp_path, model=model), model, forward=double)
    expected = posterior.predict({"x": X, "labels": LABELS})
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(predict, (posterior, {"x": X}))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
