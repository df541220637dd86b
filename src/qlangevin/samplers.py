"""SGLD as a torch optimizer: a thin class that walks the parameters; the step itself is in `steps`.

The loss is the MEAN over the batch. With N data, learning rate lr, temperature T and weight decay λ (the Gaussian prior's
precision over N) a step is the paper's with α = lr / N: its noise has variance 2 lr T / N. ``temperature=0`` is SGD.
Every method of the paper is a choice of settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import native, ops, random
from .formats import FP32, Format, check_holds, parse
from .ops import Algorithm, Rounding
from .random import Key
from .steps import Update, parameter_key, quantized, sgld_op

__all__ = ["SGLD"]

FORMATS = ("weights", "gradients", "accumulator")


@dataclass(frozen=True)
class Defaults:
    """The settings of a parameter group, checked."""

    lr: float
    num_data: float
    temperature: float
    weight_decay: float
    weights: str | None
    gradients: str | None
    accumulator: str | None
    rounding: Rounding
    algorithm: Algorithm
    maximize: bool
    seed: int

    def __post_init__(self) -> None:
        for name in ("lr", "temperature", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and 0 <= value < math.inf):
                raise ValueError(f"{name} must be a finite number that is not negative, got {value!r}")
        if not (isinstance(self.num_data, (int, float)) and 0 < self.num_data < math.inf):
            raise ValueError(
                f"num_data must be the number of training examples, a positive number, got {self.num_data!r}"
            )
        ops.choose("rounding", self.rounding, ("nearest", "stochastic", "corrected"))
        ops.choose("algorithm", self.algorithm, ("exact", "paper"))
        Key(self.seed)

    @classmethod
    def of(cls, group: dict[str, Any]) -> Defaults:
        """From the settings of a group: formats become names, a tensor lr (as schedulers may set) a number."""
        settings = {f.name: group[f.name] for f in fields(cls)}
        settings["lr"] = float(settings["lr"]) if isinstance(settings["lr"], Tensor) else settings["lr"]
        for name in FORMATS:
            settings[name] = None if settings[name] is None else str(parse(settings[name]))
        return cls(**settings)

    def update(self) -> Update:
        variance = 2 * self.lr * self.temperature / self.num_data
        return Update(
            self.lr, self.weight_decay, variance, self.weights, self.gradients, self.accumulator, self.rounding,
            self.algorithm, self.maximize,
        )  # fmt: skip


class SGLD(Optimizer):
    """Low-precision stochastic gradient Langevin dynamics.

    Args:
        params: parameters, named parameters or groups; a group may override any setting. From here on they are on the
            grid of ``weights``.
        lr: the learning rate for the mean loss.
        num_data: N, the number of training examples.
        temperature: scales the noise; 1 samples the posterior, 0 is SGD.
        weight_decay: the precision of the Gaussian prior over N.
        weights: Q_W, the format of the parameters; None leaves them in their dtype's own precision.
        gradients: Q_G, the format gradients are rounded to, stochastically; None for full precision.
        accumulator: None keeps only the parameters (SGLDLP-L); ``"fp32"`` (SGLDLP-F) or any other format keeps a second
            copy that takes the updates.
        rounding: ``"corrected"`` (Q^vc), ``"stochastic"`` (naive) or ``"nearest"``.
        algorithm: of ``"corrected"``; see `qlangevin.corrected`.
        maximize: climb instead of descend.
        seed: of all random bits; two samplers with the same seed draw the same.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        num_data: float,
        *,
        temperature: float = 1.0,
        weight_decay: float = 0.0,
        weights: str | Format | None = None,
        gradients: str | Format | None = None,
        accumulator: str | Format | None = None,
        rounding: Rounding = "corrected",
        algorithm: Algorithm = "exact",
        maximize: bool = False,
        seed: int = 0,
    ) -> None:
        names = (f.name for f in fields(Defaults))
        given = locals()
        defaults = {name: given[name] for name in names}
        Defaults.of(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are put on their grid at once."""
        settings = Defaults.of({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in FORMATS:  # by name, so that a saved sampler holds nothing but numbers and words
            group[name] = getattr(settings, name)
        try:
            for i, p in enumerate(group["params"]):
                self._check(p, settings, _name(group, i))
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for p in group["params"]:
            self._begin(p, settings)

    @staticmethod
    def _check(p: Tensor, settings: Defaults, name: str) -> None:
        try:
            check_holds(p.dtype, parse(settings.update().grid(p.dtype) or FP32))
            if settings.accumulator:
                check_holds(ops.working_dtype(p.dtype), parse(settings.accumulator))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from None

    @torch.no_grad()
    def _begin(self, p: Tensor, settings: Defaults) -> None:
        """Put a new parameter on its grid and give it a stream of its own."""
        state, s = self.state[p], settings.update()
        state["stream"], state["step"] = len(self.state) - 1, 0
        key = parameter_key(settings.seed, state["stream"], 0)
        if settings.accumulator:
            held = p.detach().to(ops.working_dtype(p.dtype)).contiguous()
            state["accumulator"] = quantized(held, settings.accumulator, s.onto, key, random.ROUNDING).clone()
        p.copy_(quantized(state.get("accumulator", p), s.grid(p.dtype), s.onto, key, random.WEIGHT))

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step. A gradient that is not finite raises FloatingPointError, and nothing has changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plans = [
            (Defaults.of(group), [p for p in group["params"] if p.grad is not None]) for group in self.param_groups
        ]
        self._check_gradients()
        for settings, params in plans:
            if not params:
                continue
            for p in params:
                self.state[p]["step"] += 1
            states = [self.state[p] for p in params]
            keys = [parameter_key(settings.seed, state["stream"], state["step"]) for state in states]
            sgld_op(
                params, [state["accumulator"] for state in states] if settings.accumulator else [],
                [cast(Tensor, p.grad) for p in params], *settings.update().numbers_and_words(), ops.signed(settings.seed),
                [ops.signed(key.stream) for key in keys], [ops.signed(key.step) for key in keys],
            )  # fmt: skip
        return loss

    def _check_gradients(self) -> None:
        """Refuse gradients the step cannot use before anything is changed by it."""
        plain, names = [], []
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                g = p.grad
                if g is None:
                    continue
                if g.layout != torch.strided or g.is_complex():
                    kind = "complex" if g.is_complex() else "sparse"
                    raise TypeError(f"{_name(group, i)} has a {kind} gradient; SGLD needs dense real ones")
                plain.append(g)
                names.append(_name(group, i))
        bad = first_not_finite(plain)
        if bad >= 0:
            raise FloatingPointError(
                f"the gradient of {names[bad]} holds an infinity or a NaN; no parameter was changed by this step"
            )

    def saturated(self) -> int:
        """How many weights sit at an end of their format's range, where updates are clipped."""
        count = 0
        for group in self.param_groups:
            for p in group["params"]:
                name = Defaults.of(group).update().grid(p.dtype)
                if name is not None:
                    format = parse(name)
                    count += int(((p >= format.high) | (p <= format.low)).sum())
        return count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved sampler stopped, to the byte. The parameters themselves are the model's to load."""
        super().load_state_dict(state_dict)
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(saved, params, strict=True):
            accumulator = state_dict["state"].get(i, {}).get("accumulator")
            if accumulator is not None:  # torch casts state to the parameter's dtype: an accumulator keeps its own
                self.state[p]["accumulator"] = accumulator.detach().to(p.device, copy=True)


def _name(group: dict[str, Any], i: int) -> str:
    """What to call a parameter in a message."""
    names = group.get("param_names")
    return f"parameter {names[i]!r}" if names else f"parameter {i} (shape {tuple(group['params'][i].shape)})"


def first_not_finite(tensors: list[Tensor]) -> int:
    """The index of the first tensor that holds an infinity or a NaN, or -1."""
    fast = [
        i for i, t in enumerate(tensors) if t.dtype == torch.float32 and t.is_contiguous() and native.enabled_for(t)
    ]
    found = native.first_not_finite([tensors[i] for i in fast]) if fast else -1
    bad = [fast[found]] if found >= 0 else []
    slow = sorted(set(range(len(tensors))) - set(fast))
    bad += [i for i in slow if not bool(tensors[i].isfinite().all())][:1]
    return min(bad, default=-1)
