// Forms (dot_forms.cuh) of ik_llama.cpp's types. The bottleneck is permutations that look up levels, so
//
//     tables   levels of 5 and 6 bits, shifted or not, and pairs of levels, are in shared memory: at most 32 words, each in
//              a bank of its own, so that lanes never conflict. The shift is one more bit of the index
//     offset   other shifted levels are not stored: sum of (q + by) x = sum of q x + by * (sum of x)
//     order    x is permuted to the order in which levels are looked up, where permuted values share a scale
//     bytes    a level of a trellis type is a sum of four bytes, less 126: these are multiplied by four copies of a value
//              of x, so that levels need neither be summed nor packed
#pragma once
#include "core/mma.cuh"
#include "unpack/dot_forms.cuh"

template <typename Codebook> INLINE uint32_t word_of(int i) {
    return i < 2 ? i ? Codebook::B : Codebook::A : i < 3 ? Codebook::C : Codebook::D;
}

// Levels of a codebook of 32, then the same plus two; and of 64, then plus one.
struct Table5 {
    static const int N = 1, WORDS = 16;
    STATIC_INLINE uint32_t word(int i) {
        const uint32_t four = (i & 4) ? word_of<kvalues_iq5nl<1>>(i & 3) : word_of<kvalues_iq5nl<0>>(i & 3);
        return i < 8 ? four : (uint32_t)raised((int)four, 2);
    }
};

struct Table6 {
    static const int N = 1, WORDS = 32;
    STATIC_INLINE uint32_t word(int i) {
        const uint32_t low = (i & 4) ? word_of<kvalues_iq6nl<1>>(i & 3) : word_of<kvalues_iq6nl<0>>(i & 3);
        const uint32_t high = (i & 4) ? word_of<kvalues_iq6nl<3>>(i & 3) : word_of<kvalues_iq6nl<2>>(i & 3);
        const uint32_t four = (i & 8) ? high : low;
        return i < 16 ? four : (uint32_t)raised((int)four, 1);
    }
};

// Scales of trellis types.
struct Table4 {
    static const int N = 1, WORDS = 4;
    STATIC_INLINE uint32_t word(int i) { return word_of<kvalues_iq4nl>(i); }
};

// Two levels of IQ2_KL for each index.
struct TableOfPairs {
    static const int N = 1, WORDS = 16;
    STATIC_INLINE uint32_t word(int i) {
        const int four = i >> 1;
        const uint32_t pairs = (four & 4) ? word_of<iq2kl_pairs<1>>(four & 3) : word_of<iq2kl_pairs<0>>(four & 3);
        return pick_bytes(kvalues_iq3nl::A, kvalues_iq3nl::B, pairs >> 16 * (i & 1));
    }
};

template <> struct Copies<IQ5_K> : Table5 {};
template <> struct Copies<IQ5_KS> : Table5 {};
template <> struct Copies<IQ6_K> : Table6 {};
template <> struct Copies<IQ2_KL> : TableOfPairs {};
template <> struct Copies<IQ1_KT> : Table4 {};
template <> struct Copies<IQ2_KT> : Table4 {};

// Two bytes of a table aligned to 256 bytes, by byte j of x: the permutation that selects it computes the address.
INLINE uint32_t pair_at(const Lookup& table, uint32_t x, int j) {
#ifdef QUANTKIT_HOST
    return load2(table.first + picked(x, j));
#else
    uint16_t v;
    asm("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(pick_bytes(x, table.mine, 0x7650 + (uint32_t)j)));
    return v;
#endif
}

// The levels of four indices, bytes of x; those of two indices, bytes j and j + 1 of x, doubled, of pairs.
INLINE int four_levels(const Lookup& table, uint32_t x) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) v[j] = table.first[picked(x, j)];
    return (int)pick_bytes(pick_bytes(v[0], v[1], 0x0040), pick_bytes(v[2], v[3], 0x0040), 0x5410);
}

