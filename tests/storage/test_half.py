"""Stores, checkpoints and predictions of bfloat16 and float16 models: dtype and bits come back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from benchmarks.kills import content
from qlangevin import QTensor

HALVES = [torch.bfloat16, torch.float16]
X, LABELS = torch.randn(16, 12, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
Kind = tuple[Callable[[nn.Sequential], nn.Sequential], dict[str, str]]
KINDS: dict[str, Kind] = {
    "dtype": (lambda m: m, {}),
    "bfp8": (lambda m: m, {"weights": "bfp8", "gradients": "bfp8"}),
    "accumulator": (lambda m: m, {"weights": "bfp8", "accumulator": "fp32"}),
    "packed": (lambda m: ql.pack(m, "bfp8"), {}),
    "lowered, 4 bits": (lambda m: ql.pack(ql.lower(m, "bfp8", "bfp8"), "bfp4"), {}),
}


class Run:
    """A half-precision model with frozen and float32 parts, and its sampler."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        change, settings = KINDS[kind]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 3))
        model.to(dtype)[2].requires_grad_(False)
        model.register_buffer("scale", torch.ones(3))  # a float32 in a half-precision model
        self.model, self.dtype = change(model), dtype
        self.sampler = ql.SGLD(self.model.named_parameters(), 0.1, 1000, **settings)  # type: ignore[arg-type]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.sampler.zero_grad()
            nn.functional.cross_entropy(self.model(X.to(self.dtype)).float(), LABELS).backward()
            self.sampler.step()

    def bits(self) -> list[Tensor]:
        named = self.model.state_dict()
        tensors = [t.decode() if isinstance(t, QTensor) else t for t in named.values()]
        tensors += [state["accumulator"] for state in self.sampler.state.values() if "accumulator" in state]
        return [t.view(torch.int16 if t.itemsize == 2 else torch.int32) for t in tensors]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_same_to_the_byte(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    whole, resumed = Run(kind, dtype), Run(kind, dtype)
    whole.train(3)
    ql.save_checkpoint(tmp_path / "a", whole.model, whole.sampler)
    whole.train(3)
    ql.load_checkpoint(tmp_path / "a", resumed.model, resumed.sampler)
    resumed.train(3)
    assert all(map(torch.equal, resumed.bits(), whole.bits()))
    for name, run in (("b", whole), ("c", resumed)):
        ql.save_checkpoint(tmp_path / name, run.model, run.sampler)
    assert content(tmp_path / "b") == content(tmp_path / "c")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_samples_and_predictions(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    run, kept, outputs = Run(kind, dtype), [], []
    with ql.SampleStore.create(tmp_path, run.model, run.sampler) as store:
        for _ in range(3):
            run.train(2)
            store.append(run.model)
            kept.append(
                {
                    n: p.decode() if isinstance(p, QTensor) else p.detach().clone()
                    for n, p in run.model.named_parameters()
                    if p.requires_grad
                }
            )
            with torch.no_grad():
                outputs.append(run.model.eval()(X.to(dtype)))
            run.model.train()
    for sample, wanted in zip(ql.SampleStore.open(tmp_path), kept, strict=True):
        for name, expected in wanted.items():
            found = sample[name]
            assert found.dtype == expected.dtype
            assert torch.equal(found.decode() if isinstance(found, QTensor) else found, expected)
    expected = torch.stack(outputs).float().softmax(-1).mean(0)
    for vectorize in (False, None):
        posterior = ql.Posterior.open(tmp_path, Run(kind, dtype).model.eval(), vectorize=vectorize)
        assert len(posterior) == 3
        torch.testing.assert_close(posterior.predict(X.to(dtype)).float(), expected, rtol=0, atol=2e-2)


@pytest.mark.parametrize("dtype", HALVES)
def test_codes_of_half_precision_are_those_of_its_grid(dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights near the ends of the range, zero rows among them, are on the grid that their dtype clips."""
    info = torch.finfo(dtype)
    rows = torch.tensor([0.0, info.smallest_normal * info.eps, 1.0, info.max], dtype=torch.float64).view(-1, 1)
    model = nn.ParameterDict({"p": nn.Parameter((rows * torch.linspace(-1, 1, 9).double()).to(dtype))})
    sampler = ql.SGLD(model.parameters(), 0.1, 100, weights="bfp8")
    with ql.SampleStore.create(tmp_path, model, sampler) as store:
        store.append(model)
        with torch.no_grad():
            model["p"][2, 0] = 0.123
        with pytest.raises(ValueError, match=r"not on the grid of bfp8 \(1 of 36\)"):
            store.append(model)
    found = ql.SampleStore.open(tmp_path)[0]["p"]
    assert isinstance(found, QTensor)
    assert torch.equal(found.decode()[[0, 1, 3]], model["p"].detach()[[0, 1, 3]])
