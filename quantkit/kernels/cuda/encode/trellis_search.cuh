// The points of a trellis codebook nearest to 8 (or 4) values; the twin of
// quantkit/kernels/cpu/encode/trellis_search.py, which describes the search.
//
// Half a warp searches for one group of values: its lane l has point l of every line of 16, like a lane of the CPU's
// vectors. Integer sums do not depend on their order, so the byte layout suits dp4a: levels are signed, squares less
// 128.
#pragma once
#include "encode/lane.cuh"

// The codebook of a type (core/lookups.py): points, centers of cells and of families; the index of each point; the
// scales of a curve relative to the estimate; for points of 4 values the lines near the queries of each bucket
// (trellis_lists.py).
struct Codebook {
    const uint8_t *points, *cells, *families;
    const int32_t* indices;
    const float* grid;
    const uint16_t* lists;
};

// Buckets of queries of 4 values, per codebook; lines listed for each.
const int RANGES = 14, BUCKETS = RANGES * RANGES * RANGES * RANGES, LISTED = 32;

// Survivors of a search for one scale; a score larger than all; the bits of a ranked score that hold the line number.
const int SURVIVORS = 16, MOST = 0x7fffffff, NUMBER = 12;
const float NOTHING_FOUND = 3e38f;

INLINE int lane_of_16() { return (int)threadIdx.x & 15; }
INLINE int half_of_warp() { return (int)threadIdx.x >> 4 & 1; }

INLINE float greater(float a, float b) { return a > b ? a : b; }

// The sum over 16 lanes, as a tree: lanes 0 .. 7 plus lanes 8 .. 15, and so on.
INLINE float sum_of_16(float v) {
    for (int d = 8; d; d >>= 1) v = v + __shfl_xor_sync(FULL, v, d);
    return v;
}

template <int ACROSS> INLINE float least_of(float v) {
    for (int d = ACROSS / 2; d; d >>= 1) v = fminf(v, __shfl_xor_sync(FULL, v, d));
    return v;
}
INLINE float least_of_16(float v) { return least_of<16>(v); }

// The first of 16 lanes with the least value, known to all.
INLINE int first_with(float least, float v) {
    return min(__ffs((int)(__ballot_sync(FULL, v == least) >> (threadIdx.x & 16))) - 1, 15) & 15;
}

// The sum of SIZE values as a tree.
template <int SIZE> INLINE float tree_sum(const float* v) {
    float s[SIZE / 2];
#pragma unroll
    for (int i = 0; i < SIZE / 2; i++) s[i] = v[i] + v[i + SIZE / 2];
    return SIZE == 8 ? (s[0] + s[2 % (SIZE / 2)]) + (s[1] + s[3 % (SIZE / 2)]) : s[0] + s[1];
}

template <int SIZE> INLINE void load_values(const float* from, float* to) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 4) {
        const float4 v = *(const float4*)(from + i);
        to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
}

// Whether registers suffice for the shorter of two code paths; otherwise some are spilled.
#if defined(QUANTKIT_HOST) || __CUDA_ARCH__ >= 900
const bool ROOMY = true;
#else
const bool ROOMY = false;
#endif

// Operations that take two or three instructions in the compiler's PTX.
INLINE uint32_t masked_or(uint32_t v, uint32_t mask, uint32_t bits) {
#ifdef QUANTKIT_HOST
    return (v & mask) | bits;
#else
    uint32_t score;
    asm("lop3.b32 %0, %1, %2, %3, 234;" : "=r"(score) : "r"(v), "r"(mask), "r"(bits));
    return score;
#endif
}

INLINE int times_plus(int v, int times, int more) {
#ifdef QUANTKIT_HOST
    return (int)((uint32_t)v * (uint32_t)times + (uint32_t)more);
#else
    int score;
    asm("mad.lo.s32 %0, %1, %2, %3;" : "=r"(score) : "r"(v), "r"(times), "r"(more));
    return score;
#endif
}

INLINE uint64_t wide_times_plus(uint32_t v, uint32_t times, uint64_t more) {
#ifdef QUANTKIT_HOST
    return (uint64_t)v * times + more;
#else
    uint64_t score;
    asm("mad.wide.u32 %0, %1, %2, %3;" : "=l"(score) : "r"(v), "r"(times), "l"(more));
    return score;
#endif
}

INLINE void halves_of(uint64_t v, uint32_t& low, uint32_t& high) {
#ifdef QUANTKIT_HOST
    low = (uint32_t)v, high = (uint32_t)(v >> 32);
#else
    asm("mov.b64 {%0, %1}, %2;" : "=r"(low), "=r"(high) : "l"(v));
#endif
}

