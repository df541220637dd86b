"""A convolutional network on scikit-learn's digits, trained by Lightning: a point by AdamW, and samples by SGLD in 8 bits.

    pip install 'qlangevin[lightning,demo]'
    python examples/lightning.py [--folder results/lightning] [--seed 0]

The LightningModule is an ordinary one; its optimizer is the sampler, and `SampleCallback` collects. 300 digits to train on,
1000 to test with; the digits' negatives are foreign images. It takes a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

# This file has the name of the package; Python would look for it here first.
sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]

import lightning as L
import torch
import tyro
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qlangevin as ql
from qlangevin.integrations.lightning import SampleCallback

FORMAT, BATCH = "bfp8", 50


class Split(NamedTuple):
    """Images and labels."""

    x: Tensor
    y: Tensor


def digits(seed: int) -> tuple[Split, Split]:
    """Return 300 digits to train on and 1000 others to test with."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16, torch.tensor(labels)[order]
    return Split(x[:300], y[:300]), Split(x[300:1300], y[300:1300])


class Classifier(L.LightningModule):  # type: ignore[misc]  # Lightning is not looked into
    """A small convolutional network; ``sampled`` chooses the optimizer."""

    def __init__(self, steps: int, samples: int, num_data: int, sampled: bool, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.steps, self.samples, self.num_data, self.sampled, self.seed = steps, samples, num_data, sampled, seed
        self.net = nn.Sequential(
            *[nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()],
            *[nn.Flatten(), nn.Linear(32 * 16, 10)],
        )

    def forward(self, x: Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        if not self.sampled:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)
        sampler = ql.SGLD(
            self.parameters(),
            lr=0.5,
            num_data=self.num_data,
            temperature=0.01,
            prior_std=2.0,
            gradients=FORMAT,
            seed=self.seed,
        )
        schedule = ql.CyclicalLR(sampler, self.steps, cycles=4, samples_per_cycle=self.samples // 4, exploration=0.5)
        return {"optimizer": sampler, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(model: L.LightningModule, train: Split, folder: Path, steps: int, seed: int, *callbacks: Any) -> None:
    """Train for some steps; a run that was interrupted is resumed from Lightning's last checkpoint."""
    last = folder / "last.ckpt"
    saving = L.pytorch.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=500)
    trainer = L.Trainer(
        max_steps=steps, max_epochs=-1, accelerator="cpu", logger=False, enable_model_summary=False,
        enable_progress_bar=sys.stderr.isatty(), default_root_dir=folder, callbacks=[saving, *callbacks],
    )  # fmt: skip
    loader = ql.Loader(TensorDataset(*train), BATCH, seed=seed)
    trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)


def entropy(probabilities: Tensor) -> Tensor:
    total: Tensor = torch.special.entr(probabilities).sum(1)
    return total


def main(
    folder: Path = Path("results/lightning"), steps: int = 3000, samples: int = 40, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Train both, and print a table of scores.

    Args:
        folder: for the store and Lightning's checkpoints; a run that was interrupted is resumed.
        steps: of the sampler; AdamW takes a quarter of them.
        samples: to collect.
        seed: of everything.
    """
    train, test = digits(seed)
    run = folder / f"seed{seed}"
    point = Classifier(steps // 4, 0, len(train.y), False, seed)
    fit(point, train, run / "adamw", steps // 4, seed)
    model = Classifier(steps, samples, len(train.y), True, seed)
    ql.pack(ql.lower(model, activations=FORMAT, errors=FORMAT, seed=seed), weights=FORMAT, seed=seed)
    callback = SampleCallback(run / "store")
    fit(model, train, run / "sgld", steps, seed, callback)
    if callback.store is not None:  # None if the run was complete before
        print(callback.report())

    posterior = ql.Posterior.open(run / "store", model)
    with torch.no_grad():
        point.eval()
        found = {"AdamW, FP32": [point(x).softmax(1) for x in (test.x, 1 - test.x)]}
    for name, some in (("one sample", posterior[-1:]), (f"average of {len(posterior)} samples", posterior)):
        found[f"{name}, {FORMAT}"] = [some.predict(x) for x in (test.x, 1 - test.x)]
    size = posterior.members[0].store.manifest.samples[0].digest.size
    floats = 4 * sum(p.numel() for p in point.parameters())
    scores = {}
    print(f"{'':32}{'error':>8}{'NLL':>8}{'ECE':>8}{'AUROC of negatives':>20}{'bytes':>12}")
    for name, (here, there) in found.items():
        s = scores[name] = ql.metrics.evaluate(here, test.y)
        s["auroc"] = ql.metrics.auroc(entropy(here), entropy(there))
        s["bytes"] = floats if "FP32" in name else size * (1 if "one" in name else len(posterior))
        print(f"{name:32}{s['error']:8.2%}{s['nll']:8.3f}{s['ece']:8.2%}{s['auroc']:20.3f}{s['bytes']:12,.0f}")
    return scores


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
