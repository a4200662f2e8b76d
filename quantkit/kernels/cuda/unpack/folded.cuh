// Second unpackers for many rows, of types whose levels times their scales are bytes still: one scale is left for all
// 256 values, and a product over 32 of them is one sum of integers. Folded<T> is T itself for all others.
//
//     Q2_K   levels q * s: 0 .. 45                          d; the minimums as they are, one per 16 values
//     Q3_K   levels (4 - q) * (s - 32): -128 .. 124         -d
#pragma once
#include "unpack/k_quants.cuh"

template <typename T> struct Folded {
    static const bool HALVES = T::HALVES;
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid) { unpack_with<T>(p, part, l, grid); }
};

template <> struct Folded<Q2_K> {
    static const bool HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t*) {
        Q2_K::unpack(p, part, l);
        const uint32_t s = load2(p + 2 * part);
        for (int i = 0; i < 8; i++) l.q[i] *= (int)(i < 4 ? s & 15 : s >> 8 & 15);
        set_scales(l, load_half(p + 80));
    }
};

template <> struct Folded<Q3_K> {
    static const bool HALVES = false;
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t*) {
        uint32_t x[8], h[8];
        load_words(p, h);
        load_words(p + 32 + 32 * (part >> 2), x);
        const uint32_t low = (uint32_t)load2(p + 96 + 2 * (part & 3)) >> (part & 4) & 0x0f0f;
        const uint32_t high = (uint32_t)load2(p + 104 + 2 * (part & 1)) >> (part & 6) & 0x0303;
        const uint32_t s = low | high << 4;
        for (int i = 0; i < 8; i++) {
            // 7 - q, then two products in 16 bits each; 3 s less, and 16384 more lest they borrow from each other.
            const uint32_t u = ((x[i] >> 2 * (part & 3) & 0x03030303u) | (rotate(h[i], 2 - part) & 0x04040404u)) ^ 0x07070707u;
            const int by = (int)(i < 4 ? s & 255 : s >> 8) - 32;
            const uint32_t bias = (uint32_t)(16384 - 3 * by) * 0x00010001u;
            const uint32_t even = (u & 0x00ff00ffu) * (uint32_t)by + bias, odd = (u >> 8 & 0x00ff00ffu) * (uint32_t)by + bias;
            l.q[i] = (int)pick_bytes(even, odd, 0x6240);
        }
        set_scales(l, -load_half(p + 108));
    }
};
