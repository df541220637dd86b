"""``python -m benchmarks.checked_training``: a few steps of small networks, for a checker of memory such as valgrind.

A ResNet, a U-Net (transposed convolutions, concatenated channels) and an LSTM, in channels-last memory, lowered and packed,
with strided 1x1 convolutions of few channels; then the same without native kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.experiments.models import LSTMClassifier, ResNet18


class UNet(nn.Module):
    """Two resolutions and a shortcut between equal ones."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.enter = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.down = nn.Sequential(nn.Conv2d(channels, 12, 1, stride=2), nn.GroupNorm(3, 12), nn.ReLU())
        self.up = nn.ConvTranspose2d(12, channels, 2, stride=2)
        self.copy_up = nn.ConvTranspose2d(12, channels, 1, stride=2, output_padding=1)
        self.leave = nn.Conv2d(3 * channels, 4, 1, padding="valid")

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enter(x)
        coarse = self.down(fine)
        pixels: Tensor = self.leave(torch.cat([fine, self.up(coarse), self.copy_up(coarse)], dim=1))
        return pixels.mean(dim=(2, 3))


def images() -> Tensor:
    return torch.randn(6, 3, 16, 16).to(memory_format=torch.channels_last)


def words() -> Tensor:
    return torch.randint(1, 20, (4, 5))


def channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "ResNet": (lambda: channels_last(ResNet18(classes=4, width=3)), images),
    "U-Net": (lambda: channels_last(UNet()), images),
    "LSTM": (lambda: LSTMClassifier(words=20, classes=4, embedding=5, hidden=7), words),
}


def train(name: str, format: str, steps: int) -> None:
    """Train one of the networks with packed weights, in the given format."""
    build, data = NETWORKS[name]
    torch.manual_seed(0)
    model = ql.lower(ql.pack(build(), format), format, format)
    sampler = ql.SGLD(model.parameters(), lr=1e-3, num_data=100)
    for _ in range(steps):
        sampler.zero_grad()
        outputs: Tensor = model(data())
        nn.functional.cross_entropy(outputs, torch.zeros(len(outputs), dtype=torch.int64)).backward()
        sampler.step()


def main() -> None:
    torch.set_num_threads(1)
    for kernels in (contextlib.nullcontext(), ql.native.disabled()):
        with kernels:
            for name in NETWORKS:
                for format in ("bfp8", "bfp4/tensor"):
                    train(name, format, steps=2)
                print(name, ql.native.level(), "trained", flush=True)


if __name__ == "__main__":
    main()
