// Superblocks of non-linear levels of ik_llama.cpp, IQ2_K to IQ6_K, and types with a row scale; the twin of
// quantkit/kernels/cpu/unpack/ik_quants.py.
//
//     IQ2_K    d f16 | extra u16 | scales 8 | qs 64                      d * (s - 8) * (codebook[q] + 5 * shift)
//     IQ3_K    d f16 | extra u16 | signs u16 | scales 8 | qs 64 | qh 32  +-d * (2 s + 1) * (codebook[q] + 4 * shift)
//     IQ4_K    d f16 | extra u16 | scales 12 | qs 128                    d * (s - 32) * (codebook[q] + 4 * shift)
//     IQ5_K    d f16 | extra u16 | scales 12 | qs 128 | qh 32            d * (s - 32) * (codebook[q] + 2 * shift)
//     IQ6_K    d f16 | extra u16 | scales 16 int8 | qs 128 | qh 64       d * s * (codebook[q] + shift)
//     IQ2_KS   extra u16 | scales 4 | qs 64                              (s - 16) * (codebook[q] + 5 * shift)
//     IQ3_KS   extra u16 | scales 4 | qs 64 | qh 32                      (s - 16) * (codebook[q] + 4 * shift)
//     IQ4_KS   scales 8 | qs 128                                         ((s & 254) - 127) * (codebook[q] + 4 * (s & 1))
//     IQ5_KS   scales 8 | qs 128 | qh 32                                 ((s & 254) - 127) * (codebook[q] + 2 * (s & 1))
//     IQ4_KSS  64 u16                                                    as IQ4_KS
//     IQ2_KL   scales_h u16 | scales_l 4 | qs 64 | qh 16                 (s - 32) * grid[q], two values for a q
//
// K: a scale and a shift for each 16 values, the others: for 32.
#pragma once
#include "unpack/levels.cuh"
#include "unpack/tables.cuh"

// Adds `by` to four levels below 128 - by.
INLINE int raised(int four, uint32_t by) { return (int)((((uint32_t)four ^ SIGNS) + by * ONES) ^ SIGNS); }

// Shifts the first, and the last, 16 levels where bit 0, and bit 1, of `shifts` is set.
INLINE void raise(Levels& l, uint32_t shifts, uint32_t by) {
    const uint32_t first = (shifts & 1) * by, last = (shifts >> 1 & 1) * by;
    for (int i = 0; i < 8; i++) l.q[i] = raised(l.q[i], i < 4 ? first : last);
}

// A codebook of up to 8 levels that may be shifted before the lookup: for the first, or the last, 16 values.
template <typename Codebook, uint32_t BY> struct Raised8 {
    uint32_t a, b;
    __device__ __forceinline__ explicit Raised8(uint32_t is_raised)
        : a(is_raised ? (uint32_t)raised((int)Codebook::A, BY) : Codebook::A),
          b(is_raised ? (uint32_t)raised((int)Codebook::B, BY) : Codebook::B) {}
};

// 32 levels of 2-bit indices, the lowest bits of bytes; codebooks: of the first, and of the last, 16 values.
template <typename Codebook> INLINE void look_up_2_bits(const uint32_t (&x)[8], Codebook first, Codebook last, Levels& l) {
    for (int i = 0; i < 8; i += 2) {
        const Codebook& c = i < 4 ? first : last;
        look_up_8(c.a, c.b, (x[i] & 0x03030303u) | (x[i + 1] & 0x03030303u) << 4, l.q[i], l.q[i + 1]);
    }
}

// 32 levels of 3-bit indices: fields of 2 bits at qs, third bits 64 bytes behind.
template <typename Codebook> INLINE void look_up_3_bits(const uint8_t* qs, int part, Codebook first, Codebook last, Levels& l) {
    uint32_t x[8], h[8];
    load_words_from_bit(qs + 32 * (part >> 2), 2 * (part & 3), x);
    load_words_from_bit(qs + 64, part - 2, h);
    for (int i = 0; i < 8; i++) x[i] = (x[i] & 0x03030303u) | (h[i] & 0x04040404u);
    for (int i = 0; i < 8; i += 2) {
        const Codebook& c = i < 4 ? first : last;
        look_up_8(c.a, c.b, x[i] | x[i + 1] << 4, l.q[i], l.q[i + 1]);
    }
}

// 32 levels of 4-bit indices.
INLINE void look_up_4_bits(const uint32_t (&x)[4], Levels& l) {
    for (int i = 0; i < 4; i++) look_up<kvalues_iq4nl>(x[i], l.q[i], l.q[i + 4]);
}

