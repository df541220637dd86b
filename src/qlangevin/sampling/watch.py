"""A look at a chain now and then, for what goes wrong without an error: weights that saturate, drifts that tear a chain apart.

Looks are before steps 1, 2, 4, 8, ... and before every thousandth, which costs a long run next to nothing. On a device that the
host must not wait for, what was seen is sent to the host, and judged in a later step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .._warnings import warn_once
from ..quantization.formats import parse
from ..quantization.operators import working_dtype
from ..quantization.qtensor import decoded
from .host_copy import HostCopy
from .settings import StepSettings

__all__ = ["Watch", "count_saturated", "is_look"]

SATURATED_SHARE = 0.01  # of a parameter's weights at an end of the range
REACHABLE = (
    2.0**64
)  # ends of a range beyond it, such as those of block floating point, are not reached by finite chains
MOST_DRIFT = 2  # times the weights: a step that moves them further than that replaces them
LEAST_DRIFT = 10  # times the noise: with less it is the noise that moves the weights


def is_look(step: int) -> bool:
    """Return True if the weights are looked at before this step."""
    return step & (step - 1) == 0 or step % 1000 == 0


def count_saturated(weights: Tensor, format: str | None) -> int:
    """Return how many weights are at an end of their format's range; None has no ends."""
    if format is None or weights.numel() == 0:
        return 0
    low, high = parse(format).low, parse(format).high
    least, most = weights.aminmax()
    if least > low and most < high:  # one pass over memory, and the usual case
        return 0
    return int(_saturated(weights, format).sum())


def _saturated(weights: Tensor, format: str) -> Tensor:
    return (weights >= parse(format).high) | (weights <= parse(format).low)


class Look(NamedTuple):
    """One parameter before a step, all but the numbers on its device."""

    settings: StepSettings
    format: str | None
    size: int
    step: int
    name: str
    what: str = "weights"  # or "velocities", "accumulators"

    @property
    def has_ends(self) -> bool:
        """True if weights can reach the ends of the range."""
        return self.format is not None and parse(self.format).high < REACHABLE


