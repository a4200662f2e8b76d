// Activation functions, and gated linear units: activation(gate) * up with all clamps (reference.py activate, gate).
//
//     silu         x / (1 + e^-x)                     gelu_erf     x / 2 (1 + erf(x / sqrt 2))
//     sigmoid      1 / (1 + e^-x)                     gelu_quick   x / (1 + e^-1.702x)
//     relu         max(x, 0)                          gelu         x / 2 (1 + tanh(sqrt(2/pi) x (1 + 0.044715 x^2)))
//     relu_sqr     max(x, 0)^2                        swiglu_oai   x / (1 + e^-alpha x), times up + 1
//     softplus     log(1 + e^x), above 20 x itself
//
// ggml looks gelu and gelu_quick up in tables of half floats: x is rounded to half before and the result after; beyond
// +-10, where it leaves the table of gelu, x is as it is, or zero. Here both roundings are done and the function between
// them is computed. A kernel is compiled with -DACTIVATION=n (glu.py knows the numbers); limits that are 0 are off.
#pragma once
#include "device.cuh"

#define ACT_SILU 0
#define ACT_GELU 1
#define ACT_GELU_ERF 2
#define ACT_GELU_QUICK 3
#define ACT_RELU 4
#define ACT_RELU_SQR 5
#define ACT_SIGMOID 6
#define ACT_SOFTPLUS 7
#define ACT_SWIGLU_OAI 8

// Comparisons are written so that a NaN stays one, as in numpy.
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

// kind: a constant, so that one case is left.
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
        default: return x * sigmoid(alpha * x);
    }
}

#ifdef ACTIVATION
// activation(x) with its clamps, those of up not among them.
INLINE float activated(float x, float gate_limit, float act_limit, float alpha) {
    if (gate_limit != 0) x = at_most(x, gate_limit);
    const float y = activation(ACTIVATION, x, alpha);
    return act_limit != 0 ? at_most(y, act_limit) : y;
}

// activation(gate) * up, or, of swiglu_oai, activation(gate) * (up + 1).
INLINE float gated(float gate, float up, float gate_limit, float act_limit, float up_limit, float alpha) {
    if (up_limit != 0) up = within(up, up_limit);
    if (ACTIVATION == ACT_SWIGLU_OAI) up += 1.0f;
    return activated(gate, gate_limit, act_limit, alpha) * up;
}
#endif
