// Decode rows of a type to f32, f16 or bf16: all, or those named by the tokens of a batch. Compiled with TYPE.
//
// A warp takes 32 parts of 32 values, one per lane; then all lanes write one part after another, so that stores
// coalesce.
#include "core/device.cuh"
#include "unpack/all.cuh"

#define TO_F32 0
#define TO_F16 1
#define TO_BF16 2

#define WARPS 8

struct dequantize_args {
    const uint8_t* w;
    uint8_t* out;
    int64_t row_bytes, rows, n, out_stride, to;  // strides in bytes; to: TO_F32 ...
};

// out = scale * the rows of w named by the tokens of a batch, or by their positions.
struct embed_args {
    const Batch* batch;
    const uint8_t* w;
    uint8_t* out;
    int64_t row_bytes, rows, n, out_stride, by_position;
    double scale;
};

INLINE int value_bytes(int to) { return to == TO_F32 ? 4 : 2; }

// The row of a part's values, and their destination; n: their number, at most 32.
struct Place {
    const uint8_t* from;
    uint8_t* to;
    int part, n;
};

// The place of part `index` of all rows; tokens: which row to read for each, or null.
template <typename A> INLINE Place place_of(const A& a, const int32_t* tokens, int to, int64_t index) {
    const int64_t per_row = (a.n + 31) / 32, row = index / per_row, part = index - row * per_row;
    const uint8_t* from = a.w + (tokens ? (int64_t)tokens[row] : row) * a.row_bytes;
    const int64_t left = a.n - 32 * part;
    return {from, a.out + row * a.out_stride + 32 * value_bytes(to) * part, (int)part, left < 32 ? (int)left : 32};
}

INLINE uint32_t rounded(float v, int to) { return to == TO_F16 ? float_to_half(v) : float_to_bf16(v); }

INLINE uint32_t two(float a, float b, int to) { return rounded(a, to) | rounded(b, to) << 16; }

INLINE void write_four(uint8_t* out, const float* v, int to) {
    if (to == TO_F32) *(float4*)out = make_float4(v[0], v[1], v[2], v[3]);
    else *(uint2*)out = make_uint2(two(v[0], v[1], to), two(v[2], v[3], to));
}

// A part in shared memory: an odd number of words, which avoids bank conflicts.
struct Staged {
    uint32_t to[2];
    int q[8];
    float d[2], m[2];
    int unused;
};

template <typename T> struct Rows {
    template <typename A>
    STATIC_INLINE void write_parts(const A& a, const int32_t* tokens, float scale, int to, Staged (*shared)[32]) {
        const int lane = threadIdx.x & 31;
        Staged* staged = shared[threadIdx.x >> 5];
        const int64_t first = ((int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5)) * 32, parts = a.rows * (a.n / 32);
        if (first >= parts) return;
        const int64_t left = parts - first;
        const int count = left < 32 ? (int)left : 32;
        if (lane < count) {
            const Place at = place_of(a, tokens, to, first + lane);
            const int per_block = T::BLOCK / 32;
            Levels l;
            T::unpack(at.from + T::HEADER + (int64_t)(at.part / per_block) * T::BYTES, at.part % per_block, l);
#ifdef FOR_PRODUCT
            const float of_row = product_scale<T>(at.from);
#else
            const float of_row = row_scale<T>(at.from);
#endif
            Staged& s = staged[lane];
            s.to[0] = (uint32_t)(uint64_t)at.to, s.to[1] = (uint32_t)((uint64_t)at.to >> 32);
            for (int i = 0; i < 8; i++) s.q[i] = l.q[i];
            for (int i = 0; i < 2; i++) {
                s.d[i] = T::ROW_SCALE ? of_row * l.d[i] : l.d[i];
                if (T::MINS) s.m[i] = l.m[i];
            }
        }
        __syncwarp();
        const int i = lane & 7;  // four values of a part, 8 lanes per part
        for (int k = lane >> 3; k < count; k += 4) {
            const Staged& s = staged[k];
            const uint32_t q = (uint32_t)s.q[i];
            const float d = s.d[i >> 2], m = T::MINS ? s.m[i >> 2] : 0;
            float v[4];
            for (int j = 0; j < 4; j++) {
                v[j] = d * (float)(int8_t)(q >> 8 * j);
                if (T::MINS) v[j] -= m;
                v[j] *= scale;
            }
            write_four((uint8_t*)((uint64_t)s.to[0] | (uint64_t)s.to[1] << 32) + 4 * value_bytes(to) * i, v, to);
        }
    }
};

// For floats, each lane reads one value of a part.
template <typename T> struct FloatRows {
    STATIC_INLINE void write(uint8_t* out, int i, float v, int to) {
        if (to == TO_F32) ((float*)out)[i] = v;
        else ((uint16_t*)out)[i] = (uint16_t)rounded(v, to);
    }
    template <typename A> STATIC_INLINE void write_parts(const A& a, const int32_t* tokens, float scale, int to, Staged (*)[32]) {
        const int lane = threadIdx.x & 31;
        const int64_t first = ((int64_t)blockIdx.x * WARPS + (threadIdx.x >> 5)) * 32;
        const int64_t parts = a.rows * ((a.n + 31) / 32);
        for (int64_t index = first; index < parts && index < first + 32; index++) {
            const Place at = place_of(a, tokens, to, index);
            const uint8_t* from = at.from + (32 * (int64_t)at.part + lane) * T::BYTES;
            if (lane < at.n) write(at.to, lane, T::value(from) * scale, to);
        }
    }
};
template <> struct Rows<F32> : FloatRows<F32> {};
template <> struct Rows<F16> : FloatRows<F16> {};
template <> struct Rows<BF16> : FloatRows<BF16> {};

KERNEL(dequantize, 256) {
    __shared__ Staged shared[WARPS][32];
    Rows<TYPE>::write_parts(a, nullptr, 1.0f, (int)a.to, shared);
}

KERNEL(embed, 256) {
    __shared__ Staged shared[WARPS][32];
    const int32_t* rows_of = a.by_position ? a.batch->positions : a.batch->tokens;
    Rows<TYPE>::write_parts(a, rows_of, (float)a.scale, TO_F32, shared);
}
