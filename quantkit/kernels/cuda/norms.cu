// Norms of groups of columns: RMS, layer and L2 (sum of squares + eps). A warp to a group.
#include "device.cuh"

#define RMS 0
#define LAYER 1
#define L2 2

// groups: of all rows; weight and bias (0: none) repeat every n_weight values along a row.
struct norm_args {
    const float* x;
    float* out;
    const float *weight, *bias;
    int64_t groups, group, per_row, n_weight;
    double eps;
};

KERNEL(norm, 256) {
    const int lane = threadIdx.x & 31;
    const int64_t g = (int64_t)blockIdx.x * 8 + (threadIdx.x >> 5);
    if (g >= a.groups) return;
    const float* x = a.x + g * a.group;
    float* out = a.out + g * a.group;
    float mean = 0;
    if (KIND == LAYER) {
        double sum = 0;
        for (int64_t i = lane; i < a.group; i += 32) sum += x[i];
        mean = (float)(warp_sum(sum) / (double)a.group);
    }
    double square = 0;  // as ggml: sums in double
    for (int64_t i = lane; i < a.group; i += 32) {
        const float v = x[i] - mean;
        square += (double)(v * v);
    }
    square = warp_sum(square);
    const float factor = (float)(1.0 / sqrt((KIND == L2 ? square : square / (double)a.group) + a.eps));
    const int64_t first = g % a.per_row * a.group;  // the group's first column in its row
    for (int64_t i = lane; i < a.group; i += 32) {
        float v = (x[i] - mean) * factor;
        const int64_t w = (first + i) % a.n_weight;
        if (a.weight) v *= a.weight[w];
        if (a.bias) v += a.bias[w];
        out[i] = v;
    }
}
