// The laws of quantization/laws.py, operation for operation, on vectors; and the gaps of formats.
#pragma once

#include "philox.h"

namespace {

using qlangevin::Grid;

constexpr float kFar = 0x1p30f, kWidest = 0x1p54f, kNormalBound = 6.660446889261581f;
constexpr double kSlack = 1 + 0x1p-20;

// Half away from zero: with the largest float below 1/2 added, truncation does it, halves and all.
inline F nearest_integer(F x) { return whole(x + (F)(((U)x & 0x80000000u) | 0x3effffffu)); }

// x in gaps, bounded; a NaN becomes a number here and is put back at the end.
inline F in_gaps(F x, F inverse) { return lesser(greater(x * inverse, all(-kFar)), all(kFar)); }

// Back from gaps to a value in range; -0 becomes 0.
inline F onto(F n, F gap, float low, float high) { return lesser(greater(n * gap, all(low)), all(high)) + 0.0f; }

// The same if x, the number that was rounded, may be NaN: then the result is NaN.
inline F onto(F n, F gap, float low, float high, F x) {
    const F value = onto(n, gap, low, high);
    return x == x ? value : x;
}

// n moved by one, up with probability p_up, down with probability p_down.
inline F moved(F n, F p_down, F p_up, F u) {
    const I up = u >= 1.0f - p_up;
    return n + one_where(up) - one_where((u < p_down) & ~up);
}

// Stochastic rounding of y: the law of `settle` with nothing to add. Whichever neighbour is the nearest, the upper one is
// taken if u >= 1 - f for y = t + f > 0, and if u >= -f for y = t + f < 0, where t is y without its fraction f.
inline F settle_stochastic(F y, F u) {
    const F t = whole(y), above = one_where(y >= 0.0f);
    return (t - 1.0f) + above + one_where(u >= above - (y - t));
}

// n + r with variance s, or what stochastic rounding has if that is more.
inline F spread(F n, F r, F s, F u) {
    const F side = magnitude(r);
    const F extra = lesser(positive(s - side * (1.0f - side)), 1.0f - side) * 0.5f;
    return moved(n, positive(-r) + extra, positive(r) + extra, u);
}

// Q^vc on the integers, both neighbours one away: three outcomes; or Gaussian noise first; or either, lane by lane.
inline F settle_discrete(F y, F s, F u) {
    const F n = nearest_integer(y);
    return spread(n, y - n, s, u);
}

// (1/4 - |r| (1 - |r|) lies between 0 and 1 - |r|: what `spread` bounds needs no bounds here.)
inline F settle_gaussian(F y, F s, F u, F xi) {
    const F start = whole(y), x = (y - start) + root(positive(s - 0.25f)) * xi, offset = nearest_integer(x);
    const F r = x - offset, side = magnitude(r), extra = (0.25f - side * (1.0f - side)) * 0.5f;
    const I up = u >= 1.0f - (positive(r) + extra), down = u < positive(-r) + extra;  // together at most 1/2
    return start + offset + one_where(up) - one_where(down);
}

inline F settle(F y, F s, I gaussian, F u, F xi) {
    return gaussian ? settle_gaussian(y, s, u, xi) : settle_discrete(y, s, u);
}

// The same without Gaussian part where the neighbour of ±wide_at on the far side is two away.
inline F settle_wide(F y, F s, F u, float wide_at) {
    const F n = nearest_integer(y), r = y - n, up = positive(r), down = positive(-r);
    const F above = n == wide_at ? all(2.0f) : all(1.0f), below = n == -wide_at ? all(2.0f) : all(1.0f);
    const F least = up * (above - up) + down * (below - down);
    const F room = (1.0f - up / above - down / below) * (below * above);
    const F extra = lesser(positive(s - least), room);
    const F p_up = up / above + extra / (above * (below + above));
    const F p_down = down / below + extra / (below * (below + above));
    return n + (u >= 1.0f - p_up ? above : u < p_down ? -below : F{});
}

inline F reaches(F y, F s) { return magnitude(y) + root(s) * kNormalBound + 1.5f; }

inline I feasible(F y, F s, float wide_at) {
    const F n = nearest_integer(y), r = (y - n) * (n < 0.0f ? all(-1.0f) : all(1.0f));
    return s <= (1.0f + r) * (1.0f + (magnitude(n) == wide_at ? all(1.0f) : F{}) - r);
}

// True if the law around y may leave the codes -top .. top.
inline I risky(F y, F s, float top) {
    const F n = nearest_integer(y), r = magnitude(y - n);
    const I gaussian = (s > 0.25f) & (reaches(y, s) <= top);
    const I outward = (magnitude(y) > magnitude(n)) | (s > r * (1.0f - r));
    return ~gaussian & ~(feasible(y, s, kFar) & (magnitude(n) + (outward ? all(1.0f) : F{}) <= top));
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
inline I float_gap(F x, const Grid &grid) {
    const F size = magnitude(x);
    const I tiny = kTiny ? size < 0x1p-100f : I{};
    const I e = (I)((U)(size * (tiny ? all(0x1p64f) : all(1.0f))) >> 23) - (127 + grid.shift) - (tiny & 64);
    return lesser(greater(e, I{} + grid.min_gap), I{} + grid.max_gap);
}

inline I ceil_log2(F x) {
    const I tiny = x < 0x1p-100f;
    return (I)(((U)(x * (tiny ? all(0x1p64f) : all(1.0f))) + 0x7fffffu) >> 23) - 127 - (tiny & 64);
}

// The largest magnitude, as integer bits so that a NaN wins.
inline float largest(const float *x, int64_t n) {
    I most = {};
    lanes(n, [&](int64_t i, auto part) { most = greater(most, (I)magnitude(part.load(x + i))); });
    int32_t one = 0;
    for (int l = 0; l < kWidth; ++l) one = most[l] > one ? most[l] : one;
    return as_float(uint32_t(one));
}

// ---- blocks: calls block(start, length) for every one of the lines in 0 .. n
template <class Block>
inline void each_block(const Grid &grid, int64_t n, const Block &block) {
    for (int64_t line = 0; line < n; line += grid.line)
        for (int64_t start = 0; start < grid.line; start += grid.size)
            block(line + start, grid.line - start < grid.size ? grid.line - start : grid.size);
}

inline int canonical_gap(float most, const Grid &grid) { return clamp(binade(most) - grid.shift, grid.min_gap, grid.max_gap); }

}  // namespace
