// Recurrent layers with a state of fixed size per sequence: convolution, the gated delta rule, selective scans, RWKV.
// A state is float32 [sequences, width]; a token at position 0 starts from zeros, regardless of the stored state. Tokens are
// processed in batch order; sequences may be mixed. Columns are independent.
#include "core/functions.cuh"

// ---- convolution: a block takes 32 columns, its warps share the tokens

#define WARPS 16
#define TAPS 16
#define ZERO_BEFORE -2   // the sequence begins here
#define STATE_BEFORE -1  // the previous token is in the state

// The token of the batch that precedes token r in its sequence, or ZERO_BEFORE or STATE_BEFORE.
INLINE int before(const Batch* b, int r) {
    if (b->positions[r] == 0) return ZERO_BEFORE;
    const int sequence = b->sequences[r];
    for (int j = r - 1; j >= 0; j--)
        if (b->sequences[j] == sequence) return j;
    return STATE_BEFORE;
}

INLINE bool last_of_sequence(const Batch* b, int r, int rows) {
    const int sequence = b->sequences[r];
    for (int j = r + 1; j < rows; j++)
        if (b->sequences[j] == sequence) return false;
    return true;
}

// A position when walking back along a sequence; missing: steps beyond the batch.
struct Place {
    int row, missing;
};

INLINE Place step_back(const Batch* b, Place p) {
    const int row = p.row >= 0 ? before(b, p.row) : p.row;
    return {row, p.missing + (row == STATE_BEFORE)};
}

// The value at that position, in one column of x and of the state.
INLINE float value_at(Place p, const float* x, const float* state, int64_t width, int taps) {
    if (p.row >= 0) return x[p.row * width];
    return p.row == ZERO_BEFORE ? 0.0f : state[(taps - 1 - p.missing) * width];
}

// weight: [width, taps], taps <= TAPS; bias: [width], or none; state: [sequences][taps - 1][width].
struct convolve_args {
    const Batch* batch;
    const float* x;
    float* out;
    const float *weight, *bias;
    float* state;
    int64_t taps, width, rows;
};

KERNEL(convolve, 512) {
    __shared__ float weights[TAPS][32];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, taps = (int)a.taps, rows = (int)a.rows;
    const int64_t first = 32 * (int64_t)blockIdx.x, column = first + lane;
    const bool in_range = column < a.width;
    if (in_range)
        for (int i = warp; i < taps; i += WARPS) weights[i][lane] = a.weight[column * taps + i];
    __syncthreads();
    if (in_range) {
        for (int t = warp; t < rows; t += WARPS) {
            const float* state = a.state + (int64_t)a.batch->sequences[t] * (taps - 1) * a.width + column;
            Place place = {t, 0};
            float sum = a.x[t * a.width + column] * weights[taps - 1][lane];
            for (int i = taps - 2; i >= 0; i--) {
                place = step_back(a.batch, place);
                sum = fmaf(value_at(place, a.x + column, state, a.width, taps), weights[i][lane], sum);
            }
            a.out[t * a.width + column] = a.bias ? sum + a.bias[column] : sum;
        }
    }
    __syncthreads();  // all have read the state
    for (int t = warp; t < rows; t += WARPS) {
        if (!last_of_sequence(a.batch, t, rows)) continue;
        float* state = a.state + (int64_t)a.batch->sequences[t] * (taps - 1) * a.width + column;
        // Oldest row first, each from a later one: no row is overwritten before it is read.
        for (int i = 0; in_range && i < taps - 1; i++) {
            Place place = {t, 0};
            for (int k = taps - 2 - i; k; k--) place = step_back(a.batch, place);
            state[i * a.width] = value_at(place, a.x + column, state, a.width, taps);
        }
    }
}

// ---- the state of a head, shared by the delta rule and the scan

// Four lanes hold a column of S in registers, lane l its rows 4 * (l + 4 * i) + 0 ... 3; a warp has 8 columns of one
// head, a block 32. Tokens are processed in chunks; data that all lanes read is loaded to shared memory per chunk.
#define COLUMNS 32
#define CHUNK (HEAD > 64 ? 4096 / HEAD : 64)
#define QUADS (HEAD / 16)
// Where every row of S has its own decay (BY_ROW), a chunk has decays as long as keys.
#define DELTA_CHUNK (BY_ROW && HEAD > 32 ? 2048 / HEAD : CHUNK)

