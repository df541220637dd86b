"""The figures of the demo."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..gaussian import GaussianResult
from ..report.looks import INK, styled
from .bands import Band, Z
from .images import ANGLES
from .regression import GRID
from .scores import Scored

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_bands", "draw_digits", "draw_gaussian"]

COLOURS = ("#7a7a7a", "#e69f00", "#0072b2", "#d55e00", "#009e73")  # of the methods on digits, in their order
NAMES = {"SGLDLP-F": "FP32 accumulator", "naive SGLDLP-L": "naive 8-bit", "VC SGLDLP-L": "corrected 8-bit"}
SHADES = {"SGLDLP-F": "#7a7a7a", "naive SGLDLP-L": "#d55e00", "VC SGLDLP-L": "#009e73"}


def _panels(count: int, height: float, **options: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=(6.4, height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


@styled
def draw_gaussian(law: GaussianResult) -> Figure:
    """Draw histograms of the samples over the density of the target."""
    figure, axes = _panels(3, 2.5, sharex=True, sharey=True)
    t = torch.linspace(-6, 6, 301)
    density = (-0.5 * t * t).exp() / math.sqrt(2 * math.pi)
    gap = float(law.points[1] - law.points[0])
    edges = torch.cat([law.points - gap / 2, law.points[-1:] + gap / 2])
    for ax, row, shares in zip(axes, law.rows, law.shares, strict=True):
        # One shape: hundreds of bars take a second to draw.
        ax.stairs((shares / gap).numpy(), edges.numpy(), fill=True, color=SHADES[row.method])
        ax.plot(t.numpy(), density.numpy(), color=INK, linewidth=1.2)
        ax.set_title(f"{NAMES[row.method]}\nvariance {row.variance:.2f} ± {row.standard_error:.2f}")
        ax.set(xlim=(-6, 6), xlabel="weight", yticks=[])
    return figure


@styled
def draw_bands(bands: Sequence[Band], mean: Tensor, sd: Tensor, data: tuple[Tensor, Tensor], label: str) -> Figure:
    """Draw the band of each sampler in colour, that of the reference as lines."""
    figure, axes = _panels(len(bands), 2.9, sharex=True, sharey=True)
    x = GRID.numpy()
    for ax, band in zip(axes, bands, strict=True):
        low, high = ((band.mean + side * Z * band.sd).numpy() for side in (-1, 1))
        ax.fill_between(x, low, high, color=band.method.colour, alpha=0.4, linewidth=0, label="sampled")
        ax.plot(x, band.mean.numpy(), color=band.method.colour, linewidth=1.2)
        for side in (-1, 1):
            edge = (mean + side * Z * sd).numpy()
            ax.plot(x, edge, color=INK, linewidth=1, linestyle="--", label=label if side < 0 else None)
        ax.plot(data[0].numpy(), data[1].numpy(), ".", color=INK, markersize=4)
        ax.set_title(f"{band.method.name}\nwidth {band.width:.2f}, covers {band.coverage:.1%}")
        ax.set(xlabel="x", xlim=(-2.5, 2.5), ylim=(-4.2, 4.2))
    axes[0].legend(fontsize=8, loc="lower right", handlelength=1.4)
    axes[0].set_ylabel("f(x), 95 % band")
    return figure


@styled
def draw_digits(scored: Sequence[Scored]) -> dict[str, Figure]:
    """Draw the curves of rotated digits, of rejection and of letters."""
    figures = {}
    for name in ("rotated", "rejected", "letters"):
        figures[name], axes = _panels(2 if name == "rotated" else 1, 3.1)
        for s, colour in zip(scored, COLOURS, strict=True):
            style: dict[str, Any] = {"color": colour, "linewidth": 1.5, "label": s.name}
            if "SGD" in s.name:
                style["linestyle"] = "--"
            for ax, x, y in _curves(name, axes, s):
                ax.plot(x, y, **style)
        _label(name, axes)
    return figures


def _curves(name: str, axes: Sequence[Axes], s: Scored) -> list[tuple[Any, Any, Any]]:
    """Return axes, x and y of the curves of one method."""
    if name == "rotated":
        return [
            (axes[0], ANGLES, [100 * e for e in s.by_angle["error"]]),
            (axes[1], ANGLES, s.by_angle["nll"]),
        ]
    if name == "rejected":
        return [(axes[0], range(0, 100, 10), [100 * e for e in s.rejection])]
    return [(axes[0], (100 * s.roc[0]).tolist(), (100 * s.roc[1]).tolist())]


def _label(name: str, axes: Sequence[Axes]) -> None:
    words = {
        "rotated": (("rotation, degrees", "error, %"), ("rotation, degrees", "NLL")),
        "rejected": (("least certain rejected, %", "error of the rest, %"),),
        "letters": (("digits rejected, %", "letters rejected, %"),),
    }
    for ax, (x, y) in zip(axes, words[name], strict=True):
        ax.set(xlabel=x, ylabel=y)
        ax.grid(True)
    if name == "letters":
        axes[0].set(xlim=(0, 40), ylim=(0, 100))
    axes[-1].legend(fontsize=8)
