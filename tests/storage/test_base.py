"""Frozen parameters: stored once for all samples and chains, or only referred to by checksums."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import DamagedError, SampleStore
from qlangevin.storage import sharing
from qlangevin.storage.manifest import Manifest, _hash_content
from tests.helpers.stores import read_files


class LoRA(nn.Module):
    """A frozen linear layer and an adapter of low rank: W x + B A x."""

    def __init__(self, inputs: int, outputs: int, rank: int = 8) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Linear(inputs, rank, bias=False)
        self.lora_B = nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.base(x) + self.lora_B(self.lora_A(x))


def build(seed: int = 0, width: int = 32, packed: bool = False) -> Any:
    torch.manual_seed(seed)
    model = nn.Sequential(LoRA(width, width), nn.ReLU(), LoRA(width, 3))
    return ql.pack(model, "bfp8", frozen=packed)


def fill(path: Path, model: Any, frozen: Any = "once", count: int = 3, stream: int = 0) -> SampleStore:
    """Sample the adapters for some steps."""
    sampler = ql.SGLD(model.parameters(), lr=0.01, num_data=100, stream=stream)
    generator = torch.Generator().manual_seed(0)
    with SampleStore.create(path, model, sampler, frozen=frozen) as store:
        for _ in range(count):
            x = torch.randn(4, model[0].base.in_features, generator=generator)
            model(x).square().mean().backward()
            sampler.step()
            sampler.zero_grad()
            store.append(model)
    return SampleStore.open(path)


X = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))


def test_a_sample_of_an_adapter_of_rank_8_is_kilobytes(tmp_path: Path) -> None:
    """Of 3.1 million weights, 99% are the base's: 12.6 MB, stored once or not at all; a sample is 36 kB."""
    model = build(width=1760)
    base = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert base > 3_000_000
    for frozen in ("once", "reference"):
        store = fill(tmp_path / frozen, model, frozen, count=2)
        assert store[0].nbytes < 1.05 * adapters + 1000 < 50_000
        files = read_files(tmp_path / frozen)
        assert ("frozen.safetensors" in files) == (frozen == "once")
        assert sum(map(len, files.values())) - (4 * base if frozen == "once" else 0) < 3 * 50_000


@pytest.mark.parametrize("packed", [False, True])
def test_a_reference_gives_the_samples_of_a_copy(packed: bool, tmp_path: Path) -> None:
    once, referred = (fill(tmp_path / kind, build(packed=packed), kind) for kind in ("once", "reference"))
    model = build(packed=packed)
    a, b = (ql.Posterior.open(store, model) for store in (once, referred))
    assert torch.equal(a.samples(X), b.samples(X))
    assert all(torch.equal(a.export(1)[name], t) for name, t in b.export(1).items())
    opened = SampleStore.open(tmp_path / "reference", model=model)
    assert list(opened[0]) == list(once[0])
    assert all(torch.equal(t, once[0].decode()[name]) for name, t in opened[0].decode().items())


def test_without_a_model_samples_are_the_adapters(tmp_path: Path) -> None:
    store = fill(tmp_path, build(), "reference")
    assert [name for name in store[0] if "lora" not in name] == []
    assert len(store[0]) == len(store[0].decode()) == 4
    assert list(store[1].tensors) == list(store[1])
    store.verify()
    model = build(seed=1)
    with pytest.raises(ValueError, match="refers to a base that is not this model's"):
        store[0].load_into(model)
    model = build()
    store[0].load_into(model)
    assert torch.equal(model(X).softmax(1), ql.Posterior.open(store[:1], build()).predict(X))


@pytest.mark.parametrize("opening", [ql.Posterior.open, lambda path, model: SampleStore.open(path, model=model)])
def test_another_base_is_refused_and_named(opening: Any, tmp_path: Path) -> None:
    fill(tmp_path / "plain", build(), "reference")
    model = build()
    with torch.no_grad():
        model[2].base.bias[1] += 1
    message = r"plain refers to a base that is not this model's: 1 of 4 frozen parameters differ .*: '2.base.bias'. Load the base"
    with pytest.raises(ValueError, match=message):
        opening(tmp_path / "plain", model)
    with pytest.raises(ValueError, match=r"4 of 4 .*with frozen parameters that are not packed"):
        opening(tmp_path / "plain", build(packed=True))
    fill(tmp_path / "packed", build(packed=True), "reference")
    with pytest.raises(ValueError, match=r"pack it as then: qlangevin.pack\(model, 'bfp8', frozen=True\)"):
        opening(tmp_path / "packed", build())


def test_a_base_that_changes_while_sampling_is_noticed(tmp_path: Path) -> None:
    model = build()
    with SampleStore.create(tmp_path, model, frozen="reference") as store:
        store.append(model)
        with torch.no_grad():
            model[0].base.weight.mul_(1.0)
        store.append(model)  # the same numbers
        with torch.no_grad():
            model[0].base.weight.mul_(2.0)
        with pytest.raises(ValueError, match=r"1 of 4 frozen parameters differ .*'0.base.weight'"):
            store.append(model)
        assert len(store) == 2


