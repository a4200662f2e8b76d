// IQ2_XS and IQ1_M as ik_llama.cpp encodes them: the same grids and bytes as in grid_quants.cuh and grid_ternary.cuh;
// the twin of quantkit/kernels/cpu/encode/grid_refined.py, which describes the differences.
//
// Source: ik_llama.cpp 8337e4cd3 ggml-quants.c quantize_row_iq2_xs_impl, quantize_row_iq1_m_impl, iq1m_process_1block.
#pragma once
#include "encode/grid_quants.cuh"
#include "encode/grid_ternary.cuh"

struct RefinedIQ2_XS {
    typedef RunSearch<16, 7> Search;
    static const int VALUES = 16, BLOCK = 256, BYTES = 74;
    // Per lane: prefix sums of w*x and of w over the sorted values. The search later reuses this memory.
    static const int SUMS = 17, SCRATCH = 16 * 2 * SUMS;
    static_assert(Search::SCRATCH <= SCRATCH, "the search has the scratch of the sums");
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void plain(const Lane& lane) {
        QuantIQ2_XS::weigh_by_squares(lane);
        finish(lane);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        QuantIQ2_XS::weigh_by_importance(lane);
        finish(lane);
    }

    // Computes the prefix sums over the sorted values; equal values keep their order.
    STATIC_INLINE void sum_below(const Lane& lane, float* sum_x, float* sum_w) {
        for (int i = 0; i < 16; i++) {
            const float x = lane.x[i];
            int place = 1;
            for (int j = 0; j < 16; j++) place += lane.x[j] < x || (lane.x[j] == x && j < i);
            sum_x[place] = x;
            sum_w[place] = lane.w[i];
        }
        sum_x[0] = sum_w[0] = 0;
        for (int i = 1; i <= 16; i++) {
            const float w = sum_w[i];
            sum_x[i] = sum_x[i - 1] + w * sum_x[i];
            sum_w[i] = sum_w[i - 1] + w;
        }
    }

    // The scale of the best partition into three runs with levels 1, 3 and 5; 0 if there is none.
    STATIC_INLINE float scale_of_partitions(const Lane& lane) {
        float *sum_x = lane.scratch + 2 * SUMS * lane.part, *sum_w = sum_x + SUMS;
        sum_below(lane, sum_x, sum_w);
        const float all_x = sum_x[16], all_w = sum_w[16];
        float best = 0, scale = 0;
#pragma unroll 1
        for (int i = 0; i <= 16; i++) {
            const float x = sum_x[i], w = sum_w[i];
#pragma unroll 1
            for (int j = i; j <= 16; j++) {
                const float qx = x + (sum_x[j] - x) * 3.0f + (all_x - sum_x[j]) * 5.0f;
                const float q2 = w + (sum_w[j] - w) * 9.0f + (all_w - sum_w[j]) * 25.0f;
                if (!(q2 > 0 && qx * qx > best * q2)) continue;
                scale = qx / q2;
                best = scale * qx;
            }
        }
        return scale;
    }

    // Rounds all groups by the best scale, up to three times while the rating improves; returns the scale.
    STATIC_INLINE float round_on(const Lane& lane, float scale, float best, bool moving) {
        uint16_t* const results = Search::results(lane);
#pragma unroll 1
        for (int pass = 0; pass < 3 && __any_sync(FULL, moving); pass++) {
            const uint16_t before[2] = {results[0], results[1]};
            Search::round_by(lane, moving ? Search::ALL : 0, scale, [&](int k, int index) { results[k] = (uint16_t)index; });
            if (!moving) continue;
            const Rating sum = Search::rate(lane.grid, lane.x, lane.w, results);
            moving = (results[0] != before[0] || results[1] != before[1]) && sum.q2 > 0 && sum.qx * sum.qx > best * sum.q2;
            if (moving) {
                scale = sum.qx / sum.q2;
                best = scale * sum.qx;
            } else {
                results[0] = before[0];
                results[1] = before[1];
            }
        }
        return scale;
    }

    // 1 or -1 per value from its sign bits: 7 bits for 8 values, of which an even number is negative.
    STATIC_INLINE float sign_of(uint32_t signs, int i) {
        const uint32_t bits = signs >> i / 8 * 7 & 127;
        return (i % 8 == 7 ? (uint32_t)__popc(bits) : bits >> i % 8) & 1 ? -1.0f : 1.0f;
    }

    STATIC_INLINE void finish(const Lane& lane) {
        const uint32_t own = take_signs<16, true>(lane.x, lane.w);
        float largest = lane.x[0];
        for (int i = 1; i < 16; i++) largest = fmaxf(largest, lane.x[i]);
        const bool dead = largest < 1e-15f;
        float scale = scale_of_partitions(lane), best;
        __syncwarp();  // magnitudes and weights are written, the scratch memory is free
        Lane inner = lane;
        inner.scratch += lane_id() / 16 * (Search::SCRATCH - SCRATCH);
        Search::best_points(inner, dead ? 0.0f : scale != 0 ? scale * 5.0f : 1.0f, scale, best);
        scale = round_on(inner, scale, best, !dead && scale != 0);
        const uint32_t signs = dead ? 0 : scale < 0 ? own ^ 0x3fff : own;
        const SubBlock sub = {dead ? -1.0f : fabsf(scale), signs, Search::results(inner)};
        QuantIQ2_XS::write(lane, sub);
        fit_again(lane, sub, own);
    }

