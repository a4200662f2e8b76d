// Matrices packed as sweeps read them (kernels/cpu/feedback/tiles.py): strips of four columns, [n / 4][n][4].
#include "core/device.cuh"

// out = a matrix of doubles, packed, as floats; transposed: its transpose, with rows `apart` elements apart. diagonal:
// replaces its diagonal, or 0. A thread has one row of a strip; blocks are (rows, strips).
struct pack_columns_args {
    const double *matrix, *diagonal;
    float* out;
    int64_t n, apart, transposed;
};

KERNEL(pack_columns, 256) {
    const int64_t row = 256 * (int64_t)blockIdx.x + threadIdx.x, first = 4 * (int64_t)blockIdx.y;
    if (row >= a.n) return;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t column = first + i;
        double x = a.transposed ? a.matrix[column * a.apart + row] : a.matrix[row * a.apart + column];
        if (a.diagonal && column == row) x = a.diagonal[row];
        v[i] = (float)x;
    }
    *(float4*)(a.out + 4 * (a.n * blockIdx.y + row)) = make_float4(v[0], v[1], v[2], v[3]);
}

// From r, upper triangular, with r^T r = a matrix whose rows and columns are in reverse order, U and D of that matrix
// in its own order: out, packed, is U on and above the diagonal, each column divided by its diagonal element; pivots
// are the squares of these. Blocks are (rows, strips).
struct pack_upper_args {
    const double* r;
    float *out, *pivots;
    int64_t n;
};

KERNEL(pack_upper, 256) {
    const int64_t row = 256 * (int64_t)blockIdx.x + threadIdx.x, first = 4 * (int64_t)blockIdx.y;
    if (row >= a.n) return;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int64_t of = a.n - 1 - (first + i);
        const double root = a.r[of * a.n + of];
        v[i] = row <= first + i ? (float)(a.r[of * a.n + a.n - 1 - row] / root) : 0.0f;
        if (row == first + i) a.pivots[row] = (float)(root * root);
    }
    *(float4*)(a.out + 4 * (a.n * blockIdx.y + row)) = make_float4(v[0], v[1], v[2], v[3]);
}

// out[i] = the diagonal of a matrix.
struct diagonal_args {
    const double* matrix;
    double* out;
    int64_t n;
};

KERNEL(diagonal, 256) {
    const int64_t i = 256 * (int64_t)blockIdx.x + threadIdx.x;
    if (i < a.n) a.out[i] = a.matrix[i * a.n + i];
}

// out[g][i][j] = matrix[order[size g + i]][order[size g + j]]: the diagonal blocks of groups of columns.
struct blocks_args {
    const double* matrix;
    const int32_t* order;
    double* out;
    int64_t n, size;
};

KERNEL(blocks, 256) {
    const int64_t i = 256 * (int64_t)blockIdx.x + threadIdx.x, row = i / a.size;
    if (row >= a.n) return;
    a.out[i] = a.matrix[a.order[row] * a.n + a.order[row / a.size * a.size + i % a.size]];
}

// out[i][j] = (float)matrix[j][first + i]; rows of out are `n` long, those of the matrix `apart` elements apart.
// Blocks are (columns, rows).
struct to_float_args {
    const double* matrix;
    float* out;
    int64_t n, rows, first, apart;
};

KERNEL(to_float, 256) {
    const int64_t column = 256 * (int64_t)blockIdx.x + threadIdx.x, row = blockIdx.y;
    if (column < a.n && row < a.rows) a.out[row * a.n + column] = (float)a.matrix[column * a.apart + a.first + row];
}
