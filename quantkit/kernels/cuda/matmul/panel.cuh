// Panels and register tiles: ROWS rows of weights, unpacked once, times TOKENS rows of activations on tensor cores.
// The twin of quantkit/kernels/cpu/matmul/panel.py. A block walks along the rows in chunks of 128 bytes:
//
//     raw bytes of weights  --cp.async-->  shared  --TYPE::unpack-->  panel: int8 levels, scales, minimums
//     rows of activations   --cp.async-->  shared: int8 levels, d, sums                (double: one chunk ahead)
//     panel x activations   --mma-->  int32 per 32 values  --fma-->  f32 sums in registers
//
// While a chunk is multiplied, the next one loads. Tiles in shared memory have rows of 128 bytes, STRIDE apart, so that
// ldmatrix has no bank conflicts. Scales are in the order lanes read them: [step of 32 values][warp][g][the lane's 2 MT
// rows]; d and sums: [step of 32][token].
//
// Warp (m, n) of WARPS_M x WARPS_N has 16 MT rows of the panel from 16 MT m on, and every WARPS_N-th group of 8 tokens
// from the n-th on, which balances warps with few tokens (`active` groups). Lane l, with g = l / 4 and t = l % 4, keeps
// sum[i][j][c] of row 16 i + g + 8 (c / 2) and of token 2 t + c % 2 of the j-th group.
//
// From int32 to f32 without a conversion: sums start from the bits of 1.5 * 2^23, so the integer i is the float
// 1.5 * 2^23 + i. One fma with -1.5 * 2^23 * d makes it d * i, rounded once, because that product is exact: no type's
// scales have more than 22 significant bits. So a product takes two fma per element and 32 values. Other work goes to
// tensor cores too: folded types (folded.cuh), whose levels contain their scales, are summed as integers over a whole
// chunk, or as f16 over 32 values (exact products, summed in f32), and minimums times sums are products of f32 in two
// parts of 11 bits each.
//
// The order of summation of a product does not depend on the rest of the tile. Threads pass the addresses of the row of
// weights (staged_row) and of activations (staged_token) that they fetch, so both may be gathered. F16 and BF16 are
// multiplied as 16 bits (activations are already rounded, so this is exact; they are narrowed in registers), F32 by fma
// in order of i.
//
//
// A row's own scale multiplies its sums at the end. Macros: TYPE, WEIGHTS (below), TOKENS (32 or 128), THREADS (with
// 128 tokens 128 for 64 rows, 256 for 128), SHARED: bytes of dynamic shared memory, from mat_mat.py.
#pragma once
#include "core/async_copy.cuh"
#include "core/mma.cuh"

#define QUANTIZED 0
#define HALF 1
#define BFLOAT 2
#define SINGLE 3

#if WEIGHTS == QUANTIZED
#include "unpack/folded.cuh"
#endif

#if TOKENS == 128
const int WARPS_M = THREADS / 128, WARPS_N = 4, MT = 4, NT = 4;
#elif TOKENS == 32
const int WARPS_M = 1, WARPS_N = 4, MT = 2, NT = 1;
#endif
const int ROWS = 16 * MT * WARPS_M;
const int STRIDE = 128 + 16;
static_assert(8 * NT * WARPS_N == TOKENS && 32 * WARPS_M * WARPS_N == THREADS, "shape of a tile");

typedef float Sums[MT][NT][4];

// ---- threads, rows and tokens

const int PER_ROW = THREADS / ROWS, PER_TOKEN = THREADS / TOKENS;  // threads per row of weights, of activations

INLINE int staged_row() { return thread_here() / PER_ROW; }
INLINE int staged_token() { return thread_here() / PER_TOKEN; }
INLINE int warp_m() { return (thread_here() >> 5) / WARPS_N; }
INLINE int warp_n() { return (thread_here() >> 5) % WARPS_N; }
// The panel row and the token of an element of the lane's sums.
INLINE int row_of(int i, int c) { return 16 * (MT * warp_m() + i) + (thread_here() >> 2 & 7) + 8 * (c >> 1); }
INLINE int token_of(int j, int c) { return 8 * (WARPS_N * j + warp_n()) + 2 * (thread_here() & 3) + (c & 1); }

INLINE void clear(Sums& sum) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) sum[i][j][c] = 0;
}

