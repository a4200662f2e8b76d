// Q1_0: one bit per value, d or -d; the twin of quantkit/kernels/cpu/unpack/binary.py.
//
//     Q1_0  128: d f16 | qs 16     bit i set: value i is d
#pragma once
#include "unpack/levels.cuh"

struct Q1_0 : traits::Q1_0 {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[1];
        load_words(p + 2 + 4 * part, x);
        for (int i = 0; i < 8; i++) l.q[i] = (int)(sign_masks(spread_bits(~x[0] >> 4 * i & 15, 7)) | ONES);
        set_scales(l, load_half(p));
    }
};
