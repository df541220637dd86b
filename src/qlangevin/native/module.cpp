// The Python module: picks the instruction set and calls its kernels. Tensors come as memory, address and bytes, which is
// checked against numel and grid (checks.h). native/__init__.py sees to it that a tensor has that memory, and the right dtype.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "checks.h"
#include "levels.h"
#include "parallel.h"
#include "typed.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace qlangevin;

namespace {

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

// ---- the functions Python calls

bool quantize(const Buffer &x, const Buffer &out, int64_t numel, const Grid &grid, int rounding, uint64_t seed, uint64_t stream,
              uint64_t step, uint32_t purpose, float variance, const Buffer &variances, const Buffer &positive,
              const Buffer &move, const Buffer &codes, const Buffer &exponents, int code_bytes, int threads) {
    check_call(numel, threads);
    check_variance(variance);
    Plan plan;
    plan.add(numel, checked_unit({&grid}, numel));
    Quantize job{};
    const Floats from = checked_floats("x", x, numel), to = checked_floats("out", out, numel);
    require(from.type == to.type, "x and out must be of one floating type, got types ", int(from.type), " and ", int(to.type));
    job.move = checked_if_any<const float>("move", move, numel);
    if (job.move && rounding == kNearest) throw std::invalid_argument("a move is not rounded to nearest; add it first");
    job.grid = grid;
    job.source = source(seed, stream, step);
    job.purpose = checked_purpose(purpose);
    job.rounding = checked_rounding(rounding);
    job.variance = variance;
    job.variances = checked_if_any<const float>("variances", variances, numel);
    job.positive = checked_if_any<const int8_t>("positive", positive, numel);
    if (!codes.absent()) job.codes = checked_codes(codes, exponents, code_bytes, numel, grid);
    return plan.all(threads, [&](const Range &r) {
        const Wide wide(from, r, true);
        Quantize part = job;
        part.x = wide.from(), part.out = to.is_half() ? wide.from() : to.wide();
        const bool good = kernels->quantize(part, r.begin, r.end);
        wide.narrow(to);
        return good;
    });
}

// Makes a step, all of whose memory is checked.
void make_step(TypedStep *self, const Buffer &theta, const Buffer &codes, const Buffer &exponents, int code_bytes,
               const Buffer &accumulator, const Buffer &gradient, int64_t numel, const Grid &weights, const Grid &gradients,
               const Grid &accumulators, uint64_t seed, uint64_t stream, uint64_t step) {
    check_call(numel, 1);
    checked_unit({&weights, &gradients, &accumulators}, numel);
    require(numel == 0 || theta.absent() != codes.absent(), "a step needs theta or its codes, and not both");
    TypedStep *made = new (self) TypedStep{};
    made->theta = checked_floats_if_any("theta", theta, numel);
    made->gradient = checked_floats("gradient", gradient, numel);
    Step *s = &made->step;
    if (theta.absent() && numel) s->codes = checked_codes(codes, exponents, code_bytes, numel, weights);
    s->accumulator = checked_if_any<float>("accumulator", accumulator, numel);
    s->numel = numel;
    s->weights = weights, s->gradients = gradients, s->accumulators = accumulators;
    s->source = source(seed, stream, step);
}

// The numbers that a step keeps beside the weights, as Python hands them over: numbers or codes, and their grid.
Stored stored(const char *name, const nb::tuple &kept, int64_t numel) {
    require(kept.size() == 5, name, " must be numbers, codes, exponents, bytes of a code and a grid");
    try {
        const Grid &grid = nb::cast<const Grid &>(kept[4]);
        check_lines(grid, numel);
        return checked_stored(name, nb::cast<Buffer>(kept[0]), nb::cast<Buffer>(kept[1]), nb::cast<Buffer>(kept[2]), nb::cast<int>(kept[3]), numel, grid);
    } catch (const std::bad_cast &) {
        throw nb::type_error("what a step keeps must be numbers, codes, exponents, bytes of a code and a grid");
    }
}

void set_center(TypedStep &t, const nb::tuple &kept, float pull) {
    check_finite("pull", pull);
    t.step.center = stored("center", kept, t.step.numel), t.step.pull = pull;
}

void set_mask(TypedStep &t, const Buffer &mask) { t.step.mask = checked<const uint8_t>("mask", mask, (t.step.numel + 7) / 8); }

void set_moments(TypedStep &t, const nb::tuple &kept, float decay, float fresh, float eps, float scale, float unscale, bool frozen) {
    for (const float x : {decay, fresh, eps, scale, unscale}) check_finite("a number of the preconditioner", x);
    t.step.moments = {stored("moments", kept, t.step.numel), decay, fresh, eps, scale, unscale, frozen};
}

void set_velocity(TypedStep &t, const nb::tuple &kept, uint64_t seed, uint64_t stream, uint64_t step, const std::vector<float> &c) {
    require(c.size() == 7, "a step with velocities has seven coefficients, got ", c.size());
    for (const float x : c) check_finite("a coefficient of a step with velocities", x);
    check_variance(c[5]), check_variance(c[6]);
    t.step.velocity = {stored("velocity", kept, t.step.numel), source(seed, stream, step), {c[0], c[1], c[2], c[3], c[4], c[5], c[6]}};
}

void sgld(std::vector<TypedStep> steps, int rounding, float lr, float weight_decay, float variance, bool maximize, int threads) {
    check_call(0, threads);
    check_finite("lr", lr);
    check_finite("weight_decay", weight_decay);
    check_variance(variance);
    const Rounding law = checked_rounding(rounding);
    Plan plan;
    for (TypedStep &typed : steps) {
        Step &s = typed.step;
        s.rounding = law, s.lr = lr, s.weight_decay = weight_decay, s.variance = variance, s.maximize = maximize;
        plan.add(s.numel, checked_unit({&s.weights, &s.gradients, &s.accumulators, &s.center.grid, &s.moments.values.grid, &s.velocity.values.grid}, s.numel));
    }
    plan.run(threads, [&] {
        return [&, scratch = std::unique_ptr<float[]>(), size = int64_t(0)](const Range &r) mutable {
            const TypedStep &typed = steps[r.tensor];
            const int64_t needed = typed.scratch_per_element() * (r.end - r.begin);
            if (needed > size) scratch.reset(new float[size_t(size = needed)]);
            typed.run(r, scratch.get());
        };
    });
}

// A conversion between numbers and codes, all of whose memory has been checked, and its plan.
struct Recoding {
    Floats values;
    Recode job;
    Plan plan;

