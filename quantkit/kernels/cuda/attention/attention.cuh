// Shared by all variants of attention: the rows of a thread block, their visible keys, caps and biases, where results
// go.
//
// Rows of q that share a key-value head are numbered token by token, head by head of the group: row = token * group +
// head. A thread block has ROWS of them and one of `splits` parts of the keys. If its tokens belong to several
// sequences, it processes one sequence after another, and for rows of the others no keys are visible meanwhile. With
// SELECTED keys each token is a sequence of its own, whose keys are numbered in the order of its row of `selected`.
#pragma once
#include "attention/cache.cuh"

#ifndef SELECTED
#define SELECTED 0
#endif
#ifndef BIASED
#define BIASED 0
#endif

#define CAUSAL 0
#define SLIDING 1
#define CHUNKED 2
#define WHOLE 3
#define SYMMETRIC 4

#define NONE -3.0e38f  // the largest score if there are no keys: finite, so that differences are never NaN
#define NO_SEQUENCE 0x7fffffff
#define BIAS_PADDING 64  // columns of a.biases after the last distance

INLINE int warp_smallest(int v) {
    for (int d = 16; d; d >>= 1) v = min(v, __shfl_xor_sync(FULL, v, d));
    return v;
}

// The first position visible from `position`.
INLINE int first_visible(const attention_args& a, int position) {
    const int window = (int)a.window;
    if (a.mask == SLIDING) return max(position - window + 1, 0);
    if (a.mask == CHUNKED) return position / window * window;
    if (a.mask == SYMMETRIC) return max(position - window / 2, 0);
    return 0;
}

// The number of the last key visible to a token: its position, or the number of selected keys; with WHOLE that of the
// last token of its sequence, with SYMMETRIC that within the window.
INLINE int last_visible(const attention_args& a, int token) {
    const int32_t *sequences = a.batch->sequences, *positions = a.batch->positions;
    if (SELECTED) {
        const int end = positions[token] + 1, n = (int)a.n_selected, window = (int)a.window;
        return (a.ratio ? min(end, window) + min(end / (int)a.ratio, n - window) : min(end, n)) - 1;
    }
    int last = token;
    if (a.mask == WHOLE || a.mask == SYMMETRIC)
        for (last = (int)a.rows - 1; sequences[last] != sequences[token];) last--;
    return a.mask == SYMMETRIC ? min(positions[last], positions[token] + (int)a.window / 2) : positions[last];
}

// A row of q: its number (token * n_head + head; -1: none) and the range of keys visible to it; if BIASED, the bias of
// key 0, before those of the others.
struct Row {
    int64_t number;
    int sequence, first, last;
    float slope;
#if BIASED
    const float* biases;
#endif
};

// ALiBi's slope of a head (Press et al. 2022): powers of 2^-(largest / n), n a power of two.
INLINE float slope_of(double largest, int head, int n_head) {
    if (largest <= 0) return 0;
    int n = 1;
    while (2 * n <= n_head) n *= 2;
    const double exponent = head < n ? (double)(head + 1) / n : (double)(2 * (head - n) + 1) / (2 * n);
    return (float)exp2(-largest * exponent);
}

INLINE Row row_of(const attention_args& a, int kv_head, int row) {
    const int group = (int)(a.n_head / a.n_head_kv), token = row / group, head = kv_head * group + row % group;
#if BIASED
    if (token >= a.rows) return Row{-1, -1, 0, -1, 0.0f, a.biases};
#else
    if (token >= a.rows) return Row{-1, -1, 0, -1, 0.0f};
#endif
    const int position = a.batch->positions[token];
    const int sequence = SELECTED ? token : a.batch->sequences[token];
    Row r{token * a.n_head + head, sequence, first_visible(a, position), last_visible(a, token),
          slope_of(a.alibi, head, (int)a.n_head)};
#if BIASED
    const int64_t n_ctx = a.batch->n_ctx;
    r.biases = a.biases + head * (2 * n_ctx + BIAS_PADDING) + n_ctx - 1 - position;
#endif
    return r;
}

// The keys visible to a block's rows of one sequence.
struct Range {
    int sequence, first, last;
};

// The range of the lowest sequence above `after` among tokens begin ... end; the same in all lanes of a warp.
INLINE Range next_range(const attention_args& a, int begin, int end, int after) {
    const int lane = threadIdx.x & 31;
    const int32_t *sequences = a.batch->sequences, *positions = a.batch->positions;
    if (SELECTED) {
        const int token = max(begin, after + 1);
        return token < end ? Range{token, 0, last_visible(a, token)} : Range{NO_SEQUENCE, 0, -1};
    }
    if (end - begin == 1) {
        const int position = positions[begin];
        return Range{sequences[begin] > after ? sequences[begin] : NO_SEQUENCE, first_visible(a, position), last_visible(a, begin)};
    }
    int sequence = NO_SEQUENCE, first = NO_SEQUENCE, last = -1;
    for (int t = begin + lane; t < end; t += 32)
        if (sequences[t] > after) sequence = min(sequence, sequences[t]);
    sequence = warp_smallest(sequence);
    for (int t = begin + lane; t < end; t += 32)
        if (sequences[t] == sequence) {
            first = min(first, first_visible(a, positions[t]));
            last = max(last, last_visible(a, t));
        }
    return Range{sequence, warp_smallest(first), -warp_smallest(-last)};
}

