// Lets the last of several blocks process the output of all of them, which saves a launch.
#pragma once
#include "core/device.cuh"

// True in all threads of the last of n blocks to arrive. The counter is 0 before the first and after the last.
INLINE bool is_last_of(int* counter, int n) {
    __shared__ int earlier;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) earlier = atomicAdd(counter, 1);
    __syncthreads();
    if (earlier != n - 1) return false;
    if (threadIdx.x == 0) *counter = 0;
    __threadfence();
    return true;
}
