// The fit of Q2_K without an importance: as in fit_with_min, but with absolute errors |error| and weights |x|.
//
// A candidate's sum of errors only decides whether it is better than the best one so far. So it is computed
// approximately, with two fused instructions per value, and exactly as in ggml where the difference is too small to
// decide.
//
// Source: llama.cpp b11434 ggml-quants.c, make_qkx2_quants with use_mad, as quantize_row_q2_K_ref calls it.
#pragma once
#include "encode/search.cuh"

// a * b + c, rounded once, clamped to 0 .. 1.
#ifdef QUANTKIT_HOST
INLINE float fma_0_to_1(float a, float b, float c) { return fminf(fmaxf(fmaf(a, b, c), 0.0f), 1.0f); }
#else
INLINE float fma_0_to_1(float a, float b, float c) {
    float v;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(v) : "f"(a), "f"(b), "f"(c));
    return v;
}
#endif

// The best line so far, x ~ scale * l + low, and its candidate: that before `next`, or the first line if that is 0,
// tried with the lowest level at base.
struct BestLine {
    float scale, low, base, next;
};

// Open questions about a best line: its exact sum of errors in ggml's order (NaN: unknown), and whether candidates
// with the same line, maybe with other levels, have a smaller one. One bit each: 1 for the last candidate, 2 for that
// before it.
struct Unsettled {
    float least, again;
};

// 16 values of a lane, in shared memory and in registers.
struct ValuesBySize {
    static const int N = 16, TOP = 3, CANDIDATES = 16;
    const float* values;
    float x[N], w[N];
    Spread of;

    __device__ __forceinline__ explicit ValuesBySize(const float* v) : values(v) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            x[i] = v[i];
            w[i] = fabsf(x[i]);
        }
        of = Spread(v, x, w);
    }

    // The number of steps of a candidate within the range of the values.
    static __device__ __forceinline__ float steps(float k) { return -0.5f + 0.1f * k + (float)TOP; }

    __device__ __forceinline__ float inverse_of(const BestLine& best) const {
        return (best.next ? steps(best.next - 1) : (float)TOP) / (of.high - best.base);
    }

    // Tries all candidates after the best one exactly as ggml does, one value after another.
    __device__ __forceinline__ void try_exactly(BestLine& best) const {
        const auto weight = [&](int i) { return fabsf(values[i]); };
        float least = far_error<N, true>(values, weight, inverse_of(best), best.base, TOP, best.scale, best.low);
#pragma unroll 1
        for (float k = best.next; k < (float)CANDIDATES; k += 1.0f) {
            const float low = best.low, inverse = steps(k) / (of.high - low);
            const Line line(far_sums<N>(values, weight, inverse, low, TOP), of.sum_w, of.sum_x);
            const float error = far_error<N, true>(values, weight, inverse, low, TOP, line.scale, line.low);
            if (!(line.det > 0 && error < least)) continue;
            least = error;
            best = {line.scale, line.low, low, k + 1.0f};
        }
    }

    // Resolves the open questions about the best line before candidate k.
    __device__ __forceinline__ void settle(BestLine& best, Unsettled& open, float k) const {
        const auto error_of = [&](float inverse, float base) {
            float error = 0;
#pragma unroll 4
            for (int i = 0; i < N; i++) {
                const float level = fminf(fmaxf(rintf(inverse * (values[i] - base)), 0.0f), (float)TOP);
                error = error + fabsf(values[i]) * fabsf(best.scale * level + best.low - values[i]);
            }
            return error;
        };
        if (open.least != open.least) open.least = error_of(inverse_of(best), best.base);
        for (int again = (int)open.again, bit; again; again ^= 1 << bit) {
            bit = 31 - __clz(again);
            const float at = k - (float)(bit + 1);
            const float error = error_of(steps(at) / (of.high - best.low), best.low);
            if (!(error < open.least)) continue;
            open.least = error;
            best.base = best.low;
            best.next = at + 1.0f;
        }
        open.again = 0;
    }

    // Offsets above the lowest level; returns the range. Both are scaled by a power of two, so that offsets are at
    // most 1.
    __device__ __forceinline__ float set_offsets(float (&offset)[N], float unit, float low) const {
        const float from = -(low * unit);
#pragma unroll
        for (int i = 0; i < N; i++) offset[i] = fma_0_to_1(x[i], unit, from);
        return fmaf(of.high, unit, from);
    }

    // The levels of a candidate, and its sums. CLAMPED: for candidates that round beyond the largest level.
    template <bool CLAMPED>
    __device__ __forceinline__ LevelSums sums(const float (&offset)[N], float (&level)[N], float inverse) const {
        LevelSums sums;
#pragma unroll
        for (int i = 0; i < N; i++) {
            level[i] = rintf(inverse * offset[i]);
            if (CLAMPED) level[i] = fminf(level[i], (float)TOP);
            const float wl = w[i] * level[i];
            sums.l = i ? sums.l + wl : wl;
            sums.l2 = i ? sums.l2 + wl * level[i] : wl * level[i];
            sums.xl = i ? sums.xl + wl * x[i] : wl * x[i];
        }
        return sums;
    }

    // The sum of errors: approximate, and in ggml's order.
    __device__ __forceinline__ float about(const float (&level)[N], float scale, float low) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float off = fabsf(fmaf(scale, level[i], low) - x[i]);
            sum = i ? fmaf(w[i], off, sum) : w[i] * off;
        }
        return sum;
    }
    __device__ __forceinline__ float exactly(const float (&level)[N], float scale, float low) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N; i++) sum = sum + w[i] * fabsf(scale * level[i] + low - x[i]);
        return sum;
    }
};

