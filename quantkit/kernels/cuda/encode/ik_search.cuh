// Shared by the encoders of ik_llama.cpp's types: weights, scale search, packing; the twin of
// quantkit/kernels/cpu/encode/ik_search.py.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp: QHelper, quantize_row_iq4_k_impl_bs16 and the functions like it.
#pragma once
#include "encode/ik_levels.cuh"
#include "encode/k_quants.cuh"

// ---- weights

// All importances of a sub-block become 1e-9 where they, its values or their products are almost 0.
template <int N> INLINE void lift_weights(const Lane& lane) {
    float w2 = 0, x2 = 0, wx = 0;
    for (int j = 0; j < N; j++) {
        const float x = lane.x[j], w = lane.w[j];
        w2 = w2 + w * w;
        x2 = x2 + x * x;
        wx = wx + w * fabsf(x);
    }
    const float least = (float)N * (1e-9f * 1e-9f);
    if (w2 > least && x2 > least && wx > least) return;
    for (int j = 0; j < N; j++) lane.w[j] = 1e-9f;
}

// Weights of N values: importance * sqrt(sigma2 + x^2), or `own` times sigma2, plus x^2.
template <int N, bool IMPORTANCE> INLINE void weigh_ik(const Lane& lane, float sigma2, float own) {
    if (IMPORTANCE) {
        lift_weights<N>(lane);
        weigh(lane, N, sigma2);
    } else {
        const float offset = own * sigma2;
        for (int j = 0; j < N; j++) lane.w[j] = offset + lane.x[j] * lane.x[j];
    }
}

template <int N> INLINE float sum_of(const float* w) {
    float total = 0;
    for (int j = 0; j < N; j++) total = total + w[j];
    return total;
}

// ---- the scale search

struct ScaleFit {
    float best, d;
    int shifted;
};

// Takes d = qx / q2 if its rating is better.
INLINE void keep_better(ScaleFit& result, float qx, float q2, int shifted) {
    if (!(q2 > 0 && qx * qx > result.best * q2)) return;
    const float ratio = qx / q2;
    result = ScaleFit{ratio * qx, ratio, shifted};
}

// sum(w q x) and sum(w q q) for the values q nearest to x * inverse, and the same for -inverse.
struct Rate {
    float qx, q2, minus_qx, minus_q2;

    template <typename L, bool SHIFTED>
    __device__ __forceinline__ void add(const Buckets<L>& t, float x, float w, float inverse, float inverse_per_width) {
        const float v = inverse * x;
        const int at = find_bucket<L>(x, inverse_per_width);
        float q = nearest_of<SHIFTED>(v, t.pairs[SHIFTED][0][at]), wq = w * q;
        qx = qx + wq * x;
        q2 = q2 + wq * q;
        q = mirrored_of<SHIFTED>(v, t.pairs[SHIFTED][1][at]);
        wq = w * q;
        minus_qx = minus_qx + wq * x;
        minus_q2 = minus_q2 + wq * q;
    }
    __device__ __forceinline__ void keep(ScaleFit& result, int shifted) const {
        keep_better(result, qx, q2, shifted);
        keep_better(result, -minus_qx, minus_q2, shifted);
    }
};

