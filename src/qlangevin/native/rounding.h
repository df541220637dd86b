// The laws of quantization/laws.py, operation for operation, on vectors; and the gaps of formats.
#pragma once

#include "philox.h"

namespace {

using qlangevin::Grid;

constexpr float kFar = 0x1p30f, kWidest = 0x1p54f, kNormalBound = 6.660446889261581f;
constexpr double kSlack = 1 + 0x1p-20;

// Half away from zero: with the largest float below 1/2 added, truncation does it, halves and all.
QL_INLINE F nearest_integer(F x) { return whole(x + with_sign(all(0x1.fffffep-2f), x)); }

// x in gaps, bounded; a NaN becomes a number here and is put back at the end.
QL_INLINE F in_gaps(F x, F inverse) { return lesser(greater(x * inverse, all(-kFar)), all(kFar)); }

// Back from gaps to a value in range; -0 becomes 0.
QL_INLINE F onto(F n, F gap, float low, float high) { return lesser(greater(n * gap, all(low)), all(high)) + 0.0f; }

// The same if x, the number that was rounded, may be NaN: then the result is NaN.
QL_INLINE F onto(F n, F gap, float low, float high, F x) {
    const F value = onto(n, gap, low, high);
    return x == x ? value : x;
}

// A number in gaps, whole + rest: an integer, and a rest that keeps its digits beside it. Where it is not split, all of it is rest.
struct Point {
    F whole, rest;
    F y() const { return whole + rest; }
};

QL_INLINE Point split(F y) { return {whole(y), y - whole(y)}; }

// 2^l in the lanes, for exponents of normal numbers.
inline F power_of_two(I l) { return (F)((l + 127) << 23); }

// Powers of two 2^l: numbers near a point are multiples of 1/2^l.
struct Parts {
    F parts, inverse;
    Parts(F parts_, F inverse_) : parts(parts_), inverse(inverse_) {}
    explicit Parts(I l) : Parts(power_of_two(l), power_of_two(-l)) {}
};

// The integer nearest to a point, or the nearest multiple of 1/parts, and what the point has beyond it.
struct Nearest {
    F n, r;
    explicit Nearest(const Point &p) : Nearest(p, nearest_integer(p.rest)) {}
    Nearest(const Point &p, const Parts &of) : Nearest(p, nearest_integer(p.rest * of.parts) * of.inverse) {}

