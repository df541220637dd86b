"""Methods replaced on one module instance, and put back by `unlower`."""

from __future__ import annotations

from typing import Any, ClassVar, TypeVar

from torch import nn

__all__ = ["Patch", "find_patch", "remove_patch", "remove_patches"]


class Patch:
    """A callable in the place of a method of one module, whose signature and name it has.

    An object, because it is copied and pickled with its module.
    """

    method: ClassVar[str]

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.replaced: Any = None  # the method that the instance had; None: that of its class

    @property
    def __wrapped__(self) -> Any:
        """The method that stood here before, for `inspect.signature`."""
        if self.replaced is None:
            return getattr(type(self.module), self.method).__get__(self.module)
        return self.replaced

    def install(self) -> None:
        """Replace the method; `remove_patches` undoes it."""
        self.replaced = self.module.__dict__.get(self.method)
        for name in ("__name__", "__qualname__", "__doc__", "__module__"):
            if (value := getattr(self.__wrapped__, name, None)) is not None:
                self.__dict__[name] = value
        self.module.__dict__[self.method] = self

    def call_replaced(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method that stood here before."""
        if self.replaced is None:
            return getattr(type(self.module), self.method)(self.module, *args, **kwargs)
        return self.replaced(*args, **kwargs)


P = TypeVar("P", bound=Patch)


def find_patch(module: nn.Module, kind: type[P]) -> P | None:
    """Return the patch of one kind on a module; None if there is none."""
    patch = module.__dict__.get(kind.method)
    while isinstance(patch, Patch):
        if isinstance(patch, kind):
            return patch
        patch = patch.replaced
    return None


def remove_patches(module: nn.Module) -> None:
    """Restore the methods that patches have replaced. A method that the user has put over a patch stays."""
    for method in ("extra_repr", "forward"):
        while isinstance(patch := module.__dict__.get(method), Patch):
            if patch.replaced is None:
                del module.__dict__[method]
            else:
                module.__dict__[method] = patch.replaced


def remove_patch(module: nn.Module, kind: type[Patch]) -> None:
    """Take patches of one kind from between the others of a module's forward."""
    above, patch = None, module.__dict__.get(kind.method)
    while isinstance(patch, Patch):
        if isinstance(patch, kind):
            if above is not None:
                above.replaced = patch.replaced
            elif patch.replaced is None:
                del module.__dict__[kind.method]
            else:
                module.__dict__[kind.method] = patch.replaced
        else:
            above = patch
        patch = patch.replaced
