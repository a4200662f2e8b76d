// IQ1_KT, IQ2_KT, IQ3_KT, IQ4_KT: the nearest of many pseudo-random points to 8 or 4 values; the twin of
// quantkit/kernels/cpu/encode/trellis.py, which describes the search of a row: same steps, same bytes.
//
// A thread block has a row (trellis.cu), a warp 32 of its values at a time; intermediate results until the row's scale
// is chosen are in scratch memory on the device. Lanes correspond to those of the CPU's vectors of 16, so sums have
// the same order; sums over a row are computed by one lane.
#pragma once
#include "encode/trellis_search.cuh"
#include "encode/trellis_settings.cuh"
#include "unpack/tables.cuh"

// IQ4_NL's values: scales of IQ1_KT and IQ2_KT are multiples of them.
INLINE float trellis_level(int i) {
    typedef kvalues_iq4nl T;
    const uint32_t four = i < 8 ? i < 4 ? T::A : T::B : i < 12 ? T::C : T::D;
    return (float)(int)((int32_t)(four << (24 - 8 * (i & 3))) >> 24);
}

// Scratch memory of a row's search: per 32 values WORDS words of survivors, the values, their weights, two curves of
// 16 errors, and numbers. Addresses are computed at each use, because registers are scarce.
template <class T> struct TrellisRow {
    float* survivors;
    int count;

    __device__ __forceinline__ TrellisRow(uint8_t* work, int64_t n) : survivors((float*)work), count((int)(n / 32)) {}

    __device__ __forceinline__ float* part(int words) const { return survivors + (int64_t)count * (T::WORDS + words); }
    __device__ __forceinline__ float* x(int b) const { return part(0) + 32 * b; }
    __device__ __forceinline__ float* w(int b) const { return part(32) + 32 * b; }
    __device__ __forceinline__ float* curves(int b) const { return part(64) + 32 * b; }
    __device__ __forceinline__ float& guess(int b) const { return part(96)[b]; }
    __device__ __forceinline__ float& energy(int b) const { return part(97)[b]; }
    __device__ __forceinline__ float& counted(int b) const { return part(98)[b]; }
    // Two choices: the level of the scale, sign and codebook as an index, the indices of points.
    __device__ __forceinline__ float* levels(int at, int b) const { return part(99 + at) + b; }
    __device__ __forceinline__ int* combinations(int at, int b) const { return (int*)part(101 + at) + b; }
    __device__ __forceinline__ int* places(int at, int b) const { return (int*)part(103 + at * T::GROUPS) + T::GROUPS * b; }
    __device__ __forceinline__ float* p(int b) const { return part(103 + 2 * T::GROUPS) + T::GROUPS * b; }
    __device__ __forceinline__ float* q(int b) const { return part(103 + 3 * T::GROUPS) + T::GROUPS * b; }
    __device__ __forceinline__ int* filled(int b) const { return (int*)part(103 + 4 * T::GROUPS) + T::SIDES * b; }
    // The least error per sign and codebook; the least of both curves.
    __device__ __forceinline__ float* least(int b) const { return part(103 + 4 * T::GROUPS + T::SIDES) + T::SIDES * b; }
    __device__ __forceinline__ float& gain(int b) const { return part(103 + 4 * T::GROUPS + 2 * T::SIDES)[b]; }

    __device__ __forceinline__ float* survivors_of(int b, int sign_and_codebook) const {
        return survivors + (int64_t)b * T::WORDS + sign_and_codebook * (T::WORDS / T::SIDES);
    }
};

// The search settings of a row. heavy: energy above which values count as large; deep: energy above which 32 values
// are searched more deeply; step: one in `step` values of little weight counts; tries: scales of the row to try;
// uneven: whether few values dominate the row; careful: whether unequal weights matter.
struct Effort {
    double heavy, deep;
    float patience;
    int step, tries;
    bool uneven, careful;

    __device__ __forceinline__ bool patient() const { return patience > 1.0f; }
};

