// Weights of four parallel streams in a layer's input and output (DeepSeek 4; model/ops.py StreamWeights).
#include "core/functions.cuh"

// scale: [3], base: [24].
struct stream_weights_args {
    float *before, *after, *across;
    const float *x, *scale, *base;
    int64_t rows, rounds;
    double eps;
};

// The sum over four lanes whose numbers differ in the bits `near` and `far`.
INLINE float four(float v, int near, int far) {
    v += __shfl_xor_sync(FULL, v, near);
    return v + __shfl_xor_sync(FULL, v, far);
}

// Sixteen lanes have a row: each an element of its 4 by 4 matrix, and the first eight a weight, too.
KERNEL(stream_weights, 128) {
    const int64_t row = (int64_t)blockIdx.x * 8 + (threadIdx.x >> 4);
    const int lane = threadIdx.x & 15;
    const bool in_range = row < a.rows;
    const float* x = a.x + (in_range ? row : 0) * 24;
    const float eps = (float)a.eps, weight = sigmoid(x[lane & 7] * a.scale[lane >> 2 & 1] + a.base[lane & 7]);
    if (in_range && lane < 4) a.before[row * 4 + lane] = weight + eps;
    if (in_range && lane >= 4 && lane < 8) a.after[row * 4 + lane - 4] = weight * 2.0f;
    float c = x[8 + lane] * a.scale[2] + a.base[8 + lane];
    float largest = fmaxf(c, __shfl_xor_sync(FULL, c, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
    c = expf(c - largest);
    c = c / four(c, 1, 2) + eps;
    c = c / (four(c, 4, 8) + eps);
    for (int64_t i = 1; i < a.rounds; i++) {
        c = c / (four(c, 1, 2) + eps);
        c = c / (four(c, 4, 8) + eps);
    }
    if (in_range) a.across[row * 16 + (lane & 3) * 4 + (lane >> 2)] = c;
}
