// How a lane multiplies weights of a type by few rows of activations: Form<TYPE>. Instructions are the bottleneck, so
// work moves from the weights to the activations, which all rows of weights share:
//
//     order    values of x are loaded, or permuted, into the stored order of the weights: Form::first, load, prepare
//     offset   levels stay unsigned: sum of (q - o) x = sum of q x - o * (sum of x)
//     fields   several values in one byte are masked, not shifted down; the sum so far is multiplied between fields, so
//              that all end with the weight of the last
//     scales   small integers times one d: products are summed as integers, then multiplied by d
//     powers   of two go into the scale of x
//
// All are exact: sums of integers, and multiplications by powers of two. A lane takes PARTS parts of 32 values at a
// time: two for types with one d per 256 values, to share work between them. (x then has one d per 256 values.)
//
//     template <> struct Form<T> : InOrder<PARTS> {
//         struct Weights { ... };                                       // one row
//         STATIC_INLINE void prepare(Activations& x);                   // after loading x, once
//         STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid);
//         STATIC_INLINE float product(const Weights& w, const Activations& x);    // without x.d
//     };
//
// `part`: the number within the block, in units of PARTS. Types not named here are unpacked to levels in order.
// SEVERAL: more than two columns, where permuting x costs more than permuting the weights.
#pragma once
#include "core/async_copy.cuh"
#include "unpack/all.cuh"

// A lane's activations: values in the form's order, and data derived from them.
struct Activations {
    int q[16], more[8], fourfold[32];
    float d;
    float2 sums;
    float4 of_words;  // the four scales of a row of q8_k64; d is 1
};

// PARTS * 32 values in order.
template <int N> struct InOrder {
    static const int PARTS = N;
    // Offset of the lane's values in a row.
    STATIC_INLINE int first(int part) { return 32 * N * part; }
    // Loads them from that offset; part: the lane's number in the block.
    STATIC_INLINE void load(const uint8_t* x, int, Activations& v) {
#pragma unroll
        for (int i = 0; i < 2 * N; i++) {
            const int4 four = ((const int4*)x)[i];
            v.q[4 * i] = four.x, v.q[4 * i + 1] = four.y, v.q[4 * i + 2] = four.z, v.q[4 * i + 3] = four.w;
        }
    }
    STATIC_INLINE void prepare(Activations&) {}
};

// sum + the products of N words.
template <int N> INLINE int add_dots(const int* a, const int* b, int sum) {
#pragma unroll
    for (int i = 0; i < N; i++) sum = __dp4a(a[i], b[i], sum);
    return sum;
}

template <int N> INLINE int sum_of(const int* x) {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) sum = __dp4a(x[i], (int)ONES, sum);
    return sum;
}

// Interleaved copies of a grid in shared memory: lanes that read different entries of one copy may conflict in a bank,
// so with 16 (8) copies at most 2 (4) lanes share one. For multiprocessors with enough shared memory.
#if __CUDA_ARCH__ >= 1200 || __CUDA_ARCH__ < 900 && __CUDA_ARCH__ != 800
#define COPIED_WORDS 0
#else
#define COPIED_WORDS 4096
#endif
template <typename T> struct Copies {
    static const int N = T::GRID > 0 && 8 * T::GRID <= COPIED_WORDS ? COPIED_WORDS / T::GRID : 1;
    static const int WORDS = N * T::GRID;
    STATIC_INLINE uint32_t word(int i) { return Grid<T>::table()[i / N]; }
};

// Fill them, aligned to 16 bytes, with all threads of a block; a barrier must follow before reads.
template <typename T> INLINE void load_copies(uint32_t* shared) {
    if constexpr (Copies<T>::N > 1) {
#pragma unroll 4
        for (int i = threadIdx.x; i < Copies<T>::WORDS / 4; i += blockDim.x) {
            const uint32_t v = Copies<T>::word(4 * i);
            ((uint4*)shared)[i] = make_uint4(v, v, v, v);
        }
    } else {
#pragma unroll 4
        for (int i = threadIdx.x; i < Copies<T>::WORDS; i += blockDim.x) shared[i] = Copies<T>::word(i);
    }
}

// Tables of levels: the lane's copy of a grid; and the magnitudes of IQ2.
struct Lookup {
    SharedAddress mine;
    const uint8_t* first;  // of one copy: an address without a computation
    uint32_t magnitudes;

    // The compiler would keep a constant or a uniform value in a uniform register, and copy it whenever an instruction
    // needs another one. Therefore the unselected byte of the magnitudes is the lane, and the address of a single copy
    // includes lane / 32, which is 0.
    __device__ __forceinline__ Lookup(uint32_t* copies, int lane, int number)
        : mine(shared_address((uint8_t*)copies) + (uint32_t)(number > 1 ? lane % number * 4 : lane / 32)),
          first((const uint8_t*)copies),
          magnitudes(IQ2_MAGNITUDES | (uint32_t)lane << 24) {}
};

