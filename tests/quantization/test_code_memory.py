"""Codes whose memory is not what format and shape need: refused when a QTensor is made, and before it is read."""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import QTensor, native
from qlangevin.quantization import qtensor
from qlangevin.quantization.code_memory import FREED
from qlangevin.quantization.formats import Format
from tests.helpers.qtensors import KINDS, coded

CODES, EXPONENTS = torch.ones(4, 6, dtype=torch.int8), torch.zeros(4, dtype=torch.int8)
PATHS = pytest.mark.parametrize("path", [native.disabled, torch.no_grad])


class Forged:
    """Contents of a file in the place of a QTensor."""

    def __init__(self, **changes: Any) -> None:
        parts = {
            "codes": CODES, "exponents": EXPONENTS, "format": ql.parse("bfp8"), "shape": (4, 6), "dtype": torch.float32,
            "view": None, "requires_grad": False, "is_parameter": False,
        } | changes  # fmt: skip
        self.parts = tuple(parts.values())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return qtensor._rebuild, self.parts


def save_and_load(what: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(what, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def with_field(format: Format, **fields: Any) -> Format:
    """Return a format with fields that its constructor would refuse."""
    for name, value in fields.items():
        object.__setattr__(format, name, value)
    return format


def test_a_sound_file_loads() -> None:
    assert torch.equal(save_and_load(Forged()).decode(), torch.full((4, 6), 2.0**-6))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exponents": None}, "needs 4 exponents, got None"),
        ({"exponents": EXPONENTS[:2].clone()}, r"exponents .* of shape \(4,\) .* got .* shape \(2,\)"),
        ({"exponents": EXPONENTS[:1].expand(4)}, "must be a contiguous .* strides"),
        ({"exponents": torch.zeros(8, dtype=torch.int8)[::2]}, "must be a contiguous .* strides"),
        ({"exponents": EXPONENTS.to(torch.int64)}, "torch.int8 .* got torch.int64"),
        ({"exponents": [0, 0, 0, 0]}, "got a list"),
        ({"codes": CODES.float()}, "torch.int8 .* got torch.float32"),
        ({"codes": CODES.to(torch.int64)}, "torch.int8 .* got torch.int64"),
        ({"codes": CODES[:3].clone()}, r"of shape \(4, 6\) .* got .* shape \(3, 6\)"),
        ({"codes": CODES.T.contiguous().T}, "must be a contiguous"),
        ({"codes": CODES[:1].expand(4, 6)}, "must be a contiguous"),
        ({"codes": CODES.to_sparse()}, "got torch.int8, torch.sparse_coo"),
        ({"codes": None}, "got NoneType"),
        ({"codes": torch.full_like(CODES, -128)}, "stand for no number of bfp8"),
        ({"shape": (2**32, 2**32)}, "no tensor has the shape"),
        ({"shape": (0, 2**62, 4)}, "no tensor has the shape"),
        ({"shape": (-4, -6)}, "no tensor has the shape"),
        ({"shape": ("4", 6)}, "damaged"),
        ({"shape": None}, "damaged"),
        ({"dtype": torch.int8}, "expected a real floating-point tensor"),
        ({"dtype": "float32"}, "damaged"),
        ({"dtype": torch.float8_e5m2}, "cannot hold every number of bfp8"),
        ({"view": ((4, 6), (6, 1), 5)}, "a view must lie inside"),
        ({"view": ((40, 6), (6, 1), 0)}, "a view must lie inside"),
        ({"view": ((4,), (-6,), 0)}, "a view must lie inside"),
        ({"view": ((2**40,), (2**40,), 0)}, "a view must lie inside"),
        ({"view": ((4, 6), (6,), 0)}, "a view must lie inside"),
        ({"view": (4, 6)}, "size, strides and offset"),
        ({"format": "bfp8"}, "a format is a FixedPoint, BlockFloat or Float, got str"),
        ({"format": {"bits": 8}}, "a format is a FixedPoint, BlockFloat or Float, got dict"),
        ({"requires_grad": 3}, "two flags"),
    ],
)  # fmt: skip
def test_forged_files_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_and_load(Forged(**changes))


