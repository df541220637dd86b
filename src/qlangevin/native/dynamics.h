// The update of one range of a step: `update` and `update_underdamped` of sampling/update.py, operation for operation.
#pragma once

#include "any_format.h"
#include "codes.h"
#include "half.h"

namespace {

// ---- numbers kept beside the weights

inline bool is_there(const Stored &s) { return s.numbers || s.codes.codes; }

// Reads the elements begin .. begin + n.
void read(const Stored &s, int64_t begin, int64_t n, float *to) {
    if (s.codes.codes) decode_range({to - begin, s.codes, s.grid}, begin, begin + n);
    else if (s.type != kFloat32) widen(static_cast<const uint16_t *>(s.numbers) + begin, s.type, to, n);
    else __builtin_memcpy(to, static_cast<const float *>(s.numbers) + begin, std::size_t(n) * sizeof(float));
}

// Writes numbers on the grid.
void write(const Stored &s, int64_t begin, int64_t n, float *from) {
    if (s.codes.codes) encode_range({from - begin, s.codes, s.grid}, begin, begin + n);
    else if (s.type != kFloat32) narrow(from, s.type, static_cast<uint16_t *>(s.numbers) + begin, n);
    else __builtin_memcpy(static_cast<float *>(s.numbers) + begin, from, std::size_t(n) * sizeof(float));
}

// Sets to zero what does not move: its bit in the mask is 0.
void clear_fixed(const uint8_t *mask, int64_t begin, int64_t n, float *move, float *spread) {
    I place = {};
    for (int j = 0; j < kWidth; ++j) place[j] = 1 << j;
    lanes(n, [=](int64_t i, auto part) {
        // The bits of a vector lie in two bytes, or in three if they do not begin with one.
        const int64_t at = begin + i, first = at / 8, last = (at + part.count - 1) / 8, second = first < last ? first + 1 : last;
        const int32_t word = mask[first] | mask[second] << 8 | mask[last] << 16;
        const I moves = (((I{} + (word >> at % 8)) & place) != 0);
        part.store(move + i, moves ? part.load(move + i) : F{});
        part.store(spread + i, moves ? part.load(spread + i) : F{});
    });
}

// ---- the parts of a step

constexpr float kLargest = 0x1.fffffep127f;  // of float32

// Q_G of the gradient: where it is, or in `rounded`. Its sign is changed later.
const float *round_gradient(const Step &s, float *rounded, int64_t begin, int64_t n) {
    const float *g = s.gradient + begin;
    if (s.gradients.kind == Grid::kNone) return g;
    stochastic(Whole{g}, rounded, begin, n, s.gradients, s.source, kGradient);
    return rounded;
}

// Rounds running means, and keeps them.
void round_moments(const Stored &kept, const Source &source, int64_t begin, int64_t n, float *moments) {
    const Grid &grid = kept.grid;
    stochastic(Whole{moments}, moments, begin, n, grid, source, kMoment);
    if (grid.kind == Grid::kNone)
        lanes(n, [=](int64_t i, auto part) { part.store(moments + i, lesser(part.load(moments + i), all(kLargest))); });
    write(kept, begin, n, moments);
}

// What of a step there is beside the weights, as constants of its loops.
template <bool kCenter, bool kGains>
struct Kind {
    static constexpr bool center = kCenter, gains = kGains;
};

template <class Body>
void with_kind(const Step &s, const Body &body) {
    const bool center = is_there(s.center) && s.pull != 0.0f, gains = is_there(s.moments.values);
    if (center && gains) body(Kind<true, true>{});
    else if (center) body(Kind<true, false>{});
    else if (gains) body(Kind<false, true>{});
    else body(Kind<false, false>{});
}

// The force f = g + λ θ + (γ/N)(θ - w0), the gain G = 1 / (eps + sqrt(V)), and the running mean V of squared gradients that follows.
template <class K>
struct Forces {
    const float *g, *theta, *center;
    float sign, decay, pull, keep, fresh, eps, scale, unscale;
    Forces(const Step &s, const float *g_, const float *theta_, const float *center_)
        : g(g_), theta(theta_), center(center_), sign(s.maximize ? -1.0f : 1.0f), decay(s.weight_decay), pull(s.pull), keep(s.moments.decay),
          fresh(s.moments.fresh), eps(s.moments.eps), scale(s.moments.scale), unscale(s.moments.unscale) {}
    template <class P> QL_INLINE F force(int64_t i, P part, F slope) const {
        const F x = part.load(theta + i), force = sign * slope + decay * x;
        return K::center ? force + pull * (x - part.load(center + i)) : force;
    }
    QL_INLINE F gain(F v) const { return 1.0f / (eps + root(v) * unscale); }
    QL_INLINE F next(F v, F slope) const {
        const F scaled = slope * scale;
        return keep * v + fresh * (scaled * scaled);
    }
};

inline bool in_bytes(const Stored &s) { return s.codes.codes && s.codes.bytes == 1 && s.grid.kind == Grid::kFloat; }

// `with_forces` with V in floats of 8 bits, in one loop: what divides and what rounds are different parts of a processor.
template <class K, class Body>
void with_byte_moments(const Forces<K> &of, const Step &s, int64_t begin, int64_t n, const Body &body) {
    const ByteFloats bytes(s.moments.values.grid);
    int8_t *codes = static_cast<int8_t *>(s.moments.values.codes.codes) + begin;
    const auto one = [=](int64_t i, auto part, F slope, F v) { body(i, part, of.force(i, part, slope), of.gain(v)); };
    if (s.moments.frozen)
        return lanes(n, [=](int64_t i, auto part) { one(i, part, part.load(of.g + i), bytes.decode(part.load(codes + i))); });
    Bits bits(s.source, kMoment, Bits::kCentered, begin + n);
    with_bits(begin, n, bits, nullptr, [=](int64_t i, auto part, F h, F) {
        const F slope = part.load(of.g + i), v = bytes.decode(part.load(codes + i));
        part.store(codes + i, bytes.round(of.next(v, slope), h));
        one(i, part, slope, v);
    });
}

// Calls body(i, part, f, G), without G if there are no gains. Takes the gradient into V, unless that is frozen. What the body stores
// may be where g is.
template <class K, class Body>
void with_forces(K, const Step &s, const float *g, const float *theta, float *center, float *moments, int64_t begin, int64_t n,
                 const Body &body) {
    const Stored &kept = s.moments.values;
    if (K::center) read(s.center, begin, n, center);
    const Forces<K> of(s, g, theta, center);
    if (!K::gains) return lanes(n, [=](int64_t i, auto part) { body(i, part, of.force(i, part, part.load(g + i)), F{}); });
    if (in_bytes(kept)) return with_byte_moments(of, s, begin, n, body);
    read(kept, begin, n, moments);
    lanes(n, [=](int64_t i, auto part) {
        const F slope = part.load(g + i), v = part.load(moments + i);
        part.store(moments + i, of.next(v, slope));
        body(i, part, of.force(i, part, slope), of.gain(v));
    });
    if (!s.moments.frozen) round_moments(kept, s.source, begin, n, moments);
}

// Draws Q(start + move, v) to out, which may be start, by the rounding of the step; move is overwritten. Rounding after the noise
// writes that to `noise`, if it is not null.
template <class V>
void draw(Rounding rounding, const float *start, float *move, V v, float *out, float *noise, const Grid &grid, const Source &source, int64_t begin, int64_t n) {
    const Moved mu{start, move};
    if (rounding == kCorrected) return corrected(mu, v, out, begin, n, grid, source);
    if (v.greatest(n) > 0.0f || noise) {
        Bits normal(source, kNoise, Bits::kNormal, begin + n);
        with_bits(begin, n, normal, nullptr, [=](int64_t i, auto part, F xi, F) {
            const F by = root(v.at(i, part)) * xi;
            if (noise) part.store(noise + i, by);
            part.store(move + i, part.load(move + i) + by);
        });
    }
    if (rounding == kStochastic) return stochastic(mu, out, begin, n, grid, source, kRounding);
    lanes(n, [=](int64_t i, auto part) { part.store(move + i, mu.total(i, part)); });
    nearest(move, out, n, grid);
}

// Draws with one variance for all, or one each in `spread`; what a mask excludes has neither move nor variance.
void draw_masked(const Step &s, const float *start, float *move, float v, bool each, float *spread, float *out, float *noise, const Grid &grid,
                 const Source &source, int64_t begin, int64_t n) {
    if (!each && !s.mask) return draw(s.rounding, start, move, Same{v}, out, noise, grid, source, begin, n);
    if (!each) lanes(n, [=](int64_t i, auto part) { part.store(spread + i, all(v)); });
    if (s.mask) clear_fixed(s.mask, begin, n, move, spread);
    draw(s.rounding, start, move, Each{spread}, out, noise, grid, source, begin, n);
}

// ---- SGLD

void update_sgld(const Step &s, const Grid &grid, float *theta, float *rest, int64_t begin, int64_t n) {
    float *drift = rest, *spread = rest + n, *moments = rest + 2 * n, *center = spread;
    const float *g = round_gradient(s, drift, begin, n);
    with_kind(s, [&](auto kind) {
        with_forces(kind, s, g, theta, center, moments, begin, n, [=, rate = -s.lr, v = s.variance](int64_t i, auto part, F force, F gain) {
            const F by = rate * force;
            part.store(drift + i, kind.gains ? by * gain : by);
            if (kind.gains) part.store(spread + i, v * gain);
        });
        draw_masked(s, theta, drift, s.variance, kind.gains, spread, theta, nullptr, grid, s.source, begin, n);
    });
}

// ---- SGHMC

void update_sghmc(const Step &s, const Grid &grid, float *theta, float *rest, int64_t begin, int64_t n) {
    float *force = rest, *spread = rest + n, *u = rest + 2 * n, *move = rest + 3 * n, *kicked = rest + 4 * n, *work = rest + 5 * n;
    const float *g = round_gradient(s, force, begin, n);
    const Underdamped c = s.velocity.coefficients;
    const bool after = s.rounding != kCorrected;  // then the noise is drawn, and rounding comes after it
    read(s.velocity.values, begin, n, u);
    with_kind(s, [&](auto kind) {
        with_forces(kind, s, g, theta, kicked, work, begin, n, [=](int64_t i, auto part, F f, F gain) {
            const F pushed = kind.gains ? f * root(gain) : f;
            part.store(force + i, pushed);
            part.store(move + i, c.fade * part.load(u + i) + c.kick * pushed);
            if (kind.gains) part.store(spread + i, gain);
        });
        draw_masked(s, u, move, c.velocity_variance, false, work, kicked, after ? work : nullptr, s.velocity.values.grid,
                    s.velocity.source, begin, n);
        lanes(n, [=](int64_t i, auto part) {
            const F old = part.load(u + i), e = after ? part.load(work + i) : (part.load(kicked + i) - old) - part.load(move + i);
            const F by = (c.carry * old + c.push * part.load(force + i)) + c.follow * e, gain = kind.gains ? part.load(spread + i) : F{};
            part.store(force + i, kind.gains ? by * root(gain) : by);
            if (kind.gains) part.store(spread + i, c.variance * gain);
        });
        write(s.velocity.values, begin, n, kicked);
        draw_masked(s, theta, force, c.variance, kind.gains, spread, theta, nullptr, grid, s.source, begin, n);
    });
}

// The update in place, on the grid of the weights or of their accumulator.
void update(const Step &s, const Grid &grid, float *theta, float *rest, int64_t begin, int64_t n) {
    if (is_there(s.velocity.values)) update_sghmc(s, grid, theta, rest, begin, n);
    else update_sgld(s, grid, theta, rest, begin, n);
}

}  // namespace
