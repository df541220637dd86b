"""QTensors: encoding and decoding, their size, dtypes, devices and representation."""

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from qlangevin import FP8_E4M3, FP8_E5M2, Float, Format, Key, QTensor, encode, native, parse, quantize
from tests.helpers.qtensors import KINDS, coded, numbers
from tests.helpers.strategies import NAMES, formats


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


@pytest.mark.parametrize("name", KINDS)
def test_encoding_takes_any_tensor(name: str) -> None:
    x = numbers(5, 8)
    for view in (x.T, x[:, ::2], x.expand(2, 5, 8), encode(x, "bfp16"), encode(x, "bfp16").T, nn.Parameter(x)):
        q = encode(view, name)
        assert not q.requires_grad
        assert not q.is_view
        assert q.is_contiguous()
        assert q.shape == view.shape
        assert torch.equal(q.decode(), quantize(view.detach() + 0.0, name))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (1, 1)])
@pytest.mark.parametrize("path", [native.disabled, torch.no_grad])
def test_scalars_and_tensors_without_elements(shape: tuple[int, ...], path: Any) -> None:
    for name in KINDS:
        with path():
            q = encode(torch.ones(shape), name)
            q.mul_(0.5)
            assert torch.equal(q.decode(), torch.full(shape, 0.5))
            assert q.nbytes == q.codes.nbytes + (0 if q.exponents is None else len(q.exponents))
            count = math.prod(shape)
            assert q.codes.numel() == ((count + 1) // 2 if q.format.storage_bits == 4 else count)
            for other in (q.clone(), copy.deepcopy(q), q.view(-1).view(shape), q.unsqueeze(0)[0], q.to(torch.float64)):
                assert isinstance(other, QTensor)
                assert torch.equal(other.decode(), q.decode().to(other.dtype))
            assert q.reshape(-1).shape == (count,)
            q.copy_(encode(torch.ones(shape), name))
            assert q.sum() == count


def test_repr() -> None:
    q = coded("bfp8", 4, 6)
    assert repr(q) == "QTensor(bfp8, shape=(4, 6), 28 bytes, device=cpu)"
    assert f"{q}" == str(q) == repr(q)
    assert repr([nn.Parameter(q)]) == "[QTensor(bfp8, shape=(4, 6), 28 bytes, device=cpu, requires_grad=True)]"
    assert repr(q.t()[2:]) == "QTensor(bfp8, shape=(4, 4), 28 bytes, device=cpu)"  # the bytes are those of the whole


# ---- dtypes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_comes_back(dtype: torch.dtype) -> None:
    x = torch.tensor([0.5, 1.25], dtype=dtype)
    assert encode(x, "fixed8.3").decode().dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_blocks_beyond_the_range_of_a_dtype(dtype: torch.dtype) -> None:
    # The codes stay; they decode as the numbers would convert, and what is written from then on is on the clipped grid.
    x = torch.tensor([[0.0, 0.0], [2.0**-130, 3 * 2.0**-134], [1e6, 1.0], [3e38, 0.0], [1.0, 0.25]])
    q = encode(x, "bfp8")
    half: Any = q.to(dtype)
    assert torch.equal(half.codes, q.codes)
    assert torch.equal(half.decode(), q.decode().to(dtype))
    assert torch.equal(half.float().decode(), q.decode())
    half.mul_(1.0)
    assert torch.equal(half.decode(), quantize(q.decode().to(dtype), "bfp8"))


@pytest.mark.parametrize("name", ["fixed8.3", "bfp8", "bfp8e4", "bfp4e4", "fp8_e4m3", "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_another_dtype_has_the_same_codes(name: str, dtype: torch.dtype) -> None:
    q = coded(name, 4, 6)
    other = q.to(dtype)
    assert isinstance(other, QTensor)
    assert other.dtype == other.decode().dtype == (other + 1).dtype == dtype
    assert torch.equal(other.codes, q.codes)
    assert torch.equal(other.decode(), q.decode().to(dtype))
    back = other.float()
    assert back.dtype == torch.float32
    assert torch.equal(back, q)
    other.mul_(0.3)
    assert torch.equal(other.decode(), quantize(q.decode().to(dtype) * 0.3, name))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bfp13", torch.float16),
        ("bfp10", torch.bfloat16),
        ("fixed8.30", torch.float16),
        ("fixed16.8", torch.bfloat16),
        ("fp8_e5m2", torch.float8_e4m3fn),
    ],
)
def test_a_dtype_that_cannot_hold_the_format_is_refused(name: str, dtype: torch.dtype) -> None:
    q = coded(name, 4, 6)
    with pytest.raises(ValueError, match=f"{dtype} cannot hold every number of {name}"):
        q.to(dtype)


def test_integers_decode_and_shared_memory_is_refused() -> None:
    q = coded("bfp8", 4, 6)
    assert torch.equal(q.to(torch.int64), q.decode().to(torch.int64))
    assert torch.equal(q.bool(), q.decode().bool())
    assert torch.equal(q.to(torch.complex64), q.decode().to(torch.complex64))
    with pytest.raises(NotImplementedError, match="no memory of its own to share"):
        q.share_memory_()
    with pytest.raises(NotImplementedError, match="decode"):
        torch.utils.dlpack.from_dlpack(q)


# ---- devices


def test_numbers_are_decoded_where_the_codes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels write to an address, which a tensor on the default device "meta" does not have; they are replaced here.
    monkeypatch.setattr(native, "decode", lambda *_, **__: None)
    q = coded("bfp8", 4, 6)
    with torch.device("meta"):
        assert q.decode().device == q.codes.device


def test_meta_tensors_have_no_numbers_but_a_shape() -> None:
    q = coded("bfp8", 4, 6).to("meta")
    assert isinstance(q, QTensor)
    assert q.nbytes == 28
    assert q.codes.is_meta
    assert (q @ torch.empty(6, 3, device="meta")).shape == (4, 3)
    assert F.embedding(torch.empty(2, dtype=torch.int64, device="meta"), q).shape == (2, 6)
