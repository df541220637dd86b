"""Q^s and Q^vc of block floating point on half-precision tensors, at both ends of their exponents.

z-tests with fixed seeds fail beyond 5.5 standard errors, which chance reaches with probability 4e-8: with fewer than 200
comparisons the false-alarm rate of the file is below 1e-5.
"""

import pytest
import torch
from torch import Tensor

from qlangevin import Key, corrected, native, parse, quantize
from qlangevin.quantization.formats import fit_dtype

Z, COUNT = 5.5, 1 << 16
HALVES = [torch.bfloat16, torch.float16]


def least(dtype: torch.dtype) -> float:
    """Return the least positive number of a dtype."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps


def z_scores(x: Tensor, mean: Tensor | float) -> Tensor:
    return (x.mean(0) - mean) / (x.var(0) / len(x)).sqrt().clamp_min(1e-30)


@pytest.mark.parametrize("dtype", HALVES)
def test_at_the_bottom_the_gap_is_the_least_number_and_the_moments_are_exact(dtype: torch.dtype) -> None:
    unit = least(dtype)
    mu = torch.tensor([0.0, 1.0, -3.0, 20.0], dtype=torch.float64) * unit  # of float32 they would have finer gaps
    for s in (0.0, 0.1, 2.0):
        drawn = corrected(mu.to(dtype).expand(COUNT, -1), s * unit**2, "bfp8", Key(3))
        gaps = drawn.double() / unit
        assert torch.equal(gaps, gaps.round())
        error = gaps - mu / unit
        assert z_scores(error, 0.0).abs().max() < Z
        if unit**2 * s > 1e-38:  # a float32: bfloat16 has no variance as small as that
            assert z_scores(error.square(), s).abs().max() < Z


def test_a_row_below_the_least_number_times_n_keeps_its_numbers() -> None:
    for dtype in HALVES:
        x = (torch.arange(-127, 128).double() * least(dtype)).to(dtype).view(1, -1)
        assert torch.equal(quantize(x, "bfp8"), x)
        assert torch.equal(quantize(x, "bfp8", "stochastic", Key(0)), x)


def test_float16_saturates_at_the_top() -> None:
    x = torch.tensor([[65504.0, 1.0], [-65504.0, 512.0], [60000.0, 0.0], [torch.inf, 300.0]], dtype=torch.float16)
    for q in (quantize(x, "bfp8"), quantize(x, "bfp8", "stochastic", Key(0)), corrected(x, 100.0, "bfp8", Key(0))):
        assert q.isfinite().all()
        assert torch.equal(q[[0, 1, 3], 0], torch.tensor([65024.0, -65024.0, 65024.0], dtype=torch.float16))
        assert (q[2, 0] - 60000).abs() <= 1024


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", ["bfp8", "bfp4/tensor", "bfp8/3", "bfp9"])
def test_what_is_drawn_is_on_the_clipped_grid_and_the_same_on_both_paths(name: str, dtype: torch.dtype) -> None:
    generator, format = torch.Generator().manual_seed(0), fit_dtype(parse(name), dtype)
    info = torch.finfo(dtype)
    for scale in (info.smallest_normal / 64, info.smallest_normal, 1.0, info.max / 4):
        x = (torch.randn(40, 33, generator=generator).clamp(-3, 3) * scale).to(dtype)
        for v in (0.0, 1e-6, 1.0):
            drawn = corrected(x, min(v * scale**2, 1e36), name, Key(1))
            assert drawn.dtype == dtype
            assert format.is_representable(drawn.float()).all()
            assert torch.equal(quantize(drawn, name), drawn)
            with native.disabled():
                assert torch.equal(corrected(x, min(v * scale**2, 1e36), name, Key(1)), drawn)
