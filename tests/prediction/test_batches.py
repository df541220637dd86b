"""Batches of many kinds, and their way to a device."""

from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any

import torch
from torch.nn.utils.rnn import pack_sequence

from qlangevin.prediction.batches import batch_size, list_tensors, move_batch, split_batch, split_inputs

X, Y = torch.ones(4, 2), torch.zeros(4)
META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


class Encoding(UserDict[str, Any]):
    """A tokenizer's output, which moves itself."""

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: t.to(device) for name, t in self.items()})


def test_what_is_there_stays_the_same_object() -> None:
    batches: list[Any] = [
        X,
        (X, Y),
        [X],
        {"x": X, "n": 3},
        Encoding(x=X),
        Pair(X, Y),
        {"deep": ({"x": X},)},
        "text",
        None,
    ]
    for batch in batches:
        assert move_batch(batch, torch.device("cpu")) is batch


def test_what_is_elsewhere_is_moved_in_its_container() -> None:
    batches: list[Any] = [X, (X, Y), [X], {"x": X, "n": 3}, Encoding(x=X), Pair(X, Y), {"deep": ({"x": X}, None)}]
    for batch in batches:
        moved = move_batch(batch, META)
        assert type(moved) is type(batch)
        assert [t.device for t in list_tensors(moved)] == [META] * len(list_tensors(batch))
    assert move_batch(pack_sequence([X, X]), META).data.device == META


def test_inputs_and_labels() -> None:
    assert split_batch(X) == (X, None)
    assert split_batch({"x": 1, "labels": 2}) == ({"x": 1, "labels": 2}, 2)
    assert split_batch({"x": 1}) == ({"x": 1}, None)
    assert split_batch((1, 2, 3)) == ((1, 2), 3)
    assert split_inputs({"x": 1, "labels": 2, "label": 3}) == ((), {"x": 1})
    assert split_inputs([1, 2]) == ((1, 2), {})
    packed = pack_sequence([X, X])
    assert split_inputs(packed)[0][0] is packed


def test_the_number_of_examples() -> None:
    assert [batch_size(b) for b in (X, (X, Y), {"x": {"y": X}}, "text", torch.tensor(1.0))] == [4, 4, 4, 1, 1]
