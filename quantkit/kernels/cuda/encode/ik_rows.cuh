// Encoders of ik_llama.cpp's types with a scale per row, 32 values per lane (rows.cu); the twin of
// quantkit/kernels/cpu/encode/ik_rows.py.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq3_ks_impl, quantize_row_iq4_k_impl_bs128,
// quantize_row_iq5_ks_impl.
#pragma once
#include "encode/ik_scales.cuh"
#include "encode/ik_search.cuh"

// ---- scales, stored where the bytes of their superblock will be: f32 d of its 8 sub-blocks, whose low bits hold the
// shifts, and where the row's d is fitted, f32 sums of weights. 2-byte aligned.
struct StoredScales {
    static const int SHIFTED = 32, SUMS = 34;
    uint8_t* block;

    __device__ __forceinline__ StoredScales(uint8_t* row, int64_t at) : block(row + at) {}
    static __device__ __forceinline__ void put(uint8_t* to, float v) {
        const uint32_t bits = __float_as_uint(v);
        *(uint16_t*)to = (uint16_t)bits;
        *(uint16_t*)(to + 2) = (uint16_t)(bits >> 16);
    }
    __device__ __forceinline__ void store(int part, float d, uint32_t shifted, float sum_w, bool fitted) const {
        put(block + 4 * part, d);
        if (part == 0) *(uint16_t*)(block + SHIFTED) = (uint16_t)shifted;
        if (fitted) put(block + SUMS + 4 * part, sum_w);
    }
    __device__ __forceinline__ float scale(int part) const { return __uint_as_float(load4_by2(block + 4 * part)); }
    __device__ __forceinline__ uint32_t shifted() const { return load2(block + SHIFTED); }
    __device__ __forceinline__ float sum(int part) const { return __uint_as_float(load4_by2(block + SUMS + 4 * part)); }
};

// ---- d of a row and its inverse

struct RowScale {
    float d, inverse;
};

// The scale of the largest magnitude, the first of equal ones. some: a float and an int per thread.
template <int BYTES> INLINE float largest_of_row(uint8_t* row, int count, float* some) {
    int* places = (int*)some + blockDim.x;
    float largest = 0;
    int place = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float scale = StoredScales(row, (int64_t)(i / 8) * BYTES).scale(i % 8);
        if (fabsf(scale) > fabsf(largest)) {
            largest = scale;
            place = i;
        }
    }
    some[threadIdx.x] = largest;
    places[threadIdx.x] = place;
    __syncthreads();
    largest = 0;
    place = 0;
    for (int i = 0; i < (int)blockDim.x; i++) {
        const float scale = some[i], more = fabsf(scale) - fabsf(largest);
        const bool larger = fabsf(scale) > fabsf(largest) || (more == 0 && scale != 0 && places[i] < place);
        largest = larger ? scale : largest;
        place = larger ? places[i] : place;
    }
    __syncthreads();
    return largest;
}

// The d whose multiples -16 .. 15 fit the scales best, and the inverse that gives the multiples.
template <int BYTES> INLINE RowScale fitted_to_row(uint8_t* row, int count, float top, float* some) {
    const int at = threadIdx.x, at_once = blockDim.x;
    Multiples of(min(at, Multiples::TRIES - 1), top, 16);
    for (int first = 0; first < count; first += at_once) {
        const int i = first + at;
        const StoredScales stored_scales(row, (int64_t)(i / 8) * BYTES);
        some[at] = i < count ? stored_scales.scale(i % 8) : 0.0f;
        some[at_once + at] = i < count ? stored_scales.sum(i % 8) : 0.0f;
        __syncthreads();
        for (int j = 0; at < Multiples::TRIES && j < min(count - first, at_once); j++) of.add(some[j], some[at_once + j], 16);
        __syncthreads();
    }
    some[at] = of.qx;
    some[at_once + at] = of.q2;
    __syncthreads();
    const Fitted result = best_multiples(some, some + at_once, top, 16);
    __syncthreads();
    return top != 0 ? RowScale{result.d, result.inverse} : RowScale{0, 0};
}

template <typename ENCODER_> INLINE RowScale row_scale(uint8_t* row, int count, float* some) {
    const float top = largest_of_row<ENCODER_::BYTES>(row, count, some);
    if (ENCODER_::FITTED) return fitted_to_row<ENCODER_::BYTES>(row, count, top, some);
    const float d = ENCODER_::scale_of(top);
    return RowScale{d, 1.0f / d};
}

// NaN has x86's bits, as in store_half.
template <int HEADER> INLINE void store_row_scale(uint8_t* out, float d) {
    if (HEADER == 2) store_half(out, d);
    else StoredScales::put(out, d == d ? d : __uint_as_float(0xffc00000u));
}

