// The kernels, compiled once for each instruction set; QL_LEVEL names it. See kernels.h for what each does.
#include "codes.h"
#include "rounding.h"

namespace {

using namespace qlangevin;

// The random numbers of one purpose, a window at a time: blocks begin anywhere, counters at multiples of a tile.
class Bits {
  public:
    Bits(const Source &source, uint32_t purpose, bool normal, int64_t end)
        : source_(source), purpose_(purpose), normal_(normal), end_(end) {}

    // The numbers of element `at` and those after it; `count` is lowered to how many are at hand.
    const float *take(int64_t at, int64_t &count) {
        if (at < from_ || at >= to_) {
            from_ = at / kTile * kTile;
            const int64_t tiles = (end_ - from_ + kTile - 1) / kTile;
            const int some = int(tiles < kWindow / kTile ? tiles : kWindow / kTile);
            (normal_ ? normal_tiles : uniform_tiles)(source_, purpose_, uint64_t(from_ / kTile), some, window_);
            to_ = from_ + some * kTile;
        }
        if (count > to_ - at) count = to_ - at;
        return window_ + (at - from_);
    }

    // The number of one element.
    float one(int64_t at) const {
        if (at >= from_ && at < to_) return window_[at - from_];
        float tile[kTile];
        (normal_ ? normal_tiles : uniform_tiles)(source_, purpose_, uint64_t(at / kTile), 1, tile);
        return tile[at % kTile];
    }

  private:
    static constexpr int64_t kWindow = 1024;  // 4 KiB: two of these and the data stay in the first-level cache
    const Source &source_;
    const uint32_t purpose_;
    const bool normal_;
    const int64_t end_;
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

// ---- fixed point. Loops capture by value: what they hold must not seem to change with what they store.

void nearest_fixed(const float *x, float *out, int64_t n, const Grid &grid) {
    const Gap g(grid.min_gap);
    lanes(n, [=, low = grid.low, high = grid.high](int64_t i, auto part) {
        const F from = part.load(x + i);
        part.store(out + i, onto(nearest_integer(g.of(from)), all(g.gap), low, high, from));
    });
}

void stochastic_fixed(const float *x, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform) {
    const Gap g(grid.min_gap);
    with_bits(at, n, uniform, nullptr, [=, low = grid.low, high = grid.high](int64_t i, auto part, F u, F) {
        const F from = part.load(x + i);
        part.store(out + i, onto(settle_stochastic(g.of(from), u), all(g.gap), low, high, from));
    });
}

template <class V>
void corrected_fixed(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform, Bits &normal) {
    const Gap g(grid.min_gap);
    const float low = grid.low, high = grid.high;
    if (g.variance_of(all(v.greatest(n)))[0] <= 0.25f)
        with_bits(at, n, uniform, nullptr, [=](int64_t i, auto part, F u, F) {
            const F from = part.load(mu + i), s = g.variance_of(v.at(i, part));
            part.store(out + i, onto(settle_discrete(g.of(from), s, u), all(g.gap), low, high, from));
        });
    else
        with_bits(at, n, uniform, &normal, [=](int64_t i, auto part, F u, F xi) {
            const F from = part.load(mu + i), s = g.variance_of(v.at(i, part));
            const F code = V::kSame ? settle_gaussian(g.of(from), s, u, xi) : settle(g.of(from), s, s > 0.25f, u, xi);
            part.store(out + i, onto(code, all(g.gap), low, high, from));
        });
}

// ---- floating point: every element has its own gap

void nearest_float(const float *x, float *out, int64_t n, const Grid &grid) {
    lanes(n, [=, grid = grid](int64_t i, auto part) {
        const F from = part.load(x + i);
        const Gaps g(float_gap(from, grid));
        part.store(out + i, onto(nearest_integer(g.of(from)) * g.gap, g.down, grid.low, grid.high, from));
    });
}

void stochastic_float(const float *x, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform) {
    with_bits(at, n, uniform, nullptr, [=, grid = grid](int64_t i, auto part, F u, F) {
        const F from = part.load(x + i);
        const Gaps g(float_gap(from, grid));
        part.store(out + i, onto(settle_stochastic(g.of(from), u) * g.gap, g.down, grid.low, grid.high, from));
    });
}

template <class V>
void corrected_float(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform, Bits &normal) {
    const float fit = float(kSlack / (double(grid.top) - 1.5));
    with_bits(at, n, uniform, &normal, [=, grid = grid](int64_t i, auto part, F u, F xi) {
        const F from = part.load(mu + i), variance = v.at(i, part), sigma = root(variance);
        const F room = lesser(sigma, (magnitude(from) + sigma * kNormalBound) * fit);
        const I e = lesser(greater(float_gap(from, grid), ceil_log2(room)), I{} + grid.max_gap);
        const Gaps g(e);
        const F y = g.of(from), s = g.variance_of(variance);
        const I gaussian = (s > 0.25f) & (reaches(y, s) <= grid.top);
        const I twice = ~gaussian & ~feasible(y, s, grid.top) & (e < grid.max_gap);
        const F half = twice ? all(0.5f) : all(1.0f);
        const F narrow = settle_wide(y * half, s * (half * half), u, grid.top) / half;
        const F code = gaussian ? settle(y, s, gaussian, u, xi) : narrow;
        part.store(out + i, onto(code * g.gap, g.down, grid.low, grid.high, from));
    });
}

// ---- block floating point

// Calls block(start, length) for every block of the lines in 0 .. n.
template <class Block>
inline void each_block(const Grid &grid, int64_t n, const Block &block) {
    for (int64_t line = 0; line < n; line += grid.line)
        for (int64_t start = 0; start < grid.line; start += grid.size)
            block(line + start, grid.line - start < grid.size ? grid.line - start : grid.size);
}

inline int canonical_gap(float most, const Grid &grid) { return clamp(binade(most) - grid.shift, grid.min_gap, grid.max_gap); }

inline void spoil(float *out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = __builtin_nanf("");
}

void nearest_block(const float *x, float *out, int64_t n, const Grid &grid) {
    each_block(grid, n, [=, grid = grid](int64_t start, int64_t length) {
        const float most = largest(x + start, length);
        if (most != most) return spoil(out + start, length);
        const Gap g(canonical_gap(most, grid));
        const float top = grid.top;
        lanes(length, [=](int64_t i, auto part) {
            const F code = nearest_integer(g.of(part.load(x + start + i)));
            const F below = code > top ? all(top) : code, inside = below < -top ? all(-top) : below;
            part.store(out + start + i, inside * g.gap + 0.0f);
        });
    });
}

// How the elements of one block are drawn on a given gap.
template <class V>
struct Law {
    const float *mu;
    V v;
    float top, low, high;

