"""SGLD as a torch optimizer: a thin class that walks the parameters; the step itself is in `steps`.

Every method of the paper is a choice of `settings`; ``temperature=0`` is SGD.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .. import native
from .._dtensor import check_shard, first_anywhere, local, shard_of
from ..quantization import operators, random
from ..quantization.formats import Format, parse
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor, decoded
from . import in_backward
from .settings import FORMATS, Settings, check_parameter
from .step import Update, parameter_key, quantized, sgld_op, update_codes_

__all__ = ["SGLD"]


class SGLD(Optimizer):
    """Low-precision stochastic gradient Langevin dynamics.

    Args:
        params: parameters, named parameters or groups; a group may override any setting. From here on they are on the
            grid of ``weights``.
        lr: the learning rate for the mean loss.
        num_data: N, the number of training examples.
        temperature: scales the noise; 1 samples the posterior, 0 is SGD.
        weight_decay: the precision of the Gaussian prior over N.
        weights: Q_W, the format of the parameters; None leaves them in their dtype's own precision, or as they are packed.
        gradients: Q_G, the format gradients are rounded to, stochastically; None for full precision.
        accumulator: None keeps only the parameters (SGLDLP-L); ``"fp32"`` (SGLDLP-F) or any other format keeps a second
            copy that takes the updates; weights loaded into the model later begin a new one.
        rounding: ``"corrected"`` (Q^vc), ``"stochastic"`` (naive) or ``"nearest"``.
        algorithm: of ``"corrected"``; see `qlangevin.corrected`.
        maximize: climb instead of descend.
        seed: of all random bits; two samplers with the same seed and stream draw the same.
        stream: tells chains apart that share a seed.
        step_in_backward: step each parameter as soon as ``backward`` has its gradient, and free the gradient: there is never
            more than one of them. ``step()`` then has nothing left to do, and gradients cannot be clipped, accumulated
            over several backward passes or rejected as a whole.
    """

    step_in_backward: bool = False
    _places: Mapping[int, tuple[int, int]] = MappingProxyType({})

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
        stream: int = 0,
        step_in_backward: bool = False,
    ) -> None:
        names = (f.name for f in fields(Settings))
        given = locals()
        defaults = {name: given[name] for name in names}
        Settings.of(defaults)
        self.step_in_backward = step_in_backward
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
            self._hook(p)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "step_in_backward": self.step_in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("stream", 0)  # saved before there were streams
            for p in group["params"]:
                self._hook(p)

    def _hook(self, p: Tensor) -> None:
        if self.step_in_backward and p.requires_grad:
            in_backward.attach(p, self)

    def _check(self, group: dict[str, Any], settings: Settings) -> None:
        """Refuse formats the parameters cannot hold; keep formats by name, so that a saved group is numbers and words."""
        for i, p in enumerate(group["params"]):
            try:
                check_parameter(local(p), settings)
                check_shard(p, parse(settings.update().grid(local(p)) or "fp32"))
                if in_backward.taken(p, self):
                    raise ValueError("another sampler steps it in backward; one parameter has one sampler")
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._name(group, i)}: {error}") from None
        for name in FORMATS:
            group[name] = getattr(settings, name)

    @torch.no_grad()
    def _begin(self, p: Tensor, settings: Settings) -> dict[str, Any]:
        """The state of a parameter. A new one gets random bits of its own and is put on its grid."""
        state, s, part = cast(dict[str, Any], self.state[p]), settings.update(), local(p)
        new = "index" not in state
        if new:
            state["index"] = 1 + max((other.get("index", -1) for other in self.state.values()), default=-1)
            state["step"] = 0
        key = parameter_key(settings.seed, settings.stream, state["index"], state["step"], shard_of(p))
        if settings.accumulator and ("accumulator" not in state or _changed(p, state, s)):
            held = _values(part).to(operators.working_dtype(p.dtype)).contiguous()
            state["accumulator"] = quantized(held, settings.accumulator, s.onto, key, random.ROUNDING).clone()
        if new and not (isinstance(part, QTensor) and "accumulator" not in state):
            part.copy_(quantized(state.get("accumulator", part), s.grid(part), s.onto, key, random.WEIGHT))
        if new:
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
        self._check_gradients([(g, i) for g in self.param_groups for i in range(len(g["params"]))])
        for settings, params in plans:
            if params:
                self._step_group(settings, params)
            for p in params if self.step_in_backward else []:  # those whose hooks are lost
                self._hook(p)
                p.grad = None
        return loss

    def _step_group(self, settings: Settings, params: list[Tensor]) -> None:
        """Step parameters that share settings: plain ones in one operator, packed ones on their codes."""
        states, parts = [self._begin(p, settings) for p in params], [local(p) for p in params]
        alike: dict[Any, list[int]] = defaultdict(list)
        for i, part in enumerate(parts):
            alike[part.format if isinstance(part, QTensor) else None].append(i)
        for packed, members in alike.items():
            held = [states[i]["accumulator"] for i in members] if settings.accumulator else []
            chain = (settings.seed, settings.stream)
            at = [(states[i]["index"], states[i]["step"] + 1) for i in members]
            keys = [parameter_key(*chain, *now, shard_of(params[i])) for i, now in zip(members, at, strict=True)]
            these, gradients = [parts[i] for i in members], [local(cast(Tensor, params[i].grad)) for i in members]
            if packed is not None:
                update_codes_(cast(list[QTensor], these), held, gradients, settings.update(), keys)
            else:
                streams, steps = (
                    [operators.signed(key.stream) for key in keys],
                    [operators.signed(key.step) for key in keys],
                )
                seed = operators.signed(settings.seed)
                sgld_op(these, held, gradients, *settings.update().arguments(), seed, streams, steps)
        for p, state in zip(params, states, strict=True):
            state["step"] += 1
            state["version"] = p._version

    @torch.no_grad()
    def step_one(self, p: Tensor) -> None:
        """Step one parameter whose gradient is ready, and free the gradient."""
        group, i = self._place(p)
        settings = Settings.of(group)
        check_parameter(local(p), settings)
        self._check_gradients([(group, i)])
        self._step_group(settings, [p])
        p.grad = None

    def _place(self, p: Tensor) -> tuple[dict[str, Any], int]:
        """The group of a parameter and its number there. Looked up where it was the last time: groups come and go."""
        g, i = self._places.get(id(p), (0, 0))
        if not (g < len(self.param_groups) and i < len(self.param_groups[g]["params"])) or (
            self.param_groups[g]["params"][i] is not p
        ):
            everywhere = [(g, i, p) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"])]
            self._places = {id(p): (g, i) for g, i, p in everywhere}
            g, i = self._places[id(p)]
        return self.param_groups[g], i

    def _check_gradients(self, places: list[tuple[dict[str, Any], int]]) -> None:
        """Refuse gradients the step cannot use before anything is changed by it."""
        with_gradient = [(group, i) for group, i in places if group["params"][i].grad is not None]
        gradients = [local(cast(Tensor, group["params"][i].grad)) for group, i in with_gradient]
        for g, (group, i) in zip(gradients, with_gradient, strict=True):
            if g.layout != torch.strided or g.is_complex():
                kind = "complex" if g.is_complex() else "sparse"
                raise TypeError(f"{self._name(group, i)} has a {kind} gradient; SGLD needs dense real ones")
        bad = first_anywhere(first_not_finite(gradients), [group["params"][i] for group, i in with_gradient])
        if bad >= 0:
            stepped = "it was not" if self.step_in_backward else "no parameter was"
            raise FloatingPointError(
                f"the gradient of {self._name(*with_gradient[bad])} holds an infinity or a NaN; {stepped} changed by this step"
            )

    def saturated(self) -> int:
        """How many weights sit at an end of their format's range, where updates are clipped."""
        count = 0
        for group in self.param_groups:
            for p in map(local, group["params"]):
                name = Settings.of(group).update().grid(p)
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
            if accumulator is not None and accumulator.shape != local(p).shape:
                raise ValueError(
                    f"the saved accumulator has shape {tuple(accumulator.shape)}, its parameter {tuple(local(p).shape)}"
                )
        super().load_state_dict(state_dict)
        for p, accumulator in held.items():
            if accumulator is not None:  # torch casts state to the parameter's dtype: an accumulator has its own
                dtype = operators.working_dtype(p.dtype)
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
    name = s.grid(local(p))
    if state.get("version", p._version) == p._version or name is None:
        return False
    format, weights = parse(name), _values(local(p)).to(operators.working_dtype(p.dtype))
    distance = (weights - state["accumulator"].clamp(format.low, format.high)).abs()
    return bool((distance > 2 * format.gap(weights)).any())


def _values(p: Tensor) -> Tensor:
    return decoded(p).detach()  # where no gradients are kept


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
