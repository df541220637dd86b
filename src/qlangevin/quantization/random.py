"""Random numbers as a pure function of (seed, stream, step, purpose, element index).

The generator is Philox4x32 with seven rounds (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy
as 1, 2, 3", SC 2011): a keyed bijection of 128-bit counters, the fewest rounds for which its authors found no
failure in BigCrush. Nothing is stored and nothing advances. Hence the PyTorch and the native path draw the same
bits, the number of threads does not matter, and a resumed run draws what an uninterrupted one would.

Layout. Counters run along lanes so that a vector unit needs no shuffles: element i = 64 t + 16 k + l takes word k of
counter 16 t + l. Normals are Box-Muller pairs from words (0, 1) and (2, 3) of one counter.

Float arithmetic here is a fixed sequence of single IEEE operations on float32 (no fused multiply-add, no library
log or sin), which the native kernels repeat: normals agree to the bit.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["NORMAL_BOUND", "Key", "centered", "normal", "philox", "uniform", "words"]

ROUNDS = 7
WORD = 0xFFFFFFFF
LANES, TILE = 16, 64

# Purposes of a draw: one element of one step may need several independent numbers. Kernels have the same numbers.
ROUNDING, NOISE, CHOICE, GRADIENT, WEIGHT, LEFTOVER, ACTIVATION, ERROR, ACTIVATION_REST, ERROR_REST, COIN, MOMENT = (
    range(12)
)
# Activations and errors are drawn most often. 16 random bits decide nearly all of them; those that follow are a purpose of
# their own, so that kernels need not draw them elsewhere.
NARROW = {ACTIVATION: ACTIVATION_REST, ERROR: ERROR_REST}
STREAM = 255  # deriving another stream

# |normal| never exceeds this: the least uniform is 2^-32. The exact block algorithms rely on it for headroom.
NORMAL_BOUND = math.sqrt(2 * math.log(2.0**32)) + 1e-5


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any], rounds: int = ROUNDS) -> tuple[Any, Any, Any, Any]:
    """Apply Philox4x32 to Python integers or to int64 tensors holding 32-bit words."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57  # 64-bit, wrapping: only the bits count
        c0, c1, c2, c3 = (
            ((product1 >> 32) & WORD) ^ c1 ^ k0,
            product1 & WORD,
            ((product0 >> 32) & WORD) ^ c3 ^ k1,
            product0 & WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


@dataclass(frozen=True)
class Key:
    """Name of a sequence of random numbers: chains differ by stream, the steps of one chain by step."""

    seed: int
    stream: int = 0
    step: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "stream", "step"):
            value = getattr(self, name)
            if type(value) is int and 0 <= value < 2**64:  # the usual case, fast: a step makes a key for each parameter
                continue
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < 2**64:
                raise ValueError(f"{name} must be an integer between 0 and 2^64 - 1, got {value!r}")
            object.__setattr__(self, name, int(value))  # also of NumPy's integers

    def at(self, step: int) -> Key:
        """Return the key of the same stream at another step."""
        return replace(self, step=step)

    def fold(self, index: int) -> Key:
        """Return the key of an independent stream derived from this one, such as one for each parameter."""
        low, high, _, _ = philox((index & WORD, index >> 32 & 0xFFFFFF | STREAM << 24, 0, 0), self.bits)
        return replace(self, stream=low | high << 32)

    @property
    def bits(self) -> tuple[int, int]:
        """The generator's 64-bit key: seed and stream, mixed."""
        counter = (self.stream & WORD, self.stream >> 32, 0, 0)
        return philox(counter, (self.seed & WORD, self.seed >> 32))[:2]


