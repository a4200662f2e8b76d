// The pairs (token, slot) of every expert, and the tiles of products by expert: plan.cuh. A counting sort in one
// block, stable because each of its warps has a run of the pairs and a counter per expert. If there are too many
// experts for all counters to fit shared memory, fewer warps have a run. gather and scatter: rows into that order and
// back, for products that need an expert's rows contiguous (cuBLAS).
#include "matmul/plan.cuh"

#define INLINE_METHOD __device__ __forceinline__

struct bucket_args {
    int32_t* plan;
    const int32_t* ids;
    int64_t rows, n_used, n_expert, runs;
};

// The sum over preceding lanes.
INLINE int before(int v) {
    const int lane = threadIdx.x & 31;
    int sum = v;
    for (int d = 1; d < 32; d *= 2) {
        const int other = __shfl_up_sync(FULL, sum, d);
        if (lane >= d) sum += other;
    }
    return sum - v;
}

// The tiles of one size: full ones by expert, then partial ones by expert, so that a launch ends more evenly. Run by a
// warp, an expert per lane, 32 at a time.
struct Tiles {
    int tokens, full, rest;  // full tiles of preceding experts; places of partial ones

    INLINE_METHOD void write(int4* tiles, int expert, int first, int count) {
        const int mine = count / tokens, left = count % tokens;
        const int at = full + before(mine), last = rest + before(left > 0);
        for (int i = 0; i < mine; i++) tiles[at + i] = make_int4(expert, first + i * tokens, tokens, 0);
        if (left) tiles[last] = make_int4(expert, first + mine * tokens, left, 0);
        full = __shfl_sync(FULL, at + mine, 31);
        rest = __shfl_sync(FULL, last + (left > 0), 31);
    }
};

// Shared memory: 4 * (runs + 1) * n_expert bytes; up to 16 runs.
KERNEL(bucket, 512) {
    DYNAMIC_SHARED(shared);
    const int runs = (int)a.runs, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const int n_expert = (int)a.n_expert, pairs = (int)(a.rows * a.n_used);
    int* counts = (int*)shared;  // [run][expert]: number of pairs in a warp's run; then the next free place
    for (int i = threadIdx.x; i < runs * n_expert; i += 512) counts[i] = 0;
    __syncthreads();

    const int run = (pairs + 32 * runs - 1) / (32 * runs) * 32, first = run * warp;
    const int last = warp < runs ? min(pairs, first + run) : first;
    int* mine = counts + warp * n_expert;
    for (int i = first + lane; i < last; i += 32) atomicAdd(mine + a.ids[i], 1);
    __syncthreads();

    int* totals = counts + runs * n_expert;
    for (int e = threadIdx.x; e < n_expert; e += 512) {
        int count = 0;
        for (int w = 0; w < runs; w++) count += counts[w * n_expert + e];
        totals[e] = count;
    }
    __syncthreads();

    // Experts in order, 32 at a time: first pair and first tile of each.
    if (warp == 0) {
        int start = 0, full32 = 0, full128 = 0;
        for (int e = lane; e < n_expert; e += 32) full32 += totals[e] / 32, full128 += totals[e] / 128;
        Tiles small = {32, 0, warp_sum(full32)}, large = {128, 0, warp_sum(full128)};
        for (int e = lane; e - lane < n_expert; e += 32) {
            const int count = e < n_expert ? totals[e] : 0, at = start + before(count);
            small.write((int4*)(a.plan + plan_tiles_at(pairs, n_expert, 32)), e, at, count);
            large.write((int4*)(a.plan + plan_tiles_at(pairs, n_expert, 128)), e, at, count);
            if (e < n_expert)
                for (int w = 0, to = at; w < runs; w++) {
                    const int n = counts[w * n_expert + e];
                    counts[w * n_expert + e] = to;
                    to += n;
                }
            start = __shfl_sync(FULL, at + count, 31);
        }
        if (lane == 0) {
            a.plan[plan_count_at(32)] = small.rest;
            a.plan[plan_count_at(128)] = large.rest;
            a.plan[2] = pairs;
        }
    }
    __syncthreads();

    // 32 pairs at a time; those of one expert are placed in order.
    for (int base = first; base < last; base += 32) {
        const int i = base + lane, expert = i < last ? a.ids[i] : -1;
        const unsigned same = __match_any_sync(FULL, expert);
        if (expert >= 0) a.plan[PLAN_PAIRS + mine[expert] + __popc(same & ((1u << lane) - 1))] = i;
        __syncwarp();
        if (expert >= 0 && (same & ((1u << lane) - 1)) == 0) mine[expert] += __popc(same);
        __syncwarp();
    }
}

// Row i of out is the row of x of the plan's i-th pair, in bf16. x_per pairs share a row of x. rows: number of pairs.
struct gather_args {
    const int32_t* plan;
    const float* x;
    uint16_t* out;
    int64_t rows, x_per, width;
};

KERNEL(gather, 256) {
    const int64_t row = blockIdx.x, width = a.width;
    const float* x = a.x + a.plan[PLAN_PAIRS + row] / (int)a.x_per * width;
    for (int64_t i = threadIdx.x; i < width; i += 256) a.out[row * width + i] = float_to_bf16(x[i]);
}

// Write row i of x to the row of out of the plan's i-th pair, with its expert's scale and bias (0: none).
struct scatter_args {
    const int32_t *plan, *ids;
    const float* x;
    float* out;
    int64_t rows, width;
    const uint8_t* bias;
    int64_t bias_stride;
    const float* scale;
};

KERNEL(scatter, 256) {
    const int64_t row = blockIdx.x, width = a.width;
    const int pair = a.plan[PLAN_PAIRS + row], expert = a.ids[pair];
    const float* bias = a.bias ? (const float*)(a.bias + expert * a.bias_stride) : 0;
    const float scale = a.scale ? a.scale[expert] : 1.0f;
    for (int64_t i = threadIdx.x; i < width; i += 256)
        a.out[pair * width + i] = a.x[row * width + i] * scale + (bias ? bias[i] : 0.0f);
}
