// Encodes rows of f32 as Q8_K_R8 and Q8_K_R16: superblocks like those of activations, the largest magnitude at 127, of
// ROWS rows together; the twin of quantkit/kernels/cpu/encode/q8_k.py. Macro: ROWS.
#include "core/device.cuh"

// rows of n values, 16-byte aligned; out: the encoded rows, 16-byte aligned.
struct q8_k_args {
    const float* x;
    uint8_t* out;
    int64_t n;
};

// A level; -128 where 127 / top is infinite, like cvtps2dq.
INLINE uint32_t level_of(float v) {
    const float rounded = rintf(v);
    return (uint32_t)(fabsf(rounded) <= 3.40282347e38f ? (int)rounded : -128) & 255;
}

// A thread block has a superblock of ROWS rows, a warp one row after another: a lane dwords l and l + 32 of it.
KERNEL(q8_k, 256) {
    const int64_t blocks = a.n / 256, group = blockIdx.x / blocks, block = blockIdx.x % blocks;
    const int lane = threadIdx.x % 32;
    uint8_t* out = a.out + (int64_t)blockIdx.x * (258 * ROWS);
    for (int row = threadIdx.x / 32; row < ROWS; row += 8) {
        const float* x = a.x + (group * ROWS + row) * a.n + block * 256 + 4 * lane;
        const float4 four[2] = {*(const float4*)x, *(const float4*)(x + 128)};
        float top = 0;
        for (int k = 0; k < 2; k++)
            top = fmaxf(fmaxf(top, fmaxf(fabsf(four[k].x), fabsf(four[k].y))), fmaxf(fabsf(four[k].z), fabsf(four[k].w)));
        top = warp_max(top);
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        for (int k = 0; k < 2; k++) {
            const uint32_t word = level_of(inverse * four[k].x) | level_of(inverse * four[k].y) << 8 |
                                  level_of(inverse * four[k].z) << 16 | level_of(inverse * four[k].w) << 24;
            *(uint32_t*)(out + 2 * ROWS + 4 * ((lane + 32 * k) * ROWS + row)) = word ^ (ROWS == 16 ? 0x80808080u : 0);
        }
        if (lane == 0) *(uint16_t*)(out + 2 * row) = float_to_half(top / 127.0f);
    }
}
