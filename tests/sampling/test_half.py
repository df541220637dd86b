"""Samplers of bfloat16 and float16 models: the law of the chain, mixed dtypes, autocast and GradScaler."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import SGLD, QTensor, native

HALVES = [torch.bfloat16, torch.float16]
X, LABELS = torch.randn(32, 12, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 3
Change = Callable[[nn.Sequential], nn.Sequential]


def build() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 3))


def loss_of(model: nn.Module, dtype: torch.dtype | None) -> Tensor:
    return nn.functional.cross_entropy(model(X if dtype is None else X.to(dtype)).float(), LABELS)


def train(
    model: nn.Module, dtype: torch.dtype | None = None, autocast: torch.dtype | None = None, **settings: Any
) -> list[float]:
    """Return the losses of a few steps."""
    sampler, losses = SGLD(model.parameters(), 0.1, 100_000, **settings), []
    for _ in range(12):
        sampler.zero_grad()
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of(model, dtype)
        loss.backward()
        sampler.step()
        losses.append(loss.item())
    return losses


def numbers(model: nn.Module) -> list[Tensor]:
    return [p.decode() if isinstance(p, QTensor) else p.detach().clone() for p in model.parameters()]


# ---- the law of a chain

ALPHA, STEPS, COUNT = 1e-4, 500, 200_000


def second_moment(step: Callable[[Tensor], None], start: float) -> tuple[float, float]:
    """Return the second moment of θ, bfloat16 numbers of variance ``start``, after steps on U = θ²/2, and their share of it."""
    theta = nn.Parameter((torch.randn(COUNT, generator=torch.Generator().manual_seed(2)) * start**0.5).bfloat16())
    before = theta.detach().double()
    for _ in range(STEPS):
        step(theta)
    after = theta.detach().double()
    return float(after.square().mean()), float((after * before).mean() / before.square().mean())


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "bf16"])
@pytest.mark.parametrize("start", [1.0, 2.0])
def test_the_variance_of_a_chain_in_bfloat16(start: float, weights: str | None) -> None:
    # α θ is less than half a gap: rounded to nearest there is no drift, and the variance grows by 2 α a step. Exact are
    # E[θ'|θ] = (1 - α) θ and Var[θ'|θ] = 2 α. The second moment of 200 000 chains has a relative standard error of
    # sqrt(2/n) = 0.0032; five of them are a false alarm with probability 6e-7, and naive steps are ten or more away.
    samplers: dict[int, SGLD] = {}

    def step(theta: nn.Parameter) -> None:
        if id(theta) not in samplers:
            samplers[id(theta)] = SGLD([theta], ALPHA, 1, weights=weights)
        theta.grad = theta.detach().clone()
        samplers[id(theta)].step()

    generator = torch.Generator().manual_seed(3)

    def step_naively(theta: nn.Parameter) -> None:
        with torch.no_grad():
            theta.add_(theta, alpha=-ALPHA)
            theta.add_((torch.randn(COUNT, generator=generator) * math.sqrt(2 * ALPHA)).bfloat16())

    shrink = (1 - ALPHA) ** (2 * STEPS)
    expected = shrink * start + (1 - shrink) / (1 - (1 - ALPHA) ** 2) * 2 * ALPHA
    found, slope = second_moment(step, start)  # type: ignore[arg-type]
    assert found == pytest.approx(expected, rel=0.016)
    assert slope == pytest.approx((1 - ALPHA) ** STEPS, abs=5 * math.sqrt(2 * ALPHA * STEPS / start / COUNT))
    naive, slope = second_moment(step_naively, start)  # type: ignore[arg-type]
    assert naive > 1.04 * expected
    assert slope > 0.99


# ---- kinds of models


MODELS: dict[str, Change] = {
    "plain": lambda m: m,
    "packed": lambda m: ql.pack(m, "bfp8"),
    "lowered": lambda m: ql.lower(m, "bfp8", "bfp8"),
    "lowered and packed": lambda m: ql.pack(ql.lower(m, "bfp8", "bfp8"), "bfp8"),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("later", [False, True], ids=["converted first", "converted later"])
def test_half_precision_models_are_trained(kind: str, dtype: torch.dtype, later: bool) -> None:
    def made() -> nn.Sequential:
        return MODELS[kind](build()).to(dtype) if later else MODELS[kind](build().to(dtype))

    model = made()
    assert {p.dtype for p in model.parameters()} == {dtype}
    losses = train(model, dtype)
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert isinstance(next(model.parameters()), QTensor) == ("packed" in kind)
    with native.disabled():
        other = made()
        assert train(other, dtype) == losses
    assert all(map(torch.equal, numbers(model), numbers(other)))


@pytest.mark.parametrize("dtype", HALVES)
def test_a_packed_model_keeps_its_codes_when_it_is_converted(dtype: torch.dtype) -> None:
    model = ql.pack(build(), "bfp8")
    codes = [p.codes.clone() for p in model.parameters() if isinstance(p, QTensor)]
    values = numbers(model)
    model.to(dtype)
    for p, code, value in zip(model.parameters(), codes, values, strict=True):
        assert isinstance(p, QTensor)
        assert isinstance(p, nn.Parameter)
        assert torch.equal(p.codes, code)
        assert torch.equal(p.decode(), value.to(dtype))
    model.float()
    assert all(map(torch.equal, numbers(model), values))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("settings", [{}, {"weights": "bfp8"}, {"weights": "fixed8.5", "accumulator": "fp32"}])
def test_parameters_and_gradients_of_several_dtypes(settings: dict[str, Any], dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        parameters = [nn.Parameter(torch.linspace(-1, 1, 60).view(6, 10).to(d)) for d in (dtype, torch.float32)]
        sampler = SGLD(parameters, 0.1, 1000, **settings)
        for k in range(3):
            for p, other in zip(parameters, (torch.float32, dtype), strict=True):
                p.grad = None
                p.grad_dtype = other
                p.grad = torch.full((6, 10), 0.1 * k).to(other)
            sampler.step()
        return [p.detach() for p in parameters]

    found = run()
    assert [t.dtype for t in found] == [dtype, torch.float32]
    with native.disabled():
        assert all(map(torch.equal, run(), found))


def test_norms_may_stay_in_float32() -> None:
    class InFloat32(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input.float()).to(input.dtype)

    model = build().bfloat16()
    model[1] = InFloat32(40)
    ql.pack(ql.lower(model, "bfp8", "bfp8"), "bfp8")
    losses = train(model, torch.bfloat16, step_in_backward=True)
    assert losses[-1] < 0.8 * losses[0]
    assert [p.dtype for p in model.parameters()].count(torch.float32) == 2


def test_large_float16_gradients_do_not_overflow_what_a_chain_is_watched_by() -> None:
    p = nn.Parameter(torch.ones(1000, dtype=torch.float16))
    sampler = SGLD([p], 1e-6, 10)
    for _ in range(3):
        p.grad = torch.full_like(p, 60_000.0)
        sampler.step()
    assert p.isfinite().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_saturated_weights_are_counted_on_the_clipped_grid(dtype: torch.dtype) -> None:
    p = nn.Parameter(torch.full((2, 3), torch.finfo(dtype).max, dtype=dtype))
    assert SGLD([p], 0.1, 10, weights="bfp8").saturated() == 6


def test_an_accumulator_holds_what_bfloat16_weights_cannot() -> None:
    p = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    sampler = SGLD([p], 2.0**-12, 1, temperature=0.0, weights="bf16", accumulator="fp32")
    for _ in range(8):
        p.grad = torch.ones_like(p)
        sampler.step()
    accumulator = sampler.state[p]["accumulator"]
    assert accumulator.dtype == torch.float32
    assert torch.equal(accumulator, torch.full((1000,), 1 - 2.0**-9))
    assert set(p.tolist()) == {1.0, 1 - 2.0**-8}


# ---- autocast and GradScaler


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("in_backward", [False, True])
def test_autocast(kind: str, dtype: torch.dtype, in_backward: bool) -> None:
    model = MODELS[kind](build())
    losses = train(model, autocast=dtype, step_in_backward=in_backward)
    assert losses[-1] < 0.8 * losses[0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with native.disabled():
        assert train(MODELS[kind](build()), autocast=dtype, step_in_backward=in_backward) == losses


def run_scaled(
    model: nn.Module, half: bool, spoil: int = -1, unscale: bool = False
) -> tuple[list[Tensor], list[float]]:
    """Train under a GradScaler; return the weights after each step, and its scales. One step has a gradient of infinity."""
    sampler, scaler = SGLD(model.parameters(), 0.1, 100_000), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    weights, scales = [], []
    for k in range(4):
        sampler.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16, enabled=not half):
            loss = loss_of(model, torch.float16 if half else None)
        scaler.scale(loss).backward()
        if k == spoil:
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradient[0, 0] = torch.inf
        if unscale:
            scaler.unscale_(sampler)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(sampler)
        scaler.update()
        weights.append(torch.cat([w.view(-1).float() for w in numbers(model)]))
        scales.append(scaler.get_scale())
    return weights, scales


@pytest.mark.parametrize("half", [False, True], ids=["autocast", "half"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_grad_scaler_skips_steps_and_divides_gradients(kind: str, half: bool) -> None:
    def made() -> nn.Module:
        return MODELS[kind](build().half() if half else build())

    weights, scales = run_scaled(made(), half)
    spoiled, after = run_scaled(made(), half, spoil=1)
    assert scales == [2.0**12] * 4
    assert after == [2.0**12, *[2.0**11] * 3]
    assert torch.equal(spoiled[1], spoiled[0])
    assert not torch.equal(spoiled[2], spoiled[1])
    model = made()
    sampler = SGLD(model.parameters(), 0.1, 100_000)
    with torch.autocast("cpu", dtype=torch.float16, enabled=not half):
        loss_of(model, torch.float16 if half else None).backward()
    sampler.step()
    without = torch.cat([w.view(-1).float() for w in numbers(model)])
    assert (weights[0] - without).abs().mean() < 0.02 * (without - weights[3]).abs().mean() + 1e-4


def test_scaled_gradients_below_float16_are_not_lost() -> None:
    # 2^-26 is below the least float16, 2^-24; multiplied by 2^12 it is not, and divided in float32 it is there again.
    p = nn.Parameter(torch.zeros(100, dtype=torch.float16))
    sampler, scaler = SGLD([p], 2.0**20, 1, temperature=0.0), torch.amp.GradScaler("cpu", init_scale=2.0**12)
    scaler.scale((p.float() * 2.0**-26).sum()).backward()
    scaler.step(sampler)
    scaler.update()
    assert torch.equal(p, torch.full_like(p, -(2.0**-6)))
    assert not hasattr(sampler, "grad_scale")


def test_float32_gradients_may_be_unscaled_and_clipped_first() -> None:
    weights, _ = run_scaled(ql.pack(build(), "bfp8"), half=False, unscale=True)
    assert not torch.equal(weights[0], weights[3])


def test_a_grad_scaler_and_steps_in_backward_exclude_each_other() -> None:
    model = build()
    sampler, scaler = SGLD(model.parameters(), 0.1, 1000, step_in_backward=True), torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, None)).backward()
    with pytest.raises(
        RuntimeError, match=r"step_in_backward=True cannot be stepped by a GradScaler: .*still multiplied"
    ):
        scaler.step(sampler)