  private:
    Nearest(const Point &p, F offset) : n(p.whole + offset), r(p.rest - offset) {}
};

// -1 where x is negative, else 1.
QL_INLINE F sign_of(F x) { return with_sign(all(1.0f), x); }

// Masks that have these probabilities for h, uniform between -1/2 and 1/2; what is beyond 1/2 is at the other end.
QL_INLINE I picks(F p, F h) { return ((h > 0.0f) & (h < p)) | (h < p - 1.0f); }

// n moved by one, up with probability p_up, down with probability p_down.
QL_INLINE F moved(F n, F p_down, F p_up, F h) {
    const I up = picks(p_up, h), down = picks(p_down, -h);
    return n + (one_where(up) - one_where(down & ~up));
}

// Stochastic rounding: `settle` with nothing to add. The neighbour on the other side of n + r is taken if h is between 0 and r.
QL_INLINE F settle_stochastic(const Nearest &at, F h) {
    return sum_where(is_less(h * (h - at.r), F{}), at.n, sign_of(h));
}

// n + r with variance s, or what stochastic rounding has if that is more.
QL_INLINE F spread(const Nearest &at, F s, F h) {
    const F side = magnitude(at.r);
    const F extra = lesser(positive(s - side * (1.0f - side)), 1.0f - side) * 0.5f;
    return moved(at.n, positive(-at.r) + extra, positive(at.r) + extra, h);
}

// The same for s <= 0.7: the probabilities are less than 1 together, so that |h| is compared with that of the side that h is on, and
// with what that of the other has beyond 1/2.
QL_INLINE F spread_little(const Nearest &at, F s, F h) {
    const F side = magnitude(at.r), extra = positive(s - side * (1.0f - side)) * 0.5f, size = magnitude(h), sign = sign_of(h);
    const F towards = times_sign(at.r, h);  // r, or -r if h is negative
    const Mask there = is_less(size, positive(towards) + extra), back = is_less(1.0f - (positive(-towards) + extra), size);
    return sum_where(back, sum_where(there, at.n, sign), -sign);
}

// Q^vc on the integers, both neighbours one away: three outcomes; or Gaussian noise first; or either, lane by lane.
QL_INLINE F settle_discrete(const Point &p, F s, F h) { return spread(Nearest(p), s, h); }

// The same for s <= 1/4: (s - |r| (1 - |r|)) is at most 1 - |r|, and neither probability exceeds 1/2. One comparison does: |h| with
// the probability of the side that h is on.
QL_INLINE F settle_quiet(const Nearest &at, F s, F h) {
    const F side = magnitude(at.r), extra = positive(s - side * (1.0f - side)) * 0.5f;
    const F towards = times_sign(at.r, h);  // r, or -r if h is negative
    return sum_where(is_less(magnitude(h), positive(towards) + extra), at.n, sign_of(h));
}

QL_INLINE F settle_gaussian(const Point &p, F s, F h, F xi) {
    return settle_quiet(Nearest(Point{p.whole, p.rest + root(positive(s - 0.25f)) * xi}), all(0.25f), h);
}

QL_INLINE F settle(const Point &p, F s, I gaussian, F h, F xi) {
    return gaussian ? settle_gaussian(p, s, h, xi) : settle_discrete(p, s, h);
}

// The same where all that exceeds v_0 has room for Gaussian noise; most vectors have no lane that does not.
QL_INLINE F settle_mixed(const Point &p, F s, F h, F xi) {
    const I gaussian = s > 0.25f;
    return any(~gaussian) ? settle(p, s, gaussian, h, xi) : settle_gaussian(p, s, h, xi);
}

// Probabilities of n - below and n + above, with mean n + r and variance s: `outcomes` of laws.py where at most one of the two
// distances is 2 and not 1. Then a division is by 2, 3 or 6.
struct Outcomes {
    F below, above, down, up;
    Outcomes(F r, F s, F below_, F above_) : below(below_), above(above_) {
        const F plus = positive(r), minus = positive(-r);
        const F least = plus * (above - plus) + minus * (below - minus);
        const F to_above = plus * (1.5f - 0.5f * above), to_below = minus * (1.5f - 0.5f * below);
        const F extra = lesser(positive(s - least), (1.0f - to_above - to_below) * (below * above));
        const I far_above = above == 2.0f, far_below = below == 2.0f;
        const F two = extra * 0.5f, three = extra / 3.0f, six = three * 0.5f;
        up = to_above + (far_above ? six : far_below ? three : two);
        down = to_below + (far_below ? six : far_above ? three : two);
    }
};

// The same without Gaussian part where the neighbour of ±wide_at on the far side is two away.
inline F settle_wide(const Nearest &at, F s, F h, float wide_at) {
    if (!any(magnitude(at.n) == wide_at)) return spread(at, s, h);  // no division
    const F above = at.n == wide_at ? all(2.0f) : all(1.0f), below = at.n == -wide_at ? all(2.0f) : all(1.0f);
    const Outcomes o(at.r, s, below, above);
    return at.n + (picks(o.up, h) ? above : picks(o.down, -h) ? -below : F{});
}

QL_INLINE F reaches(F y, F s) { return magnitude(y) + root(s) * kNormalBound + 1.5f; }

inline I feasible(const Nearest &at, F s, float wide_at) {
    const F r = at.r * (at.n < 0.0f ? all(-1.0f) : all(1.0f));
    return s <= (1.0f + r) * (1.0f + (magnitude(at.n) == wide_at ? all(1.0f) : F{}) - r);
}

// True if the law around a point may leave the codes -top .. top.
inline I risky(const Point &p, F s, float top) {
    const Nearest at(p);
    const F side = magnitude(at.r);
    const I gaussian = (s > 0.25f) & (reaches(p.y(), s) <= top);
    const I outward = (at.r * at.n > 0.0f) | (s > side * (1.0f - side));
    return ~gaussian & ~(feasible(at, s, kFar) & (magnitude(at.n) + (outward ? all(1.0f) : F{}) <= top));
}

// ---- exponents

// floor(log2 x) for x >= 0; very negative at zero, 127 at infinity.
inline int binade(float x) {
    const uint32_t bits = as_bits(x);
    if (bits == 0) return -1000;
    if (bits < 0x00800000u) return binade(x * 0x1p64f) - 64;
    return bits >= 0x7f800000u ? 127 : int(bits >> 23) - 127;
}

// The least e with x <= 2^e, near enough at zero.
inline int ceil_log2(float x) { return binade(x) + ((as_bits(x < 0x1p-126f ? x * 0x1p64f : x) & 0x7fffffu) != 0); }

inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

inline int lesser_of(int a, int b) { return a < b ? a : b; }
inline int greater_of(int a, int b) { return a > b ? a : b; }

inline float power_of_two(int e) { return e >= -126 ? as_float(uint32_t(e + 127) << 23) : as_float(1u << (e + 149)); }

// A gap 2^e in the form the loops want it. Below 2^-100 it has no normal inverse, so numbers are lifted by 2^64 first.
struct Gap {
    float gap, lift, inverse;
    explicit Gap(int e)
        : gap(power_of_two(e)), lift(e < -100 ? 0x1p64f : 1.0f), inverse(power_of_two(e < -100 ? -e - 64 : -e)) {}
    F of(F x) const { return in_gaps(x * lift, all(inverse)); }
    F variance_of(F v) const { return lesser(v * lift * inverse * lift * inverse, all(kWidest)); }
};

// The same for an exponent in each lane. `down` times a multiple of `gap` is the value. A format without numbers as small as
// that (kTiny false) is spared the lifting, here and below.
template <bool kTiny>
struct Gaps {
    F lift, down, gap, inverse;
    Gaps(F gap_, F inverse_) : lift(all(1.0f)), down(all(1.0f)), gap(gap_), inverse(inverse_) {}
    explicit Gaps(I e) {
        const I tiny = kTiny ? e < -100 : I{}, by = tiny & 64;
        lift = tiny ? all(0x1p64f) : all(1.0f);
        down = tiny ? all(0x1p-64f) : all(1.0f);
        gap = (F)((e + by + 127) << 23);
        inverse = (F)((127 - e - by) << 23);
    }
    F of(F x) const { return in_gaps(x * lift, inverse); }
    F variance_of(F v) const { return lesser(v * lift * inverse * lift * inverse, all(kWidest)); }
};

inline I lesser(I a, I b) { return a < b ? a : b; }
inline I greater(I a, I b) { return a > b ? a : b; }

// log2 of the gap of a floating format at x, in each lane; and the least e with x <= 2^e.
template <bool kTiny>
QL_INLINE I float_gap(F x, const Grid &grid) {
    const F size = magnitude(x);
    const I tiny = kTiny ? size < 0x1p-100f : I{};
    const I e = (I)((U)(size * (tiny ? all(0x1p64f) : all(1.0f))) >> 23) - (127 + grid.shift) - (tiny & 64);
    return lesser(greater(e, I{} + grid.min_gap), I{} + grid.max_gap);
}

// `parts` of laws.py on a gap 2^e: how fine numbers n near a point may be if n - 1 and n + 1 are to be on the grid.
QL_INLINE Parts float_parts(const Point &p, I e, const Grid &grid) {
    const F z = greater(magnitude(p.y()) + 1.0f, magnitude(p.rest) * (grid.top * 0x1p-23f));
    const I l = 127 + grid.shift - (I)((U)z >> 23);
    return Parts(lesser(greater(l, I{}), e - grid.min_gap));
}

QL_INLINE I ceil_log2(F x) {
    const I tiny = x < 0x1p-100f;
    return (I)(((U)(x * (tiny ? all(0x1p64f) : all(1.0f))) + 0x7fffffu) >> 23) - 127 - (tiny & 64);
}

// The largest of magnitudes, which are compared as integer bits so that a NaN wins.
inline float greatest(I magnitudes) {
    int32_t one = 0;
    for (int l = 0; l < kWidth; ++l) one = magnitudes[l] > one ? magnitudes[l] : one;
    return as_float(uint32_t(one));
}

inline float largest(const float *x, int64_t n) {
    I most = {};
    lanes(n, [&](int64_t i, auto part) { most = greater(most, (I)magnitude(part.load(x + i))); });
    return greatest(most);
}

// ---- means: `Mean` of laws.py. A weight and its drift, or one number.

// The largest |total| and the largest |move|; a NaN is the largest.
struct Extent {
    float total, move;
};

struct Whole {
    const float *start;
    template <class P> F total(int64_t i, P part) const { return part.load(start + i); }
    // kPlain: no NaN, nothing so far out that it needs bounding, no subnormal gaps.
    template <bool kPlain, class G, class P> QL_INLINE Point in(const G &g, int64_t i, P part) const {
        const F x = part.load(start + i);
        return {F{}, kPlain ? x * g.inverse : g.of(x)};
    }
    template <class G, class P> Point in_wider(const G &g, F half, int64_t i, P part) const {
        return {F{}, g.of(part.load(start + i)) * half};
    }
    static Point divided(const Point &p) { return split(p.rest); }
    Extent extent(int64_t n) const {
        return {largest(start, n), 0.0f};
    }
    Whole operator+(int64_t i) const { return {start + i}; }
};

struct Moved {
    const float *start, *move;
    template <class P> F total(int64_t i, P part) const { return part.load(start + i) + part.load(move + i); }
    template <bool kPlain, class G, class P> QL_INLINE Point in(const G &g, int64_t i, P part) const {
        const F x = part.load(start + i), by = part.load(move + i);
        const F y = kPlain ? x * g.inverse : g.of(x), n = whole(y);
        return {n, (y - n) + (kPlain ? by * g.inverse : g.of(by))};
    }
    // In units of the gap, or of twice the gap where `half` is 1/2 and not 1.
    template <class G, class P> Point in_wider(const G &g, F half, int64_t i, P part) const {
        const F y = g.of(part.load(start + i)) * half, n = whole(y);
        return {n, (y - n) + g.of(part.load(move + i)) * half};
    }
    static Point divided(const Point &p) { return p; }
    Extent extent(int64_t n) const {
        I most = {}, moves = {};
        lanes(n, [&, start = start, move = move](int64_t i, auto part) {
            const F by = part.load(move + i);
            most = greater(most, (I)magnitude(part.load(start + i) + by));
            moves = greater(moves, (I)magnitude(by));
        });
        return {greatest(most), greatest(moves)};
    }
    Moved operator+(int64_t i) const { return {start + i, move + i}; }
};

// ---- blocks: calls block(start, length) for every one of the lines in 0 .. n
template <class Block>
inline void each_block(const Grid &grid, int64_t n, const Block &block) {
    for (int64_t line = 0; line < n; line += grid.line)
        for (int64_t start = 0; start < grid.line; start += grid.size)
            block(line + start, grid.line - start < grid.size ? grid.line - start : grid.size);
}

inline int canonical_gap(float most, const Grid &grid) { return clamp(binade(most) - grid.shift, grid.min_gap, grid.max_gap); }

}  // namespace
