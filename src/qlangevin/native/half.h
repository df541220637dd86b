// bfloat16 and float16 in memory: kernels compute in float32, which holds both exactly. Narrowing rounds to nearest, half to
// even, as PyTorch does; numbers on a grid that the type holds do not change.
#pragma once

#include "rounding.h"

namespace {

using qlangevin::FloatType;
using qlangevin::kBFloat16;

struct BFloat16 {
    static constexpr int32_t kInfinity = 0x7f80;

    static F wide(U bits) { return (F)(bits << 16); }
    static U bits(F x) {
        const U b = (U)x, rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
        return x == x ? rounded : U{} + 0x7fc0u;
    }
};

struct Float16 {
    static constexpr int32_t kInfinity = 0x7c00;

    static F wide(U bits) {
        const U size = bits & 0x7fffu, digits = size << 13;
        const I tiny = (I)size < 0x0400, endless = (I)size >= kInfinity;  // subnormal; infinite or NaN
        const U common = digits + (endless ? U{} + 0x70000000u : U{} + 0x38000000u);
        const U value = tiny ? (U)(floats((I)size) * 0x1p-24f) : common;
        return (F)(value | ((bits & 0x8000u) << 16));
    }
    static U bits(F x) {
        const F size = magnitude(x);
        const U b = (U)size, common = (b + 0xfffu + ((b >> 13) & 1u) - 0x38000000u) >> 13;
        const U tiny = (U)(size + 0.5f) - 0x3f000000u;  // beside 1/2 a number has the digits of a subnormal one
        const U finite = (I)b < 0x38800000 ? tiny : (I)b >= 0x477ff000 ? U{} + 0x7c00u : common;
        return (x == x ? finite : U{} + 0x7e00u) | (((U)x >> 16) & 0x8000u);
    }
};

template <class T>
void widen_as(const uint16_t *from, float *to, int64_t n) {
    lanes(n, [=](int64_t i, auto part) { part.store(to + i, T::wide(part.load(from + i))); });
}

template <class T>
void narrow_as(const float *from, uint16_t *to, int64_t n) {
    lanes(n, [=](int64_t i, auto part) { part.store(to + i, T::bits(part.load(from + i))); });
}

template <class T>
bool finite_as(const uint16_t *x, int64_t n) {
    I most = {};
    lanes(n, [&](int64_t i, auto part) { most = greater(most, (I)(part.load(x + i) & 0x7fffu)); });
    return int32_t(as_bits(greatest(most))) < T::kInfinity;
}

void widen(const uint16_t *from, FloatType type, float *to, int64_t n) {
    (type == kBFloat16 ? widen_as<BFloat16> : widen_as<Float16>)(from, to, n);
}

void narrow(const float *from, FloatType type, uint16_t *to, int64_t n) {
    (type == kBFloat16 ? narrow_as<BFloat16> : narrow_as<Float16>)(from, to, n);
}

bool finite_half(const uint16_t *x, FloatType type, int64_t n) {
    return (type == kBFloat16 ? finite_as<BFloat16> : finite_as<Float16>)(x, n);
}

}  // namespace
