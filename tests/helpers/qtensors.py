"""QTensors of random numbers, and the formats and code paths that their tests cover."""

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qlangevin import Format, QTensor, encode, native

KINDS = ["fixed8.3", "bfp8", "bfp8/tensor", "bfp8/3", "bfp4", "bfp4/tensor", "fixed4.1", "fp8_e4m3", "e4m3", "bfp16"]
PATHS = st.sampled_from([native.disabled, torch.no_grad])  # PyTorch's, and the usual one


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(name: str | Format, *shape: int, seed: int = 0) -> QTensor:
    """Return `numbers` in a format."""
    return encode(numbers(*shape, seed=seed), name)


def leaf(q: Tensor) -> Tensor:
    """Return a copy that requires a gradient."""
    return q.detach().clone().requires_grad_()


def each(x: Any) -> list[Any]:
    """Return a list of the tensors that an operation returned, one or several."""
    return [x] if isinstance(x, Tensor) else list(x)


def forbid(*_: Any) -> Any:
    """Fail: stands in for a function that must not be called."""
    raise AssertionError("this decodes or encodes all of it")
