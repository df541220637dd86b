// Arguments and table of the kernels. Plain data only: this header is shared by code compiled for different instruction
// sets, and nothing in it may be compiled twice.
#pragma once

#include <cstdint>

namespace qlangevin {

// The grid of a format for one tensor: `KernelGrid` of quantization/format_base.py. Blocks lie in lines of `line` elements cut into pieces of `size`, the last shorter.
struct Grid {
    enum Kind : int32_t { kNone, kFixed, kBlock, kFloat };
    int32_t kind;
    int32_t shift;                 // log2 of the gap is the binade minus this: W - 2 (block), man (float)
    int32_t min_gap, max_gap;      // range of log2 of the gap
    float top, low, high;          // largest code of a block, or 2^(man + 1); range of values
    int64_t line, size;
};

// Random bits of one tensor in one step: (seed, stream) mixed to a key.
struct Source {
    uint32_t key0, key1, step0, step1;
};
// These are numbers of quantization/random.py and of `Rounding` in quantization/operators.py; a test compares them.
enum Purpose : uint32_t {
    kRounding, kNoise, kChoice, kGradient, kWeight, kLeftover, kActivation, kError, kActivationRest, kErrorRest, kCoin, kMoment
};
enum Rounding : int32_t { kNearest, kStochastic, kCorrected };

// Codes of a QTensor: integers of `bytes` bytes, and for blocks one exponent E each (the gap is 2^(E - shift)).
struct Codes {
    void *codes;
    int8_t *exponents;
    int32_t bytes;
};

// Floating types of tensors. Kernels compute in float32; numbers of the others are widened first and narrowed afterwards.
enum FloatType : int32_t { kFloat32, kBFloat16, kFloat16 };

struct Quantize {
    const float *x;
    const float *move;  // if not null: x + move is rounded, a sum that is never rounded to float first; not with kNearest
    float *out;
    Grid grid;
    Source source;
    Purpose purpose;
    Rounding rounding;
    float variance;          // of kCorrected
    const float *variances;  // one for each element, if not null
    const int8_t *positive;  // if not null: the result is zero where this is zero or less, the derivative of ReLU
    Codes codes;             // of the result, if not null
};

// Numbers that a step keeps beside the weights: of any floating type, or codes; null if there are none. They are on the grid.
struct Stored {
    void *numbers;
    FloatType type;
    Codes codes;
    Grid grid;
};

// Running means of squared gradients times scale², and how they change: `RMS` of sampling/preconditioner.py.
struct Moments {
    Stored values;
    float decay, fresh, eps, scale, unscale;  // fresh = 1 - decay, unscale = 1 / scale
    bool frozen;
};

// Coefficients of sampling/underdamped.py.
struct Underdamped {
    float fade, kick, carry, push, follow, velocity_variance, variance;
};

struct Velocity {
    Stored values;
    Source source;
    Underdamped coefficients;
};

// One tensor of a step, of SGLD or with a velocity of SGHMC: see sampling/update.py. Addresses of what is absent are null.
struct Step {
    float *theta;  // numbers, or null if `codes` hold them
    Codes codes;
    float *accumulator;  // takes the update in theta's place; then theta = Q_W(accumulator)
    const float *gradient;
    int64_t numel;
    Grid weights, gradients, accumulators;
    Source source;
    // the same for all tensors of a call
    Rounding rounding;
    float lr, weight_decay, variance;
    bool maximize;
    // what is beside the weights
    Stored center;
    float pull;  // γ/N, towards the center
    const uint8_t *mask;  // a bit an element: 0 does not move
    Moments moments;
    Velocity velocity;
};

struct Recode {
    float *values;
    Codes codes;
    Grid grid;
};

// The kernels of one instruction set. Each works on the elements begin .. end of a tensor, whole lines of its grids; scratch holds
// `scratch_of` floats for each.
struct Kernels {
    const char *name;
    bool (*quantize)(const Quantize &, int64_t begin, int64_t end);  // false if something in the result has no code
    void (*step)(const Step &, int64_t begin, int64_t end, float *scratch);
    void (*encode)(const Recode &, int64_t begin, int64_t end);
    void (*decode)(const Recode &, int64_t begin, int64_t end);
    bool (*relu_with_codes)(const float *x, const Recode &, int64_t begin, int64_t end);  // values = relu(x); the same
    bool (*encode_exactly)(const Recode &, int64_t begin, int64_t end);  // true if the codes decode to the same bits
    void (*random)(const Source &, uint32_t purpose, bool normal, float *out, int64_t begin, int64_t end);
    bool (*finite)(const float *, int64_t begin, int64_t end);
    void (*widen)(const uint16_t *, FloatType, float *, int64_t count);   // to float32, exactly
    void (*narrow)(const float *, FloatType, uint16_t *, int64_t count);  // from float32, half to even
    bool (*finite_half)(const uint16_t *, FloatType, int64_t count);
};

constexpr int64_t kTile = 64;  // elements that share counters; ranges of elementwise work begin at multiples of it

}  // namespace qlangevin
