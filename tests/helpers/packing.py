"""Small models of every kind of layer, packed or not, and chains of them."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from qlangevin import SGLD, QTensor, pack
from qlangevin.quantization.operators import Rounding


class Recurrent(nn.Module):
    """Words in, words out, one matrix for both."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.recurrent = recurrent
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.decoder(self.recurrent(self.embedding(words))[0])
        return output


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        *[nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.ConvTranspose2d(3, 2, 2, stride=2)],
        *[nn.GroupNorm(1, 2), nn.PReLU(), nn.Flatten(), nn.Linear(2 * 64, 3)],
    )


def attentive() -> nn.Sequential:
    layer = nn.TransformerEncoderLayer(6, 2, 9, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 6), layer, nn.Linear(6, 3))


WORDS = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(3, 2, 4, 4, generator=torch.Generator().manual_seed(1))
INPUT = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "mlp": (mlp, INPUT),
    "convolutional": (convolutional, IMAGES),
    "lstm, tied": (lambda: Recurrent(nn.LSTM(6, 3, bidirectional=True, batch_first=True)), WORDS),
    "gru, tied": (lambda: Recurrent(nn.GRU(6, 6, batch_first=True)), WORDS),
    "attentive": (attentive, WORDS),
}


def build(name: str = "mlp") -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    make, x = MODELS[name]
    return make(), x


@cache
def _packed(format: str, name: str, rounding: Rounding) -> nn.Module:
    model, _ = build(name)
    pack(model, format, rounding=rounding, seed=5)
    return model  # type: ignore[no-any-return]


def packed(format: str = "bfp8", name: str = "mlp", rounding: Rounding = "stochastic") -> tuple[Any, Tensor]:
    return copy.deepcopy(_packed(format, name, rounding)), MODELS[name][1]


def sampler_of(model: nn.Module, **settings: Any) -> SGLD:
    given: dict[str, Any] = {"lr": 0.1, "num_data": 1000, "weight_decay": 1e-3, "gradients": "bfp8/tensor", "seed": 5}
    return SGLD(model.named_parameters(), **given | settings)


def backward(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


def run(model: nn.Module, x: Tensor, sampler: SGLD, steps: int = 10) -> None:
    for _ in range(steps):
        sampler.zero_grad()
        backward(model, x)
        sampler.step()


def numbers(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights and buffers of a model as plain tensors."""
    return {name: t + 0 if isinstance(t, QTensor) else t.clone() for name, t in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(type(b[k]) is Tensor and torch.equal(a[k], b[k]) for k in a)
