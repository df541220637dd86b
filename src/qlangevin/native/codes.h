// Numbers to codes and back, lossless on the grid: `encode` and `decode` of the format classes in quantization/.
#pragma once

#include "rounding.h"

namespace {

using qlangevin::Recode;

// Fixed point and blocks: code = value / gap. Numbers that are on no grid, NaN too, are bounded: converting them is undefined.
template <class Code>
void encode_integers(const float *value, Code *code, int64_t n, const Gap &g) {
    const float lift = g.lift, inverse = g.inverse;
    for (int64_t i = 0; i < n; ++i) {
        const float y = value[i] * lift * inverse, above = y > -kFar ? y : -kFar;
        code[i] = Code(int32_t(above < kFar ? above : kFar));
    }
}

template <class Code>
void decode_integers(const Code *code, float *value, int64_t n, float gap) {
    for (int64_t i = 0; i < n; ++i) value[i] = float(code[i]) * gap;
}

// The same for bytes, the most frequent case: compilers do not vectorize it well.
void encode_integers(const float *value, int8_t *code, int64_t n, const Gap &g) {
    lanes(n, [=](int64_t i, auto part) { part.store(code + i, integers(g.of(part.load(value + i)))); });
}

void decode_integers(const int8_t *code, float *value, int64_t n, float gap) {
    lanes(n, [=](int64_t i, auto part) { part.store(value + i, floats(part.load(code + i)) * gap); });
}

// Floating point: the sign bit, and the rank of |value| among the numbers of the format, counted from zero. A rank is
// 2^man (E - emin + 1) + mantissa; below 2^emin it is value / Δ. Numbers float32 holds as subnormals are lifted by 2^64.
template <class Code>
void encode_floats(const float *value, Code *code, int64_t n, const Grid &grid) {
    const Gap least(grid.min_gap);
    const float normal = least.gap * grid.top * 0.5f;  // 2^emin, where gradual underflow ends
    const int32_t shift = grid.shift, bias = (grid.min_gap + shift - 1 + 127) * (1 << shift);
    for (int64_t i = 0; i < n; ++i) {
        const float size = __builtin_fabsf(value[i]);
        const bool tiny = size < 0x1p-100f;
        const int32_t under = int32_t((size < normal ? size : 0.0f) * least.lift * least.inverse);
        const int32_t over = int32_t(as_bits(tiny ? size * 0x1p64f : size) >> (23 - shift)) - bias - (tiny ? 64 << shift : 0);
        const uint32_t sign = as_bits(value[i]) >> 31 << (8 * sizeof(Code) - 1);
        code[i] = Code(sign | uint32_t(size < normal ? under : over));
    }
}

template <class Code>
void decode_floats(const Code *code, float *value, int64_t n, const Grid &grid) {
    constexpr uint32_t kSign = 1u << (8 * sizeof(Code) - 1);
    const int32_t shift = grid.shift, first = 1 << shift, least = grid.min_gap;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = uint32_t(code[i]);
        const int32_t rank = int32_t(bits & (kSign - 1)), binade = rank >> shift;
        const int32_t digits = (rank & (first - 1)) + (binade > 0 ? first : 0);
        const int32_t e = least + (binade > 0 ? binade - 1 : 0);
        // A code that stands for no number may have any e: from 128 on 2^e is infinite.
        const float gap = as_float(uint32_t((e < 128 ? e : 128) + (e < -100 ? 64 : 0) + 127) << 23) * (e < -100 ? 0x1p-64f : 1.0f);
        value[i] = (bits & kSign ? -1.0f : 1.0f) * float(digits) * gap;
    }
}

// The same for bytes. Formats of 8 bits have no numbers that float32 holds as subnormals. Bits of a float are linear in it between
// powers of two: above those of the code they are a rank, below it the fraction of a gap that the number has beyond.
struct ByteFloats {
    float gap, inverse, normal, unit;
    int32_t shift, cut, bias, high;
    explicit ByteFloats(const Grid &grid) : shift(grid.shift), cut(23 - grid.shift), bias((grid.min_gap + grid.shift - 1 + 127) * (1 << grid.shift)) {
        const Gap least(grid.min_gap);
        gap = least.gap, inverse = least.inverse, normal = gap * grid.top * 0.5f;  // 2^emin, where gradual underflow ends
        unit = power_of_two(-cut), high = int32_t(as_bits(grid.high) >> cut) - bias;
    }
    QL_INLINE I encode(F x) const {
        const F size = magnitude(x);
        const I over = (I)((U)size >> cut) - bias, under = integers(lesser(size, all(normal)) * inverse);
        return (size < normal ? under : over) | -(I)((U)x >> 31 << 7);  // -128 is the sign
    }
    QL_INLINE F decode(I bits) const { return (F)((U)decode_size(bits & 127) | ((U)(bits & 128) << 24)); }
    QL_INLINE F decode_size(I rank) const { return rank < (1 << shift) ? floats(rank) * gap : (F)((rank + bias) << cut); }
    // Q^s of numbers that are not negative: `stochastic_float` and `encode` in one.
    QL_INLINE I round(F x, F h) const {
        const I word = (I)x;
        F f = floats(word & ((1 << cut) - 1)) * unit;
        I rank = (word >> cut) - bias;
        if (in_any(is_less(x, all(normal)))) {
            const F y = lesser(x, all(normal)) * inverse, ranks = whole(y);
            f = x < normal ? y - ranks : f;
            rank = x < normal ? integers(ranks) : rank;
        }
        const Mask near = is_within(all(0.5f), f);
        const F r = sum_where(near, f, all(-1.0f));
        const Mask changes = is_less(h * (h - r), F{});  // to the neighbour on the other side
        return lesser(one_more(rank, differ(near, changes)), I{} + high);
    }
};

