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
template <class M, class V, bool kPlain>
struct Law {
    M mu;
    V v;
    float top, low, high, variance;  // the greatest

    F greatest_s(const Gap &g) const { return g.variance_of(all(variance)); }
    template <class P> Point point(int64_t i, P part, const Gap &g) const { return mu.template in<kPlain>(g, i, part); }
    template <class P> F s(int64_t i, P part, const Gap &g) const { return g.variance_of(v.at(i, part)); }
    template <class P> I at_risk(int64_t i, P part, const Gap &g) const {
        const Point p = point(i, part, g);
        // Only what reaches the top with the greatest variance can be risky, which are few.
        return any(reaches(p.y(), greatest_s(g)) > top) ? risky(p, s(i, part, g), top) : I{};
    }
    F on(F code, const Gap &g) const { return kPlain ? code * g.gap + 0.0f : onto(code, all(g.gap), low, high); }
    template <class P> F draw(int64_t i, P part, const Gap &g, F h, F xi) const {
        const Point p = M::divided(point(i, part, g));
        const F s_ = s(i, part, g);
        return on(settle(p, s_, (s_ > 0.25f) & (reaches(p.y(), s_) <= top), h, xi), g);
    }
    // The same without variance: Q^s.
    template <class P> F round(int64_t i, P part, const Gap &g, F h, const Bits *more, int64_t at) const {
        return on(draw_stochastic(Nearest(point(i, part, g)), h, more, at + i, part), g);
    }
    // What is left of the variance if the block is coarse with probability q: `draw_compensated`.
    template <class P> F draw_compensated(int64_t i, P part, const Gap &fine, const Gap &coarse, F q, F h) const {
        const Nearest at(point(i, part, fine)), wide(point(i, part, coarse));
        const F beside = magnitude(wide.r), w = greater(s(i, part, coarse), beside * (1.0f - beside)) * 4.0f;
        const F left = positive((s(i, part, fine) - q * w) / greater(1.0f - q, all(0x1p-20f)));
        const F a = magnitude(at.r), sign = at.n < 0.0f ? all(-1.0f) : all(1.0f), inwards = -h * sign;
        const F twice = lesser(positive(left - a * (1.0f - a)), a) * 0.5f;
        const F steps = (inwards > 0.0f) & (inwards < a - twice) ? (inwards < twice ? all(2.0f) : all(1.0f)) : F{};
        return on(magnitude(at.n) == top ? at.n - sign * steps : spread(at, left, h), fine);
    }
};

// One block of `draw_blocks`: n elements that begin at index `at`.
template <class M, class V, bool kPlain>
struct Block {
    const Law<M, V, kPlain> law;
    float *const out;
    const int64_t at, n;
    const Grid &grid;
    Bits &centered, &normal;

    // Draws all elements on one gap. The cases that need no choice in each lane have loops of their own, for speed.
    void draw_all(const Gap g, float most) {
        const F s = law.greatest_s(g);
        const bool fits = (reaches(g.of(all(most)), s) <= grid.top)[0];
        if (s[0] == 0.0f)
            with_bits(at, n, centered, nullptr, [=, law = law, out = out, at = at, more = more_bits(centered)](int64_t i, auto part, F h, F) {
                part.store(out + i, law.round(i, part, g, h, more, at));
            });
        else if (s[0] <= 0.25f)
            with_bits(at, n, centered, nullptr, [=, law = law, out = out](int64_t i, auto part, F h, F) {
                part.store(out + i, law.on(settle_quiet(Nearest(law.point(i, part, g)), law.s(i, part, g), h), g));
            });
        else if (fits)
            with_bits(at, n, centered, &normal, [=, law = law, out = out](int64_t i, auto part, F h, F xi) {
                const Point p = M::divided(law.point(i, part, g));
                part.store(out + i, law.on(V::kSame ? settle_gaussian(p, s, h, xi) : settle_mixed(p, law.s(i, part, g), h, xi), g));
            });
        else
            with_bits(at, n, centered, &normal, [=, law = law, out = out](int64_t i, auto part, F h, F xi) {
                part.store(out + i, law.draw(i, part, g, h, xi));
            });
    }

    // Calls visit(i) for each coordinate at risk, in order. They are few.
    template <class Visit>
    void each_at_risk(const Gap fine, const Visit &visit) const {
        lanes(n, [&, law = law](int64_t i, auto part) {
            const I risk = law.at_risk(i, part, fine);
            if (!any(risk)) return;
            for (int l = 0; l < part.count; ++l)
                if (risk[l]) visit(i + l);
        });
    }

    struct Risks {
        int64_t count = 0, largest = -1;
    };

    // Counts the coordinates at risk and finds the largest.
    Risks find_risks(const Gap fine) const {
        Risks found;
        float most = -1.0f;
        each_at_risk(fine, [&](int64_t i) {
            const float size = magnitude(law.mu.total(i, Part{1}))[0];
            ++found.count;
            if (size > most) most = size, found.largest = i;
        });
        return found;
    }

