// Tiles of rows, and their products with matrices that all rows share.
//
// Rows are lanes: of a tile of ROWS rows, each array is f32 [columns][ROWS]. A thread block has a tile. A shared
// matrix is packed in strips of four columns, f32 [n / 4][n][4]. A warp accumulates products of OWN columns in
// registers, its block those of WIDE. Every sum is taken in the order of its terms, so a row's result depends only on
// that row.
#pragma once
#include "core/async_copy.cuh"

// A file with more warps per thread block defines their number before including this one.
#ifndef WARPS_OF_TILE
#define WARPS_OF_TILE 4
#endif
const int ROWS = 32, STRIP = 4, WARPS = WARPS_OF_TILE, OWN = 16, WIDE = WARPS * OWN, CHUNK = 32, TILE_THREADS = 32 * WARPS;

INLINE int warp_here() { return (int)threadIdx.x / 32; }

// First element of this block's tile in an array of `count` lines per tile.
template <typename T> INLINE T* of_tile(T* all, int64_t count) { return all + (int64_t)blockIdx.x * count * ROWS; }

// Strips are padded so that lanes which read four of them read different banks.
const int CHUNK_APART = (CHUNK + 1) * STRIP, NEAR_APART = (WIDE + 1) * STRIP;

// Operands of a chunk of terms of a product, in shared memory.
struct Chunk {
    float a[WIDE / STRIP][CHUNK_APART], e[CHUNK][ROWS];
};

// sum[j] += sum of a[k][j] e[k] over the first `count` k. a: strips, `apart` floats apart; e: of the lane.
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

// OWN columns of a tile as a warp multiplies them: a lane has four rows of a strip, which halves its reads per
// product.
struct Patch {
    float4 of[STRIP];

    static __device__ __forceinline__ int row() { return 4 * (lane_id() % 8); }
    static __device__ __forceinline__ int strip() { return lane_id() / 8; }

    // Loads and stores lines of the warp's columns.
    __device__ __forceinline__ void load(const float* lines) {
#pragma unroll
        for (int j = 0; j < STRIP; j++) of[j] = *(const float4*)(lines + ROWS * (STRIP * strip() + j) + row());
    }
    __device__ __forceinline__ void store(float* lines) const {
#pragma unroll
        for (int j = 0; j < STRIP; j++) *(float4*)(lines + ROWS * (STRIP * strip() + j) + row()) = of[j];
    }

    static __device__ __forceinline__ void add(float4& sum, const float4& x, float by) {
        sum.x = __fmaf_rn(x.x, by, sum.x);
        sum.y = __fmaf_rn(x.y, by, sum.y);
        sum.z = __fmaf_rn(x.z, by, sum.z);
        sum.w = __fmaf_rn(x.w, by, sum.w);
    }

    // As add_products: a is the first strip of the warp's, e the tile's.
    __device__ __forceinline__ void add_products(const float* a, int64_t apart, const float* e, int count) {
        a += strip() * apart;
        e += row();
#pragma unroll 4
        for (int k = 0; k < count; k++) {
            const float4 x = *(const float4*)(e + ROWS * k), by = *(const float4*)(a + STRIP * k);
            add(of[0], x, by.x);
            add(of[1], x, by.y);
            add(of[2], x, by.z);
            add(of[3], x, by.w);
        }
    }
};

// Source of a thread's parts of the next chunk: strips, WARPS apart, and lines of the tile.
struct Operands {
    const float *a, *e;
    int64_t apart;

    __device__ __forceinline__ Operands(const float* first_strip, int64_t n, const float* e_)
        : a(first_strip + (warp_here() * n + lane_id()) * STRIP), e(e_ + 4 * threadIdx.x), apart(WARPS * n * STRIP) {}

    // Begins to copy a chunk of columns, and advances to the next.
    __device__ __forceinline__ void fetch(Chunk& to, int columns) {
        static_assert(CHUNK == 32 && CHUNK * ROWS % (4 * TILE_THREADS) == 0, "a lane copies a row of a strip");
#pragma unroll
        for (int i = 0; i < OWN / STRIP; i++)
            if (STRIP * (WARPS * i + warp_here()) < columns)
                copy_async<16>(to.a[WARPS * i + warp_here()] + STRIP * lane_id(), a + i * apart);
#pragma unroll
        for (int i = 0; i < CHUNK * ROWS; i += 4 * TILE_THREADS) copy_async<16>(to.e[0] + i + 4 * threadIdx.x, e + i);
        a += CHUNK * STRIP;
        e += CHUNK * ROWS;
    }
};

// sum[j] += sum of a[k][j] e[k] over the k before `count`, a multiple of CHUNK, for the warp's columns of `columns`,
// of which a[0] is the first strip. e: the tile's. All threads are synchronized before and after.
INLINE void multiply(float (&sum)[OWN], const float* a, int64_t n, const float* e, int count, int columns, Chunk (&chunks)[2]) {
    static_assert(sizeof(chunks) >= WIDE * ROWS * sizeof(float), "there is room for all sums");
    const int warp = warp_here(), lane = lane_id();
    float* const lines = chunks[0].a[0] + ROWS * OWN * warp;
    Patch patch;
    __syncthreads();  // e and the chunks are no longer in use
#pragma unroll
    for (int i = 0; i < OWN; i++) lines[ROWS * i + lane] = sum[i];
    __syncwarp();
    patch.load(lines);
    __syncthreads();
    Operands operands(a, n, e);
    if (count) operands.fetch(chunks[0], columns);
    end_group();
    for (int k = 0, at = 0; k < count; k += CHUNK, at ^= 1) {
        if (k + CHUNK < count) operands.fetch(chunks[at ^ 1], columns);
        end_group();
        wait_groups<1>();
        __syncthreads();
        if (OWN * warp < columns) patch.add_products(chunks[at].a[OWN / STRIP * warp], CHUNK_APART, chunks[at].e[0], CHUNK);
        __syncthreads();
    }
    patch.store(lines);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < OWN; i++) sum[i] = lines[ROWS * i + lane];
    __syncthreads();
}

// Runs the warps one after another, in rounds until all `columns` are done, OWN per warp: f(first column).
template <typename F> INLINE void in_turn(int columns, F f) {
    for (int first = 0; first < columns; first += OWN) {
        if (first / OWN % WARPS == warp_here()) f(first);
        __syncthreads();
    }
}
