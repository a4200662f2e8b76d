// IQ1_S and IQ1_M: points of a grid of -1, 0, 1, all shifted by an eighth up or down; the twin of
// quantkit/kernels/cpu/encode/grid_ternary.py, which describes the search.
//
// A lane sorts the values of its sub-block. A warp then processes one sub-block after another: its lanes rate pairs of
// boundaries, and measure the distances of neighbours.
//
// Source: llama.cpp b11434 ggml-quants.c quantize_row_iq1_s_impl, quantize_row_iq1_m_impl, iq1_find_best_neighbour2.
#pragma once
#include "encode/grid_quants.cuh"

#ifdef QUANTKIT_HOST
INLINE float reciprocal_near(float v) { return 1.0f / v; }
#else
// 1 / v within 1 ulp.
INLINE float reciprocal_near(float v) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
    return r;
}
#endif

// ---------------------------------------------------------------- candidates

// Prefix sums over the N sorted values.
template <int N> struct SumsBelow {
    float x[N + 1], w[N + 1];

    // Of N sorted values: value(j, x, w) reads the j-th; false: it is ignored.
    template <typename F> __device__ __forceinline__ void add_up(F value) {
        float sum_x = 0, sum_w = 0;
        x[0] = w[0] = 0;
        for (int j = 0; j < N; j++) {
            float v, weight;
            if (value(j, v, weight)) {
                sum_x = sum_x + weight * v;
                sum_w = sum_w + weight;
            }
            x[j + 1] = sum_x;
            w[j + 1] = sum_w;
        }
    }
};

// IQ1_S: a shift for 32 values.
struct Whole {
    static const int N = 32, CHOICES = 2;
    SumsBelow<32> sums;

    STATIC_INLINE float none() { return -3.40282347e38f; }  // the rating that a candidate must exceed

    template <typename F> __device__ __forceinline__ void add_up(F value) { sums.add_up(value); }
    __device__ __forceinline__ float weight() const { return sums.w[32]; }

    // The ratings of boundaries i <= j: shifted up, and down.
    __device__ __forceinline__ void rate(int i, int j, Rating* results) const {
        const float x = sums.x[i], w = sums.w[i], x_j = sums.x[j], w_j = sums.w[j];
        const float middle = (x_j - x) * 0.125f, middle2 = (w_j - w) * 0.125f * 0.125f;
        const float above = sums.x[32] - x_j, above2 = sums.w[32] - w_j;
        results[0].qx = x * -0.875f + middle + above * 1.125f;
        results[0].q2 = w * -0.875f * -0.875f + middle2 + above2 * 1.125f * 1.125f;
        results[1].qx = x * -1.125f - middle + above * 0.875f;
        results[1].q2 = w * -1.125f * -1.125f + middle2 + above2 * 0.875f * 0.875f;
    }
};

// IQ1_M: a shift for each 8 of 16 values; sums of both halves.
struct Halves {
    static const int N = 16, CHOICES = 4;
    SumsBelow<16> sums[2];

    STATIC_INLINE float none() { return -3.40282347e38f; }

    template <typename F> __device__ __forceinline__ void add_up(F value) {
        for (int half = 0; half < 2; half++) sums[half].add_up([&](int j, float& x, float& w) { return value(j, x, w) == half; });
    }
    __device__ __forceinline__ float weight() const { return sums[0].w[16] + sums[1].w[16]; }

    // The ratings of boundaries i <= j: both halves shifted up, only the second down, only the first down, both down.
    __device__ __forceinline__ void rate(int i, int j, Rating* results) const {
        Rating up[2], down[2];
        for (int half = 0; half < 2; half++) {
            const SumsBelow<16>& s = sums[half];
            const float below = s.x[i] + s.x[j], w = s.w[i], v = s.w[j];
            up[half].qx = s.x[16] * 1.125f - below;
            up[half].q2 = s.w[16] * 1.125f * 1.125f + w * 0.75f + v * -1.25f;
            down[half].qx = s.x[16] * 0.875f - below;
            down[half].q2 = s.w[16] * 0.875f * 0.875f + w * 1.25f + v * -0.75f;
        }
        for (int k = 0; k < 4; k++) {
            const Rating &first = k < 2 ? up[0] : down[0], &second = k % 2 == 0 ? up[1] : down[1];
            results[k].qx = first.qx + second.qx;
            results[k].q2 = first.q2 + second.q2;
        }
    }
};