// An entry, by a 32-bit address computed with one multiplication.
template <typename T> INLINE uint32_t entry(const Lookup& grid, uint32_t index) {
    const SharedAddress at = grid.mine + index * (4 * Copies<T>::N);
#ifdef QUANTKIT_HOST
    return *(const uint32_t*)at;
#else
    uint32_t v;
    asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at));
    return v;
#endif
}

// Byte j of a word: one permutation instead of a shift and a mask.
INLINE uint32_t picked(uint32_t x, int j) { return pick_bytes(x, 0, 0x4440 + (uint32_t)j); }

// The place of a block in shared memory: `at` bytes after an address that is a multiple of 4.
struct Place {
    const uint8_t* base;
    uint32_t at;

    __device__ __forceinline__ const uint8_t* plus(int bytes) const { return base + (at + (uint32_t)bytes); }
    __device__ __forceinline__ float half(int bytes) const { return load_half(plus(bytes)); }

    // N words from byte `bytes` on, a multiple of 2 like `at`, plus `more` words.
    template <int N> __device__ __forceinline__ void words(int bytes, int more, uint32_t (&out)[N]) const {
        const uint32_t first = at + (uint32_t)bytes % 4;
        const uint32_t* words = (const uint32_t*)(base + ((first & ~3u) + 4 * (uint32_t)(bytes / 4 + more)));
        uint32_t low = words[0];
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t high = words[i + 1];
            out[i] = __funnelshift_r(low, high, 8 * first);  // modulo 32
            low = high;
        }
    }

    // The words that contain N words from byte `bytes` on, any number; returns the bit at which these begin, modulo
    // 32.
    template <int N> __device__ __forceinline__ uint32_t words_around(int bytes, uint32_t (&out)[N + 1]) const {
        const uint32_t first = at + (uint32_t)bytes;
        const uint32_t* words = (const uint32_t*)(base + (first & ~3u));
#pragma unroll
        for (int i = 0; i <= N; i++) out[i] = words[i];
        return 8 * first;
    }
};

template <typename T> struct LevelsInOrder : InOrder<1> {
    typedef Levels Weights;
    STATIC_INLINE float product(const Levels& l, const Activations& x) {
        const int first = add_dots<4>(l.q, x.q, 0), second = add_dots<4>(l.q + 4, x.q + 4, T::HALVES ? 0 : first);
        const float products = l.d[1] * (float)second;
        return T::HALVES ? fmaf(l.d[0], (float)first, products) : products;
    }
};

template <typename T, bool SEVERAL> struct Form : LevelsInOrder<T> {
    STATIC_INLINE void unpack(const Place& p, int part, Levels& l, const Lookup&) { T::unpack(p.plus(0), part, l); }
};

// ---------------------------------------------------------------- words and permutations

// Two words, each a selection of the bytes of both.
INLINE void permute(int& a, int& b, uint32_t first, uint32_t second) {
    const uint32_t x = (uint32_t)a, y = (uint32_t)b;
    a = (int)pick_bytes(x, y, first);
    b = (int)pick_bytes(x, y, second);
}

// A 4 x 4 transpose: word i gets byte i of each.
INLINE void transpose(int& a, int& b, int& c, int& d) {
    permute(a, b, 0x5140, 0x7362);
    permute(c, d, 0x5140, 0x7362);
    permute(a, c, 0x5410, 0x7632);
    permute(b, d, 0x5410, 0x7632);
    const int second = c;
    c = b;
    b = second;
}

// sum + the product of four unsigned and four signed bytes.
INLINE int add_unsigned(uint32_t a, int b, int sum) {
#ifdef QUANTKIT_HOST
    return host_dp4a_us(a, b, sum);
#else
    asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
#endif
}

// ---------------------------------------------------------------- fields: binary and ternary

// A word and the same word shifted right by four have bit k of each byte at bit k, or k - 4, of four.
template <> struct Form<Q1_0, false> : InOrder<1> {
    struct Weights {
        uint32_t q[2];
        float d;
    };
    STATIC_INLINE void prepare(Activations& x) {
        x.more[0] = -4 * sum_of<8>(x.q);
        transpose(x.q[0], x.q[2], x.q[4], x.q[6]);
        transpose(x.q[1], x.q[3], x.q[5], x.q[7]);
        x.d *= 0.25f;
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        w.q[0] = load4_by2(p.plus(2 + 4 * part));
        w.q[1] = w.q[0] >> 4;
        w.d = p.half(0);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {  // 8 * bits - 4
        int sum = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sum = k < 3 ? sum * 2 : sum * 2 + x.more[0];
            sum = __dp4a((int)(w.q[0] & ONES << k), x.q[2 * k], sum);
            sum = __dp4a((int)(w.q[1] & ONES << k), x.q[2 * k + 1], sum);
        }
        return w.d * (float)sum;
    }
};