INLINE void scale_all(Sums& sum, float by) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int j = 0; j < NT; j++)
#pragma unroll
            for (int c = 0; c < 4; c++) sum[i][j][c] *= by;
}

// by: of every row of the panel.
INLINE void scale_rows(Sums& sum, const float* by) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int j = 0; j < NT; j++) sum[i][j][c] *= by[row_of(i, c)];
}

// First row, and first token, of a lane's part of the warp's.
INLINE SharedAddress place_of_rows(const uint8_t* tile, int stride) {
    return place_of_a(tile + warp_m() * 16 * MT * stride, stride);
}
template <int ACTIVE> INLINE SharedAddress place_of_tokens(const uint8_t* tile) {
    const uint8_t* first = tile + warp_n() * 8 * STRIDE;
    return ACTIVE == 1 ? place_of_b(first, STRIDE) : place_of_b_twice(first, STRIDE, 8 * WARPS_N * STRIDE);
}

// 32 bytes of the eight tokens of each of the warp's first ACTIVE groups.
template <int ACTIVE> INLINE void load_tokens(uint32_t b[ACTIVE][2], SharedAddress from) {
    if (ACTIVE == 1) {
        ldmatrix2_at(b[0], from);
    } else {
#pragma unroll
        for (int j = 0; j < ACTIVE; j += 2) ldmatrix4_at(b[j], from + 8 * WARPS_N * j * STRIDE);
    }
}

#if WEIGHTS == QUANTIZED

// ---- quantized weights: chunks of 128 values, fetched 256 at a time

const int PLANES = TYPE::FOLDED_SCALE_BYTES;  // folded types: bytes per level
const bool IN_F16 = PLANES == FOLDED_TO_F16;
const int ROW_STRIDE = IN_F16 ? 2 * 128 + 16 : STRIDE;  // of the panel
const int STEPS = IN_F16 ? 0 : PLANES ? 1 : 4;          // scales per row and chunk
static_assert(PLANES || !TYPE::HALVES, "a type with a scale per 16 values is folded");
const int MIN_STEPS = !TYPE::MINS ? 0 : TYPE::HALVES ? 8 : 4;
const int UNIT_BYTES = 256 / TYPE::BLOCK * TYPE::BYTES;  // per 256 values
const int LEAN = TYPE::ALIGN % 16 ? 15 : 0;              // how far past a multiple of 16 bytes a row may begin
const int PIECES = (UNIT_BYTES + LEAN + 15) / 16;
const int RAW_STRIDE = 16 * (PIECES | 1);

const int LEVELS_AT = 0;
const int LOW_AT = LEVELS_AT + ROWS * ROW_STRIDE;  // the second plane
const int SCALES_AT = LOW_AT + (PLANES == 2 ? ROWS * STRIDE : 0);
const int MINS_AT = SCALES_AT + 4 * STEPS * ROWS;
const int X_AT = MINS_AT + 4 * MIN_STEPS * ROWS;
const int D_AT = TOKENS * STRIDE;  // within a buffer of activations
const int SUMS_AT = D_AT + 4 * 4 * TOKENS;
const int X_BYTES = SUMS_AT + (TYPE::MINS ? 4 * 8 * TOKENS : 0);
const int LEANS_AT = X_AT + 2 * X_BYTES;
const int ROW_SCALES_AT = LEANS_AT + 4 * ROWS;
const int RAW_AT = ROW_SCALES_AT + (TYPE::ROW_SCALE ? 4 * ROWS : 0);
const int GRID_AT = RAW_AT + ROWS * RAW_STRIDE + 16;  // the last words read extend past the bytes
static_assert(GRID_AT + 4 * TYPE::GRID == SHARED, "mat_mat.shared_bytes");

const float MAGIC = 12582912.0f;
const int MAGIC_BITS = 0x4b400000;

