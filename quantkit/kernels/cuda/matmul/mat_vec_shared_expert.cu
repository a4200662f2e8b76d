// Products of one token with its experts' matrices and with a dense one, a shared expert's, in one launch.
// Macros as in mat_vec.cu, COLUMNS 1; OTHER: the type of the dense matrix, if it differs.
#ifdef TILES
#include "matmul/tile_blocks.cuh"
#else
#define BLOCKS_AT_ONCE 5
#endif
#include "matmul/two_types.cuh"
#include "matmul/gated.cuh"
#include "matmul/products.cuh"
#include "matmul/to_format.cuh"

// Block x: rows, up to those of the longest matrix; y: the dense one, then the pairs of the token.
INLINE bool is_past_end(int64_t n_out) { return first_of_block() >= n_out; }

#ifndef ACTIVATION

// n_out rows of a dense matrix: dense_...
struct mul_mat_shared_expert_args : mul_mat_id_args {
    const uint8_t *dense_x, *dense_w;
    int64_t dense_row_bytes, dense_n_in, dense_n_out;
    uint8_t* dense_out;
    const float *dense_bias, *dense_scale;
};

KERNEL(mul_mat_shared_expert, 128) {
    const bool dense = blockIdx.y == 0;
    const int64_t n_out = dense ? a.dense_n_out : a.n_out, p = blockIdx.y - (int64_t)1;
    if (is_past_end(n_out)) return;
    const int64_t expert = dense ? 0 : a.ids[p];
    const float* bias = dense ? a.dense_bias : a.bias ? (const float*)(a.bias + expert * a.bias_stride) : nullptr;
    const float scale = at_or(dense ? a.dense_scale : a.scale, expert, 1);
    float* out = (float*)(dense ? a.dense_out : a.out + 4 * p * a.n_out);
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[1] = {dense ? a.dense_w : a.w + expert * a.expert_bytes};
    const uint8_t* x = dense ? a.dense_x : a.x + p / a.x_per * a.x_stride;
    float sums[1][ROWS][COLUMNS];
    multiply_either(dense, team, matrices, dense ? a.dense_row_bytes : a.row_bytes, x, 0, dense ? a.dense_n_in : a.n_in, sums);
    finish(team, sums, [&](int row, int column, const float* v) {
        const float y = v[0] * scale;
        out[row] = bias ? y + bias[row] : y;
    });
}

#else

// One input for all, or a row per pair and one for the dense matrices. Formats: -1 for none.
struct up_gate_shared_expert_args : up_gate_id_args {
    const uint8_t *dense_x, *dense_up, *dense_gate;
    int64_t dense_row_bytes, dense_n_out;
    uint8_t* dense_out;
    const float *dense_up_bias, *dense_gate_bias, *dense_up_scale, *dense_gate_scale;
    int64_t format, dense_format;
    uint8_t *quantized, *dense_quantized;
    int* counters;  // of the pairs, then of the dense ones
};

KERNEL(up_gate_shared_expert, 128) {
    const bool dense = blockIdx.y == 0;
    const int64_t n_out = dense ? a.dense_n_out : a.n_out, p = blockIdx.y - (int64_t)1, units = (a.n_out + 255) / 256;
    if (is_past_end(n_out)) return;
    const int64_t expert = dense ? 0 : a.ids[p];
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[2] = {dense ? a.dense_up : up_of(a, expert).w, dense ? a.dense_gate : gate_of(a, expert).w};
    const uint8_t* x = dense ? a.dense_x : a.x + p / a.x_per * a.x_stride;
    float sums[2][ROWS][COLUMNS];
    multiply_either(dense, team, matrices, dense ? a.dense_row_bytes : a.row_bytes, x, 0, a.n_in, sums);
    // Loaded only here, because the products leave no registers for scales and biases.
    Side up = {a.dense_up, a.dense_up_bias, at_or(a.dense_up_scale, 0, 1)};
    Side gate = {a.dense_gate, a.dense_gate_bias, at_or(a.dense_gate_scale, 0, 1)};
    if (!dense) {
        up = up_of(a, expert);
        gate = gate_of(a, expert);
    }
    uint8_t* out = dense ? a.dense_out : a.out + 4 * p * a.n_out;
    finish_gated(team, sums, up, gate, out, 0, limits_of(a));
    const int64_t format = dense ? a.dense_format : a.format;
    if (format < 0) return;
    uint8_t* quantized = dense ? a.dense_quantized : a.quantized + p * format_bytes(format, a.n_out);
    convert_to_format(format, out, n_out, first_of_block(), quantized, a.counters + (dense ? a.n_used : p) * units);
}

#endif
