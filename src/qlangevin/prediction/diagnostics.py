"""Convergence diagnostics of chains: R-hat and effective sample size, by ArviZ.

Draws are arrays [chain, draw, ...]. `summarize` takes them from anywhere; `predictions`, `log_likelihood` and `weights` get
them from a posterior. Of chains of different lengths they take the last n draws, n the length of the shortest.

Diagnose predictions: in weight space the chains of a network hardly ever agree, because its units can be permuted.
"""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._validate import check_choice
from ..storage.model_tensors import to_plain
from . import probabilities
from .probabilities import check_probabilities

__all__ = ["Summary", "log_likelihood", "predictions", "summarize", "to_arviz", "weights"]

Array: TypeAlias = Tensor | npt.NDArray[Any]
Arrays: TypeAlias = Array | Mapping[str, Array]
Method: TypeAlias = Literal["split", "rank"]
Floats: TypeAlias = npt.NDArray[np.float64]
Index: TypeAlias = int | slice | Tensor | tuple[int | slice | Tensor, ...]

MIN_DRAWS = 4  # a chain is split in two, and a variance takes two draws


class Chain(Protocol):
    """A posterior over the samples of one chain."""

    @property
    def members(self) -> Sequence[Mapping[str, Tensor]]: ...
    def samples(self, x: Any, /) -> Tensor: ...
    def __len__(self) -> int: ...


class Sampled(Protocol):
    """A posterior, as far as it is used here."""

    @property
    def chains(self) -> Sequence[Chain]: ...


@dataclass(frozen=True, eq=False)
class Summary:
    """Statistics of draws, each an array of the shape of one draw.

    Where a quantity is constant over all chains, R-hat is 0/0 and given as NaN; where it is constant within each chain but the
    chains differ, R-hat is infinite, or nearly so. ArviZ counts all its draws as effective.
    """

    mean: Floats
    sd: Floats
    mcse_mean: Floats
    ess_bulk: Floats
    ess_tail: Floats
    r_hat: Floats

    @property
    def stuck(self) -> int:
        """Number of quantities that never moved."""
        return int(np.isnan(self.r_hat).sum())

    @property
    def worst(self) -> tuple[float, float, float]:
        """(largest R-hat, least bulk ESS, least tail ESS) of what moved; NaN if nothing did."""
        moved = ~np.isnan(self.r_hat)
        if not moved.any():
            return math.nan, math.nan, math.nan
        return float(self.r_hat[moved].max()), float(self.ess_bulk[moved].min()), float(self.ess_tail[moved].min())


@overload
def summarize(draws: Array, *, method: Method = ...) -> Summary: ...
@overload
def summarize(draws: Mapping[str, Array], *, method: Method = ...) -> dict[str, Summary]: ...
def summarize(draws: Arrays, *, method: Method = "split") -> Summary | dict[str, Summary]:
    """Return mean, sd, Monte Carlo error of the mean, bulk and tail ESS and R-hat of each quantity in draws [chain, draw, ...].

    With chains split in halves of n draws, W the mean of their variances and B/n the variance of their means,

        R-hat = √((W (n - 1)/n + B/n) / W)     ``method="split"``

    and ``method="rank"`` is the larger one of the same for normalised ranks, plain and folded (Vehtari et al. 2021), for which
    ArviZ needs two chains. A quantity takes some milliseconds: of a million weights choose some with `weights`.
    """
    check_choice("method", method, get_args(Method))
    if isinstance(draws, Mapping):
        return {
            name: _summarize_one(name, _check_draws(name, array).astype(np.float64), method)
            for name, array in draws.items()
        }
    return _summarize_one("draws", _check_draws("draws", draws).astype(np.float64), method)


def _summarize_one(name: str, x: Floats, method: Method) -> Summary:
    chains, count = x.shape[:2]
    if chains < 1 or count < MIN_DRAWS:
        raise ValueError(f"{name} has {count} draws in each of {chains} chains; at least {MIN_DRAWS} draws are needed")
    if method == "rank" and chains < 2:
        raise ValueError(f"{name} has 1 chain, and method='rank' needs two or more; use method='split'")
    if bad := int((~np.isfinite(x)).sum()):
        raise ValueError(f"{name} must be finite, got {bad} numbers of {x.size} that are not: did a chain diverge?")
    az, half = import_arviz(), count // 2
    with np.errstate(divide="ignore", invalid="ignore"):  # where a quantity never moved
        if chains == 1:  # split here, because ArviZ 0.23 returns NaN: it requires two chains before it splits them
            r_hat = _apply(az.rhat, np.concatenate((x[:, :half], x[:, -half:])), "identity")
        else:
            r_hat = _apply(az.rhat, x, method)
        bulk, tail, mcse = _apply(az.ess, x, "bulk"), _apply(az.ess, x, "tail"), _apply(az.mcse, x, "mean")
    # For a constant whose mean is rounded, ArviZ divides one rounding error by another.
    r_hat = np.where(x.max((0, 1)) == x.min((0, 1)), np.nan, r_hat)
    mean, sd = np.asarray(x.mean((0, 1))), np.asarray(x.std((0, 1), ddof=1))
    return Summary(mean, sd, mcse, bulk, tail, r_hat)


def _apply(statistic: Any, x: Floats, method: str) -> Floats:
    """Apply one of ArviZ's functions to each quantity."""
    import xarray

    dims = ("chain", "draw", *(f"dim_{i}" for i in range(x.ndim - 2)))
    return np.asarray(statistic(xarray.Dataset({"x": (dims, x)}), method=method)["x"].values, np.float64)


