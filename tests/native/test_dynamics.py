"""The kernels of steps with a centre, a mask, gains and velocities give the bits of the PyTorch path."""

import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qlangevin as ql
from qlangevin import native
from qlangevin.quantization.qtensor import decoded

FEATURES: list[dict[str, Any]] = [
    {"localization": 3.0},
    {"mask": True},
    {"preconditioner": ql.RMS(freeze_after=2)},
    {"preconditioner": ql.RMS(format="bf16")},
    {"localization": 3.0, "mask": True, "preconditioner": "rms", "box": 0.3},
]
FORMATS = [
    (None, None),
    ("bfp8", None),
    ("bf16", None),
    (None, "bfp8/32"),
    (None, "fixed8.5"),
    (None, "fp8_e4m3"),
    (None, "bfp4"),
]


def chain(
    kind: type[Any], weights: str | None, packed: str | None, dtype: torch.dtype, kernels: bool, **settings: Any
) -> list[Tensor]:
    """Return weights and state after a few steps of a chain."""
    torch.manual_seed(1)
    model = nn.Linear(37, 12).to(dtype)
    if packed:
        ql.pack(model, packed)
    draw = torch.Generator().manual_seed(5)
    if settings.pop("mask", False):
        settings["mask"] = [torch.rand(p.shape, generator=draw) > 0.3 for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ql.QLangevinWarning)  # of masks that cut blocks
        sampler = kind(
            model.parameters(), lr=0.05, num_data=100, weight_decay=1e-3, weights=weights, gradients="bfp8", **settings
        )
    with nullcontext() if kernels else native.disabled():
        for _ in range(3):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=draw).to(dtype) + 0.1 * decoded(p.detach())
            sampler.step()
    names = ("accumulator", "center", "moments", "velocity")
    kept = [state[name] for state in sampler.state.values() for name in names if name in state]
    return [decoded(t.detach()).clone() for t in (*model.parameters(), *kept)]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.skipif(not native.available, reason="there are no kernels to compare with")
@pytest.mark.parametrize("rounding", ["corrected", "stochastic", "nearest"])
@pytest.mark.parametrize("accumulator", [None, "fp32", "bfp12"])
@pytest.mark.parametrize("kind", [ql.SGLD, ql.SGHMC])
def test_the_paths_agree_to_the_bit(kind: type[Any], accumulator: str | None, rounding: str) -> None:
    formats = FORMATS if accumulator is None else FORMATS[1:4:2]
    for (weights, packed), features in itertools.product(formats, FEATURES):
        settings = {**features, "accumulator": accumulator, "rounding": rounding}
        found = [chain(kind, weights, packed, torch.float32, kernels, **settings) for kernels in (True, False)]
        assert same(*found), (weights, packed, features)


@pytest.mark.skipif(not native.available, reason="there are no kernels to compare with")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("velocity", ["fixed8.4", "bfp8", "bf16", "fp8_e4m3", "bfp4", "fp32"])
def test_the_paths_agree_for_half_precision_and_all_kinds_of_velocities(velocity: str, dtype: torch.dtype) -> None:
    for packed, features in itertools.product((None, "bfp8"), FEATURES[2::2]):
        found = [
            chain(ql.SGHMC, None, packed, dtype, kernels, velocity=velocity, **features) for kernels in (True, False)
        ]
        assert same(*found), (packed, features)


@pytest.mark.skipif(not native.available, reason="there are no kernels to compare with")
def test_the_number_of_threads_does_not_matter() -> None:
    def run(threads: int) -> list[Tensor]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            p = nn.Parameter(torch.randn(300, 257, generator=torch.Generator().manual_seed(0)))
            sampler = ql.SGHMC([p], lr=0.1, num_data=100, weights="bfp8/32", preconditioner="rms", localization=1.0)
            for _ in range(3):
                p.grad = p.detach().sin()
                sampler.step()
            return [p.detach(), *(decoded(sampler.state[p][name]) for name in ("moments", "velocity"))]
        finally:
            torch.set_num_threads(before)

    assert same(run(1), run(2))


@pytest.mark.skipif(not native.available, reason="there are no kernels that check")
def test_what_is_beside_the_weights_is_checked() -> None:
    from qlangevin.native import grid, kernels

    x, bits = torch.zeros(24), torch.zeros(3, dtype=torch.uint8)
    memory = (x.data_ptr(), 96)
    none = grid(None, torch.Size([24]))
    step = kernels.Step(
        theta=memory, codes=None, exponents=None, code_bytes=0, accumulator=None, gradient=memory, numel=24, weights=none,
        gradients=none, accumulators=none, seed=0, stream=0, step=1,
    )  # fmt: skip
    good: Any = (memory, None, None, 0, none)
    numbers: dict[str, Any] = {"decay": 0.9, "fresh": 0.1, "eps": 1e-3, "scale": 1.0, "unscale": 1.0, "frozen": False}
    velocity: dict[str, Any] = {"seed": 0, "stream": 0, "step": 1, "coefficients": [0.0] * 7}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (step.set_center, {"pull": 0.1}), (step.set_moments, numbers), (step.set_velocity, velocity)
    ]  # fmt: skip
    step.set_mask((bits.data_ptr(), 3))
    with pytest.raises(ValueError, match="mask must have 3"):
        step.set_mask((bits.data_ptr(), 2))
    for call, settings in calls:
        call(good, **settings)
        for kept in [
            ((memory[0], 95), None, None, 0, none),
            (None, None, None, 0, none),
            (memory, memory, None, 1, none),
        ]:
            with pytest.raises(ValueError, match=r"\w+ .+"):
                call(kept, **settings)
    with pytest.raises(ValueError, match="pull must be"):
        step.set_center(good, pull=float("nan"))
    for coefficients in ([0.0] * 6, [float("inf")] * 7, [0.0] * 6 + [-1.0]):
        with pytest.raises(ValueError, match=r"\w+ .+"):
            step.set_velocity(good, **velocity | {"coefficients": coefficients})