// 64 * q * x summed over N words of 2-bit fields, plus 64 times the sum so far.
template <int N> INLINE int add_fields(const uint32_t* words, const int* x, int sum) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        if (k) sum *= 4;
#pragma unroll
        for (int i = 0; i < N; i++) sum = add_unsigned(words[i] & ONES * 3 << 2 * k, x[N * k + i], sum);
    }
    return sum;
}

// A lane has 16 bytes and the values of their four fields, 32 apart.
template <bool SEVERAL> struct Form<TQ2_0, SEVERAL> : InOrder<2> {
    struct Weights {
        uint32_t q[4];
        float d;
    };
    STATIC_INLINE int first(int part) { return part / 4 * 256 + part / 2 % 2 * 128 + part % 2 * 16; }
    STATIC_INLINE void load(const uint8_t* x, int, Activations& v) {
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int4 four = *(const int4*)(x + 32 * k);
            v.q[4 * k] = four.x, v.q[4 * k + 1] = four.y, v.q[4 * k + 2] = four.z, v.q[4 * k + 3] = four.w;
        }
    }
    STATIC_INLINE void prepare(Activations& x) {
        x.more[0] = -sum_of<16>(x.q);
        x.d *= 0.015625f;
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        p.words(0, 4 * part, w.q);
        w.d = p.half(64);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return w.d * (float)add_fields<4>(w.q, x.q, x.more[0]); }
};

template <> struct Form<Q2_0, false> : InOrder<1> {
    struct Weights {
        uint32_t q[2];
        float d;
    };
    STATIC_INLINE void prepare(Activations& x) {
        x.more[0] = -sum_of<8>(x.q);
        transpose(x.q[0], x.q[2], x.q[4], x.q[6]);
        transpose(x.q[1], x.q[3], x.q[5], x.q[7]);
        x.d *= 0.015625f;
    }
    STATIC_INLINE void load(const uint8_t* x, int, Activations& v) {  // makes the words of a field adjacent
        const int4 low = *(const int4*)x, high = *(const int4*)(x + 16);
        v.q[0] = low.x, v.q[2] = low.y, v.q[4] = low.z, v.q[6] = low.w;
        v.q[1] = high.x, v.q[3] = high.y, v.q[5] = high.z, v.q[7] = high.w;
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        p.words(2, 2 * part, w.q);
        w.d = p.half(0);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return w.d * (float)add_fields<2>(w.q, x.q, x.more[0]); }
};

// A lane has two words of the first 32 bytes and one of the next 16, with five digits each, and one digit of qh.
//
// For a byte b, floor(3^n b / 256) is digit n plus three times the number formed by digits 1 to n - 1. So of two digits
// the first is right and the second is too large by 3 (first digit): one more product corrects that, and the remainder
// of b is needed for every other digit only. With SEVERAL, products are the bottleneck.
template <bool SEVERAL> struct Form<TQ1_0, SEVERAL> : InOrder<2> {
    struct Weights {
        int q[16];
        float d;
    };
    STATIC_INLINE int first(int part) { return part / 4 * 256 + part % 4 * 8; }
    STATIC_INLINE void load(const uint8_t* x, int part, Activations& v) {
        const uint8_t* words = x - 4 * part + 160;
#pragma unroll
        for (int n = 0; n < 5; n++) {
            const int2 two = *(const int2*)(x + 32 * n);
            v.q[n] = two.x, v.q[5 + n] = two.y;
            v.q[10 + n] = *(const int*)(words + 16 * n);
        }
        v.q[15] = *(const int*)(words + 80);
    }
    STATIC_INLINE void prepare(Activations& x) { x.more[0] = -sum_of<16>(x.q); }

    // Bytes 0 and 2, and 1 and 3, of a word.
    struct Fractions {
        uint32_t even, odd;
        __device__ __forceinline__ explicit Fractions(uint32_t x) : even(x & 0x00ff00ffu), odd(pick_bytes(x, 0, 0x4341)) {}
        // The integer parts of this times `by`.
        __device__ __forceinline__ int times(uint32_t by) const { return (int)pick_bytes(even * by, odd * by, 0x7351); }
        __device__ __forceinline__ void advance(uint32_t by) {
            even = even * by & 0x00ff00ffu;
            odd = odd * by & 0x00ff00ffu;
        }
    };
    STATIC_INLINE void five(uint32_t x, int* q) {
        Fractions f(x);
#pragma unroll
        for (int n = 0; n < 5; n++) {
            const uint32_t by = !SEVERAL && n % 2 ? 9 : 3;
            q[n] = f.times(by);
            if (SEVERAL || n % 2) f.advance(by);
        }
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        uint32_t x[2], y[1], last[1];
        p.words(0, 2 * part, x);
        p.words(32, part, y);
        p.words(48, 0, last);
        five(x[0], w.q);
        five(x[1], w.q + 5);
        five(y[0], w.q + 10);
        Fractions f(last[0]);
        f.advance(power_of_three(part));
        w.q[15] = f.times(3);
        w.d = p.half(52);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sum = add_dots<16>(w.q, x.q, x.more[0]), too_much = 0;
#pragma unroll
        for (int i = 0; i < 15; i += 5)
#pragma unroll
            for (int n = 0; n < 4; n += 2) too_much = __dp4a(w.q[i + n], x.q[i + n + 1], too_much);
        if (!SEVERAL) sum -= 3 * too_much;
        return w.d * (float)sum;
    }
};

