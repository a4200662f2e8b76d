// The lightning indexer: scores of all keys before a token, and the positions of the largest.
//
//     score[p] = sum over heads of scale * weight[h] * max(q[h] . k[p], 0)
//
// A token with no more than n_selected visible keys selects them all, without scores. For the others the n-th largest
// score is found digit by digit (radix selection over integers that sort like the floats, NaN lowest), and a last pass
// keeps the positions above it in order, and the lowest of those equal to it.
//
// ratio: 1; or keys belong to blocks of `ratio` positions, n_ctx / ratio per sequence, and block numbers are selected.
//
// HEAD: columns of a key; CACHE: type of the cache.
#include "attention/cache.cuh"

#define KEYS 64
#define HEADS 32            // multiplied at a time
#define SLICE 32            // columns at a time
#define STRIDE (SLICE + 4)  // row stride in floats: no bank conflicts

#define NUMBERS (HEAD % 4 == 0 ? 4 : HEAD % 2 == 0 ? 2 : 1)

// q: [rows][n_head][HEAD], weights: [rows][n_head]; scores: [tokens from `first` on][n_ctx].
struct indexer_scores_args {
    const Batch* batch;
    int64_t rows, first, n_head, n_selected, ratio;
    const float *q, *weights;
    const uint8_t* k_cache;
    double scale;
    float* scores;
};

INLINE float dot4(float4 x, float4 y, float sum) { return fmaf(x.w, y.w, fmaf(x.z, y.z, fmaf(x.y, y.y, fmaf(x.x, y.x, sum)))); }

// Loads columns `from` ... of KEYS rows from `start`; zeros outside the head and from `end` on.
INLINE void stage_keys(const indexer_scores_args& a, int64_t cells, int start, int end, int from, float* to) {
    const int64_t bytes = cache_bytes(HEAD);
    for (int i = threadIdx.x; i < KEYS * SLICE / NUMBERS; i += 128) {
        const int key = i / (SLICE / NUMBERS), column = i % (SLICE / NUMBERS) * NUMBERS;
        float v[NUMBERS] = {};
        if (from + column < HEAD && start + key < end)
            read_cache<NUMBERS>(a.k_cache + (cells + start + key) * bytes, from + column, v);
        for (int j = 0; j < NUMBERS; j++) to[key * STRIDE + column + j] = v[j];
    }
}

// Loads columns `from` ... of HEADS rows of q from `head`; zeros outside.
INLINE void stage_q(const indexer_scores_args& a, int64_t token, int head, int from, float* to) {
    for (int i = threadIdx.x; i < HEADS * SLICE; i += 128) {
        const int h = head + i / SLICE, column = from + i % SLICE;
        to[i / SLICE * STRIDE + i % SLICE] = h < a.n_head && column < HEAD ? a.q[(token * a.n_head + h) * HEAD + column] : 0.0f;
    }
}

