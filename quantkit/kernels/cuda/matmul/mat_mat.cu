// Products with many rows of activations: dense, by head, by expert; the twin of the CPU's matmul.py and moe.py. A
// block computes a tile of ROWS rows of weights times TOKENS rows of activations (panel.cuh), then scale, bias and gate
// in registers. up_gate: half of the tile's rows are up's, half gate's; a lane has both for an output. By expert: the
// plan (plan.cuh) gives tiles and their pairs; blocks without a tile exit.
#define BLOCKS_AT_ONCE 2
#include "matmul/products.cuh"
#include "matmul/panel.cuh"
#include "matmul/plan.cuh"
#include "core/functions.cuh"

INLINE float factor(const float* scale, int64_t i) { return scale ? scale[i] : 1.0f; }
INLINE float term(const float* bias, int64_t i) { return bias ? bias[i] : 0.0f; }
INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }

// The output of a row of a panel of up and gate, and whether it is gate's. A warp's first rows are up's.
INLINE int64_t output_of(int row) {
    const int in_warp = row % (16 * MT);
    return (int64_t)blockIdx.y * (ROWS / 2) + row / (16 * MT) * (8 * MT) + in_warp % (8 * MT);
}
INLINE bool is_gate(int row) { return row % (16 * MT) >= 8 * MT; }

// ---- dense

// The first token of this block's tile, and the number of tokens in it.
INLINE int64_t first_token() { return (int64_t)block_here() * TOKENS; }
INLINE int tokens_here(int64_t rows) { return (int)lesser(rows - first_token(), TOKENS); }

// The row of x that this thread fetches; beyond the end, the last row.
INLINE int64_t fetched_token(int64_t rows) { return lesser(first_token() + staged_token(), rows - 1); }
INLINE int64_t fetched_row(int64_t n_out) { return lesser((int64_t)blockIdx.y * ROWS + staged_row(), n_out - 1); }

// Scale, bias and store a tile of count tokens; out: its first row.
INLINE void store_tile(const Sums& sum, uint8_t* out, int64_t out_stride, int count, int64_t n_out, const float* bias,
                       float scale) {
#pragma unroll
    for (int i = 0; i < MT; i++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int64_t o = (int64_t)blockIdx.y * ROWS + row_of(i, c);
            if (o >= n_out) continue;
            const float b = term(bias, o);
#pragma unroll
            for (int j = 0; j < NT; j++) {
                const int token = token_of(j, c);
                if (token < count) ((float*)(out + token * out_stride))[o] = sum[i][j][c] * scale + b;
            }
        }
}

KERNEL(mul_mat, THREADS) {
    DYNAMIC_SHARED(shared);
    const uint8_t *w = a.w + fetched_row(a.n_out) * a.row_bytes, *x = a.x + fetched_token(a.rows) * a.x_stride;
    Sums sum;
    multiply_tile(shared, w, a.row_bytes, x, (int)a.n_in, tokens_here(a.rows), sum);
    uint8_t* out = a.out + first_token() * a.out_stride;
    store_tile(sum, out, a.out_stride, tokens_here(a.rows), a.n_out, a.bias, factor(a.scale, 0));
}

KERNEL(mul_mat_heads, THREADS) {
    DYNAMIC_SHARED(shared);
    const uint8_t* w = a.w + blockIdx.z * a.head_bytes + fetched_row(a.n_out) * a.row_bytes;
    const uint8_t* x = a.x + blockIdx.z * a.x_head_bytes + fetched_token(a.rows) * a.x_stride;
    Sums sum;
    multiply_tile(shared, w, a.row_bytes, x, (int)a.n_in, tokens_here(a.rows), sum);
    uint8_t* out = a.out + first_token() * a.out_stride + blockIdx.z * a.out_head_bytes;
    store_tile(sum, out, a.out_stride, tokens_here(a.rows), a.n_out, 0, 1.0f);
}

// ---- by expert

// The tile of this block: x expert, y place of its first pair in the list, z number of pairs; z = 0: none.
INLINE int4 tile_of(const int32_t* plan, int64_t pairs, int64_t n_expert) {
    if ((int)block_here() >= plan[plan_count_at(TOKENS)]) return make_int4(0, 0, 0, 0);
    return ((const int4*)(plan + plan_tiles_at(pairs, n_expert, TOKENS)))[block_here()];
}

