// Convert rows of activations to the formats of activations.cuh. Compiled with FORMAT.
#include "matmul/activations.cuh"

// Rows of x are x_stride bytes apart, rows of out contiguous.
struct quantize_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride, n;
    uint8_t* out;
};

#if OF_ROW(FORMAT)

// Formats with scales of a row: a block per row.
struct quantize_rows_args : quantize_args {};

KERNEL(quantize_rows, 256) {
    __shared__ float2 shared[64];
    const int64_t row = blockIdx.x, units = (a.n + 255) / 256;
    const float* x = (const float*)(a.x + row * a.x_stride);
    float v[8], amax[2] = {0, 0};
    for (int64_t first = 8 * threadIdx.x; first < a.n; first += 2048) {
        load_eight(x, first, a.n, v);
        for (int i = 0; i < 8; i++) amax[i / 4] = fmaxf(amax[i / 4], fabsf(v[i]));
    }
    const RowScales scales = scales_of_row<FORMAT>(amax, shared);
    for (int64_t unit = threadIdx.x >> 5; unit < units; unit += 8) {
        load_eight(x, 256 * unit + 8 * (threadIdx.x & 31), a.n, v);
        quantize_unit_by<FORMAT>(scales, v, a.out + row * Q8_UNIT * units, unit, units);
    }
}

#else

KERNEL(quantize, 128) {
    if (FORMAT < ROUND_F16) {
        const int64_t index = (int64_t)blockIdx.x * 4 + (threadIdx.x >> 5), units = (a.n + 255) / 256;
        if (index >= a.rows * units) return;
        const int64_t row = index / units, unit = index % units;
        float v[8];
        load_eight((const float*)(a.x + row * a.x_stride), 256 * unit + 8 * (threadIdx.x & 31), a.n, v);
        quantize_unit<FORMAT>(v, a.out + row * Q8_UNIT * units, unit, units);
    } else {
        const int64_t pieces = (a.n + 511) / 512, row = blockIdx.x / pieces, first = blockIdx.x % pieces * 512;
        const float* x = (const float*)(a.x + row * a.x_stride);
        float* out = (float*)(a.out + 4 * row * a.n);
        for (int64_t i = first + threadIdx.x; i < first + 512 && i < a.n; i += 128) out[i] = rounded<FORMAT>(x[i]);
    }
}

#endif
