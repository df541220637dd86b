"""A callback of Lightning's Trainer that collects samples of the posterior.

    class Classifier(L.LightningModule):
        def configure_optimizers(self):
            sampler = ql.SGLD(self.parameters(), lr=1e-2, num_data=60_000, weights="bfp8")
            schedule = ql.ConstantLR(sampler, total_steps=2000, samples=40)
            return {"optimizer": sampler, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    L.Trainer(max_steps=2000, callbacks=[SampleCallback("run")]).fit(model, loader)
    posterior = ql.Posterior.open("run", model)

It goes with ``lightning`` and with ``pytorch_lightning``. ``Trainer.fit(..., ckpt_path=...)`` goes on with the same bits: the
callback's state in Lightning's checkpoint is a checkpoint of qlangevin's, as bytes; packed weights in its ``state_dict`` are
decoded, so that anybody can load them.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._validate import check_flag
from .._warnings import warn
from ..quantization.qtensor import QTensor
from ..sampling.loss_sums import warn_of_sum
from ..sampling.schedules import Schedule
from ..sampling.stepping import Stepper
from ..storage import model_tensors
from . import trainer_checks
from .collecting import Collecting, Collector, find_sampler

__all__ = ["SampleCallback"]

FILE = "checkpoint.safetensors"


def _callback_classes() -> tuple[type, ...]:
    """Return the Callback of each of the two packages that is installed; a trainer knows its own."""
    found = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        try:
            found.append(importlib.import_module(name).Callback)
        except ImportError:
            continue
    if not found:
        raise ImportError("qlangevin.integrations.lightning needs lightning: pip install 'qlangevin[lightning]'")
    return tuple(dict.fromkeys(found))


class _Hooks(Collecting):
    """The hooks, apart from the classes that Lightning knows them by; `SampleCallback` describes the arguments."""

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
        self._saved: Tensor | None = None
        self._parts: list[Tensor] = []
        self._steps, self._first = 0, True

    # ---- hooks of the Trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check the settings, open the store, and resume if the Trainer does."""
        samplers = [each for each in trainer.optimizers if isinstance(each, Stepper)]
        if len(trainer.optimizers) > 1 and len(samplers) != 1:
            raise ValueError(
                f"the callback collects the samples of one sampler, got {len(samplers)} among the optimizers"
            )
        sampler = find_sampler(samplers[0] if samplers else next(iter(trainer.optimizers), None))
        _check_trainer(trainer, sampler, pl_module, self._allow_clipping)
        resumed = self._saved is not None
        if trainer.global_step and not resumed:
            raise ValueError(
                f"the Trainer resumes at step {trainer.global_step}, but its checkpoint was saved without this callback"
            )
        self._collector.begin(pl_module, sampler, _find_schedule(trainer), resumed, **self._options)
        if self._saved is not None:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / FILE).write_bytes(self._saved.numpy().tobytes())
                self._collector.load(Path(folder) / FILE)
            self._saved = None
        self._steps, self._parts, self._first = trainer.global_step, [], True

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        """Warn if the first loss is a sum; Lightning has divided it by the number of batches of a step."""
        if self._first:
            self._first = False
            warn_of_sum(self._collector.sampler, loss, int(trainer.accumulate_grad_batches), stacklevel=5)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note the loss, and collect a sample if this batch ended a step and it is time for one."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._parts.append(loss.detach())  # Lightning has divided it by the number of batches of a step
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        total = torch.stack(self._parts).sum() if self._parts else None
        self._parts = []
        self._collector.step(total, may_be_skipped=_is_scaled(trainer))
        if trainer.loggers and self._collector.store is not None and self._steps % trainer.log_every_n_steps == 0:
            pl_module.log("samples", float(len(self._collector.store)), logger=True, batch_size=1)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the store; warn if the chain has not converged."""
        self._collector.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Release the store."""
        self._collector.close()

    # ---- checkpoints of the Trainer

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Decode packed weights, which no other program could read."""
        weights = checkpoint["state_dict"]
        for name, t in weights.items():
            if isinstance(t, QTensor):
                weights[name] = model_tensors.to_plain(t)

    def state_dict(self) -> dict[str, Any]:
        """Return what resumes the chain: the bytes of a checkpoint of qlangevin's."""
        if self._collector.store is None:
            return {}
        with tempfile.TemporaryDirectory() as folder:
            self._collector.save(Path(folder) / FILE)
            content = bytearray((Path(folder) / FILE).read_bytes())
        return {"checkpoint": torch.frombuffer(content, dtype=torch.uint8)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep what was saved until training begins."""
        saved = state_dict.get("checkpoint")
        self._saved = saved.cpu() if isinstance(saved, Tensor) else None


class SampleCallback(_Hooks, *_callback_classes()):  # type: ignore[misc]  # known when it is imported
    """Collect samples into a store while Lightning trains, and report R-hat of their losses.

    Settings of the Trainer that would make the chain sample something else than the posterior raise ValueError when training
    begins, with the remedy; doubtful ones warn.

    Args:
        path: folder of the store.
        every: steps between samples; None takes them when the schedule says so, one of qlangevin's.
        burn_in: with ``every``, steps before the first sample.
        allow_clipping: let ``gradient_clip_val`` clip gradients, which biases the posterior.
        store_options: further arguments of `SampleStore.create`.
    """


# ---- settings of the Trainer


def _is_scaled(trainer: Any) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def _check_trainer(trainer: Any, sampler: Stepper, module: Any, allow_clipping: bool) -> None:
    """Raise ValueError for settings that would make it another posterior; warn of doubtful ones."""
    trainer_checks.check_processes(int(trainer.world_size), 1, module)
    remedy = "gradient_clip_val=None of the Trainer"
    trainer_checks.check_clipping(trainer.gradient_clip_val, sampler, remedy, allow_clipping)
    passes = int(trainer.accumulate_grad_batches)
    trainer_checks.check_accumulation(passes, sampler, "accumulate_grad_batches")
    trainer_checks.check_scaler(_is_scaled(trainer), sampler, f"precision={trainer.precision!r}")
    batches = trainer.num_training_batches
    if batches != float("inf") and batches % passes:
        warn(
            f"an epoch has {batches} batches, of which the last step accumulates {batches % passes}: Lightning divides their "
            f"loss by {passes} all the same, so that its gradient is too small; "
            f"limit_train_batches={batches - batches % passes} drops those batches",
            stacklevel=5,
        )


def _find_schedule(trainer: Any) -> Any:
    """Return the first schedule; raise ValueError if it is one of ours and does not advance with each step."""
    for config in trainer.lr_scheduler_configs:
        if isinstance(config.scheduler, Schedule) and (config.interval, config.frequency) != ("step", 1):
            raise ValueError(
                f"{type(config.scheduler).__name__} counts steps, but Lightning would advance it every {config.frequency} "
                f'{config.interval}: configure {{"scheduler": schedule, "interval": "step"}}'
            )
        return config.scheduler
    return None