// ---------------------------------------------------------------- values and weights

// Below this, values or weights are almost 0; and the weight that replaces theirs.
const double ALMOST_0 = 1e-14, LEAST_WEIGHT = 1e-4;

INLINE float at_most_1e30(double v) { return (float)(v < 1e30 ? v : 1e30); }

// Adds lanes l and l + 16, then 16 lanes as a tree.
INLINE float sum_of_32(float v) { return sum_of_16(v + __shfl_xor_sync(FULL, v, 16)); }

// An estimate of the scale that fits 32 values best, one per lane: from the fourth root of their mean fourth power; 0
// for zeros.
INLINE float guess_scale(float x) {
    const float top = warp_max(fabsf(x));
    if (top == 0) return 0;
    float v = x * (1.0f / top);
    v = v * v;
    return top * (__fsqrt_rn(__fsqrt_rn(sum_of_32(v * v) * (1.0f / 32))) * 0.0232f);
}

// The weight of each of 32 values, one per lane; x in units of `unit`, weights in units of `top`.
INLINE float weight_by_importance(float x, float importance, float sigma2, double unit, double top) {
    const float weight = importance * (float)(1 / top) * __fsqrt_rn(sigma2 + x * x);
    const double wx = sum_of_32(weight * fabsf(x)), w2 = sum_of_32(weight * weight), x2 = sum_of_32(x * x);
    const double both = top * unit;
    const bool dead = x2 * unit * unit < ALMOST_0 || w2 * both * both < ALMOST_0 || wx * both * unit < ALMOST_0;
    return dead ? at_most_1e30(LEAST_WEIGHT / both) : weight;
}

// The weights of 256 values, by a warp. importance: of these columns, or 0.
INLINE void weigh_256(const float* x, float* w, const float* importance, double unit, double top) {
    float squares = 0;
    for (int i = lane_of_16(); i < 256; i += 16) squares = squares + x[i] * x[i];
    const float square = sum_of_16(squares);
    const bool dead = (double)square * unit * unit < 256 * ALMOST_0;
    for (int i = lane_id(); i < 256; i += 32) {
        const float v = x[i];
        float weight;
        if (dead) weight = at_most_1e30(LEAST_WEIGHT / (unit * (importance ? top : unit)));
        else if (importance) weight = weight_by_importance(v, importance[i], square * (2.0f / 256), unit, top);
        else weight = square * (0.5f / 256) + v * v;
        w[i] = weight;
    }
}

// ---- errors as a function of the scale

// The error on a curve at a scale, relative to the estimate: no gain far beyond its ends.
INLINE float gain_at(const float* curve, float ratio) {
    const int bits = __float_as_int(ratio);
    const float m = __int_as_float((bits & 0x7fffff) | 0x3f800000);
    const float log2 = (float)((bits >> 23) - 127) + ((2.0f - m * (float)(1.0 / 3)) * m - (float)(5.0 / 3));
    const float t = log2 * (float)(1 / 0.0908534) + 7.5f, at = fmaxf(fminf(t, 14.99f), 0.0f);
    const int k = (int)at;
    const float inside = curve[k] + (at - (float)k) * (curve[k + 1] - curve[k]);
    const float beyond = fminf(t, 0.0f) * 0.05f - fmaxf(t - 15.0f, 0.0f) * 0.2f;
    return fminf(inside, 0.0f) * fmaxf(beyond + 1.0f, 0.0f);
}