// ---------------------------------------------------------------- the search

// A candidate: boundaries, combination of shifts, and its sums.
struct Candidate {
    int low, high, choice;  // choice -1: none
    Rating sum;

    __device__ __forceinline__ Candidate() : low(0), high(0), choice(-1), sum{0, 0} {}
    template <class S>
    __device__ __forceinline__ Candidate(const S& sums, int i, int j, int k) : low(i), high(j), choice(k), sum{0, 0} {
        Rating of[S::CHOICES];
        sums.rate(i, j, of);
#pragma unroll
        for (int n = 0; n < S::CHOICES; n++)
            if (n == k) sum = of[n];
    }
};

// All pairs of boundaries i <= j, in order, i << 8 | j.
template <int N> struct Bounds {
    static const int COUNT = (N + 1) * (N + 2) / 2;
    uint16_t at[COUNT];

    __host__ __device__ constexpr Bounds() : at() {
        int count = 0;
        for (int i = 0; i <= N; i++)
            for (int j = i; j <= N; j++) at[count++] = (uint16_t)(i << 8 | j);
    }
};
template <int N> static __device__ const Bounds<N> all_bounds = Bounds<N>();

// The candidate that the reference's scan selects: in order, each that exceeds the best so far replaces it.
template <class S> INLINE Candidate scan(const S& sums) {
    Candidate results;
    float best = S::none();
    const int count = Bounds<S::N>::COUNT;
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
        const bool there = first + lane_id() < count;
        const int pair = all_bounds<S::N>.at[min(first + lane_id(), count - 1)];
        Rating of[S::CHOICES];
        sums.rate(pair >> 8, pair & 255, of);
        uint32_t later = there ? (1u << S::CHOICES) - 1 : 0;  // candidates of the lane not yet scanned
        for (;;) {
            uint32_t better = 0;
#pragma unroll
            for (int k = 0; k < S::CHOICES; k++)
                if (later >> k & 1 && of[k].q2 > 0 && of[k].qx * of[k].qx > best * of[k].q2) better |= 1u << k;
            const uint32_t lanes = __ballot_sync(FULL, better != 0);
            if (!lanes) break;
            const int from = __ffs((int)lanes) - 1;
            const int choice = __ffs((int)__shfl_sync(FULL, better, from)) - 1;
            const int its = __shfl_sync(FULL, pair, from);
            results = Candidate(sums, its >> 8, its & 255, choice);
            best = results.sum.qx / results.sum.q2 * results.sum.qx;
            if (lane_id() < from) later = 0;
            if (lane_id() == from) later &= ~((2u << choice) - 1);
        }
    }
    return results;
}

// The same candidate, found without the sequential comparisons where no other is close.
//
// Let R be the largest qx^2 / q2, and let c be the only candidate above (1 - 2^-17) R. Within the tested limits of R
// and of the sum of weights nothing overflows, and nothing relevant to c underflows, so the scan's comparisons, and
// the quotients here, are off by less than 2^-20. Before c the scan holds a candidate below (1 - 2^-18) R, so c
// replaces it, and no later candidate replaces c. If there are two such candidates, scan.
template <class S> INLINE Candidate search_boundaries(const S& sums) {
    float most = -1, second = -1;  // of the lane's candidates
    int mine = 0;
#pragma unroll 1
    for (int at = lane_id(); at < Bounds<S::N>::COUNT; at += 32) {
        const int pair = all_bounds<S::N>.at[at];
        Rating of[S::CHOICES];
        sums.rate(pair >> 8, pair & 255, of);
#pragma unroll
        for (int k = 0; k < S::CHOICES; k++) {
            const float rating = of[k].q2 > 0 ? of[k].qx * of[k].qx * reciprocal_near(of[k].q2) : -1.0f;
            if (rating > most) mine = pair << 8 | k;
            second = fmaxf(second, fminf(most, rating));
            most = fmaxf(most, rating);
        }
    }
    const float all = warp_max(most), weight = sums.weight(), near = all * (1.0f - 0x1p-17f);
    const uint32_t lanes = __ballot_sync(FULL, most > near);
    const bool sure = all > 1e-15f && all < 1e15f && weight > 1e-15f && weight < 1e15f && !(lanes & (lanes - 1));
    if (!sure || __any_sync(FULL, second > near)) return scan(sums);
    mine = __shfl_sync(FULL, mine, __ffs((int)lanes) - 1);
    return Candidate(sums, mine >> 16, mine >> 8 & 255, mine & 255);
}