// Fetch up to 256 values of a row of weights, `left` bytes from its end, with up to 15 more bytes on either side.
INLINE void stage_unit(uint8_t* shared, const uint8_t* from, int left) {
    const int lean = (int)(uint64_t)from & LEAN, k = 16 * (thread_here() % PER_ROW);
    const int last = lean + (left < UNIT_BYTES ? left : UNIT_BYTES) - k;
    const uint8_t* piece = fixed(from - lean + k);
    uint8_t* to = fixed(shared + RAW_AT + k + staged_row() * RAW_STRIDE);
#pragma unroll
    for (int i = 0; i < (PIECES + PER_ROW - 1) / PER_ROW; i++)
        if (16 * PER_ROW * i < last) copy_async<16>(to + 16 * PER_ROW * i, piece + 16 * PER_ROW * i);
}

// Fetch 128 values of a row of activations from `first` on: levels, d, sums.
INLINE void stage_activations(uint8_t* to, const uint8_t* x, int n_in, int first) {
    const int token = staged_token(), k = thread_here() % PER_TOKEN, n_pad = (n_in + 255) & ~255;
    uint8_t* to_levels = fixed(to + token * STRIDE + 16 * k);
    const uint8_t* levels = fixed(x + first + 16 * k);
#pragma unroll
    for (int i = 0; i < 8 / PER_TOKEN; i++) copy_async<16>(to_levels + 16 * PER_TOKEN * i, levels + 16 * PER_TOKEN * i);
    uint8_t* to_d = fixed(to + D_AT + 4 * (TOKENS * k + token));
    const uint8_t* d = fixed(x + n_pad + (first >> 3) + 4 * k);
#pragma unroll
    for (int i = 0; i < 4 / PER_TOKEN; i++) copy_async<4>(to_d + 4 * TOKENS * PER_TOKEN * i, d + 4 * PER_TOKEN * i);
    if (TYPE::MINS) {
        uint8_t* to_sums = fixed(to + SUMS_AT + 8 * (TOKENS * k + token));
        const uint8_t* sums = fixed(x + n_pad + (n_pad >> 3) + (first >> 2) + 8 * k);
#pragma unroll
        for (int i = 0; i < 4 / PER_TOKEN; i++) copy_async<8>(to_sums + 8 * TOKENS * PER_TOKEN * i, sums + 8 * PER_TOKEN * i);
    }
}

INLINE void store_levels(uint8_t* to, const int q[8]) {
    ((int4*)to)[0] = make_int4(q[0], q[1], q[2], q[3]);
    ((int4*)to)[1] = make_int4(q[4], q[5], q[6], q[7]);
}

// The words of part `part` of 128 values in the order of q8_k64.
INLINE void store_by_words(uint8_t* to, int part, const int q[8]) {
#pragma unroll
    for (int g = 0; g < 4; g++) *(int2*)(to + 32 * g + 8 * part) = make_int2(q[g], q[g + 4]);
}

// Unpacks 128 values of every row from `first` on; those beyond n_in have no effect. A thread has one part of 32, or
// two adjacent ones, of a row.
INLINE void unpack_chunk(uint8_t* shared, int first, int n_in, int unit_at) {
    const int EACH = 4 * ROWS / THREADS;
    const int row = thread_here() / (4 / EACH), begin = thread_here() % (4 / EACH) * EACH;
    const int lean = LEAN ? (((const int*)(shared + LEANS_AT))[row] + unit_at) & 15 : 0;
    const uint8_t* unit = shared + RAW_AT + row * RAW_STRIDE + lean;
    const int in_warp = row % (16 * MT);
    const int slot = ((row / (16 * MT)) * 8 + in_warp % 8) * 2 * MT + in_warp / 8;
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        const int part = begin + (IN_F16 && begin ? EACH - 1 - i : i);  // avoids bank conflicts between two lanes
        const int at = (first & 128) + 32 * part;
        const uint8_t* block = unit + at / TYPE::BLOCK * TYPE::BYTES;
        Levels l = {};
        int low[8] = {};
        if (first + 32 * part < n_in)
            Folded<TYPE>::unpack(block, at % TYPE::BLOCK / 32, l, low, (const uint32_t*)(shared + GRID_AT));
        if (IN_F16) {
            store_levels(shared + LEVELS_AT + row * ROW_STRIDE + 64 * part, l.q);
            store_levels(shared + LEVELS_AT + row * ROW_STRIDE + 64 * part + 32, low);
            continue;
        }
        if (TYPE::BY_WORDS) store_by_words(shared + LEVELS_AT + row * STRIDE, part, l.q);
        else store_levels(shared + LEVELS_AT + row * STRIDE + 32 * part, l.q);
        if (PLANES == 2) store_levels(shared + LOW_AT + row * STRIDE + 32 * part, low);
        if (PLANES && part == begin) ((float*)(shared + SCALES_AT))[slot] = l.d[0];
        // By words, a step has values of all parts, whose scale is the row's.
        if (STEPS == 4) ((float*)(shared + SCALES_AT))[part * ROWS + slot] = TYPE::BY_WORDS ? 1.0f : l.d[0];
#pragma unroll
        for (int half = 0; half < MIN_STEPS / 4; half++)
            ((float*)(shared + MINS_AT))[(MIN_STEPS / 4 * part + half) * ROWS + slot] = l.m[half];
    }
}