// Scales are one of 16 levels times the row's: the codebook's, or 0 .. 15, of which the 8 around the estimate are
// tried.
template <bool CODEBOOK> struct SixteenLevels {
    static const int TRIED = CODEBOOK ? 16 : 8;
    static const bool SIGNED = CODEBOOK;
    STATIC_INLINE float level(int i) { return CODEBOOK ? trellis_level(i) : (float)i; }
    // The level of this lane; v: the one of least error, guess: the estimate, both over the row's scale.
    STATIC_INLINE float near(float, float guess) {
        if (CODEBOOK) return level(lane_of_16());
        const float first = lesser(greater(round_even(guess - 2.5f), 0.0f), 8.0f);
        return (float)(lane_id() % 8) + first;
    }

    // The least error of 32 values, by the curve of one sign, for the row's scale sign * d, each half of the warp with
    // its own d; and the scale of the values.
    STATIC_INLINE float least(float d, float sign, int side, float guess, const float* curve, const float*, float& scale) {
        const float inverse = 1.0f / guess, least_d = __shfl_sync(FULL, d, 0, 16), most_d = __shfl_sync(FULL, d, 15, 16);
        float least = 0;
        scale = 0;
#pragma unroll 1
        for (int i = 0; i < 16; i++) {
            const float of = level(i), by = fabsf(of) * inverse;
            if (((of < 0) == (sign > 0)) != (side == 1) || !(by * least_d < 1.65f && by * most_d > 0.3f)) continue;
            const float gain = gain_at(curve, d * by);
            scale = gain < least ? d * fabsf(of) : scale;
            least = fminf(gain, least);
        }
        return least;
    }
};

// Scales are -64 .. 63 times the row's.
struct WideLevels {
    static const int TRIED = 16;
    static const bool SIGNED = false;
    // The 16 levels nearest to v; none if it is NaN, as for zeros with a scale of 0.
    STATIC_INLINE float near(float v, float) {
        return (float)lane_of_16() + (lesser(55.0f, greater(-56.0f, round_even(v))) - 8.0f);
    }

    STATIC_INLINE float least(float d, float sign, int side, float guess, const float* curve, const float* grid, float& scale) {
        const float inverse = 1.0f / guess, most = (side == 0) == (sign > 0) ? 63.0f : 64.0f;
        float least = 0;
        scale = 0;
#pragma unroll 1
        for (int i = 0; i < 16; i++) {
            const float of = lesser(round_even(guess * grid[i] / d), most) * d, gain = gain_at(curve, of * inverse);
            scale = gain < least ? of : scale;
            least = lesser(gain, least);
        }
        return least;
    }
};

// ---------------------------------------------------------------- types

