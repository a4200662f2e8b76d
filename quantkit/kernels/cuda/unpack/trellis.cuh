// The trellis types of ik_llama.cpp: levels are pseudo-random numbers seeded by indices, rows begin with a scale; the
// twin of quantkit/kernels/cpu/unpack/trellis.py.
//
//     IQ1_KT  sh 8 | ql 32 | qh 16          codebook[sh & 15] * levels of 8 from 13-bit q, sh per 32 values
//     IQ2_KT  scales 4 | qs 32 u16          codebook[s] * levels of 8 from 16-bit q, 4-bit s per 32 values
//     IQ3_KT  scales 4 | qs 32 u16 | qh 32  s * magnitudes of 8 from 16-bit q, signs in qh, 4-bit s per 32 values
//     IQ4_KT  8 u32 w | ql 64 | qh 32       ((w >> 1 & 127) - 64) * levels of 4 from 16-bit q, w per 32 values
//
// The levels of q: x = q + 4096, and for each level x = 0xCBAC1FED * x; the four bytes of x & 0x3F3F3F3F are summed,
// and 126 subtracted.
#pragma once
#include "unpack/levels.cuh"
#include "unpack/tables.cuh"

// The next four levels of a generator.
INLINE int next_four(uint32_t& x) {
    uint32_t sums = 0;
    for (int i = 0; i < 4; i++) {
        x *= 0xcbac1fedu;
        sums |= (uint32_t)__dp4a((int)(x & 0x3f3f3f3fu), (int)ONES, 0) << 8 * i;
    }
    // Less 126: no byte borrows from the next one if its top bit is set, which is restored afterwards.
    return (int)(((sums | SIGNS) - 126 * ONES) ^ (~sums & SIGNS));
}

INLINE void set_eight_of(uint32_t q, int* four) {
    uint32_t x = q + 4096;
    four[0] = next_four(x);
    four[1] = next_four(x);
}

// A level of the codebook of scales.
INLINE float scale_of(uint32_t nibble) {
    int low, high;
    look_up<kvalues_iq4nl>(nibble, low, high);
    return (float)(int8_t)low;
}

// Nibble `part` of four bytes: the low ones first.
INLINE uint32_t nibble_of(const uint8_t* p, int part) { return p[part & 3] >> (part & 4) & 15; }

struct IQ1_KT : traits::IQ1_KT {
    STATIC_INLINE void seeds(const uint8_t* p, int part, uint32_t (&q)[4]) {
        const uint32_t sh = p[part], low = load4(p + 8 + 4 * part), high = load4(p + 40 + 4 * (part & 3)) >> (part & 4);
        for (int j = 0; j < 4; j += 2) {  // two seeds: halves, whose top bits are bits 4 + j and 5 + j of sh
            const uint32_t top = sh * (j ? 1u << 6 | 1u << 21 : 1u << 8 | 1u << 23) & 0x10001000u;
            const uint32_t both = pick_bytes(low, high & 0x0f0f0f0fu, j ? 0x7362 : 0x5140) | top;
            q[j] = both & 0xffff, q[j + 1] = both >> 16;
        }
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t q[4];
        seeds(p, part, q);
        for (int j = 0; j < 4; j++) set_eight_of(q[j], l.q + 2 * j);
        set_scales(l, scale_of(p[part] & 15));
    }
};

struct IQ2_KT : traits::IQ2_KT {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        for (int j = 0; j < 4; j++) set_eight_of(load2(p + 4 + 8 * part + 2 * j), l.q + 2 * j);
        set_scales(l, scale_of(nibble_of(p, part)));
    }
};

struct IQ3_KT : traits::IQ3_KT {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        for (int j = 0; j < 4; j++) set_eight_of(load2(p + 4 + 8 * part + 2 * j), l.q + 2 * j);
        for (int i = 0; i < 8; i++) {
            // Complement, and add one, where the level's sign is not the stored one; -0 is 0.
            const uint32_t signs = load4(p + 68 + 4 * i) >> part & ONES, flipped = signs ^ ((uint32_t)l.q[i] >> 7 & ONES);
            const uint32_t inverse = (uint32_t)l.q[i] ^ flipped * 255;
            l.q[i] = (int)(((inverse & ~SIGNS) + flipped) ^ (inverse & SIGNS));
        }
        set_scales(l, (float)(int)nibble_of(p, part));
    }
};

struct IQ4_KT : traits::IQ4_KT {
    // Without bit 15, which is the same in all: bit 0 of w.
    STATIC_INLINE void seeds(const uint8_t* p, int part, uint32_t w, uint32_t (&q)[8]) {
        for (int i = 0; i < 2; i++) {
            const uint32_t low = load4(p + 32 + 8 * part + 4 * i), high = load4(p + 96 + 8 * (part & 3) + 4 * i) >> (part & 4);
            for (int j = 0; j < 4; j++) {
                const uint32_t both = pick_bytes(low, high & 0x0f0f0f0fu, j < 2 ? 0x5140 : 0x7362), k = 4 * i + j;
                q[k] = (j & 1 ? both >> 16 : both & 0xffff) | ((k < 2 ? w << (4 - 3 * k) : w >> (3 * k - 4)) & 0x7000);
            }
        }
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint32_t w = load4(p + 4 * part);
        uint32_t q[8];
        seeds(p, part, w, q);
        for (int j = 0; j < 8; j++) {
            uint32_t x = q[j] + (4096 + (w & 1) * 32768);
            l.q[j] = next_four(x);
        }
        set_scales(l, (float)((int)(w >> 1 & 127) - 64));
    }
};
