// Scale searches for a few values per lane; the twin of quantkit/kernels/cpu/encode/search.py.
//
// Source: llama.cpp b11434 ggml-quants.c, make_qkx2_quants and make_qkx3_quants (fit_with_min), make_qx_quants
// (fit_signed), make_q3_quants (fit_by_descent), make_qp_quants (fit_positive).
#pragma once
#include "encode/lane.cuh"

#ifdef QUANTKIT_HOST
INLINE void keep(float&) {}
#else
// Keeps a sum in a register: otherwise the compiler recomputes it in every iteration of a loop.
INLINE void keep(float& v) { asm volatile("" : "+f"(v)); }
#endif

struct Fit {
    float scale, inverse, low, base;  // x ~ scale * level + low; levels are rounded inverse * (x - base)
    float sum_w;                      // as in fit_with_min
    float size;                       // the largest |x|
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

// The value of the largest magnitude, the first of equal ones; 0 if all are 0.
template <int N> INLINE float largest_of(const float* x) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < N; i++)
        if (fabsf(x[i]) > fabsf(largest)) largest = x[i];
    return largest;
}

// Adding this rounds to an integer, half to even, in the low bits of the sum; |v| < 2^22.
const float ROUNDING = 12582912.0f;

// The candidates for a scale in fit_signed, in the order of trials: 1 / scale is -(nmax + tenths / 10) / largest.
const int SIGNED_TRIALS = 19;
INLINE int signed_tenths(int trial) { return trial == 0 ? 0 : trial < 10 ? trial - 10 : trial - 9; }
INLINE float signed_inverse(int trial, int nmax, float largest) {
    return -((float)nmax + 0.1f * (float)signed_tenths(trial)) / largest;
}

// Adds a value to the sums of w*x*l and w*l*l of a candidate. |inverse * x| is not much more than nmax; where it
// rounds to no more, as up to nmax + 0.4, no level is below -nmax.
template <bool BELOW> INLINE void add_signed(float x, float w, float wx, int nmax, float inverse, float& sum_lx, float& sum_l2) {
    float rounded = inverse * x + ROUNDING;
    if (BELOW) rounded = fmaxf(rounded, ROUNDING - (float)nmax);
    const float level = fminf(rounded, ROUNDING + (float)(nmax - 1)) - ROUNDING;
    sum_lx = sum_lx + wx * level;
    sum_l2 = sum_l2 + w * level * level;
}

// The best candidate so far, and its number.
struct BestSigned {
    float scale, gain;
    int trial;

    __device__ __forceinline__ BestSigned() : scale(0), gain(0), trial(0) {}
    __device__ __forceinline__ void take(int which, float sum_lx, float sum_l2) {
        if (which == 0 ? sum_l2 != 0 : sum_l2 > 0 && sum_lx * sum_lx > gain * sum_l2) {
            scale = sum_lx / sum_l2;
            trial = which;
        }
        if (which == 0 || trial == which) gain = scale * sum_lx;
    }
};

// Fits x ~ scale * l with l in -nmax .. nmax - 1, maximizing (sum w*x*l)^2 / sum w*l*l; 0 for values that count as
// zero. All candidates are computed in one pass: each value is read once.
template <int N> INLINE Fit fit_signed(const float* x, const float* w, int nmax) {
    const float largest = largest_of<N>(x);
    if (fabsf(largest) < 1e-15f) return Fit{0, 0, 0, 0, 0, fabsf(largest)};
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
    fit.size = fabsf(largest);
    return fit;
}

