"""Steps with a centre, a mask, gains or velocities that the host does not wait for: the CPU's bits, no reading of numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qlangevin import RMS, SGHMC, SGLD
from qlangevin.quantization.qtensor import QTensor, decoded_as
from qlangevin.sampling import host_copy, stepping
from qlangevin.sampling.beside import KEPT
from tests.helpers.deferred_kernels import NoWaiting, deferred_kernels
from tests.sampling.test_deferred import gradients, network, run, same, steps_of

Chain = tuple[Any, Any]
GAINS = RMS(decay=0.9, eps=0.01, freeze_after=5)
KINDS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "localization": (None, {"weights": "fixed8.5", "localization": 10.0}),
    "box": ("fixed8.5", {"box": 0.1, "accumulator": "fp32"}),
    "box and velocities": ("bfp8", {"box": 0.1, "friction": 0.3, "localization": 10.0}),
    "gains": ("bfp8", {"preconditioner": GAINS}),
    "gains and an accumulator": (None, {"weights": "bfp8", "accumulator": "fp32", "preconditioner": GAINS}),
    "gains and velocities": (
        None,
        {"weights": "bf16", "friction": 0.3, "preconditioner": GAINS, "rounding": "nearest"},
    ),
}


def start(kind: str, *, masked: bool = False) -> Chain:
    packed, settings = KINDS[kind]
    model = network(packed)
    if masked:
        generator = torch.Generator().manual_seed(1)
        settings = settings | {"mask": [torch.rand(p.shape, generator=generator) > 0.4 for p in model.parameters()]}
    make: Callable[..., Any] = SGHMC if "friction" in settings else SGLD
    return model, make(model.parameters(), 0.1, 1000, weight_decay=1e-3, **settings)


def bits(chain: Chain) -> list[Tensor]:
    """Return weights, and all that the sampler keeps for them, as numbers."""
    model, sampler = chain
    kept = [state[name] for state in sampler.state.values() for name in ("accumulator", *KEPT) if name in state]
    found = [*model.parameters(), *kept]
    return [decoded_as(t, torch.float32) if isinstance(t, QTensor) else t.detach().clone() for t in found]


@pytest.mark.filterwarnings("ignore:a mask cuts through blocks")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_has_the_bits_of_the_cpus_and_does_not_wait(kind: str, masked: bool) -> None:
    one, two = start(kind, masked=masked), start(kind, masked=masked)
    run(one, range(9))
    with deferred_kernels() as kernels:
        run(two, range(1))
        for number in range(1, 9):
            gradients(two[0], number)
            with NoWaiting():
                two[1].step()
        two[1].check()
    assert kernels.calls["sgld"] == kernels.calls["begin_step"] == 9
    assert same(bits(one), bits(two))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_fails_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = start(kind), start(kind)
    run(one, range(7))
    with deferred_kernels():
        run(two, range(4))
        two[1].check()
        kept = bits(two)
        with monkeypatch.context() as deaf:
            deaf.setattr(host_copy.HostCopy, "ready", lambda self: False)  # the host hears nothing
            gradients(two[0], 4)  # there is no look before the fifth step, which would warn
            two[0][2].weight.grad[0, 0] = torch.inf
            two[1].step()
            run(two, range(5, 7))
            assert same(bits(two), kept)
        with pytest.raises(FloatingPointError, match="held an infinity or a NaN"):
            two[1].check()
        run(two, range(4, 7))
        two[1].check()
    assert same(bits(one), bits(two))


def test_the_first_step_with_gains_looks_at_the_gradients() -> None:
    one, two = start("gains"), start("gains")
    run(one, range(2))
    with deferred_kernels():
        gradients(two[0], 0)
        two[0][2].weight.grad[0, 0] = torch.nan
        with pytest.raises(FloatingPointError, match="no parameter was changed by this step"):
            two[1].step()
        assert not any("moments" in state for state in two[1].state.values())
        run(two, range(2))
    assert same(bits(one), bits(two))


def test_a_graph_cannot_capture_the_first_step_with_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampler = start("gains")
    with deferred_kernels():
        for number, only in enumerate((slice(0, 2), slice(None))):
            gradients(model, number, only)
            if number == 0:
                sampler.step()
                monkeypatch.setattr(stepping, "is_capturing", lambda: True)
        with pytest.raises(
            RuntimeError, match=r"first step of parameter 2 .*, which begins the moments of its precond"
        ):
            sampler.step()


def test_a_scale_changes_on_the_device() -> None:
    def begin() -> Chain:
        model = network()
        return model, SGLD(model.parameters(), 1e-6, 1000, weights="bfp8", preconditioner=RMS(decay=0.1, eps=0.01))

    def go(chain: Chain, late: bool) -> None:
        for number in range(8):
            gradients(chain[0], number)
            for p in chain[0].parameters():
                p.grad.mul_(10.0 ** (number / 2))
            with NoWaiting() if late and number else torch.no_grad():
                chain[1].step()

    one, two = begin(), begin()
    go(one, False)
    with deferred_kernels():
        go(two, True)
        saved = two[1].state_dict()
    assert same(bits(one), bits(two))
    scales = [[state["moments_scale"] for state in d["state"].values()] for d in (one[1].state_dict(), saved)]
    assert scales[0] == scales[1]
    assert all(type(scale) is float for scale in scales[1])
    assert any(scale < 4 for scale in scales[1])


@pytest.mark.parametrize("kind", ["gains", "gains and velocities", "box and velocities"])
def test_a_chain_moves_between_devices(kind: str) -> None:
    reference, one, two = start(kind), start(kind), start(kind)
    run(reference, range(6))
    with deferred_kernels():
        run(one, range(2))
    run(one, range(2, 3))
    two[0].load_state_dict(one[0].state_dict())
    two[1].load_state_dict(one[1].state_dict())
    with deferred_kernels():
        run(two, range(3, 6))
        assert steps_of(two[1]) == [6] * 4
    assert same(bits(reference), bits(two))
