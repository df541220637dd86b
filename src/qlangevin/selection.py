"""Which layers: chosen by type, by name pattern or by a predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import TypeAlias

from torch import nn

__all__ = ["Choice", "choose"]

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Rule: TypeAlias = type[nn.Module] | str | Predicate
Choice: TypeAlias = Rule | Iterable[Rule]


def choose(model: nn.Module, layers: Choice, skip: Choice | None = None) -> dict[str, nn.Module]:
    """The modules that a rule of ``layers`` fits and no rule of ``skip``, by name; a shared module once.

    A rule is a type (``nn.Conv2d``), a pattern of names (``"encoder.*"``) or a predicate of name and module. A pattern that
    fits no module at all is refused: it is a slip of the pen.
    """
    wanted, unwanted = _rules("layers", layers), _rules("skip", () if skip is None else skip)
    modules = dict(model.named_modules())
    for rule in [*wanted, *unwanted]:
        if isinstance(rule, str) and not any(fnmatchcase(name, rule) for name in modules):
            known = ", ".join(repr(name) for name in list(modules)[1:9]) or "none: the model has no submodules"
            raise ValueError(f"the pattern {rule!r} fits no layer; layers are named {known}, ...")
    return {
        name: module
        for name, module in modules.items()
        if any(_fits(rule, name, module) for rule in wanted) and not any(_fits(rule, name, module) for rule in unwanted)
    }


def _rules(what: str, choice: Choice) -> list[Rule]:
    rules: list[Rule] = [choice] if isinstance(choice, (str, type)) or callable(choice) else list(choice)
    for rule in rules:
        if not (isinstance(rule, str) or (isinstance(rule, type) and issubclass(rule, nn.Module)) or callable(rule)):
            raise TypeError(
                f"{what} must be types of modules, name patterns or predicates of name and module, got {rule!r}"
            )
        if isinstance(rule, type) and not issubclass(rule, nn.Module):
            raise TypeError(f"{what} must be types of modules, got {rule!r}")
    return rules


def _fits(rule: Rule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, type):
        return isinstance(module, rule)
    return bool(rule(name, module))
