"""Small networks of every kind, with inputs and labels, for tests of lowering, packing and storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn

from qlangevin import Quantize, parse
from qlangevin.experiments import models


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, 2)
        self.classify = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classify(self.encode(self.embed(x)).mean(1))
        return y


class UNet(nn.Module):
    """A strided convolution, a transposed convolution, and a skip connection around both."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 3, 4, 2, 1), nn.Tanh())
        self.skip = Quantize()
        self.head = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.LeakyReLU(), nn.AvgPool2d(2), nn.Flatten())
        self.classify = nn.Linear(4 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.classify(self.head(self.skip(self.up(self.down(x)) + x)))
        return y


class Tied(nn.Module):
    """One matrix for input and output embeddings, and one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.relu = nn.ReLU()
        self.out = nn.Linear(8, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.hidden(self.embed(x).mean(1)))
        y = self.relu(self.hidden(y))
        logits: Tensor = self.out(y)
        return logits


def images(size: int = 8) -> Tensor:
    return torch.randn(6, 3, size, size)


def words(count: int) -> Tensor:
    return torch.randint(1, count, (6, 7))


Case: TypeAlias = tuple[Callable[[], nn.Module], Callable[[], Tensor], int]

CASES: dict[str, Case] = {
    "logistic": (lambda: models.LogisticRegression(192, 3), images, 3),
    "mlp": (lambda: models.MLP(192, 3, 20), images, 3),
    "resnet": (lambda: models.ResNet18(3, width=4), lambda: images(16), 3),
    "imagenet": (lambda: models.ResNet18(3, "imagenet", width=4), lambda: images(64), 3),
    "lstm": (lambda: models.LSTMClassifier(20, 3, 6, 8), lambda: words(20), 3),
    "transformer": (Transformer, lambda: words(20), 3),
    "unet": (UNet, images, 3),
    "tied": (Tied, lambda: words(12), 12),
}


def build(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, a batch and its labels, the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        make, batch, classes = CASES[name]
        return make(), batch(), torch.randint(classes, (6,))


def two_linear(size: int = 64) -> nn.Sequential:
    """Return two square linear layers with a ReLU between them; by default large enough that outputs are kept as codes."""
    return nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size))


Gradients: TypeAlias = tuple[Tensor, list[Tensor]]


def gradients(model: nn.Module, x: Tensor, labels: Tensor) -> Gradients:
    """Return the loss and the gradient of every parameter."""
    loss = nn.functional.cross_entropy(model(x), labels)
    return loss.detach(), list(torch.autograd.grad(loss, list(model.parameters())))


def same_gradients(a: Gradients, b: Gradients) -> bool:
    """Return True if two losses and their gradients are equal, bit for bit."""
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def is_on_grid(x: Tensor, format: str) -> bool:
    """Return True if a format can represent every number of x."""
    return bool(parse(format).is_representable(x.detach()).all())
