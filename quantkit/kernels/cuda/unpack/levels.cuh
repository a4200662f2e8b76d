// The result of an unpacker: 32 values as int8 levels, four per int, with a scale and a minimum for each 16 of them.
//
//     value i = d[i / 16] * level i - m[i / 16]       (types without minimums neither set nor read m)
//
// with exactly the rounding of the reference (llama.cpp b11434 ggml-quants.c dequantize_row_*, strict f32). Levels may
// be those of the CPU's unpackers times a power of two, with scales divided by it: that is exact, and a field at the
// top of its byte becomes signed by flipping one bit. An unpacker is a struct of this form; `part` selects 32 values of
// the block at p, which is aligned to ALIGN bytes:
//
//     struct Q8_0 : traits::Q8_0 {
//         STATIC_INLINE void unpack(const uint8_t* p, int part, Levels& l);
//     };
//
// Its base holds the type's record in quantkit/kernels/formats.py (core/generated.py): values and BYTES of a BLOCK,
// bytes of a row HEADER, the bytes of a scale in it (ROW_SCALE, 0 if none), ALIGN, minimums (MINS), whether the two
// halves differ in scale (HALVES), and more. d and m exclude the row's scale (all.cuh: row_scale). No block has fewer
// than 32 values. Types with a grid of levels (GRID: its words) take its address as one more argument, so that a copy
// in shared memory can replace the table (all.cuh: load_grid, unpack_with).
//
// Blocks not aligned to 4 bytes are read in aligned words, with up to 3 bytes before and 4 after the block. In shared
// memory, leave that much room around it.
//
// Parts that share bytes: Q4_K, Q5_K 2 k and 2 k + 1; Q2_K, Q3_K, Q6_K, TQ2_0 4 k to 4 k + 3. A thread that unpacks
// them in sequence, for a k known to be the same, loads these once.
#pragma once
#include "core/device.cuh"
#include "unpack/traits.cuh"

#define STATIC_INLINE static __device__ __forceinline__

struct Levels {
    int q[8];
    float d[2], m[2];
};

// ---- loading words

// N words from any address.
template <int N> INLINE void load_words(const uint8_t* p, uint32_t (&out)[N]) {
    const uint32_t over = (uint32_t)(uint64_t)p & 3;
    const uint32_t* words = (const uint32_t*)(p - over);
    uint32_t low = words[0];
    for (int i = 0; i < N; i++) {
        const uint32_t high = words[i + 1];
        out[i] = __funnelshift_r(low, high, 8 * over);
        low = high;
    }
}

// N words from bit `bit` (-31 to 7) of the byte at any address; below 0, up to 7 bytes before it are read.
template <int N> INLINE void load_words_from_bit(const uint8_t* p, int bit, uint32_t (&out)[N]) {
    const int over = (int)((uint32_t)(uint64_t)p & 3), first = 8 * over + bit;
    const uint32_t* words = (const uint32_t*)(p - over + (first < 0 ? -4 : 0));
    uint32_t low = words[0];
    for (int i = 0; i < N; i++) {
        const uint32_t high = words[i + 1];
        out[i] = __funnelshift_r(low, high, (uint32_t)first);  // modulo 32
        low = high;
    }
}

// A half and N words after it, p aligned to 2 bytes.
template <int N> INLINE float load_half_and_words(const uint8_t* p, uint32_t (&out)[N]) {
    const uint32_t over = (uint32_t)(uint64_t)p & 2;
    const uint32_t* words = (const uint32_t*)(p - over);
    uint32_t low = words[0];
    const float half = half_to_float((uint16_t)(low >> 8 * over));
    for (int i = 0; i < N; i++) {
        const uint32_t high = words[i + 1];
        out[i] = __funnelshift_rc(low, high, 16 + 8 * over);
        low = high;
    }
    return half;
}

// N words (of the next two a multiple of 4; of 2) from an address aligned to 4 (16; 8) bytes.
template <int N> INLINE void load_words_by4(const uint8_t* p, uint32_t (&out)[N]) {
    for (int i = 0; i < N; i++) out[i] = load4(p + 4 * i);
}

template <int N> INLINE void load_words_by16(const uint8_t* p, uint32_t (&out)[N]) {
    for (int i = 0; i < N; i += 4) {
        const uint4 x = ((const uint4*)p)[i / 4];
        out[i] = x.x, out[i + 1] = x.y, out[i + 2] = x.z, out[i + 3] = x.w;
    }
}

template <int N> INLINE void load_words_by8(const uint8_t* p, uint32_t (&out)[N]) {
    for (int i = 0; i < N; i += 2) {
        const uint2 x = ((const uint2*)p)[i / 2];
        out[i] = x.x, out[i + 1] = x.y;
    }
}

INLINE float load_half(const uint8_t* p) { return half_to_float(load2(p)); }

INLINE void set_scales(Levels& l, float d) { l.d[0] = l.d[1] = d; }
INLINE void set_mins(Levels& l, float m) { l.m[0] = l.m[1] = m; }

