// Sweeps over groups of columns whose levels come from a grid: with error feedback, and by coordinate descent. The
// twin of group_sweeps.py, which defines T and B, and the loss.
//
// A thread block has a tile. BLOCK columns at a time are in shared memory, with their part of the matrix. Group after
// group, all threads multiply the roots of its tree by T^T; each half warp searches for one row; then the columns of
// the block are updated by the changes.
#pragma once
#include "feedback/search.cuh"
#include "feedback/tiles.cuh"

// Columns after which the following ones are updated.
const int BLOCK = 64, STRIPS = BLOCK / STRIP;
// Lines of roots that are multiplied at a time; half warps; words fetched for a group, one warp each.
const int TABLE_LINES = HEIGHTS ? PARTS * ROOT_LINES : (ROOT_LINES < 32 ? ROOT_LINES : 32), HALVES = 2 * WARPS, FETCHED = 4 + PARTS;
static_assert(WIDTH <= WARPS && FETCHED <= WARPS && 2 * WIDTH * WIDTH <= TILE_THREADS, "more warps for a group");
static_assert(HEIGHTS || (CLASSES == 1 && PARTS == 1 && ROOT_LINES % TABLE_LINES == 0), "roots are all there is");

// Tile after tile: x, levels, v, g, e [n][ROWS]; scale, minimum, inverse, classes [n / span][ROWS]; codes [n /
// SIZE][ROWS]. columns: in the order of the sweep; order: in the order of groups; group_of: the group of each.
// feedback, descent: [groups][2][WIDTH][WIDTH], T and B.
struct group_args {
    const int32_t *columns, *order, *group_of, *classes;
    const float *u, *h, *feedback, *descent, *roots, *scale, *minimum, *inverse;
    const uint8_t *lines, *signs;
    float *x, *levels, *v, *g, *e;
    int32_t* codes;
    int64_t n, span;
};

// Shared memory for groups; products reuse it. table: T^T times roots; scratch: scratch of the searches. square: the
// matrix's part of a block's columns, as strips, if it fits. before: the old values of columns, then their changes.
// rest: the contribution of the preceding, or of all other columns. metric, fetched: of this group and the next.
struct Shared {
    float table[TABLE_LINES * LINE], square[KEEPS_SQUARE ? STRIPS : 1][KEEPS_SQUARE ? BLOCK : 1][STRIP], before[BLOCK][ROWS],
        rest[BLOCK][ROWS], z[WIDTH][ROWS];
    float metric[2][2][WIDTH][WIDTH], fetched[2][FETCHED][ROWS];
    int code[PARTS][ROWS], scratch[HALVES][ROW_SCRATCH + 1];
};
static_assert(sizeof(Shared) <= SHARED_BYTES && 2 * sizeof(Chunk) <= SHARED_BYTES, "groups.py counts fewer bytes");

