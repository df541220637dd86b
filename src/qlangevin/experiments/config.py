"""What all experiments have in common: a typed configuration.

It is what the command line takes, what is saved beside a result, and what a run that goes on reads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, TypeAlias

from torch import nn
from torch.optim.optimizer import Optimizer

from .._validate import check_fraction, check_integer, check_number
from ..distributed.wire import parse_wire_format
from ..quantization.formats import parse
from ..quantization.random import Key
from ..sampling.schedules import ConstantLR, CyclicalLR, LinearDecayLR, Schedule, StepDecayLR
from .data.datasets import Data, Name
from .methods import METHODS, Method, MethodName

__all__ = ["Experiment", "Row"]

Row: TypeAlias = tuple[MethodName, str | None]  # of a table or figure: a method and a format, None for full precision


@dataclass(frozen=True)
class Experiment(ABC):
    """What all experiments have in common."""

    method: MethodName = "vc-sgldlp-l"
    """Which of the paper's methods."""
    format: str | None = None
    """Number format of weights and gradients, such as fixed8.6 or bfp8; the experiment's own by default."""
    activations: str = "auto"
    """Format of activations and errors: a name, "same", "full", or "auto" (full with fixed point, else the same)."""
    seed: int = 0
    """Seed of the first weights, the order of the data and all noise."""
    epochs: int = 20
    """Times through the training set."""
    batch: int = 64
    """Examples a step."""
    lr: float = 0.1
    """Learning rate, for the mean loss."""
    weight_decay: float = 1e-4
    """Precision of the Gaussian prior over the number of training examples."""
    temperature: float = 1.0
    """Scales the noise; 1 is the posterior. SGD has none."""
    samples: int = 50
    """Samples to store and average over; SGD keeps its last weights."""
    burn_in: float = 0.5
    """Share of the steps before the first sample."""
    cycles: int = 5
    """Cycles of the cyclical methods."""
    cycle_samples: int = 10
    """Samples of each cycle."""
    exploration: float = 0.8
    """Share of a cycle before its first sample."""
    limit_train: int | None = None
    """Train on the first examples only; a scaled-down run, and the result says so."""
    limit_test: int | None = None
    """Test with the first examples only."""
    workers: int = 0
    """Processes that prepare batches."""
    chains: int = 1
    """Independent chains, averaged over together; side by side, or shared by the ranks of torchrun."""
    wire: str | None = None
    """Format of gradients between ranks of one chain, such as bfp8/64, which is then Q_G; full precision by default."""

    name: ClassVar[str]
    data: ClassVar[Name]
    default_format: ClassVar[str]
    schedule_type: ClassVar[type[ConstantLR | LinearDecayLR | StepDecayLR]]
    rows: ClassVar[tuple[Row, ...]]  # of the paper's figure or table

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"there is no method {self.method!r}; there are {', '.join(METHODS)}")
        object.__setattr__(self, "format", self._checked_format())
        if self.activations not in ("auto", "same", "full"):
            parse(self.activations)
        Key(self.seed)
        for f in fields(self):  # those of one experiment, such as its width, too
            if f.type == "int" and f.name not in ("seed", "workers"):
                check_integer(f.name, getattr(self, f.name), 1)
        for name in ("limit_train", "limit_test"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.wire is not None:
            object.__setattr__(self, "wire", str(parse_wire_format(self.wire)))
            if self.low is None and self.wire != "fp32":
                raise ValueError(f"{self.how.name} is in full precision; leave --wire={self.wire} out")
        check_integer("workers", self.workers, 0)
        check_number("lr", self.lr)
        check_number("weight_decay", self.weight_decay)
        check_number("temperature", self.temperature)
        check_fraction("burn_in", self.burn_in)
        check_fraction("exploration", self.exploration)

    def _checked_format(self) -> str:
        if self.how.low:
            return str(parse(self.format or self.default_format))
        if self.format not in (None, "fp32"):
            raise ValueError(f"{self.how.name} is in full precision; leave --format={self.format} out")
        return "fp32"

    @property
    def how(self) -> Method:
        """The method, as settings."""
        return METHODS[self.method]

    @property
    def low(self) -> str | None:
        """Format of weights and gradients, None for full precision."""
        return self.format if self.how.low else None

    @property
    def activation_format(self) -> str | None:
        """Format of activations and errors, None for full precision."""
        if self.low is None or self.activations == "full":
            return None
        if self.activations == "auto":
            return self.low if parse(self.low).has_exponents else None
        return self.low if self.activations == "same" else self.activations

    @abstractmethod
    def model(self, data: Data) -> nn.Module:
        """The network, untrained."""

    @property
    def beginning(self) -> Experiment | None:
        """A run to do first, whose last weights this one begins with."""
        return None

    @property
    def length_in_epochs(self) -> int:
        return self.epochs

    @property
    def first_lr(self) -> float:
        """The learning rate the schedule begins with."""
        return self.lr

    def schedule(self, sampler: Optimizer, total_steps: int) -> Schedule:
        """Learning rates and the moments to collect a sample; SGD keeps what it ends with."""
        if self.how.cyclical:
            return CyclicalLR(sampler, total_steps, self.cycles, self.cycle_samples, exploration=self.exploration)
        samples = self.samples if self.how.noise else 1
        return self.schedule_type(sampler, total_steps, samples, burn_in=self.burn_in)

    def load_options(self) -> dict[str, Any]:
        """What this experiment asks of `data.load` besides the name."""
        return {"limit_train": self.limit_train, "limit_test": self.limit_test, "seed": self.seed}

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        """(here, in the paper) for each setting that differs, besides those that say which run it is."""
        own = {f.name: f.default for f in fields(self)}
        left_out = ("method", "format", "activations", "seed", "workers", "chains", "wire")
        here = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: (value, own[name]) for name, value in here.items() if value != own[name]}

    @property
    def scaled(self) -> list[str]:
        """In what the run is smaller, or otherwise other, than the paper's: in words."""
        return [
            f"{name.replace('_', ' ')} {here}" + (f" instead of {paper:g}" if paper is not None else "")
            for name, (here, paper) in self._changed().items()
        ] + ([f"gradients between ranks in {self.wire}"] if self.wire not in (None, "fp32") else [])

    @property
    def command(self) -> str:
        """What to type to get this run again."""
        given = {"method": self.method, "format": self.format, "seed": self.seed}
        given |= {} if self.activations == "auto" else {"activations": self.activations}
        given |= {name: here for name, (here, _) in self._changed().items()}
        given |= {"chains": self.chains} if self.chains > 1 else {}
        given |= {"wire": self.wire} if self.wire else {}
        options = (f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        return f"qlangevin run {self.name} {' '.join(options)}"

    def to_json(self) -> dict[str, Any]:
        return {"experiment": self.name, **asdict(self)}

    @property
    def run_name(self) -> str:
        """A name for the folder of the run."""
        chains = f"-chains{self.chains}" if self.chains > 1 else ""
        return f"{self.method}-{self.format}-seed{self.seed}{chains}".replace("/", "_")
