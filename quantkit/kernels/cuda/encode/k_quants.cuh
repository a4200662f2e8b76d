// Q2_K, Q3_K, Q4_K, Q5_K, Q6_K: 256 values per superblock; the twin of quantkit/kernels/cpu/encode/k_quants.py, which
// has the layouts.
//
// A lane fits scale and minimum of a sub-block. Then all lanes rate candidates for the scales and the minimums of the
// superblock, two lanes quantize these by the best, and each lane its values by them; levels, a byte each, replace the
// values.
//
// Source: llama.cpp b11434 ggml-quants.c, quantize_row_q{2,3,4,5,6}_K_ref and _impl; ik_llama.cpp 8337e4cd3, of the
// same names, for encoders _IK: their searches write levels to the memory behind the lanes' shared data.
#pragma once
#include "encode/search_refined.cuh"
#include "encode/search_sizes.cuh"

// The lowest bytes of four words.
INLINE uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
}

// Stores four bytes at a 2-byte aligned address.
INLINE void store4_by2(uint8_t* out, uint32_t v) {
    *(uint16_t*)out = (uint16_t)v;
    *(uint16_t*)(out + 2) = (uint16_t)(v >> 16);
}

// Shared by the lanes of a superblock, N sub-blocks of 256 / N values.
template <int N> struct SuperBlock {
    static const int VALUES = 256 / N, SCRATCH = 5 * N + 2, WITH_LEVELS = SCRATCH + N * (VALUES + 1);

    const Lane& lane;
    __device__ __forceinline__ explicit SuperBlock(const Lane& l) : lane(l) {}

    // k: 0 for scales, 1 for minima.
    __device__ __forceinline__ float* fitted(int k) const { return lane.scratch + k * N; }
    __device__ __forceinline__ float* codes(int k) const { return lane.scratch + (2 + k) * N; }
    __device__ __forceinline__ float* weights() const { return lane.scratch + 4 * N; }
    __device__ __forceinline__ float* fits() const { return lane.scratch + 5 * N; }
    // The lane's levels, in types that reserve memory for them.
    __device__ __forceinline__ float* levels() const { return lane.scratch + SCRATCH + lane.part * (VALUES + 1); }

    __device__ __forceinline__ int code(int k, int j) const { return (int)codes(k)[j]; }
    // Value, or level, i of the superblock.
    __device__ __forceinline__ float& value(int i) const {
        return (lane.x - lane.part * (VALUES + 1))[i / VALUES * (VALUES + 1) + i % VALUES];
    }
    // Levels 4 * i .. 4 * i + 3, a byte each, once they have replaced the values.
    __device__ __forceinline__ uint32_t levels_of(int i) const {
        const uint32_t at = (uint32_t)i, words = VALUES / 4;
        return __float_as_uint((lane.x - lane.part * (VALUES + 1))[at / words * (VALUES + 1) + at % words]);
    }

    // The first scale of the largest magnitude.
    __device__ __forceinline__ float largest_scale() const {
        float largest = 0;
        for (int j = 0; j < N; j++)
            if (fabsf(fitted(0)[j]) > fabsf(largest)) largest = fitted(0)[j];
        return largest;
    }

    __device__ __forceinline__ float squares() const {
        float total = 0;
        for (int i = 0; i < 256; i++) total = total + value(i) * value(i);
        return total;
    }

    // The same, by one lane for each superblock of the thread block: all of its threads wait. Each superblock's
    // scratch has the same size.
    template <int SCRATCH_OF_ONE = SCRATCH> __device__ __forceinline__ float shared_squares() const {
        const int thread_at = (int)threadIdx.x, mine = thread_at / N;
        if (thread_at < (int)blockDim.x / N) {
            const float* x = lane.x + (thread_at * N - thread_at) * (VALUES + 1);
            float total = 0;
#pragma unroll 1
            for (int j = 0; j < N; j++) {
#pragma unroll
                for (int i = 0; i < VALUES; i++) total = total + x[j * (VALUES + 1) + i] * x[j * (VALUES + 1) + i];
            }
            (lane.scratch + (thread_at - mine) * SCRATCH_OF_ONE)[5 * N] = total;
        }
        __syncthreads();
        return fits()[0];
    }

    // The maximum over the lanes, at least 0.
    __device__ __forceinline__ float largest_of_all(float v) const {
        for (int d = 1; d < N; d *= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, d, N));
        return v > 0 ? v : 0.0f;
    }

    // 1 / scale of scales (k = 0) or minimums, by fit_positive: all lanes share the candidates for both.
    __device__ __forceinline__ float best_inverse(const float* largest, int k, int top) const {
        const int EACH = (2 * POSITIVE_TRIALS + N - 1) / N;
        float errors[EACH];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            const int at = min(j * N + lane.part, 2 * POSITIVE_TRIALS - 1), of = at / POSITIVE_TRIALS, trial = at % POSITIVE_TRIALS;
            const float inverse = positive_inverse(trial, top, of ? largest[1] : largest[0]);
            errors[j] = positive_error<N>(fitted(of), weights(), top, inverse, trial == 0);
        }
        float least = 0;
        int best = 0;
