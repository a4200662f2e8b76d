// Sums over the rows of a value, accumulated over runs: the data of importance matrices. All in double.
//
// A column sum has a high and a low part: TwoSum keeps in the low one the rounding error of each addition, and the
// square of a float is exact in double, so the sum rounded to float32 does not depend on the order of rows (Ogita,
// Rump, Oishi 2005, Sum2). No atomics on sums: one block adds to each number, in a fixed order.
//
// bad: int64, 1 + the lowest non-finite row found, or 0; the sums are then invalid.
#include "core/device.cuh"
#include "core/outer.cuh"

#define WARPS 8

struct Sum {
    double high, low;
};

INLINE void add(Sum& to, double v) {
    const double s = to.high + v, other = s - to.high;
    to.low += (to.high - (s - other)) + (v - other);
    to.high = s;
}

INLINE bool finite(float v) { return v - v == 0.0f; }

INLINE void report(int64_t* bad, int64_t row) {
    unsigned long long* word = (unsigned long long*)bad;
    unsigned long long old = *word;
    while (old == 0 || old > (unsigned long long)row + 1) {
        const unsigned long long previous = atomicCAS(word, old, (unsigned long long)row + 1);
        if (previous == old) return;
        old = previous;
    }
}

// ---- sums of columns: x^2 and x. sums: [n_mat][4][width rounded up to 8]: high and low of x^2, high and low of x

// A warp's sums of N * 32 columns; lane l has columns l, l + 32, ...
template <int N> struct Columns {
    Sum squares[N], values[N];
};

template <int N> INLINE void clear(Columns<N>& c) {
#pragma unroll
    for (int i = 0; i < N; i++) c.squares[i] = c.values[i] = Sum{0, 0};
}

// Adds a row, x at this lane's first column; left: columns from there. False if a value is not finite.
template <int N> INLINE bool add_row(Columns<N>& to, const float* x, int64_t left) {
    bool fine = true;
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (32 * i >= left) break;
        const float v = x[32 * i];
        fine = fine && finite(v);
        add(to.squares[i], (double)v * (double)v);
        add(to.values[i], (double)v);
    }
    return fine;
}

// Adds all warps' sums to those of one matrix, at this lane's first column. parts: [4][WARPS][32] shared doubles.
template <int N> INLINE void add_up(const Columns<N>& mine, double* sums, int64_t plane, int64_t left, double* parts) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
    for (int i = 0; i < N; i++) {
        __syncthreads();
        const double all[4] = {mine.squares[i].high, mine.squares[i].low, mine.values[i].high, mine.values[i].low};
#pragma unroll
        for (int k = 0; k < 4; k++) parts[(k * WARPS + warp) * 32 + lane] = all[k];
        __syncthreads();
        if (warp < 2 && 32 * i < left) {  // warp 0 the squares, warp 1 the values
            double *high = sums + 2 * warp * plane + 32 * i, *low = high + plane;
            const double* part = parts + 2 * warp * WARPS * 32 + lane;
            Sum total = {*high, *low};
            for (int w = 0; w < WARPS; w++) {
                add(total, part[32 * w]);
                total.low += part[32 * (WARPS + w)];
            }
            *high = total.high;
            *low = total.low;
        }
    }
}

// rows: all rows of x. A block takes 32 columns.
struct sum_columns_args {
    const float* x;
    int64_t width, rows;
    double* sums;
    int64_t *count, *bad;
};

KERNEL(sum_columns, 256) {
    __shared__ double parts[4 * WARPS * 32];
    const int64_t column = 32 * (int64_t)blockIdx.x + (threadIdx.x & 31), left = a.width - column;
    Columns<1> sums;
    clear(sums);
    int64_t worst = -1;
    for (int64_t row = threadIdx.x >> 5; row < a.rows; row += WARPS)
        if (!add_row(sums, a.x + row * a.width + column, left) && worst < 0) worst = row;
    if (worst >= 0) report(a.bad, worst);
    add_up(sums, a.sums + column, (a.width + 7) / 8 * 8, left, parts);
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.count += a.rows;
}

