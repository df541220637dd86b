"""Formats: names, grids, ranges, and the value sets of hardware."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qlangevin import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    BlockFloat,
    FixedPoint,
    Float,
    Format,
    encode,
    parse,
    quantize,
)
from qlangevin.quantization.format_base import DtypeLimits
from qlangevin.quantization.formats import check_holds, fit_dtype
from qlangevin.quantization.laws import Mean
from tests.helpers.strategies import NAMES, formats


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
def test_impossible_formats_are_refused_with_the_reason(build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("(", r"\(").replace(".", r"\.")):
        build()


def test_numpys_integers_are_integers() -> None:
    assert FixedPoint(np.int64(8), np.int32(3)) == FixedPoint(8, 3)
    block = BlockFloat(8, np.int64(32))
    assert (str(block), block.layout(torch.Size((2, 64)))) == ("bfp8/32", (32, 32))


def test_other_types_are_no_formats() -> None:
    with pytest.raises(TypeError, match="got int"):
        parse(8)  # type: ignore[arg-type]


@given(formats(), st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]))
def test_a_dtype_holds_a_format_iff_its_numbers_survive(format: Format, dtype: torch.dtype) -> None:
    given, format = format, format.within(DtypeLimits.of(dtype))
    least = 2.0**format.min_gap_exponent
    widest = torch.tensor([format.low, format.high, least], dtype=torch.float64)
    if isinstance(format, (BlockFloat, Float)):  # a number with all its digits at the lower end
        widest = torch.cat([widest, torch.tensor([(format.top - 1) * least], dtype=torch.float64)])
    survive = bool((widest.to(dtype).double() == widest).all())
    if survive:
        assert fit_dtype(given, dtype) == format
        check_holds(dtype, given)
    else:
        with pytest.raises(ValueError, match="cannot hold every number"):
            fit_dtype(given, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", range(2, 13))
@pytest.mark.parametrize("exp_bits", [3, 5, 8])
def test_half_precision_clips_the_exponents_of_blocks_and_no_more(dtype: torch.dtype, bits: int, exp_bits: int) -> None:
    format, info = BlockFloat(bits, "row", exp_bits), torch.finfo(dtype)
    if bits - 1 > 1 - round(math.log2(info.eps)):
        with pytest.raises(ValueError, match="use float32 tensors or fewer bits"):
            fit_dtype(format, dtype)
        return
    fitted = fit_dtype(format, dtype)
    assert isinstance(fitted, BlockFloat)
    assert parse(str(fitted)) == fitted
    assert fitted.min_gap_exponent == max(format.min_gap_exponent, round(math.log2(info.smallest_normal * info.eps)))
    assert fitted.high == max(
        format.top * 2.0**e for e in range(-160, format.max_gap_exponent + 1) if format.top * 2.0**e <= info.max
    )
    exponents = torch.arange(fitted.min_gap_exponent, fitted.max_gap_exponent + 1)
    numbers = torch.arange(-fitted.top, fitted.top + 1).double() * 2.0 ** exponents.double().view(-1, 1)
    assert torch.equal(numbers.to(dtype).double(), numbers)  # all of them
    assert fit_dtype(fitted, dtype) == fitted
    assert (fitted == format) == (fitted.min_gap_exponent == format.min_gap_exponent and fitted.high == format.high)


@pytest.mark.parametrize(
    ("dtype", "name", "exponents"),
    [(torch.bfloat16, "bfp8@bf16", (-127, 127)), (torch.float16, "bfp8@fp16", (-18, 15))],
)
def test_the_range_of_bfp8_in_half_precision(dtype: torch.dtype, name: str, exponents: tuple[int, int]) -> None:
    fitted = fit_dtype(parse("bfp8"), dtype)
    assert str(fitted) == name
    assert (fitted.min_gap_exponent + 6, fitted.max_gap_exponent + 6) == exponents  # type: ignore[attr-defined]
    ends = torch.tensor([[0.0, 0.0], [torch.inf, 1.0], [-torch.inf, 0.0], [2.0**-24, 0.0]], dtype=dtype)
    q = encode(ends, "bfp8")
    assert q.exponents is not None
    assert q.exponents.tolist() == [exponents[0], exponents[1], exponents[1], max(-24, exponents[0])]
    top = 127 * 2.0 ** (exponents[1] - 6)
    assert q.decode().tolist() == [[0, 0], [top, 0], [-top, 0], [2.0**-24, 0]]


def test_a_half_precision_that_cannot_hold_the_digits_is_refused() -> None:
    for name in ("bfp10@bf16", "bfp13@fp16"):
        with pytest.raises(
            ValueError, match="inside must be None, 'bf16' for at most 9 bits or 'fp16' for at most 12, got"
        ):
            parse(name)
    with pytest.raises(ValueError, match="got 'fp8' with 8 bits"):
        BlockFloat(8, inside="fp8")  # type: ignore[arg-type]


def test_a_number_far_below_the_gap_is_not_on_the_grid() -> None:
    assert parse("fixed2.-33").is_representable(torch.tensor([3.9e-36, 0.0, -(2.0**33)])).tolist() == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_code_a_format_makes_is_one_of_its_codes(name: str) -> None:
    format = parse(name)
    x = torch.cat(
        [torch.randn(200, generator=torch.Generator().manual_seed(0)), torch.tensor([format.low, format.high])]
    )
    codes, exponents = format.encode(quantize(x.view(-1, 2), format))
    assert codes.dtype == format.code_dtype
    assert len(exponents) == format.block_count(codes.shape)
    assert format.has_exponents == (len(exponents) > 0)
    assert format.are_codes(codes, exponents)
    assert format.are_codes(codes[:0], exponents[:0])


@pytest.mark.parametrize(
    ("name", "code", "exponent"),
    [
        ("fixed4.1", 8, 0),
        ("fixed11.4", -1025, 0),
        ("bfp8", -128, 0),
        ("bfp4", 8, 0),
        ("bfp8e3", 1, 4),
        ("bfp8e3", 1, -5),
        ("fp8_e4m3", 0x7F, 0),  # NaN
        ("fp8_e4m3", -1, 0),
        ("fp8_e5m2", 0x7C, 0),  # infinity
        ("e4m3", 136, 0),
    ],
)
def test_bit_patterns_that_stand_for_no_number_are_no_codes(name: str, code: int, exponent: int) -> None:
    format = parse(name)
    codes, exponents = torch.tensor([code], dtype=format.code_dtype), torch.tensor([exponent], dtype=torch.int8)
    assert not format.are_codes(codes, exponents)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "e4m3", "e3m0", "bf16", "fp16"])
def test_a_float_code_is_one_iff_its_number_is_in_range(name: str) -> None:
    format = parse(name)
    info = torch.iinfo(format.code_dtype)
    codes = torch.arange(info.min, info.max + 1).to(format.code_dtype)
    values = format.decode(codes, None)
    good = (values >= format.low) & (values <= format.high)
    assert format.are_codes(codes[good], None)
    assert not any(format.are_codes(code, None) for code in codes[~good][::97])
    assert (~good).sum() == 0 or not format.are_codes(codes, None)


@pytest.mark.parametrize("name", ["fixed8.3", "e4m3", "fp8_e4m3", "bfp8", "bfp8/tensor", "bfp8/4", "bfp8/5"])
@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 4), (3, 2, 2, 4), (1, 5)])
def test_stacked_tensors_are_rounded_as_if_they_were_alone(name: str, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 1 + shape[0]).view(
        -1, *[1] * (len(shape) - 1)
    )
    format, flat = parse(name).stacked(x.shape)
    together = quantize(x.reshape(flat), format).view(shape)
    assert torch.equal(together, torch.stack([quantize(one, name) for one in x]))


@pytest.mark.parametrize("name", ["fixed8.3", "bfp8", "bfp8/tensor", "bfp8/4"])
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_blocks_are_kept_iff_permuting_dims_changes_nothing(name: str, order: tuple[int, int, int]) -> None:
    format = parse(name)
    x = torch.randn(4, 4, 4, generator=torch.Generator().manual_seed(0)).exp()
    permuted = quantize(x.permute(order).contiguous(), format).permute(*[order.index(d) for d in range(3)])
    assert format.keeps_blocks(order) == torch.equal(permuted, quantize(x, format))


@pytest.mark.parametrize("name", ["fixed8.3", "e4m3", "bfp8", "bfp8/tensor", "bfp8/4"])
@pytest.mark.parametrize(("shape", "dim"), [((4,), 0), ((4, 8), 0), ((4, 8), 1), ((4, 2, 4), 0), ((4, 2, 4), 1)])
def test_a_cut_that_cuts_no_block_changes_nothing(name: str, shape: tuple[int, ...], dim: int) -> None:
    format = parse(name)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp()
    parts = torch.cat([quantize(part, format) for part in x.split(1, dim)], dim)
    assert format.cuts_blocks(x.shape, [dim]) or torch.equal(parts, quantize(x, format))


def test_only_rows_of_block_formats_can_be_cut_apart() -> None:
    matrix, vector = torch.Size((4, 8)), torch.Size((4,))
    assert not parse("bfp8").cuts_blocks(matrix, [0])
    assert not parse("bfp8/4").cuts_blocks(matrix, [0])
    for dims in ([1], [0, 1], [None]):
        assert parse("bfp8").cuts_blocks(matrix, dims)
    assert parse("bfp8").cuts_blocks(vector, [0])
    assert parse("bfp8/tensor").cuts_blocks(matrix, [0])
    assert not parse("e4m3").cuts_blocks(vector, [0, None])


def test_the_numbers_of_a_format_can_be_listed_if_elements_stand_alone() -> None:
    for name in ("fixed6.2", "e3m2", "fp8_e4m3"):
        format = parse(name)
        values = format.values()
        assert format.is_representable(values).all()
        assert abs(len(values) - (format.value_count or 0)) <= 8  # fp8_e4m3 spends two codes on NaN
    assert parse("bfp8").value_count is None
    with pytest.raises(NotImplementedError, match="depend on other elements"):
        parse("bfp8").values()
    with pytest.raises(NotImplementedError, match="no law of its own"):
        parse("bfp8").law(Mean(torch.ones(2)), torch.ones(()))
