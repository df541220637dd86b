// Floating point: every element has a gap of its own.
#pragma once

#include "draw.h"

namespace {

template <bool kTiny>
void nearest_float(const float *x, float *out, int64_t n, const Grid &grid) {
    lanes(n, [=, grid = grid](int64_t i, auto part) {
        const F from = part.load(x + i);
        const Gaps<kTiny> g(float_gap<kTiny>(from, grid));
        part.store(out + i, onto(nearest_integer(g.of(from)) * g.gap, g.down, grid.low, grid.high, from));
    });
}

template <bool kTiny, class M>
void stochastic_float(M x, float *out, int64_t at, int64_t n, const Grid &grid, Bits &centered) {
    with_bits(at, n, centered, nullptr, [=, grid = grid, more = more_bits(centered)](int64_t i, auto part, F h, F) {
        const F total = x.total(i, part);
        const Gaps<kTiny> g(float_gap<kTiny>(total, grid));
        const Nearest near(x.template in<false>(g, i, part));
        part.store(out + i, onto(draw_stochastic(near, h, more, at + i, part) * g.gap, g.down, grid.low, grid.high, total));
    });
}

// The gap of a law of floats in each lane, 2^e, and the mean and the variance in gaps; `widened` doubles some gaps.
struct FloatLaw {
    I e;
    Point p;
    F s, doubled;  // 2 where the gap has been doubled, else 1
};

// Three outcomes may be too narrow for more than 3/4 of a squared gap; twice the gap is enough.
template <bool kTiny, class M, class P>
__attribute__((noinline)) FloatLaw widened(const FloatLaw &law, I gaussian, M mu, const Gaps<kTiny> &g, const Grid &grid, int64_t i,
                                           P part) {
    const Nearest near(law.p, float_parts(law.p, law.e, grid));
    const I twice = ~gaussian & ~feasible(near, law.s, grid.top) & (law.e < grid.max_gap);
    const F half = twice ? all(0.5f) : all(1.0f);
    return {law.e - twice, M::divided(mu.in_wider(g, half, i, part)), law.s * (half * half), twice ? all(2.0f) : all(1.0f)};  // a mask that is true is -1
}

// Q^vc of one vector, for any numbers: `Float.law` of quantization/floating_point.py.
template <bool kTiny, class M, class V, class P>
QL_INLINE F draw_float(M mu, V v, const Grid &grid, float fit, int64_t i, P part, F h, F xi) {
    const F total = mu.total(i, part), variance = v.at(i, part), sigma = root(variance);
    const F reach = (magnitude(total) + sigma * kNormalBound) * fit;
    const I own = float_gap<kTiny>(total, grid);
    const I e = lesser(greater(own, ceil_log2(lesser(sigma, reach))), I{} + grid.max_gap);
    const Gaps<kTiny> g(e);
    FloatLaw law = {e, M::divided(mu.template in<false>(g, i, part)), g.variance_of(variance), all(1.0f)};
    const I gaussian = (law.s > 0.25f) & (reach * g.lift <= g.gap);
    if (any(~gaussian & (law.s > 0.75f))) law = widened(law, gaussian, mu, g, grid, i, part);
    const F noise = root(positive(law.s - 0.25f)) * xi;
    const Point x = {law.p.whole, law.p.rest + (gaussian ? noise : F{})};
    const Nearest near = any(gaussian | (law.e > own)) ? Nearest(x, float_parts(x, law.e, grid)) : Nearest(x);
    const F code = settle_wide(near, gaussian ? all(0.25f) : law.s, h, grid.top) * law.doubled;
    return onto(code * g.gap, g.down, grid.low, grid.high, total);
}

// The same out of line, for vectors that are rare.
template <class M, class V, class P>
__attribute__((noinline)) F draw_rare_float(M mu, V v, const Grid &grid, float fit, int64_t i, P part, F h, F xi) {
    return draw_float<true>(mu, v, grid, fit, i, part, h, xi);
}

// ---- The same for numbers whose gaps are far from both ends of the exponents' range, where nothing needs lifting, bounding or
// clipping, and gaps are floats rather than exponents.

constexpr uint32_t kBinade = 0x7f800000u;

inline F power_below(F x) { return (F)((U)x & kBinade); }                   // the greatest power of two <= x, for x >= 2^-126
inline F power_above(F x) { return (F)(((U)x + 0x7fffffu) & kBinade); }     // the least >= x
inline F inverse_power(F x) { return (F)(0x7f000000u - (U)x); }

inline float least_power_above(float x) { return as_float((as_bits(x) + 0x7fffffu) & kBinade); }

// Standard deviations sqrt(v - Δ²/4) in gaps of the Gaussian part, for gaps of an element.
struct EachNoise {
    EachNoise(Each, float) {}
    F sigma(F v) const { return root(v); }
    Mask exceeds(F s, F) const { return is_less(all(0.25f), s); }
    F deviation(F s, F) const { return root(positive(s - 0.25f)); }
};

// With one variance there are few gaps that have a Gaussian part: less than 2 σ, and not less than `least`. A table has them all.
struct SameNoise {
    Table deviations;
    float root_, limit = 0.0f;
    SameNoise(Same v, float least) : root_(__builtin_sqrtf(v.value)) {
        float gap = least;
        for (int k = 0; k < 16; ++k, gap *= 2.0f) {
            const float inverse = 1.0f / gap, s = v.value * inverse * inverse;
            deviations.entries[as_bits(gap) >> 23 & 15u] = __builtin_sqrtf(s > 0.25f ? s - 0.25f : 0.0f);
            if (s > 0.25f) limit = gap * 2.0f;
        }
    }
    F sigma(F) const { return all(root_); }
    Mask exceeds(F, F gap) const { return is_less(gap, all(limit)); }
    F deviation(F, F gap) const { return deviations[(U)gap >> 23]; }
};

inline EachNoise noise_of(Each v, float least) { return {v, least}; }
inline SameNoise noise_of(Same v, float least) { return {v, least}; }

// The least gap that noise of a variance >= v allows.
inline float least_gap(float v, float fit) {
    const float sigma = __builtin_sqrtf(v), reach = sigma * kNormalBound * fit;
    return least_power_above(sigma < reach ? sigma : reach);
}

template <class M, class V>
bool plain_floats(M mu, V v, int64_t n, const Grid &grid, float fit) {
    const Extent extent = mu.extent(n);
    const float v_least = v.least(n), v_most = v.greatest(n);
    if (!(v_least > 0x1p-110f && v_most < 0x1p100f && extent.total < 0x1p100f) || grid.shift > 10) return false;
    const float gap = least_gap(v_least, fit), reach = (extent.total + __builtin_sqrtf(v_most) * kNormalBound) * fit;
    return gap >= power_of_two(greater_of(grid.min_gap + grid.shift, -60)) && reach <= power_of_two(lesser_of(grid.max_gap - 2, 60)) &&
           extent.move * grid.top <= gap * 0x1p21f;
}

template <class M, class V>
void corrected_plain_float(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, float fit, Bits &centered, Bits &normal) {
    const auto noise = noise_of(v, least_gap(v.least(n), fit));
    const float top = grid.top, unit = 2.0f / top;
    with_bits(at, n, centered, &normal, [=, &grid](int64_t i, auto part, F h, F xi) {
        const F size = magnitude(mu.total(i, part)), variance = v.at(i, part), sigma = noise.sigma(variance);
        const F reach = (size + sigma * kNormalBound) * fit;
        const F gap = greater(power_below(size) * unit, power_above(lesser(sigma, reach)));
        const Gaps<false> g(gap, inverse_power(gap));
        const Point p = M::divided(mu.template in<true>(g, i, part));
        const F s = variance * g.inverse * g.inverse;
        const Mask gaussian = both(noise.exceeds(s, gap), is_within(reach, gap));
        const F by = noise.deviation(s, gap) * xi;
        const bool everywhere = in_all(gaussian);
        const Point x = {p.whole, p.rest + (everywhere ? by : choose(gaussian, by, F{}))};
        const F inverse = lesser(power_below(magnitude(x.y()) + 1.0f) * unit, all(1.0f));  // 1 / parts
        const Nearest near(x, Parts(inverse_power(inverse), inverse));
        F code;
        if (everywhere) code = settle_quiet(near, all(0.25f), h);
        else if (in_any_but(is_less(all(0.75f), s), gaussian) || any(magnitude(near.n) == top)) {
            part.store(out + i, draw_rare_float(mu, v, grid, fit, i, part, h, xi));
            return;
        } else code = spread(near, choose(gaussian, all(0.25f), s), h);
        part.store(out + i, code * gap + 0.0f);
    });
}

template <bool kTiny, class M, class V>
void corrected_float(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &centered, Bits &normal) {
    const float fit = float(kSlack / (double(grid.top) - 0.5));
    if (plain_floats(mu, v, n, grid, fit)) return corrected_plain_float(mu, v, out, at, n, grid, fit, centered, normal);
    with_bits(at, n, centered, &normal, [=, grid = grid](int64_t i, auto part, F h, F xi) {
        part.store(out + i, draw_float<kTiny>(mu, v, grid, fit, i, part, h, xi));
    });
}

}  // namespace
