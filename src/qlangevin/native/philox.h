// Random bits: Philox4x32-7 and Box-Muller, the same numbers as quantization/random.py, operation for operation.
//
// A tile is 64 elements. Counter 16 t + l yields four words; word k is that of element 64 t + 16 k + l. So every loop
// below runs over 16 independent lanes with unit stride, which compilers turn into vector code without shuffles.
#pragma once

#include "vector.h"

namespace {

using qlangevin::kTile, qlangevin::Source;
constexpr int kLanes = 16;

struct alignas(64) Lanes {
    uint32_t word[4][kLanes];
};

// A word sits alone in a 64-bit lane: the product of two words is then one instruction, which ignores the upper half of
// its operands, so the low word of a product is never masked. Compilers given 32-bit lanes spend half their time shuffling.
// `pack` gathers the low words of two registers with one shuffle; it leaves them in order if lane j of the first register
// is counter 4 (j / 2) + j % 2 and the second is two ahead.
constexpr int kWide = kWidth / 2;
#if defined(__AVX512F__)
inline Wide product(Wide a, Wide b) { return (Wide)_mm512_mul_epu32((__m512i)a, (__m512i)b); }
inline F pack(Wide a, Wide b) { return (F)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x88); }
#elif defined(__AVX2__)
inline Wide product(Wide a, Wide b) { return (Wide)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
inline F pack(Wide a, Wide b) { return (F)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88); }
#elif defined(__SSE2__)
inline Wide product(Wide a, Wide b) { return (Wide)_mm_mul_epu32((__m128i)a, (__m128i)b); }
inline F pack(Wide a, Wide b) { return (F)_mm_shuffle_ps((__m128)a, (__m128)b, 0x88); }
#else
inline Wide product(Wide a, Wide b) { return (a & 0xFFFFFFFFu) * b; }
inline F pack(Wide a, Wide b) { return (F)U{uint32_t(a[0]), uint32_t(a[1]), uint32_t(b[0]), uint32_t(b[1])}; }
#endif

// The keys of the seven rounds, in every lane: made once for many tiles.
struct Schedule {
    Wide key[7][2];
    explicit Schedule(const Source &source) {
        for (uint32_t round = 0; round < 7; ++round) {
            key[round][0] = Wide{} + uint64_t(source.key0 + round * 0x9E3779B9u);
            key[round][1] = Wide{} + uint64_t(source.key1 + round * 0xBB67AE85u);
        }
    }
};

inline void philox_tile(const Source &source, const Schedule &schedule, uint32_t purpose, uint64_t tile, Lanes &out) {
    const uint64_t first = tile * kLanes;  // a multiple of 16: adding a lane never carries
    const Wide zero = {}, m0 = zero + 0xD2511F53u, m1 = zero + 0xCD9E8D57u;
    Wide order = {};
    for (int j = 0; j < kWide; ++j) order[j] = uint64_t(4 * (j / 2) + j % 2);
    for (int start = 0; start < kLanes; start += 2 * kWide) {
        Wide c[2][4];
        for (int h = 0; h < 2; ++h) {
            c[h][0] = order + uint64_t(uint32_t(first) + uint32_t(start + 2 * h));
            c[h][1] = zero + uint64_t(uint32_t(first >> 32) | purpose << 24);
            c[h][2] = zero + uint64_t(source.step0);
            c[h][3] = zero + uint64_t(source.step1);
        }
#pragma GCC unroll 7
        for (const auto &key : schedule.key) {
            for (auto &x : c) {
                const Wide p0 = product(x[0], m0), p1 = product(x[2], m1);
                x[0] = (p1 >> 32) ^ x[1] ^ key[0];
                x[1] = p1;
                x[2] = (p0 >> 32) ^ x[3] ^ key[1];
                x[3] = p0;
            }
        }
        for (int k = 0; k < 4; ++k) {
            const F words = pack(c[0][k], c[1][k]);
            __builtin_memcpy(&out.word[k][start], &words, sizeof words);
        }
    }
}

// Calls body(t, words) with the 64 words of each of `tiles` tiles.
template <class Body>
QL_INLINE void each_tile(const Source &source, uint32_t purpose, uint64_t tile, int tiles, const Body &body) {
    const Schedule schedule(source);
    for (int t = 0; t < tiles; ++t) {
        Lanes lanes;
        philox_tile(source, schedule, purpose, tile + uint64_t(t), lanes);
        body(t, lanes);
    }
}

// Centered numbers, between -1/2 and 1/2: a word as a signed integer, made odd, times 2^-32.
inline void centered_tiles(const Source &source, uint32_t purpose, uint64_t tile, int tiles, float *out) {
    each_tile(source, purpose, tile, tiles, [=](int t, const Lanes &lanes) {
        const uint32_t *word = &lanes.word[0][0];
        for (int i = 0; i < kTile; ++i) out[t * kTile + i] = float(int32_t(word[i] | 1u)) * 0x1p-32f;
    });
}

