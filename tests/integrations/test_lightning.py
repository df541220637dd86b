"""The callback of Lightning: it collects, resumes to the byte, reports, and refuses what biases the chain."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qlangevin as ql
from tests.helpers.stores import read_files

pytest.importorskip("lightning", reason="Lightning is not installed")

from qlangevin.integrations.lightning import SampleCallback

# Lightning 2.6 with torch 2.13, and its remark on loaders without workers.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
N, BATCH, STEPS = 96, 16, 12


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 6, generator=generator)
    return TensorDataset(x, (x[:, 0] > 0).long())


def module(package: str, packed: bool = True, interval: str = "step", reduction: str = "mean", **settings: Any) -> Any:
    """Return a LightningModule of the package with a sampler of its own."""
    base: Any = importlib.import_module(package).LightningModule

    class Classifier(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction=reduction)

        def configure_optimizers(self) -> Any:
            chosen: dict[str, Any] = {"lr": 0.05, "num_data": N, "gradients": "bfp8"} | settings
            sampler = ql.SGLD(self.parameters(), **chosen)
            schedule = ql.ConstantLR(sampler, STEPS, 6)
            return {"optimizer": sampler, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

    made = Classifier()
    if packed:
        ql.pack(ql.lower(made, activations="bfp8", errors="bfp8"), weights="bfp8")
    return made


def fit(
    folder: Path,
    package: str = PACKAGES[0],
    model: Any = None,
    callback: Any = None,
    resume: Path | None = None,
    **changes: Any,
) -> Any:
    """Train for some steps; return the trainer, whose callback's store is ``folder / "run"``."""
    lightning: Any = importlib.import_module(package)
    callback = SampleCallback(folder / "run") if callback is None else callback
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    settings = {"max_steps": STEPS, "accelerator": "cpu", "default_root_dir": folder, **quiet} | changes
    trainer = lightning.Trainer(callbacks=[callback], **settings)
    loader = ql.Loader(data(), BATCH, seed=0)
    trainer.fit(module(package) if model is None else model, loader, ckpt_path=None if resume is None else str(resume))
    return trainer


@pytest.mark.parametrize("package", PACKAGES)
def test_samples_are_collected_when_the_schedule_says_so(tmp_path: Path, package: str) -> None:
    fit(tmp_path, package)
    store = ql.SampleStore.open(tmp_path / "run")
    assert [sample.step for sample in store] == [7, 8, 9, 10, 11, 12]
    posterior = ql.Posterior.open(store, module(package))
    assert posterior.predict(data().tensors[0]).shape == (N, 2)


@pytest.mark.parametrize("after", [6, 8])  # at the end of an epoch, and within one
@pytest.mark.parametrize("packed", [False, True])
def test_a_resumed_run_has_the_store_of_one_that_was_not_interrupted(tmp_path: Path, packed: bool, after: int) -> None:
    settings: dict[str, Any] = {} if packed else {"weights": "bfp8", "accumulator": "fp32"}

    def model() -> Any:
        return module(PACKAGES[0], packed, **settings)

    whole, resumed = SampleCallback(tmp_path / "whole" / "run"), SampleCallback(tmp_path / "parts" / "run")
    fit(tmp_path / "whole", model=model(), callback=whole)
    first = fit(tmp_path / "parts", model=model(), max_steps=after)
    first.save_checkpoint(tmp_path / "saved.ckpt")
    fit(tmp_path / "parts", model=model(), callback=resumed, resume=tmp_path / "saved.ckpt")
    assert read_files(tmp_path / "parts" / "run") == read_files(tmp_path / "whole" / "run")
    assert torch.equal(resumed.losses, whole.losses)


def test_a_checkpoint_of_lightnings_holds_floats_that_a_plain_model_loads(tmp_path: Path) -> None:
    model = module(PACKAGES[0])
    fit(tmp_path, model=model).save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=True)
    plain = module(PACKAGES[0], packed=False)
    plain.load_state_dict(saved["state_dict"])
    assert all(type(t) is Tensor for t in saved["state_dict"].values())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.decode(), theirs)