// A line of BYTES bytes.
template <int BYTES> INLINE const uint8_t* line_at(const uint8_t* first, uint32_t line) {
    if constexpr (ROOMY) return (const uint8_t*)wide_times_plus(line, BYTES, (uint64_t)first);
    return first + (uint64_t)line * (uint32_t)BYTES;
}

// The squares of bytes 0 and 1 of a word, or of bytes 2 and 3, 16 bits each.
INLINE uint32_t two_squares(uint32_t word, bool last) {
    const uint32_t both = __byte_perm(word, 0, last ? 0x4342 : 0x4140);
    uint32_t low, high;
    halves_of((uint64_t)both * both, low, high);  // the first one's, in bits 17 to 31 a product, the second one's
    return __byte_perm(low, high, 0x5410);
}

// A point: four levels per word, then four squares / 64, rounded, less 128. Points that are never ranked in 8 bits
// (BARE) have magnitudes instead, or nothing where levels are magnitudes.
template <int SIZE, bool BARE = false> struct PointWords {
    static const int BYTES = SIZE == 8 && !BARE ? 16 : 8, LINE = 16 * BYTES;
    int levels[SIZE / 4], more[SIZE / 4];

    __device__ __forceinline__ explicit PointWords(const uint8_t* at) {
        if (BYTES == 16) {
            const uint4 v = __ldg((const uint4*)at);
            levels[0] = (int)v.x, levels[SIZE / 4 - 1] = (int)v.y, more[0] = (int)v.z, more[SIZE / 4 - 1] = (int)v.w;
        } else {
            const uint2 v = __ldg((const uint2*)at);
            levels[0] = (int)v.x, more[SIZE / 4 - 1] = (int)v.y;
            if (SIZE == 8) levels[SIZE / 4 - 1] = (int)v.y;
        }
    }
    // This lane's point in a line of a table, given the address in the first line.
    STATIC_INLINE const uint8_t* first(const uint8_t* table) { return table + lane_of_16() * BYTES; }
    __device__ __forceinline__ PointWords(const uint8_t* first, int line) : PointWords(line_at<LINE>(first, (uint32_t)line)) {}
    __device__ __forceinline__ int level(int i) const { return (int)(int8_t)((uint32_t)levels[i / 4] >> 8 * (i % 4)); }
    __device__ __forceinline__ uint32_t magnitudes(int k) const { return (uint32_t)(SIZE == 8 ? levels : more)[k]; }
    __device__ __forceinline__ uint32_t squares(int k, bool last) const { return two_squares(magnitudes(k), last); }
};

// A center of magnitudes: levels, and after LINES lines of these its squares, of 16 bits each.
template <int LINES> struct Center {
    static const int LINE = 256;
    int levels[2];
    uint32_t of[4];

    STATIC_INLINE const uint8_t* first(const uint8_t* table) { return table + lane_of_16() * 16; }
    __device__ __forceinline__ Center(const uint8_t* first, int line) : Center(line_at<LINE>(first, (uint32_t)line)) {}
    __device__ __forceinline__ explicit Center(const uint8_t* at) {
        const uint2 v = __ldg((const uint2*)at);
        const uint4 squares = __ldg((const uint4*)(at + LINE * LINES));
        levels[0] = (int)v.x, levels[1] = (int)v.y;
        of[0] = squares.x, of[1] = squares.y, of[2] = squares.z, of[3] = squares.w;
    }
    __device__ __forceinline__ uint32_t squares(int k, bool last) const { return of[2 * k + last]; }
};

// A line, ranked by the upper bits of a score.
INLINE int ranked_line(uint32_t score, int line) { return (int)masked_or(score, ~((1u << NUMBER) - 1), (uint32_t)line); }

// SIZE values y with weights w, distributed over the lanes of a half warp: lane l has that of l % SIZE.
template <int SIZE> struct OneOf {
    float y, w, most, most_ay;  // the largest weight, the largest w |y|

    __device__ __forceinline__ OneOf(float y, float w) : y(y), w(w), most(w), most_ay(w * fabsf(y)) {
        for (int d = SIZE / 2; d; d >>= 1) {
            most = fmaxf(most, __shfl_xor_sync(FULL, most, d));
            most_ay = fmaxf(most_ay, __shfl_xor_sync(FULL, most_ay, d));
        }
    }
    // The sum over these lanes, in the order of tree_sum.
    __device__ __forceinline__ float sum(float v) const {
        for (int d = SIZE / 2; d; d >>= 1) v = v + __shfl_xor_sync(FULL, v, d);
        return v;
    }
};

