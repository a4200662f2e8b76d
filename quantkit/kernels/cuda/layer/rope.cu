// Rotary positions: rotate pairs of columns by an angle that grows with the position (kernels/rope_constants.py).
#include "core/device.cuh"

// constants [3, pairs]: 1 if a pair rotates, its factor, its YaRN mix. out [tokens][pairs]: cos, sin, at the first of
// every `each` positions; back: 1 for the inverse rotation, else 0.
struct rope_table_args {
    const Batch* batch;
    float* out;
    int64_t rows, pairs, each, back;
    const float* constants;
    double step, freq_scale, mscale;
};

// A thread per token and pair. cos and sin in double, to round as glibc does.
KERNEL(rope_table, 128) {
    const int64_t at = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (at >= a.rows * a.pairs) return;
    const int token = (int)(at / a.pairs), pair = (int)(at % a.pairs), pairs = (int)a.pairs;
    const float step = (float)a.step, freq_scale = (float)a.freq_scale, mscale = (float)a.mscale;
    float running = (float)(a.batch->positions[token] / (int)a.each * (int)a.each);
    for (int i = 0; i < pair; i++) running *= step;  // as in ggml, whose rounding errors are part of the model
    const float turns = a.constants[pair], factor = a.constants[pairs + pair], mix = a.constants[2 * pairs + pair];
    float theta = running * turns / factor;
    theta = freq_scale * theta * (1.0f - mix) + theta * mix;
    a.out[2 * at] = (float)cos((double)theta) * mscale;
    a.out[2 * at + 1] = (float)sin((double)theta) * (a.back ? -mscale : mscale);
}

// width: values per token. Columns start ... start + n_rot of each head rotate, others are copied; out may alias x.
struct rope_args {
    float* out;
    const float *x, *table;
    int64_t width, head, start, n_rot;
};

// Block x: the token; y: 256 of its items (pairs to rotate and columns to copy, head by head).
KERNEL(rope, 256) {
    const int head = (int)a.head, start = (int)a.start, n_rot = (int)a.n_rot, pairs = n_rot / 2, each = head - pairs;
    const int item = (int)blockIdx.y * 256 + (int)threadIdx.x, number = item / each, i = item - number * each;
    if (number * head >= (int)a.width) return;
    const int64_t row = (int64_t)blockIdx.x * a.width + number * head;
    const float* x = a.x + row;
    float* out = a.out + row;
    if (i >= pairs) {
        const int column = i - pairs < start ? i - pairs : i - pairs + n_rot;
        out[column] = x[column];
        return;
    }
    const float* angle = a.table + (int64_t)blockIdx.x * n_rot + 2 * i;
    const int first = start + (NEOX ? i : 2 * i), second = NEOX ? first + pairs : first + 1;
    const float p = x[first], q = x[second];
    out[first] = p * angle[0] - q * angle[1];
    out[second] = p * angle[1] + q * angle[0];
}