#pragma unroll
        for (int trial = 0; trial < POSITIVE_TRIALS; trial++) {
            const int at = k * POSITIVE_TRIALS + trial;
            float error = 0;
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                const float its = __shfl_sync(FULL, errors[j], at % N, N);
                error = at / N == j ? its : error;
            }
            if (trial && !(error < least)) continue;
            least = error;
            best = trial;
        }
        return positive_inverse(best, top, k ? largest[1] : largest[0]);
    }

    // Quantizes scales and minimums: weighted, by a search of their own; otherwise by the largest.
    template <bool WEIGHTED_BY_SUMS>
    __device__ __forceinline__ void quantize_scales(const Fit& fit, int top, float almost_0 = 1e-15f) const {
        if (WEIGHTED_BY_SUMS) {
            fitted(0)[lane.part] = fit.scale;
            fitted(1)[lane.part] = -fit.low;
            weights()[lane.part] = fit.sum_w;
            __syncwarp();
            const float largest[2] = {largest_of_all(fit.scale), largest_of_all(-fit.low)};
            const int k = lane.part & 1;
            const float inverse = best_inverse(largest, k, top);
            if (lane.part < 2) {
                const bool dead = (k ? largest[1] : largest[0]) < almost_0;
                for (int j = 0; dead && j < N; j++) codes(k)[j] = 0;
                fits()[k] = dead ? 0.0f : fit_positive_by<N>(inverse, fitted(k), weights(), codes(k), top);
            }
        } else {
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float v = k ? -fit.low : fit.scale, largest = largest_of_all(v);
                const int c = nearest_int((largest > 0 ? (float)top / largest : 0.0f) * v) & 255;
                codes(k)[lane.part] = (float)(top == 63 ? min(c, top) : c);
                if (lane.part == k) fits()[k] = largest / (float)top;
            }
        }
        __syncwarp();
    }

    // Replaces the lane's values by levels, which are not negative.
    template <class F> __device__ __forceinline__ void put_levels(F level) const {
#pragma unroll
        for (int i = 0; i < VALUES; i += 4)
            lane.x[i / 4] = __uint_as_float(bytes_of(level(i), level(i + 1), level(i + 2), level(i + 3)));
        __syncwarp();
    }

    // The same for (x + low) / d, rounded to -BELOW .. ABOVE, plus BELOW. Where d is 0, or levels would wrap
    // around, they are those of `fallback`.
    template <int BELOW, int ABOVE, class F>
    __device__ __forceinline__ void put_levels(float d, float low, float size, F fallback) const {
        if (d != 0 && size + fabsf(low) < 4e6f * fabsf(d)) {
            const float zero = ROUNDING + (float)BELOW;  // even, like ROUNDING: ties round to the same side
            put_levels([&](int i) {
                const float v = (BELOW ? lane.x[i] : lane.x[i] + low) / d;
                return __float_as_uint(fminf(fmaxf(v + zero, ROUNDING), ROUNDING + (float)(BELOW + ABOVE)));
            });
        } else {
            put_levels([&](int i) { return (uint32_t)(fallback(i) + BELOW); });
        }
    }
};

// A scale as stored, and its rounding.
INLINE float as_half(float v) { return half_to_float(v == v ? float_to_half(v) : (uint16_t)0xfe00); }

