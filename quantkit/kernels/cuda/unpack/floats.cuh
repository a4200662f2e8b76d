// F32, F16, BF16: nothing to unpack; BLOCK is 1, values are read directly.
#pragma once
#include "core/device.cuh"
#include "unpack/traits.cuh"

struct F32 : traits::F32 {
    static __device__ __forceinline__ float value(const uint8_t* p) { return *(const float*)p; }
};

struct F16 : traits::F16 {
    static __device__ __forceinline__ float value(const uint8_t* p) { return half_to_float(load2(p)); }
};

struct BF16 : traits::BF16 {
    static __device__ __forceinline__ float value(const uint8_t* p) { return bf16_to_float(load2(p)); }
};
