// Between the products of q, k and v and attention, in one launch: a warp to a head of a token. Norm of the head and
// rotary positions (rope.cu), in either order or only one of them; keys and values go into the cache (cache.cu).
#include "cache.cuh"
#include "norms.cuh"

#define NEVER 0
#define BEFORE 1
#define AFTER 2

// Three parts, each with so many heads (0: not there): the first is at x, rows `stride` values apart, heads `step`.
// out: dense, or 0. norm: NEVER, BEFORE rotary positions or AFTER; weight and bias (or 0) repeat every n_weight values
// along the heads. turn: with rotary positions. Keys and values are written to their cache, unless it is 0.
struct heads_args {
    const Batch* batch;
    int64_t rows;
    const float* q;
    int64_t q_heads, q_stride, q_step, q_norm, q_turn;
    const float *q_weight, *q_bias;
    int64_t q_n_weight;
    float* q_out;
    const float* k;
    int64_t k_heads, k_stride, k_step, k_norm, k_turn;
    const float *k_weight, *k_bias;
    int64_t k_n_weight;
    float* k_out;
    uint8_t* k_cache;
    const float* v;
    int64_t v_heads, v_stride, v_step;
    uint8_t* v_cache;
    int64_t head, v_head;
    const float* table;
    int64_t neox, start, n_rot, kind;
    double eps;
};

INLINE void norm_head(float* x, int n, int64_t head, const float* weight, const float* bias, int64_t n_weight, int kind,
                      double eps) {
    const Moments moments = moments_of(kind, x, n, eps);
    for (int i = threadIdx.x & 31; i < n; i += 32) {
        float v = moments.of(x[i]);
        const int64_t w = (head * n + i) % n_weight;
        if (weight) v *= weight[w];
        if (bias) v += bias[w];
        x[i] = v;
    }
}

INLINE void turn_head(float* x, const float* angles, int start, int n_rot, bool neox) {
    const int pairs = n_rot / 2;
    for (int i = threadIdx.x & 31; i < pairs; i += 32) {
        const int first = start + (neox ? i : 2 * i), second = neox ? first + pairs : first + 1;
        const float p = x[first], q = x[second], c = angles[2 * i], s = angles[2 * i + 1];
        x[first] = p * c - q * s;
        x[second] = p * s + q * c;
    }
}

// A head's n values into its place of a row of the cache.
INLINE void keep(const float* x, int n, int64_t head, uint8_t* row) {
    const int lane = threadIdx.x & 31;
    for (int i = lane; i < (n + 31) / 32 * 32; i += 32) keep_column(i < n ? x[i] : 0.0f, row, head * n + i, i < n);
}

// Block x: the token; y: four warps' heads, those of q first, then of k, then of v.
KERNEL(heads, 128) {
    DYNAMIC_SHARED(shared);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int64_t token = blockIdx.x;
    int64_t head = (int64_t)blockIdx.y * 4 + warp;
    if (head >= a.q_heads + a.k_heads + a.v_heads) return;
    const bool of_q = head < a.q_heads, of_k = !of_q && head < a.q_heads + a.k_heads, of_v = !of_q && !of_k;
    head -= of_q ? 0 : of_k ? a.q_heads : a.q_heads + a.k_heads;
    const int n = (int)(of_v ? a.v_head : a.head);
    const float* from = of_q ? a.q + token * a.q_stride + head * a.q_step
                      : of_k ? a.k + token * a.k_stride + head * a.k_step
                             : a.v + token * a.v_stride + head * a.v_step;
    float* x = (float*)shared + warp * max(a.head, a.v_head);
    for (int i = lane; i < n; i += 32) x[i] = from[i];
    if (!of_v) {
        const int norm = (int)(of_q ? a.q_norm : a.k_norm);
        const float *weight = of_q ? a.q_weight : a.k_weight, *bias = of_q ? a.q_bias : a.k_bias;
        const int64_t n_weight = of_q ? a.q_n_weight : a.k_n_weight;
        if (norm == BEFORE) norm_head(x, n, head, weight, bias, n_weight, (int)a.kind, a.eps);
        __syncwarp();
        if (of_q ? a.q_turn : a.k_turn) turn_head(x, a.table + token * a.n_rot, (int)a.start, (int)a.n_rot, a.neox);
        __syncwarp();
        if (norm == AFTER) norm_head(x, n, head, weight, bias, n_weight, (int)a.kind, a.eps);
        float* out = of_q ? a.q_out : a.k_out;
        if (out) {
            out += (token * (of_q ? a.q_heads : a.k_heads) + head) * n;
            for (int i = lane; i < n; i += 32) out[i] = x[i];
        }
    }
    uint8_t* cache = of_q ? nullptr : of_k ? a.k_cache : a.v_cache;
    if (cache) keep(x, n, head, cache + cell_of(a.batch, token) * cache_bytes((of_k ? a.k_heads : a.v_heads) * n));
}
