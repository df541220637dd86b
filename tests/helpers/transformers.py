"""Small transformers from configs, with and without adapters, for the tests that need the libraries of Hugging Face."""

from __future__ import annotations

from typing import Any

import pytest
import torch

NAMES = pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def build(name: str) -> Any:
    """Build a small model, the same each time, without a download."""
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "bert":
        return library.BertForSequenceClassification(library.BertConfig(vocab_size=100, **SIZES, **NO_DROPOUT))
    if name == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return library.GPT2LMHeadModel(
            library.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100, n_positions=64, **off)
        )
    return library.LlamaForCausalLM(library.LlamaConfig(vocab_size=100, num_key_value_heads=2, **SIZES))


def lora(name: str) -> Any:
    """Build the same model with adapters of rank 8."""
    targets = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}[name]
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules=targets, fan_in_fan_out=name == "gpt2")
    torch.manual_seed(1)
    return peft.get_peft_model(build(name), config)


def batch(name: str) -> dict[str, Any]:
    """Return token ids and labels for one of the models."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 100, (4, 12), generator=generator)
    return {"input_ids": ids, "labels": torch.arange(4) % 2 if name == "bert" else ids}
