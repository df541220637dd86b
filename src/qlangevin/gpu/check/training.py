"""Cases for the sampler and for lowered networks: some steps of a chain, whose weights must be the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ...experiments.models import Block, ResNet18
from ...lowering.layers import lower
from ...quantization.operators import Rounding, quantize
from ...quantization.qtensor import QTensor
from ...sampling.packing import pack
from ...sampling.preconditioner import RMS
from ...sampling.sghmc import SGHMC
from ...sampling.sgld import SGLD
from .comparing import SPECIFICATION, Case, Place
from .operations import DTYPES, Shapes

__all__ = ["beside_cases", "chain_cases", "network_cases", "step_cases"]


@dataclass(frozen=True)
class Weights:
    """The way that a sampler keeps its weights."""

    format: str | None
    dtype: torch.dtype = torch.float32
    accumulator: str | None = None
    packed: bool = False

    def __str__(self) -> str:
        where = "packed" if self.packed else str(self.dtype).removeprefix("torch.")
        return f"{self.format or 'no format'}, {where}, accumulator {self.accumulator}"


KINDS = (
    *(Weights(f, packed=True) for f in ("bfp8", "fixed8.6", "bfp8/tensor", "bfp8/32", "fp8_e4m3", "bf16")),
    *(Weights(f, d) for f, d in product(("bfp8e5", "fixed8.6", None), DTYPES)),
    *(Weights("bfp8", accumulator=a, packed=p) for a, p in product(("fp32", "fixed16.10"), (True, False))),
)


def step_cases(shapes: Shapes, quick: bool, steps: int = 2) -> Iterator[Case]:
    """Yield steps on given gradients for each way to keep the weights; unless it must be quick, also the naive ones, and SGD."""
    others = () if quick else (("stochastic", 1.0), ("corrected", 0.0))
    for (rounding, temperature), kind in product((("corrected", 1.0), *others), KINDS):
        name = f"{kind}, {rounding}, T = {temperature:g}"
        yield Case(name, partial(_step, kind, rounding, temperature, shapes, steps))


def _step(
    kind: Weights, rounding: Rounding, temperature: float, shapes: Shapes, steps: int, place: Place
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    start = [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]
    model = nn.ParameterList([nn.Parameter(t.to(kind.dtype).to(place.device)) for t in start])
    if kind.packed:
        pack(model, kind.format or "fp32", seed=1)
    sampler = SGLD(
        model.parameters(), lr=0.1, num_data=1000, temperature=temperature, weight_decay=1e-3,
        weights=None if kind.packed else kind.format, gradients="bfp8e5", accumulator=kind.accumulator, rounding=rounding, seed=1,
    )  # fmt: skip
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(kind.dtype).to(place.device)
        sampler.step()
    return weights_of(model)


GAINS = RMS(decay=0.9, eps=0.01, freeze_after=2)
BESIDE: dict[str, dict[str, Any]] = {
    "localization, a mask": {"localization": 10.0},
    "gains, stochastic": {"preconditioner": GAINS, "rounding": "stochastic"},
    "gains, localization, box": {"preconditioner": GAINS, "localization": 10.0, "center_format": "bf16", "box": 0.2},
    "velocities": {"friction": 0.3},
    "velocities, gains, a mask": {"friction": 0.3, "velocity": "bfp8", "preconditioner": GAINS},
}


def beside_cases(shapes: Shapes, steps: int = 3) -> Iterator[Case]:
    """Yield steps with a centre, a mask, a preconditioner or velocities on packed weights."""
    for format, (name, settings) in product(("bfp8", "fixed8.6", "fp8_e4m3"), BESIDE.items()):
        yield Case(f"{format}, {name}", partial(_step_beside, format, settings, "mask" in name, shapes, steps))


def _step_beside(
    format: str, settings: dict[str, Any], masked: bool, shapes: Shapes, steps: int, place: Place
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape, generator=generator) * 0.3) for shape in shapes])
    mask = [torch.rand(shape, generator=generator) < 0.7 for shape in shapes] if masked else None
    pack(model.to(place.device), format, seed=1)
    make: Any = SGHMC if "friction" in settings else SGLD
    sampler = make(model.parameters(), lr=0.1, num_data=1000, weight_decay=1e-3, seed=1, mask=mask, **settings)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(place.device)
        sampler.step()
    return weights_of(model)


def network_cases(batch: int) -> Iterator[Case]:
    """Yield some steps of small lowered, packed networks whose arithmetic is exact in any order, because it is that of codes.

    Products of two 8-bit codes are integers below 2^14, and a thousand of them add up in float32 without rounding if they have
    one exponent. So blocks are whole tensors here, layers have no bias, the batch is a power of two and the loss is quadratic.
    """
    for format in ("fixed8.4", "bfp8/tensor"):
        yield Case(f"three layers in {format}, batch {batch}", partial(_train, format, batch))


def _train(format: str, batch: int, place: Place) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    layers = [nn.Linear(*sizes, bias=False) for sizes in ((40, 64), (64, 33), (33, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    _fill(model, generator)
    model.to(place.device)
    pack(lower(model, activations=format, errors=format, functions=False, seed=2), format, seed=2)
    sampler = SGLD(model.parameters(), lr=0.1, num_data=1000, weight_decay=1e-3, gradients="bfp8", seed=2)
    x = quantize(torch.randn(batch, 40, generator=generator), format).to(place.device)
    target = torch.randint(-3, 4, (batch, 10), generator=generator).float().to(place.device)
    outputs = []
    for _ in range(3):
        sampler.zero_grad()
        out = model(x)
        ((out - target) ** 2).sum().mul(0.5 / batch).backward()
        sampler.step()
        outputs.append(out.detach().clone())
    return [*outputs, *weights_of(model)]


def chain_cases(small: bool) -> Iterator[Case]:
    """Yield the chain of a lowered, packed ResNet, or of one block: a place computes gradients, and the CPU steps on them.

    Sums in convolutions are taken in another order on every device, so the networks' own results cannot be compared.
    """
    for format in ("bfp8",) if small else ("bfp8", "fixed8.6"):
        chain = Chain(format, small)
        yield Case(f"{'a block of a ResNet' if small else 'ResNet-18'} in {format}", chain.run)


class Chain:
    """A chain that the specification, which comes first, cannot compute before it has the other place's gradients."""

    def __init__(self, format: str, small: bool) -> None:
        self.format, self.small, self.steps = format, small, 1 if small else 3

    def run(self, place: Place) -> list[Tensor]:
        """Return zeros for the specification; elsewhere how many codes differ from those that the specification then finds."""
        if place.path == "pytorch":
            return [torch.zeros((), dtype=torch.int64)]
        gradients, codes = _sample(self.format, self.small, self.steps, place)
        replayed = _replay(self.format, self.small, gradients)
        return [torch.stack([(a.cpu() != b).sum() for a, b in zip(codes, replayed, strict=True)]).sum()]