INLINE float dot4(float4 a, float4 b, float sum) { return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum)))); }

INLINE float quad_sum(float v) {
    v += __shfl_xor_sync(FULL, v, 1);
    return v + __shfl_xor_sync(FULL, v, 2);
}

// This lane's part of a state's column, s at its first row.
INLINE void load_state(float4 (&s)[QUADS], const float* from, int lane_row, int head_k, int head_v, bool zero) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int row = lane_row + 16 * i;
        const float* at = from + (int64_t)row * head_v;
        s[i].x = !zero && row < head_k ? at[0] : 0.0f;
        s[i].y = !zero && row + 1 < head_k ? at[head_v] : 0.0f;
        s[i].z = !zero && row + 2 < head_k ? at[2 * head_v] : 0.0f;
        s[i].w = !zero && row + 3 < head_k ? at[3 * head_v] : 0.0f;
    }
}

INLINE void store_state(const float4 (&s)[QUADS], float* to, int lane_row, int head_k, int head_v) {
#pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const int row = lane_row + 16 * i;
        float* at = to + (int64_t)row * head_v;
        if (row < head_k) at[0] = s[i].x;
        if (row + 1 < head_k) at[head_v] = s[i].y;
        if (row + 2 < head_k) at[2 * head_v] = s[i].z;
        if (row + 3 < head_k) at[3 * head_v] = s[i].w;
    }
}

// Loads the state of the sequence ``next``, zeros at its first token, and stores that of the previous sequence before.
INLINE void take_state(float4 (&s)[QUADS], float* states, int64_t of_sequence, int& sequence, int next, int position, bool in_range,
                       int lane_row, int head_k, int head_v) {
    if (in_range && sequence >= 0 && next != sequence) store_state(s, states + sequence * of_sequence, lane_row, head_k, head_v);
    sequence = next;
    load_state(s, states + sequence * of_sequence, lane_row, head_k, head_v, !in_range || position == 0);
}

// Columns of a chunk's rows, zeros beyond n; row t of the chunk begins at from + t * stride.
template <int WIDTH> INLINE void load_rows(float* to, const float* from, int64_t stride, int tokens, int n) {
    for (int i = threadIdx.x; i < tokens * WIDTH; i += 128) {
        const int t = i / WIDTH, c = i % WIDTH;
        to[i] = c < n ? from[t * stride + c] : 0.0f;
    }
}

// ---- the gated delta rule: S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  out = scale S^T q

// state: [sequences][n_v_head][head_k][head_v]; head_k <= HEAD. Value head h reads key head h % n_k_head if tiled,
// else h / (n_v_head / n_k_head). g: one number per head, or BY_ROW one for each row of its S. Blocks are (value head,
// 32 of its columns).
struct delta_net_args {
    const Batch* batch;
    const float *q, *k, *v, *g, *beta;
    float *out, *state;
    int64_t n_k_head, n_v_head, head_k, head_v, tiled, rows;
    double scale;
};