    float draw_one(int64_t i, const Gap &g) const {
        return law.draw(i, Part{1}, g, all(centered.one(at + i)), all(normal.one(at + i)))[0];
    }

    // A draw of one coordinate on the union of both grids, the probability that it is outside the fine one, and whether three
    // outcomes there can have its variance.
    struct Alone {
        float value, outside;
        bool possible;
    };

    Alone draw_alone(int64_t m, const Gap fine) const {
        const Part one{1};
        const Point p = law.point(m, one, fine);
        const F s = law.s(m, one, fine);
        const Nearest near(p);
        const float top = grid.top, size = magnitude(near.n)[0];
        const bool possible = feasible(near, s, top + 1)[0] && (size == top + 1 ? size + 2 : size) <= 2 * top;
        const F outwards = near.r * (near.n < 0.0f ? all(-1.0f) : all(1.0f));
        const Outcomes o(outwards, s, all(1.0f), all(size == top + 1 ? 2.0f : 1.0f));
        const float outside = size == top ? o.up[0] : size == top + 1 ? 1.0f - o.down[0] : size > top ? 1.0f : 0.0f;
        return {law.on(settle_wide(near, s, all(centered.one(at + m)), top + 1), fine)[0], outside, possible};
    }

    // Draws the coordinates at risk first, on the coarse gap and the largest alone; the block is fine unless one is outside.
    void draw_in_turn(const Risks &risks, float most, const Gap fine, const Gap coarse) {
        const float limit = grid.top * fine.gap;
        bool outside = false;
        if (risks.count > 1)
            each_at_risk(fine, [&](int64_t i) {
                if (!outside && i != risks.largest) outside = __builtin_fabsf(draw_one(i, coarse)) > limit;
            });
        const Alone alone = draw_alone(risks.largest, fine);
        const float last = alone.possible && !outside ? alone.value : draw_one(risks.largest, coarse);
        outside |= __builtin_fabsf(last) > limit;
        const float s = law.greatest_s(fine)[0];
        if (outside) draw_all(coarse, most);
        else if (s == 0.0f) draw_rounded(fine, coarse);
        else if (risks.count == 1 && alone.possible && s <= 0.25f) draw_spared(fine, coarse, alone.outside);
        else draw_mixed(fine, coarse, s);
        out[risks.largest] = last;
    }

    // Draws on the fine gap those that are not at risk, and on the coarse gap the others.
    void draw_mixed(const Gap fine, const Gap coarse, float s) {
        with_bits(at, n, centered, s > 0.25f ? &normal : nullptr, [=, law = law, out = out](int64_t i, auto part, F h, F xi) {
            const I wide = law.at_risk(i, part, fine);
            const F value = law.draw(i, part, fine, h, xi);
            part.store(out + i, any(wide) ? (wide ? law.draw(i, part, coarse, h, xi) : value) : value);
        });
    }

    // The same without variance.
    void draw_rounded(const Gap fine, const Gap coarse) {
        with_bits(at, n, centered, nullptr, [=, law = law, out = out, at = at, more = more_bits(centered)](int64_t i, auto part, F h, F) {
            const I wide = law.at_risk(i, part, fine);
            const F value = law.round(i, part, fine, h, more, at);
            part.store(out + i, any(wide) ? (wide ? law.round(i, part, coarse, h, more, at) : value) : value);
        });
    }

    // Draws all on the fine gap, with what is left of the variance.
    void draw_spared(const Gap fine, const Gap coarse, float q) {
        with_bits(at, n, centered, nullptr, [=, law = law, out = out](int64_t i, auto part, F h, F) {
            part.store(out + i, law.draw_compensated(i, part, fine, coarse, all(q), h));
        });
    }

    // |y| - N of one coordinate, and on which side of zero it is.
    struct Beyond {
        float by, sign;
    };

    Beyond beyond(int64_t i, const Gap fine) const {
        const Nearest near(law.point(i, Part{1}, fine));
        const float n = near.n[0], sign = n < 0.0f ? -1.0f : 1.0f;
        return {near.r[0] * sign + (__builtin_fabsf(n) - grid.top), sign};  // at most 1: the gap is that of the largest
    }

    static int64_t count_units(float x) { return int64_t(x * 0x1p36f); }

    // The probability Q that the block is coarse, that of its coin, and whether a coordinate jumps outside.
    struct Toss {
        float coarse, coin;
        bool jump;
    };

