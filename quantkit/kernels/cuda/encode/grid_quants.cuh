// IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S: magnitudes are points of a grid, signs are stored separately; the twin of
// quantkit/kernels/cpu/encode/grid_quants.py, which has the table of types.
//
// Source: llama.cpp b11434 ggml-quants.c quantize_row_iq{2_xxs,2_xs,2_s,3_xxs,3_s}_impl.
#pragma once
#include "encode/grid_runs.cuh"
#include "encode/k_quants.cuh"

// Result for a sub-block: its scale (-1 if it is dead), its signs and the indices of its points.
struct SubBlock {
    float scale;
    uint32_t signs;
    const uint16_t* results;
};

// The maximum over the lanes of a superblock, at least 0.
template <int N> INLINE float largest_in_block(float v) {
    v = fmaxf(v, 0);
    for (int d = N / 2; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, d));
    return v;
}

// The 4-bit code of a scale.
INLINE uint32_t scale_code(float scale, float inverse) {
    return scale > 0 ? (uint32_t)max(0, min(15, nearest_int(0.5f * (inverse * scale - 1.0f)))) : 0;
}

// Begins a block of SIZE bytes: zeroes it and stores its scale d, the largest of all lanes over ``codes``, times a
// gain. inverse: 1 / d.
template <int N, int SIZE> struct GridBlock {
    bool alive;
    float inverse;

    __device__ __forceinline__ GridBlock(const Lane& lane, float scale, float codes, float stretch) {
        const float top = largest_in_block<N>(scale), d = top / codes;
        for (int i = lane.part; i < SIZE / 2; i += N) ((uint16_t*)lane.out)[i] = 0;
        __syncwarp();
        alive = top > 0;
        inverse = 1.0f / d;
        if (alive && lane.part == 0) store_half(lane.out, d * stretch);
    }
};

// Stores two codes in a byte; the even one of two lanes writes.
INLINE void store_codes(const Lane& lane, uint32_t code, bool alive, uint8_t* to) {
    const uint32_t other = __shfl_xor_sync(FULL, code, 1);
    if (alive && !(lane.part & 1)) to[lane.part / 2] = (uint8_t)(code | other << 4);
}

INLINE void store_word(uint8_t* to, uint32_t v) {  // 2-byte aligned
    *(uint16_t*)to = (uint16_t)v;
    *(uint16_t*)(to + 2) = (uint16_t)(v >> 16);
}

// T, the type's traits: Search, EVEN (seven signs), SIGMA (factor of the mean square), AGAIN, tiny() (sub-blocks of
// smaller values are dead), write.
template <class T, class S, int TYPE_BYTES> struct GridQuant {
    typedef S Search;
    static const int VALUES = 256 / S::PER_BLOCK, BLOCK = 256, BYTES = TYPE_BYTES, SCRATCH = S::SCRATCH;
    static const int SIZE = VALUES / S::GROUPS, TOP = SIZE == 4 ? 7 : 2;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE float sigma(const Lane& lane) {
        const float results = (float)T::SIGMA * SuperBlock<S::PER_BLOCK>(lane).squares() / 256.0f;
        __syncwarp();  // before values become magnitudes
        return results;
    }

    STATIC_INLINE void weigh_by_squares(const Lane& lane) {
        const float quarter = SIZE == 8 ? 0.25f * sigma(lane) : 0.0f;
        for (int i = 0; i < VALUES; i++) {
            const float square = lane.x[i] * lane.x[i];
            lane.w[i] = SIZE == 8 ? quarter + square : square;
        }
    }
    STATIC_INLINE void weigh_by_importance(const Lane& lane) { weigh(lane, VALUES, sigma(lane)); }

    STATIC_INLINE void plain(const Lane& lane) {
        weigh_by_squares(lane);
        finish(lane);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        weigh_by_importance(lane);
        finish(lane);
    }

    STATIC_INLINE void finish(const Lane& lane) {
        uint32_t signs = take_signs<VALUES, T::EVEN>(lane.x, lane.w);
        float largest = lane.x[0];
        for (int i = 1; i < VALUES; i++) largest = fmaxf(largest, lane.x[i]);
        bool dead = largest < T::tiny();
        float scale = largest / (float)(2 * TOP + 1);
        if (T::AGAIN == ALWAYS) {  // candidates are relative to a first fit
            static_assert(T::AGAIN != ALWAYS || S::SCRATCH * S::BLOCKS >= 8 * VALUES, "a byte for each value of a warp");
            scale = fit_positive<VALUES>(lane.x, lane.w, (uint8_t*)S::scratch_of_warp(lane) + lane_id() * VALUES, TOP + 2);
            largest = dead ? 0.0f : scale * (float)(TOP + 1);
            dead = largest <= 0;
        }
        __syncwarp();  // magnitudes and weights are written
        scale = S::template search<T::AGAIN>(lane, dead ? 0.0f : largest, scale);
        if (scale < 0) {
            signs ^= T::EVEN ? (1u << VALUES / 8 * 7) - 1 : 0xffffffffu >> (32 - VALUES);
            scale = -scale;
        }
        T::write(lane, SubBlock{dead ? -1.0f : scale, dead ? 0 : signs, S::results(lane)});
    }
};

