"""Lowered models of Hugging Face: gradient checkpointing, the columns that the Trainer keeps, and generation."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import qlangevin as ql
from qlangevin import lowering

transformers: Any = pytest.importorskip("transformers")

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 97}
pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries


def build(name: str) -> Any:
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=2, n_embd=32, n_head=2, vocab_size=97, n_positions=64, bos_token_id=1, eos_token_id=2
        )
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def results(model: Any) -> list[torch.Tensor]:
    torch.manual_seed(1)
    found = []
    for _ in range(2):
        ids = torch.randint(0, 97, (4, 16))
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return [*found, torch.tensor(list(lowering.state_dict(model).values()))]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_gradient_checkpointing_changes_no_bit(name: str, reentrant: bool) -> None:
    model = ql.lower(build(name).train(), "bfp8", "bfp8")
    other, runs = copy.deepcopy(model), []
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        other.enable_input_require_grads()
    inner = next(m for name, m in other.named_modules() if name.endswith(("1.mlp", "1.attention")))
    inner.register_forward_pre_hook(lambda *_: runs.append(1))
    assert all(torch.equal(a, b) for a, b in zip(results(model), results(other), strict=True))
    assert len(runs) == 4  # two forwards, two recomputations


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generate(name: str) -> None:
    model = ql.lower(build(name).eval(), "bfp8", "bfp8")
    ids = torch.randint(3, 97, (2, 5))
    out = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert torch.equal(out[:, :5], ids)
    assert 5 < out.shape[1] <= 9


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_the_trainer_keeps_the_columns(name: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    arguments = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=2, per_device_train_batch_size=2, save_strategy="no",
        disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8), "other": torch.zeros(1)} for _ in range(4)]
    signatures, losses = [], []
    for lowered in (False, True):
        model = build(name)
        trainer = transformers.Trainer(
            ql.lower(model, "bfp8", "bfp8") if lowered else model, arguments, train_dataset=rows
        )
        trainer._set_signature_columns_if_needed()
        signatures.append(trainer._signature_columns)
        losses.append(trainer.train().training_loss)
    assert signatures[0] == signatures[1]
    assert {"input_ids", "attention_mask", "labels"} <= set(signatures[1])
    assert abs(losses[0] - losses[1]) < 0.1
