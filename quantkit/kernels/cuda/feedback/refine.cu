// A sweep that chooses levels, factors and minimums of each sub-block together: a block of threads has a tile.
// Macros: EVEN (sweeps.cuh); SPAN, the columns of a sub-block; WIDTH, those of a window, which are visited together.
//
// For a window, the gradient g = H e is a product over all columns, of which each warp has OWN columns. Its sub-blocks
// are visited one after the other: levels in the order of columns, warps taking turns, all else by all threads.
#define BLOCKS_AT_ONCE 3
#include "feedback/refine.cuh"
#include "feedback/sweeps.cuh"

struct refine_args : tile_args {
    int64_t passes, repeats, fits, beside;
};

// Whether the window's part of the covariance, and all that is kept of a sub-block, lie in shared memory.
const bool SMALL = WIDTH <= WIDE && SPAN <= 32;
// Lines of a sub-block that change, and of a tile's scratch: g before, the best levels and values and, unless they are in
// shared memory, g and what changes (refine.py).
const int CHANGING = 4 * SPAN, LINES = WIDTH + 2 * SPAN + (SMALL ? 0 : WIDTH + CHANGING);
const int MOST_FACTORS = 256;
static_assert(WIDTH % SPAN == 0 && SPAN % OWN == 0, "columns are of whole sub-blocks, and these of what a warp multiplies");

// Lines of sub-blocks: g when one is visited, and its own; what its values were; t, the levels, or what values change by;
// c = H t; the best levels and values.
struct Lines {
    float *g, *own, *old, *t, *c, *best;
};

// What threads tell each other of a sub-block, at the lane.
struct Told {
    float gt[ROWS], tt[ROWS], gs[ROWS], ts[ROWS], by[ROWS], by_low[ROWS], scale[ROWS], low[ROWS], inverse[ROWS];
    int taken[ROWS];
};

// What does not depend on rows: the sums of the columns of each sub-block's part of H, and of these.
struct Sums {
    float column[WIDTH], sub[WIDTH / SPAN];
};

struct Window {
    const refine_args& a;
    const Book& book;
    const float* factors;
    const Sums& sums;
    const Lines& of;
    Told& told;
    const float* h;  // of the first column, strips `apart` floats apart
    int64_t apart;
    int first, here, lane, warp;
    float *levels, *v;

    // H from row k and column j on, both of the window.
    __device__ __forceinline__ const float* strips(int k, int j) const { return h + j / STRIP * apart + STRIP * k; }

    template <typename F> __device__ __forceinline__ void each(F f) const {
#pragma unroll 4
        for (int k = warp; k < SPAN; k += WARPS) f(k, ROWS * k + lane);
    }

    // Tells all threads the scales of this lane's row.
    __device__ __forceinline__ void tell(const Scales& s) const {
        told.scale[lane] = s.scale();
        told.low[lane] = s.of_sub(s.a.low);
        told.inverse[lane] = s.of_sub(s.a.inverse);
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
        const float raised = s.raised();
        float *const level = levels + (int64_t)ROWS * (first + at), *const value = v + (int64_t)ROWS * (first + at);
        each([&](int, int i) { of.t[i] = level[i] + raised; });
        __syncthreads();
        for (int j = OWN * warp; j < SPAN; j += WIDE) {
            Patch sum = {};
            sum.add_products(strips(at, at + j), apart, of.t, SPAN);
            sum.store(of.c + ROWS * j);
        }
        __syncthreads();
        const bool two = a.minimum != FIXED;
        if (warp == 0) told.gt[lane] = dot(of.t, of.own);
        if (warp == 1) told.tt[lane] = dot(of.t, of.c);
        if (warp == 2) told.gs[lane] = two ? sum(of.own) : 0.0f;
        if (warp == 3) told.ts[lane] = two ? sum(of.c) : 0.0f;
        __syncthreads();
        if (warp == 0) {
            const Two by = moved(s, told.gt[lane], -told.gs[lane], told.tt[lane], -told.ts[lane], two ? sums.sub[at / SPAN] : 0.0f);
            told.by[lane] = -by.x;
            told.by_low[lane] = by.y;
            s.settle();
            tell(s);
        }
        __syncthreads();
        const float scale = told.scale[lane], low = told.low[lane], x = told.by[lane], y = told.by_low[lane];
        each([&](int k, int i) {
            value[i] = scale * level[i] - low;
            float now = __fmaf_rn(of.c[i], x, of.own[i]);
            if (two) now = __fmaf_rn(y, sums.column[at + k], now);
            of.own[i] = now;
        });
        __syncthreads();
    }

