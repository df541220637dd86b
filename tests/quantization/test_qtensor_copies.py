"""Copies of QTensors: `copy_` within and between formats, clones and deep copies."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import QTensor, quantize
from tests.helpers.qtensors import KINDS, coded, forbid


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
    """Write into the first and return True if the second changed."""
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
