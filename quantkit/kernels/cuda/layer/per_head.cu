// Operations on heads or columns between products and their consumers, in one launch: copies of columns, activations,
// vectors, norms of groups, rotary positions, gates; results go to memory, a cache or a format.
//
// A chain is a row of `width` columns per token, cut into pieces of n (the last may be shorter). TEAM threads, a warp
// or a block of 256, apply these operations to a piece in shared memory, in this order:
//
//     x * by                one value a row                 norm      AFTER
//     x + plus              a vector
//     activation(x)                                         x * (1 + alpha * log(1 + floor((position + offset) / floor_scale)))
//     x * times             a vector                        activation(gate) * x
//     norm                  BEFORE
//     rotary positions      of every `head` columns
//
// and then store it to out, the cache and the format, those that are not null. `each` and `step` give the layout:
// column c is at c / each * step + c % each. Macros: CACHE; TEAM, THREADS of a block.
#include "matmul/activations.cuh"
#include "attention/cache.cuh"
#include "core/functions.cuh"
#include "layer/norms.cuh"

#define NEVER 0
#define BEFORE 1
#define AFTER 2

// rows: tokens, or pairs of a token and an expert, `repeat` of which read one row of x. plus, times, weight and bias
// repeat every n_... columns; a null address, or a kind below 0, skips its operation. table: rotary positions of
// `head` columns, of which n_rot from `start` rotate. quantized: rows of q_width.
struct per_head_args {
    const Batch* batch;
    int64_t rows, room;  // size in values of a piece in shared memory
    int64_t width[6], n[6], pieces[6];
    const float* x[6];
    int64_t stride[6], each[6], step[6], repeat[6];
    const float* by[6];
    const float* plus[6];
    int64_t n_plus[6], activation[6];
    const float* times[6];
    int64_t n_times[6], norm[6], kind[6], group[6];
    const float *weight[6], *bias[6];
    int64_t n_weight[6];
    double eps[6];
    const float* table[6];
    int64_t head[6], start[6], n_rot[6], neox[6];
    double floor_scale[6], alpha[6], offset[6];
    int64_t gating[6];
    const float* gate[6];
    int64_t gate_stride[6], gate_each[6], gate_step[6];
    float* out[6];
    int64_t out_stride[6], out_each[6], out_step[6];
    uint8_t* cache[6];
    int64_t cache_width[6], cache_start[6], cache_each[6], cache_step[6];
    uint8_t* quantized[6];
    int64_t format[6], q_width[6];
};

#define TEAMS (THREADS / TEAM)

INLINE void team_sync() {
    if (TEAM == 32) __syncwarp();
    else __syncthreads();
}

// The places of a piece's columns, from column `first` of its chain.
struct Places {
    int first, each, step, begin;
    bool together;

    __device__ __forceinline__ Places(int first, int n, int64_t each, int64_t step)
        : first(first), each((int)each), step((int)step), begin(of(first)), together(first % this->each + n <= this->each) {}

    __device__ __forceinline__ int of(int column) const {
        const int run = (uint32_t)column / (uint32_t)each;
        return run * step + column - run * each;
    }

    __device__ __forceinline__ int operator[](int i) const { return together ? begin + i : of(first + i); }
};

// Calls f for each column of a piece.
template <typename F> INLINE void each_of_piece(int n, F f) {
    for (int i = threadIdx.x % TEAM; i < n; i += TEAM) f(i);
}

// An activation by kind, including softplus and gates; without limits.
INLINE float activation_of(int64_t kind, float x) {
    switch (kind) {
        case ACT_SILU: return activation(ACT_SILU, x, 0);
        case ACT_GELU: return activation(ACT_GELU, x, 0);
        case ACT_GELU_ERF: return activation(ACT_GELU_ERF, x, 0);
        case ACT_GELU_QUICK: return activation(ACT_GELU_QUICK, x, 0);
        case ACT_RELU: return activation(ACT_RELU, x, 0);
        case ACT_RELU_SQR: return activation(ACT_RELU_SQR, x, 0);
        case ACT_SIGMOID: return activation(ACT_SIGMOID, x, 0);
        case ACT_LINEAR: return x;
        default: return activation(ACT_SOFTPLUS, x, 0);
    }
}

// Like moments_of of norms.cuh, by all threads of a block.
INLINE Moments moments_of_block(int kind, const float* x, int n, double eps, double* part) {
    float mean = 0;
    if (kind == LAYER) {
        double sum = 0;
        for (int i = threadIdx.x; i < n; i += THREADS) sum += x[i];
        mean = (float)(block_sum(sum, part) / (double)n);
    }
    double square = 0;
    for (int i = threadIdx.x; i < n; i += THREADS) {
        const float v = x[i] - mean;
        square += (double)(v * v);
    }
    return {mean, factor_of(kind, block_sum(square, part), n, eps)};
}

// Norms the groups of a piece that starts at column `first`: each by a warp, or a single one by the block.
INLINE void norm_piece(const per_head_args& a, int p, float* x, int n, int first, double* part) {
    const int group = (int)a.group[p], kind = (int)a.kind[p];
    const float *weight = a.weight[p], *bias = a.bias[p];
    const bool by_block = TEAM > 32 && group == n;
    const int lane = by_block ? threadIdx.x : threadIdx.x & 31, lanes = by_block ? TEAM : 32;
    for (int g = by_block ? 0 : threadIdx.x % TEAM / 32 * group; g < n; g += by_block ? n : TEAM / 32 * group) {
        float* y = x + g;
        const uint32_t at = (uint32_t)(first + g) % (uint32_t)a.n_weight[p];  // n_weight: whole groups
        const Moments moments = by_block ? moments_of_block(kind, y, group, a.eps[p], part) : moments_of(kind, y, group, a.eps[p]);
        for (int i = lane; i < group; i += lanes) {
            float v = moments.of(y[i]);
            if (weight) v *= weight[at + i];
            if (bias) v += bias[at + i];
            y[i] = v;
        }
    }
}