def test_a_checkpoint_without_the_callback_is_refused(tmp_path: Path) -> None:
    lightning: Any = importlib.import_module(PACKAGES[0])
    first = fit(tmp_path, max_steps=6, callback=lightning.Callback(), model=module(PACKAGES[0], packed=False))
    first.save_checkpoint(tmp_path / "saved.ckpt")
    with pytest.raises(ValueError, match="resumes at step 6, but its checkpoint was saved without this callback"):
        fit(tmp_path, resume=tmp_path / "saved.ckpt", model=module(PACKAGES[0], packed=False))


def test_accumulated_gradients_are_means_and_so_are_losses(tmp_path: Path) -> None:
    found = []
    for passes in (1, 2):
        model = module(PACKAGES[0], packed=False, gradients=None, temperature=0.0, lr=0.5)
        callback = SampleCallback(tmp_path / str(passes), every=1)
        lightning: Any = importlib.import_module(PACKAGES[0])
        trainer = lightning.Trainer(
            max_steps=1, accumulate_grad_batches=passes, callbacks=[callback], accelerator="cpu", logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(data(), 32 // passes))
        found.append((torch.cat([p.detach().flatten() for p in model.parameters()]), callback.losses))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


@pytest.mark.parametrize("passes", [1, 2])
def test_steps_in_backward_accumulate_as_lightning_does(tmp_path: Path, passes: int) -> None:
    in_backward = module(PACKAGES[0], step_in_backward=True, accumulate=passes)
    each = [SampleCallback(tmp_path / name, every=2) for name in ("in", "after")]
    for model, callback in zip((in_backward, module(PACKAGES[0])), each, strict=True):
        fit(tmp_path, model=model, callback=callback, accumulate_grad_batches=passes)
    assert torch.equal(each[0].losses, each[1].losses)


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"gradient_clip_val": 0.5}, "clips gradients to the norm 0.5.*gradient_clip_val=None"),
        ({"step_in_backward": True}, {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2.*accumulate=2"),
        ({"interval": "epoch"}, {}, 'counts steps, but Lightning would advance it every 1 epoch.*"interval": "step"'),
    ],
)
def test_settings_that_bias_the_chain_are_refused(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, model=module(PACKAGES[0], **settings), **changes)


def test_a_last_step_of_fewer_batches_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(
        ql.QLangevinWarning, match="6 batches, of which the last step accumulates 2.*limit_train_batches=4"
    ):
        fit(tmp_path, accumulate_grad_batches=4, callback=SampleCallback(tmp_path / "run", every=1), max_steps=2)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = module(PACKAGES[0], packed=False)
    model.configure_optimizers = lambda: torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="the optimizer is SGD"):
        fit(tmp_path, model=model)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_loss_that_is_a_sum_is_warned_of(tmp_path: Path, passes: int) -> None:
    """Lightning divides it by the number of batches of a step, which makes no mean of it."""
    model = module(PACKAGES[0], reduction="sum")
    callback = SampleCallback(tmp_path / "run", every=1)
    with pytest.warns(ql.QLangevinWarning, match=f"the loss is a sum over {BATCH} examples"):
        fit(tmp_path, model=model, callback=callback, accumulate_grad_batches=passes, max_steps=2)


def test_the_number_of_samples_is_logged_where_there_is_a_logger(tmp_path: Path) -> None:
    """Without one Lightning would warn of what is logged, and warnings are errors here."""
    fit(tmp_path / "silent", log_every_n_steps=1)
    logger = importlib.import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    fit(tmp_path / "logged", logger=logger, log_every_n_steps=6)
    [head, *lines] = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    assert [float(line.split(",")[head.split(",").index("samples")]) for line in lines] == [0, 6]
