// ik_llama.cpp's scale search: more candidates, then one level after another moves; the twin of
// quantkit/kernels/cpu/encode/search_refined.py.
//
// Source: ik_llama.cpp 8337e4cd3 ggml-quants.c, make_qx_quants (fit_signed_refined), make_qkx3_quants (fit_with_min_refined).
#pragma once
#include "encode/search.cuh"

// The level whose change by one reduces the error first, or -1, and its direction.
template <int N> INLINE int steepest(const float* x, const float* w, const float* levels, int nmax, float scale, float& step) {
    float most = 0;
    int place = -1;
    step = -1;
#pragma unroll 8
    for (int i = 0; i < N; i++) {
        const float level = levels[i], slope = scale * w[i] * (x[i] - scale * level);
        const bool rises = slope > 0;
        if (level == (rises ? (float)(nmax - 1) : (float)-nmax) || !(fabsf(slope) > most)) continue;
        most = fabsf(slope);
        place = i;
        step = rises ? 1.0f : -1.0f;
    }
    return place;
}

// Fits x ~ scale * l with l in -nmax .. nmax - 1, maximizing (sum w*x*l)^2 / sum w*l*l; returns the scale, leaves the
// levels, -nmax for values that count as zero.
template <int N> INLINE float fit_signed_refined(const float* x, const float* w, float* levels, int nmax) {
    const float largest = largest_of<N>(x);
    const bool dead = fabsf(largest) < 1e-15f;
    float iscale = (float)-nmax / largest, sum_lx = 0, sum_l2 = 0, best = 0;
    for (int k = -1; k < 38 && !dead; k++) {
        const float near = 0.1f * (float)(k / 2 - 9);
        const float to = k < 0 ? (float)-nmax : k % 2 == 0 ? -((float)nmax + near) : (float)(nmax - 1) + near;
        float lx, l2;
        signed_sums<N>(x, w, nmax, to / largest, lx, l2);
        if (k >= 0 && !(l2 > 0 && lx * lx > best * l2)) continue;
        best = k >= 0 ? lx / l2 * lx : (l2 != 0 ? lx / l2 : 0) * lx;
        iscale = to / largest;
        sum_lx = lx;
        sum_l2 = l2;
    }
    for (int i = 0; i < N; i++)
        levels[i] = dead ? (float)-nmax : round_even(lesser(fmaxf(iscale * x[i], (float)-nmax), (float)(nmax - 1)));
    float scale = sum_l2 != 0 ? sum_lx / sum_l2 : 0, step;
    for (int round = 0; round < N * (2 * nmax - 1) && !dead; round++) {
        const int place = steepest<N>(x, w, levels, nmax, scale, step);
        if (place < 0) break;
        const float level = levels[place], new_lx = sum_lx + step * (w[place] * x[place]);
        const float new_l2 = sum_l2 + w[place] * (step * (level + level) + 1.0f);
        if (!(new_l2 > 0 && new_lx * new_lx > best * new_l2)) break;
        sum_lx = new_lx;
        sum_l2 = new_l2;
        scale = new_lx / new_l2;
        best = scale * new_lx;
        levels[place] = level + step;
    }
    return dead ? 0 : scale;
}

// Sums, and the reduction of sum(w*x*x) by a fit, for x ~ scale * l + low; f64, products of a weight, a value and a
// level are exact.
struct RefinedSums {
    double w, x, x2, l, l2, xl;

    __device__ __forceinline__ void add(float x_, float w_, float level) {
        const double wl = (double)w_ * (double)level;
        l = l + wl;
        l2 = l2 + wl * (double)level;
        xl = xl + wl * (double)x_;
    }
    // The best scale and low <= 0 for the sums of levels; returns their determinant, which must be positive.
    __device__ __forceinline__ double solve(double& scale, double& low) const {
        const double det = w * l2 - l * l;
        scale = (w * xl - x * l) / det;
        low = (l2 * x - l * xl) / det;
        if (low > 0) {
            scale = xl / l2;
            low = 0;
        }
        return det;
    }
    __device__ __forceinline__ double gain(double scale, double low) const {
        const double gain = 2.0 * scale * xl + 2.0 * low * x - 2.0 * scale * low * l;
        return gain - scale * scale * l2 - low * low * w;
    }
};

