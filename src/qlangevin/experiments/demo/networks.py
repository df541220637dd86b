"""Several networks of one architecture evaluated and trained as one: chains as slices of the same tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

__all__ = ["ParallelMLP"]


class ParallelMLP(nn.Module):
    """Independent networks with ReLU. A weight is (chain · output, input), so that a block of bfp8 is a row of one network."""

    def __init__(self, chains: int, sizes: Sequence[int], seed: int) -> None:
        super().__init__()
        self.chains, self.weights, self.biases = chains, nn.ParameterList(), nn.ParameterList()
        draw = torch.Generator().manual_seed(seed)
        for inputs, outputs in pairwise(sizes):
            reach = 1 / math.sqrt(inputs)  # as torch.nn.Linear begins
            for held, shape in ((self.weights, (chains * outputs, inputs)), (self.biases, (chains, outputs))):
                held.append(nn.Parameter((2 * torch.rand(shape, generator=draw) - 1) * reach))

    def forward(self, x: Tensor) -> Tensor:
        """Return outputs (chain, example, class) of inputs (example, pixel), or of inputs for each chain."""
        x = x.expand(self.chains, *x.shape) if x.ndim == 2 else x
        last = len(self.weights) - 1
        for i, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            slices = weight.unflatten(0, (self.chains, -1)).transpose(1, 2)
            x = torch.baddbmm(bias.unsqueeze(1), x, slices)
            x = x if i == last else x.relu()
        return x