// Packs integers of these lanes, in order: four of 8 bits per word, or two of 16.
template <int SIZE, int EACH> INLINE void gather(int of_lane, int* words) {
    const int bits = 32 / EACH, at = (int)threadIdx.x & (EACH - 1);
    int word = (int)(((uint32_t)of_lane & ((1u << bits) - 1)) << bits * at);
    for (int d = 1; d < EACH; d *= 2) word |= __shfl_xor_sync(FULL, word, d);
#pragma unroll
    for (int k = 0; k < SIZE / EACH; k++) words[k] = SIZE == EACH ? word : __shfl_sync(FULL, word, EACH * k, 16);
}

// Values y with weights, in 8 bits: rounded weights u, and -2 u y in units of 64, up to 126 for magnitudes, else 64.
template <int SIZE, bool MAGNITUDES> struct CoarseQuery {
    int a[SIZE / 4], u[SIZE / 4], constant;

    __device__ __forceinline__ explicit CoarseQuery(const OneOf<SIZE>& v) {
        const float largest = MAGNITUDES ? 126.0f : 64.0f;
        const float top = greater(v.most * (1.0f / 64), v.most_ay * (1.0f / 32 / largest));
        const float factor = top > 1e-33f ? 1.0f / top : 0;
        const int weight = nearest_int(v.w * factor);
        gather<SIZE, 4>(nearest_int(greater(lesser((float)weight * v.y * (-1.0f / 32), largest), -largest)), a);
        gather<SIZE, 4>(weight, u);
        uint32_t sums = 0;
#pragma unroll
        for (int k = 0; k < SIZE / 4; k++)
            sums += (MAGNITUDES ? 0 : 126) * (uint32_t)__dp4a(a[k], 0x01010101, 0) + 128 * (uint32_t)__dp4a(u[k], 0x01010101, 0);
        constant = (int)sums;
    }
    // The error of a point of a line.
    __device__ __forceinline__ int ranked(const PointWords<SIZE>& v, int line) const {
        int sum = constant;
#pragma unroll
        for (int k = 0; k < SIZE / 4; k++) sum = __dp4a(v.more[k], u[k], __dp4a(v.levels[k], a[k], sum));
        return times_plus(sum, 1 << NUMBER, line);
    }
};

// Whether a type's points are never ranked in 8 bits: IQ3_KT and IQ4_KT.
template <int SIZE, bool MAGNITUDES> constexpr bool bare() { return SIZE == 4 || MAGNITUDES; }

// A value with its weight: the weight u in up to 15 bits, -2 u y in units of 128; or u in 8 bits times 64, in units of
// 64.
template <int SIZE, bool SHORT = false> struct FineNumbers {
    static const int STEP = SHORT ? 64 : 1, UNIT = SHORT ? 64 : 128;
    int a, u;  // u over STEP
    float factor;

    __device__ __forceinline__ explicit FineNumbers(const OneOf<SIZE>& v) {
        const float sum = v.sum(v.w * 15876.0f + v.w * fabsf(v.y) * 320.0f);
        const float top = greater(greater(sum * (float)(1 / 2.0e9), v.most * (float)((SHORT ? 2.0 : 1.0) / 32000)),
                                  v.most_ay * (float)(2.0 / UNIT / 32000));
        factor = top > 1e-33f ? 1.0f / top : 0;
        const float weight = round_even(v.w * (factor * (1.0f / STEP)));
        a = (int)(int16_t)nearest_int(weight * STEP * v.y * (-2.0f / UNIT));
        u = (int)(int16_t)nearest_int(weight);
    }
};

