// Searches of scales for a few values, one per lane; the twin of quantkit/kernels/cpu/encode/search.py.
//
// Source: llama.cpp b11434 ggml-quants.c, make_qkx2_quants and make_qkx3_quants (fit_with_min), make_qx_quants
// (fit_signed), make_q3_quants (fit_by_descent), make_qp_quants (fit_positive).
#pragma once
#include "encode/lane.cuh"

struct Fit {
    float scale, inverse, low, base;  // x ~ scale * level + low; levels come of inverse * (x - base)
    float sum_w;                      // fit_with_min's
};

// Sums over w*x*l and w*l*l for the levels -nmax .. nmax - 1 of one inverse scale.
template <int N> INLINE void signed_sums(const float* x, const float* w, int nmax, float inverse, float& sum_lx, float& sum_l2) {
    sum_lx = sum_l2 = 0;
#pragma unroll 8
    for (int i = 0; i < N; i++) {
        const float level = round_even(lesser(fmaxf(inverse * x[i], (float)-nmax), (float)(nmax - 1)));
        sum_lx = sum_lx + w[i] * x[i] * level;
        sum_l2 = sum_l2 + w[i] * level * level;
    }
}

// The value whose magnitude is the largest, the first of equal ones; 0 if all are.
template <int N> INLINE float largest_of(const float* x) {
    float largest = 0;
    for (int i = 0; i < N; i++)
        if (fabsf(x[i]) > fabsf(largest)) largest = x[i];
    return largest;
}

// Adding this rounds to an integer, even at a tie, which is in the low bits then; |v| < 2^22.
const float ROUNDING = 12582912.0f;

// The candidates for a scale of fit_signed, in the order of their trials: 1 / scale is -(nmax + tenths / 10) / largest.
const int SIGNED_TRIALS = 19;
INLINE int signed_tenths(int trial) { return trial == 0 ? 0 : trial < 10 ? trial - 10 : trial - 9; }
INLINE float signed_inverse(int trial, int nmax, float largest) {
    return -((float)nmax + 0.1f * (float)signed_tenths(trial)) / largest;
}

// Add a value to the sums over w*x*l and w*l*l of a candidate. |inverse * x| is not much more than nmax; where it rounds to no
// more, as up to nmax + 0.4, nothing is below -nmax.
template <bool BELOW> INLINE void add_signed(float x, float w, float wx, int nmax, float inverse, float& sum_lx, float& sum_l2) {
    float rounded = inverse * x + ROUNDING;
    if (BELOW) rounded = fmaxf(rounded, ROUNDING - (float)nmax);
    const float level = fminf(rounded, ROUNDING + (float)(nmax - 1)) - ROUNDING;
    sum_lx = sum_lx + wx * level;
    sum_l2 = sum_l2 + w * level * level;
}

// The best so far of candidates, and its place among them.
struct BestSigned {
    float scale, found;
    int trial;

    __device__ __forceinline__ BestSigned() : scale(0), found(0), trial(0) {}
    __device__ __forceinline__ void take(int which, float sum_lx, float sum_l2) {
        if (which == 0 ? sum_l2 != 0 : sum_l2 > 0 && sum_lx * sum_lx > found * sum_l2) {
            scale = sum_lx / sum_l2;
            trial = which;
        }
        if (which == 0 || trial == which) found = scale * sum_lx;
    }
};

