"""The methods that are compared, as functions that make their stores. Settings that the experiment does not have are here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import qlangevin as ql
from qlangevin.experiments.chain import Chain, build_network, prepare_chain, train_chain
from qlangevin.experiments.data import Data
from qlangevin.experiments.methods import MethodName
from qlangevin.experiments.presets import Experiment, read_config
from qlangevin.experiments.processes import ignore_progress
from qlangevin.experiments.results import RESULT

from . import stores

MEMBERS = 5  # of a deep ensemble
COPIES = 20  # of one network, rounded stochastically
FEW_BITS = "bfp5"  # ensembles of rounded copies are usually made with fewer bits, where copies differ
SWAG_SHARE = 0.25  # of the epochs, after those of SGD
SWAG_LR = 0.1  # times the first lr, where the schedule of SGD decays; Maddox et al. do the same for CIFAR-10
RMS_LR, SGHMC_LR, FRICTION = 0.02, 5.0, 0.1  # times SGLD's lr


@dataclass(frozen=True)
class Made:
    """Stores of one method, and what they took."""

    folders: list[Path]
    steps: int
    batch_norm: bool = False
    """Statistics of batch normalization have to be estimated: no chain has been at these weights."""


@dataclass(frozen=True)
class Work:
    """An experiment with one seed, and where to put stores; ``runs`` holds runs of a sweep, which are not done again."""

    config: Experiment
    out: Path
    data_dir: Path | None = None
    runs: Path | None = None

    @cached_property
    def data(self) -> Data:
        """Data of the experiment, augmented as the seed says."""
        return self.config.load_data(self.data_dir)

    def folder(self, name: str) -> Path:
        return self.out / f"{name}-seed{self.config.seed}"

    def chain(self, method: MethodName, format: str | None = None) -> Made:
        """Run a chain of one of the paper's methods, or the rest of it."""
        config = replace(self.config, method=method, format=format)
        chain = prepare_chain(config, self.data)
        steps = chain.schedule.total_steps
        if (run := self._find_run(config)) is not None:
            return Made([run], steps)
        train_chain(chain, self.out / config.run_name, ignore_progress)
        return Made([self.out / config.run_name], steps)

    def _find_run(self, config: Experiment) -> Path | None:
        """Return the folder of a finished run with these settings, or None."""
        folder = None if self.runs is None else self.runs / config.run_name
        return folder if folder and (folder / RESULT).exists() and read_config(folder) == config else None

    @property
    def low(self) -> str:
        return "bfp8/tensor" if self.config.name == "imdb" else "bfp8"


def sgd(work: Work) -> Made:
    return work.chain("sgdfp")


def sgd_estimated(work: Work) -> Made:
    """The same network with batch normalization as rounded copies and SWAG have it: so they can be compared."""
    return replace(sgd(work), batch_norm=True)


def nearest(work: Work) -> Made:
    """One network rounded to 8 bits after training."""
    return _copies(work, "nearest", "bfp8", 1)


def copies(work: Work) -> Made:
    return _copies(work, "stochastic", "bfp8", COPIES)


def copies_in_few_bits(work: Work) -> Made:
    return _copies(work, "stochastic", FEW_BITS, COPIES)


def _copies(work: Work, rounding: Any, format: str, count: int) -> Made:
    trained = sgd(work)
    model = build_network(work.config, work.data)
    weights = stores.last(trained.folders[0])
    members = (stores.rounded(weights, model, format, rounding, seed) for seed in range(count))
    # A sample is stored in whole bytes, so that numbers of fewer bits are kept in 8, on which grid they are too.
    folder = stores.write(work.folder(f"{rounding}-{format}"), model, members, "bfp8")
    return Made([folder], trained.steps, batch_norm=True)


def ensemble(work: Work) -> Made:
    return _join([sgd(member) for member in _members(work)])


def _members(work: Work) -> list[Work]:
    """Return the work of the members of an ensemble: this one, and others that ensembles of other seeds do not share."""
    first = 100 + work.config.seed * MEMBERS
    return [work, *(replace(work, config=replace(work.config, seed=first + i)) for i in range(1, MEMBERS))]


def _join(made: list[Made]) -> Made:
    return Made([m.folders[0] for m in made], sum(m.steps for m in made))


