"""Reviews as word numbers: read IMDB's texts, split them into words, number the words, and cache the result.

Words are numbered by their frequency in the training texts, from 2 on; ties are in alphabetical order. 0 is padding, 1 an
unknown word. A smaller vocabulary then only means that all numbers above a limit become unknown, so that the cache depends on
nothing but the texts.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from ..._progress import progress_bar
from ..._warnings import warn
from ...storage.files import DamagedError, map_file, sha256, write
from ...storage.folders import Folder
from ...storage.leftovers import remove_leftovers
from ...storage.tensor_file import report_damage, tensor_chunks
from .fetch import cache_folder
from .readers import interleave, read_archive

__all__ = ["Reviews", "encode_texts", "pad_texts", "read_imdb", "read_vocabulary", "split_words"]

VERSION = 1  # of the cache: raise it with any change in splitting, numbering or order
UNKNOWN, FIRST = 1, 2
PARTS, CLASSES = ("train", "test"), ("neg", "pos")
NAME = re.compile(r"(?:.*/)?(?:train|test)/(?:neg|pos)/\d+_\d+\.txt")
BREAK = re.compile(r"<br\s*/?>")
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*|[^\w\s]|_")  # apostrophes inside belong to a word


class Reviews(NamedTuple):
    """Word numbers of all texts one after the other, the length of each text, and its label: positive (1) or negative (0)."""

    numbers: Tensor
    lengths: Tensor
    labels: Tensor


NAMES = [f"{part}.{field}" for part in PARTS for field in Reviews._fields]  # of the tensors in the cache


class Review(NamedTuple):
    """One review as read; reviews are sorted in this order of fields."""

    part: str
    label: int
    id: int
    text: bytes


def split_words(text: str) -> list[str]:
    """Split a text into words in lower case and single punctuation marks: "Don't!<br />" becomes don't and !"""
    return WORD.findall(BREAK.sub(" ", text.lower()))


def pad_texts(reviews: Reviews, length: int, words: int) -> Tensor:
    """Return (texts, length): the last words of each text, where the verdict tends to be, padded with zeros.

    Numbers from ``words`` on become unknown words.
    """
    numbers = reviews.numbers.masked_fill(reviews.numbers >= words, UNKNOWN)
    kept = reviews.lengths.clamp(max=length)
    columns = torch.arange(length, device="cpu")
    source = (reviews.lengths.cumsum(0) - kept).unsqueeze(1) + columns
    there = columns < kept.unsqueeze(1)
    return torch.where(there, numbers[source.clamp_(max=len(numbers) - 1)], 0)


def read_imdb(path: Path, progress: bool = True) -> tuple[Reviews, Reviews]:
    """Return training and test reviews, from the archive or, if ``path`` is its folder train, from the folders."""
    key = sha256(json.dumps([VERSION, _fingerprint(path)]).encode())
    cache = cache_folder() / f"imdb-{key[:16]}.safetensors"
    encoded = _load_cache(cache)
    if encoded is None:
        encoded = _encode(_read(path, progress), progress)
        _save_cache(cache, *encoded)
    return encoded


# ---- reading


def _read(path: Path, progress: bool) -> list[list[Review]]:
    """Read the reviews of both parts, sorted by their numbers, with positive and negative ones interleaved."""
    reviews = sorted(_review(name, text) for name, text in _texts(path, progress))
    parts = []
    for part in PARTS:
        mine = [review for review in reviews if review.part == part]
        labels = torch.tensor([review.label for review in mine], dtype=torch.int64, device="cpu")
        if missing := [f"{part}/{name}" for label, name in enumerate(CLASSES) if not (labels == label).any()]:
            raise ValueError(
                f"{path} has no reviews in {' and '.join(missing)}; expected are files {missing[0]}/ID_RATING.txt"
            )
        parts.append([mine[i] for i in interleave(labels).tolist()])
    return parts


def _files(path: Path) -> list[Path]:
    folders = [path.parent / part / name for part in PARTS for name in CLASSES]
    files = (file for folder in folders for file in sorted(folder.glob("*.txt")))
    return [file for file in files if NAME.fullmatch(file.as_posix())]


def _texts(path: Path, progress: bool) -> Iterator[tuple[str, bytes]]:
    if not path.is_dir():
        yield from read_archive(path, NAME.fullmatch, progress)
        return
    files, label = _files(path), "reading IMDB"
    with progress_bar(len(files), label, progress) as advance:
        for file in files:
            yield file.as_posix(), file.read_bytes()
            advance(label, 1)


