"""Gradients in 8 bits between ranks: unbiased, equal on all ranks, and no more bytes than documented."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import qlangevin as ql
from qlangevin.distributed import Ranks, Wire, replicate
from tests.helpers import chains
from tests.helpers.deferred_layers import NoWaiting, deferred_cpu
from tests.helpers.process_groups import run_on_ranks

pytestmark = pytest.mark.distributed

FORMAT = ql.parse("bfp8/64")


class Linear(nn.Module):
    """Parameters of given shapes; the gradients of ``model(gradients)`` are the tensors passed to it."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, gradients: list[Tensor]) -> Tensor:
        parts = [(p * g.to(p.dtype)).sum() for p, g in zip(self.parameters(), gradients, strict=True)]
        return torch.stack(parts).sum()


SHAPES = {"large": (31, 50), "group": (64,), "small": (3,), "row": (1, 65), "number": ()}


def gradients(rank: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Gradients of one rank, ten times as large as those of the rank before."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator) * 10.0**rank for shape in shapes.values()]


def idle_sampler(model: nn.Module, **changes: Any) -> ql.SGLD:
    """A sampler whose steps are counted but, unless ``lr`` is given, change nothing."""
    return ql.SGLD(model.named_parameters(), **({"lr": 0.0, "num_data": 1, "seed": 4} | changes))


def reduce_gradients(model: nn.Module, called: nn.Module, sampler: ql.SGLD, mine: list[Tensor]) -> list[Tensor]:
    """Run backward on this rank's gradients and return the means that arrive."""
    sampler.zero_grad()
    called(mine).backward()
    return [cast(Tensor, p.grad).clone() for p in model.parameters()]


# ---- the means that arrive


def many_means(ranks: Ranks, steps: int) -> list[Any]:
    model = Linear(SHAPES)
    sampler = idle_sampler(model)
    called, mine = replicate(model, sampler, wire="bfp8/64", every=0), gradients(ranks.rank)
    count, first, second, seen = 0, torch.zeros(0), torch.zeros(0), []
    for _ in range(steps):
        arrived = reduce_gradients(model, called, sampler, mine)
        assert all(bool(FORMAT.is_representable(g.view(-1)).all()) for g in arrived)
        flat = torch.cat([g.view(-1) for g in arrived]).double()
        seen.append(chains.sha256(flat))
        first, second = (first + flat, second + flat**2) if count else (flat, flat**2)
        count += 1
        sampler.step()
    return [seen, (first / count).tolist(), (second / count).tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_means_are_unbiased_on_the_grid_and_equal_on_all_ranks(size: int) -> None:
    """The squared error of means over T steps, divided by its expectation: 1 for N independent elements.

    Its standard deviation is about sqrt(2 / N): above 1 + 6 of them is a false alarm once in 10^8 seeds. A bias of a
    tenth of the standard deviation of every element would make it 2.5.
    """
    steps = 150
    found = run_on_ranks(many_means, size, steps)
    assert all(other == found[0] for other in found)
    assert len(set(found[0][0])) == steps  # new random bits in each step
    exact = torch.stack([torch.cat([g.view(-1) for g in gradients(r)]).double() for r in range(size)]).mean(0)
    mean, square = (torch.tensor(numbers, dtype=torch.float64) for numbers in found[0][1:])
    variance = (square - mean**2).clamp_min(0) * steps / (steps - 1)
    weight = 1 / FORMAT.gap(exact.float()).double() ** 2  # the parameters are of different sizes
    ratio = steps * ((mean - exact) ** 2 * weight).sum() / (variance * weight).sum()
    assert 0.5 < ratio < 1 + 6 * (2 / exact.numel()) ** 0.5


def one_mean(ranks: Ranks, wire: str, dtype: str, shapes: dict[str, tuple[int, ...]]) -> list[list[float]]:
    model = Linear(shapes, getattr(torch, dtype))
    called = replicate(model, sampler := idle_sampler(model), wire=wire)
    arrived = reduce_gradients(model, called, sampler, gradients(ranks.rank, shapes))
    assert all(g.dtype == p.dtype for g, p in zip(arrived, model.parameters(), strict=True))
    sampler.step()
    return [g.flatten().tolist() for g in arrived]


@pytest.mark.parametrize(
    ("wire", "dtype", "error"),
    [
        ("fp32", "float32", 1e-6),
        ("fp32", "float64", 1e-6),
        ("bfp8/64", "float64", 2**-5),
        ("bfp8/64", "bfloat16", 2**-5),
        ("bfp8/64", "float16", 2**-5),
        ("bfp8/1", "float32", 2**-5),
        ("bfp4/5", "float32", 1.0),
        ("bfp16/64", "float32", 2**-13),
        ("bfp23/3", "float32", 2**-20),
    ],
)
def test_every_format_and_dtype_arrives(wire: str, dtype: str, error: float) -> None:
    """Also a parameter without elements. Each of the two roundings is off by less than a gap of the largest element."""
    shapes = SHAPES | {"nothing": (0, 3)}
    found = run_on_ranks(one_mean, 4, wire, dtype, shapes)
    assert all(other == found[0] for other in found)
    for arrived, *parts in zip(found[0], *(gradients(rank, shapes) for rank in range(4)), strict=True):
        exact = torch.stack([part.flatten().to(getattr(torch, dtype)).double() for part in parts]).mean(0)
        largest = max((float(part.abs().max()) for part in parts if part.numel()), default=0.0)
        assert torch.tensor(arrived, dtype=torch.float64).sub(exact).abs().le(2 * error * largest).all()


# ---- bytes and buckets


class Counted:
    """`torch.distributed.all_to_all_single`, counting its calls and the bytes that leave this rank."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls, self.bytes, self.original = rank, 0, 0, dist.all_to_all_single

    def __call__(self, output: Tensor, input: Tensor, into: list[int], out: list[int], **options: Any) -> Any:
        self.calls += 1
        self.bytes += input.element_size() * sum(n for rank, n in enumerate(out) if rank != self.rank)
        assert sum(out) == input.numel()
        return self.original(output, input, into, out, **options)

    def __enter__(self) -> Counted:
        dist.all_to_all_single = cast(Any, self)
        return self

    def __exit__(self, *_: Any) -> None:
        dist.all_to_all_single = self.original


def loopback() -> int:
    """Bytes that the kernel has sent over the loopback device."""
    lines = Path("/proc/net/dev").read_text().splitlines() if Path("/proc/net/dev").exists() else []
    return next((int(line.split()[9]) for line in lines if line.split()[0] == "lo:"), 0)


def counted_bytes(ranks: Ranks, wire: str) -> list[int]:
    model = nn.Sequential(nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    sampler = ql.SGLD(model.parameters(), 0.1, 100, weights="bfp8")
    hook = Wire(sampler, wire)
    called = replicate(model, sampler, wire=hook, every=0, bucket_cap_mb=0.1)
    before = loopback()
    with Counted(ranks.rank) as counted:
        for _ in range(3):
            sampler.zero_grad()
            called(torch.randn(4, 192)).square().mean().backward()
            sampler.step()
    weights = sum(p.numel() for p in model.parameters())
    return [hook.sent, counted.bytes, 3 * weights, loopback() - before]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("wire", "most"), [("bfp8/64", 0.27), ("fp32", 1.0)])
def test_bytes_on_the_wire(size: int, wire: str, most: float) -> None:
    """A rank of an all-reduce sends 2 (R-1)/R floats of 4 bytes for each weight."""
    found = run_on_ranks(counted_bytes, size, wire)
    for sent, counted, _, _ in found:
        assert sent == counted > 0
    sent, floats = sum(each[0] for each in found), 4 * 2 * (size - 1) * found[0][2]
    print(f"{wire}, {size} ranks: {sent / floats:.4f} of an all-reduce; on lo {max(f[3] for f in found) / floats:.4f}")
    assert sent <= most * floats
    assert all(each[0] <= 1.1 * sent / size for each in found)  # all ranks alike


OPTIONS: list[dict[str, Any]] = [
    {"bucket_cap_mb": 100},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb": 0.0004, "gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


def bucketed(ranks: Ranks, wire: str) -> list[list[Any]]:
    found = []
    for options in OPTIONS:
        model = chains.network()
        sampler = ql.SGLD(model.named_parameters(), 0.05, 50, weights="bfp8", seed=5)
        called = replicate(model, sampler, wire=wire, every=1, **options)
        with Counted(ranks.rank) as counted:
            chains.train(called, sampler, chains.loader(ranks.rank, ranks.size), 5)
        found.append([chains.digest(model, sampler), counted.calls])
    return found


@pytest.mark.parametrize("wire", ["fp32", "bfp8/64"])
def test_buckets_make_no_difference(wire: str) -> None:
    """DDP rearranges its buckets after the first step."""
    found = run_on_ranks(bucketed, 4, wire)
    assert all(other == found[0] for other in found)
    digests, calls = zip(*found[0], strict=True)
    assert len(set(digests)) == 1
    assert calls[0] == 10 < calls[1] <= calls[2]  # two exchanges a step, and more with more buckets


def convolved(ranks: Ranks) -> list[Any]:
    """A weight in channels-last memory format."""
    torch.manual_seed(0)
    model = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    sampler = ql.SGLD(model.named_parameters(), 0.05, 50, seed=5)
    called = replicate(model, sampler, wire="fp32", every=1)
    x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(ranks.rank))
    called(x).square().mean().backward()
    alone = nn.Conv2d(3, 8, 3)
    alone.load_state_dict(model.state_dict())
    each = [torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(r)) for r in range(ranks.size)]
    alone(torch.cat(each)).square().mean().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.contiguous(), alone.weight.grad)
    sampler.step()
    return [chains.digest(model, sampler)]


def test_channels_last() -> None:
    found = run_on_ranks(convolved, 2)
    assert found[0] == found[1]


# ---- infinities and NaNs


def not_finite(ranks: Ranks, wire: str | None, odd: int, value: str) -> list[Any]:
    """One rank has a bad element in one of its gradients; in the next step it has none."""
    model = Linear(SHAPES)
    sampler = idle_sampler(model, lr=0.1, weights="bfp8")
    called, mine = replicate(model, sampler, wire=wire, every=1), gradients(ranks.rank)
    before, message = chains.digest(model, sampler), ""
    bad = [g.clone() for g in mine]
    if odd in (ranks.rank, -1):
        bad[3][0, 64] = float(value)
    try:
        reduce_gradients(model, called, sampler, bad)
        sampler.step()
    except FloatingPointError as error:
        message = str(error)
    same = chains.digest(model, sampler) == before
    reduce_gradients(model, called, sampler, mine)
    sampler.step()
    return [message, same, chains.digest(model, sampler)]


@pytest.mark.parametrize("wire", [None, "fp32", "bfp8/64"])
@pytest.mark.parametrize(("odd", "value"), [(0, "nan"), (2, "inf"), (1, "-inf"), (-1, "3e38")])
def test_a_gradient_that_is_not_finite_is_an_error_on_all_ranks(wire: str | None, odd: int, value: str) -> None:
    """Also where each rank's gradient is finite and their sum is not."""
    found = run_on_ranks(not_finite, 3, wire, odd, value)
    assert found[0] == found[1] == found[2]
    message, unchanged, _ = found[0]
    if (wire, value) == (None, "3e38"):  # torch divides before it adds up
        assert (message, unchanged) == ("", False)
    else:
        assert "the gradient of parameter 'row' holds an infinity or a NaN" in message
        assert unchanged


def never_used(ranks: Ranks) -> list[str]:
    """Rank 1 does not use one parameter, and no rank uses another."""
    model = Linear(SHAPES)
    sampler = idle_sampler(model, lr=0.1, weights="bfp8", accumulator="fp32")
    called = replicate(model, sampler, wire="bfp8/64", every=1, find_unused_parameters=True)

    def forward(gradients: list[Tensor]) -> Tensor:
        used = list(zip(model.parameters(), gradients, strict=True))[1 + ranks.rank :]
        return torch.stack([(p * g).sum() for p, g in used]).sum()

    model.forward = forward  # type: ignore[method-assign]
    for _ in range(4):
        sampler.zero_grad()
        called(gradients(ranks.rank)).backward()
        sampler.step()
    steps = {name: sampler.state[p]["step"] for name, p in model.named_parameters()}
    assert steps == {name: 0 if name == "large" else 4 for name in SHAPES}
    return [chains.digest(model, sampler)]


def test_parameters_that_some_ranks_do_not_use() -> None:
    found = run_on_ranks(never_used, 2)
    assert found[0] == found[1]


def passes(ranks: Ranks) -> list[Any]:
    """Two backwards before each step: the gradient is rounded, added to, and rounded again."""
    model = Linear({"a": (64,)})
    sampler = idle_sampler(model)
    called, found = replicate(model, sampler, wire="bfp4/64", every=0), list[list[float]]()
    mine = [torch.cat((torch.ones(1), torch.full((63,), 0.13125)))]
    for _ in range(400):
        sampler.zero_grad()
        called(mine).backward()
        called(mine).backward()
        found.append(cast(Tensor, next(model.parameters()).grad).tolist())
        sampler.step()
    return found


@pytest.mark.slow
def test_two_backwards_before_a_step_have_bits_of_their_own() -> None:
    """With equal bits the mean of 25 200 numbers would be 16 standard errors off; 5 are a false alarm in 2 million."""
    [found] = run_on_ranks(passes, 1)
    numbers = torch.tensor(found, dtype=torch.float64)[:, 1:]
    error = float(numbers.std()) / numbers.numel() ** 0.5
    assert abs(float(numbers.mean()) - 0.2625) < 5 * error


def without_waiting(ranks: Ranks, value: str) -> list[Any]:
    """Average gradients, the second time with a bad element on rank 1, by the CPU's kernels and by deferred ones."""
    found: list[Any] = []
    for context in (nullcontext(), deferred_cpu()):
        model = Linear(SHAPES)
        called = replicate(model, sampler := idle_sampler(model), wire="bfp8/64", every=0)
        with context as kernels:
            for bad in (False, True):
                mine = [g.clone() for g in gradients(ranks.rank)]
                if bad and ranks.rank == 1:
                    mine[3][0, 64] = float(value)
                with NoWaiting(model) if kernels is not None else nullcontext():
                    arrived = reduce_gradients(model, called, sampler, mine)
                found.append([g.flatten().tolist() for g in arrived])
        assert kernels is None or set(kernels.calls) == {"quantize_with_codes", "decode"}
    return [repr(found[:2]), repr(found[2:])]  # NaN differs from itself


@pytest.mark.parametrize("value", ["nan", "inf", "3e38"])
def test_gradients_on_a_device_that_the_host_must_not_wait_for(value: str) -> None:
    by_rank = run_on_ranks(without_waiting, 2, value)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][0] == by_rank[0][1]
    assert ("nan" in by_rank[0][0]) == (value != "3e38")  # whose mean is finite