// ---------------------------------------------------------------- sub-blocks

INLINE float eighth(bool down) { return down ? -0.125f : 0.125f; }

// Result for the lane's sub-block: its scale; which of its halves shift down, bit 1 the first; whether it is all
// zeros.
struct Shifted {
    float scale;
    int shifts;
    bool dead;
};

// S: Whole or Halves. A warp's scratch: the permutation of each lane's sorted values, a byte each, later the indices
// of their points; the sums of a superblock.
template <class S> struct TernaryGrid {
    static const int N = S::N, GROUPS = N / 8, PER_BLOCK = 256 / N, BLOCKS = 32 / PER_BLOCK;
    static const int ORDER = 8 * N, SUMS = PER_BLOCK * (int)sizeof(S) / 4, SCRATCH = (ORDER + SUMS + BLOCKS - 1) / BLOCKS;

    STATIC_INLINE float* scratch_of_warp(const Lane& lane) { return lane.scratch - lane_id() / PER_BLOCK * SCRATCH; }
    STATIC_INLINE uint8_t* order(const Lane& lane) { return (uint8_t*)scratch_of_warp(lane) + N * lane_id(); }
    STATIC_INLINE uint16_t* results(const Lane& lane) { return (uint16_t*)order(lane); }
    STATIC_INLINE S* sums(const Lane& lane) { return (S*)(scratch_of_warp(lane) + ORDER); }

    // Sorts the positions of the lane's values by value, equal ones by position: a counting sort.
    STATIC_INLINE void sort(const Lane& lane) {
        uint8_t* const to = order(lane);
#pragma unroll 1
        for (int i = 0; i < N; i += 8) {
            int rank[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            for (int j = 0; j < N; j++) {
                const float x = lane.x[j];
#pragma unroll
                for (int k = 0; k < 8; k++) {
                    const float mine = lane.x[i + k];
                    rank[k] += j < i + k ? x <= mine : x < mine;
                }
            }
#pragma unroll
            for (int k = 0; k < 8; k++) to[rank[k]] = (uint8_t)(i + k);
        }
    }

    // Searches the sub-blocks of a warp, one after another; returns the result of the lane's own.
    STATIC_INLINE Candidate search(const Lane& lane, bool dead) {
        Candidate results;
        const uint8_t* const from = order(lane);
        S* const all = sums(lane);
#pragma unroll 1
        for (int block = 0; block < BLOCKS; block++) {
            if (lane_id() / PER_BLOCK == block)
                all[lane.part].add_up([&](int j, float& x, float& w) {
                    x = lane.x[from[j]];
                    w = lane.w[from[j]];
                    return N == 32 ? 1 : from[j] >> 3;
                });
            __syncwarp();
#pragma unroll 1
            for (int part = 0; part < PER_BLOCK; part++) {
                const int owner = block * PER_BLOCK + part;
                if (__shfl_sync(FULL, dead, owner)) continue;
                const Candidate best = search_boundaries(all[part]);
                if (lane_id() == owner) results = best;
            }
            __syncwarp();
        }
        return results;
    }

    // The slots of the lane's groups, 16 bits each: levels 0 below boundary ``low``, 2 from ``high`` on; or 2 - level.
    STATIC_INLINE uint64_t slots_of(const Lane& lane, int low, int high, bool mirrored) {
        uint64_t slots = 0;
        const uint8_t* const from = order(lane);
        for (int j = 0; j < N; j++) {
            const int level = (j >= low) + (j >= high), i = from[j] & 7;
            const uint32_t power = (i & 1 ? 3u : 1u) * (i & 2 ? 9u : 1u) * (i & 4 ? 81u : 1u);
            slots += (uint64_t)(power * (uint32_t)(mirrored ? 2 - level : level)) << 16 * (from[j] >> 3);
        }
        return slots;
    }

    // Finds the points of all sub-blocks of a warp; returns whether a group of the lane is off the grid.
    STATIC_INLINE bool find_points(const Lane& lane, const Shifted& sub, uint64_t slots) {
        bool off = false;
#pragma unroll 1
        for (int owner = 0; owner < 32; owner++) {
            if (__shfl_sync(FULL, sub.dead, owner)) continue;
            const float scale = __shfl_sync(FULL, sub.scale, owner);
            const int shifts = __shfl_sync(FULL, sub.shifts, owner), away = (owner - lane_id()) * (N + 1);
#pragma unroll 1
            for (int k = 0; k < GROUPS; k++) {
                const uint32_t half = (uint32_t)(slots >> 32 * (k >> 1));
                const int entry = lane.grid.entries[__shfl_sync(FULL, half, owner) >> 16 * (k & 1) & 0xffff];
                int index = ~entry;
                if (entry >= 0) {
                    const float q = (float)((lane_id() & 3) - 1) + eighth(shifts & (k ? 1 : 2));
                    const int value = away + 8 * k + (lane_id() >> 2);
                    index = nearest_of_warp(lane.grid, entry, cost_of(scale * q, lane.x[value], lane.w[value]));
                }
                if (lane_id() == owner) {
                    off |= entry >= 0;
                    results(lane)[k] = (uint16_t)index;
                }
            }
        }
        return off;
    }

    // Calls a function with the terms of sum(w q x) and sum(w q q), in order; q is factor times the values.
    template <typename F> STATIC_INLINE void each_term(const Lane& lane, int shifts, float factor, F take) {
#pragma unroll 1
        for (int k = 0; k < GROUPS; k++) {
            const Point<8> point(lane.grid, results(lane)[k]);
            const float shift = eighth(shifts & (k ? 1 : 2));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float q = (point.q[i] + shift) * factor, wq = lane.w[8 * k + i] * q;
                take(8 * k + i, wq * lane.x[8 * k + i], wq * q);
            }
        }
    }

    // Weights: importance * sqrt(twice the mean square + x^2), or x^2.
    STATIC_INLINE void weigh_by_importance(const Lane& lane) {
        weigh(lane, N, 2.0f * SuperBlock<PER_BLOCK>(lane).squares() / 256.0f);
    }
    STATIC_INLINE void weigh_by_squares(const Lane& lane) {
        for (int i = 0; i < N; i++) lane.w[i] = lane.x[i] * lane.x[i];
    }

    // Searches the lane's sub-block; its points are in found(lane). Sub-blocks of values below tiny become zeros. off:
    // whether a group is off the grid.
    STATIC_INLINE Shifted fit(const Lane& lane, float tiny, bool& off) {
        float largest = 0;
        for (int i = 0; i < N; i++) {
            if (lane.x[i] != lane.x[i]) lane.x[i] = 0;  // NaN cannot be sorted; its row is rejected afterwards
            largest = fmaxf(largest, fabsf(lane.x[i]));
        }
        sort(lane);
        __syncwarp();
        const Candidate best = search(lane, largest < tiny);
        Shifted sub = {best.sum.qx / best.sum.q2, 0, best.choice < 0};
        const bool negative = sub.scale < 0;
        if (!sub.dead) sub.shifts = N == 32 ? 3 * best.choice : best.choice;
        if (negative) sub.shifts = sub.dead ? 0 : 3 - sub.shifts, sub.scale = -sub.scale;
        const uint64_t slots = slots_of(lane, best.low, best.high, negative);
        __syncwarp();
        for (int k = 0; k < GROUPS; k++) results(lane)[k] = 0;
        off = find_points(lane, sub, slots);
        return sub;
    }

    // The same; where a group is off the grid, the scale is fitted again.
    STATIC_INLINE Shifted fit(const Lane& lane, float tiny) {
        bool off;
        Shifted sub = fit(lane, tiny, off);
        Rating sum = {0, 0};
        each_term(lane, sub.shifts, 1.0f, [&](int, float qx, float q2) {
            sum.qx = sum.qx + qx;
            sum.q2 = sum.q2 + q2;
        });
        if (off && sum.qx > 0 && sum.q2 > 0) sub.scale = sum.qx / sum.q2;
        if (sub.dead) sub.scale = 0;
        return sub;
    }
};

