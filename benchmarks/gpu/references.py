"""Kernels to compare with: normal numbers as `torch.randn` draws them, and a step of plain SGD in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

__all__ = ["SGD", "Reference", "randn"]


@triton.jit
def randn_kernel(
    out, n, seed0, seed1, offset, TURNS: tl.constexpr, SIN: tl.constexpr, COS: tl.constexpr, OPERANDS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write normal numbers: Philox4x32-10 and Box-Muller with the GPU's own sine and cosine, four numbers a thread, as curand."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c0 = index.to(tl.uint32)
    c1 = c0 * 0 + offset.to(tl.uint32)
    c2, c3 = c0 * 0, c0 * 0
    k0, k1 = seed0.to(tl.uint32), seed1.to(tl.uint32)
    for _ in tl.static_range(10):
        low0, high0 = c0 * 0xD2511F53, tl.umulhi(c0, 0xD2511F53)
        low1, high1 = c2 * 0xCD9E8D57, tl.umulhi(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    for pair in tl.static_range(2):
        a = c0 if pair == 0 else c2
        b = c1 if pair == 0 else c3
        u = a.to(tl.float32) * 2.3283064e-10 + 1.1641532e-10
        angle = b.to(tl.float32) * (2.3283064e-10 if TURNS else 1.4629181e-09) + 1.1641532e-10
        rho = tl.sqrt(-2.0 * tl.log(u))
        sine = tl.inline_asm_elementwise(SIN, OPERANDS, [angle], dtype=tl.float32, is_pure=True, pack=1)
        cosine = tl.inline_asm_elementwise(COS, OPERANDS, [angle], dtype=tl.float32, is_pure=True, pack=1)
        first = index + 2 * pair * n
        tl.store(out + first, rho * sine, mask=first < 4 * n)
        tl.store(out + first + n, rho * cosine, mask=first + n < 4 * n)


@triton.jit
def sgd_kernel(theta, gradient, n, lr, weight_decay, BLOCK: tl.constexpr):
    """Take a step of SGD with weight decay, in place."""
    i = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * 4
    i = tl.reshape(i[:, None] + tl.arange(0, 4)[None, :], [4 * BLOCK])
    inside = i < n
    t = tl.load(theta + i, mask=inside)
    g = tl.load(gradient + i, mask=inside)
    tl.store(theta + i, t - lr * (g + weight_decay * t), mask=inside)


@dataclass(frozen=True)
class Reference:
    """A `Specialisation`."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    elements_per_program: int
    bytes_per_element: float
    num_warps: int = 4
    passes: int = 1


def randn(target: str) -> Reference:
    """Return the kernel of normal numbers for a GPU: it has its sine by one instruction, NVIDIA's of radians, AMD's of turns."""
    amd = target.startswith("gfx")
    constants = {
        "TURNS": amd, "BLOCK": 256,
        "SIN": "v_sin_f32 $0, $1" if amd else "sin.approx.ftz.f32 $0, $1;",
        "COS": "v_cos_f32 $0, $1" if amd else "cos.approx.ftz.f32 $0, $1;",
        "OPERANDS": "=v,v" if amd else "=f,f",
    }  # fmt: skip
    signature = {"out": "*fp32", "n": "i32", "seed0": "i32", "seed1": "i32", "offset": "i32"}
    return Reference("torch.randn", randn_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, 1024, 4)


SGD = Reference(
    "SGD in FP32", sgd_kernel,
    {"theta": "*fp32", "gradient": "*fp32", "n": "i32", "lr": "fp32", "weight_decay": "fp32", "BLOCK": "constexpr"},
    {"BLOCK": 256}, 1024, 12,
)  # fmt: skip
