// IQ4_NL and IQ4_XS: 4-bit, unevenly spaced levels. IQ2 and IQ3 are in grid_quants.cuh, IQ1 in grid_ternary.cuh. The twin
// of quantkit/kernels/cpu/encode/i_quants.py, which has the layouts and the search.
//
// Source: llama.cpp b11434 ggml-quants.c, quantize_row_iq4_nl_impl and best_index_int8 with ntry = 7; ik_llama.cpp 8337e4cd3,
// of the same name, for encoders _IK.
#pragma once
#include "encode/grid_rows.cuh"
#include "encode/k_quants.cuh"
#include "unpack/tables.cuh"

// The level nearest to v, the upper one at a tie: the number of midpoints not above v; NaN gives 15.
INLINE int nearest_level(float v) {
    const bool bit3 = !(v < -4.5f), bit2 = !(v < (bit3 ? 45.5f : -57.0f));
    const bool bit1 = !(v < (bit3 ? bit2 ? 79.0f : 19.0f : bit2 ? -28.5f : -93.5f));
    const float upper = bit2 ? bit1 ? 101.0f : 61.0f : bit1 ? 31.5f : 7.0f;
    const float lower = bit2 ? bit1 ? -16.0f : -42.0f : bit1 ? -74.0f : -115.5f;
    return bit3 << 3 | bit2 << 2 | bit1 << 1 | !(v < (bit3 ? upper : lower));
}

INLINE float value_of(int level) {
    typedef kvalues_iq4nl T;
    const uint32_t four = level < 8 ? level < 4 ? T::A : T::B : level < 12 ? T::C : T::D;
    return (float)(int8_t)(four >> 8 * (level & 3));
}

// The sums over w*q*x and w*q*q for q, the values nearest to x * inverse.
INLINE void rate(const Lane& lane, float inverse, float& sumqx, float& sumq2) {
    sumqx = sumq2 = 0;
#pragma unroll 8
    for (int j = 0; j < 32; j++) {
        const float x = lane.x[j], q = value_of(nearest_level(inverse * x)), wq = lane.w[j] * q;
        sumqx = sumqx + wq * x;
        sumq2 = sumq2 + wq * q;
    }
}

// The scale of 32 values; 0 if they count as zero.
INLINE float search_scale(const Lane& lane) {
    float amax = 0, top = 0, sumqx, sumq2;
    for (int j = 0; j < 32; j++)
        if (fabsf(lane.x[j]) > amax) {
            amax = fabsf(lane.x[j]);
            top = lane.x[j];
        }
    if (amax < 1e-15f) return 0;
    rate(lane, 1.0f / (top / 127.0f), sumqx, sumq2);
    float d = sumq2 > 0 ? sumqx / sumq2 : 0, best = d * sumqx;
    for (int itry = -7; itry < 8; itry++) {
        rate(lane, (float)(itry - 127) / top, sumqx, sumq2);
        if (sumq2 > 0 && sumqx * sumqx > best * sumq2) {
            d = sumqx / sumq2;
            best = d * sumqx;
        }
    }
    return d;
}

// State of ik_llama.cpp's search for the best scale so far.
struct RefinedScale {
    float best, inverse, sumqx, sumq2;

    __device__ __forceinline__ void rate_another(const Lane& lane, float by) {
        float qx, q2;
        rate(lane, by, qx, q2);
        if (!(q2 > 0 && qx * qx > best * q2)) return;
        best = qx / q2 * qx;
        inverse = by;
        sumqx = qx;
        sumq2 = q2;
    }
};

// The level whose step to the next one reduces the error first, or -1; by how much its value changes.
INLINE int nearest_move(const Lane& lane, const float* levels, float d, float& step) {
    float due = __int_as_float(0x7f800000);
    int place = -1;
    step = 0;
#pragma unroll 4
    for (int j = 0; j < 32; j++) {
        const int level = (int)levels[j];
        const float q = value_of(level), slope = d * lane.w[j] * (lane.x[j] - d * q);
        const int to = slope > 0 ? level + 1 : level - 1;
        if (to < 0 || to > 15) continue;
        const float by = value_of(to) - q, when = fabsf(by) / fabsf(slope);
        if (!(when < due)) continue;
        due = when;
        place = j;
        step = by;
    }
    return place;
}

// The scale of 32 values by ik_llama.cpp's search: candidates from the minimum and the maximum, then levels move one
// by one.
INLINE float search_scale_refined(const Lane& lane, float* levels) {
    const float top = largest_of<32>(lane.x);
    if (fabsf(top) < 1e-15f) return 0;
    RefinedScale of = {0, 1.0f / (top / 127.0f)};
    rate(lane, of.inverse, of.sumqx, of.sumq2);
    if (of.sumq2 > 0) of.best = of.sumqx / of.sumq2 * of.sumqx;
#pragma unroll 1
    for (int i = 0; i < 30; i++) of.rate_another(lane, (float)(i / 2 - 7 + (i % 2 ? 113 : -127)) / top);
    for (int j = 0; j < 32; j++) levels[j] = (float)nearest_level(of.inverse * lane.x[j]);
    float sumqx = of.sumqx, sumq2 = of.sumq2, d = sumq2 > 0 ? sumqx / sumq2 : 0, best = d * sumqx, step;
#pragma unroll 1
    for (int round = 0; round < 1024; round++) {
        const int place = nearest_move(lane, levels, d, step);
        if (place < 0) break;
        const float w = lane.w[place], q = value_of((int)levels[place]);
        const float new_qx = sumqx + w * lane.x[place] * step, new_q2 = sumq2 + w * (step * (q + q + step));
        if (!(new_q2 > 0 && new_qx * new_qx > best * new_q2)) break;
        sumqx = new_qx;
        sumq2 = new_q2;
        d = new_qx / new_q2;
        best = d * new_qx;
        levels[place] = levels[place] + (step > 0 ? 1.0f : -1.0f);
    }
    return d;
}