// The 3-bit code of a scale.
INLINE uint32_t ternary_code(float scale, float inverse) {
    return (uint32_t)max(0, min(7, nearest_int(0.5f * (inverse * scale - 1.0f))));
}

// The weights of a part, set before ``Encoder::finish`` searches it.
template <typename Parts, typename Encoder> struct Weighing {
    STATIC_INLINE void plain(const Lane& lane) {
        Parts::weigh_by_squares(lane);
        Encoder::finish(lane);
    }
    STATIC_INLINE void weighted(const Lane& lane, float) {
        Parts::weigh_by_importance(lane);
        Encoder::finish(lane);
    }
};

struct QuantIQ1_S : Weighing<TernaryGrid<Whole>, QuantIQ1_S> {
    typedef TernaryGrid<Whole> Parts;
    static const int VALUES = 32, BLOCK = 256, BYTES = 50, SCRATCH = Parts::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void finish(const Lane& lane) {
        const Shifted sub = Parts::fit(lane, 1e-12f);
        const GridBlock<8, BYTES> block(lane, sub.scale, 15.0f, 1.125f);
        const uint16_t* results = Parts::results(lane);
        uint32_t high = 0;
        for (int k = 0; k < 4; k++) {
            lane.out[2 + 4 * lane.part + k] = (uint8_t)results[k];
            high |= (uint32_t)results[k] >> 8 << 3 * k;
        }
        if (block.alive) high |= (ternary_code(sub.scale, block.inverse) | (sub.shifts ? 8 : 0)) << 12;
        *(uint16_t*)(lane.out + 34 + 2 * lane.part) = (uint16_t)high;
    }
};

