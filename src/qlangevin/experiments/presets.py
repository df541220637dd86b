"""The experiments of the paper, one typed configuration each.

A configuration is what the command line takes, what is saved beside a result and what a run that goes on reads. What the paper
leaves open is chosen here and said at its field:

    temperature   1 on MNIST, where the posterior itself is the aim; 0.001 for the deep networks, as in the authors' code
    burn-in       half of the steps on MNIST; elsewhere what makes the samples one an epoch, the last of the run
    samples       50 on MNIST (five an epoch)
    fixed point   fixed8.8 for the ResNet, as in the authors' code: its weights are all below 1/2
    activations   in full precision where weights are in fixed point, which the paper says of CIFAR and IMDB. On MNIST errors of
                  the mean loss are far below the gap of 2 to 6 fractional bits, and nothing is learned from them
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, TypeAlias

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..checks import fraction, number, whole
from ..formats import BlockFloat, parse
from ..random import Key
from ..schedules import ConstantLR, CyclicalLR, LinearDecayLR, Schedule, StepDecayLR
from .data import Data, Name
from .methods import METHODS, Method, MethodName
from .models import MLP, LogisticRegression, LSTMClassifier, ResNet18

__all__ = ["EXPERIMENTS", "Experiment", "from_json"]

FULL: tuple[MethodName, ...] = ("sgldfp", "sgdfp")
LOW: tuple[MethodName, ...] = ("naive-sgldlp-l", "vc-sgldlp-l", "sgdlp-l", "sgldlp-f", "sgdlp-f")
CYCLICAL: tuple[MethodName, ...] = ("vc-csgldlp-l", "csgldlp-f")
Row: TypeAlias = tuple[MethodName, str | None]


def _rows(full: Iterable[MethodName], *low: tuple[str, Iterable[MethodName]]) -> tuple[Row, ...]:
    """Methods in full precision, then groups of methods in a format."""
    return (*((method, None) for method in full), *((method, format) for format, group in low for method in group))


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
                whole(f.name, getattr(self, f.name), 1)
        for name in ("limit_train", "limit_test"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 1)
        whole("workers", self.workers, 0)
        number("lr", self.lr)
        number("weight_decay", self.weight_decay)
        number("temperature", self.temperature)
        fraction("burn_in", self.burn_in)
        fraction("exploration", self.exploration)

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
            return self.low if isinstance(parse(self.low), BlockFloat) else None
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
        left_out = ("method", "format", "activations", "seed", "workers")
        here = {name: value for name, value in asdict(self).items() if name not in left_out}
        return {name: (value, own[name]) for name, value in here.items() if value != own[name]}

    @property
    def scaled(self) -> list[str]:
        """In what the run is smaller, or otherwise other, than the paper's: in words."""
        return [
            f"{name.replace('_', ' ')} {here}" + (f" instead of {paper:g}" if paper is not None else "")
            for name, (here, paper) in self._changed().items()
        ]

    @property
    def command(self) -> str:
        """What to type to get this run again."""
        given = {"method": self.method, "format": self.format, "seed": self.seed}
        given |= {} if self.activations == "auto" else {"activations": self.activations}
        given |= {name: here for name, (here, _) in self._changed().items()}
        options = (f"--{name.replace('_', '-')} {value}" for name, value in given.items())
        return f"qlangevin run {self.name} {' '.join(options)}"

    def to_json(self) -> dict[str, Any]:
        return {"experiment": self.name, **asdict(self)}

    @property
    def run_name(self) -> str:
        """A name for the folder of the run."""
        return f"{self.method}-{self.format}-seed{self.seed}".replace("/", "_")


@dataclass(frozen=True)
class Digits(Experiment):
    """scikit-learn's 8x8 digits with a network of one hidden layer; nothing to download, and done in seconds."""

    batch: int = 50
    epochs: int = 200
    weight_decay: float = 1e-3
    temperature: float = 0.01
    hidden: int = 100
    """Units of the hidden layer."""
    name = "digits"
    data = "digits"
    default_format = "fixed8.4"
    schedule_type = ConstantLR
    rows = _rows(FULL, ("fixed8.4", LOW))

    def model(self, data: Data) -> nn.Module:
        return MLP(math.prod(data.shape), data.classes, self.hidden)


@dataclass(frozen=True)
class MnistLogistic(Experiment):
    """MNIST with logistic regression: Figure 2 (a). The prior is N(0, 1/6)."""

    name = "mnist-logistic"
    data = "mnist"
    default_format = "fixed8.6"
    schedule_type = ConstantLR
    rows = _rows(FULL, *((f"fixed{2 + f}.{f}", LOW) for f in range(2, 15, 2)))

    def model(self, data: Data) -> nn.Module:
        return LogisticRegression(math.prod(data.shape), data.classes)


@dataclass(frozen=True)
class MnistMLP(Experiment):
    """MNIST with one hidden layer of 100 units: Figure 2 (b)."""

    hidden: int = 100
    """Units of the hidden layer."""
    name = "mnist-mlp"
    data = "mnist"
    default_format = "fixed8.6"
    schedule_type = ConstantLR
    rows = _rows(FULL, *((f"fixed{2 + f}.{f}", LOW) for f in range(2, 15, 2)))

    def model(self, data: Data) -> nn.Module:
        return MLP(math.prod(data.shape), data.classes, self.hidden)