// Q4_K (TOP 15) and Q5_K (31): 8 sub-blocks of 32.
template <int TOP> struct EncodeQ45 {
    static const int VALUES = 32, BLOCK = 256, BYTES = TOP == 15 ? 144 : 176, SCRATCH = SuperBlock<8>::SCRATCH;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const float* x = lane.x;
        float mean = 0;
#pragma unroll
        for (int i = 0; i < 32; i++) mean = mean + x[i] * x[i];
        mean = __fsqrt_rn(mean / 32.0f);
        const auto weight = [&](int i) { return mean + fabsf(x[i]); };
        const float start = TOP == 15 ? -1.0f : -0.5f;
        finish<false>(lane, fit_with_min<32, false>(x, weight, TOP, start, 0.1f, TOP == 15 ? 20 : 15));
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        const SuperBlock<8> block(lane);
        weigh(lane, 32, 2.0f * block.shared_squares() / 256.0f);
        const auto weight = [&](int i) { return lane.w[i]; };
        finish<true>(lane, fit_with_min<32, true>(lane.x, weight, TOP, -0.9f, 0.05f, 36));
    }

    template <bool GUARDED, bool HAS_LEVELS = false> STATIC_INLINE void finish(const Lane& lane, const Fit& fit) {
        const SuperBlock<8> block(lane);
        block.quantize_scales<GUARDED>(fit, 63, HAS_LEVELS ? 1e-16f : 1e-15f);
        const int part = lane.part, q = part & 3;
        // Bytes 0..3: scales 0..3, 4..7: minimums 0..3, each with 2 high bits of scale or minimum 4..7; 8..11: their
        // low bits.
        int scales[2], mins[2];
        for (int half = 0; half < 2; half++) {
            scales[half] = block.code(0, q + 4 * half);
            mins[half] = block.code(1, q + 4 * half);
            if (TOP == 31) scales[half] = min(scales[half], 63), mins[half] = min(mins[half], 63);
        }
        const int a = (scales[0] | scales[1] >> 4 << 6) & 255, b = (mins[0] | mins[1] >> 4 << 6) & 255;
        const int c = ((scales[1] & 15) | (mins[1] & 15) << 4) & 255;
        const int scale = part < 4 ? a & 63 : (c & 15) | a >> 6 << 4, low = part < 4 ? b & 63 : c >> 4 | b >> 6 << 4;
        const float d = as_half(block.fits()[0]) * (float)scale, dmin = as_half(block.fits()[1]) * (float)low;
        block.put_levels<0, TOP>(d, dmin, fit.size, [&](int i) {
            if (d != 0) return level_of<false>((lane.x[i] + dmin) / d, TOP);
            return HAS_LEVELS ? (int)block.levels()[i] : level_of<GUARDED>(fit.inverse * (lane.x[i] - fit.base), TOP);
        });
        uint8_t* out = lane.out;
        if (part < 2) store_half(out + 2 * part, block.fits()[part]);
        if (part < 4) out[4 + part] = (uint8_t)a, out[8 + part] = (uint8_t)b, out[12 + part] = (uint8_t)c;
        uint8_t* low_bits = out + (TOP == 31 ? 48 : 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t even = block.levels_of(16 * j + part), odd = block.levels_of(16 * j + 8 + part);
            *(uint32_t*)(low_bits + 32 * j + 4 * part) = (even & 0x0f0f0f0fu) | (odd & 0x0f0f0f0fu) << 4;
        }
        if (TOP == 31) {
            uint32_t high = 0;
#pragma unroll
            for (int j = 0; j < 8; j++) high |= (block.levels_of(8 * j + part) >> 4 & 0x01010101u) << j;
            *(uint32_t*)(out + 16 + 4 * part) = high;
        }
    }
};

struct EncodeQ4_K : EncodeQ45<15> {};
struct EncodeQ5_K : EncodeQ45<31> {};

template <int TOP> struct RefinedQ45 : EncodeQ45<TOP> {
    static const int SCRATCH = SuperBlock<8>::WITH_LEVELS;

    STATIC_INLINE void weighted(const Lane& lane, float) {
        const SuperBlock<8> block(lane);
        weigh(lane, 32, 2.0f * block.template shared_squares<SCRATCH>() / 256.0f);
        const Fit fit = fit_with_min_refined<32>(lane.x, lane.w, block.levels(), TOP);
        EncodeQ45<TOP>::template finish<true, true>(lane, fit);
    }
};

