// IQ4_KS, IQ2_KS of ik_llama.cpp: rows begin with a scale; the twin of quantkit/kernels/cpu/unpack/ik_quants.py.
//
//     IQ4_KS  scales 8 | qs 128             ((s & 254) - 127) * (codebook[q] + 4 * (s & 1)), s per 32 values
//     IQ2_KS  extra u16 | scales 4 | qs 64  (s - 16) * (codebook[q] + 5 * shift), s of 5 bits per 32 values
#pragma once
#include "unpack/levels.cuh"
#include "unpack/tables.cuh"

// Raise four levels below 128 - by.
INLINE int raised(int four, uint32_t by) { return (int)((((uint32_t)four ^ SIGNS) + by * ONES) ^ SIGNS); }

struct IQ4_KS : traits::IQ4_KS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint32_t s = p[part];
        for (int i = 0; i < 4; i++) {
            look_up<kvalues_iq4nl>(load4(p + 8 + 16 * part + 4 * i), l.q[i], l.q[i + 4]);
            l.q[i] = raised(l.q[i], (s & 1) * 4);
            l.q[i + 4] = raised(l.q[i + 4], (s & 1) * 4);
        }
        set_scales(l, (float)((int)(s & 254) - 127));
    }
};

struct IQ2_KS : traits::IQ2_KS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8];
        load_words(p + 6 + 32 * (part >> 2), x);
        const uint32_t extra = (uint32_t)load2(p) >> part, s = (p[2 + (part >> 1)] >> 4 * (part & 1) & 15) | (extra >> 4 & 16);
        for (int i = 0; i < 8; i++) {
            // Four indices as the nibbles of a byte selection.
            const uint32_t two = x[i] >> 2 * (part & 3) & 0x03030303u, four = two | two >> 4;
            l.q[i] = raised((int)pick_bytes(kvalues_iq2nl::A, 0, (four & 255) | (four >> 8 & 0xff00)), (extra & 1) * 5);
        }
        set_scales(l, (float)((int)s - 16));
    }
};