def test_resuming_needs_the_same_base_and_the_same_choice(tmp_path: Path) -> None:
    SampleStore.create(tmp_path / "a", build(), frozen="reference").close()
    SampleStore.create(tmp_path / "a", build(), frozen="reference", resume=True).close()
    with pytest.raises(ValueError, match="refers to a base that is not this model's: load the one it was begun with"):
        SampleStore.create(tmp_path / "a", build(seed=1), frozen="reference", resume=True)
    with pytest.raises(ValueError, match=r"'0.base.weight' is reference .* there, now frozen"):
        SampleStore.create(tmp_path / "a", build(), resume=True)
    with pytest.raises(ValueError, match="frozen must be one of 'once', 'reference', got 'never'"):
        SampleStore.create(tmp_path / "b", build(), frozen="never")  # type: ignore[arg-type]


def test_a_forged_reference_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, build(), "reference")
    content = json.loads((tmp_path / "manifest.json").read_text())
    for wrong in ("", "x" * 64, None, 5):
        content["tensors"]["0.base.weight"]["sha256"] = wrong
        content.pop("sha256", None)
        content["sha256"] = _hash_content(content)
        with pytest.raises(DamagedError, match="a reference has no proper checksum"):
            Manifest.from_json(json.dumps(content).encode())


# ---- chains side by side


def test_chains_share_the_file_of_the_base(tmp_path: Path) -> None:
    stores = [fill(tmp_path / f"chain-{i}", build(), stream=i) for i in range(3)]
    files = [(tmp_path / f"chain-{i}" / "frozen.safetensors").stat() for i in range(3)]
    assert len({about.st_ino for about in files}) == 1
    assert files[0].st_nlink == 3
    for store in stores:
        store.verify()
    assert len(ql.Posterior.open(tmp_path, build(seed=5))) == 9
    (tmp_path / "chain-0" / "frozen.safetensors").unlink()
    stores[1].verify()


def test_chains_of_another_base_or_with_a_damaged_file_share_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "chain-0", build())
    fill(tmp_path / "chain-1", build(seed=1))
    file = tmp_path / "chain-0" / "frozen.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    fill(tmp_path / "chain-2", build()).verify()
    inodes = {(tmp_path / f"chain-{i}" / "frozen.safetensors").stat().st_ino for i in range(3)}
    assert len(inodes) == 3
    assert not [p.name for p in tmp_path.rglob("*.tmp")]


def test_file_systems_without_links_have_a_file_for_each_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path / "chain-0", build())

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    fill(tmp_path / "chain-1", build()).verify()
    assert (tmp_path / "chain-1" / "frozen.safetensors").stat().st_nlink == 1
    assert sharing.CHAIN.fullmatch("chain-12")


def test_the_base_is_decoded_once_for_all_samples(tmp_path: Path) -> None:
    """Samples of all chains hold the same tensors for it, and vectorized evaluation does not stack them."""
    for i in range(2):
        fill(tmp_path / f"chain-{i}", build(packed=True), stream=i)
    for model in (build(packed=True), ql.unpack(build(packed=True))):
        posterior = ql.Posterior.open(tmp_path, model, vectorize=True)
        first, last = posterior._decode_sample(0), posterior._decode_sample(5)
        assert first["0.base.weight"] is last["0.base.weight"]
        assert first["0.lora_A.weight"] is not last["0.lora_A.weight"]
        alone = ql.Posterior.open(tmp_path, model, vectorize=False).samples(X)
        torch.testing.assert_close(posterior.samples(X), alone, rtol=1e-5, atol=1e-5)
        stack = posterior._ensemble.kept_stack
        assert stack is not None
        assert [tuple(stack[name][0].shape) for name in ("0.base.weight", "0.lora_A.weight")] == [(32, 32), (6, 8, 32)]


@pytest.mark.parametrize("vectorize", [True, False])
def test_chains_that_hold_their_base_and_chains_that_refer_to_it(vectorize: bool, tmp_path: Path) -> None:
    """Each is evaluated with its own base, in any order."""
    model = build()
    stores = [
        fill(tmp_path / "held", build(seed=1), "once"),
        fill(tmp_path / "referred", build(), "reference", stream=1),
    ]
    expected = [ql.Posterior.open(store, model, vectorize=False).samples(X) for store in stores]
    assert not torch.equal(*expected)
    for order in ([0, 1], [1, 0]):
        both = ql.Posterior.open([stores[i] for i in order], model, vectorize=vectorize)
        torch.testing.assert_close(both.samples(X), torch.cat([expected[i] for i in order]), rtol=1e-5, atol=1e-6)
