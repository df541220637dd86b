"""Chains that drew the same noise are warned of; those that only look like it are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import qlangevin as ql


def run(
    path: Path, init: int = 0, steps: int = 4, start: Path | None = None, **settings: Any
) -> tuple[Path, nn.Module]:
    """Sample a chain at each step, from the checkpoint of another if one is given."""
    torch.manual_seed(init)
    model = nn.Linear(3, 2)
    sampler = ql.SGLD(model.parameters(), **{"lr": 0.1, "num_data": 10, **settings})
    if start is not None:
        ql.load_checkpoint(start, model, sampler)
    with ql.SampleStore.create(path, model, sampler) as store:
        for _ in range(steps):
            sampler.zero_grad()
            model(torch.ones(4, 3)).square().mean().backward()
            sampler.step()
            store.append(model)
    ql.save_checkpoint(path, model, sampler)
    return path, model


def test_two_chains_of_one_stream_are_warned_of_once(tmp_path: Path) -> None:
    (a, model), (b, _), (c, _) = (run(tmp_path / name, init) for init, name in enumerate("abc"))
    with pytest.warns(ql.QLangevinWarning, match="have the same seed and stream") as caught:
        posterior = ql.Posterior.open([a, b, c], model)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert (
        f"{a} and {b} have the same seed and stream, so that their noise is the same and R-hat may be too good; "
        in message
    )
    assert "give each chain its own stream" in message
    posterior.chains[0].predict(torch.ones(1, 3))


@pytest.mark.parametrize(
    "settings", [{"stream": 1}, {"seed": 1}, {"temperature": 0.0}], ids=["stream", "seed", "no noise"]
)
def test_chains_with_noise_of_their_own_are_not(settings: dict[str, Any], tmp_path: Path) -> None:
    a, model = run(tmp_path / "a")
    b, _ = run(tmp_path / "b", **settings)
    ql.Posterior.open([a, b], model)


def test_ensembles_without_noise_are_not(tmp_path: Path) -> None:
    (a, model), (b, _) = (run(tmp_path / name, init, temperature=0.0) for init, name in enumerate("ab"))
    ql.Posterior.open([a, b], model)


def test_a_chain_that_goes_on_in_a_second_store_is_not(tmp_path: Path) -> None:
    a, _ = run(tmp_path / "a")
    b, model = run(tmp_path / "b", start=a)
    ql.Posterior.open([a, b], model)
    store = ql.SampleStore.open(a)
    ql.Posterior.open([store[:2], store[2:]], model)


def test_chains_that_have_not_stepped_are_not(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sampler = ql.SGLD(model.parameters(), lr=0.1, num_data=10)
    for name in "ab":
        with ql.SampleStore.create(tmp_path / name, model, sampler) as store:
            store.append(model)
    ql.Posterior.open([tmp_path / "a", tmp_path / "b"], model)


def test_stores_that_do_not_tell_are_not(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    for name in "ab":
        with ql.SampleStore.create(tmp_path / name, model) as store:
            store.append(model, step=1)
    for name in "cd":
        with ql.SampleStore.create(tmp_path / name, model, torch.optim.SGD(model.parameters(), 0.1)) as store:
            store.append(model, step=1)
    ql.Posterior.open([tmp_path / name for name in "abcd"], model)