struct QuantIQ2_XXS : GridQuant<QuantIQ2_XXS, RunSearch<32, 6>, 66> {
    static const bool EVEN = true;
    static const int SIGMA = 1;
    static const Again AGAIN = ALWAYS;
    STATIC_INLINE float tiny() { return 1e-15f; }
    STATIC_INLINE void write(const Lane& lane, const SubBlock& sub) {
        const GridBlock<8, BYTES> block(lane, sub.scale, 31.0f, 1.0f);
        if (!block.alive) return;
        uint8_t* out = lane.out + 2 + 8 * lane.part;
        for (int k = 0; k < 4; k++) out[k] = (uint8_t)sub.results[k];
        store_word(out + 4, sub.signs | scale_code(sub.scale, block.inverse) << 28);
    }
};

struct QuantIQ2_XS : GridQuant<QuantIQ2_XS, RunSearch<16, 9>, 74> {
    static const bool EVEN = true;
    static const int SIGMA = 1;
    static const Again AGAIN = OFF_GRID;
    STATIC_INLINE float tiny() { return 1e-15f; }
    STATIC_INLINE void write(const Lane& lane, const SubBlock& sub) {
        const GridBlock<16, BYTES> block(lane, sub.scale, 31.0f, 1.0f);
        store_codes(lane, scale_code(sub.scale, block.inverse), block.alive, lane.out + 66);
        if (!block.alive) return;
        for (int k = 0; k < 2; k++)
            *(uint16_t*)(lane.out + 2 + 4 * lane.part + 2 * k) = (uint16_t)(sub.results[k] | (sub.signs >> 7 * k & 127) << 9);
    }
};

struct QuantIQ2_S : GridQuant<QuantIQ2_S, GridSearch<16, 8, 2, 9, 1>, 82> {
    static const bool EVEN = false;
    static const int SIGMA = 2;
    static const Again AGAIN = OFF_GRID;
    STATIC_INLINE float tiny() { return 1e-8f; }
    STATIC_INLINE void write(const Lane& lane, const SubBlock& sub) {
        const GridBlock<16, BYTES> block(lane, sub.scale, 31.0f, 0.9875f);
        const int part = lane.part;
        const uint32_t high = (uint32_t)(sub.results[0] >> 8 | sub.results[1] >> 8 << 2), other = __shfl_xor_sync(FULL, high, 1);
        for (int k = 0; k < 2; k++) lane.out[2 + 2 * part + k] = (uint8_t)sub.results[k];
        if (!(part & 1)) lane.out[66 + part / 2] = (uint8_t)(high | other << 4);
        *(uint16_t*)(lane.out + 34 + 2 * part) = (uint16_t)sub.signs;
        store_codes(lane, scale_code(sub.scale, block.inverse), block.alive, lane.out + 74);
    }
};

struct QuantIQ3_XXS : GridQuant<QuantIQ3_XXS, GridSearch<32, 4, 7, 15, 2>, 98> {
    static const bool EVEN = true;
    static const int SIGMA = 2;
    static const Again AGAIN = OFF_GRID;
    STATIC_INLINE float tiny() { return 1e-8f; }
    STATIC_INLINE void write(const Lane& lane, const SubBlock& sub) {
        const GridBlock<8, BYTES> block(lane, sub.scale, 31.0f, 1.0125f);
        if (!block.alive) return;
        for (int k = 0; k < 8; k++) lane.out[2 + 8 * lane.part + k] = (uint8_t)sub.results[k];
        store_word(lane.out + 66 + 4 * lane.part, sub.signs | scale_code(sub.scale, block.inverse) << 28);
    }
};

// Sub-blocks of zeros are skipped, which moves qs and signs of later ones forward; qh and scales stay in place.
struct QuantIQ3_S : GridQuant<QuantIQ3_S, GridSearch<32, 4, 7, 9, 2>, 110> {
    static const bool EVEN = false;
    static const int SIGMA = 2;
    static const Again AGAIN = ALL_IF_ONE_IS_OFF;
    STATIC_INLINE float tiny() { return __int_as_float(1); }
    STATIC_INLINE void write(const Lane& lane, const SubBlock& sub) {
        const GridBlock<8, BYTES> block(lane, sub.scale, 31.0f, 1.033f);
        const uint32_t alive = __ballot_sync(FULL, sub.scale >= 0) >> ((threadIdx.x & 31) - lane.part);
        store_codes(lane, scale_code(sub.scale, block.inverse), block.alive, lane.out + 106);
        if (!(sub.scale >= 0)) return;
        const int place = __popc(alive & ((1u << lane.part) - 1));
        uint32_t high = 0;
        for (int k = 0; k < 8; k++) {
            lane.out[2 + 8 * place + k] = (uint8_t)sub.results[k];
            high |= (uint32_t)sub.results[k] >> 8 << k;
        }
        lane.out[66 + lane.part] = (uint8_t)high;
        store_word(lane.out + 74 + 4 * place, sub.signs);
    }
};
