// As dots.cuh, one row of x, with tiles of 16 rows of weights that a warp multiplies on tensor cores (tile_forms.cuh):
// ROWS / 4 of them, a block of 256 values at a time; the next warp of the team has the next block. Segments are copied
// by all threads of a team.
//
// Sums have the same order as in dots.cuh with as many LANES.
#include "core/async_copy.cuh"
#include "matmul/lanes.cuh"
#include "unpack/tile_forms.cuh"

typedef TileForm<TYPE> FORM;
static_assert(COLUMNS == 1 && ROWS % 4 == 0 && LANES <= 32, "whole tiles, one row of x");
static_assert(TYPE::BLOCK == 256 && TYPE::BYTES % 2 == 0 && TYPE::HEADER % 2 == 0, "every eighth row is aligned as the first");
const int SPAN = SLICES * TYPE::BYTES;  // bytes of a row per step
const int WORDS = (SPAN + 30) / 16;     // 16-byte words that they may span

// Copies a team's segments of a step, in order, WORDS each: a thread has one word of some segments.
template <int SEGMENTS> struct TileCopier {
    static const int LINE = WORDS > 16 ? 32 : WORDS > 8 ? 16 : 8, AT_ONCE = 32 * SLICES / LINE, ROUNDS = SEGMENTS / AT_ONCE;
    static const int BYTES = 16 * WORDS * SEGMENTS;
    static const bool STEADY = SPAN % 16 == 0;  // all segments of a row have one alignment
    static_assert(WORDS <= LINE && SEGMENTS % AT_ONCE == 0, "whole rounds");
    const uint8_t* from[ROUNDS];  // of the first step
    uint32_t limit;               // how far it may read from there

    // row_of(s): the address of the row of segment s.
    template <typename F> INLINE_METHOD void start(int thread, int row_bytes, F row_of) {
        const int at = 16 * (thread % LINE);
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            from[i] = row_of(thread / LINE + AT_ONCE * i) + at;
            if (STEADY) from[i] = boundary(from[i]);
        }
        limit = at < 16 * WORDS ? (uint32_t)max(row_bytes + 15 - at, 0) : 0;
    }
    // Destination of the thread's first word.
    INLINE_METHOD static int place(int thread) { return 16 * (WORDS * (thread / LINE) + thread % LINE); }

    // Fetch the words `by` bytes further. At most 30 bytes beyond a row are read.
    INLINE_METHOD void copy(SharedAddress to, uint32_t by) const {
#pragma unroll
        for (int i = 0; i < ROUNDS; i++) {
            const uint8_t* p = from[i] + by;
            copy16_if(by < limit, to + 16 * WORDS * AT_ONCE * i, STEADY ? p : boundary(p));
        }
    }

    INLINE_METHOD static const uint8_t* boundary(const uint8_t* p) { return (const uint8_t*)((uint64_t)p & ~15ull); }
};

