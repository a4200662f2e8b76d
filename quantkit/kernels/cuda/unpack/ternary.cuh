// TQ1_0, TQ2_0, Q2_0: levels -1, 0, 1 (Q2_0 also 2) and one f16 scale per block; the twin of
// quantkit/kernels/cpu/unpack/ternary.py.
//
//     TQ1_0  256: qs 48 | qh 4 | d f16     five base-3 digits per byte, a fraction of 256: first digit = byte * 3 >> 8
//     TQ2_0  256: qs 64 | d f16            2 bits per value, as in Q2_K; value = d * (q - 1)
//     Q2_0    64: d f16 | qs 16            2 bits per value, values 4 i ... 4 i + 3 in byte i; value = d * (q - 1)
//
// TQ1_0: digit n of byte b is value 32 n + b in the first 32 bytes, value 160 + 16 n + b in the next 16; qh holds four
// digits per byte, values 240 + 4 n + b. Multiplying a byte by 3 modulo 256 brings its next digit to the front.
#pragma once
#include "unpack/levels.cuh"

// Subtract one from four bytes below 129.
INLINE int less_one(uint32_t four) { return (int)((four + 0x7f7f7f7fu) ^ SIGNS); }

INLINE uint32_t power_of_three(int n) { return (n & 1 ? 3u : 1u) * (n & 2 ? 9u : 1u) * (n & 4 ? 81u : 1u); }

// The digits of four bytes that a power of three brings to the front, minus one.
INLINE int digits(uint32_t x, uint32_t power) {
    const uint32_t even = (x & 0x00ff00ffu) * power & 0x00ff00ffu;
    const uint32_t odd = pick_bytes(x, 0, 0x4341) * power & 0x00ff00ffu;
    return less_one(pick_bytes(even * 3, odd * 3, 0x7351));
}

struct TQ1_0 : traits::TQ1_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        // Two times 16 bytes: for parts 0..4, one digit of different bytes; for 5 and 6, two digits of the same ones;
        // for part 7, digit 4 of those, then all four digits of qh.
        uint32_t x[4], y[4];
        load_words(part < 5 ? p : p + 32, x);
        load_words(part < 5 ? p + 16 : part < 7 ? p + 32 : p + 36, y);  // qh is the fourth word from 36 on
        const uint32_t power = power_of_three(part < 5 ? part : part < 7 ? 2 * part - 10 : 4);
        const uint32_t second = part < 5 ? power : 3 * power, last = y[3];
        for (int i = 0; i < 4; i++) {
            l.q[i] = digits(x[i], power);
            l.q[i + 4] = digits(part < 7 ? y[i] : last, part < 7 ? second : power_of_three(i));
        }
        set_scales(l, load_half(p + 52));
    }
};

struct TQ2_0 : traits::TQ2_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8];
        load_words_from_bit(p + 32 * (part >> 2), 2 * (part & 3), x);
        for (int i = 0; i < 8; i++) l.q[i] = less_one(x[i] & 0x03030303u);
        set_scales(l, load_half(p + 64));
    }
};

struct Q2_0 : traits::Q2_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[2];
        load_words(p + 2 + 8 * part, x);
        for (int i = 0; i < 8; i++) {
            const uint32_t two = (x[i >> 2] >> 8 * (i & 3) & 255) * 0x1001u;  // its upper half begins at bit 16
            l.q[i] = less_one((two | two << 6) & 0x03030303u);
        }
        set_scales(l, load_half(p));
    }
};
