"""Run the code of the README and of every page of the site, and follow their links.

The words after "python" on the fence say how a block runs:

    ```python                          alone
    ```python continued                after the block before it, with its names
    ```python not run: needs a GPU     not at all

Only what the machine of the tests cannot have is a reason, so the reason begins with "needs". Blocks in other languages, and
indented ones, are not looked at.
"""

import re
import warnings
from pathlib import Path

import pytest

import qlangevin as ql

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]


def programs(page: Path) -> list[str]:
    """Return the blocks of code on a page that run; one that is "continued" is appended to the block before it."""
    found: list[str] = []
    for mark, code in re.findall(
        r"^```(?:python|py)\b *([^\n]*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    ):
        if mark == "continued":
            found.append(found.pop() + code)
        elif mark == "":
            found.append(code)
        elif not re.fullmatch(r"not run: needs \S.*", mark):
            raise ValueError(f'{page.name}: a block may be "continued" or "not run: needs ...", got {mark!r}')
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


def test_the_readme_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").split()) < 900
    [program] = programs(README)
    assert "diagnose" in program


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8"))
        assert [link for link in links if not (page.parent / link).exists()] == []