def _channels_last(model: nn.Module) -> nn.Module:
    """The layout that convolutions on CPUs compute in: a step takes a fifth less time, and memory."""
    return model.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]


@dataclass(frozen=True)
class Cifar10(Experiment):
    """CIFAR-10 with ResNet-18: Tables 1 and 2. Fixed point is fixed8.8."""

    epochs: int = 245
    batch: int = 128
    lr: float = 0.5
    weight_decay: float = 5e-4
    temperature: float = 1e-3
    burn_in: float = 195 / 245
    cycles: int = 7
    cycle_samples: int = 5
    exploration: float = 30 / 35
    width: int = 64
    """Channels of the first stage of the ResNet."""
    name = "cifar10"
    data: ClassVar[Name] = "cifar10"
    default_format = "bfp8"
    schedule_type = LinearDecayLR
    rows = _rows((*FULL, "csgldfp"), ("fixed8.8", LOW), ("bfp8", (*LOW, *CYCLICAL)))

    def model(self, data: Data) -> nn.Module:
        return _channels_last(ResNet18(data.classes, "cifar", self.width))


@dataclass(frozen=True)
class Cifar100(Cifar10):
    """CIFAR-100 with ResNet-18: Tables 1 and 2."""

    name = "cifar100"
    data: ClassVar[Name] = "cifar100"


@dataclass(frozen=True)
class Imdb(Experiment):
    """IMDB reviews with a two-layer LSTM: Table 1. Block floating point has one block a tensor."""

    epochs: int = 50
    batch: int = 80
    lr: float = 0.3
    weight_decay: float = 5e-4
    temperature: float = 1e-3
    samples: int = 20
    burn_in: float = 30 / 50
    cycles: int = 1
    cycle_samples: int = 20
    exploration: float = 30 / 50
    length: int = 400
    """Words of a review; the rest is cut off."""
    embedding: int = 100
    """Numbers a word becomes."""
    hidden: int = 256
    """Units of each LSTM layer."""
    name = "imdb"
    data = "imdb"
    default_format = "bfp8/tensor"
    schedule_type = LinearDecayLR
    rows = _rows((*FULL, "csgldfp"), ("fixed8.6", LOW), ("bfp8/tensor", (*LOW, *CYCLICAL)))

    def model(self, data: Data) -> nn.Module:
        return LSTMClassifier(data.words or 0, data.classes, self.embedding, self.hidden)

    def load_options(self) -> dict[str, Any]:
        return {**super().load_options(), "length": self.length}


@dataclass(frozen=True)
class ImageNet(Experiment):
    """ImageNet with ResNet-18: Table 3. SGD for 90 epochs, and from there SGLD for 10."""

    epochs: int = 90
    batch: int = 256
    lr: float = 0.2
    temperature: float = 1e-3
    samples: int = 20
    burn_in: float = 0.0
    sampling_epochs: int = 10
    """Epochs of SGLD, after ``epochs`` of SGD in the same precision; at the learning rate SGD ends with."""
    width: int = 64
    """Channels of the first stage of the ResNet."""
    size: int = 224
    """Pixels of a side."""
    name = "imagenet"
    data = "imagenet"
    default_format = "bfp8"
    schedule_type = StepDecayLR
    rows = _rows(FULL, ("bfp8", ("sgldlp-f", "sgdlp-f")))

    def model(self, data: Data) -> nn.Module:
        return _channels_last(ResNet18(data.classes, "imagenet", self.width))

    @property
    def beginning(self) -> Experiment | None:
        return replace(self, method=self.how.begins) if self.how.noise else None

    @property
    def length_in_epochs(self) -> int:
        return self.sampling_epochs if self.how.noise else self.epochs

    @property
    def first_lr(self) -> float:
        return self.lr / 100 if self.how.noise and not self.how.cyclical else self.lr

    def schedule(self, sampler: Optimizer, total_steps: int) -> Schedule:
        if self.how.noise and not self.how.cyclical:
            return ConstantLR(sampler, total_steps, self.samples, burn_in=self.burn_in)
        return super().schedule(sampler, total_steps)

    def load_options(self) -> dict[str, Any]:
        return {**super().load_options(), "size": self.size}


EXPERIMENTS: dict[str, type[Experiment]] = {
    preset.name: preset for preset in (Digits, MnistLogistic, MnistMLP, Cifar10, Cifar100, Imdb, ImageNet)
}


def from_json(saved: Any) -> Experiment:
    """The configuration that `Experiment.to_json` gave."""
    preset = EXPERIMENTS.get(str(saved.get("experiment"))) if isinstance(saved, dict) else None
    if preset is None:
        raise ValueError(f"this is not the configuration of an experiment; there are {', '.join(EXPERIMENTS)}")
    known = {f.name for f in fields(preset)}
    given = {name: value for name, value in saved.items() if name != "experiment"}
    if wrong := sorted(given.keys() ^ known):
        raise ValueError(f"the configuration is of another version of {preset.name}: see {', '.join(wrong)}")
    try:
        return preset(**given)
    except (TypeError, OverflowError) as error:  # a list for a name, or a number of 400 digits
        raise ValueError(f"this is not a configuration of {preset.name}: {error}") from None
