"""The networks of the paper as plain modules; `qlangevin.lower` and `qlangevin.pack` make any of them low precision."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from ..lowering.layers import Quantize

__all__ = ["MLP", "LSTMClassifier", "LogisticRegression", "ResNet18"]


class LogisticRegression(nn.Sequential):
    """One linear layer on the flattened input."""

    def __init__(self, inputs: int = 784, classes: int = 10) -> None:
        super().__init__(nn.Flatten(), nn.Linear(inputs, classes))


class MLP(nn.Sequential):
    """One hidden layer of 100 units with ReLU."""

    def __init__(self, inputs: int = 784, classes: int = 10, hidden: int = 100) -> None:
        super().__init__(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut: relu(Q(f(x) + s(x)))."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False)).append(nn.BatchNorm2d(outputs))
        self.sum = Quantize()
        self.relu2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(x)  # a line for each layer: each input is freed before the next layer runs
        y = self.norm1(y)
        y = self.relu1(y)
        y = self.conv2(y)
        y = self.norm2(y)
        y += self.shortcut(x)
        y = self.sum(y)
        return self.relu2(y)  # type: ignore[no-any-return]


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2016). The stem of ``"cifar"`` is one 3x3 convolution; that of ``"imagenet"`` shrinks fourfold.

    ``width`` is the number of channels of the first stage: 64 in the paper, fewer for a scaled-down run. ``channels_last`` puts
    weights and images into the layout that CPUs compute convolutions in, which saves a fifth of the time and memory of a step.
    It has no effect if the width is no multiple of 8: oneDNN's gradients may then be written out of bounds on CPUs without
    AVX-512 (see `lowering.convolution`).
    """

    def __init__(
        self,
        classes: int = 10,
        stem: Literal["cifar", "imagenet"] = "cifar",
        width: int = 64,
        channels_last: bool = False,
    ) -> None:
        super().__init__()
        if stem not in ("cifar", "imagenet"):
            raise ValueError(f"stem must be 'cifar' or 'imagenet', got {stem!r}")
        size, stride = (3, 1) if stem == "cifar" else (7, 2)
        self.conv = nn.Conv2d(3, width, size, stride, size // 2, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shrink = nn.MaxPool2d(3, 2, 1) if stem == "imagenet" else nn.Identity()
        widths = [width, *(width * 2**stage for stage in (0, 0, 1, 1, 2, 2, 3, 3))]
        self.blocks = nn.ModuleList(
            Block(before, after, 1 if before == after else 2) for before, after in pairwise(widths)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classify = nn.Linear(widths[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        self.channels_last = channels_last and width % 8 == 0
        if self.channels_last:
            self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:  # packed weights have no memory format, so that the input decides
            x = x.contiguous(memory_format=torch.channels_last)
        x = self.conv(x)  # line by line, as in Block
        x = self.norm(x)
        x = self.relu(x)
        x = self.shrink(x)
        for block in self.blocks:
            x = block(x)
        return self.classify(self.pool(x).flatten(1))  # type: ignore[no-any-return]


class LSTMClassifier(nn.Module):
    """Word embedding, two LSTM layers, and a linear layer on the last state of the upper one.

    Texts are rows of word numbers; 0 is padding, which follows the words and is ignored.
    """

    def __init__(self, words: int = 25_000, classes: int = 2, embedding: int = 100, hidden: int = 256) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, embedding, padding_idx=0)
        self.lstm = nn.LSTM(embedding, hidden, num_layers=2, batch_first=True)
        self.classify = nn.Linear(hidden, classes)
        for i in range(
            self.lstm.num_layers
        ):  # forget gates start open: else errors vanish on the way back through a text
            nn.init.ones_(self.lstm.get_parameter(f"bias_hh_l{i}").data[hidden : 2 * hidden])

    def forward(self, text: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(text))
        last = (text != 0).sum(1).clamp_min(1) - 1
        return self.classify(y[torch.arange(len(text), device=text.device), last])  # type: ignore[no-any-return]
