"""QTensors: lossless, of the size they report, and tensors to all of PyTorch."""

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from qlangevin import FP8_E4M3, FP8_E5M2, Float, Format, Key, QTensor, encode, native, parse, quantize
from tests.helpers.strategies import NAMES, formats

KINDS = ["fixed8.3", "bfp8", "bfp8/tensor", "bfp8/3", "bfp4", "bfp4/tensor", "fixed4.1", "fp8_e4m3", "e4m3", "bfp16"]
PATHS = st.sampled_from([native.disabled, torch.no_grad])  # PyTorch's, and the usual one


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def coded(name: str | Format, *shape: int, seed: int = 0) -> QTensor:
    return encode(numbers(*shape, seed=seed), name)


def leaf(q: Tensor) -> Tensor:
    return q.detach().clone().requires_grad_()


def each(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


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


# ---- a tensor to PyTorch

OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "with a number": lambda a, b: 2 * a - 1,
    "from the right": lambda a, b: torch.ones(4, 6) / b,
    "broadcast": lambda a, b: a * b[0],
    "matmul": lambda a, b: a @ b.T,
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "dtypes are promoted": lambda a, b: a * torch.ones(6, dtype=torch.float64),
    "compare": lambda a, b: a < b,
    "where": lambda a, b: torch.where(a > 0, a, b),
    "reduce": lambda a, b: (a.sum(), a.mean(0), b.std(), b.amax(1), a.argmax(), a.norm()),
    "sort": lambda a, b: a.sort(descending=True),
    "stack": lambda a, b: torch.stack([a, b]),
    "cat": lambda a, b: torch.cat([a, torch.ones(1, 6), b]),
    "sum of a list": lambda a, b: sum([a, b]),
    "indices": lambda a, b: (a[torch.tensor([2, 0])], a[a > 0], b[torch.tensor([1, 1]), torch.tensor([0, 5])]),
    "functional": lambda a, b: F.layer_norm(F.gelu(a), (6,)) + F.softmax(b, -1),
    "zeros like": lambda a, b: (torch.zeros_like(a), a.new_ones(3)),
    "allclose": lambda a, b: torch.tensor([torch.allclose(a, a), torch.equal(a, b), torch.equal(b, b)]),
    "keywords": lambda a, b: torch.add(input=a, other=b, alpha=2),
    "to a list": lambda a, b: torch.tensor([row.sum().item() for row in a] + [len(a), float(b[0, 0])]),
    "repeat and reshape": lambda a, b: (a.repeat(2, 2), a.reshape(3, 8), a.flatten(), a.expand(2, 4, 6).sum(0)),
    "vmap": lambda a, b: torch.func.vmap(lambda x, y: x @ y)(a, b),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_compute_with_the_decoded_numbers(operation: str) -> None:
    for name in ("bfp8", "fixed4.1", "e4m3"):
        a, b = coded(name, 4, 6), coded(name, 4, 6, seed=1)
        run = OPERATIONS[operation]
        for result, expected in zip(each(run(a, b)), each(run(a.decode(), b.decode())), strict=True):
            plain = result.decode() if isinstance(result, QTensor) else result
            assert plain.dtype == expected.dtype
            assert torch.equal(plain, expected)


def test_results_are_plain_tensors() -> None:
    q = coded("bfp8", 4, 6)
    assert type(q + 1) is Tensor
    assert type(torch.stack([q, q])) is Tensor
    assert type(torch.zeros_like(q)) is Tensor
    assert type(q[torch.tensor([1])]) is Tensor
    out = torch.empty(4, 6)
    assert torch.add(q, 1.0, out=out) is out
    assert torch.equal(out, q.decode() + 1)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.view(3, 8),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "row": lambda x: x[2],
    "column": lambda x: x[:, -1],
    "element": lambda x: x[1, 2],
    "slice": lambda x: x[1:3],
    "stride": lambda x: x[::2, 1::3],
    "no rows": lambda x: x[4:],
    "ellipsis": lambda x: x[..., None, 2:],
    "unbind": lambda x: x.unbind(1),
    "iteration": lambda x: list(x),
    "split": lambda x: x.split((1, 5), 1),
    "chunk": lambda x: x.chunk(3),
    "permute": lambda x: x.permute(1, 0),
    "expand": lambda x: x.expand(3, 4, 6),
    "select": lambda x: x.select(1, 3),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "view of a view": lambda x: x[1:].t()[1:4].view(3, 3),
    "slice of a transpose": lambda x: x.t()[2:, :3].transpose(0, 1)[1],
    "as strided": lambda x: x.as_strided((2, 3), (7, 2), 1),
}


