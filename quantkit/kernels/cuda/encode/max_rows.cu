// Encodes rows of f32 as types with one scale per row, from the value of largest magnitude: one thread block per row,
// which reads it once for the scale and again for the levels. Macro: ENCODER (max_rows.cuh).
#include "encode/all.cuh"

// rows of n values, 16-byte aligned; out: the encoded rows.
struct max_rows_args {
    const float* x;
    uint8_t* out;
    int64_t n;
};

KERNEL(max_rows, 256) {
    __shared__ float tops[8];
    __shared__ uint32_t part[32];
    const int64_t row = blockIdx.x;
    const float* x = a.x + row * a.n;
    float most = 0;
    for (int64_t i = 4 * threadIdx.x; i < a.n; i += 4 * 256) {
        const float4 v = *(const float4*)(x + i);
        most = fmaxf(fmaxf(most, fmaxf(fabsf(v.x), fabsf(v.y))), fmaxf(fabsf(v.z), fabsf(v.w)));
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) tops[threadIdx.x / 32] = most;
    __syncthreads();
    for (int i = 0; i < 8; i++) most = fmaxf(most, tops[i]);
    ENCODER::row(x, a.n, most, a.out + row * (ENCODER::HEADER + a.n / ENCODER::BLOCK * ENCODER::BYTES), part);
}
