"""The report: complete, in one file, harmless whatever names results have, and written whole or not at all."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rcParams

from qlangevin.experiments.methods import METHODS
from qlangevin.experiments.report import Lead, figures, load_results, write_report
from qlangevin.experiments.report.looks import LOOKS, label, look, window
from qlangevin.experiments.report.markdown import escape
from qlangevin.experiments.report.summary import by_cell, by_experiment
from qlangevin.experiments.report.tables import (
    cost_table,
    format_duration,
    paper_table,
    runs_table,
    scores_table,
    widths_table,
)
from qlangevin.storage import files
from tests.helpers.runs import FIVE, full, run, runs, sweep

HOSTILE = '<script>alert("x")</script>|$\\frac{$[a](b)`*_\x00\ud800\n# <b>'
VOID = {"meta", "img", "br", "path", "use", "rect"}


class Page(HTMLParser):
    """The elements and the text of a page; fails if elements are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page as `qlangevin demo` writes it: one experiment in one format, led by a picture."""
    folder = tmp_path_factory.mktemp("demo")
    picture = folder / "first.svg"
    picture.write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    results = full("digits", 2) + runs("digits", ("naive-sgldlp-l", "vc-sgldlp-l"), "bfp8", 2)
    page = write_report(
        results, folder / "out", "Eight & bits", Lead(picture, "Why <noise> matters", "Look at this first.")
    )
    assert page == folder / "out" / "index.html"
    return folder / "out"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep, a scaled-down experiment of the paper's tables, and one in which everything is hostile."""
    folder = tmp_path_factory.mktemp("large")
    changes: dict[str, Any] = {"scaled": ["epochs 12 instead of 245"]}
    noted = {"name": "cifar10", "train": 9, "test": 5, "note": "10000 of 50000 images"}
    odd = run("cifar10", "vc-sgldlp-l", "bfp8", 1, data=noted, **changes)
    odd["settings"]["lr"] = 0.7
    results = [*sweep(widths=(2, 6, 10), seeds=2), *runs("cifar10", FIVE, "bfp8", 1, data=noted, **changes), odd]
    bad = run(HOSTILE, HOSTILE, HOSTILE, command=HOSTILE, version=HOSTILE, finished=HOSTILE, scaled=[HOSTILE])
    bad["data"] |= {"name": HOSTILE, "note": HOSTILE}
    bad["environment"]["machine"] = bad["model"]["name"] = HOSTILE
    write_report([*results, bad], folder, HOSTILE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "large"])