@given(formats(), st.sampled_from(list(VIEWS)), PATHS)
def test_a_view_looks_at_the_same_codes(format: Format, view: str, path: Any) -> None:
    with path():
        q = coded(format, 4, 6)
        for seen, expected in zip(each(VIEWS[view](q)), each(VIEWS[view](q.decode())), strict=True):
            assert type(seen) is QTensor
            assert seen.codes is q.codes
            assert seen.exponents is q.exponents
            assert (seen.shape, seen.stride(), seen.dtype) == (expected.shape, expected.stride(), expected.dtype)
            assert torch.equal(seen.decode(), expected)
            assert torch.equal(seen + 1, expected + 1)


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_on_both_paths(view: str) -> None:
    for name in [*KINDS, "bfp8/4", "bfp4/5"]:  # blocks that end with a row, and blocks that do not
        q = coded(name, 4, 6)
        plain = quantize(numbers(4, 6), name)
        for path in (native.disabled, torch.no_grad):
            with path():
                for seen, expected in zip(each(VIEWS[view](q)), each(VIEWS[view](plain)), strict=True):
                    assert torch.equal(seen.decode(), expected)


def test_a_view_of_another_dtype_is_decoded() -> None:
    q = coded("bfp8", 4, 6)
    assert torch.equal(q.view(torch.int32), q.decode().view(torch.int32))
    assert type(q.view(torch.int32)) is Tensor


@pytest.mark.parametrize("name", KINDS)
def test_reshaping_that_cannot_be_a_view_copies(name: str) -> None:
    q = coded(name, 4, 6)
    d = q.decode().t()
    copies: list[Callable[[Tensor], Tensor]] = [
        lambda x: x.reshape(-1),
        lambda x: x.flatten(),
        lambda x: x.contiguous().view(-1),
        lambda x: x.contiguous(),
        lambda x: x.reshape(4, 6),
    ]
    for run in copies:
        copied, expected = run(q.t()), run(d)
        assert copied.stride() == expected.stride()
        assert torch.equal(copied + 0, expected)
        before = q.decode()
        copied.zero_()
        assert torch.equal(q.decode(), before)


# ---- written to

WRITES: dict[str, Callable[[Any], Any]] = {
    "copy_": lambda x: x.copy_(numbers(*x.shape, seed=2)),
    "copy_ what broadcasts": lambda x: x.copy_(torch.tensor(0.3)),
    "copy_ another dtype": lambda x: x.copy_(numbers(*x.shape, seed=2).double()),
    "copy_ codes": lambda x: x.copy_(coded("fixed16.10", *x.shape, seed=2)),
    "mul_": lambda x: x.mul_(0.7),
    "fill_": lambda x: x.fill_(0.3),
    "zero_": lambda x: x.zero_(),
    "add_ codes": lambda x: x.add_(coded("bfp8", *x.shape, seed=2), alpha=0.3),
    "addcmul_": lambda x: x.addcmul_(numbers(*x.shape, seed=2), numbers(*x.shape, seed=3)),
    "clamp_": lambda x: x.clamp_(-0.4, 0.4),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.3),
    "normal_": lambda x: x.normal_(generator=torch.Generator().manual_seed(4)),
    "out": lambda x: torch.exp(numbers(*x.shape, seed=2), out=x),
    "+=": lambda x: x.__iadd__(1.1),
    "itself": lambda x: x.add_(x),
    "its square": lambda x: x.mul_(x),
    "foreach": lambda x: torch._foreach_mul_([x], 0.7),
}
PLACES: dict[str, Callable[[Any], Any]] = {
    "all": lambda x: x,
    "t": lambda x: x.t(),
    "slice": lambda x: x[1:3],
    "column": lambda x: x[:, 2],
    "stride": lambda x: x.view(-1)[1::5],
    "chunk": lambda x: x.chunk(2, 1)[1],
    "detach": lambda x: x.detach(),
    "element": lambda x: x[1, 2],
}


