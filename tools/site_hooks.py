"""Hooks of mkdocs: let pages include files of the repository, and let links that leave docs/ lead to pages of the site.

A line ``<!-- include CHANGELOG.md -->`` is replaced by that file, which is code in a block of its own unless it is Markdown, and
a line ``<!-- help qlangevin -->`` by the help of each command. The words after ``python`` on a fence are for the tests
(`tests/test_readme.py`), and are removed here.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from pathlib import Path, PurePosixPath
from textwrap import indent
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "SECURITY.md": "security.md",
    "CITATION.cff": "index.md",
    "LICENSE": "license.md",
}
INCLUDE = re.compile(r"^( *)<!-- include (\S+) -->$", re.MULTILINE)
HELP = "<!-- help qlangevin -->"
COMMANDS = ("demo", "run", "sweep", "evaluate", "diagnose", "report", "llc", "bound", "bench")
FENCE = re.compile(r"^( *```python)[^\n]+$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with its includes, its links and its fences as mkdocs takes them."""
    source = PurePosixPath("docs", page.file.src_uri)
    markdown = rewrite_links(markdown, source, source)
    markdown = INCLUDE.sub(lambda found: indent(include(PurePosixPath(found[2]), source), found[1]), markdown)
    if HELP in markdown:
        markdown = markdown.replace(HELP, "\n".join(command_help(name) for name in COMMANDS))
    return FENCE.sub(r"\1", markdown)


def include(path: PurePosixPath, page: PurePosixPath) -> str:
    """Return a file of the repository as Markdown, with the links that it needs on a page."""
    text = (ROOT / path).read_text("utf-8")
    if path.suffix == ".md":
        return rewrite_links(text, path, page)
    return f"```{'python' if path.suffix == '.py' else 'text'}\n{text}```"


def command_help(command: str) -> str:
    """Return a section with the help of a command, as it prints it to a terminal of 100 columns."""
    from qlangevin.cli.main import main

    printed = io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "100", "NO_COLOR": "1"}), contextlib.redirect_stdout(printed):
        main([command, "--help"])
    text = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    return f"## qlangevin {command}\n\n```text\n{text}\n```\n"


def rewrite_links(markdown: str, written_in: PurePosixPath, page: PurePosixPath) -> str:
    """Return Markdown of one file for a page of the site: links to files outside of docs/ lead to the pages about them."""

    def rewrite(found: re.Match[str]) -> str:
        link, anchor = found[1], found[2] or ""
        target = os.path.normpath(written_in.parent / link)
        if target.startswith("docs" + os.sep):
            target = target[len("docs/") :]
        elif target.startswith("examples/"):
            target, anchor = "examples.md", "#" + PurePosixPath(target).stem
        elif target in PAGES:
            target = PAGES[target]
        else:
            return found[0]  # mkdocs says that it leads nowhere
        return f"]({os.path.relpath(target, page.parent.relative_to('docs'))}{anchor})"

    return LINK.sub(rewrite, markdown)
