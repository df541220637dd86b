"""Several chains of one run, and several ranks: equal samples however chains are divided among processes, and after any kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from qlangevin import Posterior, SampleStore, diagnostics
from qlangevin.cli.main import main
from qlangevin.distributed.ranks import Ranks
from qlangevin.experiments import chain, gaussian, run
from qlangevin.experiments.methods import MethodName
from qlangevin.experiments.presets import Digits, from_json
from qlangevin.experiments.report import load_results, write_report
from qlangevin.experiments.run import run_experiment
from qlangevin.experiments.score import evaluate, open_posterior
from tests.helpers.process_groups import run_on_ranks, start_torchrun, try_on_ranks

SMALL = Digits(
    format="bfp8", epochs=4, batch=25, lr=0.1, temperature=1.0, samples=9, burn_in=0.5, limit_train=190, limit_test=120, hidden=12
)  # fmt: skip
FOUR = replace(SMALL, chains=4)


def stored_bytes(folder: Path) -> dict[str, bytes]:
    """The contents of all samples, manifests and configurations in a folder."""
    files = [*folder.rglob("samples/*"), *folder.rglob("manifest.json"), *folder.rglob("config.json")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four chains, one after the other in this process."""
    folder = tmp_path_factory.mktemp("four") / "run"
    run_experiment(FOUR, folder)
    return folder


# ---- functions that ranks call


def run_on_rank(ranks: Ranks, settings: dict[str, Any], folder: str, dies: int | None = None, after: int = 0) -> Any:
    """Run an experiment, in which a rank may be killed after some steps; return its result and the progress it reported."""
    shares, losses = list[float](), list[Tensor]()

    def deadly_loss(*arguments: Any) -> Tensor:
        losses.append(cross_entropy(*arguments))
        if ranks.rank == dies and len(losses) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses[-1]

    chain.SECONDS = 0.0  # a checkpoint after every step
    vars(chain)["cross_entropy"] = deadly_loss
    result = run_experiment(from_json(settings), Path(folder), None, lambda label, share: shares.append(share), ranks)
    return [{name: value for name, value in result.items() if name not in ("seconds", "finished")}, sum(shares)]


def gaussian_on_rank(ranks: Ranks) -> Any:
    result = gaussian.run_gaussian(GAUSSIAN, ranks=ranks)
    return [[asdict(row) | {"seconds": 0} for row in result.rows], [shares.tolist() for shares in result.shares]]


GAUSSIAN = gaussian.GaussianSettings(stepsizes=(0.05, 0.01), chains=200)

# ---- equal chains however they are divided


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_chains_shared_by_ranks_are_those_of_one_process(ranks: int, four: Path, tmp_path: Path) -> None:
    found = run_on_ranks(run_on_rank, ranks, FOUR.to_json(), str(tmp_path / "run"))
    assert stored_bytes(tmp_path / "run") == stored_bytes(four)
    assert all(result == found[0][0] for result, _ in found)
    assert found[0][1] == pytest.approx(1)  # the first rank's own chains, and the evaluation
    expected = run.read_result(four)
    assert all(found[0][0][name] == expected[name] for name in ("scores", "trace", "r_hat", "ess", "memory", "samples"))


def test_chains_differ_and_the_first_is_the_run_without_the_others(four: Path, tmp_path: Path) -> None:
    run_experiment(SMALL, tmp_path / "one")
    chains = [stored_bytes(four / f"chain-{i}") for i in range(4)]
    assert {k: v for k, v in stored_bytes(tmp_path / "one").items() if k != "config.json"} == chains[0]
    for name in chains[0]:
        assert len({files[name] for files in chains}) == 4, name


def test_a_run_of_chains_is_averaged_over_all_of_them(four: Path) -> None:
    result, digits = run.read_result(four), SMALL.load_data(None)
    average = Posterior.open(four, open_posterior(SMALL, digits, four).model)
    assert [len(c) for c in average.chains] == [9, 9, 9, 9] == result["trace"]["chains"]
    assert result["samples"] == 36
    chains = torch.tensor(result["trace"]["log_likelihood"]).view(4, 9)
    r_hat, ess, _ = diagnostics.summarize(chains).worst
    assert (result["r_hat"], result["ess"]) == (pytest.approx(r_hat), pytest.approx(ess))
    found = evaluate([four])
    assert (found["scores"], found["r_hat"]) == (result["scores"], result["r_hat"])
    with pytest.raises(FileNotFoundError, match=r"there is no store .*: it has no manifest.json"):
        SampleStore.open(four)


