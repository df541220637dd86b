"""The kernels on bfloat16 and float16 against the PyTorch path, bit for bit: every format, rounding, instruction set and size."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from qlangevin import Key, corrected, encode, native, parse, quantize
from qlangevin.native.memory import FLOAT_TYPES
from qlangevin.quantization import random
from qlangevin.quantization.backend import TensorStep
from qlangevin.quantization.codes import decode_values, empty_codes, encode_exactly
from qlangevin.quantization.formats import fit_dtype
from qlangevin.quantization.operators import Rounding, quantize_op
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import step_tensors
from tests.helpers.strategies import NAMES

pytestmark = pytest.mark.skipif(not native.available, reason="no compiled kernels")

HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(), (0,), (3, 0), (1,), (5,), (3, 5), (2, 3, 4), (7, 33), (2, 5000)]
STEPS = ["fixed8.6", "bfp8", "bfp8/32", "bfp8/tensor", "bfp4", "fp8_e4m3", "e4m3", None]


def fits(name: str, dtype: torch.dtype) -> bool:
    try:
        return bool(fit_dtype(parse(name), dtype))
    except ValueError:
        return False


FITTING = [(name, dtype) for dtype in HALVES for name in NAMES if fits(name, dtype)]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; a NaN equals a NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    bits = torch.int16 if a.itemsize == 2 else torch.int32
    return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())


def both_paths_agree(run: Callable[[], list[Tensor]]) -> None:
    with native.disabled():
        expected = run()
    for level in native.levels():
        native.use_level(level)
        for threads in (1, 2) if level == native.levels()[-1] else (1,):
            torch.set_num_threads(threads)
            assert all(map(same, run(), expected)), (level, threads)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads, level = torch.get_num_threads(), native.level()
    yield
    torch.set_num_threads(threads)
    native.use_level(level)


def sample(shape: tuple[int, ...], magnitude: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Numbers of some size, with infinities if it is 1 and a NaN if it is 100."""
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude).to(dtype)
    if x.numel() > 8 and magnitude == 1.0:
        x.view(-1)[[1, 3]] = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    if x.numel() > 8 and magnitude == 100.0:
        x.view(-1)[2] = torch.nan
    return x


def magnitudes(dtype: torch.dtype) -> list[float]:
    """Sizes of ordinary numbers, and those near both ends of a dtype's range."""
    info = torch.finfo(dtype)
    return [1.0, 100.0, info.smallest_normal / 20, info.max / 8]


@pytest.mark.parametrize("dtype", HALVES)
def test_every_number_is_read_and_written(dtype: torch.dtype) -> None:
    every = (
        torch.arange(2**16).to(torch.int16).view(dtype)
    )  # all bit patterns, subnormal numbers, infinities and NaN included
    codes = torch.arange(
        2**15 - 128, dtype=torch.int16
    )  # of bf16 without infinities and NaN: decoding to float16 rounds
    for level in native.levels():
        native.use_level(level)
        numbers = every[every.isfinite()] + 0.0  # rounding makes -0 a 0
        name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        assert same(encode(numbers, name).codes, numbers.view(torch.int16))
        assert same(encode(numbers, name).decode(), numbers)
        assert same(
            quantize(every, name), every.nan_to_num(torch.nan, *(torch.finfo(dtype).max, torch.finfo(dtype).min)) + 0.0
        )
        wide = decode_values(codes, None, parse("bf16"))
        assert same(decode_values(codes, None, parse("bf16"), dtype=dtype), wide.to(dtype))
        integers = torch.arange(-(2**15), 2**15).to(torch.int32).view(-1, 64)
        halves = decode_values(integers, None, parse("fixed20.12"), dtype=dtype)
        assert same(halves, (integers / 2**12).to(dtype)), level  # ties go to even


@pytest.mark.parametrize(("name", "dtype"), FITTING)
def test_every_format_and_rounding(name: str, dtype: torch.dtype) -> None:
    key = Key(7, 3, 11)
    for seed, shape in enumerate(SHAPES):
        for magnitude in magnitudes(dtype):
            x = sample(shape, magnitude, seed, dtype)
            v = min(magnitude**2, 1e36)
            each = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** 3 * v
            both_paths_agree(
                lambda x=x, v=v, each=each: [  # type: ignore[misc]
                    quantize(x, name),
                    quantize(x, name, "stochastic", key),
                    quantize_op(x, name, "stochastic", 1, 2, 3, random.ACTIVATION),
                    *(corrected(x, variance, name, key) for variance in (v * 1e-4, v, each)),
                ]
            )


@pytest.mark.parametrize(("name", "dtype"), FITTING)
def test_codes(name: str, dtype: torch.dtype) -> None:
    def code(x: Tensor) -> list[Tensor]:
        coded = encode(x, name)
        again = encode_exactly(coded.decode() + 0.0, parse(name))
        assert again is not None
        parts = [coded.codes, coded.decode(), *again] + ([] if coded.exponents is None else [coded.exponents])
        off = encode_exactly(x * 1.3, parse(name))
        return [*parts, torch.tensor(off is None), *(off or ())]

    for seed, shape in enumerate(SHAPES):
        for magnitude in magnitudes(dtype):
            x = sample(shape, magnitude, seed, dtype)
            both_paths_agree(lambda x=x: code(x.nan_to_num(1.0)))  # type: ignore[misc]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["bfp8", "bfp8/32", "fixed8.4", "fp8_e4m3"])
