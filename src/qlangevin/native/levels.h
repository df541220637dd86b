// The instruction sets that the kernels were compiled for, and the one in use.
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"

namespace qlangevin {
extern const Kernels kernels_baseline;
#ifdef QL_X86
extern const Kernels kernels_avx2, kernels_avx512;
#endif
}  // namespace qlangevin

namespace {

using qlangevin::Kernels;

std::vector<const Kernels *> supported() {
    std::vector<const Kernels *> levels = {&qlangevin::kernels_baseline};
#ifdef QL_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) levels.push_back(&qlangevin::kernels_avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        levels.push_back(&qlangevin::kernels_avx512);
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

}  // namespace