def swag(work: Work) -> Made:
    """SGD goes on with a constant learning rate, and leaves snapshots; batch normalization is estimated for each draw."""
    trained = sgd(work)
    epochs = max(1, round(work.config.epochs * SWAG_SHARE))
    config = replace(work.config, method="sgdfp", format=None, epochs=epochs)
    chain = prepare_chain(config, work.data, trained.folders[0])
    decays = not isinstance(chain.schedule, ql.ConstantLR)
    for group in chain.sampler.param_groups:
        group["lr"] = group["initial_lr"] = config.first_lr * (SWAG_LR if decays else 1.0)
    schedule = ql.ConstantLR(chain.sampler, chain.schedule.total_steps, stores.SNAPSHOTS, burn_in=0.0)
    folder = work.folder("swag-snapshots")
    train_chain(replace(chain, schedule=schedule), folder, ignore_progress)
    snapshots = [dict(sample.decode()) for sample in ql.SampleStore.open(folder)]
    model = build_network(config, work.data)
    draws = stores.write(work.folder("swag"), model, stores.swag(snapshots, model, config.seed), None)
    return Made([draws], trained.steps + chain.schedule.total_steps, batch_norm=True)


def sgld(work: Work) -> Made:
    return work.chain("sgldfp")


def corrected(work: Work) -> Made:
    return work.chain("vc-sgldlp-l", work.low)


def cyclical(work: Work) -> Made:
    return work.chain("vc-csgldlp-l", work.low)


def rms(work: Work) -> Made:
    return _with_sampler(work, "rms", "vc-sgldlp-l", _make_rms)


def rms_without_noise(work: Work) -> Made:
    return _with_sampler(work, "rms-sgd", "sgdfp", _make_rms)


def sghmc(work: Work) -> Made:
    return _with_sampler(work, "sghmc", "vc-sgldlp-l", _make_sghmc)


def momentum(work: Work) -> Made:
    return _with_sampler(work, "momentum", "sgdfp", _make_sghmc)


def momentum_ensemble(work: Work) -> Made:
    return _join([momentum(member) for member in _members(work)])


def _make_rms(work: Work, chain: Chain, settings: dict[str, Any]) -> ql.SGLD:
    """Make the sampler with gains that are frozen in the middle of burn-in."""
    frozen = ql.RMS(freeze_after=max(1, int(chain.schedule.total_steps * work.config.burn_in / 2)))
    return ql.SGLD(chain.model.parameters(), settings.pop("lr") * RMS_LR, **settings, preconditioner=frozen)


def _make_sghmc(work: Work, chain: Chain, settings: dict[str, Any]) -> ql.SGHMC:
    lr = settings.pop("lr") * SGHMC_LR
    return ql.SGHMC(chain.model.parameters(), lr, **settings, friction=FRICTION, integrator="splitting")


def _with_sampler(
    work: Work, name: str, method: MethodName, make: Callable[[Work, Chain, dict[str, Any]], Any]
) -> Made:
    """Run the chain of a method with another sampler, that of SGD without noise."""
    low = work.low if method == "vc-sgldlp-l" else None
    config = replace(work.config, method=method, format=low)
    chain = prepare_chain(config, work.data)
    settings = {
        "lr": config.first_lr, "num_data": len(work.data.train), "weight_decay": config.weight_decay,
        "temperature": config.temperature if config.method_settings.noise else 0.0,
        "weights": low, "gradients": low, "seed": config.seed,
    }  # fmt: skip
    sampler = make(work, chain, settings)
    schedule = config.schedule(sampler, chain.schedule.total_steps)
    folder = work.folder(name)
    train_chain(replace(chain, sampler=sampler, schedule=schedule), folder, ignore_progress)
    return Made([folder], schedule.total_steps)


ESTIMATED = "SGD, batch normalization estimated"  # of networks that have some
ROWS: dict[str, Callable[[Work], Made]] = {
    "SGD": sgd,
    ESTIMATED: sgd_estimated,
    "SGD, rounded to bfp8 after training": nearest,
    f"{COPIES} stochastic roundings of SGD to bfp8 (LPE-BSR)": copies,
    f"{COPIES} stochastic roundings of SGD to {FEW_BITS} (LPE-BSR)": copies_in_few_bits,
    f"deep ensemble of {MEMBERS}, SGD": ensemble,
    "SWAG": swag,
    "SGD with momentum": momentum,
    f"deep ensemble of {MEMBERS}, SGD with momentum": momentum_ensemble,
    "SGD with RMS gains": rms_without_noise,
    "SGLD in float32": sgld,
    "VC SGLDLP-L, 8 bits": corrected,
    "VC cSGLDLP-L, 8 bits": cyclical,
    "VC SGLDLP-L with RMS gains, 8 bits": rms,
    "VC SGHMC, splitting, 8 bits": sghmc,
}
