// A type's integers, read from and written to bytes: levels.py gives their bit positions. Bit i of byte b is 8 b + i.
#pragma once
#include "core/device.cuh"

// The integer whose bits are at `where`, the lowest first.
INLINE uint32_t field_of(const uint8_t* bytes, const int32_t* where, int bits) {
    uint32_t value = 0;
    for (int i = 0; i < bits; i++) value |= (uint32_t)(bytes[where[i] >> 3] >> (where[i] & 7) & 1) << i;
    return value;
}

// The float with these 16 or 32 bits, and the inverse.
INLINE float float_of(uint32_t bits, int width) { return width == 16 ? half_to_float((uint16_t)bits) : __uint_as_float(bits); }
INLINE uint32_t bits_of(float f, int width) { return width == 16 ? float_to_half(f) : __float_as_uint(f); }

// The source of a bit: kind << 24 | item << 8 | bit (tables.py). Items are numbered within a block.
enum { NOTHING, LEVEL, FACTOR, MINIMUM, SHIFT, D, DMIN };
struct Source {
    int kind, item, bit;
    __device__ __forceinline__ explicit Source(uint32_t packed)
        : kind((int)(packed >> 24)), item((int)(packed >> 8 & 0xffff)), bit((int)(packed & 0xff)) {}
};
