// IQ1_BN and IQ2_BN of ik_llama.cpp: weights of -1, 0 and 1, with one scale for the row; the twin of
// quantkit/kernels/cpu/encode/bitnet.py, which has the layouts.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, IQ1BNQuantizer.
#pragma once
#include "encode/max_rows.cuh"

// 0, 1 or 2: 2 in a row of zeros.
INLINE uint32_t trit_of(float v, float half) { return v >= half ? 2 : v <= (half > 0 ? -half : -1e-45f) ? 0 : 1; }

struct EncodeIQ1_BN {
    static const int BLOCK = 64, BYTES = 13, HEADER = 2;

    STATIC_INLINE void row(const float* x, int64_t n, float most, uint8_t* out, uint32_t*) {
        const float half = 0.5f * most;
        for (int i = threadIdx.x; i < (int)(n / 64) * 13; i += blockDim.x) {
            const int byte = i % 13;
            const float* from = x + i / 13 * 64;
            uint32_t number = 0;
            for (int j = 4; j >= 0; j--) {  // the first digit is the least significant
                const int at = byte < 12 ? 16 * (byte / 3) + 5 * (byte % 3) + j : 16 * j + 15;
                number = 3 * number + (byte < 12 || j < 4 ? trit_of(from[min(at, 63)], half) : 0);
            }
            out[2 + i] = (uint8_t)((number * 256 + 242) / 243);
        }
        if (threadIdx.x < 2) {  // at any alignment
            uint16_t d;
            store_half((uint8_t*)&d, most);
            out[threadIdx.x] = (uint8_t)(d >> 8 * threadIdx.x);
        }
    }
};

struct EncodeIQ2_BN {
    static const int BLOCK = 64, BYTES = 16, HEADER = 4;

    STATIC_INLINE void row(const float* x, int64_t n, float most, uint8_t* out, uint32_t*) {
        const float half = 0.5f * most;
        for (int64_t i = threadIdx.x; i < n / 16; i += blockDim.x) {  // four bytes of four values each
            const float* from = x + i / 4 * 64 + i % 4 * 4;
            uint32_t word = 0;
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float4 v = *(const float4*)(from + 16 * k);
                word |= (trit_of(v.x, half) | trit_of(v.y, half) << 8 | trit_of(v.z, half) << 16 | trit_of(v.w, half) << 24)
                        << 2 * k;
            }
            *(uint32_t*)(out + 4 + 4 * i) = word;
        }
        if (threadIdx.x == 0) *(float*)out = most;
    }
};
