// Searches of scales for a few values, one per lane; the twin of quantkit/kernels/cpu/encode/search.py.
//
// Source: llama.cpp b11434 ggml-quants.c, make_qx_quants (fit_signed), make_qkx3_quants (fit_with_min).
#pragma once
#include "encode/lane.cuh"

struct Fit {
    float scale, inverse, low, base;  // x ~ scale * level + low; levels come of inverse * (x - base)
};

// Sums over w*x*l and w*l*l for the levels -nmax .. nmax - 1 of one inverse scale.
template <int N> INLINE void signed_sums(const Values& x, const Values& w, int nmax, float inverse, float& sum_lx, float& sum_l2) {
    sum_lx = sum_l2 = 0;
#pragma unroll 8
    for (int i = 0; i < N; i++) {
        const float level = round_even(lesser(fmaxf(inverse * x[i], (float)-nmax), (float)(nmax - 1)));
        sum_lx = sum_lx + w[i] * x[i] * level;
        sum_l2 = sum_l2 + w[i] * level * level;
    }
}

// Fit x ~ scale * l with l in -nmax .. nmax - 1, maximizing (sum w*x*l)^2 / sum w*l*l; 0 for values that count as zero.
template <int N> INLINE Fit fit_signed(const Values& x, const Values& w, int nmax) {
    float largest = 0, size = 0;
    for (int i = 0; i < N; i++)
        if (fabsf(x[i]) > size) {
            size = fabsf(x[i]);
            largest = x[i];
        }
    if (size < 1e-15f) return Fit{0, 0, 0, 0};
    float sum_lx, sum_l2;
    Fit best = {0, (float)-nmax / largest, 0, 0};
    signed_sums<N>(x, w, nmax, best.inverse, sum_lx, sum_l2);
    if (sum_l2 != 0) best.scale = sum_lx / sum_l2;
    float found = best.scale * sum_lx;
    for (int k = -9; k <= 9; k++) {
        if (k == 0) continue;
        const float inverse = -((float)nmax + 0.1f * (float)k) / largest;
        signed_sums<N>(x, w, nmax, inverse, sum_lx, sum_l2);
        if (sum_l2 > 0 && sum_lx * sum_lx > found * sum_l2) {
            best.scale = sum_lx / sum_l2;
            best.inverse = inverse;
            found = best.scale * sum_lx;
        }
    }
    return best;
}

// A level 0 .. top of any v at all: clamped before it is rounded, as make_qkx3_quants does.
INLINE int guarded_level(float v, int top) { return v > 0 ? nearest_int(v < (float)top ? v : (float)top) : 0; }

// Fit x ~ scale * l + low with l in 0 .. top and low <= 0, minimizing the weighted squares of the error. Tries `steps` + 1
// inverse scales; low is the best one so far, so the trials depend on each other.
template <int N> INLINE Fit fit_with_min(const Values& x, const Values& w, int top, float start, float delta, int steps) {
    float low = x[0], high = x[0], sum_w = w[0], sum_x = sum_w * x[0];
    for (int i = 1; i < N; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        sum_w = sum_w + w[i];
        sum_x = sum_x + w[i] * x[i];
    }
    if (low > 0) low = 0;
    if (high <= low) return Fit{0, 0, low, 0};
    float inverse = (float)top / (high - low);
    Fit best = {1.0f / inverse, is_finite(inverse) ? inverse : 0.0f, low, low};
    float least = 0;
    for (int i = 0; i < N; i++) {
        const int level = min(max(nearest_int(inverse * (x[i] - low)), 0), top);
        const float off = best.scale * (float)level + low - x[i];
        least = least + w[i] * (off * off);
    }
    for (int k = 0; k <= steps; k++) {
        inverse = (start + delta * (float)k + (float)top) / (high - low);
        float sum_l = 0, sum_l2 = 0, sum_xl = 0;
#pragma unroll 8
        for (int i = 0; i < N; i++) {
            const float level = (float)guarded_level(inverse * (x[i] - low), top), wl = w[i] * level;
            sum_l = sum_l + wl;
            sum_l2 = sum_l2 + wl * level;
            sum_xl = sum_xl + wl * x[i];
        }
        const float det = sum_w * sum_l2 - sum_l * sum_l;
        if (!(det > 0)) continue;
        float scale = (sum_w * sum_xl - sum_x * sum_l) / det, new_low = (sum_l2 * sum_x - sum_l * sum_xl) / det;
        if (new_low > 0) {
            scale = sum_xl / sum_l2;
            new_low = 0;
        }
        float error = 0;
#pragma unroll 8
        for (int i = 0; i < N; i++) {
            const float off = scale * (float)guarded_level(inverse * (x[i] - low), top) + new_low - x[i];
            error = error + w[i] * (off * off);
        }
        if (error < least) {
            least = error;
            best = Fit{scale, inverse, new_low, low};
            low = new_low;
        }
    }
    return best;
}
