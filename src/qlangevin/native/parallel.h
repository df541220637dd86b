// Splits the work on tensors among threads.
#pragma once

#include <nanobind/nanobind.h>

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

namespace nb = nanobind;

struct Range {
    size_t tensor;
    int64_t begin, end;
};

constexpr int64_t kPanel = 4096;      // least number of elements in a range: they fit the cache near the core
constexpr int64_t kGrain = 32 * 1024;  // elements worth a thread: starting one takes about as long as these

// PyTorch's own threads, if it has loaded an OpenMP library (GNU's, or one that has GNU's names): they exist already, and
// between two calls they spin for a while, on processors that threads of ours would have to share with them.
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
    } catch (const std::system_error &) {  // no more threads can be started: those that were do the work
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

    // Calls work() once in each thread; it returns a function that processes one range.
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
            } catch (...) {  // out of memory, say: thrown again in the caller's thread
                const std::lock_guard<std::mutex> lock(guard);
                failure = std::current_exception();
            }
        };
        if (useful > 1) in_parallel(int(useful), loop);
        else loop();
        if (failure) std::rethrow_exception(failure);
    }

    // Returns true if test(range) is true for all ranges.
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

}  // namespace