struct EncodeQ4_K_IK : RefinedQ45<15> {};
struct EncodeQ5_K_IK : RefinedQ45<31> {};

// 16 sub-blocks of 16.
struct EncodeQ2_K {
    static const int VALUES = 16, BLOCK = 256, BYTES = 84, SCRATCH = SuperBlock<16>::SCRATCH;
    static const bool COMPUTES_WEIGHTS = false;

    STATIC_INLINE void plain(const Lane& lane) {
        const ValuesBySize values(lane.x);
        const Spread& of = values.of;
        Unsettled open;
        BestLine best = fit_by_sizes(values, open);
        const Fit fit = {of.flat ? 0.0f : best.scale, 0, of.flat ? of.low : best.low, 0, of.sum_w, of.size};
        finish<false>(lane, fit, [&](float& inverse, float& base) {
            if (of.flat) return;
            if (open.again != 0) values.settle(best, open, (float)ValuesBySize::CANDIDATES);
            inverse = values.inverse_of(best);
            if (!is_finite(inverse)) inverse = 0;
            base = best.base;
        });
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        const SuperBlock<16> block(lane);
        weigh(lane, 16, block.shared_squares() / 256.0f);
        const auto weight = [&](int i) { return lane.w[i]; };
        const Fit fit = fit_with_min<16, true>(lane.x, weight, 3, -0.9f, 0.05f, 36);
        finish<true>(lane, fit, [&](float& inverse, float& base) {
            inverse = fit.inverse;
            base = fit.base;
        });
    }

    // The level where the lane's scale is 0 in the end; evaluated only then.
    template <bool GUARDED, class F> STATIC_INLINE void finish(const Lane& lane, const Fit& fit, F level_origin) {
        const SuperBlock<16> block(lane);
        block.quantize_scales<GUARDED>(fit, 15);
        const int byte = codes_of(block);
        const float d = as_half(block.fits()[0]) * (float)(byte & 15), dmin = as_half(block.fits()[1]) * (float)(byte >> 4);
        float inverse = 0, base = 0;
        if (d == 0) level_origin(inverse, base);
        block.put_levels<0, 3>(d, dmin, fit.size, [&](int i) {
            if (d != 0) return level_of<false>((lane.x[i] + dmin) / d, 3);
            return level_of<GUARDED>(inverse * (lane.x[i] - base), 3);
        });
        write(block, byte);
    }

    STATIC_INLINE int codes_of(const SuperBlock<16>& block) {
        return (block.code(0, block.lane.part) | block.code(1, block.lane.part) << 4) & 255;
    }

    STATIC_INLINE void write(const SuperBlock<16>& block, int byte) {
        const int part = block.lane.part;
        uint8_t* out = block.lane.out;
        out[part] = (uint8_t)byte;
        // Of each 128 values, byte l of 32: levels l, l + 32, l + 64, l + 96.
        const int at = part / 8 * 32 + part % 8;
        const uint32_t low = block.levels_of(at) | block.levels_of(at + 8) << 2;
        *(uint32_t*)(out + 16 + 4 * part) = low | block.levels_of(at + 16) << 4 | block.levels_of(at + 24) << 6;
        if (part < 2) store_half(out + 80 + 2 * part, block.fits()[part]);
    }
};

// Values are quantized by the fitted scale, before it is rounded to f16; by 0 to level 0.
struct EncodeQ2_K_IK : EncodeQ2_K {
    STATIC_INLINE void weighted(const Lane& lane, float) {
        const SuperBlock<16> block(lane);
        weigh(lane, 16, 0.75f * block.shared_squares<SCRATCH>() / 256.0f);
        block.quantize_scales<true>(fit_with_min_refined<16>(lane.x, lane.w, block.levels(), 3), 15, 1e-16f);
        const float d = block.fits()[0] * (float)block.code(0, lane.part), low = block.fits()[1] * (float)block.code(1, lane.part);
        const float inverse = inverse_or_zero(d);
        block.put_levels([&](int i) { return (uint32_t)level_of<false>((lane.x[i] + low) * inverse, 3); });
        write(block, codes_of(block));
    }

