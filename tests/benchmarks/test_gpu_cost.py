"""The tables of estimated times."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu.roofline import GPUS, Cost
from benchmarks.gpu_cost import MARK, Line, tables

ROOT = Path(__file__).parents[2]


def test_the_tables_have_a_line_for_each_kernel_and_size() -> None:
    cost = Cost({"float": 60.0, "integer": 60.0}, 6.0, 6.0)
    text = tables([Line("a step", dict.fromkeys(GPUS, cost))], GPUS)
    lines = [line for line in text.splitlines() if line.startswith("| a step")]
    assert lines[0] == "| a step | 120 | 120 | 120 | 6 |"
    assert lines[1].count("instructions") == 3
    assert "µs" in lines[1]
    assert "ms" in lines[2]
    assert text.count("estimated") == 2


def test_the_page_has_the_places_for_them_and_says_what_they_are() -> None:
    page = (ROOT / "docs" / "gpu-cost.md").read_text("utf-8")
    assert MARK.search(page)
    assert "estimates; nothing was run on a GPU" in page
