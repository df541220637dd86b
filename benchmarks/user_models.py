"""Networks as users write them: residual sums, activations, pooling and attention as functions in `forward`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS = 256  # texts are bytes


# ---- ResNet-18


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        out = F.relu(out)
        return out  # noqa: RET504


class PlainResNet18(nn.Module):
    """ResNet-18 for images of 32x32 pixels."""

    def __init__(self, classes: int = 10, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = nn.Sequential(BasicBlock(width, width, 1), BasicBlock(width, width, 1))
        self.layer2 = nn.Sequential(BasicBlock(width, width * 2, 2), BasicBlock(width * 2, width * 2, 1))
        self.layer3 = nn.Sequential(BasicBlock(width * 2, width * 4, 2), BasicBlock(width * 4, width * 4, 1))
        self.layer4 = nn.Sequential(BasicBlock(width * 4, width * 8, 2), BasicBlock(width * 8, width * 8, 1))
        self.linear = nn.Linear(width * 8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer1(out)
        out = self.layer2(out)
        out = self.layer3(out)
        out = self.layer4(out)
        out = F.avg_pool2d(out, 4)
        out = out.view(out.size(0), -1)
        return self.linear(out)  # type: ignore[no-any-return]


# ---- encoders


class TorchEncoder(nn.Module):
    """PyTorch's own transformer encoder between an embedding and a classifier of every token."""

    def __init__(self, layers: int = 6, width: int = 384) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.randn(128, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
        self.encode = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(width, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        return self.classify(self.encode(self.embed(text) + self.places[: text.shape[1]]))  # type: ignore[no-any-return]


class EncoderLayer(nn.Module):
    """A layer like Bert's, whose attention is written out: scores, mask, softmax, product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)
        self.out, self.norm1 = nn.Linear(width, width), nn.LayerNorm(width)
        self.wide, self.narrow, self.norm2 = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.LayerNorm(width),
        )

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        weights = F.softmax(scores + mask, dim=-1)
        y = torch.matmul(weights, v).transpose(1, 2).reshape(x.shape)
        x = self.norm1(x + self.out(y))
        return self.norm2(x + self.narrow(F.gelu(self.wide(x))))  # type: ignore[no-any-return]


class PlainEncoder(nn.Module):
    """A transformer encoder like Bert, written out, which does not look at padding."""

    def __init__(self, layers: int = 6, width: int = 384) -> None:
        super().__init__()
        self.embed, self.places, self.norm = nn.Embedding(WORDS, width), nn.Embedding(128, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width) for _ in range(layers))
        self.classify = nn.Linear(width, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        x = self.norm(self.embed(text) + self.places(torch.arange(text.shape[1])))
        mask = torch.where(text == 0, torch.finfo(x.dtype).min, 0.0)[:, None, None, :]
        for layer in self.layers:
            x = layer(x, mask)
        return self.classify(x)  # type: ignore[no-any-return]


# ---- a decoder


class DecoderBlock(nn.Module):
    """A block of GPT-2: causal attention and two linear layers, each after a norm and around a sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.c_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln_1(x))
        x = x + self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))
        return x  # noqa: RET504


class PlainGPT(nn.Module):
    """A decoder like GPT-2."""

    def __init__(self, layers: int = 6, width: int = 384) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(128, width)
        self.h, self.ln_f = nn.ModuleList(DecoderBlock(width) for _ in range(layers)), nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, WORDS, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        x = self.wte(text) + self.wpe(torch.arange(text.size(1), device=text.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))  # type: ignore[no-any-return]


class HuggingFaceGPT2(nn.Module):
    """GPT-2 of transformers with its default activation, a module of eight operations; without dropout."""

    def __init__(self, layers: int = 6, width: int = 384) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel  # type: ignore[import-not-found, unused-ignore]

        super().__init__()
        sizes = {"vocab_size": WORDS, "n_positions": 128, "n_embd": width, "n_layer": layers, "n_head": width // 64}
        dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = GPT2Config(**sizes, **dropout, use_cache=False, bos_token_id=0, eos_token_id=0)
        self.gpt2 = GPT2LMHeadModel(config)

    def forward(self, text: Tensor) -> Tensor:
        return self.gpt2(input_ids=text).logits  # type: ignore[no-any-return]
