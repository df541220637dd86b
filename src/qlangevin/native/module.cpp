// The Python module: trusts its caller (qlangevin/native/__init__.py checks tensors), splits the work among threads, picks the instruction set.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels.h"

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

// ---- threads

struct Range {
    size_t tensor;
    int64_t begin, end;
};

constexpr int64_t kPanel = 4096;      // elements a kernel is given at least: what fits the cache near the core
constexpr int64_t kGrain = 32 * 1024;  // elements worth a thread: starting one costs about what these take

// PyTorch's own threads, if it has brought an OpenMP library along (GNU's, or one that knows GNU's names): they are there
// already, and between two calls they spin for a while, on processors that threads of ours would have to share with them.
using Parallel = void (*)(void (*)(void *), void *, unsigned, unsigned);
Parallel openmp = nullptr;

void find_openmp() {
    openmp = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    pthread_atfork(nullptr, nullptr, [] { openmp = nullptr; });  // its threads do not survive a fork, and it waits for them
}

// Runs loop() in this thread and in others.
template <class Loop>
void in_parallel(int threads, const Loop &loop) {
    if (openmp) return openmp([](void *each) { (*static_cast<const Loop *>(each))(); }, const_cast<Loop *>(&loop), unsigned(threads), 0);
    std::vector<std::thread> others;
    try {
        for (int t = 1; t < threads; ++t) others.emplace_back([&] { loop(); });
    } catch (const std::system_error &) {  // no more threads to be had: those there are do the work
    }
    loop();
    for (auto &thread : others) thread.join();
}

// Cuts tensors into ranges of whole units. Which range a thread takes does not matter: results depend on the index alone.
class Plan {
  public:
    void add(int64_t numel, int64_t unit) {
        const int64_t length = std::max(unit, (kPanel + unit - 1) / unit * unit);
        for (int64_t begin = 0; begin < numel; begin += length)
            ranges_.push_back({tensors_, begin, std::min(numel, begin + length)});
        total_ += numel;
        ++tensors_;
    }

    // work() is called once in each thread and returns what does one range.
    template <class Work>
    void run(int threads, const Work &work) const {
        nb::gil_scoped_release release;
        const int64_t useful = std::min<int64_t>({threads, int64_t(ranges_.size()), total_ / kGrain + 1});
        std::atomic<size_t> next{0};
        std::exception_ptr failure;
        std::mutex guard;
        auto loop = [&]() noexcept {
            try {
                auto one = work();
                for (size_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < ranges_.size();) one(ranges_[i]);
            } catch (...) {  // out of memory, say: the caller's thread is the place to tell
                const std::lock_guard<std::mutex> lock(guard);
                failure = std::current_exception();
            }
        };
        if (useful > 1) in_parallel(int(useful), loop);
        else loop();
        if (failure) std::rethrow_exception(failure);
    }

    // Whether test(range) is true for all of them.
    template <class Test>
    bool all(int threads, const Test &test) const {
        std::atomic<bool> good{true};
        run(threads, [&] {
            return [&](const Range &r) {
                if (!test(r)) good = false;
            };
        });
        return good;
    }

  private:
    std::vector<Range> ranges_;
    int64_t total_ = 0;
    size_t tensors_ = 0;
};

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

// (seed, stream) to a key, as in random.py: Philox4x32-7 of (stream, 0, 0) under the seed.
Source source(uint64_t seed, uint64_t stream, uint64_t step) {
    uint32_t c[4] = {uint32_t(stream), uint32_t(stream >> 32), 0, 0}, k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p0 = uint64_t(c[0]) * 0xD2511F53u, p1 = uint64_t(c[2]) * 0xCD9E8D57u;
        const uint32_t mixed[4] = {uint32_t(p1 >> 32) ^ c[1] ^ k0, uint32_t(p1), uint32_t(p0 >> 32) ^ c[3] ^ k1, uint32_t(p0)};
        std::copy(mixed, mixed + 4, c);
    }
    return {c[0], c[1], uint32_t(step), uint32_t(step >> 32)};
}

// ---- what Python calls; tensors come as addresses

bool quantize(uint64_t x, uint64_t out, int64_t numel, const Grid &grid, int rounding, uint64_t seed, uint64_t stream,
              uint64_t step, uint32_t purpose, float variance, uint64_t variances, uint64_t positive, uint64_t codes,
              uint64_t exponents, int bytes, int threads) {
    const Quantize job{pointer<const float>(x), pointer<float>(out), grid, source(seed, stream, step), Purpose(purpose),
                       Rounding(rounding), variance, pointer<const float>(variances), pointer<const int8_t>(positive),
                       {pointer<void>(codes), pointer<int8_t>(exponents), bytes}};
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

void recode(uint64_t values, uint64_t codes, uint64_t exponents, int bytes, int64_t numel, const Grid &grid, bool encode,
            int threads) {
    const Recode job{pointer<float>(values), {pointer<void>(codes), pointer<int8_t>(exponents), bytes}, grid};
    Plan plan;
    plan.add(numel, unit({&grid}));
    const auto kernel = encode ? kernels->encode : kernels->decode;
    plan.run(threads, [&] { return [&](const Range &r) { kernel(job, r.begin, r.end); }; });
}

bool rectify(uint64_t x, uint64_t values, uint64_t codes, uint64_t exponents, int bytes, int64_t numel, const Grid &grid, int threads) {
    const Recode job{pointer<float>(values), {pointer<void>(codes), pointer<int8_t>(exponents), bytes}, grid};
    Plan plan;
    plan.add(numel, unit({&grid}));
    return plan.all(threads, [&](const Range &r) { return kernels->rectify(pointer<const float>(x), job, r.begin, r.end); });
}

bool encode_exactly(uint64_t values, uint64_t codes, uint64_t exponents, int bytes, int64_t numel, const Grid &grid, int threads) {
    const Recode job{pointer<float>(values), {pointer<void>(codes), pointer<int8_t>(exponents), bytes}, grid};
    Plan plan;
    plan.add(numel, unit({&grid}));
    std::atomic<bool> same{true};  // one that is not is enough
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

// The first of several tensors that holds an infinity or a NaN, or -1.
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
    find_openmp();
    nb::set_leak_warnings(false);  // Python keeps grids in a cache until it ends
    nb::class_<Grid>(m, "Grid").def(
        "__init__",
        [](Grid *grid, int kind, int shift, int min_gap, int max_gap, float top, float low, float high, int64_t line, int64_t size) {
            new (grid) Grid{kind, shift, min_gap, max_gap, top, low, high, line, size};
        });
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
    m.def("quantize", &quantize);
    m.def("sgld", &sgld, "steps"_a, nb::kw_only(), "rounding"_a, "lr"_a, "weight_decay"_a, "variance"_a, "maximize"_a,
          "threads"_a);
    m.def("recode", &recode);
    m.def("rectify", &rectify);
    m.def("encode_exactly", &encode_exactly);
    m.def("draw", &draw);
    m.def("first_not_finite", &first_not_finite);
}
