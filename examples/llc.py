"""The local learning coefficient of a network while it learns, with chains in 8 bits.

    python examples/llc.py

A network of two layers learns a function that a network of four units can represent. Its learning coefficient is estimated at
several moments of the training, in float32 and in 8 bits, and at the end for each layer alone. Less than a minute.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import qlangevin as ql

MOMENTS = (100, 400, 1600)


def make_data(count: int = 600, seed: int = 0) -> TensorDataset:
    """Draw inputs, and noisy outputs of a network with four hidden units."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator)
    first, second = torch.randn(6, 4, generator=generator), torch.randn(4, 1, generator=generator)
    return TensorDataset(x, (x @ first).tanh() @ second + 0.3 * torch.randn(count, 1, generator=generator))


def estimate(model: nn.Module, data: TensorDataset, weights: str | None, **more: object) -> ql.slt.LLC:
    """Estimate the learning coefficient where the model is."""
    loader = DataLoader(data, batch_size=100)
    loss = ql.slt.supervised(nn.functional.mse_loss)
    return ql.slt.llc(
        model, loader, loss, lr=1e-3, localization=20.0, weights=weights, chains=4, draws=300, burn_in=150, **more  # type: ignore[arg-type]
    )  # fmt: skip


def main(moments: tuple[int, ...] = MOMENTS) -> list[tuple[ql.slt.LLC, ql.slt.LLC]]:
    """Train, and return the estimates in float32 and in 8 bits at each moment."""
    torch.manual_seed(0)
    data, found = make_data(), []
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, moments[-1])
    x, y = data.tensors
    for step in range(1, moments[-1] + 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
        if step in moments:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ql.QLangevinWarning)  # early on, the weights are at no minimum
                pair = estimate(model, data, None), estimate(model, data, "bfp8")
            found.append(pair)
            print(
                f"step {step:5d}: "
                + ", ".join(f"{e.settings.weights or 'fp32'} {e.mean:.2f} ± {e.stderr:.2f}" for e in pair)
            )
    layers = estimate(model, data, "bfp8", masks={"first layer": "0.*", "second layer": "2.*"})
    print("refined: " + ", ".join(f"{name} {part.mean:.2f} ± {part.stderr:.2f}" for name, part in layers.parts.items()))
    return found


if __name__ == "__main__":
    main()
