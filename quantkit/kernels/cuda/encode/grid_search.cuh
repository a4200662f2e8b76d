// The scale search for sub-blocks whose values are points of a grid, IQ2 and IQ3; the twin of
// quantkit/kernels/cpu/encode/grid_search.py, which defines the candidates and their ratings. A warp searches the
// sub-blocks of one superblock after another.
//
// Source: llama.cpp b11434 ggml-quants.c quantize_row_iq{2_xxs,2_xs,2_s,3_xxs,3_s}_impl, iq{2,3}_find_best_neighbour.
#pragma once
#include "encode/search.cuh"

// The values of a point, SIZE of them.
template <int SIZE> struct Point {
    float q[SIZE];

    __device__ __forceinline__ Point(const GridTables& grid, int index) {
        const float4* from = (const float4*)(grid.points + SIZE * index);
        for (int i = 0; i < SIZE; i += 4) {
            const float4 four = from[i / 4];
            q[i] = four.x, q[i + 1] = four.y, q[i + 2] = four.z, q[i + 3] = four.w;
        }
    }
};

// The first of the nearest neighbours in a list, by sum(root * (scale * q - x)^2), added in order.
template <int SIZE>
INLINE int nearest_neighbour(const GridTables& grid, int entry, const float* x, const float* root, float scale) {
    const uint2* list = (const uint2*)grid.lists + (entry >> 8);
    float least = __int_as_float(0x7f800000);
    int results = (int)(list->x & 0xffff);
#pragma unroll 1
    for (int left = entry & 255; left; left--) {
        const uint2 four = *list++;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int index = (int)((j < 2 ? four.x : four.y) >> 16 * (j & 1) & 0xffff);
            const Point<SIZE> point(grid, index);
            float distance = 0;
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                const float off = scale * point.q[i] - x[i], cost = root[i] * off * off;
                distance = i ? distance + cost : cost;
            }
            if (distance < least) {
                least = distance;
                results = index;
            }
        }
    }
    return results;
}

// The slot of a point: values times iscale, rounded to levels 0 .. TOP.
template <int SIZE, int TOP> INLINE int slot_of(const float* x, float iscale) {
    int slot = 0;
#pragma unroll
    for (int i = SIZE - 1; i >= 0; i--) slot = slot * (TOP + 1) + min(max(nearest_int(0.5f * (iscale * x[i] - 1.0f)), 0), TOP);
    return slot;
}

// Sums over w*q*x and w*q*q.
struct Rating {
    float qx, q2;
};

// The groups of a sub-block that are rounded again by the best scale.
enum Again { OFF_GRID, ALL_IF_ONE_IS_OFF, ALWAYS };

// Parameters of a search: N values per sub-block, SIZE per group, levels 0 .. TOP; STEPS candidates on either side of
// the first, TENTHS / 10 of a level apart.
template <int N, int SIZE, int TOP, int STEPS, int TENTHS> struct GridShape {
    static const int PER_BLOCK = 256 / N, BLOCKS = 32 / PER_BLOCK, GROUPS = N / SIZE, TRIALS = 2 * STEPS + 1;
    static const int STRIDE = N + 1, ALL = (1 << GROUPS) - 1;
    static const int FOUND = GROUPS / 2;  // floats of indices, 16 bits each

    // 1 / scale of a candidate.
    STATIC_INLINE float iscale_of(int trial, float largest) {
        return ((float)(2 * TOP + 1) + (float)(trial - STEPS) * (TENTHS == 2 ? 0.2f : 0.1f)) / largest;
    }

    // Returns the candidate with the best of these ratings, and its scale; -1 if none is above 0.
    STATIC_INLINE int best_of(const float* sums, float& scale) {
        float best = 0;
        int won = -1;
        for (int trial = 0; trial < TRIALS; trial++) {
            const float qx = sums[2 * trial], q2 = sums[2 * trial + 1];
            if (q2 > 0 && qx * qx > best * q2) {
                scale = qx / q2;
                best = scale * qx;
                won = trial;
            }
        }
        return won;
    }
};

