"""The page of the demo: summary and tables first, then a section with pictures for each part."""

from __future__ import annotations

from ...storage import files
from ..report.document import Block, Document, Picture, Section, Table, Text
from ..report.looks import render
from ..report.page import write_page
from . import figures, summary
from .digits import CHOSEN
from .reference import load_reference
from .regression import GRID, Features, make_data
from .result import DemoResult

__all__ = ["write_demo"]

TITLE = "Uncertainty in 8 bits"
GAUSSIAN = (
    "An 8-bit weight is a multiple of the gap Δ, so each step of a sampler has to round. Naive rounding adds noise of its own to "
    "the Langevin noise, and the samples spread too far. The corrected quantizer draws noise and rounding together, with the "
    "variance that the step should have. A full-precision copy of the weights also helps, and costs four more bytes a weight."
)
FEATURES = (
    "A linear model on 40 fixed random features, with a gap in the data: the posterior is known in closed form (dashed). SGLD "
    "samples it in full precision and in 8 bits (fixed8.3). Coverage is the probability, under the exact posterior, that f(x) "
    "lies in the sampled 95 % band."
)
DIGITS = (
    "The 8x8 digits of scikit-learn, 1197 for training and 600 for test, and a network with one hidden layer of 50 units. SGHMC "
    "runs four chains at once; all samples of all chains are averaged. Weight decay and temperature of each method have the "
    "least NLL on validation images, among those with R-hat below 1.1, in the same search."
)
ROTATED = "Digits rotated: error and NLL. A network that knows what it does not know has an NLL that rises slowly."
REJECTED = "Digits rotated by 30°: error of those that are left when the least certain, by entropy, are rejected."
LETTERS = "Letters, which are no digits: how many are rejected by a limit on the entropy that rejects so many digits."


def write_demo(made: DemoResult) -> None:
    """Write the page; its figures are inside."""
    files.write(made.page, [write_page(build_document(made)).encode()])


def build_document(made: DemoResult) -> Document:
    """Return the page as a document."""
    words = summary.sentences(made.gaussian, made.features, made.digits)
    band_rows = summary.band_rows("features", made.features) + summary.band_rows("network", made.network)
    tables = (
        Table("Regression: 95 % bands", summary.BAND_HEAD, tuple(band_rows)),
        Table(
            "Digits: bytes a weight in training, samples stored, CPU time; ± one standard error over test images",
            summary.DIGITS_HEAD,
            tuple(summary.digits_rows(made.digits)),
        ),
    )
    opening: tuple[Block, ...] = (*tables, *(Text(sentence) for sentence in words))
    return Document(TITLE, opening, (_gaussian(made), _regression(made), _digits(made)))


def _gaussian(made: DemoResult) -> Section:
    caption = f"SGLD on a standard Gaussian (line) in {made.gaussian.settings.format}, α = {made.gaussian.rows[0].stepsize:g}."
    image = render(figures.draw_gaussian(made.gaussian), png=False)
    return Section("1. Why rounding must be corrected", (Text(GAUSSIAN), Picture("gaussian", image, caption, caption)))


def _regression(made: DemoResult) -> Section:
    data, reference = make_data(), load_reference()
    exact = figures.draw_bands(made.features, *Features(*data).exact(GRID), data, "exact")
    network = figures.draw_bands(made.network, reference.mean, reference.sd, data, "HMC")
    text = (
        "The same data and a network of 20 tanh units, in fixed8.4. The reference is a stored run of HMC in float64: "
        f"{reference.chains} chains of {reference.draws} draws, acceptance {reference.acceptance:.0%}, largest R-hat "
        f"{reference.r_hat:.3f}, least effective sample size {reference.ess:.0f}."
    )
    captions = (
        "Linear model: sampled bands in colour, the exact one dashed.",
        "Network: sampled bands, and HMC dashed.",
    )
    blocks = (
        Text(FEATURES), Picture("features", render(exact, png=False), captions[0], captions[0]),
        Text(text), Picture("network", render(network, png=False), captions[1], captions[1]),
    )  # fmt: skip
    return Section("2. Uncertainty you can see", blocks)


def _digits(made: DemoResult) -> Section:
    drawn, pictures = figures.draw_digits(made.digits), []
    for name, caption in (("rotated", ROTATED), ("rejected", REJECTED), ("letters", LETTERS)):
        pictures.append(Picture(name, render(drawn[name], png=False), caption, caption))
    rows = tuple(
        (c.name, f"{c.weight_decay:g}", f"{c.temperature:g}" if c.samples else "—", f"{c.steps}") for c in CHOSEN
    )
    verdicts = Table(
        "Difference ± standard error; same: below two standard errors",
        summary.VERDICT_HEAD,
        tuple(summary.verdict_rows(made.digits)),
    )
    chosen = Table("Chosen on validation images", ("method", "weight decay", "temperature", "steps"), rows, folded=True)
    return Section("3. What a posterior adds", (Text(DIGITS), verdicts, *pictures, chosen))
