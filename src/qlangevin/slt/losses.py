"""Losses of batches: next-token and supervised ones, and observables, which are losses of fixed data at each draw.

A loss is a function of model and batch. It returns one number for each example [example], or for each of its tokens
[example, token]; the chain follows their mean. A single number is allowed, but then it cannot be observed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from .data import batch_to, in_order

__all__ = ["Loss", "Observable", "Observables", "read_loss", "read_observables", "supervised", "token_losses"]

CRITERIA = ("torch.nn.functional", "torch.nn.modules.loss")  # modules of torch
Loss: TypeAlias = Callable[[nn.Module, Any], Tensor]
Observables: TypeAlias = Mapping[str, "DataLoader[Any] | tuple[DataLoader[Any], Loss]"]


def token_losses(model: nn.Module, batch: Any) -> Tensor:
    """Return the next-token cross entropy of a causal language model, [example, token - 1].

    A batch is a tensor of token numbers, such a tensor alone in a list, or a mapping that has ``input_ids``. Padding is
    refused: it would count as text.
    """
    ids = token_ids(batch)
    if ids is None:
        raise TypeError(
            f"a batch must be a tensor of token numbers [example, token] or have 'input_ids', got {describe(batch)}; give loss=, "
            "or let the data set return tensors (of Hugging Face's: dataset.with_format('torch'))"
        )
    if isinstance(batch, Mapping) and (mask := batch.get("attention_mask")) is not None and not bool(mask.all()):
        raise ValueError("the batch has padding, which would count as text; cut texts to sequences of one length")
    hugging_face = hasattr(model, "config") and hasattr(model, "generate")
    output = model(ids, use_cache=False) if hugging_face else model(ids)
    logits = output if isinstance(output, Tensor) else output.logits
    if logits.dim() != 3:
        raise TypeError(
            f"the model returns {describe(logits)}, not logits [example, token, word] of a language model; give loss="
        )
    flat = logits[:, :-1].float().flatten(0, 1)
    losses: Tensor = nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="none")
    return losses.view(ids.shape[0], -1)


def supervised(criterion: Callable[..., Tensor], **options: Any) -> Loss:
    """Return the loss of batches (x, y): ``criterion(model(x), y, reduction="none")``, the mean over all but the examples.

    ``criterion`` is a function as in `torch.nn.functional`, or a module such as `torch.nn.CrossEntropyLoss`.
    """
    if isinstance(criterion, nn.Module):
        each_of = copy.copy(criterion)
        each_of.reduction = "none"  # type: ignore[assignment]
        return supervised(lambda output, y, reduction: each_of(output, y, **options))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        each = criterion(model(x), y, reduction="none", **options)
        return each.flatten(1).mean(1) if each.dim() > 1 else each

    return loss


def token_ids(batch: Any) -> Tensor | None:
    """Return the token numbers of a batch, if it has any, as int64."""
    if isinstance(batch, (list, tuple)) and len(batch) == 1:
        batch = batch[0]
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if isinstance(ids, Tensor) and ids.dtype in (torch.int64, torch.int32) and ids.dim() == 2:
        return ids.long()
    return None


def describe(thing: Any) -> str:
    """Return type and shape of what is not as it should be."""
    return f"a tensor of shape {tuple(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"


def read_loss(loss: Loss | None) -> Loss:
    """Return the loss, by default `token_losses`; raise TypeError for a criterion, which knows of no model."""
    if getattr(loss, "__module__", None) in CRITERIA:
        raise TypeError(
            "loss must be a function of model and batch, got a criterion; give ql.slt.supervised(criterion)"
        )
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of model and batch, got {describe(loss)}")
    return loss or token_losses


class Observable(NamedTuple):
    """Fixed batches whose losses are recorded at each draw."""

    batches: Sequence[Any]
    loss: Loss
    ids: Tensor | None  # token numbers [example, token]

    def measure(self, model: nn.Module, name: str) -> Tensor:
        """Return the losses of all examples, [example, ...], float32 on the CPU."""
        device = next(model.parameters()).device
        with torch.no_grad():
            found = [self.loss(model, batch_to(batch, device)).float().cpu() for batch in self.batches]
        if found[0].dim() == 0:
            raise ValueError(
                f"the loss of the observable {name!r} must have a number for each example, got a single one; "
                "leave the mean out (reduction='none')"
            )
        return torch.cat(found)


def read_observables(given: Observables | None, loss: Loss) -> dict[str, Observable]:
    """Return the observables with their batches, in the order of their data sets: the same at each draw."""
    found = {}
    for name, spec in (given or {}).items():
        loader, its = spec if isinstance(spec, tuple) else (spec, loss)
        batches = [batch for _, batch in in_order(loader, name)]
        ids = [token_ids(batch) for batch in batches]
        same = all(i is not None for i in ids) and len({i.shape[1] for i in ids if i is not None}) == 1
        found[name] = Observable(batches, its, torch.cat([i for i in ids if i is not None]) if same else None)
    return found
