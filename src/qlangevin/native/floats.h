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

// ---- The same for gaps far from both ends of the exponents' range, where nothing needs lifting, bounding or clipping, and gaps are
// floats rather than exponents. Vectors with other numbers are rare, and go the way above.

constexpr uint32_t kBinade = 0x7f800000u;

QL_INLINE F power_below(F x) { return (F)((U)x & kBinade); }  // the greatest power of two <= x, for x >= 2^-126
QL_INLINE F power_above(F x) { return (F)(((U)x + 0x7fffffu) & kBinade); }  // the least >= x
QL_INLINE F inverse_power(F x) { return (F)(0x7f000000u - (U)x); }

// Gaps of the loop below, and how far a rest may be from zero so that 1/parts is the gap of floats there: see `parts` of laws.py.
struct PlainGaps {
    float least, most, rest;
    explicit PlainGaps(const Grid &grid)
        : least(power_of_two(greater_of(grid.min_gap + grid.shift, -60))), most(power_of_two(lesser_of(grid.max_gap - 2, 60))),
          rest(0x1p22f / grid.top) {}
};

// Gaussian noise of standard deviation sqrt(s - 1/4), with a variance for each element.
struct EachNoise {
    PlainGaps gaps;
    F sigma(F v) const { return root(v); }
    Mask has(F gap) const { return both(is_within(all(gaps.least), gap), is_within(gap, all(gaps.most))); }
    Mask exceeds(F s, F gap) const { return both(is_less(all(0.25f), s), has(gap)); }
    F deviation(F s, F) const { return root(positive(s - 0.25f)); }
};

// With one variance few gaps have a Gaussian part: those below 2 σ that noise does not exceed. A table has them all.
struct SameNoise {
    Table deviations;
    float root_, most, limit = 0.0f;
    SameNoise(Same v, float gap, const PlainGaps &gaps) : root_(__builtin_sqrtf(v.value)), most(gaps.most) {
        for (int k = 0; k < 16; ++k, gap *= 2.0f) {
            const float inverse = 1.0f / gap, s = v.value * inverse * inverse;
            deviations.entries[as_bits(gap) >> 23 & 15u] = __builtin_sqrtf(s > 0.25f ? s - 0.25f : 0.0f);
            if (s > 0.25f) limit = gap * 2.0f;
        }
    }
    F sigma(F) const { return all(root_); }
    Mask has(F gap) const { return is_within(gap, all(most)); }  // the noise alone makes it `least`
    Mask exceeds(F, F gap) const { return is_less(gap, all(limit)); }
    F deviation(F, F gap) const { return deviations[(U)gap >> 23]; }
};

// The least gap that noise of a variance allows: that of a weight at zero.
inline float gap_of_noise(float v, float fit) {
    const float sigma = __builtin_sqrtf(v), reach = sigma * kNormalBound * fit;
    return as_float((as_bits(sigma < reach ? sigma : reach) + 0x7fffffu) & kBinade);
}

// Returns true if the loop below is worth it.
inline bool plain_noise(Each, const Grid &grid, float) { return grid.shift <= 10; }
inline bool plain_noise(Same v, const Grid &grid, float fit) {
    const PlainGaps gaps(grid);
    return grid.shift <= 10 && gap_of_noise(v.value, fit) >= gaps.least && __builtin_sqrtf(v.value) * 2.0f <= gaps.most;
}

inline EachNoise noise_of(Each, const PlainGaps &gaps, float) { return {gaps}; }
inline SameNoise noise_of(Same v, const PlainGaps &gaps, float fit) { return {v, gap_of_noise(v.value, fit), gaps}; }

// The number near a point with noise: on multiples of 1/parts, see `parts` of laws.py.
QL_INLINE Nearest nearest_part(const Point &x, float unit) {
    const F inverse = lesser(power_below(magnitude(x.y()) + 1.0f) * unit, all(1.0f));
    return Nearest(x, Parts(inverse_power(inverse), inverse));
}

// Q^vc of one vector, where all lanes have a Gaussian part, or few do. A lane has one if and only if its variance exceeds v_0 on the
// least gap >= reach, which is its gap then: gaps of floats at the mean are not wider, and σ is between that and its half, or beyond it.
template <class M, class V, class Noise>
struct PlainFloats {
    M mu;
    V v;
    Noise noise;
    PlainGaps gaps;
    float fit, unit, top;

    template <class P> QL_INLINE F draw(int64_t i, P part, F h, F xi, const Grid &grid) const {
        const F size = magnitude(mu.total(i, part)), variance = v.at(i, part), sigma = noise.sigma(variance);
        const F reach = (size + sigma * kNormalBound) * fit, gap = power_above(reach);
        const F inverse = inverse_power(gap), s = variance * inverse * inverse;
        if (!in_all(noise.exceeds(s, gap))) return draw_mixed(i, part, h, xi, grid, size, variance, sigma, reach);
        const Point p = point(i, part, gap, inverse);
        if (!in_all(is_within(magnitude(p.rest), all(gaps.rest)))) return draw_rare_float(mu, v, grid, fit, i, part, h, xi);
        const Point x = {p.whole, p.rest + noise.deviation(s, gap) * xi};
        return settle_quiet(nearest_part(x, unit), all(0.25f), h) * gap + 0.0f;
    }
    template <class P>
    QL_INLINE_WITH_REGISTERS F draw_mixed(int64_t i, P part, F h, F xi, const Grid &grid, F size, F variance, F sigma, F reach) const {
        const F gap = greater(power_below(size) * unit, power_above(lesser(sigma, reach))), inverse = inverse_power(gap);
        const Point p = point(i, part, gap, inverse);
        const F s = variance * inverse * inverse;
        const Mask gaussian = both(noise.exceeds(s, gap), is_within(reach, gap));
        const Mask plain = both(noise.has(gap), is_within(magnitude(p.rest), all(gaps.rest)));
        const Nearest near = nearest_part({p.whole, p.rest + choose(gaussian, noise.deviation(s, gap) * xi, F{})}, unit);
        if (!in_all(plain) || in_any_but(is_less(all(0.7f), s), gaussian) || in_any(is_equal(magnitude(near.n), all(top))))
            return draw_rare_float(mu, v, grid, fit, i, part, h, xi);
        return spread_little(near, choose(gaussian, all(0.25f), s), h) * gap + 0.0f;
    }

  private:
    template <class P> QL_INLINE Point point(int64_t i, P part, F gap, F inverse) const {
        return M::divided(mu.template in<true>(Gaps<false>(gap, inverse), i, part));
    }
};

template <class M, class V>
void corrected_plain_float(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, float fit, Bits &centered, Bits &normal) {
    const PlainGaps gaps(grid);
    const auto noise = noise_of(v, gaps, fit);
    const PlainFloats<M, V, decltype(noise_of(v, gaps, fit))> law{mu, v, noise, gaps, fit, 2.0f / grid.top, grid.top};
    with_bits(at, n, centered, &normal, [=, &grid](int64_t i, auto part, F h, F xi) {
        part.store(out + i, law.draw(i, part, h, xi, grid));
    });
}

template <bool kTiny, class M, class V>
void corrected_float(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &centered, Bits &normal) {
    const float fit = float(kSlack / (double(grid.top) - 0.5));
    if (plain_noise(v, grid, fit)) return corrected_plain_float(mu, v, out, at, n, grid, fit, centered, normal);
    with_bits(at, n, centered, &normal, [=, grid = grid](int64_t i, auto part, F h, F xi) {
        part.store(out + i, draw_float<kTiny>(mu, v, grid, fit, i, part, h, xi));
    });
}

}  // namespace
