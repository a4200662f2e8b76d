// Tiles of sums of outer products: a block of 16 x 16 threads has 64 x 64 sums, a thread 4 x 4 of them, 16 apart.
#pragma once
#include "core/device.cuh"

INLINE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
INLINE double fused(double a, double b, double c) { return fma(a, b, c); }

// sums[i][j] += left[k][y + 16 i] right[k][x + 16 j], for k < count in their order, one FMA each.
template <class V, int L, int R> INLINE void add_outer(V (&sums)[4][4], V (*left)[L], V (*right)[R], int count, int x, int y) {
    for (int k = 0; k < count; k++) {
        V row[4], column[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            row[i] = left[k][y + 16 * i];
            column[i] = right[k][x + 16 * i];
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] = fused(row[i], column[j], sums[i][j]);
    }
}

// Initialize a thread's sums from c, rows of `width` values, in rows and columns before the end; 0 beyond. Those of
// the first thread begin at (top, side).
INLINE void get_sums(double (&sums)[4][4], const double* c, int64_t width, int64_t top, int64_t side, int64_t end_row,
                     int64_t end_column) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = top + 16 * i, column = side + 16 * j;
            sums[i][j] = row < end_row && column < end_column ? c[row * width + column] : 0.0;
        }
}

// Store them to c.
INLINE void put_sums(const double (&sums)[4][4], double* c, int64_t width, int64_t top, int64_t side, int64_t end_row,
                     int64_t end_column) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int64_t row = top + 16 * i, column = side + 16 * j;
            if (row < end_row && column < end_column) c[row * width + column] = sums[i][j];
        }
}
