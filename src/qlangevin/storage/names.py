"""Names of tensors that differ by what wraps a model: ``module.`` of data parallelism, ``base_model.model.`` of peft, and so on.

Names are matched if those of the store are those of the model with one prefix more, or less, all of them; anything else is
explained.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .manifest import TensorInfo
from .model_tensors import check_fits

__all__ = ["fit_names", "match_names"]

ADAPTER = "lora_"
# Names that wrappers of single layers put in the middle, and no model has of its own.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def fit_names(found: Mapping[str, TensorInfo], stored: Mapping[str, TensorInfo], what: str) -> dict[str, str]:
    """Return the name in the model of each stored tensor; raise ValueError if it is another model, with the remedy."""
    names = match_names(stored, found)
    if names:
        check_fits({name: found[names[name]] for name in stored}, stored, what)
        return names
    there, here = ({_strip(name): name for name in names} for names in (stored, found))
    prefix, longer = _find_prefix(there, here)
    equal = len({prefix + name for name in (here if longer else there)} & (there if longer else here).keys())
    if 2 * equal <= max(len(there), len(here)):
        prefix, longer = "", False  # too few are equal with it to mean anything
    if longer:
        renamed = {there.get(prefix + name, full): full for name, full in here.items()}
    else:
        renamed = {there.get(name.removeprefix(prefix), full): full for name, full in here.items()}
    try:
        check_fits({name: found[full] for name, full in renamed.items()}, stored, what)
    except ValueError as error:
        raise ValueError(f"{error}{_explain(there, here, prefix, longer)}") from None
    raise AssertionError("unreachable")


def match_names(stored: Iterable[str], found: Iterable[str]) -> dict[str, str]:
    """Return the name in the model of each stored name, or nothing if they do not differ by wrappers and one prefix."""
    there, here = ({_strip(name): name for name in names} for names in (stored, found))
    prefix, longer = _find_prefix(there, here)
    if not longer and {prefix + name for name in there} == here.keys():
        return {full: here[prefix + name] for name, full in there.items()}
    if longer and {prefix + name for name in here} == there.keys():
        return {full: here[name.removeprefix(prefix)] for name, full in there.items()}
    return {}


def _strip(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _find_prefix(there: Iterable[str], here: Iterable[str]) -> tuple[str, bool]:
    """Return the prefix that makes the most names equal, and True if the names there have it, False if those here do."""
    there, here = set(there), set(here)
    best, most = ("", False), len(there & here)
    for short, long, longer in ((there, here, False), (here, there, True)):
        ends = {
            name[: -len(end)]
            for end in sorted(short)[:1] + sorted(short)[-1:]
            for name in long
            if name.endswith("." + end)
        }
        for prefix in sorted(ends):
            count = len({prefix + name for name in short} & long)
            if count > most:
                best, most = (prefix, longer), count
    return best


def _explain(there: Iterable[str], here: Iterable[str], prefix: str, longer: bool) -> str:
    """Return what else can be said of names that do not match."""
    if any(ADAPTER in name for name in there) and not any(ADAPTER in name for name in here):
        return f". The store has adapters ({ADAPTER}...): give the model with them, as peft's get_peft_model returns it"
    if prefix:
        one, other = ("the store", "the model") if longer else ("the model", "the store")
        return (
            f". The other names of {one} are those of {other} after {prefix!r}: give the model in the wrapper it was sampled "
            "in, or the one inside of it, with the same parts"
        )
    return ""
