// Every unpacker in one module: what tests/test_cuda_unpack.py compares with the reference.
#define TYPE Q4_K
#include "dequantize.cu"

// type: an index of the list below. out: of each part 8 ints, 2 scales, 2 minimums (NaN without).
struct unpack_all_args {
    const uint8_t* w;
    uint32_t* out;
    int64_t blocks, type, shared_grid;
};

template <typename T> INLINE void unpack_blocks(const unpack_all_args& a, uint32_t* grid) {
    if (a.shared_grid) load_grid<T>(grid);
    __syncthreads();
    const int parts = T::BLOCK / 32;
    for (int64_t i = threadIdx.x; i < a.blocks * parts; i += blockDim.x) {
        Levels l;
        l.m[0] = l.m[1] = __uint_as_float(0x7fc00000u);
        const uint8_t* p = a.w + i / parts * T::BYTES;
        if (a.shared_grid) unpack_with<T>(p, (int)(i % parts), l, grid);
        else T::unpack(p, (int)(i % parts), l);
        for (int k = 0; k < 8; k++) a.out[12 * i + k] = (uint32_t)l.q[k];
        for (int k = 0; k < 2; k++) {
            a.out[12 * i + 8 + k] = __float_as_uint(l.d[k]);
            a.out[12 * i + 10 + k] = __float_as_uint(l.m[k]);
        }
    }
}

// Block, bytes, align, minimums, halves, words of the grid.
template <typename T> INLINE void describe(uint32_t* out) {
    out[0] = T::BLOCK, out[1] = T::BYTES, out[2] = T::ALIGN;
    out[3] = T::MINS, out[4] = T::HALVES, out[5] = Grid<T>::WORDS;
}

#define EACH_TYPE(DO)                                                                                      \
    DO(0, Q4_0) DO(1, Q4_1) DO(2, Q5_0) DO(3, Q5_1) DO(4, Q8_0) DO(5, Q2_K) DO(6, Q3_K) DO(7, Q4_K)        \
    DO(8, Q5_K) DO(9, Q6_K) DO(10, IQ1_S) DO(11, IQ1_M) DO(12, IQ2_XXS) DO(13, IQ2_XS) DO(14, IQ2_S)       \
    DO(15, IQ3_XXS) DO(16, IQ3_S) DO(17, IQ4_NL) DO(18, IQ4_XS) DO(19, TQ1_0) DO(20, TQ2_0) DO(21, Q2_0)   \
    DO(22, Q1_0) DO(23, MXFP4) DO(24, NVFP4)

KERNEL(unpack_all, 64) {
    __shared__ uint32_t grid[2048];
    switch (a.type) {
#define UNPACK(i, T) case i: unpack_blocks<T>(a, grid); break;
        EACH_TYPE(UNPACK)
    }
}

struct describe_all_args {
    uint32_t* out;
};

KERNEL(describe_all, 32) {
#define DESCRIBE(i, T) describe<T>(a.out + 6 * i);
    if (threadIdx.x == 0) { EACH_TYPE(DESCRIBE) }
}

// dequantize and embed of any type in one module; tokens: rows, or null.
struct write_all_args {
    const uint8_t* w;
    uint8_t* out;
    int64_t row_bytes, rows, n, out_stride;
    const int32_t* tokens;
    double scale;
    int64_t type;
};

KERNEL(write_all, 256) {
    __shared__ Staged shared[WARPS][32];
    switch (a.type) {
#define WRITE(i, T) case i: Rows<T>::write_parts(a, a.tokens, (float)a.scale, TO_F32, shared); break;
        EACH_TYPE(WRITE)
        WRITE(25, F32) WRITE(26, F16) WRITE(27, BF16)
    }
}