def test_the_report_says_how_many_chains_agree(four: Path, tmp_path: Path) -> None:
    write_report(load_results([four]), tmp_path / "report")
    [figure] = (tmp_path / "report/figures").glob("*trace*.svg")
    result = run.read_result(four)
    assert "--chains 4" in (tmp_path / "report/report.md").read_text()
    assert result["command"].endswith("--chains 4")
    assert figure.stat().st_size > 0


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("chains", [1, 2])
def test_replicas_write_one_store_for_each_chain(chains: int, tmp_path: Path) -> None:
    config = replace(SMALL, chains=chains, wire="bfp8/64")
    found = run_on_ranks(run_on_rank, 2 * chains, config.to_json(), str(tmp_path / "run"))
    assert {result["ranks"] for result, _ in found} == {2}
    assert found[0][0]["samples"] == 9 * chains
    assert found[0][1] == pytest.approx(1)
    assert found[1][1] == 0  # only the first rank reports progress
    stores = [SampleStore.open(path.parent) for path in (tmp_path / "run").rglob("manifest.json")]
    assert [store.manifest.settings["ranks"] for store in stores] == [2] * chains


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("method", ["sgldlp-f", "vc-sgldlp-l"])
def test_a_chain_on_two_ranks_begins_as_on_one_and_keeps_to_it(method: MethodName, tmp_path: Path) -> None:
    """Activations are in full precision: only the order of sums differs, which seldom moves a weight to another code."""
    config = replace(SMALL, method=method, activations="full", epochs=1, samples=4)
    run_experiment(config, tmp_path / "one")
    run_on_ranks(run_on_rank, 2, config.to_json(), str(tmp_path / "two"))
    for one, two in zip(SampleStore.open(tmp_path / "one"), SampleStore.open(tmp_path / "two"), strict=True):
        for name, weights in one.decode().items():
            same = (weights == two.decode()[name]).float().mean()
            assert same > 0.98, name


def run_in_folder_of_rank(ranks: Ranks, settings: dict[str, Any], folder: str) -> Any:
    return run_on_rank(ranks, settings, f"{folder}/{ranks.rank}")


@pytest.mark.distributed
def test_ranks_that_do_not_share_a_folder_are_refused(tmp_path: Path) -> None:
    outcomes = try_on_ranks(run_in_folder_of_rank, 2, replace(SMALL, chains=2).to_json(), str(tmp_path))
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert "a run in the folder, which all ranks must see, is True on rank 0 and False on rank 1" in outcome.message
    assert not [*tmp_path.rglob("result.json")]


@pytest.mark.distributed
def test_gaussian_rows_shared_by_ranks_are_those_of_one_process() -> None:
    alone = gaussian.run_gaussian(GAUSSIAN)
    expected = [[asdict(row) | {"seconds": 0} for row in alone.rows], [shares.tolist() for shares in alone.shares]]
    assert run_on_ranks(gaussian_on_rank, 4) == [expected] * 4


# ---- what ends a process


@pytest.mark.distributed
@pytest.mark.slow
def test_replicas_resume_after_one_was_killed(tmp_path: Path) -> None:
    settings = replace(SMALL, wire="bfp8/64").to_json()
    run_on_ranks(run_on_rank, 2, settings, str(tmp_path / "uninterrupted"))
    for dies, after in ((1, 9), (0, 15)):
        outcomes = try_on_ranks(run_on_rank, 2, settings, str(tmp_path / "run"), dies, after)
        assert outcomes[dies].error == "Died"
        assert outcomes[1 - dies].error == "MissingRankError", outcomes[1 - dies]
    assert len(SampleStore.open(tmp_path / "run")) > 0
    run_on_ranks(run_on_rank, 2, settings, str(tmp_path / "run"))
    assert stored_bytes(tmp_path / "run") == stored_bytes(tmp_path / "uninterrupted")


