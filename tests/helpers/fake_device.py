"""Models of fake tensors on devices that this machine lacks.

A PyTorch without CUDA aborts the process where autograd meets even a fake CUDA tensor. A device in Python, `STAND_IN`, stands in
for it; it has to be registered before the first backward of a process, and stays until the process ends. So
``python -m tests.helpers.fake_device`` is a process of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration

import qlangevin as ql
from qlangevin import lowering
from tests.helpers.networks import build

STAND_IN = "stand_in"


def move_to_fake(model: nn.Module, device: str) -> None:
    """Replace all tensors of a model by fake ones on a device; to be called in a `FakeTensorMode`."""
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(p.shape, device=device)))
        for name, b in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty(b.shape, dtype=b.dtype, device=device))


def run_forward(model: nn.Module, x: Tensor, device: str, *, lowered_before: bool) -> Tensor:
    """Lower a model, before or after its tensors become fake ones, and return the output."""
    if lowered_before:
        ql.lower(model, "bfp8", "bfp8")
    with FakeTensorMode():
        move_to_fake(model, device)
        if not lowered_before:
            ql.lower(model, "bfp8", "bfp8")
        y: Tensor = model(torch.empty_strided(x.shape, x.stride(), device=device))
        return y


def differentiate(model: nn.Module, x: Tensor, lowered_before: bool, last: bool) -> None:
    """Run a model forward and backward on `STAND_IN`; raise AssertionError unless the gradients are there, too."""
    x = x.to(memory_format=torch.channels_last) if last else x
    y = run_forward(model, x, STAND_IN, lowered_before=lowered_before)
    with y.fake_mode:  # type: ignore[attr-defined]
        y.sum().backward()
    assert (y.shape, y.device.type) == ((6, 3), STAND_IN)
    for p in model.parameters():
        assert p.grad is not None
        assert (p.grad.shape, p.grad.dtype, p.grad.device.type) == (p.shape, torch.float32, STAND_IN)
    if lowered_before:  # a run without numbers is none
        assert set(lowering.state_dict(model).values()) == {0}


if __name__ == "__main__":
    cases = [(before, last, build("imagenet")) for before in (False, True) for last in (False, True)]
    backend_registration._setup_privateuseone_for_python_backend(STAND_IN)  # has no random generator, so after `build`
    for before, last, (model, x, _) in cases:
        differentiate(model, x, before, last)
    print("the gradients are on the device")
