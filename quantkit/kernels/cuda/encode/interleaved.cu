// ik_llama.cpp's changes to the bytes of rows that it interleaves; the twin of the functions of the same names in
// quantkit/kernels/cpu/encode/interleaved.py. (Its changes to importances are in encode.cu.)
#include "core/device.cuh"

// rows of n values, as bytes.
struct write_ternary_args {
    const float* x;
    uint8_t* out;
    int64_t rows, n;
};
struct repeat_shifts_args : write_ternary_args {};

INLINE uint32_t level(float value, float half) { return value < -half ? 0 : value < half ? 1 : 2; }

// One lane per row, which sums in order; for ternary types a warp writes rows together, each lane two bytes of levels.
KERNEL(write_ternary, 32) {
    __shared__ float values[32 * 33];
    const int64_t first = (int64_t)blockIdx.x * 32;
    const int lane = threadIdx.x, here = (int)(a.rows - first < 32 ? a.rows - first : 32);
    float top = 0, square = 0, error = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int64_t begin = 0; begin < a.n; begin += 32) {
            for (int row = 0; row < here; row++) values[33 * row + lane] = a.x[(first + row) * a.n + begin + lane];
            __syncwarp();
            for (int i = 0; i < 32 && lane < here; i++) {
                const float value = values[33 * lane + i];
                if (pass == 0) {
                    top = fmaxf(top, fabsf(value));
                    continue;
                }
                const float difference = value - top * (float)((int)level(value, 0.5f * top) - 1);
                square = square + value * value;
                error = error + difference * difference;
            }
            __syncwarp();
        }
    uint32_t some = __ballot_sync(FULL, lane < here && error < 0.1f * square);
    for (; some; some &= some - 1) {
        const int row = __ffs((int)some) - 1;
        const float most = __shfl_sync(FULL, top, row), half = 0.5f * most;
        const float* x = a.x + (first + row) * a.n;
        uint8_t* out = a.out + (first + row) * (a.n / 256 * 84);
        for (int64_t block = 0; block < a.n / 256; block++, x += 256, out += 84) {
            for (int i = lane; i < 64; i += 32) {
                uint32_t byte = 0;
                for (int part = 0; part < 4; part++) byte |= level(x[i / 32 * 128 + i % 32 + 32 * part], half) << 2 * part;
                out[16 + i] = (uint8_t)byte;
            }
            if (lane < 16) out[lane] = 0x11;
            if (lane < 2) *(uint16_t*)(out + 80 + 2 * lane) = (uint16_t)float_to_half(most);
        }
    }
}

INLINE float sum_of_squares(const float* x) {
    float total = 0;
    for (int i = 0; i < 16; i++) total = total + x[i] * x[i];
    return total;
}

// The last lane that is set, or a number that no lane has.
INLINE int last_of(uint32_t lanes) { return 32 - __ffs((int)__brev(lanes)); }

// A warp has a group of 4 rows of IQ1_M_ROW, and 8 blocks of each at a time, in ik_llama.cpp's order: of all rows,
// block by block.
KERNEL(repeat_shifts, 32) {
    const int lane = threadIdx.x, row = lane % 4;
    const int64_t blocks = a.n / 32, at = (int64_t)blockIdx.x * 4 + row;
    const float nothing = 1e-14f;
    const uint32_t before = (1u << lane) - 1;
    uint32_t last[2] = {0, 0};
    for (int64_t first = 0; first < blocks; first += 8) {
        const int64_t block = first + lane / 4;
        const bool in_range = block < blocks;
        const float* x = a.x + at * a.n + 32 * block;
        uint8_t* high = a.out + at * (2 + 7 * blocks) + 2 + 7 * block + 4;
        const float sums[2] = {in_range ? sum_of_squares(x) : 0, in_range ? sum_of_squares(x + 16) : 0};
        const bool counts = in_range && !(sums[0] + sums[1] < nothing);
        for (int half = 0; half < 2; half++) {
            const bool sets = counts && sums[half] > nothing;
            const uint32_t own = counts ? high[half] & 0x88 : 0, setting = __ballot_sync(FULL, sets);
            const int from = last_of(setting & before), ending = last_of(setting);
            const uint32_t shift = __shfl_sync(FULL, own, from & 31), end = __shfl_sync(FULL, own, ending & 31);
            if (counts && !sets) high[half] |= (uint8_t)(from > 31 ? last[half] : shift);
            if (ending <= 31) last[half] = end;
        }
    }
}
