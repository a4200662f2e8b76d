// Two halves (f16) in a word: what the tensor cores take and the other kernels do with single ones.
#pragma once
#include "device.cuh"

// The products and the differences of two times two; denormals as they are.
INLINE uint32_t times_halves(uint32_t a, uint32_t b) {
#ifdef QUANTKIT_HOST
    return host_halves(a, b, [](float x, float y) { return x * y; });
#else
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
}

INLINE uint32_t minus_halves(uint32_t a, uint32_t b) {
#ifdef QUANTKIT_HOST
    return host_halves(a, b, [](float x, float y) { return x - y; });
#else
    uint32_t r;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
#endif
}