// ---------------------------------------------------------------- by words: a block of 64, the four scales of q8_k64

// 16 values of each scale (activations.cuh).
struct ByWords {
    static const int PARTS = 2;
    STATIC_INLINE int first(int part) { return part / 2 * 128 + part % 2 * 16; }
    STATIC_INLINE void load(const uint8_t* x, int, Activations& v) {
#pragma unroll
        for (int g = 0; g < 4; g++) {
            const int4 four = *(const int4*)(x + 32 * g);
            v.q[4 * g] = four.x, v.q[4 * g + 1] = four.y, v.q[4 * g + 2] = four.z, v.q[4 * g + 3] = four.w;
        }
    }
    STATIC_INLINE void prepare(Activations& x) {
#pragma unroll
        for (int g = 0; g < 4; g++) x.more[g] = -sum_of<4>(x.q + 4 * g);
    }
    STATIC_INLINE float scaled(const int (&sums)[4], const float4& by) {
        return fmaf(by.w, (float)sums[3], fmaf(by.z, (float)sums[2], fmaf(by.y, (float)sums[1], by.x * (float)sums[0])));
    }
};

// Levels in unpacked order, the order of x: preparing several columns costs more.
template <typename T> struct LevelsByWords : ByWords {
    struct Weights {
        int q[16];
    };
    STATIC_INLINE void prepare(Activations&) {}
    STATIC_INLINE void unpack(const Place& p, int, Weights& w, const Lookup&) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            Levels l;
            T::unpack(p.plus(0), part, l);
#pragma unroll
            for (int i = 0; i < 8; i++) w.q[4 * (i % 4) + 2 * part + i / 4] = l.q[i];
        }
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sums[4];
#pragma unroll
        for (int g = 0; g < 4; g++) sums[g] = add_dots<4>(w.q + 4 * g, x.q + 4 * g, 0);
        return scaled(sums, x.of_words);
    }
};

template <> struct Form<IQ1_BN, true> : LevelsByWords<IQ1_BN> {};
template <> struct Form<IQ2_BN, true> : LevelsByWords<IQ2_BN> {};

// A word has the 16 values of one scale.
template <> struct Form<IQ2_BN, false> : ByWords {
    struct Weights {
        uint32_t q[4];
    };
    STATIC_INLINE void prepare(Activations& x) {
        ByWords::prepare(x);
        const float4 by = x.of_words;
        x.of_words = make_float4(0.015625f * by.x, 0.015625f * by.y, 0.015625f * by.z, 0.015625f * by.w);
    }
    STATIC_INLINE void unpack(const Place& p, int, Weights& w, const Lookup&) { load_words_by4<4>(p.plus(0), w.q); }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sums[4];
#pragma unroll
        for (int g = 0; g < 4; g++) sums[g] = add_fields<1>(w.q + g, x.q + 4 * g, x.more[g]);
        return scaled(sums, x.of_words);
    }
};

