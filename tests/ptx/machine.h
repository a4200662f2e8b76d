// The meaning of PTX instructions, for code that translate.py generates: written from the PTX ISA document (9.7),
// independently of quantkit's kernels and the shim. Integers are unsigned here, of the register's size; s32 and so on
// name their interpretation.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // tests/shim/host.h says why
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#include <cstdint>
#include <cstring>

struct Dim3 {
    unsigned x, y, z;
};
struct HostThread {
    Dim3 thread, block, threads, blocks;
};
extern "C" {
extern HostThread* host_thread;
void host_copy_async(void* to, const void* from, unsigned nbytes);
void host_end_group();
void host_wait_groups(unsigned pending);
void host_wait_for_previous(), host_check_waited();

// Addresses, checked: aligned to the access, within an allocation. line: of the PTX, for messages.
uint8_t *at_global_ld(uint64_t, unsigned nbytes, int line), *at_global_st(uint64_t, unsigned nbytes, int line);
uint8_t *at_shared_ld(uint64_t, unsigned nbytes, int line), *at_shared_st(uint64_t, unsigned nbytes, int line);
uint8_t *at_generic_ld(uint64_t, unsigned nbytes, int line), *at_generic_st(uint64_t, unsigned nbytes, int line);
uint8_t *at_local_ld(uint64_t, unsigned nbytes, int line), *at_local_st(uint64_t, unsigned nbytes, int line);
uint64_t generic_of_shared(uint64_t), shared_of_generic(uint64_t);
[[noreturn]] void ptx_trap(int line);
[[noreturn]] void ptx_fail(const char* what, int line);

// Synchronization of a warp's lanes. d, a, b, c: registers of 32 bits; line: identifies the instruction.
void bar_sync(int line);
void bar_warp_sync(uint32_t mask);
uint32_t shfl_sync_up_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t mask, bool& there);
uint32_t shfl_sync_down_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t mask, bool& there);
uint32_t shfl_sync_bfly_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t mask, bool& there);
uint32_t shfl_sync_idx_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t mask, bool& there);
bool vote_sync_all_pred(bool a, uint32_t mask), vote_sync_any_pred(bool a, uint32_t mask);
uint32_t vote_sync_ballot_b32(bool a, uint32_t mask), match_any_sync_b32(uint32_t a, uint32_t mask);
uint32_t redux_sync_min_u32(uint32_t a, uint32_t mask);
void ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t* d, uint64_t p, int line);
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t* d, uint64_t p, int line);
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t* d, uint64_t p, int line);
#define DECLARE_MMA(name) \
    void mma_sync_aligned_##name(uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, int line)
DECLARE_MMA(m8n8k16_row_col_s32_s8_s8_s32);
DECLARE_MMA(m16n8k16_row_col_s32_s8_s8_s32);
DECLARE_MMA(m16n8k32_row_col_s32_s8_s8_s32);
DECLARE_MMA(m16n8k8_row_col_f32_f16_f16_f32);
DECLARE_MMA(m16n8k16_row_col_f32_f16_f16_f32);
DECLARE_MMA(m16n8k16_row_col_f32_bf16_bf16_f32);
DECLARE_MMA(m16n8k4_row_col_f32_tf32_tf32_f32);
DECLARE_MMA(m16n8k8_row_col_f32_tf32_tf32_f32);

// Returns the old value; stores the sum, the maximum, or b if the old value equals a. Fibers switch only at
// synchronization.
uint32_t atom_add_u32(uint8_t*, uint32_t), atom_max_s32(uint8_t*, uint32_t);
uint64_t atom_cas_b64(uint8_t*, uint64_t a, uint64_t b);

