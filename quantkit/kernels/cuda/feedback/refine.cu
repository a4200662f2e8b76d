// A sweep that chooses levels, factors and minimums of each sub-block jointly: a thread block has a tile. Macros: EVEN
// (sweeps.cuh); SPAN, the columns of a sub-block; WIDTH, those of a window, which are visited together.
//
// For a window, the gradient g = H e is a product over all columns, OWN columns per warp. Its sub-blocks are visited
// one after another: levels in column order, with the warps taking turns, everything else by all threads.
#define BLOCKS_AT_ONCE 3
#include "feedback/refine.cuh"
#include "feedback/sweeps.cuh"

struct refine_args : tile_args {
    int64_t passes, repeats, fits, neighbour_scales;
};

// Whether the window's part of the covariance, and the state of a sub-block, are in shared memory.
const bool SMALL = WIDTH <= WIDE && SPAN <= 32;
// Lines of a sub-block that change, and of a tile's scratch: the previous g, the best levels and values and, unless
// they are in shared memory, g and the changes (refine.py).
const int CHANGING = 4 * SPAN, LINES = WIDTH + 2 * SPAN + (SMALL ? 0 : WIDTH + CHANGING);
const int MOST_FACTORS = 256;
static_assert(WIDTH % SPAN == 0 && SPAN % OWN == 0, "columns are of whole sub-blocks, and these of what a warp multiplies");

// Lines of a sub-block: g at the beginning of a visit, and the current one; old values; t, the levels, or the changes
// of values; c = H t; the best levels and values.
struct Lines {
    float *g, *own, *old, *t, *c, *best;
};

// Values of a sub-block that the threads of a lane exchange.
struct Broadcast {
    float gt[ROWS], tt[ROWS], gs[ROWS], ts[ROWS], by[ROWS], by_minimum[ROWS], scale[ROWS], minimum[ROWS], inverse[ROWS];
    int is_better[ROWS];
};

// Row-independent sums: the column sums of each sub-block's part of H, and the sums of these.
struct Sums {
    float column[WIDTH], sub[WIDTH / SPAN];
};

struct Window {
    const refine_args& a;
    const Codebook& codebook;
    const float* factors;
    const Sums& sums;
    const Lines& of;
    Broadcast& broadcast;
    const float* h;  // of the first column, strips `apart` floats apart
    int64_t apart;
    int first, n_columns, lane, warp;
    float *levels, *v;

    // H from row k and column j on, both within the window.
    __device__ __forceinline__ const float* strips(int k, int j) const { return h + j / STRIP * apart + STRIP * k; }