// The blocks of `size` keys, begin ... end, of a range that belong to part `split`.
struct Blocks {
    int begin, end;
};

INLINE Blocks blocks_of(const attention_args& a, const Range& range, int size, int split) {
    const int begin = range.first / size, end = range.last / size + 1;
    const int per = (end - begin + (int)a.splits - 1) / (int)a.splits;
    return Blocks{begin + split * per, min(end, begin + split * per + per)};
}

// Whether this part has no keys: none in its first range, and no other range.
INLINE bool nothing_to_do(const attention_args& a, const Range& range, const Blocks& blocks, int begin, int end) {
    return blocks.begin >= blocks.end && next_range(a, begin, end, range.sequence).sequence == NO_SEQUENCE;
}

// A row limited to a range: if of another sequence, it sees no keys.
INLINE Row in_range(Row row, const Range& range) {
    if (row.sequence != range.sequence) row.first = NO_SEQUENCE;
    return row;
}

// Whether scores are capped, or biased by distance.
INLINE bool is_bent(const attention_args& a) { return BIASED || a.softcap > 0 || a.alibi > 0; }

// Scores are exponents of 2, which makes a weight one instruction: e^s = 2^(s log2 e). Products are multiplied by
// scale_of; with a cap or bias, `bend` applies log2 e.
#define LOG2_E 1.4426950408889634
INLINE float scale_of(const attention_args& a) { return (float)(is_bent(a) ? a.scale : a.scale * LOG2_E); }

INLINE float bend(const attention_args& a, const Row& row, int key, float s) {
    if (a.softcap > 0) s = tanhf(s * (1.0f / (float)a.softcap)) * (float)a.softcap;
#if BIASED
    if (key >= row.first && key <= row.last) s += row.biases[key];
#endif
    return (s + row.slope * (float)(key - row.last)) * (float)LOG2_E;
}

INLINE float mask(const Row& row, int key, float s) { return key >= row.first && key <= row.last ? s : __int_as_float(0xff800000); }

// First cell of a sequence, or of a token's keys; and the cell of a key relative to it.
INLINE int64_t first_cell(const attention_args& a, int sequence) {
    return (SELECTED ? a.batch->sequences[sequence] : sequence) * a.batch->n_ctx;
}

INLINE const int32_t* selected_of(const attention_args& a, int sequence) {
    return SELECTED ? a.selected + sequence * a.n_selected : nullptr;
}

INLINE int nth_cell(const int32_t* selected, int key) { return SELECTED ? selected[key] : key; }

INLINE const uint8_t* key_row(const attention_args& a, int kv_head, int64_t cell) {
    return a.k_cache + cell * cache_bytes(a.n_head_kv * HEAD_K) + cache_bytes(kv_head * HEAD_K);
}

// Without a value cache, values are the first columns of the keys.
INLINE const uint8_t* value_row(const attention_args& a, int kv_head, int64_t cell) {
    if (!a.v_cache) return key_row(a, kv_head, cell);
    return a.v_cache + cell * cache_bytes(a.n_head_kv * HEAD_V) + cache_bytes(kv_head * HEAD_V);
}

// Scratch: HEAD_V weighted values for every row and part, then m and l for every row and part.
INLINE float* part_values(const attention_args& a, int64_t number, int split) {
    return a.scratch + (number * a.splits + split) * HEAD_V;
}

INLINE float* part_sums(const attention_args& a, int64_t number, int split) {
    return a.scratch + a.rows * a.n_head * a.splits * HEAD_V + 2 * (number * a.splits + split);
}

// Writes the sums of a part without keys, which give its values no weight.
INLINE void leave(const attention_args& a, int kv_head, int first_row, int split) {
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
        const int64_t number = row_of(a, kv_head, first_row + r).number;
        if (number < 0) continue;
        float* sums = part_sums(a, number, split);
        sums[0] = NONE, sums[1] = 0;
    }
}

// The final factor of a row's weighted values; a sink is an extra score without a value.
INLINE float last_factor(const float* sinks, int64_t head, float m, float l) {
    if (!sinks) return 1.0f / l;
    const float sink = sinks[head] * (float)LOG2_E, largest = fmaxf(m, sink), f = exp2_near(m - largest);
    return f / (l * f + exp2_near(sink - largest));
}
