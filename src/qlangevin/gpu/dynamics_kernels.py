"""Kernels of steps that are more than SGLD's: `update` and `update_underdamped` of `sampling.update`, up to the rounding.

    prepare   SGLD: δ and v G of each weight; V' of the preconditioner
    kick      SGHMC: the move of each velocity, and what `follow` needs of the step before the velocity is overwritten
    follow    SGHMC: the move of each weight, given the velocity that was drawn

They work on a table of tensors, see `kept`, and write float32 scratch memory; kernels of `step_kernels` draw from it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..quantization import random
from ..quantization.formats import FLOAT32_MAX
from .elements import NONE, STOCHASTIC, round_element
from .generator import NOISE, centered, normal
from .kept import EXTRA_WIDTH, FIRST_GRID, Extra, load_kept
from .step_kernels import (
    COUNT,
    GRADIENT_BITS,
    NUMEL,
    OTHER,
    find_row,
    is_clear,
    load_gradient,
    load_grid,
    load_source,
    number,
    pointer,
    source_at,
    store_theta,
)

MASK, MOVE, SPREAD, BASE = (tl.constexpr(int(i)) for i in (Extra.MASK, Extra.MOVE, Extra.SPREAD, Extra.BASE))
OLD, GAIN, SCALE_AT, SCALE = (tl.constexpr(int(i)) for i in (Extra.OLD, Extra.GAIN, Extra.SCALE_AT, Extra.SCALE))
FREEZE, VELOCITY_KEY = tl.constexpr(int(Extra.FREEZE)), tl.constexpr(int(Extra.VELOCITY_KEY))
VELOCITY_STEP, THETA = tl.constexpr(int(Extra.VELOCITY_STEP)), tl.constexpr(int(Extra.THETA))
CENTER, MOMENTS, VELOCITY = (tl.constexpr(int(i)) for i in (Extra.CENTER, Extra.MOMENTS, Extra.VELOCITY))
MOMENT_BITS, LARGEST = tl.constexpr(random.MOMENT), tl.constexpr(FLOAT32_MAX)


# ---- parts of a step


@triton.jit
def elements_of_part(row, part, C: tl.constexpr):
    """Return the first element of a program, how many it has, and tiles and lanes of its counters."""
    c = tl.arange(0, C)
    first = part.to(tl.int64) * (4 * C)
    left = tl.minimum(tl.load(row + NUMEL) - first, 4 * C).to(tl.int32)
    return first, left, part * (C // 16) + c // 16, c % 16


@triton.jit
def places_of_word(k, left, C: tl.constexpr):
    """Return (place, inside) of the elements whose random bits are in word k of their counters."""
    c = tl.arange(0, C)
    place = c // 16 * 64 + 16 * k + c % 16
    return place, place < left


@triton.jit
def draw_bits(source, noise_source, tile, lane, noisy, HOW: tl.constexpr):
    """Return the random numbers of Q_G, of V' and of the noise; zeros where they are not used."""
    nothing = (tile * 0).to(tl.float32)
    bits_g = (nothing, nothing, nothing, nothing)
    bits_v, xi = bits_g, bits_g
    if HOW.q_g != NONE:
        bits_g = centered(source, GRADIENT_BITS, tile, lane)
    if HOW.moments is not None:
        bits_v = centered(source, MOMENT_BITS, tile, lane)
    if HOW.naive:
        if noisy:
            xi = normal(noise_source, NOISE, tile, lane)
    return bits_g, bits_v, xi


@triton.jit
def load_scale(row):
    """Return the scale of V: a number in the table, or on the device."""
    scale, at = number(row, SCALE), tl.load(row + SCALE_AT)
    if at != 0:
        scale = tl.load(at.to(tl.pointer_type(tl.float32)))
    return scale


@triton.jit
def is_live(row, source):
    """Return whether V still changes in this step: by its number, which may be counted on the device."""
    step = (source[3].to(tl.int64) << 32) | source[2].to(tl.int64)
    last = tl.load(row + FREEZE)
    return (last < 0) | (step <= last)


