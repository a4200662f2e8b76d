// Norms of groups of columns: RMS, layer and L2 (sum of squares + eps), a warp per group. Whole rows: row_epilogue.cu.
#include "layer/norms.cuh"

// groups: total over all rows; weight and bias (0: none) repeat every n_weight values along a row.
struct norm_args {
    const float* x;
    float* out;
    const float *weight, *bias;
    int64_t groups, group, per_row, n_weight;
    double eps;
};

KERNEL(norm, 256) {
    const int64_t g = (int64_t)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (g >= a.groups) return;
    const float* x = a.x + g * a.group;
    float* out = a.out + g * a.group;
    const Moments moments = moments_of(KIND, x, a.group, a.eps);
    const int64_t first = g % a.per_row * a.group;  // the group's first column in its row
    for (int64_t i = threadIdx.x & 31; i < a.group; i += 32) {
        float v = moments.of(x[i]);
        const int64_t w = (first + i) % a.n_weight;
        if (a.weight) v *= a.weight[w];
        if (a.bias) v += a.bias[w];
        out[i] = v;
    }
}
