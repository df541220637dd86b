"""Every function of one activation that is lowered can be differentiated: what its backward reads is not overwritten."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qlangevin as ql
from qlangevin.lowering.function_table import FUNCTIONS

OTHER_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "threshold": (0.1, 0.0), "softmax": (-1,), "softmin": (-1,), "gumbel_softmax": (), "lp_pool1d": (2.0, 2),
    "max_pool1d": (2,), "avg_pool1d": (2,), "adaptive_max_pool1d": (8,), "adaptive_avg_pool1d": (8,), "mean": (-1,),
    "normalize": (), "interpolate": (8,), "upsample": (8,),
}  # fmt: skip
# Others need other shapes, or several tensors.
LEFT_OUT = re.compile(
    r"2d|3d|conv|linear|norm|embedding|mm|mv|matmul|einsum|tensordot|add|sub|mul|div|cat|stack|prelu|scaled"
)
UNARY = [f for f in FUNCTIONS if not LEFT_OUT.search(f) or f == "normalize"]


def find(name: str) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = getattr(F, name, None) or getattr(torch, name)
    return found


class Network(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor], from_data: bool) -> None:
        super().__init__()
        self.layer, self.function, self.from_data = nn.Linear(16, 16), function, from_data

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return self.function(h + x if self.from_data else h)  # a sum with data is not rounded


@pytest.mark.parametrize("from_data", [False, True])
@pytest.mark.parametrize("name", UNARY)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's own: of deprecated functions, and of random ones
def test_the_gradient_is_that_of_the_function(name: str, from_data: bool) -> None:
    torch.manual_seed(0)
    arguments = OTHER_ARGUMENTS.get(name, ())
    model = Network(lambda t: find(name)(t, *arguments), from_data)
    x = torch.randn(4, 3, 16)
    ql.lower(model, "bfp8", None, save_codes=False)
    handler_free = Network(model.function, from_data)
    handler_free.load_state_dict(model.state_dict())
    ql.lower(handler_free, "bfp8", None, functions=False, save_codes=False)
    torch.manual_seed(1)
    model(x).sum().backward()
    torch.manual_seed(1)
    handler_free(x).sum().backward()
    got, expected = model.layer.weight.grad, handler_free.layer.weight.grad
    assert got is not None
    assert expected is not None
    if "dropout" not in name:  # which draws other bits when its mask is kept as bits
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
