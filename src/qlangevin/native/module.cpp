// The Python module: picks the instruction set and calls its kernels. It trusts its caller, native/__init__.py, to check tensors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace qlangevin;

namespace qlangevin {
extern const Kernels kernels_baseline;
#ifdef QL_X86
extern const Kernels kernels_avx2, kernels_avx512;
#endif
}  // namespace qlangevin

namespace {

std::vector<const Kernels *> supported() {
    std::vector<const Kernels *> levels = {&kernels_baseline};
#ifdef QL_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) levels.push_back(&kernels_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        levels.push_back(&kernels_avx512);
#endif
    return levels;
}

const Kernels *kernels = supported().back();

std::vector<std::string> levels() {
    std::vector<std::string> names;
    for (const Kernels *k : supported()) names.emplace_back(k->name);
    return names;
}

void use_level(const std::string &name) {
    for (const Kernels *k : supported())
        if (name == k->name) {
            kernels = k;
            return;
        }
    throw std::invalid_argument("this machine has no level " + name);
}

// Ranges must hold whole lines of every block grid; lines of one tensor divide one another.
int64_t unit(std::initializer_list<const Grid *> grids) {
    int64_t longest = kTile;
    bool blocks = false;
    for (const Grid *g : grids)
        if (g->kind == Grid::kBlock) {
            longest = blocks ? std::max(longest, g->line) : g->line;
            blocks = true;
        }
    return std::max<int64_t>(longest, 1);
}

template <class T>
T *pointer(uint64_t address) { return reinterpret_cast<T *>(static_cast<uintptr_t>(address)); }

// (seed, stream) to a key, as in quantization/random.py: Philox4x32-7 of (stream, 0, 0) under the seed.
Source source(uint64_t seed, uint64_t stream, uint64_t step) {
    uint32_t c[4] = {uint32_t(stream), uint32_t(stream >> 32), 0, 0}, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p0 = uint64_t(c[0]) * 0xD2511F53u, p1 = uint64_t(c[2]) * 0xCD9E8D57u;
        const uint32_t mixed[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
        std::copy(mixed, mixed + 4, c);
    }
    return {c[0], c[1], uint32_t(step), uint32_t(step >> 32)};
}

// ---- the functions Python calls; tensors come as addresses, 0 for none

bool quantize(uint64_t x, uint64_t out, int64_t numel, const Grid &grid, int rounding, uint64_t seed, uint64_t stream,
              uint64_t step, uint32_t purpose, float variance, uint64_t variances, uint64_t positive, uint64_t move, uint64_t codes,
              uint64_t exponents, int code_bytes, int threads) {
    Quantize job{};
    job.x = pointer<const float>(x);
    job.move = pointer<const float>(move);
    job.out = pointer<float>(out);
    job.grid = grid;
    job.source = source(seed, stream, step);
    job.purpose = Purpose(purpose);
    job.rounding = Rounding(rounding);
    job.variance = variance;
    job.variances = pointer<const float>(variances);
    job.positive = pointer<const int8_t>(positive);
    job.codes = {pointer<void>(codes), pointer<int8_t>(exponents), code_bytes};
    Plan plan;
    plan.add(numel, unit({&grid}));
    return plan.all(threads, [&](const Range &r) { return kernels->quantize(job, r.begin, r.end); });
}

void sgld(std::vector<Step> steps, int rounding, float lr, float weight_decay, float variance, bool maximize, int threads) {
    Plan plan;
    for (Step &s : steps) {
        s.rounding = Rounding(rounding), s.lr = lr, s.weight_decay = weight_decay, s.variance = variance, s.maximize = maximize;
        plan.add(s.numel, unit({&s.weights, &s.gradients, &s.accumulators}));
    }
    plan.run(threads, [&] {
        return [&, scratch = std::unique_ptr<float[]>(), size = int64_t(0)](const Range &r) mutable {
            const int64_t needed = 2 * (r.end - r.begin);
            if (needed > size) scratch.reset(new float[size_t(size = needed)]);
            kernels->step(steps[r.tensor], r.begin, r.end, scratch.get());
        };
    });
}

Recode recode(uint64_t values, uint64_t codes, uint64_t exponents, int code_bytes, const Grid &grid) {
    return {pointer<float>(values), {pointer<void>(codes), pointer<int8_t>(exponents), code_bytes}, grid};
}

void encode(uint64_t values, uint64_t codes, uint64_t exponents, int code_bytes, int64_t numel, const Grid &grid, int threads) {
    const Recode job = recode(values, codes, exponents, code_bytes, grid);
    Plan plan;
    plan.add(numel, unit({&grid}));
    plan.run(threads, [&] { return [&](const Range &r) { kernels->encode(job, r.begin, r.end); }; });
}

void decode(uint64_t values, uint64_t codes, uint64_t exponents, int code_bytes, int64_t numel, const Grid &grid, int threads) {
    const Recode job = recode(values, codes, exponents, code_bytes, grid);
    Plan plan;
    plan.add(numel, unit({&grid}));
    plan.run(threads, [&] { return [&](const Range &r) { kernels->decode(job, r.begin, r.end); }; });
}

bool relu_with_codes(uint64_t x, uint64_t out, uint64_t codes, uint64_t exponents, int code_bytes, int64_t numel,
                     const Grid &grid, int threads) {
    const Recode job = recode(out, codes, exponents, code_bytes, grid);
    Plan plan;
    plan.add(numel, unit({&grid}));
    return plan.all(threads, [&](const Range &r) {
        return kernels->relu_with_codes(pointer<const float>(x), job, r.begin, r.end);
    });
}

bool encode_exactly(uint64_t values, uint64_t codes, uint64_t exponents, int code_bytes, int64_t numel, const Grid &grid,
                    int threads) {
    const Recode job = recode(values, codes, exponents, code_bytes, grid);
    Plan plan;
    plan.add(numel, unit({&grid}));
    std::atomic<bool> same{true};  // the first difference ends the work
    return plan.all(threads, [&](const Range &r) {
        const bool good = same.load(std::memory_order_relaxed) && kernels->encode_exactly(job, r.begin, r.end);
        if (!good) same = false;
        return good;
    });
}

void draw(uint64_t out, int64_t numel, bool normal, uint64_t seed, uint64_t stream, uint64_t step, uint32_t purpose,
          int threads) {
    const Source bits = source(seed, stream, step);
    Plan plan;
    plan.add(numel, kTile);
    plan.run(threads, [&] {
        return [&](const Range &r) { kernels->random(bits, purpose, normal, pointer<float>(out), r.begin, r.end); };
    });
}

// Returns the index of the first tensor that holds an infinity or a NaN, or -1.
int64_t first_not_finite(const std::vector<uint64_t> &addresses, const std::vector<int64_t> &numels, int threads) {
    Plan plan;
    for (const int64_t numel : numels) plan.add(numel, kTile);
    std::atomic<int64_t> first{INT64_MAX};
    plan.run(threads, [&] {
        return [&](const Range &r) {
            if (kernels->finite(pointer<const float>(addresses[r.tensor]), r.begin, r.end)) return;
            int64_t seen = first.load(), mine = int64_t(r.tensor);
            while (mine < seen && !first.compare_exchange_weak(seen, mine)) {}
        };
    });
    return first == INT64_MAX ? -1 : first.load();
}

}  // namespace

