// Elementwise and row-wise operations, and copies of columns and rows.
// Except in copies (select_outputs, take, join), out may alias x or a.
#include "core/functions.cuh"
#include "core/each.cuh"

struct add_args {
    const float *a, *b;
    float* out;
    int64_t width, rows;
};

KERNEL(add, 256) {
    each_of(a.rows * a.width, [&](int64_t i, auto one) {
        using V = decltype(one);
        put(a.out + i, plus(get<V>(a.a + i), get<V>(a.b + i)));
    });
}

struct scale_args {
    const float* x;
    float* out;
    int64_t width, rows;
    double by;
};

KERNEL(scale, 256) {
    const float by = (float)a.by;
    each_of(a.rows * a.width, [&](int64_t i, auto one) { put(a.out + i, times(get<decltype(one)>(a.x + i), by)); });
}

struct shift_args : scale_args {};

KERNEL(shift, 256) {
    const float by = (float)a.by;
    each_of(a.rows * a.width,
            [&](int64_t i, auto one) { put(a.out + i, apply([&](float x) { return x + by; }, get<decltype(one)>(a.x + i))); });
}

struct clamp_args : scale_args {};

KERNEL(clamp, 256) {
    const float by = (float)a.by;
    each_of(a.rows * a.width, [&](int64_t i, auto one) {
        put(a.out + i, apply([&](float x) { return within(x, by); }, get<decltype(one)>(a.x + i)));
    });
}

struct softcap_args : scale_args {};

KERNEL(softcap, 256) {
    const float by = (float)a.by;
    each_of(a.rows * a.width, [&](int64_t i, auto one) {
        put(a.out + i, apply([&](float x) { return by * tanhf(x / by); }, get<decltype(one)>(a.x + i)));
    });
}

// e^min(x, eps) - 1 - x; a polynomial near zero, to avoid cancellation.
INLINE float below(float x, float eps) {
    const float m = at_most(x, eps);
    const float p = ((((m * (1.0f / 5040) + 1.0f / 720) * m + 1.0f / 120) * m + 1.0f / 24) * m + 1.0f / 6) * m + 0.5f;
    return (m > -0.3f ? m * m * p : expf(m) - 1.0f - m) + (m - x);
}

struct xielu_args {
    const float* x;
    float* out;
    int64_t width, rows;
    double alpha_n, alpha_p, beta, eps;
};

KERNEL(xielu, 256) {
    const float alpha_n = (float)a.alpha_n, alpha_p = (float)a.alpha_p, beta = (float)a.beta, eps = (float)a.eps;
    const auto f = [&](float x) {
        const float y = x > 0 ? x * x * alpha_p : below(x, eps) * alpha_n;
        return y + x * beta;
    };
    each_of(a.rows * a.width, [&](int64_t i, auto one) { put(a.out + i, apply(f, get<decltype(one)>(a.x + i))); });
}

// ---- by row: blocks are (row, part of its columns)

// rows_of 1: rows are outputs, not tokens; per: rows per token.
struct scale_by_position_args {
    const Batch* batch;
    const float* x;
    float* out;
    int64_t width, rows, rows_of, per;
    double floor_scale, alpha, offset;
};

KERNEL(scale_by_position, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const int64_t at = row / a.per, token = a.rows_of ? a.batch->outputs[at] : at;
    const float position = (float)a.batch->positions[token];
    const float steps = floorf((position + (float)a.offset) / (float)a.floor_scale);
    const float factor = logf(steps + 1.0f) * (float)a.alpha + 1.0f;
    const float* x = a.x + row * a.width;
    float* out = a.out + row * a.width;
    each_column(a.width, a.width % 4 == 0, [&](uint32_t c, auto one) { put(out + c, times(get<decltype(one)>(x + c), factor)); });
}

// The vector has n values and repeats along the row.
struct multiply_by_args {
    const float *x, *vector;
    float* out;
    int64_t n, width, rows;
};

template <typename F> INLINE void with_vector(const multiply_by_args& a, F f) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const float* x = a.x + row * a.width;
    float* out = a.out + row * a.width;
    each_column(a.width, (a.width | a.n) % 4 == 0, [&](uint32_t c, auto one) {
        using V = decltype(one);
        put(out + c, f(get<V>(x + c), get<V>(a.vector + c % (uint32_t)a.n)));
    });
}

KERNEL(multiply_by, 256) {
    with_vector(a, [](auto x, auto y) { return times(x, y); });
}

struct plus_vector_args : multiply_by_args {};

KERNEL(plus_vector, 256) {
    with_vector(a, [](auto x, auto y) { return plus(x, y); });
}

// ---- copies of columns and rows

// The columns from `start` on of every `period` columns, as many as make up width.
struct take_args {
    const float* x;
    float* out;
    int64_t width, x_width, start, period, rows;
};

KERNEL(take, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const uint32_t n = (uint32_t)(a.width / (a.x_width / a.period)), period = (uint32_t)a.period;
    const float* x = a.x + row * a.x_width + a.start;
    float* out = a.out + row * a.width;
    each_column(a.width, (n | a.start | a.period) % 4 == 0,
                [&](uint32_t c, auto one) { put(out + c, get<decltype(one)>(x + c / n * period + c % n)); });
}

// Interleaves period_a columns of a with period_b of b; b wraps around.
struct join_args {
    const float *a, *b;
    float* out;
    int64_t a_width, b_width, period_a, period_b, rows;
};

KERNEL(join, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const uint32_t period_a = (uint32_t)a.period_a, period_b = (uint32_t)a.period_b, period = period_a + period_b;
    const uint32_t b_groups = (uint32_t)a.b_width / period_b;
    const int64_t width = a.a_width / a.period_a * period;
    const float *from_a = a.a + row * a.a_width, *from_b = a.b + row * a.b_width;
    float* out = a.out + row * width;
    each_column(width, (period_a | period_b) % 4 == 0, [&](uint32_t c, auto one) {
        const uint32_t group = c / period, i = c % period;
        const float* from = i < period_a ? from_a + group * period_a + i : from_b + group % b_groups * period_b + (i - period_a);
        put(out + c, get<decltype(one)>(from));
    });
}

// The rows of the tokens that need logits; rows: their number, width: all columns of a token.
struct select_outputs_args {
    const Batch* batch;
    const float* x;
    float* out;
    int64_t width, rows;
};

KERNEL(select_outputs, 256) {
    const int64_t row = blockIdx.x;
    if (row >= a.rows) return;
    const float* x = a.x + a.batch->outputs[row] * a.width;
    float* out = a.out + row * a.width;
    each_column(a.width, a.width % 4 == 0, [&](uint32_t c, auto one) { put(out + c, get<decltype(one)>(x + c)); });
}

// The rows of a table of integers, [n_vocab][width], for the tokens.
struct lookup_args {
    const Batch* batch;
    const int32_t* table;
    int32_t* out;
    int64_t width, rows;
};

KERNEL(lookup, 256) {
    const int64_t at = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (at < a.rows * a.width) a.out[at] = a.table[a.batch->tokens[at / a.width] * a.width + at % a.width];
}
