// CUDA's language for a C++ compiler: threads of a block are fibers (runtime.cpp), collectives synchronize them.
// Stricter than a GPU: warp operations require all 32 lanes, a block consists of whole warps, and a barrier that some
// threads never reach ends the process with a message. Loads must be aligned (UBSan), memory in bounds (ASan).
#pragma once
// C's functions of float and double, which have different names in kernels. <cmath>, with its overloads and special functions,
// has 20000 lines: a third of the time of a kernel.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __CUDA_ARCH__ QUANTKIT_HOST_ARCH
#ifndef QUANTKIT_HOST_ARCH
#define QUANTKIT_HOST_ARCH 900
#endif

struct Dim3 {
    unsigned x, y, z;
};
struct HostThread {
    Dim3 thread, block, threads, blocks;
};
extern "C" {
extern HostThread* host_thread;                                          // of the running fiber
void host_sync_threads(int kind);                                        // __syncthreads
const void* host_exchange(int kind, const void* mine, unsigned nbytes);  // [32][64]: each lane's operands
uint8_t* host_dynamic_shared();
// cp.async: data is copied only when it is waited for, so that a missing wait is detected.
void host_copy_async(void* to, const void* from, unsigned nbytes);
void host_end_group();
void host_wait_groups(unsigned pending);  // all but the last groups are complete after it
// Output of the previous launch is poisoned, where a test declares it, until a thread waits for that launch.
void host_wait_for_previous();
void host_check_waited();
[[noreturn]] void host_fail(const char* what);
}
#define threadIdx (host_thread->thread)
#define blockIdx (host_thread->block)
#define blockDim (host_thread->threads)
#define gridDim (host_thread->blocks)
const int warpSize = 32;

#define KERNEL(name, count)                          \
    static void name##_body(const name##_args& a);   \
    extern "C" void quantkit_##name(const void* p) { \
        wait_for_previous();                         \
        name##_body(*(const name##_args*)p);         \
    }                                                \
    static void name##_body(const name##_args& a)
#define KERNEL_THAT_WAITS(name, count)               \
    static void name##_body(const name##_args& a);   \
    extern "C" void quantkit_##name(const void* p) { \
        name##_body(*(const name##_args*)p);         \
        host_check_waited();                         \
    }                                                \
    static void name##_body(const name##_args& a)
static inline void wait_for_previous() { host_wait_for_previous(); }
#define DYNAMIC_SHARED(name) uint8_t* const name = host_dynamic_shared()

// ---- vectors

#define HOST_VECTORS(T, name, bytes)                                           \
    struct alignas(2 * bytes) name##2 { T x, y; };                             \
    struct name##3 { T x, y, z; };                                             \
    struct alignas(4 * bytes > 16 ? 16 : 4 * bytes) name##4 { T x, y, z, w; }; \
    static inline name##2 make_##name##2(T x, T y) { return {x, y}; }          \
    static inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }  \
    static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
HOST_VECTORS(int, int, 4)
HOST_VECTORS(unsigned, uint, 4)
HOST_VECTORS(float, float, 4)
HOST_VECTORS(double, double, 8)
HOST_VECTORS(int8_t, char, 1)
HOST_VECTORS(uint8_t, uchar, 1)

// ---- collectives

static inline void __syncthreads() { host_sync_threads(1); }
static inline void __syncwarp(unsigned mask = 0xffffffffu) {
    if (mask != 0xffffffffu) host_fail("__syncwarp of a part of a warp");
    host_exchange(2, nullptr, 0);
}

template <typename T> static inline T host_lane(const void* table, int lane) {
    T value;
    memcpy(&value, (const char*)table + 64 * lane, sizeof(T));
    return value;
}

template <typename T> static inline T host_shuffle(int kind, unsigned mask, T value, int from) {
    if (mask != 0xffffffffu) host_fail("a shuffle of a part of a warp");
    const void* table = host_exchange(kind, &value, sizeof(T));
    return host_lane<T>(table, from);
}

static inline int host_lane_id() { return host_thread->thread.x & 31; }
template <typename T> static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32) {
    const int me = host_lane_id();
    return host_shuffle(3, mask, v, (me & ~(width - 1)) | (lane & (width - 1)));
}
template <typename T> static inline T __shfl_xor_sync(unsigned mask, T v, int other, int width = 32) {
    const int me = host_lane_id(), to = me ^ other;
    return host_shuffle(4, mask, v, (to ^ me) & ~(width - 1) & 31 && to > me ? me : to);
}
template <typename T> static inline T __shfl_down_sync(unsigned mask, T v, unsigned by, int width = 32) {
    const int me = host_lane_id();
    return host_shuffle(5, mask, v, (me & (width - 1)) + (int)by < width ? me + (int)by : me);
}
template <typename T> static inline T __shfl_up_sync(unsigned mask, T v, unsigned by, int width = 32) {
    const int me = host_lane_id();
    return host_shuffle(6, mask, v, (me & (width - 1)) >= (int)by ? me - (int)by : me);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    if (mask != 0xffffffffu) host_fail("a ballot of a part of a warp");
    const void* table = host_exchange(7, &predicate, sizeof predicate);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (host_lane<int>(table, i) != 0) * (1u << i);
    return bits;
}
static inline int __any_sync(unsigned mask, int p) { return __ballot_sync(mask, p) != 0; }
static inline int __all_sync(unsigned mask, int p) { return __ballot_sync(mask, p) == 0xffffffffu; }

