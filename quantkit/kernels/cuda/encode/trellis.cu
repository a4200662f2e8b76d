// Encodes rows of f32 as blocks of a trellis type: a thread block has one row at a time, and scratch memory for it.
// Macros: ENCODER (trellis.cuh); SURVIVOR_WORDS, the words of survivors per 32 values, from trellis.py.
#include "encode/trellis.cuh"

const int THREADS = 512, WARPS = THREADS / 32, AT_ONCE = 32;
static_assert(ENCODER::WORDS == SURVIVOR_WORDS, "trellis.py counts other words");

// rows of n values; work: `work_bytes` bytes per thread block.
struct trellis_args {
    const float *x, *importance;
    uint8_t *out, *work;
    const uint8_t *points, *cells, *families;
    const int32_t* indices;
    const float* grid;
    const uint16_t* lists;
    int64_t rows, n, work_bytes;
};

// Shared by the threads of a block.
struct Shared {
    float costs[AT_ONCE][64], scales[64], cost[64], tops[WARPS];
    double sums[2];
    int q[WARPS][64];
    Effort effort;
};

// The maximum over all threads.
INLINE float block_max(float v, float* tops) {
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = v;
    __syncthreads();
    for (int i = 0; i < WARPS; i++) v = fmaxf(v, tops[i]);
    return v;
}

INLINE float largest_of_all(const float* v, int64_t n, float* tops) {
    float most = 0;
    for (int64_t i = threadIdx.x; i < n; i += THREADS) most = fmaxf(most, fabsf(v[i]));
    return block_max(most, tops);
}

// The smallest power of two above a value, 2^-126 .. 2^126; 1 for 0.
INLINE double unit_of(float top) {
    const int exponent = min((__float_as_int(top) >> 23) - 126, 126);
    return top == 0 ? 1.0 : (double)__int_as_float((exponent + 127) << 23);
}

// Selects the search settings of a row.
INLINE void weigh_row(const TrellisRow<ENCODER>& row, bool weighed, Shared& s) {
    double total = 0, squares = 0;
    for (int b = 0; b < row.count; b++) {
        const double energy = row.energy(b);
        total = total + energy;
        squares = squares + energy * energy;
    }
    ENCODER::weigh_row(row.count, total, squares, weighed, s.effort);
}

// Searches more deeply the values that cause much of the row's error.
INLINE void refine_outliers(const TrellisRow<ENCODER>& row, const Codebook& codebook, Shared& s) {
    const int warp = (int)threadIdx.x / 32;
    for (int b = warp; b < row.count; b += WARPS)
        if (ENCODER::counts(row, b)) ENCODER::find_gain(row, b);
    __syncthreads();
    if (threadIdx.x == 0) {
        double total = 0;
        for (int b = 0; b < row.count; b++)
            if (ENCODER::counts(row, b)) total = total + (double)row.counted(b) * ENCODER::error_left(row, b);
        s.sums[1] = total;
    }
    __syncthreads();
    const double total = s.sums[1];
#pragma unroll 1
    for (int b = warp; b < row.count; b += WARPS) ENCODER::refine_outlier(row, codebook, b, total);
    __syncthreads();
}

// Writes 64 candidate scales of the row, and their errors.
INLINE void rate_row_scales(const TrellisRow<ENCODER>& row, const Codebook& codebook, float top, Shared& s) {
    const float narrow = ((float)lane_of_16() * 0.028f + 1.0f) * (top * 0.8f / ENCODER::LARGEST_LEVEL);
    const float d = lane_id() < 16 ? narrow : narrow * 1.448f;
    float total = 0;
    for (int first = 0; first < row.count; first += AT_ONCE) {
        const int n_blocks = min(row.count - first, AT_ONCE);
        __syncthreads();
        for (int i = (int)threadIdx.x / 32; i < n_blocks; i += WARPS) {
            const int b = first + i;
#pragma unroll 1
            for (int side = 0; side < 2; side++) {
                const float sign = side ? 1.0f : -1.0f;
                float cost = 0;
                if (ENCODER::counts(row, b) && (ENCODER::SIGNS == 2 || side))
                    cost = ENCODER::cost(row, codebook, b, d, sign, s.effort.tries > 1) * row.counted(b);
                s.costs[i][32 * side + lane_id()] = cost;
            }
        }
        __syncthreads();
        if (threadIdx.x < 64)
            for (int i = 0; i < n_blocks; i++) total = total + s.costs[i][threadIdx.x];
    }
    if (threadIdx.x < 64) {
        s.scales[threadIdx.x] = d * (threadIdx.x < 32 ? -1.0f : 1.0f);
        s.cost[threadIdx.x] = total;
    }
    __syncthreads();
}

// The last scale of the least error.
INLINE int index_of_least(const float* cost) {
    float least = cost[lane_id()];
    int index = lane_id();
    if (cost[index + 32] <= least) least = cost[index += 32];
    for (int d = 16; d; d /= 2) {
        const float other = __shfl_xor_sync(FULL, least, d);
        const int other_index = __shfl_xor_sync(FULL, index, d);
        const bool better = other < least || (other == least && other_index > index);
        least = better ? other : least;
        index = better ? other_index : index;
    }
    return index;
}

// Sums over a row, sequentially: the first warp w q x, the second w q q; q in units of the row's scale.
INLINE void sum_choices(const TrellisRow<ENCODER>& row, int at, Shared& s) {
    const int warp = (int)threadIdx.x / 32, count = row.count * ENCODER::GROUPS;
    if (warp < 2) {
        double total = 0;
        for (int first = 0; first < count; first += 32) {
            double term = 0;
            if (first + lane_id() < count) {
                const double level = *row.levels(at, (first + lane_id()) / ENCODER::GROUPS);
                term =
                    warp ? level * level * (double)row.q(0)[first + lane_id()] : fabs(level) * (double)row.p(0)[first + lane_id()];
            }
            for (int i = 0; i < 32; i++) total = total + __shfl_sync(FULL, term, i);
        }
        if (lane_id() == 0) s.sums[warp] = total;
    }
    __syncthreads();
}