template <int M, int R, int C>
INLINE void multiply(const Team<R>& team, const uint8_t* const (&w)[M], int row_bytes, const uint8_t* x, int64_t, int n_in,
                     float (&sums)[M][R][C]) {
    const int OF_MATRIX = R * TEAMS, ROW = 16 * WORDS;
    typedef TileCopier<M * OF_MATRIX> Segments;
    const int STAGE = Segments::BYTES, OF_ALL = WARPS / SLICES * STAGE;
    // Part of the 48 KB is used by scratch memory, a table, and sums that warps share.
    const int STAGES = __CUDA_ARCH__ < 800 || 3 * OF_ALL > 36000 ? 2 : 4 * OF_ALL > 36000 ? 3 : 4;
    const int SCRATCH_AT = STAGES * OF_ALL, TABLE = SCRATCH_AT + 4 * FORM::SCRATCH * WARPS;
    __shared__ __align__(16) uint8_t shared[TABLE + 4 * FORM::TABLE];
    const int g = team.lane / 4, t = team.lane % 4, thread = 32 * team.slice + team.lane;
    const uint32_t bytes_of_row = fixed((uint32_t)row_bytes - TYPE::HEADER), mine = team.warp / SLICES * (STAGES * STAGE);
    const SharedAddress to = shared_address(shared + mine + Segments::place(thread));

    Segments copier;
    const uint8_t *first_matrix = w[0], *last_matrix = w[M - 1];
    copier.start(thread, (int)bytes_of_row, [=](int s) {
        return (s < OF_MATRIX ? first_matrix : last_matrix) + team.offset(s / TEAMS % R, s % TEAMS, row_bytes) + TYPE::HEADER;
    });
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) {
        copier.copy(to + s * STAGE, s * SPAN);
        end_group();
    }
    uint32_t* words = (uint32_t*)(shared + SCRATCH_AT);
    for (int i = threadIdx.x; i < FORM::SCRATCH * WARPS; i += 32 * WARPS) words[i] = 0;
    words += FORM::SCRATCH * WARPS;
    for (int i = threadIdx.x; i < FORM::TABLE; i += 32 * WARPS) words[i] = FORM::word(i);
    wait_for_previous();
    SharedAddress here[M];  // the first segment of the lane's first row
    uint32_t head[M];       // its address: only the low four bits matter
#pragma unroll
    for (int m = 0; m < M; m++) {
        head[m] = (uint32_t)(uint64_t)w[m] + (uint32_t)team.offset(g / TEAMS, g % TEAMS, row_bytes) + TYPE::HEADER;
        here[m] = shared_address(shared + mine + ROW * (OF_MATRIX * m + g) + TYPE::BYTES * team.slice + (head[m] & 15));
#pragma unroll
        for (int r = 0; r < R; r++) sums[m][r][0] = 0;
    }
    const Scratch scratch(shared, (uint32_t)(SCRATCH_AT + 4 * FORM::SCRATCH * team.warp), team.lane);
    const Lookup table(words, team.lane, 1);
    const float* d = (const float*)(x + n_in) + 8 * team.slice + t;
    x += 256 * team.slice + chunk_of(team.lane);
    const int end = (int)bytes_of_row - TYPE::BYTES * team.slice;
    uint32_t by = 0;
#pragma unroll 1
    for (int stage = 0, last = (STAGES - 1) * STAGE; by < bytes_of_row; by += SPAN) {
        typename FORM::X v;
        const bool there = (int)by < end;
        FORM::load(x, there, v);
        // For a block beyond the end, the contents of the stage have no effect.
        const float d_of[2] = {there ? d[0] : 0, there ? d[4] : 0};
        wait_groups<STAGES - 2>();
        __syncthreads();
        copier.copy(to + last, by + (STAGES - 1) * SPAN);
        end_group();
        FORM::prepare(scratch, team.lane, v);
#pragma unroll
        for (int m = 0; m < M; m++) {
            const int over = Segments::STEADY ? 0 : (int)((head[m] + by) & 15) - (int)(head[m] & 15);
            const SharedAddress at = fixed(here[m] + (over + stage)), bytes = fixed(at + t), of_words = fixed(at + FORM::STEP * t);
#pragma unroll
            for (int r = 0; r < R; r += 4) {
                const TileRows rows = {bytes + ROW * 4 * r, of_words + ROW * 4 * r, at + ROW * 4 * r};
                float of[2][2];
                FORM::template products<8 * ROW>(rows, t, v, table, of);
#pragma unroll
                for (int i = 0; i < 4; i++) sums[m][r + i][0] = fmaf(d_of[i % 2], of[i / 2][i % 2], sums[m][r + i][0]);
            }
        }
        x += 256 * SLICES;
        d += 8 * SLICES;
        last = stage;
        stage = stage == (STAGES - 1) * STAGE ? 0 : stage + STAGE;
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) {
            const int row = 8 * (r / 2) + g;
            sums[m][r][0] *= product_scale<TYPE>(w[m] + team.offset(row / TEAMS, row % TEAMS, row_bytes));
        }
}
