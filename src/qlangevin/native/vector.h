// Vectors of float as wide as the instruction set has them, in the compilers' own vector language (GCC, Clang): arithmetic,
// comparisons and `mask ? a : b` work lane by lane. Loops over memory go through `lanes`, which calls a body for each vector.
//
// Like all code that is compiled for several instruction sets, this calls compiler builtins and its own functions only: an
// inline function of the standard library could be emitted once, with instructions the machine at hand does not have.
#pragma once

#include <cstddef>
#include <cstdint>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels.h"

// For functions of vectors: compilers that count their instructions leave them out of line, and pass vectors through memory.
#define QL_INLINE inline __attribute__((always_inline))
// For longer ones that not every vector needs: 32 registers have room for both, 16 do not.
#if defined(__AVX512F__)
#define QL_INLINE_WITH_REGISTERS QL_INLINE
#else
#define QL_INLINE_WITH_REGISTERS __attribute__((noinline))
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
typedef float F __attribute__((vector_size(4 * kWidth)));
typedef int32_t I __attribute__((vector_size(4 * kWidth)));
typedef uint32_t U __attribute__((vector_size(4 * kWidth)));
typedef uint64_t Wide __attribute__((vector_size(4 * kWidth)));

inline F all(float x) { return F{} + x; }

// Operations that the language lacks or compilers do not find: square roots; a < b ? a : b and a > b ? a : b in one instruction each
// (b, if one of them is a NaN); whether any lane of a mask is set, or any number at most another.
#if defined(__AVX512F__)
inline F root(F x) { return (F)_mm512_sqrt_ps((__m512)x); }
inline F lesser(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
inline F greater(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
inline bool any(I mask) { return _mm512_movepi32_mask((__m512i)mask) != 0; }
inline bool any_within(F x, float most) { return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(most), _CMP_LE_OQ) != 0; }
#elif defined(__AVX2__)
inline F root(F x) { return (F)_mm256_sqrt_ps((__m256)x); }
inline F lesser(F a, F b) { return (F)_mm256_min_ps((__m256)a, (__m256)b); }
inline F greater(F a, F b) { return (F)_mm256_max_ps((__m256)a, (__m256)b); }
inline bool any(I mask) { return _mm256_movemask_ps((__m256)mask) != 0; }
#elif defined(__SSE2__)
inline F root(F x) { return (F)_mm_sqrt_ps((__m128)x); }
inline F lesser(F a, F b) { return (F)_mm_min_ps((__m128)a, (__m128)b); }
inline F greater(F a, F b) { return (F)_mm_max_ps((__m128)a, (__m128)b); }
inline bool any(I mask) { return _mm_movemask_ps((__m128)mask) != 0; }
#else
inline F root(F x) {
    for (int l = 0; l < kWidth; ++l) x[l] = __builtin_sqrtf(x[l]);
    return x;
}
inline F lesser(F a, F b) { return a < b ? a : b; }
inline F greater(F a, F b) { return a > b ? a : b; }
inline bool any(I mask) {
    int32_t bits = 0;
    for (int l = 0; l < kWidth; ++l) bits |= mask[l];
    return bits != 0;
}
#endif
#if !defined(__AVX512F__)
inline bool any_within(F x, float most) { return any(x <= most); }
#endif

// `size`, which is not negative, with the sign of another number; and x with its sign changed where that number is negative.
#if defined(__AVX512F__)
inline F with_sign(F size, F of) { return (F)_mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0x80000000u)), (__m512i)of, (__m512i)size, 0xea); }
inline F times_sign(F x, F of) { return (F)_mm512_ternarylogic_epi32(_mm512_set1_epi32(int(0x80000000u)), (__m512i)of, (__m512i)x, 0x6a); }
#else
inline F with_sign(F size, F of) { return (F)((U)size | ((U)of & 0x80000000u)); }
inline F times_sign(F x, F of) { return (F)((U)x ^ ((U)of & 0x80000000u)); }
#endif

// What comparisons make where they are combined: AVX-512 has registers for it, which vectors of integers do not reach.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
inline Mask is_less(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
inline Mask is_within(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }
inline Mask both(Mask a, Mask b) { return Mask(a & b); }
inline Mask is_equal(F a, F b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
inline bool in_all(Mask m) { return m == 0xffff; }
inline bool in_any(Mask m) { return m != 0; }
inline Mask differ(Mask a, Mask b) { return Mask(a ^ b); }
inline I one_more(I x, Mask where) { return (I)_mm512_mask_add_epi32((__m512i)x, where, (__m512i)x, _mm512_set1_epi32(1)); }
inline F sum_where(Mask m, F a, F b) { return (F)_mm512_mask_add_ps((__m512)a, m, (__m512)a, (__m512)b); }
inline bool in_any_but(Mask m, Mask but) { return (m & ~but & 0xffff) != 0; }
inline F choose(Mask m, F a, F b) { return (F)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a); }
#else
typedef I Mask;
inline Mask is_less(F a, F b) { return a < b; }
inline Mask is_within(F a, F b) { return a <= b; }
inline Mask both(Mask a, Mask b) { return a & b; }
inline Mask is_equal(F a, F b) { return a == b; }
inline bool in_all(Mask m) { return !any(~m); }
inline bool in_any(Mask m) { return any(m); }
inline Mask differ(Mask a, Mask b) { return a ^ b; }
inline I one_more(I x, Mask where) { return x - where; }  // a mask that is true is -1
inline F sum_where(Mask m, F a, F b) { return a + (F)(m & (I)b); }
inline bool in_any_but(Mask m, Mask but) { return any(m & ~but); }
inline F choose(Mask m, F a, F b) { return m ? a : b; }
#endif

// Sixteen numbers; a lane takes the one that the four lowest bits of its index name.
struct Table {
    alignas(64) float entries[16];
#if defined(__AVX512F__)
    F operator[](U index) const { return (F)_mm512_permutexvar_ps((__m512i)index, _mm512_load_ps(entries)); }
#elif defined(__AVX2__)
    F operator[](U index) const {
        const __m256i lanes = (__m256i)index;
        const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(entries), lanes);
        const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(entries + 8), lanes);
        return (F)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(lanes, 28)));
    }
