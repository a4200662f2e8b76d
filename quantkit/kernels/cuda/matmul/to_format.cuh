// Products whose result is converted to the next weights' format: each block rounds its own values, or the last block
// of 256 columns converts them to an int8 format.
#pragma once
#include "matmul/activations.cuh"
#include "core/last_block.cuh"
#include "matmul/lanes.cuh"

// A row of `width` values at `row`; this block has written those from `at` on, one per row of weights in a block, a
// power of two. counters: 0, one per 256 columns. Called by all threads of the block.
INLINE void convert_to_format(int64_t format, const uint8_t* row, int64_t width, int64_t at, uint8_t* quantized, int* counters) {
    const int of_block = WARPS / SLICES * ROWS * TEAMS;
    if (format >= ROUND_F16) {
        const int64_t i = at + threadIdx.x;
        __syncthreads();
        if (threadIdx.x >= of_block || i >= width) return;
        const float v = ((const float*)row)[i];
        ((float*)quantized)[i] = format == ROUND_F16 ? rounded<ROUND_F16>(v) : rounded<ROUND_BF16>(v);
        return;
    }
    const int64_t unit = at / 256;
    const int blocks = (int)((min((int64_t)256, width - 256 * unit) + of_block - 1) / of_block);
    if (is_last_of(counters + unit, blocks) && threadIdx.x < 32)
        quantize_unit_of(format, (const float*)row, width, quantized, unit);
}

// The first row of weights of this block.
INLINE int64_t first_of_block() { return (int64_t)blockIdx.x * (WARPS / SLICES * ROWS * TEAMS); }

// For a row in a format.
INLINE int64_t format_bytes(int64_t format, int64_t width) {
    return format >= ROUND_F16 ? 4 * width : Q8_UNIT * ((width + 255) / 256);
}
