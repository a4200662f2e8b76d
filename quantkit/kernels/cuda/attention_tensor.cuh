// Many rows, a cache of halves: the same on tensor cores. q and the weights are split into a high and a low half (22
// bits of them count), keys and values are halves as they are, sums are f32: as exact as f32 products, nearly.
//
// ROWS / 16 warps by COLUMNS: a warp has 16 rows, scores of 1 / COLUMNS of the KEYS, 1 / COLUMNS of the values. Keys of
// the next block come while this one's values are used, values while its scores are made. With LATENT values are the
// first columns of the keys, which come into two buffers by turns.
#pragma once
#include "attention.cuh"
#include "async_copy.cuh"
#include "mma.cuh"

#define K_COLUMNS ((HEAD_K + 15) / 16 * 16)
#define V_COLUMNS ((HEAD_V + 16 * COLUMNS - 1) / (16 * COLUMNS) * (16 * COLUMNS))
#define K_STRIDE (2 * K_COLUMNS + 16)  // bytes; an odd multiple of 16: no two rows of eight in one bank
#define V_STRIDE (LATENT ? K_STRIDE : 2 * V_COLUMNS + 16)
#define P_STRIDE (2 * KEYS + 16)
#define S_TILES (KEYS / COLUMNS / 8)  // tiles of 8 keys, of 8 columns that a warp has
#define O_TILES (V_COLUMNS / COLUMNS / 8)

// Products of a score, values of a block's keys, are summed by themselves: tensor cores round sums down.
#define SUMMED 128
#define LARGEST 16384.0f  // what weights are multiplied by, q up to: the low half of a small value is still exact

INLINE void split(float x, float y, uint32_t* high, uint32_t* low) {
    const uint16_t hx = float_to_half(x), hy = float_to_half(y);
    *high = hx | (uint32_t)hy << 16;
    *low = float_to_half(x - half_to_float(hx)) | (uint32_t)float_to_half(y - half_to_float(hy)) << 16;
}

// Rows of KEYS keys from `start` on, to be there after copy_wait. Outside the range others stand for them, with weight 0.
template <int HEAD, bool OF_K> INLINE void fetch(const attention_args& a, int kv_head, const Range& range, int start, uint8_t* to) {
#pragma unroll 1
    for (int i = threadIdx.x; i < KEYS * (HEAD / 8); i += THREADS) {
        const int key = i / (HEAD / 8), part = 16 * (i % (HEAD / 8)), from = min(max(start + key, range.first), range.last);
        const uint8_t* row = OF_K ? key_row(a, kv_head, range.sequence, from) : value_row(a, kv_head, range.sequence, from);
        copy_async<16>(to + key * (OF_K ? K_STRIDE : V_STRIDE) + part, row + part);
    }
}

// Rows of q, each times a power of two that makes its largest value 2^14 ... 2^15; factors: what undoes that.
INLINE void keep_q(const attention_args& a, int kv_head, int first_row, uint8_t* high, uint8_t* low, float* factors) {
    const int lane = threadIdx.x & 31, group = (int)(a.n_head / a.n_head_kv);
    for (int r = threadIdx.x >> 5; r < ROWS; r += THREADS / 32) {
        const int row = first_row + r, token = row / group;
        const float* q = a.q + (token * a.n_head + kv_head * group + row % group) * HEAD_K;
        const int n = token < a.rows ? HEAD_K : 0;
        float largest = 0;
        for (int i = lane; i < n; i += 32) largest = fmaxf(largest, fabsf(q[i]));
        const int exponent = max((int)(__float_as_uint(warp_max(largest)) >> 23), 15);
        const float factor = __uint_as_float((uint32_t)(268 - exponent) << 23);  // 2^(14 - (exponent - 127))
        if (lane == 0) factors[r] = __uint_as_float((uint32_t)(exponent - 14) << 23);
        for (int i = lane; i < K_COLUMNS / 2; i += 32) {
            const bool there = 2 * i < n;
            split(there ? q[2 * i] * factor : 0.0f, there ? q[2 * i + 1] * factor : 0.0f,
                  (uint32_t*)(high + r * K_STRIDE) + i, (uint32_t*)(low + r * K_STRIDE) + i);
        }
    }
}