    template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll 4
        for (int k = warp; k < SPAN; k += WARPS) f(k, ROWS * k + lane);
    }

    // Broadcasts the scales of this lane's row to all threads.
    __device__ __forceinline__ void broadcast_scales(const Scales& s) const {
        broadcast.scale[lane] = s.scale();
        broadcast.minimum[lane] = s.of_sub(s.a.minimum);
        broadcast.inverse[lane] = s.of_sub(s.a.inverse);
    }

    __device__ __forceinline__ float dot(const float* x, const float* y) const {
        float total = 0;
#pragma unroll 4
        for (int k = 0; k < SPAN; k++) total = __fmaf_rn(x[ROWS * k + lane], y[ROWS * k + lane], total);
        return total;
    }

    __device__ __forceinline__ float sum(const float* x) const {
        float total = 0;
#pragma unroll 4
        for (int k = 0; k < SPAN; k++) total = total + x[ROWS * k + lane];
        return total;
    }

    // Fits scale and minimum of the sub-block that begins with column `at` of the window.
    __device__ __forceinline__ void fit(const Scales& s, int at) const {
        const float shift = s.shift();
        float *const level = levels + (int64_t)ROWS * (first + at), *const value = v + (int64_t)ROWS * (first + at);
        each([&](int, int i) { of.t[i] = level[i] + shift; });
        __syncthreads();
        for (int j = OWN * warp; j < SPAN; j += WIDE) {
            Patch sum = {};
            sum.add_products(strips(at, at + j), apart, of.t, SPAN);
            sum.store(of.c + ROWS * j);
        }
        __syncthreads();
        const bool two = a.min_kind != FIXED;
        if (warp == 0) broadcast.gt[lane] = dot(of.t, of.own);
        if (warp == 1) broadcast.tt[lane] = dot(of.t, of.c);
        if (warp == 2) broadcast.gs[lane] = two ? sum(of.own) : 0.0f;
        if (warp == 3) broadcast.ts[lane] = two ? sum(of.c) : 0.0f;
        __syncthreads();
        if (warp == 0) {
            const Two by = moved(s, broadcast.gt[lane], -broadcast.gs[lane], broadcast.tt[lane], -broadcast.ts[lane],
                                 two ? sums.sub[at / SPAN] : 0.0f);
            broadcast.by[lane] = -by.x;
            broadcast.by_minimum[lane] = by.y;
            s.settle();
            broadcast_scales(s);
        }
        __syncthreads();
        const float scale = broadcast.scale[lane], minimum = broadcast.minimum[lane], x = broadcast.by[lane],
                    y = broadcast.by_minimum[lane];
        each([&](int k, int i) {
            value[i] = scale * level[i] - minimum;
            float now = __fmaf_rn(of.c[i], x, of.own[i]);
            if (two) now = __fmaf_rn(y, sums.column[at + k], now);
            of.own[i] = now;
        });
        __syncthreads();
    }

    // Chooses the levels of that sub-block, one after another.
    __device__ __forceinline__ void descend(int at) const {
        const float scale = broadcast.scale[lane], minimum = broadcast.minimum[lane], inverse = broadcast.inverse[lane];
        for (int part = 0; part < SPAN; part += OWN) {
            float* const g = of.own + ROWS * part + lane;
            if (part / OWN % WARPS == warp) {
                const int64_t begin = (int64_t)ROWS * (first + at + part) + lane;
                float own[OWN], value[OWN], step[OWN];
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    own[i] = g[ROWS * i];
                    value[i] = v[begin + ROWS * i];
                    step[i] = a.per_diagonal[first + at + part + i];
                }
                const float* factor = strips(at + part, at + part);
#pragma unroll
                for (int i = 0; i < OWN; i++) {
                    const Chosen chosen = choose(__fmaf_rn(own[i], step[i], value[i]), scale, minimum, inverse, codebook);
                    const float change = value[i] - chosen.value;
                    levels[begin + ROWS * i] = chosen.level;
                    v[begin + ROWS * i] = chosen.value;
                    of.t[ROWS * (part + i) + lane] = change;
#pragma unroll
                    for (int j = 0; j < OWN; j += STRIP) {
                        const float4 by = *(const float4*)(factor + j / STRIP * apart + STRIP * i);
                        own[j] = __fmaf_rn(change, by.x, own[j]);
                        own[j + 1] = __fmaf_rn(change, by.y, own[j + 1]);
                        own[j + 2] = __fmaf_rn(change, by.z, own[j + 2]);
                        own[j + 3] = __fmaf_rn(change, by.w, own[j + 3]);
                    }
                }
#pragma unroll
                for (int i = 0; i < OWN; i++) g[ROWS * i] = own[i];
            }
            __syncthreads();
            for (int j = OWN * warp; j < SPAN; j += WIDE)
                if (j != part) add(of.own + ROWS * j, strips(at + part, at + j), of.t + ROWS * part, OWN);
        }
        __syncthreads();
    }

    // Adds the products of `count` columns to OWN columns of g.
    __device__ __forceinline__ void add(float* g, const float* by, const float* change, int count) const {
        Patch sum;
        sum.load(g);
        sum.add_products(by, apart, change, count);
        sum.store(g);
        __syncwarp();  // lanes read each other's values
    }

    // The reduction of the loss since that sub-block's values were `old`.
    __device__ __forceinline__ float loss_reduction(int at) const {
        float total = 0;
        const float* value = v + (int64_t)ROWS * (first + at) + lane;
#pragma unroll 4
        for (int k = 0; k < SPAN; k++) {
            const int i = ROWS * k + lane;
            const float slope = of.own[i] + of.g[ROWS * at + i];
            total = __fmaf_rn(value[ROWS * k] - of.old[i], slope, total);
        }
        return total;
    }

    // Begins a visit of that sub-block with its current state.
    __device__ __forceinline__ void begin(int at) const {
        float* value = v + (int64_t)ROWS * (first + at);
        each([&](int, int i) {
            value[i] = of.old[i];
            of.own[i] = of.g[ROWS * at + i];
        });
    }

    // Saves the levels and values of that sub-block where the row improved.
    __device__ __forceinline__ void save_levels(int at) const {
        const float *level = levels + (int64_t)ROWS * (first + at), *value = v + (int64_t)ROWS * (first + at);
        if (broadcast.is_better[lane])
            each([&](int, int i) {
                of.best[i] = level[i];
                of.best[ROWS * SPAN + i] = value[i];
            });
    }

    // Restores the levels and values saved last.
    __device__ __forceinline__ void restore_levels(int at) const {
        float *level = levels + (int64_t)ROWS * (first + at), *value = v + (int64_t)ROWS * (first + at);
        each([&](int, int i) {
            level[i] = of.best[i];
            value[i] = of.best[ROWS * SPAN + i];
        });
    }

    // Visits that sub-block: first with its current scale, then, with `neighbour_scales`, with both neighbours of the
    // fitted one; the best is kept.
    __device__ __forceinline__ void visit(int at) const {
        const Scales s(a, factors, (first + at) / SPAN, lane);
        const float* value = v + (int64_t)ROWS * (first + at);
        const bool neighbour_scales = a.neighbour_scales && a.scale_kind != FIXED;
        each([&](int, int i) {
            of.old[i] = value[i];
            of.own[i] = of.g[ROWS * at + i];
        });
        if (warp == 0) broadcast_scales(s);
        __syncthreads();
        float best = 0;
        Candidate of_first = {}, best_candidate = {};
        for (int step = 0; step < (neighbour_scales ? 3 : 1); step++) {
            if (step) {
                if (warp == 0) {
                    set_scale(s, {of_first.scale, best_candidate.m, best_candidate.dmin, of_first.factor_index},
                              step == 1 ? -1 : 1);
                    broadcast_scales(s);
                }
                begin(at);
                __syncthreads();
            }
            for (int i = 0; i < (step ? 2 : a.repeats); i++) {  // a neighbour's levels are chosen before the fit
                if (step ? i == 1 : a.fits) fit(s, at);
                descend(at);
            }
            if (neighbour_scales) {
                if (warp == 0) {
                    const float now = loss_reduction(at);
                    const bool better = step == 0 || now > best;
                    if (better) {
                        best = now;
                        best_candidate = candidate_of(s);
                    }
                    if (step == 0) of_first = best_candidate;
                    broadcast.is_better[lane] = better;
                }
                __syncthreads();
                save_levels(at);
            }
        }
        if (neighbour_scales) {
            if (warp == 0) set_scale(s, best_candidate, 0);
            restore_levels(at);
            __syncthreads();
        }
        each([&](int, int i) { of.old[i] = of.old[i] - value[i]; });
        __syncthreads();
        for (int j = OWN * warp; j < n_columns; j += WIDE) add(of.g + ROWS * j, strips(at, j), of.old, SPAN);
        __syncthreads();
    }
};

