// The Cholesky factor of a covariance, and triangular solves with it, in double: bit-identical to
// kernels/cpu/feedback/factor.py and products.py. Every sum has the order of its terms there, regardless of the tiles here:
// terms are subtracted one at a time, each by an FMA, so the result does not depend on how the work is split into
// blocks.
//
// Matrices are [n][n], row-major. Each launch factors, or solves, BLOCK rows; another launch updates the remaining
// rows.
#include "core/device.cuh"
#include "core/outer.cuh"

#define BLOCK 64
#define GROUPS 8    // in threads; each has every eighth row of a block
#define COLUMNS 32  // columns solved by a thread block
#define TILE 64
#define STEP 16  // rows at a time

// r[i][j] = matrix[order[i]][order[j]] for j >= i, with another diagonal.
struct permute_args {
    const double *matrix, *diagonal;
    const int32_t* order;
    double* r;
    int64_t n;
};

KERNEL(permute, 256) {
    const int64_t row = blockIdx.y, from = a.order[row];
    const int64_t column = 256 * (int64_t)blockIdx.x + threadIdx.x;
    if (column < row || column >= a.n) return;
    a.r[row * a.n + column] = column == row ? a.diagonal[from] : a.matrix[from * a.n + a.order[column]];
}

// Factors `count` rows from `begin` on, which are up to date, within the columns of the same range; by: the factor of
// each row, inverse: 1 / its diagonal. bad: int64, one more than the number of the first row that is not positive;
// otherwise unchanged.
struct factor_block_args {
    double *r, *by, *inverse;
    int64_t n, begin, count;
    int64_t* bad;
};

KERNEL(factor_block, 256) {
    __shared__ double block[BLOCK][BLOCK + 1];
    const int count = (int)a.count, lane = threadIdx.x % BLOCK, group = threadIdx.x / BLOCK;
    double* r = a.r + a.begin * a.n + a.begin;
    for (int row = group; row < count; row += 256 / BLOCK)
        if (lane >= row && lane < count) block[row][lane] = r[row * a.n + lane];
    __syncthreads();
    for (int k = 0; k < count; k++) {
        const double pivot = block[k][k];
        if (!(pivot > 0.0)) {  // in all threads
            if (threadIdx.x == 0 && *a.bad == 0) *a.bad = a.begin + k + 1;
            return;
        }
        const double by = 1.0 / sqrt(pivot);
        if (lane >= k && lane < count) {  // row k itself is scaled once no thread reads it any more
            const double mine = block[k][lane] * by;
            for (int row = k + 1 + group; row <= lane; row += 256 / BLOCK)
                block[row][lane] = fma(mine, -(block[k][row] * by), block[row][lane]);
            if (group == 0) r[k * a.n + lane] = mine;
            if (group == 1 && lane == k) {
                a.by[a.begin + k] = by;
                a.inverse[a.begin + k] = 1.0 / mine;
            }
        }
        __syncthreads();
    }
}

// Solves for `count` rows of x, from `begin` on, with the triangle of r between the same rows and columns: each is
// multiplied by its `by`, and subtracted from those after it; backwards: from those before it. Columns `first` to
// `last` of x, whose rows are `width` long.
struct solve_block_args {
    double* x;
    const double *r, *by;
    int64_t width, n, begin, count, first, last, backwards;
};

KERNEL(solve_block, 256) {
    __shared__ double tile[BLOCK][COLUMNS];
    const int count = (int)a.count, lane = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS;
    const int64_t column = a.first + COLUMNS * (int64_t)blockIdx.x + lane;
    const bool in_range = column < a.last;
    const double *r = a.r + a.begin * a.n + a.begin, *by = a.by + a.begin;
    double* x = a.x + a.begin * a.width + column;
    for (int k = group; k < count; k += GROUPS) tile[k][lane] = in_range ? x[k * a.width] : 0.0;
    __syncthreads();
    for (int i = 0; i < count; i++) {
        const int k = a.backwards ? count - 1 - i : i;
        const double mine = tile[k][lane] * by[k];
        if (a.backwards)
            for (int j = group; j < k; j += GROUPS) tile[j][lane] = fma(mine, -r[j * a.n + k], tile[j][lane]);
        else
            for (int j = k + 1 + group; j < count; j += GROUPS) tile[j][lane] = fma(mine, -r[k * a.n + j], tile[j][lane]);
        if (in_range && group == k % GROUPS) x[k * a.width] = mine;
        __syncthreads();
    }
}

// c[j][i] -= the sum of q[k][j] p[k][i], `count` rows k from `begin` on, for rows j from row to end_row, columns i
// from column to end_column; rows of c and p are `width` long; q is at k * q_row + j * q_column. upper: only i >= j,
// at the granularity of tiles. Blocks are (columns, rows).
struct subtract_args {
    double* c;
    const double *p, *q;
    int64_t width, q_row, q_column, begin, count, row, end_row, column, end_column, upper;
};

KERNEL(subtract, 256) {
    __shared__ double right[STEP][TILE], left[STEP][TILE + 1];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int64_t top = a.row + TILE * (int64_t)blockIdx.y, side = a.column + TILE * (int64_t)blockIdx.x;
    if (a.upper && side + TILE <= top) return;
    double sums[4][4];
    get_sums(sums, a.c, a.width, top + ty, side + tx, a.end_row, a.end_column);
    for (int64_t at = a.begin; at < a.begin + a.count; at += STEP) {
        const int steps = at + STEP <= a.begin + a.count ? STEP : (int)(a.begin + a.count - at);
        for (int i = threadIdx.x; i < STEP * TILE; i += 256) {
            const int k = i / TILE, c = i % TILE;
            right[k][c] = k < steps && side + c < a.end_column ? a.p[(at + k) * a.width + side + c] : 0.0;
            // Adjacent threads read adjacent elements of q.
            const int m = a.q_column == 1 ? k : i % STEP, j = a.q_column == 1 ? c : i / STEP;
            left[m][j] = m < steps && top + j < a.end_row ? -a.q[(at + m) * a.q_row + (top + j) * a.q_column] : 0.0;
        }
        __syncthreads();
        add_outer(sums, left, right, steps, tx, ty);
        __syncthreads();
    }
    put_sums(sums, a.c, a.width, top + ty, side + tx, a.end_row, a.end_column);
}