// The first 16 bits of those of activations and errors, two numbers from a word, so that a tile has 128 of them: a signed
// integer j, and (j + 1/2) 2^-16 is the middle of where the number lies.
constexpr int kNarrowTile = 2 * kTile;

inline void narrow_tiles(const Source &source, uint32_t purpose, uint64_t tile, int tiles, float *out) {
    each_tile(source, purpose, tile, tiles, [=](int t, const Lanes &lanes) {
        const uint32_t *word = &lanes.word[0][0];
        float *low = out + t * kNarrowTile, *high = low + kTile;
        for (int i = 0; i < kTile; ++i) low[i] = float(int32_t(word[i] << 16) >> 15 | 1) * 0x1p-17f;
        for (int i = 0; i < kTile; ++i) high[i] = float(int32_t(word[i]) >> 15 | 1) * 0x1p-17f;
    });
}

// The bits that follow these: uniform between 0 and 1, 32 bits.
inline void rest_tiles(const Source &source, uint32_t purpose, uint64_t tile, int tiles, float *out) {
    each_tile(source, purpose, tile, tiles, [=](int t, const Lanes &lanes) {
        const uint32_t *word = &lanes.word[0][0];
        for (int i = 0; i < kTile; ++i) out[t * kTile + i] = (float(word[i]) + 0.5f) * 0x1p-32f;
    });
}

// -ln u for u = (k + 1/2) / 2^31: u = 2^e (1 + f), ln(1 + f) = f - f^2/2 + f^3 P(f); near 1, f comes from 2^31 - 1 - k.
inline float negative_log(int32_t k) {
    constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
    const uint32_t shifted = as_bits(float(k) + 0.5f) - (kSqrtHalf + (31u << 23));  // u without its power of two
    const float e = float(int32_t(shifted) >> 23);
    const float complement = (float(0x7fffffff - k) + 0.5f) * -0x1p-31f;
    const float f = e == 0.0f ? complement : as_float((shifted & 0x7fffffu) + kSqrtHalf) - 1.0f;
    float p = -0.0869833380f;  // -P, which saves a negation at the end
    p = p * f + 0.142670542f;
    p = p * f + -0.149152264f;
    p = p * f + 0.165776476f;
    p = p * f + -0.199630320f;
    p = p * f + 0.250013351f;
    p = p * f + -0.333339125f;
    return (p * f + 0.5f) * (f * f) - f - e * 0.69314718f;
}

// Standard normals for `tiles` tiles, at most kTogether: words (0, 1) and (2, 3) of a counter make a Box-Muller pair each. Words, radii
// and angles have loops of their own: each is a long chain of operations, and a processor overlaps shorter ones better.
constexpr int kTogether = 16;

inline void normal_tiles(const Source &source, uint32_t purpose, uint64_t tile, int tiles, float *out) {
    alignas(64) uint32_t angles[kTogether * kTile / 2];
    alignas(64) float radii[kTogether * kTile / 2];
    each_tile(source, purpose, tile, tiles, [&](int t, const Lanes &lanes) {
        for (int pair = 0; pair < 2; ++pair) {
            const int at = (2 * t + pair) * kLanes;
            __builtin_memcpy(radii + at, lanes.word[2 * pair], sizeof lanes.word[0]);
            __builtin_memcpy(angles + at, lanes.word[2 * pair + 1], sizeof lanes.word[0]);
        }
    });
    const int count = tiles * kTile / 2;
    for (int i = 0; i < count; ++i) radii[i] = __builtin_sqrtf(negative_log(int32_t(as_bits(radii[i]) >> 1)));
    for (int i = 0; i < count; i += kLanes)
        for (int l = 0; l < kLanes; ++l) {
            const float rho = radii[i + l];
            const uint32_t b = angles[i + l];
            const float angle = float(int32_t(b >> 2) - (1 << 29)) * 1.46291807927e-9f;  // pi 2^-31
            const float square = angle * angle;
            float c = -0.00135978230f, s = -0.000195172994f;
            c = c * square + 0.0416562930f;
            c = c * square + -0.499998957f;
            s = s * square + 0.00833217800f;
            s = s * square + -0.166666552f;
            const float cosine = c * square + 1.0f, sine = (s * square + 1.0f) * angle;
            // the two lowest bits are the signs
            out[2 * i + l] = as_float(as_bits(rho * (cosine - sine)) ^ b << 31);
            out[2 * i + kLanes + l] = as_float(as_bits(rho * (cosine + sine)) ^ (b & 2u) << 30);
        }
}

}  // namespace