    // Fits d to the codes of scales: the terms of its sums, stored in place of values and weights, are added in order.
    STATIC_INLINE void fit_again(const Lane& lane, const SubBlock& sub, uint32_t own) {
        const float top = largest_in_block<16>(sub.scale);
        const float factor = 0.125f * (float)(int)(2 * scale_code(sub.scale, 1.0f / (top / 31.0f)) + 1);
        __syncwarp();
        for (int k = 0; k < 2; k++) {
            const Point<8> point(lane.grid, sub.results[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                const int i = 8 * k + j;
                const float near = point.q[j] == 1.0f ? 8.0f : point.q[j] == 3.0f ? 25.0f : 43.0f;  // a byte of the grid
                const float x = lane.x[i] * sign_of(own, i), q = factor * near * sign_of(sub.signs, i), wq = lane.w[i] * q;
                lane.x[i] = wq * x;
                lane.w[i] = wq * q;
            }
        }
        __syncwarp();
        Rating sum = {0, 0};
        for (int i = 0; i < 256; i++) {
            const int at = (i / 16 - lane.part) * 17 + i % 16;
            sum.qx = sum.qx + lane.x[at];
            sum.q2 = sum.q2 + lane.w[at];
        }
        if (lane.part == 0 && top > 0 && sum.q2 > 0) store_half(lane.out, 1.05f * sum.qx / sum.q2);
    }
};

// Candidates of IQ1_M, whose runs are summed sequentially.
struct RefinedHalves : Halves {
    STATIC_INLINE float none() { return 0; }

    // As in Halves.
    __device__ __forceinline__ void rate(int i, int j, Rating* results) const {
        Rating below[2][2], middle[2], above[2][2];  // of both halves: shifted up, and down
        for (int half = 0; half < 2; half++) {
            const SumsBelow<16>& s = sums[half];
            const float x = s.x[i], w = s.w[i], rest = s.x[16] - s.x[j], rest2 = s.w[16] - s.w[j];
            below[half][0] = Rating{x * -0.875f, w * -0.875f * -0.875f};
            below[half][1] = Rating{x * -1.125f, w * -1.125f * -1.125f};
            middle[half] = Rating{(s.x[j] - x) * 0.125f, (s.w[j] - w) * 0.125f * 0.125f};
            above[half][0] = Rating{rest * 1.125f, rest2 * 1.125f * 1.125f};
            above[half][1] = Rating{rest * 0.875f, rest2 * 0.875f * 0.875f};
        }
        for (int k = 0; k < 4; k++) {
            const int first = k / 2, second = k % 2;
            const float a = first ? -middle[0].qx : middle[0].qx, b = second ? -middle[1].qx : middle[1].qx;
            const float qx = below[0][first].qx + a + above[0][first].qx;
            const float q2 = below[0][first].q2 + middle[0].q2 + above[0][first].q2;
            results[k].qx = qx + below[1][second].qx + b + above[1][second].qx;
            results[k].q2 = q2 + below[1][second].q2 + middle[1].q2 + above[1][second].q2;
        }
    }
};

struct RefinedIQ1_M : Weighing<TernaryGrid<RefinedHalves>, RefinedIQ1_M> {
    typedef TernaryGrid<RefinedHalves> Parts;
    static const int VALUES = 16, BLOCK = 256, BYTES = 56, SCRATCH = Parts::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true;

    // Uses the mean square of 32 values, shared by two lanes.
    STATIC_INLINE void weighted(const Lane& lane, float) {
        const float* x = lane.x - (lane.part & 1) * 17;
        float total = 0;
        for (int i = 0; i < 32; i++) total = total + x[i / 16 * 17 + i % 16] * x[i / 16 * 17 + i % 16];
        weigh(lane, 16, 1.5f * total / 32.0f);
        finish(lane);
    }

    // Weights are x^2 where sum(w |x|) is 0; that sum omits the first value, as in ik_llama.cpp.
    STATIC_INLINE void use_squares_if_weights_are_zero(const Lane& lane) {
        float total = 0;
        for (int i = 1; i < 16; i++) total = total + lane.w[i] * fabsf(lane.x[i]);
        if (total == 0) Parts::weigh_by_squares(lane);
    }

    // The shifts, and their scale, that fit the selected points best.
    STATIC_INLINE void choose_shifts(const Lane& lane, Shifted& sub) {
        Rating sums[4] = {};
        for (int k = 0; k < 2; k++) {
            const Point<8> point(lane.grid, Parts::results(lane)[k]);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float w = lane.w[8 * k + i], wx = w * lane.x[8 * k + i];
#pragma unroll
                for (int n = 0; n < 4; n++) {
                    const float q = point.q[i] + eighth(n & (k ? 1 : 2));
                    sums[n].qx = sums[n].qx + wx * q;
                    sums[n].q2 = sums[n].q2 + w * q * q;
                }
            }
        }
        float best = 0;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const float qx = fmaxf(sums[n].qx, 0), q2 = sums[n].q2;
            if (!(q2 > 0 && qx * qx > best * q2)) continue;
            sub.scale = qx / q2;
            best = sub.scale * qx;
            sub.shifts = n;
        }
    }

    // Searches the lane's sub-block; one whose values are below ``tiny`` is encoded as zeros.
    STATIC_INLINE Shifted fit(const Lane& lane, float tiny) {
        bool off;
        Shifted sub = Parts::fit(lane, tiny, off);
        if (sub.dead) sub.scale = 0;
        else if (off) choose_shifts(lane, sub);
        return sub;
    }

    STATIC_INLINE void finish(const Lane& lane) {
        float weights[16];  // terms to which d is fitted
#pragma unroll
        for (int i = 0; i < 16; i++) weights[i] = lane.w[i];
        use_squares_if_weights_are_zero(lane);
        const Shifted sub = fit(lane, 1e-7f);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 16; i++) lane.w[i] = weights[i];
        QuantIQ1_M::write<Parts>(lane, sub, 1.085f);
    }
};