// Fit x ~ scale * l with l in -nmax .. nmax - 1, maximizing (sum w*x*l)^2 / sum w*l*l; 0 for values that count as zero. All
// candidates go over the values together: each value is read once.
template <int N> INLINE Fit fit_signed(const float* x, const float* w, int nmax) {
    const float largest = largest_of<N>(x);
    if (fabsf(largest) < 1e-15f) return Fit{};
    float inverse[SIGNED_TRIALS], sum_lx[SIGNED_TRIALS], sum_l2[SIGNED_TRIALS];
#pragma unroll
    for (int k = 0; k < SIGNED_TRIALS; k++) {
        inverse[k] = signed_inverse(k, nmax, largest);
        sum_lx[k] = sum_l2[k] = 0;
    }
#pragma unroll 1
    for (int i = 0; i < N; i++) {
        const float v = x[i], weight = w[i], wx = weight * v;
#pragma unroll
        for (int k = 0; k < SIGNED_TRIALS; k++) {
            if (signed_tenths(k) > 4) add_signed<true>(v, weight, wx, nmax, inverse[k], sum_lx[k], sum_l2[k]);
            else add_signed<false>(v, weight, wx, nmax, inverse[k], sum_lx[k], sum_l2[k]);
        }
    }
    BestSigned best;
    Fit fit = {};
#pragma unroll
    for (int k = 0; k < SIGNED_TRIALS; k++) {
        best.take(k, sum_lx[k], sum_l2[k]);
        if (best.trial == k) fit.inverse = inverse[k];
    }
    fit.scale = best.scale;
    return fit;
}

// The same for 16 values that the lanes of a super-block of 16 share: a lane has a candidate, some have two.
INLINE Fit fit_signed_together(const float* x, const float* w, int nmax, int part) {
    const float largest = largest_of<16>(x);
    float sum_lx[2] = {0, 0}, sum_l2[2] = {0, 0}, inverse[2];
#pragma unroll
    for (int k = 0; k < 2; k++) inverse[k] = signed_inverse(min(16 * k + part, SIGNED_TRIALS - 1), nmax, largest);
#pragma unroll 4
    for (int i = 0; i < 16; i++) {
        const float v = x[i], weight = w[i], wx = weight * v;
#pragma unroll
        for (int k = 0; k < 2; k++) add_signed<true>(v, weight, wx, nmax, inverse[k], sum_lx[k], sum_l2[k]);
    }
    BestSigned best;
#pragma unroll
    for (int k = 0; k < SIGNED_TRIALS; k++) {
        const float lx = __shfl_sync(FULL, sum_lx[k / 16], k % 16, 16), l2 = __shfl_sync(FULL, sum_l2[k / 16], k % 16, 16);
        best.take(k, lx, l2);
    }
    if (fabsf(largest) < 1e-15f) return Fit{};
    return Fit{best.scale, signed_inverse(best.trial, nmax, largest)};
}

// Fit x ~ scale * l with l in -nmax .. nmax - 1 and weights x*x: levels by the largest value, then each in turn to its
// optimum for the others, where that raises sum_lx^2 / sum_l2. Leaves the levels.
template <int N> INLINE Fit fit_by_descent(const float* x, float* levels, int nmax) {
    const float largest = largest_of<N>(x);
    if (fabsf(largest) < 1e-15f) return Fit{};
    const float inverse = (float)-nmax / largest;
    float sum_lx = 0, sum_l2 = 0;
    for (int i = 0; i < N; i++) {
        const float level = round_even(lesser(fmaxf(inverse * x[i], (float)-nmax), (float)(nmax - 1))), w = x[i] * x[i];
        levels[i] = level;
        sum_lx = sum_lx + w * x[i] * level;
        sum_l2 = sum_l2 + w * level * level;
    }
    bool moved = true;
    for (int round = 0; round < 5 && moved; round++) {
        moved = false;
        for (int i = 0; i < N; i++) {
            const float w = x[i] * x[i], wx = w * x[i], level = levels[i];
            const float rest_lx = sum_lx - wx * level, rest_l2 = sum_l2 - w * level * level;
            if (!(rest_lx > 0)) continue;
            const float to = (float)max(min(nearest_int(x[i] * rest_l2 / rest_lx), nmax - 1), -nmax);
            const float new_lx = rest_lx + wx * to, new_l2 = rest_l2 + w * to * to;
            if (to == level || !(new_l2 > 0) || !(new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)) continue;
            sum_lx = new_lx;
            sum_l2 = new_l2;
            levels[i] = to;
            moved = true;
        }
    }
    return Fit{sum_l2 > 0 ? sum_lx / sum_l2 : 0.0f, inverse};
}