def rank_process(rank: int, folder: Path) -> int | None:
    """The id of the process that is this rank of the job with this folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables, command = (process / "environ").read_bytes().split(b"\0"), (process / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if f"RANK={rank}".encode() in variables and str(folder).encode() in command:
            return int(process.name)
    return None


def wait_for(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process of a rank in /proc")
def test_torchrun_restarts_chains_of_which_one_was_killed(tmp_path: Path) -> None:
    long = replace(FOUR, epochs=80, samples=60, burn_in=0.1)
    options = (
        "--format bfp8 --epochs 80 --batch 25 --lr 0.1 --temperature 1 --samples 60 --burn-in 0.1 --limit-train 190"
    )
    options += f" --limit-test 120 --hidden 12 --chains 4 --json --out {tmp_path / 'run'}"
    with start_torchrun("run", "digits", *options.split(), ranks=4, restarts=1) as process:
        wait_for(
            (tmp_path / "run/chain-2/samples/000003.safetensors").exists, process
        )  # the manifest lists those before it
        victim = wait_for(lambda: rank_process(2, tmp_path / "run"), process)
        os.kill(victim, signal.SIGKILL)
        survived = [SampleStore.open(tmp_path / f"run/chain-{i}") for i in (0, 1, 2, 3)]
        assert len(survived[2]) > 2
        assert all(sample.tensors for store in survived for sample in store)  # which checks every byte of them
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert str(victim) in err  # torchrun names the process that died
    assert json.loads(out)["samples"] == 240
    run_experiment(long, tmp_path / "uninterrupted")
    assert stored_bytes(tmp_path / "run") == stored_bytes(tmp_path / "uninterrupted")


@pytest.mark.distributed
@pytest.mark.slow
def test_chains_side_by_side_of_which_one_fails(four: Path, tmp_path: Path) -> None:
    """Two processes run four chains: two that were not begun, one that is done, and one whose store is damaged."""
    folder, shares = tmp_path / "run", list[float]()
    shutil.copytree(four, folder)
    (folder / "result.json").unlink()
    shutil.rmtree(folder / "chain-1")
    shutil.rmtree(folder / "chain-2")
    manifest = folder / "chain-3/manifest.json"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-9])
    with pytest.raises(
        RuntimeError, match=r"^chain 3: DamagedError: .*; what is stored is safe, and the same command resumes$"
    ):
        run_experiment(FOUR, folder, progress=lambda label, share: shares.append(share), jobs=2)
    manifest.write_bytes(content)
    assert stored_bytes(folder) == stored_bytes(four)
    assert sum(shares) < 1
    assert run_experiment(FOUR, folder)["scores"] == run.read_result(four)["scores"]


# ---- mistakes


@pytest.mark.distributed
@pytest.mark.slow
def test_a_run_of_another_number_of_ranks_or_chains_is_refused(tmp_path: Path, four: Path) -> None:
    settings, folder = SMALL.to_json(), str(tmp_path / "run")
    outcomes = try_on_ranks(run_on_rank, 2, settings, folder, 1, 12)
    assert outcomes[1].error == "Died"
    with pytest.raises(ValueError, match="was begun with other settings: ranks is 2 there and 1 here"):
        run_experiment(SMALL, tmp_path / "run")
    outcomes = try_on_ranks(run_on_rank, 4, settings, folder)
    assert outcomes[0].error == "ValueError"
    assert "ranks is 2 there and 4 here" in outcomes[0].message
    assert all(outcome.error == "MissingRankError" for outcome in outcomes[1:])
    with pytest.raises(ValueError, match="holds another run: chains is 4 there and 2 here"):
        run_experiment(replace(FOUR, chains=2), four)


@pytest.mark.distributed
def test_ranks_with_different_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    outcomes = try_on_ranks(run_with_settings_of_rank, 2, SMALL.to_json(), str(tmp_path / "run"))
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert outcome.message == (
            "ranks disagree: settings.format is 'bfp8' on rank 0 and 'fixed8.4' on rank 1; "
            "settings.seed is 0 on rank 0 and 1 on rank 1"
        )
    assert not (tmp_path / "run").exists()


def run_with_settings_of_rank(ranks: Ranks, settings: dict[str, Any], folder: str) -> Any:
    other = {"seed": ranks.rank, "format": "bfp8" if ranks.first else "fixed8.4"}
    return run_on_rank(ranks, settings | other, folder)


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (replace(SMALL, chains=3), 2, "--chains 3 cannot be shared evenly by 2 ranks"),
        (replace(FOUR, wire="bfp8/64"), 4, "--wire is for chains that several ranks step together"),
        (replace(SMALL, wire="fp32"), 1, "--wire is for chains that several ranks step together"),
    ],
)
def test_chains_that_ranks_cannot_share_are_refused(config: Digits, ranks: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_experiment(config, tmp_path / "run", ranks=Ranks(0, ranks))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [["demo"], ["sweep", "digits"], ["bound"], ["report", "x"], ["evaluate", "x"]])
def test_other_commands_are_for_one_process(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(command) == 2
    expected = (
        f"qlangevin (rank 1): error: qlangevin {command[0]} is for one process; torchrun is for qlangevin run and llc\n"
    )
    assert capfd.readouterr().err == expected


def test_a_rank_that_is_no_number_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "abc", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert main(["run", "digits"]) == 2
    assert capfd.readouterr().err == "qlangevin (rank abc): error: the variable RANK must be a number, got 'abc'\n"


def test_full_precision_has_no_low_precision_wire() -> None:
    with pytest.raises(ValueError, match="SGLDFP is in full precision; leave --wire=bfp8/64 out"):
        replace(SMALL, method="sgldfp", format=None, wire="bfp8/64")
    assert replace(SMALL, wire="bfp8/64").scaled[-1] == "gradients between ranks in bfp8/64"
