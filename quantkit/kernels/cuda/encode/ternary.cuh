// TQ1_0, TQ2_0, Q2_0: weights of -1, 0, 1 times one scale per block; the twin of
// quantkit/kernels/cpu/encode/ternary.py, which has the layouts. A lane rounds 32 values; then the lanes of a block
// pack its bytes together.
//
// Source: llama.cpp b11434 ggml-quants.c, quantize_row_tq1_0_ref, quantize_row_tq2_0_ref, quantize_row_q2_0_ref.
#pragma once
#include "encode/lane.cuh"

// A block of N values, 32 per lane.
template <int N> struct Trits {
    static const int LANES_EACH = N / 32;

    const Lane& lane;
    float d, inverse;  // inverse: 0 where 1 / d is not finite

    __device__ __forceinline__ explicit Trits(const Lane& l) : lane(l) {
        d = 0;
        for (int i = 0; i < 32; i++) d = fmaxf(d, fabsf(l.x[i]));
        for (int k = LANES_EACH / 2; k; k >>= 1) d = fmaxf(d, __shfl_xor_sync(FULL, d, k));
        inverse = 1.0f / d;
        if (!is_finite(inverse)) inverse = 0;
    }

    // Replaces values by -1, 0, 1 plus 1.
    __device__ __forceinline__ void round() const {
        for (int i = 0; i < 32; i++) {
            const float v = lane.x[i] * inverse;
            lane.x[i] = v >= 0.5f ? 2.0f : v <= -0.5f ? 0.0f : 1.0f;
        }
        __syncwarp();
    }

    // Trit i of the block.
    __device__ __forceinline__ uint32_t at(int i) const { return (uint32_t)(int)(lane.x - lane.part * 33)[i / 32 * 33 + i % 32]; }

    // Packs `count` trits, `step` apart, as the digits of a fraction, ceil(number * 256 / 243); missing digits are 0.
    __device__ __forceinline__ uint8_t fraction(int i, int step, int count) const {
        uint32_t q = 0;
        for (int n = 0; n < 5; n++) q = 3 * q + (n < count ? at(i + n * step) : 0);
        return (uint8_t)((q * 256 + 242) / 243);
    }
};

struct EncodeTQ1_0 {
    static const int VALUES = 32, BLOCK = 256, BYTES = 54, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const Trits<256> trits(lane);
        trits.round();
        for (int m = lane.part; m < 32; m += 8) lane.out[m] = trits.fraction(m, 32, 5);
        for (int m = lane.part; m < 16; m += 8) lane.out[32 + m] = trits.fraction(160 + m, 16, 5);
        if (lane.part < 4) lane.out[48 + lane.part] = trits.fraction(240 + lane.part, 4, 4);
        if (lane.part == 4) store_half(lane.out + 52, trits.d);
    }
};

struct EncodeTQ2_0 {
    static const int VALUES = 32, BLOCK = 256, BYTES = 66, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const Trits<256> trits(lane);
        trits.round();
        for (int b = lane.part; b < 64; b += 8) {
            const int i = b / 32 * 128 + b % 32;
            lane.out[b] = (uint8_t)(trits.at(i) | trits.at(i + 32) << 2 | trits.at(i + 64) << 4 | trits.at(i + 96) << 6);
        }
        if (lane.part == 0) store_half(lane.out + 64, trits.d);
    }
};

struct EncodeQ2_0 {
    static const int VALUES = 32, BLOCK = 64, BYTES = 18, SCRATCH = 0;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const Trits<64> trits(lane);
        trits.round();
        const bool nothing = trits.d > 0 && trits.inverse == 0;  // C converts infinity to an int
        for (int b = lane.part; b < 16; b += 2) {
            const uint32_t four = trits.at(4 * b) | trits.at(4 * b + 1) << 2 | trits.at(4 * b + 2) << 4 | trits.at(4 * b + 3) << 6;
            lane.out[2 + b] = (uint8_t)(nothing ? 0 : four);
        }
        if (lane.part == 0) store_half(lane.out, trits.d);
    }
};
