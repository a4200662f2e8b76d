// F32, F16, BF16: nothing to unpack; BLOCK is 1, and a value is read as it is.
#pragma once
#include "device.cuh"

struct F32 {
    static const int BLOCK = 1, BYTES = 4, ALIGN = 4;
    static __device__ __forceinline__ float value(const uint8_t* p) { return *(const float*)p; }
};

struct F16 {
    static const int BLOCK = 1, BYTES = 2, ALIGN = 2;
    static __device__ __forceinline__ float value(const uint8_t* p) { return half_to_float(load2(p)); }
};

struct BF16 {
    static const int BLOCK = 1, BYTES = 2, ALIGN = 2;
    static __device__ __forceinline__ float value(const uint8_t* p) { return bf16_to_float(load2(p)); }
};