    Toss toss(const Gap fine) const {
        int64_t total = 0, squares = 0;
        float needed = 0.0f;
        bool jump = false;
        each_at_risk(fine, [&](int64_t i) {
            const Beyond b = beyond(i, fine);
            const float s = law.s(i, Part{1}, fine)[0];
            float need = s + b.by * b.by;
            if (b.by > 0.0f) {
                total += count_units(b.by), squares += count_units(b.by * b.by);
                jump |= picks(all(b.by), all(centered.one(at + i) * b.sign))[0] != 0;
            } else {
                const float a = -b.by, m = s - a * (2.0f - a), over = 1.0f - (a + a);
                need = (m > 0.0f ? m : 0.0f) / (over > 0.5f ? over : 0.5f);
            }
            needed = need > needed ? need : needed;
        });
        const float sum = float(total) * 0x1p-36f, pairs = (sum * sum - float(squares) * 0x1p-36f) * 0.5f;
        const float jumps = sum - pairs < 0.0f ? 0.0f : sum - pairs > 1.0f ? 1.0f : sum - pairs;
        const float coarse = needed > jumps ? needed : jumps, stay = 1.0f - jumps;
        return {coarse, (coarse - jumps) / (stay > 0x1p-36f ? stay : 0x1p-36f), jump};
    }

    // Draws a block with several coordinates at risk, v <= v_0: `draw_tossed` of block_rounding.py.
    void draw_tossed(const Gap fine, const Gap coarse) {
        const Toss t = toss(fine);
        const Bits coins(centered.source(), kCoin, Bits::kCentered, centered.end());
        const bool is_coarse = t.jump || __builtin_fabsf(coins.one(at)) < t.coin * 0.5f;
        const float aside = is_coarse ? 1.0f : 0.0f;
        // Numbers beyond the fine grid are set as they are found: `out` may be where the means are, so only once each.
        Bits rest(centered.source(), centered.rest_purpose(), Bits::kRest, centered.end());
        const bool narrow = centered.narrow();
        with_bits(at, n, centered, narrow ? &rest : nullptr, [&, law = law, out = out](int64_t i, auto part, F first, F other) {
            const F h = narrow ? Bits::refine(first, other) : first;
            const I risk = law.at_risk(i, part, fine);
            F value = is_coarse ? law.draw(i, part, coarse, h, h) : law.draw_compensated(i, part, fine, coarse, all(t.coarse), h);
            for (int l = 0; any(risk) && l < part.count; ++l) {
                const Beyond b = risk[l] ? beyond(i + l, fine) : Beyond{0.0f, 1.0f};
                if (b.by <= 0.0f) continue;
                const bool jumps = picks(all(b.by), all(h[l] * b.sign))[0] != 0;
                const float by = jumps || coins.one(at + i + l) >= 0.0f ? aside : -aside;
                value[l] = law.on(all(b.sign * (grid.top + by)), fine)[0];
            }
            part.store(out + i, value);
        });
    }

    void round(float most, float sigma) {
        const float top = grid.top;
        const float biggest = most * float(kSlack / (double(top) - 0.5)), spread = sigma * 1.1547006f;
        const float three = biggest > spread ? biggest : spread;
        const float noisy = top > 1.0f ? (most + sigma * kNormalBound) * float(kSlack / (double(top) - 1.5)) : three;
        const float room = sigma == 0.0f ? most * float(kSlack / double(top)) : noisy < three ? noisy : three;
        const int own = canonical_gap(most, grid);
        for (int e = clamp(ceil_log2(room), own, grid.max_gap); e > own; --e) {
            const Gap fine(e - 1), coarse(e);
            const Risks risks = find_risks(fine);
            if (risks.count > 1 && law.greatest_s(fine)[0] <= 0.25f) return draw_tossed(fine, coarse);
            if (risks.count > 0) return draw_in_turn(risks, most, fine, coarse);
        }
        draw_all(Gap(own), most);
    }
};

template <class M, class V>
void corrected_block(M mu, V v, float *out, int64_t at, int64_t n, const Grid &grid, Bits &centered, Bits &normal) {
    each_block(grid, n, [&](int64_t start, int64_t length) {
        const M mean = mu + start;
        const Extent extent = mean.extent(length);
        const float most = extent.total, variance = (v + start).greatest(length), sigma = __builtin_sqrtf(variance);
        if (most != most) return spoil(out + start, length);
        const auto draw = [&](auto plain) {
            const Law<M, V, plain.value> law{mean, v + start, grid.top, grid.low, grid.high, variance};
            Block<M, V, plain.value>{law, out + start, at + start, length, grid, centered, normal}.round(most, sigma);
        };
        // Below far, no gap is as large as the greatest, and nothing is clipped.
        const float end = grid.high * 0x1p-8f, far = end < 0x1p60f ? end : 0x1p60f;
        const bool inside = most > 0x1p-60f && most < far && sigma < far && extent.move <= most * 0x1p6f;
        if (inside) draw(Constant<true>{});
        else draw(Constant<false>{});
    });
}

}  // namespace
