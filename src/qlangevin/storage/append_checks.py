"""Checks of a sample before it is appended, and of a store before it is resumed."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from .. import lowering
from .._validate import describe_differences
from .._warnings import warn_once
from .manifest import Manifest, count_steps, is_count

__all__ = ["check_resumable", "check_step", "warn_of_dropout", "warn_of_repetition"]


def check_resumable(old: Manifest, new: Manifest, path: Path) -> None:
    """Raise ValueError unless a store was begun with the model, sampler and schedule that are to resume it."""
    base = [n for n, t in new.tensors.items() if t.sha256 and n in old.tensors]
    if [n for n in base if old.tensors[n].sha256 not in (None, new.tensors[n].sha256)]:
        raise ValueError(
            f"the store in {path} refers to a base that is not this model's: load the one it was begun with"
        )
    if old.tensors != new.tensors:
        names = [*old.tensors, *(name for name in new.tensors if name not in old.tensors)]
        odd = [n for n in names if old.tensors.get(n) != new.tensors.get(n)]
        pairs = "; ".join(f"{n!r} is {old.tensors.get(n)} there, now {new.tensors.get(n)}" for n in odd[:5])
        raise ValueError(f"the store in {path} is of another model or sampler: {pairs}")
    if odd := describe_differences({"ranks": 1, **old.settings}, {"ranks": 1, **new.settings}):
        raise ValueError(f"the store in {path} was begun with other settings: {'; '.join(odd)}")


def check_step(step: int | None, sampler: Optimizer | None, manifest: Manifest) -> int | None:
    """Return the step of a sample that is to be added, by default the sampler's; raise ValueError if it cannot be."""
    if step is None and sampler is not None:
        step = count_steps(sampler)
    if step is not None and not is_count(step):
        raise ValueError(
            f"step must be how many steps the sampler has made, an integer that is not negative, got {step!r}"
        )
    last = manifest.samples[-1].step if manifest.samples else None
    if step is not None and last is not None and step < last:
        raise ValueError(
            f"the last sample is of step {last}, this one of step {step}: was the checkpoint not loaded, or without store=, "
            "which removes the samples that came after it?"
        )
    return step


def warn_of_repetition(given: set[str], step: int | None, manifest: Manifest, path: Path, stacklevel: int) -> None:
    """Warn, once, of a second sample of one step."""
    if step is not None and manifest.samples and manifest.samples[-1].step == step:
        warn_once(
            given,
            "step",
            f"the store in {path} has a sample of step {step} already: the same weights count twice, unless something "
            "else than the sampler changed them; append one sample after a step, when schedule.collect is true",
            stacklevel + 1,
        )


def warn_of_dropout(given: set[str], model: nn.Module, stacklevel: int) -> None:
    """Warn, once, of dropout that is active: the chain then samples no posterior of the loss."""
    if "dropout" in given:
        return
    active = [name for name, module in model.named_modules() if module.training and _dropout_rate(module) > 0]
    active += _dropping_functions(model)
    if active:
        names = ", ".join(map(repr, active[:3])) + (", ..." if len(active) > 3 else "")
        warn_once(
            given,
            "dropout",
            f"dropout is active while sampling, in {names}: gradients are then of another network at each step, and the samples "
            "not of the posterior. Set its rate to 0 (in a config: dropout=0.0), or put these modules into evaluation mode",
            stacklevel + 1,
        )


def _dropout_rate(module: nn.Module) -> float:
    """Return the rate with which a module of PyTorch drops numbers in training mode."""
    if isinstance(module, _DropoutNd):
        return float(module.p)
    if isinstance(module, nn.RNNBase):
        return float(module.dropout) if module.num_layers > 1 else 0.0
    return float(module.dropout) if isinstance(module, nn.MultiheadAttention) else 0.0


def _dropping_functions(model: nn.Module) -> list[str]:
    """Return the calls of dropout as a function that a lowered model has made in training, as "module/dropout/number"."""
    called = [name for name, runs in lowering.state_dict(model).items() if "/" in name and runs > 0]
    return [name for name in called if "dropout" in name.split("/")[1] and _is_training(model, name.split("/")[0])]


def _is_training(model: nn.Module, name: str) -> bool:
    return model.get_submodule(name).training
