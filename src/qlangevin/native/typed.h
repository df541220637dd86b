// Tensors of any floating type for kernels that compute in float32: a range at a time is widened, computed with, and narrowed.
#pragma once

#include <memory>

#include "checks.h"
#include "levels.h"
#include "parallel.h"

namespace {

using qlangevin::Step;

// The numbers begin .. end of a tensor as float32: where they are, or widened in memory of their own.
class Wide {
  public:
    Wide(const Floats &numbers, const Range &r, bool read) : begin_(r.begin), count_(r.end - r.begin) {
        if (!numbers.is_half()) {
            from_ = numbers.wide();
            return;
        }
        own_.reset(new float[size_t(count_)]);
        from_ = own_.get() - begin_;
        if (read) kernels->widen(numbers.half() + begin_, numbers.type, own_.get(), count_);
    }
    float *from() const { return from_; }  // number i of the tensor is from()[i]
    void narrow(const Floats &to) const {
        if (own_) kernels->narrow(own_.get(), to.type, to.half() + begin_, count_);
    }

  private:
    int64_t begin_, count_;
    std::unique_ptr<float[]> own_;
    float *from_;
};

// A step of a tensor whose weights and gradient may be of any floating type.
struct TypedStep {
    Step step;
    Floats theta, gradient;

    // Floats that a step needs for each element: theta, drift, and what is beside them.
    int64_t own_scratch() const {
        const bool beside = step.mask || is_there(step.center) || is_there(step.moments.values);
        return is_there(step.velocity.values) ? 7 : beside ? 4 : 2;
    }
    int64_t scratch_per_element() const { return own_scratch() + (theta.is_half() ? 1 : 0); }

    // Steps the elements of a range; scratch holds `scratch_per_element` floats for each.
    void run(const Range &r, float *scratch) const {
        const int64_t n = r.end - r.begin;
        Step s = step;
        s.theta = theta.wide(), s.gradient = gradient.wide();
        if (gradient.is_half()) {  // widened where the drift will be, which is made of it element by element
            kernels->widen(gradient.half() + r.begin, gradient.type, scratch + n, n);
            s.gradient = scratch + n - r.begin;
        }
        if (!theta.is_half()) return kernels->step(s, r.begin, r.end, scratch);
        float *wide = scratch + own_scratch() * n;
        if (!s.accumulator) kernels->widen(theta.half() + r.begin, theta.type, wide, n);
        s.theta = wide - r.begin;
        kernels->step(s, r.begin, r.end, scratch);
        kernels->narrow(wide, theta.type, theta.half() + r.begin, n);
    }

  private:
    static bool is_there(const qlangevin::Stored &s) { return s.numbers || s.codes.codes; }
};

}  // namespace
