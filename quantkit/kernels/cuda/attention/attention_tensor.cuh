// Many rows on tensor cores, for an f16 or q8_0 cache. q and the weights are split into a high and a low f16 (22
// significant bits), keys and values are f16 or levels (attention_levels.cuh), sums are f32: nearly as exact as f32.
//
// ROWS / 16 by COLUMNS warps: a warp has 16 rows, and 1 / COLUMNS of the KEYS for scores and of the values' columns.
// For long heads (SLICED) it first takes 1 / COLUMNS of the columns of q, kept in registers, with all keys, and sums
// are exchanged; otherwise each warp would read all of q repeatedly.
//
// The keys of the next block are loaded while this one's values are used, values while its scores are computed. With
// LATENT, the values are the first columns of the keys; f16 keys then alternate between two buffers.
#pragma once
#include "attention/attention.cuh"
#include "core/async_copy.cuh"
#include "attention/attention_levels.cuh"
#include "core/mma.cuh"

#define LEVELS (CACHE == CACHE_Q8_0)
#define WARPS (THREADS / 32)
#define K_COLUMNS ((HEAD_K + 15) / 16 * 16)
#define V_COLUMNS ((HEAD_V + 16 * COLUMNS - 1) / (16 * COLUMNS) * (16 * COLUMNS))
#define K_STRIDE (2 * K_COLUMNS + 16)  // bytes; an odd multiple of 16: no bank conflicts among eight rows
#define V_STRIDE (LATENT ? K_STRIDE : 2 * V_COLUMNS + 16)
#define P_STRIDE (2 * KEYS + 16)
#define S_STRIDE (KEYS + 8)           // floats
#define S_TILES (KEYS / COLUMNS / 8)  // a warp's tiles of 8 keys; below, of 8 columns
#define O_TILES (V_COLUMNS / COLUMNS / 8)

#define V_SCALES ((LATENT ? HEAD_K : V_COLUMNS + 31) / 32)

// Products of a score, and the values of a block, are summed separately, because tensor cores truncate sums.
#define SUMMED (LEVELS ? 32 : 128)
#define LARGEST 16384.0f  // factor of the weights, bound of q: keeps the low half of small values exact

// Steps of 16 columns of q; if SLICED, those of a warp, and the keys it takes at a time.
#define SLICED (COLUMNS > 1 && (HEAD_K > 128 || S_TILES < 2))
#define ALL_STEPS (K_COLUMNS / 16)
#define STEPS (LEVELS ? 2 * ((ALL_STEPS / 2 + COLUMNS - 1) / COLUMNS) : (ALL_STEPS + COLUMNS - 1) / COLUMNS)
#define SPAN (LEVELS || STEPS + O_TILES / 2 > 12 ? 32 : KEYS)

INLINE void split(float x, float y, uint32_t* high, uint32_t* low) {
    *high = to_halves(x, y);
    const float2 h = halves(*high);
    *low = to_halves(x - h.x, y - h.y);
}

// The lanes that copy a row of `pieces` 16-byte pieces.
INLINE constexpr int lanes_for(int pieces) {
    int n = 8;
    if (pieces % 8)
        for (n = 1; n < pieces && n < 32;) n *= 2;
    return n;
}

// Starts to copy KEYS rows from `start`, PIECES of 16 bytes each.
template <int PIECES, int STRIDE> INLINE void fetch(const Cells& cells, int start, uint8_t* to) {
    const int LANES = lanes_for(PIECES), TIMES = (PIECES + LANES - 1) / LANES, ROWS_AT_ONCE = THREADS / LANES;
    const int lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    const SharedAddress at = shared_address(to) + first * STRIDE + 16 * lane;
#pragma unroll
    for (int r = 0; r < KEYS; r += ROWS_AT_ONCE) {
        if (KEYS % ROWS_AT_ONCE && first + r >= KEYS) break;
        const uint8_t* row = cells.piece(start + first + r);
#pragma unroll
        for (int i = 0; i < TIMES; i++)
            if (PIECES % LANES == 0 || lane + i * LANES < PIECES)
                copy16(at + (r * STRIDE + 16 * i * LANES), row + 16 * (lane + i * LANES));
    }
}

INLINE void fetch_keys(const Cells& cells, int start, uint8_t* to) {
    fetch<LEVELS ? PIECES_OF(HEAD_K) : HEAD_K / 8, LEVELS ? RAW_OF(HEAD_K) : K_STRIDE>(cells, start, to);
}

