// Pairs of values from 32 of the 64 pairs of 3-bit levels; the twin of quantkit/kernels/cpu/encode/ik_pairs.py, which
// proves that at most four pairs can be nearest within a cell of two levels.
//
// Source: ik_llama.cpp 8337e4cd3 iqk_quantize.cpp, quantize_row_iq2_kl_impl.
#pragma once
#include "encode/ik_rows.cuh"

// For each cell of two levels the candidate pairs, in the reference's order, padded with the last one: their values as
// bf16, and their indices, a byte each.
struct Cells {
    __align__(16) uint32_t values[64][4];
    uint32_t indices[64];
};

CONSTEXPR int pair_value(int pair, int which) {
    const int nibbles = pair < 16 ? level_in<iq2kl_pairs<0>>(pair) : level_in<iq2kl_pairs<1>>(pair - 16);
    return IQ3::value(nibbles >> 4 * which & 7);
}

CONSTEXPR double distance_of(double a, double b) { return a < b ? b - a : a - b; }

// Whether pair m is at least as near as pair n in both values, everywhere in a cell of two levels.
CONSTEXPR bool is_as_near(int m, int n, int cell) {
    for (int which = 0; which < 2; which++)
        for (int end = 0; end < 2; end++) {
            const int level = which ? cell % 8 : cell / 8, at = level + end;
            const double edge = at == 0 ? -1e9 : at == 8 ? 1e9 : (IQ3::value(at - 1) + IQ3::value(at)) / 2.0;
            if (distance_of(pair_value(m, which), edge) > distance_of(pair_value(n, which), edge)) return false;
        }
    return true;
}

CONSTEXPR Cells make_cells() {
    Cells t{};
    for (int cell = 0; cell < 64; cell++) {
        int result[4] = {}, count = 0;
        uint32_t seen = 0;
        for (int nth = 0; nth < 8; nth++) {
            int near = 0, least = 1 << 30;
            for (int n = 0; n < 32; n++) {
                const int a = IQ3::value(cell / 8) - pair_value(n, 0), b = IQ3::value(cell % 8) - pair_value(n, 1);
                if (seen >> n & 1 || a * a + b * b >= least) continue;
                near = n;
                least = a * a + b * b;
            }
            seen |= 1u << near;
            bool needed = true;
            for (int i = 0; i < count; i++) needed = needed && !is_as_near(result[i], near, cell);
            if (needed) result[count++] = near;
            if (least == 0) break;
        }
        for (int i = 0; i < 4; i++) {
            const int n = result[i < count ? i : count - 1];
            t.values[cell][i] = bf16_of(pair_value(n, 0)) | bf16_of(pair_value(n, 1)) << 16;
            t.indices[cell] |= (uint32_t)n << 8 * i;
        }
    }
    return t;
}

static __device__ const Cells CELLS = make_cells();

struct PairTables {
    const Buckets<IQ3>& buckets;
    const Cells& cells;
    __device__ __forceinline__ PairTables() : buckets(in_shared(BUCKETS_OF<IQ3>)), cells(in_shared(CELLS)) {}
};

// Two values, their weights, and the pair that they are rounded to.
struct Pair {
    float x, y, v, w, q, p;
    int index;
};

// Rounds values 2j and 2j + 1 times inverse to the pair of least weighted error. ANYWHERE: for values of any size.
template <bool ANYWHERE> INLINE Pair nearest_pair(const Lane& lane, const PairTables& t, int j, float inverse) {
    Pair pair = {lane.x[2 * j], lane.x[2 * j + 1], lane.w[2 * j], lane.w[2 * j + 1]};
    const float a = inverse * pair.x, b = inverse * pair.y;
    const Rounded first = ANYWHERE ? round_any<IQ3>(t.buckets, a, 0) : round_near<IQ3>(t.buckets, a, 0);
    const Rounded second = ANYWHERE ? round_any<IQ3>(t.buckets, b, 0) : round_near<IQ3>(t.buckets, b, 0);
    const int cell = 8 * first.level + second.level;
    const uint4 four = *(const uint4*)t.cells.values[cell];
    const uint32_t candidates[4] = {four.x, four.y, four.z, four.w};
    float least = 0;
    int best = 0;
#pragma unroll
    for (int c = 0; c < 4; c++) {
        const float q = low_of(candidates[c]), p = high_of(candidates[c]), off_a = q - a, off_b = p - b;
        const float distance = pair.v * off_a * off_a + pair.w * off_b * off_b;
        if (c && !(distance < least)) continue;
        least = distance;
        pair.q = q;
        pair.p = p;
        best = c;
    }
    if (ANYWHERE) pair.index = (int)(t.cells.indices[cell] >> 8 * best & 255);
    return pair;
}

