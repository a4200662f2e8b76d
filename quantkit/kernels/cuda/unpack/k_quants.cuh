// Q2_K, Q3_K, Q4_K, Q5_K, Q6_K: super-blocks of 256 values with quantized scales; the twin of
// quantkit/kernels/cpu/unpack/k_quants.py.
//
//     Q2_K  scales 16 | qs 64 | d f16 | dmin f16              d * (s & 15) * q - dmin * (s >> 4), one s per 16 values
//     Q3_K  hmask 32 | qs 64 | scales 12 | d f16              d * (s - 32) * (q - 4), 6-bit s per 16 values
//     Q4_K  d f16 | dmin f16 | scales 12 | qs 128             d * s * q - dmin * m, 6-bit s and m per 32 values
//     Q5_K  d f16 | dmin f16 | scales 12 | qh 32 | qs 128     the same, q of 5 bits
//     Q6_K  ql 128 | qh 64 | scales 16 int8 | d f16           d * s * (q - 32), s per 16 values
//
// 2-bit fields: byte b of 32 holds values b, b + 32, b + 64, b + 96 of 128, from the low bits up. 4-bit fields: byte b
// of 32 (Q6_K: of 64) holds values b and b + 32 (b + 64). One-bit masks: bit k of byte b belongs to value b + 32 * k.
// So 32 consecutive values are the same field of 32 bytes.
#pragma once
#include "unpack/levels.cuh"

struct Q2_K : traits::Q2_K {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint8_t* qs = p + 16 + 32 * (part >> 2);
        const int shift = 2 * (part & 3);
        for (int i = 0; i < 8; i++) l.q[i] = (int)(load4(qs + 4 * i) >> shift & 0x03030303u);
        const uint32_t s = load2(p + 2 * part), both = load4(p + 80);
        const float d = half_to_float((uint16_t)both), dmin = half_to_float((uint16_t)(both >> 16));
        l.d[0] = d * (float)(int)(s & 15);
        l.m[0] = dmin * (float)(int)(s >> 4 & 15);
        l.d[1] = d * (float)(int)(s >> 8 & 15);
        l.m[1] = dmin * (float)(int)(s >> 12);
    }
};

// The low 4 bits of scales are in 8 bytes, first all low nibbles; the 2 high bits are in 4 bytes of four fields.
struct Q3_K : traits::Q3_K {
    STATIC_INLINE void levels(const uint8_t* p, int part, int (&q)[8]) {  // 32 * (q - 4)
        uint32_t x[8], h[8];
        load_words_from_bit(p, part, h);
        load_words_from_bit(p + 32 + 32 * (part >> 2), 2 * (part & 3) - 5, x);
        for (int i = 0; i < 8; i++) q[i] = (int)((x[i] & 0x60606060u) | (~h[i] & ONES) * 128);
    }
    STATIC_INLINE void scales(const uint8_t* p, int part, int (&s)[2]) {
        const uint32_t low = (uint32_t)load2(p + 96 + 2 * (part & 3)) >> (part & 4) & 0x0f0f;
        const uint32_t high = (uint32_t)load2(p + 104 + 2 * (part & 1)) >> (part & 6) & 0x0303;
        const uint32_t both = low | high << 4;
        s[0] = (int)(both & 255) - 32;
        s[1] = (int)(both >> 8) - 32;
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        int s[2];
        levels(p, part, l.q);
        scales(p, part, s);
        const float d = load_half(p + 108) * 0.03125f;
        for (int i = 0; i < 2; i++) l.d[i] = d * (float)s[i];
    }
};

// Scale and minimum of 32 values of Q4_K and Q5_K, whose first 16 bytes have one layout: bytes 4..7 hold 6 bits of
// scales 0..3 and the top bits of scales 4..7; 8..11 the same for minimums; 12..15 the low 4 bits of scales 4..7, and
// in the high nibbles those of minimums 4..7.
INLINE void set_sub_scales(const uint8_t* p, int part, Levels& l) {
    const uint4 head = *(const uint4*)p;
    const int at = 8 * (part & 3);
    const uint32_t a = head.y >> at, b = head.z >> at, c = head.w >> at;
    const uint32_t s = part < 4 ? a & 63 : (c & 15) | (a >> 2 & 48);
    const uint32_t m = part < 4 ? b & 63 : (c >> 4 & 15) | (b >> 2 & 48);
    set_scales(l, half_to_float((uint16_t)head.x) * (float)(int)s);
    set_mins(l, half_to_float((uint16_t)(head.x >> 16)) * (float)(int)m);
}

struct Q4_K : traits::Q4_K {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8];
        load_words_by16(p + 16 + 32 * (part >> 1), x);
        const int shift = 4 * (part & 1);
        for (int i = 0; i < 8; i++) l.q[i] = (int)(x[i] >> shift & 0x0f0f0f0fu);
        set_sub_scales(p, part, l);
    }
};

struct Q5_K : traits::Q5_K {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8], h[8];
        load_words_by16(p + 16, h);
        load_words_by16(p + 48 + 32 * (part >> 1), x);
        const int shift = 4 * (part & 1);
        for (int i = 0; i < 8; i++) l.q[i] = (int)((x[i] >> shift & 0x0f0f0f0fu) | (rotate(h[i], 4 - part) & 0x10101010u));
        set_sub_scales(p, part, l);
    }
};

struct Q6_K : traits::Q6_K {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {  // levels 4 * (q - 32)
        uint32_t x[8], h[8];
        load_words(p + 64 * (part >> 2) + 32 * (part & 1), x);
        load_words(p + 128 + 32 * (part >> 2), h);
        const int left = 2 - 2 * (part & 2), up = 6 - 2 * (part & 3);
        for (int i = 0; i < 8; i++) l.q[i] = (int)((rotate(x[i], left) & 0x3c3c3c3cu) ^ SIGNS ^ (h[i] << up & 0xc0c0c0c0u));
        const uint32_t s = load2(p + 192 + 2 * part);
        const float d = load_half(p + 208) * 0.25f;
        l.d[0] = d * (float)(int8_t)s;
        l.d[1] = d * (float)(int8_t)(s >> 8);
    }
};