// Common to the encoders of all types; SETTINGS: a struct of trellis_settings.
template <class TYPE, class SETTINGS> struct Trellis : SETTINGS {
    static const int POINTS = SETTINGS::POINTS, SIZE = SETTINGS::SIZE, SIGNS = SETTINGS::SIGNS, CODEBOOKS = SETTINGS::CODEBOOKS;
    static const int SIDES = SIGNS * CODEBOOKS, GROUPS = 32 / SIZE, SLOTS = SETTINGS::DEEP_SEARCHES + 1;
    static const int WIDTH = SURVIVORS * SLOTS, WORDS = 3 * WIDTH * GROUPS * SIDES;

    template <class Depth>
    STATIC_INLINE void search(const Codebook& codebook, int codebook_index, float sign, float scale, const float* x, const float* w,
                              float* survivors, int slot) {
        if constexpr (Depth::listed)
            search_listed<WIDTH, Depth>(codebook, codebook_index, sign, sign / scale, x, w, survivors, SURVIVORS * slot,
                                        WORDS / SIDES);
        else
            search_points<SIZE, POINTS, SIGNS == 1, WIDTH, Depth>(codebook, codebook_index, sign, sign / scale, x, w, survivors,
                                                                  SURVIVORS * slot);
    }
    template <int ACROSS = 16> STATIC_INLINE float errors(float* survivors, int slots, float d) {
        const int AT_ONCE = TYPE::Levels::SIGNED ? 1 : ROOMY && ACROSS == 16 ? 2 : TYPE::Levels::TRIED / 8;
        return errors_of<GROUPS, WIDTH, ACROSS, AT_ONCE, !TYPE::Levels::SIGNED>(survivors, slots, d);
    }

    // Keeps the points near 32 values for scales around `center`, with either sign and either codebook.
    template <class Depth>
    STATIC_INLINE void search_around(const TrellisRow<TYPE>& row, const Codebook& codebook, int b, float center, int searches) {
        float ratio = 1;
        for (int k = 1; k < searches; k++) ratio = ratio * 0.8944272f;
#pragma unroll 1
        for (int c = 0; c < SIDES; c += Depth::codebooks) {
            float at = center * ratio;
#pragma unroll 1
            for (int k = 0; k < searches; k++) {
                search<Depth>(codebook, c % CODEBOOKS, c < CODEBOOKS ? 1.0f : -1.0f, at, row.x(b), row.w(b), row.survivors_of(b, c),
                              k);
                at = at * 1.25f;
            }
        }
    }

    // Error bound, less the energy, below which a sign and codebook of 32 values is searched again.
    STATIC_INLINE float prune_limit(const TrellisRow<TYPE>& row, int b, float patience) {
        float least = NOTHING_FOUND;
        for (int c = 0; c < SIDES; c++) least = lesser(least, row.least(b)[c]);
        return least + greater(row.energy(b) + least, 0.0f) * patience;
    }

    // The errors of 32 values for 16 scales; the codebook of least error, and the lane. Writes the least of each.
    STATIC_INLINE float find_curve(const TrellisRow<TYPE>& row, int b, int side, float of_grid, int& better, int& where) {
        float least = 0, lowest = NOTHING_FOUND;
        better = where = 0;
#pragma unroll 1
        for (int codebook_index = 0; codebook_index < CODEBOOKS; codebook_index++) {
            const int c = side * CODEBOOKS + codebook_index;
            const float error = errors(row.survivors_of(b, c), row.filled(b)[c], of_grid), best = least_of_16(error);
            least = codebook_index ? lesser(error, least) : error;
            if (lane_id() == 0) row.least(b)[c] = best;
            if (best < lowest) {
                lowest = best;
                better = codebook_index;
                where = first_with(best, error);
            }
        }
        return least;
    }

    // Whether a few of 32 weights dominate their sum.
    STATIC_INLINE bool unequal(const float* w) {
        const float weight = w[lane_id()];
        const double total = sum_of_32(weight), squares = sum_of_32(weight * weight);
        return squares * 32 > 4.0 * (total * total);
    }

    // Selects the search settings of a row. total, squares: sums of the energies and of their squares; weighed: with
    // an importance.
    STATIC_INLINE void weigh_row(int count, double total, double squares, bool weighed, Effort& effort) {
        const double share = total > 0 ? squares / (total * total) : 0.0, mean = total * 32 / (double)(32 * count);
        effort.heavy = 2.0 * mean;
        effort.uneven = share > 0.1 || share * count > 1.5;
        effort.tries = effort.uneven && share > 0.035 ? TYPE::ROW_SCALES : 1;
        effort.step = effort.tries > 1 ? 1 : max(count / 16, 1);
        effort.patience = effort.tries > 1 || share > 0.04 ? 1e30f : 0.25f;
        effort.careful = weighed && (TYPE::DEEP_IF_UNEQUAL || effort.patient());
        effort.deep = effort.patient() ? TYPE::PATIENT_DEEP_ENERGY * mean : 1e300;
        if (effort.uneven && total * (1.0 / 16) < effort.deep) effort.deep = total * (1.0 / 16);
    }

    // Searches the b-th 32 values of a row; writes the number of filled slots, and curves of errors.
    STATIC_INLINE void search_block(const TrellisRow<TYPE>& row, const Codebook& codebook, int b, const Effort& effort) {
        const float center = row.guess(b), around = center > 0 ? center : 1.0f;
        const double energy = center > 0 ? row.energy(b) : 0.0;
        const bool heavy = energy > effort.heavy;
        int slots = heavy || effort.patient() ? TYPE::HEAVY_SEARCHES : TYPE::LIGHT_SEARCHES;
        if (energy > effort.deep || (unequal(row.w(b)) && effort.careful)) {
            slots = energy > effort.deep ? SLOTS - 1 : TYPE::HEAVY_SEARCHES;
            search_around<typename TYPE::Deep>(row, codebook, b, around, slots);
        } else {
            search_around<typename TYPE::First>(row, codebook, b, around, slots);
        }
        const float counted = heavy ? 1.0f : b % effort.step == 0 ? (float)effort.step : 0.0f;
        if (lane_id() < SIDES) row.filled(b)[lane_id()] = slots;
        if (lane_id() == 0) row.counted(b) = counted;
        if (counted == 0 && !TYPE::HAS_WIDE_LEVELS) return;
        __syncwarp();
        const float of_grid = codebook.grid[lane_of_16()] * center;
        float scale_of[SIGNS];
#pragma unroll
        for (int side = 0; side < SIGNS; side++) {
            int better, where;
            const float least = find_curve(row, b, side, of_grid, better, where);
            scale_of[side] = center * codebook.grid[where];
            if (lane_id() < 16) row.curves(b)[16 * side + lane_id()] = least;
        }
        __syncwarp();
        if constexpr (TYPE::RETRIES) {
            if (slots >= SLOTS - 1 || !(center > 0)) return;
            const float limit = prune_limit(row, b, effort.patience);
#pragma unroll
            for (int side = 0; side < SIGNS; side++) {
                const float* least = row.least(b) + side * CODEBOOKS;
                const int better = least[CODEBOOKS - 1] < least[0] ? CODEBOOKS - 1 : 0, c = side * CODEBOOKS + better;
                if (least[better] > limit) continue;
                float* survivors = row.survivors_of(b, c);
                search<typename TYPE::Retry>(codebook, better, side ? -1.0f : 1.0f, scale_of[side], row.x(b), row.w(b), survivors,
                                             slots);
                const int filled = slots + 1;
                const float error = errors(survivors, filled, of_grid), lowest = least_of_16(error);
                if (lane_id() == 0) {
                    row.filled(b)[c] = filled;
                    row.least(b)[c] = lowest;
                }
                if (lane_id() < 16) row.curves(b)[16 * side + lane_id()] = lesser(error, row.curves(b)[16 * side + lane_id()]);
            }
        }
    }

    // The error of the b-th 32 values for the row's scale sign * d, each half of the warp with its own d; exact: with
    // the points found.
    STATIC_INLINE float cost(const TrellisRow<TYPE>& row, const Codebook& codebook, int b, float d, float sign, bool exact) {
        const float limit = exact && SIDES > 1 ? prune_limit(row, b, 0.25f) : 0.0f;
        float least = 0;
#pragma unroll 1
        for (int side = 0; side < SIGNS; side++) {
            float scale, error = TYPE::Levels::least(d, sign, side, row.guess(b), row.curves(b) + 16 * side, codebook.grid, scale);
            if (exact) {
                error = 0;
#pragma unroll 1
                for (int c = side * CODEBOOKS; c < (side + 1) * CODEBOOKS; c++)
                    if (SIDES == 1 || row.least(b)[c] <= limit)
                        error = lesser(errors<32>(row.survivors_of(b, c), row.filled(b)[c], scale), error);
            }
            least = lesser(error, least);
        }
        return least;
    }

    // Writes the minimum of the curves of 32 values.
    STATIC_INLINE void find_gain(const TrellisRow<TYPE>& row, int b) {
        float gain = least_of_16(row.curves(b)[lane_of_16()]);
        if (SIGNS == 2) gain = lesser(gain, least_of_16(row.curves(b)[16 + lane_of_16()]));
        if (lane_id() == 0) row.gain(b) = gain;
    }
    STATIC_INLINE bool counts(const TrellisRow<TYPE>& row, int b) { return row.counted(b) > 0 && row.guess(b) > 0; }
    STATIC_INLINE double error_left(const TrellisRow<TYPE>& row, int b) {
        return (double)greater(row.energy(b) + row.gain(b), 0.0f);
    }

    // Searches more deeply 32 values that cause much of a row's error, and ranks all points for groups of them.
    STATIC_INLINE void refine_outlier(const TrellisRow<TYPE>& row, const Codebook& codebook, int b, double total) {
        const double part = row.count == 8 ? TYPE::SHORT_ROW_FACTOR * total : total, heavy = TYPE::SCAN_ERROR * part;
        if (!(counts(row, b) && error_left(row, b) > TYPE::DEEP_ERROR * part)) return;
        const float center = row.guess(b), of_grid = codebook.grid[lane_of_16()] * center;
        float lowest = NOTHING_FOUND, error = 0;
#pragma unroll 1
        for (int side = 0; side < SIGNS; side++) {
            int better, where;
            const float least = least_of_16(find_curve(row, b, side, of_grid, better, where));
            if (!(least < lowest)) continue;
            lowest = least;
            const float scale = center * codebook.grid[where];
            const int c = side * CODEBOOKS + better;
            pick_points<GROUPS, WIDTH>(row.survivors_of(b, c), row.filled(b)[c], scale, row.p(b), row.q(b), row.places(0, b));
            __syncwarp();
            if (lane_id() < GROUPS) {
                float v[SIZE], weight[SIZE];
                load_values<SIZE>(row.x(b) + SIZE * lane_id(), v);
                load_values<SIZE>(row.w(b) + SIZE * lane_id(), weight);
#pragma unroll
                for (int i = 0; i < SIZE; i++) v[i] = v[i] * v[i] * weight[i];
                error = tree_sum<SIZE>(v) + (scale * row.q(b)[lane_id()] - row.p(b)[lane_id()]) * scale;
            }
            __syncwarp();
        }
        __syncwarp();
        const float limit = prune_limit(row, b, 1.0f);
        int filled = SLOTS;
        for (int c = 0; c < SIDES; c++) filled = min(filled, row.filled(b)[c]);
        __syncwarp();
        if (filled < SLOTS - 1) search_around<typename TYPE::Deep>(row, codebook, b, center, SLOTS - 1);
        if (lane_id() < SIDES) row.filled(b)[lane_id()] = SLOTS - 1;
#pragma unroll 1
        for (int c = 0; c < SIDES; c++) {
            if (row.least(b)[c] > limit) continue;
            const float sign = c < CODEBOOKS ? 1.0f : -1.0f;
            scan_points<SIZE, POINTS, SIGNS == 1, WIDTH, SLOTS - 1>(codebook, c % CODEBOOKS, sign, sign / center, row.x(b),
                                                                    row.w(b), row.survivors_of(b, c), error, heavy);
        }
#pragma unroll 1
        for (int side = 0; side < SIGNS; side++) {
            int better, where;
            const float least = find_curve(row, b, side, of_grid, better, where);
            if (lane_id() < 16) row.curves(b)[16 * side + lane_id()] = least;
        }
        __syncwarp();
    }

    // As best_level, for signed levels: a lane's scale has one sign only, so a single pass covers both.
    STATIC_INLINE float best_of_signed(const TrellisRow<TYPE>& row, int b, float d, int& combination) {
        const float level = TYPE::Levels::level(lane_of_16()), scale = level * d;
        const int side = scale < 0 ? 1 : 0;
        const float error = errors(row.survivors_of(b, side), row.filled(b)[0], fmaxf(fabsf(scale), 0.0f));
        const float best = least_of_16(error);
        const uint32_t least = __ballot_sync(FULL, error == best), first = __ballot_sync(FULL, error == best && side == 0);
        const bool any = best < NOTHING_FOUND;
        combination = any && (first & 0xffff) == 0 ? 1 : 0;
        const int lane = __ffs((int)((combination ? least : first) & 0xffff)) - 1;
        return any ? __shfl_sync(FULL, level, lane & 15, 16) : 0.0f;
    }

    // The scale's level of least error for 32 values, and its sign and codebook as an index.
    STATIC_INLINE float best_level(const TrellisRow<TYPE>& row, const Codebook& codebook, int b, float d, float patience,
                                   int& combination) {
        if constexpr (TYPE::Levels::SIGNED) return best_of_signed(row, b, d, combination);
        const float limit = TYPE::HAS_WIDE_LEVELS ? prune_limit(row, b, patience) : 0.0f;
        float lowest = NOTHING_FOUND, level = 0;
        int least_filled = SLOTS;
        for (int c = 0; c < SIDES; c++) least_filled = min(least_filled, row.filled(b)[c]);
        const int around = TYPE::HAS_WIDE_LEVELS && least_filled == SLOTS - 1 ? 1 : 0;
        combination = 0;
#pragma unroll 1
        for (int c = 0; c < SIDES; c++) {
            if (TYPE::HAS_WIDE_LEVELS && row.least(b)[c] > limit) continue;
            const float sign = c < CODEBOOKS ? 1.0f : -1.0f, curve = row.curves(b)[(c < CODEBOOKS ? 0 : 16) + lane_of_16()];
            const float near = row.guess(b) * codebook.grid[first_with(least_of_16(curve), curve)];
            const int count = row.filled(b)[c];
#pragma unroll 1
            for (int k = -around; k <= around; k++) {
                const float of = TYPE::Levels::near(sign * near / d + (float)(16 * k), row.guess(b) / d);
                const float scale = of * (d * sign);
                float error = errors<TYPE::Levels::TRIED>(row.survivors_of(b, c), count, greater(scale, 0.0f));
                error = scale < 0 ? NOTHING_FOUND : error;
                const float best = least_of<TYPE::Levels::TRIED>(error);
                if (best < lowest) {
                    lowest = best;
                    level = __shfl_sync(FULL, of, first_with(best, error), 16);
                    combination = c;
                }
            }
        }
        return level;
    }

    // Chooses level and points of 32 values for a row's scale d. first: the row's first choice, which searches again
    // where the scale is far from the estimate; last: search for the chosen scale. at: which of two choices is
    // written.
    STATIC_INLINE void pick_level(const TrellisRow<TYPE>& row, const Codebook& codebook, int b, float d, float patience, bool first,
                                  bool last, int at) {
        int combination;
        float level, scale;
        const auto far_from_guess = [&] {
            level = best_level(row, codebook, b, d, patience, combination);
            scale = fabsf(level * d);
            const float guess = row.guess(b);
            return (scale > 1.65f * guess || scale < 0.6f * guess) && scale > 0;
        };
        const auto search_again = [&] {
            __syncwarp();
            if (lane_id() < SIDES) {
                row.filled(b)[lane_id()] = 1;
                row.least(b)[lane_id()] = 0;
            }
            search_around<typename TYPE::Deep>(row, codebook, b, scale, 1);
        };
        if constexpr (TYPE::Levels::SIGNED) {
#pragma unroll 1
            for (bool again = first; far_from_guess() && again; again = false) search_again();  // inlined once, to save registers
        } else if (far_from_guess() && first) {
            search_again();
            far_from_guess();
        }
        float* survivors = row.survivors_of(b, combination);
        int slots = row.filled(b)[combination];
        if constexpr (TYPE::FINISHES) {
            if (last && scale > 0 && slots < SLOTS) {
                search<typename TYPE::Final>(codebook, combination % CODEBOOKS, combination >= CODEBOOKS ? -1.0f : 1.0f, scale,
                                             row.x(b), row.w(b), survivors, slots);
                slots++;
            }
        }
        pick_points<GROUPS, WIDTH>(survivors, slots, scale, row.p(b), row.q(b), row.places(at, b));
        if (lane_id() == 0) {
            *row.levels(at, b) = level;
            *row.combinations(at, b) = combination;
        }
    }
};