// Conversions and approximations that take more than an expression.
float cvt_f32_f16(uint16_t), add_rz_f32(float, float), fma_rm_f32(float, float, float);
uint16_t cvt_rn_f16_f32(float);
uint32_t cvt_rn_f16x2_f32(float a, float b), sub_rn_f16x2(uint32_t a, uint32_t b);
uint32_t mul_rn_f16x2(uint32_t a, uint32_t b);
uint32_t cvt_rni_s32_f32(float), cvt_rzi_s32_f32(float), cvt_rni_s32_f64(double);
float ex2_approx_ftz_f32(float), rcp_approx_ftz_f32(float), max_f32(float, float), min_f32(float, float);
uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c), dp4a_s32_s32(uint32_t a, uint32_t b, uint32_t c);
uint32_t dp4a_u32_s32(uint32_t a, uint32_t b, uint32_t c), dp2a_lo_s32_s32(uint32_t a, uint32_t b, uint32_t c);
uint32_t dp2a_hi_s32_s32(uint32_t a, uint32_t b, uint32_t c), dp2a_lo_u32_u32(uint32_t a, uint32_t b, uint32_t c);
uint32_t dp2a_hi_u32_u32(uint32_t a, uint32_t b, uint32_t c);
uint32_t brev_b32(uint32_t), bfi_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t d), popc_b32(uint32_t);
uint32_t lop3_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t table);
uint64_t bfi_b64(uint64_t a, uint64_t b, uint32_t c, uint32_t d);
uint32_t clz_b32(uint32_t), clz_b64(uint64_t), bfind_shiftamt_u32(uint32_t);
uint32_t shf_l_wrap_b32(uint32_t a, uint32_t b, uint32_t c), shf_r_wrap_b32(uint32_t a, uint32_t b, uint32_t c);
uint32_t shf_r_clamp_b32(uint32_t a, uint32_t b, uint32_t c);
uint32_t div_s32(uint32_t, uint32_t), div_u32(uint32_t, uint32_t), rem_s32(uint32_t, uint32_t), rem_u32(uint32_t, uint32_t);
uint64_t div_s64(uint64_t, uint64_t), rem_s64(uint64_t, uint64_t);
// The condition code register, CC.CF, of the running thread; no other instruction comes between those of a chain.
uint32_t add_cc_u32(uint32_t, uint32_t), addc_u32(uint32_t, uint32_t), addc_cc_u32(uint32_t, uint32_t);
uint32_t sub_cc_u32(uint32_t, uint32_t), subc_u32(uint32_t, uint32_t), subc_cc_u32(uint32_t, uint32_t);
uint32_t mad_lo_cc_u32(uint32_t, uint32_t, uint32_t), madc_lo_cc_u32(uint32_t, uint32_t, uint32_t);
uint32_t madc_hi_cc_u32(uint32_t, uint32_t, uint32_t), madc_hi_u32(uint32_t, uint32_t, uint32_t);
}
#define thread_at host_thread
// Compiled with COUNTED: how often each thread of a launch has run each line of the PTX; the launcher sets the
// destination. It does not begin as 0, because zero-initialized variables are taken for shared memory.
#ifdef COUNTED
extern "C" {
unsigned (*lines_run)[16384] = (unsigned (*)[16384]) ~0ull;
}
#define COUNT(line) lines_run[thread_at->block.x * thread_at->threads.x + thread_at->thread.x][line]++;
#else
#define COUNT(line)
#endif

// ---- bits

