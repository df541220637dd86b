"""A causal transformer of two layers over bytes, for benchmarks of learning coefficients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["Transformer"]

LAYERS = 2


class Transformer(nn.Module):
    """Logits of the next byte; layers normalise before they act."""

    def __init__(self, words: int, length: int, width: int, heads: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.score = nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.words(ids) + self.places(torch.arange(length, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        return self.score(self.layers(x, mask, is_causal=True))  # type: ignore[no-any-return]