// The value furthest from its level that may move towards it, or -1; the direction.
template <int N> INLINE int furthest(const float* x, const float* levels, int top, float scale, float low, float& step) {
    float most = 0;
    int place = -1;
    step = -1;
#pragma unroll 4
    for (int i = 0; i < N; i++) {
        const float level = levels[i], off = x[i] - scale * level - low;
        const bool rises = off > 0;
        if (level == (rises ? (float)top : 0.0f) || !(fabsf(off) > most)) continue;
        most = fabsf(off);
        place = i;
        step = rises ? 1.0f : -1.0f;
    }
    return place;
}

// Moves levels by one, starting with the value furthest off, as long as the fit improves. The levels are set.
template <int N>
INLINE void move_levels(const float* x, const float* w, float* levels, int top, RefinedSums sums, float& scale, float& low) {
    sums.l = sums.l2 = sums.xl = 0;
    for (int i = 0; i < N; i++) sums.add(x[i], w[i], levels[i]);
    double best = sums.gain(scale, low);
    int last = -1;
    float last_step = 0, step;
#pragma unroll 1
    for (int round = 0; round < N * top; round++) {
        const int place = furthest<N>(x, levels, top, scale, low, step);
        if (place < 0 || (place == last && last_step * step < 0)) break;
        const double weight = w[place], along = step;
        const float level = levels[place];
        sums.l = sums.l + weight * along;
        sums.xl = sums.xl + weight * (double)x[place] * along;
        sums.l2 = sums.l2 + weight * (double)((level + level) * step + 1.0f);
        double new_scale, new_low;
        const double det = sums.solve(new_scale, new_low), gain = sums.gain(new_scale, new_low);
        if (!(det > 0) || new_scale < 0 || !(gain > best)) break;
        best = gain;
        scale = (float)new_scale;
        low = (float)new_low;
        last = place;
        last_step = step;
        levels[place] = level + step;
    }
}

// Fits x ~ scale * l + low with l in 0 .. top and low <= 0, minimizing the weighted error, computed from sums; leaves
// the levels. The candidates are those of fit_with_min with weights.
template <int N> INLINE Fit fit_with_min_refined(const float* x, const float* w, float* levels, int top) {
    float low = x[0], high = x[0], sum_w = 0;
    RefinedSums sums = {};
    for (int i = 0; i < N; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        sum_w = sum_w + w[i];
        const double wx = (double)w[i] * (double)x[i];
        sums.w = sums.w + (double)w[i];
        sums.x = sums.x + wx;
        sums.x2 = sums.x2 + wx * (double)x[i];
    }
    const float size = fmaxf(high, -low);
    if (low > 0) low = 0;
    const bool flat = high - low < 1e-10f;
    float inverse = (float)top / (flat ? 1.0f : high - low), best_inverse = inverse, best_low = low;
    float scale = 1.0f / inverse;
    double best = 0;
    for (int i = 0; i < N; i++) {
        const double level = level_of<false>(inverse * (x[i] - low), top), off = (double)scale * level + (double)low - (double)x[i];
        best = best + (double)w[i] * (off * off);
    }
#pragma unroll 1
    for (int k = 0; k < 37 && !flat; k++) {
        inverse = (-0.9f + 0.05f * (float)k + (float)top) / (high - low);
        sums.l = sums.l2 = sums.xl = 0;
#pragma unroll 4
        for (int i = 0; i < N; i++) sums.add(x[i], w[i], (float)level_of<false>(inverse * (x[i] - low), top));
        double new_scale, new_low;
        const double det = sums.solve(new_scale, new_low);
        double error = sums.x2 - 2.0 * new_scale * sums.xl - 2.0 * new_low * sums.x + 2.0 * new_scale * new_low * sums.l;
        error = error + new_scale * new_scale * sums.l2 + new_low * new_low * sums.w;
        if (!(det > 0 && error < best)) continue;
        best = error;
        scale = (float)new_scale;
        best_inverse = inverse;
        best_low = low;
        low = (float)new_low;
    }
    for (int i = 0; i < N; i++) levels[i] = flat ? 0.0f : (float)level_of<false>(best_inverse * (x[i] - best_low), top);
    if (!flat) move_levels<N>(x, w, levels, top, sums, scale, low);
    return Fit{flat ? 0.0f : scale, 0, low, 0, sum_w, size};
}
