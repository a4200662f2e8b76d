// Encodes rows of f32 as grid types with a row scale (grid_rows.cuh). Macros: ENCODER; WEIGHTED, if columns have an
// importance.
//
//     parts     one lane per sub-block, of any row: all bytes except scales
//     codes     one thread block per row: its scale, from the largest sub-block scale, and the codes of all sub-blocks
#include "encode/all.cuh"

const int LANES = 128, VALUES = ENCODER::VALUES, STRIDE = VALUES + 1, PER_BLOCK = ENCODER::BLOCK / VALUES;
const int TOGETHER = 256 / VALUES;  // lanes that share scratch memory
#ifdef WEIGHTED
const bool IMPORTANCE = true;
#else
const bool IMPORTANCE = false;
#endif

// rows of n values; scales: one float of scratch per sub-block; out: the encoded rows. The other members are the
// tables of a grid type (lane.cuh).
struct parts_args {
    const float *x, *importance, *points;
    const int32_t* entries;
    const uint16_t *lists, *words;
    float* scales;
    uint8_t* out;
    int64_t rows, n;
};
struct codes_args {
    const float* scales;
    uint8_t* out;
    int64_t n;
};

INLINE uint8_t* begin_of(uint8_t* out, int64_t row, int64_t blocks) {
    return out + row * (ENCODER::HEADER + blocks * ENCODER::BYTES);
}

KERNEL(parts, 128) {
    __shared__ float values[LANES * STRIDE], weights[LANES * STRIDE], scratch[LANES / TOGETHER * ENCODER::SCRATCH + 1];
    const int64_t per_row = a.n / VALUES, first = (int64_t)blockIdx.x * LANES, left = a.rows * per_row - first;
    const int n_active = left < LANES ? (int)left : LANES, at = threadIdx.x;
    const float* x = a.x + first * VALUES;
    fetch_values<LANES, VALUES, STRIDE>(values, [&](int i) { return i < n_active * VALUES ? x[i] : 0.0f; });
#ifdef WEIGHTED
    Column column(first % per_row * VALUES + at, a.n);
    fetch_values<LANES, VALUES, STRIDE>(weights, [&](int) { return a.importance[column.next(LANES)]; });
#endif
    __syncthreads();
    const Lane lane = {values + at * STRIDE,
                       weights + at * STRIDE,
                       scratch + at / TOGETHER * ENCODER::SCRATCH,
                       0,
                       at % TOGETHER,
                       {a.entries, a.lists, a.words, a.points}};
    const Shifted sub = ENCODER::template fit<IMPORTANCE>(lane);
    if (at >= n_active) return;
    const int64_t part = first + at, row = part / per_row, block = part % per_row / PER_BLOCK;
    a.scales[part] = sub.scale;
    ENCODER::store(lane, sub.shifts, begin_of(a.out, row, a.n / 32) + ENCODER::HEADER + block * ENCODER::BYTES);
}

KERNEL(codes, 256) {
    __shared__ float tops[8];
    const int64_t row = blockIdx.x, blocks = a.n / 32, count = a.n / VALUES;
    const float* scales = a.scales + row * count;
    uint8_t* out = begin_of(a.out, row, blocks);
    float top = 0;
    for (int64_t i = threadIdx.x; i < count; i += 256) top = fmaxf(top, scales[i]);
    top = warp_max(top);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < 8; i++) top = fmaxf(top, tops[i]);
    if (threadIdx.x == 0) {
        const uint32_t d = float_to_half(1.0625f * top / 15.0f);
        out[0] = (uint8_t)d;
        out[1] = (uint8_t)(d >> 8);
    }
    const float inverse = top > 0 ? 15.0f / top : 0.0f;
    for (int64_t b = threadIdx.x; b < blocks; b += 256)
        ENCODER::store_scale(scales + b * PER_BLOCK, inverse, out + ENCODER::HEADER + b * ENCODER::BYTES);
}
