"""Posteriors of transformers and of adapters: stores, predictions, exports."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql
from tests.helpers.transformers import NAMES, batch, build, lora

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def fill(path: Path, model: nn.Module, name: str, frozen: Any = "once", stream: int = 0) -> ql.SampleStore:
    trained = [p for p in model.parameters() if p.requires_grad]
    sampler = ql.SGLD(trained, lr=1e-3, num_data=48, prior_std=1.0, stream=stream)
    with ql.SampleStore.create(path, model, sampler, frozen=frozen) as store:
        for _ in range(3):
            model(**batch(name)).loss.backward()
            sampler.step()
            sampler.zero_grad()
            store.append(model)
    return ql.SampleStore.open(path)


def logits(model: nn.Module, batch: Any) -> Any:
    return model(**batch).logits


@torch.no_grad()
def by_hand(store: ql.SampleStore, model: nn.Module, name: str) -> torch.Tensor:
    found, inputs = [], {"input_ids": batch(name)["input_ids"]}
    for sample in store:
        sample.load_into(model)
        found.append(model.eval()(**inputs).logits.softmax(-1))
    return torch.stack(found)


@NAMES
@pytest.mark.parametrize("forward", [None, logits])
def test_transformers_are_averaged_as_they_are(name: str, forward: Any, tmp_path: Path) -> None:
    store = fill(tmp_path, ql.pack(build(name), "bfp8"), name)
    expected = by_hand(store, build(name), name)
    dim = None if name == "bert" else -1
    posterior = ql.Posterior.open(store, build(name), forward=forward, class_dim=dim)
    torch.testing.assert_close(posterior.samples(batch(name)), expected, rtol=1e-4, atol=1e-5)
    prediction, labels = next(posterior.predict_loader([batch(name)]))
    torch.testing.assert_close(prediction, expected.mean(0), rtol=1e-4, atol=1e-5)
    assert torch.equal(labels, batch(name)["labels"])
    assert ql.metrics.evaluate(posterior.predict_loader([batch(name)]), class_dim=dim or 1)["count"] == labels.numel()


@NAMES
def test_an_exported_sample_is_a_pretrained_model(name: str, tmp_path: Path) -> None:
    model = ql.pack(build(name), "bfp8")
    store = fill(tmp_path / "run", model, name)
    posterior = ql.Posterior.open(store, build(name), class_dim=-1)
    folder = tmp_path / "exported"
    model.config.save_pretrained(folder)
    posterior.export(1, folder / "model.safetensors")
    model.save_pretrained(tmp_path / "whole", state_dict=posterior.export(1))
    inputs = {"input_ids": batch(name)["input_ids"]}
    for saved in (folder, tmp_path / "whole"):
        loaded = type(model).from_pretrained(saved).eval()
        with torch.no_grad():
            found = loaded(**inputs).logits.softmax(-1)
        torch.testing.assert_close(found, posterior.samples(inputs)[1], rtol=1e-4, atol=1e-5)


@NAMES
@pytest.mark.parametrize("frozen", ["once", "reference"])
def test_adapters_are_sampled_and_the_base_is_stored_once_or_not_at_all(name: str, frozen: Any, tmp_path: Path) -> None:
    model = ql.pack(lora(name), "bfp8", frozen=True)
    store = fill(tmp_path / "chain-0", model, name, frozen)
    fill(tmp_path / "chain-1", ql.pack(lora(name), "bfp8", frozen=True), name, frozen, stream=1)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (
        adapters < store[0].nbytes < adapters + 2600
    )  # a byte for each, 64 exponents or so, and a header with the names
    bases = list(tmp_path.glob("*/frozen.safetensors"))
    assert len({file.stat().st_ino for file in bases}) == (1 if frozen == "once" else 0)
    posterior = ql.Posterior.open(tmp_path, ql.pack(lora(name), "bfp8", frozen=True), class_dim=-1)
    assert len(posterior) == 6
    expected = by_hand(ql.SampleStore.open(tmp_path / "chain-0"), model, name)
    torch.testing.assert_close(posterior.chains[0].samples(batch(name)), expected, rtol=1e-4, atol=1e-5)
    if frozen == "reference":
        with pytest.raises(ValueError, match=r"refers to a base that is not this model's.*frozen=True"):
            ql.Posterior.open(tmp_path, lora(name), class_dim=-1)
    with pytest.raises(ValueError, match="The store has adapters"):
        ql.Posterior.open(tmp_path, build(name), class_dim=-1)


def test_an_exported_adapter_is_peft_s(tmp_path: Path) -> None:
    model = lora("gpt2")
    posterior = ql.Posterior.open(fill(tmp_path / "run", model, "gpt2"), model, class_dim=-1)
    model.save_pretrained(tmp_path / "adapter", state_dict=posterior.export(2))
    loaded = peft.PeftModel.from_pretrained(build("gpt2"), tmp_path / "adapter").eval()
    inputs = {"input_ids": batch("gpt2")["input_ids"]}
    with torch.no_grad():
        found = loaded(**inputs).logits.softmax(-1)
    torch.testing.assert_close(found, posterior.samples(inputs)[2], rtol=1e-4, atol=1e-5)


def test_names_without_peft_s_prefix(tmp_path: Path) -> None:
    """The model inside of the PeftModel has its names without ``base_model.model.``."""
    model = lora("bert")
    store = fill(tmp_path, model, "bert")
    inside, outside = (ql.Posterior.open(store, each) for each in (model.base_model.model, model))
    assert torch.equal(inside.predict(batch("bert")), outside.predict(batch("bert")))


@pytest.mark.slow
def test_a_transformer_in_a_process_that_serves(tmp_path: Path) -> None:
    store = fill(tmp_path, ql.pack(build("bert"), "bfp8"), "bert")
    posterior = ql.Posterior.open(store, build("bert"))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(posterior.predict, (batch("bert"),))
    torch.testing.assert_close(found, posterior.predict(batch("bert")), rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_transformer_is_a_mean() -> None:
    for name in ("bert", "gpt2", "llama"):
        ratio = ql.check_loss_scale(lambda model, batch: model(**batch).loss, build(name), batch(name))
        assert ratio == pytest.approx(1, rel=1e-4)


def test_a_tokenizers_output_is_a_batch(tmp_path: Path) -> None:
    store = fill(tmp_path, build("bert"), "bert")
    encoded = transformers.BatchEncoding(batch("bert"))
    posterior = ql.Posterior.open(store, build("bert"))
    assert torch.equal(posterior.predict(encoded), posterior.predict(batch("bert")))


@pytest.mark.parametrize("wrong", [[{"input_ids": torch.ones(3)}], {"input_ids": [[1, 2], [3, 4]]}])
def test_a_batch_that_is_not_collated_is_explained(wrong: Any, tmp_path: Path) -> None:
    posterior = ql.Posterior.open(fill(tmp_path, build("bert"), "bert"), build("bert"))
    with pytest.raises(TypeError, match="a list of examples a collator"):
        posterior.predict(wrong)


def test_a_model_with_another_adapter_than_the_store_is_told_so(tmp_path: Path) -> None:
    fill(tmp_path / "adapted", lora("bert"), "bert")
    with pytest.raises(ValueError, match=r"and \d+ more. It was sampled with an adapter: .* get_peft_model makes"):
        ql.Posterior.open(tmp_path / "adapted", build("bert"))
    fill(tmp_path / "plain", build("bert"), "bert")
    with pytest.raises(ValueError, match=r"sampled without an adapter: .* before get_peft_model"):
        ql.Posterior.open(tmp_path / "plain", lora("bert"))
