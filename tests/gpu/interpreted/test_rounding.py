"""Rounding by the Triton kernels, against the PyTorch path: bit for bit, for all formats and roundings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qlangevin import FP32, Format, Key, parse
from qlangevin.gpu import launch, split
from qlangevin.quantization import random, rounding
from qlangevin.quantization.codes import empty_codes
from qlangevin.quantization.formats import fit_dtype
from qlangevin.quantization.laws import Mean


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


KEY = Key(12345, 678, 2**33 + 7)
ELEMENTS = [
    "fixed8.6", "fp8_e4m3", "bf16", "fp32",
    *[slow(f) for f in ("fixed2.0", "fixed25.20", "fixed8.126", "fixed16.-100", "fp8_e5m2", "fp16", "e4m3", "e1m0", "e8m1")],
]  # fmt: skip
BLOCKS = [
    ("bfp8", (3, 70), 1), ("bfp8", (3, 70), 2), ("bfp8", (3, 70), 3), ("bfp2", (3, 70), 1),
    *[
        slow(name, shape, kind) for name in ("bfp8", "bfp2", "bfp3/7", "bfp8/tensor", "bfp4/32", "bfp8e3", "bfp24e2", "bfp16/64")
        for shape in ((5, 64), (2, 3, 5, 5)) for kind in range(4)
    ],
]  # fmt: skip
SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 1e-40, 3e38, -3e38]


def expected(mu: Mean, v: Tensor, format: Format, how: str, purpose: int) -> Tensor:
    if how == "nearest":
        return rounding.quantize_values(mu.start, format, how, KEY)
    if how == "corrected":
        return rounding.corrected_values(mu, v, format, "exact", KEY)
    return mu.total if format == FP32 else rounding.stochastic(mu, format, KEY, purpose)


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found.isnan() & wanted.isnan())
    assert same.all(), (found[~same][:4], wanted[~same][:4])


def check(mu: Mean, v: Tensor, format: Format, how: str, purpose: int = random.ROUNDING) -> None:
    """Compare a rounding, and its codes if it has any, with the PyTorch path."""
    wanted = expected(mu, v, format, how, purpose)
    found = launch.quantize(mu.start, format, how, KEY, purpose, v if how == "corrected" else None, move=mu.move)
    assert_same_bits(found, wanted)
    if how == "corrected" or mu.move is not None or format == FP32:
        return
    codes = torch.zeros(found.shape, dtype=format.code_dtype)
    exponents = torch.zeros(format.block_count(found.shape), dtype=torch.int8)
    spoiled, x = torch.zeros(1, dtype=torch.int32), mu.start.clone()
    assert launch.quantize_with_codes(x, format, how, KEY, purpose, (codes, exponents), spoiled=spoiled)
    assert_same_bits(x, wanted)
    assert bool(spoiled) == bool(wanted.isnan().any())
    back = torch.empty_like(x)
    launch.decode(back, codes, exponents, format, spoiled=spoiled)
    if spoiled:
        assert back.isnan().all()
        return
    assert_same_bits(back, wanted)
    for found_part, part in zip((codes, exponents), format.encode(wanted), strict=True):
        assert torch.equal(found_part, part)
    codes, exponents = torch.zeros_like(codes), torch.zeros_like(exponents)
    launch.encode(wanted, codes, exponents, format)
    for found_part, part in zip((codes, exponents), format.encode(wanted), strict=True):
        assert torch.equal(found_part, part)


@pytest.mark.parametrize("how", ["nearest", "stochastic", "corrected"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_elements(name: str, how: str) -> None:
    format = parse(name)
    generator = torch.Generator().manual_seed(len(name))
    unit = 2.0 ** max(format.min_gap_exponent + 3, -140)
    for scale in (unit, 30 * unit, 1.0, 1e30):
        special = torch.tensor([*SPECIAL, format.low, format.high, 0.5 * unit, 1.5 * unit])
        x = torch.cat([special, torch.randn(500, generator=generator) * scale])
        move = torch.randn(len(x), generator=generator) * scale * 0.1
        for v in (0.0, 1e-3, 0.04, 100.0) if how == "corrected" else (0.0,):
            variance = torch.tensor(min(v * scale * scale, 1e38))
            check(Mean(x), variance, format, how, random.ACTIVATION if how == "stochastic" else random.ROUNDING)
            if how != "nearest":
                check(Mean(x, move), variance, format, how)
    if how == "corrected":
        check(Mean(x), torch.rand(x.shape, generator=generator), format, how)  # a variance for each


def at_risk(format: Format, shape: tuple[int, ...], kind: int, generator: torch.Generator) -> Tensor:
    """Return numbers whose blocks end near a power of two: 1 by the largest number, 2 by many; 3 also special ones."""
    x = torch.randn(shape, generator=generator)
    if kind:
        rows = format.blocks(x)  # type: ignore[attr-defined]
        step = 2.0**-format.bits  # type: ignore[attr-defined]
        rows = (
            rows
            / rows.abs().amax(1, keepdim=True).clamp_min(1e-30)
            * (2 - step * torch.rand(len(rows), 1, generator=generator))
        )
        if kind == 2:
            rows[:, ::5] = rows[:, ::5].sign() * (2 - step * 3 * torch.rand(rows[:, ::5].shape, generator=generator))
        x = format.unblocks(rows, x.shape).contiguous()  # type: ignore[attr-defined]
    if kind == 3:
        x.view(-1)[3], x.view(-1)[-1], x[1] = torch.nan, torch.inf, 0
    return x


@pytest.mark.parametrize(("name", "shape", "kind"), BLOCKS)
def test_blocks(name: str, shape: tuple[int, ...], kind: int) -> None:
    format = parse(name)
    generator = torch.Generator().manual_seed(kind)
    x = at_risk(format, shape, kind, generator)
    gap = format.gap(x.nan_to_num(0, 1e3, -1e3)).min()
    move = torch.randn(shape, generator=generator) * gap * 0.3
    check(Mean(x), gap * 0, format, "nearest")
    check(Mean(x), gap * 0, format, "stochastic", random.ERROR)
    check(Mean(x, move), gap * 0, format, "stochastic")
    for v in (0.1, 4.0, 400.0):
        check(Mean(x, move), v * gap * gap, format, "corrected")
    check(Mean(x), torch.rand(shape, generator=generator) * gap * gap * (0.2 if kind < 2 else 3), format, "corrected")


@pytest.mark.parametrize(
    ("name", "kind"), [("bfp8/tensor", 2), *[slow(f, k) for f in ("bfp8/tensor", "bfp4", "bfp8/200") for k in range(4)]]
)
def test_blocks_that_programs_share(name: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for what, value in (("LONGEST", 8), ("COUNTERS", 32), ("PIECE", 1)):
        monkeypatch.setattr(split, what, value)
    test_blocks(name, (3, 170), kind)


@pytest.mark.parametrize(("rows", "counters"), [(2, 128), slow(1, 16), slow(8, 32)])
def test_the_shape_of_programs_does_not_matter(rows: int, counters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "block_shape", lambda length: launch.BlockShape(rows, counters, 4))
    monkeypatch.setattr(launch, "COUNTERS", counters)
    x = at_risk(parse("bfp8"), (3, 130), 2, torch.Generator().manual_seed(0))
    for name in ("bfp8", "fixed8.6"):
        for how in ("stochastic", "corrected"):
            check(Mean(x), torch.tensor(1e-5), parse(name), how)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 511, 512, 513])
def test_sizes_around_the_edges_of_tiles(size: int) -> None:
    x = torch.linspace(-1.9, 1.9, size)
    check(Mean(x), torch.tensor(1e-3), parse("fixed8.6"), "corrected")
    check(Mean(x), torch.tensor(0.0), parse("fixed8.6"), "stochastic", random.ACTIVATION)
    if size in (1, 16, 65, 129):
        check(Mean(x), torch.tensor(0.0), parse("bfp8"), "stochastic")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    x = torch.randn(6, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    # The interpreter makes zeros of subnormal bfloat16, other than GPUs.
    x[3:] *= torch.tensor([[2.0**-110], [2.0**-22], [torch.finfo(dtype).max]]).to(dtype)
    for name in ("fixed8.4", "bfp8", "fp8_e4m3"):
        format = fit_dtype(parse(name), dtype)
        found = launch.quantize(x, format, "stochastic", KEY, random.ACTIVATION)
        wanted = rounding.quantize_values(x.float(), format, "stochastic", KEY, random.ACTIVATION)
        assert found.dtype == dtype
        assert torch.equal(found.float(), wanted)
        codes, back = empty_codes(x, format), torch.empty_like(x)
        assert launch.quantize_with_codes(x.clone(), format, "stochastic", KEY, random.ACTIVATION, codes)
        for found_part, part in zip(codes, format.encode(wanted), strict=True):
            assert torch.equal(found_part, part)
        launch.decode(back, *codes, format)
        assert torch.equal(back, found)
        assert launch.encode_exactly(found, *codes, format)
        assert not launch.encode_exactly(found * 1.3, *codes, format)
        relu = torch.empty_like(x)
        assert launch.relu_with_codes(found, relu, *codes, format)
        assert torch.equal(relu, found.relu())
        assert torch.equal(codes[0], format.encode(wanted.relu())[0])


def test_a_step_on_the_device_takes_the_place_of_the_key() -> None:
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    for name in ("fixed8.6", "bfp8"):
        wanted = launch.quantize(x, parse(name), "stochastic", KEY.at(2**40 + 3), random.ROUNDING)
        step = torch.tensor(2**40 + 3)
        assert torch.equal(launch.quantize(x, parse(name), "stochastic", KEY, random.ROUNDING, step=step), wanted)


@pytest.mark.parametrize("name", ["fixed8.6", "bfp8", "fp8_e4m3"])
def test_relu_and_masks(name: str) -> None:
    format = parse(name)
    x = rounding.nearest(torch.randn(4, 70, generator=torch.Generator().manual_seed(1)), format)
    codes, exponents = (
        torch.zeros(x.shape, dtype=torch.int8),
        torch.zeros(format.block_count(x.shape), dtype=torch.int8),
    )
    out, spoiled = torch.empty_like(x), torch.zeros(1, dtype=torch.int32)
    assert launch.relu_with_codes(x, out, codes, exponents, format, spoiled=spoiled)
    assert_same_bits(out, x.relu())
    for found, wanted in zip((codes, exponents), format.encode(x.relu()), strict=True):
        assert torch.equal(found, wanted)
    error = torch.randn(4, 70, generator=torch.Generator().manual_seed(2))
    masked = launch.quantize(error, format, "stochastic", KEY, random.ERROR, positive=codes)
    rounded = rounding.quantize_values(error, format, "stochastic", KEY, random.ERROR)
    assert_same_bits(masked, torch.where(codes > 0, rounded, 0.0))
    x[1, 1] = torch.nan
    launch.relu_with_codes(x, out, codes, exponents, format, spoiled=spoiled)
    assert spoiled.item() == 1


def test_memory_that_kernels_would_misread_is_refused() -> None:
    x, format = torch.zeros(4, 6), parse("fixed8.6")
    with pytest.raises(ValueError, match=r"contiguous tensors of shape \(6, 4\) on cpu, got .*strides \(1, 6\)"):
        launch.quantize(x.T, format, "nearest", KEY, 0)
    with pytest.raises(ValueError, match=r"shape \(4, 6\)"):
        launch.quantize(x, format, "nearest", KEY, 0, out=torch.zeros(3))
    with pytest.raises(ValueError, match=r"shape \(4, 6\)"):
        launch.decode(torch.zeros(4, 5), torch.zeros(4, 6, dtype=torch.int8), None, format)
    with pytest.raises(ValueError, match="lazily negated"):
        launch.quantize(torch._neg_view(torch.zeros(3)), format, "nearest", KEY, 0)
