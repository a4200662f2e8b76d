// The epilogue of products: scale and bias, and, with ACTIVATION, gate and up combined.
#pragma once
#include "matmul/products.cuh"
#include "matmul/lanes.cuh"

// The value at an address, or a default for a null address.
INLINE float at_or(const float* p, int64_t i, float otherwise) { return p ? p[i] : otherwise; }

#ifdef ACTIVATION
#include "core/functions.cuh"

// One of two matrices, with its scale and bias.
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

template <typename A> INLINE Limits limits_of(const A& a) {
    return {(float)a.gate_limit, (float)a.act_limit, (float)a.up_limit, (float)a.alpha};
}

INLINE Side side_of(const uint8_t* w, int64_t expert_bytes, const uint8_t* bias, int64_t bias_stride, const float* scale,
                    int64_t expert) {
    return {w + expert * expert_bytes, bias ? (const float*)(bias + expert * bias_stride) : 0, at_or(scale, expert, 1)};
}

INLINE Side up_of(const up_gate_id_args& a, int64_t expert) {
    return side_of(a.up, a.up_expert_bytes, a.up_bias, a.up_bias_stride, a.up_scale, expert);
}

INLINE Side gate_of(const up_gate_id_args& a, int64_t expert) {
    return side_of(a.gate, a.gate_expert_bytes, a.gate_bias, a.gate_bias_stride, a.gate_scale, expert);
}

// Sum the shares of up's and gate's products and write activation(gate) * up.
template <int R, int C>
INLINE void finish_gated(const Team<R>& team, float (&sums)[2][R][C], const Side& up, const Side& gate, uint8_t* out,
                         int64_t out_stride, const Limits& limits) {
    finish(team, sums, [&](int row, int column, const float* v) {
        const float y = gated(gate.of(v[1], row), up.of(v[0], row), limits.gate, limits.act, limits.up, limits.alpha);
        *(float*)(out + column * out_stride + 4 * (int64_t)row) = y;
    });
}
#endif