@given(formats(), st.sampled_from(list(WRITES)), st.sampled_from(list(PLACES)), PATHS)
def test_writing_is_writing_into_the_decoded_tensor_and_rounding(
    format: Format, write: str, place: str, path: Any
) -> None:
    q = coded(format, 4, 6)
    plain = q.decode()
    with path():
        WRITES[write](PLACES[place](q))
    WRITES[write](PLACES[place](plain))
    assert torch.equal(q.decode(), quantize(plain, format))


@pytest.mark.parametrize("write", WRITES)
def test_every_way_of_writing(write: str) -> None:
    for name in KINDS:
        for place in PLACES.values():
            q = coded(name, 4, 6)
            plain, target = q.decode(), place(q)
            returned = WRITES[write](target)
            WRITES[write](place(plain))
            assert torch.equal(q.decode(), quantize(plain, name))
            assert write == "foreach" or returned is target


def _assign(x: Tensor, where: Any, value: Any) -> None:
    x[where] = value


ASSIGNMENTS: dict[str, Callable[[Tensor], None]] = {
    "row": lambda x: _assign(x, 0, 1.3),
    "rows": lambda x: _assign(x, slice(1, 3), numbers(6, seed=1)),
    "strided": lambda x: _assign(x, (slice(1, None), slice(None, None, 2)), numbers(3, 3, seed=1)),
    "element": lambda x: _assign(x, (2, 3), torch.tensor(-0.4)),
    "through a view": lambda x: _assign(x.T[1:], 2, 0.7),
    "through a view of a view": lambda x: _assign(x.view(2, 12)[1].view(3, 4), (slice(None), 1), 0.7),
    "through an iterator": lambda x: _assign(list(x)[2], 1, 0.7),
    "indices": lambda x: _assign(x, (torch.tensor([3, 1]), torch.tensor([0, 5])), 0.77),
    "mask": lambda x: _assign(x, x < -0.5, 0.1),
    "codes": lambda x: _assign(x, slice(0, 2), coded("fixed8.5", 2, 6, seed=1)),
    "its own": lambda x: _assign(x, 0, x[1]),
}


@pytest.mark.parametrize("assignment", ASSIGNMENTS)
def test_assignment_through_indices(assignment: str) -> None:
    for name in KINDS:
        q = coded(name, 4, 6)
        plain = q.decode()
        ASSIGNMENTS[assignment](q)
        ASSIGNMENTS[assignment](plain)
        assert torch.equal(q.decode(), quantize(plain, name))


@pytest.mark.parametrize("name", ["fixed8.3", "fp8_e4m3"])
def test_writing_several_views_of_one_tensor_at_once(name: str) -> None:
    q = coded(name, 4, 6)
    plain = q.decode()
    torch._foreach_add_([q[:2], q[2:]], 1.0)
    torch._foreach_add_([plain[:2], plain[2:]], 1.0)
    assert torch.equal(q.decode(), quantize(plain, name))
    twice = q.decode() + 2.0
    torch._foreach_add_([q, q], 1.0)
    assert torch.equal(q.decode(), quantize(twice, name))


@pytest.mark.parametrize(
    ("reshape", "arguments"),
    [("t_", ()), ("unsqueeze_", (0,)), ("squeeze_", ()), ("transpose_", (0, 1)), ("resize_", ((2, 3),))],
)
def test_changing_the_shape_in_place_is_refused(reshape: str, arguments: tuple[Any, ...]) -> None:
    q = coded("bfp8", 1, 6)
    before = q.decode()
    with pytest.raises(NotImplementedError, match="changes the shape of a tensor in place"):
        getattr(q, reshape)(*arguments)
    assert q.shape == before.shape
    assert torch.equal(q.decode(), before)


def test_nan_cannot_be_written_and_changes_nothing() -> None:
    q = coded("bfp8", 4, 6)
    before = q.decode()
    with pytest.raises(ValueError, match="cannot encode NaN"):
        q[1, 2] = torch.nan
    assert torch.equal(q.decode(), before)
    q[1, 2] = torch.inf  # saturates, as everywhere
    assert q.decode()[1, 2] == parse("bfp8").high


