// Rows of IQ1_S_R4 and IQ1_M_R4: the grid and searches of IQ1_S and IQ1_M, with scales that are multiples of the
// row's; the twin of quantkit/kernels/cpu/encode/grid_rows.py, which describes the weights.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp quantize_iq1_s_r4, quantize_iq1_m_r4.
#pragma once
#include "encode/grid_refined.cuh"

// Sums of squares, and of w |x|, below this count as 0.
const float NOTHING = 1e-14f;
// The index of the point of zeros.
const int ZEROS = 1029;

template <int N> INLINE float sum_of_squares(const float* x) {
    float total = 0;
    for (int i = 0; i < N; i++) total = total + x[i] * x[i];
    return total;
}

// Weights of a sub-block, for the sum of squares of 32 values; importances are ignored where sum(w |x|) is below the
// limit.
template <int N, bool IMPORTANCE> INLINE void weigh_of_row(const Lane& lane, float squares, float limit) {
    const float sigma = 1.5f * squares / 32.0f;
    float total = 0;
    for (int i = 0; i < N; i++) {
        const float x = lane.x[i], root = __fsqrt_rn(sigma + x * x), w = IMPORTANCE ? lane.w[i] * root : root;
        total = total + w * fabsf(x);
        lane.w[i] = w;
    }
    if (IMPORTANCE && total < limit)
        for (int i = 0; i < N; i++) lane.w[i] = __fsqrt_rn(sigma + lane.x[i] * lane.x[i]);
}

// Sets a sub-block to the point of zeros, with scale 0 and shifted up.
template <class Parts> INLINE void make_zero(const Lane& lane, Shifted& sub) {
    for (int k = 0; k < Parts::GROUPS; k++) Parts::results(lane)[k] = ZEROS;
    sub.scale = 0;
    sub.shifts = 0;
}

// A row begins with d, f16; blocks of 32 values follow, BYTES each: fit computes the bytes of the lane's sub-block,
// store writes them to ``out``, where its block begins; store_scale adds its scale, scale * inverse times d.
struct GridRowIQ1_S {
    typedef TernaryGrid<Whole> Parts;
    static const int VALUES = 32, BLOCK = 32, BYTES = 6, HEADER = 2, SCRATCH = Parts::SCRATCH;

    template <bool IMPORTANCE> STATIC_INLINE Shifted fit(const Lane& lane) {
        const float squares = sum_of_squares<32>(lane.x);
        weigh_of_row<32, IMPORTANCE>(lane, squares, NOTHING);
        Shifted sub = Parts::fit(lane, 1e-12f);
        if (squares < NOTHING) make_zero<Parts>(lane, sub);
        return sub;
    }

    STATIC_INLINE void store(const Lane& lane, int shifts, uint8_t* out) {
        const uint16_t* results = Parts::results(lane);
        uint32_t high = shifts ? 0x8000 : 0;
        for (int k = 0; k < 4; k++) {
            out[k] = (uint8_t)results[k];
            high |= (uint32_t)results[k] >> 8 << 3 * k;
        }
        out[4] = (uint8_t)high;
        out[5] = (uint8_t)(high >> 8);
    }

    STATIC_INLINE void store_scale(const float* scales, float inverse, uint8_t* out) {
        out[5] |= (uint8_t)(max(0, min(7, nearest_int(0.5f * (scales[0] * inverse - 1.0f)))) << 4);
    }
};

struct GridRowIQ1_M {
    typedef TernaryGrid<RefinedHalves> Parts;
    static const int VALUES = 16, BLOCK = 32, BYTES = 7, HEADER = 2, SCRATCH = Parts::SCRATCH;

    template <bool IMPORTANCE> STATIC_INLINE Shifted fit(const Lane& lane) {
        const float own = sum_of_squares<16>(lane.x), squares = own + __shfl_xor_sync(FULL, own, 1);
        // ik_llama.cpp compares the second sum with a double, which is slightly larger.
        weigh_of_row<16, IMPORTANCE>(lane, squares, lane.part & 1 ? __int_as_float(__float_as_int(NOTHING) + 1) : NOTHING);
        Shifted sub = RefinedIQ1_M::fit(lane, 0);
        if (squares < NOTHING || !(own > NOTHING)) make_zero<Parts>(lane, sub);
        return sub;
    }

    STATIC_INLINE void store(const Lane& lane, int shifts, uint8_t* out) {
        const uint16_t* results = Parts::results(lane);
        const int half = lane.part & 1;
        for (int k = 0; k < 2; k++) out[2 * half + k] = (uint8_t)results[k];
        out[4 + half] = (uint8_t)(results[0] >> 8 | results[1] >> 8 << 4 | (shifts & 2) << 2 | (shifts & 1) << 7);
    }

    STATIC_INLINE void store_scale(const float* scales, float inverse, uint8_t* out) {
        const int low = nearest_int(scales[0] * inverse), high = nearest_int(scales[1] * inverse);
        out[6] = (uint8_t)(max(0, min(15, low)) | max(0, min(15, high)) << 4);
    }
};
