// Unpackers for many rows, for types whose scales within 256 values are small integers times one number: the levels
// are multiplied by these integers, and a product over 256 values is one sum of integers. T::FOLDED_SCALE_BYTES
// (formats.py):
//
//     0  T unchanged: a scale per 32 or 16 values
//     1  one scale d per 256 values, levels that still fit a byte
//     2  the same with levels of two bytes: 256 * high (q) + low, both signed
//     FOLDED_TO_F16  no levels: f16 equal to the weights over F16_TIMES, two per word, in the order panel.cuh multiplies them:
//        of 16 values 0 1, 4 5, 8 9, 12 13, 2 3, 6 7, 10 11, 14 15; q: the first 16 of 32, low: the last
//
//     Q2_K      q * s: 0 .. 45; the minimums unchanged, one per 16 values
//     Q3_K      (4 - q) * (s - 32): -128 .. 124, and -d
//     TQ1_0, TQ2_0 have one scale already
//     Q6_K      4 (q - 32) * s, and d / 4: at most 16384
//     IQ2_XS, IQ2_S, IQ1_M    levels times 2 s + 1, and d / 8
//     IQ2_K ... IQ6_K         levels times s (IQ3_K: +-(2 s + 1)), and d
//     IQ1_M_ROW the value without the row's scale has 8 significant bits; divided by 128 it is 0 or at least 2^-10
//     NVFP4     E2M1 times E4M3 has 6 significant bits; divided by 128 it lies between 2^-17 and 22.5
#pragma once
#include "core/halves.cuh"
#include "unpack/all.cuh"

const float F16_TIMES = 128;

template <typename T> struct Folded {
    static_assert(T::FOLDED_SCALE_BYTES == 0, "a folded type has a Folded of its own");
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int*, const uint32_t* grid) {
        unpack_with<T>(p, part, l, grid);
    }
};

template <> struct Folded<TQ1_0> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int*, const uint32_t*) { TQ1_0::unpack(p, part, l); }
};

template <> struct Folded<TQ2_0> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int*, const uint32_t*) { TQ2_0::unpack(p, part, l); }
};

template <> struct Folded<Q2_K> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int*, const uint32_t*) {
        Q2_K::unpack(p, part, l);
        const uint32_t s = load2(p + 2 * part);
        for (int i = 0; i < 8; i++) l.q[i] *= (int)(i < 4 ? s & 15 : s >> 8 & 15);
        set_scales(l, load_half(p + 80));
    }
};

// Bytes 0 and 2, and bytes 1 and 3, of x times s, each plus a number large enough that neither borrows from the other.
INLINE void times(uint32_t x, int s, int offset, uint32_t& even, uint32_t& odd) {
    even = (x & 0x00ff00ffu) * (uint32_t)s + (uint32_t)offset * 0x00010001u;
    odd = (x >> 8 & 0x00ff00ffu) * (uint32_t)s + (uint32_t)offset * 0x00010001u;
}

template <> struct Folded<Q3_K> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int*, const uint32_t*) {
        uint32_t x[8], h[8], even, odd;
        load_words(p, h);
        load_words(p + 32 + 32 * (part >> 2), x);
        const uint32_t low = (uint32_t)load2(p + 96 + 2 * (part & 3)) >> (part & 4) & 0x0f0f;
        const uint32_t high = (uint32_t)load2(p + 104 + 2 * (part & 1)) >> (part & 6) & 0x0303;
        const uint32_t scales = low | high << 4;
        for (int i = 0; i < 8; i++) {
            const uint32_t q = (x[i] >> 2 * (part & 3) & 0x03030303u) | (rotate(h[i], 2 - part) & 0x04040404u);
            const int s = (int)(i < 4 ? scales & 255 : scales >> 8) - 32;
            times(q ^ 0x07070707u, s, 16384 - 3 * s, even, odd);  // 7 - q, minus 3 s
            l.q[i] = (int)pick_bytes(even, odd, 0x6240);
        }
        set_scales(l, -load_half(p + 108));
    }
};

// Levels times s0 (the first 16) and s1, at most 16384 in magnitude, as two bytes.
INLINE void split(Levels& l, int* low, int s0, int s1) {
    for (int i = 0; i < 8; i++) {
        const int s = i < 4 ? s0 : s1;
        uint32_t even, odd;
        times((uint32_t)l.q[i] ^ SIGNS, s, 32768 + 128 - 128 * s, even, odd);  // each 32768 + 128 + level * s
        l.q[i] = (int)(pick_bytes(even, odd, 0x7351) ^ SIGNS);
        low[i] = (int)(pick_bytes(even, odd, 0x6240) ^ SIGNS);
    }
}

