"""SGLD as a torch optimizer: a thin class that walks the parameters; the step itself is in `step`.

Every method of the paper is a choice of settings; ``temperature=0`` is SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from .._dtensor import first_anywhere, local, shard_of
from .._validate import check_flag
from ..quantization import operators, random
from ..quantization.formats import Format
from ..quantization.operators import Algorithm, Rounding
from ..quantization.qtensor import QTensor, decoded
from ..quantization.random import Key
from . import in_backward
from .accumulator import begin_accumulator, was_overwritten
from .checks import check_parameter, first_not_a_number
from .gradients import clip_to_norm, first_not_finite
from .in_backward import drop_passes, read_options, refuse_pass, total_gradient, warn_of_passes
from .interrupts import Uninterrupted
from .places import Places, name_parameter
from .step import FIELDS, FORMATS, StepSettings, TensorStep, parameter_key, quantize_for, step_tensors
from .watch import Watch, count_saturated, is_look

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
            more than one of them. ``step()`` or ``zero_grad()`` ends the step; one more gradient of a parameter before that
            raises RuntimeError. ``backward`` leaves no gradients, so `torch.nn.utils.clip_grad_norm_` has no effect; and if
            one is not finite, the parameters whose gradients came before it have stepped.
        accumulate: with ``step_in_backward``, step at the k-th backward pass, on the sum of k gradients (scale the loss by
            1/k for their mean), which takes the memory of one gradient for each parameter. ``step()`` after fewer passes
            steps on those.
        max_grad_norm: with ``step_in_backward``, scale each parameter's own gradient down to this norm; not, as
            `torch.nn.utils.clip_grad_norm_` does, the gradients of all parameters together.
    """

    step_in_backward: bool = False

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
        accumulate: int = 1,
        max_grad_norm: float | None = None,
    ) -> None:
        given = locals()
        self.step_in_backward = check_flag("step_in_backward", step_in_backward)
        defaults = {name: given[name] for name in FIELDS} | read_options(given, self.step_in_backward).to_group()
        StepSettings.from_group(defaults)
        self._begin_watching()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; they are put on their grid at once."""
        settings = StepSettings.from_group({**self.defaults, **param_group})
        read_options({**self.defaults, **param_group}, self.step_in_backward)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group, settings)
            self._check_weights(group)
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
        self._begin_watching()
        for group in self.param_groups:
            group.setdefault("stream", 0)  # absent from states that were saved before there were streams
            for p in group["params"]:
                self._attach_hook(p)

    def _begin_watching(self) -> None:
        """Begin what is not saved: the ids of parameters that have stepped in backward, and what has been seen of the chain."""
        self._stepped, self._watch, self._places = set[int](), Watch(), Places()

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
        """Take one step. A gradient that is not finite raises FloatingPointError, and nothing has changed.

        With ``step_in_backward`` that holds for the gradients that are left: what has stepped in backward has stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        plans = [(group, StepSettings.from_group(group)) for group in self.param_groups]
        for group, settings in plans:
            self._check_group(group, settings)
        gradients = self._check_gradients([p for group, _ in plans for p in group["params"]])
        each = [({p: gradients[p] for p in group["params"] if p in gradients}, group, s) for group, s in plans]
        for some, _, settings in each:
            self._look(some, settings)
        self._watch.conclude()
        with Uninterrupted():
            early = self._end_passes(gradients) if self.step_in_backward else {}
            for some, group, settings in each:
                self._step_parameters(some, group, settings)
        self._warn_of_passes("step() takes", early, stacklevel=6)  # torch wraps it twice
        return loss

    @torch.no_grad()
    def step_one(self, p: Tensor) -> None:
        """Take in the gradient of one parameter, and free it; step the parameter if that was the last backward pass."""
        group, _ = self._places.find(self.param_groups, p)
        settings, accumulate = StepSettings.from_group(group), read_options(group, self.step_in_backward).accumulate
        check_parameter(p, settings)
        if id(p) in self._stepped:
            p.grad = None
            refuse_pass(self._name(p), accumulate)
        gradients, state = self._check_gradients([p]), self._state_of(p, settings)
        passes = state.get("passes", 0) + 1
        if passes == accumulate:
            self._look(gradients, settings)
        with Uninterrupted():
            p.grad = None
            if passes < accumulate:
                state.update(gradient=gradients[p], passes=passes)
            else:
                drop_passes(state)
                self._stepped.add(id(p))
                self._step_parameters(gradients, group, settings)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. With ``step_in_backward`` it ends the step, and drops gradients that wait for more passes."""
        super().zero_grad(set_to_none)
        if self.step_in_backward:
            waiting = {p: state["passes"] for p, state in self.state.items() if "passes" in state}
            self._end_passes(())
            self._watch.conclude()
            self._warn_of_passes("zero_grad() drops", waiting, stacklevel=4)

    def _step_parameters(self, gradients: dict[Tensor, Tensor], group: dict[str, Any], settings: StepSettings) -> None:
        """Step parameters of one group."""
        most, states, tensors = group.get("max_grad_norm"), [self._state_of(p, settings) for p in gradients], []
        # Counted before any weight moves: a step that fails leaves random bits unused, and uses none twice.
        for state in states:
            state["step"] += 1
        for (p, gradient), state in zip(gradients.items(), states, strict=True):
            key = _key_of(p, settings, state["index"], state["step"])
            accumulator = state["accumulator"] if settings.accumulator else None
            clipped = gradient if most is None else clip_to_norm(gradient, p, most)
            tensors.append(TensorStep(local(p), clipped, key, accumulator))
        step_tensors(tensors, settings)
        for p, state in zip(gradients, states, strict=True):
            state["version"] = p._version

    def _end_passes(self, stepped: Iterable[Tensor]) -> dict[Tensor, int]:
        """End a step in backward, of which `step` takes these parameters; return their passes, if none has had all of them."""
        early = {} if self._stepped else {p: self.state[p]["passes"] for p in stepped if "passes" in self.state[p]}
        for p in stepped:  # their gradients wait for more passes, or hooks were lost
            self._attach_hook(p)
            p.grad = None
        for state in self.state.values():
            drop_passes(state)
        self._stepped.clear()
        return early

    def _warn_of_passes(self, what: str, passes: dict[Tensor, int], stacklevel: int) -> None:
        for p in [*passes][:1]:
            group, _ = self._places.find(self.param_groups, p)
            accumulate = read_options(group, self.step_in_backward).accumulate
            warn_of_passes(self._watch.given, what, passes[p], accumulate, self._name(p), stacklevel)

    def _look(self, gradients: dict[Tensor, Tensor], settings: StepSettings) -> None:
        """Look at parameters that are about to step, if it is time."""
        for p, gradient in gradients.items():
            if is_look(step := self.state[p].get("step", 0) + 1):
                self._watch.look(p, gradient, settings, step, self._name(p))

    def _attach_hook(self, p: Tensor) -> None:
        if self.step_in_backward and p.requires_grad:
            in_backward.attach_hook(p, self)

    # ---- checks before anything is changed

    def _check_group(self, group: dict[str, Any], settings: StepSettings) -> None:
        """Refuse parameters that cannot be stepped. Keep formats by name, so that a saved group is numbers and words."""
        for p in group["params"]:
            try:
                check_parameter(p, settings)
                if in_backward.has_hook_of_another(p, self):
                    raise ValueError("another sampler steps it in backward; one parameter has one sampler")
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._name(p)}: {error}") from None
        for name in FORMATS:
            group[name] = getattr(settings, name)

    def _check_weights(self, group: dict[str, Any]) -> None:
        """Refuse weights that are not finite."""
        with torch.no_grad():
            bad = first_not_a_number(group["params"])
        if bad >= 0:
            name = self._name(group["params"][bad])
            raise ValueError(f"{name} holds an infinity or a NaN; a chain must begin at finite weights")

    def _check_gradients(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradients of parameters that have one, summed over backward passes; refuse those that no step can use."""
        found = {p: g for p in params if (g := total_gradient(p, self.state[p])) is not None}
        for p, g in found.items():
            if g.layout != torch.strided or g.is_complex():
                kind = "complex" if g.is_complex() else "sparse"
                raise TypeError(f"{self._name(p)} has a {kind} gradient; SGLD needs dense real ones")
        bad = first_anywhere(first_not_finite([*found.values()]), [*found])
        if bad >= 0:
            stepped = "it was not" if self.step_in_backward else "no parameter was"
            name = self._name([*found][bad])
            raise FloatingPointError(
                f"the gradient of {name} holds an infinity or a NaN; {stepped} changed by this step"
            )
        return found

    def _name(self, p: Tensor) -> str:
        return name_parameter(self.param_groups, *self._places.find(self.param_groups, p))

    # ---- the rest of an optimizer

    def saturated(self) -> int:
        """Count the weights at an end of their format's range, where updates are clipped."""
        each = [(p, StepSettings.from_group(group)) for group in self.param_groups for p in map(local, group["params"])]
        with torch.no_grad():
            return sum(count_saturated(decoded(p), settings.weights_format(p)) for p, settings in each)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the chain, without torch's versions of the weights: those count the writes of one process."""
        found = super().state_dict()
        entries = {i: {name: v for name, v in each.items() if name != "version"} for i, each in found["state"].items()}
        return {**found, "state": entries}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a saved chain bit for bit. The caller loads the weights into the model, before or after."""
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        pairs = zip(saved, params, strict=False)  # torch refuses another number of parameters
        for state in state_dict["state"].values():
            if not isinstance(state, dict):
                raise ValueError(f"the saved state of a parameter must be a dict, got {type(state).__name__}")
        states = {p: state_dict["state"].get(i, {}) for i, p in pairs}
        for p, state in states.items():
            for name in ("accumulator", "gradient"):
                shape = tuple(state[name].shape) if name in state else tuple(local(p).shape)
                if shape != tuple(local(p).shape):
                    raise ValueError(f"the saved {name} has shape {shape}, its parameter {tuple(local(p).shape)}")
        accumulators = {p: state["accumulator"] for p, state in states.items() if "accumulator" in state}
        super().load_state_dict(state_dict)
        for p, accumulator in accumulators.items():  # torch has cast them to the parameter's dtype
            dtype = operators.working_dtype(p.dtype)
            self.state[p]["accumulator"] = accumulator.detach().to(p.device, dtype, copy=True).contiguous()
            self.state[p]["version"] = p._version  # so that the saved one counts, whenever the model is loaded


def _key_of(p: Tensor, settings: StepSettings, index: int, step: int) -> Key:
    """Return the random bits of a parameter, or of the shard of it that this process has."""
    return parameter_key(settings.seed, settings.stream, index, step, shard_of(p))
