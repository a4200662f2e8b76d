// Attention over a cache in blocks of keys: softmax(scale * q K^T + bias) V without storing the full score matrix.
//
// For each block, with m the largest score so far, l the sum and o the weighted values:
//
//     s = scale * q K^T       capped, biased, masked
//     m' = max(m, max s)      p = exp(s - m')      f = exp(m - m')      (in powers of 2: attention.cuh)
//     l = f l + sum p         o = f o + p V        at the end out = o / l
//
// (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention.) The keys may be split over thread blocks: each then
// stores its o, m and l, and `attention_combine` merges them. The number of parts depends on the size of the cache only
// and their bounds on the positions, so the same launch serves any position.
//
// Variants (WAY): FEW rows (attention_few.cuh), a TILE of rows in f32 (attention_tile.cuh), TENSOR cores
// (attention_tensor.cuh). HEAD_K, HEAD_V: columns of a head's key and value; CACHE: type of the cache; ROWS of q and
// THREADS per block. SELECTED 1: a token attends to the positions in its row of `selected` (lightning_indexer.cu).
#include "matmul/activations.cuh"
#include "core/last_block.cuh"

// q: [rows][n_head][HEAD_K], out: [rows][n_head][HEAD_V]; v_cache 0: the values are the first columns of the keys;
// sinks: [n_head] or 0; mask CAUSAL, SLIDING, CHUNKED, SYMMETRIC with window; biases: [n_head][2 * n_ctx + BIAS_PADDING],
// if BIASED, column n_ctx - 1 + d for the key d positions after the token; scratch: if splits > 1, see attention.py;
// selected: [rows][n_selected], if SELECTED; ratio: 0, or the number of positions per block if `selected` numbers the
// cells of a window followed by blocks (blocks.cu).
struct attention_args {
    const Batch* batch;
    int64_t rows;
    const float* q;
    float* out;
    const uint8_t *k_cache, *v_cache;
    int64_t n_head, n_head_kv;
    double scale, softcap;
    const float* sinks;
    int64_t mask, window;
    double alibi;
    const float* biases;
    int64_t splits;
    float* scratch;
    const int32_t* selected;
    int64_t n_selected, ratio;
};

#define FEW 0
#define TILE 1
#define TENSOR 2

#if WAY == FEW
#include "attention/attention_few.cuh"
#elif WAY == TILE
#include "attention/attention_tile.cuh"
#else
#include "attention/attention_tensor.cuh"
#endif

// Block x: rows and key-value head, last rows (with most keys) first; y: part of the keys.
KERNEL(attention, THREADS) {
    const int n_head_kv = (int)a.n_head_kv, tiles = (int)gridDim.x / n_head_kv;
    const int tile = tiles - 1 - (int)blockIdx.x / n_head_kv;
    attend(a, (int)blockIdx.x % n_head_kv, tile * ROWS, (int)blockIdx.y);
}

// out: [rows][head_v]; scratch as written by `attention`.
struct attention_combine_args {
    int64_t rows, n_head, head_v;
    float* out;
    const float* sinks;
    int64_t splits;
    const float* scratch;
};

// Block x: a row of a head; y: 128 of its columns. At most 128 parts, of which a warp takes every eighth.
template <typename A> INLINE void combine(const A& a) {
    __shared__ float factors[128], sums[8][128], shared[32];
    __shared__ int used;
    const int64_t row = blockIdx.x;
    const int splits = (int)a.splits, part = threadIdx.x, lane = part & 31, warp = part >> 5;
    const float* maxima = a.scratch + a.rows * a.splits * a.head_v + 2 * row * a.splits;
    const float m = part < splits ? maxima[2 * part] : NONE, l = part < splits ? maxima[2 * part + 1] : 0.0f;
    const float best = warp_max(m);
    if (part == 0) used = 0;
    if (lane == 0) shared[warp] = best;
    __syncthreads();
    float largest = shared[0];
    for (int w = 1; w < 4; w++) largest = fmaxf(largest, shared[w]);
    const float factor = l > 0 ? exp2_near(m - largest) : 0.0f;
    if (part < 128) factors[part] = factor;
    if (l > 0) atomicMax(&used, part + 1);
    const float by = last_factor(a.sinks, row % a.n_head, largest, block_sum(factor * l, shared));

    const int column = (int)blockIdx.y * 128 + lane, head_v = (int)a.head_v;
    float total[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (int p = warp; p < used; p += 8) {
        const float* values = a.scratch + (row * a.splits + p) * a.head_v + column;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (column + 32 * i < head_v && factors[p] > 0) total[i] = fmaf(factors[p], values[32 * i], total[i]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sums[warp][lane + 32 * i] = total[i];
    __syncthreads();
    if (part < 128 && (int)blockIdx.y * 128 + part < head_v) {
        float sum = 0;
        for (int w = 0; w < 8; w++) sum += sums[w][part];
        a.out[row * a.head_v + blockIdx.y * 128 + part] = sum * by;
    }
}

KERNEL(attention_combine, 256) { combine(a); }

// As attention_combine, then converts the heads to a format in rows of q_width. For an int8 format, the last block of
// every 256 columns converts them; head_v, or 128, divides 256. counters: zero, one per 256 columns of a row.
struct attention_combine_to_args : attention_combine_args {
    int64_t format, q_width;
    uint8_t* quantized;
    int* counters;
};

KERNEL(attention_combine_to, 256) {
    combine(a);
    if (a.format >= ROUND_F16) {
        const int64_t i = blockIdx.x * a.head_v + 128 * (int64_t)blockIdx.y + threadIdx.x;
        __syncthreads();
        if (threadIdx.x >= min(a.head_v, (int64_t)128)) return;
        ((float*)a.quantized)[i] = a.format == ROUND_F16 ? rounded<ROUND_F16>(a.out[i]) : rounded<ROUND_BF16>(a.out[i]);
        return;
    }
    const int64_t width = a.q_width, units = (width + 255) / 256, each = min(a.head_v, (int64_t)128);
    const int64_t at = blockIdx.x * a.head_v + 128 * (int64_t)blockIdx.y, row = at / width, unit = at % width / 256;
    const int64_t blocks = min((int64_t)256, width - 256 * unit) / each;
    if (is_last_of(a.counters + row * units + unit, (int)blocks) && threadIdx.x < 32)
        quantize_unit_of(a.format, a.out + row * width, width, a.quantized + row * Q8_UNIT * units, unit);
}
