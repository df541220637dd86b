// Loops over elements together with their random numbers; and fixed point.
#pragma once

#include "rounding.h"

namespace {

using namespace qlangevin;

// The random numbers of one purpose, a window at a time: blocks begin anywhere, counters at multiples of a tile.
class Bits {
  public:
    enum Kind { kCentered, kNormal, kRest };
    Bits(const Source &source, uint32_t purpose, Kind kind, int64_t end)
        : source_(source), purpose_(purpose), end_(end), narrow_(purpose == kActivation || purpose == kError),
          tile_(narrow_ ? kNarrowTile : kTile),
          tiles_(kind == kNormal ? normal_tiles : kind == kRest ? rest_tiles : narrow_ ? narrow_tiles : centered_tiles) {}

    // Returns the numbers of element `at` and of those after it; lowers `count` to how many are in the window.
    const float *take(int64_t at, int64_t &count) {
        if (at < from_ || at >= to_) {
            from_ = at / tile_ * tile_;
            const int64_t tiles = (end_ - from_ + tile_ - 1) / tile_;
            const int some = int(tiles < kWindow / tile_ ? tiles : kWindow / tile_);
            tiles_(source_, purpose_, uint64_t(from_ / tile_), some, window_);
            to_ = from_ + some * tile_;
        }
        if (count > to_ - at) count = to_ - at;
        return window_ + (at - from_);
    }

    // Returns the number of one element, with all its digits.
    float one(int64_t at) const {
        float tile[kNarrowTile];
        const bool here = at >= from_ && at < to_;
        if (!here) tiles_(source_, purpose_, uint64_t(at / tile_), 1, tile);
        const float h = here ? window_[at - from_] : tile[at % tile_];
        if (!narrow_) return h;
        rest_tiles(source_, rest_purpose(), uint64_t(at / kTile), 1, tile);
        return refine(all(h), all(tile[at % kTile]))[0];
    }

    // Activations and errors: h has 16 of its bits, and where these do not tell on which side of r it lies, it gets the others.
    bool narrow() const { return narrow_; }
    uint32_t rest_purpose() const { return purpose_ + (kActivationRest - kActivation); }
    const Source &source() const { return source_; }
    int64_t end() const { return end_; }

    F sharpen(F h, F r, int64_t at, int64_t count) const {
        const F distance = magnitude(h - r);
        return any_within(distance, 0x1p-17f) ? sharpened(h, distance <= 0x1p-17f, at, count) : h;  // half of h's interval
    }

    // (j + 1/2) 2^-16 and a rest to (j + rest) 2^-16.
    static F refine(F h, F rest) { return (h * 0x1p16f - 0.5f + rest) * 0x1p-16f; }

  private:
    __attribute__((noinline)) F sharpened(F h, I open, int64_t at, int64_t count) const {
        for (int l = 0; l < count; ++l)
            if (open[l]) h[l] = one(at + l);
        return h;
    }

