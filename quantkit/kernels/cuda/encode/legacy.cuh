// Q1_0, Q4_0, Q4_1, Q5_0, Q5_1, Q6_0, Q8_0, blocks with a scale, and Q8_KV; the twin of
// quantkit/kernels/cpu/encode/legacy.py, which has the layouts.
//
// Source: llama.cpp b11434 ggml-quants.c, quantize_row_q*_ref and quantize_row_q*_impl; ik_llama.cpp 8337e4cd3,
// quantize_row_q6_0_impl and iqk_quantize_row_q8_KV.
#pragma once
#include "encode/max_rows.cuh"
#include "encode/search_refined.cuh"

// Stores the fifth bits of 32 levels, where a type has them, then their nibbles.
template <bool FIFTH, typename F> INLINE void store_levels(uint8_t* out, F level) {
    uint32_t high = 0;
    uint8_t* nibbles = out + (FIFTH ? 4 : 0);
#pragma unroll 4
    for (int j = 0; j < 16; j++) {
        const uint32_t a = (uint32_t)level(j), b = (uint32_t)level(j + 16);
        nibbles[j] = (uint8_t)((a & 15) | (b & 15) << 4);
        if (FIFTH) high |= (a >> 4) << j | (b >> 4) << (j + 16);
    }
    if (FIFTH) {
        *(uint16_t*)out = (uint16_t)high;
        *(uint16_t*)(out + 2) = (uint16_t)(high >> 16);
    }
}

// 1 / d; 0 where that is infinite, when every level is 0: in C a value becomes infinity or NaN, and the integer of
// that is 0. For d = 0 the middle level remains.
INLINE float invert(float d, float& middle) {
    const float inverse = 1.0f / d;
    if (is_finite(inverse)) return inverse;
    if (d != 0) middle = 0;
    return 0;
}

// Levels 0 .. 2 * HALF - 1 around HALF.
template <int HALF> struct Symmetric {
    static const int VALUES = 32, BLOCK = 32, BYTES = HALF == 8 ? 18 : 22, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) { scale_by(lane, largest_of<32>(lane.x) / (float)-HALF); }

    STATIC_INLINE void scale_by(const Lane& lane, float d) {
        const float* x = lane.x;
        uint8_t* out = lane.out;
        float middle = (float)HALF + 0.5f;
        const float inverse = invert(d, middle);
        store_half(out, d);
        store_levels<HALF == 16>(out + 2, [&](int i) { return min((int)(x[i] * inverse + middle), 2 * HALF - 1); });
    }

    STATIC_INLINE void weighted(const Lane& lane, float mean) {
        weigh(lane, 32, mean);
        const float* x = lane.x;
        uint8_t* out = lane.out;
        const Fit fit = fit_signed<32>(x, lane.w, HALF);
        const int middle = fit.inverse != 0 ? HALF : 0;
        store_half(out, fit.scale);
        store_levels<HALF == 16>(out + 2,
                                 [&](int i) { return min(max(nearest_int(x[i] * fit.inverse), -HALF), HALF - 1) + middle; });
    }
};

// Levels 0 .. TOP above a minimum.
template <int TOP> struct Affine {
    static const int VALUES = 32, BLOCK = 32, BYTES = TOP == 15 ? 20 : 24, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const float* x = lane.x;
        uint8_t* out = lane.out;
        float low = x[0], high = x[0];
        for (int i = 1; i < 32; i++) {
            if (x[i] < low) low = x[i];
            if (x[i] > high) high = x[i];
        }
        const float d = fabsf(high - low) / (float)TOP;
        float half = 0.5f;
        const float inverse = invert(d, half);
        store_half(out, d);
        store_half(out + 2, low);
        if (!is_finite(d)) low = 0;  // infinity times 0 would be NaN: level 0
        store_levels<TOP == 31>(out + 4, [&](int i) { return min((int)((x[i] - low) * inverse + half), TOP); });
    }

    STATIC_INLINE void weighted(const Lane& lane, float mean) {
        weigh(lane, 32, mean);
        const float* x = lane.x;
        uint8_t* out = lane.out;
        const Fit fit = fit_with_min<32, true>(x, [&](int i) { return lane.w[i]; }, TOP, -0.9f, 0.05f, 36);
        store_half(out, fit.scale);
        store_half(out + 2, fit.low);
        store_levels<TOP == 31>(out + 4, [&](int i) { return level_of<true>(fit.inverse * (x[i] - fit.base), TOP); });
    }
};

struct EncodeQ4_0 : Symmetric<8> {};
struct EncodeQ4_1 : Affine<15> {};
struct EncodeQ5_0 : Symmetric<16> {};
struct EncodeQ5_1 : Affine<31> {};

// ik_llama.cpp's search with an importance: levels that move, and are kept.
template <int HALF> struct RefinedSymmetric : Symmetric<HALF> {
    static const int SCRATCH = 33;

    STATIC_INLINE void weighted(const Lane& lane, float mean) {
        weigh(lane, 32, mean);
        const float* levels = lane.scratch;
        store_half(lane.out, fit_signed_refined<32>(lane.x, lane.w, lane.scratch, HALF));
        store_levels<HALF == 16>(lane.out + 2, [&](int i) { return (int)levels[i] + HALF; });
    }
};

