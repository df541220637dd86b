// Rounding to a grid of any kind: n elements at x, which begin at index `at` of the tensor, to out.
#pragma once

#include "blocks.h"
#include "floats.h"

namespace {

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

}  // namespace