@pytest.mark.parametrize(
    ("format", "message"),
    [
        (with_field(ql.BlockFloat(8), bits=200), "bits must be an integer between 2 and 24, got 200"),
        (with_field(ql.BlockFloat(8), block=-3), "block must be an integer between 1"),
        (with_field(ql.BlockFloat(8), exp_bits=60), "exp_bits must be"),
        (with_field(ql.Float(4, 3), exp=40), "exp must be an integer between 1 and 8, got 40"),
        (with_field(ql.FixedPoint(8, 3), frac=10**9), "frac must be an integer"),
        (with_field(ql.FixedPoint(8, 3), bits="8"), "bits must be an integer"),
        (with_field(ql.FixedPoint(8, 3), kernel_grid=None), "kernel_grid"),
    ],
)
def test_the_fields_of_a_stored_format_are_checked(format: Format, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        save_and_load(Forged(format=format))
    with pytest.raises((ValueError, TypeError), match=message):
        save_and_load({"format": format})


def test_a_stored_format_without_fields_is_refused() -> None:
    with pytest.raises(ValueError, match="has fields that no format has"):
        qtensor._rebuild(CODES, EXPONENTS, object.__new__(ql.BlockFloat), (4, 6), torch.float32, None, False, False)
    with pytest.raises(ValueError, match="damaged"):
        qtensor._rebuild(CODES, EXPONENTS)


def test_a_stored_storage_that_is_too_short_is_refused() -> None:
    short = CODES.clone()
    short.untyped_storage().resize_(0)
    with pytest.raises((ValueError, RuntimeError)):  # PyTorch's own refusal
        save_and_load(Forged(codes=short))
    with pytest.raises(ValueError, match="freed"):
        qtensor._rebuild(short, EXPONENTS, ql.parse("bfp8"), (4, 6), torch.float32, None, False, False)


@pytest.mark.parametrize("name", KINDS)
def test_every_way_to_make_one_checks(name: str) -> None:
    q = coded(name, 4, 6)
    for codes in (q.codes.reshape(-1)[:-1], q.codes.to(torch.int64), torch.stack((q.codes, q.codes), -1)[..., 0]):
        with pytest.raises(ValueError, match="codes of a"):
            QTensor(codes, q.exponents, q.format, q.base_shape, q.dtype)
        with pytest.raises(ValueError, match="codes of a"):
            q.with_codes(codes, q.exponents)
        with pytest.raises(ValueError, match="codes of a"):
            QTensor.__tensor_unflatten__(
                {"codes": codes} | ({} if q.exponents is None else {"exponents": q.exponents}),
                q.__tensor_flatten__()[1], q.shape, q.stride(),
            )  # fmt: skip
    if q.exponents is not None:
        for exponents in (None, q.exponents.float(), torch.cat((q.exponents, q.exponents)), q.exponents.to("meta")):
            with pytest.raises(ValueError, match=r"exponents"):
                QTensor(q.codes, exponents, q.format, q.base_shape, q.dtype)
    with pytest.raises(ValueError, match="a view must lie inside"):
        QTensor(q.codes, q.exponents, q.format, q.base_shape, q.dtype, ((4, 7), (6, 1), 0))
    for about in ("bfp8", None):
        with pytest.raises(ValueError, match="the format of codes"):
            QTensor(q.codes, q.exponents, about, q.base_shape, q.dtype)  # type: ignore[arg-type]


def uses(q: QTensor) -> list[Callable[[], Any]]:
    """Return everything that reads codes."""
    other, rows = ql.encode(torch.zeros(4, 6), q.format), torch.zeros(2, dtype=torch.int64)
    return [
        q.decode, lambda: q + 1, lambda: q.clone(), lambda: q.to(torch.float64), lambda: other.copy_(q), lambda: q.copy_(other),
        lambda: q.add_(1), lambda: q.copy_(torch.zeros(4, 6)), lambda: torch.save(q, io.BytesIO()), lambda: q[1:] + 0,
        lambda: nn.functional.embedding(rows, q), lambda: q.t() @ torch.zeros(4, 2),
    ]  # fmt: skip


@PATHS
@pytest.mark.parametrize("name", ["bfp8", "bfp4", "fixed8.3", "bfp16", "fp32"])
def test_memory_that_changed_is_not_read(name: str, path: Any) -> None:
    def free(t: Tensor) -> None:
        t.untyped_storage().resize_(0)

    def halve(t: Tensor) -> None:
        t.untyped_storage().resize_(t.untyped_storage().nbytes() // 2)

    def shorten(t: Tensor) -> None:
        t.set_(t.reshape(-1)[:1].clone())  # type: ignore[call-overload]

    for change, error in ((free, RuntimeError), (halve, ValueError), (shorten, ValueError)):
        for part in ("codes", "exponents") if ql.parse(name).has_exponents else ("codes",):
            for i in range(len(uses(coded(name, 4, 6)))):
                q = coded(name, 4, 6)
                change(getattr(q, part))
                with path(), pytest.raises(error, match=FREED if change is free else "must be a contiguous"):
                    uses(q)[i]()


@PATHS
def test_one_exponent_is_not_copied_to_all_rows(path: Any) -> None:
    layer, source = nn.Linear(6, 4, bias=False), coded("bfp8", 4, 6)
    layer = ql.pack(layer, "bfp8")
    assert source.exponents is not None
    before, source.exponents = layer.weight.detach().clone(), source.exponents[:1]
    with path(), pytest.raises((ValueError, RuntimeError), match=r"exponents .* must be .* shape \(4,\)"):
        layer.load_state_dict({"weight": source})
    assert torch.equal(layer.weight, before)
    source = coded("bfp8", 4, 6)
    source.codes = source.codes[:1]
    with path(), pytest.raises((ValueError, RuntimeError), match=r"codes .* must be .* shape \(4, 6\)"):
        layer.load_state_dict({"weight": source})
    assert torch.equal(layer.weight, before)


def test_codes_without_memory_can_be_made_but_not_read() -> None:
    codes = CODES.clone()
    codes.untyped_storage().resize_(0)  # what FSDP2 leaves of gathered weights
    q = QTensor(codes, EXPONENTS, ql.parse("bfp8"), torch.Size((4, 6)), torch.float32)
    assert q.detach().t().shape == (6, 4)
    with pytest.raises(RuntimeError, match="the codes of these weights were freed"):
        q.decode()
    assert coded("bfp8", 4, 6).to("meta").shape == (4, 6)


@PATHS
def test_the_operators_check_too(path: Any) -> None:
    ops, exponents = torch.ops.qlangevin, EXPONENTS
    with path():
        assert torch.equal(ops.decode(CODES, exponents, "bfp8"), torch.full((4, 6), 2.0**-6))
        strided = torch.arange(8, dtype=torch.int8)[::2]
        assert torch.equal(ops.decode(CODES, strided, "bfp8"), ops.decode(CODES, strided.clone(), "bfp8"))
        for wrong in (None, exponents[:1], exponents.float(), exponents.to(torch.int64), exponents.view(2, 2)):
            with pytest.raises(ValueError, match=r"exponents|torch\.int8"):
                ops.decode(CODES, wrong, "bfp8")
        for codes in (CODES.float(), CODES.to(torch.int64), CODES.to(torch.int16)):
            with pytest.raises(ValueError, match=r"torch\.int8"):
                ops.decode(codes, exponents, "bfp8")
        for values in (torch.ones(4, 6, dtype=torch.float64), torch.ones(4, 6, dtype=torch.complex64), CODES):
            with pytest.raises(ValueError, match="only float32, bfloat16 and float16 numbers can be encoded"):
                ops.encode(values, "bfp8")
        with pytest.raises(ValueError, match=r"cannot encode numbers from 1 to 1e\+06 as fixed8\.3"):
            ops.encode(torch.tensor([1.0, 1e6]), "fixed8.3")
        freed = torch.ones(4, 6)
        freed.untyped_storage().resize_(0)
        for call in (lambda: ops.encode(freed, "bfp8"), lambda: ql.quantize(freed, "bfp8")):
            with pytest.raises(ValueError, match=r"with all of its memory|must have all of its memory"):
                call()


@pytest.mark.parametrize("name", [*KINDS, "bfp24e7", "bfp8e3", "e8m21", "e3m0", "fixed25.20"])
def test_any_bits_decode_alike_on_both_paths(name: str) -> None:
    # Codes that stand for no number, and exponents that no block has: any number will do, but the same.
    format, generator = ql.parse(name), torch.Generator().manual_seed(0)
    codes = torch.empty(8, 64, dtype=format.code_dtype)
    codes.view(torch.uint8).random_(0, 256, generator=generator)
    blocks = format.block_count(codes.shape)
    exponents = torch.empty(blocks, dtype=torch.int8).random_(-128, 128, generator=generator)
    exponents[:1] = -128
    with native.disabled():
        expected = torch.ops.qlangevin.decode(codes, exponents, name)
    found = torch.ops.qlangevin.decode(codes, exponents, name)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
