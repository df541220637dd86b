"""A callback of the Hugging Face Trainer that collects samples of the posterior.

    sampler = ql.SGLD(model.parameters(), lr=1e-2, num_data=len(data), weights="bfp8")
    schedule = ql.ConstantLR(sampler, total_steps=2000, samples=40)
    args = TrainingArguments("out", max_steps=2000, max_grad_norm=0)
    Trainer(model, args, train_dataset=data, optimizers=(sampler, schedule), callbacks=[SampleCallback("run")]).train()
    posterior = ql.Posterior.open("run", model)

``Trainer.train(resume_from_checkpoint=True)`` goes on with the same bits: beside the Trainer's own files, each of its checkpoints
gets a ``qlangevin.safetensors`` with codes, counters and what the store held.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._validate import check_flag
from .._warnings import warn
from ..sampling.loss_sums import warn_of_sum
from ..sampling.stepping import Stepper
from . import trainer_checks
from .collecting import Collecting, Collector, find_sampler

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "qlangevin.integrations.huggingface needs transformers: pip install 'qlangevin[huggingface]'"
    ) from error

__all__ = ["SampleCallback"]

FILE = "qlangevin.safetensors"  # in each of the Trainer's checkpoints


class SampleCallback(Collecting, TrainerCallback):  # type: ignore[misc]  # transformers is not looked into
    """Collect samples into a store while a Trainer trains, and report R-hat of their losses.

    Settings of the Trainer that would make the chain sample something else than the posterior raise ValueError when training
    begins, with the remedy; doubtful ones warn.

    Args:
        path: folder of the store.
        every: steps between samples; None takes them when the schedule says so, one of qlangevin's.
        burn_in: with ``every``, steps before the first sample.
        allow_clipping: let ``max_grad_norm`` clip gradients, which biases the posterior.
        store_options: further arguments of `SampleStore.create`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int | None = None,
        burn_in: int = 0,
        allow_clipping: bool = False,
        **store_options: Any,
    ) -> None:
        self._collector = Collector(path, every, burn_in)
        self._allow_clipping, self._options = check_flag("allow_clipping", allow_clipping), store_options
        self._losses = _StepLoss()

    # ---- events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Check the settings, open the store, and resume if the Trainer does."""
        model, sampler = given["model"], find_sampler(given["optimizer"])
        _check_arguments(args, sampler, model, self._allow_clipping)
        _check_schedule(args, given["lr_scheduler"])
        _check_attention_dropout(model)
        trainer_checks.check_length(given["lr_scheduler"], int(state.max_steps), int(state.global_step))
        resumed = state.global_step > 0
        file = _checkpoint_folder(args, state) / FILE
        if resumed and not file.exists():
            raise FileNotFoundError(
                f"the Trainer resumes at step {state.global_step}, but there is no {file}: resume from a checkpoint in "
                "output_dir that was saved with this callback"
            )
        self._collector.begin(model, sampler, given["lr_scheduler"], resumed, **self._options)
        if resumed:
            self._collector.load(file)
        self._losses.attach(model, sampler, given.get("train_dataloader"), int(args.gradient_accumulation_steps))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Collect a sample if it is time for one."""
        self._collector.step(self._losses.take(), may_be_skipped=_is_scaled(args))

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Save what resumes the chain into the Trainer's checkpoint."""
        folder = _checkpoint_folder(args, state)
        if folder.is_dir():
            self._collector.save(folder / FILE)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        """Add the number of samples and R-hat of their losses to the log."""
        if logs is None or not (report := self.report()).samples:
            return
        found: dict[str, float] = {"samples": report.samples}
        if report.r_hat == report.r_hat:  # there are samples enough, and JSON has no NaN
            found |= {"loss_r_hat": round(report.r_hat, 4)}
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Close the store; warn if the chain has not converged."""
        self._losses.detach()
        self._collector.end()


class _StepLoss:
    """The loss of each step, as the model returned it, put together from its micro-batches as the Trainer does."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._hook: Any = None
        self._normalized = False  # whether the model divides by the items of all micro-batches
        self._labels: list[Any] = []  # of the first step

    def attach(self, model: nn.Module, sampler: Stepper, loader: Any, passes: int) -> None:
        self.detach()
        self._sampler, self._loader, self._passes = sampler, loader, passes
        self._first, self._labels = True, []
        self._hook = model.register_forward_hook(self._hear, with_kwargs=True)

    def detach(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._parts = []

    def _hear(self, model: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = output.get("loss") if isinstance(output, dict) else None
        if not model.training or not isinstance(loss, Tensor):
            return
        self._normalized = kwargs.get("num_items_in_batch") is not None
        self._parts.append(loss.detach())
        if not self._first:
            return
        labels = kwargs.get("labels")
        self._labels.append(labels)
        if len(self._labels) == 1:
            warn_of_sum(self._sampler, loss, stacklevel=5)
            _check_terms(model, labels, self._sampler, self._loader)
            if self._passes > 1 and self._normalized:
                _check_normalization(model, args, kwargs, self._passes)
        if len(self._labels) == self._passes and self._normalized:
            _check_items(model, self._labels, float(kwargs["num_items_in_batch"]))

    def take(self) -> Tensor | None:
        """Return the loss of the step that has ended, None if the model returned none."""
        if not self._parts:
            return None
        parts, self._parts, self._first, self._labels = torch.stack(self._parts), [], False, []
        return parts.sum() if self._normalized else parts.mean()


# ---- settings of the Trainer


def _checkpoint_folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _is_scaled(args: Any) -> bool:
    return bool(args.fp16)


def _check_arguments(args: Any, sampler: Stepper, model: nn.Module, allow_clipping: bool) -> None:
    """Raise ValueError for training arguments that would make it another posterior; warn of doubtful ones."""
    trainer_checks.check_processes(int(args.world_size), int(args.n_gpu), model)
    if args.deepspeed or args.fsdp:
        raise ValueError("DeepSpeed and FSDP shard what a sampler steps as a whole: leave deepspeed= and fsdp= out")
    trainer_checks.check_clipping(args.max_grad_norm, sampler, "max_grad_norm=0 of TrainingArguments", allow_clipping)
    passes = int(args.gradient_accumulation_steps)
    trainer_checks.check_accumulation(passes, sampler, "gradient_accumulation_steps")
    trainer_checks.check_scaler(_is_scaled(args), sampler, "fp16=True")
    if args.weight_decay:
        warn(
            f"weight_decay={args.weight_decay:g} of TrainingArguments has no effect on a sampler that is passed to the Trainer: "
            "the prior is SGLD(prior_std=...) or SGLD(weight_decay=...)",
            stacklevel=5,
        )
    if args.label_smoothing_factor:
        warn(
            f"label_smoothing_factor={args.label_smoothing_factor:g}: the loss is no log-likelihood of the labels, so the "
            "posterior is that of smoothed ones, and the Trainer tells the callback no loss",
            stacklevel=5,
        )
    if args.neftune_noise_alpha:
        warn(
            f"neftune_noise_alpha={args.neftune_noise_alpha:g} adds noise that the posterior knows nothing of",
            stacklevel=5,
        )


def _check_schedule(args: Any, schedule: Any) -> None:
    """Warn of the learning rate that the Trainer lets fall if it was given no schedule."""
    made = [getattr(each, "func", each) for each in getattr(schedule, "lr_lambdas", [])]
    own = any(getattr(each, "__module__", "").startswith("transformers.") for each in made)
    name = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if own and not name.startswith("constant"):
        warn(
            f"the Trainer's own schedule ({name}) takes the learning rate to zero, and the chain with it to a stop: pass "
            "optimizers=(sampler, qlangevin.ConstantLR(...)), or lr_scheduler_type='constant'",
            stacklevel=5,
        )


def _check_normalization(model: nn.Module, args: Any, kwargs: dict[str, Any], passes: int) -> None:
    """Raise ValueError if a model takes the number of items that the Trainer hands it, and does not divide its loss by it.

    The Trainer relies on that to average over micro-batches, by the model's signature. Some models take any argument.
    """
    training = [module for module in model.modules() if module.training]
    items = kwargs["num_items_in_batch"]
    model.eval()  # draws no random bits
    try:
        with torch.no_grad():
            once, half = (float(model(*args, **kwargs | {"num_items_in_batch": n})["loss"]) for n in (items, 2 * items))
    finally:
        for module in training:
            module.training = True
    if abs(half - once / 2) > 0.1 * abs(once):
        inner = "model" if _base_of(model) is model else "model.get_base_model()"
        raise ValueError(
            f"with gradient_accumulation_steps={passes} the Trainer leaves it to the model to average over micro-batches, and "
            f"{type(model).__name__} does not: gradients would be {passes} times too large. Set "
            f"{inner}.accepts_loss_kwargs = False before the Trainer is made, and it averages by itself"
        )


def _check_terms(model: nn.Module, labels: Any, sampler: Stepper, loader: Any) -> None:
    """Compare N with the number of labels that the loss is a mean over, going by the first batch."""
    if not isinstance(labels, Tensor) or not labels.dim():
        return
    try:
        examples = len(loader.dataset)
    except (AttributeError, TypeError):
        return  # a stream of data
    valid = _count_predicted(model, labels)
    num_data = [float(group["num_data"]) for group in sampler.param_groups]
    shifted = "[:, 1:]" if _is_shifted(model, labels) else ""
    count = f"sum((b['labels']{shifted} != -100).sum().item() for b in trainer.get_train_dataloader())"
    trainer_checks.check_num_data(num_data, examples, valid / len(labels), count)


def _check_items(model: nn.Module, labels: list[Any], items: float) -> None:
    """Warn if the Trainer has a model divide its loss by labels that it does not predict, such as the first of each text.

    In transformers 5.23 it leaves out the first only for models that name their loss, and GPT2LMHeadModel does not.
    """
    if not all(isinstance(each, Tensor) and each.dim() > 1 for each in labels) or not _predicts_next(model):
        return
    predicted = sum(_count_predicted(model, each) for each in labels)
    if predicted and abs(items / predicted - 1) > 0.01:
        inner = "model" if _base_of(model) is model else "model.get_base_model()"
        warn(
            f"the Trainer divides the loss of {type(_base_of(model)).__name__} by {items:g} labels, of which it predicts "
            f"{predicted}: loss and gradients are {predicted / items:.3g} times those of the mean, as if there were so much less "
            f"data. Set {inner}.accepts_loss_kwargs = False before the Trainer is made",
            stacklevel=5,
        )


def _check_attention_dropout(model: nn.Module) -> None:
    """Warn of dropout that attention takes as a number from the config: no module, which the store would notice."""
    rate = getattr(getattr(_base_of(model), "config", None), "attention_dropout", None)
    if isinstance(rate, float) and rate > 0:
        warn(
            f"attention_dropout={rate:g} in the model's config: gradients are then of another network at each step, and the "
            "samples not of the posterior; set it to 0.0 before the model is made",
            stacklevel=5,
        )


def _count_predicted(model: nn.Module, labels: Tensor) -> int:
    """Return how many labels of a batch the loss is a mean over."""
    shifted = labels[:, 1:] if _is_shifted(model, labels) else labels
    return int((shifted != -100).sum()) if not labels.is_floating_point() else len(labels)


def _is_shifted(model: nn.Module, labels: Tensor) -> bool:
    """Return True if a model predicts each label from those before it, so that the first of a text is not predicted."""
    return labels.dim() > 1 and _predicts_next(model)


def _base_of(model: nn.Module) -> nn.Module:
    """Return the model inside of a PeftModel, or the model itself."""
    base: Any = getattr(model, "get_base_model", None)
    found: nn.Module = model if base is None else base()
    return found


def _predicts_next(model: nn.Module) -> bool:
    """Return True if the labels of a model are shifted by one, as those of a causal language model are."""
    return type(_base_of(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))
