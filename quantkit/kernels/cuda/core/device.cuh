// Base of all kernels: integer types, f16, warp reductions, and the declaration of a kernel.
//
//     struct scale_args { const float* x; float* out; int64_t rows, width; double by; };
//     KERNEL(scale, 256) { ... a.x ... }        // 256 threads a block; its arguments are the members of a
//
// Members are 8 bytes each (pointers, int64_t, double), in the order kernel.py packs them. Sources include only each
// other: NVRTC has no system headers. The tests' host shim (tests/shim) compiles the same text as C++.
#pragma once

#ifdef QUANTKIT_HOST
#include "host.h"
#else
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;

// The prefix avoids clashes with CUDA's own names, such as norm. A file that needs several blocks per multiprocessor
// at once, and so fewer registers per thread, defines BLOCKS_AT_ONCE before including this one.
#ifndef BLOCKS_AT_ONCE
#define BLOCKS_AT_ONCE 1
#endif
#define DECLARED(name, threads) extern "C" __global__ void __launch_bounds__(threads, BLOCKS_AT_ONCE) quantkit_##name
#if __CUDA_ARCH__ < 900
#define KERNEL(name, threads) DECLARED(name, threads)(const name##_args a)
#define KERNEL_THAT_WAITS(name, threads) KERNEL(name, threads)
__device__ __forceinline__ void wait_for_previous() {}
#else
// With programmatic dependent launch (device.py) a kernel's blocks may start before the previous launch is done. Every
// thread of every kernel waits for that launch, so a finished launch implies that all earlier ones are finished.
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Lets the next launch begin once all blocks of this one have reached this point.
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#define KERNEL(name, threads)                                                 \
    static __device__ __forceinline__ void body_##name(const name##_args& a); \
    DECLARED(name, threads)(const __grid_constant__ name##_args a) {          \
        let_next_begin();                                                     \
        wait_for_previous();                                                  \
        body_##name(a);                                                       \
    }                                                                         \
    static __device__ __forceinline__ void body_##name(const name##_args& a)
// A kernel whose body itself waits for the previous launch, after prefetching data that no launch writes: weights.
#define KERNEL_THAT_WAITS(name, threads)                                      \
    static __device__ __forceinline__ void body_##name(const name##_args& a); \
    DECLARED(name, threads)(const __grid_constant__ name##_args a) {          \
        let_next_begin();                                                     \
        body_##name(a);                                                       \
    }                                                                         \
    static __device__ __forceinline__ void body_##name(const name##_args& a)
#endif

// Shared memory sized at launch, 16-byte aligned.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) uint8_t name[]

__device__ __forceinline__ float half_to_float(uint16_t h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ uint16_t float_to_half(float f) {
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
    return h;
}

// Two of them packed, x in the low half.
__device__ __forceinline__ uint32_t to_halves(float x, float y) {
#if __CUDA_ARCH__ >= 800
    uint32_t two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
#else
    return float_to_half(x) | (uint32_t)float_to_half(y) << 16;
#endif
}

// 2^x within 2 ulp; 0 below 2^-126.
__device__ __forceinline__ float exp2_near(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

#define INLINE static __device__ __forceinline__

#define FULL 0xffffffffu  // all lanes of a warp

INLINE float bf16_to_float(uint16_t b) { return __uint_as_float((uint32_t)b << 16); }

// Rounds to nearest even; NaN becomes quiet (ggml_fp32_to_bf16).
INLINE uint16_t float_to_bf16(float f) {
    const uint32_t u = __float_as_uint(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 64);
    return (uint16_t)((u + (0x7fffu + ((u >> 16) & 1))) >> 16);
}

INLINE int lane_id() { return (int)threadIdx.x & 31; }

// Sums and maxima over a warp by butterflies: all lanes get the same value.
template <typename T> INLINE T warp_sum(T v) {
    for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(FULL, v, d);
    return v;
}

INLINE float warp_max(float v) {
    for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL, v, d));
    return v;
}

// Sum over a block of up to 1024 threads (a multiple of 32), returned in every thread. part: 32 shared values.
template <typename T> INLINE T block_sum(T v, T* part) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    v = warp_sum(v);
    __syncthreads();  // part may still be read
    if (lane == 0) part[warp] = v;
    __syncthreads();
    T total = 0;
    for (int i = 0; i < warps; i++) total += part[i];
    return total;
}

// The batch, in device memory: int64 words, which Python writes as one array.
struct Batch {
    int64_t n_tokens, n_outputs;
    const int32_t *tokens, *positions, *sequences, *outputs;  // outputs: rows that need logits
    int64_t n_ctx;  // cells per sequence in a cache: a token's cell is sequence * n_ctx + position
};

INLINE int64_t cell_of(const Batch* b, int64_t token) { return b->sequences[token] * b->n_ctx + b->positions[token]; }

// Little-endian loads of data aligned to two (four) bytes.
INLINE uint16_t load2(const uint8_t* p) { return *(const uint16_t*)p; }
INLINE uint32_t load4(const uint8_t* p) { return *(const uint32_t*)p; }
INLINE uint32_t load4_by2(const uint8_t* p) { return load2(p) | (uint32_t)load2(p + 2) << 16; }
