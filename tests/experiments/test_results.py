"""Saved results: found wherever they are, each once, and refused in one sentence if they are not results."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qlangevin.cli.main import main
from qlangevin.experiments.presets import Digits
from qlangevin.experiments.report import sections, write_report
from qlangevin.experiments.report.looks import Image
from qlangevin.experiments.results import check_result, computing_seconds, drop_repeated, load_results
from tests.helpers.runs import refused as refuse
from tests.helpers.runs import run


def save(result: Any, *path: Any) -> Path:
    file = Path(*path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result))
    return file


def seeds(results: list[dict[str, Any]]) -> list[int]:
    return [result["settings"]["seed"] for result in results]


def test_runs_are_found_in_folders_files_and_collections(tmp_path: Path) -> None:
    save(run(seed=0), tmp_path, "a", "result.json")
    save(run(seed=1), tmp_path, "deep", "deeper", "b", "result.json")
    save(run(seed=2), tmp_path, "deep", "c", "result.json")
    file = save(run(seed=3), tmp_path, "d", "result.json")
    collection = save({"runs": [run(seed=4), run(seed=5)]}, tmp_path, "old.json")
    assert sorted(seeds(load_results([tmp_path / "a", str(tmp_path / "deep"), file, collection]))) == [0, 1, 2, 3, 4, 5]


def test_the_same_run_counts_once_and_the_last_one_finished_is_kept(tmp_path: Path) -> None:
    first = run(finished="2026-01-01T00:00:00Z")
    again = run(finished="2026-01-02T00:00:00Z", steps=7)
    moved = run(finished="2025-12-31T00:00:00Z") | {"settings": dict(reversed(first["settings"].items()))}
    save(first, tmp_path, "a", "result.json")
    save(moved, tmp_path, "c", "result.json")
    [kept] = load_results([tmp_path, tmp_path / "a", save({"runs": [again, first]}, tmp_path, "collection.json")])
    assert kept["steps"] == 7
    workers = run()
    workers["settings"]["workers"] = 2
    assert len(drop_repeated([run(), workers])) == 1  # which changes how long it takes, not what comes out
    others = [run(seed=1), run(method="sgdlp-l"), run(format="fixed8.6"), run("mnist-mlp")]
    assert len(drop_repeated([run(), *others])) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has 0 bytes"),
        ('{"experiment": "digits", "scores": {"err', "cannot be read as JSON"),
        ('{"experiment": NaN}', "NaN is not a number of JSON"),
        ("\x00\x01", "cannot be read as JSON"),
        ("[1, 2]", "is not the result of a run: it is a list"),
        ("null", "is not the result of a run: it is null"),
        ('{"rows": []}', "is not the result of a run: it has no experiment"),
        ('{"runs": 3}', 'is not a collection of results: "runs" must be a list'),
        ('{"runs": [7]}', "run 0 of .* is not the result of a run: it is a single value"),
        ('{"experiment": "gaussian", "rows": []}', "is of the experiment gaussian, which draws its own picture"),
    ],
)
def test_files_that_are_no_results_are_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "odd" / "result.json"
    file.parent.mkdir()
    file.write_text(content)
    for path in (file, tmp_path):
        with pytest.raises(ValueError, match=message) as caught:
            load_results([path])
        assert str(file) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_places_without_results_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"there is no {tmp_path}/nowhere; give folders of finished runs"):
        load_results([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match=f"there is no result.json in or below {tmp_path}; a run writes it when"):
        load_results([tmp_path])
    with pytest.raises(ValueError, match="there is nothing to report"):
        load_results([save({"runs": []}, tmp_path, "empty.json")])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("experiment", "", "experiment must be a text that is not empty, got ''"),
        ("settings.method", 3, "settings.method must be a text that is not empty, got 3"),
        ("settings.seed", -1, "settings.seed must be an integer that is not negative, got -1"),
        ("settings.seed", True, "settings.seed must be an integer that is not negative, got True"),
        ("scores.error", 8.0, "scores.error must be a fraction, between 0 and 1, got 8.0"),
        ("scores.nll", "0.3", "scores.nll must be a finite number that is not negative, got '0.3'"),
        ("scores.nll", 10**400, "scores.nll must be a finite number that is not negative, got 1000"),
        ("scores.top5", 2, "scores.top5 must be a fraction"),
        ("single", [1], "single must be an object"),
        ("single.ece", -1, "single.ece must be a fraction"),
        ("steps", 0, "steps must be an integer above 0, got 0"),
        ("scaled", "epochs 12", "scaled must be a list of texts"),
        ("reliability.counts", [1, 2], "reliability has 11 edges, and of the bins between them"),
        ("reliability.accuracy", [None] * 10, "reliability has a bin of 3 predictions without confidence or accuracy"),
        ("trace.steps", [1, 2], "trace has 2 steps and 20 log-likelihoods"),
        ("trace.log_likelihood", [None] * 20, "trace.log_likelihood must be a list of finite numbers"),
        ("r_hat", "good", "r_hat must be a finite number"),
    ],
)
def test_wrong_fields_are_named(name: str, value: Any, message: str) -> None:
    result = run()
    *parents, last = name.split(".")
    where = result
    for part in parents:
        where = where[part]
    where[last] = value
    with pytest.raises(ValueError, match=f"^this is not the result of a run: {message}"):
        check_result(result, "this")


def test_what_may_be_missing_may_be_missing() -> None:
    result = run()
    for name in ("single", "r_hat", "ess"):
        del result[name]
    del result["data"]["note"], result["trace"]["error"]
    before = copy.deepcopy(result)
    filled: dict[str, Any] = {
        "single": None,
        "r_hat": None,
        "ess": None,
        "diagnosis": None,
        "scaled": [],
        "ranks": 1,
        "not_converged": None,
    }
    complete = check_result(result, "this")
    assert complete == before | filled | {"data": before["data"] | {"note": None}}
    assert result == before  # completed in a copy
    for name in ("scaled", "r_hat", "single", "ranks"):
        result[name] = None
    assert check_result(result, "this") == complete == check_result(complete, "this")


def refusal(result: Any) -> str | None:
    try:
        check_result(result, "this")
    except ValueError as error:
        return str(error)
    return None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_result_with_anything_in_any_place_is_taken_or_refused_in_a_sentence(data: st.DataObject) -> None:
    result = copy.deepcopy(run())
    where: Any = result
    while True:
        name = data.draw(st.sampled_from(sorted(where)))
        if not isinstance(where[name], dict) or data.draw(st.booleans()):
            break
        where = where[name]
    where[name] = data.draw(JSON)
    message = refusal(result)
    assert message is None or message.startswith("this is ")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each field, nested ones too, and of the first element of each list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*path, name)
        yield from places(each, (*path, name))


ABSENT = "absent"
WRONG: list[Any] = [ABSENT, None, "x", [], [None], {}, -1, float("nan"), float("inf"), 10**400]


def with_wrong_fields() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yield (field, value, result): a valid result with one value that is wrong there, or may be."""
    whole = run(seed=7, scaled=["epochs 2"], ranks=2)
    whole["trace"]["chains"] = [10, 10]
    whole["settings"] |= {"chains": 2, "wire": None, "workers": 0}
    for path, value in product(places(whole), WRONG):
        result: Any = copy.deepcopy(whole)
        where = result
        for part in path[:-1]:
            where = where[part]
        if value is ABSENT:
            where.pop(path[-1])
        else:
            where[path[-1]] = value
        yield ".".join(map(str, path)), value, result