INLINE int two_pairs(const Lookup& table, uint32_t x, int j) {
    return (int)pick_bytes(pair_at(table, x, j), pair_at(table, x, j + 1), 0x5410);
}

// ---------------------------------------------------------------- a scale for 16 values

// Levels with integer scales.
struct ScaledHalves {
    int q[8], s[2];
    float d;
};

template <typename T, bool SEVERAL> struct FormOfHalves : InOrder<1> {
    typedef ScaledHalves Weights;
    template <typename F> STATIC_INLINE void unpack_by(const Place& p, int part, Weights& w, F levels) {
        const uint8_t* block = p.plus(0);
        const uint32_t shifts = shifts_of(block, part);
#pragma unroll
        for (int i = 0; i < 8; i++) w.q[i] = levels(i, i < 4 ? shifts & 1 : shifts >> 1 & 1);
        T::scales(block, part, w.s);
        w.d = load_half(block);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        const int first = add_dots<4>(w.q, x.q, 0), second = add_dots<4>(w.q + 4, x.q + 4, 0);
        return w.d * (float)(first * w.s[0] + second * w.s[1]);
    }
};

template <bool SEVERAL> struct Form<IQ5_K, SEVERAL> : FormOfHalves<IQ5_K, SEVERAL> {
    STATIC_INLINE void unpack(const Place& p, int part, ScaledHalves& w, const Lookup& table) {
        uint32_t x[8], h[8];
        load_words_by16(p.plus(16 + 32 * (part >> 1)), x);
        load_words_by16(p.plus(144), h);
        FormOfHalves<IQ5_K, SEVERAL>::unpack_by(p, part, w, [&](int i, uint32_t shift) {
            const uint32_t low = (x[i] >> 4 * (part & 1) & 0x0f0f0f0fu) | shift * 0x20202020u;
            return four_levels(table, (rotate(h[i], 4 - part) & 0x10101010u) | low);
        });
    }
};

template <bool SEVERAL> struct Form<IQ6_K, SEVERAL> : FormOfHalves<IQ6_K, SEVERAL> {
    STATIC_INLINE void unpack(const Place& p, int part, ScaledHalves& w, const Lookup& table) {
        uint32_t x[8], h[8];
        load_words_by4(p.plus(20 + 32 * (part >> 1)), x);
        load_words_by4(p.plus(148 + 32 * (part >> 2)), h);
        FormOfHalves<IQ6_K, SEVERAL>::unpack_by(p, part, w, [&](int i, uint32_t shift) {
            const uint32_t low = (x[i] >> 4 * (part & 1) & 0x0f0f0f0fu) | shift * 0x40404040u;
            return four_levels(table, (rotate(h[i], 4 - 2 * (part & 3)) & 0x30303030u) | low);
        });
    }
};

template <> struct Form<IQ4_K, false> : InOrder<1> {
    struct Weights : ScaledHalves {
        int by[2];
    };
    STATIC_INLINE void prepare(Activations& x) { x.more[0] = sum_of<4>(x.q), x.more[1] = sum_of<4>(x.q + 4); }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        const uint8_t* block = p.plus(0);
        uint32_t x[4];
        load_words_by16(block + 16 + 16 * part, x);
#pragma unroll
        for (int i = 0; i < 4; i++) look_up<kvalues_iq4nl>(x[i], w.q[i], w.q[i + 4]);
        const uint32_t shifts = shifts_of(block, part);
        w.by[0] = (int)(shifts & 1) * 4, w.by[1] = (int)(shifts & 2) * 2;
        IQ4_K::scales(block, part, w.s);
        w.d = load_half(block);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        const int first = add_dots<4>(w.q, x.q, w.by[0] * x.more[0]), second = add_dots<4>(w.q + 4, x.q + 4, w.by[1] * x.more[1]);
        return w.d * (float)(first * w.s[0] + second * w.s[1]);
    }
};

