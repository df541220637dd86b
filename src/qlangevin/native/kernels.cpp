// The kernels, compiled once for each instruction set; QL_LEVEL names it. See kernels.h for what each does.
#include "dynamics.h"

namespace {

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

void step_range(const Step &s, int64_t begin, int64_t end, float *scratch) {
    const int64_t n = end - begin;
    float *work = scratch, *rest = scratch + n;
    const Recode recode{work - begin, s.codes, s.weights};
    if (s.accumulator) {
        float *accumulator = s.accumulator + begin, *theta = s.theta ? s.theta + begin : work;
        update(s, s.accumulators, accumulator, rest, begin, n);
        if (s.rounding == kNearest) nearest(accumulator, theta, n, s.weights);
        else stochastic(Whole{accumulator}, theta, begin, n, s.weights, s.source, kWeight);
    } else if (s.theta) {
        update(s, s.weights, s.theta + begin, rest, begin, n);
    } else {
        decode_range(recode, begin, end);
        update(s, s.weights, work, rest, begin, n);
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
