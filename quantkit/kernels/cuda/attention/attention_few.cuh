// Up to 8 rows: keys and values go from the cache straight to registers. A warp takes 32 keys at a time: for products
// lanes are columns, and 32 products at a time are summed over the warp; after that lanes are keys.
#pragma once
#include "attention/attention.cuh"

#define WARPS (THREADS / 32)
#define SPAN (32 / ROWS)  // keys whose products with all rows are summed together

// Values of a row that a lane loads at once, and the number of such loads.
#define WIDTH_OF(head) ((head) % 4 == 0 && (head) > 64 ? 4 : (head) % 2 == 0 ? 2 : 1)
#define TIMES_OF(head) (((head) + 32 * WIDTH_OF(head) - 1) / (32 * WIDTH_OF(head)))
#define K_WIDTH WIDTH_OF(HEAD_K)
#define K_TIMES TIMES_OF(HEAD_K)
#define V_WIDTH WIDTH_OF(HEAD_V)
#define V_TIMES TIMES_OF(HEAD_V)

#define LEVELS (CACHE == CACHE_Q8_0)

// This lane's columns of rows: T groups of N adjacent columns; quantized levels have one scale per group.
template <int HEAD, int N, int T> struct Lane {
    const uint8_t *values, *scales;  // of row 0
    uint32_t bytes;                  // row stride

    __device__ __forceinline__ Lane(const uint8_t* row0, int64_t width) {
        const int column = N * (int)(threadIdx.x & 31);
        scales = row0 + column / 32 * 34;
        values = LEVELS ? scales + 2 + column % 32 : row0 + column * (CACHE == CACHE_F32 ? 4 : 2);
        bytes = (uint32_t)cache_bytes(width);
    }

    // Zeros beyond the last column. d: the scales of quantized levels, else 1.
    __device__ __forceinline__ void read(int row, float (&out)[N * T], float (&d)[T]) const {
        const uint8_t* from = values + (uint64_t)(uint32_t)row * bytes;
        const uint8_t* scale = scales + (uint64_t)(uint32_t)row * bytes;
#pragma unroll
        for (int t = 0; t < T; t++) {
            d[t] = 1;
            if (32 * N * (t + 1) <= HEAD || N * (int)(threadIdx.x & 31) + 32 * N * t < HEAD) {
                if (LEVELS) {
                    d[t] = half_to_float(load2(scale + N * 34 * t));
#pragma unroll
                    for (int j = 0; j < N; j += 2) {
                        const float2 v = levels(load2(from + N * 34 * t + j));
                        out[N * t + j] = v.x;
                        if (j + 1 < N) out[N * t + j + 1] = v.y;
                    }
                } else {
                    read_cache<N>(from, 32 * N * t, out + N * t);
                }
            } else {
#pragma unroll
                for (int j = 0; j < N; j++) out[N * t + j] = 0;
            }
        }
    }
};

// Sums 2 D values over the warp; lane i gets the sum of value i. (Recursive, because a loop would not keep the indices
// constant.)
template <int D> INLINE float sum_lanes(float* v) {
    const bool upper = threadIdx.x & D;
#pragma unroll
    for (int i = 0; i < D; i++) {
        const float other = __shfl_xor_sync(FULL, upper ? v[i] : v[i + D], D);
        v[i] = (upper ? v[i + D] : v[i]) + other;
    }
    if constexpr (D > 1) return sum_lanes<D / 2>(v);
    return v[0];
}

