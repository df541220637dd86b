"""LoRA by peft: only the adapter is sampled, by the Trainer, and a sample is kilobytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import qlangevin as ql

pytest.importorskip("peft", reason="peft is not installed")

import peft

from qlangevin.integrations.huggingface import FILE, SampleCallback
from tests.helpers.stores import read_files
from tests.helpers.transformer_models import arguments, bert, collate, sampler_of, text, trainer

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft on transformers 5


def adapted() -> Any:
    """Return Bert with an adapter of rank 8, on a base packed into 8 bits."""
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=8, target_modules=["query", "value"], modules_to_save=["classifier"]
    )
    model = ql.lower(peft.get_peft_model(bert(hidden_size=64), config), activations="bfp8", errors="bfp8")
    return ql.pack(model, weights="bfp8", frozen=True)


def run(folder: Path, steps: int = 12, resume: bool = False) -> Any:
    model = adapted()
    sampler = sampler_of(model)
    callback = SampleCallback(folder / "run", frozen="reference")
    optimizers = (sampler, ql.ConstantLR(sampler, 12, 6))
    made = trainer(model, arguments(folder / "out", steps), text(), optimizers, callback)
    made.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-5") if resume else None)
    return model


def test_a_sample_of_the_adapter_is_kilobytes_and_the_base_is_not_stored(tmp_path: Path) -> None:
    model = run(tmp_path)
    store = ql.SampleStore.open(tmp_path / "run")
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    base = sum(p.numel() for p in model.parameters()) - weights
    size = store.manifest.samples[0].digest.size
    assert size < 1.2 * weights + 4000  # codes, exponents, and names in the header
    assert sum(map(len, read_files(tmp_path / "run").values())) < 6 * size + base / 2
    batch = collate(text(8, seed=2))
    probabilities = ql.Posterior.open(store, adapted()).predict({"input_ids": batch["input_ids"]})
    assert torch.allclose(probabilities.sum(1), torch.ones(8))


def test_only_the_adapter_is_sampled(tmp_path: Path) -> None:
    fresh, model = adapted(), run(tmp_path)
    changed = {
        name: not torch.equal(p.decode(), q.decode())
        for (name, p), (_, q) in zip(model.named_parameters(), fresh.named_parameters(), strict=True)
    }
    assert all("lora" in name or "modules_to_save" in name for name, moved in changed.items() if moved)
    assert any("lora_B" in name for name, moved in changed.items() if moved)


def test_a_resumed_adapter_has_the_store_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    run(tmp_path / "whole")
    run(tmp_path / "parts", steps=8)
    size = (tmp_path / "parts" / "out" / "checkpoint-5" / FILE).stat().st_size
    model = run(tmp_path / "parts", resume=True)
    assert read_files(tmp_path / "parts" / "run") == read_files(tmp_path / "whole" / "run")
    assert size < sum(p.numel() for p in model.parameters())  # the frozen base is left to the Trainer


def test_the_remedy_for_accumulation_works_on_the_model_inside(tmp_path: Path) -> None:
    for remedied in (False, True):
        model = adapted()
        if remedied:
            model.get_base_model().accepts_loss_kwargs = False
        sampler, callback = sampler_of(model), SampleCallback(tmp_path / f"run{remedied}")
        args = arguments(tmp_path / "out", gradient_accumulation_steps=2)
        made = trainer(model, args, text(), (sampler, ql.ConstantLR(sampler, 12, 6)), callback)
        if remedied:
            made.train()
        else:
            with pytest.raises(ValueError, match=r"Set model\.get_base_model\(\)\.accepts_loss_kwargs = False"):
                made.train()
    assert callback.store is not None
    assert len(callback.store) == 6