def forbid(*_: Any) -> Any:
    raise AssertionError("this decodes or encodes all of it")


@pytest.mark.parametrize("name", KINDS)
def test_copying_within_a_format_copies_codes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, source = coded(name, 4, 6), coded(name, 4, 6, seed=1)
    with monkeypatch.context() as m:
        m.setattr(QTensor, "decode_base", forbid)
        m.setattr(QTensor, "overwrite", forbid)
        assert target.copy_(source) is target
    assert torch.equal(target.codes, source.codes)
    assert target.codes is not source.codes
    if target.exponents is not None and source.exponents is not None:
        assert torch.equal(target.exponents, source.exponents)
        assert target.exponents is not source.exponents
    before = target.decode()
    source.zero_()
    assert torch.equal(target.decode(), before)


@pytest.mark.parametrize("name", KINDS)
def test_copying_between_formats_rounds(name: str) -> None:
    source = coded("bfp16/tensor", 4, 6, seed=1)
    target = coded(name, 4, 6)
    target.copy_(source)
    assert torch.equal(target.decode(), quantize(source.decode(), name))
    plain = torch.empty(4, 6)
    assert plain.copy_(source) is plain
    assert torch.equal(plain, source.decode())
    square, other = coded(name, 5, 5), coded(name, 5, 5, seed=1)
    square.copy_(other.t())  # the same format, but not the same order
    assert torch.equal(square.decode(), quantize(other.decode().t(), name))


def sharing(a: Tensor, b: Tensor) -> bool:
    """Whether writing into one is seen in the other; the first holds other numbers afterwards."""
    before = b + 0.0
    a.add_(3.0)
    return not torch.equal(b, before)


@pytest.mark.parametrize("name", KINDS)
def test_clones_and_copies_do_not_share_and_aliases_do(name: str) -> None:
    copies: list[Callable[[Any], Any]] = [
        torch.clone,
        copy.deepcopy,
        lambda q: q.to(torch.float64),
        lambda q: q.to("cpu", copy=True),
    ]
    for copied in copies:
        for q in (coded(name, 4, 6), coded(name, 4, 6).t()):
            other = copied(q)
            assert type(other) is QTensor
            assert isinstance(q, QTensor)
            assert other.format == q.format
            assert torch.equal(other.decode(), q.decode().to(other.dtype))
            assert not sharing(other, q)
            assert not sharing(q, other)
    aliases: list[Callable[[Any], Any]] = [
        lambda q: q.detach(),
        lambda q: q.data,
        lambda q: q.view(6, 4),
        lambda q: q.to(torch.float32),
    ]
    for alias in aliases:
        q = coded(name, 4, 6)
        assert sharing(alias(q), q)
        q = coded(name, 4, 6)
        assert sharing(q, alias(q))


def test_each_number_of_a_clone_is_its_own() -> None:
    q = coded("fixed8.3", 1, 6)
    clone, plain = q.expand(3, 6).clone(), q.decode().expand(3, 6).clone()
    clone[0, 0], plain[0, 0] = 5.0, 5.0
    assert torch.equal(clone, plain)


def test_a_part_can_be_copied_and_saved() -> None:
    part = coded("bfp8", 4, 6)[1:3]
    for other in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert type(other) is QTensor
        assert torch.equal(other, part)
        assert not sharing(other, part)


def test_a_deep_copy_has_its_own_gradient_and_keeps_requiring_one() -> None:
    p = nn.Parameter(coded("bfp8", 4, 6))
    (p * p).sum().backward()
    other = copy.deepcopy(p)
    assert isinstance(other, nn.Parameter)
    assert isinstance(other, QTensor)
    assert other.requires_grad
    assert p.grad is not None
    assert other.grad is not None
    assert torch.equal(other.grad, p.grad)
    assert other.grad.data_ptr() != p.grad.data_ptr()