KERNEL(delta_net, 128) {
    __shared__ float4 q[DELTA_CHUNK][HEAD / 4], k[DELTA_CHUNK][HEAD / 4];
    __shared__ float4 decays[BY_ROW ? DELTA_CHUNK : 1][HEAD / 4];
    __shared__ float v[DELTA_CHUNK][COLUMNS];
    __shared__ float decay[DELTA_CHUNK], beta[DELTA_CHUNK];
    __shared__ int sequences[DELTA_CHUNK], positions[DELTA_CHUNK];
    const int head = blockIdx.x, head_k = (int)a.head_k, head_v = (int)a.head_v;
    const int from_head = (int)(a.tiled ? head % a.n_k_head : head / (a.n_v_head / a.n_k_head));
    const int first = COLUMNS * blockIdx.y, column = threadIdx.x >> 2, lane_row = 4 * (threadIdx.x & 3);
    const bool in_range = first + column < head_v;
    const float scale = (float)a.scale;
    const int64_t size = (int64_t)head_k * head_v;
    float* const states = a.state + head * size + first + column;
    float4 s[QUADS];
    int sequence = -1;
    for (int begin = 0; begin < a.rows; begin += DELTA_CHUNK) {
        const int n = (int)min((int64_t)DELTA_CHUNK, a.rows - begin);
        __syncthreads();  // the previous chunk may still be read
        const int64_t of_keys = (begin * a.n_k_head + from_head) * head_k;
        load_rows<HEAD>((float*)q, a.q + of_keys, a.n_k_head * head_k, n, head_k);
        load_rows<HEAD>((float*)k, a.k + of_keys, a.n_k_head * head_k, n, head_k);
        const float* const values = a.v + (begin * a.n_v_head + head) * head_v + first;
        load_rows<COLUMNS>((float*)v, values, a.n_v_head * head_v, n, head_v - first);
        if (BY_ROW)
            for (int i = threadIdx.x; i < n * HEAD; i += 128) {
                const int t = i / HEAD, row = i % HEAD;
                const float* g = a.g + ((begin + t) * a.n_v_head + head) * head_k;
                ((float*)decays[t])[row] = row < head_k ? expf(g[row]) : 0.0f;
            }
        for (int t = threadIdx.x; t < n; t += 128) {
            if (!BY_ROW) decay[t] = expf(a.g[(begin + t) * a.n_v_head + head]);
            beta[t] = a.beta[(begin + t) * a.n_v_head + head];
            sequences[t] = a.batch->sequences[begin + t];
            positions[t] = a.batch->positions[begin + t];
        }
        __syncthreads();
        for (int t = 0; t < n; t++) {
            if (sequences[t] != sequence || positions[t] == 0)
                take_state(s, states, a.n_v_head * size, sequence, sequences[t], positions[t], in_range, lane_row, head_k, head_v);
            const float4 *kt = k[t] + lane_row / 4, *qt = q[t] + lane_row / 4;
            float part0 = 0, part1 = 0;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float one = decay[t];
                const float4 e = BY_ROW ? decays[BY_ROW * t][lane_row / 4 + 4 * i] : float4{one, one, one, one};
                s[i].x *= e.x;
                s[i].y *= e.y;
                s[i].z *= e.z;
                s[i].w *= e.w;
                (i % 2 ? part1 : part0) = dot4(s[i], kt[4 * i], i % 2 ? part1 : part0);
            }
            const float d = (v[t][column] - quad_sum(part0 + part1)) * beta[t];
            part0 = part1 = 0;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 x = kt[4 * i];
                s[i].x = fmaf(x.x, d, s[i].x);
                s[i].y = fmaf(x.y, d, s[i].y);
                s[i].z = fmaf(x.z, d, s[i].z);
                s[i].w = fmaf(x.w, d, s[i].w);
                (i % 2 ? part1 : part0) = dot4(s[i], qt[4 * i], i % 2 ? part1 : part0);
            }
            const float o = quad_sum(part0 + part1);
            if (in_range && lane_row == 0) a.out[((begin + t) * a.n_v_head + head) * head_v + first + column] = o * scale;
        }
    }
    if (in_range && sequence >= 0) store_state(s, states + sequence * a.n_v_head * size, lane_row, head_k, head_v);
}

// ---- the selective scan: dt = softplus(dt + dt_bias);  S = exp(a dt) S + b (dt x)^T;  out = (S^T c + d x) silu(z)

// state: [sequences][n_head][d_state][head]; d_state <= HEAD. Head h reads b and c of group h / (n_head / n_group).
// Without dt steps are 1; d and z may be null. Blocks are (head, 32 of its columns).
struct ssm_scan_args {
    const Batch* batch;
    const float *x, *z, *dt, *b, *c, *dt_bias, *a, *d;
    float *out, *state;
    int64_t n_head, n_group, head, d_state, rows;
};

