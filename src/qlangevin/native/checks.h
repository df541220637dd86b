// Memory that Python hands over, and the checks that keep the kernels inside of it. A check compares a few integers; what it
// refuses is a std::invalid_argument, in Python a ValueError.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace {

using qlangevin::Codes;
using qlangevin::Grid;

// The memory of a tensor: address, number of bytes and, of floating numbers, their type; in Python (address, bytes) or
// (address, bytes, type), without a type float32 or integers. None is a tensor that is absent.
struct Buffer {
    uintptr_t address = 0;
    int64_t bytes = 0;
    int type = qlangevin::kFloat32;
    bool absent() const { return address == 0 && bytes == 0; }
};

template <class... Parts>
void require(bool good, const Parts &...parts) {
    if (good) return;
    std::string message;
    const auto text = [](const auto &part) {
        if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) return std::to_string(part);
        else return std::string(part);
    };
    ((message += text(parts)), ...);
    throw std::invalid_argument(message);
}

constexpr int64_t kMost = int64_t(1) << 56;  // elements; no product of such a number and the size of one overflows

inline void check_call(int64_t numel, int threads) {
    require(numel >= 0 && numel <= kMost, "numel must be between 0 and 2^56, got ", numel);
    require(threads >= 1, "threads must be at least 1, got ", threads);
}

inline void check_finite(const char *name, float x) {
    require(std::isfinite(x), name, " must be a finite float32, got ", x);
}

inline void check_variance(float variance) {
    require(variance >= 0.0f && std::isfinite(variance), "variance must be a finite float32 and not negative, got ", variance);
}

inline qlangevin::Rounding checked_rounding(int rounding) {
    require(rounding >= qlangevin::kNearest && rounding <= qlangevin::kCorrected, "there is no rounding number ", rounding);
    return qlangevin::Rounding(rounding);
}

inline qlangevin::Purpose checked_purpose(uint32_t purpose) {
    require(purpose <= qlangevin::kMoment, "there is no purpose number ", purpose);
    return qlangevin::Purpose(purpose);
}

// Returns the address of `count` elements.
template <class T>
T *checked(const char *name, const Buffer &b, int64_t count) {
    require(b.type == qlangevin::kFloat32, name, " must be of the one type that this argument has, got type ", b.type);
    require(b.bytes == count * int64_t(sizeof(T)), name, " must have ", count, " elements of ", sizeof(T), " bytes, got ", b.bytes,
            " bytes");
    require(b.address != 0 || count == 0, name, " has no memory: its address is null");
    require(b.address % alignof(T) == 0, name, " must begin at a multiple of ", alignof(T), " bytes; a copy of it does");
    return reinterpret_cast<T *>(b.address);
}

// The same for a tensor that may be absent; then null.
template <class T>
T *checked_if_any(const char *name, const Buffer &b, int64_t count) { return b.absent() ? nullptr : checked<T>(name, b, count); }

// Floating numbers of any type.
struct Floats {
    void *address = nullptr;
    qlangevin::FloatType type = qlangevin::kFloat32;
    bool is_half() const { return address && type != qlangevin::kFloat32; }
    float *wide() const { return static_cast<float *>(address); }
    uint16_t *half() const { return static_cast<uint16_t *>(address); }
};

// Returns `count` floating numbers.
inline Floats checked_floats(const char *name, Buffer b, int64_t count) {
    const int type = b.type;
    require(type >= qlangevin::kFloat32 && type <= qlangevin::kFloat16, "there is no floating type number ", type);
    b.type = qlangevin::kFloat32;
    void *address = type == qlangevin::kFloat32 ? static_cast<void *>(checked<float>(name, b, count)) : checked<uint16_t>(name, b, count);
    return {address, qlangevin::FloatType(type)};
}

inline Floats checked_floats_if_any(const char *name, const Buffer &b, int64_t count) {
    return b.absent() ? Floats{} : checked_floats(name, b, count);
}

// Returns codes of `count` elements on a grid, with an exponent for each of its blocks.
inline Codes checked_codes(const Buffer &codes, const Buffer &exponents, int code_bytes, int64_t count, const Grid &grid) {
    require(grid.kind != Grid::kNone, "codes need the grid of a format, got none");
    const int64_t blocks = grid.kind == Grid::kBlock ? count / grid.line * ((grid.line + grid.size - 1) / grid.size) : 0;
    int8_t *shared = blocks ? checked<int8_t>("exponents", exponents, blocks) : nullptr;
    require(exponents.bytes == blocks, "exponents must be as many as there are blocks, ", blocks, ", got ", exponents.bytes);
    switch (code_bytes) {
        case 1: return {checked<int8_t>("codes", codes, count), shared, 1};
        case 2: return {checked<int16_t>("codes", codes, count), shared, 2};
        case 4: return {checked<int32_t>("codes", codes, count), shared, 4};
    }
    throw std::invalid_argument("code_bytes must be 1, 2 or 4, got " + std::to_string(code_bytes));
}

