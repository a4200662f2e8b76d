// The search of grid_search.cuh for types with long lists of neighbours, IQ2_XXS and IQ2_XS: the lanes of a warp share
// the distance computations of a list.
//
// A lane rounds a group by one of the candidates. Consecutive candidates that round it to the same point form a run:
// their scales are adjacent, and they share a list. Only the first and the last candidate of a run are measured;
// candidates between two with the same nearest neighbour get it too, if its margin is large enough (``sure``);
// otherwise two more in between are measured.
//
// Why: the distance of a neighbour is sum(root x^2) + s (a s - b), where s is the scale, and a and b belong to the
// neighbour. The difference between two neighbours is therefore s times a linear function of s, bounded by its values
// at both ends, and the scales of a run differ by less than half. Rounding changes a distance by far less than SLACK
// times (distance + sum(root x^2)), which is tested at both ends.
#pragma once
#include "encode/grid_search.cuh"

// A relative margin far above the rounding error of a distance.
#define SLACK 0x1p-12f
#define INFINITE __int_as_float(0x7f800000)

// The minimum of values >= 0, whose bits sort like the values.
INLINE float warp_min(float v) {
#if __CUDA_ARCH__ >= 800 && !defined(QUANTKIT_HOST)
    return __uint_as_float(__reduce_min_sync(FULL, __float_as_uint(v)));
#else
    for (int d = 16; d; d >>= 1) v = fminf(v, __shfl_xor_sync(FULL, v, d));
    return v;
#endif
}

// The weighted squared error of a value at a level.
INLINE float cost_of(float q, float x, float root) {
    const float off = q - x;
    return root * off * off;
}

// The nearest neighbour among those that this lane measured: its distance, the second smallest distance, its place in
// the list.
struct Nearest {
    float least, second;
    int place;

    __device__ __forceinline__ Nearest() : least(INFINITE), second(INFINITE), place(0) {}

    __device__ __forceinline__ void take(float distance, int at) {
        second = fminf(second, fmaxf(least, distance));
        place = distance < least ? at : place;
        least = fminf(least, distance);
    }

    // The first of the nearest over all lanes; second: the next smallest distance.
    __device__ __forceinline__ void of_warp() {
        const float all = warp_min(least);
        const uint32_t lanes = __ballot_sync(FULL, least == all);
        if (lanes & (lanes - 1)) {
            place = least == all ? place : 0x7fffffff;
            for (int d = 16; d; d >>= 1) place = min(place, __shfl_xor_sync(FULL, place, d));
            second = all;
        } else {
            second = warp_min(least == all ? second : least);
            place = __shfl_sync(FULL, place, __ffs((int)lanes) - 1);
        }
        least = all;
    }
};

// Measures the neighbours in a list, for groups of 8 values, by a warp and for COUNT scales. Lane 4 i + l has the cost
// of level l for value i at each scale; no word has level 3. A list is padded with copies of its first word, which are
// ignored.
template <int COUNT> INLINE void measure(const GridTables& grid, int entry, const float (&cost)[COUNT], Nearest (&nearest)[COUNT]) {
    const int me = lane_id(), count = (entry & 255) * 4;
    const uint16_t* words = grid.words + (entry >> 8) * 4;
    const uint32_t head = words[0];
#pragma unroll 1
    for (int first = 0; first < count; first += 32) {
        const int at = first + me;
        const uint32_t word = at < count ? words[at] : head;
        float distance[COUNT];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int from = (int)(word >> 2 * i & 3) | 4 * i;
#pragma unroll
            for (int n = 0; n < COUNT; n++) {
                const float more = __shfl_sync(FULL, cost[n], from);
                distance[n] = i ? distance[n] + more : more;
            }
        }
#pragma unroll
        for (int n = 0; n < COUNT; n++) nearest[n].take(at && word == head ? INFINITE : distance[n], at);
    }
#pragma unroll
    for (int n = 0; n < COUNT; n++) nearest[n].of_warp();
}