KERNEL(ssm_scan, 128) {
    __shared__ float4 b[CHUNK][HEAD / 4], c[CHUNK][HEAD / 4];
    __shared__ float x[CHUNK][COLUMNS];
    __shared__ float decay[CHUNK], step[CHUNK];
    __shared__ int sequences[CHUNK], positions[CHUNK];
    const int head = blockIdx.x, width = (int)a.head, d_state = (int)a.d_state;
    const int group = (int)(head / (a.n_head / a.n_group));
    const int first = COLUMNS * blockIdx.y, column = threadIdx.x >> 2, lane_row = 4 * (threadIdx.x & 3);
    const bool in_range = first + column < width;
    const int64_t size = (int64_t)d_state * width;
    const float skip = a.d ? a.d[head] : 0.0f;
    float* const states = a.state + head * size + first + column;
    float4 s[QUADS];
    int sequence = -1;
    for (int begin = 0; begin < a.rows; begin += CHUNK) {
        const int n = (int)min((int64_t)CHUNK, a.rows - begin);
        __syncthreads();  // the previous chunk may still be read
        const int64_t of_group = (begin * a.n_group + group) * d_state;
        load_rows<HEAD>((float*)b, a.b + of_group, a.n_group * d_state, n, d_state);
        load_rows<HEAD>((float*)c, a.c + of_group, a.n_group * d_state, n, d_state);
        const float* const values = a.x + (begin * a.n_head + head) * width + first;
        load_rows<COLUMNS>((float*)x, values, a.n_head * width, n, width - first);
        for (int t = threadIdx.x; t < n; t += 128) {
            step[t] = 1.0f;
            if (a.dt) step[t] = activation(ACT_SOFTPLUS, a.dt[(begin + t) * a.n_head + head] + a.dt_bias[head], 0.0f);
            decay[t] = expf(step[t] * a.a[head]);
            sequences[t] = a.batch->sequences[begin + t];
            positions[t] = a.batch->positions[begin + t];
        }
        __syncthreads();
        for (int t = 0; t < n; t++) {
            if (sequences[t] != sequence || positions[t] == 0)
                take_state(s, states, a.n_head * size, sequence, sequences[t], positions[t], in_range, lane_row, d_state, width);
            const float4 *bt = b[t] + lane_row / 4, *ct = c[t] + lane_row / 4;
            const float value = x[t][column], d = value * step[t];
            float part0 = 0, part1 = 0;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 y = bt[4 * i];
                s[i].x = fmaf(y.x, d, s[i].x * decay[t]);
                s[i].y = fmaf(y.y, d, s[i].y * decay[t]);
                s[i].z = fmaf(y.z, d, s[i].z * decay[t]);
                s[i].w = fmaf(y.w, d, s[i].w * decay[t]);
                (i % 2 ? part1 : part0) = dot4(s[i], ct[4 * i], i % 2 ? part1 : part0);
            }
            const float o = quad_sum(part0 + part1);
            if (in_range && lane_row == 0) {
                const int64_t at = ((begin + t) * a.n_head + head) * width + first + column;
                const float y = fmaf(value, skip, o);
                a.out[at] = a.z ? y * activation(ACT_SILU, a.z[at], 0.0f) : y;
            }
        }
    }
    if (in_range && sequence >= 0) store_state(s, states + sequence * a.n_head * size, lane_row, d_state, width);
}

// ---- the scan of columns: dt = softplus(dt);  S = exp(a dt) S + b dt x;  out = (S^T c + d x) silu(z)

// state: [sequences][d_state][width]; a: [d_state][width]; d_state <= HEAD <= 64, because decay rates are held in
// registers, too. Blocks are 32 columns.
#if HEAD <= 64
#define COLUMN_CHUNK (CHUNK / 2)
struct column_scan_args {
    const Batch* batch;
    const float *x, *z, *dt, *b, *c, *a, *d;
    float *out, *state;
    int64_t width, d_state, rows;
};

