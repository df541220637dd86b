"""Find runs, read and validate their saved results.

A run is a folder that holds ``config.json`` and, when it is finished, ``result.json``; a collection is a JSON file
``{"runs": [result, ...]}``. A file that is not a result is refused with its name and the field that is wrong; nothing is left
out in silence. Older results lack some fields, which are filled in.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..storage.files import parse_json, read
from .config import CHANGE_NO_NUMBER
from .convergence import chain_lengths, describe_non_convergence

__all__ = [
    "RESULT", "Result", "chain_lengths", "check_result", "computing_seconds", "drop_repeated", "find_runs", "load_results",
    "read_result",
]  # fmt: skip

RESULT = "result.json"
LARGE = 1e300  # beyond it sums may overflow
LIMIT = 1_000_000_000  # bytes of a collection
MOST = 5  # files named in one message
LATER = {"chains": 1, "wire": None}  # settings that older results lack, and their values then

Result: TypeAlias = dict[str, Any]
Test: TypeAlias = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGE


def _whole(value: Any) -> bool:
    return isinstance(value, int) and _number(value) and value >= 0


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _list(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _or_null(test: Test) -> Test:
    return lambda value: value is None or test(value)


# (check, words that follow "must be")
TEXT = (_text, "a text that is not empty")
AMOUNT = (lambda value: _number(value) and value >= 0, "a finite number that is not negative")
WHOLE = (_whole, "an integer that is not negative")
COUNT = (lambda value: _whole(value) and value > 0, "an integer above 0")
SHARE = (_share, "a fraction, between 0 and 1")
MAPPING = (lambda value: isinstance(value, dict), "an object")

FIELDS: dict[str, tuple[Test, str]] = {
    **dict.fromkeys(("experiment", "version", "command", "finished", "settings.method", "settings.format"), TEXT),
    **dict.fromkeys(
        ("data.name", "model.name", "environment.machine", "environment.kernels", "environment.torch"), TEXT
    ),
    **dict.fromkeys(("data.train", "data.test", "model.weights", "environment.cores", "environment.threads"), COUNT),
    **dict.fromkeys(("steps", "samples"), COUNT),
    "settings.seed": WHOLE,
    **dict.fromkeys(("scores.error", "scores.ece"), SHARE),
    **dict.fromkeys(("scores.nll", "scores.brier", "seconds.train", "seconds.evaluate"), AMOUNT),
    **dict.fromkeys(("memory.training", "memory.sample"), AMOUNT),
    "reliability.edges": (_list(_share), "a list of fractions"),
    "reliability.counts": (_list(_whole), "a list of integers that are not negative"),
    **dict.fromkeys(
        ("reliability.confidence", "reliability.accuracy"), (_list(_or_null(_share)), "a list of fractions")
    ),
    "trace.steps": (_list(_whole), "a list of integers that are not negative"),
    "trace.log_likelihood": (_list(_number), "a list of finite numbers"),
}

# These may be null or absent.
OPTIONAL: dict[str, tuple[Test, str]] = {
    "data.note": (lambda value: isinstance(value, str), "a text"),
    "scaled": (_list(lambda value: isinstance(value, str)), "a list of texts"),
    "r_hat": AMOUNT,
    "ess": AMOUNT,
    "ranks": COUNT,
    "scores.top5": SHARE,
    "single": MAPPING,
    "diagnosis": MAPPING,
    "diagnosis.total": MAPPING,
    **dict.fromkeys(("diagnosis.total.above", "diagnosis.total.between", "diagnosis.total.below"), SHARE),
    **dict.fromkeys(("diagnosis.total.saturated", "diagnosis.total.zero_gradients"), SHARE),
    **dict.fromkeys(
        [f"diagnosis.total.{name}" for name in ("inflation", "resolution", "drift", "noise", "gap_over_width")], AMOUNT
    ),
    "diagnosis.summary": TEXT,
    "diagnosis.advice": (_list(lambda value: isinstance(value, str)), "a list of texts"),
    **dict.fromkeys(("single.error", "single.ece", "single.top5"), SHARE),
    **dict.fromkeys(("single.nll", "single.brier"), AMOUNT),
    "trace.error": (_list(_share), "a list of fractions"),
    "trace.chains": (_list(_whole), "a list of integers that are not negative"),
}


def load_results(paths: Iterable[Path | str]) -> list[Result]:
    """Return all results in folders of runs, in folders of such folders, in result files and in collections, each run once."""
    found: list[Result] = []
    wrong: list[str] = []
    for path in paths:
        for file in _files(Path(path)):
            try:
                found += _read(file)
            except ValueError as error:  # all such files are named at once, and none is left out of a report in silence
                wrong.append(str(error))
    if wrong:
        more = f"; and {len(wrong) - MOST} more files" if len(wrong) > MOST else ""
        raise ValueError(f"{'; '.join(wrong[:MOST])}{more}")
    if not found:
        raise ValueError("there is nothing to report; give folders of finished runs, or collections of results")
    return drop_repeated(found)


def drop_repeated(results: Iterable[Result]) -> list[Result]:
    """Drop results with the same experiment and settings as another; the one finished last is kept."""
    newest: dict[str, Result] = {}
    for result in results:
        settings = LATER | result["settings"]
        settings = {name: value for name, value in settings.items() if name not in CHANGE_NO_NUMBER}
        name = repr((result["experiment"], _sorted(settings)))
        if name not in newest or result["finished"] > newest[name]["finished"]:
            newest[name] = result
    return list(newest.values())


def _sorted(value: Any) -> Any:
    """Return a value that is the same for mappings in any order."""
    return sorted((name, _sorted(inner)) for name, inner in value.items()) if isinstance(value, dict) else repr(value)


def _files(path: Path) -> Iterator[Path]:
    """Yield a file itself, or the result files in and below a folder."""
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"there is no {path}; give folders of finished runs, or collections of results")
        yield path
        return
    folders = find_runs(path, RESULT)
    if not folders:
        raise ValueError(f"there is no {RESULT} in or below {path}; a run writes it when it is finished")
    yield from (folder / RESULT for folder in folders)


def find_runs(path: Path, name: str) -> list[Path]:
    """Return the folders in and below a folder that hold a file of this name, sorted."""
    return sorted(Path(folder) for folder, _, names in os.walk(path) if name in names)


def read_result(folder: Path) -> Result:
    """Return the result of the finished run in a folder."""
    file = folder / RESULT
    return check_result(parse_json(read(file, f"the result {file}"), f"the result {file}"), str(file))


def _read(file: Path) -> Iterator[Result]:
    """Yield the result, or the results of the collection, in a file."""
    content = parse_json(read(file, str(file), LIMIT), str(file))
    if isinstance(content, dict) and "runs" in content:
        if not isinstance(content["runs"], list):
            raise ValueError(f'{file} is not a collection of results: "runs" must be a list')
        for i, result in enumerate(content["runs"]):
            yield check_result(result, f"run {i} of {file}")
    else:
        yield check_result(content, str(file))


def check_result(result: Any, where: str) -> Result:
    """Return a copy of a result that has all fields; raise ValueError, with the field that is wrong, if it is not a result."""
    if not isinstance(result, dict):
        raise ValueError(f"{where} is not the result of a run: it is {_kind(result)}, not an object with its scores")
    if result.get("experiment") == "gaussian":
        raise ValueError(f"{where} is of the experiment gaussian, which draws its own picture; leave it out")
    for name, (test, words) in FIELDS.items():
        there, value = _lookup(result, name)
        if not there:
            raise ValueError(f"{where} is not the result of a run: it has no {name}")
        if not test(value):
            raise ValueError(f"{where} is not the result of a run: {name} must be {words}, got {reprlib.repr(value)}")
    for name, (test, words) in OPTIONAL.items():
        _, value = _lookup(result, name)
        if value is not None and not test(value):
            raise ValueError(f"{where} is not the result of a run: {name} must be {words}, got {reprlib.repr(value)}")
    if odd := _find_infinite(result) or _find_inconsistency(result):
        raise ValueError(f"{where} is not the result of a run: {odd}")
    return _complete(result)


def _complete(result: Result) -> Result:
    """Return a result with the fields that older ones lack."""
    later = {"scaled": [], "ranks": 1}
    full = {
        **dict.fromkeys(("single", "r_hat", "ess", "diagnosis")),
        **result,
        **{n: result.get(n) or v for n, v in later.items()},
    }
    full["data"] = {"note": None, **result["data"]}
    full["not_converged"] = describe_non_convergence(full)
    return full


def _find_infinite(value: Any, where: str = "") -> str | None:
    """Describe the first number, at any depth, that JSON does not have; None if there is none."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, float) and not math.isfinite(value):
        return f"{where} must be finite, got {value}"
    found = (_find_infinite(each, f"{where}.{name}" if where else str(name)) for name, each in inner)
    return next(filter(None, found), None)


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a single value")