// ---- four bytes at a time

#define ONES 0x01010101u
#define SIGNS 0x80808080u  // flipping these makes fields at the top of bytes signed

// Subtract the same small number from four bytes below 128: levels of signed types.
INLINE int below(uint32_t four, uint32_t by) { return (int)(((four | SIGNS) - by * ONES) ^ SIGNS); }

// Rotate left; by may be negative.
INLINE uint32_t rotate(uint32_t x, int by) { return __funnelshift_l(x, x, (uint32_t)by); }

// Four bits as bit `to` of four bytes; the other bits are not zero.
INLINE uint32_t spread_bits(uint32_t four, int to) { return four * (0x00204081u << to); }

// Select bytes of a and b by the nibbles of s: 0..3 of a, 4..7 of b; plus 8: the byte's sign in all bits. PTX prmt.
INLINE uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t s) {
#ifdef QUANTKIT_HOST
    return host_prmt(a, b, s);
#else
    uint32_t r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(s));
    return r;
#endif
}

// 255 where the top bit of a byte is set, else 0.
INLINE uint32_t sign_masks(uint32_t x) { return pick_bytes(x, 0, 0xba98); }

// Levels of four nibbles from a codebook of 16: bits 0..2 in `three`, the selection by bit 3 in `fourth`.
template <typename Codebook> INLINE uint32_t look_up_four(uint32_t three, uint32_t fourth) {
    return pick_bytes(pick_bytes(Codebook::A, Codebook::B, three), pick_bytes(Codebook::C, Codebook::D, three), fourth);
}

// The bytes at even, and at odd, places of a and b.
INLINE void take_turns(uint32_t a, uint32_t b, int& even, int& odd) {
    even = (int)pick_bytes(a, b, 0x6420);
    odd = (int)pick_bytes(a, b, 0x7531);
}

// Levels of the low, and of the high, nibbles of x's bytes.
template <typename Codebook> INLINE void look_up(uint32_t x, int& low, int& high) {
    const uint32_t three = x & 0x77777777u, fourth = 0x32103210u | (x >> 1 & 0x44444444u);
    const uint32_t a = look_up_four<Codebook>(three, fourth), b = look_up_four<Codebook>(three >> 16, fourth >> 16);
    take_turns(a, b, low, high);
}

// The same from a codebook of 8, a and b, for nibbles below 8.
INLINE void look_up_8(uint32_t a, uint32_t b, uint32_t x, int& low, int& high) {
    take_turns(pick_bytes(a, b, x), pick_bytes(a, b, x >> 16), low, high);
}

// Levels of four nibbles from parts K and K + 1 of a longer codebook; fifth: the selection by bit 4.
template <template <int> class Codebook, int K>
INLINE uint32_t look_up_four_of_32(uint32_t three, uint32_t fourth, uint32_t fifth) {
    return pick_bytes(look_up_four<Codebook<K>>(three, fourth), look_up_four<Codebook<K + 1>>(three, fourth), fifth);
}

// As look_up, from a codebook of 32; bit 2 of every nibble of `fifth`: bit 4 of an index.
template <template <int> class Codebook> INLINE void look_up_32(uint32_t x, uint32_t fifth, int& low, int& high) {
    const uint32_t three = x & 0x77777777u, fourth = 0x32103210u | (x >> 1 & 0x44444444u);
    fifth |= 0x32103210u;
    const uint32_t a = look_up_four_of_32<Codebook, 0>(three, fourth, fifth);
    const uint32_t b = look_up_four_of_32<Codebook, 0>(three >> 16, fourth >> 16, fifth >> 16);
    take_turns(a, b, low, high);
}

// Levels of four nibbles from a codebook of 64; sixth: the selection by bit 5.
template <template <int> class Codebook>
INLINE uint32_t look_up_four_of_64(uint32_t three, uint32_t fourth, uint32_t fifth, uint32_t sixth) {
    const uint32_t lower = look_up_four_of_32<Codebook, 0>(three, fourth, fifth);
    return pick_bytes(lower, look_up_four_of_32<Codebook, 2>(three, fourth, fifth), sixth);
}

// As look_up_32, from a codebook of 64; bit 2 of every nibble of `sixth`: bit 5 of an index.
template <template <int> class Codebook> INLINE void look_up_64(uint32_t x, uint32_t fifth, uint32_t sixth, int& low, int& high) {
    const uint32_t three = x & 0x77777777u, fourth = 0x32103210u | (x >> 1 & 0x44444444u);
    fifth |= 0x32103210u, sixth |= 0x32103210u;
    const uint32_t a = look_up_four_of_64<Codebook>(three, fourth, fifth, sixth);
    const uint32_t b = look_up_four_of_64<Codebook>(three >> 16, fourth >> 16, fifth >> 16, sixth >> 16);
    take_turns(a, b, low, high);
}
