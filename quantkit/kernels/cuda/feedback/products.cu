// Matrix products in the order of kernels/cpu/feedback/products.py: covariances of two streams, and corrections.
#include "core/device.cuh"
#include "core/outer.cuh"

#define RUN 256  // rows whose products are added in float
#define TILE 64
#define STEP 16  // rows at a time
#define PART 1024

// c[i][j] += the sum of x[k][i] z[k][j] over `rows` rows k: RUN rows in float, one FMA each, and these sums in double.
// x is [rows][n], z [rows][m], c [n][m]. upper: only j >= i, at the granularity of tiles. Blocks are (columns, rows)
// of c.
struct products_args {
    const float *x, *z;
    double* c;
    int64_t rows, n, m, upper;
};

KERNEL(products, 256) {
    __shared__ float left[STEP][TILE], right[STEP][TILE];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int64_t top = TILE * (int64_t)blockIdx.y, side = TILE * (int64_t)blockIdx.x;
    if (a.upper && side + TILE <= top) return;
    double sums[4][4];
    get_sums(sums, a.c, a.m, top + ty, side + tx, a.n, a.m);
    for (int64_t run = 0; run < a.rows; run += RUN) {
        const int64_t end = run + RUN < a.rows ? run + RUN : a.rows;
        float part[4][4] = {};
        for (int64_t at = run; at < end; at += STEP) {
            const int here = at + STEP <= end ? STEP : (int)(end - at);
            for (int i = threadIdx.x; i < STEP * TILE; i += 256) {
                const int k = i / TILE, c = i % TILE;
                left[k][c] = k < here && top + c < a.n ? a.x[(at + k) * a.n + top + c] : 0.0f;
                right[k][c] = k < here && side + c < a.m ? a.z[(at + k) * a.m + side + c] : 0.0f;
            }
            __syncthreads();
            add_outer(part, left, right, here, tx, ty);
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] += (double)part[i][j];
    }
    put_sums(sums, a.c, a.m, top + ty, side + tx, a.n, a.m);
}

// Mirrors the upper triangle of c, [n][n], below the diagonal, tile by tile. Blocks are (columns, rows) of tiles of
// 32.
struct mirror_args {
    double* c;
    int64_t n;
};

KERNEL(mirror, 256) {
    __shared__ double tile[32][33];
    const int tx = threadIdx.x & 31, ty = threadIdx.x >> 5;
    if (blockIdx.x < blockIdx.y) return;
    const int64_t top = 32 * (int64_t)blockIdx.y, side = 32 * (int64_t)blockIdx.x;
    for (int k = ty; k < 32; k += 8)
        if (top + k < a.n && side + tx < a.n) tile[k][tx] = a.c[(top + k) * a.n + side + tx];
    __syncthreads();
    for (int k = ty; k < 32; k += 8) {
        const int64_t row = side + k, column = top + tx;
        if (row < a.n && column < row) a.c[row * a.n + column] = tile[tx][k];
    }
}

// Sets found to 1 if one of n doubles is NaN or infinite; otherwise leaves it unchanged. A block checks PART of them.
struct not_finite_sum_args {
    const double* x;
    int32_t* flag;
    int64_t n;
};

KERNEL(not_finite_sum, 256) {
    const int64_t first = PART * (int64_t)blockIdx.x;
    for (int64_t i = first + threadIdx.x; i < first + PART && i < a.n; i += 256)
        if (!(a.x[i] - a.x[i] == 0.0)) *a.flag = 1;
}

// out = x + x M, plus offset unless it is null: x, out and offset [rows][n], M packed (packing.cu). Products are added
// to x column by column of x, one FMA each. Blocks are (columns, rows).
struct correct_args {
    const float *x, *correction, *offset;
    float* out;
    int64_t rows, n;
};

KERNEL(correct, 256) {
    __shared__ float left[STEP][TILE + 1];
    __shared__ float4 right[STEP][TILE / 4];
    const int tx = threadIdx.x & 15, ty = threadIdx.x >> 4;
    const int64_t top = TILE * (int64_t)blockIdx.y, strip = TILE / 4 * (int64_t)blockIdx.x + tx;
    const bool here = 4 * strip < a.n;
    float sums[4][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t row = top + ty + 16 * i;
        const bool inside = here && row < a.rows;
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] = inside ? a.x[row * a.n + 4 * strip + j] : 0.0f;
    }
    for (int64_t at = 0; at < a.n; at += STEP) {
        for (int i = threadIdx.x; i < STEP * TILE; i += 256) {
            const int k = i % STEP, row = i / STEP;
            left[k][row] = top + row < a.rows ? a.x[(top + row) * a.n + at + k] : 0.0f;
        }
        {
            const int k = threadIdx.x % STEP, of = threadIdx.x / STEP;
            const int64_t from = TILE / 4 * (int64_t)blockIdx.x + of;
            right[k][of] = 4 * from < a.n ? ((const float4*)a.correction)[from * a.n + at + k] : float4{};
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < STEP; k++) {
            const float4 m = right[k][tx];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float x = left[k][ty + 16 * i];
                sums[i][0] = __fmaf_rn(x, m.x, sums[i][0]);
                sums[i][1] = __fmaf_rn(x, m.y, sums[i][1]);
                sums[i][2] = __fmaf_rn(x, m.z, sums[i][2]);
                sums[i][3] = __fmaf_rn(x, m.w, sums[i][3]);
            }
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t row = top + ty + 16 * i;
        if (!here || row >= a.rows) continue;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t to = row * a.n + 4 * strip + j;
            a.out[to] = a.offset ? sums[i][j] + a.offset[to] : sums[i][j];
        }
    }
}
