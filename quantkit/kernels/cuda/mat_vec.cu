// Products of matrices with 1 to 8 rows of activations: every weight is read once, and reading them is all the time.
//
// Macros: TYPE of the weights, FLOATS if it is F32, F16 or BF16; COLUMNS, rows of x; LANES that share a row of weights,
// ROWS that they compute at once. With ACTIVATION, its number, the file has the fused products of up and gate instead.
#define BLOCKS_AT_ONCE (COLUMNS == 1 ? 5 : COLUMNS == 2 ? 4 : __CUDA_ARCH__ < 800 ? 2 : 3)
#include "products.cuh"
#ifdef FLOATS
#include "float_dots.cuh"
#else
#include "dots.cuh"
#endif

// A value at an address, or what stands for it where there is none.
INLINE float at_or(const float* p, int64_t i, float otherwise) { return p ? p[i] : otherwise; }

#ifndef ACTIVATION

// The rows of a matrix, from w on, times COLUMNS rows of x.
INLINE void write_products(const uint8_t* w, int64_t row_bytes, const uint8_t* x, int64_t x_stride, int64_t n_in,
                           int64_t n_out, uint8_t* out, int64_t out_stride, const float* bias, float scale) {
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[1] = {w};
    float sums[1][ROWS][COLUMNS];
    multiply(team, matrices, (int)row_bytes, x, x_stride, (int)n_in, sums);
    finish(team, sums, [&](int row, int column, const float* v) {
        const float y = v[0] * scale;
        *(float*)(out + column * out_stride + 4 * (int64_t)row) = bias ? y + bias[row] : y;
    });
}

KERNEL(mul_mat, 128) {
    const float scale = at_or(a.scale, 0, 1);
    write_products(a.w, a.row_bytes, a.x, a.x_stride, a.n_in, a.n_out, a.out, a.out_stride, a.bias, scale);
}

KERNEL(mul_mat_heads, 128) {
    const int64_t h = blockIdx.y;
    uint8_t* out = a.out + 4 * h * a.n_out;
    write_products(a.w + h * a.head_bytes, a.row_bytes, a.x + h * a.x_head_bytes, a.x_stride, a.n_in, a.n_out, out,
                   a.out_stride, 0, 1);
}

#if COLUMNS == 1

KERNEL(mul_mat_id, 128) {
    const int64_t p = blockIdx.y, expert = a.ids[p];
    const float* bias = a.bias ? (const float*)(a.bias + expert * a.bias_stride) : 0;
    write_products(a.w + expert * a.expert_bytes, a.row_bytes, a.x + p / a.x_per * a.x_stride, 0, a.n_in, a.n_out,
                   a.out + 4 * p * a.n_out, 0, bias, at_or(a.scale, expert, 1));
}

#endif
#else
#include "functions.cuh"

// One of two matrices, and what is done to its products.
struct Side {
    const uint8_t* w;
    const float* bias;
    float scale;

    INLINE_METHOD float of(float product, int row) const {
        const float y = product * scale;
        return bias ? y + bias[row] : y;
    }
};

struct Limits {
    float gate, act, up, alpha;
};

// activation(gate x) * (up x) for COLUMNS rows of x.
INLINE void write_gated(const Side& up, const Side& gate, int64_t row_bytes, const uint8_t* x, int64_t x_stride,
                        int64_t n_in, int64_t n_out, uint8_t* out, int64_t out_stride, const Limits& limits) {
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[2] = {up.w, gate.w};
    float sums[2][ROWS][COLUMNS];
    multiply(team, matrices, (int)row_bytes, x, x_stride, (int)n_in, sums);
    finish(team, sums, [&](int row, int column, const float* v) {
        const float y = gated(gate.of(v[1], row), up.of(v[0], row), limits.gate, limits.act, limits.up, limits.alpha);
        *(float*)(out + column * out_stride + 4 * (int64_t)row) = y;
    });
}

KERNEL(up_gate, 128) {
    const Side up = {a.up, a.up_bias, at_or(a.up_scale, 0, 1)};
    const Side gate = {a.gate, a.gate_bias, at_or(a.gate_scale, 0, 1)};
    const Limits limits = {(float)a.gate_limit, (float)a.act_limit, (float)a.up_limit, (float)a.alpha};
    write_gated(up, gate, a.row_bytes, a.x, a.x_stride, a.n_in, a.n_out, a.out, a.out_stride, limits);
}

#if COLUMNS == 1

INLINE Side side_of(const uint8_t* w, int64_t expert_bytes, const uint8_t* bias, int64_t bias_stride,
                    const float* scale, int64_t expert) {
    return {w + expert * expert_bytes, bias ? (const float*)(bias + expert * bias_stride) : 0, at_or(scale, expert, 1)};
}

KERNEL(up_gate_id, 128) {
    const int64_t p = blockIdx.y, expert = a.ids[p];
    const Side up = side_of(a.up, a.up_expert_bytes, a.up_bias, a.up_bias_stride, a.up_scale, expert);
    const Side gate = side_of(a.gate, a.gate_expert_bytes, a.gate_bias, a.gate_bias_stride, a.gate_scale, expert);
    const Limits limits = {(float)a.gate_limit, (float)a.act_limit, (float)a.up_limit, (float)a.alpha};
    write_gated(up, gate, a.row_bytes, a.x + p / a.x_per * a.x_stride, 0, a.n_in, a.n_out, a.out + 4 * p * a.n_out, 0,
                limits);
}

#endif
#endif
