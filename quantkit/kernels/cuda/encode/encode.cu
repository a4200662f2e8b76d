// Encodes rows of f32 as blocks of a type: the same kernel for all types, with an encoder (lane.cuh) from the family's
// file. Macros: ENCODER; LANES, the threads per thread block; WEIGHTED, if columns have an importance; INTERLEAVED,
// the number of values per group whose importances are guarded, as ik_llama.cpp does in rows that it interleaves.
// A lane encodes a block, or a part of one. The lanes of a thread block load their values together, coalesced, into
// shared memory, where each then reads its own; the bytes are stored in the same way.
#include "encode/all.cuh"

const int VALUES = ENCODER::VALUES, PER_BLOCK = ENCODER::BLOCK / VALUES, BLOCKS = LANES / PER_BLOCK;
const int STRIDE = VALUES + 1;  // padding: lanes read different banks
#ifdef WEIGHTED
const bool OWN_WEIGHTS = true;
#else
const bool OWN_WEIGHTS = ENCODER::COMPUTES_WEIGHTS;
#endif
static_assert(32 % PER_BLOCK == 0, "a block's lanes are of one warp");

// blocks: in all rows, per_row in each. importance: per column; squares: the mean square of every row (below). The
// other members are the tables of a grid type (lane.cuh).
struct encode_args {
    const float *x, *importance, *squares, *points;
    const int32_t* entries;
    const uint16_t *lists, *words;
    uint8_t* out;
    int64_t blocks, per_row;
};

#ifdef INTERLEAVED
// Sets importances to 1e-9 in groups of INTERLEAVED values where they, the values or their products are almost 0: the
// twin of guard in quantkit/kernels/cpu/encode/interleaved.py.
INLINE void guard(const Lane& lane) {
    const float tiny = 1e-9f, limit = (float)INTERLEAVED * (tiny * tiny);
    for (int at = 0; at < VALUES; at += INTERLEAVED) {
        float squares = 0, values = 0, products = 0;
        for (int i = at; i < at + INTERLEAVED; i++) {
            const float x = lane.x[i], w = lane.w[i];
            squares = squares + w * w;
            values = values + x * x;
            products = products + w * fabsf(x);
        }
        if (squares > limit && values > limit && products > limit) continue;
        for (int i = at; i < at + INTERLEAVED; i++) lane.w[i] = tiny;
    }
}
#endif

KERNEL(encode, LANES) {
    __shared__ float values[LANES * STRIDE], scratch[BLOCKS * ENCODER::SCRATCH + 1];
    __shared__ __align__(16) uint8_t bytes[BLOCKS * ENCODER::BYTES];
    const int64_t first = (int64_t)blockIdx.x * BLOCKS, left = a.blocks - first;
    const int n_active = left < BLOCKS ? (int)left : BLOCKS, block = threadIdx.x / PER_BLOCK;
    const float* x = a.x + first * ENCODER::BLOCK;
    if (n_active == BLOCKS && lies_in_quads(x))
        fetch_quads<LANES, VALUES, STRIDE>(values, [&](int i) { return *(const float4*)(x + i); });
    else fetch_values<LANES, VALUES, STRIDE>(values, [&](int i) { return i < n_active * ENCODER::BLOCK ? x[i] : 0.0f; });
    Lane lane = {values + threadIdx.x * STRIDE,      0,
                 scratch + block * ENCODER::SCRATCH, bytes + block * ENCODER::BYTES,
                 (int)threadIdx.x % PER_BLOCK,       {a.entries, a.lists, a.words, a.points}};
    __shared__ float weights[OWN_WEIGHTS ? LANES * STRIDE : 1];
    lane.w = weights + (OWN_WEIGHTS ? threadIdx.x * STRIDE : 0);
#ifdef WEIGHTED
    const int64_t row = a.per_row * ENCODER::BLOCK, begin = first % a.per_row * ENCODER::BLOCK;
    if (lies_in_quads(a.importance)) {
        Column column(begin + 4 * threadIdx.x, row);
        fetch_quads<LANES, VALUES, STRIDE>(weights, [&](int) { return *(const float4*)(a.importance + column.next(4 * LANES)); });
    } else {
        Column column(begin + threadIdx.x, row);
        fetch_values<LANES, VALUES, STRIDE>(weights, [&](int) { return a.importance[column.next(LANES)]; });
    }
    const float mean = a.squares && block < n_active ? a.squares[(first + block) / a.per_row] : 0.0f;
    __syncthreads();
#ifdef INTERLEAVED
    guard(lane);
    __syncwarp();
#endif
    ENCODER::weighted(lane, mean);
#else
    __syncthreads();
    ENCODER::plain(lane);
#endif
    __syncthreads();
    uint8_t* out = a.out + first * ENCODER::BYTES;  // 16-byte aligned, like out
    const int size = n_active * ENCODER::BYTES;
    for (int i = 16 * threadIdx.x; i + 16 <= size; i += 16 * LANES) *(uint4*)(out + i) = *(const uint4*)(bytes + i);
    for (int i = size / 16 * 16 + threadIdx.x; i < size; i += LANES) out[i] = bytes[i];
}

#ifdef WEIGHTED
// The mean square of every row, summed from left to right by one lane.
struct mean_squares_args {
    const float* x;
    float* squares;
    int64_t rows, n;
};

KERNEL(mean_squares, 32) {
    __shared__ float values[32 * 33];
    const int64_t first = (int64_t)blockIdx.x * 32;
    const int lane = threadIdx.x, n_active = (int)(a.rows - first < 32 ? a.rows - first : 32);
    float sum = 0;
    for (int64_t begin = 0; begin < a.n; begin += 32) {
        const int columns = (int)(a.n - begin < 32 ? a.n - begin : 32);
        for (int row = 0; row < n_active; row++)
            if (lane < columns) values[33 * row + lane] = a.x[(first + row) * a.n + begin + lane];
        __syncwarp();
        if (lane < n_active)
            for (int i = 0; i < columns; i++) sum = sum + values[33 * lane + i] * values[33 * lane + i];
        __syncwarp();
    }
    if (lane < n_active) a.squares[first + lane] = sum / (float)(int)a.n;
}
#endif
