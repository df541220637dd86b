"""IMDB: words, their numbers, the order of the texts, and what is kept of them."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qlangevin.experiments.data import load_dataset, text
from qlangevin.experiments.data.text import (
    Reviews,
    encode_texts,
    pad_texts,
    read_imdb,
    read_vocabulary,
    split_words,
)
from qlangevin.storage.tensor_file import tensor_chunks
from tests.helpers.official import REVIEWS, archive, real, write

PACKED = {f"aclImdb/{name}": review.encode() for name, review in REVIEWS.items()}
# Of the training texts in REVIEWS: how often, then the alphabet.
WORDS = ["", "?", "bad", "film", "good", ".", "a", "i", "!", ",", ":", "it", "it's", "love", "loved"]
TRAIN = [  # blame first; by number, so that 2 is before 10
    (0, ["it's", "bad", ":", "a", "bad", "film", "."]),
    (1, ["good", ",", "good", "film", "!", "i", "loved", "it", "."]),
    (0, ["bad"]),
    (1, ["a", "film", "i", "love"]),
    (1, ["good"]),
]
TEST = [(0, ["bad", "?", ",", "bad", "film"]), (1, ["good", "?"])]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/qlangevin"


@pytest.fixture
def packed(tmp_path: Path, cache: Path) -> Path:
    path = tmp_path / "imdb/aclImdb_v1.tar.gz"
    archive(path, PACKED)
    return path


def spelled(reviews: Reviews) -> list[tuple[int, list[str]]]:
    parts = reviews.numbers.split(reviews.lengths.tolist())
    labels = reviews.labels.tolist()
    return [(label, [WORDS[i] for i in part.tolist()]) for label, part in zip(labels, parts, strict=True)]


# ---- words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("Don't!<br />", ["don't", "!"]),
        ("a<br/>b<BR>c", ["a", "b", "c"]),
        ("'quoted' rock'n'roll ends'", ["'", "quoted", "'", "rock'n'roll", "ends", "'"]),
        ("7/10... _really_", ["7", "/", "10", ".", ".", ".", "_", "really", "_"]),
        ("Été à Ωμέγα", ["été", "à", "ωμέγα"]),
        (" \t\n", []),
        ("", []),
    ],
)
def test_words_and_punctuation(line: str, words: list[str]) -> None:
    assert split_words(line) == words


@given(st.text())
def test_nothing_but_white_space_is_lost(line: str) -> None:
    line = line.replace("<", "")
    assert "".join(split_words(line)) == "".join(line.lower().split())


# ---- reading


def test_words_are_numbered_by_frequency_and_classes_take_turns(packed: Path) -> None:
    train, test = read_imdb(packed)
    assert spelled(train) == TRAIN
    assert spelled(test) == TEST


def test_other_texts_have_the_numbers_of_the_reviews(packed: Path) -> None:
    vocabulary = read_vocabulary(packed)
    assert vocabulary == WORDS[2:]
    encoded = encode_texts(["Good film!", "", "A worse film"], vocabulary)
    assert spelled(encoded) == [(0, ["good", "film", "!"]), (0, []), (0, ["a", "?", "film"])]


@pytest.mark.parametrize("folder", ["", "aclImdb", "imdb/aclImdb"])
def test_folders_give_the_same_as_the_archive(tmp_path: Path, cache: Path, folder: str) -> None:
    write(tmp_path / "data" / folder, {name: review.encode() for name, review in REVIEWS.items()})
    write(tmp_path / "data" / folder, {"train/pos/notes.txt": b"not a review", "train/labeledBow.feat": b"9 0:9"})
    found = load_dataset("imdb", tmp_path / "data", length=9, words=14)
    assert (found.classes, found.shape, found.words) == (2, (9,), 14)
    assert found.note == "5 of 25000 training texts, 2 of 25000 test texts"
    x, y = found.train.__getitems__([1, 2])
    assert y.tolist() == [1, 0]
    assert x.dtype == torch.int64
    assert x.tolist() == [[4, 9, 4, 3, 8, 7, 1, 11, 5], [2, 0, 0, 0, 0, 0, 0, 0, 0]]  # loved is beyond the first 14
    assert load_dataset("imdb", tmp_path / "data", limit_train=2).train.labels.tolist() == [0, 1]
    assert load_dataset("imdb", tmp_path / "data").words == len(WORDS) == 15


def test_long_texts_keep_their_last_words() -> None:
    reviews = Reviews(torch.arange(2, 12, dtype=torch.int32), torch.tensor([5, 0, 1, 4]), torch.zeros(4))
    assert pad_texts(reviews, 4, 10).tolist() == [[3, 4, 5, 6], [0, 0, 0, 0], [7, 0, 0, 0], [8, 9, 1, 1]]
    assert pad_texts(reviews, 6, 99).tolist()[0] == [2, 3, 4, 5, 6, 0]


def test_a_part_without_a_class_is_named(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "aclImdb_v1.tar.gz"
    archive(path, {name: review for name, review in PACKED.items() if "train/neg" not in name})
    with pytest.raises(
        ValueError, match=f"{path} has no reviews in train/neg; expected are files train/neg/ID_RATING.txt"
    ):
        load_dataset("imdb", tmp_path)
    write(tmp_path / "else", {"train/photo.jpg": b""})
    with pytest.raises(ValueError, match=r"else/\S*train has no reviews in train/neg and train/pos; expected"):
        load_dataset("imdb", tmp_path / "else")
    archive(path, dict.fromkeys(PACKED, b" "))
    with pytest.raises(ValueError, match="the reviews of IMDB have no words"):
        load_dataset("imdb", tmp_path)
    assert not cache.exists()


def test_a_damaged_archive_is_named(packed: Path, cache: Path) -> None:
    whole = packed.read_bytes()
    for wrong in (whole[: len(whole) // 2], b"<html>" * 100):
        packed.write_bytes(wrong)
        with pytest.raises(
            ValueError, match=f"^{packed} is damaged: it cannot be unpacked .*; remove it and get it again"
        ):
            read_imdb(packed)
    packed.write_bytes(b"")
    with pytest.raises(ValueError, match=f"the archive of IMDB is damaged: {packed} has 0 bytes"):
        read_imdb(packed)
    assert not cache.exists()


# ---- what is kept


def unreadable(*arguments: object) -> None:
    raise AssertionError("the texts are read again")


def test_texts_are_read_once(packed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = read_imdb(packed)
    [kept] = cache.iterdir()
    assert kept.suffix == ".safetensors"
    monkeypatch.setattr(text, "_read", unreadable)
    after = read_imdb(packed)
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    copy = packed.with_name("copy.tar.gz")  # what counts is the content
    copy.write_bytes(packed.read_bytes())
    assert spelled(read_imdb(copy)[0]) == TRAIN


def test_other_texts_are_read_anew(packed: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_imdb(packed)
    archive(packed, PACKED | {"aclImdb/test/pos/0_8.txt": b"good film"})
    assert spelled(read_imdb(packed)[1])[1] == (1, ["good", "film"])
    monkeypatch.setattr(text, "VERSION", 99)
    read_imdb(packed)
    assert len(list(cache.iterdir())) == 3


def test_changed_folders_are_read_anew(tmp_path: Path, cache: Path) -> None:
    write(tmp_path, {name: review.encode() for name, review in REVIEWS.items()})
    assert spelled(read_imdb(tmp_path / "train")[1]) == TEST
    file = tmp_path / "test/pos/0_8.txt"
    about = file.stat()
    file.write_bytes(b"good film")  # as long as it was
    os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    assert spelled(read_imdb(tmp_path / "train")[1])[1] == (1, ["good", "film"])


@pytest.mark.parametrize("damage", ["cut", "flipped", "header", "empty", "other"])
def test_a_damaged_cache_is_written_anew(packed: Path, cache: Path, damage: str) -> None:
    read_imdb(packed)
    [kept] = cache.iterdir()
    whole = kept.read_bytes()
    other = tensor_chunks({"train.numbers": torch.zeros(3)})
    kept.write_bytes(
        {
            "cut": whole[:-5],
            "flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
            "header": b"\xff" * 8 + whole[8:],
            "empty": b"",
            "other": b"".join(other),
        }[damage]
    )
    train, test = read_imdb(packed)
    assert (spelled(train), spelled(test)) == (TRAIN, TEST)
    assert kept.read_bytes() == whole


def test_texts_are_read_even_if_they_cannot_be_kept(packed: Path, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(b"a file is in the way")
    with pytest.warns(UserWarning, match=f"the words of IMDB could not be cached in {cache}"):
        train, _ = read_imdb(packed)
    assert spelled(train) == TRAIN


def test_texts_are_on_the_cpu_whatever_the_default_device_is(packed: Path) -> None:
    for _ in range(2):  # read, then kept
        with torch.device("meta"):
            found = load_dataset("imdb", packed.parent, length=3)
            x, _ = found.train.__getitems__([0])
        assert x.tolist() == [[2, 3, 5]]


@pytest.mark.slow
@real
def test_real_imdb() -> None:
    found = load_dataset("imdb")
    assert (found.note, found.words, found.shape) == (None, 25_000, (400,))
    for part in (found.train, found.test):
        assert part.labels.tolist() == [0, 1] * 12_500
    x, _ = found.train.__getitems__(range(25_000))
    padding = x == 0
    assert bool((padding[:, 1:] >= padding[:, :-1]).all())
    assert float((x == 1).sum() / (~padding).sum()) < 0.03