// rows: tokens, with experts ids [rows, n_used]; x has one row for x_per of these pairs. bad: a pair. Blocks are
// (128 columns, expert).
struct sum_columns_id_args {
    const float* x;
    const int32_t* ids;
    int64_t width, rows, n_used, x_per;
    double* sums;
    int64_t *counts, *bad;
};

KERNEL(sum_columns_id, 256) {
    __shared__ double parts[4 * WARPS * 32];
    __shared__ int is_bad[32];
    const int lane = threadIdx.x & 31, expert = (int)blockIdx.y;
    const int64_t column = 128 * (int64_t)blockIdx.x + lane, left = a.width - column, pairs = a.rows * a.n_used;
    Columns<4> sums;
    clear(sums);
    int64_t worst = -1;
    int count = 0;
    for (int64_t first = threadIdx.x & ~31; first < pairs; first += 256) {
        uint32_t chosen = __ballot_sync(FULL, first + lane < pairs && a.ids[first + lane] == expert);
        count += __popc(chosen);
        for (; chosen; chosen &= chosen - 1) {
            const int64_t pair = first + __ffs((int)chosen) - 1;
            if (!add_row(sums, a.x + pair / a.x_per * a.width + column, left) && worst < 0) worst = pair;
        }
    }
    if (worst >= 0) report(a.bad, worst);
    count = block_sum(lane == 0 ? count : 0, is_bad);
    if (count == 0) return;
    const int64_t plane = (a.width + 7) / 8 * 8;
    add_up(sums, a.sums + 4 * plane * expert + column, plane, left, parts);
    if (blockIdx.x == 0 && threadIdx.x == 0) a.counts[expert] += count;
}

// ---- covariances: sums += x x^T, per expert

// A block computes TILE x TILE of one expert's sums, at or below the diagonal, and their mirror images.
#define TILE 64
#define STEP 16  // rows at a time

// rows: tokens, with experts ids [rows, n_used]; ids 0: all rows belong to the only matrix, and n_used is 1. x has one
// row for x_per of these pairs. sums: [experts][width][width] of experts first, first + 1, ...; weights (0: none), one
// per pair: rows are weighted by their squares, whose sum goes to weight [experts]; counts [experts]; both may be 0.
// Blocks are (rows of tiles, columns of tiles, expert).
struct covariance_args {
    const float* x;
    const int32_t* ids;
    const float* weights;
    int64_t width, rows, n_used, x_per, first;
    double* sums;
    int64_t* counts;
    double* weight;
};