// The low, or the high, nibbles of two words as the low and the high nibbles of one.
INLINE uint32_t nibbles_of_two(uint32_t x, uint32_t y, int high) {
    return (x >> 4 * high & 0x0f0f0f0fu) | (y >> 4 * high & 0x0f0f0f0fu) << 4;
}

// Bit 2 of the bytes of two words, rotated before, as bit 2 of the low and of the high nibbles of one.
INLINE uint32_t bits_of_two(uint32_t x, uint32_t y, int left) {
    return (rotate(x, left) & 0x04040404u) | (rotate(y, left) & 0x04040404u) << 4;
}

// 32 levels of 5-bit indices: nibbles of x, fifth bits of h.
INLINE void look_up_5_bits(const uint32_t (&x)[8], const uint32_t (&h)[8], int part, Levels& l) {
    for (int i = 0; i < 8; i += 2) {
        const uint32_t low = nibbles_of_two(x[i], x[i + 1], part & 1), fifth = bits_of_two(h[i], h[i + 1], 2 - part);
        look_up_32<kvalues_iq5nl>(low, fifth, l.q[i], l.q[i + 1]);
    }
}

// ---- a scale for 16 values; `scales`: without d

// The shifts of a part: two bits of extra.
INLINE uint32_t shifts_of(const uint8_t* p, int part) { return (uint32_t)load2(p + 2) >> 2 * part; }

template <typename T> INLINE void scale_halves(const uint8_t* p, int part, Levels& l) {
    int s[2];
    T::scales(p, part, s);
    const float d = load_half(p);
    for (int i = 0; i < 2; i++) l.d[i] = d * (float)s[i];
}

struct IQ2_K : traits::IQ2_K {
    STATIC_INLINE void scales(const uint8_t* p, int part, int (&s)[2]) {
        s[0] = (p[4 + part] & 15) - 8;
        s[1] = (p[4 + part] >> 4) - 8;
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        typedef Raised8<kvalues_iq2nl, 5> Codebook;
        const uint32_t shifts = shifts_of(p, part);
        uint32_t x[8];
        load_words_by4(p + 12 + 32 * (part >> 2), x);
        for (int i = 0; i < 8; i++) x[i] >>= 2 * (part & 3);
        look_up_2_bits(x, Codebook(shifts & 1), Codebook(shifts & 2), l);
        scale_halves<IQ2_K>(p, part, l);
    }
};

struct IQ3_K : traits::IQ3_K {
    STATIC_INLINE void scales(const uint8_t* p, int part, int (&s)[2]) {
        const int both = p[6 + part], signs = load2(p + 4) >> 2 * part;
        s[0] = (2 * (both & 15) + 1) * (1 - 2 * (signs & 1));
        s[1] = (2 * (both >> 4) + 1) * (1 - (signs & 2));
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        typedef Raised8<kvalues_iq3nl, 4> Codebook;
        const uint32_t shifts = shifts_of(p, part);
        look_up_3_bits(p + 14, part, Codebook(shifts & 1), Codebook(shifts & 2), l);
        scale_halves<IQ3_K>(p, part, l);
    }
};

// Scales of IQ4_K and IQ5_K: 2 high bits of each, then 4 low bits.
INLINE void scales_of_6_bits(const uint8_t* p, int part, int (&s)[2]) {
    const int low = p[8 + part], high = load4(p + 4) >> 4 * part & 15;
    s[0] = ((low & 15) | (high << 4 & 48)) - 32;
    s[1] = (low >> 4 | (high << 2 & 48)) - 32;
}

struct IQ4_K : traits::IQ4_K {
    STATIC_INLINE void scales(const uint8_t* p, int part, int (&s)[2]) { scales_of_6_bits(p, part, s); }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[4];
        load_words_by16(p + 16 + 16 * part, x);
        look_up_4_bits(x, l);
        raise(l, shifts_of(p, part), 4);
        scale_halves<IQ4_K>(p, part, l);
    }
};

struct IQ5_K : traits::IQ5_K {
    STATIC_INLINE void scales(const uint8_t* p, int part, int (&s)[2]) { scales_of_6_bits(p, part, s); }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8], h[8];
        load_words_by16(p + 16 + 32 * (part >> 1), x);
        load_words_by16(p + 144, h);
        look_up_5_bits(x, h, part, l);
        raise(l, shifts_of(p, part), 2);
        scale_halves<IQ5_K>(p, part, l);
    }
};

