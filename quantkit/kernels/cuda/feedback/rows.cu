// Conversion of rows between bytes and tiles.
//     to_lanes       rows as lanes of a tile
//     read_scales    the scales of a tile, from bytes
//     keep           which rows are better than the best so far
//     write          the bytes of those
#include "core/device.cuh"
#include "feedback/fields.cuh"
#include "feedback/tiles.cuh"

// rows of n values; out: tiles [n][ROWS]; missing rows are copies of the last one.
struct to_lanes_args {
    const float* x;
    float* out;
    int64_t rows, n;
};

KERNEL(to_lanes, 128) {
    __shared__ float values[ROWS][33];
    const int64_t first = (int64_t)blockIdx.x * ROWS, begin = (int64_t)blockIdx.y * 32;
    const int lane = lane_id(), warp = warp_here();
    for (int row = warp; row < ROWS; row += WARPS)
        values[row][lane] = a.x[(first + row < a.rows ? first + row : a.rows - 1) * a.n + begin + lane];
    __syncthreads();
    for (int k = warp; k < 32; k += WARPS) a.out[(first / ROWS * a.n + begin + k) * ROWS + lane] = values[lane][k];
}

// Fields are arrays [fields][bits] of bit positions; bits is 0 where there are none. Those of factors, minimums and
// shifts belong to a block; d and dmin too, or to the row's header, of `header` bytes. factor_indices: of the factor
// of each s. The other members are outputs, described at tile_args. super: sub-blocks per superblock, block: per
// block.
struct read_scales_args {
    const uint8_t* bytes;
    const int32_t *factor_fields, *minimum_fields, *shift_fields, *d_field, *dmin_field, *factor_indices;
    const float* factors;
    float *scale, *minimum, *inverse, *m, *shift, *d, *dmin;
    int32_t* factor_index;
    int64_t rows, row_bytes, block_bytes, header, subs, super, block;
    int64_t factor_bits, minimum_bits, shift_bits, d_bits, dmin_bits, by_row, added;
    double by;
};

KERNEL(read_scales, 128) {
    const int lane = lane_id();
    const int64_t row = min((int64_t)blockIdx.x * ROWS + lane, a.rows - 1), supers = a.subs / a.super;
    const uint8_t* bytes = a.bytes + row * a.row_bytes;
    for (int64_t sub = (int64_t)blockIdx.y * WARPS + warp_here(); sub < a.subs; sub += (int64_t)gridDim.y * WARPS) {
        const uint8_t *block = bytes + a.header + sub / a.block * a.block_bytes, *floats = a.by_row ? bytes : block;
        const int item = (int)(sub % a.block);
        const int64_t at = (blockIdx.x * a.subs + sub) * ROWS + lane, up = (blockIdx.x * supers + sub / a.super) * ROWS + lane;
        const float d = a.d_bits ? float_of(field_of(floats, a.d_field, (int)a.d_bits), (int)a.d_bits) : 1.0f;
        float dmin = a.dmin_bits ? float_of(field_of(floats, a.dmin_field, (int)a.dmin_bits), (int)a.dmin_bits) : 0.0f;
        if (a.added) dmin = -dmin;
        if (sub % a.super == 0) {
            a.d[up] = d;
            a.dmin[up] = dmin;
        }
        int factor_index = 0;
        float scale = d, m = a.dmin_bits ? 1.0f : 0.0f, shift = 0;
        if (a.factor_bits) {
            factor_index = a.factor_indices[field_of(block, a.factor_fields + item * a.factor_bits, (int)a.factor_bits)];
            scale = d * a.factors[factor_index];
        }
        if (a.minimum_bits) m = (float)(int)field_of(block, a.minimum_fields + item * a.minimum_bits, (int)a.minimum_bits);
        if (a.shift_bits)
            shift = (float)(int)field_of(block, a.shift_fields + item * a.shift_bits, (int)a.shift_bits) * (float)a.by;
        a.factor_index[at] = factor_index;
        a.scale[at] = scale;
        a.m[at] = m;
        a.shift[at] = shift;
        a.minimum[at] = (a.dmin_bits ? dmin * m : 0.0f) - scale * shift;
        a.inverse[at] = fabsf(scale) > 1.17549435e-38f ? 1.0f / scale : 0.0f;
    }
}