// Minimums times sums of a chunk: 4 or 8 products per element, on tensor cores in two parts each.
template <int ACTIVE> INLINE void subtract_mins(const uint8_t* shared, const uint8_t* x, Sums& sum) {
    const int N = TYPE::HALVES ? 2 : 1, g = thread_here() >> 2 & 7, t = thread_here() & 3;
    const float* mins = (const float*)(shared + MINS_AT) + (warp_m() * 8 + g) * 2 * MT + N * t * ROWS;
    const float2* sums = (const float2*)(x + SUMS_AT) + 8 * warp_n();
#if __CUDA_ARCH__ >= 800
    uint32_t b[ACTIVE][2][N];
#pragma unroll
    for (int j = 0; j < ACTIVE; j++) {
        const float2 s = sums[TOKENS * t + 8 * WARPS_N * j + g];
        const float v[2] = {TYPE::HALVES ? s.x : s.x + s.y, s.y};
#pragma unroll
        for (int n = 0; n < N; n++) {
            b[j][0][n] = tf32_of(v[n]);
            b[j][1][n] = __float_as_uint(v[n] - __uint_as_float(b[j][0][n]));
        }
    }
#pragma unroll
    for (int i = 0; i < MT; i++) {
        float a[2 * N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float2 m = *(const float2*)(mins + n * ROWS + 2 * i);
            a[2 * n] = -m.x;
            a[2 * n + 1] = -m.y;
        }
#pragma unroll
        for (int j = 0; j < ACTIVE; j++) mma_f32<N>(sum[i][j], a, b[j]);
    }
#else
    for (int k = 0; k < MIN_STEPS; k++)
#pragma unroll
        for (int j = 0; j < ACTIVE; j++) {
            const float4 two = *(const float4*)(sums + TOKENS * (k / N) + 8 * WARPS_N * j + 2 * t);
            const float s[2] = {N == 1 ? two.x + two.y : k % 2 ? two.y : two.x, N == 1 ? two.z + two.w : k % 2 ? two.w : two.z};
#pragma unroll
            for (int i = 0; i < MT; i++) {
                const float2 m = *(const float2*)(mins + (k - N * t) * ROWS + 2 * i);
#pragma unroll
                for (int c = 0; c < 4; c++) sum[i][j][c] = fmaf(c >> 1 ? -m.y : -m.x, s[c & 1], sum[i][j][c]);
            }
        }
#endif
}

// Multiply the panel by a buffer of activations, with a scale per step.
template <int ACTIVE> INLINE void multiply_steps(const uint8_t* shared, const uint8_t* x, Sums& sum) {
    const int g = thread_here() >> 2 & 7, t = thread_here() & 3;
    const SharedAddress rows = place_of_rows(shared + LEVELS_AT, STRIDE), tokens = place_of_tokens<ACTIVE>(x);
    const float* scales = (const float*)(shared + SCALES_AT) + (warp_m() * 8 + g) * 2 * MT;
    const float* d_of = (const float*)(x + D_AT) + 8 * warp_n() + 2 * t;
    const int magic[4] = {MAGIC_BITS, MAGIC_BITS, MAGIC_BITS, MAGIC_BITS};
#pragma unroll 1
    for (int step = 0; step < 4; step++) {
        uint32_t b[ACTIVE][2];
        load_tokens<ACTIVE>(b, tokens + 32 * step);
        float2 d[ACTIVE];
#pragma unroll
        for (int j = 0; j < ACTIVE; j++) d[j] = *(const float2*)(d_of + TOKENS * step + 8 * WARPS_N * j);
#pragma unroll
        for (int i = 0; i < MT; i++) {
            uint32_t a[4];
            ldmatrix4_at(a, rows + 16 * i * STRIDE + 32 * step);
            const float2 scale = *(const float2*)(scales + step * ROWS + 2 * i);
            const float of_row[2] = {scale.x, scale.y}, back[2] = {scale.x * -MAGIC, scale.y * -MAGIC};
            int dots[ACTIVE][4];
#pragma unroll
            for (int j = 0; j < ACTIVE; j++) mma_s8(dots[j], a, b[j], magic);
#pragma unroll
            for (int j = 0; j < ACTIVE; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    const float product = fmaf(__int_as_float(dots[j][c]), of_row[c >> 1], back[c >> 1]);
                    sum[i][j][c] = fmaf(product, c & 1 ? d[j].y : d[j].x, sum[i][j][c]);
                }
        }
    }
}

