// Rows of a q8_0 cache for tensor cores. A level is a half as it is; products with levels are exact, and scales of 32
// values multiply what the levels do not: sums of 32 products of a key, weights of a value.
//
// Rows lie at multiples of two bytes: they are copied in whole pieces of 16 bytes, with what is beside them, and taken
// apart in shared memory.
#pragma once
#include "attention.cuh"

// Pieces of 16 bytes that a head's row lies in, wherever it begins; bytes of them, an odd number of pieces.
#define PIECES_OF(head) (((head) / 32 * 34 + 14 + 15) / 16)
#define RAW_OF(head) (16 * (PIECES_OF(head) | 1))

// Two levels as halves: a level + 128 is the low byte of 1024 and more.
INLINE uint32_t two_levels(uint16_t two) {
    return sub_halves(__byte_perm(two ^ 0x8080u, 0x64646464u, 0x4140), 0x64806480u);
}

// A head's rows in one sequence's cells, of which those of a range count: beyond it others stand for them, with weight 0.
struct Cells {
    const uint8_t* row0;
    int row_bytes, first, last;

    __device__ __forceinline__ int key(int i) const { return min(max(i, first), last); }
    __device__ __forceinline__ const uint8_t* row(int i) const { return row0 + (int64_t)key(i) * row_bytes; }
    // Where a row begins in its first piece.
    __device__ __forceinline__ int begin(int i) const { return ((uint32_t)(uint64_t)row0 + (uint32_t)key(i) * (uint32_t)row_bytes) & 15; }
};

// Levels of rows start ... start + KEYS, from what was copied to the halves of a tile.
template <int HEAD, int STRIDE> INLINE void unpack_levels(const Cells& cells, int start, const uint8_t* raw, uint8_t* tile) {
    const int UNITS = HEAD / 8;
#pragma unroll 4
    for (int i = threadIdx.x; i < KEYS * UNITS; i += THREADS) {
        const int key = i / UNITS, u = i % UNITS;
        const uint8_t* from = raw + key * RAW_OF(HEAD) + cells.begin(start + key) + u / 4 * 34 + 2 + u % 4 * 8;
        *(uint4*)(tile + key * STRIDE + 16 * u) = make_uint4(two_levels(load2(from)), two_levels(load2(from + 2)),
                                                             two_levels(load2(from + 4)), two_levels(load2(from + 6)));
    }
}

// Their scales: [HEAD / 32][KEYS]; factors, if any: powers of two that bring the largest of each KEYS to 2^14 ... 2^15.
template <int HEAD> INLINE void unpack_scales(const Cells& cells, int start, const uint8_t* raw, float* scales, float* factors) {
    const int lane = threadIdx.x & 31;
    for (int block = threadIdx.x >> 5; block < HEAD / 32; block += THREADS / 32) {
        float largest = 0;
#pragma unroll
        for (int key = lane; key < KEYS; key += 32) {
            const float d = half_to_float(load2(raw + key * RAW_OF(HEAD) + cells.begin(start + key) + 34 * block));
            scales[block * KEYS + key] = d;
            largest = fmaxf(largest, fabsf(d));
        }
        if (!factors) continue;
        largest = warp_max(largest);
        if (lane == 0) factors[block] = __uint_as_float((268 - max(__float_as_uint(largest) >> 23, 15u)) << 23);
    }
}
