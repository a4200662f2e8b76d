// Many rows, in f32, 64 keys at a time. Sixteen lanes share four rows: each has every sixteenth score and four of
// every 64 columns of the values. Shared memory holds 32 columns of the keys, or the values of a few keys, at a time.
#pragma once
#include "attention/attention.cuh"

#define KEYS 64
#define SLICE 32            // columns of the keys at a time
#define STRIDE (SLICE + 4)  // row stride in floats: no bank conflicts
#define Q_STRIDE ((HEAD_K + SLICE - 1) / SLICE * SLICE + 4)
#define P_STRIDE (KEYS + 4)
#define V_COLUMNS ((HEAD_V + 63) / 64 * 64)
#define V_PARTS (V_COLUMNS / 64)
#define V_KEYS (V_PARTS > 4 ? 4 : V_PARTS > 2 ? 8 : 32 / V_PARTS)  // keys whose values are loaded at a time

#define NUMBERS_OF(head) ((head) % 4 == 0 ? 4 : (head) % 2 == 0 ? 2 : 1)

// Loads columns `from` ... from + COLUMNS of N rows from key `start`; zeros outside the head and the range.
template <int N, int COLUMNS, int HEAD, bool OF_K>
INLINE void stage(const attention_args& a, int kv_head, const Range& range, int start, int from, int stride, float* to) {
    const int numbers = NUMBERS_OF(HEAD);
#pragma unroll 2
    for (int i = threadIdx.x; i < N * COLUMNS / numbers; i += THREADS) {
        const int key = start + i / (COLUMNS / numbers), column = i % (COLUMNS / numbers) * numbers;
        float v[numbers];
#pragma unroll
        for (int j = 0; j < numbers; j++) v[j] = 0;
        if (from + column < HEAD && key >= range.first && key <= range.last) {
            const int64_t cell = first_cell(a, range.sequence) + nth_cell(selected_of(a, range.sequence), key);
            const uint8_t* row = OF_K ? key_row(a, kv_head, cell) : value_row(a, kv_head, cell);
            read_cache<numbers>(row, from + column, v);
        }
        float* out = to + (key - start) * stride + column;
        if (numbers == 4) {
            *(float4*)out = make_float4(v[0], v[1], v[2], v[3]);
        } else {
#pragma unroll
            for (int j = 0; j < numbers; j++) out[j] = v[j];
        }
    }
}

INLINE float dot4(float4 x, float4 y, float sum) { return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum)))); }

INLINE float max16(float v) {
    for (int d = 8; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, d));
    return v;
}

