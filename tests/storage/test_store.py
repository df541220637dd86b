"""A folder of samples: what it holds, what readers see, and what is refused."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from qlangevin import SGLD, ConstantLR, CyclicalLR, QLangevinWarning, QTensor, SampleStore, pack
from qlangevin.storage.folders import Folder
from tests.helpers.processes import fork, wait_for
from tests.helpers.stores import build, draw, fill_store, is_sample, read_files


def test_a_store_is_a_sequence(tmp_path: Path) -> None:
    s = fill_store(tmp_path)
    assert len(s) == 3
    assert [sample.step for sample in s] == [0, 1, 2]
    assert [sample.index for sample in s[1:]] == [1, 2]
    assert [sample.index for sample in s[::-2]] == [2, 0]
    assert s[5:] == []
    assert s[-1].index == 2
    assert all(is_sample(sample, i) for i, sample in enumerate(s))
    for bad in (3, -4):
        with pytest.raises(IndexError, match=f"sample {bad} of a store with 3"):
            s[bad]


def test_a_sample_is_a_mapping_in_the_order_of_the_model(tmp_path: Path) -> None:
    sample = fill_store(tmp_path)[0]
    assert list(sample) == [name for name, _ in (*build().named_parameters(), *build().named_buffers())]
    assert len(sample) == len(sample.decode()) == len(list(sample))
    assert isinstance(sample["0.weight"], QTensor)
    assert not isinstance(sample["2.weight"], QTensor)
    with pytest.raises(KeyError):
        sample["nothing"]


def test_what_is_printed(tmp_path: Path) -> None:
    s = fill_store(tmp_path)
    assert repr(s) == f"SampleStore({str(tmp_path)!r}, 3 samples, {s.nbytes} bytes)"
    assert repr(s[1]) == f"Sample(1 of {tmp_path}, step 1, {s[1].nbytes} bytes)"


def test_nbytes_is_what_the_tensors_take_on_the_disk(tmp_path: Path) -> None:
    s = fill_store(tmp_path)
    assert s.nbytes == sum(p.stat().st_size for p in tmp_path.rglob("*.safetensors"))
    assert s[0].nbytes == (tmp_path / "samples" / "000000.safetensors").stat().st_size


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    s = fill_store(tmp_path)
    found = load_file(tmp_path / "samples" / "000001.safetensors")
    weight: Any = s[1]["0.weight"]
    assert torch.equal(found["0.weight.codes"], weight.codes)
    assert torch.equal(found["0.weight.exponents"], weight.exponents)
    assert torch.equal(found["1.running_mean"], s[1]["1.running_mean"])
    assert not [name for name in found if name.startswith("3.")]  # frozen: stored once
    assert load_file(tmp_path / "frozen.safetensors").keys() == {"3.weight", "3.bias"}


def test_two_equal_runs_give_the_same_bytes(tmp_path: Path) -> None:
    fill_store(tmp_path / "a")
    fill_store(tmp_path / "b")
    assert read_files(tmp_path / "a") == read_files(tmp_path / "b")


def test_nothing_in_the_folder_is_a_pickle(tmp_path: Path) -> None:
    fill_store(tmp_path)
    for name, data in read_files(tmp_path).items():
        assert not data.startswith(b"PK"), name
        with pytest.raises((ValueError, IndexError, UnicodeDecodeError)):
            list(pickletools.genops(data))


def test_the_manifest_says_where_the_samples_come_from(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sampler = SGLD(model.parameters(), 0.1, 1000, weights="bfp8", seed=7)
    with SampleStore.create(tmp_path, model, sampler, ConstantLR(sampler, 100, 2)) as s:
        model(torch.ones(1, 3)).sum().backward()
        sampler.step()
        assert s.append(model).step == 1
        assert s.append(model, step=5).step == 5
    about = json.loads((tmp_path / "manifest.json").read_text())
    assert about["version"] == 1
    assert about["library"]
    assert about["settings"] == SampleStore.open(tmp_path).settings
    assert about["settings"]["seed"] == 7
    assert about["settings"]["sampler"]["groups"][0]["num_data"] == 1000
    assert about["settings"]["schedule"]["schedule"] == "ConstantLR"
    assert about["tensors"]["weight"] == {"kind": "parameter", "shape": [2, 3], "dtype": "float32", "format": "bfp8"}
    assert [record["step"] for record in about["samples"]] == [1, 5]


def test_tensors_written_to_in_memory_do_not_change_the_store(tmp_path: Path) -> None:
    s = fill_store(tmp_path)
    before = read_files(tmp_path)
    weight: Any = s[0]["0.weight"]
    weight.codes.zero_()
    s[0]["2.weight"].zero_()
    assert read_files(tmp_path) == before
    assert is_sample(s[0], 0)


# ---- readers, while it grows


def test_a_reader_sees_what_is_added_and_taken_away(tmp_path: Path) -> None:
    reader = fill_store(tmp_path, 1)
    kept = reader[0]
    model = build()
    with SampleStore.open(tmp_path, write=True) as writer:
        writer.append(draw(model, 1))
        assert len(reader) == 2
        assert reader.nbytes == writer.nbytes
        assert is_sample(reader[1], 1)
        writer.truncate(1)
        assert len(reader) == 1
        writer.append(draw(model, 2))
        assert is_sample(reader[1], 2)
    assert is_sample(kept, 0)


def test_nbytes_of_a_reader_grows_too(tmp_path: Path) -> None:
    reader = fill_store(tmp_path, 1)
    with SampleStore.open(tmp_path, write=True) as writer:
        writer.append(build())
        assert reader.nbytes == writer.nbytes


def test_a_sample_added_while_a_reader_opens_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_store(tmp_path, 1)
    read = SampleStore._read_manifest

    def slow(folder: Folder) -> Any:
        found = read(folder)
        monkeypatch.undo()
        with SampleStore.open(folder.path, write=True) as writer:
            writer.append(build())
        return found

    monkeypatch.setattr(SampleStore, "_read_manifest", staticmethod(slow))
    assert len(SampleStore.open(tmp_path)) == 2


def test_a_reader_needs_no_permission_to_write(tmp_path: Path) -> None:
    fill_store(tmp_path)
    (tmp_path / ".lock").unlink()
    assert len(SampleStore.open(tmp_path)) == 3
    assert not (tmp_path / ".lock").exists()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    s = fill_store(tmp_path)
    for action in (lambda: s.append(build()), lambda: s.truncate(0)):
        with pytest.raises(PermissionError, match=r"or open for reading; SampleStore.open\(..., write=True\) to write"):
            action()
    assert len(s) == 3


def test_samples_read_by_another_process_while_they_are_written(tmp_path: Path) -> None:
    fill_store(tmp_path, 1)

    def follow() -> None:
        reader, seen = SampleStore.open(tmp_path), 0
        while seen < 15:
            for sample in reader[seen:]:
                sample.decode()
                seen += 1

    child, model = fork(follow), build()
    with SampleStore.open(tmp_path, write=True) as writer:
        for i in range(1, 15):
            writer.append(draw(model, i))
    assert wait_for(child) == 0


# ---- truncate, resume


def test_truncate_keeps_the_first(tmp_path: Path) -> None:
    fill_store(tmp_path / "two", 2)
    fill_store(tmp_path / "s", 4)
    with SampleStore.open(tmp_path / "s", write=True) as s:
        s.truncate(4)
        s.truncate(2)
        assert read_files(tmp_path / "s") == read_files(tmp_path / "two")
        for bad in (-1, 3):
            with pytest.raises(ValueError, match=f"count must be between 0 and 2, the samples there are, got {bad}"):
                s.truncate(bad)
        s.append(draw(build(), 7))
        assert is_sample(s[2], 7)
        s.truncate(0)
    assert len(SampleStore.open(tmp_path / "s")) == 0


def sampled(
    path: Path, resume: bool = False, lr: float = 0.1, weights: str = "bfp8", cyclical: bool = False
) -> SampleStore:
    model = nn.Linear(3, 2)
    sampler = SGLD(model.parameters(), lr, 1000, weights=weights)
    schedule = CyclicalLR(sampler, 100, 2, 1) if cyclical else ConstantLR(sampler, 100, 2)
    return SampleStore.create(path, model, sampler, schedule, resume=resume)


def test_resume_goes_on_with_the_same_settings_only(tmp_path: Path) -> None:
    with sampled(tmp_path, resume=True) as s:
        s.append(pack(nn.Linear(3, 2), "bfp8"))
    before = read_files(tmp_path)
    with sampled(tmp_path, resume=True) as s:
        assert len(s) == 1
    with pytest.raises(FileExistsError, match=r"holds a store already; create\(..., resume=True\) continues it"):
        sampled(tmp_path)
    with pytest.raises(
        ValueError, match=r"begun with other settings: sampler.groups\[0\].lr is 0.1 there and 0.2 here"
    ):
        sampled(tmp_path, resume=True, lr=0.2)
    with pytest.raises(
        ValueError, match=r"begun with other settings: .*schedule.schedule is 'ConstantLR' there and 'Cyclical"
    ):
        sampled(tmp_path, resume=True, cyclical=True)
    with pytest.raises(
        ValueError, match=r"another model or sampler: 'weight' is parameter bfp8 \[2, 3\] there, now .* fixed8.6"
    ):
        sampled(tmp_path, resume=True, weights="fixed8.6")
    assert read_files(tmp_path) == before
    SampleStore.open(tmp_path, write=True).close()  # the lock has been released


def test_samples_without_a_manifest_are_not_written_over(tmp_path: Path) -> None:
    fill_store(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(FileExistsError, match="holds samples, but no manifest that describes them"):
        SampleStore.create(tmp_path, build())
    with pytest.raises(FileNotFoundError, match=r"there is no store in .*: it has no manifest.json"):
        SampleStore.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        SampleStore.open(tmp_path / "none")


# ---- what does not fit


def test_another_model_is_refused_and_the_tensors_named(tmp_path: Path) -> None:
    fill_store(tmp_path)
    with SampleStore.open(tmp_path, write=True) as s:
        for model, why in (
            (build(4), r"'0.weight' is parameter bfp8 \[3, 5\] there and parameter bfp8 \[4, 5\] in the model"),
            (build()[:3], r"'3.weight' is missing in the model; '3.bias' is missing in the model$"),
            (build().append(nn.Linear(1, 1)), "'4.weight' is in the model only; '4.bias' is in the model only$"),
            (build(frozen=False), "'3.weight' is frozen float32 .* there and parameter float32 .* in the model"),
            (
                build().double(),
                r"'0.weight' is of float32 there and of float64 in the model \(model.to\(torch.float32\) .*more$",
            ),
            (pack(build(), "bfp8", layers="2"), r"'2.weight' is parameter float32 \[2, 3\] there and parameter bfp8"),
        ):
            with pytest.raises(ValueError, match="is of another model: .*" + why):
                s.append(model)
        with pytest.raises(ValueError, match=r"Sample.* is of another model: '0.weight'"):
            s[0].load_into(build(4))
        assert len(s) == 3


@pytest.mark.parametrize("how", ["in place", "behind autograd's back", "another tensor"])
def test_frozen_parameters_must_not_change(how: str, tmp_path: Path) -> None:
    model = build()
    with SampleStore.create(tmp_path, model) as s:
        s.append(model)
        s.append(model)
        layer: Any = model[3]
        with torch.no_grad():
            if how == "in place":
                layer.weight[0, 0] += 1
            elif how == "behind autograd's back":
                layer.weight.data[0, 0] += 1
            else:
                layer.weight = nn.Parameter(layer.weight + 1, requires_grad=False)
        with pytest.raises(ValueError, match=r"'3.weight' is frozen, but has changed since the store was created"):
            s.append(model)
        assert len(s) == 2


def test_a_frozen_parameter_made_in_inference_mode(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False))
    with SampleStore.create(tmp_path, model) as s:
        s.append(model)


@pytest.mark.parametrize("step", [-1, 1.5, True, "1", 2**63])
def test_a_step_that_is_no_number_is_refused_and_the_store_stays_readable(step: Any, tmp_path: Path) -> None:
    fill_store(tmp_path)
    before = read_files(tmp_path)
    with (
        SampleStore.open(tmp_path, write=True) as s,
        pytest.raises((ValueError, TypeError), match=f"step must be .*got {step!r}"),
    ):
        s.append(build(), step)
    assert read_files(tmp_path) == before


def test_a_step_before_that_of_the_last_sample_is_refused(tmp_path: Path) -> None:
    with SampleStore.create(tmp_path, model := build()) as s:
        s.append(model, 5)
        with pytest.raises(
            ValueError, match="last sample is of step 5, this one of step 4: was the checkpoint not loaded"
        ):
            s.append(model, 4)
        assert len(s) == 1


def test_a_second_sample_of_a_step_is_said_once_and_stored(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    sampler = SGLD(model.parameters(), 0.1, 1000)
    with SampleStore.create(tmp_path, model, sampler) as s:
        s.append(model)
        with pytest.warns(
            QLangevinWarning, match="has a sample of step 0 already: the same weights count twice"
        ) as caught:
            s.append(model)
        assert caught[0].filename == __file__
        s.append(model)
        assert len(s) == 3
        s.append(model, step=1)
    with SampleStore.open(tmp_path, write=True) as s, pytest.warns(QLangevinWarning, match="of step 1 already"):
        s.append(model, step=1)
