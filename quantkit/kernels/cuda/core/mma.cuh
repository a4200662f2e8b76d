// Tensor cores: thin wrappers of mma.sync.
//
// A warp multiplies a (16 rows) by b (8 columns) along 32 bytes: 32 int8 or 16 values of 16 bits. In every case lane l
// holds, with g = l / 4 and t = l % 4,
//
//     a[0] bytes 4t.. of row g     a[1] of row g + 8     a[2] bytes 16 + 4t.. of row g     a[3] of row g + 8
//     b[0] bytes 4t.. of column g  b[1] bytes 16 + 4t.. of it
//     c[0], c[1]  row g, columns 2t and 2t + 1           c[2], c[3]  row g + 8
//
// as load_a and load_b (ldmatrix) deliver them. sm_75 combines two or four smaller instructions into one of these.
// On the host (tests/shim/host.h) only the primitives are emulated.
#pragma once
#include "core/async_copy.cuh"

#ifdef QUANTKIT_HOST
INLINE void ldmatrix4_at(uint32_t r[4], SharedAddress row) { ldmatrix4(r, row); }
INLINE void ldmatrix2_at(uint32_t r[2], SharedAddress row) { ldmatrix2(r, row); }
#else

// The same address, opaque to the compiler: later accesses use constant offsets from it.
template <typename T> INLINE T* fixed(T* p) {
    asm("" : "+l"(p));
    return p;
}

// The same value in a register, opaque to the compiler.
INLINE uint32_t fixed(uint32_t v) {
    asm("" : "+r"(v));
    return v;
}

// threadIdx.x and blockIdx.x, read again at each use, so that values derived from them are recomputed rather than kept
// in registers across a loop.
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

// The same for 8 x 8 f16 matrices, each transposed.
INLINE void ldmatrix4_transposed(uint32_t r[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
}

// Two 8 x 16-byte matrices; lanes 0 to 15 give the addresses.
INLINE void ldmatrix2_at(uint32_t r[2], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(row) : "memory");
}
INLINE void ldmatrix2(uint32_t r[2], const void* row) { ldmatrix2_at(r, (uint32_t)__cvta_generic_to_shared(row)); }

// c += a b in f32. HALF: a and b are half as long, so that a lane has half as many words of them.
#define MMA_F32(name, kind)                                                                             \
    INLINE void name(float c[4], const uint32_t a[4], const uint32_t b[2]) {                            \
        asm("mma.sync.aligned." kind " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                            \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                        \
    }
#define MMA_F32_HALF(name, kind)                                                            \
    INLINE void name(float c[4], uint32_t a0, uint32_t a1, uint32_t b) {                    \
        asm("mma.sync.aligned." kind " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};" \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                \
            : "r"(a0), "r"(a1), "r"(b));                                                    \
    }
#if __CUDA_ARCH__ >= 800
INLINE void mma_m16n8k32_s8(int d[4], const uint32_t a[4], const uint32_t b[2], const int c[4]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %11, %12, %13};"
        : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(c[0]), "r"(c[1]), "r"(c[2]), "r"(c[3]));
}

MMA_F32(mma_m16n8k16_f16, "m16n8k16.row.col.f32.f16.f16.f32")
MMA_F32(mma_m16n8k16_bf16, "m16n8k16.row.col.f32.bf16.bf16.f32")
// c += a b in tf32 over 4 values; each lane holds value t of row g (a0), row g + 8 (a1) and column g (b).
MMA_F32_HALF(mma_m16n8k4_tf32, "m16n8k4.row.col.f32.tf32.tf32.f32")
// The same over 8 values: a[0], a[1], b[0] as above, the others are value t + 4.
MMA_F32(mma_m16n8k8_tf32, "m16n8k8.row.col.f32.tf32.tf32.f32")
#else
INLINE void mma_m8n8k16_s8(int d[2], uint32_t a, uint32_t b, const int c[2]) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%4, %5};"
        : "=r"(d[0]), "=r"(d[1])
        : "r"(a), "r"(b), "r"(c[0]), "r"(c[1]));
}

MMA_F32_HALF(mma_m16n8k8_f16, "m16n8k8.row.col.f32.f16.f16.f32")
#endif
#endif