template <> struct Folded<Q6_K> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t*) {
        Q6_K::unpack(p, part, l);
        const uint32_t s = load2(p + 192 + 2 * part);
        split(l, low, (int8_t)s, (int8_t)(s >> 8));
        set_scales(l, load_half(p + 208) * 0.25f);
    }
};

// Types whose blocks begin with d, and which have scales as integers.
template <typename T> struct FoldedHalves {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t*) {
        int s[2];
        T::unpack(p, part, l);
        T::scales(p, part, s);
        split(l, low, s[0], s[1]);
        set_scales(l, load_half(p));
    }
};
template <> struct Folded<IQ2_K> : FoldedHalves<IQ2_K> {};
template <> struct Folded<IQ3_K> : FoldedHalves<IQ3_K> {};
template <> struct Folded<IQ4_K> : FoldedHalves<IQ4_K> {};
template <> struct Folded<IQ5_K> : FoldedHalves<IQ5_K> {};
template <> struct Folded<IQ6_K> : FoldedHalves<IQ6_K> {};

template <> struct Folded<IQ2_XS> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t* grid) {
        IQ2_XS::unpack(p, part, l, grid);
        const int s = p[66 + part];
        split(l, low, 2 * (s & 15) + 1, 2 * (s >> 4) + 1);
        set_scales(l, load_half(p) * 0.125f);
    }
};

template <> struct Folded<IQ2_S> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t* grid) {
        IQ2_S::unpack(p, part, l, grid);
        const int s = p[74 + part];
        split(l, low, 2 * (s & 15) + 1, 2 * (s >> 4) + 1);
        set_scales(l, load_half(p) * 0.125f);
    }
};

template <> struct Folded<IQ1_M> {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t* grid) {
        IQ1_M::unpack(p, part, l, grid);
        const uint2 w = *(const uint2*)(p + 48);
        const uint32_t s = (part & 4 ? w.y : w.x) >> (16 * (part >> 1 & 1) + 6 * (part & 1));
        split(l, low, 2 * (int)(s & 7) + 1, 2 * (int)(s >> 3 & 7) + 1);
        const uint32_t d = (w.x >> 12 & 15) | (w.x >> 24 & 0xf0) | (w.y >> 4 & 0xf00) | (w.y >> 16 & 0xf000);
        set_scales(l, half_to_float((uint16_t)d) * 0.125f);
    }
};

template <> struct Folded<IQ1_M_ROW> {
    // Level times s of 16 values, added to the 1536 of an f16, whose last bit is 1: 8 words of two f16.
    STATIC_INLINE void scaled(const int* q, int s, int* out) {
        for (int i = 0; i < 4; i++) {
            uint32_t even, odd;
            times((uint32_t)q[i] ^ SIGNS, s, 0x6600 - 128 * s, even, odd);
            out[i] = (int)over_1024(pick_bytes(even, odd, 0x5410));
            out[4 + i] = (int)over_1024(pick_bytes(even, odd, 0x7632));
        }
    }
    STATIC_INLINE uint32_t over_1024(uint32_t two) { return times_halves(minus_halves(two, 0x66006600u), 0x14001400u); }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t* grid) {
        Levels folded;
        IQ1_M_ROW::unpack(p, part, folded, grid);
        scaled(folded.q, p[6] & 15, l.q);
        scaled(folded.q + 4, p[6] >> 4, low);
    }
};

// Four E2M1 times `by`: two words of two f16. In every byte, the sign is the top bit of `signs`, the rest bits 1 to 3
// of `three`: together, shifted, they form the upper byte of an f16, E2M1 over 2^14.
INLINE void scale_fp4(uint32_t signs, uint32_t three, uint32_t by, int& first, int& second) {
    const uint32_t tops = (signs & SIGNS) | (three & 0x0e0e0e0eu);
    first = (int)times_halves(pick_bytes(tops, 0, 0x1404), by);
    second = (int)times_halves(pick_bytes(tops, 0, 0x3424), by);
}

template <> struct Folded<NVFP4> {
    // 16 values: 8 words of two f16.
    STATIC_INLINE void scaled(const uint8_t* qs, uint32_t code, int* out) {
        // An unsigned E4M3 shifted left by 7 is an f16 over 2^8; times 2^15, so that all is over 128.
        const uint32_t d = code == 127 ? 0 : (code & 127) << 7, by = times_halves(d * 0x00010001u, 0x78007800u);
        for (int i = 0; i < 2; i++) {
            const uint32_t x = load4(qs + 4 * i);
            scale_fp4(x << 4, x << 1, by, out[i], out[4 + i]);
            scale_fp4(x, x >> 3, by, out[2 + i], out[6 + i]);
        }
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, int* low, const uint32_t*) {
        const uint32_t codes = load4(p) >> 16 * part;
        scaled(p + 4 + 16 * part, codes & 255, l.q);
        scaled(p + 12 + 16 * part, codes >> 8 & 255, low);
    }
};
