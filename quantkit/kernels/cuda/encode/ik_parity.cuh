// 4-bit levels in groups of four with an even number of set bits; the twin of
// quantkit/kernels/cpu/encode/ik_parity.py, which describes which level moves and how groups are stored.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq4_kss_impl, prune_iq4ks, scramble_table.
#pragma once
#include "encode/ik_rows.cuh"

// For each level the three levels at most two away whose bits have the other parity, ascending, padded with the last
// one: the values of two of them as bf16; the value of the third, with the levels in its low bits.
struct Moves {
    uint32_t two[16], third[16];
};

CONSTEXPR bool is_odd(int level) { return 0x6996 >> level & 1; }

CONSTEXPR Moves make_moves() {
    Moves t{};
    for (int level = 0; level < 16; level++) {
        int to[3] = {}, count = 0;
        for (int q = level < 2 ? 0 : level - 2; q <= level + 2 && q < 16; q++)
            if (is_odd(q) != is_odd(level)) to[count++] = q;
        for (; count < 3; count++) to[count] = to[count - 1];
        t.two[level] = bf16_of(IQ4::value(to[0])) | bf16_of(IQ4::value(to[1])) << 16;
        t.third[level] = bf16_of(IQ4::value(to[2])) << 16 | to[0] | to[1] << 4 | to[2] << 8;
    }
    return t;
}

static __device__ const Moves MOVES = make_moves();

struct ParityTables {
    const Buckets<IQ4>& buckets;
    const Moves& moves;
    __device__ __forceinline__ ParityTables() : buckets(in_shared(BUCKETS_OF<IQ4>)), moves(in_shared(MOVES)) {}
};

// Four values and weights; their levels and the values of these.
struct Group {
    float x[4], w[4], q[4];
    int level[4];

    // Values 2k, 2k + 16, 2k + 1, 2k + 17.
    static __device__ __forceinline__ int place(int k, int j) { return 2 * k + (j & 1) * 16 + (j >> 1); }
    __device__ __forceinline__ Group(const Lane& lane, int k) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            x[j] = lane.x[place(k, j)];
            w[j] = lane.w[place(k, j)];
        }
    }

    // Rounds x * inverse to the nearest levels, then makes the number of set bits even. ANYWHERE: for x of any size.
    template <bool ANYWHERE> __device__ __forceinline__ void round(const ParityTables& t, float inverse, float d, int shifted) {
        const float up = shifted ? (float)IQ4::RAISE : 0.0f;
        int bits = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float v = inverse * x[j];
            const Rounded r = ANYWHERE ? round_any<IQ4>(t.buckets, v, shifted) : round_near<IQ4>(t.buckets, v, shifted);
            level[j] = r.level;
            q[j] = r.value;
            bits ^= r.level;
        }
        if (!is_odd(bits)) return;
        float least[4], to[4];
        int moved[4];
#pragma unroll
        for (int j = 0; j < 4; j++) best_move(t.moves, j, d, up, least[j], moved[j], to[j]);
        const bool of_1 = least[1] < least[0], of_3 = least[3] < least[2];
        const bool last = (of_3 ? least[3] : least[2]) < (of_1 ? least[1] : least[0]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const bool moves = last == (j >= 2) && (j >= 2 ? of_3 : of_1) == (j & 1);
            level[j] = moves ? moved[j] : level[j];
            q[j] = moves ? to[j] : q[j];
        }
    }

    // The smallest loss of moving a level to one of the other parity, that level, and its value.
    __device__ __forceinline__ void best_move(const Moves& t, int j, float d, float up, float& least, int& moved, float& to) const {
        const float now = d * (q[j] - up) - x[j], square = now * now;
        const uint32_t two = t.two[level[j]], third = t.third[level[j]];
        const float values[3] = {low_of(two) + up, high_of(two) + up, high_of(third) + up};
#pragma unroll
        for (int c = 0; c < 3; c++) {
            const float off = d * values[c] - x[j], loss = w[j] * (off * off - square);
            if (c && !(loss < least)) continue;
            least = loss;
            moved = (int)(third >> 4 * c & 15);
            to = values[c];
        }
    }
};