// Four int8 to two words of two f16: the low byte of the f16 1024 + 128 + v is v with its top bit flipped.
INLINE void halves_of(uint32_t four, uint32_t two[2]) {
    two[0] = minus_halves(pick_bytes(four ^ SIGNS, 0x64646464u, 0x4140), 0x64806480u);
    two[1] = minus_halves(pick_bytes(four ^ SIGNS, 0x64646464u, 0x4342), 0x64806480u);
}

// The same for f16 that contain their scales: sums of f16 products over 32 values, in an order that lets bytes become
// f16 in place: a lane's values 4 t to 4 t + 3 of 16 are elements 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of mma.
template <int ACTIVE> INLINE void multiply_f16(const uint8_t* shared, const uint8_t* x, Sums& sum) {
    const SharedAddress rows = place_of_rows(shared + LEVELS_AT, ROW_STRIDE), tokens = place_of_tokens<ACTIVE>(x);
    const float* d_of = (const float*)(x + D_AT) + 8 * warp_n() + 2 * (thread_here() & 3);
#pragma unroll 1
    for (int step = 0; step < 4; step++) {
        uint32_t levels[ACTIVE][2], b[ACTIVE][2][2];
        load_tokens<ACTIVE>(levels, tokens + 32 * step);
        float2 d[ACTIVE];
#pragma unroll
        for (int j = 0; j < ACTIVE; j++) {
            d[j] = *(const float2*)(d_of + TOKENS * step + 8 * WARPS_N * j);
            halves_of(levels[j][0], b[j][0]);
            halves_of(levels[j][1], b[j][1]);
        }
#pragma unroll
        for (int i = 0; i < MT; i++) {
            float dots[ACTIVE][4] = {};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                uint32_t a[4];
                ldmatrix4_at(a, rows + 16 * i * ROW_STRIDE + 64 * step + 32 * half);
#pragma unroll
                for (int j = 0; j < ACTIVE; j++) mma_f16(dots[j], a, b[j][half]);
            }
#pragma unroll
            for (int j = 0; j < ACTIVE; j++)
#pragma unroll
                for (int c = 0; c < 4; c++) sum[i][j][c] = fmaf(dots[j][c], c & 1 ? d[j].y : d[j].x, sum[i][j][c]);
        }
    }
}

// Sums of integers over a chunk, for 16 rows, times the scales of both.
template <int ACTIVE> INLINE void add_dots(const int dots[ACTIVE][4], float2 scale, const float* d_of, float sum[NT][4]) {
#pragma unroll
    for (int j = 0; j < ACTIVE; j++) {
        const float2 d = *(const float2*)(d_of + 8 * WARPS_N * j);
#pragma unroll
        for (int c = 0; c < 4; c++)
            sum[j][c] = fmaf((float)dots[j][c], (c >> 1 ? scale.y : scale.x) * (c & 1 ? d.y : d.x), sum[j][c]);
    }
}

