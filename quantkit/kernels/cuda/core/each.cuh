// Loops of elementwise kernels: four columns at a time where sizes allow, one otherwise.
//
//     each_of(total, [&](int64_t i, auto one) { using V = decltype(one); put(out + i, get<V>(x + i)); });
//
// The function is compiled for V float4 and for V float. Values begin at a multiple of 16 bytes.
#pragma once
#include "core/device.cuh"

// Elements of a block: 256 threads, four each (elementwise.py PART).
#define PART 1024

template <typename V> INLINE V get(const float* p) { return *(const V*)p; }
template <typename V> INLINE void put(float* p, V v) { *(V*)p = v; }

template <typename F> INLINE float apply(F f, float x) { return f(x); }
template <typename F> INLINE float4 apply(F f, float4 x) { return make_float4(f(x.x), f(x.y), f(x.z), f(x.w)); }
template <typename F> INLINE float apply(F f, float x, float y) { return f(x, y); }
template <typename F> INLINE float4 apply(F f, float4 x, float4 y) {
    return make_float4(f(x.x, y.x), f(x.y, y.y), f(x.z, y.z), f(x.w, y.w));
}

INLINE float plus(float x, float y) { return x + y; }
INLINE float4 plus(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
INLINE float times(float x, float y) { return x * y; }
INLINE float4 times(float4 x, float4 y) { return make_float4(x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w); }
INLINE float4 times(float4 x, float y) { return make_float4(x.x * y, x.y * y, x.z * y, x.w * y); }

// Visits this block's elements of `total`: PART of them from PART * blockIdx.x.
template <typename F> INLINE void each_of(int64_t total, F f) {
    int64_t i = PART * (int64_t)blockIdx.x + 4 * threadIdx.x;
    if (i + 4 <= total) f(i, float4{});
    else
        for (; i < total; i++) f(i, float{});
}

// Visits this block's columns of a row of `width`: PART of them from PART * blockIdx.y. by_four: for a column that is
// a multiple of four, all reads and writes are 16-byte aligned and contiguous with the next three columns.
template <typename F> INLINE void each_column(int64_t width, bool by_four, F f) {
    const int64_t first = PART * (int64_t)blockIdx.y;
    if (by_four) {
        const int64_t c = first + 4 * threadIdx.x;
        if (c < width) f((uint32_t)c, float4{});
    } else {
        for (int64_t c = first + threadIdx.x; c < width && c < first + PART; c += 256) f((uint32_t)c, float{});
    }
}