INLINE void fetch_values(const Cells& cells, int start, uint8_t* to) {
    fetch<LEVELS ? PIECES_OF(HEAD_V) : HEAD_V / 8, LEVELS ? RAW_OF(HEAD_V) : V_STRIDE>(cells, start, to);
}

// Splits rows of q, each scaled by a power of two such that its largest value is in 2^14 ... 2^15; factors: its
// inverse. A warp loads several rows at once, because the block has no other work until they arrive.
INLINE void keep_q(const attention_args& a, int kv_head, int first_row, uint8_t* high, uint8_t* low, float* factors) {
    const int PAIRS = (HEAD_K / 2 + 31) / 32, MOST = PAIRS <= 2 ? 8 : 4;
    const int AT_ONCE = ROWS / WARPS < MOST ? ROWS / WARPS : MOST;
    const int lane = threadIdx.x & 31, group = (int)(a.n_head / a.n_head_kv);
    for (int first = AT_ONCE * (threadIdx.x >> 5); first < ROWS; first += AT_ONCE * WARPS) {
        float2 v[AT_ONCE][PAIRS];
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            const int row = first_row + first + r, token = row / group;
            const float* q = a.q + (token * a.n_head + kv_head * group + row % group) * HEAD_K;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) {
                const int column = 2 * (lane + 32 * i);
                v[r][i] = token < a.rows && column < HEAD_K ? *(const float2*)(q + column) : make_float2(0, 0);
            }
        }
#pragma unroll
        for (int r = 0; r < AT_ONCE; r++) {
            float largest = 0;
#pragma unroll
            for (int i = 0; i < PAIRS; i++) largest = fmaxf(largest, fmaxf(fabsf(v[r][i].x), fabsf(v[r][i].y)));
            const int exponent = max((int)(__float_as_uint(warp_max(largest)) >> 23), 15);
            const float factor = __uint_as_float((uint32_t)(268 - exponent) << 23);  // 2^(14 - (exponent - 127))
            if (lane == 0) factors[first + r] = __uint_as_float((uint32_t)(exponent - 14) << 23);
#pragma unroll
            for (int i = 0; i < (K_COLUMNS / 2 + 31) / 32; i++) {
                uint32_t two[2] = {0, 0};
                if (i < PAIRS) split(v[r][i].x * factor, v[r][i].y * factor, &two[0], &two[1]);
                const int at = (first + r) * K_STRIDE + 4 * (lane + 32 * i);
                if (lane + 32 * i < K_COLUMNS / 2) *(uint32_t*)(high + at) = two[0], *(uint32_t*)(low + at) = two[1];
            }
        }
    }
}

// sums += q of a step, high and low, times N tiles of eight keys from `here`.
template <int N> INLINE void add_products(float (&sums)[N][4], const uint32_t high[4], const uint32_t low[4], const uint8_t* here) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        uint32_t b[4];
        load_b_twice(b, here + 8 * i * K_STRIDE, K_STRIDE, 8 * K_STRIDE);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            mma_f16(sums[i + j], high, b + 2 * j);
            mma_f16(sums[i + j], low, b + 2 * j);
        }
    }
}

// s += sums, for levels times the scales of the keys (from this lane's first).
template <int N> INLINE void add_sums(float (&s)[N][4], const float (&sums)[N][4], const float* scales) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (LEVELS) {
            const float2 d = *(const float2*)(scales + 8 * i);
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] = fmaf(sums[i][j], j % 2 ? d.y : d.x, s[i][j]);
        } else {
#pragma unroll
            for (int j = 0; j < 4; j++) s[i][j] += sums[i][j];
        }
    }
}