// The same for folded types: sums of integers over the chunk, for two times 16 rows.
template <int ACTIVE> INLINE void multiply_folded(const uint8_t* shared, const uint8_t* x, Sums& sum) {
    const int g = thread_here() >> 2 & 7, t = thread_here() & 3;
    const SharedAddress rows = place_of_rows(shared + LEVELS_AT, STRIDE), tokens = place_of_tokens<ACTIVE>(x);
    const float* scales = (const float*)(shared + SCALES_AT) + (warp_m() * 8 + g) * 2 * MT;
    const float* d_of = (const float*)(x + D_AT) + 8 * warp_n() + 2 * t;
#pragma unroll
    for (int i = 0; i < MT; i += 2) {
        int dots[2][ACTIVE][4] = {};
#pragma unroll 1
        for (int step = 0; step < 4; step++) {
            uint32_t b[ACTIVE][2];
            load_tokens<ACTIVE>(b, tokens + 32 * step);
#pragma unroll
            for (int k = 0; k < 2; k++) {
                uint32_t a[4];
                ldmatrix4_at(a, rows + 16 * (i + k) * STRIDE + 32 * step);
#pragma unroll
                for (int j = 0; j < ACTIVE; j++) mma_s8(dots[k][j], a, b[j], dots[k][j]);
            }
        }
#pragma unroll
        for (int k = 0; k < 2; k++) add_dots<ACTIVE>(dots[k], *(const float2*)(scales + 2 * (i + k)), d_of, sum[i + k]);
    }
}

// The same for two planes: the upper plane's sums times 256, plus the lower plane's; the tokens stay in registers.
template <int ACTIVE> INLINE void multiply_planes(const uint8_t* shared, const uint8_t* x, Sums& sum) {
    const int g = thread_here() >> 2 & 7, t = thread_here() & 3;
    const SharedAddress rows = place_of_rows(shared + LEVELS_AT, STRIDE), tokens = place_of_tokens<ACTIVE>(x);
    const float* scales = (const float*)(shared + SCALES_AT) + (warp_m() * 8 + g) * 2 * MT;
    const float* d_of = (const float*)(x + D_AT) + 8 * warp_n() + 2 * t;
    uint32_t b[4][ACTIVE][2];
#pragma unroll
    for (int step = 0; step < 4; step++) load_tokens<ACTIVE>(b[step], tokens + 32 * step);
#pragma unroll
    for (int i = 0; i < MT; i++) {
        int dots[ACTIVE][4] = {};
#pragma unroll 1
        for (int plane = 0; plane < 2; plane++) {
            if (plane)
#pragma unroll
                for (int j = 0; j < ACTIVE; j++)
#pragma unroll
                    for (int c = 0; c < 4; c++) dots[j][c] *= 256;
#pragma unroll
            for (int step = 0; step < 4; step++) {
                uint32_t a[4];
                ldmatrix4_at(a, rows + plane * LOW_AT + 16 * i * STRIDE + 32 * step);
#pragma unroll
                for (int j = 0; j < ACTIVE; j++) mma_s8(dots[j], a, b[step][j], dots[j]);
            }
        }
        add_dots<ACTIVE>(dots, *(const float2*)(scales + 2 * i), d_of, sum[i]);
    }
}

template <int ACTIVE> INLINE void multiply_chunk(const uint8_t* shared, const uint8_t* x, Sums& sum) {
    if (IN_F16) multiply_f16<ACTIVE>(shared, x, sum);
    else if (PLANES == 2) multiply_planes<ACTIVE>(shared, x, sum);
    else if (PLANES) multiply_folded<ACTIVE>(shared, x, sum);
    else multiply_steps<ACTIVE>(shared, x, sum);
    if (TYPE::MINS) subtract_mins<ACTIVE>(shared, x, sum);
}

#else

// ---- weights of F16, BF16, F32: chunks of 128 bytes of a row

const int SIZE = WEIGHTS == SINGLE ? 4 : 2;
const int CHUNK = 128 / SIZE;  // values of a chunk

const int W_BYTES = ROWS * STRIDE, X_BYTES = TOKENS * STRIDE;
const int X_AT = 2 * W_BYTES;
static_assert(X_AT + 2 * X_BYTES == SHARED, "mat_mat.shared_bytes");

