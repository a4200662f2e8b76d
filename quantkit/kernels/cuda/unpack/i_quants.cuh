// The i-quants: levels looked up in a codebook (IQ4), or 4 or 8 at a time in a grid (IQ1, IQ2, IQ3); the twin of
// quantkit/kernels/cpu/unpack/i_quants.py.
//
//     IQ4_NL   32:  d f16 | qs 16                                     d * codebook[q], halves of bytes as in Q4_0
//     IQ4_XS   256: d f16 | scales_h u16 | scales_l 4 | qs 128        d * (s - 32) * codebook[q], 6-bit s per 32 values
//     IQ3_XXS  256: d f16 | qs 64 | 8 u32: 4 x 7 signs, 4-bit s       d * (0.5 + s) * 0.5 * grid[q]
//     IQ3_S    256: d f16 | qs 64 | qh 8 | signs 32 | scales 4        d * (1 + 2 s) * grid[q], s per 32 values
//     IQ2_XXS  256: d f16 | 8 x (4 qs, u32: 4 x 7 signs, 4-bit s)     d * (0.5 + s) * 0.25 * grid[q]
//     IQ2_XS   256: d f16 | 32 u16: 9-bit q, 7 signs | scales 8       the same, s per 16 values
//     IQ2_S    256: d f16 | qs 32 | signs 32 | qh 8 | scales 8        the same
//     IQ1_S    256: d f16 | qs 32 | 8 u16: 4 x 3 bits of q, s, sign   d * (2 s + 1) * (grid[q] +- 1/8), s, sign per 32
//     IQ1_M    256: qs 32 | qh 16 | 4 u16: 4 x 3-bit s, 4 bits of d   the same, s per 16, sign per 8 values
//
// and of single rows of IQ1_S_R4 and IQ1_M_R4, which begin with d f16:
//
//     IQ1_S_ROW 32: qs 4 | u16: 4 x 3 bits of q, s, sign              as IQ1_S
//     IQ1_M_ROW 32: qs 4 | qh 2 | s 1: two nibbles                    d * s * (grid[q] +- 1/8), s per 16, sign per 8
//
// Seven signs encode eight: the eighth makes the number of negative values even. IQ1's eighths become integers: levels
// are 8 * grid +- 1, the scale an eighth. Grids of 8 values are nibbles (tables.cuh): a byte permutation turns four of
// them into levels, with a table of the magnitudes and their negatives (IQ2), or of the three shifted levels (IQ1).
// Multiplications spread the signs to nibbles or bytes; their copies of the bits do not overlap.
#pragma once
#include "unpack/levels.cuh"
#include "unpack/tables.cuh"

// ---------------------------------------------------------------- IQ4

struct IQ4_NL : traits::IQ4_NL {
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l) {
        uint32_t x[4];
        set_scales(l, load_half_and_words(p, x));
        for (int i = 0; i < 4; i++) look_up<kvalues_iq4nl>(x[i], l.q[i], l.q[i + 4]);
    }
};

struct IQ4_XS : traits::IQ4_XS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[4];
        load_words_by8(p + 8 + 16 * part, x);
        for (int i = 0; i < 4; i++) look_up<kvalues_iq4nl>(x[i], l.q[i], l.q[i + 4]);
        const uint2 head = *(const uint2*)p;
        const uint32_t s = (head.y >> 4 * part & 15) | (head.x >> (16 + 2 * part) & 3) << 4;
        set_scales(l, half_to_float((uint16_t)head.x) * (float)((int)s - 32));
    }
};

// ---------------------------------------------------------------- signs of IQ2 and IQ3

// Seven signs as bit `at` of nibbles, in the order 0 4 1 5 2 6 3, with their parity in the eighth: the low nibbles of
// four bytes are those of values 0..3, the high nibbles those of values 4..7.
INLINE uint32_t seven_signs(uint32_t seven, int at = 0) {
    const uint32_t x = seven * (0x00204081u << at) & 0x01111111u << at;
    return x | (x * 0x11111111u & 0x10000000u << at);  // the last bit of the sum of all nibbles
}

// Eight signs as the top bits of nibbles, in the order 3 7 2 6 1 5 0 4.
INLINE uint32_t reversed_signs(uint32_t eight) { return eight * 0x08040201u & 0x88888888u; }

// 255 in each of four bytes where the sign is set: nibble k of a word of signs.
INLINE uint32_t negative(uint32_t signs, int k) { return sign_masks(spread_bits(signs >> 4 * k & 15, 7)); }

