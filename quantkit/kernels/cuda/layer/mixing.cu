// Operations on a row's own statistics and mixes of column groups, around the layers of Gemma 3n and RWKV.
#include "core/functions.cuh"
#include "core/each.cuh"

// The sum of n squared differences from mean, by a block; differences and squares in f32, as in norms.cuh.
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
    const float target = sqrtf((float)sum_of_squares(a.like + row * a.group, a.group, 0.0f, parts));
    const float own = sqrtf((float)sum_of_squares(a.x + at, a.group, 0.0f, parts));
    for (int64_t i = threadIdx.x; i < a.group; i += 256) a.out[at + i] = a.x[at + i] * target / own;
}

// x has n groups of `group` columns, base and out width / group; a row of n weights for each of these.
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

// x and to have n columns, out, by and weights width / n groups of them; by, weights: or null.
struct lerp_args {
    const float *x, *to, *by, *weights;
    float* out;
    int64_t width, n, rows;
};

KERNEL(lerp, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const uint32_t n = (uint32_t)a.n;
    const float *x = a.x + row * a.n, *to = a.to + row * a.n, *weights = a.weights ? a.weights + row * a.width : nullptr;
    float* out = a.out + row * a.width;
    each_column(a.width, n % 4 == 0, [&](uint32_t c, auto one) {
        using V = decltype(one);
        V factor = {};
        if (a.by) factor = get<V>(a.by + c);
        if (weights) factor = a.by ? plus(factor, get<V>(weights + c)) : get<V>(weights + c);
        const V from = get<V>(x + c % n);
        put(out + c, plus(from, times(plus(get<V>(to + c % n), times(from, -1.0f)), factor)));
    });
}

// x + v times the sum of r k vector over each head's columns, by a warp.
struct bonus_args {
    const float *x, *r, *k, *v, *vector;
    float* out;
    int64_t width, head, rows;
};

KERNEL(bonus, 256) {
    const int64_t heads = a.width / a.head, unit = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (unit >= a.rows * heads) return;
    const int64_t at = unit * a.head;
    const float* vector = a.vector + unit % heads * a.head;
    float sum = 0;
    for (int64_t i = lane; i < a.head; i += 32) sum = fmaf(a.k[at + i] * a.r[at + i], vector[i], sum);
    sum = warp_sum(sum);
    for (int64_t i = lane; i < a.head; i += 32) a.out[at + i] = a.x[at + i] + a.v[at + i] * sum;
}