// A query for points of known magnitudes: pairs of -2 u y / 128; bytes of u, signed high ones, low ones.
template <int SIZE, bool MAGNITUDES_KNOWN> struct FineQuery {
    int a[SIZE / 2], high[SIZE / 4];
    uint32_t low[SIZE / 4];
    float factor;

    __device__ __forceinline__ explicit FineQuery(const OneOf<SIZE>& v) {
        const FineNumbers<SIZE> of(v);
        factor = of.factor;
        int u[SIZE / 2];
        gather<SIZE, 2>(of.a, a);
        gather<SIZE, 2>(of.u, u);
#pragma unroll
        for (int k = 0; k < SIZE / 4; k++) {
            low[k] = __byte_perm((uint32_t)u[2 * k], (uint32_t)u[2 * k + 1], 0x6420);
            high[k] = (int)__byte_perm((uint32_t)u[2 * k], (uint32_t)u[2 * k + 1], 0x7531);
        }
    }
    // -2 u y v / 128 and u v v, summed.
    template <class Point> __device__ __forceinline__ void sums(const Point& point, uint32_t& p, uint32_t& q) const {
        int of_levels = 0, upper = 0;
        uint32_t lower = 0;
#pragma unroll
        for (int k = 0; k < SIZE / 4; k++) {
            const uint32_t first = point.squares(k, false), last = point.squares(k, true);
            of_levels = __dp2a_hi(a[2 * k + 1], point.levels[k], __dp2a_lo(a[2 * k], point.levels[k], of_levels));
            lower = __dp2a_hi(last, low[k], __dp2a_lo(first, low[k], lower));
            upper = __dp2a_hi((int)last, high[k], __dp2a_lo((int)first, high[k], upper));
        }
        p = (uint32_t)of_levels, q = (uint32_t)times_plus(upper, 256, (int)lower);
    }
    // The error of a point of a line, in fewer bits.
    template <class Point> __device__ __forceinline__ int ranked(const Point& point, int line) const {
        uint32_t p, q;
        sums(point, p, q);
        return ranked_line((uint32_t)times_plus((int)p, 128, (int)q), line);
    }
    // The errors for scales 1/8 above and below.
    template <class Point>
    __device__ __forceinline__ void ranked_around(const Point& point, int line, int& above, int& below) const {
        uint32_t p, q;
        sums(point, p, q);
        above = ranked_line((uint32_t)times_plus((int)p, 144, (int)q), line);
        below = ranked_line((uint32_t)times_plus((int)p, 112, (int)q), line);
    }
};

// A query of weights u in 8 bits, for magnitudes: pairs of -2 u y / 64, bytes of u.
struct ShortQuery {
    int a[4];
    uint32_t u[2];

    __device__ __forceinline__ explicit ShortQuery(const OneOf<8>& v) {
        const FineNumbers<8, true> of(v);
        gather<8, 2>(of.a, a);
        gather<8, 4>(of.u, (int*)u);
    }
    template <class Point> __device__ __forceinline__ int ranked(const Point& point, int line) const {
        int sum = __dp2a_hi(a[1], point.levels[0], __dp2a_lo(a[0], point.levels[0], 0));
        sum = __dp2a_hi(a[3], point.levels[1], __dp2a_lo(a[2], point.levels[1], sum));
        uint32_t score = (uint32_t)sum;
#pragma unroll
        for (int k = 0; k < 2; k++)
            score = __dp2a_hi(point.squares(k, true), u[k], __dp2a_lo(point.squares(k, false), u[k], score));
        return ranked_line(score << 6, line);
    }
};

// The same for other points.
template <int SIZE> struct FineQuery<SIZE, false> {
    int a[SIZE], u[SIZE];
    float factor;

    __device__ __forceinline__ explicit FineQuery(const OneOf<SIZE>& v) {
        const FineNumbers<SIZE> of(v);
        factor = of.factor;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            a[i] = __shfl_sync(FULL, of.a, i, 16);
            u[i] = __shfl_sync(FULL, of.u, i, 16);
        }
    }
    __device__ __forceinline__ void sums(const PointWords<SIZE>& point, uint32_t& p, uint32_t& q) const {
        p = q = 0;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const uint32_t v = (uint32_t)point.level(i);
            p += v * (uint32_t)a[i];
            q += v * (v * (uint32_t)u[i]);
        }
    }
    __device__ __forceinline__ int ranked(const PointWords<SIZE>& point, int line) const {
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const uint32_t v = (uint32_t)point.level(i);
            sum += v * (v * (uint32_t)u[i] + ((uint32_t)a[i] << 7));
        }
        return ranked_line(sum, line);
    }
};

// The number of lanes that keep the best point, the second best, and so on: 16, 8, 4 or 0.
template <int A, int B = 0, int C = 0, int D = 0> struct Shape {
    static const int DEPTH = B == 0 ? 1 : C == 0 ? 2 : D == 0 ? 3 : 4, KEPT = A + B + C + D;
    STATIC_INLINE int lanes(int i) { return i == 0 ? A : i == 1 ? B : i == 2 ? C : D; }
};