template <int TOP> struct RefinedAffine : Affine<TOP> {
    static const int SCRATCH = 33;

    STATIC_INLINE void weighted(const Lane& lane, float mean) {
        weigh(lane, 32, mean);
        const float* levels = lane.scratch;
        const Fit fit = fit_with_min_refined<32>(lane.x, lane.w, lane.scratch, TOP);
        store_half(lane.out, fit.scale);
        store_half(lane.out + 2, fit.low);
        store_levels<TOP == 31>(lane.out + 4, [&](int i) { return (int)levels[i]; });
    }
};

// ik_llama.cpp's --symmetric-q40: levels -7 .. 7, with or without an importance.
struct EncodeQ4_0_SYMMETRIC : Symmetric<8> {
    STATIC_INLINE void plain(const Lane& lane) {
        float size = 0;
        for (int i = 0; i < 32; i++) size = fmaxf(size, fabsf(lane.x[i]));
        scale_by(lane, size / 7.0f);
    }
    STATIC_INLINE void weighted(const Lane& lane, float) { plain(lane); }
};

struct EncodeQ4_0_IK : RefinedSymmetric<8> {};
struct EncodeQ4_1_IK : RefinedAffine<15> {};
struct EncodeQ5_0_IK : RefinedSymmetric<16> {};
struct EncodeQ5_1_IK : RefinedAffine<31> {};

struct EncodeQ8_0 {
    static const int VALUES = 32, BLOCK = 32, BYTES = 34, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const float* x = lane.x;
        uint8_t* out = lane.out;
        float size = 0, none = 0;
        for (int i = 0; i < 32; i++) size = fmaxf(size, fabsf(x[i]));
        const float d = size / 127.0f, inverse = invert(d, none);
        store_half(out, d);
#pragma unroll 4
        for (int i = 0; i < 32; i++) out[2 + i] = (uint8_t)round_away(x[i] * inverse);
    }
};

struct EncodeQ6_0 {
    static const int VALUES = 32, BLOCK = 32, BYTES = 26, SCRATCH = 33;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void plain(const Lane& lane) {
        for (int i = 0; i < 32; i++) lane.w[i] = lane.x[i] * lane.x[i];
        finish(lane);
    }

    STATIC_INLINE void weighted(const Lane& lane, float mean) {
        weigh(lane, 32, mean);
        finish(lane);
    }

    STATIC_INLINE void finish(const Lane& lane) {
        float* levels = lane.scratch;
        uint8_t* out = lane.out;
        store_half(out, fit_signed_refined<32>(lane.x, lane.w, levels, 32));
        for (int j = 0; j < 16; j++) {
            const int a = (int)levels[j] + 32, b = (int)levels[j + 16] + 32;
            out[10 + j] = (uint8_t)((a & 15) | (b & 15) << 4);
            // Byte j: of levels j and j + 16, then of j + 8 and j + 24.
            const int high = a >> 4 | b >> 4 << 2;
            out[2 + (j & 7)] = (uint8_t)(j < 8 ? high : out[2 + (j & 7)] | high << 4);
        }
    }
};

struct EncodeQ8_KV {
    static const int BLOCK = 32, BYTES = 32, HEADER = 8;

    STATIC_INLINE void row(const float* x, int64_t n, float most, uint8_t* out, uint32_t* part) {
        const float d = most / 127.0f, inverse = most > 0 ? 1.0f / d : 0.0f;
        uint32_t total = 0;
        for (int64_t i = 4 * threadIdx.x; i < n; i += 4 * blockDim.x) {
            const float4 four = *(const float4*)(x + i);
            const float values[4] = {four.x, four.y, four.z, four.w};
            uint32_t bytes = 0;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                // As cvtps2dq: INT_MIN for values beyond int32. Where 1 / d is infinite all levels are that.
                const float v = values[j] * inverse;
                const int q = fabsf(v) < 2147483648.0f ? __float2int_rn(v) : -2147483647 - 1;
                total += (uint32_t)q;
                bytes |= (uint32_t)(max(min(q, 127), -128) & 255) << 8 * j;
            }
            *(uint32_t*)(out + 8 + i) = bytes;
        }
        total = block_sum(total, part);
        if (threadIdx.x == 0) {
            *(float*)out = d;
            *(uint32_t*)(out + 4) = total;
        }
    }
};

// Signs, times the mean magnitude of the block.
struct EncodeQ1_0 {
    static const int VALUES = 32, BLOCK = 128, BYTES = 18, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        uint32_t signs = 0;
        for (int i = 0; i < 32; i++) signs |= (uint32_t)(lane.x[i] >= 0) << i;
        for (int k = 0; k < 2; k++) *(uint16_t*)(lane.out + 2 + 4 * lane.part + 2 * k) = (uint16_t)(signs >> 16 * k);
        if (lane.part) return;
        float sum = 0;  // of the values of four lanes
        for (int i = 0; i < 128; i++) sum = sum + fabsf(lane.x[i / 32 * 33 + i % 32]);
        store_half(lane.out, sum / 128.0f);
    }
};