NB_MODULE(_kernels, m) {
    using namespace nb::literals;
    find_openmp();
    nb::set_leak_warnings(false);  // Python keeps grids in a cache until it ends
    nb::class_<Grid>(m, "Grid").def(
        "__init__",
        [](Grid *grid, int kind, int shift, int min_gap, int max_gap, float top, float low, float high, int64_t line, int64_t size) {
            new (grid) Grid{kind, shift, min_gap, max_gap, top, low, high, line, size};
        },
        nb::kw_only(), "kind"_a, "shift"_a, "min_gap"_a, "max_gap"_a, "top"_a, "low"_a, "high"_a, "line"_a, "size"_a);
    nb::class_<Step>(m, "Step").def(
        "__init__",
        [](Step *self, uint64_t theta, uint64_t codes, uint64_t exponents, int code_bytes, uint64_t accumulator, uint64_t gradient,
           int64_t numel, const Grid &weights, const Grid &gradients, const Grid &accumulators, uint64_t seed, uint64_t stream,
           uint64_t step) {
            Step *s = new (self) Step{};
            s->theta = pointer<float>(theta);
            s->codes = {pointer<void>(codes), pointer<int8_t>(exponents), code_bytes};
            s->accumulator = pointer<float>(accumulator);
            s->gradient = pointer<const float>(gradient);
            s->numel = numel;
            s->weights = weights, s->gradients = gradients, s->accumulators = accumulators;
            s->source = source(seed, stream, step);
        },
        nb::kw_only(), "theta"_a, "codes"_a, "exponents"_a, "code_bytes"_a, "accumulator"_a, "gradient"_a, "numel"_a, "weights"_a,
        "gradients"_a, "accumulators"_a, "seed"_a, "stream"_a, "step"_a);
    m.def("levels", &levels);
    m.def("level", [] { return std::string(kernels->name); });
    m.def("use_level", &use_level);
    m.def("quantize", &quantize, nb::kw_only(), "x"_a, "out"_a, "numel"_a, "grid"_a, "rounding"_a, "seed"_a, "stream"_a, "step"_a,
          "purpose"_a, "variance"_a = 0.0f, "variances"_a = 0, "positive"_a = 0, "move"_a = 0, "codes"_a = 0, "exponents"_a = 0,
          "code_bytes"_a = 0, "threads"_a);
    m.def("sgld", &sgld, "steps"_a, nb::kw_only(), "rounding"_a, "lr"_a, "weight_decay"_a, "variance"_a, "maximize"_a, "threads"_a);
    m.def("encode", &encode, nb::kw_only(), "values"_a, "codes"_a, "exponents"_a, "code_bytes"_a, "numel"_a, "grid"_a, "threads"_a);
    m.def("decode", &decode, nb::kw_only(), "values"_a, "codes"_a, "exponents"_a, "code_bytes"_a, "numel"_a, "grid"_a, "threads"_a);
    m.def("relu_with_codes", &relu_with_codes, nb::kw_only(), "x"_a, "out"_a, "codes"_a, "exponents"_a, "code_bytes"_a, "numel"_a,
          "grid"_a, "threads"_a);
    m.def("encode_exactly", &encode_exactly, nb::kw_only(), "values"_a, "codes"_a, "exponents"_a, "code_bytes"_a, "numel"_a,
          "grid"_a, "threads"_a);
    m.def("draw", &draw, nb::kw_only(), "out"_a, "numel"_a, "normal"_a, "seed"_a, "stream"_a, "step"_a, "purpose"_a, "threads"_a);
    m.def("first_not_finite", &first_not_finite);

    // Numbers that Python defines too; a test compares them.
    nb::dict purposes, roundings, kinds;
    purposes["rounding"] = int(kRounding);
    purposes["noise"] = int(kNoise);
    purposes["choice"] = int(kChoice);
    purposes["gradient"] = int(kGradient);
    purposes["weight"] = int(kWeight);
    purposes["leftover"] = int(kLeftover);
    purposes["activation"] = int(kActivation);
    purposes["error"] = int(kError);
    purposes["activation_rest"] = int(kActivationRest);
    purposes["error_rest"] = int(kErrorRest);
    purposes["coin"] = int(kCoin);
    roundings["nearest"] = int(kNearest);
    roundings["stochastic"] = int(kStochastic);
    roundings["corrected"] = int(kCorrected);
    kinds["none"] = int(Grid::kNone);
    kinds["fixed"] = int(Grid::kFixed);
    kinds["block"] = int(Grid::kBlock);
    kinds["float"] = int(Grid::kFloat);
    m.attr("PURPOSES") = purposes;
    m.attr("ROUNDINGS") = roundings;
    m.attr("GRID_KINDS") = kinds;
}