// The best DEPTH lines of a lane, by the scores of its points.
template <int DEPTH> struct Best {
    int of[DEPTH];

    __device__ __forceinline__ Best() {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) of[i] = MOST;
    }
    __device__ __forceinline__ void take(int score) {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int less = min(of[i], score);
            score = max(of[i], score);
            of[i] = less;
        }
    }
    // Four at once: sorted, then the lowest of both lists.
    __device__ __forceinline__ void take(int a, int b, int c, int d) {
        if constexpr (DEPTH == 4) {
            order(a, b), order(c, d), order(a, c), order(b, d), order(b, c);
            of[0] = min(of[0], d), of[1] = min(of[1], c), of[2] = min(of[2], b), of[3] = min(of[3], a);
            order(of[0], of[2]), order(of[1], of[3]), order(of[0], of[1]), order(of[2], of[3]);
        } else {
            take(a), take(b), take(c), take(d);
        }
    }
    STATIC_INLINE void order(int& a, int& b) {
        const int less = min(a, b);
        b = max(a, b);
        a = less;
    }
    // The number of the i-th best point of a lane; with fewer than 16 `lanes`, of 16 / lanes lanes together.
    __device__ __forceinline__ int place(int i, int lanes = 16) const {
        int score = of[i];
        int at = (score & ((1 << NUMBER) - 1)) << 4 | lane_of_16();
        for (int step = 8; step >= lanes; step /= 2) {
            const int partner = __shfl_xor_sync(FULL, score, step), other = __shfl_xor_sync(FULL, at, step);
            at = partner < score ? other : at;
            score = min(partner, score);
        }
        return at;
    }
};

// Ranks the points of `count` lines from `first` on.
template <class Point, int DEPTH, class Query>
INLINE void rank_all(const uint8_t* table, int first, int count, const Query& query, Best<DEPTH>& best) {
    if constexpr (ROOMY) {
        const uint8_t* of_line = line_at<Point::LINE>(Point::first(table), (uint32_t)first);
#pragma unroll 4
        for (int line = first; line < first + count; line++, of_line += Point::LINE) best.take(query.ranked(Point(of_line), line));
    } else {
        const uint8_t* of_lane = Point::first(table);
#pragma unroll 2
        for (int line = first; line < first + count; line++) best.take(query.ranked(Point(of_lane, line), line));
    }
}

// Shared memory in which half a warp lists up to 64 lines.
INLINE int* list_of_half() {
    __shared__ __align__(16) int lists[32 * 64];
    return lists + threadIdx.x / 16 * 64;
}

// Calls `rate` with the surviving lines that this half found, four at a time.
template <class KEPT, class F> INLINE void each_four(const Best<KEPT::DEPTH>& lines, F rate) {
    int *list = list_of_half(), count = 0;
    __syncwarp();
#pragma unroll
    for (int k = 0; k < KEPT::DEPTH; k++) {
        const int place = lines.place(k, KEPT::lanes(k));
        if (lane_of_16() < KEPT::lanes(k)) list[count + lane_of_16()] = place;
        count += KEPT::lanes(k);
    }
    __syncwarp();
    if constexpr (ROOMY) {
#pragma unroll 1
        for (const int4 *at = (const int4*)list, *end = at + KEPT::KEPT / 4; at < end; at++) rate(*at);
    } else {
#pragma unroll 1
        for (int i = 0; i < KEPT::KEPT; i += 4) rate(*(const int4*)(list + i));
    }
}

template <class Point, class KEPT, int DEPTH, class Query>
INLINE void rank(const uint8_t* table, const Best<KEPT::DEPTH>& lines, const Query& query, Best<DEPTH>& best) {
    const uint8_t* of_lane = Point::first(table);
    each_four<KEPT>(lines, [&](int4 four) {
        const int a = query.ranked(Point(of_lane, four.x), four.x), b = query.ranked(Point(of_lane, four.y), four.y);
        const int c = query.ranked(Point(of_lane, four.z), four.z), d = query.ranked(Point(of_lane, four.w), four.w);
        best.take(a, b, c, d);
    });
}

// Calls `rate` with the first COUNT of the lines listed for a bucket, one after another.
template <int COUNT, class F> INLINE void each_listed(const uint16_t* list, F rate) {
    static_assert(COUNT % 4 == 0 && COUNT <= LISTED, "lines are read by four");
#pragma unroll 1
    for (int i = 0; i < COUNT; i += 4) {
        const uint2 four = *(const uint2*)(list + i);
        rate((int)(four.x & 0xffff));
        rate((int)(four.x >> 16));
        rate((int)(four.y & 0xffff));
        rate((int)(four.y >> 16));
    }
}

// The list of the bucket of 4 values, one per lane of a half warp: lane l has that of l % 4.
INLINE const uint16_t* list_of(const Codebook& codebook, int codebook_index, float y) {
    const int eighth = (int)lesser(fabsf(y) * (1.0f / 8), 15.0f);
    const int of = eighth < 8 ? eighth >> 1 : eighth < 11 ? 4 : eighth < 14 ? 5 : 6;
    int at = y < 0 ? RANGES / 2 - 1 - of : RANGES / 2 + of;
    at = at * RANGES + __shfl_xor_sync(FULL, at, 1);
    at = at * (RANGES * RANGES) + __shfl_xor_sync(FULL, at, 2);
    return codebook.lists + LISTED * (BUCKETS * codebook_index + __shfl_sync(FULL, at, 0, 16));
}