static inline float as_f32(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline double as_f64(uint64_t u) {
    double f;
    memcpy(&f, &u, 8);
    return f;
}
static inline uint32_t as_b32(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline uint64_t as_b64(double f) {
    uint64_t u;
    memcpy(&u, &f, 8);
    return u;
}
#define GET(type, q, i) (((const type*)(q))[i])
#define PUT(type, q, i, value) ((type*)(q))[i] = (value)

// Generic addresses are the host's; those of shared memory begin at BASE of translate.py.
#define cvta_shared_u64(a) generic_of_shared(a)
#define cvta_to_shared_u64(a) shared_of_generic(a)
#define cvta_local_u64(a) (a)
#define cvta_global_u64(a) (a)
#define cvta_to_local_u64(a) (a)
#define cvta_to_global_u64(a) (a)
#define at_param_ld(a, n, line) ((const uint8_t*)(a))
#define at_param_st(a, n, line) ((uint8_t*)(a))

// ---- integers

#define U32(x) ((uint32_t)(x))
#define U64(x) ((uint64_t)(x))
#define S16(x) ((int16_t)(x))
#define S32(x) ((int32_t)(x))
#define S64(x) ((int64_t)(x))
#define add_s16(a, b) ((uint16_t)((a) + (b)))
#define add_s32(a, b) U32((a) + (b))
#define add_u32(a, b) U32((a) + (b))
#define add_s64(a, b) U64((a) + (b))
#define add_u64(a, b) U64((a) + (b))
#define sub_s32(a, b) U32((a) - (b))
#define sub_s64(a, b) U64((a) - (b))
#define neg_s32(a) U32(0u - (a))
#define neg_s64(a) U64(0ull - (a))
#define mul_lo_s32(a, b) U32((a) * (b))
#define mul_lo_u32(a, b) U32((a) * (b))
#define mul_lo_s64(a, b) U64((a) * (b))
#define mul_hi_s32(a, b) U32((int64_t)S32(a) * S32(b) >> 32)
#define mul_hi_u32(a, b) U32(U64(a) * (b) >> 32)
#define mul_wide_u16(a, b) (U32(a) * (b))
#define mul_wide_s32(a, b) U64((int64_t)S32(a) * S32(b))
#define mul_wide_u32(a, b) (U64(a) * (b))
#define mad_wide_u32(a, b, c) (U64(a) * (b) + (c))
#define mad_lo_s32(a, b, c) U32((a) * (b) + (c))
#define LESS(type, a, b) ((type)(a) < (type)(b))
#define min_s32(a, b) (LESS(int32_t, a, b) ? (a) : (b))
#define min_f64(a, b) fmin(a, b)  // the number if one of them is a NaN
#define min_u32(a, b) (LESS(uint32_t, a, b) ? (a) : (b))
#define min_s64(a, b) (LESS(int64_t, a, b) ? (a) : (b))
#define max_s32(a, b) (LESS(int32_t, b, a) ? (a) : (b))
#define max_u32(a, b) (LESS(uint32_t, b, a) ? (a) : (b))
#define max_s64(a, b) (LESS(int64_t, b, a) ? (a) : (b))
#define max_u64(a, b) (LESS(uint64_t, b, a) ? (a) : (b))
#define and_b16(a, b) ((uint16_t)((a) & (b)))
#define and_b32(a, b) ((a) & (b))
#define and_b64(a, b) ((a) & (b))
#define and_pred(a, b) ((a) & (b))
#define or_b16(a, b) ((uint16_t)((a) | (b)))
#define or_b32(a, b) ((a) | (b))
#define or_b64(a, b) ((a) | (b))
#define or_pred(a, b) ((a) | (b))
#define xor_b16(a, b) ((uint16_t)((a) ^ (b)))
#define xor_b32(a, b) ((a) ^ (b))
#define xor_pred(a, b) ((a) != (b))
#define not_b32(a) (~(a))
#define not_b64(a) (~(a))
#define not_pred(a) (!(a))
// Amounts beyond the register's width are clamped to it.
#define SHIFT(bits, b, shifted, beyond) ((b) < bits ? (shifted) : (beyond))
#define shl_b16(a, b) ((uint16_t)SHIFT(16, b, U32(a) << (b), 0))
#define shl_b32(a, b) SHIFT(32, b, (a) << (b), 0u)
#define shl_b64(a, b) SHIFT(64, b, (a) << (b), 0ull)
#define shr_u16(a, b) ((uint16_t)SHIFT(16, b, U32(a) >> (b), 0))
#define shr_u32(a, b) SHIFT(32, b, (a) >> (b), 0u)
#define shr_u64(a, b) SHIFT(64, b, (a) >> (b), 0ull)
#define shr_s16(a, b) ((uint16_t)(S16(a) >> ((b) < 15 ? (b) : 15)))
#define shr_s32(a, b) U32(S32(a) >> ((b) < 31 ? (b) : 31))
#define shr_s64(a, b) U64(S64(a) >> ((b) < 63 ? (b) : 63))

// ---- predicates: a comparison of floats with a NaN is false, or true for those that end with u

#define setp_eq_b16(a, b) ((a) == (b))
#define setp_eq_s16(a, b) ((a) == (b))
#define setp_eq_b32(a, b) ((a) == (b))
#define setp_eq_b64(a, b) ((a) == (b))
#define setp_eq_s32(a, b) ((a) == (b))
#define setp_eq_s64(a, b) ((a) == (b))
#define setp_eq_f32(a, b) ((a) == (b))
#define setp_eq_f64(a, b) ((a) == (b))
#define setp_ne_s16(a, b) ((a) != (b))
#define setp_ne_s32(a, b) ((a) != (b))
#define setp_ne_s64(a, b) ((a) != (b))
#define setp_lt_s32(a, b) (S32(a) < S32(b))
#define setp_lt_u32(a, b) ((a) < (b))
#define setp_lt_s64(a, b) (S64(a) < S64(b))
#define setp_lt_u64(a, b) ((a) < (b))
#define setp_lt_f32(a, b) ((a) < (b))
#define setp_lt_f64(a, b) ((a) < (b))
#define setp_le_s32(a, b) (S32(a) <= S32(b))
#define setp_le_u32(a, b) ((a) <= (b))
#define setp_le_s64(a, b) (S64(a) <= S64(b))
#define setp_le_u64(a, b) ((a) <= (b))
#define setp_le_f32(a, b) ((a) <= (b))
#define setp_le_f64(a, b) ((a) <= (b))
#define setp_gt_s16(a, b) (S16(a) > S16(b))
#define setp_gt_s32(a, b) (S32(a) > S32(b))
#define setp_gt_u32(a, b) ((a) > (b))
#define setp_gt_s64(a, b) (S64(a) > S64(b))
#define setp_gt_u64(a, b) ((a) > (b))
#define setp_gt_f32(a, b) ((a) > (b))
#define setp_gt_f64(a, b) ((a) > (b))
#define setp_ge_s32(a, b) (S32(a) >= S32(b))
#define setp_ge_u32(a, b) ((a) >= (b))
#define setp_ge_s64(a, b) (S64(a) >= S64(b))
#define setp_ge_u64(a, b) ((a) >= (b))
#define setp_ge_f32(a, b) ((a) >= (b))
#define setp_ge_f64(a, b) ((a) >= (b))
#define setp_neu_f32(a, b) (!((a) == (b)))
#define setp_neu_f64(a, b) (!((a) == (b)))
#define setp_ltu_f32(a, b) (!((a) >= (b)))
#define setp_ltu_f64(a, b) (!((a) >= (b)))
#define setp_gtu_f32(a, b) (!((a) <= (b)))
#define setp_leu_f32(a, b) (!((a) > (b)))
#define setp_leu_f64(a, b) (!((a) > (b)))
#define setp_gtu_f64(a, b) (!((a) <= (b)))
#define setp_geu_f32(a, b) (!((a) < (b)))
#define setp_geu_f64(a, b) (!((a) < (b)))
#define setp_num_f32(a, b) ((a) == (a) && (b) == (b))
#define setp_nan_f32(a, b) ((a) != (a) || (b) != (b))
#define selp_b16(a, b, p) ((p) ? (a) : (b))
#define selp_u16(a, b, p) ((p) ? (a) : (b))
#define selp_b32(a, b, p) ((p) ? (a) : (b))
#define selp_s32(a, b, p) ((p) ? (a) : (b))
#define selp_u32(a, b, p) ((p) ? (a) : (b))
#define selp_b64(a, b, p) ((p) ? (a) : (b))
#define selp_u64(a, b, p) ((p) ? (a) : (b))
#define selp_f32(a, b, p) ((p) ? (a) : (b))
#define selp_f64(a, b, p) ((p) ? (a) : (b))

// ---- floats: nothing is contracted (by compiler flags), denormals stay; NaN results of f32 arithmetic are 0x7fffffff

static inline float one_nan(float x) { return x == x ? x : as_f32(0x7fffffffu); }
#define add_rn_f32(a, b) one_nan((a) + (b))
#define sub_rn_f32(a, b) one_nan((a) - (b))
#define mul_rn_f32(a, b) one_nan((a) * (b))
#define div_rn_f32(a, b) one_nan((a) / (b))
#define rcp_rn_f32(a) one_nan(1.0f / (a))
#define sqrt_rn_f32(a) one_nan(sqrtf(a))
#define fma_rn_f32(a, b, c) one_nan(fmaf(a, b, c))
#define fma_rn_sat_f32(a, b, c) cvt_sat_f32_f32(fmaf(a, b, c))
#define add_rn_f64(a, b) ((a) + (b))
#define sub_rn_f64(a, b) ((a) - (b))
#define mul_rn_f64(a, b) ((a) * (b))
#define div_rn_f64(a, b) ((a) / (b))
#define rcp_rn_f64(a) (1.0 / (a))
#define sqrt_rn_f64(a) sqrt(a)
#define fma_rn_f64(a, b, c) fma(a, b, c)
#define abs_f32(a) as_f32(as_b32(a) & 0x7fffffffu)
#define abs_f64(a) as_f64(as_b64(a) & 0x7fffffffffffffffull)
#define copysign_f32(a, b) as_f32((as_b32(a) & 0x80000000u) | (as_b32(b) & 0x7fffffffu))  // b with the sign of a
#define neg_f32(a) as_f32(as_b32(a) ^ 0x80000000u)
#define neg_f64(a) as_f64(as_b64(a) ^ 0x8000000000000000ull)

// ---- conversions

#define cvt_s16_s8(a) ((uint16_t)(int16_t)(int8_t)(a))
#define cvt_s32_s8(a) U32((int32_t)(int8_t)(a))
#define cvt_s32_s16(a) U32((int32_t)(int16_t)(a))
#define cvt_s64_s32(a) U64((int64_t)S32(a))
#define cvt_u16_u32(a) ((uint16_t)(a))
#define cvt_u16_u64(a) ((uint16_t)(a))
#define cvt_u32_u16(a) U32(a)
#define cvt_u32_u64(a) U32(a)
#define cvt_u64_u16(a) ((uint64_t)(a))
#define cvt_u64_u32(a) U64(a)
#define cvt_f64_f32(a) ((double)(a))
#define cvt_rn_f32_f64(a) one_nan((float)(a))
#define cvt_rn_f32_s16(a) ((float)S16(a))
#define cvt_rn_f32_s32(a) ((float)S32(a))
#define cvt_rn_f32_u16(a) ((float)(a))
#define cvt_rn_f64_s32(a) ((double)S32(a))
#define cvt_rn_f64_s64(a) ((double)S64(a))
#define cvt_rmi_f32_f32(a) one_nan(floorf(a))
#define cvt_rni_f32_f32(a) one_nan(rintf(a))
// Saturating, NaN to 0.
#define cvt_rzi_s32_f64(a) U32((a) != (a) ? 0 : (int32_t)fmin(fmax(trunc(a), -2147483648.0), 2147483647.0))
#define cvt_rzi_f32_f32(a) one_nan(truncf(a))
#define cvt_sat_f32_f32(a) ((a) > 0.0f ? ((a) < 1.0f ? (a) : 1.0f) : 0.0f)