// State of a sweep, in every thread. FEEDBACK: with error feedback; otherwise by descent.
template <bool FEEDBACK> struct Sweep {
    const group_args& a;
    Shared& s;
    const GridTree tree;
    const int n, lane, warp, subs;
    float *const levels, *const v, *const e;
    int32_t* const codes;
    int begin;  // of the block's columns

    __device__ __forceinline__ Sweep(const group_args& a, Shared& s)
        : a(a),
          s(s),
          tree{a.roots, a.lines, a.signs},
          n((int)a.n),
          lane(lane_id()),
          warp(warp_here()),
          subs(n / (int)a.span),
          levels(of_tile(a.levels, n)),
          v(of_tile(a.v, n)),
          e(of_tile(a.e, n)),
          codes(of_tile(a.codes, n / SIZE)),
          begin(0) {}

    __device__ __forceinline__ int column(int k) const { return FEEDBACK ? a.columns[k] : a.order[k]; }

    // The place in shared memory of column k of the sweep, within the block.
    __device__ __forceinline__ int offset(int k) const { return (FEEDBACK ? k : a.order[k]) - begin; }

    __device__ __forceinline__ int group(int k) const { return FEEDBACK ? a.group_of[a.columns[k]] : k / WIDTH; }

    // ---- data of column k's group, prefetched, a word per thread

    __device__ __forceinline__ float fetch(int k) const {
        if (k >= n) return 0;
        const int sub = ROWS * (column(k) / (int)a.span) + lane;
        switch (warp) {
            case 0: return of_tile(a.scale, subs)[sub];
            case 1: return of_tile(a.minimum, subs)[sub];
            case 2: return of_tile(a.inverse, subs)[sub];
            case 3: return __int_as_float(of_tile(a.classes, subs)[sub]);
            default:
                if (warp >= FETCHED) return 0;
                return __int_as_float(codes[ROWS * (group(k) * PARTS + warp - 4) + lane]);
        }
    }

    __device__ __forceinline__ float fetch_frame(int k) const {
        const float* metrics = FEEDBACK ? a.feedback : a.descent;
        const int at = 2 * WIDTH * WIDTH * (k / WIDTH) + (int)threadIdx.x;
        return (int)threadIdx.x < 2 * WIDTH * WIDTH && k < n ? metrics[at] : 0.0f;
    }

    __device__ __forceinline__ void put(int side, float fetched, float metric) const {
        if (warp < FETCHED) s.fetched[side][warp][lane] = fetched;
        if ((int)threadIdx.x < 2 * WIDTH * WIDTH) (&s.metric[side][0][0][0])[threadIdx.x] = metric;
    }

    // ---- a group: its target and its tables

    // z = (T^T (p + minimum) + B r) / scale: one axis per warp.
    __device__ __forceinline__ void aim(int k, int side) const {
        if (warp >= WIDTH) return;
        const float minimum = s.fetched[side][1][lane];
        float total = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const int at = offset(k + i);
            const float p = s.before[at][lane], rest = FEEDBACK ? s.rest[at][lane] - p : s.rest[at][lane];
            total = __fmaf_rn(rest, s.metric[side][1][warp][i], total);
            if (i <= warp) total = __fmaf_rn(p + minimum, s.metric[side][0][i][warp], total);
        }
        s.z[warp][lane] = total * s.fetched[side][2][lane];
    }

    // The table of some lines of roots, for one part.
    __device__ __forceinline__ void prepare(int side, int part, int first, int count, float* table) const {
        float t[SIZE][SIZE];
#pragma unroll
        for (int j = 0; j < SIZE; j++)
#pragma unroll
            for (int i = 0; i <= j; i++) t[i][j] = s.metric[side][0][SIZE * part + i][SIZE * part + j];
#pragma unroll 1
        for (int root = (int)threadIdx.x; root < LANES * count; root += TILE_THREADS) {
            const float* c = tree.roots + SIZE * (LANES * first + root);
            float products[SIZE];
#pragma unroll
            for (int j = 0; j < SIZE; j++) {
                float total = 0;
#pragma unroll
                for (int i = 0; i <= j; i++) total = __fmaf_rn(c[i], t[i][j], total);
                products[j] = total * UNIT;
            }
            float* line = table + LINE * (root / LANES);
#pragma unroll
            for (int j = 0; j < SIZE; j++) line[place_in_line(root % LANES, j)] = products[j];
        }
    }

    // -T of a part.
    __device__ __forceinline__ void read_t(int side, int part, float (&t)[SIZE][SIZE]) const {
#pragma unroll
        for (int j = 0; j < SIZE; j++)
#pragma unroll
            for (int i = 0; i <= j; i++) t[i][j] = -UNIT * s.metric[side][0][SIZE * part + i][SIZE * part + j];
    }

    __device__ __forceinline__ void read_z(int row, int part, float (&z)[SIZE]) const {
#pragma unroll
        for (int j = 0; j < SIZE; j++) z[j] = s.z[SIZE * part + j][row];
    }

    // ---- choosing codes: a half warp has every HALVES-th row

    __device__ __forceinline__ int now(int side, int part, int row) const { return __float_as_int(s.fetched[side][4 + part][row]); }

#if HEIGHTS == 0
    __device__ __forceinline__ void choose(int side) const {
        const int half = (int)threadIdx.x / LANES;
        float z[ROWS / HALVES][SIZE];
        Nearest best[ROWS / HALVES];
#pragma unroll
        for (int i = 0; i < ROWS / HALVES; i++) {
            best[i] = {far_away(), 0};
            read_z(half + HALVES * i, 0, z[i]);
        }
#pragma unroll 1
        for (int first = 0; first < ROOT_LINES; first += TABLE_LINES) {
            if (first) __syncthreads();
            prepare(side, 0, first, TABLE_LINES, s.table);
            __syncthreads();
#pragma unroll
            for (int i = 0; i < ROWS / HALVES; i++) nearest_root(s.table, first, TABLE_LINES, z[i], best[i]);
        }
#pragma unroll
        for (int i = 0; i < ROWS / HALVES; i++) {
            const ScoredPoint point = pick(best[i].loss, best[i].line, now(side, 0, half + HALVES * i));
            if (lane_of_16() == 0) s.code[0][half + HALVES * i] = point.code;
        }
    }
