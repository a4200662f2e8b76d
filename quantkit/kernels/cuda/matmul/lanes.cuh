// Which lanes of a block share which rows of weights, how their sums are reduced, and which lane writes them.
//
// LANES (8, 16, 32, 64 or 128) lanes form a team that computes R rows. Below 32 several teams share a warp; above,
// each of the team's warps has a slice of the rows, and their sums are added in order. Macros: LANES.
//
// With TILES (tile_dots.cuh) a warp has ROWS * TEAMS rows of 8 lanes each, where a thread counts as two lanes of half
// as many rows, and the warps of a team are slices of 8 lanes: sums have the same order.
#pragma once
#include "core/device.cuh"

#define INLINE_METHOD __device__ __forceinline__

const int WARPS = 4;  // per block
#ifdef TILES
const int GROUP = 8;
#else
const int GROUP = LANES < 32 ? LANES : 32;  // lanes of a warp per row
#endif
const int TEAMS = 32 / GROUP;      // per warp
const int SLICES = LANES / GROUP;  // warps per team

template <int R> struct Team {
    int first, last;    // first row of this warp; last row of the matrix
    int warp, lane;     // in the block, in the warp
    int number, slice;  // of the team in the warp, of the warp in the team

    INLINE_METHOD explicit Team(int64_t n_out) {
#ifdef QUANTKIT_HOST
        lane = threadIdx.x & 31;
#else
        asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));  // volatile: read once, kept in a register
#endif
        warp = threadIdx.x >> 5;
        number = lane / GROUP;
        slice = warp % SLICES;
        first = (int)(blockIdx.x * (WARPS / SLICES) + warp / SLICES) * (R * TEAMS);
        last = (int)n_out - 1;
    }

    // Where the r-th row of a team of this warp begins in a matrix; beyond the end, the last row.
    INLINE_METHOD int64_t offset(int r, int team, int row_bytes) const {
        return (int64_t)((uint64_t)(uint32_t)min(first + r * TEAMS + team, last) * (uint32_t)row_bytes);
    }
    INLINE_METHOD int64_t offset(int r, int row_bytes) const { return offset(r, number, row_bytes); }
};

// Sum N values (a power of two) over 2 D lanes: each lane passes half of its values to the other half of the lanes. The
// sum of value i ends in lanes from i * 2 D / N; the order of additions does not depend on N.
template <int N, int D> INLINE float sum_and_spread(const float (&v)[N], int lane) {
    float halves[N > 1 ? N / 2 : 1];
    const bool upper = lane & D;
    if constexpr (N > 1) {
#pragma unroll
        for (int i = 0; i < N / 2; i++) {
            const float sent = upper ? v[i] : v[i + N / 2];
            halves[i] = (upper ? v[i + N / 2] : v[i]) + __shfl_xor_sync(FULL, sent, D);
        }
    } else {
        halves[0] = v[0] + __shfl_xor_sync(FULL, v[0], D);
    }
    if constexpr (D == 1) return halves[0];
    else return sum_and_spread<(N > 1 ? N / 2 : 1), D / 2>(halves, lane);
}

INLINE constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

#ifdef TILES

// As below: sums[m][2 i], sums[m][2 i + 1] are the shares of a thread's two lanes in row 8 i + lane / 4.
template <int M, int R, int C, typename F> INLINE void finish(const Team<R>& team, float (&sums)[M][R][C], F store) {
    __shared__ float shares[SLICES > 1 ? WARPS / 2 : 1][M][R][32];
    const int t = team.lane % 4;
#pragma unroll
    for (int half = SLICES / 2; half; half /= 2) {  // those of later slices go to earlier ones
        const int at = team.warp / SLICES * (SLICES / 2) + team.slice % half;
        if (team.slice / half == 1)
#pragma unroll
            for (int i = 0; i < M * R; i++) shares[at][i / R][i % R][team.lane] = sums[i / R][i % R][0];
        __syncthreads();
        if (team.slice < half)
#pragma unroll
            for (int i = 0; i < M * R; i++) sums[i / R][i % R][0] += shares[at][i / R][i % R][team.lane];
        __syncthreads();
    }
    if (team.slice) return;
#pragma unroll
    for (int i = 0; i < R / 2; i++) {
        float v[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            v[m] = sums[m][2 * i][0] + sums[m][2 * i + 1][0];
            v[m] += __shfl_xor_sync(FULL, v[m], 2);
            v[m] += __shfl_xor_sync(FULL, v[m], 1);
        }
        const int row = team.first + 8 * i + team.lane / 4;
        if (t == i % 4 && row <= team.last) store(row, 0, v);
    }
}

#else

// Sum the shares of all lanes and call store(row, c, sums of the matrices) for each row and column, in one lane.
template <int M, int R, int C, typename F> INLINE void finish(const Team<R>& team, const float (&sums)[M][R][C], F store) {
    const int ALL = power_of_two(R * C), N = ALL < GROUP ? ALL : GROUP;
    __shared__ float shares[SLICES > 1 ? WARPS : 1][M][ALL];
    static_assert(SLICES == 1 || ALL <= GROUP, "a team of several warps has one round");
    const int lane = team.lane % GROUP;
#pragma unroll
    for (int base = 0; base < R * C; base += N) {
        float v[M];
#pragma unroll
        for (int m = 0; m < M; m++) {
            float some[N];
#pragma unroll
            for (int i = 0; i < N; i++) some[i] = base + i < R * C ? sums[m][(base + i) / C][(base + i) % C] : 0.0f;
            v[m] = sum_and_spread<N, GROUP / 2>(some, team.lane);
        }
        const int number = base + lane / (GROUP / N);
        if (SLICES > 1) {
#pragma unroll
            for (int m = 0; m < M; m++) shares[team.warp][m][number] = v[m];
            __syncthreads();
            if (team.slice) return;  // whole warps return
#pragma unroll
            for (int s = 1; s < SLICES; s++)
#pragma unroll
                for (int m = 0; m < M; m++) v[m] += shares[team.warp + s][m][number];
        }
        const int row = team.first + number / C * TEAMS + team.number;
        if (lane % (GROUP / N) == 0 && number < R * C && row <= team.last) store(row, number % C, v);
    }
}
#endif
