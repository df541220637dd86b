"""The steps of a sampler: the checks before a step, and the order of all that is in one.

A parameter is ``late`` if kernels that the host does not wait for step it: they count its steps, and notice a gradient that is
not finite themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from .._dtensor import first_anywhere
from .._warnings import warn_once
from ..quantization.backend import TensorStep
from . import in_backward
from .beside import begins_moments, complete_step, prepare_step, rescale_moments
from .checks import check_gradient, check_parameter
from .deferred import find_deferred, step_deferred
from .gradient_rows import is_kept, keep_rows
from .gradients import clip_to_norm, first_not_finite
from .host_copy import has_no_numbers, is_capturing
from .in_backward import drop_passes, read_options, total_gradient, warn_of_passes
from .interrupts import Uninterrupted
from .keeping import Keeper
from .settings import NAMED, StepSettings
from .step import step_tensors
from .watch import is_look

__all__ = ["Plan", "Stepper"]


class Plan(NamedTuple):
    """The part of one group in a step."""

    gradients: dict[Tensor, Tensor]
    group: dict[str, Any]
    settings: StepSettings
    late: bool = False


class Stepper(Keeper):
    """Base of samplers: all of a step but its settings and the methods that users call."""

    # ---- the step

    def _step_all(self, found: dict[Tensor, Tensor]) -> dict[Tensor, int]:
        """Step all parameters that have gradients; return the passes of those that step early, if they step in backward."""
        groups = [(group, StepSettings.from_group(group)) for group in self.param_groups]
        for group, settings in groups:
            self._check_group(group, settings)
        plans = [Plan({p: found[p] for p in group["params"] if p in found}, group, s) for group, s in groups]
        plans = self._check_gradients(plans)
        for plan in plans:
            self._look(plan)
        self._watch.conclude()
        with Uninterrupted():
            early = self._end_passes(found) if self.step_in_backward else {}
            self._step_plans(plans)
        return early

    def _step_plans(self, plans: list[Plan]) -> None:
        """Step parameters: late ones all together, without waiting, the others group by group."""
        late, blind = [p for plan in plans if plan.late for p in plan.gradients], is_capturing()
        if late and not any(map(has_no_numbers, late)):
            self._count_on_devices(late)
        later, late_steps, states = [], list[tuple[Plan, list[TensorStep]]](), list[dict[str, Any]]()
        for plan in plans:
            tensors = self._count_steps(plan, blind, states)
            if plan.late:
                later.append((dict(zip(plan.gradients, tensors, strict=True)), plan.settings))
                late_steps.append((plan, tensors))
            else:
                step_tensors(tensors, plan.settings)
                self._complete(plan, tensors)
        if late:
            step_deferred(later, self._counts)
            for plan, tensors in late_steps:
                self._complete(plan, tensors)
            if not blind:
                self._counts.ask()
        for p, state in zip((p for plan in plans for p in plan.gradients), states, strict=True):
            state["version"] = p._version

    def _count_steps(self, plan: Plan, blind: bool, all_states: list[dict[str, Any]]) -> list[TensorStep]:
        """Count one step of the parameters of a group, and return what it reads and writes; ``blind`` if it is captured.

        Their states join ``all_states``.
        Counted before any weight moves: a step that fails leaves random bits unused, and uses none twice.
        """
        settings, most = plan.settings, plan.group.get("max_grad_norm")
        states = [self._state_of(p, settings, plan.late) for p in plan.gradients]
        all_states += states
        for state in states:
            state["step"] += 0 if blind and plan.late else 1
        tensors = []
        for (p, gradient), state in zip(plan.gradients.items(), states, strict=True):
            key = settings.key_of(p, state["index"], state["step"])
            accumulator = state["accumulator"] if settings.accumulator else None
            clipped = gradient if most is None else clip_to_norm(gradient, p, most, wait=not plan.late)
            step = TensorStep(self._theta(p), clipped, key, accumulator)
            if not settings.is_plain:
                velocity_key = settings.velocity_key_of(p, state["index"], state["step"])
                step = prepare_step(step, state, settings, velocity_key, plan.late)
            tensors.append(step)
        return tensors

    def _complete(self, plan: Plan, tensors: list[TensorStep]) -> None:
        """Bring weights that have left their box back to it."""
        if plan.settings.box is not None:
            for p, t in zip(plan.gradients, tensors, strict=True):
                complete_step(t, self.state[p], plan.settings, self._clear_on(plan, p))

    def _clear_on(self, plan: Plan, p: Tensor) -> Tensor | None:
        """Return, on its device, whether steps of a late parameter are not turned into nothing; None if it is not late."""
        return self._counts.clear_on(p.device) if plan.late else None

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

    def _warn_of_nothing(self, stacklevel: int) -> None:
        """Warn of a first step that had no gradients; one in backward may be ended before it has begun."""
        if not self.step_in_backward and not any(state.get("step") for state in self.state.values()):
            warn_once(
                self._watch.given,
                "nothing to step",
                "step() changes nothing: none of the parameters has a gradient. Call loss.backward() before, for a loss that "
                "depends on them, and see that they have requires_grad=True",
                stacklevel,
            )

    def _look(self, plan: Plan) -> None:
        """Look at parameters that are about to step, if it is time."""
        if plan.late and is_capturing():
            return
        for p, gradient in plan.gradients.items():
            if is_look(step := self.state[p].get("step", 0) + 1) and not has_no_numbers(p):
                theta, name = self._theta(p), self._name(p)
                formats = plan.settings.velocity_format(theta), plan.settings.accumulator
                kept = zip(("velocities", "accumulators"), ("velocity", "accumulator"), formats, strict=True)
                beside = [(what, self.state[p][key], format) for what, key, format in kept if key in self.state[p]]
                self._watch.look(theta, gradient, plan.settings, step, name, wait=not plan.late, beside=beside)
                rescale_moments(self.state[p], gradient, plan.settings, self._clear_on(plan, p))
            if (self._keeps_next or is_kept(step) or p not in self._kept) and not has_no_numbers(p):
                most = plan.group.get("max_grad_norm")
                self._kept[p] = keep_rows(
                    gradient if most is None else clip_to_norm(gradient, p, most, wait=not plan.late)
                )

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
        for name in NAMED:
            group[name] = getattr(settings, name)

    def _find_gradients(self, params: list[Tensor]) -> dict[Tensor, Tensor]:
        """Return the gradients of parameters that have one, summed over backward passes; refuse those that no step can use."""
        return {p: g for p in params if (g := total_gradient(p, self.state[p])) is not None}

    def _check_gradients(self, plans: list[Plan]) -> list[Plan]:
        """Return plans in which a parameter is late if its kernels look at its gradient; refuse gradients that no step can use.

        No parameter steps if one cannot: if not all of them are late, the host looks at all gradients.
        """
        for p, g in ((p, g) for plan in plans for p, g in plan.gradients.items()):
            try:
                check_gradient(p, g)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{self._name(p)} {error}") from None
        plans = [part for plan in plans for part in self._split(plan)]
        others = [p for plan in plans if not plan.late for p in plan.gradients]
        new = [p for plan in plans if plan.late for p in plan.gradients if begins_moments(self.state[p], plan.settings)]
        if not others and not new:
            return plans
        if not others and is_capturing():
            raise RuntimeError(
                f"a CUDA graph cannot capture the first step of {self._name(new[0])}, which begins the moments of its "
                "preconditioner; take a step, with gradients of the same parameters, before the capture"
            )
        if new:
            self._wait_for_counts()
        if is_capturing():
            raise RuntimeError(f"{self._name(others[0])} has no kernels that a CUDA graph could capture a step of")
        params = [p for plan in plans for p in plan.gradients]
        bad = first_anywhere(first_not_finite([g for plan in plans for g in plan.gradients.values()]), params)
        if bad >= 0:
            stepped, name = "it was not" if self.step_in_backward else "no parameter was", self._name(params[bad])
            raise FloatingPointError(
                f"the gradient of {name} holds an infinity or a NaN; {stepped} changed by this step"
            )
        if self._counts.holds_any(others):
            self._settle()
        return plans

    def _split(self, plan: Plan) -> list[Plan]:
        """Return the parts of a plan: parameters that are late, and those that are not."""
        late = find_deferred(plan.gradients, self._theta, plan.settings)
        if not late:
            return [plan]
        others = {p: g for p, g in plan.gradients.items() if p not in late}
        parts = [plan._replace(gradients=late, late=True), plan._replace(gradients=others)]
        return [part for part in parts if part.gradients]
