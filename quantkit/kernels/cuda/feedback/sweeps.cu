// Sweeps over the columns of tiles, in the order in which columns are visited: a thread block has a tile. Macros: EVEN
// (sweeps.cuh).
//     error_feedback         chooses all levels with error feedback, and sets the loss
//     residuals    sets e and the loss of given values
//
// Columns are visited WIDE at a time. The feedback of preceding columns is a product, OWN columns per warp; then warp
// after warp visits its own columns, and updates those after them.
#define BLOCKS_AT_ONCE 3
#include "feedback/sweeps.cuh"

struct error_feedback_args : tile_args {};
// before, best: the loss of each row, f64 [rows].
struct residuals_args : tile_args {
    double *before, *best;
};

KERNEL(error_feedback, 128) {
    __shared__ __align__(16) Chunk chunks[2];
    __shared__ __align__(16) float near[WIDE / STRIP][NEAR_APART];  // the matrix's part of these columns
    __shared__ Codebook codebook;
    __shared__ double loss[ROWS];
    __shared__ int order[WIDE];
    // Between products, of these columns, [WIDE][ROWS] each.
    float *const own_e = chunks[0].a[0], *const own_x = own_e + WIDE * ROWS, *const own_inverse = own_x + WIDE * ROWS;
    static_assert(sizeof(chunks) >= 3 * WIDE * ROWS * sizeof(float), "there is room");
    const int n = (int)a.n, lane = lane_id(), warp = warp_here(), shift = __ffs((int)a.span) - 1;
    const int subs = n >> shift;
    const float *x = of_tile(a.x, n), *scale = of_tile(a.scale, subs), *minimum = of_tile(a.minimum, subs);
    const float* inverse = of_tile(a.inverse, subs);
    float *levels = of_tile(a.levels, n), *v = of_tile(a.v, n), *e = of_tile(a.e, n);
    read_codebook(codebook, a.codebook);
    if (warp == 0) loss[lane] = 0;
    for (int begin = 0; begin < n; begin += WIDE) {
        const int n_columns = min(WIDE, n - begin), first = begin + OWN * warp;
        const bool any = first < n;
        for (int i = threadIdx.x; i < n_columns / STRIP * n_columns; i += TILE_THREADS)
            copy_async<16>(near[i / n_columns] + STRIP * (i % n_columns),
                           a.u + ((int64_t)(begin / STRIP + i / n_columns) * n + begin + i % n_columns) * STRIP);
        if (threadIdx.x < WIDE) order[threadIdx.x] = (int)threadIdx.x < n_columns ? a.columns[begin + threadIdx.x] : 0;
        __syncthreads();
        const int* at = order + OWN * warp;
        float sum[OWN], own_scale[OWN], own_minimum[OWN];
#pragma unroll
        for (int i = 0; i < OWN; i++) sum[i] = x[ROWS * at[i] + lane];
        multiply(sum, a.u + (int64_t)begin * n, n, e, begin, n_columns, chunks);
        copy_wait();
        __syncthreads();
#pragma unroll
        for (int i = 0; i < OWN; i++) {
            const int sub = ROWS * (at[i] >> shift) + lane, own = ROWS * (OWN * warp + i) + lane;
            own_x[own] = x[ROWS * at[i] + lane];
            own_scale[i] = scale[sub];
            own_minimum[i] = minimum[sub];
            own_inverse[own] = inverse[sub];
        }
        for (int part = 0; part < n_columns; part += OWN) {
            if (part == OWN * warp) {
                double total = loss[lane];
                const float* factors = near[part / STRIP] + STRIP * part;
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const int own = ROWS * (part + i) + lane;
                    const Chosen chosen = choose(sum[i], own_scale[i], own_minimum[i], own_inverse[own], codebook);
                    const float c = sum[i] - chosen.value, error = own_x[own] - chosen.value;
                    levels[ROWS * at[i] + lane] = chosen.level;
                    v[ROWS * at[i] + lane] = chosen.value;
                    e[ROWS * (first + i) + lane] = error;
                    own_e[own] = error;
                    total = total + (double)a.pivots[first + i] * ((double)c * (double)c);
#pragma unroll
                    for (int j = i / STRIP * STRIP; j < OWN; j += STRIP) {
                        const float4 by = four_of(factors, NEAR_APART, i, j);
#pragma unroll
                        for (int l = j; l < j + STRIP; l++)
                            if (l > i) sum[l] = __fmaf_rn(error, one_of(by, l - j), sum[l]);
                    }
                }
                loss[lane] = total;
            }
            __syncthreads();
            if (part < OWN * warp && any)
                add_products(sum, near[OWN / STRIP * warp] + STRIP * part, NEAR_APART, own_e + ROWS * part + lane, OWN);
        }
    }
    if (warp == 0) of_tile(a.loss, 1)[lane] = loss[lane];
}

KERNEL(residuals, 128) {
    __shared__ __align__(16) Chunk chunks[2];
    __shared__ double loss[ROWS];
    const int n = (int)a.n, lane = lane_id(), warp = warp_here();
    const float *x = of_tile(a.x, n), *v = of_tile(a.v, n);
    float* e = of_tile(a.e, n);
    for (int k = warp; k < n; k += WARPS) {
        const int at = ROWS * a.columns[k] + lane;
        e[ROWS * k + lane] = x[at] - v[at];
    }
    if (warp == 0) loss[lane] = 0;
    for (int begin = 0; begin < n; begin += WIDE) {
        const int n_columns = min(WIDE, n - begin);
        float sum[OWN] = {};
        multiply(sum, a.u + (int64_t)begin * n, n, e, begin + n_columns, n_columns, chunks);
        in_turn(n_columns, [&](int first) {
            double total = loss[lane];
#pragma unroll
            for (int i = 0; i < OWN; i++) total = total + (double)a.pivots[begin + first + i] * ((double)sum[i] * (double)sum[i]);
            loss[lane] = total;
        });
    }
    const int64_t row = (int64_t)blockIdx.x * ROWS + lane;
    if (warp == 0 && row < a.rows) a.before[row] = a.best[row] = loss[lane];
}
