"""Packed models saved by transformers, peft, accelerate and the Trainer, and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import qlangevin as ql
from tests.helpers.transformers import NAMES, batch, build, lora

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning", "ignore:.*pin_memory:UserWarning"
)


def walk(model: nn.Module, name: str, steps: int = 3, **options: Any) -> ql.SGLD:
    """Sample for some steps."""
    sampler = ql.SGLD(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, num_data=48, prior_std=1.0, **options
    )
    for _ in range(steps):
        model(**batch(name)).loss.backward()
        sampler.step()
        sampler.zero_grad()
    return sampler


def codes(model: nn.Module) -> dict[str, torch.Tensor]:
    packed = [(name, p) for name, p in model.named_parameters() if isinstance(p, ql.QTensor)]
    parts = [(f"{name} {part}", getattr(p, part)) for name, p in packed for part in ("codes", "exponents")]
    return {name: t for name, t in parts if t is not None}


def same_codes(a: nn.Module, b: nn.Module) -> bool:
    one, other = codes(a), codes(b)
    return bool(one) and one.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in one.items())


@NAMES
def test_save_pretrained_writes_floats_and_they_are_the_same_codes(name: str, tmp_path: Path) -> None:
    model = ql.pack(build(name), "bfp8")
    walk(model, name)
    model.save_pretrained(tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "model.safetensors").values()} == {torch.float32}
    plain = type(model).from_pretrained(tmp_path)
    inputs = {"input_ids": batch(name)["input_ids"]}
    with torch.no_grad():
        torch.testing.assert_close(plain.eval()(**inputs).logits, model.eval()(**inputs).logits)
    assert same_codes(ql.pack(plain, "bfp8", seed=7), model)


@NAMES
def test_peft_saves_adapters_of_packed_models(name: str, tmp_path: Path) -> None:
    model = ql.pack(lora(name), "bfp8", frozen=True)
    walk(model, name)
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert all("lora_" in key and t.dtype == torch.float32 for key, t in written.items())
    other = peft.PeftModel.from_pretrained(build(name), tmp_path, is_trainable=True)
    assert same_codes(ql.pack(other, "bfp8", frozen=True), model)


def test_accelerate_saves_packed_models(tmp_path: Path) -> None:
    model = ql.pack(build("gpt2"), "bfp8")
    walk(model, "gpt2")
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path)
    other = ql.pack(build("gpt2"), "bfp8")
    assert not same_codes(model, other)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)  # without the tied name
    assert same_codes(model, other)


class Examples(torch.utils.data.Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"input_ids": (torch.arange(6) * (i + 1)) % 100, "labels": torch.tensor(i % 2)}


def trainer(model: Any, folder: Path, steps: int) -> Any:
    sampler = ql.SGLD(model.parameters(), lr=1e-3, num_data=16, prior_std=1.0)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=0,
        disable_tqdm=True, max_grad_norm=0.0, dataloader_pin_memory=False,
    )  # fmt: skip
    constant = torch.optim.lr_scheduler.LambdaLR(sampler, lambda step: 1.0)
    return transformers.Trainer(model, arguments, train_dataset=Examples(), optimizers=(sampler, constant))


def test_checkpoints_of_the_trainer_resume_to_the_byte(tmp_path: Path) -> None:
    whole = ql.pack(build("bert"), "bfp8")
    trainer(whole, tmp_path / "whole", 4).train()
    resumed = ql.pack(build("bert"), "bfp8")
    trainer(resumed, tmp_path / "whole", 4).train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert same_codes(whole, resumed)


def test_checkpoints_as_lightning_writes_them_hold_codes(tmp_path: Path) -> None:
    """Lightning saves a dict with the state_dict and those of the optimizers by torch.save, and may load it as weights only."""
    model = ql.pack(build("bert"), "bfp8")
    sampler = walk(model, "bert")
    checkpoint = {"epoch": 1, "state_dict": model.state_dict(), "optimizer_states": [sampler.state_dict()]}
    torch.save(checkpoint, tmp_path / "last.ckpt")
    found = torch.load(tmp_path / "last.ckpt", weights_only=True)
    other = ql.pack(build("bert"), "bfp8")
    other.load_state_dict(found["state_dict"])
    assert same_codes(model, other)
    again = ql.SGLD(other.parameters(), lr=1e-3, num_data=48, prior_std=1.0)
    again.load_state_dict(found["optimizer_states"][0])
    for each, chain in ((model, sampler), (other, again)):
        each(**batch("bert")).loss.backward()
        chain.step()
    assert same_codes(model, other)