    static const int SCRATCH = SuperBlock<16>::WITH_LEVELS;
};

// 16 sub-blocks of 16, without minimums.
struct EncodeQ3_K {
    static const int VALUES = 16, BLOCK = 256, BYTES = 110, SCRATCH = SuperBlock<16>::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void plain(const Lane& lane) {
        const SuperBlock<16> block(lane);
        const Fit fit = fit_by_descent<16>(lane.x, lane.w, 4);  // leaves its levels in w
        block.fitted(0)[lane.part] = fit.scale;
        __syncwarp();
        const float largest = block.largest_scale(), iscale = -32.0f / (largest != 0 ? largest : 1.0f);
        const int code = min(max((int)(int8_t)nearest_int(iscale * fit.scale), -32), 31) + 32;
        block.codes(0)[lane.part] = (float)(largest != 0 ? code : 0);
        finish(lane, fit, largest != 0 ? 1.0f / iscale : 0.0f, lane.w);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) {
        const SuperBlock<16> block(lane);
        weigh(lane, 16, 2.0f * block.shared_squares() / 256.0f);
        float sum_w = 0;
        for (int i = 0; i < 16; i++) sum_w = sum_w + lane.w[i];
        const Fit fit = fit_signed<16>(lane.x, lane.w, 4);
        block.fitted(0)[lane.part] = fit.scale;
        block.weights()[lane.part] = sum_w;
        __syncwarp();
        const Fit scales = fit_signed_across_lanes(block.fitted(0), block.weights(), 32, lane.part);
        // Where sums overflow, ggml's iscale is -0: every level is 0, its code 32, and d a sum of zeros, or NaN.
        const bool infinite = !is_finite(block.largest_scale());
        float nothing = 0;
        for (int j = 0; j < 16; j++) nothing = nothing + 0.0f * block.weights()[j];
        const int code = infinite ? 32 : min(max(nearest_int(scales.inverse * fit.scale), -32), 31) + 32;
        block.codes(0)[lane.part] = (float)(scales.inverse != 0 || infinite ? code : 0);
        finish(lane, fit, infinite ? nothing : scales.scale, 0);
    }

    // half: the scale of the scales, before it is rounded; levels: those of the search, or 0.
    STATIC_INLINE void finish(const Lane& lane, const Fit& fit, float half, const float* levels) {
        const SuperBlock<16> block(lane);
        __syncwarp();
        const int part = lane.part;
        const float d = as_half(half) * (float)(block.code(0, part) - 32);
        block.put_levels<4, 3>(d, 0, fit.size, [&](int i) {
            const float v = lane.x[i];
            if (d != 0) return min(max(nearest_int(v / d), -4), 3);
            if (fit.inverse == 0) return -4;  // a sub-block of zeros
            return levels ? (int)levels[i] : min(max(nearest_int(v * fit.inverse), -4), 3);
        });
        uint8_t* out = lane.out;
        const int at = part / 8 * 32 + part % 8;
        uint32_t low = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) low |= (block.levels_of(at + 8 * k) & 0x03030303u) << 2 * k;
        store4_by2(out + 32 + 4 * part, low);
        if (part < 8) {
            uint32_t high = 0;
#pragma unroll
            for (int k = 0; k < 8; k++) high |= (block.levels_of(8 * k + part) >> 2 & 0x01010101u) << k;
            store4_by2(out + 4 * part, high);
        }
        if (part < 8) out[96 + part] = (uint8_t)((block.code(0, part) & 15) | (block.code(0, part + 8) & 15) << 4);
        if (part < 4) {
            uint32_t high = 0;
            for (int k = 0; k < 4; k++) high |= (uint32_t)block.code(0, part + 4 * k) >> 4 << 2 * k;
            out[104 + part] = (uint8_t)high;
        }
        if (part == 0) store_half(out + 108, half);
    }
};

// A scale and levels by ik_llama.cpp's search; a sub-block counts as zero by the inverse.
template <int NMAX> INLINE Fit refined_signed(const Lane& lane) {
    const float* x = lane.x;
    const Fit fit = {fit_signed_refined<16>(x, lane.w, SuperBlock<16>(lane).levels(), NMAX)};
    const float size = fabsf(largest_of<16>(x));
    return Fit{fit.scale, size < 1e-15f ? 0.0f : 1.0f, 0, 0, 0, size};
}