// A level 0 .. top of any v at all: guarded, as make_qkx3_quants does, v is clamped before it is rounded; else, as
// make_qkx2_quants does, after that, and wraps around first.
template <bool GUARDED> INLINE int level_of(float v, int top) {
    if (GUARDED) return v > 0 ? nearest_int(v < (float)top ? v : (float)top) : 0;
    return min(max(nearest_int(v), 0), top);
}

// The weighted error of a level.
template <bool ABSOLUTE> INLINE float error_of(float w, float off) { return w * (ABSOLUTE ? fabsf(off) : off * off); }

// What a candidate of fit_with_min adds up.
struct LevelSums {
    float l, l2, xl;

    __device__ __forceinline__ void add(float x, float w, float level) {
        const float wl = w * level;
        l = l + wl;
        l2 = l2 + wl * level;
        xl = xl + wl * x;
    }
};

// A level as level_of gives it, where v is no more than 2^22 or guarded.
template <bool GUARDED> INLINE float near_level(float v, int top) {
    if (GUARDED) return fminf(fmaxf(v, 0.0f), (float)top) + ROUNDING - ROUNDING;
    return fminf(fmaxf(v + ROUNDING, ROUNDING), ROUNDING + (float)top) - ROUNDING;
}

// A candidate whose levels wrap around: one value after the other.
template <int N> INLINE LevelSums far_sums(const float* x, const float* w, float inverse, float low, int top) {
    LevelSums sums = {0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < N; i++) sums.add(x[i], w[i], (float)level_of<false>(inverse * (x[i] - low), top));
    return sums;
}
template <int N, bool ABSOLUTE>
INLINE float far_error(const float* x, const float* w, float inverse, float low, int top, float scale, float new_low) {
    float error = 0;
#pragma unroll 1
    for (int i = 0; i < N; i++) {
        const float level = (float)level_of<false>(inverse * (x[i] - low), top);
        error = error + error_of<ABSOLUTE>(w[i], scale * level + new_low - x[i]);
    }
    return error;
}

// Fit x ~ scale * l + low with l in 0 .. top and low <= 0, minimizing the weighted squares (or sizes) of the error. Tries
// `steps` + 1 inverse scales; low is the best one so far, so the trials depend on each other. Values, weights and the levels
// of a trial are in registers.
template <int N, bool GUARDED, bool ABSOLUTE>
INLINE Fit fit_with_min(const float* values, const float* weights, int top, float start, float delta, int steps) {
    float x[N], w[N], level[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = values[i];
        w[i] = weights[i];
    }
    float low = x[0], high = x[0], sum_w = w[0], sum_x = sum_w * x[0];
#pragma unroll
    for (int i = 1; i < N; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        sum_w = sum_w + w[i];
        sum_x = sum_x + w[i] * x[i];
    }
    const float smallest = low;
    if (low > 0) low = 0;
    if (high <= low) return Fit{0, 0, low, 0, sum_w};
    float inverse = (float)top / (high - low);
    Fit best = {1.0f / inverse, is_finite(inverse) ? inverse : 0.0f, low, low, sum_w};
    float least = 0;
    if (fabsf(inverse * (high - low)) < 4e6f) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float near = near_level<false>(inverse * (x[i] - low), top);
            least = least + error_of<ABSOLUTE>(w[i], best.scale * near + low - x[i]);
        }
    } else {
        least = far_error<N, ABSOLUTE>(values, weights, inverse, low, top, best.scale, low);
    }