INLINE float sum16(float v) {
    for (int d = 8; d; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
    return v;
}

INLINE void attend(const attention_args& a, int kv_head, int first_row, int split) {
    DYNAMIC_SHARED(memory);
    __shared__ Row rows[ROWS];
    float* q = (float*)memory;            // [ROWS][Q_STRIDE]
    float* p = q + ROWS * Q_STRIDE;       // [ROWS][P_STRIDE]
    float* staged = p + ROWS * P_STRIDE;  // [KEYS][STRIDE] keys, [V_KEYS][V_COLUMNS] values
    const int x = threadIdx.x & 15, y = threadIdx.x >> 4, group = (int)(a.n_head / a.n_head_kv);
    const int begin = first_row / group, end = min((int)a.rows, (first_row + ROWS - 1) / group + 1);
    Range range = next_range(a, begin, end, -1);
    Blocks blocks = blocks_of(a, range, KEYS, split);
    if (nothing_to_do(a, range, blocks, begin, end)) return leave(a, kv_head, first_row, split);

    for (int i = threadIdx.x; i < ROWS * (Q_STRIDE - 4); i += THREADS) {
        const int row = first_row + i / (Q_STRIDE - 4), column = i % (Q_STRIDE - 4), token = row / group;
        const float* from = a.q + (token * a.n_head + kv_head * group + row % group) * HEAD_K;
        q[i / (Q_STRIDE - 4) * Q_STRIDE + column] = token < a.rows && column < HEAD_K ? from[column] : 0.0f;
    }
    for (int i = threadIdx.x; i < ROWS; i += THREADS) rows[i] = row_of(a, kv_head, first_row + i);
    __syncthreads();  // rows are read even if this part has no keys of any sequence
    float m[4], l[4], o[4][4 * V_PARTS];
#pragma unroll
    for (int r = 0; r < 4; r++) {
        m[r] = NONE, l[r] = 0;
#pragma unroll
        for (int c = 0; c < 4 * V_PARTS; c++) o[r][c] = 0;
    }
    q += 4 * y * Q_STRIDE, p += 4 * y * P_STRIDE;  // this thread's rows

    for (; range.sequence != NO_SEQUENCE; range = next_range(a, begin, end, range.sequence)) {
        blocks = blocks_of(a, range, KEYS, split);
        for (int block = blocks.begin; block < blocks.end; block++) {
            const int start = KEYS * block;
            float s[4][4] = {};
#pragma unroll 1
            for (int from = 0; from < HEAD_K; from += SLICE) {
                __syncthreads();
                stage<KEYS, SLICE, HEAD_K, true>(a, kv_head, range, start, from, STRIDE, staged);
                __syncthreads();
                float part[4][4] = {};  // summed separately: errors do not grow with the head's length
#pragma unroll 1
                for (int c = 0; c < SLICE; c += 4) {
                    float4 right[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) right[k] = *(const float4*)(staged + (x + 16 * k) * STRIDE + c);
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        const float4 left = *(const float4*)(q + r * Q_STRIDE + from + c);
#pragma unroll
                        for (int k = 0; k < 4; k++) part[r][k] = dot4(left, right[k], part[r][k]);
                    }
                }
#pragma unroll
                for (int r = 0; r < 4; r++)
#pragma unroll
                    for (int k = 0; k < 4; k++) s[r][k] += part[r][k];
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const Row row = in_range(rows[4 * y + r], range);
                float largest = m[r], sum = 0;
#pragma unroll
                for (int k = 0; k < 4; k++) s[r][k] *= scale_of(a);
                if (is_bent(a)) {
#pragma unroll
                    for (int k = 0; k < 4; k++) s[r][k] = bend(a, row, start + x + 16 * k, s[r][k]);
                }
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    s[r][k] = mask(row, start + x + 16 * k, s[r][k]);
                    largest = fmaxf(largest, s[r][k]);
                }
                largest = max16(largest);
                const float factor = exp2_near(m[r] - largest);
                m[r] = largest;
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float weight = exp2_near(s[r][k] - largest);
                    sum += weight;
                    p[r * P_STRIDE + x + 16 * k] = weight;
                }
                l[r] = l[r] * factor + sum16(sum);
#pragma unroll
                for (int c = 0; c < 4 * V_PARTS; c++) o[r][c] *= factor;
            }
#pragma unroll 1
            for (int from = 0; from < KEYS; from += V_KEYS) {
                __syncthreads();  // weights are written, keys have been read
                stage<V_KEYS, V_COLUMNS, HEAD_V, false>(a, kv_head, range, start + from, 0, V_COLUMNS, staged);
                __syncthreads();
#pragma unroll 1
                for (int k = 0; k < V_KEYS; k += 4) {
                    float4 weights[4];
#pragma unroll
                    for (int r = 0; r < 4; r++) weights[r] = *(const float4*)(p + r * P_STRIDE + from + k);
#pragma unroll
                    for (int i = 0; i < 4; i++) {
#pragma unroll
                        for (int c = 0; c < V_PARTS; c++) {
                            const float4 v = *(const float4*)(staged + (k + i) * V_COLUMNS + 4 * x + 64 * c);
#pragma unroll
                            for (int r = 0; r < 4; r++) {
                                const float w = i == 0   ? weights[r].x
                                                : i == 1 ? weights[r].y
                                                : i == 2 ? weights[r].z
                                                         : weights[r].w;
                                o[r][4 * c] = fmaf(w, v.x, o[r][4 * c]);
                                o[r][4 * c + 1] = fmaf(w, v.y, o[r][4 * c + 1]);
                                o[r][4 * c + 2] = fmaf(w, v.z, o[r][4 * c + 2]);
                                o[r][4 * c + 3] = fmaf(w, v.w, o[r][4 * c + 3]);
                            }
                        }
                    }
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) {
        const int64_t number = rows[4 * y + r].number;
        if (number < 0) continue;
        const bool whole = a.splits == 1;
        const float by = whole ? last_factor(a.sinks, number % a.n_head, m[r], l[r]) : 1.0f;
        float* out = whole ? a.out + number * HEAD_V : part_values(a, number, split);
#pragma unroll
        for (int c = 0; c < 4 * V_PARTS; c++) {
            const int column = 4 * x + c / 4 * 64 + c % 4;
            if (column < HEAD_V) out[column] = o[r][c] * by;
        }
        if (!whole && x == 0) {
            float* sums = part_sums(a, number, split);
            sums[0] = m[r], sums[1] = l[r];
        }
    }
}
