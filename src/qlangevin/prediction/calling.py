"""Calling a model for a batch: by the user's ``forward``, or with the batch as its arguments; and the numbers it returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn

from .batches import split_inputs

__all__ = ["Forward", "call_model", "check_forward", "find_output"]

Forward: TypeAlias = Callable[[nn.Module, Any], Any]

EXAMPLE = "forward=lambda model, batch: model(**batch).logits"


def check_forward(forward: Any) -> None:
    """Raise TypeError unless ``forward`` is a function of model and batch, or None."""
    if forward is None:
        return
    if not callable(forward) or isinstance(forward, nn.Module):
        raise TypeError(f"forward must be a function of model and batch, such as {EXAMPLE}, got {forward!r:.200}")
    try:
        inspect.signature(forward).bind(None, None)
    except TypeError:
        takes = inspect.signature(forward)
        raise TypeError(f"forward must take the model and a batch, such as {EXAMPLE}; this one takes {takes}") from None
    except ValueError:  # a function in C tells no signature
        return


def call_model(model: nn.Module, x: Any, forward: Forward | None = None) -> Any:
    """Return what the model returns for these inputs."""
    if forward is not None:
        return forward(model, x)
    args, kwargs = split_inputs(x)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        _explain_arguments(model, args, kwargs, error)
        raise
    except AttributeError as error:
        _explain_kinds(args, kwargs, error)
        raise


def _explain_kinds(args: tuple[Any, ...], kwargs: dict[str, Any], error: AttributeError) -> None:
    """Raise TypeError with the remedy if the batch holds anything else than tensors."""
    if odd := {type(x).__name__ for x in (*args, *kwargs.values()) if not isinstance(x, Tensor) and x is not None}:
        raise TypeError(
            f"the batch gave the model a {' and a '.join(sorted(odd))}, which failed ({error}): a batch is a tensor, a tuple "
            "of arguments or a dict of keyword arguments, with tensors in it; texts need a tokenizer (return_tensors='pt'), a "
            "list of examples a collator"
        ) from error


def _explain_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], error: TypeError) -> None:
    """Raise TypeError with the remedy if the model does not take these arguments."""
    takes = inspect.signature(model.forward)
    try:
        takes.bind(*args, **kwargs)
    except TypeError:
        given = f"the keywords {', '.join(kwargs)}" if kwargs else f"{len(args)} arguments"
        first = f"batch[{next(iter(kwargs))!r}]" if kwargs else "batch[0]"
        raise TypeError(
            f"the batch gives {type(model).__name__} {given}, and its forward takes {takes} ({error}); say how to call it: "
            f"Posterior.open(..., forward=lambda model, batch: model({first}))"
        ) from error


def find_output(output: Any, forward: Forward | None = None) -> Tensor:
    """Return the tensor of an output, or its ``logits``, as models of Hugging Face return them; raise TypeError for others."""
    found = output
    if not isinstance(output, Tensor):
        found = getattr(output, "logits", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("logits")
    if isinstance(found, Tensor) and found.dtype.is_floating_point:
        return found
    who = "the model" if forward is None else "forward"
    kind = found.dtype if isinstance(found, Tensor) else type(output).__name__
    part = "[0]"
    if isinstance(output, Mapping) and not isinstance(found, Tensor):
        kind = f"{kind} with {', '.join(map(repr, output)) or 'nothing'}"
        tensors = (key for key, t in output.items() if isinstance(t, Tensor) and t.dtype.is_floating_point)
        part = f"[{next(tensors, 'logits')!r}]"
    raise TypeError(
        f"{who} must return a tensor of floating-point numbers, or an output that has one as its logits, got {kind}; say which "
        f"numbers with Posterior.open(..., forward=lambda model, batch: model(batch){part})"
    )