#pragma unroll 1
    for (int k = 0; k <= steps; k++) {
        inverse = (start + delta * (float)k + (float)top) / (high - low);
        // The least and the largest value have the levels that are furthest out.
        const bool near = GUARDED || (fabsf(inverse * (high - low)) < 4e6f && fabsf(inverse * (smallest - low)) < 4e6f);
        LevelSums sums = {0, 0, 0};
        if (near) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                level[i] = near_level<GUARDED>(inverse * (x[i] - low), top);
                sums.add(x[i], w[i], level[i]);
            }
        } else {
            sums = far_sums<N>(values, weights, inverse, low, top);
        }
        const float det = sum_w * sums.l2 - sums.l * sums.l;
        if (!(det > 0)) continue;
        float scale = (sum_w * sums.xl - sum_x * sums.l) / det, new_low = (sums.l2 * sum_x - sums.l * sums.xl) / det;
        if (new_low > 0) {
            scale = sums.xl / sums.l2;
            new_low = 0;
        }
        float error = 0;
        if (near) {
#pragma unroll
            for (int i = 0; i < N; i++) error = error + error_of<ABSOLUTE>(w[i], scale * level[i] + new_low - x[i]);
        } else {
            error = far_error<N, ABSOLUTE>(values, weights, inverse, low, top, scale, new_low);
        }
        if (error < least) {
            least = error;
            best = Fit{scale, inverse, new_low, low, sum_w};
            low = new_low;
        }
    }
    return best;
}

// The sum over w * (x - l / inverse)^2; the first trial keeps l in a byte, later ones clamp it to top.
template <int N> INLINE float positive_error(const float* x, const float* w, int top, float inverse, bool first) {
    const float scale = 1.0f / inverse;
    float total = 0;
    for (int i = 0; i < N; i++) {
        const int level = nearest_int(inverse * x[i]);
        const float off = x[i] - scale * (float)(first ? level & 255 : min(level, top));
        total = total + w[i] * off * off;
    }
    return total;
}

// Fit x ~ scale * l with l in 0 .. top, for the scales or minima of a super-block; return the scale, leave the levels,
// float or uint8_t.
template <int N, typename T>
INLINE float fit_positive(const float* x, const float* w, T* levels, int top, float almost_0 = 1e-15f) {
    float largest = 0;
    for (int i = 0; i < N; i++) {
        largest = fmaxf(largest, x[i]);
        levels[i] = 0;
    }
    if (largest < almost_0) return 0;
    float best = (float)top / largest, least = positive_error<N>(x, w, top, best, true);
    for (int k = -4; k <= 4; k++) {
        if (k == 0) continue;
        const float inverse = (0.1f * (float)k + (float)top) / largest;
        const float error = positive_error<N>(x, w, top, inverse, false);
        if (error < least) {
            least = error;
            best = inverse;
        }
    }
    float sum_lx = 0, sum_l2 = 0;
    for (int i = 0; i < N; i++) {
        const int level = min(nearest_int(best * x[i]), top);
        levels[i] = (T)(level & 255);
        sum_lx = sum_lx + w[i] * x[i] * (float)level;
        sum_l2 = sum_l2 + w[i] * (float)level * (float)level;
    }
    // Each level in turn to its optimum for the others, where that raises sum_lx^2 / sum_l2.
    bool moved = true;
    for (int round = 0; round < 5 && moved; round++) {
        moved = false;
        for (int i = 0; i < N; i++) {
            const float wx = w[i] * x[i], rest_lx = sum_lx - wx * levels[i], rest_l2 = sum_l2 - w[i] * levels[i] * levels[i];
            if (!(rest_lx > 0) || !(rest_l2 > 0)) continue;
            const int level = min(nearest_int(x[i] * rest_l2 / rest_lx), top);
            const float to = (float)level, new_lx = rest_lx + wx * to, new_l2 = rest_l2 + w[i] * to * to;
            if (to == levels[i] || !(new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)) continue;
            sum_lx = new_lx;
            sum_l2 = new_l2;
            levels[i] = (T)(level & 255);
            moved = true;
        }
    }
    return sum_l2 > 0 ? sum_lx / sum_l2 : 0;
}
