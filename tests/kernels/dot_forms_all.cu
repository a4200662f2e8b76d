// Every form of a type for few rows (unpack/dot_forms.cuh) in one module, which tests/cuda/test_cuda_dot_forms.py
// compares with numpy.
#include "unpack/ik_dot_forms.cuh"

// w: blocks of a type, `bytes` in all, stored `shift` bytes after a 16-byte aligned address in shared memory. levels:
// the activations. type: an index into the list below. out: each lane's share of the product.
struct dot_forms_all_args {
    const uint8_t *w, *levels;
    float* out;
    int64_t bytes, shift, type, several;
};

template <typename T, bool SEVERAL> INLINE void multiply_blocks(const dot_forms_all_args& a, uint8_t* room, uint32_t* copies) {
    typedef Form<T, SEVERAL> FORM;
    const int lane = threadIdx.x, of_block = T::BLOCK / 32 / FORM::PARTS, lanes = (int)a.bytes / T::BYTES * of_block;
    load_copies<T>(copies);
    for (int i = lane; i < a.bytes; i += blockDim.x) room[16 + a.shift + i] = a.w[i];
    __syncthreads();
    if (lane >= lanes) return;
    const Place place = {room, (uint32_t)(16 + a.shift + lane / of_block * T::BYTES)};
    const Lookup grid(copies, lane, Copies<T>::N);
    Activations x;
    typename FORM::Weights w;
    FORM::load((const uint8_t*)a.levels + FORM::first(lane), lane % of_block, x);
    x.d = 1;
    x.of_words = make_float4(1, 1, 1, 1);
    FORM::prepare(x);
    FORM::unpack(place, lane % of_block, w, grid);
    a.out[lane] = x.d * FORM::product(w, x);
}

// clang-format off
#define EACH_FORM(DO) \
    DO(0, Q3_K) DO(1, IQ1_S) DO(2, IQ1_M) DO(3, IQ2_XXS) DO(4, IQ2_XS) DO(5, IQ2_S) DO(6, IQ3_XXS) DO(7, IQ3_S) \
    DO(8, TQ1_0) DO(9, TQ2_0) DO(10, Q2_0) DO(11, Q1_0) DO(12, Q5_0) \
    DO(13, IQ1_S_ROW) DO(14, IQ1_M_ROW) DO(15, IQ4_K) DO(16, IQ5_K) DO(17, IQ6_K) DO(18, IQ4_KS) DO(19, IQ5_KS) \
    DO(20, IQ4_KSS) DO(21, IQ2_KL) DO(22, IQ2_K) DO(23, IQ3_K) DO(24, IQ2_KS) DO(25, IQ3_KS) \
    DO(26, IQ1_KT) DO(27, IQ2_KT) DO(28, IQ4_KT) DO(29, IQ1_BN) DO(30, IQ3_KT) DO(31, IQ2_BN)
// clang-format on

KERNEL(dot_forms_all, 32) {
    __shared__ __align__(16) uint8_t room[1024];
    __shared__ __align__(256) uint32_t copies[4096];
    switch (2 * a.type + a.several) {
#define MULTIPLY(i, T)                                             \
    case 2 * i: multiply_blocks<T, false>(a, room, copies); break; \
    case 2 * i + 1: multiply_blocks<T, true>(a, room, copies); break;
        EACH_FORM(MULTIPLY)
    }
}
