// Rows of a q8_0 cache for tensor cores. A level is exact as f16, and so are products with levels; the scales, one per
// 32 values, are applied to sums of 32 products (keys) or to the weights (values).
//
// Rows are only 2-byte aligned: they are copied in 16-byte pieces, including neighbouring bytes, and unpacked in
// shared memory.
#pragma once
#include "attention/attention.cuh"
#include "core/halves.cuh"
#include "core/mma.cuh"

// The 16-byte pieces that cover a head's row at any alignment; their bytes, rounded up to an odd number of pieces.
#define PIECES_OF(head) (((head) / 32 * 34 + 14 + 15) / 16)
#define RAW_OF(head) (16 * (PIECES_OF(head) | 1))

// Two levels as f16: level + 128 becomes the low byte of an f16 above 1024. tops: 0x64646464, in a register.
INLINE uint32_t two_levels(uint16_t two, uint32_t tops) {
    return minus_halves(__byte_perm(two ^ 0x8080u, tops, 0x4140), 0x64806480u);
}

// A head's rows in one sequence's cells; rows outside the range are clamped to it and get weight 0.
struct Cells {
    const uint8_t* base;     // a multiple of 16
    uint32_t begin0, bytes;  // offset of row 0 from base, row stride
    int first, last;
    const int32_t* selected;

    __device__ __forceinline__ uint64_t at(int i) const {
        return (uint64_t)(uint32_t)nth_cell(selected, min(max(i, first), last)) * bytes + begin0;
    }
    // The 16-byte piece in which a row begins, and the offset within it.
    __device__ __forceinline__ const uint8_t* piece(int i) const { return base + (at(i) & ~(uint64_t)15); }
    __device__ __forceinline__ int begin(int i) const { return (int)((uint32_t)at(i) & 15); }
};

INLINE Cells cells_of(const attention_args& a, const uint8_t* row0, int64_t values, const Range& range) {
    const uint32_t begin0 = (uint32_t)((uint64_t)row0 & 15);
    return Cells{row0 - begin0, begin0, (uint32_t)cache_bytes(values), range.first, range.last, selected_of(a, range.sequence)};
}

// Unpacks the copied levels of rows start ... start + KEYS to the f16 of a tile, 16 at a time.
template <int HEAD, int STRIDE> INLINE void unpack_levels(const Cells& cells, int start, const uint8_t* raw, uint8_t* tile) {
    const int UNITS = HEAD / 16, ALL = KEYS * UNITS;
    const bool EVEN = THREADS % UNITS == 0;  // a thread takes the same unit of every key
    const uint32_t tops = fixed(0x64646464u);
    const int key0 = threadIdx.x / UNITS, unit0 = threadIdx.x % UNITS;
#pragma unroll
    for (int i = 0; i < ALL; i += THREADS) {
        if (ALL % THREADS && i + (int)threadIdx.x >= ALL) break;
        const int key = EVEN ? key0 + i / UNITS : (i + (int)threadIdx.x) / UNITS;
        const int unit = EVEN ? unit0 : (i + (int)threadIdx.x) % UNITS;
        const uint8_t* from = raw + key * RAW_OF(HEAD) + cells.begin(start + key) + (unit / 2 * 34 + unit % 2 * 16 + 2);
        uint4* to = (uint4*)(tile + key * STRIDE + 32 * unit);
#pragma unroll
        for (int j = 0; j < 2; j++)
            to[j] = make_uint4(two_levels(load2(from + 8 * j), tops), two_levels(load2(from + 8 * j + 2), tops),
                               two_levels(load2(from + 8 * j + 4), tops), two_levels(load2(from + 8 * j + 6), tops));
    }
}

// Unpacks their scales, [HEAD / 32][KEYS]: to scales unchanged, and to large times a power of two that brings the
// largest of each KEYS to 2^14 ... 2^15, with its inverse in undo[HEAD / 32]. Either may be 0.
template <int HEAD>
INLINE void unpack_scales(const Cells& cells, int start, const uint8_t* raw, float* scales, float* large, float* undo) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int first = 0; first < HEAD / 32; first += THREADS / 32) {
        const int block = first + (threadIdx.x >> 5);
        if (HEAD / 32 % (THREADS / 32) && block >= HEAD / 32) break;
        float d[KEYS / 32], largest = 0;
#pragma unroll
        for (int i = 0; i < KEYS / 32; i++) {
            const int key = lane + 32 * i;
            d[i] = half_to_float(load2(raw + key * RAW_OF(HEAD) + cells.begin(start + key) + 34 * block));
            if (scales) scales[block * KEYS + key] = d[i];
            largest = fmaxf(largest, fabsf(d[i]));
        }
        if (!large) continue;
        const uint32_t exponent = max(__float_as_uint(warp_max(largest)) >> 23, 15u);
        if (lane == 0) undo[block] = __uint_as_float((exponent - 14) << 23);
#pragma unroll
        for (int i = 0; i < KEYS / 32; i++) large[block * KEYS + lane + 32 * i] = d[i] * __uint_as_float((268 - exponent) << 23);
    }
}
