"""Several chains of one run, and several ranks: the same samples however they are shared out, and whatever ends a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.helpers import teams

SMALL = Digits(
    format="bfp8", epochs=4, batch=25, lr=0.1, temperature=1.0, samples=9, burn_in=0.5, limit_train=190, limit_test=120, hidden=12
)  # fmt: skip
FOUR = replace(SMALL, chains=4)
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", "--master-port"]


def kept(folder: Path) -> dict[str, bytes]:
    """The samples and what describes them, to the byte."""
    files = [*folder.rglob("samples/*"), *folder.rglob("manifest.json"), *folder.rglob("config.json")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four chains, one after the other in this process."""
    folder = tmp_path_factory.mktemp("four") / "run"
    run_experiment(FOUR, folder)
    return folder


# ---- on ranks; these functions are called there


def run_there(ranks: Ranks, settings: dict[str, Any], folder: str, dies: int | None = None, after: int = 0) -> Any:
    """A run, all of it or until a rank dies in the midst of it; what it gives, and the share of progress it told."""
    shares, losses = list[float](), list[Tensor]()

    def fatal(*arguments: Any) -> Tensor:
        losses.append(cross_entropy(*arguments))
        if ranks.rank == dies and len(losses) == after:
            os.kill(os.getpid(), signal.SIGKILL)
        return losses[-1]

    chain.SECONDS = 0.0  # a checkpoint after every step
    vars(chain)["cross_entropy"] = fatal
    result = run_experiment(from_json(settings), Path(folder), None, lambda label, share: shares.append(share), ranks)
    return [{name: value for name, value in result.items() if name not in ("seconds", "finished")}, sum(shares)]


def gaussian_there(ranks: Ranks) -> Any:
    result = gaussian.run_gaussian(GAUSSIAN, ranks=ranks)
    return [[asdict(row) | {"seconds": 0} for row in result.rows], [shares.tolist() for shares in result.shares]]


GAUSSIAN = gaussian.GaussianSettings(stepsizes=(0.05, 0.01), chains=200)

# ---- the same chains however they are shared out


@pytest.mark.parametrize("ranks", [2, 4])
def test_chains_shared_by_ranks_are_those_of_one_process(ranks: int, four: Path, tmp_path: Path) -> None:
    found = teams.values(run_there, ranks, FOUR.to_json(), str(tmp_path / "run"))
    assert kept(tmp_path / "run") == kept(four)
    assert all(result == found[0][0] for result, _ in found)
    assert found[0][1] == pytest.approx(1)  # the first rank's own chains, and the evaluation
    there = run.read_result(four)
    assert all(found[0][0][name] == there[name] for name in ("scores", "trace", "r_hat", "ess", "memory", "samples"))


def test_chains_differ_and_the_first_is_the_run_without_the_others(four: Path, tmp_path: Path) -> None:
    run_experiment(SMALL, tmp_path / "one")
    chains = [kept(four / f"chain-{i}") for i in range(4)]
    assert {k: v for k, v in kept(tmp_path / "one").items() if k != "config.json"} == chains[0]
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


@pytest.mark.parametrize("chains", [1, 2])
def test_replicas_write_one_store_for_each_chain(chains: int, tmp_path: Path) -> None:
    config = replace(SMALL, chains=chains, wire="bfp8/64")
    found = teams.values(run_there, 2 * chains, config.to_json(), str(tmp_path / "run"))
    assert {result["ranks"] for result, _ in found} == {2}
    assert found[0][0]["samples"] == 9 * chains
    assert found[0][1] == pytest.approx(1)
    assert found[1][1] == 0  # only the first rank of all tells
    stores = [SampleStore.open(path.parent) for path in (tmp_path / "run").rglob("manifest.json")]
    assert [store.manifest.settings["ranks"] for store in stores] == [2] * chains


@pytest.mark.parametrize("method", ["sgldlp-f", "vc-sgldlp-l"])
def test_a_chain_on_two_ranks_begins_as_on_one_and_keeps_to_it(method: MethodName, tmp_path: Path) -> None:
    """Activations in full precision; then only the order of sums differs, which seldom moves a weight to another code."""
    config = replace(SMALL, method=method, activations="full", epochs=1, samples=4)
    run_experiment(config, tmp_path / "one")
    teams.values(run_there, 2, config.to_json(), str(tmp_path / "two"))
    for one, two in zip(SampleStore.open(tmp_path / "one"), SampleStore.open(tmp_path / "two"), strict=True):
        for name, weights in one.decode().items():
            same = (weights == two.decode()[name]).float().mean()
            assert same > 0.98, name


def apart_there(ranks: Ranks, settings: dict[str, Any], folder: str) -> Any:
    return run_there(ranks, settings, f"{folder}/{ranks.rank}")


def test_ranks_that_do_not_see_the_same_folder_are_told_so(tmp_path: Path) -> None:
    outcomes = teams.outcomes(apart_there, 2, replace(SMALL, chains=2).to_json(), str(tmp_path))
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert "a run in the folder, which all ranks must see, is True there and False here" in outcome.message
    assert not [*tmp_path.rglob("result.json")]