def _review(name: str, text: bytes) -> Review:
    part, kind, file = name.split("/")[-3:]
    return Review(part, CLASSES.index(kind), int(file.partition("_")[0]), text)


# ---- numbering


def _encode(parts: Sequence[Sequence[Review]], progress: bool) -> tuple[Reviews, Reviews]:
    """Number words in order of appearance, then renumber them by frequency; millions of words would take too much memory."""
    seen: dict[str, int] = {}
    with progress_bar(sum(map(len, parts)), "numbering words", progress) as advance:
        train = _appearance(parts[0], seen, advance)
        known = len(seen)
        test = _appearance(parts[1], seen, advance)
    words, counts = list(seen), torch.bincount(train.numbers, minlength=len(seen)).tolist()
    ranks = torch.full((len(seen),), UNKNOWN, dtype=torch.int32, device="cpu")
    order = sorted(range(known), key=lambda i: (-counts[i], words[i]))
    ranks[order] = torch.arange(FIRST, FIRST + known, dtype=torch.int32, device="cpu")
    return train._replace(numbers=ranks[train.numbers]), test._replace(numbers=ranks[test.numbers])


def _appearance(reviews: Sequence[Review], seen: dict[str, int], advance: Callable[[str, float], None]) -> Reviews:
    numbers, lengths = array("i"), []
    for review in reviews:
        found = split_words(review.text.decode("utf-8", errors="replace"))
        numbers.extend([seen.setdefault(word, len(seen)) for word in found])
        lengths.append(len(found))
        advance("numbering words", 1)
    if not numbers:
        raise ValueError("the reviews of IMDB have no words; get them again")
    counts, labels = (torch.tensor(t, device="cpu") for t in (lengths, [review.label for review in reviews]))
    return Reviews(torch.frombuffer(numbers, dtype=torch.int32), counts, labels)


def read_vocabulary(path: Path, progress: bool = True) -> list[str]:
    """Return the words of the training reviews in the order of their numbers; the first word has number 2."""
    train, _ = _read(path, progress)
    counts = Counter(word for review in train for word in split_words(review.text.decode("utf-8", errors="replace")))
    return sorted(counts, key=lambda word: (-counts[word], word))


def encode_texts(texts: Sequence[str], vocabulary: Sequence[str]) -> Reviews:
    """Number the words of texts that are no reviews of IMDB; their labels are 0."""
    ranks = {word: number for number, word in enumerate(vocabulary, FIRST)}
    numbers = [[ranks.get(word, UNKNOWN) for word in split_words(text)] for text in texts]
    flat = torch.tensor([n for text in numbers for n in text], dtype=torch.int32, device="cpu")
    lengths = torch.tensor([len(text) for text in numbers], device="cpu")
    return Reviews(flat, lengths, torch.zeros_like(lengths))


# ---- cache


def _fingerprint(path: Path) -> list[str] | str:
    """Return what identifies the reviews: the hash of the archive, or names, sizes and times of all files."""
    if path.is_dir():
        about = ((file, file.stat()) for file in _files(path))
        return [
            f"{file.parent.parent.name}/{file.parent.name}/{file.name} {s.st_size} {s.st_mtime_ns}" for file, s in about
        ]
    with map_file(path, "the archive of IMDB") as mapped, memoryview(mapped) as everything:
        return sha256(everything)


def _load_cache(path: Path) -> tuple[Reviews, Reviews] | None:
    """Return the cached reviews; None if they are missing or damaged."""
    what = "the cache of IMDB"
    try:
        with map_file(path, what), report_damage(what), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in NAMES}
            if (file.metadata() or {}).get("sha256") != _digest(tensors):
                return None
    except (DamagedError, OSError):
        return None
    train, test = ([tensors[f"{part}.{field}"] for field in Reviews._fields] for part in PARTS)
    return Reviews(*train), Reviews(*test)


def _save_cache(path: Path, train: Reviews, test: Reviews) -> None:
    tensors = dict(zip(NAMES, (*train, *test), strict=True))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with Folder.open(path.parent) as folder:
            remove_leftovers(folder)
        write(path, tensor_chunks(tensors, {"sha256": _digest(tensors)}))
    except OSError as error:
        warn(f"the words of IMDB could not be cached in {path}: {error}")


def _digest(tensors: Mapping[str, Tensor]) -> str:
    arrays: Any = [tensors[name].numpy() for name in NAMES]
    return sha256(*(memoryview(array).cast("B") for array in arrays))