def _sample(format: str, small: bool, steps: int, place: Place) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the gradients of each step, and the weights after all steps."""
    model, sampler = _residual(format, small, place)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4, 3, 6 if small else 32, 6 if small else 32, generator=generator).to(place.device)
    y = torch.randint(10, (4,), generator=generator).to(place.device)
    gradients = []
    for _ in range(steps):
        sampler.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradients.append([p.grad.detach().cpu() for p in model.parameters() if p.grad is not None])
        sampler.step()
    return gradients, weights_of(model)


def _replay(format: str, small: bool, gradients: list[list[Tensor]]) -> list[Tensor]:
    """Return the weights that given gradients lead to on the PyTorch path."""
    with SPECIFICATION.entered():
        model, sampler = _residual(format, small, SPECIFICATION)
        for step in gradients:
            for p, g in zip(model.parameters(), step, strict=True):
                p.grad = g.clone()
            sampler.step()
        return weights_of(model)


def _residual(format: str, small: bool, place: Place) -> tuple[nn.Module, SGLD]:
    model: nn.Module = ResNet18(width=16)
    if small:
        model = nn.Sequential(Block(3, 4, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    _fill(model, torch.Generator().manual_seed(10))
    model.to(place.device)
    pack(lower(model, activations="bfp8", errors="bfp8", functions=False), format)
    return model, SGLD(model.parameters(), lr=0.1, num_data=50_000, weight_decay=1e-4, gradients="bfp8")


def _fill(model: nn.Module, generator: torch.Generator) -> None:
    """Draw the weights of a model from a generator: torch's global one belongs to the user."""
    for p in model.parameters():
        if p.dim() > 1:
            p.data = torch.randn(p.shape, generator=generator) / p[0].numel() ** 0.5
        elif not bool((p == 1).all()):  # not the scales of BatchNorm
            p.data = torch.zeros(p.shape)


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return codes and exponents of packed parameters, other parameters as they are."""
    found: list[Tensor | None] = []
    for p in model.parameters():
        found += [p.codes, p.exponents] if isinstance(p, QTensor) else [p.detach()]
    return [t.clone() for t in found if t is not None]
