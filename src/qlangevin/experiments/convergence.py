"""Convergence of a run: R-hat of the test set's log-likelihood along its chains, and the sentence said if it is too large.

R-hat compares the variance between chains, or between the halves of a single one, with the variance within them; it is 1 for
chains that have forgotten where they began. ArviZ is imported on first use: it takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from .methods import METHODS, method_name

__all__ = ["MAX_R_HAT", "chain_lengths", "convergence", "describe_non_convergence", "warn_of_non_convergence"]

MAX_R_HAT = 1.1
"""Beyond it we say that chains have not mixed, as Gelman and Rubin did. To trust an estimate of a single quantity ask for less:
Vehtari et al. (2021) advise 1.01, which the few samples of a network hardly ever reach."""

LONGER = "Run longer (--epochs), discard more of the beginning (--burn-in) or take larger steps (--lr)."
LONGER_CHAINS = (
    "Run longer (--epochs) or take larger steps (--lr); if that does not help, each chain stays in a mode of its own: take a "
    "cyclical method (--method) or more chains (--chains)."
)
LONGER_CYCLES = "Run longer (--epochs), with more cycles (--cycles), or explore longer in each (--exploration)."
STUCK = (
    "All samples of a chain have the same log-likelihood: it stands still, and R-hat is not defined. Take larger steps (--lr), a "
    "higher temperature (--temperature) or a format with a finer grid (--format)."
)


def convergence(log_likelihood: Tensor) -> dict[str, float | None]:
    """Return R-hat and effective sample size of chains (chain, draw), or of the halves of one; None if too short."""
    from ..prediction import diagnostics

    chains, draws = log_likelihood.shape
    if draws < _enough_draws(chains):
        return {"r_hat": None, "ess": None}
    r_hat, ess, _ = diagnostics.summarize(log_likelihood).worst
    known = math.isfinite(r_hat)
    return {"r_hat": r_hat if known else None, "ess": ess if known else None}


def _enough_draws(chains: int) -> int:
    """Return the draws of a chain that R-hat needs; a single chain is compared half with half."""
    from ..prediction.diagnostics import MIN_DRAWS

    return MIN_DRAWS if chains > 1 else 2 * MIN_DRAWS


def chain_lengths(result: Mapping[str, Any]) -> list[int]:
    """Return the number of samples of each chain in the trace of a result."""
    trace = result["trace"]
    return list(trace.get("chains") or [len(trace["steps"])])


def describe_non_convergence(result: Mapping[str, Any]) -> str | None:
    """Return one line on a result whose R-hat exceeds `MAX_R_HAT`: what it means and what to do. None if there is no cause."""
    r_hat, lengths = result.get("r_hat"), chain_lengths(result)
    if r_hat is None:
        return STUCK if _is_stuck(result["trace"]["log_likelihood"], lengths) else None
    if r_hat <= MAX_R_HAT:
        return None
    means, advice = "the chains have not mixed, and averages depend on where each began", LONGER_CHAINS
    if len(lengths) == 1:
        means, advice = (
            "the halves of the chain differ, it has not converged, and averages depend on where it began",
            LONGER,
        )
    method = METHODS.get(result["settings"]["method"])
    if method is not None and method.cyclical:
        advice = LONGER_CYCLES
    return f"R-hat {r_hat:.2f} of the log-likelihood: {means}. {advice}"


def _is_stuck(log_likelihood: Sequence[float], lengths: Sequence[int]) -> bool:
    """Return True if chains that are long enough for R-hat have the same value in all samples of each."""
    chains = [log_likelihood[begin:end] for begin, end in pairwise(accumulate(lengths, initial=0))]
    return min(lengths) >= _enough_draws(len(lengths)) and all(len(set(chain)) == 1 for chain in chains)


def warn_of_non_convergence(results: Sequence[Mapping[str, Any]]) -> str | None:
    """Return one line for a table of results, with the worst of them if there are several; None if all have converged."""
    found = [(result, text) for result in results if (text := describe_non_convergence(result))]
    if len(results) == 1 or not found:
        return found[0][1] if found else None
    worst, text = max(found, key=lambda pair: math.inf if pair[0].get("r_hat") is None else pair[0]["r_hat"])
    settings = worst["settings"]
    name = f"{method_name(settings['method'])} in {settings['format']} with seed {settings['seed']}"
    judged = sum(
        r.get("r_hat") is not None or describe_non_convergence(r) is not None for r in results
    )  # SGD has no R-hat
    return (
        f"{len(found)} of {judged} sampled runs have not converged (R-hat above {MAX_R_HAT}); the worst, {name}: {text}"
    )