class Watch:
    """Sums over one sampler's chain, and the warnings that were given: each once."""

    def __init__(self) -> None:
        self.given: set[str] = set()
        self._drift = self._noise = self._weights = 0.0  # squared norms, summed over the parameters of one look
        self._seen: list[tuple[Look, Tensor]] = []  # in this step, on a device
        self._sent: list[tuple[list[Look], HostCopy]] = []  # in an earlier one

    def look(
        self, weights: Tensor, gradient: Tensor, settings: StepSettings, step: int, name: str, *, wait: bool = True,
        beside: Iterable[tuple[str, Tensor, str | None]] = (),
    ) -> None:  # fmt: skip
        """Look at one parameter before a step; `conclude` follows when all of them were looked at.

        ``beside`` has velocities and accumulators with their formats.
        """
        seen = Look(settings, settings.weights_format(weights), weights.numel(), step, name)
        weights = decoded(weights.detach())
        for what, values, format in beside:
            self._look_beside(seen._replace(format=format, what=what), decoded(values), wait)
        if not wait:
            self._seen.append((seen, _measure(seen, weights, gradient)))
            return
        if seen.has_ends and "weights" not in self.given:
            self._judge_saturation(seen, count_saturated(weights, seen.format), stacklevel=8)
        if step > 1 and "drift" not in self.given:  # weights that are zero at first are moved by any gradient
            self._add(seen, _squared_norm(weights), _squared_norm(gradient))

    def _look_beside(self, seen: Look, values: Tensor, wait: bool) -> None:
        """Look at the ends of the range of what a parameter has beside its weights."""
        if not seen.has_ends or seen.what in self.given:
            return
        if wait:
            self._judge_saturation(seen, count_saturated(values, seen.format), stacklevel=9)
        else:
            count = _saturated(values, str(seen.format)).sum().double()
            self._seen.append((seen, torch.stack([count, torch.zeros_like(count), torch.zeros_like(count)])))

    def conclude(self) -> None:
        """Judge what was looked at in this step, or send it to the host where that has to wait."""
        self._judge_drift(stacklevel=7)
        devices = dict.fromkeys(numbers.device for _, numbers in self._seen)
        for device in devices:
            some = [(look, numbers) for look, numbers in self._seen if numbers.device == device]
            self._sent.append(([look for look, _ in some], HostCopy(torch.stack([n for _, n in some]))))
        self._seen = []

    def judge_sent(self, *, wait: bool, stacklevel: int) -> None:
        """Judge what earlier steps have sent, if it has arrived."""
        if not self._sent or not (wait or all(copy.ready() for _, copy in self._sent)):
            return
        sent, self._sent = self._sent, []
        for looks, copy in sent:
            for look, (saturated, weights, gradient) in zip(looks, copy.numbers(), strict=True):
                if look.has_ends:
                    self._judge_saturation(look, int(saturated), stacklevel + 2)
                if look.step > 1 and look.what == "weights":
                    self._add(look, weights, gradient)
        self._judge_drift(stacklevel + 1)

    def _add(self, look: Look, weights: float, gradient: float) -> None:
        """Add squared norms of one parameter to the sums."""
        gap = (getattr(parse(look.format), "step", None) or 0.0) if look.format else 0.0
        self._weights += weights + look.size * gap**2  # a drift below the gap of a fixed grid does not move weights far
        if (rms := look.settings.rms) is not None:  # gains make gradients about 1 in size
            gradient = min(gradient / rms.eps**2, look.size)
        self._drift += look.settings.push**2 * gradient
        self._noise += look.settings.variance * look.size

    def _judge_drift(self, stacklevel: int) -> None:
        """Warn if the drift over all parameters is far larger than the weights, and forget the sums."""
        if not self._drift and not self._weights:  # most steps: nothing was looked at
            return
        drift, noise, weights = (math.sqrt(x) for x in (self._drift, self._noise, self._weights))
        self._drift = self._noise = self._weights = 0.0
        if drift > MOST_DRIFT * weights and drift > LEAST_DRIFT * noise:
            ratio = f"{drift / weights:.3g} times" if weights else "infinitely many times"
            warn_once(
                self.given,
                "drift",
                f"a step moves the weights by lr |gradient| = {drift:.3g}, {ratio} their norm: the chain jumps about instead of "
                "following the posterior. Is the loss a sum over the batch? It must be the mean: qlangevin.check_loss_scale "
                "tells. If it is, take a smaller lr",
                stacklevel,
            )

    def _judge_saturation(self, look: Look, count: int, stacklevel: int) -> None:
        if count > SATURATED_SHARE * look.size and count >= min(4, look.size):
            format = parse(str(look.format))
            where = f"{count} of {look.size} {look.what} of {look.name} are at an end of the range of {format}, "
            warn_once(
                self.given, look.what, where + _CLIPPED[look.what].format(low=format.low, high=format.high), stacklevel
            )


_NOT_SAMPLED = (
    "{low:g} to {high:g}, where updates are clipped, and the chain does not sample the posterior. Take a format "
    "with a wider range (fewer fractional bits, or block floating point) or a smaller lr"
)
_CLIPPED = {  # what follows from saturation, and what to do
    "weights": _NOT_SAMPLED,
    "accumulators": _NOT_SAMPLED,
    "velocities": "{high:g} standard deviations: weights move more slowly than lr and friction say. That passes if the chain "
    'only has a long way to go. Else take velocity="bf16", a smaller lr, or a higher temperature',
}


def _measure(look: Look, weights: Tensor, gradient: Tensor) -> Tensor:
    """Return weights at an end of the range and squared norms of weights and gradient, on their device."""
    none = torch.zeros((), dtype=torch.float64, device=weights.device)
    saturated = _saturated(weights, str(look.format)).sum() if look.has_ends else none
    norms = [_norm(t).double().square() for t in (weights, gradient)]
    return torch.stack([saturated.double(), *norms])


def _squared_norm(t: Tensor) -> float:
    return float(_norm(t)) ** 2


def _norm(t: Tensor) -> Tensor:
    """Return the norm in float32 or float64: those of large tensors exceed float16."""
    norm: Tensor = torch.linalg.vector_norm(t, dtype=working_dtype(t.dtype))
    return norm