// The survivors of each group of values: 2 P, Q and their numbers, WIDTH of each.
template <int WIDTH> struct Survivors {
    static const int WORDS = 3 * WIDTH;
    float* of;

    __device__ __forceinline__ Survivors(float* survivors, int group) : of(survivors + WORDS * group) {}
    __device__ __forceinline__ const float* p() const { return of; }
    __device__ __forceinline__ const float* q() const { return of + WIDTH; }
    __device__ __forceinline__ const int* places() const { return (const int*)of + 2 * WIDTH; }

    // Computes 2 P, of x or -x, and Q of a point, and stores them.
    template <class Point, int SIZE>
    __device__ __forceinline__ void keep(int at, const uint8_t* table, int place, const float (&x)[SIZE], const float (&w)[SIZE],
                                         float sign) const {
        const Point point(table + (uint64_t)(uint32_t)place * (uint32_t)Point::BYTES);
        float p = 0, q = 0;
#pragma unroll
        for (int j = 0; j < SIZE; j++) {
            const float v = (float)point.level(j), wv = v * w[j];
            p = p + wv * x[j];
            q = q + wv * v;
        }
        of[at] = p * (sign + sign);
        of[WIDTH + at] = q;
        ((int*)of)[2 * WIDTH + at] = place;
    }
};

// The depth of a search: the Shape of families (void: all cells are ranked) and of the cells that remain; whether
// centers, and points, are ranked in 8 bits.
template <class FAMILIES, class CELLS, bool COARSE_TREE, bool COARSE> struct TreeSearch {
    typedef FAMILIES Families;
    typedef CELLS Cells;
    static const int listed = 0, codebooks = 1;
    static const bool coarse_tree = COARSE_TREE, coarse = COARSE;
};

// The depth for points of 4 values: the number of listed lines; for one scale or two, each with half of the survivors;
// of one codebook or both.
template <int COUNT, bool AROUND, int CODEBOOKS> struct ListSearch {
    static const int listed = COUNT, codebooks = CODEBOOKS;
    static const bool around = AROUND;
};

template <int SIZE, bool MAGNITUDES, bool COARSE, bool SHORT = false> struct QueryOf {
    typedef FineQuery<SIZE, bare<SIZE, MAGNITUDES>()> Type;
};
template <int SIZE, bool MAGNITUDES> struct QueryOf<SIZE, MAGNITUDES, true> {
    typedef CoarseQuery<SIZE, MAGNITUDES> Type;
};
template <> struct QueryOf<8, true, false, true> {
    typedef ShortQuery Type;
};

// A query in the form used for centers, and their number of lines.
template <int SIZE, int LINES, class Query> struct CenterOf {
    typedef PointWords<SIZE> Type;
};
template <int LINES> struct CenterOf<8, LINES, FineQuery<8, true>> {
    typedef Center<LINES> Type;
};

// The best cells: of all, or of the best families.
template <int SIZE, int POINTS, class FAMILIES, int DEPTH, class Query> struct Tree {
    STATIC_INLINE void rank_cells(const Codebook& codebook, int codebook_index, const Query& query, Best<DEPTH>& cells) {
        Best<FAMILIES::DEPTH> families;
        typedef typename CenterOf<SIZE, POINTS / 4096, Query>::Type Family;
        typedef typename CenterOf<SIZE, POINTS / 256, Query>::Type Cell;
        rank_all<Family>(codebook.families, codebook_index * (POINTS / 4096), POINTS / 4096, query, families);
        rank<Cell, FAMILIES>(codebook.cells, families, query, cells);
    }
};
template <int SIZE, int POINTS, int DEPTH, class Query> struct Tree<SIZE, POINTS, void, DEPTH, Query> {
    STATIC_INLINE void rank_cells(const Codebook& codebook, int codebook_index, const Query& query, Best<DEPTH>& cells) {
        rank_all<PointWords<SIZE>>(codebook.cells, codebook_index * (POINTS / 256), POINTS / 256, query, cells);
    }
};

