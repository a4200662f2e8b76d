// Tensor cores: thin names for the instructions of mma.sync.
//
// A warp multiplies a (16 rows) with b (8 columns) over 32 bytes of both, rows and columns 32 bytes long: 32 int8, or
// 16 values of 16 bits. For all of them lane l holds, with g = l / 4 and t = l % 4,
//
//     a[0] bytes 4t.. of row g     a[1] of row g + 8     a[2] bytes 16 + 4t.. of row g     a[3] of row g + 8
//     b[0] bytes 4t.. of column g  b[1] bytes 16 + 4t.. of it
//     c[0], c[1]  row g, columns 2t and 2t + 1           c[2], c[3]  row g + 8
//
// which is how load_a and load_b (ldmatrix) give them. sm_75 has smaller instructions: two or four of them make one.
// On the host (tests/shim/host.h) the primitives are emulated, what is made of them here is the same.
#pragma once
#include "async_copy.cuh"

#ifdef QUANTKIT_HOST
INLINE void ldmatrix4_at(uint32_t r[4], SharedAddress row) { ldmatrix4(r, row); }
INLINE void ldmatrix2_at(uint32_t r[2], SharedAddress row) { ldmatrix2(r, row); }
#else

// The same address, but the compiler may not take it apart again: what follows is at constant distances from it.
template <typename T> INLINE T* fixed(T* p) {
    asm("" : "+l"(p));
    return p;
}

// The same value, in a register: not known to the compiler as a constant.
INLINE uint32_t fixed(uint32_t v) {
    asm("" : "+r"(v));
    return v;
}

// threadIdx.x and blockIdx.x, read where they stand: what is made of them in a loop, or before and after it, is made
// there, and not kept in registers meanwhile.
INLINE unsigned thread_here() {
    unsigned t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

INLINE unsigned block_here() {
    unsigned t;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(t));
    return t;
}

// ---- primitives