// The index of a point.
INLINE int index_of(const Codebook& codebook, float level, int place) { return level != 0 ? codebook.indices[place] : 0; }

INLINE uint32_t code_of(float level) {
    int error = 0;
    for (int i = 1; i < 16; i++) error = trellis_level(i) == level ? i : error;
    return (uint32_t)error;
}

// Nibble b % 8 / 4 of byte b % 4 of four bytes, from eight numbers.
template <class F> INLINE void put_nibbles(uint8_t* out, F number) {
    if (lane_id() < 4) out[lane_id()] = (uint8_t)(number(lane_id()) | number(lane_id() + 4) << 4);
}

// q: the 8 * GROUPS indices of a block, levels and codebooks of its 8 scales; x: its values.
struct TrellisBlock {
    const float *levels, *x;
    const int *q, *combinations;
};

struct EncodeIQ1_KT : Trellis<EncodeIQ1_KT, trellis_settings::IQ1_KT> {
    typedef SixteenLevels<true> Levels;

    STATIC_INLINE void put(uint8_t* out, const TrellisBlock& of) {
        if (lane_id() < 8) {
            uint32_t code = code_of(of.levels[lane_id()]);
            for (int j = 0; j < 4; j++) code |= (uint32_t)of.q[4 * lane_id() + j] >> 12 << (4 + j);
            out[lane_id()] = (uint8_t)code;
        }
        out[8 + lane_id()] = (uint8_t)of.q[lane_id()];
        if (lane_id() < 16) out[40 + lane_id()] = (uint8_t)((of.q[lane_id()] >> 8 & 15) | (of.q[16 + lane_id()] >> 8 & 15) << 4);
    }
};

