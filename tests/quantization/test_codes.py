"""Codes of numbers that are on the grid, and only of those: every path, instruction set and number of threads."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from qlangevin import FP32, Float, Format, Key, encode, native, parse, quantize
from qlangevin.quantization.codes import decode_op, encode_exactly
from tests.helpers.strategies import NAMES, formats

SMALL = [name for name in NAMES if parse(name).storage_bits < 32]
SHAPES = [(), (0,), (3, 0), (1,), (5,), (7, 33), (2, 3, 40), (3, 1029)]
# Hypothesis asks for fixtures of each example; these two set a state that all examples share.
shared = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32)


def on_grid(shape: tuple[int, ...], format: str | Format, seed: int = 0, magnitude: float = 1.0) -> Tensor:
    """Numbers of a format, no zero among them negative."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    return quantize(x, format, "stochastic", Key(seed)) + 0.0


def exactly(x: Tensor, format: str | Format) -> tuple[Tensor, Tensor | None] | None:
    """`encode_exactly`, after comparing its two paths."""
    found = encode_exactly(x, parse(format))
    with native.disabled():
        other = encode_exactly(x, parse(format))
    assert (found is None) == (other is None)
    if found is not None and other is not None:
        assert found[0].dtype == other[0].dtype
        assert torch.equal(found[0], other[0])
        assert (found[1] is None) == (other[1] is None)
        assert found[1] is None or other[1] is None or torch.equal(found[1], other[1])
    return found


def decoded(found: tuple[Tensor, Tensor | None] | None, format: str | Format) -> Tensor:
    assert found is not None
    values: Tensor = decode_op(*found, str(format))
    return values


@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_on_the_grid_get_codes_that_decode_to_the_same_bits(shape: tuple[int, ...], every_level: str) -> None:
    for name in SMALL:
        for magnitude in (1.0, 1e-38, 1e30):
            x = on_grid(shape, name, 1, magnitude)
            found = exactly(x, name)
            assert torch.equal(bits(decoded(found, name)), bits(x)), (name, magnitude)
            assert found is not None
            assert found[0].shape == x.shape
            assert parse(name).storage_bits == 4 or torch.equal(found[0], encode(x, name).codes)


@shared
@given(format=formats().filter(lambda f: f.storage_bits < 32), seed=st.integers(0, 2**32), power=st.integers(-130, 120))
def test_any_format_any_size(format: Format, seed: int, power: int, every_level: str) -> None:
    x = on_grid((4, 37), format, seed, 2.0**power)
    assert torch.equal(bits(decoded(exactly(x, format), format)), bits(x))


@shared
@given(format=formats().filter(lambda f: f.storage_bits < 32), data=st.data())
def test_one_number_one_ulp_off_is_enough(format: Format, data: st.DataObject, every_level: str, threads: int) -> None:
    # Below 32 bits every grid is coarser than float32's own, so that the neighbour of a number on it is not on it.
    x = on_grid((5, 41), format, data.draw(st.integers(0, 2**32)), 2.0 ** data.draw(st.integers(-20, 20)))
    assert exactly(x, format) is not None
    place = data.draw(st.integers(0, x.numel() - 1))
    towards = torch.tensor(data.draw(st.sampled_from([torch.inf, -torch.inf])))
    x.view(-1)[place] = torch.nextafter(x.view(-1)[place], towards)
    assert exactly(x, format) is None


@pytest.mark.parametrize("what", ["nan", "inf", "-inf", "above", "below", "far above"])
def test_numbers_without_a_code_are_refused(what: str, every_level: str) -> None:
    for name in SMALL:
        high, low, infinity = parse(name).high, parse(name).low, torch.tensor(torch.inf)
        number = {
            "above": float(torch.nextafter(torch.tensor(high), infinity)),
            "below": float(torch.nextafter(torch.tensor(low), -infinity)),
            "far above": torch.finfo(torch.float32).max,
        }.get(what, torch.nan if what == "nan" else float(infinity) * (-1 if what == "-inf" else 1))
        for place in (0, 57, 7 * 33 - 1):  # in the midst of vectors and in what is left over at the end
            x = on_grid((7, 33), name)
            x.view(-1)[place] = number
            assert exactly(x, name) is None, (name, place)


def test_the_sign_of_zero_is_not_lost(every_level: str) -> None:
    # Integers have one zero. Floats have two, each with a code of its own.
    for name in SMALL:
        x = on_grid((7, 33), name)
        x.view(-1)[57] = -0.0
        found = exactly(x, name)
        if isinstance(parse(name), Float):
            assert torch.equal(bits(decoded(found, name)), bits(x))
        else:
            assert found is None


@pytest.mark.parametrize("name", ["fixed8.3", "bfp8", "bfp8/tensor", "bfp8/32", "bf16"])
def test_no_part_of_a_large_tensor_is_overlooked(name: str, every_level: str, threads: int) -> None:
    x = on_grid((100, 1001), name)  # more than enough for two threads to share it
    assert torch.equal(bits(decoded(exactly(x, name), name)), bits(x))
    for place in (0, 50_000, 100_099):
        spoilt = x.clone()
        spoilt.view(-1)[place] = torch.nextafter(x.view(-1)[place], torch.tensor(torch.inf))
        assert encode_exactly(spoilt, parse(name)) is None


@shared
@given(format=formats().filter(lambda f: f.storage_bits < 32), seed=st.integers(0, 2**32))
def test_arbitrary_bit_patterns(format: Format, seed: int, every_level: str) -> None:
    # Every float32 there is, NaNs and subnormal numbers too: there are codes if and only if rounding changes nothing.
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-(2**31), 2**31, (10, 1), dtype=torch.int32, generator=generator).view(torch.float32)
    for one in x:
        found = exactly(one, format)
        assert (found is not None) == torch.equal(quantize(one, format), one)
        assert found is None or torch.equal(bits(decoded(found, format)), bits(one))


@pytest.mark.parametrize("format", [FP32, parse("fixed25.20"), parse("bfp24e7"), parse("e8m21")], ids=str)
def test_codes_as_large_as_the_numbers_are_not_worth_it(format: Format) -> None:
    assert encode_exactly(on_grid((3, 4), format), format) is None


def test_exponents_are_those_of_the_blocks() -> None:
    found = exactly(torch.tensor([[1.0, -0.5], [6.0, 0.25]]), "bfp8")
    assert found is not None
    assert found[0].tolist() == [[64, -32], [96, 4]]
    assert found[1] is not None
    assert found[1].tolist() == [0, 2]
