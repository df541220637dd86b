"""The demo: exact answers it is compared with, its verdicts, one page with the tables first."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qlangevin.cli.main import main
from qlangevin.experiments import gaussian
from qlangevin.experiments.demo import bands, digits, images, methods, reference, regression, run, scores, summary
from qlangevin.experiments.environment import limit_threads
from qlangevin.experiments.processes import JobOutcome, ignore_progress


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few chains, few steps, in this process."""
    short = tuple(replace(settings, steps=40) for settings in digits.CHOSEN)
    parts = (*(run.Part("sample_digits", (s,), 5.0) for s in short), *run.PARTS[len(short) :])
    monkeypatch.setattr(run, "PARTS", parts)
    monkeypatch.setattr(run, "FEATURES", regression.Schedule(8, 2e-4, 60))
    monkeypatch.setattr(run, "NETWORK", regression.Schedule(8, 1e-4, 60))
    monkeypatch.setattr(run, "GAUSSIAN", gaussian.GaussianSettings(stepsizes=(0.1,), chains=50, steps=60))
    monkeypatch.setattr(run, "run_in_processes", in_this_process)


def in_this_process(job: object, arguments: list[tuple[run.Part]], *_: object) -> dict[int, JobOutcome]:
    return {i: JobOutcome(run.run_part(*given, ignore_progress)) for i, given in enumerate(arguments)}


def test_the_exact_band_is_that_of_the_gaussian_posterior() -> None:
    """f(x) has the mean and variance of conditioning the joint Gaussian of f(x) and y, computed in function space."""
    x, y = regression.make_data()
    model = regression.Features(x, y)
    phi, at = model._features(x), model._features(regression.GRID)
    gain = torch.linalg.solve(phi @ phi.T + regression.NOISE**2 * torch.eye(len(x)).double(), phi @ at.T).T
    mean, sd = model.exact(regression.GRID)
    torch.testing.assert_close(mean, gain @ y)
    torch.testing.assert_close(sd.square(), (at * at).sum(1) - (gain * (at @ phi.T)).sum(1))


def test_gradients_are_those_of_the_energy() -> None:
    x, y = regression.make_data()
    network = regression.Network(x, y)
    w = torch.randn(3, network.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad(network.energy(w).sum(), w)
    torch.testing.assert_close(network.gradient(w.detach()) * len(x), expected)
    features = regression.Features(x, y)
    v = torch.randn(2, features.size)
    expected = (v.double() - features.mean) @ features.precision / len(x)
    torch.testing.assert_close(features.gradient(v), expected.float(), rtol=1e-3, atol=1e-3)


def test_a_band_drawn_from_the_exact_posterior_has_width_1_and_covers_95_percent() -> None:
    model = regression.Features(*regression.make_data())
    mean, sd = model.exact(regression.GRID)
    draw = torch.Generator().manual_seed(1)
    for factor in (1.0, 2.0):
        values = mean + factor * sd * torch.randn(64, 100, len(mean), generator=draw, dtype=torch.float64)
        band = bands.compare_with_exact(regression.Sampled(methods.FULL, values), mean, sd)
        assert band.width == pytest.approx(factor, rel=0.01)
        assert band.coverage == pytest.approx(math.erf(factor * 1.959964 / math.sqrt(2)), abs=0.003)


def test_the_stored_reference_has_converged() -> None:
    found = reference.load_reference()
    assert found.r_hat < 1.05
    assert 0.6 < found.acceptance < 0.99
    assert bool((found.quantiles.diff(dim=0) > 0).all())
    values = (found.mean + found.sd * torch.randn(64, 100, 101, generator=torch.Generator().manual_seed(2))).double()
    band = bands.compare_with_reference(regression.Sampled(methods.FULL, values), found)
    assert band.coverage == pytest.approx(0.95, abs=0.02)


def test_rotation_and_letters() -> None:
    data = images.load_images()
    torch.testing.assert_close(images.rotate(data.test, 0), data.test)
    quarter = images.rotate(images.rotate(data.test, 90), -90)
    torch.testing.assert_close(quarter, data.test, atol=1e-5, rtol=0)
    assert data.letters.shape == (len(images.FONTS) * len(images.LETTERS), 64)
    assert bool((data.letters.sum(1) > 1).all())


def test_verdicts_respect_standard_errors() -> None:
    assert summary.Verdict("nll", -0.01, 0.006).word == "same"
    assert summary.Verdict("nll", -0.01, 0.004).word == "better"
    assert summary.Verdict("auroc", -0.01, 0.004).word == "worse"
    assert str(summary.Verdict("error", 0.01, 0.002)) == "worse (+1.00 ± 0.20 percentage points)"


def test_rejecting_the_least_certain_removes_the_errors_first() -> None:
    p = torch.tensor([[0.9, 0.1]] * 9 + [[0.4, 0.6]])
    assert scores.reject_curve(p, torch.zeros(10, dtype=torch.int64)) == pytest.approx([0.1] + [0.0] * 9)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_the_page_has_the_tables_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    for expected in ("SGHMC, corrected 8-bit", "AUROC", "features, SGLD naive 8-bit", f"page: {tmp_path}/index.html"):
        assert expected in out
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert page.index("<table") < page.index("<svg")
    assert page.count("<svg") == 6
    assert main(["demo", "--out", str(tmp_path), "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert set(json.loads(captured.out)["digits"]) >= {"one network, SGD", "SGHMC, FP32"}


def test_a_part_that_fails_is_reported_and_no_page_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_in_processes", lambda *_: {0: JobOutcome(error="OSError: the disk is on fire")})
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "sample_digits: OSError: the disk is on fire" in capsys.readouterr().err
    assert not (tmp_path / "index.html").exists()


def test_mistakes_are_noticed_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the demo must not start")

    monkeypatch.setattr(run, "run_in_processes", never)
    (tmp_path / "file").write_text("kept")
    for arguments, message in (
        (["--jobs", "0"], "jobs must be an integer, at least 1, got 0"),
        (["--out", str(tmp_path / "file")], f"{tmp_path}/file: File exists"),
    ):
        assert main(["demo", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in " ".join(err.replace("│", " ").split())
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_small_networks_run_in_one_thread() -> None:
    with limit_threads(7510, 50):
        assert torch.get_num_threads() == 1
    with limit_threads(11_000_000, 128):
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0.1, 0.5])
def test_an_interrupt_during_imports_prints_no_traceback(delay: float) -> None:
    code = (
        "import os, signal, sys, threading, time; from qlangevin_command import main; sys.argv = ['qlangevin', 'demo'];"
        f"threading.Thread(target=lambda: (time.sleep({delay}), os.kill(os.getpid(), signal.SIGINT)), daemon=True).start();"
        "sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
