// One row for every block of positions: a weighted sum of its tokens' rows, column by column (DeepSeek 4).
//
// With w_i the softmax of score_i + ape_i over the tokens of a block, the output of its last token is the sum of w_i
// kv_i; that of others is 0. With overlap kv, score and ape are twice as wide: a block consists of the second halves
// of its tokens, and of the first halves of those of the block before.
#include "core/functions.cuh"

// out: [rows][width]; ape: [ratio][width of kv]; state: [sequences][3 (9 with overlap)][width]: the running sums of
// the second halves, of the first ones, and of the first ones of the block before.
struct compress_args {
    const Batch* batch;
    float* out;
    const float *kv, *score, *ape;
    float* state;
    int64_t width, ratio, overlap, rows;
};

// A running softmax: the largest score, the sum of the weights, and that of the weighted values.
struct Sums {
    float largest, weights, values;
};

INLINE Sums both(Sums x, Sums y) {
    const float largest = fmaxf(x.largest, y.largest);
    const float f = expf(x.largest - largest), g = expf(y.largest - largest);
    return {largest, x.weights * f + y.weights * g, x.values * f + y.values * g};
}

INLINE Sums load_sums(const float* state, int64_t width) { return {state[0], state[width], state[2 * width]}; }

INLINE void store_sums(float* state, int64_t width, Sums x) {
    state[0] = x.largest;
    state[width] = x.weights;
    state[2 * width] = x.values;
}

// A thread has a column of all tokens, in order.
KERNEL(compress, 64) {
    const int64_t column = (int64_t)blockIdx.x * 64 + threadIdx.x, width = a.width;
    if (column >= width) return;
    const int64_t wide = a.overlap ? 2 * width : width, size = (a.overlap ? 9 : 3) * width;
    Sums own = {}, first = {}, before = {};
    int64_t sequence = -1;
    float* state = nullptr;
    const auto keep = [&]() {
        if (sequence < 0) return;
        store_sums(state, width, own);
        if (!a.overlap) return;
        store_sums(state + 3 * width, width, first);
        store_sums(state + 6 * width, width, before);
    };
    for (int64_t t = 0; t < a.rows; t++) {
        const int64_t position = a.batch->positions[t], i = position % a.ratio;
        if (a.batch->sequences[t] != sequence) {
            keep();
            sequence = a.batch->sequences[t];
            state = a.state + sequence * size + column;
            own = load_sums(state, width);
            if (a.overlap) first = load_sums(state + 3 * width, width), before = load_sums(state + 6 * width, width);
        }
        const int64_t at = wide - width + column;
        const Sums sums = {a.score[wide * t + at] + a.ape[wide * i + at], 1.0f, a.kv[wide * t + at]};
        own = i ? both(own, sums) : sums;
        if (a.overlap) {
            const Sums half = {a.score[wide * t + column] + a.ape[wide * i + column], 1.0f, a.kv[wide * t + column]};
            first = i ? both(first, half) : half;
        }
        float out = 0;
        if (i == a.ratio - 1) {
            const Sums whole = a.overlap && position >= a.ratio ? both(before, own) : own;
            out = whole.values / whole.weights;
            before = first;
        }
        a.out[width * t + column] = out;
    }
    keep();
}