// Few columns of levels of 2 and 3 bits: of two words alternately, in the order of the lookup permutations. both:
// indices of two words, the second one's in the upper halves of bytes.
template <typename Codebook> INLINE void look_up_by_turns(const uint32_t (&both)[4], Codebook first, Codebook last, int (&q)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const Codebook& c = i < 2 ? first : last;
        q[2 * i] = (int)pick_bytes(c.a, c.b, both[i]);
        q[2 * i + 1] = (int)pick_bytes(c.a, c.b, both[i] >> 16);
    }
}

struct TwoByTurns : InOrder<1> {
    STATIC_INLINE void prepare(Activations& x) {
#pragma unroll
        for (int i = 0; i < 8; i += 2) permute(x.q[i], x.q[i + 1], 0x5140, 0x7362);
    }
};

// Indices of 2 bits; and of 3, with third bits 64 bytes behind.
INLINE void indices_of_2_bits(const uint8_t* qs, int part, uint32_t (&both)[4]) {
    uint32_t x[8];
    load_words_from_bit(qs + 32 * (part >> 2), 2 * (part & 3), x);
#pragma unroll
    for (int i = 0; i < 4; i++) both[i] = (x[2 * i] & 0x03030303u) | (x[2 * i + 1] << 4 & 0x30303030u);
}

INLINE void indices_of_3_bits(const uint8_t* qs, int part, uint32_t (&both)[4]) {
    uint32_t h[8];
    indices_of_2_bits(qs, part, both);
    load_words_from_bit(qs + 64, part - 2, h);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        both[i] |= h[2 * i] & 0x04040404u;
        both[i] |= h[2 * i + 1] << 4 & 0x40404040u;
    }
}

template <typename T> struct TwoAlternatingHalves : TwoByTurns {
    typedef ScaledHalves Weights;
    template <typename Codebook> STATIC_INLINE void set(const uint8_t* block, int part, const uint32_t (&both)[4], Weights& w) {
        const uint32_t shifts = shifts_of(block, part);
        look_up_by_turns(both, Codebook(shifts & 1), Codebook(shifts & 2), w.q);
        T::scales(block, part, w.s);
        w.d = load_half(block);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        const int first = add_dots<4>(w.q, x.q, 0), second = add_dots<4>(w.q + 4, x.q + 4, 0);
        return w.d * (float)(first * w.s[0] + second * w.s[1]);
    }
};

template <> struct Form<IQ2_K, false> : TwoAlternatingHalves<IQ2_K> {
    STATIC_INLINE void unpack(const Place& p, int part, ScaledHalves& w, const Lookup&) {
        uint32_t both[4];
        indices_of_2_bits(p.plus(12), part, both);
        set<Raised8<kvalues_iq2nl, 5>>(p.plus(0), part, both, w);
    }
};

template <> struct Form<IQ3_K, false> : TwoAlternatingHalves<IQ3_K> {
    STATIC_INLINE void unpack(const Place& p, int part, ScaledHalves& w, const Lookup&) {
        uint32_t both[4];
        indices_of_3_bits(p.plus(14), part, both);
        set<Raised8<kvalues_iq3nl, 4>>(p.plus(0), part, both, w);
    }
};

// ---------------------------------------------------------------- a scale for 32 values, and one for the row

struct ScaledPart {
    int q[8];
    float d;
};

template <> struct Form<IQ2_KS, false> : TwoByTurns {
    typedef ScaledPart Weights;
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        const uint32_t extra = (uint32_t)load2(p.plus(0)) >> part, s = *p.plus(2 + (part >> 1)) >> 4 * (part & 1) & 15;
        const Raised8<kvalues_iq2nl, 5> codebook(extra & 1);
        uint32_t both[4];
        indices_of_2_bits(p.plus(6), part, both);
        look_up_by_turns(both, codebook, codebook, w.q);
        w.d = (float)((int)(s | (extra >> 4 & 16)) - 16);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return w.d * (float)add_dots<8>(w.q, x.q, 0); }
};

