// The level nearest to a value, and sweeps over the columns of rows that choose levels with error feedback: the CPU's
// sweeps.py has the formulas.
//
// Macro: EVEN, 1 if levels are equally spaced.
#pragma once
#include "feedback/tiles.cuh"

// Arguments of kernels over tiles, tile after tile. u, h: packed; x, levels, v, e: [n][ROWS]; scale, minimum, inverse,
// m, shift and factor_index: [n / span][ROWS], factor_index: of the factor in `factors`; d, dmin: [n / span /
// per_d][ROWS]; loss: [ROWS]. m and dmin are 0 if there are no minimums. scale_kind, min_kind: what is fitted
// (refine.cuh). scratch: see refine.cu.
struct tile_args {
    const int32_t* columns;
    const float *u, *pivots, *h, *per_diagonal, *codebook, *factors;
    float *x, *levels, *v, *e, *scale, *minimum, *inverse, *m, *shift, *d, *dmin, *scratch;
    int32_t* factor_index;
    double* loss;
    int64_t rows, n, span, per_d, scale_kind, min_kind, max_m, factor_count;
};

// Levels, ascending: if equally spaced, the first, their distance and 1 over it, their number; otherwise the lower
// bound of each except the first, then all levels; `half`: half their number, rounded up to a power of two.
const int MOST_LEVELS = 64;
struct Codebook {
    float first, apart, inverse, last;
    int half, unused[3];
    float ends[MOST_LEVELS], levels[MOST_LEVELS];
};
static_assert(sizeof(Codebook) == 4 * (8 + 2 * MOST_LEVELS), "sweeps.py packs it");

// Copies a codebook to shared memory, where it is valid after a barrier.
INLINE void read_codebook(Codebook& to, const float* from) {
    for (int i = threadIdx.x; i < (int)(sizeof(Codebook) / 4); i += blockDim.x) ((float*)&to)[i] = from[i];
}

// The level nearest to y.
INLINE float nearest(float y, const Codebook& codebook) {
#if EVEN
    float rank = rintf((y - codebook.first) * codebook.inverse);
    rank = rank > 0.0f ? rank : 0.0f;
    rank = rank < codebook.last ? rank : codebook.last;
    return __fmaf_rn(rank, codebook.apart, codebook.first);
#else
    int rank = 0;
    for (int half = codebook.half; half; half >>= 1) rank += y > codebook.ends[rank + half - 1] ? half : 0;
    return codebook.levels[rank];
#endif
}

struct Chosen {
    float level, value;
};

// The level nearest to x, and its value.
INLINE Chosen choose(float x, float scale, float minimum, float inverse, const Codebook& codebook) {
    const float level = nearest((x + minimum) * inverse, codebook);
    return {level, scale * level - minimum};
}

// The four elements at row k, columns j to j + 3, of strips in shared memory.
INLINE float4 four_of(const float* a, int apart, int k, int j) { return *(const float4*)(a + j / STRIP * apart + STRIP * k); }
INLINE float one_of(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