// sum(w q x) and sum(w q q) for the pairs nearest to the values times inverse.
INLINE void rate_pairs(const Lane& lane, const PairTables& t, float inverse, float& qx, float& q2) {
    qx = q2 = 0;
#pragma unroll 4
    for (int j = 0; j < 16; j++) {
        const Pair r = nearest_pair<false>(lane, t, j, inverse);
        const float wq = r.v * r.q, wp = r.w * r.p;
        qx = qx + (wq * r.x + wp * r.y);
        q2 = q2 + (wq * r.q + wp * r.p);
    }
}

struct PairLevels : RowTraits {
    static const int BYTES = 86, SCRATCH = LevelBlock<8>::SCRATCH, HEADER = 2, TERMS = 16;
    static const bool FITTED = false;
    static constexpr float NEAR = 2.25f, STRETCH = 1.025f;
    typedef PairTables Tables;

    // The scale of the largest magnitude becomes -32.
    STATIC_INLINE float scale_of(float top) { return 0.0f - top / 32.0f; }

    // Without an importance the weights are magnitudes.
    template <bool IMPORTANCE> STATIC_INLINE void weigh_values(const Lane& lane) {
        if (IMPORTANCE) weigh_row_values<PairLevels, true>(lane);
        for (int j = 0; !IMPORTANCE && j < 32; j++) lane.w[j] = fabsf(lane.x[j]);
    }

    STATIC_INLINE ScaleFit find(const Lane& lane, const Tables& t) {
        const float top = largest_of<32>(lane.x), low = (float)IQ3::value(0);
        if (fabsf(top) < 1e-16f) return ScaleFit{};
        ScaleFit result = {};
        for (int k = -6; k <= 5; k++) {
            const float inverse = k == -6 ? 1.0f / (top / -low) : ((float)k + low) / top;
            float qx, q2;
            rate_pairs(lane, t, inverse, qx, q2);
            if (k == -6) result = ScaleFit{qx / q2 * qx, qx / q2, 0};
            else keep_better(result, qx, q2, 0);
            rate_pairs(lane, t, -inverse, qx, q2);
            keep_better(result, qx, q2, 0);
        }
        return result;
    }

    // The sum of w (d q - x)^2 for the pairs nearest to the values / d.
    STATIC_INLINE float error(const Lane& lane, const Tables& t, float d) {
        const float inverse = inverse_or_zero(d);
        float total = 0;
        for (int j = 0; j < 16; j++) {
            const Pair r = nearest_pair<true>(lane, t, j, inverse);
            const float a = d * r.q - r.x, b = d * r.p - r.y;
            total = total + (r.v * a * a + r.w * b * b);
        }
        return total;
    }

    // Of the multiple of d nearest to the scale and its two neighbours, the one of least error, the lowest of equal
    // ones.
    STATIC_INLINE int best_multiple(const Lane& lane, const Tables& t, float d, int near) {
        float least = 3.4028234663852886e38f;
        int best = near;
        for (int m = near - 1; m <= near + 1; m++) {
            const float off = error(lane, t, d * (float)m);
            if (!(off < least) || m < -32 || m > 31) continue;
            least = off;
            best = m;
        }
        return best;
    }

    STATIC_INLINE void store(const Lane& lane, const Tables& t, const ScaleFit& result, const RowScale& of) {
        const LevelBlock<8> block(lane);
        const int part = lane.part, m = best_multiple(lane, t, of.d, nearest_multiple(of.inverse * result.d, -32, 31));
        const float factor = (float)m, inverse = inverse_or_zero(of.d * factor);
        uint8_t* indices = block.levels();
        for (int j = 0; j < 16; j++) {
            const Pair r = nearest_pair<true>(lane, t, j, inverse);
            const float q = r.q * factor, p = r.p * factor, wq = r.v * q, wp = r.w * p;
            lane.x[j] = wq * r.x + wp * r.y;
            lane.w[j] = wq * q + wp * p;
            indices[16 * part + j] = (uint8_t)(m == 0 ? 0 : r.index);
        }
        block.codes(0)[part] = (float)(m + 32);
        __syncwarp();
        // Layout: u8 of 2 high bits each, twice; the nibbles of scales ib and ib + 4; low nibbles; high bits.
        uint8_t* out = lane.out;
        uint32_t high = 0;
        for (int k = 0; k < 4; k++) high |= (uint32_t)block.code(0, 4 * (part & 1) + k) >> 4 << 2 * k;
        if (part < 2) out[part] = (uint8_t)high;
        if (part < 4) out[2 + part] = block.nibbles(part, part + 4);
        for (int i = part; i < 64; i += 8) {
            const uint8_t* at = indices + i / 16 * 32 + i % 16;
            out[6 + i] = (uint8_t)((at[0] & 15) | at[16] << 4);
        }
        for (int i = part; i < 16; i += 8) {
            uint32_t fifth = 0;
            for (int k = 0; k < 8; k++) fifth |= (uint32_t)indices[16 * k + i] >> 4 << k;
            out[70 + i] = (uint8_t)fifth;
        }
    }
};
