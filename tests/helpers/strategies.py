"""Hypothesis strategies for formats, and names of formats of every kind."""

import torch
from hypothesis import strategies as st

from qlangevin import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, BlockFloat, FixedPoint, Float, Format
from qlangevin.quantization.format_base import DtypeLimits

HARDWARE = (FP8_E4M3, FP8_E5M2, FP16, BF16, FP32)

FIXED = ["fixed8.3", "fixed2.0", "fixed4.1", "fixed16.12", "fixed25.20", "fixed8.-3", "fixed8.126"]
BLOCK = ["bfp8", "bfp8/tensor", "bfp8/32", "bfp8/7", "bfp4", "bfp3/tensor", "bfp2", "bfp16", "bfp24e7", "bfp8e3"]
FLOAT = ["e8m1", "e4m3", "e5m2", "e2m1", "e3m0", "e8m7", "e8m21", "fp8_e4m3", "fp8_e5m2", "bf16", "fp16", "fp32"]
NAMES = FIXED + BLOCK + FLOAT


def _floats() -> st.SearchStrategy[Float]:
    pairs = st.tuples(st.integers(1, 8), st.integers(0, 23)).filter(
        lambda p: -(2 ** (p[0] - 1)) - p[1] >= -149 and p != (8, 0)
    )
    return pairs.map(lambda p: Float(*p))


def _fixed() -> st.SearchStrategy[FixedPoint]:
    return st.integers(2, 25).flatmap(lambda b: st.integers(b - 128, 126).map(lambda f: FixedPoint(b, f)))


def _blocks() -> st.SearchStrategy[BlockFloat]:
    widths = st.tuples(st.integers(2, 24), st.integers(1, 8)).filter(lambda p: -(2 ** (p[1] - 1)) - p[0] + 2 >= -149)
    shared = st.one_of(st.just("row"), st.just("tensor"), st.integers(1, 100))
    formats = st.tuples(widths, shared).map(lambda t: BlockFloat(t[0][0], t[1], t[0][1]))  # type: ignore[arg-type]
    halves = st.sampled_from([None, torch.bfloat16, torch.float16])
    return st.builds(lambda f, dtype: f if dtype is None else f.within(DtypeLimits.of(dtype)), formats, halves)


def formats() -> st.SearchStrategy[Format]:
    """Return a strategy for formats of all kinds."""
    return st.one_of(_fixed(), _blocks(), _floats(), st.sampled_from(HARDWARE))