// The same for 16 values shared by the lanes of a superblock of 16: each lane has a candidate, some have two.
INLINE Fit fit_signed_across_lanes(const float* x, const float* w, int nmax, int part) {
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

// A value in fit_by_descent: its level, and its terms in both sums. While its optimum given the others is between from
// and to, it certainly rounds to the level, or is clamped to it, which is known without a division.
struct Descending {
    float level, lx, l2, from, to;

    __device__ __forceinline__ void set(float x, float at, int nmax) {
        const float w = x * x;
        level = at;
        lx = w * x * at;
        l2 = w * at * at;
        from = at > (float)-nmax ? at - 0.4999f : -4e6f;
        to = at < (float)(nmax - 1) ? at + 0.4999f : 4e6f;
    }
    // Whether it may move. Products of such a small rest_lx are inexact.
    __device__ __forceinline__ bool unsure(float x, float sum_lx, float sum_l2) const {
        const float rest_lx = sum_lx - lx, optimum = x * (sum_l2 - l2);
        return rest_lx > 0 && (rest_lx < 1e-35f || optimum < from * rest_lx || optimum > to * rest_lx);
    }
    // Moves to the optimum given the others, if that is better; returns whether it did.
    __device__ __forceinline__ bool move(float x, int nmax, float& sum_lx, float& sum_l2) {
        const float w = x * x, rest_lx = sum_lx - lx, rest_l2 = sum_l2 - l2;
        const float at = (float)max(min(nearest_int(x * rest_l2 / rest_lx), nmax - 1), -nmax);
        const float new_lx = rest_lx + w * x * at, new_l2 = rest_l2 + w * at * at;
        const bool better = new_l2 > 0 && new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2;
        if (!(rest_lx > 0) || at == level || !better) return false;
        sum_lx = new_lx;
        sum_l2 = new_l2;
        set(x, at, nmax);
        return true;
    }
};

// Fits x ~ scale * l with l in -nmax .. nmax - 1 and weights x*x: levels by the largest value, then each in turn at
// its optimum given the others, where that increases sum_lx^2 / sum_l2. Leaves the levels. All lanes of a warp call
// this together; if one of them needs the exact test of a value, all make it.
template <int N> INLINE Fit fit_by_descent(const float* values, float* levels, int nmax) {
    const float largest = largest_of<N>(values);
    const bool dead = fabsf(largest) < 1e-15f;
    const float inverse = dead ? 0.0f : (float)-nmax / largest;
    float x[N], sum_lx = 0, sum_l2 = 0;
    Descending at[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = dead ? 0.0f : values[i];
        at[i].set(x[i], round_even(lesser(fmaxf(inverse * x[i], (float)-nmax), (float)(nmax - 1))), nmax);
        sum_lx = sum_lx + at[i].lx;
        sum_l2 = sum_l2 + at[i].l2;
    }
    bool moved = true;
#pragma unroll 1
    for (int round = 0; round < 5 && __any_sync(FULL, moved); round++) {
        moved = false;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (__any_sync(FULL, at[i].unsure(x[i], sum_lx, sum_l2))) moved |= at[i].move(x[i], nmax, sum_lx, sum_l2);
    }
#pragma unroll
    for (int i = 0; i < N; i++) levels[i] = at[i].level;
    return Fit{sum_l2 > 0 ? sum_lx / sum_l2 : 0.0f, inverse, 0, 0, 0, fabsf(largest)};
}

// A level 0 .. top of an arbitrary v: guarded, as in make_qkx3_quants, v is clamped before it is rounded; otherwise,
// as in make_qkx2_quants, after that, and wraps around first.
template <bool GUARDED> INLINE int level_of(float v, int top) {
    if (GUARDED) return v > 0 ? nearest_int(v < (float)top ? v : (float)top) : 0;
    return min(max(nearest_int(v), 0), top);
}

// The sums of a candidate of fit_with_min.
struct LevelSums {
    float l, l2, xl;

    __device__ __forceinline__ void add(float x, float w, float level) {
        const float wl = w * level;
        l = l + wl;
        l2 = l2 + wl * level;
        xl = xl + wl * x;
    }
};

// The best line for the levels of a candidate, if det > 0.
struct Line {
    float det, scale, low;

    __device__ __forceinline__ Line(const LevelSums& sums, float sum_w, float sum_x) {
        det = sum_w * sums.l2 - sums.l * sums.l;
        scale = (sum_w * sums.xl - sum_x * sums.l) / det;
        low = (sums.l2 * sum_x - sums.l * sums.xl) / det;
        if (low > 0) {
            scale = sums.xl / sums.l2;
            low = 0;
        }
    }
};

// The range of a candidate's values: within the levels, beyond the largest, below 0, or anywhere. The lanes of a warp
// take one branch.
enum Reach { WITHIN, ABOVE, BELOW, ANYWHERE };

// A level as from level_of, where |v| is at most 2^22 or v is guarded.
template <Reach REACH, bool GUARDED> INLINE float near_level(float v, int top) {
    if (REACH == WITHIN) return rintf(v);
    if (REACH == ABOVE) return fminf(rintf(v), (float)top);
    if (REACH == BELOW) return fmaxf(rintf(v), 0.0f);
    if (GUARDED) return rintf(fminf(fmaxf(v, 0.0f), (float)top));
    return fminf(fmaxf(rintf(v), 0.0f), (float)top);
}

// The levels of a candidate, and its sums.
template <Reach REACH, bool GUARDED, int N>
INLINE LevelSums near_sums(const float (&x)[N], const float (&w)[N], float (&level)[N], float inverse, float low, int top) {
    LevelSums sums = {0, 0, 0};
#pragma unroll
    for (int i = 0; i < N; i++) {
        level[i] = near_level<REACH, GUARDED>(inverse * (x[i] - low), top);
        sums.add(x[i], w[i], level[i]);
    }
    return sums;
}

// A candidate whose levels may wrap around: one value after another. weight: of a value.
template <int N, class W> INLINE LevelSums far_sums(const float* x, W weight, float inverse, float low, int top) {
    LevelSums sums = {0, 0, 0};
#pragma unroll 1
    for (int i = 0; i < N; i++) sums.add(x[i], weight(i), (float)level_of<false>(inverse * (x[i] - low), top));
    return sums;
}
template <int N, bool ABSOLUTE, class W>
INLINE float far_error(const float* x, W weight, float inverse, float low, int top, float scale, float new_low) {
    float error = 0;
#pragma unroll 1
    for (int i = 0; i < N; i++) {
        const float level = (float)level_of<false>(inverse * (x[i] - low), top);
        const float off = scale * level + new_low - x[i];
        error = error + weight(i) * (ABSOLUTE ? fabsf(off) : off * off);
    }
    return error;
}

// For values that are not negative, the first zero, for its sign; otherwise the minimum.
template <int N> INLINE float first_zero(const float* x, float other) {
#pragma unroll 1
    for (int i = 0; i < N; i++)
        if (x[i] == 0) return x[i];
    return other;
}

// Whether the sum of squared errors, in the reference's order, certainly exceeds least. All in f32: sums of 32 values
// with weights >= 0 are off by at most 33 roundings of 2^-24, later terms by six more, each of at most three times
// `terms` together; the errors themselves by four roundings of a level's value, 5e-4 of a sum that is at least 1e-6 of
// `terms`. Beyond these limits underflow might matter.
INLINE bool surely_worse(const LevelSums& sums, float sum_w, float sum_x, float sum_x2, float scale, float low, float least) {
    const float terms = sum_x2 + scale * scale * sums.l2 + low * low * sum_w;
    const float error = terms + 2.0f * (scale * (low * sums.l - sums.xl) - low * sum_x);
    return error - 9e-6f * terms > 1.001f * least && least > 1e-26f && fabsf(scale) < 1e6f && fabsf(low) < 1e6f;
}

// Common to all candidates of a lane. flat: all levels of the candidates are 0, so they are harmless and none is
// selected.
struct Spread {
    float low, high, smallest, size, sum_w, sum_x;
    bool flat;

    Spread() = default;
    template <int N> __device__ __forceinline__ Spread(const float* values, const float (&x)[N], const float (&w)[N]) {
        low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0];
#pragma unroll
        for (int i = 1; i < N; i++) {
            low = fminf(x[i], low);
            high = fmaxf(x[i], high);
            sum_w = sum_w + w[i];
            sum_x = sum_x + w[i] * x[i];
        }
        keep(sum_w);
        smallest = low;
        size = fmaxf(high, -smallest);
        if (low > 0) low = 0;
        if (low == 0) low = first_zero<N>(values, low);
        flat = high <= low;
        if (flat) high = 1;
    }
};