#else
    __device__ __forceinline__ void choose(int side) const {
        for (int part = 0; part < PARTS; part++) prepare(side, part, 0, ROOT_LINES, s.table + LINE * ROOT_LINES * part);
        __syncthreads();
        const int half = (int)threadIdx.x / LANES;
        float t[SIZE][SIZE];
        read_t(side, 0, t);
#pragma unroll 1
        for (int row = half; row < ROWS; row += HALVES) choose_row(side, row, t, s.scratch[half]);
    }

#if PARTS == 1
    __device__ __forceinline__ void choose_row(int side, int row, const float (&t)[SIZE][SIZE], int* scratch) const {
        float z[SIZE];
        read_z(row, 0, z);
        const int of_class = __float_as_int(s.fetched[side][3][row]);
        const ScoredPoint point = search(tree, s.table, t, z, of_class, now(side, 0, row), scratch);
        if (lane_of_16() == 0) s.code[0][row] = point.code;
    }
#else
    // The best code of the second part after ``first``; ``after``: its current one.
    __device__ __forceinline__ ScoredPoint second(int side, int row, int first, int after, int* scratch) const {
        float t[SIZE][SIZE], rest[SIZE], level[SIZE];
        read_t(side, 1, t);
        read_z(row, 1, rest);
        point_levels(tree, first, level);
#pragma unroll
        for (int j = 0; j < SIZE; j++)
#pragma unroll
            for (int i = 0; i < SIZE; i++) rest[j] = rest[j] - level[i] * s.metric[side][0][i][SIZE + j];
        const int of_class = class_of(first);
        return search(tree, s.table + LINE * ROOT_LINES, t, rest, of_class, class_of(after) == of_class ? after : -1, scratch);
    }

    // Two parts of one class: the best pair, given candidates of the first part.
    __device__ __forceinline__ void choose_row(int side, int row, const float (&t)[SIZE][SIZE], int* scratch) const {
        const int before = now(side, 0, row), after = now(side, 1, row);
        float z[SIZE];
        read_z(row, 0, z);
        int one = before, of_class = 0;
        float loss_of_one = loss_of(tree, t, z, before), best = 0;
        int chosen[2] = {before, after};
#pragma unroll 1
        for (int turn = 0; turn <= CLASSES; turn++) {
            if (turn) {
                const ScoredPoint point = search(tree, s.table, t, z, of_class++, -1, scratch);
                one = point.code, loss_of_one = point.loss;
            }
            const ScoredPoint two = second(side, row, one < 0 ? before : one, after, scratch);
            const float loss = loss_of_one + two.loss;
            const bool better = one >= 0 && loss < best;
            if (turn == 0) best = two.loss + loss_of_one;
            if (turn == 0) chosen[1] = two.code;
            if (turn && better) best = loss, chosen[0] = one, chosen[1] = two.code;
        }
        if (lane_of_16() == 0) s.code[0][row] = chosen[0], s.code[1][row] = chosen[1];
    }
