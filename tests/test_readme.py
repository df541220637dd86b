"""Run the code of the README and of the pages under docs/, and follow their links."""

import re
import warnings
from pathlib import Path

import pytest

import qlangevin as ql

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def programs(page: Path) -> list[str]:
    """Return the blocks of code on a page; one that is "continued" is appended to the block before it."""
    found: list[str] = []
    for continued, code in re.findall(r"```python( continued)?\n(.*?)```", page.read_text("utf-8"), re.DOTALL):
        found.append(found.pop() + code if continued else code)
    return found


BLOCKS = {f"{page.relative_to(ROOT)} {i}": code for page in PAGES for i, code in enumerate(programs(page))}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_the_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = re.findall(r"^(?:from|import) (accelerate|lightning|peft|transformers)\b", BLOCKS[name], re.MULTILINE)
    for library in libraries:
        pytest.importorskip(library, reason=f"{library} is not installed; make test-ecosystem does")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        if libraries:  # which warn of each other
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", ql.QLangevinWarning)
        exec(compile(BLOCKS[name], name, "exec"), {"__name__": "page"})


def test_the_first_screen_has_both_commands() -> None:
    top = README.read_text(encoding="utf-8")[:1500]
    assert "make demo" in top
    assert "make test" in top
    assert len(programs(README)) >= 4


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == []
