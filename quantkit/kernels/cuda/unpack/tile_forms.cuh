// How a warp multiplies 16 rows of a trellis type by one row of x: TileForm<TYPE>, 256 values of each row at a time,
// on tensor cores. These sum the bytes of a level, which on other units costs as much as generating it.
//
// Lane l has, with g = l / 4 and t = l % 4, sub-blocks t and t + 4 of rows g and g + 8. A register of a (mma.cuh) is a
// generated word, the four bytes of a level; so its place in a row of a is the lane's t, and the four lanes of a row
// have four sub-blocks, which b separates: column c belongs to sub-block c / 2 + 4 (c % 2), and is zero except where
// lane c / 2 has its words. So a lane gets the sums of sub-block t (t + 4) for its two rows in c[0] and c[2] (c[1] and
// c[3]), and b is the same for both, and for all rows. Sums of integers are exact, in any order.
//
//     template <> struct TileForm<T> {
//         struct X { ... };                          // what a lane has of 256 values of x
//         static const int STEP = ...;               // bytes of a row between places of neighbouring lanes
//         static const int SCRATCH = ..., TABLE = ...;  // words of shared memory: of a warp, of a block
//         STATIC_INLINE uint32_t word(int i);        // a word of the table
//         STATIC_INLINE void load(const uint8_t* x, bool there, X& v);  // x: what chunk_of says
//         STATIC_INLINE void prepare(const Scratch& scratch, int lane, X& v);
//         // sums[row][half], of sub-blocks t and t + 4, without x.d; the two rows are APART bytes apart
//         template <int APART>
//         STATIC_INLINE void products(const TileRows& rows, int t, const X& v, const Lookup& table, float (&sums)[2][2]);
//     };
#pragma once
#include "unpack/ik_dot_forms.cuh"

template <typename T> struct TileForm;

// The lane's first row: the block plus t bytes, plus STEP t, and the block.
struct TileRows {
    SharedAddress bytes, words, block;
};

// Loads by 32-bit addresses with immediate offsets; not moved across barriers.
#ifdef QUANTKIT_HOST
#define LOAD_SHARED(name, type, kind) \
    INLINE uint32_t name(SharedAddress at) { return *(const type*)at; }
#else
#define LOAD_SHARED(name, type, kind)                                     \
    INLINE uint32_t name(SharedAddress at) {                              \
        uint32_t v;                                                       \
        asm volatile("ld.shared." kind " %0, [%1];" : "=r"(v) : "r"(at)); \
        return v;                                                         \
    }
#endif
LOAD_SHARED(shared_byte, uint8_t, "u8")
LOAD_SHARED(shared_half, uint16_t, "u16")
LOAD_SHARED(shared_word, uint32_t, "u32")

// The sub-block of a column of b; whether the lane is the one of its four that has the column's words; and the offset
// of the eight values of a column that a lane loads: the lane with the words loads the first eight, and the others
// follow.
INLINE int sub_block_of(int column) { return column / 2 + 4 * (column % 2); }
INLINE bool has_column(int lane) { return lane % 4 == lane / 8; }
INLINE int chunk_of(int lane) { return 32 * sub_block_of(lane / 4) + 8 * (lane % 4 ^ lane / 8); }

// The sums of all columns, times FACTOR, in the layout of c.
template <int FACTOR> INLINE void sum_columns(uint2 eight, int (&sums)[4]) {
    const uint32_t factor = (uint32_t)(FACTOR & 255) * ONES, a[4] = {factor, factor, factor, factor}, b[2] = {eight.x, eight.y};
    const int zeros[4] = {0, 0, 0, 0};
    mma_s8(sums, a, b, zeros);
}

// A warp's shared memory: nine columns of b, the last one zero, with 4 words of padding between them, so that the
// writes of a quarter warp have no bank conflicts. A lane writes 8 words of its column, and reads it, or zeros.
struct Scratch {
    static const int COLUMN = 36, WORDS = 9 * COLUMN;
    Place write, read;

    __device__ __forceinline__ Scratch(const uint8_t* base, uint32_t at, int lane)
        : write{base, fixed(at + 4 * (uint32_t)(COLUMN * (lane / 4) + 8 * (lane % 4 ^ lane / 8)))},
          read{base, fixed(at + 4 * (uint32_t)(COLUMN * (has_column(lane) ? lane / 4 : 8)))} {}
};

// Entry i of a table of pairs of words.
INLINE uint2 two_words(const Lookup& table, uint32_t i) {
    const SharedAddress at = table.mine + 8 * i;
#ifdef QUANTKIT_HOST
    return *(const uint2*)at;
#else
    uint2 v;
    asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(at));
    return v;
#endif
}

// The next two words of the generators of two rows, in the layout of a: alternately.
INLINE void next_words(uint32_t (&state)[2], uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i] = state[i % 2] & 0x3f3f3f3fu;
        state[i % 2] *= 0xcbac1fedu;
    }
}

// ---------------------------------------------------------------- levels in the order of generation

// b: four copies of a value of x, because its products with the bytes of a word are summed.
template <typename T> struct GeneratedTile {
    struct X {
        uint2 eight;
        uint32_t b[32];
        int sums[4];
    };
    static const int SCRATCH = Scratch::WORDS;

    STATIC_INLINE void load(const uint8_t* x, bool is_inside, X& v) { v.eight = is_inside ? *(const uint2*)x : make_uint2(0, 0); }
    STATIC_INLINE void prepare(const Scratch& scratch, int, X& v) {
        uint32_t copies[8];
#pragma unroll
        for (int i = 0; i < 8; i++) copies[i] = pick_bytes(i < 4 ? v.eight.x : v.eight.y, 0, 0x1111 * (uint32_t)(i % 4));
        uint4* to = (uint4*)scratch.write.plus(0);
        to[0] = make_uint4(copies[0], copies[1], copies[2], copies[3]);
        to[1] = make_uint4(copies[4], copies[5], copies[6], copies[7]);
        sum_columns<-126>(v.eight, v.sums);
        __syncwarp();
        const uint4* from = (const uint4*)scratch.read.plus(0);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint4 four = from[i];
            v.b[4 * i] = four.x, v.b[4 * i + 1] = four.y, v.b[4 * i + 2] = four.z, v.b[4 * i + 3] = four.w;
        }
    }
    template <int APART>
    STATIC_INLINE void products(const TileRows& rows, int, const X& v, const Lookup& table, float (&sums)[2][2]) {
        const uint32_t more = fixed(4096 * 0xcbac1fedu);
        typename TileForm<T>::Seeds seeds[2][2];
        int factors[2][2], c[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < 4; i++) c[half][i] = v.sums[i];
#pragma unroll
            for (int r = 0; r < 2; r++) TileForm<T>::template start<APART>(rows, r, half, table, seeds[half][r], factors[half][r]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t state[2][2];
#pragma unroll
            for (int i = 0; i < 4; i++)
                state[i / 2][i % 2] =
                    TileForm<T>::template seed<APART>(rows, i % 2, i / 2, seeds[i / 2][i % 2], j) * 0xcbac1fedu + more;
#pragma unroll
            for (int i = 0; i < 8; i += 2)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t a[4];
                    next_words(state[half], a);
                    mma_s8(c[half], a, v.b + 8 * j + i, c[half]);
                }
        }
#pragma unroll
        for (int i = 0; i < 4; i++) sums[i / 2][i % 2] = (float)(c[i % 2][2 * (i / 2) + i % 2] * factors[i % 2][i / 2]);
    }
};

template <> struct TileForm<IQ1_KT> : GeneratedTile<IQ1_KT> {
    struct Seeds {
        uint32_t low, high;
    };
    // For each value of sh: its top bits, as bits 4 of four bytes; its factor.
    static const int STEP = 4, TABLE = 512;
    STATIC_INLINE uint32_t word(int i) {
        const uint32_t sh = (uint32_t)i >> 1, top = sh & 0xf0;
        return i & 1 ? (uint32_t)(int)scale_of(sh & 15) : (top | top << 7 | top << 14 | top << 21) & 0x10101010u;
    }
    template <int APART>
    STATIC_INLINE void start(const TileRows& rows, int r, int half, const Lookup& table, Seeds& seeds, int& factor) {
        const uint2 of_sh = two_words(table, shared_byte(rows.bytes + (APART * r + 4 * half)));
        seeds.low = shared_word(rows.words + (APART * r + 8 + 16 * half));
        seeds.high = (shared_word(rows.words + (APART * r + 40)) >> 4 * half & 0x0f0f0f0fu) | of_sh.x;
        factor = (int)of_sh.y;
    }
    template <int APART> STATIC_INLINE uint32_t seed(const TileRows&, int, int, const Seeds& seeds, int j) {
        return pick_bytes(seeds.low, seeds.high, 0xcc40 + 0x1111 * (uint32_t)j);  // 12 and more: a sign, so 0
    }
};

template <> struct TileForm<IQ2_KT> : GeneratedTile<IQ2_KT> {
    struct Seeds {};
    static const int STEP = 8, TABLE = Table4::WORDS;
    STATIC_INLINE uint32_t word(int i) { return Table4::word(i); }
    template <int APART> STATIC_INLINE void start(const TileRows& rows, int r, int half, const Lookup& table, Seeds&, int& factor) {
        factor = (int8_t)table.first[shared_byte(rows.bytes + APART * r) >> 4 * half & 15];
    }
    template <int APART> STATIC_INLINE uint32_t seed(const TileRows& rows, int r, int half, const Seeds&, int j) {
        return shared_half(rows.words + (APART * r + 4 + 32 * half + 2 * j));
    }
};

// ---------------------------------------------------------------- levels with signs

// Tensor cores sum the four bytes of a level (b: ones); then four levels are packed into a word and multiplied. A sum
// of bytes plus 2 has its top bit set where its level, 126 less, is not negative. A negated level is ~l + 1: the sum
// of those ones is that of all x, less the x of levels that are not negated, whose mask is -1.
template <> struct TileForm<IQ3_KT> {
    struct X {
        uint2 eight;
        uint32_t b[8], ones[2];
        int sums[4];
    };
    static const int STEP = 8, SCRATCH = 0, TABLE = 0;
    STATIC_INLINE uint32_t word(int) { return 0; }

    STATIC_INLINE void load(const uint8_t* x, bool is_inside, X& v) {
        v.eight = is_inside ? *(const uint2*)x : make_uint2(0, 0);
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (is_inside && has_column((int)threadIdx.x & 31)) low = ((const uint4*)x)[0], high = ((const uint4*)x)[1];
        v.b[0] = low.x, v.b[1] = low.y, v.b[2] = low.z, v.b[3] = low.w;
        v.b[4] = high.x, v.b[5] = high.y, v.b[6] = high.z, v.b[7] = high.w;
    }
    STATIC_INLINE void prepare(const Scratch&, int lane, X& v) {
        sum_columns<1>(v.eight, v.sums);
#pragma unroll
        for (int i = 0; i < 2; i++) v.ones[i] = has_column(lane) && lane / 4 % 2 == i ? ONES : 0;
    }
    template <int APART> STATIC_INLINE void products(const TileRows& rows, int t, const X& v, const Lookup&, float (&sums)[2][2]) {
        const uint32_t more = fixed(4096 * 0xcbac1fedu), byte = fixed(256u), two_bytes = fixed(65536u);
        const int twos[4] = {2, 2, 2, 2};
        int c[2][4];
#pragma unroll
        for (int i = 0; i < 8; i++) c[i / 4][i % 4] = v.sums[i % 4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t state[2][2], levels[2][4], kept[2][4];  // words 2 j and 2 j + 1 of both rows, in the layout of a
#pragma unroll
            for (int i = 0; i < 4; i++)
                state[i / 2][i % 2] = shared_half(rows.words + (APART * (i % 2) + 4 + 32 * (i / 2) + 2 * j)) * 0xcbac1fedu + more;
#pragma unroll
            for (int i = 0; i < 4; i += 2) {
                int d[2][2][4];
#pragma unroll
                for (int two = 0; two < 2; two++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        uint32_t a[4];
                        next_words(state[half], a);
                        mma_s8(d[half][two], a, v.ones, twos);
                    }
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    const uint32_t stored = shared_word(rows.block + (APART * r + 68 + 8 * j + 2 * i));
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const int (&of)[2][4] = d[half];
                        const uint32_t low = (uint32_t)of[0][2 * r] + (uint32_t)of[0][2 * r + 1] * byte;
                        const uint32_t q = ((uint32_t)of[1][2 * r] + (uint32_t)of[1][2 * r + 1] * byte) * two_bytes + low;
                        kept[half][i + r] = sign_masks(stored * (128u >> t >> 4 * half) ^ q);
                        levels[half][i + r] = q ^ kept[half][i + r] ^ 0x7f7f7f7fu;
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; half++) mma_s8(c[half], levels[half], v.b + 2 * j, c[half]);
#pragma unroll
            for (int half = 0; half < 2; half++) mma_s8(c[half], kept[half], v.b + 2 * j, c[half]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int factor = shared_byte(rows.bytes + APART * (i / 2)) >> 4 * (i % 2) & 15;
            sums[i / 2][i % 2] = (float)(c[i % 2][2 * (i / 2) + i % 2] * factor);
        }
    }
};
