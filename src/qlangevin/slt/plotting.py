"""Pictures of estimates: traces of the chains, and the coefficients of chains and parts. matplotlib is imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .traces import Traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_estimate"]


def draw_estimate(result: Traces) -> Figure:
    """Draw the running mean of each chain's trace, and beside it λ̂ of each chain; below that the parts, if there are several."""
    from matplotlib.figure import Figure

    parts: list[Traces] = [*result.parts.values()] or [result]
    rows = 1 if len(parts) == 1 else 2
    figure = Figure(figsize=(8, 3.2 * rows), layout="constrained")
    axes: Any = figure.subplots(rows, 2, width_ratios=(2, 1), squeeze=False)
    _draw_traces(axes[0, 0], result)
    _draw_chains(axes[0, 1], result)
    if rows == 2:
        axes[1, 1].remove()
        _draw_parts(axes[1, 0], parts)
    return figure


def _draw_traces(ax: Any, result: Traces) -> None:
    burn_in, trace = result.settings.burn_in, result.trace
    width = max(1, trace.shape[1] // 50)
    for chain, values in enumerate(trace):
        smooth = np.convolve(values, np.ones(width) / width, "valid")
        ax.plot(np.arange(len(smooth)) + width, smooth, lw=0.9, label=f"chain {chain}" if len(trace) <= 6 else None)
    ax.axhline(result.mean, color="k", lw=0.8)
    if burn_in:
        ax.axvspan(0, burn_in, color="k", alpha=0.07, lw=0)
    ax.set(xlabel="step", ylabel="nβ (L(w) - L(w*))", title=f"mean of {width} steps; burn-in shaded", xlim=(0, None))
    if len(trace) <= 6:
        ax.legend(fontsize="x-small", frameon=False)


def _draw_chains(ax: Any, result: Traces) -> None:
    values = result.per_chain
    ax.plot(values, np.arange(len(values)), "o", ms=4)
    ax.axvline(result.mean, color="k", lw=0.8)
    ax.axvspan(result.mean - result.stderr, result.mean + result.stderr, color="k", alpha=0.1, lw=0)
    ax.set(xlabel="λ̂", ylabel="chain", title=f"{result.mean:.4g} ± {result.stderr:.2g}, R-hat {result.r_hat:.3f}")


def _draw_parts(ax: Any, parts: list[Traces]) -> None:
    places = np.arange(len(parts))
    ax.errorbar([p.mean for p in parts], places, xerr=[p.stderr for p in parts], fmt="o", ms=4, lw=0.9)
    ax.set_yticks(places, [p.name for p in parts])
    ax.invert_yaxis()
    ax.set(xlabel="λ̂", title="parts")