def words(key: Key, count: int, purpose: int = ROUNDING, device: torch.device | str | None = None) -> Tensor:
    """Return the first ``count`` 32-bit words of the sequence, as int64."""
    tiles = -(-count // TILE)
    index = torch.arange(tiles * LANES, dtype=torch.int64, device=device)
    zero = torch.zeros_like(index)
    counter = (index & WORD, (index >> 32) | purpose << 24, zero + (key.step & WORD), zero + (key.step >> 32))
    drawn = torch.stack(philox(counter, key.bits))  # (word, counter)
    return drawn.view(4, tiles, LANES).transpose(0, 1).reshape(-1)[:count]


def uniform(key: Key, count: int, purpose: int = ROUNDING, device: torch.device | str | None = None) -> Tensor:
    """Return float32 numbers between 0 and 1: the middles of 2^23 equal cells, so that u and 1 - u have the same law."""
    return (words(key, count, purpose, device) >> 9).to(torch.float32) * 2.0**-23 + 2.0**-24


def centered(key: Key, count: int, purpose: int = ROUNDING, device: torch.device | str | None = None) -> Tensor:
    """Return float32 numbers h, uniform between -1/2 and 1/2, with all their digits near zero.

    So P(0 < h < p) is p for the smallest p: up to the rounding of float32 there, and to 2^-32. A word is a signed integer, which
    is made odd; h is that times 2^-32. Activations and errors have two numbers in a word, those of 64 words' low halves first,
    each a signed integer j; 32 more bits k are from a purpose of their own: h = (j + (k + 1/2) 2^-32) 2^-16.
    """
    if purpose not in NARROW:
        return (_signed(words(key, count, purpose, device), 32) | 1).to(torch.float32) * 2.0**-32
    halves = words(key, -(-count // (2 * TILE)) * TILE, purpose, device).view(-1, TILE)
    first = _signed(torch.stack((halves & 0xFFFF, halves >> 16), 1).view(-1)[:count], 16)
    rest = (words(key, count, NARROW[purpose], device).to(torch.float32) + 0.5) * 2.0**-32
    return (first.to(torch.float32) + rest) * 2.0**-16


def _signed(x: Tensor, bits: int) -> Tensor:
    """Return integers of some bits, two's complement, with their sign."""
    return x - ((x >> (bits - 1)) << bits)


# Minimax fits on the intervals used below; see `_negative_log` and `normal`.
_LOG = (0.333339125, -0.250013351, 0.199630320, -0.165776476, 0.149152264, -0.142670542, 0.0869833380)
_COS = (-0.499998957, 0.0416562930, -0.00135978230)
_SIN = (-0.166666552, 0.00833217800, -0.000195172994)
_LN2, _SQRT_HALF = 0.69314718, 0.70710677


def _horner(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Return c0 + c1 x + c2 x^2 + ..., one multiplication and one addition at a time."""
    total = torch.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total


def root(x: Tensor) -> Tensor:
    """Return sqrt(x), correctly rounded, by way of float64: torch calls a vector library on some CPUs, which is not."""
    if x.device.type == "mps":  # has no float64
        return x.sqrt()
    return x.double().sqrt().to(x.dtype)


def _negative_log(k: Tensor) -> Tensor:
    """Return -ln u for u = (k + 1/2) / 2^31, with k a 31-bit integer.

    u = 2^e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2), and ln(1 + f) = f - f^2/2 + f^3 P(f). Near u = 1, where
    f would lose its digits, it is taken from the integer 2^31 - 1 - k, which has them all.
    """
    u = k.to(torch.float32) * 2.0**-31 + 2.0**-32
    mantissa, exponent = torch.frexp(u)
    low = mantissa < _SQRT_HALF
    e = (exponent - low.to(exponent.dtype)).to(torch.float32)
    complement = (2**31 - 1 - k).to(torch.float32) * 2.0**-31 + 2.0**-32
    f = torch.where(e == 0, -complement, torch.where(low, mantissa + mantissa, mantissa) - 1.0)
    log = (_horner(_LOG, f) * f - 0.5) * (f * f) + f
    return -(log + e * _LN2)


def normal(key: Key, count: int, purpose: int = NOISE, device: torch.device | str | None = None) -> Tensor:
    """Return standard normal float32 numbers by Box-Muller, at most `NORMAL_BOUND` in magnitude.

    A pair of words (a, b) gives ρ = sqrt(-ln u) from a, and from b two random signs and an angle φ in [-π/4, π/4). The
    pair is ± ρ (cos φ - sin φ), ± ρ (cos φ + sin φ), that is sqrt(-2 ln u) times the cosine and the sine of φ + π/4.
    """
    padded = -(-count // TILE) * TILE
    pairs = words(key, padded, purpose, device).view(-1, 2, 2, LANES)
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    rho = root(_negative_log(a >> 1))
    angle = ((b >> 2) - 2**29).to(torch.float32) * (math.pi * 2.0**-31)
    square = angle * angle
    cosine = _horner(_COS, square) * square + 1.0
    sine = (_horner(_SIN, square) * square + 1.0) * angle
    first = rho * (cosine - sine) * (1 - 2 * (b & 1)).to(torch.float32)
    second = rho * (cosine + sine) * (1 - (b & 2)).to(torch.float32)
    return torch.stack((first, second), 2).view(-1)[:count]
