"""Lowered modules under `torch.func.vmap`: each of many is rounded as if it were alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

import qlangevin as ql
from qlangevin import lowering
from tests.helpers.networks import build
from tests.helpers.strategies import NAMES

SAMPLES = 5
SHAPES = [(), (7,), (0,), (1,), (40,), (4, 6), (1, 6), (3, 40), (2, 3, 4), (2, 3, 4, 5)]


def spread(*shape: int) -> Tensor:
    """Return samples and rows of very different sizes, so that a result with the block of another sample differs."""
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(shape, generator=generator)
    return (
        y
        * 2.0 ** torch.randint(-6, 7, shape, generator=generator)
        * 4.0 ** torch.arange(shape[0]).reshape(-1, *[1] * (len(shape) - 1))
    )


def lowered_identity(format: str, training: bool = False) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Return a lowered module, and a function that runs it with the random bits of its first run."""
    module = ql.lower(nn.Identity(), format, None, layers=nn.Identity, seed=5).train(training)

    def quantize(x: Tensor) -> Tensor:
        lowering.load_state_dict(module, dict.fromkeys(lowering.state_dict(module), 0))
        y: Tensor = module(x)
        return y

    return module, quantize


@pytest.mark.parametrize("format", NAMES)
def test_every_format_and_shape_bit_for_bit(format: str) -> None:
    _, quantize = lowered_identity(format)
    for shape in SHAPES:
        x = spread(SAMPLES, *shape)
        assert torch.equal(vmap(quantize)(x), torch.stack([quantize(one) for one in x])), shape


@pytest.mark.parametrize("format", NAMES)
def test_stochastic_rounding_has_the_bits_of_each_alone(format: str) -> None:
    _, quantize = lowered_identity(format, training=True)
    for shape in SHAPES:
        x = spread(SAMPLES, *shape)
        assert torch.equal(vmap(quantize)(x), torch.stack([quantize(one) for one in x])), shape


def test_training_counts_once() -> None:
    module, _ = lowered_identity("bfp8", training=True)
    vmap(module)(spread(SAMPLES, 4, 6))
    assert list(lowering.state_dict(module).values()) == [1]
    module.eval()
    vmap(module)(spread(SAMPLES, 4, 6))
    assert list(lowering.state_dict(module).values()) == [1]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4", "fp8_e4m3"])
@pytest.mark.parametrize("dim", [1, 2, -1])
def test_samples_along_any_dim(format: str, dim: int, training: bool) -> None:
    _, quantize = lowered_identity(format, training)
    x = spread(4, 6, 5)
    alone = torch.stack([quantize(one) for one in x.unbind(dim)])
    assert torch.equal(vmap(quantize, in_dims=dim)(x), alone)
    assert torch.equal(vmap(quantize, in_dims=dim, out_dims=dim)(x), alone.movedim(0, dim))
    assert torch.equal(vmap(quantize, in_dims=dim, chunk_size=2)(x), alone)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4"])
def test_nested(format: str, training: bool) -> None:
    _, quantize = lowered_identity(format, training)
    x = spread(3, 4, 5, 6)
    alone = torch.stack([torch.stack([quantize(one) for one in some]) for some in x])
    assert torch.equal(vmap(vmap(quantize))(x), alone)
    assert torch.equal(vmap(vmap(quantize, in_dims=2), in_dims=1)(x), torch.stack(
        [torch.stack([quantize(one) for one in some.unbind(2)]) for some in x.unbind(1)]
    ))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["bfp8e5", "bfp8e5/tensor", "bfp8e5/4", "fixed8.4", "fp8_e4m3"])
def test_other_dtypes(format: str, dtype: torch.dtype) -> None:
    _, quantize = lowered_identity(format)
    x = (spread(SAMPLES, 4, 6) / 256).to(dtype)
    y = vmap(quantize)(x)
    assert y.dtype == dtype
    assert torch.equal(y, torch.stack([quantize(one) for one in x]))


def test_channels_last() -> None:
    x = spread(SAMPLES, 2, 3, 4, 5)
    last = torch.stack([one.contiguous(memory_format=torch.channels_last) for one in x])
    views = x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)  # each sample is channels-last in memory
    for format in ("bfp8", "bfp8/4", "fixed8.4"):
        for training in (False, True):
            _, quantize = lowered_identity(format, training)
            for many in (last, views):
                assert torch.equal(vmap(quantize)(many), torch.stack([quantize(one) for one in many.unbind(0)]))


def test_what_is_not_a_number_stays_with_its_sample() -> None:
    x = spread(SAMPLES, 4, 6)
    x[1, 2, 3], x[3, 0, 0] = torch.nan, torch.inf
    for format in ("bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4", "fp8_e4m3"):
        _, quantize = lowered_identity(format)
        alone = torch.stack([quantize(one) for one in x])
        torch.testing.assert_close(vmap(quantize)(x), alone, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", ["bfp8", "bfp8/tensor", "bfp8/4", "fixed8.4", "fp8_e4m3"])
@pytest.mark.parametrize("training", [False, True])
def test_networks_with_many_weights(format: str, training: bool) -> None:
    """Products in float64 are summed in another order under vmap, a difference of 1e-16 that rounding removes."""
    models = []
    for scale in (0.5, 1.0, 2.0):
        model, x, _ = build("mlp")
        for p in model.parameters():
            p.data.mul_(scale)
        models.append(ql.lower(model.double(), format, None, seed=2).train(training))
    alone = torch.stack([model(x.double()) for model in models]).detach()
    lowering.load_state_dict(models[0], dict.fromkeys(lowering.state_dict(models[0]), 0))
    many = vmap(lambda *state: functional_call(models[0], state, (x.double(),)))(*stack_module_state(models))
    assert torch.equal(many, alone)
    assert lowering.state_dict(models[0]) == lowering.state_dict(models[1])