INLINE float half_scale(uint32_t s, float d, float factor) { return ((float)(int)s + 0.5f) * d * factor; }

// Byte j of a word.
INLINE uint32_t byte_of(uint32_t x, int j) { return x >> 8 * j & 255; }

// ---------------------------------------------------------------- IQ3

struct IQ3_XXS : traits::IQ3_XXS {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq3xxs_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        uint32_t x[2], w[1];
        load_words(p + 2 + 8 * part, x);
        load_words(p + 66 + 4 * part, w);
        for (int i = 0; i < 8; i += 2) {
            const uint32_t signs = seven_signs(w[0] >> 7 * (i / 2) & 127), low = signs & ONES, high = signs >> 4 & ONES;
            // -m is ~m + 1; no byte of a grid is 0, so none carries.
            l.q[i] = (int)((grid[byte_of(x[i >> 2], i & 3)] ^ low * 255) + low);
            l.q[i + 1] = (int)((grid[byte_of(x[i >> 2], (i & 3) + 1)] ^ high * 255) + high);
        }
        set_scales(l, half_scale(w[0] >> 28, load_half(p), 0.5f));
    }
};

struct IQ3_S : traits::IQ3_S {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq3s_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        uint32_t x[2], signs[1];
        load_words(p + 2 + 8 * part, x);
        load_words(p + 74 + 4 * part, signs);
        const uint32_t h = p[66 + part];
        for (int i = 0; i < 8; i++) {
            const uint32_t less_one = grid[byte_of(x[i >> 2], i & 3) | (h << (8 - i) & 256)];
            l.q[i] = (int)((less_one ^ negative(signs[0], i)) | ONES);  // m - 1 is even, and -m its complement
        }
        const uint32_t s = p[106 + (part >> 1)] >> 4 * (part & 1) & 15;
        set_scales(l, (float)(int)(2 * s + 1) * load_half(p));
    }
};

// ---------------------------------------------------------------- IQ2

// 8 levels by nibbles: magnitudes 8, 25, 43; nibbles plus 4 give their negatives.
#define IQ2_MAGNITUDES 0x002b1908u
#define IQ2_NEGATIVES 0x00d5e7f8u
INLINE uint32_t four_signed(uint32_t nibbles) { return pick_bytes(IQ2_MAGNITUDES, IQ2_NEGATIVES, nibbles); }

// The entry's nibbles are in the order of seven_signs.
INLINE void set_eight(Levels& l, int j, uint32_t entry, uint32_t seven) {
    const uint32_t s = seven_signs(seven) * 4 + entry;
    const uint32_t a = four_signed(s), b = four_signed(s >> 16);
    l.q[2 * j] = (int)pick_bytes(a, b, 0x6420);
    l.q[2 * j + 1] = (int)pick_bytes(a, b, 0x7531);
}

// A scale for each 16 values, in the nibbles of a byte.
INLINE void set_half_scales(Levels& l, uint32_t s, float d) {
    l.d[0] = half_scale(s & 15, d, 0.25f);
    l.d[1] = half_scale(s >> 4, d, 0.25f);
}

struct IQ2_XXS : traits::IQ2_XXS {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq2xxs_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        uint32_t x[2];
        load_words(p + 2 + 8 * part, x);
        for (int j = 0; j < 4; j++) set_eight(l, j, grid[byte_of(x[0], j)], x[1] >> 7 * j & 127);
        set_scales(l, half_scale(x[1] >> 28, load_half(p), 0.25f));
    }
};

struct IQ2_XS : traits::IQ2_XS {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq2xs_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        uint32_t x[2];
        load_words(p + 2 + 8 * part, x);
        for (int j = 0; j < 4; j++) {
            const uint32_t both = x[j >> 1] >> 16 * (j & 1);
            set_eight(l, j, grid[both & 511], both >> 9 & 127);
        }
        set_half_scales(l, p[66 + part], load_half(p));
    }
};

struct IQ2_S : traits::IQ2_S {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq2s_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        uint32_t x[1], signs[1];
        load_words(p + 2 + 4 * part, x);
        load_words(p + 34 + 4 * part, signs);
        const uint32_t h = p[66 + part];
        for (int j = 0; j < 4; j++) {
            const uint32_t entry = grid[byte_of(x[0], j) | (h << (8 - 2 * j) & 768)];
            const uint32_t s = reversed_signs(byte_of(signs[0], j)) | entry, a = four_signed(s >> 1), b = four_signed(s >> 17);
            l.q[2 * j] = (int)pick_bytes(a, b, 0x0246);
            l.q[2 * j + 1] = (int)pick_bytes(a, b, 0x1357);
        }
        set_half_scales(l, p[74 + part], load_half(p));
    }
};

