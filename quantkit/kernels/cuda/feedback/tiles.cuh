// Tiles of rows, and products of them with matrices that all rows share.
//
// Rows are lanes: of a tile of ROWS rows, each array is f32 [columns][ROWS]. A block of threads has a tile. A shared
// matrix is packed in strips of four columns, f32 [n / 4][n][4]. A warp sums up products of OWN columns in registers,
// its block those of WIDE. Every sum is taken in the order of its terms, so a row's result depends on nothing but the row.
#pragma once
#include "core/async_copy.cuh"

// A file whose blocks of threads have more warps defines how many before including this one.
#ifndef WARPS_OF_TILE
#define WARPS_OF_TILE 4
#endif
const int ROWS = 32, STRIP = 4, WARPS = WARPS_OF_TILE, OWN = 16, WIDE = WARPS * OWN, CHUNK = 32, TILE_THREADS = 32 * WARPS;

INLINE int lane_here() { return (int)threadIdx.x % 32; }
INLINE int warp_here() { return (int)threadIdx.x / 32; }

// Where this block's tile begins in an array of `count` lines a tile.
template <typename T> INLINE T* of_tile(T* all, int64_t count) { return all + (int64_t)blockIdx.x * count * ROWS; }

// Operands of so many terms of a product, in shared memory.
struct Chunk {
    float a[WIDE / STRIP][CHUNK][STRIP], e[CHUNK][ROWS];
};

// sum[j] += sum of a[k][j] e[k] over the first `count` k. a: strips, `apart` floats from one to the next; e: of the lane.
template <int COLUMNS> INLINE void add_products(float (&sum)[COLUMNS], const float* a, int64_t apart, const float* e, int count) {
#pragma unroll 4
    for (int k = 0; k < count; k++) {
        const float x = e[ROWS * k];
#pragma unroll
        for (int j = 0; j < COLUMNS; j += STRIP) {
            const float4 by = *(const float4*)(a + j / STRIP * apart + STRIP * k);
            sum[j] = __fmaf_rn(x, by.x, sum[j]);
            sum[j + 1] = __fmaf_rn(x, by.y, sum[j + 1]);
            sum[j + 2] = __fmaf_rn(x, by.z, sum[j + 2]);
            sum[j + 3] = __fmaf_rn(x, by.w, sum[j + 3]);
        }
    }
}

INLINE void fetch_chunk(Chunk* to, const float* a, int64_t n, const float* e, int k, int columns) {
    for (int i = threadIdx.x; i < columns / STRIP * CHUNK; i += TILE_THREADS)
        copy_async<16>(to->a[i / CHUNK][i % CHUNK], a + (i / CHUNK * n + k + i % CHUNK) * STRIP);
    for (int i = threadIdx.x; i < CHUNK * ROWS / 4; i += TILE_THREADS)
        copy_async<16>(to->e[0] + 4 * i, e + (int64_t)k * ROWS + 4 * i);
}

// sum[j] += sum of a[k][j] e[k] over the k before `count`, a multiple of CHUNK, for the warp's columns of `columns`, of
// which a[0] is the first strip. e: the tile's. Begins and ends with all threads in step.
INLINE void multiply(float (&sum)[OWN], const float* a, int64_t n, const float* e, int count, int columns, Chunk (&chunks)[2]) {
    const int warp = warp_here();
    __syncthreads();  // what is in e, and in chunks, is no longer needed otherwise
    if (count) fetch_chunk(chunks, a, n, e, 0, columns);
    end_group();
    for (int k = 0, at = 0; k < count; k += CHUNK, at ^= 1) {
        if (k + CHUNK < count) fetch_chunk(chunks + (at ^ 1), a, n, e, k + CHUNK, columns);
        end_group();
        wait_groups<1>();
        __syncthreads();
        if (OWN * warp < columns)
            add_products(sum, chunks[at].a[OWN / STRIP * warp][0], STRIP * CHUNK, chunks[at].e[0] + lane_here(), CHUNK);
        __syncthreads();
    }
}

// Lets warps come one after another, as often as it takes for `columns`, each with OWN of them: f(first column).
template <typename F> INLINE void in_turn(int columns, F f) {
    for (int first = 0; first < columns; first += OWN) {
        if (first / OWN % WARPS == warp_here()) f(first);
        __syncthreads();
    }
}
