"""States as JSON and tensors: what goes in comes out, the same to the bit and of the same type."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.storage import files, state_json
from qlangevin.storage.files import DamagedError
from qlangevin.storage.tensor_file import DTYPES


def plain(tree: Any) -> Any:
    """A tree that can be compared: tensors as bytes, numbers with their types."""
    if isinstance(tree, Tensor):
        assert type(tree) is Tensor
        memory = tree.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(tree.dtype), tuple(tree.shape), bytes(memory.numpy())
    if isinstance(tree, dict):
        return [(plain(k), plain(v)) for k, v in tree.items()]
    if isinstance(tree, (list, tuple)):
        return type(tree).__name__, [plain(item) for item in tree]
    return type(tree).__name__, repr(tree)


def there_and_back(tree: Any) -> Any:
    tensors = dict[str, Tensor]()
    text = json.dumps(state_json.flatten(tree, tensors, "here"), allow_nan=False)
    return state_json.unflatten(files.parse_json(text, "it"), tensors)


TENSORS = [
    torch.randn(3, 2),
    torch.tensor(2.5),
    torch.zeros(0, 3),
    torch.ones(2, dtype=torch.bool),
    torch.tensor([-0.0]),
]
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(TENSORS)
SIMPLE = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
KEYS = st.recursive(SIMPLE, lambda keys: st.lists(keys, max_size=3).map(tuple), max_leaves=3)


def _larger(trees: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(trees, max_size=4)
    return lists | lists.map(tuple) | st.dictionaries(KEYS, trees, max_size=4)


@given(st.recursive(LEAVES, _larger, max_leaves=20))
def test_any_tree_comes_back(tree: Any) -> None:
    assert plain(there_and_back(tree)) == plain(tree)


@pytest.mark.parametrize("tree", [{"tensor": 1}, {"float": "nan"}, {"tuple": []}, {"dict": [[1, 2]]}, {}, {1: {2: ()}}])
def test_dicts_that_look_like_our_own_notation_come_back(tree: Any) -> None:
    assert plain(there_and_back(tree)) == plain(tree)


def test_tensors_of_every_dtype_come_back_through_a_file(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        for shape in ((), (0,), (2, 0, 3), (5,), (3, 7)):
            numbers = torch.randint(0, 2, shape, generator=generator) * 3 - 1
            tensors[f"{dtype} {shape}"] = numbers.to(dtype)
    tensors["not finite"] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0])
    tensors["transposed"] = torch.arange(6).view(2, 3).T
    tensors["expanded"] = torch.ones(1).expand(4)
    tensors["with gradient"] = nn.Parameter(torch.ones(2))
    model = nn.Linear(1, 1)
    ql.save_checkpoint(tmp_path, model, tensors=tensors)
    found = ql.load_checkpoint(tmp_path, model)["tensors"]
    assert plain(found) == plain({name: t.detach().clone() for name, t in tensors.items()})
    for t in found.values():
        t.zero_()  # they are the caller's own, in memory of their own
    assert plain(ql.load_checkpoint(tmp_path, model)["tensors"]["transposed"])[1] == (3, 2)


def test_numbers_of_numpy_become_numbers() -> None:
    tree = {"f": np.float32(0.5), "d": np.float64(np.inf), "i": np.int64(3), "b": np.bool_(True), np.int8(1): "key"}
    assert plain(there_and_back(tree)) == plain({"f": 0.5, "d": float("inf"), "i": 3, "b": True, 1: "key"})


def test_other_mappings_become_dicts() -> None:
    assert plain(there_and_back(OrderedDict(b=1, a=2))) == plain({"b": 1, "a": 2})


@pytest.mark.parametrize(
    ("counters", "where"),
    [
        ({"best": object()}, "counters.best is a object"),
        ({"a": {"b": [0, (1, {2, 3})]}}, r"counters.a.b.1.1 is a set"),
        ({"a": {3: b"x"}}, "counters.a.3 is a bytes"),
        ({"a": [np.zeros(3)]}, "counters.a.0 is a ndarray"),
        ({"a": 1j}, "counters.a is a complex"),
        ({"f": print}, "counters.f is a builtin_function_or_method"),
        ({"a": {frozenset(): 1}}, "counters.a is a frozenset"),
        ({"a": {"b": torch.zeros(2, dtype=torch.uint16)}}, r"counters.a.b.*torch.uint16"),
        ({"a": [torch.zeros(2, dtype=torch.complex128)]}, r"counters.a.0.*torch.complex128"),
        ({"a": torch.eye(2).to_sparse()}, r"counters.a .*sparse"),
        ({"a": torch.zeros(2, device="meta")}, r"counters.a .*meta"),
        ({"a": ql.encode(torch.ones(2, 3), "bfp8")}, "counters.a .*QTensor"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path, counters: dict[str, Any], where: str
) -> None:
    with pytest.raises(TypeError, match=where):
        ql.save_checkpoint(tmp_path, nn.Linear(1, 1), **counters)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tensor", [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag])
def test_tensors_that_are_conjugate_by_a_flag_come_back(tmp_path: Path, tensor: Tensor) -> None:
    model = nn.Linear(1, 1)
    ql.save_checkpoint(tmp_path, model, tensor=tensor)
    assert torch.equal(ql.load_checkpoint(tmp_path, model)["tensor"], tensor)


@pytest.mark.parametrize("name", ["é", '\0\n"\\', "#1", "__metadata__", "model.weight", "😀", "\ud800"])
def test_any_word_can_be_the_name_of_a_tensor(tmp_path: Path, name: str) -> None:
    model = nn.Linear(1, 1)
    counters: dict[str, Any] = {name: torch.ones(3), "found": {name: torch.ones(2)}}
    ql.save_checkpoint(tmp_path, model, **counters)
    found = ql.load_checkpoint(tmp_path, model)
    assert torch.equal(found["found"][name], torch.ones(2))
    assert torch.equal(found[name], torch.ones(3))


@pytest.mark.parametrize(
    "tree",
    [
        *[{"tensor": "absent"}, {"tensor": []}, {"tensor": None}, {"float": "x"}, {"float": None}, {"float": [1]}],
        *[{"tuple": 3}, {"dict": 3}, {"dict": [[1]]}, {"dict": [3]}, {"dict": [[[], 1]]}, {"other": 1}, {}],
        *[{"tensor": "a", "float": "b"}, [{"code": "print(1)"}], {"tuple": [{"tuple": None}]}],
    ],
)
def test_what_is_no_tree_is_damaged(tree: Any) -> None:
    with pytest.raises(DamagedError):
        state_json.unflatten(tree, {})


def test_the_states_of_all_generators_come_back() -> None:
    before = state_json.random_state()
    np.random.standard_normal()  # leaves half of a pair behind
    random.gauss(0, 1)

    def draw() -> tuple[Any, ...]:
        return torch.randn(9).tolist(), random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist()

    state = there_and_back(state_json.random_state())
    wanted = draw()
    draw()
    state_json.set_random_state(state)
    assert draw() == wanted
    state_json.set_random_state(before)
