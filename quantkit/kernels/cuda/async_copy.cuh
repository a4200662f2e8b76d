// Copies from global to shared memory that do not go through registers and are waited for in groups: cp.async of sm_80
// and later. Elsewhere the copy is made at once, and there is nothing to wait for. A thread waits for its own copies;
// what other threads copied is seen after a barrier that follows.
#pragma once
#include "device.cuh"

#if !defined(QUANTKIT_HOST) && __CUDA_ARCH__ >= 800
#define ASYNC_COPY 1
#endif

// 16 bytes, both addresses aligned to 16.
INLINE void copy16(uint8_t* to, const uint8_t* from) {
#ifdef ASYNC_COPY
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
                 : "memory");
#else
    *(uint4*)to = *(const uint4*)from;
#endif
}

// What this thread has copied since the last call is a group, be it empty.
INLINE void end_group() {
#ifdef ASYNC_COPY
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until all but the last N groups are there.
template <int N> INLINE void wait_groups() {
#ifdef ASYNC_COPY
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}
