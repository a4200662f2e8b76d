// Scales of sub-blocks as multiples of a common scale; the twin of quantkit/kernels/cpu/encode/ik_scales.py.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, make_qx_quants.
#pragma once
#include "encode/lane.cuh"

// The integer nearest to v, clamped to low .. high.
INLINE int nearest_multiple(float v, int low, int high) { return max(min(nearest_int(v), high), low); }

// A trial with multiples -levels .. levels - 1: sums, scale by scale, for the inverse of trial k of 19.
struct Multiples {
    static const int TRIES = 19;
    float inverse, qx, q2;

    __device__ __forceinline__ Multiples(int k, float top, int levels) : qx(0), q2(0) {
        const int tenths = k <= 9 ? k - 10 : k - 9;  // 0, then -9 .. 9 without 0
        inverse = -((k ? 0.1f * (float)tenths : 0.0f) + (float)levels) / top;
    }
    __device__ __forceinline__ void add(float x, float w, int levels) {
        const float q = (float)nearest_multiple(inverse * x, -levels, levels - 1);
        qx = qx + w * x * q;
        q2 = q2 + w * q * q;
    }
};

// The best fit of 19 trials: d, and the inverse that gives the multiples.
struct Fitted {
    float d, inverse;
};

INLINE Fitted best_multiples(const float* qx, const float* q2, float top, int levels) {
    Fitted result = {q2[0] != 0 ? qx[0] / q2[0] : 0, Multiples(0, top, levels).inverse};
    float best = result.d * qx[0];
    for (int k = 1; k < Multiples::TRIES; k++) {
        if (!(q2[k] > 0 && qx[k] * qx[k] > best * q2[k])) continue;
        result = Fitted{qx[k] / q2[k], Multiples(k, top, levels).inverse};
        best = result.d * qx[k];
    }
    return result;
}
