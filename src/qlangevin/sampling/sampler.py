"""Samplers as torch optimizers: the methods that users call; `stepping` walks the parameters, `update` has the equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from .._dtensor import local
from .._validate import check_flag
from .._warnings import warn_once
from ..quantization.qtensor import decoded
from . import compiled
from .checks import check_parameter, first_not_a_number
from .diagnose import diagnose_sampler
from .diagnosis import TOLERANCE, Diagnosis
from .given import has_unused_center, spread_over_groups, take_from_group
from .grad_scale import divide_gradients, takes_scaled_gradients
from .group_names import check_names
from .in_backward import drop_passes, read_options, refuse_pass
from .interrupts import Uninterrupted
from .prior import resolve_prior
from .saved_state import check_states, from_saved, split_saved, to_saved
from .settings import SETTINGS, StepSettings
from .stepping import Plan, Stepper
from .watch import count_saturated

__all__ = ["Sampler"]


class Sampler(Stepper):
    """A sampler as users see it: `SGLD` and `SGHMC` add their settings.

    Loading a `state_dict` resumes the chain bit for bit.
    """

    checks_parameters = True

    def __init__(self, params: ParamsT, given: dict[str, Any]) -> None:
        """Validate the settings, which are those of all groups that have none of their own, and begin the chain."""
        if isinstance(params, nn.Module):
            raise TypeError(
                f"params must be the parameters of a model, got a {type(params).__name__}; give model.parameters(), or "
                "model.named_parameters(), whose names errors and warnings then have"
            )
        settings = {name: given.get(name, default) for name, default in SETTINGS.items()}
        StepSettings.from_group({**settings, "weight_decay": 0.0})  # num_data, before the prior is divided by it
        prior = resolve_prior(given, {})
        self.step_in_backward = check_flag("step_in_backward", given["step_in_backward"])
        defaults = settings | prior
        defaults |= read_options(given, self.step_in_backward).to_group()
        StepSettings.from_group(defaults)
        self._begin_watching()
        groups = spread_over_groups(params, given)
        for i, group in enumerate(groups if isinstance(groups, list) else ()):  # all, before the first is on its grid
            check_names(group, i)
            own = self._settings_of(group, defaults)
            take_from_group(group, own)
            if has_unused_center(group, own):
                message = (
                    "a centre is given, but nothing uses it: give localization=, or box=, which it is the centre of"
                )
                warn_once(self._watch.given, "center", message, stacklevel=3)
        super().__init__(groups, defaults)

    def _settings_of(self, group: dict[str, Any], defaults: dict[str, Any]) -> StepSettings:
        """Return the settings of a group that is not one of the sampler's yet."""
        return StepSettings.from_group({**defaults, **group, **resolve_prior(group, defaults)})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; those that require gradients are put on their grid at once."""
        check_names(param_group, len(self.param_groups))
        param_group, given = take_from_group(param_group, self._settings_of(param_group, self.defaults))
        param_group |= resolve_prior(param_group, self.defaults)
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
        self._given |= given
        for p in group["params"]:
            with torch.no_grad():
                self._state_of(p, settings)
            self._attach_hook(p)
            self._first_backward.attach(p)
        self._given = {p: mine for p, mine in self._given.items() if "center" in mine and "center" not in self.state[p]}
        self._list_parameters()

    def centers(self) -> list[Tensor]:
        """Return the centre of each parameter as it is kept; another sampler given them as ``center`` shares their memory."""
        return [self.state[p]["center"] for group in self.param_groups for p in group["params"]]

    def _check_weights(self, group: dict[str, Any]) -> None:
        """Refuse weights that are not finite."""
        with torch.no_grad():
            bad = first_not_a_number(group["params"])
        if bad >= 0:
            name = self._name(group["params"][bad])
            raise ValueError(f"{name} holds an infinity or a NaN; a chain must begin at finite weights")

    def __getstate__(self) -> dict[str, Any]:
        self.check()
        return {**super().__getstate__(), "step_in_backward": self.step_in_backward}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._begin_watching()
        for group in self.param_groups:
            for name, default in SETTINGS.items():  # a state that was saved by an earlier release lacks some
                group.setdefault(name, default)
            for p in group["params"]:
                self._attach_hook(p)
        self._list_parameters()

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

        A `torch.amp.GradScaler` calls it by ``scaler.step(sampler)``, and skips the step if a gradient is not finite.
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
        found = self._find_gradients([p for group in self.param_groups for p in group["params"]])
        gradients = divide_gradients(found, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        if gradients is None:
            return loss
        early = self._step_all(gradients)
        self._warn_of_passes("step() takes", early, stacklevel=6)  # torch wraps it twice
        if not gradients:
            self._warn_of_nothing(stacklevel=5)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True if a GradScaler, which asks for it, is to leave it to `step` to divide the gradients."""
        return takes_scaled_gradients(self.everyone, self.step_in_backward)

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
        plans = self._check_gradients([Plan(gradients, group, settings)])
        passes = state.get("passes", 0) + 1
        if passes == accumulate:
            self._look(plans[0])
        with Uninterrupted():
            p.grad = None
            if passes < accumulate:
                state.update(gradient=gradients[p], passes=passes)
            else:
                drop_passes(state)
                self._stepped.add(id(p))
                self._step_plans(plans)

    @torch.no_grad()
    def step_compiled(self, gradients: dict[Tensor, Tensor], thetas: dict[Tensor, Tensor]) -> None:
        """Take one step with tensors that stand for the parameters and their gradients; the operator of `compiled` calls it."""
        self._hear(stacklevel=5)
        if self.step_in_backward:
            raise RuntimeError(
                "a sampler with step_in_backward=True cannot step inside of torch.compile: call step() outside of it"
            )
        self._thetas = thetas
        try:
            self._step_all(gradients)
        finally:
            self._thetas = {}

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

    # ---- the rest of an optimizer

    def saturated(self) -> int:
        """Count the weights at an end of their format's range, where updates are clipped."""
        groups = [(group["params"], StepSettings.from_group(group)) for group in self.param_groups]
        each = [(local(p), settings) for params, settings in groups for p in params if p.requires_grad]
        with torch.no_grad():
            return sum(count_saturated(decoded(p), settings.weights_format(p)) for p, settings in each)

    def diagnose(
        self,
        model: nn.Module | None = None,
        widths: Mapping[str, Tensor | float] | None = None,
        tolerance: float = TOLERANCE,
    ) -> Diagnosis:
        """Tell which weights are limited by the noise and which by the grid, and what would repair it; printable as a table.

        It takes the gradients as they are, after ``backward`` and before ``zero_grad``; of a parameter that has none, as with
        ``step_in_backward``, some rows that were kept before steps 1, 101, 201, ... and the first one after a state was loaded,
        which holds no gradients. It changes nothing, and waits for devices.

        Args:
            model: names the parameters.
            widths: the posterior's standard deviation of each weight, by the names of the parameters, if it is known: tensors of
                the parameters' shapes, or a number for all weights of a parameter.
            tolerance: the inflation of the effective temperature that passes for none; it decides what is advised.
        """
        return diagnose_sampler(self, model, widths, tolerance)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the chain, without torch's versions of the weights: those count the writes of one process."""
        self.check()
        found = super().state_dict()
        return {**found, "state": {i: to_saved(each) for i, each in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume a saved chain bit for bit. The caller loads the weights into the model, before or after."""
        states = check_states(state_dict, [p for group in self.param_groups for p in group["params"]])
        super().load_state_dict(split_saved(state_dict))
        for p, saved in states.items():
            if saved and from_saved(self.state[p], saved, p):
                self.state[p]["version"] = p._version  # so that the saved ones count, whenever the model is loaded