def test_the_page_is_one_file_that_loads_and_runs_nothing(name: str, request: pytest.FixtureRequest) -> None:
    text = (request.getfixturevalue(name) / "index.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {"script", "link", "iframe", "object", "b"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert not [a for a in attributes if a.startswith("on")]
        for where in (attributes.get(a) or "#" for a in ("src", "href", "xlink:href")):
            assert where.startswith(("#", "data:image/"))
    assert not re.search(r"url\((?!#)|@import", text)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    assert used <= set(ids)


@pytest.mark.parametrize("name", ["demo", "large"])
def test_every_figure_says_what_it_shows_and_what_to_look_at(name: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(name)
    page = Page((folder / "index.html").read_text(encoding="utf-8"))
    drawn = [*page.all("svg"), *page.all("img")]
    assert len(drawn) == len(page.all("figure")) == len(page.all("figcaption")) > 4
    for attributes in drawn:
        assert len(attributes.get("aria-label") or attributes.get("alt") or "") > 15
    for file in (folder / "figures").glob("*.svg"):
        ET.parse(file)
    linked = re.findall(
        r"^!\[.*\]\((figures/[^)]*)\)$", (folder / "report.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(linked) == len(drawn)
    assert {Path(link).stem for link in linked} == {file.stem for file in (folder / "figures").iterdir()}
    for png in (folder / "figures").glob("*.png"):
        assert png.read_bytes().startswith(b"\x89PNG")


def test_the_lead_picture_comes_first(demo: Path) -> None:
    text = (demo / "index.html").read_text(encoding="utf-8")
    assert (
        text.index("<h1>Eight &amp; bits") < text.index("Look at this first.") < text.index("<img") < text.index("<svg")
    )
    assert 'alt="Why &lt;noise&gt; matters"' in text
    assert (demo / "figures" / "lead.svg").exists()


def test_the_page_is_honest_about_where_its_numbers_come_from(demo: Path) -> None:
    text = " ".join(Page((demo / "index.html").read_text(encoding="utf-8")).text.split())
    for part in (
        "8 runs with seeds 0, 1 took",
        "hours)",
        "a machine",
        "native (avx2)",
        "qlangevin run digits --method sgldfp",
    ):
        assert part in text
    assert "not run" not in text


def test_scaled_down_and_mixed_runs_are_said_to_be_right_above_the_table(large: Path) -> None:
    text = unescape((large / "index.html").read_text(encoding="utf-8"))
    note = "CIFAR-10 is not run as in the paper: 10000 of 50000 images; epochs 12 instead of 245."
    mixed = "VC SGLDLP-L in bfp8 is averaged over runs with different lr (0.1, 0.7)"
    assert text.index("Tables 1 and 2") < text.index(note) < text.index(mixed) < text.index("Table 1, test error")
    assert note in (large / "report.md").read_text(encoding="utf-8")


def test_hostile_names_are_text(large: Path) -> None:
    text = (large / "index.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\x00" not in text
    assert "&lt;script&gt;alert(&quot;x&quot;)&lt;/script&gt;|$" in text
    assert all(re.fullmatch(r"[a-z0-9._-]+\.(svg|png)", file.name) for file in (large / "figures").iterdir())
    lines = (large / "report.md").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if re.search(r"(?<!\\)<", line) and not line.startswith("    ")]
    tables = [line for line in lines if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in tables if "script" in line} <= set(range(5, 12))
    assert escape("a|b\n<c>") == r"a\|b \<c\>"


def test_the_results_can_be_reported_again(demo: Path, large: Path) -> None:
    assert len(load_results([demo / "runs.json"])) == 8
    again = load_results([demo / "runs.json", large / "runs.json", demo / "runs.json"])
    assert (
        again
        == json.loads((demo / "runs.json").read_text())["runs"] + json.loads((large / "runs.json").read_text())["runs"]
    )


def test_the_claims_are_on_the_page(large: Path) -> None:
    page = Page((large / "index.html").read_text(encoding="utf-8"))
    classes = [attributes.get("class") for attributes in page.all("td")]
    assert classes.count("good") >= 4
    assert "Full-precision quality means" in page.text
    assert re.search(r"Of \d+ claims of the paper \d+ holds? here", page.text)


def test_a_single_run_and_different_numbers_of_samples(tmp_path: Path) -> None:
    alone = run("mnist-mlp", "sgldfp", "fp32") | {"single": None, "r_hat": None, "ess": None}
    alone["reliability"] |= {"counts": [0] * 10, "confidence": [None] * 10, "accuracy": [None] * 10}
    alone["trace"] = {"steps": [], "log_likelihood": []}
    short = run("mnist-mlp", "sgldfp", "fp32", 1, samples=3)
    short["trace"] = {"steps": [1, 2, 3], "log_likelihood": [-1.0, -0.9, -0.8]}
    short["reliability"] = {
        "edges": [0.0, 0.5, 1.0],
        "counts": [2, 8],
        "confidence": [0.3, 0.9],
        "accuracy": [0.5, 1.0],
    }
    text = Page(write_report([alone, short], tmp_path).read_text(encoding="utf-8")).text
    assert "3 to 20" in text
    assert "R-hat" in text


def test_nothing_is_written_if_anything_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="there is nothing to report"):
        write_report([], out)
    with pytest.raises(ValueError, match="result 1 is not the result of a run: it has no experiment"):
        write_report([run(), {}], out)
    for path, message in [
        (tmp_path / "no.png", "there is no lead picture"),
        (tmp_path / "a.txt", "must be one of png, svg"),
    ]:
        with pytest.raises(ValueError, match=message):
            write_report([run()], out, lead=Lead(path, "", ""))
    assert not out.exists()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"a report is a folder, .*file is a file; choose another place"):
        write_report([run()], tmp_path / "file")

    def full_disk(path: Path, parts: Any) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(files, "write", full_disk)
    monkeypatch.setattr(figures, "draw_traces", figures.draw_reliability)  # faster, and does not matter here
    with pytest.raises(OSError, match="No space left"):
        write_report([run()], out)
    assert [path for path in out.rglob("*") if path.is_file()] == []


def test_paper_tables_have_its_rows_and_figures_beside_ours() -> None:
    results = runs("cifar10", ("vc-sgldlp-l", "sgdlp-l"), "bfp8") + runs("imdb", ("mine",), "bfp8/tensor", 1)
    table = paper_table(by_experiment(results), ("error",), "Table 1")
    assert table.head == ("", "CIFAR-10", "paper", "IMDB", "paper")
    rows = [row if isinstance(row, tuple) else row.text for row in table.rows]
    assert rows[0] == "32-bit floating point"
    assert rows[1] == ("SGLDFP", "—", "4.65 ± 0.06", "—", "13.43 ± 0.21")
    assert rows[4] == "8-bit fixed point"
    assert rows[10] == "8-bit block floating point (CIFAR-10: bfp8, IMDB: bfp8/tensor)"
    assert [row[0] for row in rows[11:]] == [
        *("Naïve SGLDLP-L", "VC SGLDLP-L", "SGDLP-L", "SGLDLP-F", "SGDLP-F", "VC cSGLDLP-L", "cSGLDLP-F", "mine")
    ]
    assert re.fullmatch(r"7\.8\d ± 0\.\d+ \(3\)", rows[12][1])
    assert rows[12][2:] == ("5.51 ± 0.01", "—", "13.99 ± 0.24")
    assert rows[-1][1:3] == ("—", "—")


def test_two_formats_of_a_family_get_a_group_each() -> None:
    table = paper_table(by_experiment([run("cifar10", format=f) for f in ("bfp8", "bfp8/32")]), ("ece", "nll"), "both")
    headings = [row.text for row in table.rows if not isinstance(row, tuple)]
    assert headings[2:] == ["8-bit block floating point (bfp8)", "8-bit block floating point (bfp8/32)"]
    assert table.head == ("", "ECE (%)", "paper", "NLL")
    imagenet = paper_table(by_experiment([run("imagenet")]), ("error", "top5"), "Table 3")
    assert imagenet.head == ("", "error (%)", "paper", "top-5 error (%)", "paper")
    assert [row[0] for row in imagenet.rows if isinstance(row, tuple)] == [
        "SGLDFP", "SGDFP", "VC SGLDLP-L", "SGLDLP-F", "SGDLP-F"
    ]  # fmt: skip


def test_tables_of_a_sweep_of_scores_of_costs_and_of_runs() -> None:
    cells = by_cell(sweep(widths=(2, 4, 6), seeds=1))
    table = widths_table(cells, "nll")
    assert table.head == ("fractional bits", "Naïve SGLDLP-L", "VC SGLDLP-L", "SGDLP-L", "SGLDLP-F", "SGDLP-F")
    assert [row[0] for row in table.rows if isinstance(row, tuple)] == [
        "2 (fixed4.2)", "4 (fixed6.4)", "6 (fixed8.6)", "full precision"
    ]  # fmt: skip
    last = table.rows[-1]
    assert isinstance(last, tuple)
    assert last[1] == last[2] == last[4] != last[3] == last[5]
    few = by_cell([run(samples=20), run(seed=1, samples=30)])
    assert scores_table(few).rows[-1][-2:] == ("2", "20 to 30")  # type: ignore[index]
    assert cost_table(few).rows[0][1:4] == ("bfp8", "1.00", "1.01")  # type: ignore[index]
    assert runs_table({"digits": few}).rows[1][1:3] == ("bfp8", "0, 1")  # type: ignore[index]
    assert [format_duration(s) for s in (3.14, 59.9, 61, 3700, 360_000)] == [
        "3.1 s",
        "59.9 s",
        "1 min",
        "1 h 2 min",
        "100 h 0 min",
    ]


def test_methods_look_the_same_everywhere_and_sgd_is_dashed() -> None:
    assert set(LOOKS) == set(METHODS)
    assert len(set(LOOKS.values())) == len(LOOKS)
    for key, method in METHODS.items():
        assert look(key).line == ("-" if method.noise else "--")
    assert look("mine") == look("mine")
    assert label("$a$\n" + "x" * 90) == r"\$a\$?" + "x" * 27 + "…"


def test_far_outliers_do_not_flatten_the_rest() -> None:
    low, high = window([1.0, 1.1, 1.2, 1.15, 90.0])
    assert low < 1.0
    assert 1.2 < high < 1.4
    assert window([1.0, 2.0, 3.0])[1] > 3.0
    for values in ([0.0], [5.0, 5.0], [1.0, 1.0, 1.0, 9.0]):
        low, high = window(values)
        assert low < min(values)
        assert high > max(values)


def test_a_broken_method_does_not_hide_the_others() -> None:
    figure = figures.draw_curves(by_cell(sweep(widths=(2, 6, 10), seeds=2)), "nll")
    whole, near = figure.axes
    assert whole.get_yscale() == "log"
    assert whole.get_ylim()[1] > 2.5
    assert near.get_ylim()[1] < 0.4
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(names) == sorted(METHODS[m].name for m in (*FIVE, "sgldfp", "sgdfp"))
    alike = [r for bits in (2, 4, 6) for r in runs("mnist-mlp", ("sgldlp-f",), f"fixed{bits + 2}.{bits}")]
    assert len(figures.draw_curves(by_cell(alike), "error").axes) == 1


def test_the_enlarged_frame_shows_full_precision_of_all_methods() -> None:
    far = [r | {"scores": r["scores"] | {"nll": 0.4}} for r in runs("mnist-logistic", ("sgldfp",), "fp32")]
    others = [r for r in sweep(widths=(2, 6, 10)) if r["settings"]["method"] != "sgldfp"]
    near = figures.draw_curves(by_cell([*others, *far]), "nll").axes[1]
    assert near.get_ylim()[1] > 0.4


def test_reliability_is_pooled_by_counts() -> None:
    bins = {"edges": [0.0, 0.5, 1.0], "counts": [0, 10], "confidence": [None, 0.9], "accuracy": [None, 0.8]}
    other = {"edges": [0.0, 0.5, 1.0], "counts": [10, 30], "confidence": [0.4, 0.7], "accuracy": [0.5, 0.6]}
    [points] = figures._pool_bins([run(reliability=bins), run(reliability=other)])
    assert points == [pytest.approx((0.4, 0.5, 0.2)), pytest.approx((0.75, 0.65, 0.8))]


def test_matplotlibs_settings_are_left_as_they_were(demo: Path) -> None:
    assert rcParams["svg.fonttype"] == "path"
    assert rcParams["font.size"] == 10.0
