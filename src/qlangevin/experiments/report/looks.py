"""Style of the figures: a colour, a line and a marker for each method, the same in all figures; and figures as files.

The colours are those of Okabe and Ito, which colour-blind readers can tell apart, and related ones. SGD is dashed.
"""

from __future__ import annotations

import io
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FRAME", "INK", "Image", "Look", "label", "look", "render", "styled", "window"]

P = ParamSpec("P")
T = TypeVar("T")

# A page replaces these by its own colours, so that nothing else in a figure may have them.
INK, FRAME, PAPER = "#1b1f24", "#8a9098", "#fffffe"
STYLE: dict[Any, Any] = {
    "axes.edgecolor": FRAME, "axes.facecolor": "none", "axes.labelcolor": INK, "axes.spines.right": False,
    "axes.spines.top": False, "axes.titlesize": 9, "figure.facecolor": PAPER, "font.family": "DejaVu Sans", "font.size": 9,
    "grid.alpha": 0.25, "grid.color": FRAME, "grid.linewidth": 0.6, "legend.frameon": False, "savefig.facecolor": PAPER,
    "svg.fonttype": "none", "svg.hashsalt": "qlangevin", "text.color": INK, "text.usetex": False,
    "xtick.color": FRAME, "xtick.labelcolor": INK, "ytick.color": FRAME, "ytick.labelcolor": INK,
}  # fmt: skip


class Look(NamedTuple):
    """Colour, line and marker of a method."""

    colour: str
    line: str
    marker: str


LOOKS = {
    "sgldfp": Look("#7a7a7a", "-", "o"),
    "sgdfp": Look("#7a7a7a", "--", "s"),
    "csgldfp": Look("#a58d5f", "-", "P"),
    "sgldlp-f": Look("#0072b2", "-", "o"),
    "sgdlp-f": Look("#56b4e9", "--", "s"),
    "csgldlp-f": Look("#8a7fd6", "-", "P"),
    "naive-sgldlp-l": Look("#d55e00", "-", "v"),
    "vc-sgldlp-l": Look("#009e73", "-", "D"),
    "sgdlp-l": Look("#cc79a7", "--", "X"),
    "vc-csgldlp-l": Look("#7fb238", "-", "P"),
    "nearest-sgldlp-l": Look("#b5534f", "-", "h"),
    "nearest-sgdlp-l": Look("#b5534f", "--", "*"),
}
FAR = 5  # times as far from the best as two thirds of the values are
OTHERS = ("#e69f00", "#a6761d", "#5f9ea0", "#c06ce0")


def look(method: str) -> Look:
    """Return the look of a method; one that is not the paper's gets a colour that depends on its name."""
    dash = "--" if method.startswith("sgd") else "-"
    return LOOKS.get(method) or Look(OTHERS[zlib.crc32(method.encode("utf-8", "replace")) % len(OTHERS)], dash, "o")


def label(text: str, most: int = 32) -> str:
    """Escape a text for matplotlib: no formulas, only printable characters, not too long."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return (text if len(text) <= most else f"{text[: most - 1]}…").replace("$", r"\$")


def window(values: Sequence[float]) -> tuple[float, float]:
    """Return a range that shows most values, from the lowest on; far outliers, at most a third of them, are left out."""
    low, most = min(values), sorted(values)[2 * (len(values) - 1) // 3]
    far = max(values) - low > FAR * (most - low) > 0
    high = max(v for v in values if v <= low + FAR / 2 * (most - low)) if far else max(values)
    pad = 0.08 * (high - low) or 0.05 * abs(low) or 1.0
    return low - pad, high + pad


def styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Make a function draw in this style; matplotlib's settings are restored afterwards."""

    @wraps(draw)
    def inner(*args: P.args, **kwargs: P.kwargs) -> T:
        from matplotlib import rc_context

        with warnings.catch_warnings(), rc_context(STYLE):
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # of a method's name, say
            return draw(*args, **kwargs)

    return inner


class Image(NamedTuple):
    """A figure as files."""

    svg: str
    png: bytes | None

    def inline(self, prefix: str, alt: str) -> str:
        """Return the SVG for embedding in a page, in the page's colours; ``alt`` must be HTML."""
        text = self.svg[self.svg.index("<svg") :]
        text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text, flags=re.DOTALL)
        text = re.sub(r'\bid="', f'id="{prefix}-', text)
        text = re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", text)
        text = text.replace(INK, "currentColor").replace(FRAME, "var(--frame)").replace(PAPER, "none")
        return re.sub(r"<svg\b", f'<svg role="img" aria-label="{alt}"', text, count=1)


@styled
def render(figure: Figure, png: bool = True) -> Image:
    """Render a figure as SVG, and as PNG if asked to."""
    svg, pixels = io.StringIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    if not png:
        return Image(svg.getvalue(), None)
    figure.set_layout_engine("none")  # the layout is computed; computing it again takes longest
    figure.savefig(pixels, format="png", dpi=160)
    return Image(svg.getvalue(), pixels.getvalue())
