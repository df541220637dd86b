"""The state of SGLD: resuming from a saved one, and weights loaded after construction."""

import io

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, BlockFloat
from tests.helpers.sgld import METHODS, backward, problem


@pytest.mark.parametrize("method", ["VC SGLDLP-L", "SGLDLP-F", "8 bits over 16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loading_a_state_resumes_the_chain_bit_for_bit(method: str, dtype: torch.dtype) -> None:
    def start() -> tuple[nn.Module, Tensor, Tensor, SGLD]:
        model, x, y = problem()
        model = model.to(dtype)
        weights = {"weights": "fixed8.5"} if dtype == torch.bfloat16 else {}
        settings = {**METHODS[method], **weights, "gradients": BlockFloat(8, "tensor"), "seed": 3}
        return model, x.to(dtype), y, SGLD(model.parameters(), 0.1, 1000, **settings)

    def run(model: nn.Module, x: Tensor, y: Tensor, sampler: SGLD, steps: int) -> None:
        for _ in range(steps):
            backward(model, x, y)
            sampler.step()

    one = start()
    run(*one, 3)
    buffer = io.BytesIO()
    torch.save((one[0].state_dict(), one[3].state_dict()), buffer)
    run(*one, 4)
    buffer.seek(0)
    model_state, sampler_state = torch.load(buffer, weights_only=True)
    two = start()
    two[3].param_groups[0]["seed"] = 99  # the saved one counts
    two[0].load_state_dict(model_state)
    two[3].load_state_dict(sampler_state)
    run(*two, 4)
    for p, q in zip(one[0].parameters(), two[0].parameters(), strict=True):
        assert torch.equal(p, q)
        if "accumulator" in one[3].state[p]:
            assert torch.equal(one[3].state[p]["accumulator"], two[3].state[q]["accumulator"])
            assert one[3].state[p]["accumulator"].dtype == two[3].state[q]["accumulator"].dtype


def test_a_saved_accumulator_of_another_shape_or_dtype() -> None:
    small, large = (nn.Parameter(torch.ones(n)) for n in (4, 64))
    saved = SGLD([small], 0.1, 100, accumulator="fp32").state_dict()
    with pytest.raises(ValueError, match=r"accumulator has shape \(4,\), its parameter \(64,\)"):
        SGLD([large], 0.1, 100, accumulator="fp32").load_state_dict(saved)
    wide = nn.Parameter(torch.full((4,), 0.25, dtype=torch.float64))
    sampler = SGLD([small], 0.1, 10**9, accumulator="fp32", temperature=0.0)
    sampler.load_state_dict(SGLD([wide], 0.1, 10**9, accumulator="fp32", temperature=0.0).state_dict())
    small.grad = torch.zeros(4)
    sampler.step()
    assert small.tolist() == [0.25] * 4


def test_weights_loaded_after_construction_are_not_undone() -> None:
    p = nn.Parameter(torch.full((2, 3), 0.3))
    sampler = SGLD([p], 0.1, 10**9, weights="bfp8", accumulator="fp32", temperature=0.0)
    p.grad = torch.zeros_like(p)
    for value in (0.75, 0.5):  # before the first step, and after it
        with torch.no_grad():
            p.fill_(value)
        sampler.step()
        assert torch.equal(p, torch.full((2, 3), value))
    kept = sampler.state[p]["accumulator"].add_(0.001).clone()  # below the weights' precision, and kept
    with torch.no_grad():
        p.copy_(p.clone())
    sampler.step()
    assert torch.equal(sampler.state[p]["accumulator"], kept)


def test_a_state_saved_before_there_were_streams_is_of_the_first() -> None:
    p = nn.Parameter(torch.zeros(5))
    sampler = SGLD([p], 0.1, 100, stream=7)
    state = sampler.state_dict()
    del state["param_groups"][0]["stream"]
    sampler.load_state_dict(state)
    assert sampler.param_groups[0]["stream"] == 0
    p.grad = torch.zeros(5)
    sampler.step()


def test_a_state_that_is_none_is_refused() -> None:
    model, x, y = problem()
    sampler = SGLD(model.parameters(), 0.1, 1000, weights="bfp8")
    backward(model, x, y)
    sampler.step()
    for index in (0, 77):  # of a parameter, and of none
        forged = sampler.state_dict()
        forged["state"][index] = "step"
        with pytest.raises(ValueError, match="the saved state of a parameter must be a dict, got str"):
            sampler.load_state_dict(forged)
