"""Random bits of layers follow from their names; two layers of one network that would draw the same are refused."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import lower, lowering, unlower
from qlangevin.lowering.handler import find_handler

SAME = (
    r"two layers of this network draw the same random bits: both were lowered under the name '.*', with the same seed"
)
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 6))
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.encoder(x))
        return output


def streams(model: nn.Module) -> dict[str, int]:
    handlers = {name: find_handler(module) for name, module in model.named_modules()}
    return {name: handler.stream for name, handler in handlers.items() if handler is not None}


def train(model: nn.Module) -> Tensor:
    output: Tensor = model(X)
    output.square().sum().backward()
    return output.detach()


def test_lowering_in_parts_gives_the_bits_of_lowering_the_whole() -> None:
    whole = lower(Network(), "bfp8", "bfp8")
    parts = Network()
    lower(parts, "bfp8", "bfp8", layers="head.*")
    lower(parts, "bfp8", "bfp8", layers="encoder.*")
    assert streams(whole) == streams(parts)
    assert len(set(streams(whole).values())) == 6
    assert torch.equal(train(whole), train(parts))


def test_parts_that_know_their_names_draw_the_bits_of_the_whole() -> None:
    whole, parts = lower(Network(), "bfp8", "bfp8", functions=False), Network()  # those of the root are in no part
    lower(parts.head, "bfp8", "bfp8", prefix="head")
    lower(parts.encoder[0], "bfp8", "bfp8", prefix="encoder.0")  # a layer by itself
    lower(parts.encoder, "bfp8", "bfp8", prefix="encoder", layers=["1", "2"])
    assert streams(whole) == streams(parts)
    assert torch.equal(train(whole), train(parts))
    assert lowering.settings(whole) == lowering.settings(parts)  # what a checkpoint compares
    lowering.load_state_dict(parts, lowering.state_dict(whole))
    assert torch.equal(train(whole), train(parts))


@pytest.mark.parametrize("prefix", [".encoder", "encoder.", "."])
def test_a_prefix_is_a_name(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix must be the name of a module"):
        lower(Network().encoder, "bfp8", prefix=prefix)


def test_the_error_tells_the_remedy() -> None:
    model = Network()
    lower_parts(model)
    with pytest.raises(RuntimeError, match=r"lower\(net\.encoder, \.\.\., prefix='encoder'\)"):
        train(model)


def test_bits_do_not_depend_on_which_other_layers_are_lowered() -> None:
    few = streams(lower(Network(), "bfp8", layers="head.2"))
    assert few.items() <= streams(lower(Network(), "bfp8")).items()
    compiled: Any = torch.compile(Network(), backend="eager")
    assert set(streams(lower(compiled, "bfp8")).values()) == set(streams(lower(Network(), "bfp8")).values())


def lower_parts(model: Network) -> None:
    lower(model.encoder, "bfp8", "bfp8")
    lower(model.head, "bfp8", "bfp8")


def lower_layers(model: Network) -> None:
    for module in (model.encoder[0], model.head[2]):
        lower(module, "bfp8")


def lower_errors(model: Network) -> None:
    lower(model.encoder[0], None, "bfp8")
    lower(model.head[2], None, "bfp8")


def copy_a_lowered_layer(model: Network) -> None:
    model.encoder[2] = copy.deepcopy(lower(model.head[0], "bfp8"))


def load_a_lowered_layer(model: Network) -> None:
    buffer = io.BytesIO()
    torch.save(lower(model.head[0], "bfp8"), buffer)
    buffer.seek(0)
    model.encoder[2] = torch.load(buffer, weights_only=False)


@pytest.mark.parametrize(
    "prepare", [lower_parts, lower_layers, lower_errors, copy_a_lowered_layer, load_a_lowered_layer]
)
def test_two_layers_of_one_network_with_the_same_bits_are_refused(prepare: Callable[[Network], None]) -> None:
    model = Network()
    prepare(model)
    with pytest.raises(RuntimeError, match=SAME):
        train(model)
    model.eval()
    train(model)  # rounds to nearest: no random bits


def test_parts_with_streams_or_seeds_of_their_own() -> None:
    for other in ({"stream": 1}, {"seed": 1}):
        model = Network()
        lower(model.encoder, "bfp8", "bfp8")
        lower(model.head, "bfp8", "bfp8", **other)  # type: ignore[arg-type]
        train(model)
        assert len(set(streams(model).values())) == 6


def test_rounding_to_nearest_needs_no_bits() -> None:
    model = Network()
    lower(model.encoder, "bfp8", rounding="nearest")
    lower(model.head, "bfp8", rounding="nearest")
    train(model)


def test_models_that_are_trained_apart_may_share_bits() -> None:
    one = lower(Network(), "bfp8", "bfp8")
    two, three = copy.deepcopy(one), lower(Network(), "bfp8", "bfp8")
    for _ in range(2):
        outputs = [train(model) for model in (one, two, three)]
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])
    two.eval()
    (one(X) + two(X)).sum().backward()  # evaluation draws no bits
    two.train()
    with pytest.raises(RuntimeError, match=SAME):
        (one(X) + two(X)).sum().backward()


def test_a_layer_may_run_several_times() -> None:
    one, other = lower(nn.Linear(5, 5), "bfp8", "bfp8"), lower(nn.Linear(5, 5), "bfp8", "bfp8")
    one(one(X)).sum().backward()
    loss = other(other(X)).sum()
    loss.backward(retain_graph=True)
    loss.backward()


def test_layers_that_are_gone_share_nothing() -> None:
    gone = lower(nn.Linear(5, 5), "bfp8", seed=77)
    handler = find_handler(gone)
    assert handler is not None
    assert not handler.bits.are_shared
    del handler, gone
    gc.collect()
    model = lower(nn.Sequential(nn.Linear(5, 5)), "bfp8", seed=77)
    unlower(model)
    gc.collect()
    lower(model, "bfp8", seed=77)
    handler = find_handler(model[0])
    assert handler is not None
    assert not handler.bits.are_shared


def test_counts_resume_under_the_names_of_the_whole_model() -> None:
    model = Network()
    lower(model.encoder, "bfp8")
    lower(model.head, "bfp8", stream=1)
    train(model)
    assert lowering.state_dict(model) == dict.fromkeys(streams(model), 1)