// Fits x ~ scale * l + low with l in 0 .. top, an odd number, and low <= 0, minimizing the weighted squared error.
// Tries `steps` + 1 inverse scales; low is the best one so far, so the trials depend on each other. Values, weights
// and the levels of a trial are in registers. All lanes of a warp call this together. weight: of a value, by its
// index.
template <int N, bool GUARDED, class W>
INLINE Fit fit_with_min(const float* values, W weight, int top, float start, float delta, int steps) {
    const bool SKIPS = !GUARDED;  // candidates that are certainly worse: few with importances
    float x[N], w[N], level[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        x[i] = values[i];
        w[i] = weight(i);
    }
    const Spread of(values, x, w);
    const float high = of.high;
    float low = of.low, sum_x2 = 0;
    if (SKIPS) {
#pragma unroll
        for (int i = 0; i < N; i++) sum_x2 = sum_x2 + w[i] * x[i] * x[i];
    }
    float inverse = (float)top / (high - low), scale = 1.0f / inverse, base = low, least = 0;
    float best = is_finite(inverse) ? inverse : 0.0f;
    if (fabsf(inverse * (high - low)) < 4e6f) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float off = scale * rintf(inverse * (x[i] - low)) + low - x[i];
            least = least + w[i] * (off * off);
        }
    } else {
        least = far_error<N, false>(values, weight, inverse, low, top, scale, low);
    }