// Stores the survivors of 32 values, with weights w, for scales around 1 / |inverse|, from `at` on; sign: of the
// scales.
template <int SIZE, int POINTS, bool MAGNITUDES, int WIDTH, class Depth>
INLINE void search_points(const Codebook& codebook, int codebook_index, float sign, float inverse, const float* x, const float* w,
                          float* survivors, int at) {
    typedef typename QueryOf<SIZE, MAGNITUDES, Depth::coarse, MAGNITUDES && Depth::coarse_tree && !Depth::coarse>::Type Query;
    typedef typename QueryOf<SIZE, MAGNITUDES, Depth::coarse_tree>::Type TreeQuery;
    typedef typename Depth::Cells Cells;
    typedef Tree<SIZE, POINTS, typename Depth::Families, Cells::DEPTH, TreeQuery> Centers;
    typedef PointWords<SIZE, bare<SIZE, MAGNITUDES>()> Point;
#pragma unroll 1
    for (int group = half_of_warp(); group < 32 / SIZE; group += 2) {
        const int mine = SIZE * group + ((int)threadIdx.x & (SIZE - 1));
        const OneOf<SIZE> one(fmaxf(fminf(x[mine] * inverse, 140.0f), -140.0f), w[mine]);
        const Query query(one);
        Best<Cells::DEPTH> cells;
        if constexpr (Depth::coarse == Depth::coarse_tree) Centers::rank_cells(codebook, codebook_index, query, cells);
        else Centers::rank_cells(codebook, codebook_index, TreeQuery(one), cells);
        const Survivors<WIDTH> group_survivors(survivors, group);
        float v[SIZE], weight[SIZE];
        load_values<SIZE>(x + SIZE * group, v);
        load_values<SIZE>(w + SIZE * group, weight);
        Best<1> score;
        rank<Point, Cells>(codebook.points, cells, query, score);
        group_survivors.template keep<Point>(at + lane_of_16(), codebook.points, score.place(0), v, weight, sign);
    }
    __syncwarp();
}

// The same for 8 groups of 4 values, of the lines listed for their buckets, in Depth::codebooks codebooks from `book`
// on, whose survivors are `apart` words apart.
template <int WIDTH, class Depth>
INLINE void search_listed(const Codebook& codebook, int codebook_index, float sign, float inverse, const float* x, const float* w,
                          float* survivors, int at, int apart) {
    typedef PointWords<4> Point;
    const uint8_t* of_lane = Point::first(codebook.points);
#pragma unroll 1
    for (int group = half_of_warp(); group < 8; group += 2) {
        const int mine = 4 * group + ((int)threadIdx.x & 3);
        const OneOf<4> one(greater(lesser(x[mine] * inverse, 140.0f), -140.0f), w[mine]);
        const FineQuery<4, true> query(one);
        const uint16_t* list = list_of(codebook, codebook_index, one.y);
        float v[4], weight[4];
        load_values<4>(x + 4 * group, v);
        load_values<4>(w + 4 * group, weight);
#pragma unroll 1
        for (int k = 0; k < Depth::codebooks; k++) {
            int place;
            if constexpr (Depth::around) {
                Best<1> above, below;
                each_listed<Depth::listed>(list, [&](int line) {
                    int more, less;
                    query.ranked_around(Point(of_lane, line), line, more, less);
                    above.take(more);
                    below.take(less);
                });
                const int first = above.place(0, 8), other = __shfl_xor_sync(FULL, below.place(0, 8), 8);
                place = lane_of_16() < 8 ? first : other;
            } else {
                Best<1> score;
                each_listed<Depth::listed>(list, [&](int line) { score.take(query.ranked(Point(of_lane, line), line)); });
                place = score.place(0);
            }
            const Survivors<WIDTH> group_survivors(survivors + k * apart, group);
            group_survivors.template keep<Point>(at + lane_of_16(), codebook.points, place, v, weight, sign);
            list += LISTED * BUCKETS;
        }
    }
    __syncwarp();
}

// Ends of the three or four ranges of scales, relative to the estimate, for which all points are ranked.
template <int RANGES> INLINE float end_of_range(int i) {
    if (RANGES == 3) return i < 2 ? i ? 0.85f : 0.62f : i == 2 ? 1.17f : 1.6f;
    return i < 2 ? i ? 0.79f : 0.62f : i == 2 ? 1.0f : i == 3 ? 1.27f : 1.6f;
}

// The score of the error found so far, and the largest score.
const float KNOWN = 32768, WORST = (1 << (31 - NUMBER)) - 1;

