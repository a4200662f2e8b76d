// Routing of a token by a warp, for route.cu and router products (mat_vec_same_input.cu).
//
//     probs      softmax(logits), sigmoid(logits), sqrt(softplus(logits)), or the logits themselves (softmax_weight)
//     choice     probs + bias; with groups, minus infinity outside the n_group_used groups with the largest top-2 sums
//     ids        the n_used largest of choice, descending; ties by lower number; / share
//     weights    probs[ids]; softmax of them (softmax_weight); / max(sum, sum_floor) (norm); * scale (unless 0)
//
// Comparisons use integers that sort as the floats do, so that NaN sorts last and no expert comes twice.
#pragma once
#include "core/functions.cuh"

#define SOFTMAX 0
#define SIGMOID 1
#define SOFTMAX_WEIGHT 2
#define SQRT_SOFTPLUS 3

#define LOWEST __uint_as_float(0xff800000u)  // minus infinity

// An integer that sorts like the float, with -0 as 0; NaN is lowest, but above 0, which marks selected experts.
INLINE uint32_t sort_key(float v) {
    const uint32_t bits = __float_as_uint(v + 0.0f);
    if (v != v) return 1;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// x[i] = e^(x[i] - max) / sum, for n values in shared memory, by a warp.
INLINE void softmax(float* x, int n, int lane) {
    float largest = LOWEST, total = 0;
    for (int i = lane; i < n; i += 32) largest = fmaxf(largest, x[i]);
    largest = warp_max(largest);
    for (int i = lane; i < n; i += 32) {
        x[i] = expf(x[i] - largest);
        total += x[i];
    }
    total = warp_sum(total);
    for (int i = lane; i < n; i += 32) x[i] = x[i] / total;
}

// The largest of this lane's keys (lane, lane + 32, ...) and its index, packed so that the first of ties wins.
INLINE uint64_t best_of_lane(const uint32_t* keys, int n, int lane) {
    uint64_t best = 0;
    for (int i = lane; i < n; i += 32) {
        const uint64_t candidate = (uint64_t)keys[i] << 32 | (0xffffffffu - (uint32_t)i);
        if (candidate > best) best = candidate;
    }
    return best;
}

// Removes the largest of n keys and returns its index. mine: best_of_lane, kept between calls.
INLINE int take_largest(uint32_t* keys, int n, int lane, uint64_t& mine) {
    uint64_t best = mine;
    for (int d = 16; d; d >>= 1) {
        const uint64_t other = __shfl_xor_sync(FULL, best, d);
        if (other > best) best = other;
    }
    const int where = (int)(0xffffffffu - (uint32_t)best);
    if (best == mine) {  // unique, so this is the lane that holds it
        keys[where] = 0;
        mine = best_of_lane(keys, n, lane);
    }
    return where;
}

// Sets the keys outside the best groups to that of minus infinity. scores: room for n_group keys.
INLINE void keep_groups(uint32_t* keys, const float* probs, const float* bias, int n, int n_group, int n_group_used,
                        uint32_t* scores, int lane) {
    const int size = n / n_group;
    for (int g = lane; g < n_group; g += 32) {
        float best = LOWEST, second = LOWEST;
        for (int k = 0; k < size; k++) {
            const int i = g * size + (k + lane) % size;  // lanes begin at different banks
            const float v = bias ? probs[i] + bias[i] : probs[i];
            if (v > best) {
                second = best;
                best = v;
            } else if (v > second) {
                second = v;
            }
        }
        scores[g] = sort_key(size > 1 ? best + second : best);
    }
    __syncwarp();
    uint64_t mine = best_of_lane(scores, n_group, lane);
    for (int j = 0; j < n_group_used; j++) take_largest(scores, n_group, lane, mine);
    __syncwarp();
    for (int i = lane; i < n; i += 32)
        if (scores[i / size]) keys[i] = sort_key(LOWEST);
    __syncwarp();
}

// Routes row `row` of logits, by a warp. shared: room for probs [n_expert], keys [n_expert], and chosen weights
// [n_used] or scores [n_group]. A has ids, weights, logits, bias, n_expert, n_used, n_group, n_group_used, gating,
// norm, share, scale, sum_floor. given: ids of all rows if they are not chosen here, or null.
template <typename A> INLINE void route_token(const A& a, int64_t row, float* shared, const int32_t* row_of = nullptr) {
    const int lane = threadIdx.x & 31;
    const int n = (int)a.n_expert, n_used = (int)a.n_used, n_group = (int)a.n_group;
    float* probs = shared;
    uint32_t* keys = (uint32_t*)(probs + n);
    float* chosen = probs + 2 * n;
    for (int i = lane; i < n; i += 32) {
        const float x = a.logits[row * n + i];
        probs[i] = a.gating == SIGMOID ? sigmoid(x) : a.gating == SQRT_SOFTPLUS ? sqrtf(activation(ACT_SOFTPLUS, x, 0.0f)) : x;
    }
    if (a.gating == SOFTMAX) softmax(probs, n, lane);
    for (int i = lane; i < n; i += 32) keys[i] = sort_key(a.bias ? probs[i] + a.bias[i] : probs[i]);
    __syncwarp();
    if (n_group > 1) keep_groups(keys, probs, a.bias, n, n_group, (int)a.n_group_used, (uint32_t*)chosen, lane);
    uint64_t mine = best_of_lane(keys, n, lane);
    for (int j = 0; j < n_used; j++) {
        const int e = row_of ? row_of[row * n_used + j] : take_largest(keys, n, lane, mine) / (int)a.share;
        if (lane == j % 32) {  // the lane that reads it below
            a.ids[row * n_used + j] = e;
            chosen[j] = probs[e];
        }
    }
    if (a.gating == SOFTMAX_WEIGHT) softmax(chosen, n_used, lane);
    double total = 0;
    for (int j = lane; j < n_used; j += 32) total += chosen[j];
    total = warp_sum(total);
    const float factor = a.norm ? at_least((float)total, (float)a.sum_floor) : 1.0f;
    for (int j = lane; j < n_used; j += 32) {
        const float w = chosen[j] / factor;
        a.weights[row * n_used + j] = a.scale != 0 ? w * (float)a.scale : w;
    }
}
