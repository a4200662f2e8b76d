// IQ1_BN, IQ2_BN: levels -1, 0, 1, and one scale for the row; the twin of quantkit/kernels/cpu/unpack/bitnet.py.
//
//     IQ1_BN  64: ql 12 | extra 1     base-3 digits as in TQ1_0; of 16 values, 15 in three bytes of ql, one in extra
//     IQ2_BN  64: qs 16               2 bits per value, byte b holds values b, b + 16, b + 32, b + 48
#pragma once
#include "unpack/ternary.cuh"

// Two digits minus one of four values, from the halves of a and b: bytes that were multiplied by a power of three
// each.
INLINE int digits_of_halves(uint32_t a, uint32_t b) {
    return less_one(pick_bytes((a & 0x00ff00ffu) * 3, (b & 0x00ff00ffu) * 3, 0x7531));
}

struct IQ1_BN : traits::IQ1_BN {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint32_t extra = p[12];
        for (int i = 0; i < 8; i += 4) {  // 16 values
            const uint8_t* ql = p + 6 * part + 3 * (i >> 2);
            const uint32_t a = ql[0], b = ql[1], c = ql[2];
            const uint32_t last = extra * (part ? (i ? 3 : 9) : (i ? 27 : 81));
            // Products with 81, 27, 9, 3, 1 in turn, two in the halves of a word.
            l.q[i] = digits_of_halves(a * (27u << 16 | 81), a * (3u << 16 | 9));
            l.q[i + 1] = digits_of_halves(a | b * (81u << 16), b * (9u << 16 | 27));
            l.q[i + 2] = digits_of_halves(b * (1u << 16 | 3), c * (27u << 16 | 81));
            l.q[i + 3] = digits_of_halves(c * (3u << 16 | 9), c | last << 16);
        }
        set_scales(l, 1);
    }
};

struct IQ2_BN : traits::IQ2_BN {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        for (int i = 0; i < 4; i++) {
            const uint32_t x = load4(p + 4 * i) >> 4 * part;
            l.q[i] = less_one(x & 0x03030303u);
            l.q[i + 4] = less_one(x >> 2 & 0x03030303u);
        }
        set_scales(l, 1);
    }
};