struct QuantIQ1_M : Weighing<TernaryGrid<Halves>, QuantIQ1_M> {
    typedef TernaryGrid<Halves> Parts;
    static const int VALUES = 16, BLOCK = 256, BYTES = 56, SCRATCH = Parts::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void finish(const Lane& lane) { write<Parts>(lane, Parts::fit(lane, 1e-7f), 1.1125f); }

    // The scale of a superblock is fitted to the codes of its parts: the terms, stored in place of values and weights,
    // are added in order.
    template <class P> STATIC_INLINE void write(const Lane& lane, const Shifted& sub, float stretch) {
        const float top = largest_in_block<16>(sub.scale), inverse = 1.0f / (top / 15.0f);
        const uint32_t code = ternary_code(sub.scale, inverse);
        P::each_term(lane, sub.shifts, (float)(int)(2 * code + 1), [&](int i, float qx, float q2) {
            lane.x[i] = qx;
            lane.w[i] = q2;
        });
        __syncwarp();
        Rating sum = {0, 0};
        const int first = -lane.part * 17;
        for (int i = 0; i < 256; i++) {
            const int at = first + i / 16 * 17 + i % 16;
            sum.qx = sum.qx + lane.x[at];
            sum.q2 = sum.q2 + lane.w[at];
        }
        const bool alive = top > 0;
        const float d = sum.q2 > 0 ? sum.qx / sum.q2 : top / 15.0f;
        store(lane, P::results(lane), sub.shifts, alive, code, d * stretch);
    }

    STATIC_INLINE void store(const Lane& lane, const uint16_t* results, int shifts, bool alive, uint32_t code, float d) {
        const int part = lane.part;
        uint32_t high = (uint32_t)(results[0] >> 8 | results[1] >> 8 << 4);
        if (alive) high |= (uint32_t)((shifts & 2) << 2 | (shifts & 1) << 7);
        *(uint16_t*)(lane.out + 2 * part) = (uint16_t)((results[0] & 255) | (results[1] & 255) << 8);
        lane.out[32 + part] = (uint8_t)high;
        // Packs four 3-bit codes and 4 bits of d into each of four words.
        uint32_t word = code << 3 * (part & 3);
        for (int k = 1; k < 4; k <<= 1) word |= __shfl_xor_sync(FULL, word, k);
        const uint32_t half = d == d ? float_to_half(d) : 0xfe00;
        word |= (half >> (part & 12) & 15) << 12;
        if (!(part & 3)) *(uint16_t*)(lane.out + 48 + part / 2) = (uint16_t)(alive ? word : 0);
    }
};
