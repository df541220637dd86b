"""Settings of an estimate, in the units of Lau et al. (2023) and devinterp, and the same in the units of our samplers.

A chain at the point w* with stepsize ε, inverse temperature nβ and localization γ is

    w' = w - ε/2 (nβ ∇L(w) + γ (w - w*)) + N(0, ε).

`SGLD` with learning rate lr, N data, temperature T and localization γ' is

    w' = w - lr (∇L(w) + γ'/N (w - w*)) + N(0, 2 lr T / N).

The two are the same with N = n, T = n / (nβ), lr = ε nβ / 2 and γ' = γ T: then lr γ'/N = ε γ / 2 and 2 lr T / N = ε.
With β = 1/log n the temperature is log n.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from .._validate import check_choice, check_integer, check_number
from ..quantization.formats import FP32, Format, parse
from ..sampling.preconditioner import RMS, parse_preconditioner
from ..sampling.sampler import Sampler
from ..sampling.sghmc import SGHMC
from ..sampling.sgld import SGLD

__all__ = ["Method", "Settings", "default_nbeta"]

Method: TypeAlias = Literal["sgld", "rms", "sghmc"]
LEAST_DATA = 3  # log n must be above 1: at n = 1 it is zero, at n = 2 the posterior would be sharper than Bayes'
RMS_DECAY, RMS_EPS = 0.99, 0.1  # of devinterp's RMSprop


def default_nbeta(num_data: int) -> float:
    """Return nβ = n / log n (Watanabe, 2013); raise ValueError for fewer than 3 data."""
    if num_data < LEAST_DATA:
        raise ValueError(
            f"nbeta = n / log n needs n >= {LEAST_DATA} data, got n = {num_data}; give more data, or nbeta itself"
        )
    return num_data / math.log(num_data)


@dataclass(frozen=True)
class Settings:
    """Validated settings of an estimate; ``lr`` is ε, ``localization`` γ."""

    lr: float
    nbeta: float
    localization: float
    num_data: int
    weights: str | None = "bf16"
    sampler: Method = "sgld"
    preconditioner: str | None = None
    friction: float = 0.1
    box: float | None = None
    chains: int = 4
    draws: int = 200
    burn_in: int = 0
    steps_between: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "nbeta"):
            if not check_number(name, getattr(self, name)) > 0:
                raise ValueError(f"{name} must be positive, got 0")
        check_number("localization", self.localization)
        check_choice("sampler", self.sampler, get_args(Method))
        for name, least in (("chains", 1), ("draws", 4), ("burn_in", 0), ("steps_between", 1), ("seed", 0)):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), least))

    @property
    def steps(self) -> int:
        """Steps of a chain."""
        return self.burn_in + self.draws * self.steps_between

    def is_draw(self, steps: int) -> bool:
        """Return True if the weights are a draw after this many steps."""
        past = steps - self.burn_in
        return past > 0 and past % self.steps_between == 0

    @property
    def temperature(self) -> float:
        """T = n / (nβ) of the sampler."""
        return self.num_data / self.nbeta

    @property
    def packed(self) -> Format | None:
        """The format that weights are packed in; None if they keep the dtype of the model."""
        return None if self.weights is None else parse(self.weights)

    @property
    def format_name(self) -> str:
        """The format of the chains' weights, for messages."""
        return self.weights or "full precision"

    def sampler_options(self) -> dict[str, Any]:
        """Return the settings in the units of `SGLD`: lr, num_data, temperature and localization, and what goes with them."""
        options: dict[str, Any] = {
            "lr": self.lr * self.nbeta / 2,
            "num_data": self.num_data,
            "temperature": self.temperature,
            "localization": self.localization * self.temperature,
            "box": self.box,
            "seed": self.seed,
        }
        if self.sampler == "sghmc":
            options["friction"] = self.friction
        return options | ({} if self.preconditioner is None else {"preconditioner": self.preconditioner})

    def make_sampler(self, params: Any, **more: Any) -> Sampler:
        """Return the sampler of a chain."""
        return (SGHMC if self.sampler == "sghmc" else SGLD)(params, **self.sampler_options(), **more)

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON's types."""
        return dataclasses.asdict(self)


def read_sampler(sampler: str | RMS, burn_in: int) -> tuple[Method, str | None]:
    """Return the method, and its preconditioner by name: gains are frozen after the burn-in unless they are given."""
    if isinstance(sampler, RMS):
        return "rms", str(parse_preconditioner(sampler))
    check_choice("sampler", sampler, get_args(Method))
    if sampler != "rms":
        return sampler, None  # type: ignore[return-value]
    return "rms", str(RMS(decay=RMS_DECAY, eps=RMS_EPS, freeze_after=burn_in or None))


def read_weights(weights: str | Format | None) -> str | None:
    """Return the format of the weights by name; None for full precision, which is that of the model's dtype."""
    return None if weights is None or parse(weights) == FP32 else str(parse(weights))
