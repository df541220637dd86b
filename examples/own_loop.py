"""A training loop of your own, changed by two lines: sampled instead of optimised, with everything in 8 bits.

    python examples/own_loop.py

Two spirals, a small network, 40 epochs, a few seconds. The lines that are not plain PyTorch are marked with <--.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql


def spirals(count: int, seed: int) -> TensorDataset:
    """Draw noisy points on two spirals; the label is the spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    radius = torch.rand(count, generator=generator).sqrt() * 3
    angle = radius * 2 + labels * math.pi
    points = torch.stack((radius * angle.cos(), radius * angle.sin()), 1)
    return TensorDataset(points + 0.35 * torch.randn(count, 2, generator=generator), labels)


def main(epochs: int = 40) -> tuple[float, float]:
    """Train, and return the test NLL of the last sample and of the average."""
    torch.manual_seed(0)
    train, test = spirals(2000, seed=1), spirals(2000, seed=2)
    loader = DataLoader(train, batch_size=50, shuffle=True)
    model = nn.Sequential(
        *[nn.Linear(2, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2)],
    )
    model = ql.pack(ql.lower(model, activations="bfp8", errors="bfp8"), weights="bfp8")  # <-- was: nothing
    optimizer = ql.SGLD(model.parameters(), lr=0.2, num_data=len(train), gradients="bfp8")  # <-- was: torch.optim.SGD

    points, labels = test.tensors
    total, samples = torch.zeros(len(test), 2), 0
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if epoch >= epochs // 2:  # from here on every epoch is a sample: average the predictions
            last = predict(model, points)
            total, samples = total + last, samples + 1

    one, average = (nll(p, labels) for p in (last, total / samples))
    print(
        f"bytes: {sum(p.nbytes for p in model.parameters())} for {sum(p.numel() for p in model.parameters())} weights"
    )
    print(f"test negative log-likelihood: {one:.3f} of the last sample, {average:.3f} of the average of {samples}")
    return one, average


def predict(model: nn.Module, x: Tensor) -> Tensor:
    """Return the probabilities of the classes."""
    with torch.no_grad():
        model.eval()
        probabilities: Tensor = model(x).softmax(1)
        model.train()
    return probabilities


def nll(probabilities: Tensor, labels: Tensor) -> float:
    """Return the mean negative log-likelihood."""
    return float(nn.functional.nll_loss(probabilities.log(), labels))


if __name__ == "__main__":
    main()
