"""Checkpoints and stores of chains whose steps the host does not wait for: they wait, and move between devices."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from qlangevin import SGLD, SampleStore, load_checkpoint, save_checkpoint
from tests.helpers.deferred_kernels import deferred_kernels
from tests.sampling.test_deferred import bits, gradients, network, run, same

Kernels = Callable[[], AbstractContextManager[Any]]


def chain(packed: bool) -> tuple[Any, SGLD]:
    model = network("bfp8" if packed else None)
    return model, SGLD(model.parameters(), 0.1, 1000, weights=None if packed else "bfp8", accumulator="bfp16")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("there", "here"), [(deferred_kernels, nullcontext), (nullcontext, deferred_kernels)])
def test_a_checkpoint_moves_between_devices(packed: bool, there: Kernels, here: Kernels, tmp_path: Path) -> None:
    reference, one, two = chain(packed), chain(packed), chain(packed)
    run(reference, range(6))
    with there():
        run(one, range(3))
        save_checkpoint(tmp_path, *one)
    with here():
        load_checkpoint(tmp_path, *two)
        run(two, range(3, 6))
    assert same(bits(reference), bits(two))


def test_what_is_stored_waits_for_the_steps(tmp_path: Path) -> None:
    model, sampler = chain(packed=False)
    with deferred_kernels(), SampleStore.create(tmp_path / "samples", model, sampler) as store:
        run((model, sampler), range(3))
        sampler._counts._devices[torch.device("cpu")].counts += 2  # as a replayed graph does
        store.append(model)
        assert store.manifest.samples[-1].step == 5
        gradients(model, 3)
        model[0].weight.grad[0] = torch.nan
        sampler.step()
        with pytest.raises(FloatingPointError, match="held an infinity"):
            store.append(model)
        assert len(store) == 1
        gradients(model, 3)
        model[0].weight.grad[0] = torch.nan
        sampler.step()
        with pytest.raises(FloatingPointError, match="held an infinity"):
            save_checkpoint(tmp_path / "checkpoint", model, sampler)
        assert not (tmp_path / "checkpoint").exists()
        save_checkpoint(tmp_path / "checkpoint", model, sampler)


def test_loading_forgets_a_step_that_failed(tmp_path: Path) -> None:
    reference, (model, sampler) = chain(packed=False), chain(packed=False)
    run(reference, range(4))
    with deferred_kernels():
        run((model, sampler), range(2))
        save_checkpoint(tmp_path, model, sampler)
        gradients(model, 2)
        model[0].weight.grad[0] = torch.nan
        sampler.step()
        load_checkpoint(tmp_path, model, sampler)
        run((model, sampler), range(2, 4))
        sampler.check()
    assert same(bits(reference), bits((model, sampler)))
