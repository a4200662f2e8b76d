// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, and Q6_0, Q8_KV of ik_llama.cpp: blocks of 32 values; Q1_0: of 128. The twin of
// quantkit/kernels/cpu/unpack/legacy.py.
//
//     Q1_0  d f16 | qs 16                 d where bit i is set, else -d
//     Q4_0  d f16 | qs 16                 d * (q - 8)
//     Q4_1  d f16 | m f16 | qs 16         d * q + m
//     Q5_0  d f16 | qh 4 | qs 16          d * (q - 16)
//     Q5_1  d f16 | m f16 | qh 4 | qs 16  d * q + m
//     Q8_0  d f16 | qs 32 int8            d * q
//     Q6_0  d f16 | qh 8 | qs 16          d * (q - 32)
//     Q8_KV qs 32 int8                    q; the row begins with d f32 and the sum of all q, an i32
//
// Byte b of 16 holds values b and b + 16; bit i of qh is the fifth bit of value i. Q6_0: byte b of qh holds two high bits
// of values b, b + 16, b + 8, b + 24.
#pragma once
#include "unpack/levels.cuh"

struct Q4_0 : traits::Q4_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {  // levels 16 * (q - 8)
        uint32_t x[4];
        set_scales(l, load_half_and_words(p, x) * 0.0625f);
        for (int i = 0; i < 4; i++) {
            l.q[i] = (int)((x[i] << 4 & 0xf0f0f0f0u) ^ SIGNS);
            l.q[i + 4] = (int)((x[i] & 0xf0f0f0f0u) ^ SIGNS);
        }
    }
};

struct Q4_1 : traits::Q4_1 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        const uint32_t both = load4(p);
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4(p + 4 + 4 * i);
            l.q[i] = (int)(x & 0x0f0f0f0fu);
            l.q[i + 4] = (int)(x >> 4 & 0x0f0f0f0fu);
        }
        set_scales(l, half_to_float((uint16_t)both));
        set_mins(l, -half_to_float((uint16_t)(both >> 16)));
    }
};

struct Q5_0 : traits::Q5_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {  // levels 8 * (q - 16)
        uint32_t x[5];
        set_scales(l, load_half_and_words(p, x) * 0.125f);
        for (int i = 0; i < 4; i++) {
            const uint32_t low = x[0] >> 4 * i & 15, high = x[0] >> (16 + 4 * i) & 15;
            l.q[i] = (int)((x[i + 1] << 3 & 0x78787878u) ^ SIGNS ^ (spread_bits(low, 7) & SIGNS));
            l.q[i + 4] = (int)((x[i + 1] >> 1 & 0x78787878u) ^ SIGNS ^ (spread_bits(high, 7) & SIGNS));
        }
    }
};

struct Q5_1 : traits::Q5_1 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        const uint32_t both = load4(p), h = load4(p + 4);
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4(p + 8 + 4 * i), low = h >> 4 * i & 15, high = h >> (16 + 4 * i) & 15;
            l.q[i] = (int)((x & 0x0f0f0f0fu) | (spread_bits(low, 4) & 0x10101010u));
            l.q[i + 4] = (int)((x >> 4 & 0x0f0f0f0fu) | (spread_bits(high, 4) & 0x10101010u));
        }
        set_scales(l, half_to_float((uint16_t)both));
        set_mins(l, -half_to_float((uint16_t)(both >> 16)));
    }
};

struct Q8_0 : traits::Q8_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        uint32_t x[8];
        set_scales(l, load_half_and_words(p, x));
        for (int i = 0; i < 8; i++) l.q[i] = (int)x[i];
    }
};

struct Q6_0 : traits::Q6_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {  // levels 4 * (q - 32)
        uint32_t x[6];
        set_scales(l, load_half_and_words(p, x) * 0.25f);
        for (int i = 0; i < 4; i++) {
            const uint32_t high = i < 2 ? x[i] << 6 : x[i - 2] << 2, q = x[i + 2];
            const uint32_t next = i < 2 ? x[i] << 4 : x[i - 2];
            l.q[i] = (int)((q << 2 & 0x3c3c3c3cu) ^ SIGNS ^ (high & 0xc0c0c0c0u));
            l.q[i + 4] = (int)((q >> 2 & 0x3c3c3c3cu) ^ SIGNS ^ (next & 0xc0c0c0c0u));
        }
    }
};

struct Q8_KV : traits::Q8_KV {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        uint32_t x[8];
        load_words_by8(p, x);
        for (int i = 0; i < 8; i++) l.q[i] = (int)x[i];
        set_scales(l, 1);
    }
};

struct Q1_0 : traits::Q1_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[1];
        load_words(p + 2 + 4 * part, x);
        for (int i = 0; i < 8; i++) l.q[i] = (int)(sign_masks(spread_bits(~x[0] >> 4 * i & 15, 7)) | ONES);
        set_scales(l, load_half(p));
    }
};