// loss: per tile; best: per row, f64. better: int32 [rows], written. A row is replaced where its loss is less than
// `share` of the best.
struct keep_args {
    const double* loss;
    double* best;
    int32_t* better;
    int64_t rows;
    double share;
};

KERNEL(keep, 128) {
    const int64_t row = (int64_t)blockIdx.x * 128 + threadIdx.x;
    if (row >= a.rows) return;
    const bool better = a.loss[row] < a.best[row] * a.share;
    a.better[row] = better;
    if (better) a.best[row] = a.loss[row];
}

// sources: of each bit of a row's header, then of a block's (fields.cuh). level_codes: by level & 255; 0 where levels
// are the integers of groups, bit by bit. factor_codes: by factor_index. The other members as above. Bits without a
// source keep their value.
struct write_args {
    uint8_t* bytes;
    const int32_t *better, *sources, *level_codes, *factor_codes, *factor_index;
    const float *levels, *m, *shift, *d, *dmin;
    int64_t rows, n, row_bytes, block_bytes, header, subs, super, block, values, d_bits, dmin_bits, added;
};

// The bits of an integer or a float of this lane's row. block: of the row, or 0 for its header.
INLINE uint32_t stored(const write_args& a, const Source& of, int64_t block) {
    const int64_t sub = (blockIdx.x * a.subs + block * a.block + of.item) * ROWS + lane_id();
    if (of.kind == LEVEL) {
        const int64_t at = (blockIdx.x * a.n + block * a.values + of.item) * ROWS + lane_id();
        if (!a.level_codes) return __float_as_uint(a.levels[at]);
        return (uint32_t)a.level_codes[(int)a.levels[at] & 255];
    }
    if (of.kind == FACTOR) return (uint32_t)a.factor_codes[a.factor_index[sub]];
    if (of.kind == MINIMUM) return (uint32_t)(int)a.m[sub];
    if (of.kind == SHIFT) return a.shift[sub] != 0.0f;
    const int64_t supers = a.subs / a.super, up = (blockIdx.x * supers + block * a.block / a.super + of.item) * ROWS + lane_id();
    if (of.kind == D) return bits_of(a.d[up], (int)a.d_bits);
    return bits_of(a.added ? -a.dmin[up] : a.dmin[up], (int)a.dmin_bits);
}

KERNEL(write, 128) {
    const int64_t row = (int64_t)blockIdx.x * ROWS + lane_id();
    if (row >= a.rows || !a.better[row]) return;
    uint8_t* bytes = a.bytes + row * a.row_bytes;
    for (int64_t i = (int64_t)blockIdx.y * WARPS + warp_here(); i < a.row_bytes; i += (int64_t)gridDim.y * WARPS) {
        const int64_t inside = i - a.header, block = inside < 0 ? 0 : inside / a.block_bytes;
        const int32_t* sources = a.sources + 8 * (inside < 0 ? i : i - block * a.block_bytes);
        uint32_t byte = bytes[i], whole = 0;
        int32_t last = -1;
        for (int bit = 0; bit < 8; bit++) {
            const Source of((uint32_t)sources[bit]);
            if (of.kind == NOTHING) continue;
            const int32_t which = sources[bit] >> 8;  // bits of one integer are often adjacent
            if (which != last) whole = stored(a, of, block);
            last = which;
            byte = (byte & ~(1u << bit)) | (whole >> of.bit & 1) << bit;
        }
        bytes[i] = (uint8_t)byte;
    }
}
