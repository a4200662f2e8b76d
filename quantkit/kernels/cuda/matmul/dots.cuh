// Rows of quantized weights times a few rows of activations: the inner loop of mat_vec.cu.
//
// LANES lanes share a row of weights: part of a warp, a warp, or several warps of a block. Per step each lane
// processes one part of 32 values, or two (dot_forms.cuh), so a step is a segment of the row. Segments are copied to
// shared memory 16 bytes at a time, from the 16-byte boundary before them (rows are not aligned): memory is read in
// whole lines for any type, and the next steps load while one is computed; the first ones load during the previous
// launch, unless that selects the weights. Only warp-level barriers are needed.
//
// The sum of a row depends on LANES only, not on the number of rows or columns computed together. (Included once for
// each type in a file: mat_vec_same_input.cu.)
#ifdef TILES
#include "matmul/tile_dots.cuh"
#else
#include "core/async_copy.cuh"
#include "matmul/lanes.cuh"
#include "unpack/ik_dot_forms.cuh"

typedef Form<TYPE, (COLUMNS > 2)> FORM;
static_assert(FORM::PARTS == TYPE::BLOCKS_PER_LANE, "parts of a lane");
const int VALUES = 32 * FORM::PARTS;                             // per lane and step
const int SEGMENT = GROUP * VALUES / TYPE::BLOCK * TYPE::BYTES;  // bytes of a row per step
const int WORDS = (SEGMENT + 30) / 16;                           // 16-byte words that they may span

// Offsets of a lane's values in a row: int8 levels[n_pad] | float d[n_pad / 32] | float sums[n_pad / 16].
struct ActivationRow {
    const uint8_t* levels;
    int d, sums;  // relative to the levels; by words, every d is that of the row's start
    static const int D_BYTES = TYPE::BY_WORDS ? 0 : VALUES / 8;

    // part: in units of VALUES.
    INLINE_METHOD ActivationRow(const uint8_t* x, int n_pad, int part)
        : levels(x + FORM::first(part)),
          d(n_pad + D_BYTES * part - FORM::first(part)),
          sums(n_pad + n_pad / 8 + VALUES / 4 * part - FORM::first(part)) {}

    INLINE_METHOD Activations load(int by, int part_of_block) const {
        const uint8_t* p = levels + by;
        Activations v;
        FORM::load(p, part_of_block, v);
        if (TYPE::BY_WORDS) v.of_words = *(const float4*)(p + d);
        v.d = TYPE::BY_WORDS ? 1.0f : *(const float*)(p + d);
        if (TYPE::MINS) v.sums = *(const float2*)(p + sums);
        return v;
    }

    INLINE_METHOD void advance(int parts) {
        levels += VALUES * parts;
        d -= (VALUES - D_BYTES) * parts;
        sums -= VALUES / 4 * 3 * parts;
    }
};

// sum + the product of a lane's values.
template <typename W> INLINE float add_product(float sum, const W& w, const Activations& x) {
    sum = fmaf(x.d, FORM::product(w, x), sum);
    if constexpr (TYPE::MINS) sum = fmaf(-w.m[1], x.sums.y, fmaf(-w.m[0], x.sums.x, sum));
    return sum;
}

// Copies a warp's segments of one step, in order, WORDS each.
template <int SEGMENTS> struct Copier {
    static const int BYTES = 16 * WORDS * SEGMENTS, ROUNDS = (WORDS * SEGMENTS + 31) / 32;
    static const bool STEADY = SLICES * SEGMENT % 16 == 0;  // all segments of a row have one alignment
    const uint8_t* from[ROUNDS];                            // the lane's words of the first step
    int limit[ROUNDS];                                      // how far it may read from there

    // first: where the first segment begins in a row; row_of(s): the address of the row of segment s.
    template <typename F> INLINE_METHOD void start(int lane, int row_bytes, int first, F row_of) {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const int word = lane + 32 * i, at = first + 16 * (word % WORDS);
            from[i] = row_of(min(word / WORDS, SEGMENTS - 1)) + at;
            if (STEADY) from[i] = boundary(from[i]);
            limit[i] = word < WORDS * SEGMENTS ? row_bytes + 15 - at : -(1 << 30);
        }
    }

    // Fetch the words `by` bytes further. At most 30 bytes beyond a row are read.
    INLINE_METHOD void copy(SharedAddress to, int by) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const uint8_t* p = from[i] + by;
            copy16_if(by < limit[i], to + 512 * i, STEADY ? p : boundary(p));
        }
    }

    INLINE_METHOD static const uint8_t* boundary(const uint8_t* p) { return (const uint8_t*)((uint64_t)p & ~15ull); }
};

