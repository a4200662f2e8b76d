// The moments of a norm: the mean to subtract and the factor to multiply by; sums in double, as in ggml.
#pragma once
#include "core/device.cuh"

#define RMS 0
#define LAYER 1
#define L2 2

// v -> (v - mean) * factor
struct Moments {
    float mean, factor;

    __device__ __forceinline__ float of(float v) const { return (v - mean) * factor; }
};

// square: the sum of the squares of n differences from the mean.
INLINE float factor_of(int kind, double square, int64_t n, double eps) {
    return (float)(1.0 / sqrt((kind == L2 ? square : square / (double)n) + eps));
}

// The moments of n values, by a warp.
INLINE Moments moments_of(int kind, const float* x, int64_t n, double eps) {
    const int lane = threadIdx.x & 31;
    float mean = 0;
    if (kind == LAYER) {
        double sum = 0;
        for (int64_t i = lane; i < n; i += 32) sum += x[i];
        mean = (float)(warp_sum(sum) / (double)n);
    }
    double square = 0;
    for (int64_t i = lane; i < n; i += 32) {
        const float v = x[i] - mean;
        square += (double)(v * v);
    }
    return {mean, factor_of(kind, warp_sum(square), n, eps)};
}
