"""Checks of a trainer's settings: refused if the posterior would be another one, warned of if that is doubtful."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .. import lowering
from .._warnings import warn
from ..sampling.schedules import Schedule
from ..sampling.stepping import Stepper

__all__ = [
    "check_accumulation",
    "check_clipping",
    "check_length",
    "check_num_data",
    "check_parameters",
    "check_processes",
    "check_scaler",
]


def check_parameters(model: nn.Module, sampler: Stepper) -> None:
    """Raise ValueError if the sampler steps other tensors than the model's parameters, or none of them is trained."""
    own = {id(p) for p in model.parameters()}
    stepped = [p for group in sampler.param_groups for p in group["params"]]
    if foreign := sum(id(p) not in own for p in stepped):
        raise ValueError(
            f"{foreign} of the sampler's {len(stepped)} parameters are not the model's, whose samples would not change: make the "
            "sampler of model.parameters() of the model that is trained, after pack and get_peft_model"
        )
    if not any(p.requires_grad for p in stepped):
        raise ValueError(
            f"none of the sampler's {len(stepped)} parameters has requires_grad=True: there is nothing to sample. Make the "
            "sampler after get_peft_model, of model.parameters(): adapters are new parameters, and those of before are frozen"
        )


def check_clipping(norm: float | None, sampler: Stepper, remedy: str, allowed: bool) -> None:
    """Raise ValueError for clipped gradients: the chain would not sample the posterior."""
    if not norm:
        return
    if sampler.step_in_backward:
        raise ValueError(
            f"the trainer clips gradients to the norm {norm:g}, but with step_in_backward=True there are none left to clip: "
            f"set {remedy}, and SGLD(max_grad_norm=...) if each parameter's own gradient is to be clipped"
        )
    if not allowed:
        raise ValueError(
            f"the trainer clips gradients to the norm {norm:g}, so that the chain would sample another distribution than the "
            f"posterior wherever they are larger: set {remedy}, or allow_clipping=True of the callback to do it all the same"
        )


def check_accumulation(passes: int, sampler: Stepper, name: str) -> None:
    """Raise ValueError if a sampler that steps in backward has other passes a step than the trainer."""
    if not sampler.step_in_backward:
        return  # gradients add up until step() is called
    own = {int(group.get("accumulate", 1)) for group in sampler.param_groups}
    if own != {passes}:
        have = ", ".join(map(str, sorted(own)))
        raise ValueError(
            f"the trainer has {name}={passes}, but the sampler steps in backward with accumulate={have}; they must be equal: "
            f"SGLD(step_in_backward=True, accumulate={passes})"
        )


def check_scaler(scaled: bool, sampler: Stepper, setting: str) -> None:
    """Raise ValueError if gradients are scaled for float16 and the sampler would step on them before they are unscaled."""
    if scaled and sampler.step_in_backward:
        raise ValueError(
            f"{setting} multiplies the loss to keep small gradients in float16, and step_in_backward=True would step on "
            "gradients that are still multiplied: use bf16, or step_in_backward=False"
        )


def check_processes(processes: int, gpus: int, model: nn.Module) -> None:
    """Raise ValueError for a trainer that would copy the model to several processes or GPUs."""
    if processes > 1:
        raise ValueError(
            f"the trainer runs {processes} processes, whose copies of the model nothing would keep the same to the byte: train "
            "each chain in a process of its own (stream=0, 1, ... of the sampler), or use qlangevin.distributed.replicate in a "
            "loop of your own"
        )
    if gpus > 1:
        also = ", which lowered layers do not survive" if lowering.state_dict(model) else ""
        raise ValueError(
            f"the trainer would spread batches over {gpus} GPUs by nn.DataParallel{also}: make one visible, "
            "CUDA_VISIBLE_DEVICES=0, and train a chain on each"
        )


def check_length(schedule: object, steps: int, done: int) -> None:
    """Raise ValueError if a trainer takes more steps than its schedule has; warn if it ends before the first sample."""
    if not isinstance(schedule, Schedule):
        return
    total = schedule.total_steps
    if done >= total:
        raise ValueError(f"this run is finished: its schedule has {total} steps, and the checkpoint is of step {done}")
    if steps > total:
        raise ValueError(
            f"the trainer takes {steps} steps and the schedule has total_steps={total}: give both the same number "
            "(max_steps= of the trainer)"
        )
    if 0 < steps < min(schedule.moments, default=0):
        warn(
            f"the trainer takes {steps} steps of the {total} that the schedule has, and ends before the first sample: give both "
            "the same number, unless the run is to be resumed",
            stacklevel=5,
        )


def check_num_data(num_data: Sequence[float], examples: int, items_per_example: float, count: str) -> None:
    """Warn if N is far from the number of terms that the loss is the mean of: examples, or tokens that are predicted.

    ``items_per_example`` is that of the first batch; ``count`` is the code that counts the items of all.
    """
    terms = examples * items_per_example
    odd = [n for n in num_data if not 0.5 < n / terms < 2]
    if not odd:
        return
    what, ratio = f"num_data={odd[0]:g}, but the loss is a mean over {examples} examples", f"{odd[0] / terms:.3g}"
    if items_per_example == 1:
        message = f"{what}: the posterior is that of {ratio} times the data; num_data={terms:.0f} counts each once"
    else:
        message = (
            f"{what} of about {items_per_example:.4g} labels (tokens) each: the posterior is that of about {ratio} times the "
            f"data. N is about {terms:.4g}, going by the first batch; count it: {count}"
        )
    warn(message, stacklevel=5)
