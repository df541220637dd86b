// The kernels, compiled once for each instruction set; QL_LEVEL names it. See kernels.h for what each does.
#include "blocks.h"
#include "codes.h"
#include "half.h"

namespace {

// ---- all formats: n elements at x, which begin at index `at` of the tensor, to out

inline bool tiny(const Grid &grid) { return grid.min_gap < -100; }

// The same if noise keeps gaps of floats far from the least.
inline bool tiny(const Grid &grid, Same v) { return tiny(grid) && v.value < 0x1p-100f; }
inline bool tiny(const Grid &grid, Each) { return tiny(grid); }

void nearest(const float *x, float *out, int64_t n, const Grid &grid) {
    switch (grid.kind) {
        case Grid::kFixed: return nearest_fixed(x, out, n, grid);
        case Grid::kFloat: return (tiny(grid) ? nearest_float<true> : nearest_float<false>)(x, out, n, grid);
        case Grid::kBlock: return nearest_block(x, out, n, grid);
        default: __builtin_memmove(out, x, std::size_t(n) * sizeof(float));
    }
}

template <class M>
void stochastic(M x, float *out, int64_t at, int64_t n, const Grid &grid, const Source &source, uint32_t purpose) {
    Bits bits(source, purpose, Bits::kCentered, at + n);
    switch (grid.kind) {
        case Grid::kFixed: return stochastic_fixed(x, out, at, n, grid, bits);
        case Grid::kFloat: return (tiny(grid) ? stochastic_float<true, M> : stochastic_float<false, M>)(x, out, at, n, grid, bits);
        case Grid::kBlock: return corrected_block(x, Same{0.0f}, out, at, n, grid, bits, bits);
        default: lanes(n, [=](int64_t i, auto part) { part.store(out + i, x.total(i, part)); });
    }
}

// Adds sqrt(v) xi to x.
template <class V>
void add_noise(const float *x, V v, float *out, int64_t at, int64_t n, const Source &source) {
    Bits normal(source, kNoise, Bits::kNormal, at + n);
    with_bits(at, n, normal, nullptr, [=](int64_t i, auto part, F xi, F) {
        part.store(out + i, part.load(x + i) + root(v.at(i, part)) * xi);
    });
}

// All there is to Q^vc at full precision. A drift is small, so it meets the noise first.
template <class V>
void corrected_none(Whole mu, V v, float *out, int64_t at, int64_t n, const Source &source) {
    add_noise(mu.start, v, out, at, n, source);
}

template <class V>
void corrected_none(Moved mu, V v, float *out, int64_t at, int64_t n, const Source &source) {
    Bits normal(source, kNoise, Bits::kNormal, at + n);
    with_bits(at, n, normal, nullptr, [=](int64_t i, auto part, F xi, F) {
        part.store(out + i, part.load(mu.start + i) + (part.load(mu.move + i) + root(v.at(i, part)) * xi));
    });
}

template <class M, class V>
void corrected(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, const Source &source) {
    if (grid.kind == Grid::kNone) return corrected_none(mu, v, out, at, n, source);
    Bits centered(source, kRounding, Bits::kCentered, at + n), normal(source, kNoise, Bits::kNormal, at + n);
    switch (grid.kind) {
        case Grid::kFixed: return corrected_fixed(mu, v, out, at, n, grid, centered, normal);
        case Grid::kFloat:
            return (tiny(grid, v) ? corrected_float<true, M, V> : corrected_float<false, M, V>)(mu, v, out, at, n, grid, centered, normal);
        default: return corrected_block(mu, v, out, at, n, grid, centered, normal);
    }
}

// ---- the table of kernels, see kernels.h

template <class M>
void quantize_mean(const Quantize &q, M x, float *out, int64_t begin, int64_t n) {
    if (q.rounding == kStochastic) stochastic(x, out, begin, n, q.grid, q.source, q.purpose);
    else if (q.variances) corrected(x, Each{q.variances + begin}, out, begin, n, q.grid, q.source);
    else corrected(x, Same{q.variance}, out, begin, n, q.grid, q.source);
}

bool quantize_range(const Quantize &q, int64_t begin, int64_t end) {
    const float *x = q.x + begin;
    float *out = q.out + begin;
    const int64_t n = end - begin;
    if (q.rounding == kNearest) nearest(x, out, n, q.grid);
    else if (q.move) quantize_mean(q, Moved{x, q.move + begin}, out, begin, n);
    else quantize_mean(q, Whole{x}, out, begin, n);
    if (q.positive)
        lanes(n, [=, positive = q.positive + begin](int64_t i, auto part) {
            part.store(out + i, part.load(positive + i) > 0 ? part.load(out + i) : F{});
        });
    return !q.codes.codes || encode_inside({q.out, q.codes, q.grid}, begin, end);  // while it is in the cache
}

// The update of one range in place, on the grid of the weights or of their accumulator. The drift is kept apart from theta.
void update(const Step &s, const Grid &grid, float *theta, float *drift, int64_t begin, int64_t n) {
    const float *g = s.gradient + begin;
    if (s.gradients.kind != Grid::kNone) {
        stochastic(Whole{g}, drift, begin, n, s.gradients, s.source, kGradient);
        g = drift;
    }
    lanes(n, [=, sign = s.maximize ? -1.0f : 1.0f, rate = -s.lr, decay = s.weight_decay](int64_t i, auto part) {
        part.store(drift + i, rate * (sign * part.load(g + i) + decay * part.load(theta + i)));
    });
    const Moved mu{theta, drift};
    if (s.rounding == kCorrected) return corrected(mu, Same{s.variance}, theta, begin, n, grid, s.source);
    if (s.variance > 0.0f) add_noise(drift, Same{s.variance}, drift, begin, n, s.source);
    if (s.rounding == kStochastic) return stochastic(mu, theta, begin, n, grid, s.source, kRounding);
    lanes(n, [=](int64_t i, auto part) { part.store(drift + i, mu.total(i, part)); });
    nearest(drift, theta, n, grid);
}

void step_range(const Step &s, int64_t begin, int64_t end, float *scratch) {
    const int64_t n = end - begin;
    float *drift = scratch, *work = scratch + n;
    const Recode recode{work - begin, s.codes, s.weights};
    if (s.accumulator) {
        float *accumulator = s.accumulator + begin, *theta = s.theta ? s.theta + begin : work;
        update(s, s.accumulators, accumulator, drift, begin, n);
        if (s.rounding == kNearest) nearest(accumulator, theta, n, s.weights);
        else stochastic(Whole{accumulator}, theta, begin, n, s.weights, s.source, kWeight);
    } else if (s.theta) {
        update(s, s.weights, s.theta + begin, drift, begin, n);
    } else {
        decode_range(recode, begin, end);
        update(s, s.weights, work, drift, begin, n);
    }
    if (!s.theta) encode_range(recode, begin, end);
}

bool relu_with_codes_range(const float *x, const Recode &r, int64_t begin, int64_t end) {
    lanes(end - begin, [=, x = x + begin, y = r.values + begin](int64_t i, auto part) {
        const F from = part.load(x + i);
        part.store(y + i, from < 0.0f ? F{} : from);  // a NaN stays one
    });
    return encode_inside(r, begin, end);
}

void random_range(const Source &source, uint32_t purpose, bool normal, float *out, int64_t begin, int64_t end) {
    Bits bits(source, purpose, normal ? Bits::kNormal : Bits::kCentered, end);
    for (int64_t at = begin; bits.narrow() && at < end; ++at) out[at] = bits.one(at);  // all digits; used by tests alone
    for (int64_t at = bits.narrow() ? end : begin, count; at < end; at += count) {
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
const Kernels QL_NAME(QL_LEVEL) = {QL_STRING(QL_LEVEL), quantize_range,       step_range,   encode_range,
                                   decode_range,        relu_with_codes_range,        encode_exactly_range,
                                   random_range,        finite_range,         widen,        narrow,
                                   finite_half};
}  // namespace qlangevin