INLINE void turn_piece(const per_head_args& a, int p, float* x, int n, int64_t token) {
    const int head = (int)a.head[p], start = (int)a.start[p], n_rot = (int)a.n_rot[p], pairs = n_rot / 2;
    const float* angles = a.table[p] + token * n_rot;
    each_of_piece(n / head * pairs, [&](int item) {
        const int number = (uint32_t)item / (uint32_t)pairs, i = item - number * pairs;
        const int at = number * head + start + (a.neox[p] ? i : 2 * i), other = at + (a.neox[p] ? pairs : 1);
        const float first = x[at], second = x[other], c = angles[2 * i], s = angles[2 * i + 1];
        x[at] = first * c - second * s;
        x[other] = first * s + second * c;
    });
}

// The factor of a token's position (elementwise.cu scale_by_position).
INLINE float factor_at(const per_head_args& a, int p, int64_t token) {
    const float position = (float)a.batch->positions[token];
    const float steps = floorf((position + (float)a.offset[p]) / (float)a.floor_scale[p]);
    return logf(steps + 1.0f) * (float)a.alpha[p] + 1.0f;
}

// Writes the chain's columns from `first` to their places in a row of the cache, 32 adjacent ones at a time.
INLINE void keep_piece(const per_head_args& a, int p, const float* x, int n, int first, int64_t token) {
    uint8_t* row = a.cache[p] + cell_of(a.batch, token) * cache_bytes(a.cache_width[p]);
    const Places to(first, n, a.cache_each[p], a.cache_step[p]);
    each_of_piece((n + 31) / 32 * 32, [&](int i) { keep_column(i < n ? x[i] : 0.0f, row, (int)a.cache_start[p] + to[i], i < n); });
}

// Rows of the format have q_width values: a piece is several units of one row, or whole rows.
INLINE void quantize_piece(const per_head_args& a, int p, const float* x, int n, int first, int64_t token) {
    const int q_width = (int)a.q_width[p], units = (q_width + 255) / 256;
    const int64_t row = token * (a.width[p] / q_width) + (uint32_t)first / (uint32_t)q_width;
    const int at = (uint32_t)first % (uint32_t)q_width;
    if (a.format[p] < ROUND_F16) {
        uint8_t* out = a.quantized[p] + row * Q8_UNIT * units;
        for (int u = threadIdx.x % TEAM / 32; 256 * u < n; u += TEAM / 32) {
            float v[8];
            load_eight(x, 256 * u + 8 * (threadIdx.x & 31), n, v);
            quantize_unit_in(a.format[p], v, out, at / 256 + u, units);
        }
    } else {
        float* out = (float*)a.quantized[p] + row * q_width + at;
        const bool half = a.format[p] == ROUND_F16;
        each_of_piece(n, [&](int i) { out[i] = half ? rounded<ROUND_F16>(x[i]) : rounded<ROUND_BF16>(x[i]); });
    }
}

// Block x: the token; y: pieces, chain by chain.
KERNEL(per_head, THREADS) {
    DYNAMIC_SHARED(shared);
    __shared__ double sums[32];
    const int64_t token = blockIdx.x;
    int p = 0, piece = (int)blockIdx.y * TEAMS + (int)threadIdx.x / TEAM;
    for (; p < 6 && piece >= (int)a.pieces[p]; p++) piece -= (int)a.pieces[p];
    if (p == 6) return;
    const int first = piece * (int)a.n[p], n = min((int)a.n[p], (int)a.width[p] - first);
    float* x = (float*)shared + (int)threadIdx.x / TEAM * (int)a.room;
    const float* from = a.x[p] + token / a.repeat[p] * a.stride[p];
    const float by = a.by[p] ? a.by[p][token] : 1.0f;
    const float *plus = a.plus[p], *times = a.times[p];
    const Places at(first, n, a.each[p], a.step[p]);
    each_of_piece(n, [&](int i) {
        float v = from[at[i]] * by;
        if (plus) v = v + plus[(uint32_t)(first + i) % (uint32_t)a.n_plus[p]];
        if (a.activation[p] >= 0) v = activation_of(a.activation[p], v);
        if (times) v = v * times[(uint32_t)(first + i) % (uint32_t)a.n_times[p]];
        x[i] = v;
    });
    team_sync();
    if (a.norm[p] == BEFORE) {
        norm_piece(a, p, x, n, first, sums);
        team_sync();
    }
    if (a.table[p]) {
        turn_piece(a, p, x, n, token);
        team_sync();
    }
    if (a.norm[p] == AFTER) {
        norm_piece(a, p, x, n, first, sums);
        team_sync();
    }
    if (a.floor_scale[p] != 0) {
        const float factor = factor_at(a, p, token);
        each_of_piece(n, [&](int i) { x[i] = x[i] * factor; });
    }
    if (a.gate[p]) {
        const float* gate = a.gate[p] + token * a.gate_stride[p];
        const Places of_gate(first, n, a.gate_each[p], a.gate_step[p]);
        each_of_piece(n, [&](int i) { x[i] = activation_of(a.gating[p], gate[of_gate[i]]) * x[i]; });
    }
    if (a.out[p]) {
        float* out = a.out[p] + token * a.out_stride[p];
        const Places to(first, n, a.out_each[p], a.out_step[p]);
        each_of_piece(n, [&](int i) { out[to[i]] = x[i]; });
    }
    if (a.cache[p]) keep_piece(a, p, x, n, first, token);
    if (a.quantized[p]) {
        team_sync();
        quantize_piece(a, p, x, n, first, token);
    }
}
