"""Operations of PyTorch on QTensors, embedding, and torch.compile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from qlangevin import QTensor, native
from tests.helpers.qtensors import KINDS, coded, each, forbid, leaf, numbers

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