KERNEL(column_scan, 128) {
    __shared__ float4 b[COLUMN_CHUNK][HEAD / 4], c[COLUMN_CHUNK][HEAD / 4];
    __shared__ float x[COLUMN_CHUNK][COLUMNS], dt[COLUMN_CHUNK][COLUMNS];
    __shared__ int sequences[COLUMN_CHUNK], positions[COLUMN_CHUNK];
    const int width = (int)a.width, d_state = (int)a.d_state;
    const int first = COLUMNS * blockIdx.x, column = threadIdx.x >> 2, lane_row = 4 * (threadIdx.x & 3);
    const bool in_range = first + column < width;
    const int64_t size = (int64_t)d_state * width;
    const float skip = in_range ? a.d[first + column] : 0.0f;
    float* const states = a.state + first + column;
    float4 s[QUADS], rate[QUADS];
    load_state(rate, a.a + first + column, lane_row, d_state, width, !in_range);
    int sequence = -1;
    for (int begin = 0; begin < a.rows; begin += COLUMN_CHUNK) {
        const int n = (int)min((int64_t)COLUMN_CHUNK, a.rows - begin);
        __syncthreads();  // the previous chunk may still be read
        load_rows<HEAD>((float*)b, a.b + (int64_t)begin * d_state, d_state, n, d_state);
        load_rows<HEAD>((float*)c, a.c + (int64_t)begin * d_state, d_state, n, d_state);
        load_rows<COLUMNS>((float*)x, a.x + begin * a.width + first, width, n, width - first);
        load_rows<COLUMNS>((float*)dt, a.dt + begin * a.width + first, width, n, width - first);
        for (int t = threadIdx.x; t < n; t += 128) {
            sequences[t] = a.batch->sequences[begin + t];
            positions[t] = a.batch->positions[begin + t];
        }
        __syncthreads();
        for (int t = 0; t < n; t++) {
            if (sequences[t] != sequence || positions[t] == 0)
                take_state(s, states, size, sequence, sequences[t], positions[t], in_range, lane_row, d_state, width);
            const float4 *bt = b[t] + lane_row / 4, *ct = c[t] + lane_row / 4;
            const float value = x[t][column], step = activation(ACT_SOFTPLUS, dt[t][column], 0.0f), d = value * step;
            float part0 = 0, part1 = 0;
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 y = bt[4 * i];
                s[i].x = fmaf(y.x, d, s[i].x * expf(rate[i].x * step));
                s[i].y = fmaf(y.y, d, s[i].y * expf(rate[i].y * step));
                s[i].z = fmaf(y.z, d, s[i].z * expf(rate[i].z * step));
                s[i].w = fmaf(y.w, d, s[i].w * expf(rate[i].w * step));
                (i % 2 ? part1 : part0) = dot4(s[i], ct[4 * i], i % 2 ? part1 : part0);
            }
            const float o = quad_sum(part0 + part1);
            if (in_range && lane_row == 0) {
                const int64_t at = (begin + t) * a.width + first + column;
                a.out[at] = fmaf(value, skip, o) * activation(ACT_SILU, a.z[at], 0.0f);
            }
        }
    }
    if (in_range && sequence >= 0) store_state(s, states + sequence * size, lane_row, d_state, width);
}
#endif

// ---- RWKV: S = diag(w) S + k v^T - (rate * removed) (S^T removed)^T;  out = scale S^T r;  w = exp(-exp(g)), or with a
// ---- bound exp(-bound sigmoid(g))

// state: [sequences][n_head][head][head]; head <= HEAD. Head h reads k and v of head h / (n_head / n_kv_head).
// removed, rate: or null; S^T removed uses S before its decay. earlier: out uses the previous S. complement: k is k (1
// - w). Blocks are (head, 32 of its columns).
#define WKV_CHUNK (1024 / HEAD)
struct wkv_args {
    const Batch* batch;
    const float *r, *g, *k, *v, *removed, *rate;
    float *out, *state;
    int64_t n_head, n_kv_head, head, earlier, complement, rows;
    double scale, bound;
};