def _lookup(result: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Return whether a result has ``a.b``, and its value."""
    value: Any = result
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _find_inconsistency(result: Result) -> str | None:
    """Describe the first inconsistency between the parts of a result; None if there is none."""
    bins, trace = result["reliability"], result["trace"]
    lengths = {name: len(bins[name]) for name in ("counts", "confidence", "accuracy")}
    if set(lengths.values()) != {len(bins["edges"]) - 1}:
        return f"reliability has {len(bins['edges'])} edges, and of the bins between them {lengths}"
    for count, confidence, accuracy in zip(bins["counts"], bins["confidence"], bins["accuracy"], strict=True):
        if count and (confidence is None or accuracy is None):
            return f"reliability has a bin of {count} predictions without confidence or accuracy"
    if len(trace["steps"]) != len(trace["log_likelihood"]):
        return f"trace has {len(trace['steps'])} steps and {len(trace['log_likelihood'])} log-likelihoods"
    if sum(chains := chain_lengths(result)) != len(trace["steps"]):
        return f"trace has {len(trace['steps'])} steps, but chains of {chains}"
    return None


def computing_seconds(result: Result) -> float:
    """Return the seconds of computing on all ranks; every chain counts as much as the longest."""
    seconds = result["seconds"]
    return float(len(chain_lengths(result)) * (result.get("ranks") or 1) * seconds["train"] + seconds["evaluate"])
