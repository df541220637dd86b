"""Formats: names, grids, ranges, and the value sets of hardware."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qlangevin import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, BlockFloat, FixedPoint, Float, Format, parse, quantize
from qlangevin.quantization.formats import check_holds
from tests.helpers.strategies import formats


@given(formats())
def test_a_name_stands_for_one_format(format: Format) -> None:
    assert parse(str(format)) == format
    assert parse(format) is format
    assert len({format, parse(str(format))}) == 1


@given(formats())
def test_the_ends_of_the_range_are_on_the_grid_and_nothing_beyond(format: Format) -> None:
    ends = torch.tensor([[format.low], [format.high]], dtype=torch.float64)
    assert format.is_representable(ends).all()
    beyond = ends + torch.tensor([[-1.0], [1.0]]) * format.gap(ends)
    assert not format.is_representable(beyond).any()


def test_names_read_as_the_documentation_says() -> None:
    assert parse("fixed8.3") == FixedPoint(bits=8, frac=3)
    assert parse("bfp8") == BlockFloat(8, "row")
    assert parse("bfp8/tensor") == BlockFloat(8, "tensor")
    assert parse("bfp8/32") == BlockFloat(8, 32)
    assert parse("bfp8e4") == BlockFloat(8, "row", exp_bits=4)
    assert parse("e4m3") == Float(exp=4, man=3)
    assert parse("fp32") == FP32


def test_fixed_point_has_the_papers_range() -> None:
    format = FixedPoint(8, 3)
    assert (format.low, format.high, format.step) == (-16.0, 15.875, 0.125)
    every = torch.arange(-200, 200, dtype=torch.float64) / 16
    assert int(format.is_representable(every).sum()) == int(((every * 8 % 1 == 0) & (every >= -16)).sum())


@pytest.mark.parametrize(("value", "gap"), [(1.0, 2**-6), (1.99, 2**-6), (2.0, 2**-5), (-0.3, 2**-8), (1e-45, 2**-134)])
def test_the_gap_of_a_block_is_set_by_its_largest_element(value: float, gap: float) -> None:
    block = torch.tensor([value, value / 2, 0.0])
    assert BlockFloat(8).gap(block).tolist() == [gap] * 3  # 2^(E - W + 2)


def test_the_gap_of_floats_follows_the_papers_formula() -> None:
    x = torch.tensor([1.0, 1.9, 2.0, 0.3, 2.0**-8, 2.0**-9, 0.0, 2.0**20])
    assert Float(4, 3).gap(x).log2().tolist() == [-3, -3, -2, -5, -11, -11, -11, 4]  # 2^(clip(E, -8, 7) - 3)


def test_e4m3_of_the_paper_has_271_values() -> None:
    format = Float(4, 3)
    multiples = torch.arange(-(2**19), 2**19 + 1, dtype=torch.float64) * 2.0**format.min_gap_exponent
    assert int(format.is_representable(multiples).sum()) == 271
    assert format.storage_bits == 16


@pytest.mark.parametrize("format", [FP8_E4M3, FP8_E5M2, FP16, BF16], ids=str)
def test_hardware_formats_are_torchs_dtypes_code_for_code(format: Float) -> None:
    dtype = format.dtype
    assert dtype is not None
    integer = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(integer)
    values = torch.arange(info.min, info.max + 1).to(integer).view(dtype).to(torch.float32)
    values = values[values.isfinite()].unique()
    assert format.is_representable(values).all()
    middles = (values[1:].double() + values[:-1].double()) / 2
    assert not format.is_representable(middles).any()
    assert (format.low, format.high) == (values.min().item(), values.max().item())
    assert torch.equal(quantize(values, format), values)


@pytest.mark.parametrize(
    ("shape", "block", "expected"),
    [
        ((4, 6), "row", (6, 6)),
        ((4, 2, 3), "row", (6, 6)),
        ((6,), "row", (6, 6)),
        ((), "row", (1, 1)),
        ((4, 6), "tensor", (24, 24)),
        ((4, 6), 4, (6, 4)),
        ((4, 6), 99, (6, 6)),
    ],
)
def test_blocks_lie_where_the_format_says(shape: tuple[int, ...], block: Any, expected: tuple[int, int]) -> None:
    format = BlockFloat(8, block)
    assert format.layout(torch.Size(shape)) == expected
    x = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    rows = format.blocks(x)
    assert rows.shape[0] == format.block_count(x.shape)
    assert torch.equal(format.unblocks(rows, x.shape), x)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: FixedPoint(1, 0), "bits must be an integer between 2 and 25, got 1"),
        (lambda: FixedPoint(26, 0), "got 26"),
        (lambda: FixedPoint(8, 200), "frac must be"),
        (lambda: FixedPoint(8.0, 3), "got 8.0"),  # type: ignore[arg-type]
        (lambda: BlockFloat(1), "bits must be"),
        (lambda: BlockFloat(8, 0), "block must be"),
        (lambda: BlockFloat(8, "column"), "block must be"),  # type: ignore[arg-type]
        (lambda: BlockFloat(24, "row", 8), "use at most 23 bits"),
        (lambda: Float(9, 3), "exp must be"),
        (lambda: Float(8, 22), "use man <= 21"),
        (lambda: Float(4, 3, "fp9"), "got 'fp9' with other bits"),
        (lambda: Float(3, 2, "fp16"), "got 'fp16' with other bits"),
        (lambda: Float(8, 0), "man must be an integer between 1"),
        (lambda: BlockFloat(8, 32.0), "got 32.0"),  # type: ignore[arg-type]
        (lambda: parse("fixed8"), "unknown format 'fixed8'"),
        (lambda: parse("int8"), "fp8_e4m3"),
        (lambda: parse("fixed1.0"), "between 2 and 25"),
    ],
)
def test_a_format_that_cannot_be_says_why(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(".", r"\.")):
        build()


def test_numpys_integers_are_integers() -> None:
    assert FixedPoint(np.int64(8), np.int32(3)) == FixedPoint(8, 3)
    block = BlockFloat(8, np.int64(32))
    assert (str(block), block.layout(torch.Size((2, 64)))) == ("bfp8/32", (32, 32))


def test_what_is_no_format_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="got int"):
        parse(8)  # type: ignore[arg-type]


@given(formats(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_a_dtype_holds_a_format_iff_its_numbers_survive(format: Format, dtype: torch.dtype) -> None:
    least = 2.0**format.min_gap_exponent
    widest = torch.tensor([format.low, format.high, least], dtype=torch.float64)
    if isinstance(format, (BlockFloat, Float)):  # a number with all its digits at the lower end
        widest = torch.cat([widest, torch.tensor([(format.top - 1) * least], dtype=torch.float64)])
    survive = bool((widest.to(dtype).double() == widest).all())
    if survive:
        check_holds(dtype, format)
    else:
        with pytest.raises(ValueError, match="cannot hold every number"):
            check_holds(dtype, format)


def test_a_number_far_below_the_gap_is_not_on_the_grid() -> None:
    assert parse("fixed2.-33").is_representable(torch.tensor([3.9e-36, 0.0, -(2.0**33)])).tolist() == [
        False,
        True,
        True,
    ]
