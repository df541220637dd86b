"""Layers chosen by types, patterns of names and predicates, and rules that are refused."""

from typing import Any

import pytest
from torch import nn

import qlangevin as ql
from qlangevin._select import Choice, select_modules

NAMES = ["", "encoder", "encoder.0", "encoder.1", "encoder.2", "norm", "head"]


def model() -> nn.Module:
    encoder = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.ConvTranspose2d(2, 2, 3))
    return nn.ModuleDict({"encoder": encoder, "norm": nn.BatchNorm2d(2), "head": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("layers", "skip", "expected"),
    [
        (nn.Module, None, NAMES),
        (nn.Linear, None, ["head"]),
        (nn.modules.conv._ConvNd, None, ["encoder.0", "encoder.2"]),  # a type stands for those derived from it
        (nn.LSTM, None, []),  # a type that the model has no layer of is no mistake
        ("head", None, ["head"]),
        ("encoder.*", None, ["encoder.0", "encoder.1", "encoder.2"]),
        ("encoder.[02]", None, ["encoder.0", "encoder.2"]),
        ("*.?", None, ["encoder.0", "encoder.1", "encoder.2"]),
        ("", None, [""]),
        (lambda name, module: name.endswith("2"), None, ["encoder.2"]),
        (lambda name, module: isinstance(module, nn.ReLU), None, ["encoder.1"]),
        (lambda name, module: len(list(module.children())), None, ["", "encoder"]),  # anything true is true
        ([nn.Linear, "encoder.0"], None, ["encoder.0", "head"]),
        ((nn.Linear, nn.Linear, "head", lambda name, module: name == "head"), None, ["head"]),
        ((rule for rule in ("norm", nn.ReLU)), None, ["encoder.1", "norm"]),
        ([], None, []),
        (nn.Module, [], NAMES),
        (nn.Module, nn.Module, []),
        (nn.Module, "*", []),
        (nn.Module, ["encoder*", ""], ["norm", "head"]),
        ("encoder.*", nn.ReLU, ["encoder.0", "encoder.2"]),
        ([nn.Linear, nn.Conv2d], lambda name, module: "." in name, ["head"]),
        (nn.Module, [nn.BatchNorm2d, "head", lambda name, module: name.startswith("encoder")], [""]),
    ],
)
def test_what_rules_choose(layers: Choice, skip: Choice | None, expected: list[str]) -> None:
    net = model()
    chosen = select_modules(net, layers, skip)
    assert list(chosen) == expected  # in the order of the model
    assert all(chosen[name] is net.get_submodule(name) for name in expected)


def test_predicates_get_name_and_module() -> None:
    net, seen = model(), []
    select_modules(net, lambda name, module: bool(seen.append((name, module))))  # type: ignore[func-returns-value]
    assert seen == list(net.named_modules())


def test_a_shared_module_is_chosen_once() -> None:
    shared = nn.Linear(2, 2)
    net = nn.Sequential(shared, nn.ReLU(), shared)
    assert select_modules(net, nn.Linear) == {"0": shared}
    assert select_modules(net, nn.Module, nn.Linear).keys() == {"", "1"}


def test_the_case_of_letters_counts() -> None:
    with pytest.raises(ValueError, match="the pattern 'HEAD' fits no layer"):
        select_modules(model(), "HEAD")


@pytest.mark.parametrize("where", ["layers", "skip"])
def test_a_pattern_that_matches_no_layer_is_refused(where: str) -> None:
    rules: dict[str, Any] = {"layers": nn.Module, where: ["head", "encodr.*"]}
    with pytest.raises(
        ValueError, match=r"'encodr.\*' fits no layer; layers are named 'encoder', 'encoder.0', .*'head'"
    ):
        select_modules(model(), **rules)
    with pytest.raises(ValueError, match=r"'weight' fits no layer; .* the model has no submodules"):
        select_modules(nn.Linear(1, 1), **{**rules, where: "weight"})


@pytest.mark.parametrize("where", ["layers", "skip"])
@pytest.mark.parametrize("wrong", [int, [int], [3], [nn.Linear, 3], [None], [["head"]], 3, 2.5])
def test_rules_of_another_kind_are_named(where: str, wrong: Any) -> None:
    rules: dict[str, Any] = {"layers": nn.Module, where: wrong}
    with pytest.raises(TypeError, match=f"^{where} must be types of modules.*got "):
        select_modules(model(), **rules)


def test_a_module_is_not_a_rule() -> None:
    # It can be called, but not to ask it whether a layer is wanted.
    net = model()
    with pytest.raises(TypeError, match=r"^skip must be types of modules, .* got Linear"):
        select_modules(net, nn.Module, net.get_submodule("head"))


@pytest.mark.parametrize("function", [ql.pack, ql.lower])
def test_only_modules_have_layers(function: Any) -> None:
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got generator"):
        function(nn.Linear(2, 2).parameters(), "bfp8")