    Recoding(const Buffer &numbers, const Buffer &codes, const Buffer &exponents, int code_bytes, int64_t numel, const Grid &grid,
             int threads) {
        check_call(numel, threads);
        plan.add(numel, checked_unit({&grid}, numel));
        values = checked_floats("values", numbers, numel);
        job = {values.wide(), checked_codes(codes, exponents, code_bytes, numel, grid), grid};
    }
    Recode over(const Wide &wide) const { return {wide.from(), job.codes, job.grid}; }
};

void encode(const Buffer &values, const Buffer &codes, const Buffer &exponents, int code_bytes, int64_t numel, const Grid &grid,
            int threads) {
    const Recoding r(values, codes, exponents, code_bytes, numel, grid, threads);
    r.plan.run(threads, [&] {
        return [&](const Range &part) { kernels->encode(r.over(Wide(r.values, part, true)), part.begin, part.end); };
    });
}

void decode(const Buffer &values, const Buffer &codes, const Buffer &exponents, int code_bytes, int64_t numel, const Grid &grid,
            int threads) {
    const Recoding r(values, codes, exponents, code_bytes, numel, grid, threads);
    r.plan.run(threads, [&] {
        return [&](const Range &part) {
            const Wide wide(r.values, part, false);
            kernels->decode(r.over(wide), part.begin, part.end);
            wide.narrow(r.values);
        };
    });
}

bool relu_with_codes(const Buffer &x, const Buffer &out, const Buffer &codes, const Buffer &exponents, int code_bytes,
                     int64_t numel, const Grid &grid, int threads) {
    const Recoding r(out, codes, exponents, code_bytes, numel, grid, threads);
    const Floats from = checked_floats("x", x, numel);
    require(from.type == r.values.type, "x and out must be of one floating type, got types ", int(from.type), " and ", int(r.values.type));
    return r.plan.all(threads, [&](const Range &part) {
        const Wide wide(from, part, true);
        const bool good = kernels->relu_with_codes(wide.from(), from.is_half() ? r.over(wide) : r.job, part.begin, part.end);
        wide.narrow(r.values);
        return good;
    });
}

bool encode_exactly(const Buffer &values, const Buffer &codes, const Buffer &exponents, int code_bytes, int64_t numel,
                    const Grid &grid, int threads) {
    const Recoding r(values, codes, exponents, code_bytes, numel, grid, threads);
    std::atomic<bool> same{true};  // the first difference ends the work
    return r.plan.all(threads, [&](const Range &part) {
        const bool good = same.load(std::memory_order_relaxed) &&
                          kernels->encode_exactly(r.over(Wide(r.values, part, true)), part.begin, part.end);
        if (!good) same = false;
        return good;
    });
}

void draw(const Buffer &out, int64_t numel, bool normal, uint64_t seed, uint64_t stream, uint64_t step, uint32_t purpose,
          int threads) {
    check_call(numel, threads);
    const bool narrow = checked_purpose(purpose) == kActivation || purpose == kError;
    require(!(normal && narrow), "activations and errors are rounded with uniform numbers: no normal ones are drawn for them");
    float *to = checked<float>("out", out, numel);
    const Source bits = source(seed, stream, step);
    Plan plan;
    plan.add(numel, kTile);
    plan.run(threads, [&] {
        return [&](const Range &r) { kernels->random(bits, purpose, normal, to, r.begin, r.end); };
    });
}

// Returns the index of the first tensor that holds an infinity or a NaN, or -1.
int64_t first_not_finite(const std::vector<Buffer> &tensors, int threads) {
    check_call(0, threads);
    Plan plan;
    std::vector<Floats> numbers;
    for (const Buffer &t : tensors) {
        const int64_t count = t.bytes / int64_t(t.type == kFloat32 ? sizeof(float) : sizeof(uint16_t));
        numbers.push_back(checked_floats("a tensor", t, count));
        check_call(t.bytes, threads);
        plan.add(count, kTile);
    }
    std::atomic<int64_t> first{INT64_MAX};
    plan.run(threads, [&] {
        return [&](const Range &r) {
            const Floats &t = numbers[r.tensor];
            if (t.is_half() ? kernels->finite_half(t.half() + r.begin, t.type, r.end - r.begin)
                            : kernels->finite(t.wide(), r.begin, r.end))
                return;
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
            check_grid(*new (grid) Grid{kind, shift, min_gap, max_gap, top, low, high, line, size});
        },
        nb::kw_only(), "kind"_a, "shift"_a, "min_gap"_a, "max_gap"_a, "top"_a, "low"_a, "high"_a, "line"_a, "size"_a);
    nb::class_<TypedStep>(m, "Step").def(
        "__init__", &make_step, nb::kw_only(), "theta"_a.none(), "codes"_a.none(), "exponents"_a.none(), "code_bytes"_a,
        "accumulator"_a.none(), "gradient"_a, "numel"_a, "weights"_a, "gradients"_a, "accumulators"_a, "seed"_a, "stream"_a,
        "step"_a)
        .def("set_center", &set_center, "kept"_a, nb::kw_only(), "pull"_a)
        .def("set_mask", &set_mask, "mask"_a)
        .def("set_moments", &set_moments, "kept"_a, nb::kw_only(), "decay"_a, "fresh"_a, "eps"_a, "scale"_a, "unscale"_a, "frozen"_a)
        .def("set_velocity", &set_velocity, "kept"_a, nb::kw_only(), "seed"_a, "stream"_a, "step"_a, "coefficients"_a);
    m.def("levels", &levels);
    m.def("level", [] { return std::string(kernels->name); });
    m.def("use_level", &use_level);
    m.def("quantize", &quantize, nb::kw_only(), "x"_a, "out"_a, "numel"_a, "grid"_a, "rounding"_a, "seed"_a, "stream"_a, "step"_a,
          "purpose"_a, "variance"_a = 0.0f, "variances"_a = nb::none(), "positive"_a = nb::none(), "move"_a = nb::none(),
          "codes"_a = nb::none(), "exponents"_a = nb::none(), "code_bytes"_a = 0, "threads"_a);
    m.def("sgld", &sgld, "steps"_a, nb::kw_only(), "rounding"_a, "lr"_a, "weight_decay"_a, "variance"_a, "maximize"_a, "threads"_a);
    m.def("encode", &encode, nb::kw_only(), "values"_a, "codes"_a, "exponents"_a.none(), "code_bytes"_a, "numel"_a, "grid"_a,
          "threads"_a);
    m.def("decode", &decode, nb::kw_only(), "values"_a, "codes"_a, "exponents"_a.none(), "code_bytes"_a, "numel"_a, "grid"_a,
          "threads"_a);
    m.def("relu_with_codes", &relu_with_codes, nb::kw_only(), "x"_a, "out"_a, "codes"_a, "exponents"_a.none(), "code_bytes"_a,
          "numel"_a, "grid"_a, "threads"_a);
    m.def("encode_exactly", &encode_exactly, nb::kw_only(), "values"_a, "codes"_a, "exponents"_a.none(), "code_bytes"_a, "numel"_a,
          "grid"_a, "threads"_a);
    m.def("draw", &draw, nb::kw_only(), "out"_a, "numel"_a, "normal"_a, "seed"_a, "stream"_a, "step"_a, "purpose"_a, "threads"_a);
    m.def("first_not_finite", &first_not_finite, "tensors"_a, "threads"_a);

    // Numbers that Python defines too; a test compares them.
    nb::dict purposes, roundings, kinds, types;
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
    purposes["moment"] = int(kMoment);
    types["float32"] = int(kFloat32);
    types["bfloat16"] = int(kBFloat16);
    types["float16"] = int(kFloat16);
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
    m.attr("FLOAT_TYPES") = types;
}
