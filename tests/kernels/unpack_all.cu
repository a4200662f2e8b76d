// Every unpacker in one module, which tests/cuda/test_cuda_unpack.py compares with the reference. EACH_TYPE(DO),
// EACH_FLOAT(DO): DO(i, TYPE) for every type.
#define TYPE Q4_K
#include "unpack/dequantize.cu"

// type: its index. out: per part 8 ints, 2 scales, 2 minimums (NaN without).
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

KERNEL(unpack_all, 64) {
    __shared__ uint32_t grid[2048];
    switch (a.type) {
#define UNPACK(i, T) \
    case i: unpack_blocks<T>(a, grid); break;
        EACH_TYPE(UNPACK)
    }
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
#define WRITE(i, T) \
    case i: Rows<T>::write_parts(a, a.tokens, (float)a.scale, TO_F32, shared); break;
        EACH_TYPE(WRITE)
        EACH_FLOAT(WRITE)
    }
}