// ---- multiples of d, and their storage

// Odd multiples -127 .. 127, with the shift in the lowest bit; the scale of the largest magnitude becomes +-127.
struct RowScales8 {
    static const int BYTES = 8;
    static const bool FITTED = false;
    STATIC_INLINE float scale_of(float top) { return fabsf(top) / 127.0f; }
    STATIC_INLINE int multiple(float scale, float inverse) {
        return 2 * nearest_multiple(0.5f * (scale * inverse + 127.0f), 0, 127) - 127;
    }
    STATIC_INLINE int code(int m, int shifted) { return (m + 127) | shifted; }
    STATIC_INLINE void store(const LevelBlock<8>& block, uint8_t* out) {
        out[block.lane.part] = (uint8_t)block.code(0, block.lane.part);
    }
};

// Multiples -16 .. 15: bytes of 8 high bits and of 8 shift flags, then nibbles[4]. APART: high bits come first, and
// nibbles of scales ib and ib + 4 share a byte; otherwise ib and ib + 1.
template <bool APART> struct RowScales5 {
    static const int BYTES = 6;
    static const bool FITTED = !APART;
    STATIC_INLINE float scale_of(float top) { return -top / 16.0f; }
    STATIC_INLINE int multiple(float scale, float inverse) { return nearest_multiple(scale * inverse, -16, 15); }
    STATIC_INLINE int code(int m, int shifted) { return (m + 16) | shifted << 5; }
    STATIC_INLINE void store(const LevelBlock<8>& block, uint8_t* out) {
        const int part = block.lane.part, shift = APART == (part == 0) ? 4 : 5;
        uint32_t bits = 0;
        for (int i = 0; i < 8; i++) bits |= ((uint32_t)block.code(0, i) >> shift & 1) << i;
        if (part < 2) out[part] = (uint8_t)bits;
        const int q = part & 3;
        if (part < 4) out[2 + part] = APART ? block.nibbles(q, q + 4) : block.nibbles(2 * q, 2 * q + 1);
    }
};

// ---- types

// Common to all types, besides the parameters of cpu/encode/ik_rows.py: rows_encoder: near, own, stretch.
struct RowTraits {
    static const int OWN_ROOM = 0, TERMS = 32;  // floats per lane during the search; terms of its values
    static constexpr float NEAR = 2, OWN = 0, STRETCH = 1;
    STATIC_INLINE int term_at(int i) { return i; }  // position of the i-th term to be summed
};

template <typename TYPE, bool IMPORTANCE> INLINE void weigh_row_values(const Lane& lane) {
    const bool squares = IMPORTANCE || TYPE::OWN != 0;
    weigh_ik<32, IMPORTANCE>(lane, squares ? TYPE::NEAR * SuperBlock<8>(lane).squares() / 256.0f : 0, TYPE::OWN);
}

template <typename L> struct LevelTables {
    const Buckets<L>& buckets;
    __device__ __forceinline__ LevelTables() : buckets(in_shared(BUCKETS_OF<L>)) {}
};

// For levels L of BITS bits. PAIRED: the terms of values j and j + 16 are added to each other before the sum. ZEROS:
// levels are 0 where the scale is 0.
template <typename TYPE, typename L, typename SCALES, int BITS, int HEADER_> struct EncodeIkRow : RowTraits, SCALES {
    static const int BYTES = SCALES::BYTES + 32 * BITS, SCRATCH = LevelBlock<8>::SCRATCH, HEADER = HEADER_;
    static const bool PAIRED = false, ZEROS = false;
    typedef LevelTables<L> Tables;

    template <bool IMPORTANCE> STATIC_INLINE void weigh_values(const Lane& lane) { weigh_row_values<TYPE, IMPORTANCE>(lane); }

    STATIC_INLINE void store(const Lane& lane, const Tables& t, const ScaleFit& result, const RowScale& of) {
        const LevelBlock<8> block(lane);
        const int m = SCALES::multiple(result.d, of.inverse);
        const float factor = (float)m;
        const bool alive = !TYPE::ZEROS || m != 0;
        round_levels<L, 32>(lane, t.buckets, inverse_or_zero(factor * of.d), factor, result.shifted, alive,
                            block.levels() + 32 * lane.part);
        for (int j = 0; TYPE::PAIRED && j < 16; j++) {
            lane.x[j] = lane.x[j] + lane.x[j + 16];
            lane.w[j] = lane.w[j] + lane.w[j + 16];
        }
        block.codes(0)[lane.part] = (float)SCALES::code(m, result.shifted);
        __syncwarp();
        SCALES::store(block, lane.out);
        pack<BITS>(block.levels(), lane.out + SCALES::BYTES, lane.part, 8);
    }
};
