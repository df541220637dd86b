"""Step numbers of a sampler on its devices, and the flag of a gradient that is not finite.

On a GPU the host must not wait within a step, and a CUDA graph replays one without the host. So the kernels themselves count
the steps, look for gradients that are not finite, and if they find one turn that step and all further ones into nothing, until
the host has raised the error. Every parameter of the sampler has a slot, its place among all of them: in ``counts``, the steps
it has taken, and in ``flags``, the least slot whose gradient is not finite, in this step and before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..quantization.backend import NO_ERROR, kernels_for
from .host_copy import HostCopy
from .kernel_step import Counters

__all__ = ["DeviceCounts", "SamplerCounts"]


class DeviceCounts:
    """Step numbers and flags on one device."""

    def __init__(self, device: torch.device, counts: list[int]) -> None:
        self.counts = torch.tensor(counts, dtype=torch.int64, device=device)
        self.before = self.counts.clone()  # those before the last step that was not turned into nothing
        self.flags = torch.full((2,), NO_ERROR, dtype=torch.int32, device=device)
        self._copy: HostCopy | None = None

    def begin(self, gradients: list[Tensor], slots: list[int]) -> None:
        """Count a step of these slots, and look at their gradients."""
        torch.where(self.flags[1] == NO_ERROR, self.counts, self.before, out=self.before)
        kernels = kernels_for(*gradients) if gradients else None
        if kernels is not None:
            kernels.begin_step(gradients, slots, self.counts, self.flags)

    def share(self, other: DeviceCounts) -> None:
        """Take over the flag of another device: no parameter of a sampler steps if one cannot."""
        theirs = other.flags[:1].to(self.flags.device, non_blocking=True)
        torch.minimum(self.flags[:1], theirs, out=self.flags[:1])

    def ask(self) -> None:
        """Have the flag sent to the host, if it is not on its way already."""
        self._copy = self._copy or HostCopy(self.flags)

    def arrived(self) -> int:
        """Return the flag if it has arrived, else `NO_ERROR`."""
        if self._copy is None or not self._copy.ready():
            return NO_ERROR
        flag, self._copy = self._copy.numbers()[0], None
        return int(flag)

    def wait(self) -> int:
        """Wait for all steps on this device and return the flag."""
        self._copy = None
        return int(self.flags[0])

    def undo(self) -> None:
        """Go back to before the step that failed."""
        self._copy = None
        self.counts.copy_(self.before)
        self.flags.fill_(NO_ERROR)


class SamplerCounts:
    """Step numbers of all parameters of a sampler, on each device that it steps on."""

    def __init__(self) -> None:
        self._slots: dict[Tensor, int] = {}
        self._devices: dict[torch.device, DeviceCounts] = {}
        self._homes: dict[Tensor, torch.device] = {}  # of parameters that have stepped by kernels that count

    def clear(self) -> None:
        """Forget everything: the numbers on the host are the right ones."""
        self._slots, self._devices, self._homes = {}, {}, {}

    def holds(self, params: Iterable[Tensor]) -> bool:
        """Return True if the steps of these parameters are counted, each on the device it is on now."""
        return all(self._homes.get(p) == p.device for p in params)

    def holds_any(self, params: Iterable[Tensor]) -> bool:
        """Return True if the steps of one of these parameters are counted on a device."""
        return any(p in self._homes for p in params)

    def build(self, everyone: Sequence[Tensor], steps: list[int], params: Sequence[Tensor]) -> None:
        """Count the steps of these parameters from now on; ``steps`` are those that every parameter has taken."""
        self.clear()
        self._slots = {p: i for i, p in enumerate(everyone)}
        self._homes = {p: p.device for p in params}
        self._devices = {device: DeviceCounts(device, steps) for device in dict.fromkeys(self._homes.values())}

    def begin(self, gradients: dict[Tensor, Tensor]) -> None:
        """Count a step of these parameters, and look at their gradients: one call a device."""
        for device, counted in self._devices.items():
            some = {p: g for p, g in gradients.items() if p.device == device}
            counted.begin([*some.values()], [self._slots[p] for p in some])
        for one in self._devices.values():
            for other in self._devices.values():
                if other is not one:
                    one.share(other)

    def counters(self, params: Sequence[Tensor]) -> Counters:
        """Return the numbers of parameters of one device, as a step takes them."""
        found = self._devices[params[0].device]
        return Counters([self._slots[p] for p in params], found.counts, found.flags)

    def count_of(self, p: Tensor) -> Tensor:
        """Return the steps that a parameter has taken, on its device."""
        return self._devices[p.device].counts[self._slots[p]]

    def clear_on(self, device: torch.device) -> Tensor | None:
        """Return, on a device, whether steps there are not turned into nothing; None if none are counted there."""
        found = self._devices.get(device)
        return None if found is None else found.flags[0] == NO_ERROR

    def ask(self) -> None:
        """Have the flags sent to the host."""
        for counted in self._devices.values():
            counted.ask()

    def failed(self, *, wait: bool) -> Tensor | None:
        """Return the parameter whose gradient was not finite; without waiting None also if that is not known yet."""
        flag = min((c.wait() if wait else c.arrived() for c in self._devices.values()), default=NO_ERROR)
        return None if flag == NO_ERROR else [*self._slots][flag]

    def undo(self) -> None:
        """Go back to before the step that failed."""
        for counted in self._devices.values():
            counted.undo()

    def tell(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Wait for all steps, and write the number that each parameter has taken into its state on the host."""
        numbers = {device: counted.counts.tolist() for device, counted in self._devices.items()}
        for p, device in self._homes.items():
            states[p]["step"] = numbers[device][self._slots[p]]