// Block x: a group of tiles of KEYS; y: a token. A thread has four of the HEADS heads and every sixteenth key.
KERNEL(indexer_scores, 128) {
    __shared__ __align__(16) float keys[KEYS * STRIDE], q[HEADS * STRIDE], sums[8][KEYS];
    const int64_t token = a.first + blockIdx.y;
    const int end = (a.batch->positions[token] + 1) / (int)a.ratio, x = threadIdx.x & 15, y = threadIdx.x >> 4;
    if (end <= a.n_selected) return;
    const int64_t cells = a.batch->sequences[token] * (a.batch->n_ctx / a.ratio);
    float* scores = a.scores + (int64_t)blockIdx.y * a.batch->n_ctx;
    for (int start = KEYS * (int)blockIdx.x; start < end; start += KEYS * (int)gridDim.x) {
        float total[4] = {};
        for (int head = 0; head < a.n_head; head += HEADS) {
            float s[4][4] = {};
#pragma unroll 1
            for (int from = 0; from < HEAD; from += SLICE) {
                __syncthreads();
                stage_keys(a, cells, start, end, from, keys);
                stage_q(a, token, head, from, q);
                __syncthreads();
#pragma unroll 2
                for (int c = 0; c < SLICE; c += 4) {
                    float4 right[4];
#pragma unroll
                    for (int k = 0; k < 4; k++) right[k] = *(const float4*)(keys + (x + 16 * k) * STRIDE + c);
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        const float4 left = *(const float4*)(q + (4 * y + r) * STRIDE + c);
#pragma unroll
                        for (int k = 0; k < 4; k++) s[r][k] = dot4(left, right[k], s[r][k]);
                    }
                }
            }
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int h = head + 4 * y + r;
                const float weight = h < a.n_head ? a.weights[token * a.n_head + h] * (float)a.scale : 0.0f;
#pragma unroll
                for (int k = 0; k < 4; k++) total[k] = fmaf(fmaxf(s[r][k], 0.0f), weight, total[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) sums[y][x + 16 * k] = total[k];
        __syncthreads();
        if (threadIdx.x < KEYS && start + (int)threadIdx.x < end) {
            float score = 0;
            for (int i = 0; i < 8; i++) score += sums[i][threadIdx.x];
            scores[start + threadIdx.x] = score;
        }
    }
}

// out: [rows][n_selected]: positions, ascending, then -1; scores as written by indexer_scores.
struct indexer_select_args {
    const Batch* batch;
    int64_t rows, first, n_selected, ratio;
    const float* scores;
    int32_t* out;
};

#define THREADS 512  // of indexer_select
#define EACH 4       // adjacent keys of a thread at a time
#define BITS 8       // of a digit

// An unsigned integer that sorts as the float does; NaN becomes 0.
INLINE uint32_t sort_key(float v) {
    const uint32_t bits = __float_as_uint(v + 0.0f);  // -0 becomes 0
    return bits << 1 > 0xff000000u ? 0 : bits ^ ((uint32_t)((int32_t)bits >> 31) | 0x80000000u);
}

// The sum of v over the preceding threads; total: over all. part: THREADS / 32 shared values.
INLINE int sum_before(int v, int* part, int* total) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int sum = v;
    for (int d = 1; d < 32; d <<= 1) {
        const int other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    __syncthreads();  // part may still be read
    if (lane == 31) part[warp] = sum;
    __syncthreads();
    int before = 0, all = 0;
    for (int i = 0; i < THREADS / 32; i++) {
        before += i < warp ? part[i] : 0;
        all += part[i];
    }
    *total = all;
    return before + sum - v;
}

// Block x: a token.
KERNEL(indexer_select, 512) {
    __shared__ int counts[1 << BITS], part[THREADS / 32], chosen_digit[2];
    const int64_t token = a.first + blockIdx.x;
    const int n = (a.batch->positions[token] + 1) / (int)a.ratio;
    int32_t* out = a.out + token * a.n_selected;
    if (n <= a.n_selected) {
        for (int i = threadIdx.x; i < a.n_selected; i += THREADS) out[i] = i < n ? i : -1;
        return;
    }
    const float* scores = a.scores + (int64_t)blockIdx.x * a.batch->n_ctx;

    uint32_t least = 0;  // the high digits of the smallest selected key
    int remaining = (int)a.n_selected;
    for (int shift = 32 - BITS; shift >= 0; shift -= BITS) {
        if (threadIdx.x < 1 << BITS) counts[threadIdx.x] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < n; i += THREADS) {
            const uint32_t key = sort_key(scores[i]);
            if (shift == 32 - BITS || key >> (shift + BITS) == least) atomicAdd(&counts[(key >> shift) & ((1 << BITS) - 1)], 1);
        }
        __syncthreads();
        const int digit = (1 << BITS) - 1 - (int)threadIdx.x, mine = digit >= 0 ? counts[digit] : 0;
        int all;
        const int above = sum_before(mine, part, &all);
        if (above < remaining && above + mine >= remaining) chosen_digit[0] = digit, chosen_digit[1] = above;
        __syncthreads();
        least = least << BITS | (uint32_t)chosen_digit[0];
        remaining -= chosen_digit[1];
    }

    // `wanted` keys equal to the smallest are selected, the first ones.
    int larger = 0, equal = 0;
    for (int start = 0; start < n; start += THREADS * EACH) {
        const int i0 = start + EACH * (int)threadIdx.x;
        uint32_t keys[EACH];
        int counted = 0;  // larger keys, and from bit 16 on equal ones
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            keys[j] = i0 + j < n ? sort_key(scores[i0 + j]) : 0;
            counted += i0 + j >= n ? 0 : keys[j] > least ? 1 : keys[j] == least ? 1 << 16 : 0;
        }
        int all;
        const int before = sum_before(counted, part, &all);
        int at = larger + (before & 0xffff), same = equal + (before >> 16);
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (i0 + j >= n || keys[j] < least) continue;
            if (keys[j] > least || same < remaining) out[at + min(same, remaining)] = i0 + j;
            if (keys[j] > least) at++;
            else same++;
        }
        larger += all & 0xffff;
        equal += all >> 16;
    }
}