    // Chooses the levels of that sub-block, one after the other.
    __device__ __forceinline__ void descend(int at) const {
        const float scale = told.scale[lane], low = told.low[lane], inverse = told.inverse[lane];
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
                    const Chosen chosen = choose(__fmaf_rn(own[i], step[i], value[i]), scale, low, inverse, book);
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

    // OWN columns of g gain the products of `count` columns.
    __device__ __forceinline__ void add(float* g, const float* by, const float* change, int count) const {
        Patch sum;
        sum.load(g);
        sum.add_products(by, apart, change, count);
        sum.store(g);
        __syncwarp();  // its lanes read each other's
    }

    // By how much the loss has fallen since that sub-block's values were `old`.
    __device__ __forceinline__ float gained(int at) const {
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

    // Begins that sub-block with what was there before.
    __device__ __forceinline__ void begin(int at) const {
        float* value = v + (int64_t)ROWS * (first + at);
        each([&](int, int i) {
            value[i] = of.old[i];
            of.own[i] = of.g[ROWS * at + i];
        });
    }

    // Keeps the levels and values of that sub-block's rows that are taken.
    __device__ __forceinline__ void take(int at) const {
        const float *level = levels + (int64_t)ROWS * (first + at), *value = v + (int64_t)ROWS * (first + at);
        if (told.taken[lane])
            each([&](int, int i) {
                of.best[i] = level[i];
                of.best[ROWS * SPAN + i] = value[i];
            });
    }

    // Sets those that were kept last.
    __device__ __forceinline__ void take_back(int at) const {
        float *level = levels + (int64_t)ROWS * (first + at), *value = v + (int64_t)ROWS * (first + at);
        each([&](int, int i) {
            level[i] = of.best[i];
            value[i] = of.best[ROWS * SPAN + i];
        });
    }

    // Visits that sub-block: first with the scale it has, then, `beside`, with both neighbours of what was found, of
    // which the best is taken.
    __device__ __forceinline__ void visit(int at) const {
        const Scales s(a, factors, (first + at) / SPAN, lane);
        const float* value = v + (int64_t)ROWS * (first + at);
        const bool beside = a.beside && a.kind != FIXED;
        each([&](int, int i) {
            of.old[i] = value[i];
            of.own[i] = of.g[ROWS * at + i];
        });
        if (warp == 0) tell(s);
        __syncthreads();
        float best = 0;
        Kept found = {}, kept = {};
        for (int step = 0; step < (beside ? 3 : 1); step++) {
            if (step) {
                if (warp == 0) {
                    recall(s, {found.scale, kept.m, kept.dmin, found.place}, step == 1 ? -1 : 1);
                    tell(s);
                }
                begin(at);
                __syncthreads();
            }
            for (int i = 0; i < (step ? 2 : a.repeats); i++) {  // a neighbour's levels are chosen before it is fitted
                if (step ? i == 1 : a.fits) fit(s, at);
                descend(at);
            }
            if (beside) {
                if (warp == 0) {
                    const float now = gained(at);
                    const bool better = step == 0 || now > best;
                    if (better) {
                        best = now;
                        kept = remembered(s);
                    }
                    if (step == 0) found = kept;
                    told.taken[lane] = better;
                }
                __syncthreads();
                take(at);
            }
        }
        if (beside) {
            if (warp == 0) recall(s, kept, 0);
            take_back(at);
            __syncthreads();
        }
        each([&](int, int i) { of.old[i] = of.old[i] - value[i]; });
        __syncthreads();
        for (int j = OWN * warp; j < here; j += WIDE) add(of.g + ROWS * j, strips(at, j), of.old, SPAN);
        __syncthreads();
    }
};

KERNEL(refine, 128) {
    __shared__ __align__(16) Chunk chunks[2];  // between products, what changes in a window
    __shared__ __align__(16) float near[SMALL ? WIDE / STRIP * NEAR_APART : STRIP];
    __shared__ Book book;
    __shared__ Sums sums;
    __shared__ Told told;
    __shared__ double gain[ROWS];
    __shared__ float factors[MOST_FACTORS];
    static_assert(!SMALL || sizeof(chunks) >= (WIDTH + CHANGING) * ROWS * sizeof(float), "there is room");
    const int n = (int)a.n, lane = lane_here(), warp = warp_here();
    const float* x = of_tile(a.x, n);
    float *v = of_tile(a.v, n), *e = of_tile(a.e, n), *before = of_tile(a.scratch, LINES), *best = before + WIDTH * ROWS;
    float *const g = SMALL ? chunks[0].a[0] : best + 2 * SPAN * ROWS, *const changing = g + WIDTH * ROWS;
    const Lines lines = {g, changing, changing + SPAN * ROWS, changing + 2 * SPAN * ROWS, changing + 3 * SPAN * ROWS, best};
    read_book(book, a.book);
    for (int i = threadIdx.x; i < a.factor_count; i += TILE_THREADS) factors[i] = a.factors[i];
    if (warp == 0) gain[lane] = 0;
    for (int k = warp; k < n; k += WARPS) e[ROWS * k + lane] = x[ROWS * k + lane] - v[ROWS * k + lane];
    for (int first = 0; first < n; first += WIDTH) {
        const int here = min(WIDTH, n - first);
        const float* h = a.h + (int64_t)first * n;
        if (SMALL)
            for (int i = threadIdx.x; i < here / STRIP * here; i += TILE_THREADS)
                copy_async<16>(near + i / here * NEAR_APART + i % here * STRIP,
                               h + ((int64_t)(i / here) * n + first + i % here) * STRIP);
        for (int j = 0; j < here; j += WIDE) {
            float sum[OWN] = {};
            multiply(sum, h + (int64_t)j * n, n, e, n, min(WIDE, here - j), chunks);
            const int own = j + OWN * warp;
            if (own < here)
#pragma unroll
                for (int i = 0; i < OWN; i++) g[ROWS * (own + i) + lane] = before[ROWS * (own + i) + lane] = sum[i];
        }
        copy_wait();
        __syncthreads();
        const Window window = {a,
                               book,
                               factors,
                               sums,
                               lines,
                               told,
                               SMALL ? near : h + (int64_t)first * STRIP,
                               SMALL ? NEAR_APART : (int64_t)n * STRIP,
                               first,
                               here,
                               lane,
                               warp,
                               of_tile(a.levels, n),
                               v};
        if (a.minimum != FIXED) {
            for (int j = threadIdx.x; j < here; j += TILE_THREADS) {
                const float* column = window.strips(j / SPAN * SPAN, j) + j % STRIP;
                float one = 0;
#pragma unroll 4
                for (int k = 0; k < SPAN; k++) one = one + column[STRIP * k];
                sums.column[j] = one;
            }
            __syncthreads();
            if (threadIdx.x < here / SPAN) {
                float total = 0;
#pragma unroll 4
                for (int k = 0; k < SPAN; k++) total = total + sums.column[SPAN * threadIdx.x + k];
                sums.sub[threadIdx.x] = total;
            }
            __syncthreads();
        }
        for (int pass = 0; pass < a.passes; pass++)
            for (int at = 0; at < here; at += SPAN) window.visit(at);
        in_turn(here, [&](int part) {
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