// Stores the levels of the lane's values as 16 bytes of nibbles. IK: as in ik_llama.cpp, values beyond int32 become
// level 0.
template <bool IK> INLINE uint32_t nibble_of_value(float v) {
    return !IK || fabsf(v) < 2147483648.0f ? (uint32_t)nearest_level(v) : 0;
}
template <bool IK> INLINE void store_nibbles(const Lane& lane, float inverse, uint8_t* out) {
    for (int j = 0; j < 16; j++)
        out[j] = (uint8_t)(nibble_of_value<IK>(inverse * lane.x[j]) | nibble_of_value<IK>(inverse * lane.x[j + 16]) << 4);
}

// Weights without an importance: squares.
INLINE void weigh_by_squares(const Lane& lane) {
    for (int j = 0; j < 32; j++) lane.w[j] = lane.x[j] * lane.x[j];
}

template <bool IK> struct EncodeNL {
    static const int VALUES = 32, BLOCK = 32, BYTES = 18, SCRATCH = IK ? 33 : 0;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void plain(const Lane& lane) {
        weigh_by_squares(lane);
        finish(lane);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        float squares = 0;
        for (int j = 0; j < 32; j++) squares = squares + lane.x[j] * lane.x[j];
        weigh(lane, 32, squares * 0.0625f);
        finish(lane);
    }

    STATIC_INLINE void finish(const Lane& lane) {
        const float d = IK ? search_scale_refined(lane, lane.scratch) : search_scale(lane);
        store_half(lane.out, d);
        store_nibbles<IK>(lane, inverse_or_zero(d), lane.out + 2);
    }
};

template <bool IK> struct EncodeXS {
    static const int VALUES = 32, BLOCK = 256, BYTES = 136, SCRATCH = IK ? SuperBlock<8>::WITH_LEVELS : SuperBlock<8>::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void plain(const Lane& lane) {
        weigh_by_squares(lane);
        finish(lane);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        weigh(lane, 32, SuperBlock<8>(lane).template shared_squares<SCRATCH>() * 0.0078125f);
        finish(lane);
    }

    STATIC_INLINE void finish(const Lane& lane) {
        const SuperBlock<8> block(lane);
        const int part = lane.part;
        block.fitted(0)[part] = IK ? search_scale_refined(lane, block.levels()) : search_scale(lane);
        __syncwarp();
        // The first scale of the largest magnitude becomes -32.
        const float d = -block.largest_scale() / 32.0f;
        const int code = max(min(nearest_int(block.fitted(0)[part] * inverse_or_zero(d)), 31), -32);
        block.codes(0)[part] = (float)(code + 32);
        __syncwarp();
        store_nibbles<IK>(lane, inverse_or_zero(d * (float)code), lane.out + 8 + 16 * part);
        if (part < 4) lane.out[4 + part] = (uint8_t)((block.code(0, 2 * part) & 15) | (block.code(0, 2 * part + 1) & 15) << 4);
        if (part < 2) {
            uint32_t high = 0;
            for (int k = 0; k < 4; k++) high |= (uint32_t)block.code(0, 4 * part + k) >> 4 << 2 * k;
            lane.out[2 + part] = (uint8_t)high;
        }
        if (part == 0) store_half(lane.out, d);
    }
};

struct EncodeIQ4_NL : EncodeNL<false> {};
struct EncodeIQ4_NL_IK : EncodeNL<true> {};
struct EncodeIQ4_XS : EncodeXS<false> {};
struct EncodeIQ4_XS_IK : EncodeXS<true> {};

// ---------------------------------------------------------------- IQ1, IQ2 and IQ3

struct EncodeIQ1_S : QuantIQ1_S {};
struct EncodeIQ1_M : QuantIQ1_M {};
struct EncodeIQ1_M_IK : RefinedIQ1_M {};
struct EncodeIQ1_S_ROW : GridRowIQ1_S {};
struct EncodeIQ1_M_ROW : GridRowIQ1_M {};
struct EncodeIQ2_XXS : QuantIQ2_XXS {};
struct EncodeIQ2_XS : QuantIQ2_XS {};
struct EncodeIQ2_XS_IK : RefinedIQ2_XS {};
struct EncodeIQ2_S : QuantIQ2_S {};
struct EncodeIQ3_XXS : QuantIQ3_XXS {};
struct EncodeIQ3_S : QuantIQ3_S {};
