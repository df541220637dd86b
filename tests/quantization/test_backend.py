"""The registry of kernels: one backend for each type of device."""

from collections.abc import Iterator
from typing import cast

import pytest
import torch

from qlangevin.quantization import backend
from qlangevin.quantization.backend import Kernels, kernels_for


@pytest.fixture
def other() -> Iterator[Kernels]:
    """Kernels registered for tensors without numbers; no test calls them."""
    kernels = cast(Kernels, object())
    backend.register("meta", kernels)
    yield kernels
    backend.unregister("meta")


def test_a_device_without_backend_has_no_kernels() -> None:
    assert kernels_for(torch.ones(1, device="meta")) is None
    assert backend.unregister("meta") is None


def test_a_device_has_the_kernels_registered_for_it(other: Kernels) -> None:
    x = torch.ones(2, device="meta")
    assert kernels_for(x) is other
    assert kernels_for(x, x.bfloat16(), x.to(torch.int8)) is other
    assert backend.unregister("meta") is other
    assert kernels_for(x) is None


def test_float64_has_none(other: Kernels) -> None:
    x = torch.ones(2, device="meta")
    assert kernels_for(x.double()) is None
    assert kernels_for(x, x.double()) is None


def test_tensors_of_two_devices_are_refused(other: Kernels) -> None:
    x, y = torch.ones(2, device="meta"), torch.ones(2)
    for pair in ((x, y), (y, x), (y, x.double())):
        with pytest.raises(ValueError, match=r"one device, got (meta and cpu|cpu and meta); move one of them"):
            kernels_for(*pair)