    static constexpr int64_t kWindow = kTogether * kTile;  // 4 KiB: two of these and the data stay in the first-level cache
    const Source &source_;
    const uint32_t purpose_;
    const int64_t end_;
    const bool narrow_;
    const int64_t tile_;
    void (*const tiles_)(const Source &, uint32_t, uint64_t, int, float *);
    int64_t from_ = 0, to_ = 0;
    alignas(64) float window_[kWindow];
};

// Variances: the same for all elements, or one each.
struct Same {
    static constexpr bool kSame = true;
    float value;
    template <class P> F at(int64_t, P) const { return all(value); }
    float greatest(int64_t) const { return value; }
    Same operator+(int64_t) const { return *this; }
};
struct Each {
    static constexpr bool kSame = false;
    const float *values;
    template <class P> F at(int64_t i, P part) const { return part.load(values + i); }
    float greatest(int64_t n) const { return largest(values, n); }
    Each operator+(int64_t i) const { return {values + i}; }
};

// Calls body(i, part, h, xi) for n elements that begin at index `at` of the tensor, a vector at a time.
template <class Body>
QL_INLINE void with_bits(int64_t at, int64_t n, Bits &centered, Bits *normal, const Body &body) {
    for (int64_t i = 0, count; i < n; i += count) {
        count = n - i;
        const float *h = centered.take(at + i, count);
        const float *xi = normal ? normal->take(at + i, count) : h;  // not used if there is no Gaussian part
        lanes(count, [=](int64_t j, auto part) { body(i + j, part, part.load(h + j), part.load(xi + j)); });
    }
}

// Q^s on the integers; ``more`` has further bits of h, or is null if h has them all. `at` is the index of the first lane.
template <class P>
QL_INLINE F draw_stochastic(const Nearest &near, F h, const Bits *more, int64_t at, P part) {
    return settle_stochastic(near, more ? more->sharpen(h, near.r, at, part.count) : h);
}

inline const Bits *more_bits(const Bits &bits) { return bits.narrow() ? &bits : nullptr; }

// ---- fixed point. Loops capture by value, so that the compiler knows that stores do not change what they captured.

void nearest_fixed(const float *x, float *out, int64_t n, const Grid &grid) {
    const Gap g(grid.min_gap);
    lanes(n, [=, low = grid.low, high = grid.high](int64_t i, auto part) {
        const F from = part.load(x + i);
        part.store(out + i, onto(nearest_integer(g.of(from)), all(g.gap), low, high, from));
    });
}

// Calls draw(constant true) if no element is NaN or so far out that it needs bounding: such loops are faster.
template <bool kValue>
struct Constant {
    static constexpr bool value = kValue;
};

template <class M, class Draw>
inline void plainly(M mu, int64_t n, const Gap &g, const Draw &draw) {
    const Extent extent = mu.extent(n);
    if (g.lift == 1.0f && (extent.total + extent.move) * g.inverse < kFar) draw(Constant<true>{});
    else draw(Constant<false>{});
}

template <bool kPlain, class M, class P>
inline void store_fixed(float *out, int64_t i, P part, F code, const Gap &g, float low, float high, M mu) {
    part.store(out + i, kPlain ? onto(code, all(g.gap), low, high) : onto(code, all(g.gap), low, high, mu.total(i, part)));
}

template <class M>
void stochastic_fixed(M x, float *out, int64_t at, int64_t n, const Grid &grid, Bits &centered) {
    const Gap g(grid.min_gap);
    plainly(x, n, g, [&, low = grid.low, high = grid.high, more = more_bits(centered)](auto plain) {
        with_bits(at, n, centered, nullptr, [=](int64_t i, auto part, F h, F) {
            const Nearest near(x.template in<plain.value>(g, i, part));
            store_fixed<plain.value>(out, i, part, draw_stochastic(near, h, more, at + i, part), g, low, high, x);
        });
    });
}

template <class M, class V>
void corrected_fixed(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &centered, Bits &normal) {
    const Gap g(grid.min_gap);
    const bool noisy = g.variance_of(all(v.greatest(n)))[0] > 0.25f;
    plainly(mu, n, g, [&, low = grid.low, high = grid.high](auto plain) {
        if (!noisy)
            with_bits(at, n, centered, nullptr, [=](int64_t i, auto part, F h, F) {
                const Nearest near(mu.template in<plain.value>(g, i, part));
                const F code = settle_quiet(near, g.variance_of(v.at(i, part)), h);
                store_fixed<plain.value>(out, i, part, code, g, low, high, mu);
            });
        else
            with_bits(at, n, centered, &normal, [=](int64_t i, auto part, F h, F xi) {
                const Point p = M::divided(mu.template in<plain.value>(g, i, part));
                const F s = g.variance_of(v.at(i, part));
                const F code = V::kSame ? settle_gaussian(p, s, h, xi) : settle_mixed(p, s, h, xi);
                store_fixed<plain.value>(out, i, part, code, g, low, high, mu);
            });
    });
}

}  // namespace