KERNEL(wkv, 128) {
    __shared__ float4 r[WKV_CHUNK][HEAD / 4], w[WKV_CHUNK][HEAD / 4], k[WKV_CHUNK][HEAD / 4];
    __shared__ float4 removed[WKV_CHUNK][HEAD / 4], lost[WKV_CHUNK][HEAD / 4];
    __shared__ float v[WKV_CHUNK][COLUMNS];
    __shared__ int sequences[WKV_CHUNK], positions[WKV_CHUNK];
    const int head = blockIdx.x, n_rows = (int)a.head;
    const int kv_head = (int)(head / (a.n_head / a.n_kv_head));
    const int first = COLUMNS * blockIdx.y, column = threadIdx.x >> 2, lane_row = 4 * (threadIdx.x & 3);
    const bool in_range = first + column < n_rows;
    const float scale = (float)a.scale, bound = (float)a.bound;
    const int64_t size = (int64_t)n_rows * n_rows;
    float* const states = a.state + head * size + first + column;
    float4 s[QUADS];
    int sequence = -1;
    for (int begin = 0; begin < a.rows; begin += WKV_CHUNK) {
        const int n = (int)min((int64_t)WKV_CHUNK, a.rows - begin);
        __syncthreads();  // the previous chunk may still be read
        for (int i = threadIdx.x; i < n * HEAD; i += 128) {
            const int t = i / HEAD, row = i % HEAD;
            const bool there = row < n_rows;
            const int64_t at = ((begin + t) * a.n_head + head) * n_rows + row;
            const int64_t of_kv = ((begin + t) * a.n_kv_head + kv_head) * n_rows + row;
            const float g = there ? a.g[at] : 0.0f, key = there ? a.k[of_kv] : 0.0f;
            const float kept = expf(-(bound != 0 ? bound * sigmoid(g) : expf(g)));
            const float gone = there && a.removed ? a.removed[at] : 0.0f;
            ((float*)r[t])[row] = there ? a.r[at] * scale : 0.0f;
            ((float*)w[t])[row] = kept;
            ((float*)k[t])[row] = a.complement ? key - key * kept : key;
            ((float*)removed[t])[row] = gone;
            ((float*)lost[t])[row] = there && a.removed ? -gone * a.rate[at] : 0.0f;
        }
        const float* const values = a.v + (begin * a.n_kv_head + kv_head) * n_rows + first;
        load_rows<COLUMNS>((float*)v, values, a.n_kv_head * n_rows, n, n_rows - first);
        for (int t = threadIdx.x; t < n; t += 128) {
            sequences[t] = a.batch->sequences[begin + t];
            positions[t] = a.batch->positions[begin + t];
        }
        __syncthreads();
        for (int t = 0; t < n; t++) {
            if (sequences[t] != sequence || positions[t] == 0)
                take_state(s, states, a.n_head * size, sequence, sequences[t], positions[t], in_range, lane_row, n_rows, n_rows);
            const int lane = lane_row / 4;
            const float value = v[t][column];
            float part0 = 0, part1 = 0, before = 0;
            if (a.removed || a.earlier) {
                const float4* by = (a.earlier ? r[t] : removed[t]) + lane;
#pragma unroll
                for (int i = 0; i < QUADS; i++) (i % 2 ? part1 : part0) = dot4(s[i], by[4 * i], i % 2 ? part1 : part0);
                before = quad_sum(part0 + part1);
                part0 = part1 = 0;
            }
#pragma unroll
            for (int i = 0; i < QUADS; i++) {
                const float4 x = k[t][lane + 4 * i], y = lost[t][lane + 4 * i], e = w[t][lane + 4 * i];
                s[i].x = fmaf(y.x, before, fmaf(x.x, value, s[i].x * e.x));
                s[i].y = fmaf(y.y, before, fmaf(x.y, value, s[i].y * e.y));
                s[i].z = fmaf(y.z, before, fmaf(x.z, value, s[i].z * e.z));
                s[i].w = fmaf(y.w, before, fmaf(x.w, value, s[i].w * e.w));
                (i % 2 ? part1 : part0) = dot4(s[i], r[t][lane + 4 * i], i % 2 ? part1 : part0);
            }
            const float o = a.earlier ? before : quad_sum(part0 + part1);
            if (in_range && lane_row == 0) a.out[((begin + t) * a.n_head + head) * n_rows + first + column] = o;
        }
    }
    if (in_range && sequence >= 0) store_state(s, states + sequence * a.n_head * size, lane_row, n_rows, n_rows);
}
