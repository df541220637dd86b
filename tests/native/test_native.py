"""The kernels against the PyTorch path, bit for bit: every format, rounding, instruction set and number of threads."""

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, cast, get_args

import pytest
import torch
from torch import Tensor

from qlangevin import Key, corrected, encode, native, parse, quantize
from qlangevin.quantization import laws, operators, random
from qlangevin.quantization.backend import Kernels, TensorStep, kernels_for
from qlangevin.quantization.codes import encode_exactly
from qlangevin.quantization.floating_point import Float
from qlangevin.quantization.formats import GridKind
from qlangevin.quantization.operators import Rounding
from qlangevin.sampling.settings import StepSettings
from qlangevin.sampling.step import step_tensors
from qlangevin.sampling.update import update
from tests.helpers.strategies import NAMES

pytestmark = pytest.mark.skipif(not native.available, reason="no compiled kernels")

SHAPES = [(), (0,), (3, 0), (1,), (5,), (3, 5), (2, 3, 4), (64,), (7, 33), (3, 1029), (2, 5000)]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; a NaN equals a NaN."""
    return torch.equal(torch.where(a.isnan(), 7.0, a), torch.where(b.isnan(), 7.0, b)) and not bool(
        ((a == 0) & (torch.signbit(a) != torch.signbit(b))).any()
    )


def both_paths_agree(run: Callable[[], Tensor]) -> None:
    with native.disabled():
        expected = run()
    for level in native.levels():
        native.use_level(level)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert same(run(), expected), (level, threads)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    threads, level = torch.get_num_threads(), native.level()
    yield
    torch.set_num_threads(threads)
    native.use_level(level)


def sample(shape: tuple[int, ...], magnitude: float, seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * magnitude
    if x.numel() > 8 and magnitude == 1.0:
        x.view(-1)[[1, 3]] = torch.tensor([torch.inf, -torch.inf])
    if x.numel() > 8 and magnitude == 100.0:
        x.view(-1)[2] = torch.nan
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1.0, 1e-38, 1e37, 100.0])
def test_every_format_and_rounding(name: str, magnitude: float) -> None:
    key = Key(7, 3, 11)
    for seed, shape in enumerate(SHAPES):
        x = sample(shape, magnitude, seed)
        v = min(magnitude**2, 1e36)
        each = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) ** 3 * v
        both_paths_agree(lambda x=x: quantize(x, name))  # type: ignore[misc]
        both_paths_agree(lambda x=x: quantize(x, name, "stochastic", key))  # type: ignore[misc]
        for variance in (v * 1e-4, v, each):
            both_paths_agree(lambda x=x, variance=variance: corrected(x, variance, name, key))  # type: ignore[misc]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bfp8", "bfp4", "bfp2", "bfp3/16", "bfp8/tensor", "bfp12/20", "bfp24e7", "bfp8e3"])
def test_blocks_near_the_top_of_their_binade(name: str) -> None:
    # Blocks scaled by powers of two and noise of every size: many are at risk of growing, some grow, some do not.
    generator = torch.Generator().manual_seed(3)
    for seed in range(25):
        x = torch.randn(40, 37, generator=generator) * 2.0 ** torch.randint(-12, 12, (40, 1), generator=generator)
        v = 10.0 ** float(torch.empty(()).uniform_(-9, 3, generator=generator))
        for variance in (v, torch.rand(40, 37, generator=generator) * v):
            both_paths_agree(lambda x=x, v=variance, s=seed: corrected(x, v, name, Key(s)))  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["fixed8.3", "bfp8e4", "fp8_e4m3", "e4m3"])
def test_other_dtypes(dtype: torch.dtype, name: str) -> None:
    x = sample((9, 70), 3.0, 0).to(dtype)
    both_paths_agree(lambda: quantize(x, name, "stochastic", Key(1)))
    both_paths_agree(lambda: corrected(x, 0.01, name, Key(1)))


@pytest.mark.parametrize("name", NAMES)
def test_codes(name: str) -> None:
    for seed, shape in enumerate(SHAPES):
        for magnitude in (2.0, 1e-38, 1e30):
            x = sample(shape, magnitude, seed)
            both_paths_agree(lambda x=x: encode(x, name).codes.float())  # type: ignore[misc]
            both_paths_agree(lambda x=x: encode(x, name).decode())  # type: ignore[misc]
            if parse(name).storage_bits and (exponents := encode(x, name).exponents) is not None:
                with native.disabled():
                    other = encode(x, name).exponents
                assert other is not None
                assert torch.equal(exponents, other)


@pytest.mark.parametrize(
    "name", ["fixed8.6", "bfp8", "bfp8/32", "bfp8/tensor", "bfp16", "fp8_e4m3", "e4m3", "bfp4", "fp32"]
)
@pytest.mark.parametrize("rounding", ["corrected", "stochastic", "nearest"])
def test_the_step_on_codes_is_the_step_on_values(name: str, rounding: Rounding, every_level: str) -> None:
    generator = torch.Generator().manual_seed(0)
    settings = StepSettings(0.1, 2000, weight_decay=1e-3, gradients="bfp8", rounding=rounding)
    theta = encode(torch.randn(50, 129, generator=generator) * 0.3, name)
    for step in range(3):
        gradient = torch.randn(50, 129, generator=generator)
        key = Key(5, 1, step)
        with native.disabled():
            expected = update(theta.decode(), gradient, settings, name, key)
        step_tensors([TensorStep(theta, gradient, key)], settings)
        assert torch.equal(theta.decode(), expected)


def test_stochastic_rounding_in_the_kernels_arrangement() -> None:
    # The kernels ask if h is between 0 and r by the sign of h (h - r), the definition by comparisons: the same for all floats.
    r = torch.tensor([-0.5, -0.4, -(2.0**-30), -1e-12, 0.0, 1e-38, 2.0**-30, 0.1, 0.49999997]).view(-1, 1)
    h = torch.cat(
        (random.centered(Key(0), 10_000), r.view(-1), r.view(-1) * (1 + 2.0**-23), r.view(-1) * (1 - 2.0**-24))
    )
    h = h[(h.abs() >= 2.0**-49) & (h.abs() <= 0.5)].expand(len(r), -1)
    down, up = laws.pick(*laws.outcomes(r, torch.zeros(())), h)
    assert torch.equal(h * (h - r) < 0, down | up)
    assert torch.equal(up & (h < 0), torch.zeros_like(up))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1.0, 1e-38, 1e37])
def test_a_mean_and_its_move_in_every_format(name: str, magnitude: float) -> None:
    generator, format = torch.Generator().manual_seed(1), parse(name)
    for shape, scales in (((), [1e-3]), ((5,), [1e-3]), ((7, 133), [1e-9, 1e-3, 1.0])):
        start = quantize(torch.randn(shape, generator=generator) * magnitude, name)
        for scale in scales:
            mean = laws.Mean(start, torch.randn(shape, generator=generator) * (scale * magnitude))
            for v in (0.0, 1e-6, 1.0):
                variance = torch.tensor(min(v * scale * magnitude**2, 1e36))
                both_paths_agree(lambda m=mean, v=variance: operators.draw(m, v, format, Key(2, 3, 4)))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["e4m3", "fp8_e5m2", "bf16", "fp16", "e2m1", "e3m0", "e8m1", "e8m18", "e6m22"])
def test_floats_of_all_binades_with_noise_of_all_sizes(name: str) -> None:
    generator, format = torch.Generator().manual_seed(0), parse(name)
    start = quantize(torch.randn(3000, generator=generator) * torch.exp2(torch.arange(3000) % 24 - 12), name)
    for move in (None, start * -1e-6, start * torch.randn(3000, generator=generator), -start):  # the last cancels
        for v in (1e-9, 1e-6, 1e-4, 1e-2, 1.0):
            mean, variance = laws.Mean(start, move), torch.tensor(v)
            both_paths_agree(lambda m=mean, v=variance: operators.draw(m, v, format, Key(9)))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "bf16", "fp16", "e8m18"])
def test_floats_and_noise_at_both_ends_of_the_range(name: str) -> None:
    """Vectors of numbers that are far from the ends, that are not, and of both; with a variance for all and one for each."""
    generator, format = torch.Generator().manual_seed(4), cast(Float, parse(name))
    lowest, highest = format.min_gap_exponent, format.max_gap_exponent
    binades = torch.arange(2000) * (highest + format.man - lowest) // 2000 + lowest
    start = quantize(torch.randn(2000, generator=generator).double().mul(torch.exp2(binades.double())).float(), name)
    start[[5, 700, 1201]] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    wide = torch.exp2(torch.randint(lowest, highest, (2000,), generator=generator).clamp(-60, 60).float())
    for move in (None, start * torch.randn(2000, generator=generator), wide - start):  # the last cancels
        each = [start.square().nan_to_num(1.0, 1.0).clamp_max(1e36) * scale for scale in (1e-6, 1e-2, 0.0)]
        ends = [
            2.0 ** (2 * max(min(e, 60), -74)) for end in (lowest + format.man, highest) for e in range(end - 4, end + 3)
        ]
        for v in (*each, *(torch.tensor(end) for end in ends)):
            mean = laws.Mean(start, move)
            both_paths_agree(lambda m=mean, v=v: operators.draw(m, v, format, Key(9)))  # type: ignore[misc]


@pytest.mark.parametrize("name", ["bfp8", "bfp4", "bfp2", "bfp3/16", "bfp8/tensor", "bfp8e3"])
def test_several_at_the_top_of_a_block(name: str) -> None:
    # Weights on the grid of which many are ±N, and drifts in and out of the block's range: the case that tosses a coin.
    generator, format = torch.Generator().manual_seed(3), parse(name)
    top = parse(name).largest_multiple
    codes = torch.randint(-int(top), int(top) + 1, (64, 37), generator=generator).float()
    start = quantize(torch.where(torch.rand(64, 37, generator=generator) < 0.1, top * codes.sign(), codes) / 64, name)
    for scale in (1e-7, 1e-2, 0.9):
        for v in (0.0, 1e-7, 1e-2, 0.25, 0.3):
            mean = laws.Mean(start, torch.randn(64, 37, generator=generator) * (scale / 64))
            variance = torch.tensor(v / 64**2)
            both_paths_agree(lambda m=mean, v=variance: operators.draw(m, v, format, Key(5)))  # type: ignore[misc]
            both_paths_agree(lambda m=mean, v=variance: corrected(m.total, v, name, Key(5)))  # type: ignore[misc]
        for purpose in (random.ACTIVATION, random.ERROR):
            x = mean.total
            both_paths_agree(
                lambda x=x, p=purpose: operators.quantize_op(x, name, "stochastic", 1, 2, 3, p)  # type: ignore[misc]
            )


def test_tensors_that_the_kernels_would_misread_are_refused() -> None:
    theta, gradient = torch.zeros(4), torch.zeros(8)
    settings: dict[str, Any] = {"weights": None, "gradients": None, "accumulator": None, "rounding": "corrected"}
    for step in (
        TensorStep(theta, gradient, Key(0)),
        TensorStep(theta, torch.zeros(4), Key(0), torch.zeros(4, dtype=torch.float64)),
        TensorStep(torch.zeros(4, 4).T[0], torch.zeros(4), Key(0)),
        TensorStep(encode(theta, "bfp8"), gradient, Key(0)),
    ):
        with pytest.raises(ValueError, match="the kernels need a contiguous"):
            native.sgld([step], **settings, lr=0.1, weight_decay=0.0, variance=0.0, maximize=False)


def test_instruction_sets_are_named() -> None:
    assert native.levels()[0] == "baseline"
    assert native.level() == os.environ.get("QLANGEVIN_KERNELS", native.levels()[-1])
    with pytest.raises(ValueError, match="level must be one of baseline"):
        native.use_level("mmx")


def test_python_and_cpp_number_purposes_roundings_and_grids_alike() -> None:
    kernels = native.kernels
    assert {name.upper(): number for name, number in kernels.PURPOSES.items()} == {
        name: getattr(random, name)
        for name in (
            *("ROUNDING", "NOISE", "CHOICE", "GRADIENT", "WEIGHT", "LEFTOVER", "ACTIVATION", "ERROR"),
            *("ACTIVATION_REST", "ERROR_REST", "COIN", "MOMENT"),
        )
    }
    assert list(kernels.ROUNDINGS.items()) == [(name, number) for number, name in enumerate(get_args(Rounding))]
    assert {name.upper(): number for name, number in kernels.GRID_KINDS.items()} == dict(GridKind.__members__)


def test_the_module_is_the_backend_of_the_cpu() -> None:
    backend, x = cast(Kernels, native), torch.ones(1)
    assert kernels_for(x) is backend
    assert kernels_for(x, x) is backend
    for others in ((x.double(),), (x, x.double())):
        assert kernels_for(*others) is None
    with native.disabled():
        assert kernels_for(x) is None


def test_the_module_has_every_kernel_of_a_backend() -> None:
    kernels = {name: function for name, function in vars(Kernels).items() if not name.startswith("_")}
    assert {"quantize", "encode", "decode", "sgld"} <= set(kernels)
    del kernels["begin_step"]  # of deferred kernels only
    for name, function in kernels.items():
        _, *expected = inspect.signature(function).parameters
        assert expected == ["args", "kwargs"] or expected == list(inspect.signature(getattr(native, name)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_grids_have_fields_of_the_same_names(name: str) -> None:
    for shape in SHAPES:
        size = torch.Size(shape)
        assert isinstance(native.grid(parse(name), size), native.kernels.Grid)
        with pytest.raises(TypeError):
            native.kernels.Grid(*parse(name).kernel_grid(size))  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["fixed2.0", "fixed4.1", "fixed8.3", "fixed12.3"])
def test_what_is_one_too_far_up_has_no_code(name: str, every_level: str) -> None:
    x = torch.full((3, 1000), -parse(name).low)
    x[:2] = parse(name).high
    assert encode_exactly(x[:2], parse(name)) is not None
    assert encode_exactly(x, parse(name)) is None
