"""Calls that the compiled module refuses: every length, number and enumerator that does not fit."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qlangevin import Key, encode, native, parse
from qlangevin.quantization.backend import TensorStep
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import step_tensors

pytestmark = pytest.mark.skipif(not native.available, reason="no compiled kernels")

SHAPE, BITS = torch.Size((4, 6)), {"seed": 1, "stream": 2, "step": 3}


def memory(t: Tensor) -> tuple[int, int]:
    return t.data_ptr(), t.nbytes


def grid(name: str = "bfp8", shape: tuple[int, ...] = (4, 6)) -> Any:
    return native.kernels.Grid(**parse(name).kernel_grid(torch.Size(shape))._asdict())


class Tensors:
    """Tensors of one call: numbers, codes, exponents."""

    def __init__(self) -> None:
        self.x, self.out, self.gradient = torch.ones(SHAPE), torch.empty(SHAPE), torch.ones(SHAPE)
        self.codes, self.exponents = torch.zeros(SHAPE, dtype=torch.int8), torch.zeros(4, dtype=torch.int8)
        self.coded = {"codes": memory(self.codes), "exponents": memory(self.exponents), "code_bytes": 1}
        self.shared = {"numel": 24, "grid": grid(), "threads": 1}

    def calls(self) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
        """Return every kernel with arguments that fit."""
        k, x, out = native.kernels, memory(self.x), memory(self.out)
        step = {
            "theta": None, **self.coded, "accumulator": None, "gradient": memory(self.gradient), "numel": 24, **BITS,
            "weights": grid(), "gradients": grid("bfp8/3"), "accumulators": grid("fp32"),
        }  # fmt: skip
        settings = {"rounding": 2, "lr": 0.1, "weight_decay": 0.0, "variance": 0.1, "maximize": False, "threads": 1}
        one, law = [k.Step(**step)], {"rounding": 1, "purpose": 0, "variance": 0.0}
        return {
            "quantize": (
                k.quantize,
                {"x": x, "out": out, "move": memory(self.gradient), **law, **BITS, **self.coded, **self.shared},
            ),
            "encode": (k.encode, {"values": x, **self.coded, **self.shared}),
            "decode": (k.decode, {"values": out, **self.coded, **self.shared}),
            "encode_exactly": (k.encode_exactly, {"values": x, **self.coded, **self.shared}),
            "relu_with_codes": (k.relu_with_codes, {"x": x, "out": out, **self.coded, **self.shared}),
            "draw": (k.draw, {"out": out, "numel": 24, "normal": True, "purpose": 1, "threads": 1, **BITS}),
            "first_not_finite": (k.first_not_finite, {"tensors": [x, out], "threads": 1}),
            "Step": (k.Step, step),
            "sgld": (k.sgld, {"steps": one, **settings}),
        }  # fmt: skip


NAMES = [
    "quantize",
    "encode",
    "decode",
    "encode_exactly",
    "relu_with_codes",
    "draw",
    "first_not_finite",
    "Step",
    "sgld",
]


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_is_checked(name: str) -> None:
    function, arguments = (tensors := Tensors()).calls()[name]
    function(**arguments)
    wrong: dict[str, list[Any]] = {
        "numel": [-1, 0, 23, 25, 48, 2**60, 2**63 - 1],
        "threads": [0, -1],
        "rounding": [-1, 3],
        "purpose": [12, 2**32 - 1],
        "variance": [-1.0, math.nan, math.inf],
        "lr": [math.nan, math.inf],
        "weight_decay": [math.nan],
        "code_bytes": [0, 2, 3, 4, 8, -1],
        "grid": [grid("bfp8", (5, 7)), grid("bfp8", (2, 12)), grid("fp32")],
        "weights": [grid("bfp8", (5, 7)), grid("fp32")],
        "gradients": [grid("bfp8", (3, 8))],  # lines of 8, where the others have lines of 6
        "tensors": [[None, (0, 4)], [(tensors.x.data_ptr(), 3)], [(tensors.x.data_ptr(), -4)]],
    }
    for key, value in arguments.items():
        if isinstance(value, tuple):
            address, size = value
            wrong[key] = [(address, size - 1), (address, 0), (0, size), (address, -size), (address, 2**62)]
            wrong[key] += [] if key in ("codes", "exponents") else [(address + 1, size)]
    for key in arguments.keys() & wrong.keys():
        for value in wrong[key]:
            with pytest.raises(ValueError, match=r"\w+ .+"):
                function(**arguments | {key: value})


def test_normal_numbers_are_drawn_for_wide_purposes_only() -> None:
    out = torch.empty(128)
    for purpose in ("activation", "error"):
        number = native.kernels.PURPOSES[purpose]
        native.kernels.draw(out=memory(out), numel=128, normal=False, purpose=number, threads=1, **BITS)
        with pytest.raises(ValueError, match="uniform numbers"):
            native.kernels.draw(out=memory(out), numel=128, normal=True, purpose=number, threads=1, **BITS)


def test_a_step_needs_numbers_or_codes() -> None:
    function, arguments = (tensors := Tensors()).calls()["Step"]
    for change in ({"theta": memory(tensors.x)}, {"codes": None}):
        with pytest.raises(ValueError, match="theta or its codes, and not both"):
            function(**arguments | change)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": 4}, {"kind": -1}, {"line": 0}, {"size": 0}, {"size": 7}, {"line": -6}, {"line": 2**60}, {"shift": 23},
        {"shift": -1}, {"min_gap": -150}, {"max_gap": 128}, {"min_gap": 5, "max_gap": 4}, {"top": 100.0}, {"top": math.nan},
        {"high": math.inf}, {"low": math.nan}, {"high": -1.0},
    ],
)  # fmt: skip
def test_grids_that_no_format_has_are_refused(change: dict[str, Any]) -> None:
    fields = parse("bfp8").kernel_grid(SHAPE)._asdict()
    native.kernels.Grid(**fields)
    with pytest.raises(ValueError, match=r"must be|need|there is no kind"):
        native.kernels.Grid(**fields | change)


def test_memory_is_two_or_three_integers() -> None:
    for wrong in (1, "x", (1,), (1, 2, 3, 4), (1, 2, "x"), (1, 2, 2**64), [1, 2], (1.0, 2), (-1, 4), (2**64, 4)):
        with pytest.raises(TypeError):
            native.kernels.first_not_finite([wrong], 1)  # type: ignore[list-item]


def test_tensors_between_multiples_of_their_size_are_read_by_way_of_a_copy() -> None:
    memory_ = torch.zeros(100, dtype=torch.uint8)
    x = torch.frombuffer(memory_.numpy(), dtype=torch.float32, count=24, offset=1).copy_(torch.arange(24))
    assert x.data_ptr() % 4
    assert torch.equal(native.quantize(x, parse("fixed8.0"), "nearest", Key(0), 0), torch.arange(24.0))
    assert native.first_not_finite([x]) == -1
    with pytest.raises(ValueError, match="must begin at a multiple of 4 bytes"):
        native.quantize(x, parse("fixed8.0"), "nearest", Key(0), 0, out=x)


def test_an_unknown_rounding_is_refused() -> None:
    with pytest.raises(ValueError, match="rounding must be one of nearest, stochastic, corrected, got 'up'"):
        native.quantize(torch.ones(3), parse("bfp8"), "up", Key(0), 0)
    with pytest.raises(ValueError, match="rounding must be nearest or stochastic, got 'up'"):
        torch.ops.qlangevin.quantize(torch.ones(3), "bfp8", "up", 0, 0, 0, 0)


def test_lazily_negated_tensors_are_read_as_the_numbers_they_are() -> None:
    x = torch.randn(4, 6)
    negated = torch._neg_view(x)  # what conj().imag returns: the memory is that of x
    expected = native.quantize(-x, parse("bfp8"), "nearest", Key(0), 0)
    assert torch.equal(native.quantize(negated, parse("bfp8"), "nearest", Key(0), 0), expected)
    assert native.first_not_finite([negated]) == -1
    steps = []
    for gradient in (-x, negated):
        theta = encode(torch.zeros(4, 6), "bfp8")
        step_tensors([TensorStep(theta, gradient, Key(0))], StepSettings(0.1, 1000))
        steps.append(theta.decode())
    assert torch.equal(*steps)
    with pytest.raises(ValueError, match="lazily negated"):
        native.quantize(x, parse("bfp8"), "nearest", Key(0), 0, out=negated)
