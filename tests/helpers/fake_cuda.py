"""A process whose fake CUDA tensors can be differentiated, though its PyTorch has no CUDA: ``python -m tests.helpers.fake_cuda``.

It is given the library compiled from ``fake_cuda.cpp``, which has to be loaded before torch is. It trains networks of fake
tensors, and prints a line for each.
"""

import ctypes
import os
import sys
from collections.abc import Callable
from typing import Any

ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake  # noqa: E402

from qlangevin import SGLD, lower, pack  # noqa: E402
from qlangevin.quantization.qtensor import QTensor  # noqa: E402
from tests.helpers.deferred_kernels import deferred_kernels  # noqa: E402

CUDA = torch.device("cuda", 0)


def network(packed: str | None, dtype: torch.dtype) -> Any:
    """Return a small lowered network on the GPU."""
    here: dict[str, Any] = {"device": CUDA, "dtype": dtype}
    first, norm, last = nn.Conv2d(3, 4, 3, **here), nn.BatchNorm2d(4, **here), nn.Linear(36, 3, **here)
    model = nn.Sequential(first, norm, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), last)
    if packed:
        pack(model, packed)
    return lower(model, "bfp8" if dtype == torch.float32 else "fixed8.5", "bfp8")


def training_step(model: Any, sampler: SGLD) -> Callable[[Tensor, Tensor], Tensor]:
    def train(x: Tensor, y: Tensor) -> Tensor:
        sampler.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        sampler.step()
        return loss.detach()

    return train


def parts(t: Tensor) -> list[Tensor]:
    """Return the memory of a tensor: codes and exponents, or itself."""
    return [t.codes, *([] if t.exponents is None else [t.exponents])] if isinstance(t, QTensor) else [t]


def describe(model: nn.Module, sampler: SGLD) -> list[tuple[Any, ...]]:
    """Return dtype, shape and device of all that a step writes; all of it has to be fake."""
    tensors = [part for p in model.parameters() for part in parts(p)]
    tensors += [state["accumulator"] for state in sampler.state.values() if "accumulator" in state]
    assert all(is_fake(t) for t in tensors)
    return [(t.dtype, t.shape, t.device) for t in tensors]


def train(packed: str | None, accumulator: str | None, dtype: torch.dtype, compiled: bool) -> None:
    """Take steps on fake tensors; raise AssertionError if something is not where or what it should be."""
    with FakeTensorMode(), deferred_kernels("cuda") as kernels:
        model = network(packed, dtype)
        sampler = SGLD(
            model.parameters(), 0.1, 1000, weights=None if packed else "fixed8.5", accumulator=accumulator,
            gradients="bfp8",
        )  # fmt: skip
        before = describe(model, sampler)
        assert all(device == CUDA for *_, device in before)
        step = training_step(model, sampler)
        step = torch.compile(step, fullgraph=True, backend="aot_eager") if compiled else step
        for _ in range(2):
            loss = step(
                torch.randn(8, 3, 8, 8, device=CUDA, dtype=dtype), torch.zeros(8, dtype=torch.int64, device=CUDA)
            )
        assert (loss.dtype, loss.shape, loss.device) == (dtype, (), CUDA)
        assert describe(model, sampler) == before
        for p in model.parameters():
            assert p.grad is not None
            assert (p.grad.dtype, p.grad.shape, p.grad.device) == (dtype, p.shape, CUDA)
        assert not kernels.calls, "kernels would read memory that is not there"


def main() -> None:
    """Train everything."""
    torch._dynamo.config.trace_autograd_ops = True
    for compiled in (False, True):
        for packed, accumulator in ((None, None), (None, "fp32"), ("bfp8", None), ("bfp4", "bfp16")):
            train(packed, accumulator, torch.float32, compiled)
            print("compiled" if compiled else "eager", packed, accumulator)
    assert counters["stats"]["unique_graphs"] == 4
    train(None, "fp32", torch.bfloat16, compiled=False)
    print("eager bfloat16")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # autograd has a thread for the device, which nobody ends
