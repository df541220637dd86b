"""Writing into QTensors, their views and their data: the result is rounded to the format."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from qlangevin import Format, parse, quantize
from tests.helpers.qtensors import KINDS, PATHS, coded, numbers
from tests.helpers.strategies import formats

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


# ---- data


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
