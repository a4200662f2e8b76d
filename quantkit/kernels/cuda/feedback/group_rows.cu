// Kernels beside the sweeps over groups (group_sweeps.cuh), for tiles whose levels come from a grid.
//     read_codes          the codes of groups, and the classes of sub-blocks, from bytes
//     q_of_codes          the integers of groups, to be written
//     set_scales          scales, minimums, 1 / scale, from factors and d
//     set_values          levels, values and errors, from codes and scales
//     gradient            g = H e
//     losses              the sum of g e; copy_losses: of rows
//     errors              e = x - v
//     fit_factors         the factors of sub-blocks, in turn; fit_super_scales: every d
#define WARPS_OF_TILE 8
#include "feedback/fields.cuh"
#include "feedback/scales.cuh"

// A grid: columns per point, points per group, bits of an index, of a group's signs (even: one less than columns, an
// even number is negative), of a point's number. order, point_of_index, pattern_of: codebook_tree.py. Tile after tile:
// codes [groups * parts][ROWS], q [groups][ROWS].
struct codes_args {
    const int32_t *order, *point_of_index;
    const uint8_t *signs, *pattern_of;
    int32_t* codes;
    int64_t rows, n, size, parts, index_bits, sign_bits, even, point_bits;
};

// fields: of the integers of a block's groups, int32 [groups of a block][bits]; shift_fields: of the bit that selects
// a sub-block's codebook, [subs][1], if a type has codebooks. classes: [subs][ROWS], written.
struct read_codes_args : codes_args {
    const uint8_t* bytes;
    const int32_t *fields, *shift_fields;
    int32_t* classes;
    int64_t row_bytes, block_bytes, header, block, bits, span, codebooks;
};

KERNEL(read_codes, 256) {
    const int lane = lane_id(), width = (int)(a.size * a.parts), groups = (int)a.n / width, subs = (int)(a.n / a.span);
    const int64_t row = min((int64_t)blockIdx.x * ROWS + lane, a.rows - 1);
    const uint8_t* blocks = a.bytes + row * a.row_bytes + a.header;
    int32_t *codes = of_tile(a.codes, groups * a.parts), *classes = of_tile(a.classes, subs);
    const int per_block = (int)a.block / width, subs_per_block = (int)(a.block / a.span), per_sub = groups / subs;
    for (int group = (int)blockIdx.y * WARPS + warp_here(); group < groups; group += (int)gridDim.y * WARPS) {
        const uint8_t* block = blocks + group / per_block * a.block_bytes;
        const uint32_t q = field_of(block, a.fields + group % per_block * a.bits, (int)a.bits);
        const int sub = group / per_sub;
        const int codebook = a.codebooks > 1 ? (int)field_of(block, a.shift_fields + sub % subs_per_block, 1) : 0;
        uint32_t negative = q >> (a.parts * a.index_bits);
        if (a.even) negative |= (uint32_t)(__popc(negative) & 1) << a.sign_bits;
        for (int part = 0; part < a.parts; part++) {
            const int index = (int)(q >> (part * a.index_bits) & ((1u << a.index_bits) - 1)) + (codebook << a.index_bits);
            const int pattern = a.sign_bits ? a.pattern_of[negative >> (part * a.size) & ((1u << a.size) - 1)] : 0;
            codes[ROWS * (group * a.parts + part) + lane] = pattern << a.point_bits | a.point_of_index[index];
        }
        if (group % per_sub == 0) classes[ROWS * sub + lane] = codebook;
    }
}

struct q_of_codes_args : codes_args {
    uint32_t* q;
};

KERNEL(q_of_codes, 256) {
    const int lane = lane_id(), groups = (int)(a.n / (a.size * a.parts));
    const int32_t* codes = of_tile(a.codes, groups * a.parts);
    for (int group = (int)blockIdx.y * WARPS + warp_here(); group < groups; group += (int)gridDim.y * WARPS) {
        uint32_t indices = 0, negative = 0;
        for (int part = 0; part < a.parts; part++) {
            const int code = codes[ROWS * (group * a.parts + part) + lane], point = code & ((1 << a.point_bits) - 1);
            indices |= ((uint32_t)a.order[point] & ((1u << a.index_bits) - 1)) << (part * a.index_bits);
            negative |= (uint32_t)a.signs[code >> a.point_bits] << (part * a.size);
        }
        negative &= (1u << a.sign_bits) - 1;
        of_tile(a.q, groups)[ROWS * group + lane] = indices | negative << (a.parts * a.index_bits);
    }
}

// Tile after tile, [subs][ROWS]; d: [subs / super][ROWS]. stored: use d as it is stored, as f16.
struct set_scales_args {
    const float *factors, *shift, *d;
    const int32_t* factor_index;
    float *scale, *minimum, *inverse;
    int64_t subs, super, stored;
};

