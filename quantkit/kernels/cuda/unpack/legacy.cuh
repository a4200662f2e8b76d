// Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: blocks of 32 values; the file and the order of quantkit/kernels/cpu/unpack/legacy.py.
//
//     Q4_0  d f16 | qs 16                 d * (q - 8)
//     Q4_1  d f16 | m f16 | qs 16         d * q + m
//     Q5_0  d f16 | qh 4 | qs 16          d * (q - 16)
//     Q5_1  d f16 | m f16 | qh 4 | qs 16  d * q + m
//     Q8_0  d f16 | qs 32 int8            d * q
//
// Byte b of 16 holds values b and b + 16.
#pragma once
#include "unpack/levels.cuh"

struct Q4_0 {
    static const int BLOCK = 32, BYTES = 18, ALIGN = 2;
    static const bool MINS = false, HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4_by2(p + 2 + 4 * i);
            l.q[i] = below(low_nibbles(x), 8);
            l.q[i + 4] = below(high_nibbles(x), 8);
        }
        l.d[0] = l.d[1] = half_to_float(load2(p));
    }
};

struct Q4_1 {
    static const int BLOCK = 32, BYTES = 20, ALIGN = 4;
    static const bool MINS = true, HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4(p + 4 + 4 * i);
            l.q[i] = low_nibbles(x);
            l.q[i + 4] = high_nibbles(x);
        }
        l.d[0] = l.d[1] = half_to_float(load2(p));
        l.m[0] = l.m[1] = -half_to_float(load2(p + 2));
    }
};

struct Q5_0 {
    static const int BLOCK = 32, BYTES = 22, ALIGN = 2;
    static const bool MINS = false, HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        const uint32_t h = load4_by2(p + 2);
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4_by2(p + 6 + 4 * i);
            l.q[i] = below(low_nibbles(x) | (int)spread_bits(h, 4 * i, 4), 16);
            l.q[i + 4] = below(high_nibbles(x) | (int)spread_bits(h, 16 + 4 * i, 4), 16);
        }
        l.d[0] = l.d[1] = half_to_float(load2(p));
    }
};

struct Q5_1 {
    static const int BLOCK = 32, BYTES = 24, ALIGN = 4;
    static const bool MINS = true, HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        const uint32_t h = load4(p + 4);
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4(p + 8 + 4 * i);
            l.q[i] = low_nibbles(x) | (int)spread_bits(h, 4 * i, 4);
            l.q[i + 4] = high_nibbles(x) | (int)spread_bits(h, 16 + 4 * i, 4);
        }
        l.d[0] = l.d[1] = half_to_float(load2(p));
        l.m[0] = l.m[1] = -half_to_float(load2(p + 2));
    }
};

struct Q8_0 {
    static const int BLOCK = 32, BYTES = 34, ALIGN = 2;
    static const bool MINS = false, HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        for (int i = 0; i < 8; i++) l.q[i] = (int)load4_by2(p + 2 + 4 * i);
        l.d[0] = l.d[1] = half_to_float(load2(p));
    }
};
