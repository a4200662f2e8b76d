// Asynchronous copies from global to shared memory, waited for in groups: cp.async on sm_80 and later, elsewhere plain
// synchronous copies. A thread waits for its own copies only; those of other threads are visible after a barrier.
#pragma once
#include "core/device.cuh"

#ifdef QUANTKIT_HOST
typedef uint8_t* SharedAddress;
INLINE SharedAddress shared_address(uint8_t* p) { return p; }
#else
typedef uint32_t SharedAddress;
INLINE SharedAddress shared_address(uint8_t* p) {
    SharedAddress address;  // volatile: keep it in a register instead of recomputing it at each use
    asm volatile("mov.u32 %0, %1;" : "=r"(address) : "r"((uint32_t)__cvta_generic_to_shared(p)));
    return address;
}
#endif

// 16 bytes, both addresses aligned to 16.
INLINE void copy16(SharedAddress to, const uint8_t* from) {
#if defined(QUANTKIT_HOST)
    host_copy_async(to, from, 16);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
    const uint4 v = *(const uint4*)from;
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

// The same under a condition: a predicate, because the assembler would move loads before a copy inside a branch.
INLINE void copy16_if(bool is_valid, SharedAddress to, const uint8_t* from) {
#if !defined(QUANTKIT_HOST) && __CUDA_ARCH__ >= 800
    asm volatile(
        "{ .reg .pred %%is_valid; setp.ne.s32 %%is_valid, %0, 0; @%%is_valid cp.async.cg.shared.global [%1], [%2], 16; }" ::"r"(
            (int)is_valid),
        "r"(to), "l"(from)
        : "memory");
#else
    if (is_valid) copy16(to, from);
#endif
}

// BYTES bytes (4, 8 or 16; both addresses aligned to that), through generic addresses.
template <int BYTES> INLINE void copy_async(void* to, const void* from) {
#if defined(QUANTKIT_HOST)
    host_copy_async(to, from, BYTES);
#elif __CUDA_ARCH__ >= 800
    const uint32_t address = (uint32_t)__cvta_generic_to_shared(to);
    if (BYTES == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(BYTES) : "memory");
#else
    if (BYTES == 16) *(int4*)to = *(const int4*)from;
    else if (BYTES == 8) *(int2*)to = *(const int2*)from;
    else *(int*)to = *(const int*)from;
#endif
}

// Close a group, possibly empty, of this thread's copies since the last call.
INLINE void end_group() {
#if defined(QUANTKIT_HOST)
    host_end_group();
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait for all but the last N groups.
template <int N> INLINE void wait_groups() {
#if defined(QUANTKIT_HOST)
    host_wait_groups(N);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

// Wait for all of this thread's copies.
INLINE void copy_wait() {
#if defined(QUANTKIT_HOST)
    host_end_group();
    host_wait_groups(0);
#elif __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}
