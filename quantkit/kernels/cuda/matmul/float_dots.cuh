// Rows of F32, F16 or BF16 weights times a few rows of f32 activations. Macros: TYPE, LANES (32 and more).
//
// Lanes read consecutive 16-byte words, several loads at once; rows not aligned to 16 bytes, and remainders of less
// than 16 bytes, are read value by value.
#pragma once
#include "matmul/lanes.cuh"
#include "unpack/floats.cuh"

// The values of four bytes.
INLINE void unpack_word(F32, uint32_t word, float* v) { v[0] = __uint_as_float(word); }
INLINE void unpack_word(F16, uint32_t word, float* v) {
    v[0] = half_to_float((uint16_t)word);
    v[1] = half_to_float((uint16_t)(word >> 16));
}
INLINE void unpack_word(BF16, uint32_t word, float* v) {
    v[0] = __uint_as_float(word << 16);
    v[1] = __uint_as_float(word & 0xffff0000u);
}

const int VALUES = 16 / TYPE::BYTES;  // of 16 bytes

// sums += the products of 16 bytes of each row with their activations.
template <int M, int R, int C>
INLINE void add_products(const uint4 (&words)[M][R], const uint8_t* x, int64_t x_stride, float (&sums)[M][R][C]) {
    float weights[M][R][VALUES];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++) {
            float* v = weights[m][r];
            unpack_word(TYPE(), words[m][r].x, v);
            unpack_word(TYPE(), words[m][r].y, v + VALUES / 4);
            unpack_word(TYPE(), words[m][r].z, v + VALUES / 2);
            unpack_word(TYPE(), words[m][r].w, v + VALUES / 4 * 3);
        }
#pragma unroll
    for (int c = 0; c < C; c++)
#pragma unroll
        for (int i = 0; i < VALUES; i += 4) {
            const float4 v = *(const float4*)(x + c * x_stride + 4 * i);
#pragma unroll
            for (int m = 0; m < M; m++)
#pragma unroll
                for (int r = 0; r < R; r++) {
                    float sum = fmaf(weights[m][r][i], v.x, sums[m][r][c]);
                    sum = fmaf(weights[m][r][i + 1], v.y, sum);
                    sum = fmaf(weights[m][r][i + 2], v.z, sum);
                    sums[m][r][c] = fmaf(weights[m][r][i + 3], v.w, sum);
                }
        }
}

// words[i] = the 16 bytes of each row that belong to this lane in the i-th of COUNT rounds from `part` on.
template <int COUNT, int N, int M, int R>
INLINE void load_words(uint4 (&words)[N][M][R], const uint8_t* const (&rows)[M][R], int part) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int r = 0; r < R; r++) words[i][m][r] = *(const uint4*)(rows[m][r] + 16 * (int64_t)(part + i * LANES));
}

// sums[m][r][c] = this lane's share of the product of the team's row r of matrix m and row c of x.
template <int M, int R, int C>
INLINE void multiply(const Team<R>& team, const uint8_t* const (&w)[M], int row_bytes, const uint8_t* x, int64_t x_stride, int n_in,
                     float (&sums)[M][R][C]) {
    const int AT_ONCE = C <= 2 ? 4 : 2;  // loads per row
    const uint8_t* rows[M][R];
    int64_t bits = row_bytes | x_stride | (int64_t)x;
#pragma unroll
    for (int m = 0; m < M; m++) {
        bits |= (int64_t)w[m];
#pragma unroll
        for (int r = 0; r < R; r++) rows[m][r] = w[m] + team.offset(r, row_bytes);
    }
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int c = 0; c < C; c++) sums[m][r][c] = 0;
    const int begin = team.slice * 32 + team.lane;
    if ((bits & 15) || n_in % VALUES) {
        wait_for_previous();
        for (int i = begin; i < n_in; i += LANES)
#pragma unroll
            for (int c = 0; c < C; c++) {
                const float v = *(const float*)(x + c * x_stride + 4 * (int64_t)i);
#pragma unroll
                for (int m = 0; m < M; m++)
#pragma unroll
                    for (int r = 0; r < R; r++)
                        sums[m][r][c] = fmaf(TYPE::value(rows[m][r] + (int64_t)TYPE::BYTES * i), v, sums[m][r][c]);
            }
        return;
    }
    const int parts = n_in / VALUES;
    int part = begin;
    uint4 words[AT_ONCE][M][R];
    bool more = part + (AT_ONCE - 1) * LANES < parts;
    if (more) load_words<AT_ONCE>(words, rows, part);
    wait_for_previous();
#pragma unroll 1
    while (more) {
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) add_products(words[i], x + 4 * VALUES * (int64_t)(part + i * LANES), x_stride, sums);
        part += AT_ONCE * LANES;
        more = part + (AT_ONCE - 1) * LANES < parts;
        if (more) load_words<AT_ONCE>(words, rows, part);
    }
    for (; part < parts; part += LANES) {
        load_words<1>(words, rows, part);
        add_products(words[0], x + 4 * VALUES * (int64_t)part, x_stride, sums);
    }
}