@triton.jit
def load_gain(row, first, place, inside, g, h, scale, live, numbers, HOW: tl.constexpr):
    """Return G of elements, and take their gradients into V if it is live."""
    keep, fresh, eps = numbers
    moments = load_kept(row, MOMENTS, first, place, inside, HOW.moments)
    if live:
        scaled = g * scale
        store_moments(row, first + place, inside, keep * moments + fresh * (scaled * scaled), h, HOW.moments)
    return tl.div_rn(1.0, eps + tl.sqrt_rn(moments) * tl.div_rn(1.0, scale))


@triton.jit
def store_moments(row, at, inside, value, h, KEPT: tl.constexpr):
    """Write Q^s of V'."""
    grid = load_grid(row, MOMENTS + FIRST_GRID)
    if KEPT.kind == NONE:
        value = tl.minimum(value, LARGEST)
    else:
        value = round_element(value, value, 0.0, h, value, grid, KEPT.kind, STOCHASTIC, False, KEPT.tiny)
    store_theta(pointer(row, MOMENTS, KEPT.dtype, False), at, inside, value, grid, KEPT.kind, KEPT.codes, KEPT.tiny)


@triton.jit
def load_force(row, first, place, inside, g, sign, decay, pull, HOW: tl.constexpr):
    """Return f = g + λ θ + (γ/N)(θ - w0) of elements."""
    theta = load_kept(row, THETA, first, place, inside, HOW.theta)
    f = sign * g + decay * theta
    if HOW.center is not None:
        f = f + pull * (theta - load_kept(row, CENTER, first, place, inside, HOW.center))
    return f


@triton.jit
def where_moving(row, at, inside, move, v):
    """Return move and variance of elements, zero where the mask holds them."""
    byte = tl.load(pointer(row, MASK, tl.uint8, False) + (at >> 3), mask=inside, other=0).to(tl.int32)
    moving = ((byte >> (at & 7).to(tl.int32)) & 1) != 0
    return tl.where(moving, move, 0.0), tl.where(moving, v, 0.0)


@triton.jit
def store_scratch(row, COLUMN: tl.constexpr, at, inside, value):
    tl.store(pointer(row, COLUMN, tl.float32, True) + at, value, mask=inside)


@triton.jit
def load_scratch(row, COLUMN: tl.constexpr, at, inside):
    return tl.load(pointer(row, COLUMN, tl.float32, True) + at, mask=inside, other=0.0)


@triton.jit
def finish_move(row, at, inside, move, v, xi, noisy, EACH: tl.constexpr, HOW: tl.constexpr):
    """Write the move of elements, and with EACH the variances that Q^vc reads; naive rounding has the noise in the move.

    Return the noise.
    """
    if HOW.masked:
        move, v = where_moving(row, at, inside, move, v)
    noise = xi * 0.0
    if HOW.naive:
        if noisy:
            noise = tl.sqrt_rn(v) * xi
            move = move + noise
    elif EACH:
        store_scratch(row, SPREAD, at, inside, v)
    store_scratch(row, MOVE, at, inside, move)
    return noise


# ---- SGLD


