// Rows of activations in the formats of products, with the integers, scales and sums of the CPU's
// (quantkit/kernels/cpu/matmul/activations.py); shared by activations.cu and row_epilogue.cu.
//
//     q8_0  per 32 values: d = f16(amax / 127), q = round(x * 127 / amax)
//     q8_1  the same, with s = f16(amax / 127 * sum of q)
//     q8_2  per 32 values: d = bf16(amax / 127), q = round(x / d)
//     q8_k  per 256 values: d = 1 / iscale, q = round(iscale * x), iscale = -127 / max
//     f16   rounded to half precision, kept as f32
//     bf16  rounded to bfloat16, kept as f32
//
// (max: the first value of the largest magnitude, with its sign.) A row of the int8 formats; n_pad is n rounded up to a
// multiple of 256, with zeros after n:
//
//     int8 levels[n_pad] | float d[n_pad / 32] | float sums[n_pad / 16]       Q8_UNIT bytes per 256 values
//
// sums are the factors of minimums, one per 16 values: d * sum of q in q8_k; s and 0 alternating in q8_1; 0 in q8_0 and q8_2.
#pragma once
#include "core/device.cuh"
#include "matmul/units.cuh"

#define Q8_0 0
#define Q8_1 1
#define Q8_2 2
#define Q8_K 3
#define ROUND_F16 4
#define ROUND_BF16 5

#define ONES 0x01010101

// 8 values of a row of n, from value `first` on, zero-padded.
INLINE void load_eight(const float* x, int64_t first, int64_t n, float (&v)[8]) {
    if (first + 8 <= n && ((uint64_t)x & 15) == 0) {
        for (int i = 0; i < 8; i += 4) {
            const float4 four = *(const float4*)(x + first + i);
            v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
        }
    } else {
        for (int i = 0; i < 8; i++) v[i] = first + i < n ? x[first + i] : 0;
    }
}

INLINE float largest_magnitude(const float (&v)[8]) {
    float most = 0;
    for (int i = 0; i < 8; i++) most = fmaxf(most, fabsf(v[i]));
    return most;
}

// The factor of the values, d before rounding, and d as stored.
struct Scale {
    float factor, exact, stored;
};

// For 32 values: 4 lanes with 8 each.
template <int FORM> INLINE Scale scale_of_32(const float (&v)[8]) {
    float amax = largest_magnitude(v);
    amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(FULL, amax, 2));
    const float d = amax / 127.0f;
    if (FORM == Q8_2) {
        const float stored = bf16_to_float(float_to_bf16(d));
        // Below, d is denormal: it may be so much smaller than amax / 127 that levels overflow.
        return {amax > 3.0092655381050560e-36f ? 1.0f / stored : 0.0f, d, stored};  // 2^-118
    }
    // Below, d is 0 in half precision and 127 / amax may overflow.
    return {amax > 7.5231638452626401e-37f ? 127.0f / amax : 0.0f, d, half_to_float(float_to_half(d))};  // 2^-120
}

// For 256 values: a warp with 8 per lane.
INLINE Scale scale_of_256(const float (&v)[8]) {
    const float mine = largest_magnitude(v), most = warp_max(mine);
    float first = 0;
    for (int i = 7; i >= 0; i--)
        if (fabsf(v[i]) == most) first = v[i];
    const int lane = __ffs((int)__ballot_sync(FULL, mine == most)) - 1;
    const float largest = __shfl_sync(FULL, first, lane < 0 ? 0 : lane);
    if (largest == 0) return {0, 0, 0};
    const float iscale = -127.0f / largest, d = 1.0f / iscale;
    // It overflows for values near the smallest floats: levels are 0 then.
    return {fabsf(iscale) < __uint_as_float(0x7f800000u) ? iscale : 0, d, d};
}

INLINE uint32_t four_levels(const float* v, float factor) {
    uint32_t four = 0;
    for (int i = 0; i < 4; i++) four |= ((uint32_t)min(__float2int_rn(v[i] * factor), 127) & 255) << 8 * i;
    return four;
}

// Write unit `unit` of a row of `units`, 256 values each, in an int8 format: a warp, 8 values per lane.
template <int FORM> INLINE void quantize_unit(const float (&v)[8], uint8_t* out, int64_t unit, int64_t units) {
    const int lane = threadIdx.x & 31;
    const Scale scale = FORM == Q8_K ? scale_of_256(v) : scale_of_32<FORM>(v);
    const uint2 levels = make_uint2(four_levels(v, scale.factor), four_levels(v + 4, scale.factor));
    ((uint2*)(out + 256 * unit))[lane] = levels;
    float* d = (float*)(out + 256 * units) + 8 * unit;
    if (lane % 4 == 0) d[lane / 4] = scale.stored;

    int sum = __dp4a((int)levels.x, ONES, __dp4a((int)levels.y, ONES, 0));
    sum += __shfl_xor_sync(FULL, sum, 1);
    float of_minimum = 0;
    if (FORM == Q8_K) of_minimum = (float)sum * scale.stored;
    if (FORM == Q8_1) {
        sum += __shfl_xor_sync(FULL, sum, 2);
        if (lane % 4 == 0) of_minimum = half_to_float(float_to_half((float)sum * scale.exact));
    }
    float* sums = (float*)(out + 288 * units) + 16 * unit;
    if (lane % 2 == 0) sums[lane / 2] = of_minimum;
}

// The same in an int8 format known at run time.
INLINE void quantize_unit_in(int64_t format, const float (&v)[8], uint8_t* out, int64_t unit, int64_t units) {
    switch (format) {
        case Q8_0: quantize_unit<Q8_0>(v, out, unit, units); break;
        case Q8_1: quantize_unit<Q8_1>(v, out, unit, units); break;
        case Q8_2: quantize_unit<Q8_2>(v, out, unit, units); break;
        case Q8_K: quantize_unit<Q8_K>(v, out, unit, units); break;
    }
}

// Convert a unit of a row x of n values, by a warp.
INLINE void quantize_unit_of(int64_t format, const float* x, int64_t n, uint8_t* out, int64_t unit) {
    float v[8];
    load_eight(x, 256 * unit + 8 * (threadIdx.x & 31), n, v);
    quantize_unit_in(format, v, out, unit, (n + 255) / 256);
}

template <int FORM> INLINE float rounded(float v) {
    return FORM == ROUND_F16 ? half_to_float(float_to_half(v)) : bf16_to_float(float_to_bf16(v));
}