    template <class P> F y(int64_t i, P part, const Gap &g) const { return g.of(part.load(mu + i)); }
    template <class P> F s(int64_t i, P part, const Gap &g) const { return g.variance_of(v.at(i, part)); }
    template <class P> I at_risk(int64_t i, P part, const Gap &g) const { return risky(y(i, part, g), s(i, part, g), top); }
    F on(F code, const Gap &g) const { return onto(code, all(g.gap), low, high); }
    template <class P> F draw(int64_t i, P part, const Gap &g, F u, F xi) const {
        const F y_ = y(i, part, g), s_ = s(i, part, g);
        return on(settle(y_, s_, (s_ > 0.25f) & (reaches(y_, s_) <= top), u, xi), g);
    }
};

// One block of `_exact_blocks`: n elements that begin at index `at`.
template <class V>
struct Block {
    const Law<V> law;
    float *const out;
    const int64_t at, n;
    const Grid &grid;
    Bits &uniform, &normal;

    bool noisy(const Gap &g) const { return g.variance_of(all(law.v.greatest(n)))[0] > 0.25f; }

    // All on one gap. The cases that need no choice in each lane are worth loops of their own.
    void draw_all(const Gap g, float most) {
        const F s = g.variance_of(all(law.v.greatest(n)));
        const bool fits = (reaches(g.of(all(most)), s) <= grid.top)[0];
        if (s[0] == 0.0f)
            with_bits(at, n, uniform, nullptr, [=, law = law, out = out](int64_t i, auto part, F u, F) {
                part.store(out + i, law.on(settle_stochastic(law.y(i, part, g), u), g));
            });
        else if (s[0] <= 0.25f)
            with_bits(at, n, uniform, nullptr, [=, law = law, out = out](int64_t i, auto part, F u, F) {
                part.store(out + i, law.on(settle_discrete(law.y(i, part, g), law.s(i, part, g), u), g));
            });
        else if (V::kSame && fits)
            with_bits(at, n, uniform, &normal, [=, law = law, out = out](int64_t i, auto part, F u, F xi) {
                part.store(out + i, law.on(settle_gaussian(law.y(i, part, g), s, u, xi), g));
            });
        else
            with_bits(at, n, uniform, &normal, [=, law = law, out = out](int64_t i, auto part, F u, F xi) {
                part.store(out + i, law.draw(i, part, g, u, xi));
            });
    }

    // The largest coordinate at risk, or -1.
    int64_t largest_at_risk(const Gap fine) const {
        float most = -1.0f;
        int64_t m = -1;
        lanes(n, [&, law = law](int64_t i, auto part) {
            const F candidate = law.at_risk(i, part, fine) ? magnitude(part.load(law.mu + i)) : all(-1.0f);
            if (!any(candidate > most)) return;
            for (int l = 0; l < part.count; ++l)
                if (candidate[l] > most) most = candidate[l], m = i + l;
        });
        return m;
    }

