"""Calibrated digits in 8 bits: train, store, average, and compare with the best single network SGD finds.

    python examples/digits.py [--folder results/digits] [--seed 0]

The 8x8 digits of scikit-learn: 300 for training, 300 for validation, 1197 for testing. The sampler works in 8 bits (VC SGLDLP-L
with weights, gradients, activations and errors in block floating point), and stores its samples in 8 bits. SGD is in full
precision. Of six settings each, the one with the highest likelihood on the validation set is taken. An interrupted run is resumed
when the program is started again. It takes a minute or two.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
import tyro
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import qlangevin as ql

FORMAT, BATCH = "bfp8", 50
SGD_SETTINGS = tuple(product((0.1, 0.3), (1e-4, 1e-3, 5e-3)))  # learning rate, weight decay
SGLD_SETTINGS = tuple(product((0.1, 0.3), (0.003, 0.01, 0.03)))  # precision of the prior, temperature


Predict: TypeAlias = Callable[[Tensor], Tensor]


class Split(NamedTuple):
    """Images and labels."""

    x: Tensor
    y: Tensor


def digits(seed: int = 0) -> tuple[Split, Split, Split]:
    """Return training, validation and test set."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    parts = (slice(0, 300), slice(300, 600), slice(600, None))
    return tuple(Split(x[part], y[part]) for part in parts)  # type: ignore[return-value]


def network(seed: int) -> nn.Module:
    """Build a network of one hidden layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def sgd(train: Split, lr: float, weight_decay: float, epochs: int, seed: int) -> Predict:
    """Train a network in full precision, with momentum and a learning rate that falls to zero; return its predictions."""
    model, loader = network(seed), ql.Loader(TensorDataset(*train), BATCH, seed=seed)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for x, y in loader.until(epochs * len(loader)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return lambda x: model(x).detach().softmax(1)


def sgld(
    train: Split, run: Path, prior: float, temperature: float, epochs: int, samples: int, seed: int
) -> ql.Posterior:
    """Sample in 8 bits, into a folder; an interrupted run is resumed."""
    model, n = network(seed), len(train.y)
    ql.lower(model, activations=FORMAT, errors=FORMAT)
    ql.pack(model, weights=FORMAT)
    loader = ql.Loader(TensorDataset(*train), BATCH, seed=seed)
    sampler = ql.SGLD(
        model.parameters(),
        lr=1.0,
        num_data=n,
        temperature=temperature,
        weight_decay=prior / n,
        gradients=FORMAT,
        seed=seed,
    )
    schedule = ql.CyclicalLR(sampler, epochs * len(loader), cycles=8, samples_per_cycle=samples // 8, exploration=0.5)
    with ql.SampleStore.create(run, model, sampler, schedule, resume=True) as store:
        state = (run, model, sampler, schedule, loader, store)
        ql.load_checkpoint(*state, missing_ok=True)
        for x, y in loader.until(schedule.total_steps):
            sampler.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            sampler.step()
            schedule.step()
            if schedule.collect:
                store.append(model)
            if loader.steps % 300 == 0:
                ql.save_checkpoint(*state)
    return ql.Posterior.open(run, model)


def best(candidates: list[Predict], data: Split) -> Predict:
    """Return the candidate under which the labels have the highest likelihood."""
    return min(candidates, key=lambda predict: ql.metrics.evaluate(predict(data.x), data.y)["nll"])


def main(
    folder: Path = Path("results/digits"), epochs: int = 600, samples: int = 200, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Train, choose, test, and print a table of scores."""
    train, validation, test = digits(seed)
    networks = [sgd(train, *settings, epochs // 3, seed) for settings in SGD_SETTINGS]
    runs = {s: folder / f"seed{seed}-prior{s[0]:g}-temperature{s[1]:g}" for s in SGLD_SETTINGS}
    posteriors = [sgld(train, run, *settings, epochs, samples, seed) for settings, run in runs.items()]
    average = best([posterior.predict for posterior in posteriors], validation)
    posterior = next(p for p in posteriors if p.predict == average)
    predictions = {
        "best SGD network, FP32": best(networks, validation)(test.x),
        f"average of {len(networks)} SGD networks": torch.stack([network(test.x) for network in networks]).mean(0),
        f"one sample, {FORMAT}": posterior[-1:].predict(test.x),
        f"average of {len(posterior)} samples": average(test.x),
    }
    scores = {name: ql.metrics.evaluate(p, test.y) for name, p in predictions.items()}
    print(f"{'':28}{'error':>8}{'NLL':>8}{'Brier':>8}{'ECE':>8}")
    for name, s in scores.items():
        print(f"{name:28}{s['error']:8.2%}{s['nll']:8.3f}{s['brier']:8.3f}{s['ece']:8.2%}")
    store = posterior.members[0].store
    weights = sum(p.numel() for p in posterior.model.parameters())
    print(f"{len(store)} samples in {store.path}, {store.nbytes / len(store) / weights:.2f} bytes a weight")
    likelihood = ql.diagnostics.log_likelihood(posterior, test.x, test.y).mean(2)
    print(f"R-hat of the test log-likelihood along the chain: {float(ql.diagnostics.summarize(likelihood).r_hat):.2f}")
    return scores


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
