"""SGLD as a torch optimizer: a thin class that walks the parameters; the step itself is in `steps`.

The loss is the MEAN over the batch. With N data, learning rate lr, temperature T and weight decay λ (the Gaussian prior's
precision over N) a step is the paper's with α = lr / N: its noise has variance 2 lr T / N. ``temperature=0`` is SGD.
Every method of the paper is a choice of settings.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from . import native, ops, random
from .formats import FLOAT32_MAX, FP8_E4M3, FP32, Format, check_holds, parse
from .ops import Algorithm, Rounding
from .random import Key
from .steps import Update, parameter_key, quantized, sgld_op

__all__ = ["SGLD"]

FORMATS = ("weights", "gradients", "accumulator")


@dataclass(frozen=True)
class Settings:
    """What a parameter group is told, checked; formats by name."""

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
            if not (isinstance(value, numbers.Real) and 0 <= float(value) < FLOAT32_MAX):
                raise ValueError(f"{name} must be a finite number that is not negative, got {value!r}")
            object.__setattr__(self, name, float(value))  # also of NumPy's numbers
        if not (isinstance(self.num_data, numbers.Real) and 0 < self.num_data < math.inf):
            raise ValueError(
                f"num_data must be the number of training examples, a positive number, got {self.num_data!r}"
            )
        if not self.variance < FLOAT32_MAX:
            raise ValueError(
                f"the noise would have variance 2 lr temperature / num_data = {self.variance}; check num_data"
            )
        ops.choose("rounding", self.rounding, ("nearest", "stochastic", "corrected"))
        ops.choose("algorithm", self.algorithm, ("exact", "paper"))
        Key(self.seed)

    @classmethod
    def of(cls, group: dict[str, Any]) -> Settings:
        """Those of a parameter group: formats become names, a tensor lr (as schedulers may set) a number."""
        settings = {f.name: group[f.name] for f in fields(cls)}
        settings["lr"] = float(settings["lr"]) if isinstance(settings["lr"], Tensor) else settings["lr"]
        for name in FORMATS:
            settings[name] = None if settings[name] is None else str(parse(settings[name]))
        return cls(**settings)

    @property
    def variance(self) -> float:
        """Of the noise of one step."""
        return 2 * self.lr * self.temperature / float(self.num_data)

    def update(self) -> Update:
        return Update(
            self.lr, self.weight_decay, self.variance, self.weights, self.gradients, self.accumulator, self.rounding,
            self.algorithm, self.maximize,
        )  # fmt: skip


@lru_cache(maxsize=1024)
def check_dtype(dtype: torch.dtype, weights: str | None, accumulator: str | None) -> None:
    """Refuse formats that parameters of a dtype, or their accumulators, cannot hold."""
    check_holds(dtype, parse(weights) if weights else FP32 if dtype == torch.float32 else FP8_E4M3)
    if accumulator:
        check_holds(ops.working_dtype(dtype), parse(accumulator))


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
            copy that takes the updates; weights loaded into the model later begin a new one.
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
        names = (f.name for f in fields(Settings))
        given = locals()
        defaults = {name: given[name] for name in names}
        Settings.of(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are put on their grid at once."""
        settings = Settings.of({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group, settings)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for p in group["params"]:
            self._begin(p, settings)

    def _check(self, group: dict[str, Any], settings: Settings) -> None:
        """Refuse formats the parameters cannot hold; keep formats by name, so that a saved group is numbers and words."""
        for i, p in enumerate(group["params"]):
            try:
                check_dtype(p.dtype, settings.weights, settings.accumulator)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._name(group, i)}: {error}") from None
        for name in FORMATS:
            group[name] = getattr(settings, name)

    @torch.no_grad()
    def _begin(self, p: Tensor, settings: Settings) -> dict[str, Any]:
        """The state of a parameter. A new one gets random bits of its own and is put on its grid."""
        state, s = cast(dict[str, Any], self.state[p]), settings.update()
        new = "index" not in state
        if new:
            state["index"] = 1 + max((other.get("index", -1) for other in self.state.values()), default=-1)
            state["step"] = 0
        key = parameter_key(settings.seed, state["index"], state["step"])
        if settings.accumulator and ("accumulator" not in state or _changed(p, state, s)):
            held = p.detach().to(ops.working_dtype(p.dtype)).contiguous()
            state["accumulator"] = quantized(held, settings.accumulator, s.onto, key, random.ROUNDING).clone()
        if new:
            p.copy_(quantized(state.get("accumulator", p), s.grid(p.dtype), s.onto, key, random.WEIGHT))
            state["version"] = p._version
        return state

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
        plans = []
        for group in self.param_groups:
            settings = Settings.of(group)
            self._check(group, settings)
            plans.append((settings, [p for p in group["params"] if p.grad is not None]))
        self._check_gradients()
        for settings, params in plans:
            if params:
                self._step_group(settings, params)
        return loss

    def _step_group(self, settings: Settings, params: list[Tensor]) -> None:
        states = [self._begin(p, settings) for p in params]
        keys = [parameter_key(settings.seed, state["index"], state["step"] + 1) for state in states]
        sgld_op(
            params, [state["accumulator"] for state in states] if settings.accumulator else [],
            [cast(Tensor, p.grad) for p in params], *settings.update().arguments(), ops.signed(settings.seed),
            [ops.signed(key.stream) for key in keys], [ops.signed(key.step) for key in keys],
        )  # fmt: skip
        for p, state in zip(params, states, strict=True):
            state["step"] += 1
            state["version"] = p._version

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
                    raise TypeError(f"{self._name(group, i)} has a {kind} gradient; SGLD needs dense real ones")
                plain.append(g)
                names.append(self._name(group, i))
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
                name = Settings.of(group).update().grid(p.dtype)
                if name is not None:
                    format = parse(name)
                    count += int(((p >= format.high) | (p <= format.low)).sum())
        return count

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved sampler stopped, to the byte. The parameters themselves are the model's to load."""
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        held = {p: state_dict["state"].get(i, {}).get("accumulator") for i, p in zip(saved, params, strict=False)}
        for p, accumulator in held.items():
            if accumulator is not None and accumulator.shape != p.shape:
                raise ValueError(
                    f"the saved accumulator has shape {tuple(accumulator.shape)}, its parameter {tuple(p.shape)}"
                )
        super().load_state_dict(state_dict)
        for p, accumulator in held.items():
            if accumulator is not None:  # torch casts state to the parameter's dtype: an accumulator has its own
                dtype = ops.working_dtype(p.dtype)
                self.state[p]["accumulator"] = accumulator.detach().to(p.device, dtype, copy=True).contiguous()
                self.state[p]["version"] = p._version  # what was saved counts, whenever the model is loaded

    def _name(self, group: dict[str, Any], i: int) -> str:
        """What to call a parameter in a message."""
        if names := group.get("param_names"):
            return f"parameter {names[i]!r}"
        where = next((f" of group {g}" for g, other in enumerate(self.param_groups) if g and other is group), "")
        return f"parameter {i}{where} (shape {tuple(group['params'][i].shape)})"


def _changed(p: Tensor, state: dict[str, Any], s: Update) -> bool:
    """Whether somebody else has written other weights into a parameter than those its accumulator stands for.

    Writing raises torch's version counter, but may also have put back what was there, when a checkpoint is loaded. Weights
    rounded from the accumulator are within two gaps of it.
    """
    name = s.grid(p.dtype)
    if state.get("version", p._version) == p._version or name is None:
        return False
    format, weights = parse(name), p.detach().to(ops.working_dtype(p.dtype))
    distance = (weights - state["accumulator"].clamp(format.low, format.high)).abs()
    return bool((distance > 2 * format.gap(weights)).any())


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