    // Whether a coordinate at risk other than m, drawn on the coarse gap, lands outside the fine grid. Those at risk are
    // few: their random numbers are made one at a time.
    bool others_outside(int64_t m, const Gap fine, const Gap coarse) {
        const float limit = grid.top * fine.gap;
        bool outside = false;
        lanes(n, [&, law = law](int64_t i, auto part) {
            const I risk = law.at_risk(i, part, fine);
            if (outside || !any(risk)) return;
            for (int l = 0; l < part.count; ++l)
                if (risk[l] && i + l != m) outside |= __builtin_fabsf(draw_one(i + l, coarse)) > limit;
        });
        return outside;
    }

    float draw_one(int64_t i, const Gap &g) {
        return law.draw(i, Part{1}, g, all(uniform.one(at + i)), all(normal.one(at + i)))[0];
    }

    // The largest coordinate at risk, on the union of both grids if three outcomes there can have its variance.
    float draw_alone(int64_t m, const Gap fine, const Gap coarse, bool outside) {
        const Part one{1};
        const F y = law.y(m, one, fine), s = law.s(m, one, fine);
        const float top = grid.top, n = magnitude(nearest_integer(y))[0];
        const bool possible = feasible(y, s, top + 1)[0] && (n == top + 1 ? n + 2 : n) <= 2 * top;
        if (outside || !possible) return draw_one(m, coarse);
        return law.on(settle_wide(y, s, all(uniform.one(at + m)), top + 1), fine)[0];
    }

    // Coordinates at risk are drawn first, on the coarse gap; the block is fine unless one of them lands outside.
    void draw_carefully(int64_t m, float most, const Gap fine, const Gap coarse) {
        bool outside = others_outside(m, fine, coarse);
        const float alone = draw_alone(m, fine, coarse, outside);
        outside |= __builtin_fabsf(alone) > grid.top * fine.gap;
        if (outside) draw_all(coarse, most);
        else draw_mixed(fine, coarse);
        out[m] = alone;
    }

    void draw_mixed(const Gap fine, const Gap coarse) {
        with_bits(at, n, uniform, noisy(fine) ? &normal : nullptr, [=, law = law, out = out](int64_t i, auto part, F u, F xi) {
            const I wide = law.at_risk(i, part, fine);
            const F value = law.draw(i, part, fine, u, xi);
            part.store(out + i, any(wide) ? (wide ? law.draw(i, part, coarse, u, xi) : value) : value);
        });
    }