// With b a fraction of 256, D[n] = floor(3^(n + 1) b / 256) is digit n plus three times D[n - 1]. Digit n is value 4 - n
// of a byte's five; of 16 values, the last is digit 4 - i of the extra byte, i the number of the 16.
//
// A word has one value of each 16, and so of one scale.
template <> struct Form<IQ1_BN, false> : ByWords {
    struct Weights {
        int q[16];
    };
    STATIC_INLINE void prepare(Activations& x) {
        ByWords::prepare(x);
#pragma unroll
        for (int g = 0; g < 4; g++) transpose(x.q[4 * g], x.q[4 * g + 1], x.q[4 * g + 2], x.q[4 * g + 3]);
    }
    // Bytes of the first and the third 16, and of the second and the fourth, become five words.
    STATIC_INLINE void five(uint32_t even, uint32_t odd, int* q) {
        even &= 0x00ff00ffu, odd &= 0x00ff00ffu;
        const uint32_t powers[5] = {3, 9, 27, 81, 243};
        uint32_t before = 0;
#pragma unroll
        for (int n = 0; n < 5; n++) {
            const uint32_t d = pick_bytes(even * powers[n], odd * powers[n], 0x7351);
            q[4 - n] = (int)(d - 3 * before);
            before = d;
        }
    }
    STATIC_INLINE void unpack(const Place& p, int, Weights& w, const Lookup&) {
        uint32_t around[4], x[3];
        const uint32_t bit = p.words_around<3>(0, around), extra = *p.plus(12);
#pragma unroll
        for (int i = 0; i < 3; i++) x[i] = __funnelshift_r(around[i], around[i + 1], bit);
        five(pick_bytes(x[0], x[1], 0x0600), pick_bytes(x[0], x[2], 0x0503), w.q);
        five(pick_bytes(x[0], x[1], 0x0701), pick_bytes(x[1], x[2], 0x0600), w.q + 5);
        five(pick_bytes(x[0], x[2], 0x0402), pick_bytes(x[1], x[2], 0x0701), w.q + 10);
        const uint32_t high = extra * (27u << 16 | 243), middle = extra * (9u << 16 | 81), low = extra * (3u << 16 | 27);
        w.q[15] = (int)(pick_bytes(high, middle, 0x7351) - 3 * pick_bytes(middle, low, 0x7351));
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sums[4];
#pragma unroll
        for (int g = 0; g < 4; g++) sums[g] = add_dots<4>(w.q + 4 * g, x.q + 4 * g, x.more[g]);
        return scaled(sums, x.of_words);
    }
};

// ---------------------------------------------------------------- integer scales

template <bool SEVERAL> struct Form<Q3_K, SEVERAL> : InOrder<1> {
    struct Weights {
        int q[8], s[2];
        float d;
    };
    STATIC_INLINE void prepare(Activations& x) { x.d *= 0.03125f; }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup&) {
        Q3_K::levels(p.plus(0), part, w.q);
        Q3_K::scales(p.plus(0), part, w.s);
        w.d = p.half(108);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        const int first = add_dots<4>(w.q, x.q, 0), second = add_dots<4>(w.q + 4, x.q + 4, 0);
        return w.d * (float)(first * w.s[0] + second * w.s[1]);
    }
};

// ---------------------------------------------------------------- grids

// 64 levels with scales 2 s + 1 in eighths, one per 32 or 16.
template <int SCALES> struct Scaled64 {
    int q[16], s[SCALES];
    float d;
};

template <int SCALES> INLINE float scaled_product(const Scaled64<SCALES>& w, const Activations& x) {
    const int N = 16 / SCALES;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < SCALES; i++) sum += w.s[i] * add_dots<N>(w.q + N * i, x.q + N * i, 0);
    return w.d * (float)sum;
}

// 2 s + 1 of nibble i.
INLINE int odd_nibble(uint32_t s, int i) { return (int)((i ? s >> (4 * i - 1) : s << 1) & 30 | 1); }

// The levels of 8 nibbles of a grid, with signs: in stored order, or with SEVERAL in the order of the values.
template <bool SEVERAL>
INLINE void set_levels(int* q, const Lookup& grid, uint32_t nibbles, uint32_t upper, uint32_t a, uint32_t b) {
    q[0] = (int)pick_bytes(grid.magnitudes, IQ2_NEGATIVES, nibbles);
    q[1] = (int)pick_bytes(grid.magnitudes, IQ2_NEGATIVES, upper);
    if (SEVERAL) permute(q[0], q[1], a, b);
}

// x in the order 0 4 1 5 2 6 3 7 within 8 values, scales in eighths.
template <bool SEVERAL> INLINE void prepare_shuffled(Activations& x) {
#pragma unroll
    for (int i = 0; i < 16; i += 2)
        if (!SEVERAL) permute(x.q[i], x.q[i + 1], 0x5140, 0x7362);
    x.d *= 0.125f;
}

template <bool SEVERAL> INLINE void set_shuffled(int* q, const Lookup& grid, uint32_t entry, uint32_t seven) {
    const uint32_t s = seven_signs(seven) * 4 + entry;
    set_levels<SEVERAL>(q, grid, s, s >> 16, 0x6420, 0x7531);
}

template <bool SEVERAL> struct Form<IQ2_XXS, SEVERAL> : InOrder<2> {
    typedef Scaled64<2> Weights;
    STATIC_INLINE void prepare(Activations& x) { prepare_shuffled<SEVERAL>(x); }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        uint32_t x[4];
        p.words(2, 4 * part, x);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const uint32_t signs = x[2 * i + 1];
#pragma unroll
            for (int j = 0; j < 4; j++)
                set_shuffled<SEVERAL>(w.q + 8 * i + 2 * j, grid, entry<IQ2_XXS>(grid, picked(x[2 * i], j)), signs >> 7 * j & 127);
            w.s[i] = (int)(signs >> 27 | 1);
        }
        w.d = p.half(0);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return scaled_product(w, x); }
};