void encode_floats(const float *value, int8_t *code, int64_t n, const Grid &grid) {
    lanes(n, [=, of = ByteFloats(grid)](int64_t i, auto part) { part.store(code + i, of.encode(part.load(value + i))); });
}

void decode_floats(const int8_t *code, float *value, int64_t n, const Grid &grid) {
    lanes(n, [=, of = ByteFloats(grid)](int64_t i, auto part) { part.store(value + i, of.decode(part.load(code + i))); });
}

// The gap of a block. An exponent that no block has, in a damaged file say, may be below those of float32.
inline float decoded_gap(const Grid &grid, const int8_t *exponent) {
    const int gap = exponent ? *exponent - grid.shift : grid.min_gap;
    return gap < -149 ? 0.0f : power_of_two(gap);
}

// Calls block(start, length, exponent) for the blocks of begin .. end; fixed point is one block without exponent.
template <class Block>
void each_coded_block(const Recode &r, int64_t begin, int64_t end, const Block &block) {
    if (r.grid.kind != Grid::kBlock) return block(begin, end - begin, static_cast<int8_t *>(nullptr));
    const int64_t per_line = (r.grid.line + r.grid.size - 1) / r.grid.size;
    int8_t *exponent = r.codes.exponents + begin / r.grid.line * per_line;
    each_block(r.grid, end - begin, [&](int64_t start, int64_t n) { block(begin + start, n, exponent++); });
}

// Returns false, with not all of them encoded, if some are beyond `limit` or NaN: these have no code.
template <class Code>
bool encode_as(const Recode &r, int64_t begin, int64_t end, float limit) {
    Code *codes = static_cast<Code *>(r.codes.codes);
    bool inside = true;
    each_coded_block(r, begin, end, [&](int64_t start, int64_t n, int8_t *exponent) {
        const bool look = exponent || limit < __builtin_inff();
        const float most = look ? largest(r.values + start, n) : 0.0f;
        if (!(inside = inside && most <= limit)) return;
        if (r.grid.kind == Grid::kFloat) return encode_floats(r.values + start, codes + start, n, r.grid);
        const int gap = exponent ? canonical_gap(most, r.grid) : r.grid.min_gap;
        if (exponent) *exponent = int8_t(gap + r.grid.shift);
        encode_integers(r.values + start, codes + start, n, Gap(gap));
    });
    return inside;
}

template <class Code>
void decode_as(const Recode &r, int64_t begin, int64_t end) {
    const Code *codes = static_cast<const Code *>(r.codes.codes);
    if (r.grid.kind == Grid::kFloat) return decode_floats(codes + begin, r.values + begin, end - begin, r.grid);
    each_coded_block(r, begin, end, [&](int64_t start, int64_t n, const int8_t *exponent) {
        decode_integers(codes + start, r.values + start, n, decoded_gap(r.grid, exponent));
    });
}

// Returns true if codes that were made of the values decode to the same bits.
template <class Code>
bool same_as(const Recode &r, int64_t begin, int64_t end) {
    constexpr int64_t kChunk = 1024;
    const Code *codes = static_cast<const Code *>(r.codes.codes);
    bool same = true;
    each_coded_block(r, begin, end, [&](int64_t start, int64_t n, const int8_t *exponent) {
        const float gap = decoded_gap(r.grid, exponent);
        float chunk[kChunk];
        for (int64_t i = 0, count; same && i < n; i += count) {
            count = n - i < kChunk ? n - i : kChunk;
            if (r.grid.kind == Grid::kFloat) decode_floats(codes + start + i, chunk, count, r.grid);
            else decode_integers(codes + start + i, chunk, count, gap);
            same = __builtin_memcmp(chunk, r.values + start + i, std::size_t(count) * sizeof(float)) == 0;
        }
    });
    return same;
}

bool encode_within(const Recode &r, int64_t begin, int64_t end, float limit) {
    if (r.codes.bytes == 1) return encode_as<int8_t>(r, begin, end, limit);
    return r.codes.bytes == 2 ? encode_as<int16_t>(r, begin, end, limit) : encode_as<int32_t>(r, begin, end, limit);
}

void encode_range(const Recode &r, int64_t begin, int64_t end) { encode_within(r, begin, end, __builtin_inff()); }

// The same for numbers of which some may have no code; returns false then.
bool encode_inside(const Recode &r, int64_t begin, int64_t end) {
    return encode_within(r, begin, end, r.grid.high > -r.grid.low ? r.grid.high : -r.grid.low);
}

// Fixed point goes one further down than up, and a code may have room for what is one too far.
bool exceeds(const float *value, int64_t n, float high) {
    F most = {};
    lanes(n, [&](int64_t i, auto part) { most = greater(part.load(value + i), most); });
    return any(most > high);
}

bool encode_exactly_range(const Recode &r, int64_t begin, int64_t end) {
    if (!encode_inside(r, begin, end)) return false;
    if (r.grid.kind == Grid::kFixed && exceeds(r.values + begin, end - begin, r.grid.high)) return false;
    if (r.codes.bytes == 1) return same_as<int8_t>(r, begin, end);
    return r.codes.bytes == 2 ? same_as<int16_t>(r, begin, end) : same_as<int32_t>(r, begin, end);
}

void decode_range(const Recode &r, int64_t begin, int64_t end) {
    if (r.codes.bytes == 1) return decode_as<int8_t>(r, begin, end);
    if (r.codes.bytes == 2) return decode_as<int16_t>(r, begin, end);
    decode_as<int32_t>(r, begin, end);
}

}  // namespace