INLINE void attend(const attention_args& a, int kv_head, int first_row, int part) {
    DYNAMIC_SHARED(memory);
    uint8_t* q_high = memory;                                   // [ROWS][K_STRIDE]
    uint8_t* q_low = q_high + ROWS * K_STRIDE;
    uint8_t* keys = q_low + ROWS * K_STRIDE;                    // [1 + LATENT][KEYS][K_STRIDE]
    uint8_t* values = keys + (1 + LATENT) * KEYS * K_STRIDE;    // [KEYS][V_STRIDE], none if LATENT
    uint8_t* p_high = values + (LATENT ? 0 : KEYS * V_STRIDE);  // [ROWS][P_STRIDE], none if COLUMNS is 1
    uint8_t* p_low = p_high + ROWS * P_STRIDE;
    __shared__ float factors[ROWS], shared[COLUMNS][ROWS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, top = warp / COLUMNS * 16, column = warp % COLUMNS;
    const int g = lane >> 2, t = lane & 3, group = (int)(a.n_head / a.n_head_kv);
    const int begin = first_row / group, end = min((int)a.rows, (first_row + ROWS - 1) / group + 1);
    Range range = next_range(a, begin, end, -1);
    Blocks blocks = blocks_of(a, range, KEYS, part);
    if (nothing_to_do(a, range, blocks, begin, end)) return leave(a, kv_head, first_row, part);

    bool fetched = blocks.begin < blocks.end;
    if (fetched) fetch<HEAD_K, true>(a, kv_head, range, KEYS * blocks.begin, keys);
    keep_q(a, kv_head, first_row, q_high, q_low, factors);
    if (K_COLUMNS > HEAD_K) {  // what q is zero for must be a number
        for (int i = threadIdx.x; i < (1 + LATENT) * KEYS; i += THREADS)
            *(uint4*)(keys + i * K_STRIDE + 2 * HEAD_K) = make_uint4(0, 0, 0, 0);
    }
    __syncthreads();
    // This lane's rows: top + g and top + g + 8. l is of its own columns until the end.
    const float scales[2] = {(float)a.scale * factors[top + g], (float)a.scale * factors[top + g + 8]};
    float m[2] = {NONE, NONE}, l[2] = {0, 0}, o[O_TILES][4];
#pragma unroll
    for (int i = 0; i < O_TILES; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;

    int buffer = 0;
    for (; range.sequence != NO_SEQUENCE; range = next_range(a, begin, end, range.sequence)) {
        const Row seeing[2] = {in_range(row_of(a, kv_head, first_row + top + g), range),
                               in_range(row_of(a, kv_head, first_row + top + g + 8), range)};
        blocks = blocks_of(a, range, KEYS, part);
        if (blocks.begin < blocks.end && !fetched)
            fetch<HEAD_K, true>(a, kv_head, range, KEYS * blocks.begin, keys + buffer * KEYS * K_STRIDE);
        fetched = false;
        for (int block = blocks.begin; block < blocks.end; block++) {
            const int start = KEYS * block;
            const uint8_t* here = keys + buffer * KEYS * K_STRIDE;
            copy_wait();
            __syncthreads();  // these keys are there; what the block before used is free
            if (LATENT) {
                buffer ^= 1;
                if (block + 1 < blocks.end)
                    fetch<HEAD_K, true>(a, kv_head, range, start + KEYS, keys + buffer * KEYS * K_STRIDE);
            } else {
                fetch<HEAD_V, false>(a, kv_head, range, start, values);
            }

            float s[S_TILES][4] = {};
            for (int first = 0; first < K_COLUMNS / 16; first += SUMMED / 16) {
                float sums[S_TILES][4] = {};
                const int last = min(first + SUMMED / 16, K_COLUMNS / 16);
#pragma unroll 2
                for (int k = first; k < last; k++) {
                    uint32_t high[4], low[4];
                    load_a(high, q_high + top * K_STRIDE + 32 * k, K_STRIDE);
                    load_a(low, q_low + top * K_STRIDE + 32 * k, K_STRIDE);
#pragma unroll
                    for (int i = 0; i < S_TILES; i += 2) {
                        uint32_t b[4];
                        const uint8_t* from = here + 8 * (column * S_TILES + i) * K_STRIDE + 32 * k;
                        if (S_TILES > 1) {
                            load_b_twice(b, from, K_STRIDE, 8 * K_STRIDE);
                        } else {
                            load_b(b, from, K_STRIDE);
                        }
#pragma unroll
                        for (int j = 0; j < 2 && i + j < S_TILES; j++) {
                            mma_f16(sums[i + j], high, b + 2 * j);
                            mma_f16(sums[i + j], low, b + 2 * j);
                        }
                    }
                }
#pragma unroll
                for (int i = 0; i < 4 * S_TILES; i++) s[i / 4][i % 4] += sums[i / 4][i % 4];
            }

            float largest[2] = {m[0], m[1]}, f[2];
            const int key = start + 8 * column * S_TILES + 2 * t;
#pragma unroll
            for (int i = 0; i < 4 * S_TILES; i++) s[i / 4][i % 4] *= scales[i % 4 / 2];
            if (is_bent(a)) {
#pragma unroll
                for (int i = 0; i < 4 * S_TILES; i++)
                    s[i / 4][i % 4] = bend(a, seeing[i % 4 / 2], key + i / 4 * 8 + i % 2, s[i / 4][i % 4]);
            }
#pragma unroll
            for (int i = 0; i < 4 * S_TILES; i++) {
                s[i / 4][i % 4] = mask(seeing[i % 4 / 2], key + i / 4 * 8 + i % 2, s[i / 4][i % 4]);
                largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], s[i / 4][i % 4]);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL, largest[r], 1));
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL, largest[r], 2));
                if (COLUMNS > 1 && t == 0) shared[column][top + g + 8 * r] = largest[r];
            }
            if (!LATENT) copy_wait();
            if (!LATENT || COLUMNS > 1) __syncthreads();  // values and largest scores are there, keys have been used
            if (!LATENT && block + 1 < blocks.end) fetch<HEAD_K, true>(a, kv_head, range, start + KEYS, keys);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (COLUMNS > 1) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) largest[r] = fmaxf(largest[r], shared[c][top + g + 8 * r]);
                }
                f[r] = expf(m[r] - largest[r]);
                m[r] = largest[r];
                l[r] *= f[r];
            }

            uint32_t high[KEYS / 16][4], low[KEYS / 16][4];  // weights, as the left factor of the products with values