template <bool SEVERAL> struct Form<IQ2_XS, SEVERAL> : InOrder<2> {
    typedef Scaled64<4> Weights;
    STATIC_INLINE void prepare(Activations& x) { prepare_shuffled<SEVERAL>(x); }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        uint32_t x[4];
        p.words(2, 4 * part, x);
        const uint32_t s = load2(p.plus(66 + 2 * part));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t both = x[j / 2] >> 16 * (j % 2);
            set_shuffled<SEVERAL>(w.q + 2 * j, grid, entry<IQ2_XS>(grid, both & 511), both >> 9 & 127);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) w.s[i] = odd_nibble(s, i);
        w.d = p.half(0);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return scaled_product(w, x); }
};

template <bool SEVERAL> struct Form<IQ2_S, SEVERAL> : InOrder<2> {
    typedef Scaled64<4> Weights;
    STATIC_INLINE void prepare(Activations& x) {
#pragma unroll
        for (int i = 0; i < 16; i += 2)
            if (!SEVERAL) permute(x.q[i], x.q[i + 1], 0x6273, 0x4051);
        x.d *= 0.125f;
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        uint32_t x[2], signs[2];
        p.words(2, 2 * part, x);
        p.words(34, 2 * part, signs);
        const uint32_t h = load2(p.plus(66 + 2 * part)), s = load2(p.plus(74 + 2 * part));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t high = (j < 4 ? h << (8 - 2 * j) : h >> (2 * j - 8)) & 768;
            const uint32_t e = entry<IQ2_S>(grid, picked(x[j / 4], j % 4) | high);
            const uint32_t n = reversed_signs(picked(signs[j / 4], j % 4)) | e;
            set_levels<SEVERAL>(w.q + 2 * j, grid, n >> 1, n >> 17, 0x0246, 0x1357);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) w.s[i] = odd_nibble(s, i);
        w.d = p.half(0);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return scaled_product(w, x); }
};

// A negative level is its magnitude's complement plus one; the mask of negative ones supplies that one, as bytes of -1.
template <bool SEVERAL> struct Form<IQ3_XXS, SEVERAL> : InOrder<2> {
    struct Weights : Scaled64<2> {
        int negative[16];
    };
    STATIC_INLINE void prepare(Activations& x) { x.d *= 0.25f; }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        uint32_t x[4], signs[2];
        p.words(2, 4 * part, x);
        p.words(66, 2 * part, signs);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            const uint32_t s = seven_signs(signs[j / 4] >> 7 * (j % 4) & 127, 3);
#pragma unroll
            for (int i = 2 * j; i < 2 * j + 2; i++) {
                const uint32_t mask = sign_masks(i % 2 ? s : s << 4);
                const uint32_t level = entry<IQ3_XXS>(grid, picked(x[i / 4], i % 4)) ^ mask;
                w.negative[i] = (int)mask;
                w.q[i] = (int)(SEVERAL ? level + (mask & ONES) : level);
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) w.s[i] = (int)(signs[i] >> 27 | 1);
        w.d = p.half(0);
    }
    STATIC_INLINE float with_ones(const Weights& w, const Activations& x) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
            sum += w.s[i] * (add_dots<8>(w.q + 8 * i, x.q + 8 * i, 0) - add_dots<8>(w.negative + 8 * i, x.q + 8 * i, 0));
        return w.d * (float)sum;
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return SEVERAL ? scaled_product(w, x) : with_ones(w, x); }
};

template <bool SEVERAL> struct Form<IQ3_S, SEVERAL> : InOrder<2> {
    typedef Scaled64<2> Weights;
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        uint32_t x[4], signs[2];
        p.words(2, 4 * part, x);
        p.words(74, 2 * part, signs);
        const uint32_t h = load2(p.plus(66 + 2 * part));
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // The top bits of the bytes belong to values 7 6 5 4, and the bits 4 below to values 3 2 1 0.
            const uint32_t s = picked(signs[j / 4], j % 4) * 0x08040201u;
#pragma unroll
            for (int i = 2 * j; i < 2 * j + 2; i++) {
                const uint32_t high = (i < 8 ? h << (8 - i) : h >> (i - 8)) & 256;
                const uint32_t less_one = entry<IQ3_S>(grid, picked(x[i / 4], i % 4) | high);
                const uint32_t mask = pick_bytes(i % 2 ? s : s << 4, 0, 0x89ab);
                w.q[i] = (int)((less_one ^ mask) | ONES);
            }
        }
        const uint32_t s = *p.plus(106 + part);
        w.s[0] = odd_nibble(s, 0), w.s[1] = odd_nibble(s, 1);
        w.d = p.half(0);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return scaled_product(w, x); }
};