// The largest difference between sums of errors and ggml's, in roundings of 2^-24. An error differs by one of 3 *
// scale, the only inexact product, which ggml rounds; by two of scale * level + low, at most |x| and the error; and by
// two of the error. Each of both sums adds 16 of itself.
struct Slack {
    float by_scale, by_size;

    __device__ __forceinline__ explicit Slack(const Spread& of)
        : by_scale(3.2f * 0x1p-24f * of.sum_w), by_size(4.4f * 0x1p-24f * of.sum_w * of.size) {}
    // For two sums of about the same size, except for the term of the other's scale.
    __device__ __forceinline__ float of_two(float sum, float scale) const {
        return fmaf(80.0f * 0x1p-24f, sum, fmaf(by_scale, fabsf(scale), by_size));
    }
};

// The best line of all candidates. All lanes of a warp call this together.
INLINE BestLine fit_by_sizes(const ValuesBySize& v, Unsettled& open) {
    const int N = ValuesBySize::N, TOP = ValuesBySize::TOP;
    const float unknown = __int_as_float(0x7fffffff);
    const Spread& of = v.of;
    const float whole = of.high - of.low, first = (float)TOP / whole;
    BestLine best = {1.0f / first, of.low, of.low, 0};
    open = {unknown, 0};
    bool usual = __all_sync(FULL, of.flat || (of.size > 1e-15f && of.size < 1e15f && whole > 1e-5f * of.size));
    if (usual) {
        const Slack slack(of);
        // The first range times the unit is 1/8 .. 1/4. While ranges are close to that, no relevant value over- or
        // underflows. For constant values everything is NaN, and no candidate is better.
        float unit = of.flat ? 0.0f : __int_as_float(0x7d800000 - (__float_as_int(whole) & 0x7f800000));
        keep(unit);
        const float least_range = of.flat ? -1.0f : 1e-5f * (of.size * unit);
        float offset[N], level[N], range = v.set_offsets(offset, unit, best.low), inverse = (float)TOP / range;
#pragma unroll
        for (int i = 0; i < N; i++) level[i] = rintf(inverse * offset[i]);
        const float least = v.about(level, best.scale, best.low), by = slack.of_two(least, best.scale);
        float too_much = least + by, surely_less = least - by;
#pragma unroll 1
        for (float k = 0; k < (float)ValuesBySize::CANDIDATES; k += 1.0f) {
            const float steps = ValuesBySize::steps(k);
            inverse = steps / range;
            const LevelSums sums =
                steps > (float)TOP + 0.45f ? v.sums<true>(offset, level, inverse) : v.sums<false>(offset, level, inverse);
            Line line(sums, of.sum_w, of.sum_x);
            keep(line.det);
            const float error = v.about(level, line.scale, line.low);
            const bool same = line.scale == best.scale && line.low == best.low;
            bool may_be_better = !same && fmaf(-slack.by_scale, fabsf(line.scale), error) <= too_much;
            if (__any_sync(FULL, may_be_better)) {
                may_be_better = may_be_better && line.det > 0;
                const float most = fmaf(slack.by_scale, fabsf(line.scale), error);
                const bool asks = may_be_better && !(most < surely_less);
                float exact = unknown;
                if (__any_sync(FULL, asks)) {
                    exact = v.exactly(level, line.scale, line.low);
                    if (asks) v.settle(best, open, k);
                    surely_less = asks && exact < open.least ? 1e38f : surely_less;
                }
                const bool better = may_be_better && most < surely_less;
                const float of_two = slack.of_two(error, line.scale);
                too_much = better ? error + of_two : too_much;
                surely_less = better ? error - of_two : surely_less;
                best = {better ? line.scale : best.scale, better ? line.low : best.low, better ? best.low : best.base,
                        better ? k + 1.0f : best.next};
                open = {better ? exact : open.least, better ? 0.0f : open.again};
                range = v.set_offsets(offset, unit, best.low);
                usual = __all_sync(FULL, range > least_range & range <= 1.0f);
                if (!usual) break;
            }
            open.again = fmaf(2.0f, open.again, same ? 1.0f : 0.0f);
        }
    }
    if (!usual) {
        v.try_exactly(best);
        open.again = 0;
    }
    return best;
}