def test_every_field_that_is_wrong_is_named_or_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field replaced by each of `WRONG`: what is refused names file and field, all the rest makes one report."""
    taken, refused = [], 0
    for field, value, result in with_wrong_fields():
        if (message := refusal(result)) is None:
            taken.append(result | {"command": f"{field} {value}"})
            taken[-1]["settings"] = {
                "from": [field, str(value)],
                **taken[-1]["settings"],
            }  # no run is another's repetition
        else:
            refused += 1
            assert message.startswith("this is not the result of a run: ")
            parents = field.removesuffix(".0").split(".")
            assert parents[0] in message or "it has no" in message, (field, value, message)
    assert refused > 300
    assert len(taken) > 60
    monkeypatch.setattr(sections, "render", lambda figure: Image("<svg/>", b"PNG"))  # which takes most of the time
    page = write_report(taken, tmp_path).read_text(encoding="utf-8")
    assert f"{len(taken)} runs of" in page


def test_a_wrong_file_is_refused_by_every_command_that_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "bad", "worse"):
        save(run() | ({} if name == "good" else {"scores": None}), tmp_path, name, "result.json")
    sentence = refuse(["report", str(tmp_path), "--out", str(tmp_path / "report")], capsys)
    for name in ("bad", "worse"):
        assert f"{tmp_path / name}/result.json is not the result of a run: it has no scores.error" in sentence
    assert not (tmp_path / "report").exists()
    save(run() | {"ranks": None}, tmp_path, "report me", "result.json")
    assert main(["report", str(tmp_path / "report me"), "--out", str(tmp_path / "report")]) == 0


@pytest.mark.parametrize(
    ("field", "value"), [("single", None), ("single", {"nll": 1.0}), ("r_hat", ABSENT), ("ranks", None)]
)
def test_an_older_result_of_a_finished_run_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], field: str, value: Any
) -> None:
    config = Digits()
    save(config.to_json(), tmp_path, "config.json")
    result = run() | {"settings": config.to_json()} | {field: value}
    if value is ABSENT:
        del result[field]
    save(result, tmp_path, "result.json")
    assert main(["run", "digits", "--out", str(tmp_path)]) == 0
    assert "the last sample alone: error" in capsys.readouterr().out
    save(result | {"memory": None}, tmp_path, "result.json")
    for arguments in (["run", "digits", "--resume", str(tmp_path)], ["run", "digits", "--out", str(tmp_path)]):
        assert "result.json is not the result of a run: it has no memory.training" in refuse(arguments, capsys)


def test_computing_counts_chains_and_ranks() -> None:
    trace: dict[str, Any] = {"steps": [1, 2, 1, 2]}
    one: dict[str, Any] = {"trace": trace, "seconds": {"train": 10.0, "evaluate": 1.0}}
    assert computing_seconds(one) == computing_seconds(one | {"ranks": None}) == 11
    assert computing_seconds(one | {"ranks": 2, "trace": trace | {"chains": [2, 2]}}) == 41