// IQ1: d (2 s + 1) (g +- 1/8). f(i, entry, minus) for each 8 of 64 values, minus: -1/8; sets 2 s + 1, returns d.
template <typename F> INLINE float each_eight(IQ1_S, const Place& p, int part, const Lookup& grid, int (&s)[2], F f) {
    uint32_t x[2];
    p.words(2, 2 * part, x);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t h = load2(p.plus(34 + 4 * part + 2 * i));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t high = (j < 3 ? h << (8 - 3 * j) : h >> 1) & 0x700;
            f(4 * i + j, entry<IQ1_S>(grid, picked(x[i], j) | high), h & 0x8000);
        }
        s[i] = (int)(h >> 11 & 14 | 1);
    }
    return p.half(0);
}

template <typename F> INLINE float each_eight(IQ1_M, const Place& p, int part, const Lookup& grid, int (&s)[4], F f) {
    const uint2 x = *(const uint2*)p.plus(8 * part), scales = *(const uint2*)p.plus(48);
    const uint32_t both = load4(p.plus(32 + 4 * part));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32_t q = i ? x.y : x.x, h = i ? both >> 16 : both;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t high = (j < 2 ? h << (8 - 4 * j) : h >> (4 * j - 8)) & 0x700;
            f(4 * i + j, entry<IQ1_M>(grid, picked(q, j) | high), h & 8 << 4 * j);
        }
    }
    const uint32_t four = (part & 2 ? scales.y : scales.x) >> 16 * (part & 1);
#pragma unroll
    for (int i = 0; i < 4; i++) s[i] = (int)((i ? four >> (3 * i - 1) : four << 1) & 14 | 1);
    // The top digits of the half words of scales, moved to the top half.
    const uint32_t high = (scales.y & 0xf0000000u) | (scales.y << 12 & 0x0f000000u);
    const uint32_t low = (scales.x >> 8 & 0x00f00000u) | (scales.x << 4 & 0x000f0000u);
    return half_to_float((uint16_t)((high | low) >> 16));
}

// Several columns: 8 g +- 1.
template <typename T, int SCALES> struct ShiftedLevels : InOrder<2> {
    typedef Scaled64<SCALES> Weights;
    STATIC_INLINE void prepare(Activations& x) { x.d *= 0.125f; }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        w.d = each_eight(T(), p, part, grid, w.s,
                         [&](int i, uint32_t entry, uint32_t minus) { set_eight_shifted(w.q + 2 * i, entry, minus); });
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) { return scaled_product(w, x); }
};

template <> struct Form<IQ1_S, true> : ShiftedLevels<IQ1_S, 2> {};
template <> struct Form<IQ1_M, true> : ShiftedLevels<IQ1_M, 4> {};

// Few columns: g + 1, even and odd ones in the nibbles of a byte. Sums are 16 times that, starting at -14 times the sum
// of x, or -18 times with a minus.
template <int N> INLINE void prepare_evens(Activations& x) {
#pragma unroll
    for (int i = 0; i < N; i += 2) permute(x.q[i], x.q[i + 1], 0x6420, 0x7531);
    x.d *= 0.0625f;
}

INLINE void set_halves(int* q, uint32_t entry) {
    q[0] = (int)(entry & 0x0f0f0f0fu);
    q[1] = (int)(entry & 0xf0f0f0f0u);
}

// sum + 16 times the sum of 8 N levels.
template <int N> INLINE int add_halves(const int* q, const int* x, int sum) {
    int low = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        low = __dp4a(q[2 * i], x[2 * i], low);
        sum = __dp4a(q[2 * i + 1], x[2 * i + 1], sum);
    }
    return low * 16 + sum;
}

template <> struct Form<IQ1_S, false> : InOrder<2> {
    struct Weights : Scaled64<2> {
        uint32_t minus[2];
    };
    STATIC_INLINE void prepare(Activations& x) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int sum = sum_of<8>(x.q + 8 * i);
            x.more[2 * i] = -14 * sum;
            x.more[2 * i + 1] = -18 * sum;
        }
        prepare_evens<16>(x);
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        w.d = each_eight(IQ1_S(), p, part, grid, w.s, [&](int i, uint32_t entry, uint32_t minus) {
            set_halves(w.q + 2 * i, entry);
            w.minus[i / 4] = minus;
        });
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 2; i++)
            sum += w.s[i] * add_halves<4>(w.q + 8 * i, x.q + 8 * i, w.minus[i] ? x.more[2 * i + 1] : x.more[2 * i]);
        return w.d * (float)sum;
    }
};

// A minus for each 8 values: twice their sum is subtracted 7 or 9 times. For each N times 16 values, two such sums.
template <int N> INLINE void set_sums_of_8(Activations& x) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int a = sum_of<2>(x.q + 4 * i), b = sum_of<2>(x.q + 4 * i + 2);
        x.more[i] = (int)pick_bytes((uint32_t)a * 2, (uint32_t)b * 2, 0x5410);
    }
}

