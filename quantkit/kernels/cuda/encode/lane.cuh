// Shared by all encoders: the values and weights of a lane, ggml's rounding, and the interface of an encoder.
//     struct EncodeQ4_0 {                  // of the type Q4_0, the twin of encode_q4_0
//         static const int VALUES = 32;    // per lane: a block, or a part of one that is searched by itself
//         static const int BLOCK = 32;     // values per block
//         static const int BYTES = 18;     // bytes per block
//         static const int SCRATCH = 0;       // floats of scratch shared by the lanes of a block
//         static const bool COMPUTES_WEIGHTS = false;  // whether plain writes weights of its own to w
//         STATIC_INLINE void plain(const Lane& lane);
//         STATIC_INLINE void weighted(const Lane& lane, float mean);  // mean square of the row
//     };
// A lane processes values in the reference's order, so sums are rounded alike and the bytes are the CPU's. All lanes
// of a warp run, those past the end on zeros, so they may synchronize (__syncwarp).
#pragma once
#include "core/device.cuh"

#define STATIC_INLINE static __device__ __forceinline__

// Tables of a grid type (core/lookups.py): per slot ~index if the point is on the grid, else offset << 8 | length of
// its list of neighbours, both in units of four; lists of indices, and of words; the values of each point.
struct GridTables {
    const int32_t* entries;
    const uint16_t *lists, *words;
    const float* points;
};

// In shared memory: its values and their importances, which it may overwrite; scratch shared by the block's lanes; the
// bytes of the block, 2-byte aligned. part: the number of the lane within its block.
struct Lane {
    float *x, *w, *scratch;
    uint8_t* out;
    int part;
    GridTables grid;
};

// Loads the values of the COUNT lanes of a thread block, VALUES each, coalesced; those of adjacent lanes are STRIDE
// apart. from: value i of all lanes together, called in order.
template <int COUNT, int VALUES, int STRIDE, class F> INLINE void fetch_values(float* to, F from) {
    static_assert(COUNT % VALUES == 0, "a thread always has the same place in a lane");
    const int thread_at = (int)threadIdx.x;
    to += thread_at / VALUES * STRIDE + thread_at % VALUES;
#pragma unroll 8
    for (int j = 0; j < VALUES; j++) to[j * (COUNT / VALUES) * STRIDE] = from(thread_at + j * COUNT);
}

// The same for 16-byte aligned values, four at a time: from(i) for i = 0, 4, 8, ...
template <int COUNT, int VALUES, int STRIDE, class F> INLINE void fetch_quads(float* to, F from) {
    static_assert(4 * COUNT % VALUES == 0 && VALUES % 4 == 0, "a thread always has the same place in a lane");
    const int thread_at = 4 * (int)threadIdx.x;
    to += thread_at / VALUES * STRIDE + thread_at % VALUES;
#pragma unroll 8
    for (int j = 0; j < VALUES / 4; j++) {
        const float4 four = from(thread_at + 4 * j * COUNT);
        float* lane = to + 4 * j * COUNT / VALUES * STRIDE;
        lane[0] = four.x;
        lane[1] = four.y;
        lane[2] = four.z;
        lane[3] = four.w;
    }
}

INLINE bool lies_in_quads(const float* x) { return ((uint64_t)x & 15) == 0; }

// A column that advances by a step and wraps around at the end of a row, without a division each time.
struct Column {
    uint32_t at, n;

    __device__ __forceinline__ Column(int64_t begin, int64_t row) : at((uint32_t)begin % (uint32_t)row), n((uint32_t)row) {}
    __device__ __forceinline__ uint32_t next(uint32_t step) {
        const uint32_t first = at;
        at += step;
        while (at >= n) at -= n;
        return first;
    }
};

// Importances to weights: w = importance * sqrt(sigma + x^2).
INLINE void weigh(const Lane& lane, int n, float sigma) {
    for (int i = 0; i < n; i++) lane.w[i] = lane.w[i] * __fsqrt_rn(sigma + lane.x[i] * lane.x[i]);
}

// ggml's nearest_int: wraps around from 2^22 on; 0 for NaN, as for the bits of x86's NaN.
INLINE int nearest_int(float v) { return v == v ? (__float_as_int(v + 12582912.0f) & 0x007fffff) - 0x00400000 : 0; }

// To the nearest integer, even at a tie; |v| < 2^22.
INLINE float round_even(float v) { return v + 12582912.0f - 12582912.0f; }

// To the nearest integer, away from 0 at a tie; |v| < 2^22.
INLINE int round_away(float v) {
    const float size = fabsf(v);
    const int whole = (int)size, up = size - (float)whole >= 0.5f;
    return v < 0 ? -(whole + up) : whole + up;
}

INLINE float lesser(float a, float b) { return a < b ? a : b; }

INLINE float inverse_or_zero(float d) { return d != 0 ? 1.0f / d : 0; }

INLINE bool is_finite(float v) { return fabsf(v) < __int_as_float(0x7f800000); }

// NaN, from values so large that a sum overflows, has x86's bits; such a block is rejected afterwards.
INLINE void store_half(uint8_t* out, float v) { *(uint16_t*)out = v == v ? float_to_half(v) : (uint16_t)0xfe00; }