@pytest.mark.parametrize("name", ["fixed8.3", "bfp8e4", "bfp4e4", "fp8_e4m3", "e4m3"])
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
        ("bfp8", torch.float16),
        ("bfp8", torch.bfloat16),
        ("fixed16.8", torch.bfloat16),
        ("fp8_e5m2", torch.float8_e4m3fn),
    ],
)
def test_a_dtype_that_cannot_hold_the_format_is_refused(name: str, dtype: torch.dtype) -> None:
    q = coded(name, 4, 6)
    with pytest.raises(ValueError, match=f"{dtype} cannot hold every number of {name}"):
        q.to(dtype)


def test_repr() -> None:
    q = coded("bfp8", 4, 6)
    assert repr(q) == "QTensor(bfp8, shape=(4, 6), 28 bytes, device=cpu)"
    assert f"{q}" == str(q) == repr(q)
    assert repr([nn.Parameter(q)]) == "[QTensor(bfp8, shape=(4, 6), 28 bytes, device=cpu, requires_grad=True)]"
    assert repr(q.t()[2:]) == "QTensor(bfp8, shape=(4, 4), 28 bytes, device=cpu)"  # the bytes are those of the whole


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


def test_saved_and_loaded_it_is_the_same() -> None:
    for name in KINDS:
        q = coded(name, 4, 6)
        for kept in (q, q.t(), nn.Parameter(q), q.to(torch.float64)):
            assert isinstance(kept, QTensor)
            buffer = io.BytesIO()
            torch.save(kept, buffer)
            buffer.seek(0)
            for loaded in (pickle.loads(pickle.dumps(kept)), torch.load(buffer, weights_only=False)):
                assert isinstance(loaded, QTensor)
                assert (loaded.format, loaded.dtype, loaded.shape) == (kept.format, kept.dtype, kept.shape)
                assert loaded.requires_grad == kept.requires_grad
                assert isinstance(loaded, nn.Parameter) == isinstance(kept, nn.Parameter)
                assert torch.equal(loaded.detach(), kept.detach())
                assert torch.equal(loaded.detach() * 2, kept.detach() * 2)


def test_it_is_safe_to_load() -> None:
    for name in ("bfp8", "fixed4.1", "fp8_e4m3"):
        buffer, q = io.BytesIO(), coded(name, 4, 6)
        torch.save({"weight": q}, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=True)["weight"]
        assert loaded.format == q.format
        assert torch.equal(loaded, q)


@pytest.mark.parametrize("new", [torch.zeros(4, 6), coded("bfp8", 4, 6, seed=1), coded("bfp4", 4, 6)])
def test_data_can_be_replaced(new: Tensor) -> None:
    p = nn.Parameter(coded("bfp8", 4, 6))
    p.data = new
    assert torch.equal(p.detach(), quantize(new + 0.0, "bfp8"))


def test_data_of_another_shape_is_refused() -> None:
    p = nn.Parameter(coded("bfp8", 4, 6))
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"data must keep the shape \(4, 6\) of a QTensor, got \(2,\)"):
        p.data = torch.zeros(2)
    assert torch.equal(p.detach(), before)


def test_data_can_be_written_to() -> None:
    p = nn.Parameter(coded("bfp8", 4, 6))
    expected = p.detach().decode() * 0.3  # type: ignore[attr-defined]
    p.data.mul_(0.3)
    assert torch.equal(p.detach(), quantize(expected, "bfp8"))
    p.data[0] = 0.0
    assert p[0].abs().sum() == 0


# ---- autograd

USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "linear": ((5, 6), lambda w: F.linear(numbers(3, 6), w)),
    "linear with a bias": ((6,), lambda b: F.linear(numbers(3, 4), numbers(6, 4, seed=1), b)),
    "linear of sequences": ((5, 6), lambda w: F.linear(numbers(2, 3, 6), w)),
    "conv": ((4, 2, 3, 3), lambda w: F.conv2d(numbers(2, 2, 6, 6), w, padding=1)),
    "transposed conv": ((2, 4, 3), lambda w: F.conv_transpose1d(numbers(2, 2, 6), w, stride=2)),
    "embedding": ((7, 6), lambda w: F.embedding(torch.tensor([[1, 5], [5, 0]]), w)),
    "embedding bag": ((7, 6), lambda w: F.embedding_bag(torch.tensor([[1, 5], [5, 0]]), w)),
    "matmul": ((5, 6), lambda w: numbers(3, 5) @ w),
    "matmul of a transpose": ((5, 6), lambda w: numbers(3, 6) @ w.T),
    "batches": ((4, 5, 6), lambda w: torch.bmm(w, numbers(4, 6, 2))),
    "layer norm": ((6,), lambda w: F.layer_norm(numbers(3, 6), (6,), w, w)),
    "batch norm": ((6,), lambda w: F.batch_norm(numbers(3, 6), None, None, w, w, training=True)),
    "elementwise": ((5, 6), lambda w: (w * w).sin() * w[0] + w.exp()),
    "views": ((5, 6), lambda w: w.view(6, 5)[1:4].T[::2] * w[2:, 1:4].chunk(3)[0]),
    "indices": ((5, 6), lambda w: w[torch.tensor([1, 1, 3])].square()),
    "decode": ((5, 6), lambda w: (w.decode() if isinstance(w, QTensor) else w).square()),
    "decode a view": ((5, 6), lambda w: (v.decode() if isinstance(v := w.T[1:], QTensor) else v).square()),
    "another dtype": ((5, 6), lambda w: w.double().square()),
    "clone": ((5, 6), lambda w: w.clone().square()),
}


@pytest.mark.parametrize("use", USES)
def test_gradients_are_those_of_the_decoded_numbers_bit_for_bit(use: str) -> None:
    shape, run = USES[use]
    for name in ("bfp8", "bfp4", "fixed8.6", "bfp8/tensor"):
        q = leaf(coded(name, *shape))
        plain = leaf(quantize(numbers(*shape), name))
        results = [run(w) for w in (q, plain)]
        assert torch.equal(results[0], results[1])
        for result in results:
            result.backward(numbers(*result.shape, seed=9).to(result.dtype))
        assert type(q.grad) is Tensor
        assert plain.grad is not None
        assert torch.equal(q.grad, plain.grad)


def test_gradients_of_gradients_and_functional_ones() -> None:
    q = leaf(coded("bfp8", 3, 4))
    values = q.detach().decode()  # type: ignore[attr-defined]
    (first,) = torch.autograd.grad((q**3).sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    assert torch.equal(second, torch.func.grad(lambda x: (3 * x**2).sum())(values))
    assert torch.equal(torch.func.grad(lambda x: (x**3).sum())(q.detach()), first)


KEEPS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((3, 6), (5, 6), F.linear),
    "linear of sequences": ((2, 3, 6), (5, 6), F.linear),
    "conv": ((2, 2, 6, 6), (4, 2, 3, 3), F.conv2d),
    "transposed conv": ((2, 2, 6), (2, 4, 3), F.conv_transpose1d),
    "matmul": ((3, 5), (5, 6), lambda x, w: x @ w),
    "matmul of a transpose": ((3, 6), (5, 6), lambda x, w: x @ w.T),
    "batches": ((4, 6, 2), (4, 5, 6), lambda x, w: torch.bmm(w, x)),
    "elementwise": ((5, 6), (5, 6), lambda x, w: x * w),
    "views": ((5, 6), (5, 6), lambda x, w: x[1:].T * w[:4].T),
}


@pytest.mark.parametrize("use", KEEPS)
def test_what_autograd_keeps_is_codes(use: str) -> None:
    (input_shape, shape, run), saved = KEEPS[use], []

    def keep(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    q, x = leaf(coded("bfp8", *shape)), numbers(*input_shape, seed=1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run(x, q)
    assert isinstance(q, QTensor)
    kept = [t for t in saved if isinstance(t, QTensor)]
    assert len(kept) == 1
    assert kept[0].codes is q.codes
    assert sum(t.numel() for t in saved if not isinstance(t, QTensor)) <= x.numel()


def test_autograd_notices_that_codes_changed() -> None:
    p = nn.Parameter(coded("bfp8", 4, 4))
    loss = (p * p).sum()
    with torch.no_grad():
        p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "nesterov": True}, {"foreach": True}, {"fused": True}], ids=str
)
def test_a_step_of_torchs_sgd_is_rounded_to_nearest(options: dict[str, Any]) -> None:
    for name in KINDS:
        p, plain = nn.Parameter(coded(name, 4, 6)), nn.Parameter(quantize(numbers(4, 6), name))
        for w in (p, plain):
            optimizer = torch.optim.SGD([w], lr=0.1, weight_decay=0.01, **options)
            w.grad = numbers(4, 6, seed=1)
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(p.detach(), quantize(plain.detach(), name))


