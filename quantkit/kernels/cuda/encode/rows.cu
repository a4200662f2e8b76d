// Encodes rows of f32 as types whose rows begin with a scale, which depends on the whole row; the scales of sub-blocks
// are searched as multiples of it. Macros: ENCODER (ik_rows.cuh); WEIGHTED, if columns have an importance.
//
//     scales    a lane has 32 values, of any row, and searches their scale: nearly all of the work
//     rows      a thread block has a row: the row's scale from the scales, then levels and bytes
//
// Between the two kernels, scales are stored where the bytes of their superblock will be. Sums over a row, which fit
// its scale to the levels, have a fixed order: one thread adds while others wait, so thread blocks are small, and many
// of them run at once.
#include "encode/all.cuh"

const int LANES = 64, STRIDE = 33, AT_ONCE = LANES / 8;
#ifdef WEIGHTED
const bool IMPORTANCE = true;
#else
const bool IMPORTANCE = false;
#endif

// rows of n values; out: the encoded rows.
struct scales_args {
    const float *x, *importance;
    uint8_t* out;
    int64_t rows, n;
};
struct rows_args : scales_args {};

// First byte of a row's blocks.
INLINE uint8_t* blocks_of(const scales_args& a, int64_t row) {
    return a.out + row * (ENCODER::HEADER + a.n / 256 * ENCODER::BYTES) + ENCODER::HEADER;
}

KERNEL(scales, 64) {
    __shared__ float values[LANES * STRIDE], weights[LANES * STRIDE], own[LANES * ENCODER::OWN_ROOM + 1];
    const int64_t per_row = a.n / 256, first = (int64_t)blockIdx.x * AT_ONCE, left = a.rows * per_row - first;
    const int n_active = left < AT_ONCE ? (int)left : AT_ONCE;
    const float* x = a.x + first * 256;
    fetch_values<LANES, 32, STRIDE>(values, [&](int i) { return i < n_active * 256 ? x[i] : 0.0f; });
#ifdef WEIGHTED
    Column column(first % per_row * 256 + threadIdx.x, a.n);
    fetch_values<LANES, 32, STRIDE>(weights, [&](int) { return a.importance[column.next(LANES)]; });
#endif
    __syncthreads();
    const typename ENCODER::Tables tables;
    const int at = threadIdx.x, part = at % 8;
    const Lane lane = {values + at * STRIDE, weights + at * STRIDE, own + at * ENCODER::OWN_ROOM, 0, part};
    ENCODER::template weigh_values<IMPORTANCE>(lane);
    __syncwarp();  // the search may overwrite values that other lanes sum
    const float sum_w = ENCODER::FITTED ? sum_of<32>(lane.w) : 0;
    const ScaleFit result = ENCODER::find(lane, tables);
    const uint32_t shifted = __ballot_sync(FULL, result.shifted) >> (at & 24) & 255;
    if (at / 8 < n_active) {
        const int64_t block = first + at / 8;
        const StoredScales stored_scales(blocks_of(a, block / per_row), block % per_row * ENCODER::BYTES);
        stored_scales.store(part, result.d, shifted, sum_w, ENCODER::FITTED);
    }
}

KERNEL(rows, 64) {
    __shared__ float values[LANES * STRIDE], weights[LANES * STRIDE], scratch[AT_ONCE * ENCODER::SCRATCH], some[2 * LANES];
    __shared__ __align__(4) uint8_t bytes[AT_ONCE * ENCODER::BYTES];
    const int64_t row = blockIdx.x;
    const int at = threadIdx.x, count = (int)(a.n / 32);
    const float* x = a.x + row * a.n;
    uint8_t* out = blocks_of(a, row);
    const RowScale of = row_scale<ENCODER>(out, count, some);
    const typename ENCODER::Tables tables;
    float total = 0;  // of the terms in x (thread 0) and in w (the first thread of another warp)
    for (int first = 0; first < count; first += LANES) {
        const int n_active = min(count - first, LANES);
        const float* part = x + first * 32;
        fetch_values<LANES, 32, STRIDE>(values, [&](int i) { return i < n_active * 32 ? part[i] : 0.0f; });
#ifdef WEIGHTED
        const float* columns = a.importance + first * 32;
        fetch_values<LANES, 32, STRIDE>(weights, [&](int i) { return i < n_active * 32 ? columns[i] : 0.0f; });
#endif
        ScaleFit result = {};
        if (at < n_active) {
            const StoredScales stored_scales(out, (int64_t)((first + at) / 8) * ENCODER::BYTES);
            result.d = stored_scales.scale(at % 8);
            result.shifted = (int)(stored_scales.shifted() >> at % 8 & 1);
        }
        __syncthreads();
        const int block = at / 8;
        const Lane lane = {values + at * STRIDE, weights + at * STRIDE, scratch + block * ENCODER::SCRATCH,
                           bytes + block * ENCODER::BYTES, at % 8};
        ENCODER::template weigh_values<IMPORTANCE>(lane);
        __syncwarp();  // terms replace values that other lanes sum
        ENCODER::store(lane, tables, result, of);
        __syncthreads();
        if (at % 32 == 0) {
            const float* terms = at ? weights : values;
            for (int i = 0; i < n_active; i++)
#pragma unroll
                for (int j = 0; j < ENCODER::TERMS; j++) total = total + terms[i * STRIDE + ENCODER::term_at(j)];
        }
        uint16_t* to = (uint16_t*)(out + first / 8 * ENCODER::BYTES);
        for (int i = at; i < n_active / 8 * ENCODER::BYTES / 2; i += LANES) to[i] = of.d != 0 ? ((const uint16_t*)bytes)[i] : 0;
        __syncthreads();
    }
    if (at % 32 == 0) some[at] = total;
    __syncthreads();
    const float sumqx = some[0], sumq2 = some[32], d = of.d != 0 && sumq2 > 0 ? sumqx / sumq2 : of.d;
    if (at == 0) store_row_scale<ENCODER::HEADER>(out - ENCODER::HEADER, ENCODER::STRETCH * d);
}
