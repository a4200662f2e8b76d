// Activation functions and gated linear units: activation(gate) * up with all clamps.
//
//     silu         x / (1 + e^-x)                     gelu_erf     x / 2 (1 + erf(x / sqrt 2))
//     sigmoid      1 / (1 + e^-x)                     gelu_quick   x / (1 + e^-1.702x)
//     relu         max(x, 0)                          gelu         x / 2 (1 + tanh(sqrt(2/pi) x (1 + 0.044715 x^2)))
//     relu_sqr     max(x, 0)^2                        swiglu_oai   x / (1 + e^-alpha x), times up + 1
//     softplus     log(1 + e^x), x above 20           linear       x
//
// ggml looks gelu and gelu_quick up in f16 tables: x is rounded to f16 before, the result after; beyond +-10, outside
// the gelu table, the result is x or zero. Here both roundings are kept and the function between them is computed.
// Kernels are compiled with -DACTIVATION=n (numbers in glu.py); a limit of 0 is off.
#pragma once
#include "core/device.cuh"

#define ACT_SILU 0
#define ACT_GELU 1
#define ACT_GELU_ERF 2
#define ACT_GELU_QUICK 3
#define ACT_RELU 4
#define ACT_RELU_SQR 5
#define ACT_SIGMOID 6
#define ACT_SOFTPLUS 7
#define ACT_SWIGLU_OAI 8
#define ACT_LINEAR 9

// These comparisons propagate NaN, as numpy does.
INLINE float at_most(float x, float limit) { return x > limit ? limit : x; }
INLINE float at_least(float x, float limit) { return x < limit ? limit : x; }
INLINE float within(float x, float limit) { return at_least(at_most(x, limit), -limit); }

INLINE float round_half(float x) { return half_to_float(float_to_half(x)); }
INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

INLINE float gelu(float x) {
    const float h = round_half(x);
    const float inner = 0.797884583f * h * (1.0f + 0.044715f * h * h);
    const float y = round_half(0.5f * h * (1.0f + tanhf(inner)));
    return x <= -10.0f ? 0.0f : x >= 10.0f ? x : y;
}

INLINE float gelu_quick(float x) {
    const float h = round_half(x);
    return round_half(h * sigmoid(1.702f * h));
}

// kind is a constant, so only one case is compiled.
INLINE float activation(int kind, float x, float alpha) {
    switch (kind) {
        case ACT_SILU: return x * sigmoid(x);
        case ACT_GELU: return gelu(x);
        case ACT_GELU_ERF: return 0.5f * x * (1.0f + erff(x * 0.707106781f));
        case ACT_GELU_QUICK: return gelu_quick(x);
        case ACT_RELU: return at_least(x, 0.0f);
        case ACT_RELU_SQR: return at_least(x, 0.0f) * at_least(x, 0.0f);
        case ACT_SIGMOID: return sigmoid(x);
        case ACT_SOFTPLUS: return x > 20.0f ? x : log1pf(expf(x));
        case ACT_LINEAR: return x;
        default: return x * sigmoid(alpha * x);
    }
}

#ifdef ACTIVATION
// activation(x) with the clamps of the gate.
INLINE float activated(float x, float gate_limit, float act_limit, float alpha) {
    if (gate_limit != 0) x = at_most(x, gate_limit);
    const float y = activation(ACTIVATION, x, alpha);
    return act_limit != 0 ? at_most(y, act_limit) : y;
}

// activation(gate) * up, or activation(gate) * (up + 1) for swiglu_oai.
INLINE float gated(float gate, float up, float gate_limit, float act_limit, float up_limit, float alpha) {
    if (up_limit != 0) up = within(up, up_limit);
    if (ACTIVATION == ACT_SWIGLU_OAI) up += 1.0f;
    return activated(gate, gate_limit, act_limit, alpha) * up;
}
#endif