KERNEL(set_scales, 256) {
    const int lane = lane_id(), subs = (int)a.subs;
    const float *d = of_tile(a.d, subs / a.super), *shift = of_tile(a.shift, subs);
    const int32_t* factor_index = of_tile(a.factor_index, subs);
    float *scales = of_tile(a.scale, subs), *minimum = of_tile(a.minimum, subs), *inverse = of_tile(a.inverse, subs);
    for (int sub = (int)blockIdx.y * WARPS + warp_here(); sub < subs; sub += (int)gridDim.y * WARPS) {
        const int at = ROWS * sub + lane;
        float d_of_row = d[ROWS * (sub / (int)a.super) + lane];
        if (a.stored) d_of_row = half_to_float(float_to_half(d_of_row));
        const float scale = a.factors[factor_index[at]] * d_of_row;
        scales[at] = scale;
        minimum[at] = 0.0f - scale * shift[at];
        inverse[at] = fabsf(scale) > 1.17549435e-38f ? 1.0f / scale : 0.0f;
    }
}

// lines: of points (codebook_tree.py). order: of columns, group after group.
struct set_values_args {
    const uint8_t *lines, *signs;
    const int32_t *order, *codes;
    const float *x, *scale, *minimum;
    float *v, *e;
    int64_t n, span, size, point_bits;
    double unit;
};

KERNEL(set_values, 256) {
    const int lane = lane_id(), n = (int)a.n, size = (int)a.size;
    const float *x = of_tile(a.x, n), *scale = of_tile(a.scale, n / a.span), *minimum = of_tile(a.minimum, n / a.span);
    const int32_t* codes = of_tile(a.codes, n / size);
    float *v = of_tile(a.v, n), *e = of_tile(a.e, n);
    for (int k = (int)blockIdx.y * WARPS + warp_here(); k < n; k += (int)gridDim.y * WARPS) {
        const int code = codes[ROWS * (k / size) + lane], point = code & ((1 << a.point_bits) - 1);
        const float level = (float)((int)a.lines[point * size + k % size] - 128) * (float)a.unit;
        const float signed_level = a.signs[code >> a.point_bits] >> (k % size) & 1 ? -level : level;
        const int column = a.order[k], at = ROWS * column + lane, sub = ROWS * (column / (int)a.span) + lane;
        const float value = scale[sub] * signed_level - minimum[sub];
        v[at] = value;
        e[at] = x[at] - value;
    }
}

struct gradient_args {
    const float *h, *e;
    float* g;
    int64_t n;
};

KERNEL(gradient, 256) {
    __shared__ __align__(16) Chunk chunks[2];
    const int n = (int)a.n, from = (int)blockIdx.y * WIDE, first = from + OWN * warp_here();
    const int columns = n - from < WIDE ? n - from : WIDE;
    float sum[OWN] = {};
    multiply(sum, a.h + (int64_t)from * n, n, of_tile(a.e, n), n, columns, chunks);
    if (OWN * warp_here() < columns)
#pragma unroll
        for (int i = 0; i < OWN; i++) of_tile(a.g, n)[ROWS * (first + i) + lane_id()] = sum[i];
}

// loss: per tile, f64 [ROWS].
struct losses_args {
    const float *g, *e;
    double* loss;
    int64_t n;
};

KERNEL(losses, 32) {
    const int n = (int)a.n, lane = lane_id();
    const float *g = of_tile(a.g, n), *e = of_tile(a.e, n);
    double total = 0;
#pragma unroll 8
    for (int k = 0; k < n; k++) total = total + (double)g[ROWS * k + lane] * (double)e[ROWS * k + lane];
    of_tile(a.loss, 1)[lane] = total;
}

// before, after: losses per row.
struct copy_losses_args {
    const double* loss;
    double *before, *after;
    int64_t rows;
};

KERNEL(copy_losses, 256) {
    const int64_t row = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (row < a.rows) a.before[row] = a.after[row] = a.loss[row];
}

// e = x - v.
struct errors_args {
    const float *x, *v;
    float* e;
    int64_t n;
};

KERNEL(errors, 256) {
    const int n = (int)a.n;
    const float *x = of_tile(a.x, n), *v = of_tile(a.v, n);
    float* e = of_tile(a.e, n);
    for (int k = (int)blockIdx.y * WARPS + warp_here(); k < n; k += (int)gridDim.y * WARPS) {
        const int at = ROWS * k + lane_id();
        e[at] = x[at] - v[at];
    }
}

struct fit_factors_args : fit_args {};
struct fit_super_scales_args : fit_args {};

KERNEL(fit_factors, 256) {
    __shared__ __align__(16) FactorScratch scratch;
    fit_factors(a, scratch);
}

KERNEL(fit_super_scales, 256) {
    __shared__ __align__(16) SuperBlockScratch scratch;
    fit_super_scales(a, scratch);
}