INLINE void attend(const attention_args& a, int kv_head, int first_row, int part) {
    // If SLICED, the space of q is reused once registers hold it.
    DYNAMIC_SHARED(memory);
    uint8_t* incoming = memory;                                                // [KEYS] keys, raw if levels
    uint8_t* q_high = incoming + KEYS * (LEVELS ? RAW_OF(HEAD_K) : K_STRIDE);  // [ROWS][K_STRIDE]
    uint8_t* q_low = q_high + ROWS * K_STRIDE;
    uint8_t* next = SLICED ? q_high : q_low + ROWS * K_STRIDE;
    uint8_t* tile = next;  // [KEYS] second keys, values, levels
    next += KEYS * (LATENT ? K_STRIDE : LEVELS ? max(K_STRIDE, V_STRIDE) : V_STRIDE);
    uint8_t* raw_values = next;  // [KEYS], of levels
    next += LEVELS && !LATENT ? KEYS * RAW_OF(HEAD_V) : 0;
    float* k_scales = (float*)next;  // [HEAD_K / 32][KEYS], of levels
    next += LEVELS ? 4 * KEYS * (HEAD_K / 32) : 0;
    float* v_scales = (float*)next;  // [V_SCALES][KEYS], times factors
    next += LEVELS ? 4 * KEYS * V_SCALES : 0;
    float* exchanged = (float*)next;                            // [SLICED ? COLUMNS : 1][ROWS][S_STRIDE]
    uint8_t *p_high = next, *p_low = p_high + ROWS * P_STRIDE;  // [ROWS][P_STRIDE], later
    __shared__ float factors[ROWS], shared[COLUMNS][ROWS], undo[V_SCALES];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, top = warp / COLUMNS * 16, column = warp % COLUMNS;
    const int g = lane >> 2, t = lane & 3, group = (int)(a.n_head / a.n_head_kv);
    const int begin = first_row / group, end = min((int)a.rows, (first_row + ROWS - 1) / group + 1);
    Range range = next_range(a, begin, end, -1);
    Blocks blocks = blocks_of(a, range, KEYS, part);
    if (nothing_to_do(a, range, blocks, begin, end)) return leave(a, kv_head, first_row, part);

    bool fetched = blocks.begin < blocks.end;
    if (fetched) {
        const uint8_t* row0 = key_row(a, kv_head, first_cell(a, range.sequence));
        fetch_keys(cells_of(a, row0, a.n_head_kv * HEAD_K, range), KEYS * blocks.begin, incoming);
    }
    keep_q(a, kv_head, first_row, q_high, q_low, factors);
    __syncthreads();
    uint32_t high_q[SLICED ? STEPS : 1][4], low_q[SLICED ? STEPS : 1][4];
    if constexpr (SLICED) {
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            const int step = min(column * STEPS + k, ALL_STEPS - 1);
            load_a(high_q[k], q_high + top * K_STRIDE + 32 * step, K_STRIDE);
            load_a(low_q[k], q_low + top * K_STRIDE + 32 * step, K_STRIDE);
        }
        __syncthreads();
    }
    if (K_COLUMNS > HEAD_K) {  // where q is zero, keys must still be finite
        for (int i = threadIdx.x; i < (1 + LATENT) * KEYS; i += THREADS)
            *(uint4*)((i < KEYS ? incoming : tile) + i % KEYS * K_STRIDE + 2 * HEAD_K) = make_uint4(0, 0, 0, 0);
    }
    // This lane's rows: top + g and top + g + 8. Until the end, l covers only its own columns.
    const float scales[2] = {scale_of(a) * factors[top + g], scale_of(a) * factors[top + g + 8]};
    float m[2] = {NONE, NONE}, l[2] = {0, 0}, o[O_TILES][4];
