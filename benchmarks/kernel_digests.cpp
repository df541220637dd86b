// Prints a digest of what each kernel computes for the grids read from stdin, to compare processors: see arm64.py.
//
// A line of stdin is a name, the fields of a Grid, the number of elements, the bytes of a code (0: none) and the number of
// exponents. Numbers to be rounded come from a linear congruential generator; some are zero, tiny, huge or infinite.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace qlangevin;

namespace qlangevin {
extern const Kernels kernels_baseline;
}

namespace {

const Kernels &kernels = kernels_baseline;

struct Digest {
    uint64_t value = 14695981039346656037u;
    void bytes(const void *data, std::size_t count) {
        const unsigned char *at = static_cast<const unsigned char *>(data);
        for (std::size_t i = 0; i < count; ++i) value = (value ^ at[i]) * 1099511628211u;
    }
    void floats(const std::vector<float> &numbers) {
        for (float x : numbers) {
            if (std::isnan(x)) x = 0.5f;  // processors differ in a NaN's bits
            bytes(&x, sizeof x);
        }
    }
};

std::vector<float> numbers(int64_t count, uint64_t seed, bool special) {
    std::vector<float> x(count);
    const float odd[] = {0.0f, -0.0f, 1e-40f, -1e-38f, 3e38f, INFINITY, -INFINITY, 127.0f / 64, 0.5f};
    for (int64_t i = 0; i < count; ++i) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float(seed >> 40) / float(1 << 23) - 1.0f) * std::ldexp(1.0f, int(seed >> 33 & 7) - 5);
        if (special && i % 7 == 3) x[i] = odd[seed >> 50 & 7];
    }
    return x;
}

void report(const char *name, const char *kernel, const Digest &digest) {
    std::printf("%s %s %016llx\n", name, kernel, static_cast<unsigned long long>(digest.value));
}

// All bit patterns of a half precision to float32, and numbers of all sizes back.
void digest_half(const char *name, FloatType type) {
    std::vector<uint16_t> every(1 << 16), narrow(10007);
    for (std::size_t i = 0; i < every.size(); ++i) every[i] = uint16_t(i);
    std::vector<float> wide(every.size()), x = numbers(10007, 11, true);
    kernels.widen(every.data(), type, wide.data(), int64_t(every.size()));
    Digest digest;
    digest.floats(wide);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= std::ldexp(1.0f, int(i % 60) - 30);
    kernels.narrow(x.data(), type, narrow.data(), int64_t(narrow.size()));
    digest.bytes(narrow.data(), 2 * narrow.size());
    digest.value += kernels.finite_half(narrow.data(), type, int64_t(narrow.size()));
    report(name, "half", digest);
}

void digest_grid(const char *name, const Grid &grid, int64_t count, int code_bytes, int64_t exponent_count) {
    const Source source{1, 2, 3, 4};
    const char *roundings[] = {"nearest", "stochastic", "corrected"};
    std::vector<float> out(count), scratch(2 * count);
    std::vector<int8_t> codes(count * 4), exponents(exponent_count);
    for (int special = 0; special < 2; ++special)
        for (int rounding = 0; rounding < 3; ++rounding) {
            const std::vector<float> x = numbers(count, 7, special);
            Quantize q{};
            q.x = x.data(), q.out = out.data(), q.grid = grid, q.source = source, q.purpose = kRounding;
            q.rounding = Rounding(rounding), q.variance = 1e-4f;
            kernels.quantize(q, 0, count);
            Digest digest;
            digest.floats(out);
            if (code_bytes && !special) {
                const Recode recode{out.data(), {codes.data(), exponents.data(), code_bytes}, grid};
                kernels.encode(recode, 0, count);
                digest.bytes(codes.data(), count * code_bytes);
                digest.bytes(exponents.data(), exponents.size());
                kernels.decode(recode, 0, count);
                digest.floats(out);
            }
            report(name, roundings[rounding], digest);
            if (special) continue;
            std::vector<float> theta = out;
            Step s{};
            s.theta = theta.data(), s.gradient = x.data(), s.numel = count;
            s.weights = s.gradients = grid, s.source = source, s.rounding = Rounding(rounding);
            s.lr = 1e-3f, s.weight_decay = 1e-2f, s.variance = 1e-5f;
            kernels.step(s, 0, count, scratch.data());
            Digest stepped;
            stepped.floats(theta);
            report(name, "step", stepped);
        }
}

}  // namespace

int main() {
    for (int normal = 0; normal < 2; ++normal) {
        std::vector<float> drawn(10000);
        kernels.random({5, 6, 7, 8}, kNoise, normal, drawn.data(), 0, 10000);
        Digest digest;
        digest.floats(drawn);
        report("random", normal ? "normal" : "uniform", digest);
    }
    digest_half("bfloat16", kBFloat16);
    digest_half("float16", kFloat16);
    char name[64];
    Grid grid{};
    long long line, size, count, exponents;
    int code_bytes;
    while (std::scanf("%63s %d %d %d %d %f %f %f %lld %lld %lld %d %lld", name, &grid.kind, &grid.shift, &grid.min_gap,
                      &grid.max_gap, &grid.top, &grid.low, &grid.high, &line, &size, &count, &code_bytes, &exponents) == 13) {
        grid.line = line, grid.size = size;
        digest_grid(name, grid, count, code_bytes, exponents);
    }
}
