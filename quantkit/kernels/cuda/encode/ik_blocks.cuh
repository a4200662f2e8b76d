// Encoders of ik_llama.cpp's types with a scale per superblock, 16 values per lane; the twin of
// quantkit/kernels/cpu/encode/ik_blocks.py.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq3_k_impl, quantize_row_iq4_k_impl_bs16,
// quantize_row_iq5_k_impl, quantize_row_iq6_k_impl.
#pragma once
#include "encode/ik_scales.cuh"
#include "encode/ik_search.cuh"

struct IkBlock : LevelBlock<16> {
    static const int FITS = LevelBlock<16>::SCRATCH, SCRATCH = FITS + 2 * Multiples::TRIES;

    __device__ __forceinline__ explicit IkBlock(const Lane& l) : LevelBlock<16>(l) {}
    __device__ __forceinline__ float* tries(int k) const { return lane.scratch + FITS + k * Multiples::TRIES; }

    // Stores the low nibbles of the 16 codes in 8 bytes.
    __device__ __forceinline__ void store_low_nibbles(uint8_t* out) const {
        if (lane.part < 8) out[lane.part] = nibbles(2 * lane.part, 2 * lane.part + 1);
    }
};

// ---- d and its multiples, and their storage

// Multiples -32 .. 31: the scale of the largest magnitude becomes -32. u16 high bits of 8 of them, twice, then 8 bytes
// of low nibbles.
struct Scales6 {
    static const int BYTES = 12;
    STATIC_INLINE float multiple(const IkBlock& block, float scale, float, int& m) {
        const float d = -block.largest_scale() / 32.0f;
        m = nearest_multiple(scale * inverse_or_zero(d), -32, 31);
        return d;
    }
    STATIC_INLINE int code(int m) { return m + 32; }
    STATIC_INLINE void store(const IkBlock& block, uint8_t* out) {
        const int part = block.lane.part;
        uint32_t high = 0;
        for (int k = 0; k < 4; k++) high |= (uint32_t)block.code(0, 4 * (part & 3) + k) >> 4 << 2 * k;
        if (part < 4) out[part] = (uint8_t)high;
        block.store_low_nibbles(out + 4);
    }
};

// Multiples -127 .. 127, as i8: the scale of the largest magnitude becomes -127.
struct Scales8 {
    static const int BYTES = 16;
    STATIC_INLINE float multiple(const IkBlock& block, float scale, float, int& m) {
        const float d = -block.largest_scale() / 127.0f;
        m = nearest_multiple(scale * inverse_or_zero(d), -127, 127);
        return d;
    }
    STATIC_INLINE int code(int m) { return m; }
    STATIC_INLINE void store(const IkBlock& block, uint8_t* out) { out[block.lane.part] = (uint8_t)block.code(0, block.lane.part); }
};

// Odd multiples -31 .. 31: u16 signs, then 8 bytes of (|m| - 1) / 2.
struct ScalesOdd {
    static const int BYTES = 10;
    STATIC_INLINE float multiple(const IkBlock& block, float scale, float, int& m) {
        const float d = fabsf(block.largest_scale()) / 31.0f;
        const int odd = 2 * nearest_multiple(0.5f * (fabsf(scale) * inverse_or_zero(d) - 1.0f), 0, 15) + 1;
        m = scale < 0 ? -odd : odd;
        return d;
    }
    STATIC_INLINE int code(int m) { return m < 0 ? (-m - 1) >> 1 | 16 : (m - 1) >> 1; }
    STATIC_INLINE void store(const IkBlock& block, uint8_t* out) {
        const int part = block.lane.part;
        uint32_t signs = 0;
        for (int k = 0; k < 8; k++) signs |= (uint32_t)block.code(0, 8 * (part & 1) + k) >> 4 << k;
        if (part < 2) out[part] = (uint8_t)signs;
        block.store_low_nibbles(out + 2);
    }
};