// The scale of N values, 0 where all |x| < 1e-16. Tries 2 TRIES + 1 inverses that are STEP apart, plain and shifted
// ones together. GUARDED: a first candidate without weight is ignored.
template <typename L, int N, int TRIES, int STEP, bool GUARDED> INLINE ScaleFit search(const Lane& lane, const Buckets<L>& t) {
    const float top = largest_of<N>(lane.x), low = (float)L::value(0);
    if (fabsf(top) < 1e-16f) return ScaleFit{};
    const float first = top / -low, start = 1.0f / first;
    Rate plain = {};
    for (int j = 0; j < N; j++) plain.add<L, false>(t, lane.x[j], lane.w[j], start, start * per_unit<L>());
    ScaleFit result = {0, plain.qx / plain.q2, false};
    result.best = result.d * plain.qx;
    if (GUARDED && !(plain.q2 > 0)) result = ScaleFit{0, first, false};
    keep_better(result, -plain.minus_qx, plain.minus_q2, false);
    for (int itry = -TRIES; itry <= TRIES; itry++) {
        const float inverse = (STEP * itry + low) / top, inverse_up = (STEP * itry + (low + L::RAISE)) / top;
        const float per_width = inverse * per_unit<L>(), per_width_up = inverse_up * per_unit<L>();
        Rate up = {};
        plain = Rate{};
#pragma unroll 4
        for (int j = 0; j < N; j++) {
            const float x = lane.x[j], w = lane.w[j];
            plain.add<L, false>(t, x, w, inverse, per_width);
            up.add<L, true>(t, x, w, inverse_up, per_width_up);
        }
        plain.keep(result, false);
        up.keep(result, true);
    }
    return result;
}

// ---- levels and terms

// Further memory shared by the lanes of a superblock: its levels, a byte each.
template <int N> struct LevelBlock : SuperBlock<N> {
    static const int LEVELS = SuperBlock<N>::SCRATCH, SCRATCH = LEVELS + 64;

    __device__ __forceinline__ explicit LevelBlock(const Lane& l) : SuperBlock<N>(l) {}
    __device__ __forceinline__ uint8_t* levels() const { return (uint8_t*)(this->lane.scratch + LEVELS); }
    // Nibbles of the codes of two sub-blocks as a byte.
    __device__ __forceinline__ uint8_t nibbles(int i, int j) const {
        return (uint8_t)((this->code(0, i) & 15) | (this->code(0, j) & 15) << 4);
    }
};

// Writes the levels of inverse * x; x and w become the terms of sum(w q x) and sum(w q q), q = factor * value.
template <typename L, int N>
INLINE void round_levels(const Lane& lane, const Buckets<L>& t, float inverse, float factor, int shifted, bool alive,
                         uint8_t* levels) {
    for (int j = 0; j < N; j++) {
        const float x = lane.x[j];
        const Rounded r = round_any<L>(t, inverse * x, shifted);
        const float q = r.value * factor, wq = lane.w[j] * q;
        lane.x[j] = wq * x;
        lane.w[j] = wq * q;
        levels[j] = (uint8_t)(alive ? r.level : 0);
    }
}

// Packs BITS bits, from bit SHIFT, of the 256 levels of a superblock, with its `parts` lanes: byte j of row r of 32
// holds value j of the sub-blocks of 32 from number r * 8 / BITS on, lowest bits first.
template <int BITS, int SHIFT> INLINE void pack_plane(const uint8_t* levels, uint8_t* out, int part, int parts) {
    for (int i = part; i < 32 * BITS; i += parts) {
        uint32_t byte = 0;
        for (int k = 0; k < 8 / BITS; k++)
            byte |= ((uint32_t)levels[32 * (i / 32 * (8 / BITS) + k) + i % 32] >> SHIFT & ((1 << BITS) - 1)) << BITS * k;
        out[i] = (uint8_t)byte;
    }
}

// Levels of BITS bits: with 4, the first 16 of each 32 are low nibbles and the last 16 high ones.
template <int BITS> INLINE void pack(const uint8_t* levels, uint8_t* out, int part, int parts) {
    if (BITS == 2) pack_plane<2, 0>(levels, out, part, parts);
    if (BITS == 3) pack_plane<2, 0>(levels, out, part, parts), pack_plane<1, 2>(levels, out + 64, part, parts);
    for (int i = part; BITS == 4 && i < 128; i += parts)
        out[i] = (uint8_t)(levels[i / 16 * 32 + i % 16] | levels[i / 16 * 32 + i % 16 + 16] << 4);
    if (BITS > 4) pack_plane<4, 0>(levels, out, part, parts);
    if (BITS == 5) pack_plane<1, 4>(levels, out + 128, part, parts);
    if (BITS == 6) pack_plane<2, 4>(levels, out + 128, part, parts);
}