struct IQ6_K : traits::IQ6_K {
    STATIC_INLINE void scales(const uint8_t* p, int part, int (&s)[2]) {
        const uint32_t both = load2(p + 4 + 2 * part);
        s[0] = (int8_t)both;
        s[1] = (int8_t)(both >> 8);
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8], h[8];
        load_words_by4(p + 20 + 32 * (part >> 1), x);
        load_words_by4(p + 148 + 32 * (part >> 2), h);
        const int left = 2 - 2 * (part & 3);
        for (int i = 0; i < 8; i += 2) {
            const uint32_t low = nibbles_of_two(x[i], x[i + 1], part & 1);
            const uint32_t fifth = bits_of_two(h[i], h[i + 1], left), sixth = bits_of_two(h[i], h[i + 1], left - 1);
            look_up_64<kvalues_iq6nl>(low, fifth, sixth, l.q[i], l.q[i + 1]);
        }
        raise(l, shifts_of(p, part), 1);
        scale_halves<IQ6_K>(p, part, l);
    }
};

// ---- a scale for 32 values, and one for the row

struct IQ2_KS : traits::IQ2_KS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint32_t extra = (uint32_t)load2(p) >> part, s = (p[2 + (part >> 1)] >> 4 * (part & 1) & 15) | (extra >> 4 & 16);
        const Raised8<kvalues_iq2nl, 5> codebook(extra & 1);
        uint32_t x[8];
        load_words_from_bit(p + 6 + 32 * (part >> 2), 2 * (part & 3), x);
        look_up_2_bits(x, codebook, codebook, l);
        set_scales(l, (float)((int)s - 16));
    }
};

struct IQ3_KS : traits::IQ3_KS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        const uint32_t extra = (uint32_t)load2(p) >> part, s = (p[2 + (part & 3)] >> (part & 4) & 15) | (extra << 4 & 16);
        const Raised8<kvalues_iq3nl, 4> codebook(extra & 256);
        look_up_3_bits(p + 6, part, codebook, codebook, l);
        set_scales(l, (float)((int)s - 16));
    }
};

// A byte s of IQ4_KS, IQ5_KS and IQ4_KSS: the scale, and whether levels are shifted.
INLINE void scale_and_raise(uint32_t s, uint32_t by, Levels& l) {
    raise(l, (s & 1) * 3, by);
    set_scales(l, (float)((int)(s & 254) - 127));
}

struct IQ4_KS : traits::IQ4_KS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[4];
        load_words_by4(p + 8 + 16 * part, x);
        look_up_4_bits(x, l);
        scale_and_raise(p[part], 4, l);
    }
};

struct IQ5_KS : traits::IQ5_KS {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[8], h[8];
        load_words_by4(p + 8 + 32 * (part >> 1), x);
        load_words_by4(p + 136, h);
        look_up_5_bits(x, h, part, l);
        scale_and_raise(p[part], 2, l);
    }
};

// s is the lowest bits of 8 u16, x their others, of which x ^ x >> 1 holds four indices.
struct IQ4_KSS : traits::IQ4_KSS {
    // Masks the scale out of words, which leaves indices.
    STATIC_INLINE uint32_t take_scale(uint32_t (&x)[4]) {
        uint32_t s = 0;
        for (int i = 0; i < 4; i++) {
            s |= ((x[i] & 1) | (x[i] >> 15 & 2)) << 2 * i;
            x[i] &= 0xfffefffeu;
            x[i] ^= x[i] >> 1;
        }
        return s;
    }
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[4];
        load_words_by4(p + 16 * part, x);
        const uint32_t s = take_scale(x);
        look_up_4_bits(x, l);
        scale_and_raise(s, 4, l);
    }
};

// 4-bit fields as in IQ4_KS, each with a fifth bit, stand for two levels of IQ3_K: their indices are nibbles of a byte.
struct IQ2_KL : traits::IQ2_KL {
    STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l) {
        uint32_t x[4], h[4];
        load_words(p + 6 + 16 * (part >> 1), x);
        load_words_from_bit(p + 70, part - 2, h);
        for (int i = 0; i < 4; i += 2) {
            const uint32_t fifth = (h[i] & 0x04040404u) | (h[i + 1] & 0x04040404u) << 4;
            int pairs[2];
            look_up_32<iq2kl_pairs>(nibbles_of_two(x[i], x[i + 1], part & 1), fifth, pairs[0], pairs[1]);
            for (int k = 0; k < 4; k++) {
                const uint32_t four = (uint32_t)pairs[k >> 1] >> 16 * (k & 1);
                l.q[2 * i + k] = (int)pick_bytes(kvalues_iq3nl::A, kvalues_iq3nl::B, four);
            }
        }
        const uint32_t low = p[2 + (part & 3)] >> (part & 4) & 15, high = (uint32_t)load2(p) >> 2 * part & 3;
        set_scales(l, (float)((int)(low | high << 4) - 32));
    }
};
