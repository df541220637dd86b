"""State of a sampler: that of each parameter, their names, and the counts of steps that the host does not wait for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .._dtensor import local
from ..quantization import random
from ..quantization.qtensor import QTensor, decoded_as
from . import compiled, in_backward
from .accumulator import begin_accumulator, may_be_overwritten, renew_accumulator, weights_differ
from .beside import begin_beside
from .checks import check_accumulator
from .deferred import can_be_deferred
from .device_counts import SamplerCounts
from .gradient_rows import RowSample
from .host_copy import is_capturing
from .kernel_step import step_kernels
from .loss_sums import FirstBackward
from .masks import unpack_mask
from .places import Places, name_parameter
from .settings import StepSettings
from .update import quantize_for
from .watch import Watch

__all__ = ["Keeper"]


class Keeper(Optimizer):
    """Base of samplers: what they keep between steps."""

    step_in_backward: bool = False

    def step_one(self, p: Tensor) -> None:
        """Take in the gradient of one parameter."""
        raise NotImplementedError

    def step_compiled(self, gradients: dict[Tensor, Tensor], thetas: dict[Tensor, Tensor]) -> None:
        """Take one step with tensors that stand for the parameters and their gradients."""
        raise NotImplementedError

    def _list_parameters(self) -> None:
        self.everyone = [p for group in self.param_groups for p in group["params"]]

    def _begin_watching(self) -> None:
        """Begin what is not saved: what has stepped in backward, what was seen of the chain, counters on devices.

        ``_thetas`` are tensors that stand for parameters in a compiled step.
        """
        self._stepped, self._watch, self._places = set[int](), Watch(), Places()
        self._counts, self._thetas = SamplerCounts(), dict[Tensor, Tensor]()
        self._given = dict[Tensor, dict[str, Any]]()  # centres and masks of parameters that have not begun
        self._kept, self._keeps_next = dict[Tensor, RowSample](), False
        self._first_backward = FirstBackward(self)
        self.everyone = list[Tensor]()
        if not hasattr(self, "handle"):  # compiled code refers to it, also after a state was loaded
            self.handle = compiled.register(self)

    def keep_gradients(self) -> None:
        """Keep some rows of the gradients of the steps from now on, in the place of the last kept, for a `diagnose` after them.

        That makes a diagnosis independent of where a chain was interrupted: what is kept now and then is not saved.
        """
        self._keeps_next = True

    @property
    def warned(self) -> set[str]:
        """Topics that the user was warned of."""
        return self._watch.given

    def _name(self, p: Tensor) -> str:
        return name_parameter(self.param_groups, *self._places.find(self.param_groups, p))

    def _attach_hook(self, p: Tensor) -> None:
        if self.step_in_backward and p.requires_grad:
            in_backward.attach_hook(p, self)

    # ---- the state of a parameter: its index among all, steps taken, accumulator if any, and torch's version of its weights

    def _state_of(self, p: Tensor, settings: StepSettings, late: bool = False) -> dict[str, Any]:
        """Return the state of a parameter, made at the first call; its accumulator stands for the weights as they are.

        ``late`` for a parameter that kernels count the steps of.
        """
        state = cast(dict[str, Any], self.state[p])
        if "index" not in state:
            self._begin_state(p, state, settings)
            return state
        if not settings.is_plain and (p.requires_grad or p.grad is not None):
            begin_beside(local(p), state, settings, self._given.get(p, {}), self._watch.given)
        if settings.accumulator:
            kept = state.get("accumulator")
            if kept is not None and not (kept.is_cpu and p.is_cpu):  # faster than to compare devices
                check_accumulator(p, kept, self._name(p))
            if kept is None or may_be_overwritten(p, state):
                self._renew_accumulator(p, state, settings, late)
        return state

    def _renew_accumulator(self, p: Tensor, state: dict[str, Any], settings: StepSettings, late: bool) -> None:
        """Begin the accumulator of a parameter anew, if there is none or it stands for other weights."""
        key, theta = settings.key_of(p, state["index"], state["step"]), self._theta(p)
        kernels = step_kernels(theta, None, settings) if late and "accumulator" in state else None
        if kernels is not None:
            renew_accumulator(kernels, theta, state["accumulator"], settings, key, self._counts.count_of(p))
        elif "accumulator" not in state or bool(weights_differ(theta, state["accumulator"], settings)):
            state["accumulator"] = begin_accumulator(theta, settings, key)

    def _theta(self, p: Tensor) -> Tensor:
        """Return the part of a parameter that this process has, or what stands for it."""
        return self._thetas.get(p, local(p)) if self._thetas else local(p)

    def _begin_state(self, p: Tensor, state: dict[str, Any], settings: StepSettings) -> None:
        """Fill the state of a new parameter: random bits of its own, an accumulator; and put it on its grid.

        A frozen parameter is left as it is: a base under adapters keeps its precision, and takes no memory for an accumulator.
        """
        state["index"] = 1 + max((other.get("index", -1) for other in self.state.values()), default=-1)
        state["step"] = 0
        state["version"] = p._version
        if not p.requires_grad and p.grad is None:
            return
        part, source, key = local(p), local(p), settings.key_of(p, state["index"], 0)
        if settings.accumulator:
            source = state["accumulator"] = begin_accumulator(part, settings, key)
        if settings.accumulator or not isinstance(part, QTensor):  # a packed one is on its grid
            format = settings.weights_format(part)
            part.copy_(quantize_for(random.WEIGHT, source, format, settings.noise_free_rounding, key))
        if not settings.is_plain:
            begin_beside(part, state, settings, self._given.get(p, {}), self._watch.given)
            if settings.accumulator and "mask" in state:  # what does not move is what it is rounded to, at every step
                moving = unpack_mask(state["mask"], part.shape)
                state["accumulator"].copy_(torch.where(moving, source, decoded_as(part, source.dtype)))
        state["version"] = p._version

    # ---- steps that the host does not wait for

    def check(self) -> None:
        """Wait for all steps taken so far, and raise the error of a gradient that was not finite, if there was one.

        On a GPU ``step()`` does not wait, so the error of a step is raised by a later one, or here: call it after the last step,
        and before weights are used for anything else. `state_dict`, checkpoints and stores do so. The parameters are as
        they were before the step that failed, and so are the numbers of steps. On CPUs it does nothing.
        """
        self._wait_for_counts()
        self._watch.judge_sent(wait=True, stacklevel=3)

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
        self._counts.tell(self.state)
        self._kept.clear()  # it may hold rows of that gradient; the next step keeps others
        stepped = "it was not changed by that step, nor any parameter"
        if not self.step_in_backward:
            stepped = "no parameter was changed by that step, nor"
        raise FloatingPointError(
            f"the gradient of {self._name(p)} held an infinity or a NaN; {stepped} by those after it, which do not count"
        )

    def _wait_for_counts(self) -> None:
        """Wait for all steps; raise the error of the first that failed, else have the host know their numbers."""
        self._raise_failed(self._counts.failed(wait=True))
        self._counts.tell(self.state)

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
