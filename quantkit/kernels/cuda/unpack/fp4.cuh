// MXFP4 and NVFP4: 4-bit floats (E2M1) scaled by a power of two, or by an 8-bit float; the twin of
// quantkit/kernels/cpu/unpack/fp4.py.
//
//     MXFP4  32: e u8 | qs 16             E2M1[q] * 2^(e - 127); value i in the low, i + 16 in the high half of byte i
//     NVFP4  64: 4 scales u8 | qs 32      E2M1[q] * scale; 16 values per scale, value i and i + 8 in one of 8 bytes
//
// E2M1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6 with a sign; levels are twice that, scales half. NVFP4's scale is an unsigned
// E4M3 whose top bit is ignored; 0x7F, its NaN, counts as 0.
#pragma once
#include "unpack/levels.cuh"
#include "unpack/tables.cuh"

// 2^(e - 128), denormal below 2.
INLINE float half_e8m0(uint32_t e) { return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23); }

struct MXFP4 : traits::MXFP4 {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        uint32_t x[4];
        load_words(p + 1, x);
        for (int i = 0; i < 4; i++) look_up<kvalues_fp4>(x[i], l.q[i], l.q[i + 4]);
        set_scales(l, half_e8m0(p[0]));
    }
};

// Half the value of an unsigned E4M3.
INLINE float half_ue4m3(uint32_t code) {
    const uint32_t x = code & 127;
    if (code == 127) return 0;
    return x < 8 ? (float)(int)x * 0.0009765625f : __uint_as_float((x << 20) + (119u << 23));
}

struct NVFP4 : traits::NVFP4 {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint8_t* qs = p + 4 + 16 * part;
        for (int i = 0; i < 2; i++) {
            look_up<kvalues_fp4>(load4(qs + 4 * i), l.q[i], l.q[i + 2]);
            look_up<kvalues_fp4>(load4(qs + 8 + 4 * i), l.q[i + 4], l.q[i + 6]);
        }
        const uint32_t s = load4(p) >> 16 * part;
        l.d[0] = half_ue4m3(s & 255);
        l.d[1] = half_ue4m3(s >> 8 & 255);
    }
};