// Replaces the scale by the one that fits the levels of x * inverse best, if its rating is better; d: the inverse's
// reciprocal, positive.
INLINE void try_even(const Lane& lane, const ParityTables& t, float inverse, float d, int shifted, ScaleFit& result) {
    float qx = 0, q2 = 0;
    for (int k = 0; k < 8; k++) {
        Group g(lane, k);
        g.round<false>(t, inverse, d, shifted);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float wq = g.w[j] * g.q[j];
            qx = qx + wq * g.x[j];
            q2 = q2 + wq * g.q[j];
        }
    }
    keep_better(result, qx, q2, 0);
}

// The g of 15 bits with g ^ 2 g = bits, of which an even number is set.
INLINE uint32_t halved(uint32_t bits) {
    bits ^= bits << 1;
    bits ^= bits << 2;
    bits ^= bits << 4;
    return (bits ^ bits << 8) & 0x7fff;
}

struct EvenLevels : RowTraits, RowScales8 {
    static const int BYTES = 128, SCRATCH = SuperBlock<8>::SCRATCH, HEADER = 4;
    static constexpr float STRETCH = 1.01f;
    typedef ParityTables Tables;

    template <bool IMPORTANCE> STATIC_INLINE void weigh_values(const Lane& lane) { weigh_row_values<EvenLevels, IMPORTANCE>(lane); }
    // Terms are summed group by group.
    STATIC_INLINE int term_at(int i) { return Group::place(i / 4, i % 4); }

    STATIC_INLINE ScaleFit find(const Lane& lane, const Tables& t) {
        const float top = largest_of<32>(lane.x), low = (float)IQ4::value(0);
        if (fabsf(top) < 1e-16f) return ScaleFit{};
        ScaleFit result = {0, top / -low, 0};
        for (int itry = -7; itry <= 7; itry++)
            for (int shifted = 0; shifted < 2; shifted++) {
                const float inverse = (itry + low + (shifted ? (float)IQ4::RAISE : 0.0f)) / top, d = 1.0f / inverse;
                try_even(lane, t, inverse, d, shifted, result);
                try_even(lane, t, -inverse, d, shifted, result);
            }
        return result;
    }

    // The sum of w (x - d q)^2.
    STATIC_INLINE float error(const Lane& lane, const Tables& t, float d, int shifted) {
        const float inverse = 1.0f / d;
        float squares = 0;
        for (int k = 0; k < 8; k++) {
            Group g(lane, k);
            g.round<true>(t, inverse, d, shifted);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float off = g.x[j] - d * g.q[j];
                squares = squares + g.w[j] * off * off;
            }
        }
        return squares;
    }

    STATIC_INLINE void store(const Lane& lane, const Tables& t, const ScaleFit& result, const RowScale& of) {
        const int m = multiple(result.d, of.inverse);
        const float factor = (float)m, d = of.d * factor, inverse = 1.0f / d;
        const float plain = error(lane, t, d, 0);
        const int shifted = error(lane, t, d, 1) < plain, bits = code(m, shifted);
        uint16_t* out = (uint16_t*)(lane.out + 16 * lane.part);
        for (int k = 0; k < 8; k++) {
            Group g(lane, k);
            g.round<true>(t, inverse, d, shifted);
            out[k] = (uint16_t)(halved(g.level[0] | g.level[1] << 4 | g.level[2] << 8 | g.level[3] << 12) << 1 | (bits >> k & 1));
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float q = g.q[j] * factor, wq = g.w[j] * q;
                lane.x[Group::place(k, j)] = wq * g.x[j];
                lane.w[Group::place(k, j)] = wq * q;
            }
        }
    }
};
