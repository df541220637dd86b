"""The forward hook that lowers one module, of any kind; `modules` has the kinds that are treated otherwise."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import _global_forward_hooks as global_forward_hooks
from torch.utils._pytree import tree_map_only

from ..quantization import operators
from ..quantization.backend import Kernels
from ..quantization.random import Key
from . import graph_count, plain_tensors, replay
from .operator import lower_op
from .patches import Patch
from .plain_tensors import QuantizationSpec
from .shared_bits import SharedBits

__all__ = ["ExtraRepr", "Handler", "HandlerForward", "find_handler"]


class Handler:
    """Lowers one module: a forward hook that returns Q_A of its outputs, whose errors Q_E rounds.

    Random bits are a function of the seed, the stream, the layer's name and how often the layer has run in training.
    A subclass says what is special about a kind of module.
    """

    may_overwrite_output: ClassVar[bool] = False
    """The module's output is memory of its own, which its backward does not read: Q_A may be written into it."""
    keeps_grid: ClassVar[bool] = False
    """The module returns some of the numbers it is given, so that those on a grid stay on it."""
    replaces_forward: ClassVar[bool] = False
    """`forward` takes the place of the module's own, unless the user has already replaced that."""
    recomputes: ClassVar[bool] = False
    """Recompute in backward what the module's own operations would save, where possible; see `recomputation`."""
    quantizes_in_forward: ClassVar[bool] = False
    """`forward` returns quantized outputs, so that the hook has nothing left to do."""

    def __init__(self, activations: str | None, errors: str | None, rounding: str, chain: Key, name: str) -> None:
        self.activations, self.errors, self.rounding = activations, errors, rounding
        self.chain, self.name, self.seed = chain, name, chain.seed
        self.set_replica(0)
        self.count = torch.zeros((), dtype=torch.int64, device="cpu")  # on the host; graphs count on the device
        self.graph_count = graph_count.GraphCount()

    def set_replica(self, replica: int) -> None:
        """Draw the random bits of one of several copies of the model; copy 0 has those of a model without copies."""
        stream = self.chain.fold(_stream_index(self.name))
        self.stream = (stream.fold(replica) if replica else stream).stream
        self.bits = SharedBits.claim(self.seed, self.stream, self)

    @property
    def runs(self) -> int:
        """The number of runs in training. Waits for the device if a graph counts them there."""
        return self.graph_count.total(self.count)

    @runs.setter
    def runs(self, number: int) -> None:
        self.graph_count.load(number, self.count)

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("bits", "graph_count")}
        if self.graph_count.is_used:  # the graph is no copy's
            state["count"] = torch.full((), self.runs, dtype=torch.int64)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.graph_count = graph_count.GraphCount()
        self.bits = SharedBits.claim(self.seed, self.stream, self)

    def settings(self) -> str:
        """Return all settings but the replica as text."""
        chain = f", stream={self.chain.stream}" if self.chain.stream else ""
        return f"{self!r}, rounding={self.rounding}, seed={self.seed}{chain}"

    def __repr__(self) -> str:
        return f"activations={self.activations or 'fp32'}, errors={self.errors or 'fp32'}"

    def install(self, module: nn.Module) -> None:
        """Lower a module with this handler; `unlower` undoes it."""
        module.register_forward_hook(self)
        ExtraRepr(module).install()
        if self.replaces_forward and "forward" not in module.__dict__:
            HandlerForward(module).install()

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not (self.quantizes_in_forward and isinstance(_instance_forward(module), HandlerForward)):
            output = self.quantize_outputs(module, args, output)
        if self.bits.are_shared and module.training and self.rounding != "nearest":
            self.bits.watch(self, self.name, output)
        return output

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute what the module's own forward does."""
        return type(module).forward(module, *args, **kwargs)

    def quantize_outputs(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Quantize every tensor that a module returns."""
        if isinstance(output, Tensor):
            return self.quantize(module, output, self.keeps_grid and self._got_numbers_on_grid(module, args))
        return tree_map_only(Tensor, lambda t: self.quantize(module, t), output)

    def quantize(self, module: nn.Module, x: Tensor, already_on_grid: bool = False, is_own: bool = False) -> Tensor:
        """Return Q_A of one output; Q_E rounds its error. ``is_own``: the caller knows that it may be overwritten."""
        if not x.dtype.is_floating_point or (self.activations is None and self.errors is None):
            return x
        if (kernels := plain_tensors.kernels_to_write(x)) is not None:
            spec = self.next_spec(module, x, kernels)
            own_output = self.may_overwrite_output and self._sees_output_first(module)
            may_overwrite = (own_output or is_own) and not x._is_view()
            if spec.region and torch._C._len_torch_dispatch_stack():
                may_overwrite = False  # selective checkpointing keeps outputs of operations
            return plain_tensors.quantize_activation(
                x, spec, kernels, may_overwrite=may_overwrite, already_on_grid=already_on_grid, producer=self
            )
        seed, stream, count = operators.signed(self.seed), operators.signed(self.stream), self._next_count(module, x)
        rounding = self._rounding_of(module)
        return cast(Tensor, lower_op(x, self.activations, self.errors, rounding, seed, stream, count))

    def next_spec(self, module: nn.Module, x: Tensor, kernels: Kernels) -> QuantizationSpec:
        """Count one more run if the module is in training; return the settings of that run, which rounds x.

        A run that a checkpointed region repeats is not counted, and has the settings of the first one.
        """
        number: int | Tensor = 0
        regions = replay.enclosing_regions()
        if module.training and not regions:
            number = self._count_run(x, kernels.deferred)
        elif module.training:
            number = replay.number_of_run(regions, self, lambda: self._count_run(x, kernels.deferred))
        step = number if isinstance(number, Tensor) else None
        key = Key(self.seed, self.stream, 0 if isinstance(number, Tensor) else number)
        region = replay.innermost(regions)
        return QuantizationSpec(self.activations, self.errors, self._rounding_of(module), key, step, region)

    def _count_run(self, x: Tensor, deferred: bool) -> int | Tensor:
        """Count one more run; return its number, a tensor if graphs count on the device."""
        if deferred and (self.graph_count.is_used or graph_count.is_capturing(x)):
            return self.graph_count.next_number(self.count)
        if deferred:
            self.graph_count.prepare(x.device)
        return int(self.count.add_(1))

    def _next_count(self, module: nn.Module, x: Tensor) -> Tensor:
        """Count as `next_spec` does; return the count as a tensor, which later runs leave as it is."""
        if torch.compiler.is_compiling():
            return self.count.add_(1).clone() if module.training else torch.zeros_like(self.count)
        if isinstance(x, FakeTensor) and not isinstance(self.count, FakeTensor):
            return x.new_zeros((), dtype=torch.int64, device="cpu")  # a run without numbers is none
        if not module.training:
            return torch.zeros_like(self.count)
        if graph_count.is_capturing(x):
            raise RuntimeError(
                f"a lowered layer cannot be captured in a CUDA graph without kernels for its output, a {type(x).__name__} of "
                f"{x.dtype}: use plain tensors of torch.float32, torch.bfloat16 or torch.float16, and install triton"
            )
        number = replay.number_of_run(replay.enclosing_regions(), self, self._count_without_kernels)
        return replay.mark_counted(number if isinstance(number, Tensor) else torch.full_like(self.count, number))

    def _count_without_kernels(self) -> Tensor:
        if self.graph_count.is_used:
            return self.graph_count.next_number(self.count)
        return self.count.add_(1).clone()

    def _rounding_of(self, module: nn.Module) -> str:
        return self.rounding if module.training else "nearest"

    def _got_numbers_on_grid(self, module: nn.Module, args: Any) -> bool:
        """Return True if the first argument is on the grid of the activations, and so is the output that this hook gets.

        A block of the output must lie within one of the input, which is sure for examples and without blocks.
        """
        if not self._sees_output_first(module) or "/" in str(self.activations):
            return False
        return bool(args) and plain_tensors.is_on_grid(args[0], self.activations)

    def _sees_output_first(self, module: nn.Module) -> bool:
        """Return True if this hook gets the output as the module's type makes it: no other hook or forward was there."""
        forward = _instance_forward(module)
        ours = forward is None or isinstance(forward, HandlerForward)
        return ours and not global_forward_hooks and next(iter(module._forward_hooks.values())) is self


@cache
def _stream_index(name: str) -> int:
    """Return 56 bits that stand for a name; the first is 1, as it is not in the index of a parameter."""
    name = name.replace("_orig_mod.", "")  # compiled models have the bits of others
    return int.from_bytes(blake2b(name.encode(), digest_size=7).digest(), "big") | 1 << 55


def find_handler(module: nn.Module) -> Handler | None:
    """Return the handler of a module; None if it is not lowered."""
    for hook in module._forward_hooks.values():
        if isinstance(hook, Handler):
            return hook
    return None


def _instance_forward(module: nn.Module) -> Any:
    """Return the forward that an instance has instead of its class's, beneath those of a lowered model; None if it has none."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, Patch) and not isinstance(forward, HandlerForward):
        forward = forward.replaced
    return forward


class HandlerForward(Patch):
    """`Handler.forward` as the forward of its module."""

    method = "forward"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        handler = find_handler(self.module)
        if handler is None:  # unlowered, but the user had put a forward over this one, which still calls it
            return self.call_replaced(*args, **kwargs)
        return handler.forward(self.module, *args, **kwargs)


class ExtraRepr(Patch):
    """The module's own `extra_repr`, followed by the formats."""

    method = "extra_repr"

    def __call__(self) -> str:
        return ", ".join(filter(None, [self.call_replaced(), repr(find_handler(self.module))]))