template <> struct Form<IQ3_KS, false> : TwoByTurns {
    typedef ScaledPart Weights;
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        const uint32_t extra = (uint32_t)load2(p.plus(0)) >> part, s = *p.plus(2 + (part & 3)) >> (part & 4) & 15;
        const Raised8<kvalues_iq3nl, 4> codebook(extra & 256);
        uint32_t both[4];
        indices_of_3_bits(p.plus(6), part, both);
        look_up_by_turns(both, codebook, codebook, w.q);
        w.d = (float)((int)(s | (extra << 4 & 16)) - 16);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return w.d * (float)add_dots<8>(w.q, x.q, 0); }
};

template <bool SEVERAL> struct Form<IQ5_KS, SEVERAL> : InOrder<1> {
    typedef ScaledPart Weights;
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& table) {
        uint32_t x[8], h[8];
        load_words_by4(p.plus(8 + 32 * (part >> 1)), x);
        load_words_by4(p.plus(136), h);
        const uint32_t s = *p.plus(part), raise = (s & 1) * 0x20202020u;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint32_t low = (x[i] >> 4 * (part & 1) & 0x0f0f0f0fu) | raise;
            w.q[i] = four_levels(table, (rotate(h[i], 4 - part) & 0x10101010u) | low);
        }
        w.d = (float)((int)(s & 254) - 127);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return w.d * (float)add_dots<8>(w.q, x.q, 0); }
};

// 64 values: the low, and the high, nibbles of 16 bytes.
template <bool SEVERAL> struct Form<IQ2_KL, SEVERAL> : InOrder<2> {
    struct Weights {
        int q[16], s[2];
    };
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& table) {
        uint32_t x[5], h[5];
        const uint32_t from = p.words_around<4>(6 + 16 * part, x), fifth = p.words_around<4>(70, h) + 2 * (uint32_t)part;
        const uint32_t scales = load2(p.plus(0)) >> 4 * part, low = load2(p.plus(2 + 2 * (part & 1))) >> 2 * (part & 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint32_t four = __funnelshift_r(x[i], x[i + 1], from), bits = __funnelshift_r(h[i], h[i + 1], fifth);
                const uint32_t index = ((half ? four >> 3 : four << 1) & 0x1e1e1e1eu) | (bits << (5 - half) & 0x20202020u);
                w.q[8 * half + 2 * i] = two_pairs(table, index, 0);
                w.q[8 * half + 2 * i + 1] = two_pairs(table, index, 2);
            }
            w.s[half] = (int)((low >> 8 * half & 15) | (scales >> 2 * half & 3) << 4) - 32;
        }
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        return (float)(w.s[0] * add_dots<8>(w.q, x.q, 0) + w.s[1] * add_dots<8>(w.q + 8, x.q + 8, 0));
    }
};

// Few columns of IQ4_KS and IQ4_KSS: words of four levels of the first 16 and four of the last, alternately.
template <typename T> struct Alternating : InOrder<1> {
    struct Weights : ScaledPart {
        int by;
    };
    STATIC_INLINE void prepare(Activations& x) {
        x.more[0] = sum_of<8>(x.q);
#pragma unroll
        for (int i = 0; i < 4; i++) permute(x.q[i], x.q[i + 4], 0x5140, 0x7362);
    }
    STATIC_INLINE void set(const uint32_t (&x)[4], uint32_t s, Weights& w) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t three = x[i] & 0x77777777u, fourth = 0x32103210u | (x[i] >> 1 & 0x44444444u);
            w.q[i] = (int)look_up_four<kvalues_iq4nl>(three, fourth);
            w.q[i + 4] = (int)look_up_four<kvalues_iq4nl>(three >> 16, fourth >> 16);
        }
        w.by = (int)(s & 1) * 4;
        w.d = (float)((int)(s & 254) - 127);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        return w.d * (float)add_dots<8>(w.q, x.q, w.by * x.more[0]);
    }
};