// The index of the neighbour at a place in a list.
INLINE int index_at(const GridTables& grid, int entry, int place) { return grid.lists[(entry >> 8) * 4 + place]; }

// The index of the first nearest neighbour.
INLINE int nearest_of_warp(const GridTables& grid, int entry, float cost) {
    const float costs[1] = {cost};
    Nearest nearest[1];
    measure(grid, entry, costs, nearest);
    return index_at(grid, entry, nearest[0].place);
}

template <int N, int STEPS> struct RunSearch : GridShape<N, 8, 2, STEPS, 1> {
    typedef GridShape<N, 8, 2, STEPS, 1> Shape;
    using Shape::best_of, Shape::iscale_of;
    static const int PER_BLOCK = Shape::PER_BLOCK, BLOCKS = Shape::BLOCKS, GROUPS = Shape::GROUPS, TRIALS = Shape::TRIALS;
    static const int STRIDE = Shape::STRIDE, ALL = Shape::ALL, FOUND = Shape::FOUND;
    // The groups that a warp processes at once, and which lanes have a candidate.
    static const int AT_ONCE = TRIALS <= 16 ? 2 : 1, PER_GROUP = 32 / AT_ONCE;
    static const uint32_t FIRST = AT_ONCE == 2 ? 0x10001u : 1u, VALID = FIRST * ((1u << TRIALS) - 1);
    // Point indices of all lanes; ratings and indices of the candidates of a superblock.
    static const int CANDIDATES = PER_BLOCK * TRIALS;
    static const int SCRATCH = PER_BLOCK * FOUND + (2 * CANDIDATES + CANDIDATES * FOUND + BLOCKS - 1) / BLOCKS;
    // Flag in a point's index: the point is a neighbour, because the group is not on the grid.
    static const int OFF = 1 << 15;

    STATIC_INLINE float* scratch_of_warp(const Lane& lane) { return lane.scratch - lane_id() / PER_BLOCK * SCRATCH; }
    STATIC_INLINE uint16_t* results(const Lane& lane) { return (uint16_t*)(scratch_of_warp(lane) + lane_id() * FOUND); }
    STATIC_INLINE float* ratings(const Lane& lane) { return scratch_of_warp(lane) + 32 * FOUND; }
    STATIC_INLINE uint16_t* found_by(const Lane& lane, int candidate) {
        return (uint16_t*)(ratings(lane) + 2 * CANDIDATES) + GROUPS * candidate;
    }

    // The values of groups, for distances: lane 4 i + l has value i, and the value of level l.
    struct Values {
        float x[AT_ONCE], root[AT_ONCE], margin[AT_ONCE], q;

        __device__ __forceinline__ Values(const float* from, const float* w) : q((float)(2 * (lane_id() & 3) + 1)) {
#pragma unroll
            for (int g = 0; g < AT_ONCE; g++) {
                x[g] = from[8 * g + (lane_id() >> 2)];
                root[g] = __fsqrt_rn(w[8 * g + (lane_id() >> 2)]);
                float total = root[g] * x[g] * x[g];
                for (int d = 4; d < 32; d <<= 1) total += __shfl_xor_sync(FULL, total, d);
                margin[g] = total > 1e-30f ? SLACK * total : INFINITE;  // where products may underflow, no neighbour is sure
            }
        }
        __device__ __forceinline__ float cost(int g, float scale) const {
            return AT_ONCE == 2 && g ? cost_of(scale * q, x[AT_ONCE - 1], root[AT_ONCE - 1]) : cost_of(scale * q, x[0], root[0]);
        }
        __device__ __forceinline__ float margin_of(int g) const { return g ? margin[AT_ONCE - 1] : margin[0]; }
    };

    // Finds the points of AT_ONCE groups from group k on, for all candidates. begins: lanes whose point differs from
    // that of the lane before; entry: of the lane's point, -1 without a candidate. Returns index << 1 | sure for the
    // lane's.
    STATIC_INLINE int points_of_runs(const GridTables& grid, const Values& values, uint32_t begins, int entry, float scale) {
        const uint32_t ends = (begins | ~VALID) >> 1 | 1u << 31;  // preceding lanes
        int state = entry < 0 ? ~entry << 1 : 0;
        uint32_t left = __ballot_sync(FULL, entry >= 0);
        while (left) {
            const int lane = __ffs((int)left) - 1;
            const uint32_t behind = FULL << lane;
            const int end = __ffs((int)(ends & behind)) - 1;
            int a = lane, b = end;
            if (!(begins >> lane & 1)) {  // between two measured lanes
                const int from = lane - 1, to = __ffs((int)(~left & behind)) - 1, third = max(1, (to - from) / 3);
                const int known = __shfl_sync(FULL, state, from), other = __shfl_sync(FULL, state, to);
                if (known == other && known & 1) {
                    if (lane_id() > from && lane_id() < to) state = known;
                    left &= ~(behind & ~(FULL << to));
                    continue;
                }
                a = from + third;
                b = to - third;
            }
            const int group = a / PER_GROUP, of = __shfl_sync(FULL, entry, a);
            const float costs[2] = {values.cost(group, __shfl_sync(FULL, scale, a)),
                                    values.cost(group, __shfl_sync(FULL, scale, b))};
            Nearest nearest[2];
            measure(grid, of, costs, nearest);
#pragma unroll
            for (int n = 0; n < 2; n++) {
                const bool sure = nearest[n].second - nearest[n].least > SLACK * nearest[n].least + values.margin_of(group);
                const int code = index_at(grid, of, nearest[n].place) << 1 | (int)sure;
                if (lane_id() == (n ? b : a)) state = code;
            }
            left &= ~(1u << a | 1u << b);
        }
        return state;
    }

    // Finds the points of a sub-block for all candidates, [candidate][group].
    STATIC_INLINE void find_points(const GridTables& grid, const float* x, const float* w, float largest, uint16_t* to) {
        const int trial = lane_id() % PER_GROUP, g = lane_id() / PER_GROUP;
        const bool in_range = trial < TRIALS;
        const float iscale = iscale_of(trial, largest);
#pragma unroll 1
        for (int k = 0; k < GROUPS; k += AT_ONCE) {
            const Values values(x + 8 * k, w + 8 * k);
            const int slot = slot_of<8, 2>(x + 8 * (k + g), iscale);
            const int entry = in_range ? grid.entries[slot] : -1;
            const bool same = slot == __shfl_up_sync(FULL, slot, 1);
            const uint32_t begins = __ballot_sync(FULL, !same) | FIRST;
            const int state = points_of_runs(grid, values, begins, entry, 1.0f / iscale);
            if (in_range) to[trial * GROUPS + k + g] = (uint16_t)(state >> 1 | (entry >= 0 ? OFF : 0));
        }
    }

    // Rates the points of a sub-block.
    STATIC_INLINE Rating rate(const GridTables& grid, const float* x, const float* w, const uint16_t* points) {
        Rating sum = {0, 0};
#pragma unroll 1
        for (int k = 0; k < GROUPS; k++) {
            const Point<8> point(grid, points[k] & (OFF - 1));
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float weight = w[8 * k + i];
                sum.qx = sum.qx + weight * x[8 * k + i] * point.q[i];
                sum.q2 = sum.q2 + weight * point.q[i] * point.q[i];
            }
        }
        return sum;
    }

    // Tries all candidates for the sub-blocks of a warp; writes the points of the best one (the first if none is rated
    // above 0), and returns a mask of its groups that are not on the grid. largest: the value that the first candidate
    // maps to the top level; 0: a dead sub-block. best: the rating of the best one.
    STATIC_INLINE int best_points(const Lane& lane, float largest, float& scale, float& best) {
        float* const sums = ratings(lane);
        int off = 0;
        best = 0;
#pragma unroll 1
        for (int block = 0; block < BLOCKS; block++) {
#pragma unroll 1
            for (int part = 0; part < PER_BLOCK; part++) {
                const int owner = block * PER_BLOCK + part, away = (owner - lane_id()) * STRIDE;
                const float top = __shfl_sync(FULL, largest, owner);
                if (top != 0) find_points(lane.grid, lane.x + away, lane.w + away, top, found_by(lane, part * TRIALS));
            }
            __syncwarp();
#pragma unroll 1
            for (int first = 0; first < CANDIDATES; first += 32) {
                const int at = min(first + lane_id(), CANDIDATES - 1), owner = block * PER_BLOCK + at / TRIALS;
                const int away = (owner - lane_id()) * STRIDE;
                if (__shfl_sync(FULL, largest, owner) == 0) continue;
                const Rating sum = rate(lane.grid, lane.x + away, lane.w + away, found_by(lane, at));
                sums[2 * at] = sum.qx;
                sums[2 * at + 1] = sum.q2;
            }
            __syncwarp();
            if (lane_id() / PER_BLOCK == block) {
                const int won = largest == 0 ? -1 : best_of(sums + 2 * lane.part * TRIALS, scale);
                if (won >= 0) best = scale * sums[2 * (lane.part * TRIALS + won)];
                for (int k = 0; k < GROUPS; k++) {
                    const int point = won < 0 ? 0 : found_by(lane, lane.part * TRIALS + won)[k];
                    results(lane)[k] = (uint16_t)(point & (OFF - 1));
                    off |= (point & OFF ? 1 : 0) << k;
                }
            }
            __syncwarp();
        }
        return off;
    }

    // Rounds groups by a scale: those in each lane's mask ``mine``, computed by all lanes. keep(k, index): the lane's
    // group k.
    template <class F> STATIC_INLINE void round_by(const Lane& lane, int mine, float scale, F keep) {
        uint32_t slots[FOUND] = {};
#pragma unroll
        for (int k = 0; k < GROUPS; k++)
            if (mine) slots[k / 2] |= (uint32_t)slot_of<8, 2>(lane.x + 8 * k, 1.0f / scale) << 16 * (k & 1);
#pragma unroll 1
        for (int owner = 0; owner < 32; owner++) {
            const int run = __shfl_sync(FULL, mine, owner), away = (owner - lane_id()) * STRIDE;
            if (!run) continue;
            const float by = __shfl_sync(FULL, scale, owner);
#pragma unroll
            for (int k = 0; k < GROUPS; k++) {
                if (!(run >> k & 1)) continue;
                const int slot = __shfl_sync(FULL, slots[k / 2], owner) >> 16 * (k & 1) & 0xffff, entry = lane.grid.entries[slot];
                int index = ~entry;
                if (entry >= 0) {
                    const int value = away + 8 * k + (lane_id() >> 2);
                    const float q = (float)(2 * (lane_id() & 3) + 1);
                    index = nearest_of_warp(lane.grid, entry, cost_of(by * q, lane.x[value], __fsqrt_rn(lane.w[value])));
                }
                if (lane_id() == owner) keep(k, index);
            }
        }
    }

    // As in GridSearch; the warp rounds groups again.
    template <Again AGAIN> STATIC_INLINE float search(const Lane& lane, float largest, float scale) {
        static_assert(AGAIN != ALL_IF_ONE_IS_OFF, "the first point, where no candidate is better than 0, is on the grid");
        float best;
        const int off = best_points(lane, largest, scale, best);
        const int again = largest != 0 && scale > 0 ? AGAIN == ALWAYS ? ALL : off : 0;
        round_by(lane, again, scale, [&](int k, int index) { results(lane)[k] = (uint16_t)index; });
        if (!again) return scale;
        const Rating sum = rate(lane.grid, lane.x, lane.w, results(lane));
        return sum.q2 > 0 ? sum.qx / sum.q2 : scale;
    }
};
