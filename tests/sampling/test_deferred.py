"""Steps that the host does not wait for: the same bits, one call a group, no reading of numbers, and errors that come later."""

import copy
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, QLangevinWarning, pack
from qlangevin.quantization.qtensor import QTensor, decoded
from qlangevin.sampling import host_copy, keeping, stepping
from tests.helpers.deferred_kernels import DeferredKernels, NoWaiting, deferred_kernels
from tests.helpers.sgld import METHODS

Chain = tuple[Any, SGLD]


@pytest.fixture
def device() -> Iterator[DeferredKernels]:
    with deferred_kernels() as kernels:
        yield kernels


def network(weights: str | None = None) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 3))
    return model if weights is None else pack(model, weights)


def gradients(model: nn.Module, step: int, only: slice = slice(None)) -> None:
    """Give a model gradients that depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = None
    for p in [*model.parameters()][only]:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(chain: Chain, steps: range) -> None:
    model, sampler = chain
    for step in steps:
        gradients(model, step)
        sampler.step()


def bits(chain: Chain) -> list[Tensor]:
    model, sampler = chain
    found = [p.codes if isinstance(p, QTensor) else p.detach() for p in model.parameters()]
    found += [state["accumulator"] for state in sampler.state.values() if "accumulator" in state]
    return [t.clone() for t in found]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def steps_of(sampler: SGLD) -> list[int]:
    return [state["step"] for state in sampler.state_dict()["state"].values()]


# ---- bits


@pytest.mark.parametrize("method", METHODS)
def test_a_chain_has_the_bits_of_the_cpus(method: str) -> None:
    def chain() -> Chain:
        model = network()
        return model, SGLD(model.parameters(), 0.1, 1000, weight_decay=1e-3, **METHODS[method])

    one, two = chain(), chain()
    run(one, range(4))
    with deferred_kernels() as kernels:
        run(two, range(4))
        two[1].check()
    assert same(bits(one), bits(two))
    printed = METHODS[method].get("algorithm") == "paper"  # has no kernels
    assert kernels.calls["sgld"] == kernels.calls["begin_step"] == (0 if printed else 4)


@pytest.mark.parametrize("format", ["fixed8.5", "bfp8", "bfp4", "fixed4.2", "fp8_e4m3", "bfp16"])
@pytest.mark.parametrize("accumulator", [None, "fp32", "bfp16"])
def test_packed_parameters_step_on_codes(format: str, accumulator: str | None) -> None:
    def chain() -> Chain:
        model = network(format)
        return model, SGLD(model.parameters(), 0.1, 1000, accumulator=accumulator)

    one, two = chain(), chain()
    run(one, range(3))
    with deferred_kernels() as kernels:
        run(two, range(3))
    assert kernels.calls["sgld"] == kernels.calls["begin_step"] == 3
    assert same(bits(one), bits(two))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weights", [None, "fixed8.5"])
def test_parameters_of_other_dtypes(dtype: torch.dtype, weights: str | None) -> None:
    def chain() -> Chain:
        model = network().to(dtype)
        return model, SGLD(model.parameters(), 0.1, 1000, weights=weights)

    one, two = chain(), chain()
    run(one, range(3))
    with deferred_kernels() as kernels:
        run(two, range(3))
    assert kernels.calls["begin_step"] == (0 if dtype == torch.float64 else 3)
    assert same(bits(one), bits(two))


# ---- calls


def test_one_call_for_all_gradients_and_one_for_each_group(device: DeferredKernels) -> None:
    model = network()
    groups: list[dict[str, Any]] = [
        {"params": [*model[0].parameters()]},
        {"params": [*model[2].parameters()], "lr": 0.01},
    ]
    sampler = SGLD(groups, 0.1, 1000, weights="bfp8")
    device.calls.clear()
    gradients(model, 0)
    sampler.step()
    assert device.calls == {"begin_step": 1, "sgld": 2}


def test_dtypes_without_a_format_are_calls_of_their_own(device: DeferredKernels) -> None:
    model = network()
    model[2].bfloat16()
    sampler = SGLD(model.parameters(), 0.1, 1000)
    gradients(model, 0)
    sampler.step()
    assert device.calls["begin_step"] == 1
    assert device.calls["sgld"] == 2


@pytest.mark.parametrize("packed", [None, "bfp8", "bfp4"])
@pytest.mark.parametrize("accumulator", [None, "bfp16"])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_reads_no_number(device: DeferredKernels, packed: str, accumulator: str, in_backward: bool) -> None:
    model = network(packed)
    weights = None if packed else "fixed8.5"
    most = 0.5 if in_backward else None
    sampler = SGLD(
        model.parameters(), 0.1, 1000, weights=weights, accumulator=accumulator, step_in_backward=in_backward,
        max_grad_norm=most,
    )  # fmt: skip
    for step in range(5):  # looks before steps 1, 2 and 4
        if in_backward:
            torch.manual_seed(step)
            loss = sum((decoded(p) * torch.randn(p.shape)).sum() for p in model.parameters())
            with NoWaiting():
                loss.backward()  # type: ignore[union-attr]
        else:
            gradients(model, step)
        with NoWaiting():
            sampler.step()
    assert steps_of(sampler) == [5] * 4


def test_the_check_for_waiting_finds_it() -> None:
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        float(torch.ones(1))
    model = network()
    sampler = SGLD(model.parameters(), 0.1, 1000, max_grad_norm=1.0, step_in_backward=True)
    gradients(model, 0)
    with NoWaiting(), pytest.raises(AssertionError, match="waits"):
        sampler.step()


def test_clipping_has_the_bits_of_the_cpus() -> None:
    def chain(dtype: torch.dtype) -> Chain:
        model = network().to(dtype)
        return model, SGLD(model.parameters(), 0.1, 1000, step_in_backward=True, max_grad_norm=1.5)

    for dtype in (torch.float32, torch.bfloat16):
        one, two = chain(dtype), chain(dtype)
        run(one, range(3))
        with deferred_kernels():
            run(two, range(3))
        assert same(bits(one), bits(two))


# ---- errors


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("waits", [False, True])
def test_a_gradient_that_is_not_finite_is_told_later_and_the_chain_goes_on(bad: float, waits: bool) -> None:
    def chain() -> Chain:
        model = network()
        return model, SGLD(model.named_parameters(), 0.1, 1000, weights="bfp8", accumulator="fp32")

    message = (
        r"the gradient of parameter '2.weight' held an infinity or a NaN; no parameter was changed by that step, nor"
    )
    one, two = chain(), chain()
    run(one, range(2))
    with deferred_kernels():
        model, sampler = two
        run(two, range(2))
        kept = bits(two)
        gradients(model, 2)
        model[2].weight.grad[1, 1] = bad
        sampler.step()
        assert same(bits(two), kept)
        with pytest.raises(FloatingPointError, match=message):
            sampler.check() if waits else sampler.step()
        assert steps_of(sampler) == [2] * 4
        run(one, range(2, 5))
        run(two, range(2, 5))
        sampler.check()
    assert same(bits(one), bits(two))


def test_steps_after_the_failed_one_are_nothing(device: DeferredKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    sampler = SGLD(model.parameters(), 0.1, 1000)
    run((model, sampler), range(2))
    kept = bits((model, sampler))
    monkeypatch.setattr(host_copy.HostCopy, "ready", lambda self: False)  # the host hears nothing
    gradients(model, 2, slice(1, 3))
    model[0].bias.grad[0] = torch.nan
    sampler.step()
    run((model, sampler), range(3, 6))
    assert same(bits((model, sampler)), kept)
    with pytest.raises(FloatingPointError, match=r"parameter 1 \(shape \(17,\)\)"):
        sampler.check()
    assert steps_of(sampler) == [2] * 4  # also those of parameters without a gradient in the step that failed
    sampler.check()


def test_parameters_that_step_now_and_then_keep_their_counts(device: DeferredKernels) -> None:
    model = network()
    sampler = SGLD(model.parameters(), 0.1, 1000)
    for step, only in enumerate([slice(0, 2), slice(None), slice(2, 4), slice(1, 3)]):
        gradients(model, step, only)
        sampler.step()
    assert steps_of(sampler) == [2, 3, 3, 2]
    gradients(model, 4, slice(0, 2))
    model[0].weight.grad.fill_(torch.inf)
    sampler.step()
    with pytest.raises(FloatingPointError):
        sampler.check()
    assert steps_of(sampler) == [2, 3, 3, 2]


def test_an_error_in_backward_names_the_parameter(device: DeferredKernels) -> None:
    model = network()
    sampler = SGLD(model.named_parameters(), 0.1, 1000, step_in_backward=True)
    (model[0].weight.sum() * torch.inf).backward()
    with pytest.raises(
        FloatingPointError, match=r"'0.weight' held .*; it was not changed by that step, nor any parameter"
    ):
        sampler.step()
    assert steps_of(sampler) == [0] * 4


def test_one_parameter_without_kernels_makes_the_step_wait(device: DeferredKernels) -> None:
    model = network()
    model[2].double()
    sampler = SGLD(model.parameters(), 0.1, 1000)
    kept = bits((model, sampler))
    gradients(model, 0)
    model[0].weight.grad[0] = torch.nan
    with pytest.raises(FloatingPointError, match="holds an infinity or a NaN; no parameter was changed by this step"):
        sampler.step()
    assert same(bits((model, sampler)), kept)
    gradients(model, 0)
    sampler.step()
    assert steps_of(sampler) == [1] * 4


def test_check_does_nothing_on_a_cpu() -> None:
    model = network()
    sampler = SGLD(model.parameters(), 0.1, 1000)
    run((model, sampler), range(2))
    with NoWaiting():
        sampler.check()
    assert steps_of(sampler) == [2] * 4


def test_tensors_of_two_devices_are_named() -> None:
    model = network()
    sampler = SGLD(model.named_parameters(), 0.1, 1000, weights="bfp8", accumulator="fp32")
    gradients(model, 0)
    state = sampler.state[model[0].bias]
    state["accumulator"] = state["accumulator"].to("meta")
    message = r"parameter '0.bias' is on cpu, its accumulator on meta: the model was moved .*load_state_dict"
    with pytest.raises(ValueError, match=message):
        sampler.step()


# ---- the host's copy of a number


def test_a_copy_on_its_way_is_not_waited_for(device: DeferredKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = [False]
    monkeypatch.setattr(host_copy.HostCopy, "ready", lambda self: ready[0])
    model = network()
    sampler = SGLD(model.parameters(), 0.1, 1000)
    gradients(model, 0)
    model[0].weight.grad[0] = torch.nan
    sampler.step()
    run((model, sampler), range(1, 3))  # nothing is known yet
    ready[0] = True
    gradients(model, 3)
    with pytest.raises(FloatingPointError):
        sampler.step()
    assert steps_of(sampler) == [0] * 4


# ---- states


@pytest.mark.parametrize("method", ["VC SGLDLP-L", "SGLDLP-F", "8 bits over 16"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("there_first", [False, True])
def test_a_chain_moves_between_devices(method: str, packed: bool, there_first: bool) -> None:
    def chain() -> Chain:
        model = network("bfp8" if packed else None)
        settings = METHODS[method] | ({"weights": None} if packed else {})
        return model, SGLD(model.parameters(), 0.1, 1000, **settings)

    def run_there(chain: Chain, steps: range) -> None:
        with deferred_kernels():
            run(chain, steps)
            chain[1].check()

    reference, one, two = chain(), chain(), chain()
    run(reference, range(6))
    (run_there if there_first else run)(one, range(3))
    buffer = io.BytesIO()
    torch.save((one[0].state_dict(), one[1].state_dict()), buffer)
    buffer.seek(0)
    weights, state = torch.load(buffer, weights_only=True)
    two[0].load_state_dict(weights)
    two[1].load_state_dict(state)
    (run if there_first else run_there)(two, range(3, 6))
    assert same(bits(reference), bits(two))


def test_kernels_may_come_and_go_within_a_chain() -> None:
    def chain() -> Chain:
        model = network()
        return model, SGLD(model.parameters(), 0.1, 1000, weights="bfp8", accumulator="bfp16")

    one, two = chain(), chain()
    run(one, range(6))
    for steps in (range(2), range(3, 5)):
        with deferred_kernels():
            run(two, steps)
        run(two, range(steps.stop, steps.stop + 1))
    assert same(bits(one), bits(two))
    assert steps_of(two[1]) == [6] * 4


def test_copies_and_new_groups_know_the_counts(device: DeferredKernels) -> None:
    model = network()
    sampler = SGLD(model[0].parameters(), 0.1, 1000)
    run((model, sampler), range(3))
    sampler._counts._devices[torch.device("cpu")].counts += 1  # as a replayed graph does
    assert [state["step"] for state in copy.deepcopy(sampler).state.values()] == [4, 4]
    sampler.add_param_group({"params": [*model[2].parameters()]})
    run((model, sampler), range(3, 5))
    assert steps_of(sampler) == [6, 6, 2, 2]


def test_weights_written_by_others_begin_a_new_accumulator(device: DeferredKernels) -> None:
    def chain() -> Chain:
        model = network()
        return model, SGLD(model.parameters(), 0.1, 1000, weights="bfp8", accumulator="bfp16")

    def run_with_writes(chain: Chain) -> None:
        model, _ = chain
        for step in range(4):
            with torch.no_grad():
                if step == 2:
                    model[0].weight.fill_(0.7)
                model[2].weight.copy_(model[2].weight.clone())  # the same, which is no reason
            gradients(model, step)
            with NoWaiting():
                chain[1].step()

    one, two = chain(), chain()
    run_with_writes(one)
    run(two, range(2))
    device.calls.clear()
    assert not same(bits(one), bits(two))
    with torch.no_grad():
        two[0][0].weight.fill_(0.7)
    run(two, range(2, 4))
    assert same(bits(one), bits(two))


# ---- warnings


def test_what_was_seen_is_told_in_a_later_step(device: DeferredKernels) -> None:
    model = network()
    sampler = SGLD(model.named_parameters(), 1e-3, 100, weights="fixed8.6")
    with torch.no_grad():
        model[0].weight.fill_(-2.0)
    gradients(model, 0)
    with NoWaiting():
        sampler.step()
    gradients(model, 1)
    with pytest.warns(QLangevinWarning, match=r"of 102 weights of parameter '0.weight' are at an end") as caught:
        sampler.step()
    assert caught[0].filename == __file__
    sampler.check()


def test_check_tells_what_was_seen(device: DeferredKernels) -> None:
    model = network()
    sampler = SGLD(model.parameters(), 1.0, 10**6)
    for scale in (0, 1e4):  # before the first step nothing is said of the drift
        gradients(model, 0)
        for p in model.parameters():
            p.grad *= scale
        sampler.step()
    with pytest.warns(QLangevinWarning, match="a step moves the weights") as caught:
        sampler.check()
    assert caught[0].filename == __file__


# ---- graphs


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Stand in for the capture of a graph, as the sampler sees it."""
    now = [False]
    for module in (host_copy, keeping, stepping):
        monkeypatch.setattr(module, "is_capturing", lambda: now[0])
    return now


