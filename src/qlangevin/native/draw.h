// Loops over elements together with their random numbers; and the formats in which every element stands alone.
#pragma once

#include "rounding.h"

namespace {

using namespace qlangevin;

// The random numbers of one purpose, a window at a time: blocks begin anywhere, counters at multiples of a tile.
class Bits {
  public:
    Bits(const Source &source, uint32_t purpose, bool normal, int64_t end)
        : source_(source), purpose_(purpose), end_(end), tile_(is_narrow(purpose) ? kNarrowTile : kTile),
          tiles_(normal ? normal_tiles : is_narrow(purpose) ? narrow_tiles : uniform_tiles) {}

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

    // Returns the number of one element.
    float one(int64_t at) const {
        if (at >= from_ && at < to_) return window_[at - from_];
        float tile[kNarrowTile];
        tiles_(source_, purpose_, uint64_t(at / tile_), 1, tile);
        return tile[at % tile_];
    }

  private:
    static bool is_narrow(uint32_t purpose) { return purpose == kActivation || purpose == kError; }
    static constexpr int64_t kWindow = 1024;  // 4 KiB: two of these and the data stay in the first-level cache
    const Source &source_;
    const uint32_t purpose_;
    const int64_t end_, tile_;
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

// Calls body(i, part, u, xi) for n elements that begin at index `at` of the tensor, a vector at a time.
template <class Body>
inline __attribute__((always_inline)) void with_bits(int64_t at, int64_t n, Bits &uniform, Bits *normal, const Body &body) {
    for (int64_t i = 0, count; i < n; i += count) {
        count = n - i;
        const float *u = uniform.take(at + i, count);
        const float *xi = normal ? normal->take(at + i, count) : u;  // not used if there is no Gaussian part
        lanes(count, [=](int64_t j, auto part) { body(i + j, part, part.load(u + j), part.load(xi + j)); });
    }
}

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

template <class Draw>
inline void plainly(const float *x, int64_t n, const Gap &g, const Draw &draw) {
    const float most = largest(x, n);
    if (g.lift == 1.0f && most * g.inverse < kFar) draw(Constant<true>{});
    else draw(Constant<false>{});
}

void stochastic_fixed(const float *x, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform) {
    const Gap g(grid.min_gap);
    plainly(x, n, g, [&, low = grid.low, high = grid.high](auto plain) {
        with_bits(at, n, uniform, nullptr, [=](int64_t i, auto part, F u, F) {
            const F from = part.load(x + i), code = settle_stochastic(plain.value ? from * g.inverse : g.of(from), u);
            part.store(out + i, plain.value ? onto(code, all(g.gap), low, high) : onto(code, all(g.gap), low, high, from));
        });
    });
}

template <class V>
void corrected_fixed(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform, Bits &normal) {
    const Gap g(grid.min_gap);
    const bool noisy = g.variance_of(all(v.greatest(n)))[0] > 0.25f;
    plainly(mu, n, g, [&, low = grid.low, high = grid.high](auto plain) {
        const auto store = [=](int64_t i, auto part, F code, F from) {
            part.store(out + i, plain.value ? onto(code, all(g.gap), low, high) : onto(code, all(g.gap), low, high, from));
        };
        if (!noisy)
            with_bits(at, n, uniform, nullptr, [=](int64_t i, auto part, F u, F) {
                const F from = part.load(mu + i), y = plain.value ? from * g.inverse : g.of(from);
                store(i, part, settle_discrete(y, g.variance_of(v.at(i, part)), u), from);
            });
        else
            with_bits(at, n, uniform, &normal, [=](int64_t i, auto part, F u, F xi) {
                const F from = part.load(mu + i), y = plain.value ? from * g.inverse : g.of(from);
                const F s = g.variance_of(v.at(i, part));
                store(i, part, V::kSame ? settle_gaussian(y, s, u, xi) : settle(y, s, s > 0.25f, u, xi), from);
            });
    });
}

// ---- floating point: every element has its own gap

template <bool kTiny>
void nearest_float(const float *x, float *out, int64_t n, const Grid &grid) {
    lanes(n, [=, grid = grid](int64_t i, auto part) {
        const F from = part.load(x + i);
        const Gaps<kTiny> g(float_gap<kTiny>(from, grid));
        part.store(out + i, onto(nearest_integer(g.of(from)) * g.gap, g.down, grid.low, grid.high, from));
    });
}

template <bool kTiny>
void stochastic_float(const float *x, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform) {
    with_bits(at, n, uniform, nullptr, [=, grid = grid](int64_t i, auto part, F u, F) {
        const F from = part.load(x + i);
        const Gaps<kTiny> g(float_gap<kTiny>(from, grid));
        part.store(out + i, onto(settle_stochastic(g.of(from), u) * g.gap, g.down, grid.low, grid.high, from));
    });
}

template <bool kTiny, class V>
void corrected_float(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform, Bits &normal) {
    const float fit = float(kSlack / (double(grid.top) - 1.5));
    with_bits(at, n, uniform, &normal, [=, grid = grid](int64_t i, auto part, F u, F xi) {
        const F from = part.load(mu + i), variance = v.at(i, part), sigma = root(variance);
        const F room = lesser(sigma, (magnitude(from) + sigma * kNormalBound) * fit);
        const I e = lesser(greater(float_gap<kTiny>(from, grid), ceil_log2(room)), I{} + grid.max_gap);
        const Gaps<kTiny> g(e);
        const F y = g.of(from), s = g.variance_of(variance);
        const I gaussian = (s > 0.25f) & (reaches(y, s) <= grid.top);
        const I twice = ~gaussian & ~feasible(y, s, grid.top) & (e < grid.max_gap);
        const F half = twice ? all(0.5f) : all(1.0f);
        const F narrow = settle_wide(y * half, s * (half * half), u, grid.top) / half;
        const F code = gaussian ? settle(y, s, gaussian, u, xi) : narrow;
        part.store(out + i, onto(code * g.gap, g.down, grid.low, grid.high, from));
    });
}

}  // namespace