// Returns numbers that are kept beside weights: of any floating type, or codes.
inline qlangevin::Stored checked_stored(const char *name, const Buffer &numbers, const Buffer &codes, const Buffer &exponents, int code_bytes,
                                        int64_t count, const Grid &grid) {
    require(numbers.absent() != codes.absent() || count == 0, name, " must be numbers or codes, and not both");
    qlangevin::Stored stored{};
    stored.grid = grid;
    if (!codes.absent()) {
        stored.codes = checked_codes(codes, exponents, code_bytes, count, grid);
        return stored;
    }
    const Floats floats = checked_floats_if_any(name, numbers, count);
    stored.numbers = floats.address, stored.type = floats.type;
    return stored;
}

// Refuses grids on which exponents leave the range of float32: kernels make 2^e by shifting.
inline void check_grid(const Grid &g) {
    require(g.kind >= Grid::kNone && g.kind <= Grid::kFloat, "there is no kind of grid number ", g.kind);
    require(g.size >= 1 && g.size <= g.line && g.line <= kMost, "blocks need 1 <= size <= line <= 2^56, got size ", g.size, ", line ",
            g.line);
    if (g.kind == Grid::kNone) return;
    require(g.min_gap >= -149 && g.min_gap <= g.max_gap && g.max_gap <= 127,
            "gaps must be between 2^-149 and 2^127, got 2^", g.min_gap, " to 2^", g.max_gap);
    require(g.low <= 0.0f && g.high >= 0.0f && std::isfinite(g.low) && std::isfinite(g.high),
            "low must be a finite number up to 0 and high one from 0 on, got ", g.low, " and ", g.high);
    if (g.kind == Grid::kFixed) return;
    require(g.shift >= 0 && g.shift <= (g.kind == Grid::kBlock ? 22 : 23), "shift must be between 0 and 23, of blocks 22, got ", g.shift);
    const float top = std::ldexp(1.0f, g.shift + 1) - (g.kind == Grid::kBlock ? 1.0f : 0.0f);
    require(g.top == top, "top must be ", top, " for shift ", g.shift, ", got ", g.top);
    const int least = g.min_gap + g.shift, most = g.max_gap + g.shift;  // exponents of blocks, binades of floats
    require(least >= -128 && least <= 0 && most <= 127, "exponents must be between -128 and 127, got ", least, " to ", most);
}

// Refuses a tensor that does not consist of whole lines of its grid.
inline void check_lines(const Grid &grid, int64_t numel) {
    require(grid.kind != Grid::kBlock || numel % grid.line == 0, "numel must be a multiple of the ", grid.line,
            " elements in a line of blocks, got ", numel);
}

// Returns the number of elements that ranges are cut at: they must hold whole lines of every block grid.
inline int64_t checked_unit(std::initializer_list<const Grid *> grids, int64_t numel) {
    int64_t longest = 1;
    bool blocks = false;
    for (const Grid *g : grids) {
        check_lines(*g, numel);
        if (g->kind == Grid::kBlock) longest = g->line > longest ? g->line : longest, blocks = true;
    }
    for (const Grid *g : grids)
        require(g->kind != Grid::kBlock || longest % g->line == 0, "lines of one tensor must divide one another, got ", g->line, " and ",
                longest);
    return blocks ? longest : qlangevin::kTile;
}

}  // namespace

namespace nanobind::detail {

template <>
struct type_caster<Buffer> {
    NB_TYPE_CASTER(Buffer, const_name("tuple[int, int] | tuple[int, int, int] | None"))

    bool from_python(handle source, uint8_t, cleanup_list *) noexcept {
        value = {};
        if (source.is_none()) return true;
        if (!PyTuple_Check(source.ptr())) return false;
        const Py_ssize_t parts = PyTuple_Size(source.ptr());
        if (parts != 2 && parts != 3) return false;
        value.address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(source.ptr(), 0));
        value.bytes = PyLong_AsLongLong(PyTuple_GetItem(source.ptr(), 1));
        const long type = parts == 3 && !PyErr_Occurred() ? PyLong_AsLong(PyTuple_GetItem(source.ptr(), 2)) : 0;
        value.type = type >= 0 && type <= qlangevin::kFloat16 ? int(type) : -1;
        if (!PyErr_Occurred()) return true;
        PyErr_Clear();
        return false;
    }
};

}  // namespace nanobind::detail
