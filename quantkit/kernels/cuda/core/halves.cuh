// Arithmetic on two f16 packed in a word, as tensor cores read them; denormals are kept.
#pragma once
#include "core/device.cuh"

#ifdef QUANTKIT_HOST
INLINE uint32_t times_halves(uint32_t a, uint32_t b) {
    return host_halves(a, b, [](float x, float y) { return x * y; });
}
INLINE uint32_t minus_halves(uint32_t a, uint32_t b) {
    return host_halves(a, b, [](float x, float y) { return x - y; });
}
#else
INLINE uint32_t times_halves(uint32_t a, uint32_t b) {
    asm("mul.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
INLINE uint32_t minus_halves(uint32_t a, uint32_t b) {
    asm("sub.rn.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
}
#endif
