// The point of a grid nearest to a target, in the metric of a group's covariance: the twin of search.py, which
// describes the search. A half warp searches for a row, with one root, or child, per lane: a line of sixteen. Both
// halves take the same branches, so that the lanes of a warp can synchronize. Macros: those of codebook_tree.py; HELD,
// the number of nodes whose children's losses are cached: those of other nodes are recomputed.
#pragma once
#include "core/device.cuh"

const int LANES = 16, MOST = 64, LINES = ROOT_LINES / CLASSES, WIDTH = SIZE * PARTS;
// Floats per line of roots; bytes per line of points.
const int LINE = LANES * SIZE;

// No child is nearer.
INLINE float far_away() { return __int_as_float(0x7f800000); }

struct GridTree {
    const float* roots;
    const uint8_t *lines, *signs;
};

// A code, -1 if there is none, and its loss.
struct ScoredPoint {
    int code;
    float loss;
};

// Output of a row's search, in shared memory: lists of nodes, losses of children.
const int ROW_SCRATCH = HEIGHTS == 0 ? 0 : 2 * MOST + (HEIGHTS > 1 ? HELD * LANES : 0);

INLINE int lane_of_16() { return (int)threadIdx.x & 15; }
INLINE unsigned ballot_of_16(bool yes) {
    const unsigned all = __ballot_sync(FULL, yes);
    return threadIdx.x & 16 ? all >> 16 : all & 0xffffu;
}
INLINE int longer_of_two(int count) { return max(count, __shfl_xor_sync(FULL, count, 16)); }

// ---- levels

// The signed bytes of a word of bytes biased by 128.
INLINE float of_byte(uint32_t word, int i) { return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + i)) - 8388736.0f; }

// The values of a lane of a line, with the signs of a pattern.
INLINE void child_of(const GridTree& tree, int line, int lane, int pattern, float (&c)[SIZE]) {
    const uint8_t* at = tree.lines + (line * LANES + lane) * SIZE;
#if SIZE == 2
    const uint32_t words[1] = {*(const uint16_t*)at};
#elif SIZE == 4
    const uint32_t words[1] = {*(const uint32_t*)at};
#else
    const uint2 both = *(const uint2*)at;
    const uint32_t words[2] = {both.x, both.y};
#endif
    const uint32_t signs = PATTERNS > 1 ? tree.signs[pattern] : 0;
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        c[i] = of_byte(words[i / 4], i % 4);
        if (PATTERNS > 1) c[i] = __uint_as_float(__float_as_uint(c[i]) ^ (signs << (31 - i) & 0x80000000u));
    }
}

// The levels of a point.
INLINE void point_levels(const GridTree& tree, int code, float (&c)[SIZE]) {
    const int point = code & ((1 << POINT_BITS) - 1);
    child_of(tree, FIRST_OF_POINTS + (point >> 4), point & 15, code >> POINT_BITS, c);
#pragma unroll
    for (int i = 0; i < SIZE; i++) c[i] = c[i] * UNIT;
}

// The class of a point, by the pattern of its signs.
INLINE int class_of(int code) { return CLASSES * (code >> POINT_BITS) / PATTERNS; }

// ---- distances

INLINE float near2(float z0, float z1, float c0, float c1) {
    const float a = z0 - c0, b = z1 - c1;
    return __fmaf_rn(a, a, b * b);
}

// The squared distance of a lane's root, from a line of products with T^T: quads of axes, one after another in each.
INLINE float near(const float (&z)[SIZE], const float* line) {
#if SIZE == 2
    const float2 c = ((const float2*)line)[lane_of_16()];
    return near2(z[0], z[1], c.x, c.y);
#else
    float total = 0;
#pragma unroll
    for (int i = 0; i < SIZE; i += 4) {
        const float4 c = ((const float4*)line)[LANES * (i / 4) + lane_of_16()];
        const float sum = near2(z[i], z[i + 1], c.x, c.y) + near2(z[i + 2], z[i + 3], c.z, c.w);
        total = i ? total + sum : sum;
    }
    return total;
#endif
}

// The offset of an axis's value in such a line.
INLINE int place_in_line(int lane, int axis) {
    const int width = SIZE < 4 ? SIZE : 4;
    return LANES * width * (axis / width) + width * lane + axis % width;
}

// The squared distance of a lane's child; t is -T, on and above the diagonal.
INLINE float score(const GridTree& tree, int first, int bits, int node, const float (&t)[SIZE][SIZE], const float (&z)[SIZE]) {
    float c[SIZE], squares[SIZE];
    child_of(tree, first + (node & ((1 << bits) - 1)), lane_of_16(), node >> bits, c);
#pragma unroll
    for (int j = 0; j < SIZE; j++) {
        float rest = z[j];
#pragma unroll
        for (int i = 0; i <= j; i++) rest = __fmaf_rn(c[i], t[i][j], rest);
        squares[j] = rest * rest;
    }
#pragma unroll
    for (int step = 1; step < SIZE; step *= 2)
#pragma unroll
        for (int j = 0; j < SIZE; j += 2 * step) squares[j] = squares[j] + squares[j + step];
    return squares[0];
}