INLINE void attend(const attention_args& a, int kv_head, int first_row, int split) {
    __shared__ float weights[WARPS][32][ROWS];
    __shared__ float partial_o[WARPS][ROWS][HEAD_V], partial_m[WARPS][ROWS], partial_l[WARPS][ROWS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, group = (int)(a.n_head / a.n_head_kv);
    const int begin = first_row / group, end = min((int)a.rows, (first_row + ROWS - 1) / group + 1);
    Range range = next_range(a, begin, end, -1);
    Blocks blocks = blocks_of(a, range, 32, split);
    if (nothing_to_do(a, range, blocks, begin, end)) return leave(a, kv_head, first_row, split);

    float q[ROWS][K_WIDTH * K_TIMES], o[ROWS][V_WIDTH * V_TIMES];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int row = first_row + r, token = row / group;
        const float* from = a.q + (token * a.n_head + kv_head * group + row % group) * HEAD_K;
#pragma unroll
        for (int i = 0; i < K_WIDTH * K_TIMES; i++) {
            const int column = K_WIDTH * (lane + i / K_WIDTH * 32) + i % K_WIDTH;
            q[r][i] = token < a.rows && column < HEAD_K ? from[column] : 0.0f;
        }
#pragma unroll
        for (int i = 0; i < V_WIDTH * V_TIMES; i++) o[r][i] = 0;
    }
    const float scale = scale_of(a);
    // For scores, a lane has a row and one key of each SPAN; until the end, l covers only its own keys.
    float m = NONE, l = 0;

    for (; range.sequence != NO_SEQUENCE; range = next_range(a, begin, end, range.sequence)) {
        const Row mine = in_range(row_of(a, kv_head, first_row + lane / SPAN), range);
        const int64_t cells = first_cell(a, range.sequence);
        const int32_t* selected = selected_of(a, range.sequence);
        const Lane<HEAD_K, K_WIDTH, K_TIMES> keys(key_row(a, kv_head, cells), a.n_head_kv * HEAD_K);
        const Lane<HEAD_V, V_WIDTH, V_TIMES> values(value_row(a, kv_head, cells), a.n_head_kv * (a.v_cache ? HEAD_V : HEAD_K));
        blocks = blocks_of(a, range, 32, split);
        for (int block = blocks.begin + warp; block < blocks.end; block += WARPS) {
            const int start = 32 * block;
            float s[ROWS];
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                float products[32];
#pragma unroll
                for (int i = 0; i < SPAN; i++) {
                    float k[K_WIDTH * K_TIMES], d[K_TIMES];
                    keys.read(nth_cell(selected, min(max(start + SPAN * j + i, range.first), range.last)), k, d);
#pragma unroll
                    for (int r = 0; r < ROWS; r++) {
                        float sum = 0;
#pragma unroll
                        for (int t = 0; t < K_TIMES; t++) {
                            float part = LEVELS ? 0 : sum;
#pragma unroll
                            for (int c = K_WIDTH * t; c < K_WIDTH * (t + 1); c++) part = fmaf(q[r][c], k[c], part);
                            sum = LEVELS ? fmaf(part, d[t], sum) : part;
                        }
                        products[SPAN * r + i] = sum;
                    }
                }
                s[j] = sum_lanes<16>(products) * scale;
            }
            if (is_bent(a)) {
#pragma unroll
                for (int j = 0; j < ROWS; j++) s[j] = bend(a, mine, start + SPAN * j + lane % SPAN, s[j]);
            }
            float largest = m;
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                s[j] = mask(mine, start + SPAN * j + lane % SPAN, s[j]);
                largest = fmaxf(largest, s[j]);
            }
#pragma unroll
            for (int d = SPAN / 2; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, d));
            const float factor = exp2_near(m - largest);
            m = largest;
            l *= factor;
            __syncwarp();  // the previous weights have been read
#pragma unroll
            for (int j = 0; j < ROWS; j++) {
                const float p = exp2_near(s[j] - m);
                l += p;
                weights[warp][SPAN * j + lane % SPAN][lane / SPAN] = p;
            }
            __syncwarp();
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float f = __shfl_sync(FULL, factor, SPAN * r);
#pragma unroll
                for (int c = 0; c < V_WIDTH * V_TIMES; c++) o[r][c] *= f;
            }
#pragma unroll(ROWS <= 2 ? 16 : 8)
            for (int i = 0; i < 32; i++) {
                float v[V_WIDTH * V_TIMES], d[V_TIMES];
                // Clamped keys have weight 0.
                values.read(nth_cell(selected, min(max(start + i, range.first), range.last)), v, d);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    const float p = weights[warp][i][r];
#pragma unroll
                    for (int t = 0; t < V_TIMES; t++) {
                        const float by = LEVELS ? p * d[t] : p;
#pragma unroll
                        for (int c = V_WIDTH * t; c < V_WIDTH * (t + 1); c++) o[r][c] = fmaf(by, v[c], o[r][c]);
                    }
                }
            }
        }
    }

    // Merge the warps.
#pragma unroll
    for (int d = SPAN / 2; d; d >>= 1) l += __shfl_xor_sync(FULL, l, d);
    if (lane % SPAN == 0) partial_m[warp][lane / SPAN] = m, partial_l[warp][lane / SPAN] = l;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
        for (int i = 0; i < V_WIDTH * V_TIMES; i++) {
            const int column = V_WIDTH * (lane + i / V_WIDTH * 32) + i % V_WIDTH;
            if (column < HEAD_V) partial_o[warp][r][column] = o[r][i];
        }
    }
    __syncthreads();
    for (int r = 0; r < ROWS; r++) {
        const int row = first_row + r, token = row / group, head = kv_head * group + row % group;
        if (token >= a.rows) break;
        const int64_t number = token * a.n_head + head;
        float largest = NONE, sum = 0, factors[WARPS];
#pragma unroll
        for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, partial_m[w][r]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            factors[w] = exp2_near(partial_m[w][r] - largest);
            sum += factors[w] * partial_l[w][r];
        }
        const bool whole = a.splits == 1;
        const float by = whole ? last_factor(a.sinks, head, largest, sum) : 1.0f;
        float* out = whole ? a.out + number * HEAD_V : part_values(a, number, split);
        for (int i = threadIdx.x; i < HEAD_V; i += THREADS) {
            float value = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) value = fmaf(factors[w], partial_o[w][r][i], value);
            out[i] = value * by;
        }
        if (!whole && threadIdx.x == 0) {
            float* sums = part_sums(a, number, split);
            sums[0] = largest, sums[1] = sum;
        }
    }
}
