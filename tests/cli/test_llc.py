"""The command ``llc`` on a run of SGD, and what it refuses; `tests/integrations` has a language model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qlangevin.cli.main import main
from tests.helpers.runs import TINY, refused

SHORT = ["--lr", "1e-4", "--localization", "100", "--chains", "2", "--draws", "6", "--batch", "25"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sgd"
    assert main([*TINY, "--method", "sgdfp", "--out", str(folder), "--json"]) == 0
    return folder


def test_a_run_is_estimated_and_a_page_written(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    command = ["llc", str(trained), *SHORT, "--masks", "*", "1.*", "--out", str(tmp_path / "a"), "--json"]
    assert main(command) == 0
    first = json.loads(capsys.readouterr().out)
    assert [part["name"] for part in first["parts"]] == ["*", "1.*"]
    assert first["parts"][0]["settings"]["num_data"] == 100
    assert first["parts"][1]["weights_moved"] == 64 * 8 + 8
    page = (tmp_path / "a" / "index.html").read_text()
    assert "LLC by chain" in page
    assert main(command) == 0  # again, from the disk
    assert json.loads(capsys.readouterr().out) == first


def test_a_table_is_printed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["llc", str(trained), *SHORT, "--weights", "bfp8", "--limit", "50"]) == 0
    out = capsys.readouterr().out
    assert "Local learning coefficient, bfp8" in out
    assert "full" in out


def test_bad_input_is_named(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no config.json" in refused(["llc", str(tmp_path), *SHORT], capsys)
    assert "fits no parameter" in refused(["llc", str(trained), *SHORT, "--masks", "9.*"], capsys)
    assert "needs n >= 3 data" in refused(["llc", str(trained), *SHORT, "--limit", "2"], capsys)
    (tmp_path / "config.json").write_text("5")
    assert "config.json" in refused(["llc", str(tmp_path), *SHORT], capsys)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert "--text FILE" in refused(["llc", str(tmp_path), *SHORT], capsys)
    assert "No such file" in refused(["llc", str(tmp_path), *SHORT, "--text", str(tmp_path / "none")], capsys)
    wrong = {"lr": "-1", "localization": "-1", "nbeta": "nan", "chains": "0", "draws": "0", "box": "-1"}
    for name, value in wrong.items():
        assert name in refused(["llc", str(trained), *SHORT, f"--{name}", value], capsys)
    assert "got 99" in refused(["llc", str(trained), *SHORT, "--weights", "bfp99"], capsys)


def test_a_chain_that_leaves_is_said_and_its_losses_are_kept(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "left"
    command = ["llc", str(trained), *SHORT, "--lr", "1e4", "--draws", "40", "--out", str(out), "--json"]
    assert "smaller lr" in refused(command, capsys, code=1)
    assert (out / "part-0" / "chain-0.safetensors").exists()
