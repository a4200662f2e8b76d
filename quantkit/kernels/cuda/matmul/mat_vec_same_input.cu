// Products of several matrices with the same 1 to 8 rows of activations, in one launch: q, k and v. Macros as in
// mat_vec.cu; OTHER: the type of the matrices from n_first on, if it differs. With ROUTE one matrix is a router: the
// last block to finish chooses the experts.
#include "matmul/two_types.cuh"

// As mul_mat's, for up to four matrices. Rows of out_i have n_out_i values.
struct mul_mats_args {
    int64_t rows;
    const uint8_t* x;
    int64_t x_stride, n_in, row_bytes, other_row_bytes, n_first;
    const uint8_t *w_0, *w_1, *w_2, *w_3;
    int64_t n_out_0, n_out_1, n_out_2, n_out_3;
    uint8_t *out_0, *out_1, *out_2, *out_3;
    const float *bias_0, *bias_1, *bias_2, *bias_3, *scale_0, *scale_1, *scale_2, *scale_3;
};

template <typename T> INLINE T of_four(int which, T a, T b, T c, T d) { return which < 2 ? which ? b : a : which < 3 ? c : d; }

// Block x: rows, up to those of the longest matrix; y: which matrix.
INLINE void write_one(const mul_mats_args& a) {
    const int which = blockIdx.y;
    const int64_t n_out = of_four(which, a.n_out_0, a.n_out_1, a.n_out_2, a.n_out_3);
    if ((int64_t)blockIdx.x * (WARPS / SLICES * ROWS * TEAMS) >= n_out) {
        wait_for_previous();
        return;
    }
    uint8_t* out = of_four(which, a.out_0, a.out_1, a.out_2, a.out_3);
    const float* bias = of_four(which, a.bias_0, a.bias_1, a.bias_2, a.bias_3);
    const float* scales = of_four(which, a.scale_0, a.scale_1, a.scale_2, a.scale_3);
    const float scale = scales ? *scales : 1.0f;
    const Team<ROWS> team(n_out);
    const uint8_t* const matrices[1] = {of_four(which, a.w_0, a.w_1, a.w_2, a.w_3)};
    float sums[1][ROWS][COLUMNS];
    const bool other = which >= a.n_first;
    multiply_either(other, team, matrices, other ? a.other_row_bytes : a.row_bytes, a.x, a.x_stride, a.n_in, sums);
    finish(team, sums, [&](int row, int column, const float* v) {
        const float y = v[0] * scale;
        *(float*)(out + 4 * (column * n_out + row)) = bias ? y + bias[row] : y;
    });
}

#ifdef ROUTE
#include "core/last_block.cuh"
#include "layer/route.cuh"

// And as route's; counter: 0. logits: the output of one of the matrices.
struct mul_mats_route_args : mul_mats_args {
    int32_t* ids;
    float* weights;
    const float *logits, *bias;
    int64_t n_expert, n_used, n_group, n_group_used, gating, norm, share;
    double scale, sum_floor;
    int* counter;
};

KERNEL_THAT_WAITS(mul_mats_route, 128) {
    DYNAMIC_SHARED(shared);
    write_one(a);
    if (!is_last_of(a.counter, (int)(gridDim.x * gridDim.y))) return;
    for (int64_t row = 0; threadIdx.x < 32 && row < a.rows; row++) {
        route_token(a, row, (float*)shared);
        __syncwarp();
    }
}
#else
KERNEL_THAT_WAITS(mul_mats, 128) { write_one(a); }
#endif
