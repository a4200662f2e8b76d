// Products of matrices with 1 to 8 rows of activations: every weight is read once; memory bandwidth is the limit.
//
// Macros: TYPE of the weights, FLOATS if it is F32, F16 or BF16; COLUMNS: rows of x; LANES that share a row of weights,
// ROWS they compute at once. With ACTIVATION, a number, the file has the fused products of up and gate instead; with
// TO, those of one row whose result is converted to a format. With TILES tensor cores multiply (tile_dots.cuh).
#ifdef TILES
#include "matmul/tile_blocks.cuh"
#else
#define BLOCKS_AT_ONCE (COLUMNS == 1 ? 5 : COLUMNS == 2 ? 4 : __CUDA_ARCH__ < 800 ? 2 : 3)
#endif
#include "matmul/products.cuh"
#ifdef FLOATS
#include "matmul/float_dots.cuh"
#else
#include "matmul/dots.cuh"
#endif
#ifdef TO
#include "matmul/to_format.cuh"
#endif
#include "matmul/gated.cuh"

#ifndef ACTIVATION

// The rows of matrix w times COLUMNS rows of x.
INLINE void write_products(const uint8_t* w, int64_t row_bytes, const uint8_t* x, int64_t x_stride, int64_t n_in, int64_t n_out,
                           uint8_t* out, int64_t out_stride, const float* bias, float scale) {
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[1] = {w};
    float sums[1][ROWS][COLUMNS];
    multiply(team, matrices, (int)row_bytes, x, x_stride, (int)n_in, sums);
    finish(team, sums, [&](int row, int column, const float* v) {
        const float y = v[0] * scale;
        *(float*)(out + column * out_stride + 4 * (int64_t)row) = bias ? y + bias[row] : y;
    });
}

#ifndef TO
KERNEL_THAT_WAITS(mul_mat, 128) {
    const float scale = at_or(a.scale, 0, 1);
    write_products(a.w, a.row_bytes, a.x, a.x_stride, a.n_in, a.n_out, a.out, a.out_stride, a.bias, scale);
}
#endif

INLINE void write_head(const mul_mat_heads_args& a, int64_t h) {
    write_products(a.w + h * a.head_bytes, a.row_bytes, a.x + h * a.x_head_bytes, a.x_stride, a.n_in, a.n_out,
                   a.out + h * a.out_head_bytes, a.out_stride, 0, 1);
}

#ifdef TO
KERNEL_THAT_WAITS(mul_mat_heads_to, 128) {
    const int64_t h = blockIdx.y;
    write_head(a, h);
    convert_to_format(a.format, a.out, a.heads * a.n_out, h * a.n_out + first_of_block(), a.quantized, a.counters);
}
#else
KERNEL_THAT_WAITS(mul_mat_heads, 128) { write_head(a, blockIdx.y); }
#endif

#if COLUMNS == 1 && !defined(TO)

KERNEL(mul_mat_id, 128) {
    const int64_t p = blockIdx.y, expert = a.ids[p];
    const float* bias = a.bias ? (const float*)(a.bias + expert * a.bias_stride) : 0;
    write_products(a.w + expert * a.expert_bytes, a.row_bytes, a.x + p / a.x_per * a.x_stride, 0, a.n_in, a.n_out,
                   a.out + 4 * p * a.n_out, 0, bias, at_or(a.scale, expert, 1));
}

#endif
#else
// activation(gate x) * (up x) for COLUMNS rows of x.
INLINE void write_gated(const Side& up, const Side& gate, int64_t row_bytes, const uint8_t* x, int64_t x_stride, int64_t n_in,
                        int64_t n_out, uint8_t* out, int64_t out_stride, const Limits& limits) {
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[2] = {up.w, gate.w};
    float sums[2][ROWS][COLUMNS];
    multiply(team, matrices, (int)row_bytes, x, x_stride, (int)n_in, sums);
    finish_gated(team, sums, up, gate, out, out_stride, limits);
}

INLINE void write_up_gate(const up_gate_args& a) {
    const Side up = {a.up, a.up_bias, at_or(a.up_scale, 0, 1)};
    const Side gate = {a.gate, a.gate_bias, at_or(a.gate_scale, 0, 1)};
    write_gated(up, gate, a.row_bytes, a.x, a.x_stride, a.n_in, a.n_out, a.out, a.out_stride, limits_of(a));
}

#ifdef TO
KERNEL_THAT_WAITS(up_gate_to, 128) {
    write_up_gate(a);
    convert_to_format(a.format, a.out, a.n_out, first_of_block(), a.quantized, a.counters);
}
#else
KERNEL_THAT_WAITS(up_gate, 128) { write_up_gate(a); }
#endif

#if COLUMNS == 1

INLINE void write_up_gate_id(const up_gate_id_args& a, int64_t p) {
    const int64_t expert = a.ids[p];
    write_gated(up_of(a, expert), gate_of(a, expert), a.row_bytes, a.x + p / a.x_per * a.x_stride, 0, a.n_in, a.n_out,
                a.out + 4 * p * a.n_out, 0, limits_of(a));
}

#ifdef TO
KERNEL(up_gate_id_to, 128) {
    const int64_t p = blockIdx.y;
    write_up_gate_id(a, p);
    convert_to_format(a.format, a.out + 4 * p * a.n_out, a.n_out, first_of_block(),
                      a.quantized + p * format_bytes(a.format, a.n_out), a.counters + p * ((a.n_out + 255) / 256));
}
#else
KERNEL(up_gate_id, 128) { write_up_gate_id(a, blockIdx.y); }
#endif

#endif
#endif
