"""Views of QTensors, which share the codes, and reshaping that has to copy."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from qlangevin import Format, QTensor, native, quantize
from tests.helpers.qtensors import KINDS, PATHS, coded, each, numbers
from tests.helpers.strategies import formats

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


def test_inference_mode() -> None:
    q = coded("bfp8", 4, 6)
    d = q.decode()
    with torch.inference_mode():
        assert torch.equal(F.linear(torch.ones(2, 6), q), torch.ones(2, 6) @ d.T)
        for view in VIEWS.values():
            for seen, expected in zip(each(view(q)), each(view(d)), strict=True):
                assert torch.equal(seen + 0, expected)
