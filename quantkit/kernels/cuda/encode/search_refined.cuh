// ik_llama.cpp's search for a scale: more candidates, then one level after the other moves; the twin of
// quantkit/kernels/cpu/encode/search_refined.py.
//
// Source: ik_llama.cpp 8337e4cd3 ggml-quants.c, make_qx_quants.
#pragma once
#include "encode/search.cuh"

// Which level's move by one lowers the error fastest, or -1, and in what direction.
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

// Fit x ~ scale * l with l in -nmax .. nmax - 1, maximizing (sum w*x*l)^2 / sum w*l*l; return the scale, leave the levels,
// -nmax for values that count as zero.
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