#pragma unroll
    for (int i = 0; i < O_TILES; i++) o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;

    uint8_t *here = LEVELS ? tile : incoming, *there = LATENT && !LEVELS ? tile : incoming;
    for (; range.sequence != NO_SEQUENCE; range = next_range(a, begin, end, range.sequence)) {
        const Row visible[2] = {in_range(row_of(a, kv_head, first_row + top + g), range),
                                in_range(row_of(a, kv_head, first_row + top + g + 8), range)};
        blocks = blocks_of(a, range, KEYS, part);
        const int64_t cells = first_cell(a, range.sequence);
        const Cells keys = cells_of(a, key_row(a, kv_head, cells), a.n_head_kv * HEAD_K, range);
        const Cells values = cells_of(a, value_row(a, kv_head, cells), a.n_head_kv * HEAD_V, range);
        if (blocks.begin < blocks.end && !fetched) fetch_keys(keys, KEYS * blocks.begin, LEVELS ? incoming : here);
        fetched = false;
        for (int block = blocks.begin; block < blocks.end; block++) {
            const int start = KEYS * block;
            copy_wait();
            __syncthreads();  // the keys have arrived; the previous block's buffers are free
            if (LEVELS) {
                if (!LATENT) fetch_values(values, start, raw_values);
                end_group();
                unpack_levels<HEAD_K, K_STRIDE>(keys, start, incoming, tile);
                unpack_scales<HEAD_K>(keys, start, incoming, k_scales, LATENT ? v_scales : nullptr, undo);
                __syncthreads();
                if (block + 1 < blocks.end) fetch_keys(keys, start + KEYS, incoming);
                end_group();
            } else if (LATENT) {
                if (block + 1 < blocks.end) fetch_keys(keys, start + KEYS, there);
            } else {
                fetch_values(values, start, tile);
            }

            float s[S_TILES][4] = {};
            if constexpr (!SLICED) {
                const int mine = 8 * column * S_TILES;
                for (int first = 0; first < ALL_STEPS; first += SUMMED / 16) {
                    float sums[S_TILES][4] = {};
                    const int last = min(first + SUMMED / 16, ALL_STEPS);
#pragma unroll 2
                    for (int k = first; k < last; k++) {
                        uint32_t high[4], low[4];
                        load_a(high, q_high + top * K_STRIDE + 32 * k, K_STRIDE);
                        load_a(low, q_low + top * K_STRIDE + 32 * k, K_STRIDE);
                        add_products(sums, high, low, here + mine * K_STRIDE + 32 * k);
                    }
                    add_sums(s, sums, k_scales + first / 2 * KEYS + mine + 2 * t);
                }
            } else {
#pragma unroll
                for (int from = 0; from < KEYS; from += SPAN) {
                    float mine[SPAN / 8][4] = {};
#pragma unroll
                    for (int first = 0; first < STEPS; first += LEVELS ? 2 : STEPS) {
                        float sums[SPAN / 8][4] = {};
                        const int step = column * STEPS + first;
#pragma unroll
                        for (int k = 0; k < (LEVELS ? 2 : STEPS); k++)
                            if (STEPS * COLUMNS == ALL_STEPS || step + k < ALL_STEPS)
                                add_products(sums, high_q[first + k], low_q[first + k], here + from * K_STRIDE + 32 * (step + k));
                        if (!LEVELS || STEPS * COLUMNS == ALL_STEPS || step < ALL_STEPS)  // else scales are undefined
                            add_sums(mine, sums, k_scales + step / 2 * KEYS + from + 2 * t);
                    }
                    float* to = exchanged + (column * ROWS + top + g) * S_STRIDE + from + 2 * t;
#pragma unroll
                    for (int i = 0; i < SPAN / 8; i++) {
                        *(float2*)(to + 8 * i) = make_float2(mine[i][0], mine[i][1]);
                        *(float2*)(to + 8 * S_STRIDE + 8 * i) = make_float2(mine[i][2], mine[i][3]);
                    }
                }
                __syncthreads();
#pragma unroll
                for (int i = 0; i < 2 * COLUMNS * S_TILES; i++) {
                    const int c = i / 2 / S_TILES, tile8 = i / 2 % S_TILES, r = i % 2;
                    const float* sum = exchanged + (c * ROWS + top + g + 8 * r) * S_STRIDE + 8 * (column * S_TILES + tile8) + 2 * t;
                    const float2 two = *(const float2*)sum;
                    s[tile8][2 * r] += two.x, s[tile8][2 * r + 1] += two.y;
                }
            }

            float largest[2] = {m[0], m[1]}, f[2];
            const int key = start + 8 * column * S_TILES + 2 * t;
#pragma unroll
            for (int i = 0; i < 4 * S_TILES; i++) s[i / 4][i % 4] *= scales[i % 4 / 2];
            if (is_bent(a)) {
#pragma unroll
                for (int i = 0; i < 4 * S_TILES; i++)
                    s[i / 4][i % 4] = bend(a, visible[i % 4 / 2], key + i / 4 * 8 + i % 2, s[i / 4][i % 4]);
            }
            if (start < max(visible[0].first, visible[1].first) || start + KEYS - 1 > min(visible[0].last, visible[1].last)) {
#pragma unroll
                for (int i = 0; i < 4 * S_TILES; i++)
                    s[i / 4][i % 4] = mask(visible[i % 4 / 2], key + i / 4 * 8 + i % 2, s[i / 4][i % 4]);
            }
#pragma unroll
            for (int i = 0; i < 4 * S_TILES; i++) largest[i % 4 / 2] = fmaxf(largest[i % 4 / 2], s[i / 4][i % 4]);
#pragma unroll
            for (int r = 0; r < 2; r++) {
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL, largest[r], 1));
                largest[r] = fmaxf(largest[r], __shfl_xor_sync(FULL, largest[r], 2));
                if (COLUMNS > 1 && t == 0) shared[column][top + g + 8 * r] = largest[r];
            }
            if (LEVELS) wait_groups<1>();
            if (!LEVELS && !LATENT) copy_wait();
            if (!LATENT || COLUMNS > 1) __syncthreads();  // values and largest scores are ready, keys have been used
            if (!LATENT && !LEVELS && block + 1 < blocks.end) fetch_keys(keys, start + KEYS, incoming);
            if (!LATENT && LEVELS) {
                unpack_levels<HEAD_V, V_STRIDE>(values, start, raw_values, tile);
                unpack_scales<HEAD_V>(values, start, raw_values, nullptr, v_scales, undo);
            }