#endif
#endif

    // ---- applying the choice

    // Sets the codes of a group, its levels and values, and their changes: one column per warp.
    __device__ __forceinline__ void set(int k, int side) const {
        if (warp < PARTS) codes[ROWS * (group(k) * PARTS + warp) + lane] = s.code[warp][lane];
        if (warp >= WIDTH) return;
        float level[SIZE];
        point_levels(tree, s.code[warp / SIZE][lane], level);
        const float value_of_level = pick_one(level, warp % SIZE);
        const int at = offset(k + warp), to = ROWS * column(k + warp) + lane;
        const float value = s.fetched[side][0][lane] * value_of_level - s.fetched[side][1][lane];
        const float change = s.before[at][lane] - value;
        levels[to] = value_of_level;
        v[to] = value;
        s.before[at][lane] = change;
        e[FEEDBACK ? ROWS * (k + warp) + lane : to] = change;
    }

    static __device__ __forceinline__ float pick_one(const float (&values)[SIZE], int i) {
        float value = values[0];
#pragma unroll
        for (int j = 1; j < SIZE; j++) value = i == j ? values[j] : value;
        return value;
    }

    // A strip of the block's columns, from the first of them on.
    __device__ __forceinline__ const float* strip_of_matrix(int strip) const {
        return (FEEDBACK ? a.u : a.h) + STRIP * ((int64_t)(begin / STRIP + strip) * n + begin);
    }

    // Applies the changes of a group to the block's columns: with error feedback, to the following ones.
    __device__ __forceinline__ void take_over(int k) const {
        for (int strip = warp; strip < STRIPS; strip += WARPS) {
            if (FEEDBACK && begin + STRIP * (strip + 1) <= k + WIDTH) continue;
            const float* square = KEEPS_SQUARE ? s.square[strip][0] : strip_of_matrix(strip);
            float rest[STRIP];
#pragma unroll
            for (int j = 0; j < STRIP; j++) rest[j] = s.rest[STRIP * strip + j][lane];
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                const int at = offset(k + i);
                const float change = s.before[at][lane];
                const float4 by = *(const float4*)(square + STRIP * at);
                rest[0] = __fmaf_rn(change, by.x, rest[0]);
                rest[1] = __fmaf_rn(change, by.y, rest[1]);
                rest[2] = __fmaf_rn(change, by.z, rest[2]);
                rest[3] = __fmaf_rn(change, by.w, rest[3]);
            }
#pragma unroll
            for (int j = 0; j < STRIP; j++) s.rest[STRIP * strip + j][lane] = rest[j];
        }
    }

    // ---- all columns

    __device__ __forceinline__ void sweep_block() const {
        put(0, fetch(begin), fetch_frame(begin));
        __syncthreads();
#pragma unroll 1
        for (int k = begin, side = 0; k < begin + BLOCK; k += WIDTH, side ^= 1) {
            const float next = fetch(k + WIDTH), next_frame = fetch_frame(k + WIDTH);
            aim(k, side);
            if (HEIGHTS == 0) __syncthreads();
            choose(side);
            __syncthreads();
            set(k, side);
            put(side ^ 1, next, next_frame);
            __syncthreads();
            take_over(k);
            __syncthreads();
        }
    }

    __device__ __forceinline__ void fetch_block(const float* before) const {
        if (KEEPS_SQUARE)
            for (int i = (int)threadIdx.x; i < STRIPS * BLOCK; i += TILE_THREADS)
                *(float4*)s.square[i / BLOCK][i % BLOCK] = ((const float4*)strip_of_matrix(i / BLOCK))[i % BLOCK];
        for (int i = warp; i < BLOCK; i += WARPS)
            s.before[i][lane] = before[ROWS * (FEEDBACK ? a.columns[begin + i] : begin + i) + lane];
    }
};

INLINE void error_feedback_groups(const group_args& a, uint8_t* memory) {
    Shared& s = *(Shared*)memory;
    Chunk(&chunks)[2] = *(Chunk(*)[2])memory;
    Sweep<true> sweep(a, s);
    const int n = sweep.n, lane = sweep.lane, warp = sweep.warp;
    const float* x = of_tile(a.x, n);
#pragma unroll 1
    for (sweep.begin = 0; sweep.begin < n; sweep.begin += BLOCK) {
        const int first = OWN * warp;
        float sum[OWN] = {};
        if (first < BLOCK)
#pragma unroll
            for (int i = 0; i < OWN; i++) sum[i] = x[ROWS * a.columns[sweep.begin + first + i] + lane];
        multiply(sum, a.u + (int64_t)sweep.begin * n, n, sweep.e, sweep.begin, BLOCK, chunks);
        if (first < BLOCK)
#pragma unroll
            for (int i = 0; i < OWN; i++) s.rest[first + i][lane] = sum[i];
        sweep.fetch_block(x);
        sweep.sweep_block();
    }
}

INLINE void descend_groups(const group_args& a, uint8_t* memory) {
    Shared& s = *(Shared*)memory;
    Chunk(&chunks)[2] = *(Chunk(*)[2])memory;
    Sweep<false> sweep(a, s);
    const int n = sweep.n, lane = sweep.lane, warp = sweep.warp;
    float* g = of_tile(a.g, n);
#pragma unroll 1
    for (sweep.begin = 0; sweep.begin < n; sweep.begin += BLOCK) {
        const int begin = sweep.begin;
        for (int i = warp; i < BLOCK; i += WARPS) s.rest[i][lane] = g[ROWS * (begin + i) + lane];
        sweep.fetch_block(sweep.v);
        sweep.sweep_block();
        for (int i = warp; i < BLOCK; i += WARPS) g[ROWS * (begin + i) + lane] = s.rest[i][lane];
#pragma unroll 1
        for (int from = 0; from < n; from += WIDE) {
            const int first = from + OWN * warp;
            const bool any = first < n && (first < begin || first >= begin + BLOCK);
            float sum[OWN] = {};
            if (any)
#pragma unroll
                for (int i = 0; i < OWN; i++) sum[i] = g[ROWS * (first + i) + lane];
            multiply(sum, a.h + STRIP * ((int64_t)from / STRIP * n + begin), n, sweep.e + ROWS * begin, BLOCK,
                     n - from < WIDE ? n - from : WIDE, chunks);
            if (any)
#pragma unroll
                for (int i = 0; i < OWN; i++) g[ROWS * (first + i) + lane] = sum[i];
        }
        __syncthreads();
    }
}
