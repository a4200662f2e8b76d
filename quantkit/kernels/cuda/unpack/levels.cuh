// What an unpacker gives: 32 values as int8 levels, four to an int, with a scale and a minimum for each 16 of them.
//
//     value i = d[i / 16] * level i - m[i / 16]       (types without minimums: m is never set nor read)
//
// with exactly the roundings of the reference (llama.cpp b11434 ggml-quants.c dequantize_row_*, strict f32). An
// unpacker is a struct of this form; `part` is which 32 values of the block at p, p is aligned to ALIGN bytes:
//
//     struct Q8_0 {
//         static const int BLOCK = 32, BYTES = 34, ALIGN = 2;      // values and bytes of a block
//         static const bool MINS = false, HALVES = false;          // minimums; the two halves differ in scale
//         INLINE void unpack(const uint8_t* p, int part, Levels& l);
//     };
//
// (inside a struct: STATIC_INLINE). A block of fewer than 32 values (NVFP4's has 64, none has fewer) does not exist.
#pragma once
#include "device.cuh"

#define STATIC_INLINE static __device__ __forceinline__

struct Levels {
    int q[8];
    float d[2], m[2];
};

// Four nibbles of x, the low ones, as four bytes.
INLINE int low_nibbles(uint32_t x) { return (int)(x & 0x0f0f0f0fu); }
INLINE int high_nibbles(uint32_t x) { return (int)(x >> 4 & 0x0f0f0f0fu); }

// Subtract the same small number from four bytes: levels of signed types.
INLINE int below(int four, uint32_t by) { return (int)__vsubss4((uint32_t)four, by * 0x01010101u); }

// Four bits, from bit `first` of h on, moved to bit `to` of four bytes.
INLINE uint32_t spread_bits(uint32_t h, int first, int to) {
    const uint32_t b = h >> first & 15;
    return ((b & 1) | (b & 2) << 7 | (b & 4) << 14 | (b & 8) << 21) << to;
}
