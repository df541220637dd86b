"""Names that differ by what wraps a model are matched; others are explained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.storage.names import match_names
from tests.helpers.posteriors import X, small_model, store_draws


class Wrapper(nn.Module):
    """A model inside of another, as an attribute of this name."""

    def __init__(self, name: str, model: nn.Module) -> None:
        super().__init__()
        self.add_module(name, model)
        self.inner = name

    def forward(self, x: Tensor) -> Any:
        return self.get_submodule(self.inner)(x)


def nest(*names: str) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for name in reversed(names):
            model = Wrapper(name, model)
        return model

    return wrap


WRAPPERS = {
    "module.": nest("module"),
    "net.": nest("net"),
    "base_model.model.": nest("base_model", "model"),
    "_orig_mod. of a layer": lambda model: nn.Sequential(Wrapper("_orig_mod", model[0]), *model[1:]),  # type: ignore[index]
    "data parallel": nn.DataParallel,
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_prefix_more_or_less_is_matched(wrap: Any, tmp_path: Path) -> None:
    plain = small_model()
    inside = store_draws(tmp_path / "plain", model=copy.deepcopy(plain))
    outside = store_draws(tmp_path / "wrapped", model=wrap(copy.deepcopy(plain)))
    expected = ql.Posterior.open(inside, plain).samples(X)
    for store in (inside, outside):
        for model in (plain, wrap(plain)):
            inner = copy.deepcopy(plain)
            torch.testing.assert_close(ql.Posterior.open(store, model).samples(X), expected)
            target = wrap(inner) if model is not plain else inner
            store[2].load_into(target)
            torch.testing.assert_close(inner(X).softmax(1), expected[2])


def test_names_are_matched_all_or_none() -> None:
    assert match_names(["a.w", "b.w"], ["b.w", "a.w"]) == {"a.w": "a.w", "b.w": "b.w"}
    assert match_names(["a.w", "b.w"], ["x.y.b.w", "x.y.a.w"]) == {"a.w": "x.y.a.w", "b.w": "x.y.b.w"}
    assert match_names(["x.a", "x.b"], ["a", "b"]) == {"x.a": "a", "x.b": "b"}
    assert match_names(["w"], ["x.w"]) == {"w": "x.w"}
    assert match_names(["a.w", "b.w"], ["x.a.w", "y.b.w"]) == {}
    assert match_names(["a.w", "b.w"], ["x.a.w"]) == {}
    assert match_names(["a", "b"], ["a", "c"]) == {}
    assert match_names(["module.a", "a"], ["module.module.a", "module.a"]) == {
        "module.a": "module.module.a",
        "a": "module.a",
    }
    assert match_names([], []) == {}


def test_another_prefix_with_other_parts_is_explained(tmp_path: Path) -> None:
    store = store_draws(tmp_path, model=nest("net")(small_model()))
    bigger = nn.Sequential(*small_model().children(), nn.Linear(3, 3))
    message = (
        r"of another model: '3.weight' is in the model only; '3.bias' is in the model only. "
        r"The other names of the store are those of the model after 'net.': give the model in the wrapper"
    )
    with pytest.raises(ValueError, match=message):
        ql.Posterior.open(store, bigger)
    with pytest.raises(
        ValueError, match=r"'net.2.weight' is parameter float32 \[3, 8\] there and .* \[5, 8\] in the model"
    ):
        ql.Posterior.open(store, small_model(5))


def test_a_base_without_its_adapters_is_explained(tmp_path: Path) -> None:
    model = nn.Module()
    model.layer = nn.Linear(4, 3)
    model.lora_A = nn.Linear(4, 2)
    store = store_draws(tmp_path, model=model)
    base = nn.Module()
    base.layer = nn.Linear(4, 3)
    with pytest.raises(ValueError, match=r"'lora_A.weight' is missing in the model.*The store has adapters \(lora_"):
        ql.Posterior.open(store, base)


def test_a_model_with_nothing_in_common_is_refused_without_a_guess(tmp_path: Path) -> None:
    store = store_draws(tmp_path)
    with pytest.raises(ValueError, match=r"'0.weight' is missing in the model.*'weight' is in the model only$"):
        ql.Posterior.open(store, nn.Linear(4, 8, bias=False))
