// Block floating point: the functions of quantization/block_rounding.py, one block at a time.
#pragma once

#include "draw.h"

namespace {

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

// The law of the elements of one block on a given gap. kPlain: the block is far from both ends of the exponents' range, so
// that nothing needs lifting, bounding or clipping.
template <class V, bool kPlain>
struct Law {
    const float *mu;
    V v;
    float top, low, high;

    template <class P> F y(int64_t i, P part, const Gap &g) const {
        const F x = part.load(mu + i);
        return kPlain ? x * g.inverse : g.of(x);
    }
    template <class P> F s(int64_t i, P part, const Gap &g) const { return g.variance_of(v.at(i, part)); }
    template <class P> I at_risk(int64_t i, P part, const Gap &g) const {
        const F y_ = y(i, part, g), s_ = s(i, part, g);
        const I near = reaches(y_, s_) > top;  // true for few, and only these can be at risk
        return any(near) ? near & risky(y_, s_, top) : I{};
    }
    F on(F code, const Gap &g) const { return kPlain ? code * g.gap + 0.0f : onto(code, all(g.gap), low, high); }
    template <class P> F draw(int64_t i, P part, const Gap &g, F u, F xi) const {
        const F y_ = y(i, part, g), s_ = s(i, part, g);
        return on(settle(y_, s_, (s_ > 0.25f) & (reaches(y_, s_) <= top), u, xi), g);
    }
};

// One block of `draw_blocks`: n elements that begin at index `at`.
template <class V, bool kPlain>
struct Block {
    const Law<V, kPlain> law;
    float *const out;
    const int64_t at, n;
    const Grid &grid;
    Bits &uniform, &normal;

    bool noisy(const Gap &g) const { return g.variance_of(all(law.v.greatest(n)))[0] > 0.25f; }

    // Draws all elements on one gap. The cases that need no choice in each lane have loops of their own, for speed.
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

    // Returns the index of the largest coordinate at risk, or -1.
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

    // Returns true if a coordinate at risk other than m, drawn on the coarse gap, lands outside the fine grid. Those at risk
    // are few: their random numbers are made one at a time.
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

    // Draws the largest coordinate at risk, on the union of both grids if three outcomes there can have its variance.
    float draw_alone(int64_t m, const Gap fine, const Gap coarse, bool outside) {
        const Part one{1};
        const F y = law.y(m, one, fine), s = law.s(m, one, fine);
        const float top = grid.top, n = magnitude(nearest_integer(y))[0];
        const bool possible = feasible(y, s, top + 1)[0] && (n == top + 1 ? n + 2 : n) <= 2 * top;
        if (outside || !possible) return draw_one(m, coarse);
        return law.on(settle_wide(y, s, all(uniform.one(at + m)), top + 1), fine)[0];
    }

    // Draws the coordinates at risk first, on the coarse gap; the block is fine unless one of them lands outside.
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

    void round(float most, float sigma) {
        const float top = grid.top;
        const float biggest = most * float(kSlack / (double(top) - 0.5)), spread = sigma * 1.1547006f;
        const float three = biggest > spread ? biggest : spread;
        const float noisy = top > 1.0f ? (most + sigma * kNormalBound) * float(kSlack / (double(top) - 1.5)) : three;
        const float room = sigma == 0.0f ? most / top : noisy < three ? noisy : three;
        const int own = canonical_gap(most, grid);
        for (int coarse = clamp(ceil_log2(room), own, grid.max_gap); coarse > own; --coarse) {
            const int64_t m = largest_at_risk(Gap(coarse - 1));
            if (m >= 0) return draw_carefully(m, most, Gap(coarse - 1), Gap(coarse));
        }
        draw_all(Gap(own), most);
    }
};

template <class V>
void corrected_block(const float *mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &uniform, Bits &normal) {
    each_block(grid, n, [&](int64_t start, int64_t length) {
        const float most = largest(mu + start, length), sigma = __builtin_sqrtf((v + start).greatest(length));
        if (most != most) return spoil(out + start, length);
        const auto draw = [&](auto plain) {
            const Law<V, plain.value> law{mu + start, v + start, grid.top, grid.low, grid.high};
            Block<V, plain.value>{law, out + start, at + start, length, grid, uniform, normal}.round(most, sigma);
        };
        const bool inside = grid.max_gap > 80 && grid.min_gap < -80;
        if (inside && most > 0x1p-60f && most < 0x1p60f && sigma < 0x1p60f) draw(Constant<true>{});
        else draw(Constant<false>{});
    });
}

}  // namespace