#else
    F operator[](U index) const {
        F x;
        for (int l = 0; l < kWidth; ++l) x[l] = entries[index[l] & 15u];
        return x;
    }
#endif
};

inline F magnitude(F x) { return (F)((U)x & 0x7fffffffu); }
inline F positive(F x) { return greater(x, F{}); }
// Towards zero, for any number. Zero may have either sign.
#if defined(__AVX512F__)
inline F whole(F x) { return (F)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
#elif defined(__AVX2__)
inline F whole(F x) { return (F)_mm256_round_ps((__m256)x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC); }
#else
inline F whole(F x) {
    const I fits = magnitude(x) < 0x1p23f;
    return fits ? __builtin_convertvector(__builtin_convertvector(fits ? x : F{}, I), F) : x;
}
#endif
inline F one_where(I mask) { return (F)(mask & (I)all(1.0f)); }

// Whole numbers in the lanes, |x| < 2^31; and these as bytes in memory, which compilers do not vectorize well.
inline I integers(F x) { return __builtin_convertvector(x, I); }
inline F floats(I x) { return __builtin_convertvector(x, F); }
#if defined(__AVX512F__)
inline I load_bytes(const int8_t *p) { return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline void store_bytes(int8_t *p, I x) { _mm_storeu_si128((__m128i *)p, _mm512_cvtepi32_epi8((__m512i)x)); }
#elif defined(__AVX2__)
inline I load_bytes(const int8_t *p) { return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)); }
inline void store_bytes(int8_t *p, I x) {
    const __m256i words = _mm256_packs_epi32((__m256i)x, (__m256i)x), bytes = _mm256_packs_epi16(words, words);
    const __m256i joined = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64((__m128i *)p, _mm256_castsi256_si128(joined));
}
#else
inline I load_bytes(const int8_t *p) {
    I x;
    for (int l = 0; l < kWidth; ++l) x[l] = p[l];
    return x;
}
inline void store_bytes(int8_t *p, I x) {
    for (int l = 0; l < kWidth; ++l) p[l] = int8_t(x[l]);
}
#endif

// The same for words of 16 bits, without sign; what is stored has no other bits.
#if defined(__AVX512F__)
inline U load_words(const uint16_t *p) { return (U)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)); }
inline void store_words(uint16_t *p, U x) { _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16((__m512i)x)); }
#elif defined(__AVX2__)
inline U load_words(const uint16_t *p) { return (U)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)); }
inline void store_words(uint16_t *p, U x) {
    const __m256i words = _mm256_packus_epi32((__m256i)x, (__m256i)x), joined = _mm256_permute4x64_epi64(words, 0x08);
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(joined));
}
#else
typedef uint16_t Words __attribute__((vector_size(2 * kWidth)));
inline U load_words(const uint16_t *p) {
    Words x;
    __builtin_memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, U);
}
inline void store_words(uint16_t *p, U x) {
    const Words words = __builtin_convertvector(x, Words);
    __builtin_memcpy(p, &words, sizeof words);
}
#endif

// A piece of memory: a full vector, or the shorter one at the end (missing lanes read as zero).
struct Full {
    static constexpr int64_t count = kWidth;
    F load(const float *p) const {
        F x;
        __builtin_memcpy(&x, p, sizeof x);
        return x;
    }
    void store(float *p, F x) const { __builtin_memcpy(p, &x, sizeof x); }
    I load(const int8_t *p) const { return load_bytes(p); }
    void store(int8_t *p, I x) const { store_bytes(p, x); }
    U load(const uint16_t *p) const { return load_words(p); }
    void store(uint16_t *p, U x) const { store_words(p, x); }
};
struct Part {
    int64_t count;
    F load(const float *p) const {
        F x = {};
        __builtin_memcpy(&x, p, std::size_t(count) * sizeof(float));
        return x;
    }
    void store(float *p, F x) const { __builtin_memcpy(p, &x, std::size_t(count) * sizeof(float)); }
    I load(const int8_t *p) const {
        int8_t all[kWidth] = {};
        __builtin_memcpy(all, p, std::size_t(count));
        return load_bytes(all);
    }
    void store(int8_t *p, I x) const {
        int8_t all[kWidth];
        store_bytes(all, x);
        __builtin_memcpy(p, all, std::size_t(count));
    }
    U load(const uint16_t *p) const {
        uint16_t all[kWidth] = {};
        __builtin_memcpy(all, p, std::size_t(count) * sizeof(uint16_t));
        return load_words(all);
    }
    void store(uint16_t *p, U x) const {
        uint16_t all[kWidth];
        store_words(all, x);
        __builtin_memcpy(p, all, std::size_t(count) * sizeof(uint16_t));
    }
};

template <class Body>
QL_INLINE void lanes(int64_t n, const Body &body) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, Full{});
    if (i < n) body(i, Part{n - i});
}

inline float as_float(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t as_bits(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

}  // namespace
