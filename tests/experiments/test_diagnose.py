"""The diagnosis of a run: from its checkpoint and samples, in its result, on the report, at the command line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qlangevin.cli.main import main
from qlangevin.experiments.diagnose import diagnose_run, posterior_widths
from qlangevin.experiments.report import load_results, write_report
from qlangevin.experiments.results import check_result
from qlangevin.experiments.run import run_experiment
from qlangevin.storage.store import SampleStore
from tests.helpers.experiments import SMALL
from tests.helpers.runs import refused, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a small network at a temperature that 8 bits cannot resolve."""
    folder = tmp_path_factory.mktemp("diagnosed") / "run"
    run_experiment(replace(SMALL, temperature=1e-3), folder)
    return folder


def test_result_has_the_diagnosis(folder: Path) -> None:
    (result,) = load_results([folder])
    kept, found = result["diagnosis"], diagnose_run(folder, batches=1)
    assert kept["total"]["inflation"] == found.total.inflation  # the same checkpoint and the same batch
    assert kept["summary"] == found.summary
    assert kept["advice"] == [str(remedy) for remedy in found.advice]
    assert not kept["sufficient"]


def test_batches_are_averaged(folder: Path) -> None:
    one, three = diagnose_run(folder, batches=1), diagnose_run(folder, batches=3)
    assert one.total.inflation != three.total.inflation
    assert three.total.inflation == pytest.approx(one.total.inflation, rel=0.5)
    assert [part.size for part in one.parameters] == [part.size for part in three.parameters]


def test_names_are_those_of_the_model_and_widths_those_of_the_samples(folder: Path) -> None:
    found = diagnose_run(folder)
    store = SampleStore.open(folder)
    assert [part.name for part in found.parameters] == [name for name in store.names if "." in name]
    name = found.parameters[0].name
    stacked = torch.stack([sample.decode()[name] for sample in store]).double()
    widths = posterior_widths(folder, [name])
    assert widths is not None
    torch.testing.assert_close(widths[name], stacked.std(0), rtol=1e-9, atol=1e-12)
    part = found.parameters[0]
    assert part.gap_over_width == pytest.approx(part.gap / float(stacked.std(0).square().mean().sqrt()))


@pytest.mark.parametrize("method", ["sgldlp-f", "naive-sgldlp-l", "sgdlp-l", "sgldfp"])
def test_other_methods(method: Any, tmp_path: Path) -> None:
    config = replace(SMALL, method=method, format=None if method == "sgldfp" else "bfp8", epochs=1, samples=2)
    result = run_experiment(config, tmp_path / "run")
    total = result["diagnosis"]["total"]
    assert (total["inflation"] is None) == (method == "sgdlp-l")
    assert total["format"] == ("fp32" if method in ("sgldlp-f", "sgldfp") else "bfp8")


def test_several_chains(tmp_path: Path) -> None:
    run_experiment(replace(SMALL, epochs=1, samples=2, chains=2), tmp_path / "run")
    first, second = (diagnose_run(tmp_path / "run", chain=i) for i in (0, 1))
    assert first.total.resolution != second.total.resolution
    with pytest.raises(ValueError, match=r"--chain must be below 2"):
        diagnose_run(tmp_path / "run", chain=2)


def test_command_prints_table_advice_and_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(folder), "--batches", "1"]) == 0
    shown = capsys.readouterr().out
    for expected in ("1.weight", "v<v_s", "The bits do not suffice", "bytes a weight", 'weights="bfp'):
        assert expected in shown
    assert main(["diagnose", str(folder), "--batches", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["total"]["size"] == sum(part["size"] for part in answer["parameters"])
    assert answer["advice"][0]["kind"] in ("bits", "block", "accumulator", "lr")
    assert answer["sufficient"] is False


def test_bad_input_ends_with_a_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no run in" in refused(["diagnose", str(tmp_path)], capsys)
    assert "batches must be an integer, at least 1" in refused(["diagnose", str(folder), "--batches", "0"], capsys)
    assert "--chain must be below 1" in refused(["diagnose", str(folder), "--chain", "1"], capsys)
    assert "tolerance must be above 1" in refused(["diagnose", str(folder), "--tolerance", "1"], capsys)
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert "there is no checkpoint" in refused(["diagnose", str(tmp_path)], capsys)


def test_report_asks_whether_the_bits_suffice(folder: Path, tmp_path: Path) -> None:
    page = write_report(load_results([folder]), tmp_path).read_text()
    assert "Do the bits suffice?" in page


def test_older_results_have_none(tmp_path: Path) -> None:
    result = check_result(run(), "an old one")
    assert result["diagnosis"] is None
    assert "Do the bits suffice?" not in write_report([result], tmp_path).read_text()


def test_a_diagnosis_without_shares_is_reported(tmp_path: Path) -> None:
    """As that of weights whose noise comes by way of velocities alone."""
    total = {"above": None, "between": None, "below": None, "inflation": 1.25}
    result = check_result(run(diagnosis={"total": total}), "it")
    page = write_report([result], tmp_path).read_text()
    assert "Do the bits suffice?" in page
    assert "1.25" in page


def test_damaged_diagnosis_is_refused() -> None:
    with pytest.raises(ValueError, match=r"diagnosis.total.above must be a fraction"):
        check_result(run(diagnosis={"total": {"above": 7}}), "it")
    with pytest.raises(ValueError, match=r"diagnosis must be an object"):
        check_result(run(diagnosis="good"), "it")
