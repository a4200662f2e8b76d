// Rows of activations in the formats of products, with the integers, scales and sums of the CPU's
// (quantkit/kernels/cpu/matmul/activations.py); shared by activations.cu and row_epilogue.cu.
//
//     q8_0  per 32 values: d = f16(amax / 127), q = round(x * 127 / amax)
//     q8_1  the same, with s = f16(amax / 127 * sum of q)
//     q8_2  per 32 values: d = bf16(amax / 127), q = round(x / d)
//     q8_k  per 256 values: d = 1 / iscale, q = round(iscale * x), iscale = -127 / max
//     q8_kv   per row: d = amax / 127, q = round(x / d)
//     q8_k64  the same, four a row: for places i of which i % 16 / 4 is 0, 1, 2, 3
//     f16   rounded to half precision, kept as f32
//     bf16  rounded to bfloat16, kept as f32
//
// (max: the first value of the largest magnitude, with its sign.) Layout of a row in the int8 formats; n_pad is n
// rounded up to a multiple of 256, with zeros after n:
//
//     int8 levels[n_pad] | float d[n_pad / 32] | float sums[n_pad / 16]       Q8_UNIT bytes per 256 values
//
// sums are multiplied by minimums, one per 16 values: d * sum of q in q8_k; s and 0 alternating in q8_1; 0 in others.
//
// q8_k64 stores the levels by words: of each 128 the 32 with the first scale, then those of the second, third and
// fourth, so that 32 consecutive levels share a scale here, too. Products permute weights to that order
// (TYPE::BY_WORDS).
#pragma once
#include "core/device.cuh"
#include "matmul/units.cuh"

#define Q8_0 0
#define Q8_1 1
#define Q8_2 2
#define Q8_K 3
#define Q8_KV 4
#define Q8_K64 5
#define ROUND_F16 6
#define ROUND_BF16 7
// Formats with scales of a row are converted by a block per row.
#define OF_ROW(FORM) ((FORM) == Q8_KV || (FORM) == Q8_K64)

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

// For a row, by a block of up to 1024 threads: the scales of this thread's first four values and of its second four.
// amax: of all its first ones, and second ones, the first at multiples of 8. shared: 64 values.
struct RowScales {
    Scale of[2];
};

INLINE Scale scale_of_row(float amax) {
    const float d = amax / 127.0f;
    return {amax > 3.0092655381050560e-36f ? 1.0f / d : 0.0f, d, d};  // 2^-118, as in q8_2
}

template <int FORM> INLINE RowScales scales_of_row(float (&amax)[2], float2* shared) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    for (int i = 0; i < 2; i++)
        for (int d = 16; d > 1; d >>= 1) amax[i] = fmaxf(amax[i], __shfl_xor_sync(FULL, amax[i], d));
    __syncthreads();  // shared may still be read
    if (lane < 2) shared[threadIdx.x / 32 * 2 + lane] = make_float2(amax[0], amax[1]);
    __syncthreads();
    float2 most = make_float2(0, 0);
    for (int w = 0; w < warps; w++) {
        const float2 v = shared[2 * w + (lane & 1)];
        most = make_float2(fmaxf(most.x, v.x), fmaxf(most.y, v.y));
    }
    if (FORM == Q8_KV) {
        most.x = fmaxf(most.x, most.y);
        most.x = most.y = fmaxf(most.x, __shfl_xor_sync(FULL, most.x, 1));
    }
    return {{scale_of_row(most.x), scale_of_row(most.y)}};
}

INLINE uint32_t four_levels(const float* v, float factor) {
    uint32_t four = 0;
    for (int i = 0; i < 4; i++) four |= ((uint32_t)min(__float2int_rn(v[i] * factor), 127) & 255) << 8 * i;
    return four;
}

// Writes unit `unit` of a row of `units`, 256 values each, in an int8 format: a warp, 8 values per lane.
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

// The same for the scales of a row.
template <int FORM>
INLINE void quantize_unit_by(const RowScales& scales, const float (&v)[8], uint8_t* out, int64_t unit, int64_t units) {
    const int lane = threadIdx.x & 31;
    uint32_t* levels = (uint32_t*)(out + 256 * unit);
    float* d = (float*)(out + 256 * units) + 8 * unit;
    for (int i = 0; i < 2; i++) {
        const int word = 2 * lane + i, by_words = word / 32 * 32 + word % 4 * 8 + word % 32 / 4;
        levels[FORM == Q8_K64 ? by_words : word] = four_levels(v + 4 * i, scales.of[i].factor);
        // Lanes 0 and 1 have all four scales.
        if (lane < 4) d[lane / 2 * 4 + lane % 2 * 2 + i] = scales.of[i].stored;
    }
    float* sums = (float*)(out + 288 * units) + 16 * unit;
    if (lane < 16) sums[lane] = 0;
}

// The same in an int8 format of units known at run time.
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