// Multiples -8 .. 7, as nibbles, fitted to the scales; the weight of a scale is the sum of its weights.
struct Scales4 {
    static const int BYTES = 8;
    STATIC_INLINE float multiple(const IkBlock& block, float scale, float sum_w, int& m) {
        const int part = block.lane.part;
        block.weights()[part] = sum_w;
        __syncwarp();
        const float top = block.largest_scale();
        for (int k = part; k < Multiples::TRIES; k += 16) {
            Multiples of(k, top, 8);
            for (int i = 0; i < 16; i++) of.add(block.fitted(0)[i], block.weights()[i], 8);
            block.tries(0)[k] = of.qx;
            block.tries(1)[k] = of.q2;
        }
        __syncwarp();
        const float d = top != 0 ? best_multiples(block.tries(0), block.tries(1), top, 8).d : 0;
        m = nearest_multiple(scale * inverse_or_zero(d), -8, 7);
        return d;
    }
    STATIC_INLINE int code(int m) { return m + 8; }
    STATIC_INLINE void store(const IkBlock& block, uint8_t* out) { block.store_low_nibbles(out); }
};

// ---- super-blocks

// Fits a non-zero scale to the levels nearest to x / d.
template <typename L> INLINE float refit(const Lane& lane, const Buckets<L>& t, const ScaleFit& result) {
    const float inverse = 1.0f / result.d;
    float sumqx = 0, sumq2 = 0;
    for (int j = 0; j < 16; j++) {
        const float x = lane.x[j], q = round_any<L>(t, inverse * x, result.shifted).value, wq = lane.w[j] * q;
        sumqx = sumqx + wq * x;
        sumq2 = sumq2 + wq * q;
    }
    return result.d != 0 && sumq2 > 0 ? sumqx / sumq2 : result.d;
}

// For levels L of BITS bits; the type's parameters are those of cpu/encode/ik_blocks.py: block_encoder: near, own,
// again, zeros, stretch.
template <typename TYPE, typename L, typename SCALES, int BITS> struct EncodeIkBlock {
    static const int VALUES = 16, BLOCK = 256, BYTES = 4 + SCALES::BYTES + 32 * BITS, SCRATCH = IkBlock::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true, AGAIN = true, ZEROS = true;
    static constexpr float NEAR = 2, OWN = 0.25f, STRETCH = 1;

    STATIC_INLINE void plain(const Lane& lane) { encode<false>(lane); }
    STATIC_INLINE void weighted(const Lane& lane, float) { encode<true>(lane); }

    template <bool IMPORTANCE> STATIC_INLINE void encode(const Lane& lane) {
        const IkBlock block(lane);
        const bool squares = IMPORTANCE || TYPE::OWN != 0;
        weigh_ik<16, IMPORTANCE>(lane, squares ? TYPE::NEAR * block.squares() / 256.0f : 0, TYPE::OWN);
        const Buckets<L>& t = in_shared(BUCKETS_OF<L>);
        ScaleFit result = TYPE::find(lane, t);
        if (TYPE::AGAIN) result.d = refit(lane, t, result);
        finish(block, t, result);
    }

    STATIC_INLINE void finish(const IkBlock& block, const Buckets<L>& t, const ScaleFit& result) {
        const Lane& lane = block.lane;
        const int part = lane.part;
        block.fitted(0)[part] = result.d;
        __syncwarp();
        int m;
        float d = SCALES::multiple(block, result.d, sum_of<16>(lane.w), m);
        const bool dead = TYPE::ZEROS && d == 0;
        const float factor = (float)m, scale = factor * d;
        const bool alive = !TYPE::ZEROS || scale != 0;
        round_levels<L, 16>(lane, t, inverse_or_zero(scale), factor, result.shifted, alive, block.levels() + 16 * part);
        block.codes(0)[part] = (float)SCALES::code(m);
        __syncwarp();
        if (part < 2) block.fits()[part] = sum_in_order(block, part);
        const uint32_t shifted = __ballot_sync(FULL, result.shifted) >> (threadIdx.x & 16) & 0xffff;
        __syncwarp();
        uint8_t* out = lane.out;
        if (dead) {
            for (int i = part; i < BYTES; i += 16) out[i] = 0;
            return;
        }
        const float sumq2 = block.fits()[1];
        d = sumq2 > 0 ? block.fits()[0] / sumq2 : d;
        if (part == 0) {
            store_half(out, TYPE::STRETCH * d);
            *(uint16_t*)(out + 2) = (uint16_t)shifted;
        }
        SCALES::store(block, out + 4);
        pack<BITS>(block.levels(), out + 4 + SCALES::BYTES, part, 16);
    }

    // Sums the terms stored in x (part 0) or in w.
    STATIC_INLINE float sum_in_order(const IkBlock& block, int part) {
        const float* terms = part ? block.lane.w - block.lane.part * 17 : &block.value(0);
        float total = 0;
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 16; j++) total = total + terms[17 * i + j];
        return total;
    }
};