def to_arviz(
    draws: Arrays, *, log_likelihood: Arrays | None = None, observed_data: Arrays | None = None,
    sample_stats: Mapping[str, Array] | None = None,
) -> Any:  # fmt: skip
    """Return the draws as `arviz.InferenceData`, for ArviZ's plots, `arviz.summary`, `arviz.loo` and its file formats.

    A bare array of draws is called "x", a bare ``log_likelihood`` [chain, draw, example] and ``observed_data`` [example] "y".
    """
    groups = {"posterior": _name_arrays("x", draws), "log_likelihood": _name_arrays("y", log_likelihood)}
    groups["sample_stats"] = sample_stats or {}
    given = {
        kind: {name: _check_draws(name, x) for name, x in group.items()} for kind, group in groups.items() if group
    }
    shapes = {f"{kind} {name}": x.shape[:2] for kind, group in given.items() for name, x in group.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"all must have the same number of chains and of draws, got {shapes}")
    if observed_data is not None:
        given["observed_data"] = {k: _to_numpy(v) for k, v in _name_arrays("y", observed_data).items()}
    with warnings.catch_warnings():  # ArviZ takes few draws for axes in the wrong order
        warnings.filterwarnings("ignore", "More chains", UserWarning)
        return import_arviz().from_dict(**given)


def _name_arrays(name: str, arrays: Arrays | None) -> Mapping[str, Array]:
    return {} if arrays is None else arrays if isinstance(arrays, Mapping) else {name: arrays}


def _check_draws(name: str, array: Array) -> npt.NDArray[Any]:
    x = _to_numpy(array)
    if x.ndim < 2:
        raise ValueError(f"{name} must be [chain, draw, ...], got shape {x.shape}; x[None] is one chain")
    return x


def _to_numpy(array: Array) -> npt.NDArray[Any]:
    if isinstance(array, Tensor):
        values = to_plain(array).cpu()
        array = (values.double() if values.is_floating_point() else values).numpy()  # NumPy has no bfloat16
    return np.asarray(array)


def import_arviz() -> Any:
    """Import ArviZ, which is slow, without its announcement of changes to come."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing a major refactor", FutureWarning)
        import arviz as module
    return module


def predictions(posterior: Sampled, x: Any) -> Tensor:
    """Return the prediction of each sample, [chain, draw, example, ...]: probabilities, or means."""
    chains, n = _equal_chains(posterior)
    with torch.no_grad():
        return torch.stack([chain.samples(x)[len(chain) - n :] for chain in chains])


def log_likelihood(posterior: Sampled, x: Any, labels: Tensor, *, noise: float | None = None) -> Tensor:
    """Return log p(y|x, θ) of each example under each sample, [chain, draw, example], float64 on the CPU.

    Predictions are probabilities and labels as in `metrics.evaluate`, classes along the posterior's ``class_dim``; an example
    with several labels or pixels has the sum of their log likelihoods. If the posterior's link is the identity,
    predictions are means of labels of the same shape, and

        log p(y|x, θ) = -(y - f(x))²/2σ² - log(2πσ²)/2

    with the posterior's ``noise`` for σ², or another variance given here.
    """
    if noise is None and getattr(posterior, "link", None) == "identity":
        noise = float(getattr(posterior, "noise", 0.0))
    if noise is not None and not 0 < noise < math.inf:
        raise ValueError(f"noise must be a variance, positive and finite, got {noise!r}")
    f, y = predictions(posterior, x).cpu(), labels.cpu()
    if noise is None:
        class_dim = getattr(posterior, "class_dim", None) or 1
        samples = [probabilities.move_classes(sample, y, class_dim) for sample in f.flatten(0, 1)]
        for sample in samples:
            check_probabilities(sample, y)
        each = torch.stack([probabilities.log_likelihood(sample, y) for sample in samples])
    elif f.shape[2:] == y.shape:
        each = -(y.double() - f.double()).square() / (2 * noise) - math.log(2 * math.pi * noise) / 2
    else:
        raise ValueError(f"shapes must be equal: predictions {tuple(f.shape[2:])} and labels {tuple(y.shape)}")
    return each.reshape(*f.shape[:3], -1).sum(-1)


def weights(posterior: Sampled, names: Sequence[str] | Mapping[str, Index]) -> dict[str, Tensor]:
    """Return parameters of each sample, name -> [chain, draw, ...]; with a mapping name -> index, only the entries chosen.

    ``weights(posterior, {"0.weight": (0, slice(5)), "0.bias": 3})``
    """
    names = [names] if isinstance(names, str) else names
    chosen: dict[str, Any] = dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, ...)
    chains, n = _equal_chains(posterior)
    drawn: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for chain in chains:
        for draw in range(len(chain) - n, len(chain)):
            member = chain.members[draw]  # once for all names: it is read from a file
            for name, index in chosen.items():
                drawn[name].append(to_plain(_parameter(member, name))[index])
    return {name: torch.stack(tensors).unflatten(0, (len(chains), n)) for name, tensors in drawn.items()}


def _parameter(member: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in member:
        near = difflib.get_close_matches(name, member, n=3, cutoff=0) or ["none"]
        raise ValueError(f"no parameter is called {name!r}; near to it are {', '.join(near)}")
    return member[name]


def _equal_chains(posterior: Sampled) -> tuple[Sequence[Chain], int]:
    """Return the chains, and the length of the shortest."""
    lengths = [len(chain) for chain in posterior.chains]
    if not lengths or min(lengths) == 0:
        raise ValueError(f"a posterior must have a sample in each chain, got chains of lengths {lengths}")
    return posterior.chains, min(lengths)