// ---------------------------------------------------------------- IQ1

// 8 levels 8 * (-1, 0, 1), shifted by 1, or by -1 if minus is not 0.
INLINE void set_eight_shifted(int* q, uint32_t entry, uint32_t minus) {
    const uint32_t levels = minus ? 0x0007fff7u : 0x000901f9u;
    q[0] = (int)pick_bytes(levels, 0, entry);
    q[1] = (int)pick_bytes(levels, 0, entry >> 16);
}

// Levels from four bytes of indices and a word of their high bits, a scale and the sign of the shift; returns the scale.
// entry(index) looks up the grid.
template <typename F> INLINE float set_levels_iq1_s(Levels& l, uint32_t low, uint32_t h, F entry) {
    for (int j = 0; j < 4; j++) set_eight_shifted(l.q + 2 * j, entry(byte_of(low, j) | (h >> 3 * j & 7) << 8), h >> 15);
    return (float)(int)(2 * (h >> 12 & 7) + 1);
}

struct IQ1_S : traits::IQ1_S {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq1s_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        uint32_t x[1];
        load_words(p + 2 + 4 * part, x);
        const float s = set_levels_iq1_s(l, x[0], load2(p + 34 + 2 * part), [&](uint32_t i) { return grid[i]; });
        set_scales(l, s * load_half(p) * 0.125f);
    }
};

struct IQ1_S_ROW : traits::IQ1_S_ROW {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq1s_grid<N>; }
    template <typename F> STATIC_INLINE void unpack_by(const uint8_t* p, Levels& l, F entry) {
        uint32_t x[1];
        load_words(p, x);
        set_scales(l, set_levels_iq1_s(l, x[0], load2(p + 4), entry) * 0.125f);
    }
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l, const uint32_t* grid = table()) {
        unpack_by(p, l, [&](uint32_t i) { return grid[i]; });
    }
};

// Levels from four bytes of indices, each with a nibble of h: 3 bits, and the sign of the shift.
template <typename F> INLINE void set_levels_iq1_m(Levels& l, uint32_t low, uint32_t h, F entry) {
    for (int j = 0; j < 4; j++) set_eight_shifted(l.q + 2 * j, entry(byte_of(low, j) | (h >> 4 * j & 7) << 8), h >> 4 * j & 8);
}

struct IQ1_M : traits::IQ1_M {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq1s_grid<N>; }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l, const uint32_t* grid = table()) {
        set_levels_iq1_m(l, load4(p + 4 * part), load2(p + 32 + 2 * part), [&](uint32_t i) { return grid[i]; });
        const uint2 w = *(const uint2*)(p + 48);  // the top digits of its four halves are d
        const uint32_t low = (w.x >> 12 & 0xf) | (w.x >> 24 & 0xf0), high = (w.y >> 4 & 0xf00) | (w.y >> 16 & 0xf000);
        const float d = half_to_float((uint16_t)(low | high));
        const uint32_t s = (part & 4 ? w.y : w.x) >> (16 * (part >> 1 & 1) + 6 * (part & 1));
        l.d[0] = (float)(int)(2 * (s & 7) + 1) * d * 0.125f;
        l.d[1] = (float)(int)(2 * (s >> 3 & 7) + 1) * d * 0.125f;
    }
};

struct IQ1_M_ROW : traits::IQ1_M_ROW {
    template <int N = 0> STATIC_INLINE const uint32_t* table() { return iq1s_grid<N>; }
    template <typename F> STATIC_INLINE void unpack_by(const uint8_t* p, Levels& l, F entry) {
        uint32_t x[1];
        load_words(p, x);
        set_levels_iq1_m(l, x[0], p[4] | (uint32_t)p[5] << 8, entry);
        const uint32_t s = p[6];
        l.d[0] = (float)(int)(s & 15) * 0.125f;
        l.d[1] = (float)(int)(s >> 4) * 0.125f;
    }
    STATIC_INLINE void unpack(const uint8_t* p, int, Levels& l, const uint32_t* grid = table()) {
        unpack_by(p, l, [&](uint32_t i) { return grid[i]; });
    }
};
