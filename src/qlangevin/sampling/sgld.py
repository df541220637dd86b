"""SGLD as a torch optimizer: a thin class that walks the parameters; the step itself is in `step`.

Every method of the paper is a choice of settings; ``temperature=0`` is SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, cast, overload

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
from . import compiled, in_backward
from .accumulator import begin_accumulator, may_be_overwritten, renew_accumulator, was_overwritten
from .checks import check_gradient, check_parameter, first_not_a_number
from .deferred import can_be_deferred, step_deferred
from .device_counts import SamplerCounts
from .gradients import clip_to_norm, first_not_finite
from .host_copy import has_no_numbers, is_capturing
from .in_backward import drop_passes, read_options, refuse_pass, total_gradient, warn_of_passes
from .interrupts import Uninterrupted
from .kernel_step import step_kernels
from .places import Places, name_parameter
from .saved_state import check_states, without_private
from .step import FIELDS, FORMATS, StepSettings, TensorStep, parameter_key, quantize_for, step_tensors
from .watch import Watch, count_saturated, is_look

__all__ = ["SGLD"]


class Plan(NamedTuple):
    """The part of one group in a step."""

    gradients: dict[Tensor, Tensor]
    group: dict[str, Any]
    settings: StepSettings


NOT_CHANGED = "no parameter was changed by that step, nor"


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
    checks_parameters = True

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
        self._settle()
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
        self._list_parameters()

    def __getstate__(self) -> dict[str, Any]:
        self.check()
        return {**super().__getstate__(), "step_in_backward": self.step_in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_watching()
        for group in self.param_groups:
            group.setdefault("stream", 0)  # absent from states that were saved before there were streams
            for p in group["params"]:
                self._attach_hook(p)
        self._list_parameters()

    def _list_parameters(self) -> None:
        self.everyone = [p for group in self.param_groups for p in group["params"]]

    def _begin_watching(self) -> None:
        """Begin what is not saved: what has stepped in backward, what was seen of the chain, counters on devices.

        ``_thetas`` are tensors that stand for parameters in a compiled step.
        """
        self._stepped, self._watch, self._places = set[int](), Watch(), Places()
        self._counts, self._thetas = SamplerCounts(), dict[Tensor, Tensor]()
        self.handle, self.everyone = compiled.register(self), list[Tensor]()

    # ---- the state of a parameter: its index among all, steps taken, accumulator if any, and torch's version of its weights

    def _state_of(self, p: Tensor, settings: StepSettings, late: bool = False) -> dict[str, Any]:
        """Return the state of a parameter, made at the first call; its accumulator stands for the weights as they are.

        ``late`` for a parameter that kernels count the steps of.
        """
        state, theta = cast(dict[str, Any], self.state[p]), self._theta(p)
        if "index" not in state:
            self._begin_state(p, state, settings)
        elif settings.accumulator:
            key = _key_of(p, settings, state["index"], state["step"])
            if late and "accumulator" in state:
                kernels = step_kernels(theta, None, settings) if may_be_overwritten(p, state) else None
                if kernels is not None:
                    renew_accumulator(kernels, theta, state["accumulator"], settings, key, self._counts.count_of(p))
            elif "accumulator" not in state or was_overwritten(p, theta, state, settings):
                state["accumulator"] = begin_accumulator(theta, settings, key)
        return state

    def _theta(self, p: Tensor) -> Tensor:
        """Return the part of a parameter that this process has, or what stands for it."""
        return self._thetas.get(p, local(p)) if self._thetas else local(p)

    def _begin_state(self, p: Tensor, state: dict[str, Any], settings: StepSettings) -> None:
        """Fill the state of a new parameter: random bits of its own, an accumulator; and put it on its grid."""
        state["index"] = 1 + max((other.get("index", -1) for other in self.state.values()), default=-1)
        state["step"] = 0
        part, source, key = local(p), local(p), _key_of(p, settings, state["index"], 0)
        if settings.accumulator:
            source = state["accumulator"] = begin_accumulator(part, settings, key)
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

        On a GPU the step does not wait for the device. If a gradient is not finite, that step and those after it change nothing,
        and a later ``step()``, or `check`, raises the error; the chain goes on from where it was. A step captured in a CUDA
        graph has the settings, ``lr`` among them, of the capture, and draws new random bits in each replay.
        """
        compiling = torch.compiler.is_compiling()
        if not compiling:
            self._hear(stacklevel=5)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if compiling:
            compiled.trace_step(self)
            return loss
        early = self._step_all(self._find_gradients([p for group in self.param_groups for p in group["params"]]))
        self._warn_of_passes("step() takes", early, stacklevel=6)  # torch wraps it twice
        return loss

    @torch.no_grad()
    def step_one(self, p: Tensor) -> None:
        """Take in the gradient of one parameter, and free it; step the parameter if that was the last backward pass."""
        self._hear(stacklevel=5)
        group, _ = self._places.find(self.param_groups, p)
        settings, accumulate = StepSettings.from_group(group), read_options(group, self.step_in_backward).accumulate
        check_parameter(p, settings)
        if id(p) in self._stepped:
            p.grad = None
            refuse_pass(self._name(p), accumulate)
        gradients, state = self._find_gradients([p]), self.state[p]
        plan = Plan(gradients, group, settings)
        late = self._check_gradients([plan])
        passes = state.get("passes", 0) + 1
        if passes == accumulate:
            self._look(plan, late)
        with Uninterrupted():
            p.grad = None
            if passes < accumulate:
                state.update(gradient=gradients[p], passes=passes)
            else:
                drop_passes(state)
                self._stepped.add(id(p))
                self._step_plans([plan], late)

    @torch.no_grad()
    def step_compiled(self, gradients: dict[Tensor, Tensor], thetas: dict[Tensor, Tensor]) -> None:
        """Take one step with tensors that stand for the parameters and their gradients; the operator of `compiled` calls it."""
        self._hear(stacklevel=5)
        self._thetas = thetas
        try:
            self._step_all(gradients)
        finally:
            self._thetas = {}

    def check(self) -> None:
        """Wait for all steps taken so far, and raise the error of a gradient that was not finite, if there was one.

        On a GPU ``step()`` does not wait, so the error of a step is raised by a later one, or here: call it after the last step,
        and before weights are used for anything else. `state_dict`, checkpoints and stores do so. The parameters are as
        they were before the step that failed, and so are the numbers of steps. On CPUs it does nothing.
        """
        self._wait_for_counts()
        self._watch.judge_sent(wait=True, stacklevel=3)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. With ``step_in_backward`` it ends the step, and drops gradients that wait for more passes."""
        if torch.compiler.is_compiling():
            compiled.trace_zero_grad(self, set_to_none)
            return
        super().zero_grad(set_to_none)
        if self.step_in_backward:
            waiting = {p: state["passes"] for p, state in self.state.items() if "passes" in state}
            self._end_passes(())
            self._watch.conclude()
            self._warn_of_passes("zero_grad() drops", waiting, stacklevel=4)

    def _step_all(self, found: dict[Tensor, Tensor]) -> dict[Tensor, int]:
        """Step all parameters that have gradients; return the passes of those that step early, if they step in backward."""
        groups = [(group, StepSettings.from_group(group)) for group in self.param_groups]
        for group, settings in groups:
            self._check_group(group, settings)
        plans = [Plan({p: found[p] for p in group["params"] if p in found}, group, s) for group, s in groups]
        late = self._check_gradients(plans)
        for plan in plans:
            self._look(plan, late)
        self._watch.conclude()
        with Uninterrupted():
            early = self._end_passes(found) if self.step_in_backward else {}
            self._step_plans(plans, late)
        return early

    def _step_plans(self, plans: list[Plan], late: set[Tensor]) -> None:
        """Step parameters: ``late`` ones all together, without waiting, the others group by group."""
        later, blind = [], is_capturing()
        if late and not any(map(has_no_numbers, late)):
            self._count_on_devices(late)
        for plan in plans:
            tensors = self._count_steps(plan, late, blind)
            now = [t for p, t in tensors.items() if p not in late]
            step_tensors(now, plan.settings)
            later.append(({p: t for p, t in tensors.items() if p in late}, plan.settings))
        if late:
            step_deferred(later, self._counts)
            if not blind:
                self._counts.ask()
        for plan in plans:
            for p in plan.gradients:
                self.state[p]["version"] = p._version

    def _count_steps(self, plan: Plan, late: set[Tensor], blind: bool) -> dict[Tensor, TensorStep]:
        """Count one step of the parameters of a group, and return what it reads and writes.

        Counted before any weight moves: a step that fails leaves random bits unused, and uses none twice.
        """
        settings, most = plan.settings, plan.group.get("max_grad_norm")
        states = [self._state_of(p, settings, p in late) for p in plan.gradients]
        for p, state in zip(plan.gradients, states, strict=True):
            state["step"] += 0 if blind and p in late else 1
        tensors = {}
        for (p, gradient), state in zip(plan.gradients.items(), states, strict=True):
            key = _key_of(p, settings, state["index"], state["step"])
            accumulator = state["accumulator"] if settings.accumulator else None
            clipped = gradient if most is None else clip_to_norm(gradient, p, most, wait=p not in late)
            tensors[p] = TensorStep(self._theta(p), clipped, key, accumulator)
        return tensors

    # ---- steps that the host does not wait for: kernels count them, and notice gradients that are not finite

    def _hear(self, stacklevel: int) -> None:
        """Raise the error and give the warnings of earlier steps that the host knows of by now."""
        if not is_capturing():
            self._raise_failed(self._counts.failed(wait=False))
            self._watch.judge_sent(wait=False, stacklevel=stacklevel)

    def _raise_failed(self, p: Tensor | None) -> None:
        """Go back to before the step that failed for the gradient of a parameter, and raise; None is no failure."""
        if p is None:
            return
        self._counts.undo()
        self._read_counts()
        stepped = "it was not changed by that step, nor any parameter" if self.step_in_backward else NOT_CHANGED
        raise FloatingPointError(
            f"the gradient of {self._name(p)} held an infinity or a NaN; {stepped} by those after it, which do not count"
        )

    def _read_counts(self) -> None:
        for p, step in self._counts.read().items():
            self.state[p]["step"] = step

    def _wait_for_counts(self) -> None:
        """Wait for all steps; raise the error of the first that failed, else have the host know their numbers."""
        self._raise_failed(self._counts.failed(wait=True))
        self._read_counts()

    def _settle(self) -> None:
        """Wait for all steps, and count them on the host again."""
        self._wait_for_counts()
        self._counts.clear()

    def _count_on_devices(self, params: Iterable[Tensor]) -> None:
        """Have the steps of parameters counted on their devices, if they are not yet."""
        if self._counts.holds(params):
            return
        if is_capturing():
            raise RuntimeError(
                "a CUDA graph cannot capture the first step of a parameter, which puts its counter on the device; take a step, "
                "with gradients of the same parameters, before the capture"
            )
        self._wait_for_counts()
        everyone = {p: group for group in self.param_groups for p in group["params"]}
        steps = [self.state[p].get("step", 0) for p in everyone]
        able = [p for p, g in everyone.items() if can_be_deferred(p, self._theta(p), None, StepSettings.from_group(g))]
        self._counts.build([*everyone], steps, able)

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

    def _look(self, plan: Plan, late: set[Tensor]) -> None:
        """Look at parameters that are about to step, if it is time."""
        if is_capturing():
            return
        for p, gradient in plan.gradients.items():
            if is_look(step := self.state[p].get("step", 0) + 1) and not has_no_numbers(p):
                theta, wait = self._theta(p), p not in late
                self._watch.look(theta, gradient, plan.settings, step, self._name(p), wait=wait)

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

    def _find_gradients(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradients of parameters that have one, summed over backward passes; refuse those that no step can use."""
        return {p: g for p in params if (g := total_gradient(p, self.state[p])) is not None}

    def _check_gradients(self, plans: list[Plan]) -> set[Tensor]:
        """Return the parameters whose kernels look at the gradient themselves; refuse gradients that no step can use.

        No parameter steps if one cannot: if there are others too, the host looks at all of them.
        """
        found = {p: g for plan in plans for p, g in plan.gradients.items()}
        for p, g in found.items():
            try:
                check_gradient(p, g, self.state[p].get("accumulator"))
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._name(p)} {error}") from None
        late = {
            p
            for plan in plans
            for p, g in plan.gradients.items()
            if can_be_deferred(p, self._theta(p), g, plan.settings)
        }
        if len(late) == len(found):
            return late
        others = [p for p in found if p not in late]
        if is_capturing():
            raise RuntimeError(f"{self._name(others[0])} has no kernels that a CUDA graph could capture a step of")
        bad = first_anywhere(first_not_finite([*found.values()]), [*found])
        if bad >= 0:
            stepped = "it was not" if self.step_in_backward else "no parameter was"
            name = self._name([*found][bad])
            raise FloatingPointError(
                f"the gradient of {name} holds an infinity or a NaN; {stepped} changed by this step"
            )
        if self._counts.holds_any(others):
            self._settle()
        return late

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
        self.check()
        found = super().state_dict()
        return {**found, "state": {i: without_private(each) for i, each in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a saved chain bit for bit. The caller loads the weights into the model, before or after."""
        states = check_states(state_dict, [p for group in self.param_groups for p in group["params"]])
        accumulators = {p: state["accumulator"] for p, state in states.items() if "accumulator" in state}
        super().load_state_dict(state_dict)
        for p, accumulator in accumulators.items():  # torch has cast them to the parameter's dtype
            dtype = operators.working_dtype(p.dtype)
            self.state[p]["accumulator"] = accumulator.detach().to(p.device, dtype, copy=True).contiguous()
            self.state[p]["version"] = p._version  # so that the saved one counts, whenever the model is loaded


def _key_of(p: Tensor, settings: StepSettings, index: int, step: int) -> Key:
    """Return the random bits of a parameter, or of the shard of it that this process has."""
    return parameter_key(settings.seed, settings.stream, index, step, shard_of(p))
