"""Optimizers that still hold parameters which packing has replaced."""

import copy

import pytest
import torch
from torch import Tensor, nn

from qlangevin import SGLD, QTensor, pack, unpack
from tests.helpers.packing import backward, build, numbers, packed, run, same, sampler_of


def test_train_then_pack_then_sample() -> None:
    model, x = build()
    trainer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(trainer, 1)  # the two refer to each other
    backward(model, x)
    trainer.step()
    schedule.step()
    pack(model, "bfp8")
    run(model, x, sampler_of(model), 2)
    before = numbers(model)
    words = r"AdamW cannot step: parameter 0 \(shape \(7, 6\)\): pack\(model\) has put another tensor in its place.*"
    with pytest.raises(ValueError, match=words + r"after pack make a new optimizer or sampler of model.parameters\(\)"):
        trainer.step()
    assert same(numbers(model), before)


@pytest.mark.parametrize("step_in_backward", [False, True])
def test_sample_then_unpack_and_export(step_in_backward: bool) -> None:
    model, x = packed()
    sampler = sampler_of(model, step_in_backward=step_in_backward)
    run(model, x, sampler, 2)
    unpack(model)
    before, state = numbers(model), copy.deepcopy(sampler.state_dict())
    backward(model, x)
    with pytest.raises(
        ValueError, match=r"SGLD cannot step: parameter '0.weight': unpack\(model\) has put another tensor"
    ):
        sampler.step(lambda: pytest.fail("the closure was called"))
    assert same(numbers(model), before)
    assert str(sampler.state_dict()) == str(state)
    run(model, x, sampler_of(model, weights="bfp8"), 2)  # a new one


def test_no_sampler_takes_a_replaced_parameter() -> None:
    model, _ = build()
    old = model[0].weight
    pack(model, "bfp8", layers="0")
    before = old.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(7, 6\)\): pack\(model\) has put another tensor"):
        SGLD([old], 0.1, 100, weights="bfp4")
    sampler = sampler_of(model)
    with pytest.raises(ValueError, match=r"parameter 'old': pack\(model\) has put another tensor"):
        sampler.add_param_group({"params": [("old", old)]})
    assert len(sampler.param_groups) == 1
    assert torch.equal(old, before)


def test_optimizers_of_other_parameters_step_as_before() -> None:
    model, x = build()
    last: list[Tensor] = [*model[2].parameters()]
    trainer, sampler = torch.optim.SGD(last[:1], 0.1), SGLD(last[1:], 0.1, 100)
    pack(model, "bfp8", layers="0")
    backward(model, x)
    before = numbers(model)
    trainer.step()
    sampler.step()
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters() if name.startswith("2."))


def test_a_copy_of_a_replaced_parameter_is_a_new_one() -> None:
    model, _ = build()
    old = model[0].bias
    pack(model, "bfp8")
    SGLD([copy.deepcopy(old)], 0.1, 100)


def test_a_refused_packing_replaces_nothing() -> None:
    model, x = build()
    sampler = sampler_of(model)
    model[2].bias.data[1] = torch.nan
    with pytest.raises(ValueError, match="holds an infinity or a NaN"):
        pack(model, "bfp8")
    model[2].bias.data.zero_()
    run(model, x, sampler, 1)
    assert not any(isinstance(p, QTensor) for p in model.parameters())


def test_tied_weights_are_replaced_once() -> None:
    model, x = build("gru, tied")
    sampler = sampler_of(model)
    pack(model, "bfp8", layers=nn.Embedding)
    with pytest.raises(ValueError, match=r"parameter 'embedding.weight': pack\(model\) has put another tensor"):
        sampler.step()
    run(model, x, sampler_of(model), 1)
