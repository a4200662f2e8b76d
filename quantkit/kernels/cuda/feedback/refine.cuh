// Scale and minimum of a sub-block, set to where the loss is least: refine.py of the CPU says what is computed. Rows are
// lanes of a warp; gs and ts are of the direction -1.
#pragma once
#include "feedback/sweeps.cuh"

// What may be fitted: nothing, an integer, or a half float.
enum { FIXED, INTEGER, HALF };

// Scales of a row's sub-block, and what they are made of: where they lie in the arrays of tile_args.
struct Scales {
    const tile_args& a;
    const float* factors;
    int at, up;  // of the tile's lines

    __device__ __forceinline__ Scales(const tile_args& a_, const float* factors_, int sub, int lane)
        : a(a_), factors(factors_), at(ROWS * sub + lane), up(ROWS * (sub / (int)a_.per_d) + lane) {}

    template <typename T> __device__ __forceinline__ T& of_sub(T* all) const { return of_tile(all, a.n / a.span)[at]; }
    __device__ __forceinline__ float& scale() const { return of_sub(a.scale); }
    __device__ __forceinline__ float& m() const { return of_sub(a.m); }
    __device__ __forceinline__ float raised() const { return of_sub(a.raised); }
    __device__ __forceinline__ int32_t& place() const { return of_sub(a.place); }
    __device__ __forceinline__ float& d() const { return of_tile(a.d, a.n / a.span / a.per_d)[up]; }
    __device__ __forceinline__ float& dmin() const { return of_tile(a.dmin, a.n / a.span / a.per_d)[up]; }

    // low and inverse, of what has been found.
    __device__ __forceinline__ void settle() const {
        const float now = scale();
        of_sub(a.low) = dmin() * m() - now * raised();
        of_sub(a.inverse) = fabsf(now) > 1.1754944e-38f ? 1.0f / now : 0.0f;
    }
};

struct Two {
    float x, y;
};

// Where -2 (x gt + y gs) + x^2 tt + 2 x y ts + y^2 ss is least; y is 0 if ss is.
INLINE Two least(float gt, float gs, float tt, float ts, float ss) {
    if (!(tt > 0.0f)) return {0.0f, ss > 0.0f ? gs / ss : 0.0f};
    const float determinant = tt * ss - ts * ts;
    if (!(determinant > 1e-6f * tt * ss)) return {gt / tt, 0.0f};
    return {(gt * ss - gs * ts) / determinant, (gs * tt - gt * ts) / determinant};
}

INLINE float as_half(float x) { return half_to_float(float_to_half(x)); }

// The place of the factor next to one, in ascending ones.
INLINE int nearest_factor(const float* factors, int count, float wanted) {
    int place = 0, end = count;
    while (place < end) {
        const int middle = place + ((end - place) >> 1);
        if (factors[middle] >= wanted) end = middle;
        else place = middle + 1;
    }
    if (place > 0 && (place == count || wanted - factors[place - 1] < factors[place] - wanted)) place--;
    return place;
}

// Sets scale and minimum to the best values; returns by how much scale and low change. low gains y; `raised` is left to
// the caller.
INLINE Two moved(const Scales& s, float gt, float gs, float tt, float ts, float ss) {
    const float now = s.scale(), d = s.d(), dmin = s.a.minimum != FIXED ? s.dmin() : 0.0f, m_now = s.m();
    if (s.a.minimum == FIXED || (s.a.minimum == INTEGER && dmin == 0.0f)) gs = ts = ss = 0.0f;
    const Two best = least(gt, gs, tt, ts, ss);
    float x = best.x, y = best.y, half = 0, m = 0;
    int place = 0;
    const bool by_factor = s.a.kind == INTEGER && d != 0.0f;
    if (by_factor) {
        place = nearest_factor(s.factors, (int)s.a.factor_count, (now + x) / d);
        x = d * s.factors[place] - now;
    } else if (s.a.kind == HALF) {
        half = as_half(now + x);
        x = half - now;
    } else x = 0.0f;
    if (ss > 0.0f) {
        y = (gs - x * ts) / ss;
        if (s.a.minimum == INTEGER) {
            m = rintf(m_now + y / dmin);
            m = m > 0.0f ? m : 0.0f;
            m = m < (float)(int)s.a.most ? m : (float)(int)s.a.most;
            y = dmin * (m - m_now);
        } else {
            m = as_half(dmin + y);
            y = m - dmin;
        }
    } else y = 0.0f;
    if (!(x * (x * tt + 2.0f * (y * ts - gt)) + y * (y * ss - 2.0f * gs) < 0.0f)) return {0.0f, 0.0f};
    if (by_factor) {
        s.place() = place;
        s.scale() = d * s.factors[place];
    } else if (s.a.kind == HALF) s.d() = s.scale() = half;
    if (ss > 0.0f) (s.a.minimum == INTEGER ? s.m() : s.dmin()) = m;
    return {x, y};
}

// A scale and a minimum that are kept.
struct Kept {
    float scale, m, dmin;
    int place;
};

INLINE Kept remembered(const Scales& s) { return {s.scale(), s.m(), s.dmin(), s.place()}; }

// Sets them again, with the factor `step` places away.
INLINE void recall(const Scales& s, const Kept& kept, int step) {
    float scale = kept.scale;
    if (s.a.minimum == INTEGER) s.m() = kept.m;
    else if (s.a.minimum == HALF) s.dmin() = kept.dmin;
    if (s.a.kind == INTEGER) {
        int place = kept.place;
        if (step != 0) {
            place = min(max(place + step, 0), (int)s.a.factor_count - 1);
            scale = s.d() * s.factors[place];
        }
        s.place() = place;
    } else s.d() = scale = as_half(scale * (1.0f + (float)step / 32.0f));
    s.scale() = scale;
    s.settle();
}
