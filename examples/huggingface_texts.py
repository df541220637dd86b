"""Texts for examples/huggingface.py: docstrings of installed libraries, or IMDB's reviews, and foreign texts."""

from __future__ import annotations

import ast
import functools
import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARIES = ("matplotlib", "networkx", "numpy", "pandas", "xarray")
FOREIGN = ("email", "http", "logging", "multiprocessing", "tkinter", "unittest", "urllib", "xml")
NAMES = re.compile(r"\b(matplotlib|mpl|plt|pyplot|networkx|nx|numpy|np|pandas|pd|xarray|xr)\b", re.IGNORECASE)


class Texts(NamedTuple):
    """Texts and labels."""

    texts: list[str]
    labels: list[int]

    def take(self, order: Sequence[int]) -> Texts:
        return Texts([self.texts[i] for i in order], [self.labels[i] for i in order])

    def draw(self, count: int, seed: int) -> tuple[Texts, Texts]:
        """Return some texts, drawn at random, and the others."""
        order = torch.randperm(len(self.texts), generator=torch.Generator().manual_seed(seed)).tolist()
        return self.take(order[:count]), self.take(order[count:])


@functools.cache
def docstrings(package: str) -> tuple[str, ...]:
    """Return the first paragraphs of the docstrings of a package, read from its files, without its name."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root, texts = Path(spec.origin).parent, []
    for file in sorted(root.rglob("*.py")):
        if "test" in file.relative_to(root).as_posix():
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (found := ast.get_docstring(node)):
                text = NAMES.sub("it", " ".join(found.split("\n\n")[0].split()))
                if 40 <= len(text) <= 300:
                    texts.append(text)
    return tuple(texts)


def reviews(data_dir: Path | None) -> Texts:
    """Return the beginnings of IMDB's training reviews; the label is 1 for a good one."""
    from qlangevin.experiments.data.fetch import find_files
    from qlangevin.experiments.data.readers import read_archive

    [path] = find_files("imdb", data_dir)
    name = re.compile(r".*train/(pos|neg)/\d+_\d+\.txt")
    if path.is_dir():
        found = [(file.as_posix(), file.read_bytes()) for file in sorted(path.parent.rglob("*.txt"))]
    else:
        found = list(read_archive(path, name.fullmatch, True))
    chosen = [(text, "/pos/" in where) for where, text in found if name.fullmatch(where)]
    return Texts([text.decode(errors="replace")[:800] for text, _ in chosen], [int(good) for _, good in chosen])


class Data(NamedTuple):
    """Texts to train and validate with, texts to test with, which are the same for every seed, and foreign texts."""

    task: str
    known: Texts
    test: Texts
    foreign: Texts


def read_texts(data_dir: Path | None, test: int) -> Data:
    """Read the texts; none to test with is among those to train or validate with."""
    imdb = data_dir is not None or "QLANGEVIN_DATA" in os.environ
    labels = {text: label for label, name in enumerate(LIBRARIES) for text in docstrings(name)}
    texts = reviews(data_dir) if imdb else Texts(list(labels), list(labels.values()))
    foreign = list(dict.fromkeys(text for name in FOREIGN for text in docstrings(name) if text not in labels))
    tested, known = texts.draw(test, seed=0)
    return Data(
        "reviews" if imdb else "documentation", known, tested, Texts(foreign, [0] * len(foreign)).draw(test, 0)[0]
    )
