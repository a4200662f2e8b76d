// Scales fitted to given levels, in the metric of the covariance: the twin of scales.py, which has the formulas. A
// thread block has a tile; there are no minimums.
#pragma once
#include "feedback/tiles.cuh"

// Tile after tile: levels, v, g, e, c [n][ROWS]; shift: the offset added to levels, factor_index: of the factor in
// ``factors``, ascending, [n / span][ROWS]; d [n / super][ROWS]. half: d is an f16. e and c are scratch.
struct fit_args {
    const float *h, *factors, *levels, *shift;
    float *v, *g, *e, *c, *d;
    int32_t* factor_index;
    int64_t n, span, super, factor_count, half;
};

const int MOST_SPAN = 32;

// The factor_index of the factor of least loss, starting from ``factor_index``.
INLINE int best_factor_index(const float* factors, int count, int factor_index, float d, float slope, float curvature) {
    const float target = factors[factor_index] + slope / (curvature * d);
    int best = 0, last = count;
    while (best < last) {  // the first that is not less; past the end for NaN
        const int middle = (best + last) / 2;
        if (!(factors[middle] >= target)) best = middle + 1;
        else last = middle;
    }
    if (best > 0 && (best == count || target - factors[best - 1] < factors[best] - target)) best--;
    return best;
}

// The sum of a b over lines ``begin`` to ``end`` of this lane.
INLINE float dot_lines(const float* a, const float* b, int begin, int end) {
    float total = 0;
#pragma unroll 8
    for (int k = begin; k < end; k++) total = __fmaf_rn(a[ROWS * k + lane_id()], b[ROWS * k + lane_id()], total);
    return total;
}

struct FactorScratch {
    float t[MOST_SPAN][ROWS], c[MOST_SPAN][ROWS], by[ROWS], strips[WARPS][OWN / STRIP][MOST_SPAN][STRIP];
};

// Sets g = g - by H t for all columns, t of ``span`` columns from ``begin`` on: each warp computes OWN columns at a
// time.
INLINE void move_gradient(const fit_args& a, int begin, float* g, FactorScratch& s) {
    const int n = (int)a.n, span = (int)a.span, lane = lane_id(), warp = warp_here();
    float4 next[OWN / STRIP];
    auto fetch = [&](int first) {
#pragma unroll
        for (int i = 0; i < OWN / STRIP; i++) {
            const bool any = lane < span && first < n;
            const int64_t from = (int64_t)(first / STRIP + i) * n + begin + lane;
            next[i] = any ? *(const float4*)(a.h + STRIP * from) : make_float4(0, 0, 0, 0);
        }
    };
    fetch(OWN * warp);
    const float back = 0.0f - s.by[lane];
#pragma unroll 1
    for (int first = OWN * warp; first < n; first += OWN * WARPS) {
#pragma unroll
        for (int i = 0; i < OWN / STRIP; i++)
            if (lane < span) *(float4*)s.strips[warp][i][lane] = next[i];
        __syncwarp();
        fetch(first + OWN * WARPS);
        float sum[OWN] = {}, before[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) before[i] = g[ROWS * (first + i) + lane];
        add_products(sum, s.strips[warp][0][0], MOST_SPAN * STRIP, s.t[0] + lane, span);
#pragma unroll
        for (int i = 0; i < OWN; i++) g[ROWS * (first + i) + lane] = __fmaf_rn(sum[i], back, before[i]);
        __syncwarp();
    }
}