// The search for types with short lists of neighbours: one candidate per lane. Adjacent lanes round the same values by
// nearly equal scales, mostly to the same points, and so read the same lists. Nothing is pruned. The best candidate is
// rounded again by the lane that has the sub-block.
template <int N, int SIZE, int TOP, int STEPS, int TENTHS> struct GridSearch : GridShape<N, SIZE, TOP, STEPS, TENTHS> {
    typedef GridShape<N, SIZE, TOP, STEPS, TENTHS> Shape;
    using Shape::best_of, Shape::iscale_of;
    static const int PER_BLOCK = Shape::PER_BLOCK, BLOCKS = Shape::BLOCKS, GROUPS = Shape::GROUPS, TRIALS = Shape::TRIALS;
    static const int STRIDE = Shape::STRIDE, ALL = Shape::ALL, FOUND = Shape::FOUND;
    // Point indices of all lanes of a warp; ratings of the candidates of one superblock.
    static const int SCRATCH = PER_BLOCK * FOUND + (2 * PER_BLOCK * TRIALS + BLOCKS - 1) / BLOCKS;

    STATIC_INLINE float* scratch_of_warp(const Lane& lane) { return lane.scratch - lane_id() / PER_BLOCK * SCRATCH; }
    // The indices of the lane's points.
    STATIC_INLINE uint16_t* results(const Lane& lane) { return (uint16_t*)(scratch_of_warp(lane) + lane_id() * FOUND); }
    STATIC_INLINE float* ratings(const Lane& lane) { return scratch_of_warp(lane) + 32 * FOUND; }

    // Rates the points of a sub-block. Groups are rounded by iscale, and to the nearest neighbour by scale where the
    // result is not on the grid. KEEP: only groups in the mask ``again`` are rounded, and their points and the mask
    // ``off`` of those not on the grid are stored; the other groups keep their points.
    template <bool KEEP>
    STATIC_INLINE Rating rate(const GridTables& grid, const float* x, const float* w, float iscale, float scale, uint16_t* results,
                              int again, int& off) {
        Rating sum = {0, 0};
#pragma unroll 1
        for (int k = 0; k < GROUPS; k++) {
            float of[SIZE], weight[SIZE];
#pragma unroll
            for (int i = 0; i < SIZE; i++) of[i] = x[SIZE * k + i], weight[i] = w[SIZE * k + i];
            int index;
            if (!KEEP || (again >> k & 1)) {
                const int entry = grid.entries[slot_of<SIZE, TOP>(of, iscale)];
                index = ~entry;
                if (entry >= 0) {
                    float root[SIZE];
#pragma unroll
                    for (int i = 0; i < SIZE; i++) root[i] = __fsqrt_rn(weight[i]);
                    index = nearest_neighbour<SIZE>(grid, entry, of, root, scale);
                    if (KEEP) off |= 1 << k;
                }
                if (KEEP) results[k] = (uint16_t)index;
            } else {
                index = results[k];
            }
            const Point<SIZE> point(grid, index);
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                sum.qx = sum.qx + weight[i] * of[i] * point.q[i];
                sum.q2 = sum.q2 + weight[i] * point.q[i] * point.q[i];
            }
        }
        return sum;
    }

    // Tries all candidates for the sub-blocks of a warp; returns the best one, -1 if there is none, and its scale.
    // largest: the value that the first candidate maps to the top level; 0 for a dead sub-block.
    STATIC_INLINE int best_trial(const Lane& lane, float largest, float& scale) {
        float* const sums = ratings(lane);
        int won = -1;
#pragma unroll 1
        for (int block = 0; block < BLOCKS; block++) {
#pragma unroll 1
            for (int first = 0; first < PER_BLOCK * TRIALS; first += 32) {
                const int at = first + lane_id(), part = min(at / TRIALS, PER_BLOCK - 1), owner = block * PER_BLOCK + part;
                const float top = __shfl_sync(FULL, largest, owner);
                if (at >= PER_BLOCK * TRIALS || top == 0) continue;
                const int away = (owner - lane_id()) * STRIDE;
                const float iscale = iscale_of(at - part * TRIALS, top);
                int off = 0;
                const Rating sum = rate<false>(lane.grid, lane.x + away, lane.w + away, iscale, 1.0f / iscale, nullptr, ALL, off);
                sums[2 * at] = sum.qx;
                sums[2 * at + 1] = sum.q2;
            }
            __syncwarp();
            if (lane_id() / PER_BLOCK == block && largest != 0) won = best_of(sums + 2 * lane.part * TRIALS, scale);
            __syncwarp();
        }
        return won;
    }

    // Finds scale and points of the lane's sub-block; largest 0: it is dead. scale: the result where no candidate is
    // rated above 0: then all points are the first one, which counts as off the grid if AGAIN is ALL_IF_ONE_IS_OFF.
    template <Again AGAIN> STATIC_INLINE float search(const Lane& lane, float largest, float scale) {
        const int won = best_trial(lane, largest, scale);
        uint16_t* const points = results(lane);
        for (int k = 0; k < GROUPS; k++) points[k] = 0;
        if (largest == 0) return scale;
        int off = 0, again = won < 0 ? 0 : ALL;
        float iscale = iscale_of(won, largest), by = 1.0f / iscale;
        if (won < 0 && AGAIN == ALL_IF_ONE_IS_OFF) off = ALL;
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            const Rating sum = rate<true>(lane.grid, lane.x, lane.w, iscale, by, points, again, off);
            if (pass) return sum.q2 > 0 ? sum.qx / sum.q2 : scale;
            again = AGAIN == ALWAYS || (AGAIN == ALL_IF_ONE_IS_OFF && off) ? ALL : off;
            if (!(scale > 0) || !again) break;
            iscale = 1.0f / scale;
            by = scale;
        }
        return scale;
    }
};

// ---------------------------------------------------------------- signs

// The index of the smallest w * x * x of 8 values, the first of equal ones.
INLINE int least_of_8(const float* x, const float* w) {
    int at = 0;
    float least = w[0] * x[0] * x[0];
    for (int i = 1; i < 8; i++) {
        const float size = w[i] * x[i] * x[i];
        if (size < least) least = size, at = i;
    }
    return at;
}

// Replaces values by magnitudes; returns their signs: 8 bits for 8 values, lowest first. EVEN: 7 bits; if an odd
// number is negative, the value with the smallest w * x * x changes its sign first, and its magnitude becomes
// negative.
template <int N, bool EVEN> INLINE uint32_t take_signs(float* x, const float* w) {
    uint32_t signs = 0;
    for (int k = 0; k < N; k += 8) {
        uint32_t bits = 0;
        for (int i = 0; i < 8; i++) bits |= (uint32_t)(x[k + i] < 0) << i;
        const int flip = EVEN && (__popc(bits) & 1) ? least_of_8(x + k, w + k) : -1;
        for (int i = 0; i < 8; i++) {
            const float v = x[k + i], size = v < 0 ? -v : v;
            x[k + i] = i == flip ? -size : size;
        }
        if (flip >= 0) bits ^= 1u << flip;
        signs |= EVEN ? (bits & 127) << k / 8 * 7 : bits << k;
    }
    return signs;
}