#pragma unroll 1
    for (float k = 0; k <= (float)steps; k += 1.0f) {
        inverse = (start + delta * k + (float)top) / (high - low);
        // The extreme levels belong to the smallest and the largest value.
        const float first = inverse * (of.smallest - low), last = inverse * (high - low);
        bool near = true;
        LevelSums sums;
        if (__any_sync(FULL, !(inverse > 0 && first >= -0.5f && last < (float)top + 0.5f))) {
            const bool below = __any_sync(FULL, !(inverse > 0 && first >= -0.5f));
            const bool above = __any_sync(FULL, !(inverse > 0 && last < (float)top + 0.5f));
            near = GUARDED || (fabsf(first) < 4e6f && fabsf(last) < 4e6f);
            if (!near) sums = far_sums<N>(values, weight, inverse, low, top);
            else if (!below) sums = near_sums<ABOVE, GUARDED>(x, w, level, inverse, low, top);
            else if (!above) sums = near_sums<BELOW, GUARDED>(x, w, level, inverse, low, top);
            else sums = near_sums<ANYWHERE, GUARDED>(x, w, level, inverse, low, top);
        } else {
            sums = near_sums<WITHIN, GUARDED>(x, w, level, inverse, low, top);
        }
        const Line line(sums, of.sum_w, of.sum_x);
        if (SKIPS && k > (float)(steps - 5)) {
            const bool worse = surely_worse(sums, of.sum_w, of.sum_x, sum_x2, line.scale, line.low, least);
            if (__all_sync(FULL, worse || !(line.det > 0))) continue;
        }
        float error = 0;
        if (near) {
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float off = line.scale * level[i] + line.low - x[i];
                error = error + w[i] * (off * off);
            }
        } else {
            error = far_error<N, false>(values, weight, inverse, low, top, line.scale, line.low);
        }
        if (line.det > 0 && error < least) {
            least = error;
            scale = line.scale;
            best = inverse;
            base = low;
            low = line.low;
        }
    }
    return of.flat ? Fit{0, 0, base, 0, of.sum_w, of.size} : Fit{scale, best, low, base, of.sum_w, of.size};
}

// The sum of w * (x - l / inverse)^2; the first trial stores l as a byte, later ones clamp it to top.
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

// The candidates for 1 / scale in fit_positive, in the order of trials.
const int POSITIVE_TRIALS = 9;
INLINE float positive_inverse(int trial, int top, float largest) {
    const int tenths = trial < 5 ? trial - 5 : trial - 4;
    return (trial == 0 ? (float)top : 0.1f * (float)tenths + (float)top) / largest;
}

// Fits x ~ scale * l with l in 0 .. top, given 1 / scale of the best candidate; returns the scale, leaves the levels,
// float or uint8_t.
template <int N, typename T> INLINE float fit_positive_by(float best, const float* x, const float* w, T* levels, int top) {
    float sum_lx = 0, sum_l2 = 0;
    for (int i = 0; i < N; i++) {
        const int level = min(nearest_int(best * x[i]), top);
        levels[i] = (T)(level & 255);
        sum_lx = sum_lx + w[i] * x[i] * (float)level;
        sum_l2 = sum_l2 + w[i] * (float)level * (float)level;
    }
    // Each level in turn at its optimum given the others, where that increases sum_lx^2 / sum_l2.
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

// The same for all candidates, for the scales or minimums of a superblock.
template <int N, typename T>
INLINE float fit_positive(const float* x, const float* w, T* levels, int top, float almost_0 = 1e-15f) {
    float largest = 0;
    for (int i = 0; i < N; i++) {
        largest = fmaxf(largest, x[i]);
        levels[i] = 0;
    }
    if (largest < almost_0) return 0;
    float best = positive_inverse(0, top, largest), least = positive_error<N>(x, w, top, best, true);
    for (int trial = 1; trial < POSITIVE_TRIALS; trial++) {
        const float inverse = positive_inverse(trial, top, largest);
        const float error = positive_error<N>(x, w, top, inverse, false);
        if (error < least) {
            least = error;
            best = inverse;
        }
    }
    return fit_positive_by<N>(best, x, w, levels, top);
}
