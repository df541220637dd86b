"""The step of VC SGLDLP-L over the weights of a ResNet-18, against drawing one normal number for each weight.

Two ways: on int8 codes in place, all tensors in one call of the kernels, and the whole of `SGLD.step` on float32 parameters,
with its Python and its check of the gradients. Gradients are quantised too. Then `SGLD.step` on bfloat16 and float16
parameters, with gradients of their dtype as they are, against float32 parameters on the same grid; and on bfloat16 ones without
a format, which are rounded to bfloat16 with the corrected law, against float32 ones, which are not rounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import qlangevin as ql
from qlangevin.quantization.backend import TensorStep
from qlangevin.sampling.settings import StepSettings, parameter_key
from qlangevin.sampling.step import step_tensors

from .timing import WALL, Contestant, Goal, Row, measure

LR, TEMPERATURE, WEIGHT_DECAY = 0.1, 1.0, 1e-4
RESTART = 16  # steps after which a chain is reset: with random gradients it would drift away
RANDN, CONTROL = "torch.randn, no allocation", "torch.lgamma, for comparison"
# (name, format, N). With CIFAR's N the noise is below v_0 on fixed8.6, and no Gaussian is drawn; with N = 1000 it is above.
CASES = (("fixed8.6", "fixed8.6", 50_000), ("fixed8.6, N = 1000", "fixed8.6", 1000), ("bfp8", "bfp8", 50_000))


def resnet18() -> list[torch.Size]:
    """Return the shapes of the CIFAR ResNet-18's parameters: 11 173 962 weights."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for inputs in (before, width):
            shapes += [(width, inputs, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if inputs != width:
                shapes += [(width, inputs, 1, 1), (width,), (width,)]
        before = width
    return [torch.Size(shape) for shape in [*shapes, (10, 512), (10,)]]


def numel() -> int:
    return sum(shape.numel() for shape in resnet18())


def draws(seed: int) -> list[Tensor]:
    """Draw standard normals for every shape."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in resnet18()]


def weights() -> list[Tensor]:
    """Return weights as at the start of training: Kaiming's scale for matrices, ones and zeros for normalization and biases."""
    tensors = draws(0)
    for i, w in enumerate(tensors):
        if w.dim() > 1:
            w.mul_((2 / w[0].numel()) ** 0.5)
        else:
            w.fill_(float(tensors[i - 1].dim() > 1 and i < len(tensors) - 1))
    return tensors


class Chain:
    """A chain that can be timed: ``run`` makes one step; ``before``, not timed, resets it every `RESTART` steps."""

    def __init__(self, step: Callable[[int], object], tensors: list[Tensor]) -> None:
        self.step, self.steps = step, 0
        self.tensors, self.start = tensors, [t.detach().clone() for t in tensors]

    def run(self) -> None:
        self.steps += 1
        self.step(self.steps)

    @torch.no_grad()
    def before(self) -> None:
        if self.steps % RESTART == 0:
            for now, start in zip(self.tensors, self.start, strict=True):
                now.copy_(start)

    def check(self) -> None:
        """Raise RuntimeError if the chain stands still or is saturated: its time would mean nothing."""
        largest = torch.iinfo(torch.int8).max if self.tensors[0].dtype == torch.int8 else float("inf")
        count = sum(t.numel() for t in self.tensors)
        moved = sum(int((t != s).sum()) for t, s in zip(self.tensors, self.start, strict=True)) / count
        at_end = sum(int((t.abs() >= largest).sum()) for t in self.tensors) / count
        if moved < 0.001 or at_end > 0.001:
            raise RuntimeError(f"the chain is not alive: {moved:.2%} of its weights moved, {at_end:.2%} are saturated")


def on_codes(format: str, num_data: int, gradients: list[Tensor]) -> Chain:
    """VC SGLDLP-L on int8 codes. Every other step ascends, so that random gradients do not add up."""
    settings = [
        StepSettings(LR, num_data, TEMPERATURE, WEIGHT_DECAY, gradients=format, maximize=up) for up in (False, True)
    ]
    packed = [ql.encode(w, format) for w in weights()]

    def step(k: int) -> None:
        tensors = enumerate(zip(packed, gradients, strict=True))
        step_tensors([TensorStep(q, g, parameter_key(0, 0, i, k)) for i, (q, g) in tensors], settings[k % 2 == 0])

    return Chain(step, [q.codes for q in packed] + [q.exponents for q in packed if q.exponents is not None])


def on_values(
    format: str | None,
    num_data: int,
    gradients: list[Tensor],
    dtype: torch.dtype = torch.float32,
    q_g: str | None = None,
) -> Chain:
    """The same chain as an optimizer over parameters of a dtype."""
    parameters = [torch.nn.Parameter(w.to(dtype)) for w in weights()]
    for p, g in zip(parameters, gradients, strict=True):
        p.grad = g.to(dtype)
    sampler = ql.SGLD(
        parameters, LR, num_data, temperature=TEMPERATURE, weight_decay=WEIGHT_DECAY, weights=format, gradients=q_g
    )
    return Chain(lambda k: sampler.step(), list(parameters))


def run(seconds: float) -> list[Row]:
    """Time all cases with one thread, then with two if there are two processors."""
    gradients = [g.mul_(1e-3) for g in draws(1)]
    chains = {f"codes, {name}": on_codes(format, n, gradients) for name, format, n in CASES}
    chains |= {f"SGLD.step, {name}": on_values(format, n, gradients, q_g=format) for name, format, n in CASES}
    contestants = {name: Contestant(chain.run, before=chain.before) for name, chain in chains.items()}
    count = numel()
    normals = Contestant(partial(torch.randn, count, out=torch.empty(count)))
    times = {name: t / count * 1e9 for name, t in measure(contestants | {RANDN: normals}, seconds / 2).items()}
    group, goal = f"one step, {count / 1e6:.2f}M weights, one thread", Goal("<", 1)
    rows = [Row(group, name, times[name], "ns", RANDN, times[RANDN], "time", goal) for name in contestants]
    rows += two_threads(contestants, seconds / 2) if (os.cpu_count() or 1) > 1 else []
    rows += half_precision(gradients, seconds)
    for chain in chains.values():
        chain.check()
    return rows


def half_precision(gradients: list[Tensor], seconds: float) -> list[Row]:
    """Time `SGLD.step` on half-precision parameters and on float32 ones."""
    single = {format: on_values(format, 50_000, gradients) for format in (None, "bf16", "bfp8", "fixed8.6")}
    half = {
        f"{str(dtype)[6:]}, weights={format}": (on_values(format, 50_000, gradients, dtype), format)
        for dtype, formats in ((torch.bfloat16, (None, "bf16", "bfp8", "fixed8.6")), (torch.float16, ("bfp8",)))
        for format in formats
    }
    chains = {f"float32, weights={format}": chain for format, chain in single.items()}
    chains |= {name: chain for name, (chain, _) in half.items()}
    contestants = {name: Contestant(chain.run, before=chain.before) for name, chain in chains.items()}
    times, count = measure(contestants, seconds), numel()
    rows = []
    for name, (_, format) in half.items():
        rival, goal = f"float32, weights={format}", None if format is None else Goal("<=", 1.3)
        mine, its = (times[key] / count * 1e9 for key in (name, rival))
        rows.append(Row("one step, half precision", name, mine, "ns", rival, its, "time", goal))
    for chain in chains.values():
        chain.check()
    return rows


def two_threads(contestants: dict[str, Contestant], seconds: float) -> list[Row]:
    """Measure the gain from a second thread. A torch function that only computes shows what gain the machine allowed."""
    x = torch.linspace(-3, 3, 1 << 22)
    contestants = contestants | {CONTROL: Contestant(partial(torch.lgamma, x, out=torch.empty_like(x)))}
    both = {
        f"{name} {threads}": Contestant(c.run, threads, c.before)
        for name, c in contestants.items()
        for threads in (1, 2)
    }
    times = {name: t * 1e3 for name, t in measure(both, seconds, WALL).items()}
    rows = []
    for name in contestants:
        goal = None if name == CONTROL else Goal(">=", 1.8)
        one, two = times[f"{name} 1"], times[f"{name} 2"]
        rows.append(Row("one step, two threads", name, two, "ms", "one thread", one, "speed", goal))
    return rows
