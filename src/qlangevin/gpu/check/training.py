"""Cases for the sampler and for lowered networks: some steps of a chain, whose weights must be the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from ...experiments.models import ResNet18
from ...lowering.layers import lower
from ...quantization.operators import Rounding, quantize
from ...quantization.qtensor import QTensor
from ...sampling.packing import pack
from ...sampling.sgld import SGLD
from .comparing import Case, Place
from .operations import DTYPES, Shapes

__all__ = ["chain_cases", "network_cases", "step_cases"]


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


def network_cases(batch: int) -> Iterator[Case]:
    """Yield some steps of small lowered, packed networks whose arithmetic is exact in any order, because it is that of codes.

    Products of two 8-bit codes are integers below 2^14, and a thousand of them add up in float32 without rounding if they have
    one exponent. So blocks are whole tensors here, layers have no bias, the batch is a power of two and the loss is quadratic.
    """
    for format in ("bfp8/tensor", "fixed8.4"):
        yield Case(f"three layers in {format}, batch {batch}", partial(_train, format, batch))


def _train(format: str, batch: int, place: Place) -> list[Tensor]:
    generator = torch.Generator().manual_seed(9)
    layers = [nn.Linear(*sizes, bias=False) for sizes in ((40, 64), (64, 33), (33, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    _fill(model, generator)
    model.to(place.device)
    pack(lower(model, activations=format, errors=format, seed=2), format, seed=2)
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


def chain_cases(width: int, steps: int, place: Place) -> Iterator[Case]:
    """Yield the chain of a lowered, packed ResNet-18: the place computes the gradients, and both samplers step on these.

    Sums in convolutions are taken in another order on every device, so the networks' own results cannot be compared.
    """
    for format in ("bfp8", "fixed8.6"):
        with place.entered():
            gradients, codes = _sample(format, width, steps, place)
        yield Case(
            f"ResNet-18 of width {width} in {format}, {steps} steps", partial(_replay, format, width, gradients, codes)
        )


def _sample(format: str, width: int, steps: int, place: Place) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return the gradients of each step, and the weights after all steps."""
    model, sampler = _resnet(format, width, place)
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(4, 3, 16, 16, generator=generator).to(place.device)
    y = torch.randint(10, (4,), generator=generator).to(place.device)
    gradients = []
    for _ in range(steps):
        sampler.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradients.append([p.grad.detach().cpu() for p in model.parameters() if p.grad is not None])
        sampler.step()
    return gradients, weights_of(model)


def _replay(format: str, width: int, gradients: list[list[Tensor]], codes: list[Tensor], place: Place) -> list[Tensor]:
    """Return the weights that given gradients lead to; at the place that computed these, the weights that it has."""
    if place.path != "pytorch":
        return codes
    model, sampler = _resnet(format, width, place)
    for step in gradients:
        for p, g in zip(model.parameters(), step, strict=True):
            p.grad = g.clone()
        sampler.step()
    return weights_of(model)


def _resnet(format: str, width: int, place: Place) -> tuple[nn.Module, SGLD]:
    model = ResNet18(width=width)
    _fill(model, torch.Generator().manual_seed(10))
    model.to(place.device)
    pack(lower(model, activations="bfp8", errors="bfp8"), format)
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