def test_a_captured_step_counts_on_the_device_only(device: DeferredKernels, capturing: list[bool]) -> None:
    """The stand-in runs at once what a capture would record: the first call is the first replay."""

    def chain() -> Chain:
        model = network()
        return model, SGLD(model.parameters(), 0.1, 1000, weights="bfp8", accumulator="fp32")

    one, two = chain(), chain()
    run(one, range(5))
    run(two, range(1))
    asked = sampler_copies(two[1])
    capturing[0] = True
    run(two, range(1, 5))
    capturing[0] = False
    assert [state["step"] for state in two[1].state.values()] == [1] * 4  # what the host has counted
    assert sampler_copies(two[1]) == asked  # and nothing was sent to it
    assert same(bits(one), bits(two))
    assert steps_of(two[1]) == [5] * 4
    assert [state["step"] for state in two[1].state.values()] == [5] * 4


def sampler_copies(sampler: SGLD) -> list[Any]:
    return [counted._copy for counted in sampler._counts._devices.values()]


def test_a_first_step_cannot_be_captured(device: DeferredKernels, capturing: list[bool]) -> None:
    model = network()
    sampler = SGLD(model.named_parameters(), 0.1, 1000)
    gradients(model, 0)
    capturing[0] = True
    with pytest.raises(RuntimeError, match="take a step, with gradients of the same parameters, before the capture"):
        sampler.step()
    model.double()
    gradients(model, 0)
    with pytest.raises(RuntimeError, match=r"parameter '0.weight' has no kernels that a CUDA graph could capture"):
        sampler.step()