template <> struct Form<IQ4_KS, false> : Alternating<IQ4_KS> {
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        uint32_t x[4];
        load_words_by4(p.plus(8 + 16 * part), x);
        set(x, *p.plus(part), w);
    }
};

template <> struct Form<IQ4_KSS, false> : Alternating<IQ4_KSS> {
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        uint32_t x[4];
        load_words_by4(p.plus(16 * part), x);
        const uint32_t s = IQ4_KSS::take_scale(x);
        set(x, s, w);
    }
};

// ---------------------------------------------------------------- trellis types

// Few columns: N values of each seed, in the order of generation.
template <int N> struct Generated : InOrder<1> {
    struct Weights {
        uint32_t seed[32 / N], more = 4096;  // to be added to all seeds
        float d;
    };
    STATIC_INLINE void prepare(Activations& x) {
        x.more[0] = -126 * sum_of<8>(x.q);
#pragma unroll
        for (int i = 0; i < 32; i++) x.fourfold[i] = (int)pick_bytes((uint32_t)x.q[i / 4], 0, 0x1111 * (uint32_t)(i % 4));
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sum = x.more[0];
        const uint32_t more = fixed(w.more * 0xcbac1fedu);
#pragma unroll
        for (int j = 0; j < 32 / N; j++) {
            uint32_t v = w.seed[j] * 0xcbac1fedu + more;
#pragma unroll
            for (int i = 0; i < N; i++, v *= 0xcbac1fedu) sum = __dp4a((int)(v & 0x3f3f3f3fu), x.fourfold[N * j + i], sum);
        }
        return w.d * (float)sum;
    }
};

template <> struct Form<IQ1_KT, false> : Generated<8> {
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& table) {
        IQ1_KT::seeds(p.plus(0), part, w.seed);
        w.d = (float)(int8_t)table.first[*p.plus(part) & 15];
    }
};

template <> struct Form<IQ2_KT, false> : Generated<8> {
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& table) {
        const uint8_t *block = p.plus(0), *seeds = block + 4 + 8 * part;
#pragma unroll
        for (int j = 0; j < 4; j++) w.seed[j] = load2(seeds + 2 * j);
        w.d = (float)(int8_t)table.first[nibble_of(block, part)];
    }
};

template <> struct Form<IQ4_KT, false> : Generated<4> {
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        const uint32_t head = load4(p.plus(4 * part));
        IQ4_KT::seeds(p.plus(0), part, head, w.seed);
        w.more = 4096 + (head & 1) * 32768;
        w.d = (float)((int)(head >> 1 & 127) - 64);
    }
};

// Signs of these levels are stored separately, so levels must be summed: -l is ~l + 1, and the mask of levels to be
// negated supplies that one, as bytes of -1.
template <> struct Form<IQ3_KT, false> : InOrder<1> {
    struct Weights {
        int q[8], negated[8];
        float d;
    };
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        const uint8_t *block = p.plus(0), *seeds = block + 4 + 8 * part;
        const uint32_t to_top = 128u >> part, more = fixed(4096 * 0xcbac1fedu);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t v = load2(seeds + 2 * j) * 0xcbac1fedu + more;
#pragma unroll
            for (int i = 2 * j; i < 2 * j + 2; i++) {
                uint32_t level[4];
#pragma unroll
                for (int k = 0; k < 4; k++, v *= 0xcbac1fedu) level[k] = (uint32_t)__dp4a((int)(v & 0x3f3f3f3fu), (int)ONES, -126);
                const uint32_t q =
                    pick_bytes(pick_bytes(level[0], level[1], 0x0040), pick_bytes(level[2], level[3], 0x0040), 0x5410);
                const uint32_t mask = sign_masks(load4(block + 68 + 4 * i) * to_top ^ q);
                w.q[i] = (int)(q ^ mask);
                w.negated[i] = (int)mask;
            }
        }
        w.d = (float)(int)nibble_of(block, part);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        return w.d * (float)(add_dots<8>(w.q, x.q, 0) - add_dots<8>(w.negated, x.q, 0));
    }
};