#pragma unroll
            for (int i = 0; i < S_TILES; i++) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const float x = expf(s[i][2 * r] - m[r]), y = expf(s[i][2 * r + 1] - m[r]);
                    l[r] += x + y;
                    if (COLUMNS == 1) {
                        split(LARGEST * x, LARGEST * y, &high[i / 2][i % 2 * 2 + r], &low[i / 2][i % 2 * 2 + r]);
                    } else {
                        const int at = (top + g + 8 * r) * P_STRIDE + 16 * (column * S_TILES + i) + 4 * t;
                        split(LARGEST * x, LARGEST * y, (uint32_t*)(p_high + at), (uint32_t*)(p_low + at));
                    }
                }
            }
            if (COLUMNS > 1) {
                __syncthreads();
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++) {
                    load_a(high[k], p_high + top * P_STRIDE + 32 * k, P_STRIDE);
                    load_a(low[k], p_low + top * P_STRIDE + 32 * k, P_STRIDE);
                }
            }
            const uint8_t* from = (LATENT ? here : values) + 16 * column * O_TILES;
#pragma unroll
            for (int i = 0; i < O_TILES; i += 2) {
                float sums[2][4] = {};
#pragma unroll
                for (int k = 0; k < KEYS / 16; k++) {
                    uint32_t b[4];
                    load_b_across(b, from + 16 * k * V_STRIDE + 16 * i, V_STRIDE);
                    mma_f16(sums[0], high[k], b);
                    mma_f16(sums[1], high[k], b + 2);
                    mma_f16(sums[0], low[k], b);
                    mma_f16(sums[1], low[k], b + 2);
                }
#pragma unroll
                for (int j = 0; j < 8; j++) o[i + j / 4][j % 4] = fmaf(o[i + j / 4][j % 4], f[j % 4 / 2], sums[j / 4][j % 4]);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        l[r] += __shfl_xor_sync(FULL, l[r], 1);
        l[r] += __shfl_xor_sync(FULL, l[r], 2);
    }
    if (COLUMNS > 1) {
        __syncthreads();
        if (t == 0) shared[column][top + g] = l[0], shared[column][top + g + 8] = l[1];
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            l[r] = 0;
            for (int c = 0; c < COLUMNS; c++) l[r] += shared[c][top + g + 8 * r];
        }
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int64_t number = row_of(a, kv_head, first_row + top + g + 8 * r).number;
        if (number < 0) continue;
        const bool whole = a.splits == 1;
        const float by = (whole ? last_factor(a.sinks, number % a.n_head, m[r], l[r]) : 1.0f) / LARGEST;
        float* out = whole ? a.out + number * HEAD_V : part_values(a, number, part);
#pragma unroll
        for (int i = 0; i < O_TILES; i++) {
            const int at = 8 * (column * O_TILES + i);
            if (at < HEAD_V) *(float2*)(out + at + 2 * t) = make_float2(o[i][2 * r] * by, o[i][2 * r + 1] * by);
        }
        if (!whole && column == 0 && t == 0) {
            float* sums = part_sums(a, number, part);
            sums[0] = m[r], sums[1] = l[r];
        }
    }
}
