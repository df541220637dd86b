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

// Sets what does not move to zero. Masks have few changes, so most bytes are all ones or all zeros.
void clear_fixed(const uint8_t *mask, int64_t begin, int64_t n, float *x) {
    for (int64_t i = 0; i < n; ++i) {
        const int64_t at = begin + i;
        if (at % 8 == 0 && i + 8 <= n && mask[at / 8] == 0xff) i += 7;
        else if (!(mask[at / 8] >> (at % 8) & 1)) x[i] = 0.0f;
    }
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
    if (!K::gains || m.frozen) return;
    stochastic(Whole{moments}, moments, begin, n, m.values.grid, s.source, kMoment);
    if (m.values.grid.kind == Grid::kNone)
        lanes(n, [=](int64_t i, auto part) { part.store(moments + i, lesser(part.load(moments + i), all(kLargest))); });
    write(m.values, begin, n, moments);
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
    if (s.mask) clear_fixed(s.mask, begin, n, move), clear_fixed(s.mask, begin, n, spread);
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