def test_gaussian_rows_shared_by_ranks_are_those_of_one_process() -> None:
    alone = gaussian.run_gaussian(GAUSSIAN)
    expected = [[asdict(row) | {"seconds": 0} for row in alone.rows], [shares.tolist() for shares in alone.shares]]
    assert teams.values(gaussian_there, 4) == [expected] * 4


# ---- what ends a process


def test_replicas_of_which_one_was_killed_go_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    settings = replace(SMALL, wire="bfp8/64").to_json()
    teams.values(run_there, 2, settings, str(tmp_path / "whole"))
    for dies, after in ((1, 9), (0, 15)):
        outcomes = teams.outcomes(run_there, 2, settings, str(tmp_path / "run"), dies, after)
        assert outcomes[dies].error == "Died"
        assert outcomes[1 - dies].error == "MissingRankError", outcomes[1 - dies]
    assert len(SampleStore.open(tmp_path / "run")) > 0
    teams.values(run_there, 2, settings, str(tmp_path / "run"))
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")


@contextmanager
def torchrun(*arguments: str, ranks: int, restarts: int = 0) -> Iterator[subprocess.Popen[str]]:
    """``torchrun -m qlangevin``, ended with all it has started."""
    options = [str(teams.free_port()), f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "-m", "qlangevin"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [*TORCHRUN, *options, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def rank_process(rank: int, folder: Path) -> int | None:
    """The process that is a rank of the job with this folder."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            told = (place / "environ").read_bytes().split(b"\0"), (place / "cmdline").read_bytes()
        except OSError:
            continue  # it has ended
        if f"RANK={rank}".encode() in told[0] and str(folder).encode() in told[1]:
            return int(place.name)
    return None


def until(condition: Callable[[], Any], process: subprocess.Popen[str], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the process of a rank in /proc")
def test_torchrun_restarts_chains_of_which_one_was_killed(tmp_path: Path) -> None:
    long = replace(FOUR, epochs=80, samples=60, burn_in=0.1)
    options = (
        "--format bfp8 --epochs 80 --batch 25 --lr 0.1 --temperature 1 --samples 60 --burn-in 0.1 --limit-train 190"
    )
    options += f" --limit-test 120 --hidden 12 --chains 4 --json --out {tmp_path / 'run'}"
    with torchrun("run", "digits", *options.split(), ranks=4, restarts=1) as process:
        until(
            lambda: (tmp_path / "run/chain-2/samples/000003.safetensors").exists(), process
        )  # the ones before are listed
        victim = until(lambda: rank_process(2, tmp_path / "run"), process)
        os.kill(victim, signal.SIGKILL)
        survived = [SampleStore.open(tmp_path / f"run/chain-{i}") for i in (0, 1, 2, 3)]
        assert len(survived[2]) > 2
        assert all(sample.tensors for store in survived for sample in store)  # which checks every byte of them
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert str(victim) in err  # torchrun says who died
    assert json.loads(out)["samples"] == 240
    run_experiment(long, tmp_path / "whole")
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")


def test_chains_side_by_side_of_which_one_fails(four: Path, tmp_path: Path) -> None:
    """Two processes do four chains: two that were not begun, one that is done, and one whose store is damaged."""
    folder, told = tmp_path / "run", list[float]()
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
        run_experiment(FOUR, folder, progress=lambda label, share: told.append(share), jobs=2)
    manifest.write_bytes(content)
    assert kept(folder) == kept(four)
    assert sum(told) < 1
    assert run_experiment(FOUR, folder)["scores"] == run.read_result(four)["scores"]


# ---- mistakes


def test_a_run_of_another_number_of_ranks_or_chains_is_refused(tmp_path: Path, four: Path) -> None:
    settings, folder = SMALL.to_json(), str(tmp_path / "run")
    outcomes = teams.outcomes(run_there, 2, settings, folder, 1, 12)
    assert outcomes[1].error == "Died"
    with pytest.raises(ValueError, match="was begun with other settings: ranks is 2 there and 1 here"):
        run_experiment(SMALL, tmp_path / "run")
    outcomes = teams.outcomes(run_there, 4, settings, folder)
    assert outcomes[0].error == "ValueError"
    assert "ranks is 2 there and 4 here" in outcomes[0].message
    assert all(outcome.error == "MissingRankError" for outcome in outcomes[1:])
    with pytest.raises(ValueError, match="holds another run: chains is 4 there and 2 here"):
        run_experiment(replace(FOUR, chains=2), four)


def test_ranks_that_were_told_different_things_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    outcomes = teams.outcomes(odd_there, 2, SMALL.to_json(), str(tmp_path / "run"))
    for outcome in outcomes:
        assert outcome.error == "ValueError"
        assert (
            "settings.format is 'bfp8' there and 'fixed8.4' here; settings.seed is 0 there and 1 here"
            in outcome.message
        )
    assert not (tmp_path / "run").exists()


def odd_there(ranks: Ranks, settings: dict[str, Any], folder: str) -> Any:
    other = {"seed": ranks.rank, "format": "bfp8" if ranks.first else "fixed8.4"}
    return run_there(ranks, settings | other, folder)


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
    expected = f"qlangevin (rank 1): error: qlangevin {command[0]} is for one process; torchrun is for qlangevin run\n"
    assert capfd.readouterr().err == expected


def test_a_rank_that_is_no_number_is_a_sentence(
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