@triton.jit(do_not_specialize=["count"])
def prepare(
    table, flags, count, rate, sign, decay, pull, v, keep, fresh, eps, HOW: tl.constexpr, FLAGGED: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write δ = -lr f G and v G, and with naive rounding δ + sqrt(v G) ξ; take the gradients into V."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, part = find_row(table, count, EXTRA_WIDTH)
        first, left, tile, lane = elements_of_part(row, part, C)
        source, noisy, scale = load_source(row), v > 0.0, load_scale(row)
        same = (tile * 0).to(tl.float32) + v
        live, gradient = is_live(row, source), pointer(row, OTHER, HOW.gradient, False)
        bits_g, bits_v, xi = draw_bits(source, source, tile, lane, noisy, HOW)
        for k in tl.static_range(4):
            place, inside = places_of_word(k, left, C)
            at = first + place
            g = load_gradient(row, gradient, at, inside, bits_g[k], HOW.q_g, HOW.tiny_g)
            move = rate * load_force(row, first, place, inside, g, sign, decay, pull, HOW)
            spread = same
            if HOW.moments is not None:
                gain = load_gain(row, first, place, inside, g, bits_v[k], scale, live, (keep, fresh, eps), HOW)
                move, spread = move * gain, v * gain
            finish_move(row, at, inside, move, spread, xi[k], noisy, HOW.each, HOW)


# ---- SGHMC


@triton.jit
def velocity_source(row):
    """Return key and step of the velocities of a tensor."""
    return source_at(tl.load(row + VELOCITY_KEY), tl.load(row + VELOCITY_STEP), tl.load(row + COUNT))


@triton.jit(do_not_specialize=["count"])
def kick(
    table, flags, count, sign, decay, pull, keep, fresh, eps, fade, kick_by, carry, push, v, HOW: tl.constexpr,
    FLAGGED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the moves of velocities, carry u + push √G f, G, and u; with naive rounding the noise in the place of u."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, part = find_row(table, count, EXTRA_WIDTH)
        first, left, tile, lane = elements_of_part(row, part, C)
        source, noisy, scale = load_source(row), v > 0.0, load_scale(row)
        same = (tile * 0).to(tl.float32) + v
        live, gradient = is_live(row, source), pointer(row, OTHER, HOW.gradient, False)
        bits_g, bits_v, xi = draw_bits(source, velocity_source(row), tile, lane, noisy, HOW)
        for k in tl.static_range(4):
            place, inside = places_of_word(k, left, C)
            at = first + place
            g = load_gradient(row, gradient, at, inside, bits_g[k], HOW.q_g, HOW.tiny_g)
            f = load_force(row, first, place, inside, g, sign, decay, pull, HOW)
            if HOW.moments is not None:
                gain = load_gain(row, first, place, inside, g, bits_v[k], scale, live, (keep, fresh, eps), HOW)
                store_scratch(row, GAIN, at, inside, gain)
                f = f * tl.sqrt_rn(gain)
            u = load_kept(row, VELOCITY, first, place, inside, HOW.velocity)
            store_scratch(row, BASE, at, inside, carry * u + push * f)
            noise = finish_move(row, at, inside, fade * u + kick_by * f, same, xi[k], noisy, HOW.masked, HOW)
            store_scratch(row, OLD, at, inside, noise if HOW.naive else u)


@triton.jit(do_not_specialize=["count"])
def follow(table, flags, count, follow_by, v, HOW: tl.constexpr, FLAGGED: tl.constexpr, C: tl.constexpr):
    """Write the moves of weights, √G (carry u + push √G f + follow e), and their variances."""
    clear = is_clear(flags, FLAGGED)
    if clear:
        row, part = find_row(table, count, EXTRA_WIDTH)
        first, left, tile, lane = elements_of_part(row, part, C)
        noisy, nothing = v > 0.0, (tile * 0).to(tl.float32)
        xi = (nothing, nothing, nothing, nothing)
        if HOW.naive:
            if noisy:
                xi = normal(load_source(row), NOISE, tile, lane)
        for k in tl.static_range(4):
            place, inside = places_of_word(k, left, C)
            at = first + place
            e = load_scratch(row, OLD, at, inside)
            if not HOW.naive:
                drawn = load_kept(row, VELOCITY, first, place, inside, HOW.velocity)
                e = (drawn - e) - load_scratch(row, MOVE, at, inside)
            move = load_scratch(row, BASE, at, inside) + follow_by * e
            spread = nothing + v
            if HOW.moments is not None:
                gain = load_scratch(row, GAIN, at, inside)
                move, spread = move * tl.sqrt_rn(gain), v * gain
            finish_move(row, at, inside, move, spread, xi[k], noisy, HOW.each, HOW)
