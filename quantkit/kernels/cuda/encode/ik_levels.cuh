// Rounding to the levels of ik_llama.cpp's types: non-uniform values, plain or shifted, for both signs at once; the
// twin of quantkit/kernels/cpu/encode/ik_levels.py, which proves that the result is the reference's.
//
// Buckets of equal width contain at most one boundary between two levels each. A table entry holds both levels as
// bf16, which is exact for them, so a shift converts either to f32. Tables are in shared memory: up to 32 buckets are
// read without bank conflicts.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, best_index_iq2nl to best_index_iq6nl.
#pragma once
#include "encode/lane.cuh"
#include "unpack/tables.cuh"

#define CONSTEXPR __device__ constexpr

// bf16 of an integer of up to 8 bits.
CONSTEXPR uint32_t bf16_of(int v) {
    uint32_t size = v < 0 ? -v : v, exponent = 127 + 7;
    if (!size) return 0;
    while (!(size & 128)) size <<= 1, exponent--;
    return (v < 0 ? 0x8000u : 0u) | exponent << 7 | (size & 127);
}

INLINE float low_of(uint32_t pair) { return __uint_as_float(pair << 16); }
INLINE float high_of(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

template <typename Codebook> CONSTEXPR int level_in(int i) {
    const uint32_t words[4] = {Codebook::A, Codebook::B, Codebook::C, Codebook::D};
    const int byte = (int)(words[i >> 2] >> 8 * (i & 3) & 255);
    return byte < 128 ? byte : byte - 256;
}

// The sets of levels: their number, the shift, buckets and their width.
struct IQ2 {
    static const int LEVELS = 4, RAISE = 5, BUCKETS = 16;
    static constexpr double WIDTH = 10.0;
    CONSTEXPR static int value(int i) { return level_in<kvalues_iq2nl>(i); }
};
struct IQ3 {
    static const int LEVELS = 8, RAISE = 4, BUCKETS = 16;
    static constexpr double WIDTH = 12.13;
    CONSTEXPR static int value(int i) { return level_in<kvalues_iq3nl>(i); }
};
struct IQ4 {
    static const int LEVELS = 16, RAISE = 4, BUCKETS = 32;
    static constexpr double WIDTH = 11.64;
    CONSTEXPR static int value(int i) { return level_in<kvalues_iq4nl>(i); }
};
struct IQ5 {
    static const int LEVELS = 32, RAISE = 2, BUCKETS = 64;
    static constexpr double WIDTH = 4.5;
    CONSTEXPR static int value(int i) { return i < 16 ? level_in<kvalues_iq5nl<0>>(i) : level_in<kvalues_iq5nl<1>>(i - 16); }
};
struct IQ6 {
    static const int LEVELS = 64, RAISE = 1, BUCKETS = 128;
    static constexpr double WIDTH = 2.5;
    CONSTEXPR static int value(int i) {
        return i < 32   ? i < 16 ? level_in<kvalues_iq6nl<0>>(i) : level_in<kvalues_iq6nl<1>>(i - 16)
               : i < 48 ? level_in<kvalues_iq6nl<2>>(i - 32)
                        : level_in<kvalues_iq6nl<3>>(i - 48);
    }
};

// pairs: per [plain, shifted][values, minus mirrored values] the values below and above the boundary in a bucket;
// levels: the level below, and in bit 7 whether the one above differs.
template <typename L> struct Buckets {
    uint32_t pairs[2][2][L::BUCKETS];
    uint8_t levels[2][L::BUCKETS];
};

template <typename L> CONSTEXPR int value_at(int i, int shifted, int mirrored) {
    const int v = L::value(mirrored ? L::LEVELS - 1 - i : i) + (shifted ? L::RAISE : 0);
    return mirrored ? -v : v;
}

template <typename L> CONSTEXPR Buckets<L> make_buckets() {
    Buckets<L> t{};
    for (int of = 0; of < 4; of++) {
        const int shifted = of >> 1, mirrored = of & 1;
        int below = 0;
        for (int n = -L::BUCKETS / 2; n < L::BUCKETS / 2; n++) {
            const int low = value_at<L>(below, shifted, mirrored), next = below < L::LEVELS - 1 ? below + 1 : below;
            const int high = value_at<L>(next, shifted, mirrored);
            const bool inside = next > below && (low + high) / 2.0 < (n + 0.5) * L::WIDTH;
            const int at = n & (L::BUCKETS - 1);
            t.pairs[shifted][mirrored][at] = bf16_of(low) | bf16_of(inside ? high : low) << 16;
            if (!mirrored) t.levels[shifted][at] = (uint8_t)(below | inside << 7);
            below += inside;
        }
    }
    return t;
}

template <typename L> static __device__ const Buckets<L> BUCKETS_OF = make_buckets<L>();

// The tables in shared memory; called by all threads of a block.
template <typename T> INLINE const T& in_shared(const T& table) {
    __shared__ T copy;
    for (int i = threadIdx.x; i < (int)sizeof(T) / 4; i += blockDim.x) ((uint32_t*)&copy)[i] = ((const uint32_t*)&table)[i];
    __syncthreads();
    return copy;
}

// The bucket of x * inverse, given inverse / width; off by one at most near a bucket's edge, where there is no
// boundary.
template <typename L> INLINE int find_bucket(float x, float inverse_per_width) {
    return (int)(__float_as_uint(__fmaf_rn(x, inverse_per_width, 12582912.0f)) & (L::BUCKETS - 1));
}

template <typename L> INLINE float per_unit() { return (float)(1 / L::WIDTH); }

// The nearest of the two values in v's bucket; shifted ones by the reference's two subtractions.
template <bool SHIFTED> INLINE float nearest_of(float v, uint32_t pair) {
    const float low = low_of(pair), high = high_of(pair);
    if (SHIFTED) return v - low < high - v ? low : high;
    return v + v >= low + high ? high : low;
}

// Minus the value nearest to -v; pair: of mirrored values.
template <bool SHIFTED> INLINE float mirrored_of(float v, uint32_t pair) {
    const float low = low_of(pair), high = high_of(pair);
    if (SHIFTED) return high - v < v - low ? high : low;
    return v + v <= low + high ? low : high;
}

// v clamped to +-reach. C converts values beyond int to INT_MIN, hence level 0.
INLINE float limit(float v, float reach) { return fmaxf(fminf(v < 2147483648.0f ? v : -reach, reach), -reach); }

struct Rounded {
    int level;
    float value;
};

// The level nearest to v, which must be within the buckets, and its value.
template <typename L> INLINE Rounded round_near(const Buckets<L>& t, float v, int shifted) {
    const int at = find_bucket<L>(v, per_unit<L>()), level = (shifted ? t.levels[1] : t.levels[0])[at];
    const uint32_t pair = (shifted ? t.pairs[1][0] : t.pairs[0][0])[at];
    const float low = low_of(pair), high = high_of(pair);
    const bool upper = shifted ? !(v - low < high - v) : v + v >= low + high;
    return Rounded{(level & 127) + (upper & level >> 7), upper ? high : low};
}

// The same for any v.
template <typename L> INLINE Rounded round_any(const Buckets<L>& t, float v, int shifted) {
    return round_near<L>(t, limit(v, (float)((L::BUCKETS / 2 - 1) * L::WIDTH)), shifted);
}
