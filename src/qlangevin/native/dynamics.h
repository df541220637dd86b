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

// Q^s of numbers that are not negative to codes of a float of 8 bits: `stochastic_float` and `encode_floats` in one. Bits of a float
// are linear in it between powers of two: above those of the code they are a rank, below it the fraction f of a gap that the
// number has beyond. Below 2^emin gaps are the least.
void stochastic_bytes(const float *x, int8_t *code, int64_t at, int64_t n, const Grid &grid, Bits &bits) {
    const Gap least(grid.min_gap);
    const int32_t shift = grid.shift, cut = 23 - shift, below = (1 << cut) - 1, bias = (grid.min_gap + shift - 1 + 127) * (1 << shift);
    const float normal = least.gap * grid.top * 0.5f, inverse = least.inverse, unit = power_of_two(-cut);
    const int32_t high = int32_t(as_bits(grid.high) >> cut) - bias;
    with_bits(at, n, bits, nullptr, [=](int64_t i, auto part, F h, F) {
        const F from = part.load(x + i), y = lesser(from, all(normal)) * inverse, ranks = whole(y);
        const I under = from < normal, word = (I)from;
        const F f = under ? y - ranks : floats(word & below) * unit;
        const I rank = under ? integers(ranks) : (word >> cut) - bias;
        const I near = f >= 0.5f;
        const F r = f - one_where(near);
        const I changes = h * (h - r) < 0.0f;  // to the neighbour on the other side
        part.store(code + i, lesser(rank - (near ^ changes), I{} + high));  // a mask that is true is -1
    });
}

// Rounds running means, and keeps them.
void round_moments(const Stored &kept, const Source &source, int64_t begin, int64_t n, float *moments) {
    const Grid &grid = kept.grid;
    if (kept.codes.codes && kept.codes.bytes == 1 && grid.kind == Grid::kFloat) {
        Bits bits(source, kMoment, Bits::kCentered, begin + n);
        return stochastic_bytes(moments, static_cast<int8_t *>(kept.codes.codes) + begin, begin, n, grid, bits);
    }
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

// Calls body(i, part, f, G) with the force f = g + λ θ + (γ/N)(θ - w0), and the gain 1 / (eps + sqrt(V)) if there are gains. Takes
// the gradient into the running mean V of its squares, unless that is frozen. What the body stores may be where g is.
template <class K, class Body>
void with_forces(K, const Step &s, const float *g, const float *theta, float *center, float *moments, int64_t begin, int64_t n,
                 const Body &body) {
    const Moments &m = s.moments;
    if (K::center) read(s.center, begin, n, center);
    if (K::gains) read(m.values, begin, n, moments);
    lanes(n, [=, sign = s.maximize ? -1.0f : 1.0f, decay = s.weight_decay, pull = s.pull, keep = m.decay, fresh = m.fresh, eps = m.eps,
              scale = m.scale, unscale = m.unscale](int64_t i, auto part) {
        const F slope = part.load(g + i), x = part.load(theta + i), v = K::gains ? part.load(moments + i) : F{};
        F force = sign * slope + decay * x;
        if (K::center) force = force + pull * (x - part.load(center + i));
        if (K::gains) {
            const F scaled = slope * scale;
            part.store(moments + i, keep * v + fresh * (scaled * scaled));
        }
        body(i, part, force, K::gains ? 1.0f / (eps + root(v) * unscale) : F{});
    });
    if (K::gains && !m.frozen) round_moments(m.values, s.source, begin, n, moments);
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
