"""Tensors of codes: lossless, and as small as they say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import NAMES, formats

from qlangevin import FP8_E4M3, FP8_E5M2, Float, Format, Key, QTensor, encode, parse, quantize


@given(formats(), st.integers(0, 2**32), st.floats(-40, 40))
def test_decoding_gives_back_what_was_on_the_grid(format: Format, seed: int, magnitude: float) -> None:
    x = torch.randn(5, 9, generator=torch.Generator().manual_seed(seed)) * 2.0**magnitude
    on_grid = quantize(x, format, "stochastic", Key(seed))
    q = encode(on_grid, format)
    assert torch.equal(q.decode(), on_grid)
    assert torch.equal(encode(x, format, "stochastic", Key(seed)).decode(), on_grid)


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("fixed8.3", 6 * 10),
        ("fixed16.3", 6 * 20),
        ("fixed4.1", 6 * 5),
        ("fixed11.4", 6 * 20),
        ("fixed20.4", 6 * 40),
        ("bfp8", 6 * 10 + 6),
        ("bfp4", 6 * 5 + 6),
        ("bfp8/tensor", 6 * 10 + 1),
        ("bfp8/4", 6 * 10 + 6 * 3),
        ("fp8_e4m3", 6 * 10),
        ("bf16", 6 * 20),
        ("fp32", 6 * 40),
    ],
)
def test_bytes(name: str, nbytes: int) -> None:
    q = encode(torch.randn(6, 10), name)
    assert q.nbytes == nbytes
    assert f"{nbytes} bytes" in repr(q)
    assert q.numel() == 60


def test_an_odd_number_of_4_bit_codes() -> None:
    x = torch.tensor([-8.0, 7.0, -1.0])
    q = encode(x, "fixed4.0")
    assert q.nbytes == 2
    assert q.unpacked().tolist() == [-8, 7, -1]
    assert q.decode().tolist() == x.tolist()


@pytest.mark.parametrize("format", [FP8_E4M3, FP8_E5M2], ids=str)
def test_codes_of_hardware_formats_are_torchs_bits(format: Float) -> None:
    assert format.dtype is not None
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 3
    assert torch.equal(encode(x, format).codes.view(format.dtype).float(), quantize(x, format))


def test_codes_and_exponents_mean_what_is_written() -> None:
    q = encode(torch.tensor([[1.0, -0.5], [6.0, 0.25]]), "bfp8")
    assert q.codes.tolist() == [[64, -32], [96, 4]]  # gaps 2^-6 and 2^-4
    assert q.exponents is not None
    assert q.exponents.tolist() == [0, 2]
    assert encode(torch.tensor([1.0, -16.0]), "fixed8.3").codes.tolist() == [8, -128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_comes_back(dtype: torch.dtype) -> None:
    x = torch.tensor([0.5, 1.25], dtype=dtype)
    assert encode(x, "fixed8.3").decode().dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_room_for_its_ends(name: str) -> None:
    format = parse(name)
    ends = torch.tensor([[format.low], [format.high], [0.0]])
    q = encode(ends, format)
    assert torch.equal(q.decode(), ends)
    assert isinstance(q.to("cpu"), QTensor)


def test_nan_has_no_code() -> None:
    with pytest.raises(ValueError, match="cannot encode NaN"):
        encode(torch.tensor([1.0, torch.nan]), "bfp8")