// Bytes of -7, or of -9 where the top bit of a byte is set: signs select them.
INLINE int times_of_top_bits(uint32_t a, uint32_t b, uint32_t signs) {
    return (int)(pick_bytes(a, b, signs) & 0x0e0e0e0eu ^ 0xf9f9f9f9u);
}

template <> struct Form<IQ1_M, false> : InOrder<2> {
    struct Weights : Scaled64<4> {
        int times[2];  // -7 or -9, one byte per 8 values
    };
    STATIC_INLINE void prepare(Activations& x) {
        set_sums_of_8<4>(x);
        prepare_evens<16>(x);
    }
    STATIC_INLINE void unpack(const Place& p, int part, Weights& w, const Lookup& grid) {
        w.d = each_eight(IQ1_M(), p, part, grid, w.s, [&](int i, uint32_t entry, uint32_t) { set_halves(w.q + 2 * i, entry); });
        const uint32_t both = load4(p.plus(32 + 4 * part)), left = both << 4;
        w.times[0] = times_of_top_bits(both, left, 0x9d8c);
        w.times[1] = times_of_top_bits(both, left, 0xbfae);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        int sum = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int start = i % 2 ? __dp2a_hi(x.more[i], w.times[i / 2], 0) : __dp2a_lo(x.more[i], w.times[i / 2], 0);
            sum += w.s[i] * add_halves<2>(w.q + 4 * i, x.q + 4 * i, start);
        }
        return w.d * (float)sum;
    }
};

// Single rows of IQ1_S_R4 and IQ1_M_R4 have activations of 32 values.
template <typename T> struct ShiftedRow : LevelsInOrder<T> {
    STATIC_INLINE void unpack(const Place& p, int, Levels& l, const Lookup& grid) {
        T::unpack_by(p.plus(0), l, [&](uint32_t index) { return entry<T>(grid, index); });
    }
};
template <> struct Form<IQ1_S_ROW, true> : ShiftedRow<IQ1_S_ROW> {};
template <> struct Form<IQ1_M_ROW, true> : ShiftedRow<IQ1_M_ROW> {};

template <> struct Form<IQ1_S_ROW, false> : InOrder<1> {
    struct Weights {
        int q[8];
        uint32_t minus;
        float d;
    };
    STATIC_INLINE void prepare(Activations& x) {
        const int sum = sum_of<8>(x.q);
        x.more[0] = -14 * sum, x.more[1] = -18 * sum;
        prepare_evens<8>(x);
    }
    STATIC_INLINE void unpack(const Place& p, int, Weights& w, const Lookup& grid) {
        uint32_t words[2];
        const uint32_t bit = p.words_around<1>(0, words);
        const uint32_t x = __funnelshift_r(words[0], words[1], bit), h = words[1] >> (bit & 16);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t high = (j < 3 ? h << (8 - 3 * j) : h >> 1) & 0x700;
            set_halves(w.q + 2 * j, entry<IQ1_S_ROW>(grid, picked(x, j) | high));
        }
        w.minus = h & 0x8000;
        w.d = (float)(int)(h >> 11 & 14 | 1);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        return w.d * (float)add_halves<4>(w.q, x.q, w.minus ? x.more[1] : x.more[0]);
    }
};

template <> struct Form<IQ1_M_ROW, false> : InOrder<1> {
    struct Weights {
        int q[8], s[2], times;
    };
    STATIC_INLINE void prepare(Activations& x) {
        set_sums_of_8<2>(x);
        prepare_evens<8>(x);
    }
    STATIC_INLINE void unpack(const Place& p, int, Weights& w, const Lookup& grid) {
        uint32_t words[3];
        const uint32_t bit = p.words_around<2>(0, words);
        const uint32_t x = __funnelshift_r(words[0], words[1], bit), h = __funnelshift_r(words[1], words[2], bit);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const uint32_t high = (j < 2 ? h << (8 - 4 * j) : h >> (4 * j - 8)) & 0x700;
            set_halves(w.q + 2 * j, entry<IQ1_M_ROW>(grid, picked(x, j) | high));
        }
        w.times = times_of_top_bits(h, h << 4, 0x9d8c);
        w.s[0] = (int)(h >> 16 & 15), w.s[1] = (int)(h >> 20 & 15);
    }
    STATIC_INLINE float product(const Weights& w, const Activations& x) {
        const int first = add_halves<2>(w.q, x.q, __dp2a_lo(x.more[0], w.times, 0));
        const int second = add_halves<2>(w.q + 4, x.q + 4, __dp2a_hi(x.more[1], w.times, 0));
        return (float)(w.s[0] * first + w.s[1] * second);
    }
};
