// The operations between two products, in one launch: a block per row, 8 columns per lane, kept in registers
// throughout.
//
//     t = x, or the sum of a token's experts       (in the order of route.cu's combine)
//     t = norm of t                                (post-norms: Gemma 2, OLMo 2)
//     y = plus_too + by * (plus + t)               -> sum; plus times sigmoid(gate), one value a row, if there is one
//     z = norm of y                                -> normed
//     z in the format of a weight's activations    -> quantized
//
// Each step is optional: pointer 0, kind NONE, by 1, format -1. THREADS a block; UNITS of 256 columns a warp.
#include "matmul/activations.cuh"
#include "core/functions.cuh"
#include "layer/norms.cuh"

#define NONE -1

// x: [rows * n_used, width] with weights [rows, n_used] or 0; n_used 0: [rows, width]. sum may alias x, plus or
// plus_too. selected: rows are outputs, while x, plus and plus_too have rows of tokens; sum is then separate, n_used 0.
struct row_epilogue_args {
    const Batch* batch;
    int64_t rows, width, selected;
    const float *x, *weights;
    int64_t n_used, post_kind;
    const float *post_weight, *post_bias;
    double post_eps;
    const float *plus, *plus_too, *gate;
    double by;
    float* sum;
    int64_t kind;
    const float *weight, *bias;
    double eps;
    float* normed;
    int64_t format;
    uint8_t* quantized;
};

// This lane's columns of a row: eight of each unit of its warp.
struct Columns {
    float v[UNITS][8];

    static __device__ __forceinline__ int64_t first(int u) {
        return 256 * ((threadIdx.x >> 5) + (int64_t)u * (THREADS / 32)) + 8 * (threadIdx.x & 31);
    }

    __device__ __forceinline__ void load(const float* row, int64_t width) {
#pragma unroll
        for (int u = 0; u < UNITS; u++) load_eight(row, first(u), width, v[u]);
    }

    __device__ __forceinline__ void store(float* row, int64_t width) const {
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int64_t c = first(u);
            if (c + 8 <= width && ((uint64_t)row & 15) == 0) {
                ((float4*)(row + c))[0] = make_float4(v[u][0], v[u][1], v[u][2], v[u][3]);
                ((float4*)(row + c))[1] = make_float4(v[u][4], v[u][5], v[u][6], v[u][7]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (c + i < width) row[c + i] = v[u][i];
            }
        }
    }

    // f(value, u, i) for every value, including those beyond the row.
    template <typename F> __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int u = 0; u < UNITS; u++)
#pragma unroll
            for (int i = 0; i < 8; i++) f(v[u][i], u, i);
    }

    __device__ __forceinline__ void add(const float* row, int64_t width) {
        add(row, width, [](float v) { return v; });
    }

    template <typename F> __device__ __forceinline__ void add(const float* row, int64_t width, F f) {
        Columns other;
        other.load(row, width);
        each([&](float& v, int u, int i) { v = v + f(other.v[u][i]); });
    }
};

// Norm of a row, times weight, plus bias; all blocks of a launch take the same branches.
INLINE void normalize(Columns& y, int64_t width, int kind, const float* weight, const float* bias, double eps, double* part) {
    Columns w;  // loading while sums are computed
    if (weight) w.load(weight, width);
    float mean = 0;
    if (kind == LAYER) {
        double sum = 0;
        y.each([&](float& v, int u, int i) { sum += v; });  // zeros beyond the row
        mean = (float)(block_sum(sum, part) / (double)width);
    }
    double square = 0;
    y.each([&](float& v, int u, int i) {
        const float d = v - mean;
        if (Columns::first(u) + i < width) square += (double)(d * d);
    });
    const Moments moments = {mean, factor_of(kind, block_sum(square, part), width, eps)};
    y.each([&](float& v, int u, int i) { v = moments.of(v); });
    if (weight) y.each([&](float& v, int u, int i) { v *= w.v[u][i]; });
    if (bias) y.add(bias, width);
}