// Fetch the 16-byte pieces k, k + BY, ... of BYTES of a row, zeros after its last `left`.
template <int BYTES, int BY> INLINE void stage_pieces(uint8_t* to, const uint8_t* from, int64_t left, int k) {
    if (((uint64_t)from & 15) == 0 && left >= BYTES) {
        to = fixed(to + 16 * k);
        from = fixed(from + 16 * k);
#pragma unroll
        for (int i = 0; i < BYTES / (16 * BY); i++) copy_async<16>(to + 16 * BY * i, from + 16 * BY * i);
    } else {
        for (int at = 16 * k; at < BYTES; at += 16 * BY)
            for (int i = at; i < at + 16; i += 2) *(uint16_t*)(to + i) = i < left ? load2(from + i) : (uint16_t)0;
    }
}

#if WEIGHTS == SINGLE

template <int ACTIVE> INLINE void multiply_chunk(const uint8_t* w, const uint8_t* x, Sums& sum) {
    const int g = thread_here() >> 2 & 7, t = thread_here() & 3;
    const uint8_t* rows = w + (warp_m() * 16 * MT + g) * STRIDE;
    const uint8_t* tokens = x + (warp_n() * 8 + 2 * t) * STRIDE;
#pragma unroll 1
    for (int k = 0; k < 128; k += 16) {
        float4 b[ACTIVE][2];
#pragma unroll
        for (int j = 0; j < ACTIVE; j++) {
            b[j][0] = *(const float4*)(tokens + 8 * WARPS_N * j * STRIDE + k);
            b[j][1] = *(const float4*)(tokens + (8 * WARPS_N * j + 1) * STRIDE + k);
        }
#pragma unroll
        for (int i = 0; i < 2 * MT; i++) {
            const float4 a = *(const float4*)(rows + 8 * i * STRIDE + k);
#pragma unroll
            for (int j = 0; j < 2 * ACTIVE; j++) {
                const float4 v = b[j / 2][j % 2];
                float& to = sum[i / 2][j / 2][2 * (i % 2) + j % 2];
                to = fmaf(a.w, v.w, fmaf(a.z, v.z, fmaf(a.y, v.y, fmaf(a.x, v.x, to))));
            }
        }
    }
}

#else

// The two values at p as 16 bits each; exact, since they are already rounded.
INLINE uint32_t narrow(const float2 v) {
    if (WEIGHTS == HALF) return float_to_half(v.x) | (uint32_t)float_to_half(v.y) << 16;
    return __float_as_uint(v.x) >> 16 | (__float_as_uint(v.y) & 0xffff0000u);
}

// A thread's part of a chunk of activations, in registers: pieces of four values.
struct Fetched {
    float4 v[CHUNK / 4 / PER_TOKEN];
};

// Load the pieces k, k + PER_TOKEN, ... of a chunk of a row, zeros after its last `left` bytes.
INLINE void fetch(Fetched& f, const uint8_t* from, int64_t left, int k) {
    const bool whole = ((uint64_t)from & 15) == 0 && left >= 4 * CHUNK;
#pragma unroll
    for (int i = 0; i < CHUNK / 4 / PER_TOKEN; i++) {
        const int at = 16 * (k + PER_TOKEN * i);
        if (whole) {
            f.v[i] = *(const float4*)(from + at);
        } else {
            const float* v = (const float*)(from + at);
            f.v[i] =
                make_float4(at < left ? v[0] : 0, at + 4 < left ? v[1] : 0, at + 8 < left ? v[2] : 0, at + 12 < left ? v[3] : 0);
        }
    }
}

INLINE void store_narrow(uint8_t* row, const Fetched& f, int k) {
#pragma unroll
    for (int i = 0; i < CHUNK / 4 / PER_TOKEN; i++)
        *(uint2*)(row + 8 * (k + PER_TOKEN * i)) =
            make_uint2(narrow(make_float2(f.v[i].x, f.v[i].y)), narrow(make_float2(f.v[i].z, f.v[i].w)));
}

template <int ACTIVE> INLINE void multiply_chunk(const uint8_t* w, const uint8_t* x, Sums& sum) {
    const SharedAddress rows = place_of_rows(w, STRIDE), tokens = place_of_tokens<ACTIVE>(x);
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t b[ACTIVE][2];
        load_tokens<ACTIVE>(b, tokens + 32 * step);
#pragma unroll
        for (int i = 0; i < MT; i++) {
            uint32_t a[4];
            ldmatrix4_at(a, rows + 16 * i * STRIDE + 32 * step);
#pragma unroll
            for (int j = 0; j < ACTIVE; j++) {
                if (WEIGHTS == HALF) mma_f16(sum[i][j], a, b[j]);
                else mma_bf16(sum[i][j], a, b[j]);
            }
        }
    }
}