KERNEL(mul_mat_id, THREADS) {
    DYNAMIC_SHARED(shared);
    int4 tile = tile_of(a.plan, a.rows * a.n_used, a.n_expert);
    if (tile.z == 0) return;
    const int32_t* pairs = a.plan + PLAN_PAIRS + tile.y;
    const uint8_t* w = a.w + tile.x * a.expert_bytes + fetched_row(a.n_out) * a.row_bytes;
    const uint8_t* x = a.x + pairs[lesser(staged_token(), tile.z - 1)] / (int)a.x_per * a.x_stride;
    Sums sum;
    multiply_tile(shared, w, a.row_bytes, x, (int)a.n_in, tile.z, sum);
    tile = tile_of(a.plan, a.rows * a.n_used, a.n_expert);  // recomputed to save registers
    pairs = a.plan + PLAN_PAIRS + tile.y;
    const float scale = factor(a.scale, tile.x);
    const float* bias = a.bias ? (const float*)(a.bias + tile.x * a.bias_stride) : 0;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = token_of(j, odd);
            if (token >= tile.z) continue;
            float* out = (float*)a.out + pairs[token] * a.n_out;
#pragma unroll
            for (int i = 0; i < 2 * MT; i++) {
                const int64_t o = (int64_t)blockIdx.y * ROWS + row_of(i / 2, 2 * (i % 2));
                if (o < a.n_out) out[o] = sum[i / 2][j][2 * (i % 2) + odd] * scale + term(bias, o);
            }
        }
}

// ---- up and gate

#ifdef ACTIVATION
struct Limits {
    float gate, act, up, alpha;
};

// activation(gate) * up of a lane's outputs of one token; j, odd: which token of the lane.
INLINE void store_gated(const Sums& sum, int j, int odd, float* out, int64_t n_out, const float* up_bias, const float* gate_bias,
                        float up_scale, float gate_scale, const Limits& limits) {
#pragma unroll
    for (int i = 0; i < MT; i++) {
        const int c = 2 * (i % 2);
        const int64_t o = output_of(row_of(i / 2, c));
        if (o >= n_out) continue;
        const float up = sum[i / 2][j][c + odd] * up_scale + term(up_bias, o);
        const float gate = sum[i / 2 + MT / 2][j][c + odd] * gate_scale + term(gate_bias, o);
        out[o] = gated(gate, up, limits.gate, limits.act, limits.up, limits.alpha);
    }
}

KERNEL(up_gate, THREADS) {
    DYNAMIC_SHARED(shared);
    const int row = staged_row();
    const uint8_t* w = (is_gate(row) ? a.gate : a.up) + lesser(output_of(row), a.n_out - 1) * a.row_bytes;
    const uint8_t* x = a.x + fetched_token(a.rows) * a.x_stride;
    Sums sum;
    multiply_tile(shared, w, a.row_bytes, x, (int)a.n_in, tokens_here(a.rows), sum);
    const Limits limits = {(float)a.gate_limit, (float)a.act_limit, (float)a.up_limit, (float)a.alpha};
    const float up_scale = factor(a.up_scale, 0), gate_scale = factor(a.gate_scale, 0);
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = token_of(j, odd);
            if (token >= tokens_here(a.rows)) continue;
            float* out = (float*)(a.out + (first_token() + token) * a.out_stride);
            store_gated(sum, j, odd, out, a.n_out, a.up_bias, a.gate_bias, up_scale, gate_scale, limits);
        }
}

KERNEL(up_gate_id, THREADS) {
    DYNAMIC_SHARED(shared);
    int4 tile = tile_of(a.plan, a.rows * a.n_used, a.n_expert);
    if (tile.z == 0) return;
    const int32_t* pairs = a.plan + PLAN_PAIRS + tile.y;
    const int row = staged_row();
    const uint8_t* w = is_gate(row) ? a.gate + tile.x * a.gate_expert_bytes : a.up + tile.x * a.up_expert_bytes;
    const uint8_t* x = a.x + pairs[lesser(staged_token(), tile.z - 1)] / (int)a.x_per * a.x_stride;
    Sums sum;
    w += lesser(output_of(row), a.n_out - 1) * a.row_bytes;
    multiply_tile(shared, w, a.row_bytes, x, (int)a.n_in, tile.z, sum);
    tile = tile_of(a.plan, a.rows * a.n_used, a.n_expert);
    pairs = a.plan + PLAN_PAIRS + tile.y;
    const Limits limits = {(float)a.gate_limit, (float)a.act_limit, (float)a.up_limit, (float)a.alpha};
    const float up_scale = factor(a.up_scale, tile.x), gate_scale = factor(a.gate_scale, tile.x);
    const float* up_bias = a.up_bias ? (const float*)(a.up_bias + tile.x * a.up_bias_stride) : 0;
    const float* gate_bias = a.gate_bias ? (const float*)(a.gate_bias + tile.x * a.gate_bias_stride) : 0;
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const int token = token_of(j, odd);
            if (token >= tile.z) continue;
            float* out = (float*)a.out + pairs[token] * a.n_out;
            store_gated(sum, j, odd, out, a.n_out, up_bias, gate_bias, up_scale, gate_scale, limits);
        }
}
#endif