// ---- atomics: fibers switch at collectives only

template <typename T, typename U> static inline T atomicAdd(T* p, U v) {
    T old = *p;
    *p = old + (T)v;
    return old;
}
template <typename T, typename U> static inline T atomicMax(T* p, U v) {
    T old = *p;
    if ((T)v > old) *p = (T)v;
    return old;
}
template <typename T, typename U> static inline T atomicMin(T* p, U v) {
    T old = *p;
    if ((T)v < old) *p = (T)v;
    return old;
}
template <typename T, typename U> static inline T atomicExch(T* p, U v) {
    T old = *p;
    *p = (T)v;
    return old;
}
template <typename T, typename U> static inline T atomicOr(T* p, U v) {
    T old = *p;
    *p = old | (T)v;
    return old;
}
template <typename T> static inline T atomicCAS(T* p, T c, T v) {
    T old = *p;
    if (old == c) *p = v;
    return old;
}
static inline void __threadfence() {}
static inline void __threadfence_block() {}

// ---- arithmetic

template <typename T> static inline T __ldg(const T* p) { return *p; }
static inline int __dp4a(int a, int b, int c) {
    uint32_t sum = (uint32_t)c;
    for (int i = 0; i < 4; i++) sum += (uint32_t)((int8_t)((uint32_t)a >> 8 * i) * (int8_t)((uint32_t)b >> 8 * i));
    return (int)sum;
}
static inline int host_dp4a_us(uint32_t a, int b, int c) {  // PTX dp4a.u32.s32
    uint32_t sum = (uint32_t)c;
    for (int i = 0; i < 4; i++) sum += (uint32_t)((uint8_t)(a >> 8 * i) * (int8_t)((uint32_t)b >> 8 * i));
    return (int)sum;
}
static inline int host_dp2a(int a, int b, int c) {
    const int low = (int16_t)(uint32_t)a * (int8_t)(uint32_t)b;
    return (int)((uint32_t)c + (uint32_t)low + (uint32_t)((a >> 16) * (int8_t)((uint32_t)b >> 8)));
}
static inline int __dp2a_lo(int a, int b, int c) { return host_dp2a(a, b, c); }
static inline int __dp2a_hi(int a, int b, int c) { return host_dp2a(a, (int)((uint32_t)b >> 16), c); }
static inline unsigned host_dp2a_unsigned(unsigned a, unsigned b, unsigned c) {
    return c + (a & 0xffff) * (b & 255) + (a >> 16) * (b >> 8 & 255);
}
static inline unsigned __dp2a_lo(unsigned a, unsigned b, unsigned c) { return host_dp2a_unsigned(a, b, c); }
static inline unsigned __dp2a_hi(unsigned a, unsigned b, unsigned c) { return host_dp2a_unsigned(a, b >> 16, c); }
static inline float __uint_as_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline float __int_as_float(int u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t __float_as_uint(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline int __float_as_int(float f) {
    int u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
#define __expf expf
#define __logf logf
static inline float __fdividef(float a, float b) { return a / b; }
static inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
// To integers as the GPU does: saturating, NaN to 0.
static inline int host_to_int(double v) {
    return __builtin_isnan(v) ? 0 : v >= 2147483647.0 ? 2147483647 : v <= -2147483648.0 ? -2147483647 - 1 : (int)v;
}
static inline int __float2int_rn(float a) { return host_to_int(nearbyint((double)a)); }
static inline int __float2int_rz(float a) { return host_to_int(trunc((double)a)); }
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (v >> i & 1u) << (31 - i);
    return r;
}
// prmt: bit 3 of a selector's nibble spreads the sign of the byte; __byte_perm ignores that bit.
static inline unsigned host_prmt(unsigned x, unsigned y, unsigned s) {
    const uint64_t both = (uint64_t)y << 32 | x;
    unsigned out = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned pick = s >> 4 * i & 15;
        unsigned byte = (unsigned)(both >> 8 * (pick & 7)) & 255;
        if (pick & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << 8 * i;
    }
    return out;
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned s) { return host_prmt(x, y, s & 0x7777); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) << (by & 31) >> 32);
}
static inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned by) {
    return (unsigned)(((uint64_t)high << 32 | low) >> (by < 32 ? by : 32));
}
static inline unsigned host_bytes(unsigned a, unsigned b, int (*f)(int, int)) {
    unsigned out = 0;
    for (int i = 0; i < 4; i++) out |= ((unsigned)f((int)(a >> 8 * i & 255), (int)(b >> 8 * i & 255)) & 255) << 8 * i;
    return out;
}
static inline unsigned __vadd4(unsigned a, unsigned b) {
    return host_bytes(a, b, [](int x, int y) { return x + y; });
}
static inline unsigned __vsub4(unsigned a, unsigned b) {
    return host_bytes(a, b, [](int x, int y) { return x - y; });
}
static inline unsigned __vsubss4(unsigned a, unsigned b) {
    return host_bytes(a, b, [](int x, int y) {
        const int d = (int8_t)x - (int8_t)y;
        return d > 127 ? 127 : d < -128 ? -128 : d;
    });
}
static inline unsigned __vcmpeq4(unsigned a, unsigned b) {
    return host_bytes(a, b, [](int x, int y) { return x == y ? 255 : 0; });
}
static inline unsigned __vcmpne4(unsigned a, unsigned b) {
    return host_bytes(a, b, [](int x, int y) { return x != y ? 255 : 0; });
}
template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }

static inline float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 31) return __uint_as_float(sign | 0x7f800000u | m << 13 | (m ? 0x400000u : 0));
    if (e == 0) {
        const float f = (float)m * 0x1p-24f;
        return sign ? -f : f;
    }
    return __uint_as_float(sign | (e + 112) << 23 | m << 13);
}

static inline uint16_t float_to_half(float f) {
    const uint32_t u = __float_as_uint(f), sign = u >> 16 & 0x8000, x = u & 0x7fffffff;
    if (x > 0x7f800000u) return (uint16_t)(sign | 0x7e00 | (x >> 13 & 0x3ff));
    if (x >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);  // 65520 and beyond
    if (x < 0x38800000u) {                                   // below 2^-14: subnormal, in steps of 2^-24
        const float scaled = __uint_as_float(x) * 0x1p24f;   // exact
        return (uint16_t)(sign | (uint32_t)nearbyintf(scaled));
    }
    const uint32_t rounded = x + 0xfff + (x >> 13 & 1);
    return (uint16_t)(sign | ((rounded - 0x38000000u) >> 13));
}

template <typename F> static inline uint32_t host_halves(uint32_t a, uint32_t b, F f) {
    const uint32_t low = float_to_half(f(half_to_float((uint16_t)a), half_to_float((uint16_t)b)));
    return low | (uint32_t)float_to_half(f(half_to_float((uint16_t)(a >> 16)), half_to_float((uint16_t)(b >> 16)))) << 16;
}