// Sets the factor of every sub-block, in turn.
INLINE void fit_factors(const fit_args& a, FactorScratch& s) {
    const int n = (int)a.n, span = (int)a.span, subs = n / span, per = (int)(a.super / a.span);
    const int lane = lane_id(), warp = warp_here();
    const float *levels = of_tile(a.levels, n), *shift = of_tile(a.shift, subs), *d = of_tile(a.d, n / (int)a.super);
    float *v = of_tile(a.v, n), *g = of_tile(a.g, n);
    int32_t* factor_indices = of_tile(a.factor_index, subs);
#pragma unroll 1
    for (int sub = 0; sub < subs; sub++) {
        const int begin = sub * span;
        for (int i = warp; i < span; i += WARPS) s.t[i][lane] = levels[ROWS * (begin + i) + lane] + shift[ROWS * sub + lane];
        __syncthreads();
        if (STRIP * warp < span) {
            float sum[STRIP] = {};
            add_products(sum, a.h + STRIP * ((int64_t)(begin / STRIP + warp) * n + begin), 0, s.t[0] + lane, span);
#pragma unroll
            for (int j = 0; j < STRIP; j++) s.c[STRIP * warp + j][lane] = sum[j];
        }
        __syncthreads();
        if (warp == 0) {
            const float slope = dot_lines(s.t[0], g + ROWS * begin, 0, span), curvature = dot_lines(s.t[0], s.c[0], 0, span);
            const float d_of_row = d[ROWS * (sub / per) + lane];
            float by = 0;
            if (d_of_row != 0.0f && curvature > 0.0f) {
                const int factor_index = factor_indices[ROWS * sub + lane];
                const int best = best_factor_index(a.factors, (int)a.factor_count, factor_index, d_of_row, slope, curvature);
                by = d_of_row * (a.factors[best] - a.factors[factor_index]);
                factor_indices[ROWS * sub + lane] = best;
            }
            s.by[lane] = by;
        }
        __syncthreads();
        for (int i = warp; i < span; i += WARPS) {
            float* at = v + ROWS * (begin + i) + lane;
            *at = __fmaf_rn(s.t[i][lane], s.by[lane], *at);
        }
        move_gradient(a, begin, g, s);
        __syncthreads();
    }
}

struct SuperBlockScratch {
    Chunk chunks[2];
    float dots[2][ROWS];
};

// The change of d of least loss; 0 if no change improves it. gt, tt: slope and curvature.
INLINE float change_of_d(float d, float gt, float tt, bool half) {
    float x = tt > 0.0f ? gt / tt : 0.0f;
    if (half) x = half_to_float(float_to_half(d + x)) - d;
    const float y = 0;  // of a minimum, which does not exist here: NaN stays NaN
    const float loss = x * x * tt + 2.0f * x * y * 0.0f + y * y * 0.0f - 2.0f * (x * gt + y * 0.0f);
    return loss < 0.0f ? x : 0.0f;
}

// Sets d of every superblock.
INLINE void fit_super_scales(const fit_args& a, SuperBlockScratch& s) {
    const int n = (int)a.n, span = (int)a.span, super = (int)a.super, subs = n / span, supers = n / super;
    const int lane = lane_id(), warp = warp_here();
    const float *levels = of_tile(a.levels, n), *shift = of_tile(a.shift, subs);
    const int32_t* factor_indices = of_tile(a.factor_index, subs);
    float *v = of_tile(a.v, n), *g = of_tile(a.g, n), *t = of_tile(a.e, n), *c = of_tile(a.c, n), *d = of_tile(a.d, supers);
    for (int k = warp; k < n; k += WARPS) {
        const int sub = ROWS * (k / span) + lane;
        t[ROWS * k + lane] = a.factors[factor_indices[sub]] * (levels[ROWS * k + lane] + shift[sub]);
    }
#pragma unroll 1
    for (int which = 0; which < supers; which++) {
        const int begin = which * super, end = begin + super;
#pragma unroll 1
        for (int from = 0; from < n; from += WIDE) {
            const int first = from + OWN * warp, columns = n - from < WIDE ? n - from : WIDE;
            float sum[OWN] = {};
            multiply(sum, a.h + STRIP * ((int64_t)from / STRIP * n + begin), n, t + ROWS * begin, super, columns, s.chunks);
            if (OWN * warp < columns)
#pragma unroll
                for (int i = 0; i < OWN; i++) c[ROWS * (first + i) + lane] = sum[i];
        }
        __syncthreads();
        if (warp < 2) s.dots[warp][lane] = dot_lines(t, warp ? c : g, begin, end);
        __syncthreads();
        const float before = d[ROWS * which + lane];
        const float by = change_of_d(before, s.dots[0][lane], s.dots[1][lane], a.half), back = 0.0f - by;
        __syncthreads();
        if (warp == 0) d[ROWS * which + lane] = before + by;
        for (int k = begin + warp; k < end; k += WARPS) {
            float* at = v + ROWS * k + lane;
            *at = __fmaf_rn(t[ROWS * k + lane], by, *at);
        }
        for (int k = warp; k < n; k += WARPS) {
            float* at = g + ROWS * k + lane;
            *at = __fmaf_rn(c[ROWS * k + lane], back, *at);
        }
    }
}
