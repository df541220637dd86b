"""Typed configuration of an experiment: the options of the command line, saved beside a result and read to resume a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from torch import nn
from torch.optim.optimizer import Optimizer

from .._validate import check_fraction, check_integer, check_number
from ..distributed.wire import parse_wire_format
from ..quantization.formats import parse
from ..quantization.random import Key
from ..sampling.schedules import ConstantLR, CyclicalLR, LinearDecayLR, Schedule, StepDecayLR
from .data import Data, DatasetName, load_dataset
from .methods import METHODS, Method, MethodName

__all__ = ["CHANGE_NO_NUMBER", "MAY_DIFFER_IN_SEEDS", "Experiment", "PaperRow"]

PaperRow: TypeAlias = tuple[MethodName, str | None]  # of a table or figure: method and format, None for full precision

# Settings by what they decide. Folders, --jobs, --timeout and the number of ranks are no settings: they are not saved with a run.
CHANGE_NO_NUMBER = ("workers",)  # a run may be resumed with others
MAY_DIFFER_IN_SEEDS = ("seed", *CHANGE_NO_NUMBER)  # of runs whose scores are averaged: each estimates the same number
SAME_LAW = (
    "seed",
    "chains",
    *CHANGE_NO_NUMBER,
)  # of runs whose samples are averaged: which chains of one law, and how many
SCORED_ON = ("limit_test",)  # the test set; of no consequence for samples


@dataclass(frozen=True)
class Experiment(ABC):
    """Settings that all experiments have in common; a preset adds its own, its data and its network."""

    method: MethodName = "vc-sgldlp-l"
    """Method of the paper."""
    format: str | None = None
    """Number format of weights and gradients, such as fixed8.6 or bfp8; by default that of the experiment."""
    activations: str = "auto"
    """Format of activations and errors: a name, "same", "full", or "auto" (full with fixed point, else the same)."""
    seed: int = 0
    """Seed of the initial weights, the order of the data and all noise."""
    epochs: int = 20
    """Passes over the training set."""
    batch: int = 64
    """Examples per step."""
    lr: float = 0.1
    """Learning rate, with the loss a mean over the batch."""
    weight_decay: float = 1e-4
    """Precision of the Gaussian prior, divided by the number of training examples."""
    temperature: float = 1.0
    """Temperature of the posterior; 1 samples the posterior itself. SGD ignores it."""
    samples: int = 50
    """Samples to store and average over; SGD stores its last weights only."""
    burn_in: float = 0.5
    """Fraction of the steps before the first sample."""
    cycles: int = 5
    """Cycles of the cyclical methods."""
    cycle_samples: int = 10
    """Samples per cycle."""
    exploration: float = 0.8
    """Fraction of a cycle before its first sample."""
    limit_train: int | None = None
    """Train on the first examples only; the result records that the run is scaled down."""
    limit_test: int | None = None
    """Test on the first examples only."""
    workers: int = 0
    """Processes that prepare batches."""
    chains: int = 1
    """Independent chains, averaged together; run in parallel, or shared by the ranks of torchrun."""
    wire: str | None = None
    """Format of gradients sent between the ranks of one chain, such as bfp8/64; replaces Q_G. Full precision by default."""

    name: ClassVar[str]
    data: ClassVar[DatasetName]
    default_format: ClassVar[str]
    schedule_type: ClassVar[type[ConstantLR | LinearDecayLR | StepDecayLR]]
    rows: ClassVar[tuple[PaperRow, ...]]  # of the paper's figure or table

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"there is no method {self.method!r}; there are {', '.join(METHODS)}")
        object.__setattr__(self, "format", self._checked_format())
        if self.activations not in ("auto", "same", "full"):
            parse(self.activations)
        Key(self.seed)
        for f in fields(self):  # also those of a preset, such as its width
            if f.type == "int" and f.name not in ("seed", "workers"):
                check_integer(f.name, getattr(self, f.name), 1)
        for name in ("limit_train", "limit_test"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.wire is not None:
            object.__setattr__(self, "wire", str(parse_wire_format(self.wire)))
            if self.weight_format is None and self.wire != "fp32":
                raise ValueError(f"{self.method_settings.name} is in full precision; leave --wire={self.wire} out")
        check_integer("workers", self.workers, 0)
        check_number("lr", self.lr)
        check_number("weight_decay", self.weight_decay)
        check_number("temperature", self.temperature)
        check_fraction("burn_in", self.burn_in)
        check_fraction("exploration", self.exploration)

    def _checked_format(self) -> str:
        if self.method_settings.low_precision:
            return str(parse(self.format or self.default_format))
        if self.format not in (None, "fp32"):
            raise ValueError(f"{self.method_settings.name} is in full precision; leave --format={self.format} out")
        return "fp32"

    @property
    def method_settings(self) -> Method:
        """Settings of the method."""
        return METHODS[self.method]

    @property
    def weight_format(self) -> str | None:
        """Format of weights and gradients, None for full precision."""
        return self.format if self.method_settings.low_precision else None

    @property
    def activation_format(self) -> str | None:
        """Format of activations and errors, None for full precision."""
        if self.weight_format is None or self.activations == "full":
            return None
        if self.activations == "auto":
            return self.weight_format if parse(self.weight_format).has_exponents else None
        return self.weight_format if self.activations == "same" else self.activations

    @abstractmethod
    def model(self, data: Data) -> nn.Module:
        """Build the network, untrained."""

    @property
    def warm_start(self) -> Experiment | None:
        """Run to do first, whose last weights this one starts from; None to start from random weights."""
        return None

    @property
    def length_in_epochs(self) -> int:
        """Epochs of this run, without those of its warm start."""
        return self.epochs

    @property
    def first_lr(self) -> float:
        """Initial learning rate of the schedule."""
        return self.lr

    def schedule(self, sampler: Optimizer, total_steps: int) -> Schedule:
        """Build the schedule of learning rates and samples; SGD collects only its last weights."""
        if self.method_settings.cyclical:
            return CyclicalLR(sampler, total_steps, self.cycles, self.cycle_samples, exploration=self.exploration)
        samples = self.samples if self.method_settings.noise else 1
        return self.schedule_type(sampler, total_steps, samples, burn_in=self.burn_in)

    @property
    def law(self) -> dict[str, Any]:
        """Settings that decide the law of the samples; runs that share it can be averaged, as chains of one target.

        Formats are compared by what they come to: activations "auto" with the format it stands for, no wire with an fp32 one.
        """
        left_out = (*SAME_LAW, *SCORED_ON)
        settings = {name: value for name, value in self.to_json().items() if name not in left_out}
        wire = None if self.wire == "fp32" else self.wire
        return settings | {"activations": self.activation_format, "wire": wire}

    def load_data(self, data_dir: Path | None) -> Data:
        """Load the data set of the experiment; download it if it is missing and ``data_dir`` is None."""
        return load_dataset(self.data, data_dir, **self.load_options())

    def load_options(self) -> dict[str, Any]:
        """Options of `load_dataset` besides the name and the folder."""
        return {"limit_train": self.limit_train, "limit_test": self.limit_test, "seed": self.seed}

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        """Return (here, in the paper) for each setting that differs, without those that identify the run."""
        own = {f.name: f.default for f in fields(self)}
        left_out = ("method", "format", "activations", "wire", *SAME_LAW)
        here = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: (value, own[name]) for name, value in here.items() if value != own[name]}

    @property
    def scaled(self) -> list[str]:
        """Descriptions of the settings in which the run differs from the paper's."""
        return [
            f"{name.replace('_', ' ')} {here}" + (f" instead of {paper:g}" if paper is not None else "")
            for name, (here, paper) in self._changed().items()
        ] + ([f"gradients between ranks in {self.wire}"] if self.wire not in (None, "fp32") else [])

    @property
    def command(self) -> str:
        """Command that reproduces this run."""
        given = {"method": self.method, "format": self.format, "seed": self.seed}
        given |= {} if self.activations == "auto" else {"activations": self.activations}
        given |= {name: here for name, (here, _) in self._changed().items()}
        given |= {"chains": self.chains} if self.chains > 1 else {}
        given |= {"wire": self.wire} if self.wire else {}
        options = (f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        return f"qlangevin run {self.name} {' '.join(options)}"

    def to_json(self) -> dict[str, Any]:
        """Return the configuration as JSON; `presets.from_json` reads it."""
        return {"experiment": self.name, **asdict(self)}

    @property
    def run_name(self) -> str:
        """Name of the run, and of its folder by default."""
        chains = f"-chains{self.chains}" if self.chains > 1 else ""
        return f"{self.method}-{self.format}-seed{self.seed}{chains}".replace("/", "_")