    void round() {
        const float most = largest(law.mu, n), top = grid.top, sigma = __builtin_sqrtf(law.v.greatest(n));
        if (most != most) return spoil(out, n);
        const float biggest = most * float(kSlack / (double(top) - 0.75)), spread = sigma * 1.1547006f;
        const float three = biggest > spread ? biggest : spread;
        const float noisy = top > 1.0f ? (most + sigma * kNormalBound) * float(kSlack / (double(top) - 1.5)) : three;
        const float room = sigma == 0.0f ? most / top : noisy < three ? noisy : three;
        const int own = canonical_gap(most, grid), coarse = clamp(ceil_log2(room), own, grid.max_gap);
        const int fine = own > coarse - 1 ? own : coarse - 1;
        const int64_t m = fine < coarse ? largest_at_risk(Gap(fine)) : -1;
        if (m >= 0) draw_carefully(m, most, Gap(fine), Gap(coarse));
        else draw_all(Gap(fine), most);
    }
};

template <class V>
void corrected_block(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform, Bits &normal) {
    each_block(grid, n, [&](int64_t start, int64_t length) {
        const Law<V> law{mu + start, v + start, grid.top, grid.low, grid.high};
        Block<V>{law, out + start, at + start, length, grid, uniform, normal}.round();
    });
}

// ---- all formats: n elements at x, which begin at index `at` of the tensor, to out

void nearest(const float *x, float *out, int64_t n, const Grid &grid) {
    switch (grid.kind) {
        case Grid::kFixed: return nearest_fixed(x, out, n, grid);
        case Grid::kFloat: return nearest_float(x, out, n, grid);
        case Grid::kBlock: return nearest_block(x, out, n, grid);
        default: __builtin_memmove(out, x, std::size_t(n) * sizeof(float));
    }
}

void stochastic(const float *x, float *out, int64_t at, int64_t n, const Grid &grid, const Source &source, uint32_t purpose) {
    Bits uniform(source, purpose, false, at + n);
    switch (grid.kind) {
        case Grid::kFixed: return stochastic_fixed(x, out, at, n, grid, uniform);
        case Grid::kFloat: return stochastic_float(x, out, at, n, grid, uniform);
        case Grid::kBlock: return corrected_block(x, Same{0.0f}, out, at, n, grid, uniform, uniform);
        default: __builtin_memmove(out, x, std::size_t(n) * sizeof(float));
    }
}

// x + sqrt(v) xi: all there is to Q^vc at full precision, and what the naive sampler rounds.
template <class V>
void add_noise(const float *x, V v, float *out, int64_t at, int64_t n, const Source &source) {
    Bits normal(source, kNoise, true, at + n);
    with_bits(at, n, normal, nullptr, [=](int64_t i, auto part, F xi, F) {
        part.store(out + i, part.load(x + i) + root(v.at(i, part)) * xi);
    });
}

template <class V>
void corrected(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, const Source &source) {
    Bits uniform(source, kRounding, false, at + n), normal(source, kNoise, true, at + n);
    switch (grid.kind) {
        case Grid::kFixed: return corrected_fixed(mu, v, out, at, n, grid, uniform, normal);
        case Grid::kFloat: return corrected_float(mu, v, out, at, n, grid, uniform, normal);
        case Grid::kBlock: return corrected_block(mu, v, out, at, n, grid, uniform, normal);
        default: return add_noise(mu, v, out, at, n, source);
    }
}

// ---- what is offered

void quantize_range(const Quantize &q, int64_t begin, int64_t end) {
    const float *x = q.x + begin;
    float *out = q.out + begin;
    const int64_t n = end - begin;
    if (q.rounding == kNearest) return nearest(x, out, n, q.grid);
    if (q.rounding == kStochastic) return stochastic(x, out, begin, n, q.grid, q.source, q.purpose);
    if (q.variances) return corrected(x, Each{q.variances + begin}, out, begin, n, q.grid, q.source);
    return corrected(x, Same{q.variance}, out, begin, n, q.grid, q.source);
}

// The update of one range in place, on the grid of the weights or of their accumulator.
void update(const Step &s, const Grid &grid, float *theta, float *mu, int64_t begin, int64_t n) {
    const float *g = s.gradient + begin;
    if (s.gradients.kind != Grid::kNone) {
        stochastic(g, mu, begin, n, s.gradients, s.source, kGradient);
        g = mu;
    }
    lanes(n, [=, sign = s.maximize ? -1.0f : 1.0f, lr = s.lr, decay = s.weight_decay](int64_t i, auto part) {
        const F at = part.load(theta + i);
        part.store(mu + i, at - lr * (sign * part.load(g + i) + decay * at));
    });
    if (s.rounding == kCorrected) return corrected(mu, Same{s.variance}, theta, begin, n, grid, s.source);
    if (s.variance > 0.0f) add_noise(mu, Same{s.variance}, mu, begin, n, s.source);
    if (s.rounding == kNearest) return nearest(mu, theta, n, grid);
    stochastic(mu, theta, begin, n, grid, s.source, kRounding);
}

void step_range(const Step &s, int64_t begin, int64_t end, float *scratch) {
    const int64_t n = end - begin;
    float *mu = scratch, *work = scratch + n;
    const Recode recode{work - begin, s.codes, s.weights};
    if (s.accumulator) {
        float *accumulator = s.accumulator + begin, *theta = s.theta ? s.theta + begin : work;
        update(s, s.accumulators, accumulator, mu, begin, n);
        if (s.rounding == kNearest) nearest(accumulator, theta, n, s.weights);
        else stochastic(accumulator, theta, begin, n, s.weights, s.source, kWeight);
    } else if (s.theta) {
        update(s, s.weights, s.theta + begin, mu, begin, n);
    } else {
        decode_range(recode, begin, end);
        update(s, s.weights, work, mu, begin, n);
    }
    if (!s.theta) encode_range(recode, begin, end);
}

void random_range(const Source &source, uint32_t purpose, bool normal, float *out, int64_t begin, int64_t end) {
    Bits bits(source, purpose, normal, end);
    for (int64_t at = begin, count; at < end; at += count) {
        count = end - at;
        const float *drawn = bits.take(at, count);
        __builtin_memcpy(out + at, drawn, std::size_t(count) * sizeof(float));
    }
}

bool finite_range(const float *x, int64_t begin, int64_t end) { return largest(x + begin, end - begin) < __builtin_inff(); }

}  // namespace

#define QL_JOIN(a, b) a##b
#define QL_NAME(level) QL_JOIN(kernels_, level)
#define QL_TEXT(level) #level
#define QL_STRING(level) QL_TEXT(level)

namespace qlangevin {
extern const Kernels QL_NAME(QL_LEVEL);
const Kernels QL_NAME(QL_LEVEL) = {QL_STRING(QL_LEVEL), quantize_range, step_range,  encode_range,
                                   decode_range,        random_range,   finite_range};
}  // namespace qlangevin
