"""SGLD as a torch optimizer: a thin class that walks the parameters; the step itself is in `step`.

Every method of the paper is a choice of settings; ``temperature=0`` is SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .._dtensor import first_anywhere, local, shard_of
from ..quantization import operators, random
from ..quantization.formats import Format, parse
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor
from ..quantization.random import Key
from . import in_backward
from .accumulator import begin_accumulator, was_overwritten
from .checks import check_parameter, first_not_finite
from .step import FIELDS, FORMATS, StepSettings, TensorStep, parameter_key, quantize_for, step_tensors

__all__ = ["SGLD"]


class SGLD(Optimizer):
    """Low-precision stochastic gradient Langevin dynamics.

    A step takes the weights θ to

        θ' = Q(θ - lr (Q_G(∇loss) + λ θ), v)    with noise of variance v = 2 lr T / N,

    where Q is Q^vc, or rounds after the noise was added (see ``rounding``). With an accumulator a, that is what takes the
    step, and θ = Q_W(a).

    Args:
        params: parameters, named parameters or groups; a group may override any setting. From here on they are on the
            grid of ``weights``.
        lr: the learning rate for the mean loss.
        num_data: N, the number of training examples.
        temperature: T, scales the noise; 1 samples the posterior, 0 is SGD.
        weight_decay: λ, the precision of the Gaussian prior over N.
        weights: Q_W, the format of the parameters; None leaves them in their dtype's own precision, or as they are packed.
        gradients: Q_G, the format gradients are rounded to, stochastically; None for full precision.
        accumulator: None keeps only the parameters (SGLDLP-L); ``"fp32"`` (SGLDLP-F) or any other format keeps a second
            copy that takes the updates; weights loaded into the model later begin a new one.
        rounding: ``"corrected"`` (Q^vc), ``"stochastic"`` (naive) or ``"nearest"``.
        algorithm: of ``"corrected"``; see `qlangevin.corrected`.
        maximize: climb instead of descend.
        seed: of all random bits; two samplers with the same seed and stream draw the same.
        stream: distinguishes chains that share a seed.
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
        given = locals()
        defaults = {name: given[name] for name in FIELDS}
        StepSettings.from_group(defaults)
        self.step_in_backward = step_in_backward
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are put on their grid at once."""
        settings = StepSettings.from_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, settings)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        for p in group["params"]:
            with torch.no_grad():
                self._state_of(p, settings)
            self._attach_hook(p)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "step_in_backward": self.step_in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("stream", 0)  # absent from states that were saved before there were streams
            for p in group["params"]:
                self._attach_hook(p)

    # ---- the state of a parameter: its index among all, steps taken, accumulator if any, and torch's version of its weights

    def _state_of(self, p: Tensor, settings: StepSettings) -> dict[str, Any]:
        """Return the state of a parameter, made at the first call; its accumulator stands for the weights as they are."""
        state = cast(dict[str, Any], self.state[p])
        if "index" not in state:
            self._begin_state(p, state, settings)
        elif settings.accumulator and ("accumulator" not in state or was_overwritten(p, state, settings)):
            key = _key_of(p, settings, state["index"], state["step"])
            state["accumulator"] = begin_accumulator(p, settings, key)
        return state

    def _begin_state(self, p: Tensor, state: dict[str, Any], settings: StepSettings) -> None:
        """Fill the state of a new parameter: random bits of its own, an accumulator; and put it on its grid."""
        state["index"] = 1 + max((other.get("index", -1) for other in self.state.values()), default=-1)
        state["step"] = 0
        part, source, key = local(p), local(p), _key_of(p, settings, state["index"], 0)
        if settings.accumulator:
            source = state["accumulator"] = begin_accumulator(p, settings, key)
        if settings.accumulator or not isinstance(part, QTensor):  # a packed one is on its grid
            format = settings.weights_format(part)
            part.copy_(quantize_for(random.WEIGHT, source, format, settings.noise_free_rounding, key))
        state["version"] = p._version

    # ---- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step. A gradient that is not finite raises FloatingPointError, and nothing has changed."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plans = [(group, StepSettings.from_group(group)) for group in self.param_groups]
        for group, settings in plans:
            self._check_group(group, settings)
        self._check_gradients([(group, i) for group in self.param_groups for i in range(len(group["params"]))])
        for group, settings in plans:
            params = [p for p in group["params"] if p.grad is not None]
            self._step_parameters(params, settings)
            for p in params if self.step_in_backward else []:  # their hooks were lost
                self._attach_hook(p)
                p.grad = None
        return loss

    @torch.no_grad()
    def step_one(self, p: Tensor) -> None:
        """Step one parameter whose gradient is ready, and free the gradient."""
        group, i = self._find(p)
        settings = StepSettings.from_group(group)
        check_parameter(p, settings)
        self._check_gradients([(group, i)])
        self._step_parameters([p], settings)
        p.grad = None

    def _step_parameters(self, params: list[Tensor], settings: StepSettings) -> None:
        """Step parameters that share settings."""
        states, tensors = [self._state_of(p, settings) for p in params], []
        for p, state in zip(params, states, strict=True):
            key = _key_of(p, settings, state["index"], state["step"] + 1)
            accumulator = state["accumulator"] if settings.accumulator else None
            tensors.append(TensorStep(local(p), local(cast(Tensor, p.grad)), key, accumulator))
        step_tensors(tensors, settings)
        for p, state in zip(params, states, strict=True):
            state["step"] += 1
            state["version"] = p._version

    def _attach_hook(self, p: Tensor) -> None:
        if self.step_in_backward and p.requires_grad:
            in_backward.attach_hook(p, self)

    # ---- checks before anything is changed

    def _check_group(self, group: dict[str, Any], settings: StepSettings) -> None:
        """Refuse parameters that cannot be stepped. Keep formats by name, so that a saved group is numbers and words."""
        for i, p in enumerate(group["params"]):
            try:
                check_parameter(p, settings)
                if in_backward.has_hook_of_another(p, self):
                    raise ValueError("another sampler steps it in backward; one parameter has one sampler")
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._name(group, i)}: {error}") from None
        for name in FORMATS:
            group[name] = getattr(settings, name)

    def _check_gradients(self, places: list[tuple[dict[str, Any], int]]) -> None:
        """Refuse gradients that the step cannot use."""
        ready = [(group, i) for group, i in places if group["params"][i].grad is not None]
        gradients = [local(group["params"][i].grad) for group, i in ready]
        for g, (group, i) in zip(gradients, ready, strict=True):
            if g.layout != torch.strided or g.is_complex():
                kind = "complex" if g.is_complex() else "sparse"
                raise TypeError(f"{self._name(group, i)} has a {kind} gradient; SGLD needs dense real ones")
        bad = first_anywhere(first_not_finite(gradients), [group["params"][i] for group, i in ready])
        if bad >= 0:
            stepped = "it was not" if self.step_in_backward else "no parameter was"
            raise FloatingPointError(
                f"the gradient of {self._name(*ready[bad])} holds an infinity or a NaN; {stepped} changed by this step"
            )

    def _find(self, p: Tensor) -> tuple[dict[str, Any], int]:
        """Return the group of a parameter and its number there. The places found last are kept, and looked up anew if stale."""
        g, i = self._places.get(id(p), (0, 0))
        if not (g < len(self.param_groups) and i < len(self.param_groups[g]["params"])) or (
            self.param_groups[g]["params"][i] is not p
        ):
            everywhere = [(g, i, p) for g, group in enumerate(self.param_groups) for i, p in enumerate(group["params"])]
            self._places = {id(p): (g, i) for g, i, p in everywhere}
            g, i = self._places[id(p)]
        return self.param_groups[g], i

    def _name(self, group: dict[str, Any], i: int) -> str:
        """Return what messages call a parameter."""
        if names := group.get("param_names"):
            return f"parameter {names[i]!r}"
        where = next((f" of group {g}" for g, other in enumerate(self.param_groups) if g and other is group), "")
        return f"parameter {i}{where} (shape {tuple(group['params'][i].shape)})"

    # ---- the rest of an optimizer

    def saturated(self) -> int:
        """Count the weights at an end of their format's range, where updates are clipped."""
        count = 0
        for group in self.param_groups:
            settings = StepSettings.from_group(group)
            for p in map(local, group["params"]):
                name = settings.weights_format(p)
                if name is not None:
                    format = parse(name)
                    count += int(((p >= format.high) | (p <= format.low)).sum())
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the chain, without torch's versions of the weights: those count the writes of one process."""
        found = super().state_dict()
        entries = {i: {name: v for name, v in each.items() if name != "version"} for i, each in found["state"].items()}
        return {**found, "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a saved chain bit for bit. The caller loads the weights into the model, before or after."""
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        accumulators = {
            p: found
            for i, p in zip(saved, params, strict=False)  # torch refuses another number of parameters
            if (found := state_dict["state"].get(i, {}).get("accumulator")) is not None
        }
        for p, accumulator in accumulators.items():
            if accumulator.shape != local(p).shape:
                raise ValueError(
                    f"the saved accumulator has shape {tuple(accumulator.shape)}, its parameter {tuple(local(p).shape)}"
                )
        super().load_state_dict(state_dict)
        for p, accumulator in accumulators.items():  # torch has cast them to the parameter's dtype
            dtype = operators.working_dtype(p.dtype)
            self.state[p]["accumulator"] = accumulator.detach().to(p.device, dtype, copy=True).contiguous()
            self.state[p]["version"] = p._version  # so that the saved one counts, whenever the model is loaded


def _key_of(p: Tensor, settings: StepSettings, index: int, step: int) -> Key:
    """Return the random bits of a parameter, or of the shard of it that this process has."""
    return parameter_key(settings.seed, settings.stream, index, step, shard_of(p))
