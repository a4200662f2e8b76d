// Layout of the key-value cache: each cell is one row of all key-value heads. The macro CACHE is its type: F32, F16, or
// Q8_0 in ggml's blocks of 34 bytes (f16 scale, 32 levels).
#pragma once
#include "core/device.cuh"

#define CACHE_F32 0
#define CACHE_F16 1
#define CACHE_Q8_0 2

INLINE int64_t cache_bytes(int64_t values) {
    return CACHE == CACHE_F32 ? 4 * values : CACHE == CACHE_F16 ? 2 * values : values / 32 * 34;
}

INLINE float2 halves(uint32_t two) { return make_float2(half_to_float((uint16_t)two), half_to_float((uint16_t)(two >> 16))); }

// Two levels, as floats. level + 128 becomes the low byte of a float above 2^23, because integer conversions are slow.
INLINE float2 levels(uint16_t two) {
    const uint32_t bytes = two ^ 0x8080u;
    return make_float2(__uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7650)) - 8388736.0f,
                       __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7651)) - 8388736.0f);
}

// Reads N values (1, 2 or 4) from i on of a head's row; i and the head's length are multiples of N (and of 2 for Q8_0,
// whose heads are multiples of 32).
template <int N> INLINE void read_cache(const uint8_t* row, int i, float* out) {
    if (CACHE == CACHE_F32) {
        if (N == 4) {
            const float4 v = *(const float4*)(row + 4 * i);
            out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
        } else {
            for (int j = 0; j < N; j++) out[j] = *(const float*)(row + 4 * (i + j));
        }
    } else if (CACHE == CACHE_F16) {
        if (N == 4) {
            const uint2 v = *(const uint2*)(row + 2 * i);
            const float2 low = halves(v.x), high = halves(v.y);
            out[0] = low.x, out[1] = low.y, out[2] = high.x, out[3] = high.y;
        } else if (N == 2) {
            const float2 v = halves(load4(row + 2 * i));
            out[0] = v.x, out[1] = v.y;
        } else {
            for (int j = 0; j < N; j++) out[j] = half_to_float(load2(row + 2 * (i + j)));
        }
    } else {
        const uint8_t* block = row + i / 32 * 34;
        const float d = half_to_float(load2(block));
        for (int j = 0; j < N; j += 2) {
            const float2 v = levels(load2(block + 2 + i % 32 + j));
            out[j] = v.x * d;
            if (j + 1 < N) out[j + 1] = v.y * d;
        }
    }
}

// Writes a value to its column of a row; a warp's lanes hold 32 adjacent columns from a multiple of 32. Lanes that are
// not `inside` pass 0.
INLINE void keep_column(float x, uint8_t* row, int64_t column, bool inside) {
    if (CACHE == CACHE_Q8_0) {  // as quantize_row_q8_0_ref; a scale too small to invert gives levels of 0
        const float d = warp_max(fabsf(x)) / 127.0f;
        float inverse = 1.0f / d;
        if (!(inverse < 3.4028235e38f)) inverse = 0;
        uint8_t* block = row + column / 32 * 34;
        if (column % 32 == 0) *(uint16_t*)block = float_to_half(d);
        block[2 + column % 32] = (uint8_t)(int8_t)(int)roundf(x * inverse);
    } else if (inside) {
        if (CACHE == CACHE_F16) ((uint16_t*)row)[column] = float_to_half(x);
        if (CACHE == CACHE_F32) ((float*)row)[column] = x;
    }
}