struct EncodeQ3_K_IK : EncodeQ3_K {
    static const int SCRATCH = SuperBlock<16>::WITH_LEVELS;

    STATIC_INLINE void weighted(const Lane& lane, float) {
        const SuperBlock<16> block(lane);
        weigh(lane, 16, 2.0f * block.shared_squares<SCRATCH>() / 256.0f);
        float sum_w = 0;
        for (int i = 0; i < 16; i++) sum_w = sum_w + lane.w[i];
        const Fit fit = refined_signed<4>(lane);
        block.fitted(0)[lane.part] = fit.scale;
        block.weights()[lane.part] = sum_w;
        __syncwarp();
        if (lane.part == 0) {
            block.fits()[0] = fit_signed_refined<16>(block.fitted(0), block.weights(), block.codes(0), 32);
            for (int i = 0; i < 16; i++) block.codes(0)[i] = block.codes(0)[i] + 32.0f;
        }
        __syncwarp();
        finish(lane, fit, block.fits()[0], block.levels());
    }
};

// 16 sub-blocks of 16, without minimums. Weights are the unmodified importances.
struct EncodeQ6_K {
    static const int VALUES = 16, BLOCK = 256, BYTES = 210, SCRATCH = SuperBlock<16>::SCRATCH;
    static const bool COMPUTES_WEIGHTS = true;

    STATIC_INLINE void plain(const Lane& lane) {
        for (int i = 0; i < 16; i++) lane.w[i] = lane.x[i] * lane.x[i];
        finish(lane, fit_signed<16>(lane.x, lane.w, 32), 0);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) { finish(lane, fit_signed<16>(lane.x, lane.w, 32), 0); }

    // levels: those of the search, or 0.
    STATIC_INLINE void finish(const Lane& lane, const Fit& fit, const float* levels) {
        const SuperBlock<16> block(lane);
        const int part = lane.part;
        block.fitted(0)[part] = fit.scale;
        __syncwarp();
        const float largest = block.largest_scale();
        const bool dead = fabsf(largest) < 1e-15f;
        const float iscale = -128.0f / (dead ? 1.0f : largest), half = dead ? 0.0f : 1.0f / iscale;
        const int code = dead ? 0 : (int8_t)min(nearest_int(iscale * fit.scale), 127);
        const float d = as_half(half) * (float)code, inverse = dead ? 0.0f : fit.inverse;
        block.put_levels<32, 31>(d, 0, fit.size, [&](int i) {
            const float v = lane.x[i];
            if (d != 0) return min(max(nearest_int(v / d), -32), 31);
            if (inverse == 0) return -32;  // a sub-block of zeros
            return levels ? (int)levels[i] : min(max(nearest_int(v * inverse), -32), 31);
        });
        uint8_t* out = lane.out;
        // Of each 128 values, byte l of 32: levels l and l + 64, then l + 32 and l + 96; then the high bits of all.
        const int at = part / 8 * 32 + part % 8, chunk = part / 8, l = part % 8 * 4;
        const uint32_t a = block.levels_of(at), b = block.levels_of(at + 8), c = block.levels_of(at + 16),
                       e = block.levels_of(at + 24), low = 0x0f0f0f0fu, high = 0x03030303u;
        store4_by2(out + 64 * chunk + l, (a & low) | (c & low) << 4);
        store4_by2(out + 64 * chunk + 32 + l, (b & low) | (e & low) << 4);
        store4_by2(out + 128 + 4 * part, (a >> 4 & high) | (b >> 4 & high) << 2 | (c >> 4 & high) << 4 | (e >> 4 & high) << 6);
        out[192 + part] = (uint8_t)code;
        if (part == 0) store_half(out + 208, half);
    }
};

struct EncodeQ6_K_IK : EncodeQ6_K {
    static const int SCRATCH = SuperBlock<16>::WITH_LEVELS;

    STATIC_INLINE void plain(const Lane& lane) {
        for (int i = 0; i < 16; i++) lane.w[i] = lane.x[i] * lane.x[i];
        weighted(lane, 0);
    }

    STATIC_INLINE void weighted(const Lane& lane, float) { finish(lane, refined_signed<32>(lane), SuperBlock<16>(lane).levels()); }
};