// Four 8 x 16-byte matrices; lane l gives the address of row l % 8 of matrix l / 8.
INLINE void ldmatrix4_at(uint32_t r[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}
INLINE void ldmatrix4(uint32_t r[4], const void* row) { ldmatrix4_at(r, (uint32_t)__cvta_generic_to_shared(row)); }

// The same of 8 x 8 halves, each matrix transposed.
INLINE void ldmatrix4_transposed(uint32_t r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// Two of them; the addresses of lanes 0 to 15 count.
INLINE void ldmatrix2_at(uint32_t r[2], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
INLINE void ldmatrix2(uint32_t r[2], const void* row) { ldmatrix2_at(r, (uint32_t)__cvta_generic_to_shared(row)); }

#if __CUDA_ARCH__ >= 800
INLINE void mma_m16n8k32_s8(int d[4], const uint32_t a[4], const uint32_t b[2], const int c[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

INLINE void mma_m16n8k16_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

INLINE void mma_m16n8k16_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a b in tf32, 4 values along (one of each lane: a0 of row g, a1 of row g + 8, b of column g, value t).
INLINE void mma_m16n8k4_tf32(float c[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}

// The same, 8 values along: a[0], a[1], b[0] as above, the others of value t + 4.
INLINE void mma_m16n8k8_tf32(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#else
INLINE void mma_m8n8k16_s8(int d[2], uint32_t a, uint32_t b, const int c[2]) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %5};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a), "r"(b), "r"(c[0]), "r"(c[1]));
}

INLINE void mma_m16n8k8_f16(float c[4], uint32_t a0, uint32_t a1, uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b));
}
#endif
#endif

// ---- fragments

// The address that this lane gives for rows 0 to 15 of a tile whose rows are `stride` bytes apart, 32 bytes from p on:
// loops make it once, what they load is at distances from it.
INLINE SharedAddress place_of_a(const uint8_t* p, int stride) {
    const int l = thread_here() & 31;
    return shared_address((uint8_t*)p + (l & 15) * stride + (l >> 4) * 16);
}
INLINE void load_a(uint32_t a[4], const uint8_t* p, int stride) { ldmatrix4_at(a, place_of_a(p, stride)); }

// The same of columns 0 to 7.
INLINE SharedAddress place_of_b(const uint8_t* p, int stride) {
    const int l = thread_here() & 15;
    return shared_address((uint8_t*)p + (l & 7) * stride + (l >> 3) * 16);
}
INLINE void load_b(uint32_t b[2], const uint8_t* p, int stride) { ldmatrix2_at(b, place_of_b(p, stride)); }

// The same of two times 8 columns, `apart` bytes between them: b[0], b[1] and b[2], b[3].
INLINE SharedAddress place_of_b_twice(const uint8_t* p, int stride, int apart) {
    const int l = thread_here() & 31;
    return shared_address((uint8_t*)p + (l & 7) * stride + (l >> 3 & 1) * 16 + (l >> 4) * apart);
}
INLINE void load_b_twice(uint32_t b[4], const uint8_t* p, int stride, int apart) {
    ldmatrix4_at(b, place_of_b_twice(p, stride, apart));
}

// Two times 8 columns of halves that lie across: value i of them is in row i from p on. b as of load_b_twice.
INLINE void load_b_across(uint32_t b[4], const uint8_t* p, int stride) {
    const int l = thread_here() & 31;
    ldmatrix4_transposed(b, p + (l & 15) * stride + (l >> 4) * 16);
}

// ---- products

// The bits of a float that tf32 has.
INLINE uint32_t tf32_of(float v) { return __float_as_uint(v) & 0xffffe000u; }

// d = a b + c in int8 over 32 values.
INLINE void mma_s8(int d[4], const uint32_t a[4], const uint32_t b[2], const int c[4]) {
#if __CUDA_ARCH__ >= 800
    mma_m16n8k32_s8(d, a, b, c);
#else
    mma_m8n8k16_s8(d, a[0], b[0], c);
    mma_m8n8k16_s8(d, a[2], b[1], d);
    mma_m8n8k16_s8(d + 2, a[1], b[0], c + 2);
    mma_m8n8k16_s8(d + 2, a[3], b[1], d + 2);
#endif
}

#if __CUDA_ARCH__ >= 800
// c += a b in f32 over 4 N values (N 1 or 2; a[2 n], a[2 n + 1], b[n] of value t + 4 n), by tf32: both are split in two
// parts of 11 bits, whose products are exact. What is left out is 2^-22 of a product.
template <int N> INLINE void mma_f32(float c[4], const float a[2 * N], const uint32_t b[2][N]) {
    uint32_t parts[2][2 * N];
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        parts[0][i] = tf32_of(a[i]);
        parts[1][i] = __float_as_uint(a[i] - __uint_as_float(parts[0][i]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t *u = parts[1 - i / 2], *v = b[1 - i % 2];  // the smallest first
        if (N == 1)
            mma_m16n8k4_tf32(c, u[0], u[1], v[0]);
        else
            mma_m16n8k8_tf32(c, u, v);
    }
}
#endif

// c += a b over 16 halves.
INLINE void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if __CUDA_ARCH__ >= 800
    mma_m16n8k16_f16(c, a, b);
#else
    mma_m16n8k8_f16(c, a[0], a[1], b[0]);
    mma_m16n8k8_f16(c, a[2], a[3], b[1]);
#endif
}

// c += a b over 16 bfloat16; sm_75 does without tensor cores: lanes hand their values round.
INLINE void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if __CUDA_ARCH__ >= 800
    mma_m16n8k16_bf16(c, a, b);
#else
    const int l = threadIdx.x & 31;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++) {
            const uint32_t rows[2] = {__shfl_sync(FULL, a[2 * half], (l & 28) + i), __shfl_sync(FULL, a[2 * half + 1], (l & 28) + i)};
            for (int j = 0; j < 2; j++) {
                const uint32_t column = __shfl_sync(FULL, b[half], 4 * (2 * (l & 3) + j) + i);
                for (int r = 0; r < 2; r++) {
                    c[2 * r + j] = fmaf(__uint_as_float(rows[r] << 16), __uint_as_float(column << 16), c[2 * r + j]);
                    c[2 * r + j] = fmaf(__uint_as_float(rows[r] & 0xffff0000u), __uint_as_float(column & 0xffff0000u), c[2 * r + j]);
                }
            }
        }
#endif
}