// Writes the blocks of a row.
INLINE void write_row(const TrellisRow<ENCODER>& row, const Codebook& codebook, const float* x, int at, uint8_t* out, Shared& s) {
    const int warp = (int)threadIdx.x / 32;
    for (int block = warp; block < row.count / 8; block += WARPS) {
        const float* levels = row.levels(at, 8 * block);
        for (int i = lane_id(); i < 8 * ENCODER::GROUPS; i += 32) {
            const float level = levels[i / ENCODER::GROUPS];
            s.q[warp][i] = index_of(codebook, level, row.places(at, 8 * block)[i]);
        }
        __syncwarp();
        ENCODER::put(out + (int64_t)block * ENCODER::BYTES, {levels, x + 256 * block, s.q[warp], row.combinations(at, 8 * block)});
        __syncwarp();
    }
}

// Chooses the scale of a row, and levels and points for it; returns the scale, 0 if there is none, and the number of
// the choice.
INLINE double fit_row(const TrellisRow<ENCODER>& row, const Codebook& codebook, Shared& s, int& chosen) {
    const int warp = (int)threadIdx.x / 32, tries = s.effort.tries, fits = tries > 1 ? 2 : 1;
    double best = -1, scale = 0, before = -1;
    int at = 0, attempt = 0, fit = 0;
    float d = 0;
    bool last = false;
    while (true) {
        if (fit == 0) {
            const int cheapest = index_of_least(s.cost);
            last = attempt == tries || (s.cost[cheapest] >= 0 && attempt > 0);
            if (last && !(best >= 0)) break;  // sums are NaN: a row of zeros
            d = last ? (float)scale : s.scales[cheapest];
            before = -1;
            __syncthreads();
            if (threadIdx.x == 0) s.cost[cheapest] = 0;
        }
#pragma unroll 1
        for (int b = warp; b < row.count; b += WARPS)
            ENCODER::pick_level(row, codebook, b, d, s.effort.patience, attempt + fit == 0, last, at);
        __syncthreads();
        sum_choices(row, at, s);
        const double qx = (d > 0 ? 0.5 : -0.5) * s.sums[0], q2 = s.sums[1], gain = q2 > 0 ? qx * qx / q2 : 0.0;
        __syncthreads();
        if (gain > best) {
            best = gain;
            scale = q2 > 0 ? qx / q2 : 0.0;
            at = 1 - at;
        }
        if (last) break;
        fit++;
        if (gain <= before || q2 <= 0 || fit == fits) attempt++, fit = 0;
        else d = (float)(qx / q2), before = gain;
    }
    chosen = 1 - at;
    return scale;
}

KERNEL(trellis, 512) {
    __shared__ Shared s;
    const int warp = (int)threadIdx.x / 32;
    const TrellisRow<ENCODER> row(a.work + blockIdx.x * a.work_bytes, a.n);
    const Codebook codebook = {a.points, a.cells, a.families, a.indices, a.grid, a.lists};
    const int64_t row_bytes = 4 + a.n / 256 * ENCODER::BYTES;
    const float largest_weight = a.importance ? largest_of_all(a.importance, a.n, s.tops) : 0.0f;
    const double top_weight = largest_weight > 0 ? largest_weight : 1.0;
    for (int64_t which = blockIdx.x; which < a.rows; which += gridDim.x) {
        const float* x = a.x + which * a.n;
        uint8_t* out = a.out + which * row_bytes;
        for (int64_t i = threadIdx.x; i < row_bytes / 4; i += THREADS) ((uint32_t*)out)[i] = 0;
        const double unit = unit_of(largest_of_all(x, a.n, s.tops));
        const float inverse = (float)(1 / unit);
        float top = 0;
        for (int b = warp; b < row.count; b += WARPS) {
            const float raw = x[32 * b + lane_id()], scaled = raw * inverse, v = ENCODER::SIGNS == 1 ? fabsf(scaled) : scaled;
            row.x(b)[lane_id()] = v;
            const bool alive = warp_max(fabsf(raw)) >= 1e-16f;
            const float guess = alive ? guess_scale(v) : 0.0f;
            if (lane_id() == 0) row.guess(b) = guess;
            top = fmaxf(top, guess);
        }
        top = block_max(top, s.tops);  // and waits for all
        if (top == 0) continue;
        for (int b = 8 * warp; b < row.count; b += 8 * WARPS) {
            weigh_256(row.x(b), row.w(b), a.importance ? a.importance + 32 * b : 0, unit, top_weight);
            __syncwarp();
            for (int i = b; i < b + 8; i++) {
                const float v = row.x(i)[lane_id()], energy = sum_of_32(v * v * row.w(i)[lane_id()]);
                if (lane_id() == 0) row.energy(i) = energy;
            }
        }
        __syncthreads();
        if (threadIdx.x == 0) weigh_row(row, a.importance != 0, s);
        __syncthreads();
#pragma unroll 1
        for (int b = warp; b < row.count; b += WARPS) ENCODER::search_block(row, codebook, b, s.effort);
        __syncthreads();
        if (s.effort.uneven) refine_outliers(row, codebook, s);
        rate_row_scales(row, codebook, top, s);
        int at;
        const double scale = fit_row(row, codebook, s, at);
        if (threadIdx.x == 0) *(float*)out = (float)(scale * ENCODER::ROW_SCALE_GAIN * unit);
        if (scale != 0) write_row(row, codebook, x, at, out + 4, s);
        __syncthreads();
    }
}
