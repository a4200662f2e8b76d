// A scale search over partitions: every assignment of four levels to 16 or 32 sorted values; the twin of
// quantkit/kernels/cpu/encode/ik_partitions.py, which describes which partitions are pruned, and proves that the
// result is that of trying all.
//
// Here each lane prunes independently of its neighbours. Ratings used only as bounds are not divided exactly, and the
// bound of the last two runs is shared by plain and shifted values: it is at least as large as either.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq2_k_impl, quantize_row_iq2_ks_impl.
#pragma once
#include "encode/ik_search.cuh"

// Terms of runs in sum(w q x), times two, and in sum(w q q), for plain and shifted values.
struct Terms {
    float qx, qx_up, q2, q2_up;

    __device__ __forceinline__ Terms operator+(const Terms& o) const {
        return Terms{qx + o.qx, qx_up + o.qx_up, q2 + o.q2, q2_up + o.q2_up};
    }
    __device__ __forceinline__ void keep(ScaleFit& result) const {
        keep_better(result, qx, q2, false);
        keep_better(result, qx_up, q2_up, true);
    }
};

// Approximately 1 / v.
INLINE float inverse_near(float v) {
#ifdef QUANTKIT_HOST
    return 1.0f / v;
#else
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(v));
    return inverse;
#endif
}

// The approximate rating of a partition; infinite where it is unknown.
INLINE float rating(float qx, float q2) { return q2 > 0 ? qx * inverse_near(q2) * qx : qx != 0 ? __int_as_float(0x7f800000) : 0; }

