// Scale and minimum of a sub-block, set to the minimum of the loss: the CPU's refine.py has the formulas. Rows are
// lanes of a warp; gs and ts are of the direction -1.
#pragma once
#include "feedback/sweeps.cuh"

// What is fitted: nothing, an integer, or an f16.
enum { FIXED, INTEGER, HALF };

// Scales of a row's sub-block and their components: offsets in the arrays of tile_args.
struct Scales {
    const tile_args& a;
    const float* factors;
    int at, up;  // of the tile's lines

    __device__ __forceinline__ Scales(const tile_args& a_, const float* factors_, int sub, int lane)
        : a(a_), factors(factors_), at(ROWS * sub + lane), up(ROWS * (sub / (int)a_.per_d) + lane) {}

    template <typename T> __device__ __forceinline__ T& of_sub(T* all) const { return of_tile(all, a.n / a.span)[at]; }
    __device__ __forceinline__ float& scale() const { return of_sub(a.scale); }
    __device__ __forceinline__ float& m() const { return of_sub(a.m); }
    __device__ __forceinline__ float shift() const { return of_sub(a.shift); }
    __device__ __forceinline__ int32_t& factor_index() const { return of_sub(a.factor_index); }
    __device__ __forceinline__ float& d() const { return of_tile(a.d, a.n / a.span / a.per_d)[up]; }
    __device__ __forceinline__ float& dmin() const { return of_tile(a.dmin, a.n / a.span / a.per_d)[up]; }

    // minimum and inverse, from the fitted values.
    __device__ __forceinline__ void settle() const {
        const float now = scale();
        of_sub(a.minimum) = dmin() * m() - now * shift();
        of_sub(a.inverse) = fabsf(now) > 1.1754944e-38f ? 1.0f / now : 0.0f;
    }
};

struct Two {
    float x, y;
};

// The minimum of -2 (x gt + y gs) + x^2 tt + 2 x y ts + y^2 ss; y is 0 if ss is.
INLINE Two least(float gt, float gs, float tt, float ts, float ss) {
    if (!(tt > 0.0f)) return {0.0f, ss > 0.0f ? gs / ss : 0.0f};
    const float determinant = tt * ss - ts * ts;
    if (!(determinant > 1e-6f * tt * ss)) return {gt / tt, 0.0f};
    return {(gt * ss - gs * ts) / determinant, (gs * tt - gt * ts) / determinant};
}

INLINE float as_half(float x) { return half_to_float(float_to_half(x)); }

// The factor_index of the adjacent factor, in ascending order.
INLINE int nearest_factor(const float* factors, int count, float target) {
    int factor_index = 0, end = count;
    while (factor_index < end) {
        const int middle = factor_index + ((end - factor_index) >> 1);
        if (factors[middle] >= target) end = middle;
        else factor_index = middle + 1;
    }
    if (factor_index > 0 && (factor_index == count || target - factors[factor_index - 1] < factors[factor_index] - target))
        factor_index--;
    return factor_index;
}

// Sets scale and minimum to the best values; returns their changes. minimum is increased by y; the caller sets
// `shift`.
INLINE Two moved(const Scales& s, float gt, float gs, float tt, float ts, float ss) {
    const float now = s.scale(), d = s.d(), dmin = s.a.min_kind != FIXED ? s.dmin() : 0.0f, m_now = s.m();
    if (s.a.min_kind == FIXED || (s.a.min_kind == INTEGER && dmin == 0.0f)) gs = ts = ss = 0.0f;
    const Two best = least(gt, gs, tt, ts, ss);
    float x = best.x, y = best.y, half = 0, m = 0;
    int factor_index = 0;
    const bool by_factor = s.a.scale_kind == INTEGER && d != 0.0f;
    if (by_factor) {
        factor_index = nearest_factor(s.factors, (int)s.a.factor_count, (now + x) / d);
        x = d * s.factors[factor_index] - now;
    } else if (s.a.scale_kind == HALF) {
        half = as_half(now + x);
        x = half - now;
    } else x = 0.0f;
    if (ss > 0.0f) {
        y = (gs - x * ts) / ss;
        if (s.a.min_kind == INTEGER) {
            m = rintf(m_now + y / dmin);
            m = m > 0.0f ? m : 0.0f;
            m = m < (float)(int)s.a.max_m ? m : (float)(int)s.a.max_m;
            y = dmin * (m - m_now);
        } else {
            m = as_half(dmin + y);
            y = m - dmin;
        }
    } else y = 0.0f;
    if (!(x * (x * tt + 2.0f * (y * ts - gt)) + y * (y * ss - 2.0f * gs) < 0.0f)) return {0.0f, 0.0f};
    if (by_factor) {
        s.factor_index() = factor_index;
        s.scale() = d * s.factors[factor_index];
    } else if (s.a.scale_kind == HALF) s.d() = s.scale() = half;
    if (ss > 0.0f) (s.a.min_kind == INTEGER ? s.m() : s.dmin()) = m;
    return {x, y};
}

// A scale and a minimum that were tried.
struct Candidate {
    float scale, m, dmin;
    int factor_index;
};

INLINE Candidate candidate_of(const Scales& s) { return {s.scale(), s.m(), s.dmin(), s.factor_index()}; }

// Sets them again, with the factor `step` positions away.
INLINE void set_scale(const Scales& s, const Candidate& to, int step) {
    float scale = to.scale;
    if (s.a.min_kind == INTEGER) s.m() = to.m;
    else if (s.a.min_kind == HALF) s.dmin() = to.dmin;
    if (s.a.scale_kind == INTEGER) {
        int factor_index = to.factor_index;
        if (step != 0) {
            factor_index = min(max(factor_index + step, 0), (int)s.a.factor_count - 1);
            scale = s.d() * s.factors[factor_index];
        }
        s.factor_index() = factor_index;
    } else s.d() = scale = as_half(scale * (1.0f + (float)step / 32.0f));
    s.scale() = scale;
    s.settle();
}
