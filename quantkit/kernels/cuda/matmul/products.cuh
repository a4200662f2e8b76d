// Arguments of products, the same for few rows (mat_vec.cu) and many (mat_mat.cu): the caller chooses by their number.
#pragma once
#include "core/device.cuh"

// rows of x; strides in bytes. bias, one value per row of w, and scale, one value: may be 0.
struct mul_mat_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride;
    const uint8_t* w;
    int64_t row_bytes, n_in, n_out;
    uint8_t* out;
    int64_t out_stride;
    const float *bias, *scale;
};

// One matrix per head times the head's part of x, into that of out; each is ..._head_bytes apart.
struct mul_mat_heads_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride, x_head_bytes;
    const uint8_t* w;
    int64_t row_bytes, head_bytes, heads, n_in, n_out;
    uint8_t* out;
    int64_t out_stride, out_head_bytes;
};

// Pair p of token and expert, p = token * n_used + j, is row p of out and of ids; its row of x is p / x_per.
struct mul_mat_id_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride, x_per;
    const int32_t *ids, *plan;  // plan: of moe.cu, for many rows
    int64_t n_expert, n_used;
    const uint8_t* w;
    int64_t row_bytes, expert_bytes, n_in, n_out;
    uint8_t* out;
    const uint8_t* bias;  // experts' biases are bias_stride bytes apart
    int64_t bias_stride;
    const float* scale;  // one per expert
};

// Both matrices have one type and one row_bytes. Limits that are 0 are off.
struct up_gate_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride;
    const uint8_t *up, *gate;
    int64_t row_bytes, n_in, n_out;
    uint8_t* out;
    int64_t out_stride;
    const float *up_bias, *gate_bias, *up_scale, *gate_scale;
    double gate_limit, act_limit, up_limit, alpha;
};

// As mul_mat_id; up and gate may be halves of a merged tensor: two addresses, the same bytes per expert.
struct up_gate_id_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride, x_per;
    const int32_t *ids, *plan;  // plan: of moe.cu, for many rows
    int64_t n_expert, n_used;
    const uint8_t *up, *gate;
    int64_t up_expert_bytes, gate_expert_bytes, row_bytes, n_in, n_out;
    uint8_t* out;
    const uint8_t *up_bias, *gate_bias;
    int64_t up_bias_stride, gate_bias_stride;
    const float *up_scale, *gate_scale;
    double gate_limit, act_limit, up_limit, alpha;
};

// The same with rows of out also converted to a format (to_format.cuh): of one token, or of pairs.
struct mul_mat_heads_to_args : mul_mat_heads_args {
    int64_t format;
    uint8_t* quantized;
    int* counters;
};

struct up_gate_to_args : up_gate_args {
    int64_t format;
    uint8_t* quantized;
    int* counters;
};

struct up_gate_id_to_args : up_gate_id_args {
    int64_t format;
    uint8_t* quantized;
    int* counters;
};