// x and w: sorted, N values; sum_x and sum_w: prefix sums of w x and of w.
template <int N, int END_FIRST, int START_LAST> struct Partitions {
    float *x, *w, *sum_x, *sum_w;

    // Sorts by value, with the weights, by swapping adjacent pairs: stable.
    __device__ __forceinline__ void sort() const {
        for (int turn = 0; turn < N; turn++) {
            for (int i = turn % 2; i < N - 1; i += 2) {
                const float x0 = x[i], x1 = x[i + 1], w0 = w[i], w1 = w[i + 1];
                const bool swap = x0 > x1;
                x[i] = swap ? x1 : x0;
                x[i + 1] = swap ? x0 : x1;
                w[i] = swap ? w1 : w0;
                w[i + 1] = swap ? w0 : w1;
            }
        }
    }

    // Returns sum(w x x).
    __device__ __forceinline__ float sum_up(float& amax) const {
        float wx = 0, all = 0, wx2 = 0;
        amax = 0;
        for (int i = 0; i < N; i++) {
            sum_x[i] = wx;
            sum_w[i] = all;
            wx = wx + w[i] * x[i];
            all = all + w[i];
            wx2 = wx2 + w[i] * x[i] * x[i];
            amax = fmaxf(amax, fabsf(x[i]));
        }
        sum_x[N] = wx;
        sum_w[N] = all;
        return wx2;
    }

    // The number of values i .. j - 1 with a given level, ascending or descending.
    __device__ __forceinline__ Terms terms(int i, int j, int level, bool down) const {
        const int of = down ? 3 - level : level;
        const float wx = sum_x[j] - sum_x[i], all = sum_w[j] - sum_w[i];
        const float a = of < 2 ? of ? -13.0f : -31.0f : of == 2 ? 1.0f : 17.0f, b = a + 5.0f;
        return Terms{wx * a, wx * b, all * a * a, all * b * b};
    }

    // Fits the scale to the levels nearest to x / d. `best` becomes its rating if that is better and the partition is
    // valid: runs have bounds.
    __device__ __forceinline__ float fit(const Buckets<IQ2>& t, float d, int shifted, float& best) const {
        const float inverse = 1.0f / d;
        float qx = 0, q2 = 0;
        int lowest = 0, highest = 0;
        for (int i = 0; i < N; i++) {
            const Rounded r = round_any<IQ2>(t, inverse * x[i], shifted);
            qx = qx + w[i] * r.value * x[i];
            q2 = q2 + w[i] * r.value * r.value;
            lowest += r.level == 0;
            highest += r.level == 3;
        }
        const int first = d > 0 ? lowest : highest, last = d > 0 ? highest : lowest;
        if (!(q2 > 0)) return d;
        const float ratio = qx / q2;
        if (first < END_FIRST && last > 0 && last <= N - START_LAST && ratio * qx > best) best = ratio * qx;
        return ratio;
    }

    // The rating of a likely partition: the best of a few, found by alternately fitting levels and scale.
    __device__ __forceinline__ float reached(const Buckets<IQ2>& t) const {
        ScaleFit result = {};
        const int n = N / 16;
        for (int i1 = n; i1 < 5 * n; i1 += 2 * n)
            for (int i2 = 4 * n; i2 < 9 * n; i2 += 2 * n)
                for (int down = 0; down < 2; down++) {
                    const Terms two = terms(0, i1, 0, down) + terms(i1, i2, 1, down);
                    for (int i3 = 10 * n; i3 < 15 * n; i3 += 2 * n)
                        (two + terms(i2, i3, 2, down) + terms(i3, N, 3, down)).keep(result);
                }
        float best = result.best;
        for (int kind = 0; kind < 2; kind++) {
            float scale = result.d;
            for (int k = 0; k < 2; k++) scale = fit(t, scale, kind, best);
        }
        return best;
    }

    // Writes upper bounds of what the last two runs, from each value on, add to a rating: ascending to x and
    // descending to w.
    __device__ __forceinline__ void store_bounds() const {
        for (int i = 0; i < N; i++)
            for (int down = 0; down < 2; down++) {
                float most = 0;
                for (int j = max(i, START_LAST); j < N; j++) {
                    const Terms last = terms(i, j, 2, down) + terms(j, N, 3, down);
                    most = fmaxf(most, fmaxf(rating(last.qx, last.q2), rating(last.qx_up, last.q2_up)));
                }
                (down ? w : x)[i] = most;
            }
    }

    // Whether the first two runs, with any last two, may be rated above `least` of them: qx^2 / q2 of either kind.
    static __device__ __forceinline__ bool may_exceed(const Terms& two, float least) {
        return !(two.qx * two.qx < least * two.q2) || !(two.qx_up * two.qx_up < least * two.q2_up);
    }

    // The scale, 0 where all |x| < 1e-16. x, w and the sums are overwritten.
    __device__ __forceinline__ ScaleFit search(const Buckets<IQ2>& t) const {
        const float infinity = __int_as_float(0x7f800000);
        sort();
        float amax;
        const float wx2 = sum_up(amax), all = sum_w[N], known = reached(t);
        const bool dead = amax < 1e-16f;
        store_bounds();
        // The error of a bound is a fraction of sum(w x x). Where sums are too small or too large the bound is
        // infinite.
        const bool sound = known * all > 1e-25f && wx2 * all < 1e33f && all < 1e34f;
        const float needed = dead ? infinity : sound ? known - 2e-5f * wx2 : -1.0f;
        ScaleFit result = {};
        for (int i1 = 0; i1 < END_FIRST; i1++) {
            const Terms up = terms(0, i1, 0, false), down = terms(0, i1, 0, true);
            for (int i2 = i1; i2 < N; i2++) {
                const Terms two_up = up + terms(i1, i2, 1, false), two_down = down + terms(i1, i2, 1, true);
                const bool try_up = may_exceed(two_up, needed - x[i2]), try_down = may_exceed(two_down, needed - w[i2]);
                if (!try_up && !try_down) continue;
                for (int i3 = max(i2, START_LAST); i3 < N; i3++) {
                    if (try_up) (two_up + terms(i2, i3, 2, false) + terms(i3, N, 3, false)).keep(result);
                    if (try_down) (two_down + terms(i2, i3, 2, true) + terms(i3, N, 3, true)).keep(result);
                }
            }
        }
        return dead ? ScaleFit{} : result;
    }
};