struct EncodeIQ2_KT : Trellis<EncodeIQ2_KT, trellis_settings::IQ2_KT> {
    typedef SixteenLevels<true> Levels;

    STATIC_INLINE void put(uint8_t* out, const TrellisBlock& of) {
        put_nibbles(out, [&](int b) { return code_of(of.levels[b]); });
        *(uint16_t*)(out + 4 + 2 * lane_id()) = (uint16_t)of.q[lane_id()];
    }
};

struct EncodeIQ3_KT : Trellis<EncodeIQ3_KT, trellis_settings::IQ3_KT> {
    typedef SixteenLevels<false> Levels;

    STATIC_INLINE void put(uint8_t* out, const TrellisBlock& of) {
        put_nibbles(out, [&](int b) { return (uint32_t)(int)of.levels[b]; });
        *(uint16_t*)(out + 4 + 2 * lane_id()) = (uint16_t)of.q[lane_id()];
        uint32_t signs = 0;
        for (int b = 0; b < 8; b++) signs |= (of.x[32 * b + lane_id()] < 0 ? 1u : 0u) << b;
        out[68 + lane_id()] = (uint8_t)signs;
    }
};

struct EncodeIQ4_KT : Trellis<EncodeIQ4_KT, trellis_settings::IQ4_KT> {
    typedef WideLevels Levels;

    STATIC_INLINE void put(uint8_t* out, const TrellisBlock& of) {
        if (lane_id() < 8) {
            uint32_t word = (uint32_t)((int)of.levels[lane_id()] + 64) << 1 | (uint32_t)(of.combinations[lane_id()] % CODEBOOKS);
            for (int j = 0; j < 8; j++) word |= (uint32_t)of.q[8 * lane_id() + j] >> 12 << (8 + 3 * j);
            *(uint32_t*)(out + 4 * lane_id()) = word;
        }
        for (int i = lane_id(); i < 64; i += 32) out[32 + i] = (uint8_t)of.q[i];
        out[96 + lane_id()] = (uint8_t)((of.q[lane_id()] >> 8 & 15) | (of.q[32 + lane_id()] >> 8 & 15) << 4);
    }
};