KERNEL(refine, 128) {
    __shared__ __align__(16) Chunk chunks[2];  // between products, the changes of a window
    __shared__ __align__(16) float near[SMALL ? WIDE / STRIP * NEAR_APART : STRIP];
    __shared__ Codebook codebook;
    __shared__ Sums sums;
    __shared__ Broadcast broadcast;
    __shared__ double gain[ROWS];
    __shared__ float factors[MOST_FACTORS];
    static_assert(!SMALL || sizeof(chunks) >= (WIDTH + CHANGING) * ROWS * sizeof(float), "there is room");
    const int n = (int)a.n, lane = lane_id(), warp = warp_here();
    const float* x = of_tile(a.x, n);
    float *v = of_tile(a.v, n), *e = of_tile(a.e, n), *before = of_tile(a.scratch, LINES), *best = before + WIDTH * ROWS;
    float *const g = SMALL ? chunks[0].a[0] : best + 2 * SPAN * ROWS, *const changing = g + WIDTH * ROWS;
    const Lines lines = {g, changing, changing + SPAN * ROWS, changing + 2 * SPAN * ROWS, changing + 3 * SPAN * ROWS, best};
    read_codebook(codebook, a.codebook);
    for (int i = threadIdx.x; i < a.factor_count; i += TILE_THREADS) factors[i] = a.factors[i];
    if (warp == 0) gain[lane] = 0;
    for (int k = warp; k < n; k += WARPS) e[ROWS * k + lane] = x[ROWS * k + lane] - v[ROWS * k + lane];
    for (int first = 0; first < n; first += WIDTH) {
        const int n_columns = min(WIDTH, n - first);
        const float* h = a.h + (int64_t)first * n;
        if (SMALL)
            for (int i = threadIdx.x; i < n_columns / STRIP * n_columns; i += TILE_THREADS)
                copy_async<16>(near + i / n_columns * NEAR_APART + i % n_columns * STRIP,
                               h + ((int64_t)(i / n_columns) * n + first + i % n_columns) * STRIP);
        for (int j = 0; j < n_columns; j += WIDE) {
            float sum[OWN] = {};
            multiply(sum, h + (int64_t)j * n, n, e, n, min(WIDE, n_columns - j), chunks);
            const int own = j + OWN * warp;
            if (own < n_columns)
#pragma unroll
                for (int i = 0; i < OWN; i++) g[ROWS * (own + i) + lane] = before[ROWS * (own + i) + lane] = sum[i];
        }
        copy_wait();
        __syncthreads();
        const Window window = {a,
                               codebook,
                               factors,
                               sums,
                               lines,
                               broadcast,
                               SMALL ? near : h + (int64_t)first * STRIP,
                               SMALL ? NEAR_APART : (int64_t)n * STRIP,
                               first,
                               n_columns,
                               lane,
                               warp,
                               of_tile(a.levels, n),
                               v};
        if (a.min_kind != FIXED) {
            for (int j = threadIdx.x; j < n_columns; j += TILE_THREADS) {
                const float* column = window.strips(j / SPAN * SPAN, j) + j % STRIP;
                float one = 0;
#pragma unroll 4
                for (int k = 0; k < SPAN; k++) one = one + column[STRIP * k];
                sums.column[j] = one;
            }
            __syncthreads();
            if (threadIdx.x < n_columns / SPAN) {
                float total = 0;
#pragma unroll 4
                for (int k = 0; k < SPAN; k++) total = total + sums.column[SPAN * threadIdx.x + k];
                sums.sub[threadIdx.x] = total;
            }
            __syncthreads();
        }
        for (int pass = 0; pass < a.passes; pass++)
            for (int at = 0; at < n_columns; at += SPAN) window.visit(at);
        in_turn(n_columns, [&](int part) {
            double total = gain[lane];
#pragma unroll 4
            for (int i = 0; i < OWN; i++) {
                const int k = ROWS * (part + i) + lane, at = ROWS * first + k;
                const float now = x[at] - v[at];
                const double slope = (double)before[k] + (double)g[k];
                total = total + (double)(e[at] - now) * slope;
                e[at] = now;
            }
            gain[lane] = total;
        });
    }
    if (warp == 0) of_tile(a.loss, 1)[lane] -= gain[lane];
}