// ---- fragments

// This lane's ldmatrix address for 32 bytes from p of rows 0 to 15, `stride` bytes apart. Loops compute it once and
// load at offsets from it.
INLINE SharedAddress place_of_a(const uint8_t* p, int stride) {
    const int l = thread_here() & 31;
    return shared_address((uint8_t*)p + (l & 15) * stride + (l >> 4) * 16);
}
INLINE void load_a(uint32_t a[4], const uint8_t* p, int stride) { ldmatrix4_at(a, place_of_a(p, stride)); }

// The same for columns 0 to 7.
INLINE SharedAddress place_of_b(const uint8_t* p, int stride) {
    const int l = thread_here() & 15;
    return shared_address((uint8_t*)p + (l & 7) * stride + (l >> 3) * 16);
}
INLINE void load_b(uint32_t b[2], const uint8_t* p, int stride) { ldmatrix2_at(b, place_of_b(p, stride)); }

// The same for two groups of 8 columns, `apart` bytes apart: b[0], b[1] and b[2], b[3].
INLINE SharedAddress place_of_b_twice(const uint8_t* p, int stride, int apart) {
    const int l = thread_here() & 31;
    return shared_address((uint8_t*)p + (l & 7) * stride + (l >> 3 & 1) * 16 + (l >> 4) * apart);
}
INLINE void load_b_twice(uint32_t b[4], const uint8_t* p, int stride, int apart) {
    ldmatrix4_at(b, place_of_b_twice(p, stride, apart));
}

// Two groups of 8 f16 columns stored transposed: value i is in row i from p. b as in load_b_twice.
INLINE void load_b_across(uint32_t b[4], const uint8_t* p, int stride) {
    const int l = thread_here() & 31;
    ldmatrix4_transposed(b, p + (l & 15) * stride + (l >> 4) * 16);
}

// ---- products

// A float truncated to the bits of tf32.
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
// c += a b in f32 over 4 N values (N 1 or 2; a[2 n], a[2 n + 1], b[n] hold value t + 4 n), by tf32: both factors are
// split into two parts of 11 bits, whose products are exact. The error is 2^-22 of a product.
template <int N> INLINE void mma_f32(float c[4], const float a[2 * N], const uint32_t b[2][N]) {
    uint32_t parts[2][2 * N];
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        parts[0][i] = tf32_of(a[i]);
        parts[1][i] = __float_as_uint(a[i] - __uint_as_float(parts[0][i]));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t *u = parts[1 - i / 2], *v = b[1 - i % 2];  // smallest first
        if (N == 1) mma_m16n8k4_tf32(c, u[0], u[1], v[0]);
        else mma_m16n8k8_tf32(c, u, v);
    }
}
#endif

// c += a b over 16 f16.
INLINE void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if __CUDA_ARCH__ >= 800
    mma_m16n8k16_f16(c, a, b);
#else
    mma_m16n8k8_f16(c, a[0], a[1], b[0]);
    mma_m16n8k8_f16(c, a[2], a[3], b[1]);
#endif
}

// c += a b over 16 bfloat16; without tensor cores on sm_75, where lanes exchange values by shuffles.
INLINE void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
#if __CUDA_ARCH__ >= 800
    mma_m16n8k16_bf16(c, a, b);
#else
    const int l = threadIdx.x & 31;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 4; i++) {
            const uint32_t rows[2] = {__shfl_sync(FULL, a[2 * half], (l & 28) + i),
                                      __shfl_sync(FULL, a[2 * half + 1], (l & 28) + i)};
            for (int j = 0; j < 2; j++) {
                const uint32_t column = __shfl_sync(FULL, b[half], 4 * (2 * (l & 3) + j) + i);
                for (int r = 0; r < 2; r++) {
                    c[2 * r + j] = fmaf(__uint_as_float(rows[r] << 16), __uint_as_float(column << 16), c[2 * r + j]);
                    c[2 * r + j] =
                        fmaf(__uint_as_float(rows[r] & 0xffff0000u), __uint_as_float(column & 0xffff0000u), c[2 * r + j]);
                }
            }
        }
#endif
}
