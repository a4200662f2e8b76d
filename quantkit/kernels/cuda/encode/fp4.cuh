// MXFP4 and NVFP4: E2M1 with a scale that is a small float; the twin of quantkit/kernels/cpu/encode/fp4.py, which has
// the layouts and the reasons why midpoints and the exponent are exact.
//
// Source: llama.cpp b11434 ggml-quants.c quantize_row_mxfp4_ref, quantize_row_nvfp4_ref, best_index_mxfp4.
#pragma once
#include "encode/lane.cuh"

// The midpoints between magnitudes 0 1 2 3 4 6 8 12 times d; infinite where the larger magnitude overflows.
struct Midpoints {
    float m[7];

    __device__ __forceinline__ explicit Midpoints(float d) {
        const float m8 = d * 8.0f * 0.5f, m12 = d * 12.0f * 0.5f;
        m[0] = d * 0.5f, m[1] = d * 1.5f, m[2] = d * 2.5f, m[3] = d * 3.5f, m[4] = d * 5.0f;
        m[5] = d * 3.0f + m8;
        m[6] = m8 + m12;
    }

    // The nearest level: bits 2, 1, 0 by bisection, bit 3 the sign of all but level 0.
    __device__ __forceinline__ uint32_t level(float x) const {
        const float a = fabsf(x);
        const bool bit2 = a > m[3], bit1 = a > (bit2 ? m[5] : m[1]);
        const bool bit0 = a > (bit1 ? bit2 ? m[6] : m[2] : bit2 ? m[4] : m[0]);
        return (uint32_t)bit2 << 2 | (uint32_t)bit1 << 1 | (uint32_t)bit0 | (x < -m[0] ? 8u : 0u);
    }
};

template <int N> INLINE float largest_magnitude(const float* x) {
    float size = 0;
    for (int i = 0; i < N; i++) size = fmaxf(size, fabsf(x[i]));
    return size;
}

// The number of floats below 2^k whose log2f is k.
INLINE int floats_that_round_up(int k) {
    const int m = k > 0 ? k - 1 : -k;
    return (m >= 2) + (m >= 4) + 3 * (m >= 8) + 6 * (m >= 16) + 11 * (m >= 32) + 22 * (m >= 64) + 44 * (m >= 128);
}

// The exponent byte for a largest magnitude: floor(log2) - 2, biased by 127.
INLINE int e8m0_of(float amax) {
    if (!(amax > 0)) return 0;
    const int shift = amax < 1.17549435e-38f ? -24 : 0;
    const int bits = __float_as_int(shift ? amax * 16777216.0f : amax);
    return (((bits + floats_that_round_up((bits >> 23) + shift - 126)) >> 23) + shift - 2) & 255;
}

// 2^(e - 128): a denormal for e = 0 and 1.
INLINE float e8m0_half(int e) { return __int_as_float(e < 2 ? 0x00200000 << e : (e - 1) << 23); }

struct EncodeMXFP4 {
    static const int VALUES = 32, BLOCK = 32, BYTES = 17, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const float* x = lane.x;
        uint8_t* out = lane.out;
        const int e = e8m0_of(largest_magnitude<32>(x));
        const Midpoints middles(e8m0_half(e));
        out[0] = (uint8_t)e;
        for (int j = 0; j < 16; j++) out[1 + j] = (uint8_t)(middles.level(x[j]) | middles.level(x[j + 16]) << 4);
    }
};

// A float >= 0 as 4 exponent and 3 mantissa bits: ties round up; 248 and above become 448.
INLINE int ue4m3_of(float v) {
    const int bits = __float_as_int(lesser(v, 448.0f)), exponent = (bits >> 23) - 120;
    if (exponent <= 0) return min((int)(lesser(v, 1.0f) * 512.0f + 0.5f), 7);
    const int normal = (exponent << 3 | (bits >> 20 & 7)) + (bits >> 19 & 1);
    return normal >= 0x78 ? 0x7e : normal;
}

// Half the value of an unsigned E4M3.
INLINE float ue4m3_half(int u) { return u < 8 ? (float)u * 0.0009765625f : __int_as_float((u << 20) + (119 << 23)); }

// The level that the reference's search returns where differences to several magnitudes are equal.
INLINE uint32_t level_one_by_one(float x, float d) {
    uint32_t best = 0;
    float error = fabsf(x);
    for (uint32_t level = 1; level < 16; level++) {
        const int k = (int)(level & 7);
        const float value = (float)(k < 5 ? k : k == 5 ? 6 : k == 6 ? 8 : 12) * d, off = fabsf((level < 8 ? value : -value) - x);
        if (off < error) {
            best = level;
            error = off;
        }
    }
    return best;
}

struct EncodeNVFP4 {
    static const int VALUES = 16, BLOCK = 64, BYTES = 36, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;  // each lane has one of four sub-blocks

    STATIC_INLINE void plain(const Lane& lane) {
        const float* x = lane.x;
        uint8_t* out = lane.out;
        const int part = lane.part;
        const float amax = largest_magnitude<16>(x);
        const int scale = ue4m3_of(amax / 6.0f);
        const float half = ue4m3_half(scale);
        const Midpoints middles(scale ? half : 1.0f);  // with a scale of 0 the values are < 0.006: level 0
        const bool one_by_one = amax >= 16777216.0f;
        out[part] = (uint8_t)scale;
        for (int j = 0; j < 8; j++) {
            const float a = x[j], b = x[j + 8];
            out[4 + 8 * part + j] = (uint8_t)(one_by_one ? level_one_by_one(a, half) | level_one_by_one(b, half) << 4
                                                         : middles.level(a) | middles.level(b) << 4);
        }
    }
};
