// What the ways of attention share: which rows a block has, what they see, how scores are bent, where results go.
//
// Rows of q that share a key-value head are numbered token by token, head by head of its group: row = token * group +
// head. A block takes ROWS of them, and one of `splits` parts of the keys. Its tokens may be of several sequences: it
// goes through them one by one, and rows of another sequence see nothing meanwhile.
#pragma once
#include "cache.cuh"

#define CAUSAL 0
#define SLIDING 1
#define CHUNKED 2

#define NONE -3.0e38f     // the largest score of no keys: finite, so that differences are numbers
#define NO_SEQUENCE 0x7fffffff

INLINE int warp_smallest(int v) {
    for (int d = 16; d; d >>= 1) v = min(v, __shfl_xor_sync(FULL, v, d));
    return v;
}

// The first position that a token at this one sees.
INLINE int first_seen(const attention_args& a, int position) {
    const int window = (int)a.window;
    if (a.mask == SLIDING) return max(position - window + 1, 0);
    if (a.mask == CHUNKED) return position / window * window;
    return 0;
}

// A row of q: where it is (token * n_head + head; -1: none), what it sees.
struct Row {
    int64_t number;
    int sequence, first, last;
    float slope;
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
    if (token >= a.rows) return Row{-1, -1, 0, -1, 0.0f};
    const int position = a.batch->positions[token];
    return Row{token * a.n_head + head, a.batch->sequences[token], first_seen(a, position), position,
               slope_of(a.alibi, head, (int)a.n_head)};
}

// The keys that a block's rows of one sequence see.
struct Range {
    int sequence, first, last;
};

// The range of the first sequence above `after` of tokens begin ... end; the same in all lanes of a warp.
INLINE Range next_range(const attention_args& a, int begin, int end, int after) {
    const int lane = threadIdx.x & 31;
    const int32_t *sequences = a.batch->sequences, *positions = a.batch->positions;
    if (end - begin == 1) {
        const int position = positions[begin];
        return Range{sequences[begin] > after ? sequences[begin] : NO_SEQUENCE, first_seen(a, position), position};
    }
    int sequence = NO_SEQUENCE, first = NO_SEQUENCE, last = -1;
    for (int t = begin + lane; t < end; t += 32)
        if (sequences[t] > after) sequence = min(sequence, sequences[t]);
    sequence = warp_smallest(sequence);
    for (int t = begin + lane; t < end; t += 32)
        if (sequences[t] == sequence) {
            first = min(first, first_seen(a, positions[t]));
            last = max(last, positions[t]);
        }
    return Range{sequence, warp_smallest(first), -warp_smallest(-last)};
}

// Blocks of `size` keys of a range that part `split` takes: begin ... end.
struct Blocks {
    int begin, end;
};

INLINE Blocks blocks_of(const attention_args& a, const Range& range, int size, int split) {
    const int begin = range.first / size, end = range.last / size + 1;
    const int per = (end - begin + (int)a.splits - 1) / (int)a.splits;
    return Blocks{begin + split * per, min(end, begin + split * per + per)};
}

// Whether this part has no keys: none of its first range, and there is no other.
INLINE bool nothing_to_do(const attention_args& a, const Range& range, const Blocks& blocks, int begin, int end) {
    return blocks.begin >= blocks.end && next_range(a, begin, end, range.sequence).sequence == NO_SEQUENCE;
}

// A row while keys of this range come: of another sequence it sees none of them.
INLINE Row in_range(Row row, const Range& range) {
    if (row.sequence != range.sequence) row.first = NO_SEQUENCE;
    return row;
}

// Scores that are more than products: capped, and biased by the distance.
INLINE bool is_bent(const attention_args& a) { return a.softcap > 0 || a.alibi > 0; }

// Scores count as exponents of 2, in which a weight is one instruction: e^s = 2^(s log2 e). What products are
// multiplied by, if nothing bends them before:
#define LOG2_E 1.4426950408889634
INLINE float scale_of(const attention_args& a) { return (float)(is_bent(a) ? a.scale : a.scale * LOG2_E); }

INLINE float bend(const attention_args& a, const Row& row, int key, float s) {
    if (a.softcap > 0) s = tanhf(s * (1.0f / (float)a.softcap)) * (float)a.softcap;
    return (s + row.slope * (float)(key - row.last)) * (float)LOG2_E;
}

INLINE float mask(const Row& row, int key, float s) {
    return key >= row.first && key <= row.last ? s : __int_as_float(0xff800000);
}

INLINE const uint8_t* key_row(const attention_args& a, int kv_head, int sequence, int key) {
    const int64_t cell = sequence * a.batch->n_ctx + key;
    return a.k_cache + cell * cache_bytes(a.n_head_kv * HEAD_K) + cache_bytes(kv_head * HEAD_K);
}

// Without a cache of values they are the first columns of the keys.
INLINE const uint8_t* value_row(const attention_args& a, int kv_head, int sequence, int key) {
    if (!a.v_cache) return key_row(a, kv_head, sequence, key);
    const int64_t cell = sequence * a.batch->n_ctx + key;
    return a.v_cache + cell * cache_bytes(a.n_head_kv * HEAD_V) + cache_bytes(kv_head * HEAD_V);
}

// Scratch: of every row and part HEAD_V weighted values, then of every row and part m and l.
INLINE float* part_values(const attention_args& a, int64_t number, int split) {
    return a.scratch + (number * a.splits + split) * HEAD_V;
}

INLINE float* part_sums(const attention_args& a, int64_t number, int split) {
    return a.scratch + a.rows * a.n_head * a.splits * HEAD_V + 2 * (number * a.splits + split);
}

// The sums of a part that has no keys, with which its values do not count.
INLINE void leave(const attention_args& a, int kv_head, int first_row, int split) {
    for (int r = threadIdx.x; r < ROWS; r += THREADS) {
        const int64_t number = row_of(a, kv_head, first_row + r).number;
        if (number < 0) continue;
        float* sums = part_sums(a, number, split);
        sums[0] = NONE, sums[1] = 0;
    }
}

// What a row's weighted values are multiplied by at the end: a sink is one more score, without a value.
INLINE float last_factor(const float* sinks, int64_t head, float m, float l) {
    if (!sinks) return 1.0f / l;
    const float sink = sinks[head] * (float)LOG2_E, largest = fmaxf(m, sink), f = exp2_near(m - largest);
    return f / (l * f + exp2_near(sink - largest));
}