// Stores, like search_points, of all points the best of each lane for RANGES ranges of scales around 1 / |inverse|:
// for groups whose error, one per lane of the first ones, exceeds `least`.
template <int SIZE, int POINTS, bool MAGNITUDES, int WIDTH, int RANGES>
INLINE void scan_points(const Codebook& codebook, int codebook_index, float sign, float inverse, const float* x, const float* w,
                        float* survivors, float error, double least) {
    typedef PointWords<SIZE, bare<SIZE, MAGNITUDES>()> Point;
    const uint8_t* of_lane = Point::first(codebook.points);
#pragma unroll 1
    for (int group = half_of_warp(); group < 32 / SIZE; group += 2) {
        const float of_group = __shfl_sync(FULL, error, group);
        const int mine = SIZE * group + ((int)threadIdx.x & (SIZE - 1));
        const OneOf<SIZE> one(x[mine] * inverse, w[mine]);
        const FineQuery<SIZE, bare<SIZE, MAGNITUDES>()> query(one);
        const float energy = one.sum(one.y * one.y * one.w) * query.factor;
        if (!((double)of_group > least)) continue;  // the halves of a warp have diverged here
        const float factor = KNOWN / (of_group * inverse * inverse * query.factor);
        Best<1> best[RANGES];
#pragma unroll 1
        for (int line = codebook_index * (POINTS / 16); line < (codebook_index + 1) * (POINTS / 16); line++) {
            uint32_t p, q;
            query.sums(Point(of_lane, line), p, q);
            const float pf = (float)(int)p * 128.0f, qf = (float)(int)q, suits = pf * -0.5f / (qf + 1.0f);
#pragma unroll
            for (int i = 0; i < RANGES; i++) {
                const float ratio = greater(lesser(suits, end_of_range<RANGES>(i + 1)), end_of_range<RANGES>(i));
                const float score = (energy + (pf + qf * ratio) * ratio) * factor;
                best[i].take(ranked_line((uint32_t)nearest_int(lesser(greater(score, 0.0f), WORST)) << NUMBER, line));
            }
        }
        float v[SIZE], weight[SIZE];
        load_values<SIZE>(x + SIZE * group, v);
        load_values<SIZE>(w + SIZE * group, weight);
        const Survivors<WIDTH> group_survivors(survivors, group);
#pragma unroll
        for (int i = 0; i < RANGES; i++)
            group_survivors.template keep<Point>(SURVIVORS * i + lane_of_16(), codebook.points, best[i].place(0), v, weight, sign);
    }
    __syncwarp();
}

// The errors of 32 values for one scale d >= 0 per lane, each with the best survivors of `slots` searches for it;
// lanes of the same scale share survivors. AT_ONCE: groups for which registers suffice; INCREMENTS: whether they suffice
// for an incremented address.
template <int GROUPS, int WIDTH, int ACROSS, int AT_ONCE, bool INCREMENTS>
INLINE float errors_of(float* survivors, int slots, float d) {
    const int EACH = 4 * 32 / ACROSS, begin = 4 * (ACROSS == 16 ? half_of_warp() : lane_id() / ACROSS);
    const int SEARCHES = ROOMY && ACROSS == 8 ? 4 : 1;
    static_assert(SURVIVORS % EACH == 0, "lanes share the survivors of a search");
    float total = 0;
#pragma unroll AT_ONCE
    for (int group = 0; group < GROUPS; group++) {
        const float* at = Survivors<WIDTH>(survivors, group).p() + begin;
        float least = NOTHING_FOUND;
#pragma unroll SEARCHES
        for (int first = 0; first < SURVIVORS * slots; first += SURVIVORS) {
            const float* from = INCREMENTS ? at : at + first;
            if (INCREMENTS) at += SURVIVORS;
#pragma unroll
            for (int i = 0; i < SURVIVORS; i += EACH) {
                const float4 p = *(const float4*)(from + i), q = *(const float4*)(from + WIDTH + i);
                least = fminf(d * q.x - p.x, least);
                least = fminf(d * q.y - p.y, least);
                least = fminf(d * q.z - p.z, least);
                least = fminf(d * q.w - p.w, least);
            }
        }
        for (int step = 16; step >= ACROSS; step /= 2) least = fminf(least, __shfl_xor_sync(FULL, least, step));
        total = total + least;
    }
    return total * d;
}

// The best survivors of all groups for a scale d >= 0: the first lane of a group writes 2 P, Q and the index.
template <int GROUPS, int WIDTH> INLINE void pick_points(float* survivors, int slots, float d, float* p, float* q, int* places) {
    const int EACH = 32 / GROUPS, group = lane_id() / EACH;
    const Survivors<WIDTH> of(survivors, group);
    float best = NOTHING_FOUND;
    int at = 0;
    for (int i = lane_id() % EACH; i < SURVIVORS * slots; i += EACH) {
        const float score = of.q()[i] * d - of.p()[i];
        at = score < best ? i : at;
        best = lesser(score, best);
    }
#pragma unroll
    for (int step = EACH / 2; step; step /= 2) {
        const float other = __shfl_xor_sync(FULL, best, step);
        const int partner = __shfl_xor_sync(FULL, at, step);
        const bool better = other < best || (other == best && partner < at);
        best = better ? other : best;
        at = better ? partner : at;
    }
    if (lane_id() % EACH == 0) {
        p[group] = of.p()[at];
        q[group] = of.q()[at];
        places[group] = of.places()[at];
    }
}