#endif
#endif

// The same for the active groups of tokens: one, two, or all.
INLINE void multiply_active(const uint8_t* w, const uint8_t* x, int active, Sums& sum) {
    if (NT == 1 || active == 1) multiply_chunk<1>(w, x, sum);
    else if (NT == 2 || active == 2) multiply_chunk < NT<2 ? 1 : 2>(w, x, sum);
    else multiply_chunk<NT>(w, x, sum);
}

// ---- a tile

// The sums of the panel's rows with `count` tokens. w, x: the rows this thread fetches (staged_row, staged_token).
INLINE void multiply_tile(uint8_t* shared, const uint8_t* w, int64_t row_bytes, const uint8_t* x, int n_in, int count, Sums& sum) {
    const int active = (count + 8 * WARPS_N - 1) / (8 * WARPS_N);
    clear(sum);
    w = fixed(w);
    x = fixed(x);
#if WEIGHTS == QUANTIZED
    if (TYPE::ROW_SCALE && thread_here() % PER_ROW == 0) ((float*)(shared + ROW_SCALES_AT))[staged_row()] = product_scale<TYPE>(w);
    w += TYPE::HEADER;
    row_bytes -= TYPE::HEADER;
    if (LEAN && thread_here() % PER_ROW == 0) ((int*)(shared + LEANS_AT))[staged_row()] = (int)((uint64_t)w & 15);
    load_grid<TYPE>((uint32_t*)(shared + GRID_AT));
    stage_unit(shared, w, (int)row_bytes);
    stage_activations(shared + X_AT, x, n_in, 0);
#pragma unroll 1
    for (int first = 0; first < n_in; first += 128) {
        const int buffer = first & 128 ? X_BYTES : 0, unit_at = (first >> 8) * UNIT_BYTES;
        copy_wait();
        __syncthreads();  // the bytes have arrived, and the last chunk is done
        unpack_chunk(shared, first, n_in, unit_at);
        __syncthreads();
        if (first + 128 < n_in) {
            if (buffer) stage_unit(shared, w + unit_at + UNIT_BYTES, (int)row_bytes - unit_at - UNIT_BYTES);
            stage_activations(shared + X_AT + X_BYTES - buffer, x, n_in, first + 128);
        }
        multiply_active(shared, shared + X_AT + buffer, active, sum);
    }
    if (IN_F16) scale_all(sum, F16_TIMES);
    if (TYPE::ROW_SCALE) scale_rows(sum, (const float*)(shared + ROW_SCALES_AT));
#else
    const int64_t w_bytes = (int64_t)n_in * SIZE, x_bytes = (int64_t)n_in * 4;
    uint8_t *w_to = shared + staged_row() * STRIDE, *x_to = shared + X_AT + staged_token() * STRIDE;
    const int k = thread_here() % PER_ROW, l = thread_here() % PER_TOKEN;
    stage_pieces<128, PER_ROW>(w_to, w, w_bytes, k);
#if WEIGHTS == SINGLE
    stage_pieces<128, PER_TOKEN>(x_to, x, x_bytes, l);
#else
    Fetched fetched;
    fetch(fetched, x, x_bytes, l);
#endif
#pragma unroll 1
    for (int first = 0; first < n_in; first += CHUNK) {
        const int buffer = first / CHUNK & 1, next = first + CHUNK;
#if WEIGHTS != SINGLE
        store_narrow(x_to + buffer * X_BYTES, fetched, l);
#endif
        copy_wait();
        __syncthreads();
        if (next < n_in) {
            stage_pieces<128, PER_ROW>(w_to + (1 - buffer) * W_BYTES, w + SIZE * next, w_bytes - SIZE * next, k);
#if WEIGHTS == SINGLE
            stage_pieces<128, PER_TOKEN>(x_to + (1 - buffer) * X_BYTES, x + 4 * next, x_bytes - 4 * next, l);
#else
            fetch(fetched, x + 4 * next, x_bytes - 4 * next, l);
#endif
        }
        multiply_active(shared + buffer * W_BYTES, shared + X_AT + buffer * X_BYTES, active, sum);
    }
#endif
}