// The same for a node of another height, by default the last.
const int LAST_BITS = HEIGHTS ? HEIGHT_BITS >> 4 * (HEIGHTS ? HEIGHTS - 1 : 0) : 0;
INLINE float score_of_points(const GridTree& tree, int node, const float (&t)[SIZE][SIZE], const float (&z)[SIZE]) {
    return score(tree, FIRST_OF_POINTS, LAST_BITS, node, t, z);
}

// ---- descending the tree

// The largest loss among the lanes kept; lanes of equal loss count as one.
INLINE float limit_of(float least) {
    const int lane = lane_of_16();
#pragma unroll
    for (int width = 2; width <= LANES; width *= 2)
#pragma unroll
        for (int step = width / 2; step; step /= 2) {
            const float other = __shfl_xor_sync(FULL, least, step);
            const bool takes_less = !(lane & step) == !(lane & width);
            least = takes_less == other < least ? other : least;
        }
    const float before = __shfl_up_sync(FULL, least, 1, LANES);
    unsigned different = ballot_of_16(lane == 0 || least != before);
#pragma unroll
    for (int i = 1; i < KEPT; i++) different &= different - 1;
    const float limit = __shfl_sync(FULL, least, different ? __ffs(different) - 1 : 0, LANES);
    return different ? limit : far_away();
}

// Lists the children of a node that are near; returns the number of nodes in the list.
INLINE int keep(int count, bool is_near, int first_child, int* list) {
    const unsigned near = ballot_of_16(is_near);
    const int at = count + __popc(near & ((1u << lane_of_16()) - 1));
    if (is_near && at < MOST - 2) list[at] = first_child + lane_of_16();
    return min(count + __popc(near), MOST - 2);
}

// The best lane, the first of equal ones, and its code; ``now`` if there is none.
INLINE ScoredPoint pick(float best, int code, int now) {
    int lane = lane_of_16();
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) {
        const float other = __shfl_xor_sync(FULL, best, step);
        const int from = __shfl_xor_sync(FULL, lane, step);
        const bool better = other < best || (other == best && from < lane);
        best = better ? other : best;
        lane = better ? from : lane;
    }
    code = __shfl_sync(FULL, code, lane, LANES) + lane;
    const bool any = best < far_away();
    return {any ? code : now, any ? best : far_away()};
}

#if HEIGHTS == 0
// The best root of each lane so far.
struct Nearest {
    float loss;
    int line;
};

// Searches some lines of roots, from line ``first`` on.
INLINE void nearest_root(const float* table, int first, int count, const float (&z)[SIZE], Nearest& best) {
#pragma unroll 4
    for (int line = 0; line < count; line++) {
        const float distance = near(z, table + LINE * line);
        const bool less = distance < best.loss;
        best.loss = less ? distance : best.loss;
        best.line = less ? LANES * (first + line) : best.line;
    }
}
#else
// A near point of a class, or ``now`` unless it is -1. table: T^T times the roots; scratch: ROW_SCRATCH words.
INLINE ScoredPoint search(const GridTree& tree, const float* table, const float (&t)[SIZE][SIZE], const float (&z)[SIZE],
                          int of_class, int now, int* scratch) {
    float losses[LINES], least = far_away();
    table += LINE * LINES * of_class;
#pragma unroll
    for (int line = 0; line < LINES; line++) {
        losses[line] = near(z, table + LINE * line);
        least = least < losses[line] ? least : losses[line];
    }
    float limit = limit_of(least);
    int *nodes = scratch, *other = scratch + MOST, count = 0, first = 0;
#pragma unroll
    for (int line = 0; line < LINES; line++) count = keep(count, losses[line] <= limit, LANES * (LINES * of_class + line), nodes);
    __syncwarp();
#if HEIGHTS > 1
    float* held = (float*)(scratch + 2 * MOST) + lane_of_16();
#pragma unroll 1
    for (int height = 0; height < HEIGHTS - 1; height++) {
        const int bits = HEIGHT_BITS >> 4 * height & 15, longer = longer_of_two(count);
        least = far_away();
#pragma unroll 1
        for (int i = 0; i < count; i++) {
            const float loss = score(tree, first, bits, nodes[i], t, z);
            if (i < HELD) held[LANES * i] = loss;
            least = least < loss ? least : loss;
        }
        __syncwarp();
        limit = limit_of(least);
        int more = 0;
#pragma unroll 1
        for (int i = 0; i < longer; i++) {
            const int node = i < count ? nodes[i] : 0;
            bool is_near = i < count;
            if (is_near) is_near = (i < HELD ? held[LANES * i] : score(tree, first, bits, node, t, z)) <= limit;
            more = keep(more, is_near, LANES * node, other);
        }
        __syncwarp();
        int* const swapped = nodes;
        nodes = other, other = swapped, count = more;
        first += 1 << bits;
    }
#endif
    if (now >= 0) {
        if (lane_of_16() == 0) nodes[count] = now >> 4;
        count++;
    }
    __syncwarp();
    float best = far_away();
    int code = 0;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        const float loss = score_of_points(tree, nodes[i], t, z);
        const bool less = loss < best;
        best = less ? loss : best;
        code = less ? LANES * nodes[i] : code;
    }
    __syncwarp();
    return pick(best, code, now);
}

// The loss of the point of a code.
INLINE float loss_of(const GridTree& tree, const float (&t)[SIZE][SIZE], const float (&z)[SIZE], int code) {
    return __shfl_sync(FULL, score_of_points(tree, code >> 4, t, z), code & 15, LANES);
}
#endif
