"""Which layers: chosen by type, by name pattern or by a predicate."""

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
    """The modules that a rule of ``layers`` fits and no rule of ``skip``, by name; a shared module once.

    A rule is a type (``nn.Conv2d``), a pattern of names (``"encoder.*"``) or a predicate of name and module. A pattern that
    fits no module at all is refused: it is a slip of the pen.
    """
    wanted, unwanted = _rules("layers", layers), _rules("skip", () if skip is None else skip)
    modules = dict(model.named_modules(remove_duplicate=False))
    for rule in [*wanted, *unwanted]:
        if isinstance(rule, str) and not any(fnmatchcase(name, rule) for name in modules):
            known = ", ".join(repr(name) for name in list(modules)[1:9]) or "none: the model has no submodules"
            raise ValueError(f"the pattern {rule!r} fits no layer; layers are named {known}, ...")
    chosen = {}
    for name, module in model.named_modules():
        names = [other for other, same in modules.items() if same is module]  # one of them is enough

        def fits(rules: list[Rule], names: list[str] = names, module: nn.Module = module) -> bool:
            return any(_fits(rule, name, module) for rule in rules for name in names)

        if fits(wanted) and not fits(unwanted):
            chosen[name] = module
    return chosen


def _rules(what: str, choice: Choice) -> list[Rule]:
    single = isinstance(choice, (str, type)) or not isinstance(choice, Iterable)
    rules: list[Any] = [choice] if single else list(cast(Iterable[Rule], choice))
    for rule in rules:
        is_type = isinstance(rule, type) and issubclass(rule, nn.Module)
        is_predicate = callable(rule) and not isinstance(rule, (type, nn.Module))  # which can be called, but not asked
        if not (isinstance(rule, str) or is_type or is_predicate):
            got = type(rule).__name__ if isinstance(rule, nn.Module) else repr(rule)
            raise TypeError(
                f"{what} must be types of modules, name patterns or predicates of name and module, got {got}"
            )
    return rules


def _fits(rule: Rule, name: str, module: nn.Module) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, type):
        return isinstance(module, rule)
    return bool(rule(name, module))
