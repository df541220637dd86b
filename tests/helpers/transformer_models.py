"""Tiny transformers from configurations, their data, and runs of the Hugging Face Trainer; needs transformers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import qlangevin as ql

VOCABULARY, LENGTH, EXAMPLES = 60, 12, 48
Batch: TypeAlias = dict[str, Tensor]


def bert(seed: int = 0, **config: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32,
        "num_labels": 2,
        **sizes,
        **dropout,
    }
    return BertForSequenceClassification(BertConfig(**(settings | config)))


def gpt2(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2, **dropout)
    config.eos_token_id = config.bos_token_id = config.pad_token_id = 0
    return GPT2LMHeadModel(config)


def llama(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=1, max_position_embeddings=32, **sizes, **ids)
    )


def t5(seed: int = 0) -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(seed)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **sizes, **ids))


def vit(seed: int = 0) -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(image_size=16, patch_size=4, num_labels=2, **sizes, **dropout))


def text(count: int = EXAMPLES, seed: int = 1) -> list[dict[str, Any]]:
    """Sequences whose label is whether their first token is in the upper half of the vocabulary."""
    tokens = torch.randint(2, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": int(row[0] >= VOCABULARY // 2)} for row in tokens]


def sentences(count: int = EXAMPLES, seed: int = 1) -> list[dict[str, Any]]:
    """Sequences that count upwards, for language models."""
    start = torch.randint(2, VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(seed))
    tokens = (start + torch.arange(LENGTH) - 2) % (VOCABULARY - 2) + 2
    return [{"input_ids": row, "labels": row} for row in tokens]


def images(count: int = EXAMPLES, seed: int = 1) -> list[dict[str, Any]]:
    pixels = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
    return [{"pixel_values": x, "labels": int(x[0].mean() > 0)} for x in pixels]


MODELS: dict[str, tuple[Callable[[], Any], Callable[[], list[dict[str, Any]]]]] = {
    "bert": (bert, text), "gpt2": (gpt2, sentences), "llama": (llama, sentences), "t5": (t5, sentences), "vit": (vit, images),
}  # fmt: skip


def collate(rows: list[dict[str, Any]]) -> Batch:
    """Stack examples into a batch of named tensors."""
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def sampler_of(model: nn.Module, terms: float = EXAMPLES, **settings: Any) -> ql.SGLD:
    """Return a sampler of all that is trained."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    chosen: dict[str, Any] = {"lr": 0.02, "num_data": terms, "gradients": "bfp8", "temperature": 0.01} | settings
    return ql.SGLD(trained, **chosen)


def arguments(folder: Path, steps: int = 12, **changes: Any) -> Any:
    """Return the training arguments of a short, quiet run on the CPU."""
    from transformers import TrainingArguments

    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
    run = {
        "max_steps": steps,
        "per_device_train_batch_size": 8,
        "save_steps": 5,
        "logging_steps": 5,
        "max_grad_norm": 0,
    }
    with warnings.catch_warnings():
        return TrainingArguments(str(folder), **(quiet | run | changes))


def trainer(model: Any, args: Any, data: list[dict[str, Any]], optimizers: Any, *callbacks: Any) -> Any:
    """Return a Trainer that prints nothing."""
    from transformers import PrinterCallback, Trainer

    made = Trainer(
        model, args, train_dataset=data, optimizers=optimizers, callbacks=[*callbacks], data_collator=collate
    )
    made.remove_callback(PrinterCallback)
    return made
