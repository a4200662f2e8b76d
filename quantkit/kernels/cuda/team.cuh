// Which lanes of a block share which rows of weights, how their sums come together, and who writes them.
//
// LANES (8, 16, 32, 64 or 128) lanes are a team: they compute R rows. Below 32 several teams share a warp; above, the
// team's warps take slices of the rows and their sums are added in order. Macros: LANES.
#pragma once
#include "device.cuh"

#define INLINE_METHOD __device__ __forceinline__

const int WARPS = 4;                             // of a block
const int GROUP = LANES < 32 ? LANES : 32;       // lanes of a warp on one row
const int TEAMS = 32 / GROUP;                    // of a warp
const int SLICES = LANES / GROUP;                // warps of a team

INLINE int lane_id() { return threadIdx.x & 31; }

template <int R> struct Team {
    int64_t first, last;  // of the rows of this warp; the last row of the matrix
    int number, slice;    // of this team in the warp, of this warp in the team

    INLINE_METHOD explicit Team(int64_t n_out) {
        const int warp = threadIdx.x >> 5;
        number = lane_id() / GROUP;
        slice = warp % SLICES;
        first = ((int64_t)blockIdx.x * (WARPS / SLICES) + warp / SLICES) * (R * TEAMS);
        last = n_out - 1;
    }

    // The r-th row of a team of this warp; beyond the end the last one, once more.
    INLINE_METHOD int64_t row(int r, int team) const { return min(first + r * TEAMS + team, last); }
    INLINE_METHOD int64_t row(int r) const { return row(r, number); }
};

// Add the shares of all lanes and call store(row, c, sums of the matrices) for each row and column, in one lane.
template <int M, int R, int C, typename F>
INLINE void finish(const Team<R>& team, float (&sums)[M][R][C], F store) {
    __shared__ float shares[SLICES > 1 ? WARPS : 1][M][R * C];
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                for (int d = GROUP / 2; d; d >>= 1) sums[m][r][c] += __shfl_xor_sync(FULL, sums[m][r][c], d);
    const int lane = lane_id() % GROUP, warp = threadIdx.x >> 5;
    for (int base = 0; base < R * C; base += GROUP) {
        const int mine = base + lane;
        float v[M];
        for (int m = 0; m < M; m++) v[m] = 0;
        // All lanes have all sums: each takes one (registers have no index).
        for (int m = 0; m < M; m++)
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++)
                    if (r * C + c == mine) v[m] = sums[m][r][c];
        if (SLICES > 1) {
            if (mine < R * C)
                for (int m = 0; m < M; m++) shares[warp][m][mine] = v[m];
            __syncthreads();
            for (int s = 1; s < SLICES; s++)
                if (team.slice == 0 && mine < R * C)
                    for (int m = 0; m < M; m++) v[m] += shares[warp + s][m][mine];
        }
        const int64_t row = team.first + mine / C * TEAMS + team.number;
        if (team.slice == 0 && mine < R * C && row <= team.last) store(row, mine % C, v);
    }
}
