"""Gradients through QTensors, the codes that autograd keeps, and a step of torch's SGD."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qlangevin import QTensor, quantize
from tests.helpers.qtensors import KINDS, coded, leaf, numbers

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