template <int FORM> INLINE void quantize_row(const Columns& y, uint8_t* out, int64_t units) {
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (Columns::first(u) / 256 < units) quantize_unit<FORM>(y.v[u], out, Columns::first(u) / 256, units);
}

template <int FORM> INLINE void quantize_row_by(const Columns& y, uint8_t* out, int64_t units, double* part) {
    float amax[2] = {0, 0};
#pragma unroll
    for (int u = 0; u < UNITS; u++)
#pragma unroll
        for (int i = 0; i < 8; i++) amax[i / 4] = fmaxf(amax[i / 4], fabsf(y.v[u][i]));
    const RowScales scales = scales_of_row<FORM>(amax, (float2*)part);
#pragma unroll
    for (int u = 0; u < UNITS; u++)
        if (Columns::first(u) / 256 < units) quantize_unit_by<FORM>(scales, y.v[u], out, Columns::first(u) / 256, units);
}

template <int FORM> INLINE void round_row(Columns& y, float* out, int64_t width) {
    y.each([&](float& v, int u, int i) { v = rounded<FORM>(v); });
    y.store(out, width);
}

KERNEL(row_epilogue, THREADS) {
    __shared__ double part[64];
    const int64_t row = blockIdx.x, width = a.width, units = (width + 255) / 256;
    const int64_t from = a.selected ? a.batch->outputs[row] : row;
    Columns y;
    if (a.n_used) {
        const float* x = a.x + row * a.n_used * width;
        const float* weights = a.weights ? a.weights + row * a.n_used : nullptr;
        y.load(x, width);
        if (weights) y.each([&](float& v, int u, int i) { v = v * weights[0]; });
#pragma unroll 4
        for (int64_t j = 1; j < a.n_used; j++) {
            Columns term;
            term.load(x + j * width, width);
            const float weight = weights ? weights[j] : 1.0f;
            y.each([&](float& v, int u, int i) { v = v + term.v[u][i] * weight; });
        }
    } else {
        y.load(a.x + from * width, width);
    }
    if (a.post_kind != NONE) normalize(y, width, (int)a.post_kind, a.post_weight, a.post_bias, a.post_eps, part);
    if (a.plus && a.gate) {
        const float gate = sigmoid(a.gate[from]);
        y.add(a.plus + from * width, width, [&](float v) { return gate * v; });
    } else if (a.plus) {
        y.add(a.plus + from * width, width);
    }
    const float by = (float)a.by;
    y.each([&](float& v, int u, int i) { v = v * by; });
    if (a.plus_too) y.add(a.plus_too + from * width, width);
    if (a.sum) y.store(a.sum + row * width, width);
    if (a.kind != NONE) normalize(y, width, (int)a.kind, a.weight, a.bias, a.eps, part);
    if (a.normed) y.store(a.normed + row * width, width);
    // Values beyond the row are zero, except after a layer norm's mean and bias.
    y.each([&](float& v, int u, int i) { v = Columns::first(u) + i < width ? v : 0.0f; });
    uint8_t* quantized = a.quantized + row * Q8_UNIT * units;
    switch (a.format) {
        case Q8_0: quantize_row<Q8_0>(y, quantized, units); break;
        case Q8_1: quantize_row<Q8_1>(y, quantized, units); break;
        case Q8_2: quantize_row<Q8_2>(y, quantized, units); break;
        case Q8_K: quantize_row<Q8_K>(y, quantized, units); break;
        case Q8_KV: quantize_row_by<Q8_KV>(y, quantized, units, part); break;
        case Q8_K64: quantize_row_by<Q8_K64>(y, quantized, units, part); break;
        case ROUND_F16: round_row<ROUND_F16>(y, (float*)a.quantized + row * width, width); break;
        case ROUND_BF16: round_row<ROUND_BF16>(y, (float*)a.quantized + row * width, width); break;
    }
}
