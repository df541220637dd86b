"""Layers of a model, chosen by type, by name pattern or by a predicate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, TypeAlias, cast

from torch import nn

__all__ = ["Choice", "select_modules"]

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Rule: TypeAlias = type[nn.Module] | str | Predicate
Choice: TypeAlias = Rule | Iterable[Rule]


def select_modules(model: nn.Module, layers: Choice, skip: Choice | None = None) -> dict[str, nn.Module]:
    """Return the modules that match a rule of ``layers`` and none of ``skip``, by name; a shared module once.

    A rule is a type (``nn.Conv2d``), a pattern of names (``"encoder.*"``) or a predicate of name and module. Raises ValueError if
    a pattern matches no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    wanted, unwanted = _check_rules("layers", layers), _check_rules("skip", () if skip is None else skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    for rule in [*wanted, *unwanted]:
        if isinstance(rule, str) and not any(fnmatchcase(name, rule) for name in modules):
            known = ", ".join(repr(name) for name in list(modules)[1:9]) or "none: the model has no submodules"
            raise ValueError(f"the pattern {rule!r} fits no layer; layers are named {known}, ...")
    chosen = {}
    for name, module in model.named_modules():
        names = [other for other, same in modules.items() if same is module]  # a match of one of them is enough
        if _matches_any(wanted, names, module) and not _matches_any(unwanted, names, module):
            chosen[name] = module
    return chosen


def _matches_any(rules: list[Rule], names: list[str], module: nn.Module) -> bool:
    return any(_matches(rule, name, module) for rule in rules for name in names)


def _check_rules(what: str, choice: Choice) -> list[Rule]:
    """Return the rules of a choice as a list; raise TypeError if one is none."""
    single = isinstance(choice, (str, type)) or not isinstance(choice, Iterable)
    rules: list[Any] = [choice] if single else list(cast(Iterable[Rule], choice))
    for rule in rules:
        is_type = isinstance(rule, type) and issubclass(rule, nn.Module)
        is_predicate = callable(rule) and not isinstance(rule, (type, nn.Module))  # a module can be called, too
        if not (isinstance(rule, str) or is_type or is_predicate):
            got = type(rule).__name__ if isinstance(rule, nn.Module) else repr(rule)
            raise TypeError(
                f"{what} must be types of modules, name patterns or predicates of name and module, got {got}"
            )
    return rules


def _matches(rule: Rule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, type):
        return isinstance(module, rule)
    return bool(rule(name, module))