#pragma unroll
            for (int r = 0; r < 2; r++) {
                if (COLUMNS > 1) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) largest[r] = fmaxf(largest[r], shared[c][top + g + 8 * r]);
                }
                f[r] = exp2_near(m[r] - largest[r]);
                m[r] = largest[r];
                l[r] *= f[r];
            }
#pragma unroll
            for (int i = 0; i < 4 * S_TILES; i++) {
                s[i / 4][i % 4] = exp2_near(s[i / 4][i % 4] - m[i % 4 / 2]);
                l[i % 4 / 2] += s[i / 4][i % 4];
            }
            const uint8_t* from = (LATENT ? here : tile) + 16 * column * O_TILES;
            if constexpr (LEVELS) {
                if (COLUMNS > 1) {
#pragma unroll
                    for (int i = 0; i < 2 * S_TILES; i++)
                        *(float2*)(exchanged + (top + g + i % 2 * 8) * S_STRIDE + 8 * (column * S_TILES + i / 2) + 2 * t) =
                            make_float2(s[i / 2][i % 2 * 2], s[i / 2][i % 2 * 2 + 1]);
                }
                if (!LATENT || COLUMNS > 1) __syncthreads();
                // For tiles of one scale, the weights are multiplied by it and then split.
                const int SOME = O_TILES % 4 ? 2 : 4;
#pragma unroll
                for (int i = 0; i < O_TILES; i += SOME) {
                    const int scale = (column * O_TILES + i) / 4;
                    float sums[SOME][4] = {};
#pragma unroll
                    for (int k = 0; k < KEYS / 16; k++) {
                        uint32_t high[4], low[4];
#pragma unroll
                        for (int j = 0; j < 2; j++) {
                            const float2 d = *(const float2*)(v_scales + scale * KEYS + 16 * k + 8 * j + 2 * t);
#pragma unroll
                            for (int r = 0; r < 2; r++) {
                                float2 p;
                                if (COLUMNS == 1) {
                                    p = make_float2(s[(2 * k + j) % S_TILES][2 * r], s[(2 * k + j) % S_TILES][2 * r + 1]);
                                } else {
                                    p = *(const float2*)(exchanged + (top + g + 8 * r) * S_STRIDE + 16 * k + 8 * j + 2 * t);
                                }
                                split(p.x * d.x, p.y * d.y, &high[2 * j + r], &low[2 * j + r]);
                            }
                        }
#pragma unroll
                        for (int j = 0; j < SOME; j += 2) {
                            uint32_t b[4];
                            load_b_across(b, from + 16 * k * V_STRIDE + 16 * (i + j), V_STRIDE);
                            mma_f16(sums[j], high, b);
                            mma_f16(sums[j + 1], high, b + 2);
                            mma_f16(sums[j], low, b);
                            mma_f16(sums[j + 1], low, b + 2);
                        }
                    }
                    const float by = undo[scale];
#pragma unroll
                    for (int j = 0; j < 4 * SOME; j++)
                        o[i + j / 4][j % 4] = fmaf(sums[j / 4][j % 4], by, o[i + j / 4][j % 4] * f[j % 4 / 2]);
                }
            } else {
                uint32_t high[KEYS / 16][4], low[KEYS / 16][4];  // weights, as the left factor of products with values
#pragma unroll
                for (int i = 0; i < 2 * S_TILES; i++) {
                    const int r = i % 2, number = i / 2;
                    const float x = LARGEST * s[number][2 * r], y = LARGEST * s[number][2 * r + 1];
                    if (COLUMNS == 1) {
                        split(x, y, &high[number / 2][number % 2 * 2 + r], &low[number / 2][number % 2 * 2 + r]);
                    } else {
                        const int at = (top + g + 8 * r) * P_STRIDE + 16 * (column * S_TILES + number) + 4 * t;
                        split(x, y, (uint32_t*)(p_high + at), (uint32_t*)(p_low + at));
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
            if (LATENT && !LEVELS) {
                uint8_t* used = here;
                here = there, there = used;
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
        const float by = (whole ? last_factor(a.sinks, number % a.n_head, m[r], l[r]) : 1.0f) / (LEVELS ? 1.0f : LARGEST);
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
