"""A run of ImageNet, in which SGLD begins with the weights of an SGD run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qlangevin import QTensor, SampleStore
from qlangevin.experiments import chain, run
from qlangevin.experiments.presets import Experiment, read_config
from qlangevin.experiments.results import check_result
from qlangevin.experiments.run import run_experiment
from tests.helpers.experiments import TINY, Watch, kept, lasting, press
from tests.helpers.official import imagenet


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    imagenet(folder)
    return folder


def test_imagenets_sgld_begins_where_its_sgd_ends(photos: Path, tmp_path: Path) -> None:
    watch = Watch()
    result = run_experiment(TINY, tmp_path, photos, watch)
    assert watch.total == pytest.approx(1)
    assert (result["steps"], result["samples"]) == (3, 2)
    first = run.read_result(tmp_path / "begin")
    assert first["settings"] == replace(TINY, method="sgdlp-f").to_json()
    assert (first["steps"], first["samples"]) == (6, 1)
    parts = chain.prepare_chain(TINY, TINY.load_data(photos), tmp_path / "begin")
    last = SampleStore.open(tmp_path / "begin")[-1].decode()
    here = {**dict(parts.model.named_parameters()), **dict(parts.model.named_buffers())}
    assert last.keys() <= here.keys()
    for name, value in last.items():
        mine = here[name]
        assert torch.equal(mine.decode() if isinstance(mine, QTensor) else mine, value), name
    fresh = dict(chain.prepare_chain(TINY, TINY.load_data(photos)).model.named_parameters())["conv.weight"]
    assert isinstance(fresh, QTensor)
    assert not torch.equal(fresh.decode(), last["conv.weight"])
    assert parts.sampler.param_groups[0]["lr"] == pytest.approx(TINY.lr / 100)
    check_result(result, "the result")
    check_result(first, "the first result")


@pytest.mark.slow
def test_imagenet_is_interrupted_in_either_part_and_goes_on(photos: Path, tmp_path: Path) -> None:
    expected = run_experiment(TINY, tmp_path / "whole", photos)
    for after, part in ((3, "begin"), (9, ".")):  # six steps of SGD and their scores come before those of SGLD
        with pytest.raises(KeyboardInterrupt):
            run_experiment(TINY, tmp_path / "run", photos, Watch(after, press))
        assert read_config(tmp_path / "run") == TINY  # so that --resume finds it
        assert (tmp_path / "run" / part / "checkpoint.safetensors").exists()
        assert (tmp_path / "run/begin/result.json").exists() == (part == ".")
    assert lasting(run_experiment(TINY, tmp_path / "run", photos)) == lasting(expected)
    assert kept(tmp_path / "run") == kept(tmp_path / "whole")


def test_a_mistake_in_sgld_is_noticed_before_sgd(photos: Path, tmp_path: Path) -> None:
    config: Experiment = replace(TINY, samples=4)
    with pytest.raises(ValueError, match="samples must be at most 3"):
        run_experiment(config, tmp_path / "run", photos)
    assert list(tmp_path.iterdir()) == []