def test_rounding_and_relu_with_codes(name: str, dtype: torch.dtype) -> None:
    format, key = fit_dtype(parse(name), dtype), Key(3)
    for seed, shape in enumerate([(3, 5), (7, 64), (2, 5000)]):
        for magnitude in magnitudes(dtype):
            x = sample(shape, magnitude, seed, dtype)
            rounded = quantize(x, name, "stochastic", key)
            for level in native.levels():
                native.use_level(level)
                y, made = x.clone(), empty_codes(x, format)
                good = native.quantize_with_codes(y, format, "stochastic", key, random.ROUNDING, made)
                assert same(y, rounded)
                assert good == (not bool(rounded.isnan().any()))
                out, codes = torch.empty_like(y), empty_codes(x, format)
                assert native.relu_with_codes(y, out, *codes, format) == good
                assert same(out, y.clamp_min(0))
                if good:
                    expected = format.encode(y.float())
                    assert all(map(same, made, expected))
                    assert all(map(same, codes, format.encode(out.float())))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rounding", ["corrected", "stochastic", "nearest"])
@pytest.mark.parametrize("name", STEPS)
def test_steps(name: str | None, rounding: Rounding, dtype: torch.dtype) -> None:
    """Weights of one dtype with gradients of any, with and without an accumulator, plain and packed."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(50, 129, generator=generator) * 0.3
    for gradient_dtype in (dtype, torch.float32):
        gradients = [torch.randn(50, 129, generator=generator).to(gradient_dtype) for _ in range(2)]
        for accumulator in (None, "fp32", "fixed16.12"):
            settings = StepSettings(
                0.1, 2000, weight_decay=1e-3, weights=name, gradients="bfp8", rounding=rounding, accumulator=accumulator
            )

            def run(
                packed: bool, settings: StepSettings = settings, gradients: list[Tensor] = gradients
            ) -> list[Tensor]:
                grid = name or {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
                theta = encode(start.to(dtype), grid) if packed else quantize(start.to(dtype), grid)
                summed = start.clone() if settings.accumulator else None
                for step, gradient in enumerate(gradients):
                    step_tensors([TensorStep(theta, gradient, Key(5, 1, step), summed)], settings)
                parts = [theta.codes, theta.exponents, theta.decode()] if packed else [theta]  # type: ignore[attr-defined]
                return [part for part in (*parts, summed) if part is not None]

            for packed in (False, True):
                both_paths_agree(lambda packed=packed, run=run: run(packed))  # type: ignore[misc]
            assert same(run(True)[1 if len(run(True)) == 2 + (accumulator is not None) else 2], run(False)[0])


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_of_float32_weights_take_gradients_of_half_precision(dtype: torch.dtype) -> None:
    settings = StepSettings(0.1, 2000, weights="bfp8", gradients="fixed8.4")
    gradient = torch.randn(9, 700).to(dtype)

    def run() -> list[Tensor]:
        theta, packed = torch.zeros(9, 700), encode(torch.zeros(9, 700), "bfp8")
        step_tensors([TensorStep(theta, gradient, Key(1)), TensorStep(packed, gradient, Key(1))], settings)
        return [theta, packed.decode()]

    both_paths_agree(run)
    assert same(*run())


@pytest.mark.parametrize("dtype", HALVES)
def test_numbers_that_are_not_finite_are_found(dtype: torch.dtype) -> None:
    tensors = [torch.full((5000,), torch.finfo(dtype).max, dtype=dtype) for _ in range(3)]
    for level in native.levels():
        native.use_level(level)
        assert native.first_not_finite([*tensors, torch.ones(3)]) == -1
        for bad in (torch.inf, -torch.inf, torch.nan):
            for place in (0, 4097, 4999):
                spoiled = tensors[1].clone()
                spoiled[place] = bad
                assert native.first_not_finite([tensors[0], spoiled, tensors[2]]) == 1


def test_halves_that_the_kernels_would_misread_are_refused() -> None:
    x, codes = torch.ones(4, 6, dtype=torch.bfloat16), empty_codes(torch.ones(4, 6), parse("bfp8"))
    with pytest.raises(ValueError, match="x and out must be of one floating type, got types 1 and 2"):
        native.quantize(x, parse("bfp8"), "nearest", Key(0), 0, out=x.half())
    with pytest.raises(ValueError, match="x and out must be of one floating type, got types 1 and 0"):
        native.relu_with_codes(x, x.float(), *codes, parse("bfp8"))
    with pytest.raises(ValueError, match=r"need a contiguous torch.float32 tensor .*got torch.float64"):
        native.decode(x.double(), *codes, parse("bfp8"))
    for bad in (
        (x.data_ptr(), x.nbytes, 3),
        (x.data_ptr(), x.nbytes, -1),
        (x.data_ptr(), x.nbytes, 2**70),
        (1, 2, 3, 4),
    ):
        with pytest.raises((ValueError, TypeError)):
            native.kernels.first_not_finite([bad], 1)  # type: ignore[list-item]
    names = {str(dtype).removeprefix("torch."): number for dtype, number in FLOAT_TYPES.items()}
    assert names == native.kernels.FLOAT_TYPES
