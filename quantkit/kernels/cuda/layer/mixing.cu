// Rows by their own statistics, and groups of columns mixed: what Gemma 3n and DeepSeek 4 have around their layers.
#include "core/functions.cuh"
#include "core/each.cuh"

// The sum of n squares of differences from mean, by a block; differences and squares in f32, as in norms.cuh.
INLINE double sum_of_squares(const float* x, int64_t n, float mean, double* parts) {
    double square = 0;
    for (int64_t i = threadIdx.x; i < n; i += 256) {
        const float v = x[i] - mean;
        square += (double)(v * v);
    }
    return block_sum(square, parts);
}

// out = max(x - mean - factor * deviation, 0), the deviation over width - 1.
struct exceed_args {
    const float* x;
    float* out;
    int64_t width, rows;
    double factor;
};

KERNEL(exceed, 256) {
    __shared__ double parts[32];
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const float* x = a.x + row * a.width;
    double sum = 0;
    for (int64_t i = threadIdx.x; i < a.width; i += 256) sum += x[i];
    const float mean = (float)(block_sum(sum, parts) / (double)a.width);
    const float deviation = sqrtf((float)(sum_of_squares(x, a.width, mean, parts) / (double)(a.width - 1)));
    const float cut = mean + deviation * (float)a.factor;
    for (int64_t i = threadIdx.x; i < a.width; i += 256) a.out[row * a.width + i] = at_least(x[i] - cut, 0.0f);
}

// like: rows of `group` columns.
struct to_length_args {
    const float *x, *like;
    float* out;
    int64_t width, rows, group;
};

KERNEL(to_length, 256) {
    __shared__ double parts[32];
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const int64_t at = row * a.width + blockIdx.y * a.group;
    const float wanted = sqrtf((float)sum_of_squares(a.like + row * a.group, a.group, 0.0f, parts));
    const float own = sqrtf((float)sum_of_squares(a.x + at, a.group, 0.0f, parts));
    for (int64_t i = threadIdx.x; i < a.group; i += 256) a.out[at + i] = a.x[at + i] * wanted / own;
}

// x has n groups of `group` columns, base and out width / group; a row of weights n for each of these.
struct mix_args {
    const float *x, *weights, *base;
    float* out;
    int64_t width, group, n, rows;
    double offset;
};

KERNEL(mix, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const uint32_t group = (uint32_t)a.group;
    const float offset = (float)a.offset;
    const float* x = a.x + row * a.n * a.group;
    const float* weights = a.weights + row * (a.width / a.group) * a.n;
    each_column(a.width, group % 4 == 0, [&](uint32_t c, auto one) {
        using V = decltype(one);
        const float* w = weights + c / group * a.n;
        V total = times(get<V>(x + c % group), w[0] + offset);
        for (int64_t i = 1; i < a.n; i++) total = plus(total, times(get<V>(x + i * a.group + c % group), w[i] + offset));
        put(a.out + row * a.width + c, plus(get<V>(a.base + row * a.width + c), total));
    });
}

// scale: [3], base: [24].
struct stream_weights_args {
    float *before, *after, *across;
    const float *x, *scale, *base;
    int64_t rows, rounds;
    double eps;
};

// The sum of the values of four lanes that `near` and `far` tell apart.
INLINE float four(float v, int near, int far) {
    v += __shfl_xor_sync(FULL, v, near);
    return v + __shfl_xor_sync(FULL, v, far);
}

// Sixteen lanes take a row: each an element of its matrix of 4 by 4, the first eight a weight, too.
KERNEL(stream_weights, 128) {
    const int64_t row = (int64_t)blockIdx.x * 8 + (threadIdx.x >> 4);
    const int lane = threadIdx.x & 15;
    const bool here = row < a.rows;
    const float* x = a.x + (here ? row : 0) * 24;
    const float eps = (float)a.eps, weight = sigmoid(x[lane & 7] * a.scale[lane >> 2 & 1] + a.base[lane & 7]);
    if (here && lane < 4) a.before[row * 4 + lane] = weight + eps;
    if (here && lane >= 4 && lane < 8) a.after[row * 4 + lane - 4] = weight * 2.0f;
    float c = x[8 + lane] * a.scale[2] + a.base[8 + lane];
    float largest = fmaxf(c, __shfl_xor_sync(FULL, c, 1));
    largest = fmaxf(largest, __shfl_xor_sync(FULL, largest, 2));
    c = expf(c - largest);
    c = c / four(c, 1, 2) + eps;
    c = c / (four(c, 4, 8) + eps);
    for (int64_t i = 1; i < a.rounds; i++) {
        c = c / (four(c, 1, 2) + eps);
        c = c / (four(c, 4, 8) + eps);
    }
    if (here) a.across[row * 16 + (lane & 3) * 4 + (lane >> 2)] = c;
}