static inline uint32_t to_halves(float x, float y) { return float_to_half(x) | (uint32_t)float_to_half(y) << 16; }
static inline float exp2_near(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

// ---- tensor cores (mma.cuh): every lane contributes its registers, and reads the operands of its results

template <typename T> static inline T* fixed(T* p) { return p; }
static inline uint32_t fixed(uint32_t v) { return v; }
static inline unsigned thread_here() { return threadIdx.x; }
static inline unsigned block_here() { return blockIdx.x; }
static inline void ldmatrix4(uint32_t r[4], const void* row) {
    const int l = host_lane_id();
    const void* table = host_exchange(16, &row, sizeof row);
    for (int i = 0; i < 4; i++) {
        const uint8_t* from = host_lane<const uint8_t*>(table, 8 * i + l / 4);
        if ((uintptr_t)from % 16) host_fail("ldmatrix: rows are 16-byte aligned");
        r[i] = *(const uint32_t*)(from + 4 * (l % 4));
    }
}
static inline void ldmatrix4_transposed(uint32_t r[4], const void* row) {
    const int l = host_lane_id();
    const void* table = host_exchange(25, &row, sizeof row);
    for (int i = 0; i < 4; i++) {
        const uint16_t *even = host_lane<const uint16_t*>(table, 8 * i + 2 * (l % 4)),
                       *odd = host_lane<const uint16_t*>(table, 8 * i + 2 * (l % 4) + 1);
        if ((uintptr_t)even % 16 || (uintptr_t)odd % 16) host_fail("ldmatrix: rows are 16-byte aligned");
        r[i] = even[l / 4] | (uint32_t)odd[l / 4] << 16;
    }
}
static inline void ldmatrix2(uint32_t r[2], const void* row) {
    const int l = host_lane_id();
    const void* table = host_exchange(17, &row, sizeof row);
    for (int i = 0; i < 2; i++) {
        const uint8_t* from = host_lane<const uint8_t*>(table, 8 * i + l / 4);
        if ((uintptr_t)from % 16) host_fail("ldmatrix: rows are 16-byte aligned");
        r[i] = *(const uint32_t*)(from + 4 * (l % 4));
    }
}

// Row g of a, of `parts` pieces of 16 bytes, times column c of b, as int8; a's pieces are registers `step` apart.
struct HostOperands {
    uint32_t a[4], b[2];
};
static inline int host_dot_s8(const void* table, int g, int column, int a0, int step, int parts) {
    int sum = 0;
    for (int part = 0; part < parts; part++)
        for (int t = 0; t < 4; t++) {
            const HostOperands *x = (const HostOperands*)((const char*)table + 64 * (4 * g + t)),
                               *y = (const HostOperands*)((const char*)table + 64 * (4 * column + t));
            sum = __dp4a((int)x->a[a0 + step * part], (int)y->b[part], sum);
        }
    return sum;
}
static inline void mma_m16n8k32_s8(int d[4], const uint32_t a[4], const uint32_t b[2], const int c[4]) {
    const HostOperands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const void* table = host_exchange(18, &mine, sizeof mine);
    const int g = host_lane_id() / 4, t = host_lane_id() % 4;
    for (int i = 0; i < 4; i++) d[i] = c[i] + host_dot_s8(table, g, 2 * t + i % 2, i / 2, 2, 2);
}
static inline void mma_m8n8k16_s8(int d[2], uint32_t a, uint32_t b, const int c[2]) {
    const HostOperands mine = {{a, 0, 0, 0}, {b, 0}};
    const void* table = host_exchange(20, &mine, sizeof mine);
    const int g = host_lane_id() / 4, t = host_lane_id() % 4;
    for (int i = 0; i < 2; i++) d[i] = c[i] + host_dot_s8(table, g, 2 * t + i, 0, 0, 1);
}
template <typename F> static inline void host_mma_16(int kind, float c[4], const HostOperands& mine, int parts, F to_float) {
    const void* table = host_exchange(kind, &mine, sizeof mine);
    const int g = host_lane_id() / 4, t = host_lane_id() % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 4 * parts; k++) {
            const HostOperands *x = (const HostOperands*)((const char*)table + 64 * (4 * g + k % 4)),
                               *y = (const HostOperands*)((const char*)table + 64 * (4 * (2 * t + i % 2) + k % 4));
            const uint32_t u = x->a[i / 2 + 2 * (k / 4)], v = y->b[k / 4];
            c[i] += to_float((uint16_t)u) * to_float((uint16_t)v) + to_float((uint16_t)(u >> 16)) * to_float((uint16_t)(v >> 16));
        }
}
static inline float host_bf16_to_float(uint16_t b) { return __uint_as_float((uint32_t)b << 16); }
static inline void mma_m16n8k16_f16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    host_mma_16(21, c, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, 2, half_to_float);
}
static inline void mma_m16n8k8_f16(float c[4], uint32_t a0, uint32_t a1, uint32_t b) {
    host_mma_16(22, c, {{a0, a1, 0, 0}, {b, 0}}, 1, half_to_float);
}
static inline void mma_m16n8k16_bf16(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    host_mma_16(23, c, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}, 2, host_bf16_to_float);
}
// tf32: the low 13 bits of an operand are ignored.
static inline float host_tf32(uint32_t u) { return __uint_as_float(u & 0xffffe000u); }
static inline void mma_m16n8k8_tf32(float c[4], const uint32_t a[4], const uint32_t b[2]) {
    const HostOperands mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
    const void* table = host_exchange(25, &mine, sizeof mine);
    const int g = host_lane_id() / 4, t = host_lane_id() % 4;
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++) {
            const HostOperands *x = (const HostOperands*)((const char*)table + 64 * (4 * g + k % 4)),
                               *y = (const HostOperands*)((const char*)table + 64 * (4 * (2 * t + i % 2) + k % 4));
            c[i] += host_tf32(x->a[i / 2 + 2 * (k / 4)]) * host_tf32(y->b[k / 4]);
        }
}
static inline void mma_m16n8k4_tf32(float c[4], uint32_t a0, uint32_t a1, uint32_t b) {
    const uint32_t a[4] = {a0, a1, 0, 0}, both[2] = {b, 0};
    mma_m16n8k8_tf32(c, a, both);
}

// The mask of lanes that have the same value.
static inline unsigned __match_any_sync(unsigned mask, int v) {
    if (mask != 0xffffffffu) host_fail("a match of a part of a warp");
    const void* table = host_exchange(24, &v, sizeof v);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= (host_lane<int>(table, i) == v) * (1u << i);
    return bits;
}
