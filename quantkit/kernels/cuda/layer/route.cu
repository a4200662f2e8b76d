// Routing: the experts of a token and their weights, a warp per token (route.cuh); rows before and after the experts.
#include "core/each.cuh"
#include "layer/route.cuh"

struct route_args {
    int32_t* ids;
    float* weights;
    const float *logits, *bias;
    const int32_t* chosen;
    int64_t rows, n_expert, n_used, n_group, n_group_used, gating, norm, share;
    double scale, sum_floor;
};

KERNEL(route, THREADS) {
    DYNAMIC_SHARED(shared);
    const int warp = threadIdx.x >> 5;
    const int64_t row = (int64_t)blockIdx.x * (THREADS / 32) + warp;
    if (row >= a.rows) return;
    route_token(a, row, (float*)shared + warp * (2 * a.n_expert + max(a.n_used, a.n_group)), a.chosen);
}

// ---- rows before and after the experts; rows: number of tokens

// out row (t, j) = x row t * weights[t, j]
struct repeat_args {
    const float *x, *weights;
    float* out;
    int64_t width, n_used, rows;
};

KERNEL(repeat, 256) {
    const int64_t pair = blockIdx.x;
    if (pair >= a.rows * a.n_used) return;
    const float* x = a.x + pair / a.n_used * a.width;
    float* out = a.out + pair * a.width;
    const float weight = a.weights[pair];
    each_column(a.width, a.width % 4 == 0, [&](uint32_t c, auto one) { put(out + c, times(get<decltype(one)>(x + c), weight)); });
}

// out row t = sum over j, in order, of weights[t, j] * x row (t, j), each product and sum rounded; weights 0: sum.
struct combine_args {
    const float *x, *weights;
    float* out;
    int64_t width, n_used, rows;
};

KERNEL(combine, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const float* x = a.x + row * a.n_used * a.width;
    const float* weights = a.weights ? a.weights + row * a.n_used : nullptr;
    float* out = a.out + row * a.width;
    each_column(a.width, a.width % 4 == 0, [&](uint32_t c, auto one) {
        using V = decltype(one);
        const auto term = [&](int64_t j) {
            const V v = get<V>(x + j * a.width + c);
            return weights ? times(v, weights[j]) : v;
        };
        V sum = term(0);
        for (int64_t j = 1; j < a.n_used; j++) sum = plus(sum, term(j));
        put(out + c, sum);
    });
}