KERNEL(covariance, 256) {
    __shared__ double left[STEP][TILE], right[STEP][TILE], parts[32];
    __shared__ int list[256], is_bad[WARPS];
    if (blockIdx.y > blockIdx.x) return;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, expert = (int)(a.first + blockIdx.z);
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int64_t top = TILE * (int64_t)blockIdx.x, side = TILE * (int64_t)blockIdx.y, pairs = a.rows * a.n_used;
    double sums[4][4] = {}, weight = 0;
    int64_t count = 0;
    for (int64_t begin = 0; begin < pairs; begin += 256) {
        const int64_t pair = begin + threadIdx.x;
        const bool chosen = pair < pairs && (!a.ids || a.ids[pair] == expert);
        const uint32_t mask = __ballot_sync(FULL, chosen);
        if (lane == 0) is_bad[warp] = __popc(mask);
        if (a.weight) {
            const double w = chosen ? (double)a.weights[pair] : 0;
            weight += block_sum(w * w, parts);
        }
        __syncthreads();
        int n = 0, before = __popc(mask & ((1u << lane) - 1));
        for (int w = 0; w < WARPS; w++) {
            if (w < warp) before += is_bad[w];
            n += is_bad[w];
        }
        if (chosen) list[before] = (int)threadIdx.x;
        count += n;
        __syncthreads();
        for (int at = 0; at < n; at += STEP) {
            for (int i = threadIdx.x; i < STEP * TILE; i += 256) {
                const int r = i / TILE, c = i % TILE;
                double l = 0, m = 0;
                if (at + r < n) {
                    const int64_t p = begin + list[at + r];
                    const float* x = a.x + p / a.x_per * a.width;
                    const double w = a.weights ? (double)a.weights[p] : 1;
                    if (top + c < a.width) l = x[top + c] * (w * w);
                    if (side + c < a.width) m = x[side + c];
                }
                left[r][c] = l;
                right[r][c] = m;
            }
            __syncthreads();
            add_outer(sums, left, right, STEP, tx, ty);
            __syncthreads();
        }
    }
    double* to = a.sums + blockIdx.z * a.width * a.width;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = top + ty + 16 * i, column = side + tx + 16 * j;
            if (row >= a.width || column > row || count == 0) continue;
            const double sum = to[row * a.width + column] + sums[i][j];
            to[row * a.width + column] = sum;
            to[column * a.width + row] = sum;
        }
    }
    if (threadIdx.x == 0 && blockIdx.x == 0) {
        if (a.counts) a.counts[blockIdx.z] += count;
        if (a.weight) a.weight[blockIdx.z] += weight;
    }
}

// ---- similarity: the sum of the cosines of the rows of a and b

// cosines: double [rows], for add_cosines; NaN if a row is all zeros. A block per row.
struct similarity_args {
    const float *a, *b;
    int64_t width, rows;
    double* cosines;
    int64_t* bad;
};

KERNEL(similarity, 256) {
    __shared__ double parts[32];
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    double product = 0, of_a = 0, of_b = 0;
    for (int64_t i = row * a.width + threadIdx.x; i < (row + 1) * a.width; i += 256) {
        const double x = a.a[i], y = a.b[i];
        product += x * y;
        of_a += x * x;
        of_b += y * y;
    }
    product = block_sum(product, parts);
    of_a = block_sum(of_a, parts);
    of_b = block_sum(of_b, parts);
    if (threadIdx.x) return;
    a.cosines[row] = product / sqrt(of_a * of_b);
    const double both = of_a + of_b;
    if (both - both != 0) report(a.bad, row);
}

// One block adds the finite cosines to total; count: all rows.
struct add_cosines_args {
    const double* cosines;
    int64_t rows;
    double* total;
    int64_t* count;
};

KERNEL(add_cosines, 256) {
    __shared__ double parts[32];
    double sum = 0;
    for (int64_t i = threadIdx.x; i < a.rows; i += 256) {
        const double v = a.cosines[i];
        if (v - v == 0) sum += v;
    }
    sum = block_sum(sum, parts);
    if (threadIdx.x) return;
    *a.total += sum;
    *a.count += a.rows;
}

// ---- non-finite rows, and ids that count up

// A warp per row.
struct not_finite_args {
    const float* x;
    int64_t width, rows;
    int64_t* bad;
};

KERNEL(not_finite, 256) {
    const int64_t row = (int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5);
    if (row >= a.rows) return;
    bool fine = true;
    for (int64_t i = threadIdx.x & 31; i < a.width; i += 32) fine = fine && finite(a.x[row * a.width + i]);
    fine = __all_sync(FULL, fine);
    if (!fine && (threadIdx.x & 31) == 0) report(a.bad, row);
}

// Sets every row of out, int32 [rows, n_used], to first, first + 1, ...: routes each token to these experts.
struct count_up_args {
    int32_t* out;
    int64_t first, n_used, rows;
};

KERNEL(count_up, 256) {
    const int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i < a.rows * a.n_used) a.out[i] = (int32_t)(a.first + i % a.n_used);
}