def test_inference_mode() -> None:
    q = coded("bfp8", 4, 6)
    d = q.decode()
    with torch.inference_mode():
        assert torch.equal(F.linear(torch.ones(2, 6), q), torch.ones(2, 6) @ d.T)
        for view in VIEWS.values():
            for seen, expected in zip(each(view(q)), each(view(d)), strict=True):
                assert torch.equal(seen + 0, expected)


# ---- embedding


@pytest.mark.parametrize("name", KINDS)
def test_embedding_decodes_only_the_rows_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [coded(name, rows, 5) for rows in (1, 2, 7)]
    fulls, decode, sizes = [q.decode() for q in tables], native.decode, []

    def counted(values: Tensor, *rest: Any, **how: Any) -> None:
        sizes.append(values.numel())
        decode(values, *rest, **how)

    monkeypatch.setattr(native, "decode", counted)
    monkeypatch.setattr(QTensor, "decode_base", forbid)
    for q, full in zip(tables, fulls, strict=True):
        last = len(q) - 1
        for indices in (
            torch.tensor([[0, last, 0], [last, last // 2, 0]]),
            torch.tensor([last], dtype=torch.int32),
            torch.tensor(0),
            torch.empty(2, 0, dtype=torch.int64),
        ):
            for path in (native.disabled, torch.enable_grad):
                sizes.clear()
                with path():
                    found = F.embedding(indices, q)
                    assert sizes == ([5 * indices.numel()] if native.enabled_for(full) else [])
                assert torch.equal(found, F.embedding(indices, full))


def test_embedding_of_a_view_and_other_options() -> None:
    q = coded("bfp8", 7, 5)
    i = torch.tensor([3, 0, 3])
    assert torch.equal(F.embedding(i, q.T), F.embedding(i, q.decode().T))
    assert torch.equal(F.embedding(i, q[2:]), F.embedding(i, q.decode()[2:]))
    gradients = []
    for w in (leaf(q), leaf(q.decode())):
        F.embedding(i, w, padding_idx=0, scale_grad_by_freq=True).square().sum().backward()
        gradients.append(w.grad)
    assert torch.equal(gradients[0], gradients[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("index", [-1, 7, -8])
def test_embedding_has_no_rows_beyond_its_ends(index: int) -> None:
    with pytest.raises(IndexError, match="out of"):
        F.embedding(torch.tensor([index]), coded("bfp8", 7, 5))


# ---- devices


def test_numbers_are_decoded_where_the_codes_are(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernels write to an address, which a tensor on the default device "meta" does not have; they are replaced here.
    monkeypatch.setattr(native, "decode", lambda *_: None)
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


# ---- torch.compile


@pytest.mark.slow
def test_compiled_functions_give_the_same_numbers() -> None:
    if not torch._dynamo.eval_frame.is_dynamo_supported():
        pytest.skip("no torch.compile here")

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w, b).relu() @ w[1:3].t()[:3]

    x, w, b = numbers(3, 6), leaf(coded("bfp8", 3, 6)), leaf(coded("bfp4", 3))
    results = []
    for run in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        y = run(x, w, b)
        y.square().sum().backward()
        results.append((y.detach(), w.grad, b.grad))
        w.grad = b.grad = None
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_integers_decode_and_shared_memory_is_refused() -> None:
    q = coded("bfp8", 4, 6)
    assert torch.equal(q.to(torch.int64), q.decode().to(torch.int64))
    assert torch.equal(q.bool(), q.decode().bool())
    assert torch.equal(q.to(torch.complex64), q.decode().to(torch.complex64))
    with pytest.raises(NotImplementedError, match="no memory of its own to share"):
        q.share_memory_()
    with pytest.raises(NotImplementedError, match="decode"):
        torch.utils.dlpack.from_dlpack(q)
