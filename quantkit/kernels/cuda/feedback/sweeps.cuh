// Levels next to a value, and sweeps over the columns of rows that choose them with error feedback: sweeps.py of the CPU
// says what is computed.
//
// Macro: EVEN, 1 if levels are equally far from each other.
#pragma once
#include "feedback/tiles.cuh"

// What kernels over tiles take, tile after tile. u, h: packed; x, levels, v, e: [n][ROWS]; scale, low, inverse, m, raised
// and place: [n / span][ROWS], place: of the factor in `factors`; d, dmin: [n / span / per_d][ROWS]; loss: [ROWS]. m and
// dmin are 0 if there are no minimums. kind, minimum: what is fitted (refine.cuh). scratch: see refine.cu.
struct tile_args {
    const int32_t* columns;
    const float *u, *pivots, *h, *per_diagonal, *book, *factors;
    float *x, *levels, *v, *e, *scale, *low, *inverse, *m, *raised, *d, *dmin, *scratch;
    int32_t* place;
    double* loss;
    int64_t rows, n, span, per_d, kind, minimum, most, factor_count;
};

// Levels, ascending: the first, their distance and 1 over it where that is one, how many; otherwise where each but the
// first begins, then all; `half`: half of them, rounded up to a power of two.
const int MOST_LEVELS = 64;
struct Book {
    float first, apart, inverse, last;
    int half, unused[3];
    float ends[MOST_LEVELS], levels[MOST_LEVELS];
};
static_assert(sizeof(Book) == 4 * (8 + 2 * MOST_LEVELS), "sweeps.py packs it");

// Copies a book to shared memory; it is there after a barrier.
INLINE void read_book(Book& to, const float* from) {
    for (int i = threadIdx.x; i < (int)(sizeof(Book) / 4); i += blockDim.x) ((float*)&to)[i] = from[i];
}

// The level next to y.
INLINE float nearest(float y, const Book& book) {
#if EVEN
    float rank = rintf((y - book.first) * book.inverse);
    rank = rank > 0.0f ? rank : 0.0f;
    rank = rank < book.last ? rank : book.last;
    return __fmaf_rn(rank, book.apart, book.first);
#else
    int rank = 0;
    for (int half = book.half; half; half >>= 1) rank += y > book.ends[rank + half - 1] ? half : 0;
    return book.levels[rank];
#endif
}

struct Chosen {
    float level, value;
};

// The level next to x, and its value.
INLINE Chosen choose(float x, float scale, float low, float inverse, const Book& book) {
    const float level = nearest((x + low) * inverse, book);
    return {level, scale * level - low};
}

// The four elements at row k, columns j to j + 3, of strips in shared memory.
INLINE float4 four_of(const float* a, int apart, int k, int j) { return *(const float4*)(a + j / STRIP * apart + STRIP * k); }
INLINE float one_of(const float4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
