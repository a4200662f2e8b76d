// Rows of quantized weights times a few rows of activations: what every warp of mat_vec.cu does.
//
// LANES lanes share a row of weights: a part of a warp, a warp, or several warps of a block. In a step each takes one
// part of 32 values, so that a step is a segment of the row. Segments are copied to shared memory 16 bytes at a time,
// from the 16-byte boundary before them on (rows begin anywhere): memory is read in whole lines whatever the type, and
// the next steps are on their way while one is computed. No barrier but the warp's own is needed.
//
// The sum of a row depends on LANES only, not on how many rows or columns are computed together.
#pragma once
#include "async_copy.cuh"
#include "team.cuh"
#include "unpack/all.cuh"

// Values of a row of activations: int8 levels[n_pad] | float d[n_pad / 32] | float sums[n_pad / 16].
struct Activations {
    int4 low, high;
    float d, sum0, sum1;
};

INLINE Activations load_activations(const uint8_t* x, int n_pad, int part) {
    Activations v;
    v.low = *(const int4*)(x + 32 * part);
    v.high = *(const int4*)(x + 32 * part + 16);
    v.d = *(const float*)(x + n_pad + 4 * part);
    if (TYPE::MINS) {
        const float2 sums = *(const float2*)(x + n_pad + n_pad / 8 + 8 * part);
        v.sum0 = sums.x;
        v.sum1 = sums.y;
    }
    return v;
}

// sum + the product of 32 values.
INLINE float add_product(float sum, const Levels& l, const Activations& x) {
    int first = __dp4a(l.q[0], x.low.x, 0);
    first = __dp4a(l.q[1], x.low.y, first);
    first = __dp4a(l.q[2], x.low.z, first);
    first = __dp4a(l.q[3], x.low.w, first);
    int second = __dp4a(l.q[4], x.high.x, TYPE::HALVES ? 0 : first);
    second = __dp4a(l.q[5], x.high.y, second);
    second = __dp4a(l.q[6], x.high.z, second);
    second = __dp4a(l.q[7], x.high.w, second);
    float products = l.d[1] * (float)second;
    if (TYPE::HALVES) products = fmaf(l.d[0], (float)first, products);
    sum = fmaf(x.d, products, sum);
    if (TYPE::MINS) sum = fmaf(-l.m[1], x.sum1, fmaf(-l.m[0], x.sum0, sum));
    return sum;
}

const int SEGMENT = GROUP * 32 / TYPE::BLOCK * TYPE::BYTES;  // bytes of a row in a step
const int WORDS = (SEGMENT + 30) / 16;                       // of 16 bytes, that they may lie in

// Copies the segments of a warp: those of one step, one after the other, WORDS each.
template <int SEGMENTS> struct Copier {
    static const int BYTES = 16 * WORDS * SEGMENTS, ROUNDS = (WORDS * SEGMENTS + 31) / 32;
    const uint8_t* from[ROUNDS];  // where this lane's words would be in a row that begins at a boundary
    int limit[ROUNDS];            // bytes from there to the end of the row

    // row_of(s): the address of the row that segment s is of.
    template <typename F> INLINE_METHOD void start(int row_bytes, F row_of) {
        for (int i = 0; i < ROUNDS; i++) {
            const int word = lane_id() + 32 * i, segment = min(word / WORDS, SEGMENTS - 1), offset = 16 * (word % WORDS);
            from[i] = row_of(segment) + offset;
            limit[i] = word < WORDS * SEGMENTS ? row_bytes - offset : -(1 << 30);
        }
    }

    // Fetch what begins `at` bytes from the start of every row. Nothing beyond the word in which a row ends is read.
    INLINE_METHOD void copy(uint8_t* stage, int at) const {
        for (int i = 0; i < ROUNDS; i++) {
            const uint64_t p = (uint64_t)(from[i] + at);
            if (at - (int)(p & 15) < limit[i]) copy16(stage + 16 * (lane_id() + 32 * i), (const uint8_t*)(p & ~15ull));
        }
    }
};

// sums[m][r][c] = this lane's share of row team.row(r) of matrix m times row c of x.
template <int M, int R, int C>
INLINE void multiply(const Team<R>& team, const uint8_t* const (&w)[M], int64_t row_bytes, const uint8_t* x,
                     int64_t x_stride, int n_in, float (&sums)[M][R][C]) {
    const int SEGMENTS = M * R * TEAMS, STAGES = Copier<SEGMENTS>::BYTES > 1500 ? 2 : 4;
    const bool EARLY = C <= 2;  // activations fit the registers while one waits for weights
    const int STAGE = Copier<SEGMENTS>::BYTES;
    __shared__ __align__(16) uint8_t stages[WARPS * STAGES * STAGE + 16];  // unpackers read some bytes beyond
    const int parts = n_in / 32, n_pad = (n_in + 255) / 256 * 256, steps = (parts + LANES - 1) / LANES;
    const int lane = lane_id() % GROUP, PARTS = TYPE::BLOCK / 32;

    Copier<SEGMENTS> copier;
    const uint8_t *first_matrix = w[0], *last_matrix = w[M - 1];
    copier.start((int)row_bytes, [=](int s) {
        return (s < R * TEAMS ? first_matrix : last_matrix) + team.row(s / TEAMS % R, s % TEAMS) * row_bytes;
    });
    uint32_t head[M][R];  // where rows begin: only the last four bits matter
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) head[m][r] = (uint32_t)(uint64_t)w[m] + (uint32_t)team.row(r) * (uint32_t)row_bytes;
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sums[m][r][c] = 0;

    // Step s is segment `slice + SLICES * s` of the row.
    uint8_t* const mine = stages + (threadIdx.x >> 5) * STAGES * STAGE;
    const int first = team.slice * SEGMENT, stride = SLICES * SEGMENT;
    for (int s = 0; s < STAGES; s++) {
        if (s < steps) copier.copy(mine + s * STAGE, first + s * stride);
        end_group();
    }
    for (int s = 0, stage = 0; s < steps; s++, stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE) {
        const int part = (SLICES * s + team.slice) * GROUP + lane, at = first + s * stride;
        Activations early[EARLY ? C : 1];
        if (EARLY)
            for (int c = 0; c < C; c++) early[c] = load_activations(x + c * x_stride, n_pad, min(part, parts - 1));
        wait_groups<STAGES - 1>();
        __syncwarp();
        if (part < parts) {
            const uint8_t* block = mine + stage + 16 * WORDS * team.number + lane / PARTS * TYPE::BYTES;
            Levels levels[M][R];
            for (int m = 0; m < M; m++)
                for (int r = 0; r < R; r++)
                    TYPE::unpack(block + 16 * WORDS * TEAMS * (m * R + r) + (head[m][r] + at & 15), lane % PARTS,
                                 levels[m][r]);
            for (int c = 0; c < C; c++) {
                const Activations v = EARLY ? early[EARLY ? c : 0] : load_activations(x + c * x_stride, n_pad, part);
                for (int m = 0; m < M; m++)
                    for (int r = 0; r < R; r++) sums[m][r][c] = add_product(sums[m][r][c], levels[m][r], v);
            }
        }
        __syncwarp();
        if (s + STAGES < steps) copier.copy(mine + stage, at + STAGES * stride);
        end_group();
    }
}