// sums[m][r][c] = this lane's share of the product of the team's row r of matrix m and row c of x.
template <int M, int R, int C>
INLINE void multiply(const Team<R>& team, const uint8_t* const (&w)[M], int row_bytes, const uint8_t* x, int64_t x_stride, int n_in,
                     float (&sums)[M][R][C]) {
    const int SEGMENTS = M * R * TEAMS, STAGE = Copier<SEGMENTS>::BYTES, STAGES = STAGE > 1500 ? 2 : 4;
    const bool EARLY = C <= 2;  // activations fit in registers while weights load
    // Unpackers may read some bytes before and after a block.
    __shared__ __align__(16) uint8_t stages[16 + WARPS * STAGES * STAGE + 16];
    __shared__ __align__(256) uint32_t copies[Copies<TYPE>::WORDS > 0 ? Copies<TYPE>::WORDS : 1];
    const int lane = team.lane % GROUP, parts = n_in / VALUES, n_pad = (n_in + 255) / 256 * 256;
    const int steps = (parts + LANES - 1) / LANES, PARTS = TYPE::BLOCK / VALUES;
    const int mine = 16 + team.warp * (STAGES * STAGE);
    const SharedAddress to = shared_address(stages + mine + 16 * team.lane);
    const int first = team.slice * SEGMENT, stride = SLICES * SEGMENT;  // in a row: first step, between steps

    Copier<SEGMENTS> copier;
    const uint8_t *first_matrix = w[0], *last_matrix = w[M - 1];
    copier.start(team.lane, row_bytes - TYPE::HEADER, first, [=](int s) {
        return (s < R * TEAMS ? first_matrix : last_matrix) + team.offset(s / TEAMS % R, s % TEAMS, row_bytes) + TYPE::HEADER;
    });
#pragma unroll
    for (int s = 0; s < STAGES; s++) {
        copier.copy(to + s * STAGE, s * stride);
        end_group();
    }
    if (Copies<TYPE>::WORDS) {
        load_copies<TYPE>(copies);
        __syncthreads();
    }
    wait_for_previous();
    const Lookup grid(copies, team.lane, Copies<TYPE>::N);
    uint32_t head[M][R];  // where the first segments begin: only the low four bits matter
    float of_row[M][R];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) {
            head[m][r] = (uint32_t)(uint64_t)w[m] + (uint32_t)team.offset(r, row_bytes) + TYPE::HEADER + first;
            of_row[m][r] = product_scale<TYPE>(w[m] + team.offset(r, row_bytes));
#pragma unroll
            for (int c = 0; c < C; c++) sums[m][r][c] = 0;
        }
    const int block = mine + 16 * WORDS * team.number + lane / PARTS * TYPE::BYTES;
    int part = team.slice * GROUP + lane;
    ActivationRow row(x, n_pad, part);
#pragma unroll 1
    for (int s = 0, stage = 0; s < steps; s++) {
        Activations early[EARLY ? C : 1];
        if (EARLY && part < parts)
#pragma unroll
            for (int c = 0; c < C; c++) early[c] = row.load(c * (int)x_stride, lane % PARTS);
        wait_groups<STAGES - 1>();
        __syncwarp();
        if (part < parts) {
            FORM::Weights weights[M][R];
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const int at = block + stage + 16 * WORDS * TEAMS * (m * R + r) + (int)(head[m][r] + s * stride & 15);
                    FORM::unpack(Place{stages, (uint32_t)at}, lane % PARTS, weights[m][r], grid);
                }
#pragma unroll
            for (int c = 0; c < C; c++) {
                Activations v = EARLY ? early[EARLY ? c : 0] : row.load(c * (int)x_stride, lane % PARTS);
                FORM::prepare(v);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int r = 0; r < R; r++) sums[m][r][c] = add_product(sums[m][r][c], weights[m][r], v);
            }
        }
        __syncwarp();
        copier.copy(to + stage, (s + STAGES) * stride);
        end_group();
        part += LANES;
        row.advance(LANES);
        stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
    }
    if constexpr (TYPE::ROW_SCALE)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++)
#pragma unroll
                for (int c = 0; c < C; c++) sums[m][r][c] *= of_row[m][r];
}
#endif
