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

// Turns the running mean of squares into gains, and takes the gradient into it unless it is frozen.
void read_gains(const Moments &m, const Source &source, const float *g, float *gain, float *work, int64_t begin, int64_t n) {
    read(m.values, begin, n, gain);
    if (!m.frozen) {
        lanes(n, [=, keep = m.decay, fresh = m.fresh, scale = m.scale](int64_t i, auto part) {
            const F scaled = part.load(g + i) * scale;
            part.store(work + i, keep * part.load(gain + i) + fresh * (scaled * scaled));
        });
        stochastic(Whole{work}, work, begin, n, m.values.grid, source, kMoment);
        if (m.values.grid.kind == Grid::kNone)
            lanes(n, [=](int64_t i, auto part) { part.store(work + i, lesser(part.load(work + i), all(kLargest))); });
        write(m.values, begin, n, work);
    }
    lanes(n, [=, eps = m.eps, unscale = m.unscale](int64_t i, auto part) {
        part.store(gain + i, 1.0f / (eps + root(part.load(gain + i)) * unscale));
    });
}

// f = g + λ θ + (γ/N)(θ - w0), times a factor.
void add_forces(const Step &s, const float *g, const float *theta, float *force, float *center, float factor, int64_t begin, int64_t n) {
    const float sign = s.maximize ? -1.0f : 1.0f, decay = s.weight_decay, pull = s.pull;
    if (!is_there(s.center) || pull == 0.0f)
        return lanes(n, [=](int64_t i, auto part) {
            part.store(force + i, factor * (sign * part.load(g + i) + decay * part.load(theta + i)));
        });
    read(s.center, begin, n, center);
    lanes(n, [=](int64_t i, auto part) {
        const F x = part.load(theta + i);
        part.store(force + i, factor * ((sign * part.load(g + i) + decay * x) + pull * (x - part.load(center + i))));
    });
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

// ---- SGLD

void update_sgld(const Step &s, const Grid &grid, float *theta, float *rest, int64_t begin, int64_t n) {
    float *drift = rest, *spread = rest + n, *work = rest + 2 * n;
    const float *g = round_gradient(s, drift, begin, n);
    const bool gains = is_there(s.moments.values);
    if (gains) read_gains(s.moments, s.source, g, spread, work, begin, n);
    add_forces(s, g, theta, drift, work, -s.lr, begin, n);
    if (!gains && !s.mask) return draw(s.rounding, theta, drift, Same{s.variance}, theta, nullptr, grid, s.source, begin, n);
    lanes(n, [=, v = s.variance](int64_t i, auto part) {
        if (gains) part.store(drift + i, part.load(drift + i) * part.load(spread + i));
        part.store(spread + i, gains ? v * part.load(spread + i) : all(v));
    });
    if (s.mask) clear_fixed(s.mask, begin, n, drift), clear_fixed(s.mask, begin, n, spread);
    draw(s.rounding, theta, drift, Each{spread}, theta, nullptr, grid, s.source, begin, n);
}

// ---- SGHMC

// Draws a part of a step with one variance, or with one each if a mask or gains ask for it.
void draw_spread(const Step &s, const float *start, float *move, float v, const float *gain, float *spread, float *out, float *noise,
                 const Grid &grid, const Source &source, int64_t begin, int64_t n) {
    if (!gain && !s.mask) return draw(s.rounding, start, move, Same{v}, out, noise, grid, source, begin, n);
    lanes(n, [=](int64_t i, auto part) { part.store(spread + i, gain ? v * part.load(gain + i) : all(v)); });
    if (s.mask) clear_fixed(s.mask, begin, n, move), clear_fixed(s.mask, begin, n, spread);
    draw(s.rounding, start, move, Each{spread}, out, noise, grid, source, begin, n);
}

void update_sghmc(const Step &s, const Grid &grid, float *theta, float *rest, int64_t begin, int64_t n) {
    float *force = rest, *gain = rest + n, *u = rest + 2 * n, *move = rest + 3 * n, *kicked = rest + 4 * n, *work = rest + 5 * n;
    const float *g = round_gradient(s, force, begin, n);
    const bool gains = is_there(s.moments.values);
    if (gains) read_gains(s.moments, s.source, g, gain, work, begin, n);
    add_forces(s, g, theta, force, work, 1.0f, begin, n);
    const Underdamped c = s.velocity.coefficients;
    read(s.velocity.values, begin, n, u);
    lanes(n, [=](int64_t i, auto part) {
        if (gains) part.store(force + i, part.load(force + i) * root(part.load(gain + i)));
        part.store(move + i, c.fade * part.load(u + i) + c.kick * part.load(force + i));
    });
    const bool after = s.rounding != kCorrected;  // then the noise is drawn, and rounding comes after it
    draw_spread(s, u, move, c.velocity_variance, nullptr, work, kicked, after ? work : nullptr, s.velocity.values.grid, s.velocity.source, begin, n);
    lanes(n, [=](int64_t i, auto part) {
        const F old = part.load(u + i), e = after ? part.load(work + i) : (part.load(kicked + i) - old) - part.load(move + i);
        const F drift = (c.carry * old + c.push * part.load(force + i)) + c.follow * e;
        part.store(force + i, gains ? drift * root(part.load(gain + i)) : drift);
    });
    write(s.velocity.values, begin, n, kicked);
    draw_spread(s, theta, force, c.variance, gains ? gain : nullptr, work, theta, nullptr, grid, s.source, begin, n);
}

// The update in place, on the grid of the weights or of their accumulator. `rest` holds `kScratch` floats for each element.
void update(const Step &s, const Grid &grid, float *theta, float *rest, int64_t begin, int64_t n) {
    if (is_there(s.velocity.values)) update_sghmc(s, grid, theta, rest, begin, n);
    else update_sgld(s, grid, theta, rest, begin, n);
}

}  // namespace
