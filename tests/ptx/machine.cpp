// The parts of machine.h that are more than an expression: memory, warp-level instructions, rounding. From the PTX ISA
// document, 9.7; fragments of matrices from the tables of 9.7.14.5. Compiled once, with sanitizers: an access is tried
// here, by its type, and thus checked, before the translated code, which is compiled without sanitizers, makes it.
//
// Deviations from the hardware: approximations (ex2, rcp) are computed exactly and rounded; f32 sums of an mma are
// computed in double and rounded once (PTX leaves their order and precision open).
#include "machine.h"

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <map>
#include <set>
#include <tuple>

extern "C" {
void host_sync_threads(int kind);
const void* host_exchange(int kind, const void* mine, unsigned nbytes);
uint8_t* host_dynamic_shared();
[[noreturn]] void host_fail(const char* what);
}

namespace {
const uint64_t BASE = 1024, WINDOW = 232448;  // shared memory: at most 227 KiB
const uint32_t FULL = 0xffffffffu;

// Kinds of warp-level instructions: one that must be the same for all lanes (.aligned) is identified by its line.
enum { SHFL = 1 << 24, VOTE_ALL, VOTE_ANY, BALLOT, MATCH, REDUCE, WARP_BARRIER, ALIGNED = 1 << 25 };

unsigned lane() { return host_thread->thread.x % 32; }

void whole(uint32_t mask) {
    if (mask != FULL) host_fail("a member mask that is not all lanes");
}

template <typename T> T given(const void* table, unsigned from) {
    T value;
    memcpy(&value, (const char*)table + 64 * from, sizeof value);
    return value;
}

template <typename T> __attribute__((noinline)) void try_load(const uint8_t* p) { (void)*(volatile const T*)p; }

void seen(uint64_t a, unsigned n, int line);
bool is_counting();

// Aligned, and every eight bytes of it readable: otherwise UBSan and ASan end the process.
uint8_t* tried(uint64_t a, unsigned n, int line) {
    if (a % n) {
        char text[120];
        snprintf(text, sizeof text, "line %d of the PTX: %u bytes at an unaligned address", line, n);
        host_fail(text);
    }
    if (is_counting()) seen(a, n, line);
    const uint8_t* p = (const uint8_t*)a;
    if (n == 1) try_load<uint8_t>(p);
    if (n == 2) try_load<uint16_t>(p);
    if (n == 4) try_load<uint32_t>(p);
    if (n >= 8) try_load<uint64_t>(p);
    if (n == 16) try_load<uint64_t>(p + 8);
    return (uint8_t*)a;
}

// Counting (count.py): the k-th time that a thread reaches a line is one request of its warp.
struct Request {
    uint64_t at[32];
    uint32_t lanes, bytes;
    bool shared;
};
struct Count {
    uint64_t requests, parts, least;
};
bool counting;
uint64_t shared_bytes;                                            // of a block
std::map<std::tuple<unsigned, int, unsigned>, Request> requests;  // warp, line, k
std::map<std::pair<unsigned, int>, unsigned> visits;              // thread, line
std::map<std::pair<int, bool>, Count> counts;                     // line, shared
Dim3 counted_block;

// Shared memory: wavefronts. 32 lanes are served at once, of 8 bytes 16 lanes, of 16 bytes 8; words in one bank one by
// one.
void count_shared(const Request& r, Count& count) {
    const unsigned together = r.bytes <= 4 ? 32 : 128 / r.bytes;
    for (unsigned first = 0; first < 32; first += together) {
        std::set<uint64_t> words;
        for (unsigned l = first; l < first + together; l++)
            if (r.lanes >> l & 1)
                for (unsigned i = 0; i < r.bytes; i += 4) words.insert((r.at[l] + i) / 4);
        unsigned of_bank[32] = {}, most = 0;
        for (uint64_t word : words) most = std::max(most, ++of_bank[word % 32]);
        count.parts += most;
        count.least += (words.size() + 31) / 32;
    }
}

// Global memory: sectors of 32 bytes, and their number if the bytes were contiguous.
void count_global(const Request& r, Count& count) {
    std::set<uint64_t> sectors, bytes;
    for (unsigned l = 0; l < 32; l++)
        if (r.lanes >> l & 1)
            for (unsigned i = 0; i < r.bytes; i++) sectors.insert((r.at[l] + i) / 32), bytes.insert(r.at[l] + i);
    count.parts += sectors.size();
    count.least += (bytes.size() + 31) / 32;
}

void finish_block() {
    for (const auto& entry : requests) {
        const Request& r = entry.second;
        Count& count = counts[{std::get<1>(entry.first), r.shared}];
        count.requests++;
        r.shared ? count_shared(r, count) : count_global(r, count);
    }
    requests.clear();
    visits.clear();
}

bool is_counting() { return counting; }

void seen(uint64_t a, unsigned n, int line) {
    const Dim3 b = host_thread->block;
    if (b.x != counted_block.x || b.y != counted_block.y || b.z != counted_block.z) finish_block();
    counted_block = b;
    const unsigned t = host_thread->thread.x;
    Request& r = requests[{t / 32, line, visits[{t, line}]++}];
    const uint64_t shared = (uint64_t)host_dynamic_shared();
    r.at[t % 32] = a;
    r.lanes |= 1u << t % 32;
    r.bytes = n;
    r.shared = a >= shared && a - shared < shared_bytes;
}

uint8_t* in_shared(uint64_t a, unsigned n, int line) {
    if (a < BASE || a - BASE > WINDOW) ptx_fail("no address of shared memory", line);
    return tried((uint64_t)host_dynamic_shared() + a - BASE, n, line);
}
}  // namespace

extern "C" {
void ptx_fail(const char* what, int line) {
    char text[200];
    snprintf(text, sizeof text, "line %d of the PTX: %s", line, what);
    host_fail(text);
}
void ptx_trap(int line) { ptx_fail("trap", line); }

uint8_t* at_global_ld(uint64_t a, unsigned n, int line) { return tried(a, n, line); }
uint8_t* at_global_st(uint64_t a, unsigned n, int line) { return tried(a, n, line); }
uint8_t* at_generic_ld(uint64_t a, unsigned n, int line) { return tried(a, n, line); }
uint8_t* at_generic_st(uint64_t a, unsigned n, int line) { return tried(a, n, line); }
uint8_t* at_local_ld(uint64_t a, unsigned n, int line) { return tried(a, n, line); }
uint8_t* at_local_st(uint64_t a, unsigned n, int line) { return tried(a, n, line); }
uint8_t* at_shared_ld(uint64_t a, unsigned n, int line) { return in_shared(a, n, line); }
uint8_t* at_shared_st(uint64_t a, unsigned n, int line) { return in_shared(a, n, line); }
uint64_t generic_of_shared(uint64_t a) { return a - BASE + (uint64_t)host_dynamic_shared(); }
uint64_t shared_of_generic(uint64_t a) { return a - (uint64_t)host_dynamic_shared() + BASE; }

// Begins to count, for blocks with this much shared memory; ends it, and returns the counts: line, shared or not,
// requests, parts of them, the minimum possible.
void ptx_begin_count(uint64_t nbytes) {
    shared_bytes = nbytes;
    counts.clear();
    counting = true;
}
uint64_t ptx_end_count(uint64_t* rows, uint64_t room) {
    finish_block();
    counting = false;
    uint64_t n = 0;
    for (const auto& [place, c] : counts) {
        if (n == room) break;
        const uint64_t row[5] = {(uint64_t)place.first, place.second, c.requests, c.parts, c.least};
        memcpy(rows + 5 * n++, row, sizeof row);
    }
    return n;
}

// ---- synchronization of lanes

// bar.sync is barrier.sync.aligned: the threads of a warp are at the same one.
void bar_sync(int line) {
    host_exchange(ALIGNED + line, nullptr, 0);
    host_sync_threads(1);
}

void bar_warp_sync(uint32_t mask) {
    whole(mask);
    host_exchange(WARP_BARRIER, nullptr, 0);
}

// The modes differ in the lane that is read, j, and in the condition for a read; c holds a clamp in its low 5 bits,
// and from bit 8 on the bits of a lane's number that identify its segment.
enum { UP, DOWN, BUTTERFLY, INDEX };
static uint32_t shuffle(int mode, uint32_t a, uint32_t b, uint32_t c, uint32_t mask, bool& there) {
    whole(mask);
    const void* table = host_exchange(SHFL + 16 * mode, &a, sizeof a);
    const int me = (int)lane(), by = (int)(b & 31), clamp = (int)(c & 31), segment = (int)(c >> 8 & 31);
    const int last = (me & segment) | (clamp & ~segment), first = me & segment;
    int from;
    switch (mode) {
        case UP:
            from = me - by;
            there = from >= last;
            break;
        case DOWN:
            from = me + by;
            there = from <= last;
            break;
        case BUTTERFLY:
            from = me ^ by;
            there = from <= last;
            break;
        default: from = first | (by & ~segment); there = from <= last;
    }
    return given<uint32_t>(table, (unsigned)(there ? from : me));
}
uint32_t shfl_sync_up_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t m, bool& t) { return shuffle(UP, a, b, c, m, t); }
uint32_t shfl_sync_down_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t m, bool& t) { return shuffle(DOWN, a, b, c, m, t); }
uint32_t shfl_sync_bfly_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t m, bool& t) { return shuffle(BUTTERFLY, a, b, c, m, t); }
uint32_t shfl_sync_idx_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t m, bool& t) { return shuffle(INDEX, a, b, c, m, t); }

static uint32_t ballot(int kind, bool a, uint32_t mask) {
    whole(mask);
    const uint8_t mine = a;
    const void* table = host_exchange(kind, &mine, 1);
    uint32_t bits = 0;
    for (unsigned i = 0; i < 32; i++) bits |= (uint32_t)given<uint8_t>(table, i) << i;
    return bits;
}
bool vote_sync_all_pred(bool a, uint32_t mask) { return ballot(VOTE_ALL, a, mask) == FULL; }
bool vote_sync_any_pred(bool a, uint32_t mask) { return ballot(VOTE_ANY, a, mask) != 0; }
uint32_t vote_sync_ballot_b32(bool a, uint32_t mask) { return ballot(BALLOT, a, mask); }
uint32_t match_any_sync_b32(uint32_t a, uint32_t mask) {
    whole(mask);
    const void* table = host_exchange(MATCH, &a, sizeof a);
    uint32_t bits = 0;
    for (unsigned i = 0; i < 32; i++) bits |= (uint32_t)(given<uint32_t>(table, i) == a) << i;
    return bits;
}
uint32_t redux_sync_min_u32(uint32_t a, uint32_t mask) {
    whole(mask);
    const void* table = host_exchange(REDUCE, &a, sizeof a);
    for (unsigned i = 0; i < 32; i++) a = given<uint32_t>(table, i) < a ? given<uint32_t>(table, i) : a;
    return a;
}

// Lanes 8 i to 8 i + 7 give the addresses of the rows of matrix i: 8 values of 16 bits each. Register i of lane l gets
// values 2 (l % 4) and the next one of row l / 4; transposed: of column l / 4. The addresses of lanes beyond the
// matrices are checked on sm_75 as well, so they must be valid everywhere.
static void load_matrices(uint32_t* d, uint64_t p, int line, unsigned count, bool transposed) {
    const bool before = counting;
    counting &= lane() < 8 * count;  // the addresses of other lanes are not used
    const uint64_t mine = (uint64_t)in_shared(p, 16, line);
    counting = before;
    const void* table = host_exchange(ALIGNED + line, &mine, sizeof mine);
    const unsigned l = lane();
    for (unsigned i = 0; i < count; i++) {
        uint16_t half[2];
        for (unsigned k = 0; k < 2; k++) {
            const unsigned fast = 2 * (l % 4) + k, slow = l / 4;
            const unsigned row = transposed ? fast : slow, column = transposed ? slow : fast;
            half[k] = ((const uint16_t*)given<uint64_t>(table, 8 * i + row))[column];
        }
        d[i] = half[0] | (uint32_t)half[1] << 16;
    }
    host_exchange(ALIGNED + line, nullptr, 0);  // all have read before any lane writes
}
void ldmatrix_sync_aligned_m8n8_x2_shared_b16(uint32_t* d, uint64_t p, int line) { load_matrices(d, p, line, 2, false); }
void ldmatrix_sync_aligned_m8n8_x4_shared_b16(uint32_t* d, uint64_t p, int line) { load_matrices(d, p, line, 4, false); }
void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(uint32_t* d, uint64_t p, int line) { load_matrices(d, p, line, 4, true); }
}

// ---- mma: D = A B + C. Elements i of a lane's fragments, from the low bits of its first register up, are placed as
// in the tables of 9.7.14.5, with group = lane / 4 and thread = lane % 4.

namespace {
struct Place {
    int row, column;
};
typedef Place (*Layout)(int group, int thread, int i);

// Integers of 8 bits. m8n8k16, m16n8k16 and m16n8k32:
Place a_k16_m8_s8(int g, int t, int i) { return {g, 4 * t + i}; }
Place a_k16_s8(int g, int t, int i) { return {i < 4 ? g : g + 8, 4 * t + (i & 3)}; }
Place a_k32_s8(int g, int t, int i) {
    return {i < 4 || (8 <= i && i < 12) ? g : g + 8, i < 8 ? 4 * t + (i & 3) : 4 * t + (i & 3) + 16};
}
Place b_k16_s8(int g, int t, int i) { return {4 * t + i, g}; }
Place b_k32_s8(int g, int t, int i) { return {i < 4 ? 4 * t + (i & 3) : 4 * t + (i & 3) + 16, g}; }
// 16 bits. m16n8k8 and m16n8k16:
Place a_k8_16(int g, int t, int i) { return {i < 2 ? g : g + 8, 2 * t + (i & 1)}; }
Place a_k16_16(int g, int t, int i) {
    return {i < 2 || (4 <= i && i < 6) ? g : g + 8, i < 4 ? 2 * t + (i & 1) : 2 * t + (i & 1) + 8};
}
Place b_k8_16(int g, int t, int i) { return {2 * t + i, g}; }
Place b_k16_16(int g, int t, int i) { return {i < 2 ? 2 * t + (i & 1) : 2 * t + (i & 1) + 8, g}; }
// tf32. m16n8k4 and m16n8k8:
Place a_k4_32(int g, int t, int i) { return {i == 0 ? g : g + 8, t}; }
Place a_k8_32(int g, int t, int i) { return {i == 0 || i == 2 ? g : g + 8, i < 2 ? t : t + 4}; }
Place b_k4_32(int g, int t, int) { return {t, g}; }
Place b_k8_32(int g, int t, int i) { return {i == 0 ? t : t + 4, g}; }
// Accumulators, of 8 and of 16 rows.
Place c_m8(int g, int t, int i) { return {g, 2 * t + i}; }
Place c_m16(int g, int t, int i) { return {i < 2 ? g : g + 8, 2 * t + (i & 1)}; }

enum Type { S8, F16, BF16, TF32 };
int bits_of(Type type) { return type == S8 ? 8 : type == TF32 ? 32 : 16; }

// The lane and element of a matrix element: the inverse of a layout.
struct Where {
    uint8_t lane[32][32], element[32][32];
};
Where backwards(Layout layout, int elements, int rows, int columns) {
    Where where;
    memset(&where, 255, sizeof where);
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < elements; i++) {
            const Place p = layout(l / 4, l % 4, i);
            if (where.lane[p.row][p.column] != 255) host_fail("two lanes hold one element of a matrix");
            where.lane[p.row][p.column] = (uint8_t)l;
            where.element[p.row][p.column] = (uint8_t)i;
        }
    if (32 * elements != rows * columns) host_fail("the elements of a matrix are more or less than the lanes hold");
    return where;
}

struct Shape {
    Type type;
    int m, k, a_registers, b_registers;
    Layout c;
    Where a, b;
    Shape(Type type, int m, int k, int a_registers, int b_registers, Layout layout_a, Layout layout_b, Layout c)
        : type(type),
          m(m),
          k(k),
          a_registers(a_registers),
          b_registers(b_registers),
          c(c),
          a(backwards(layout_a, a_registers * 32 / bits_of(type), m, k)),
          b(backwards(layout_b, b_registers * 32 / bits_of(type), k, 8)) {}
};

struct Fragments {
    uint32_t a[4], b[2];
};

uint32_t element(const void* table, const Where& where, int row, int column, size_t offset, int bits) {
    const unsigned l = where.lane[row][column], i = where.element[row][column], per = 32 / (unsigned)bits;
    uint32_t word;
    memcpy(&word, (const char*)table + 64 * l + offset + 4 * (i / per), 4);
    return bits == 32 ? word : word >> (unsigned)bits * (i % per) & ((1u << bits) - 1);
}

double value_of(uint32_t bits, Type type) {
    switch (type) {
        case F16: return cvt_f32_f16((uint16_t)bits);
        case BF16: return as_f32(bits << 16);
        default: return as_f32(bits & 0xffffe000u);  // 19 bits of it are a tf32
    }
}

void mma(const Shape& s, uint32_t* d, const uint32_t* a, const uint32_t* b, const uint32_t* c, int line) {
    Fragments mine = {};
    memcpy(mine.a, a, 4 * (size_t)s.a_registers);
    memcpy(mine.b, b, 4 * (size_t)s.b_registers);
    const void* table = host_exchange(ALIGNED + line, &mine, sizeof mine);
    const int l = (int)lane(), bits = bits_of(s.type);
    uint32_t result[4];
    for (int i = 0; i < s.m / 4; i++) {
        const Place p = s.c(l / 4, l % 4, i);
        uint32_t whole_sum = c[i];
        double sum = as_f32(c[i]);
        for (int k = 0; k < s.k; k++) {
            const uint32_t x = element(table, s.a, p.row, k, offsetof(Fragments, a), bits);
            const uint32_t y = element(table, s.b, k, p.column, offsetof(Fragments, b), bits);
            if (s.type == S8) whole_sum += (uint32_t)((int8_t)x * (int8_t)y);
            else sum += value_of(x, s.type) * value_of(y, s.type);
        }
        result[i] = s.type == S8 ? whole_sum : as_b32(one_nan((float)sum));
    }
    memcpy(d, result, (size_t)s.m);
}
}  // namespace

#define MMA(name, type, m, k, a_registers, b_registers, a, b, c)                                                               \
    extern "C" void mma_sync_aligned_##name(uint32_t* to, const uint32_t* x, const uint32_t* y, const uint32_t* z, int line) { \
        static const Shape shape(type, m, k, a_registers, b_registers, a, b, c);                                               \
        mma(shape, to, x, y, z, line);                                                                                         \
    }
MMA(m8n8k16_row_col_s32_s8_s8_s32, S8, 8, 16, 1, 1, a_k16_m8_s8, b_k16_s8, c_m8)
MMA(m16n8k16_row_col_s32_s8_s8_s32, S8, 16, 16, 2, 1, a_k16_s8, b_k16_s8, c_m16)
MMA(m16n8k32_row_col_s32_s8_s8_s32, S8, 16, 32, 4, 2, a_k32_s8, b_k32_s8, c_m16)
MMA(m16n8k8_row_col_f32_f16_f16_f32, F16, 16, 8, 2, 1, a_k8_16, b_k8_16, c_m16)
MMA(m16n8k16_row_col_f32_f16_f16_f32, F16, 16, 16, 4, 2, a_k16_16, b_k16_16, c_m16)
MMA(m16n8k16_row_col_f32_bf16_bf16_f32, BF16, 16, 16, 4, 2, a_k16_16, b_k16_16, c_m16)
MMA(m16n8k4_row_col_f32_tf32_tf32_f32, TF32, 16, 4, 2, 1, a_k4_32, b_k4_32, c_m16)
MMA(m16n8k8_row_col_f32_tf32_tf32_f32, TF32, 16, 8, 4, 2, a_k8_32, b_k8_32, c_m16)

// ---- values

extern "C" {
uint32_t atom_add_u32(uint8_t* p, uint32_t b) {
    const uint32_t before = *(uint32_t*)p;
    *(uint32_t*)p = before + b;
    return before;
}
uint32_t atom_max_s32(uint8_t* p, uint32_t b) {
    const int32_t before = *(int32_t*)p;
    if ((int32_t)b > before) *(int32_t*)p = (int32_t)b;
    return (uint32_t)before;
}
uint64_t atom_cas_b64(uint8_t* p, uint64_t a, uint64_t b) {
    const uint64_t before = *(uint64_t*)p;
    if (before == a) *(uint64_t*)p = b;
    return before;
}

float cvt_f32_f16(uint16_t h) {
    const int exponent = h >> 10 & 31, fraction = h & 1023;
    float f;
    if (exponent == 31) f = fraction ? as_f32(0x7fffffffu) : INFINITY;
    else if (exponent) f = ldexpf((float)(1024 + fraction), exponent - 25);
    else f = ldexpf((float)fraction, -24);
    return f != f ? f : h >> 15 ? -f : f;
}

// The half nearest to f, ties to an even fraction; a NaN is 0x7fff.
uint16_t cvt_rn_f16_f32(float f) {
    if (f != f) return 0x7fff;
    const uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    const double x = fabs((double)f);
    if (x >= 65520) return sign | 0x7c00;  // half way between the largest value and the next one
    int exponent;
    frexp(x, &exponent);  // x in [1/2, 1) 2^exponent
    if (exponent < -13 || x == 0) exponent = -13;
    const long steps = (long)nearbyint(ldexp(x, 11 - exponent));      // in units of the last place: 2^(exponent - 11)
    return sign | (uint16_t)(((long)(exponent + 13) << 10) + steps);  // the leading bit, 1024, increments the exponent
}

// The first operand becomes the upper half.
uint32_t cvt_rn_f16x2_f32(float a, float b) { return (uint32_t)cvt_rn_f16_f32(a) << 16 | cvt_rn_f16_f32(b); }

// Two halves less two: the difference is exact in f32, or its double rounding is harmless (24 bits are more than 2 x
// 11 + 1).
static uint16_t half_difference(uint32_t a, uint32_t b) {
    return cvt_rn_f16_f32(cvt_f32_f16((uint16_t)a) - cvt_f32_f16((uint16_t)b));
}
uint32_t sub_rn_f16x2(uint32_t a, uint32_t b) { return (uint32_t)half_difference(a >> 16, b >> 16) << 16 | half_difference(a, b); }

// The product of two halves has 22 bits: exact in f32.
static uint16_t half_product(uint32_t a, uint32_t b) { return cvt_rn_f16_f32(cvt_f32_f16((uint16_t)a) * cvt_f32_f16((uint16_t)b)); }
uint32_t mul_rn_f16x2(uint32_t a, uint32_t b) { return (uint32_t)half_product(a >> 16, b >> 16) << 16 | half_product(a, b); }

static float rounded(int direction, float (*f)(float, float, float), float a, float b, float c) {
    const int before = fegetround();
    fesetround(direction);
    const float result = f(a, b, c);
    fesetround(before);
    return one_nan(result);
}
__attribute__((noinline)) static float plus(float a, float b, float) {
    volatile float x = a, y = b, z;
    z = x + y;
    return z;
}
__attribute__((noinline)) static float fused(float a, float b, float c) {
    volatile float x = a, y = b, w = c, z;
    z = fmaf(x, y, w);
    return z;
}
float add_rz_f32(float a, float b) { return rounded(FE_TOWARDZERO, plus, a, b, 0); }
float fma_rm_f32(float a, float b, float c) { return rounded(FE_DOWNWARD, fused, a, b, c); }

// To integers: out of range becomes the nearest limit; a NaN of f32 becomes 0, of f64 the number 0x80000000.
static uint32_t to_s32(double whole) {
    return whole >= 2147483647.0 ? 0x7fffffffu : whole <= -2147483648.0 ? 0x80000000u : (uint32_t)(int32_t)whole;
}
uint32_t cvt_rni_s32_f32(float a) { return a != a ? 0 : to_s32(nearbyint((double)a)); }
uint32_t cvt_rzi_s32_f32(float a) { return a != a ? 0 : to_s32(trunc((double)a)); }
uint32_t cvt_rni_s32_f64(double a) { return a != a ? 0x80000000u : to_s32(nearbyint(a)); }

// .ftz: a denormal operand or result is zero with its sign.
static float flushed(float f) { return fabsf(f) < 0x1p-126f ? copysignf(0.0f, f) : f; }
float ex2_approx_ftz_f32(float a) { return flushed(one_nan((float)exp2((double)flushed(a)))); }
float rcp_approx_ftz_f32(float a) { return flushed(one_nan((float)(1.0 / (double)flushed(a)))); }

// The number if one of them is a NaN; +0 is greater than -0.
float max_f32(float a, float b) {
    if (a != a) return one_nan(b);
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? b : a;
    return a > b ? a : b;
}

float min_f32(float a, float b) {
    if (a != a) return one_nan(b);
    if (b != b) return a;
    if (a == 0 && b == 0) return std::signbit(a) ? a : b;
    return a < b ? a : b;
}

uint32_t prmt_b32(uint32_t a, uint32_t b, uint32_t c) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t d = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned control = c >> 4 * i & 15;
        uint32_t byte = (uint32_t)(bytes >> 8 * (control & 7)) & 255;
        if (control & 8) byte = byte & 128 ? 255 : 0;
        d |= byte << 8 * i;
    }
    return d;
}
uint32_t dp4a_s32_s32(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = c;
    for (int i = 0; i < 4; i++) {
        const int32_t x = (int8_t)(a >> 8 * i & 255), y = (int8_t)(b >> 8 * i & 255);
        d += (uint32_t)(x * y);
    }
    return d;
}
uint32_t dp4a_u32_s32(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = c;
    for (int i = 0; i < 4; i++) d += (uint32_t)((int32_t)(a >> 8 * i & 255) * (int8_t)(b >> 8 * i & 255));
    return d;
}
uint32_t dp2a_lo_s32_s32(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = c;
    for (int i = 0; i < 2; i++) d += (uint32_t)((int16_t)(a >> 16 * i & 65535) * (int8_t)(b >> 8 * i & 255));
    return d;
}
uint32_t dp2a_hi_s32_s32(uint32_t a, uint32_t b, uint32_t c) { return dp2a_lo_s32_s32(a, b >> 16, c); }
uint32_t dp2a_lo_u32_u32(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d = c;
    for (int i = 0; i < 2; i++) d += (a >> 16 * i & 65535) * (b >> 8 * i & 255);
    return d;
}
uint32_t dp2a_hi_u32_u32(uint32_t a, uint32_t b, uint32_t c) { return dp2a_lo_u32_u32(a, b >> 16, c); }
uint32_t brev_b32(uint32_t a) {
    uint32_t d = 0;
    for (int i = 0; i < 32; i++) d |= (a >> i & 1) << (31 - i);
    return d;
}
uint32_t popc_b32(uint32_t a) {
    uint32_t d = 0;
    for (; a; a >>= 1) d += a & 1;
    return d;
}
uint32_t clz_b32(uint32_t a) { return a ? (uint32_t)__builtin_clz(a) : 32; }
uint32_t clz_b64(uint64_t a) {
    uint32_t d = 0;
    for (; d < 64 && !(a >> 63); d++) a <<= 1;
    return d;
}
uint32_t bfind_shiftamt_u32(uint32_t a) {
    for (uint32_t i = 32; i--;)
        if (a >> i & 1) return 31 - i;
    return 0xffffffffu;
}
uint64_t bfi_b64(uint64_t a, uint64_t b, uint32_t c, uint32_t d) {
    const unsigned position = c & 255, length = d & 255;
    uint64_t f = b;
    for (unsigned i = 0; i < length && position + i <= 63; i++)
        f = (f & ~(1ull << (position + i))) | (a >> i & 1) << (position + i);
    return f;
}
uint32_t bfi_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const unsigned position = c & 255, length = d & 255;
    uint32_t f = b;
    for (unsigned i = 0; i < length && position + i <= 31; i++) f = (f & ~(1u << (position + i))) | (a >> i & 1) << (position + i);
    return f;
}
// The entry of the table that bits a, b, c select.
uint32_t lop3_b32(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
    uint32_t found = 0;
    for (unsigned i = 0; i < 32; i++) found |= (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i;
    return found;
}
// [b, a] as one number of 64 bits: the upper half of it shifted left, the lower half of it shifted right.
static uint64_t joined(uint32_t a, uint32_t b) { return (uint64_t)b << 32 | a; }
uint32_t shf_l_wrap_b32(uint32_t a, uint32_t b, uint32_t c) { return (uint32_t)(joined(a, b) << (c & 31) >> 32); }
uint32_t shf_r_wrap_b32(uint32_t a, uint32_t b, uint32_t c) { return (uint32_t)(joined(a, b) >> (c & 31)); }
uint32_t shf_r_clamp_b32(uint32_t a, uint32_t b, uint32_t c) { return (uint32_t)(joined(a, b) >> (c < 32 ? c : 32)); }
}

// Division by zero has an unspecified result in PTX: a kernel that divides by zero is wrong.
template <typename T, typename U> static U divided(U a, U b, bool rest) {
    if (!b) host_fail("an integer division by zero");
    if ((T)b == (T)-1 && (T)-1 < 0) return rest ? 0 : (U)0 - a;
    return (U)(rest ? (T)a % (T)b : (T)a / (T)b);
}

extern "C" {
uint32_t div_s32(uint32_t a, uint32_t b) { return divided<int32_t>(a, b, false); }
uint32_t div_u32(uint32_t a, uint32_t b) { return divided<uint32_t>(a, b, false); }
uint32_t rem_s32(uint32_t a, uint32_t b) { return divided<int32_t>(a, b, true); }
uint32_t rem_u32(uint32_t a, uint32_t b) { return divided<uint32_t>(a, b, true); }
uint64_t div_s64(uint64_t a, uint64_t b) { return divided<int64_t>(a, b, false); }
uint64_t rem_s64(uint64_t a, uint64_t b) { return divided<int64_t>(a, b, true); }

// CC.CF: the carry out of a sum, the borrow of a difference.
static uint32_t carry;
static uint32_t sum(uint64_t wide, bool keep) {
    if (keep) carry = (uint32_t)(wide >> 32);
    return (uint32_t)wide;
}
static uint32_t difference(uint64_t wide, bool keep) {
    if (keep) carry = (uint32_t)(wide >> 63);
    return (uint32_t)wide;
}
uint32_t add_cc_u32(uint32_t a, uint32_t b) { return sum((uint64_t)a + b, true); }
uint32_t addc_u32(uint32_t a, uint32_t b) { return sum((uint64_t)a + b + carry, false); }
uint32_t addc_cc_u32(uint32_t a, uint32_t b) { return sum((uint64_t)a + b + carry, true); }
uint32_t sub_cc_u32(uint32_t a, uint32_t b) { return difference((uint64_t)a - b, true); }
uint32_t subc_u32(uint32_t a, uint32_t b) { return difference((uint64_t)a - b - carry, false); }
uint32_t subc_cc_u32(uint32_t a, uint32_t b) { return difference((uint64_t)a - b - carry, true); }
uint32_t mad_lo_cc_u32(uint32_t a, uint32_t b, uint32_t c) { return sum((uint64_t)(a * b) + c, true); }
uint32_t madc_lo_cc_u32(uint32_t a, uint32_t b, uint32_t c) { return sum((uint64_t)(a * b) + c + carry, true); }
static uint32_t high(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }
uint32_t madc_hi_cc_u32(uint32_t a, uint32_t b, uint32_t c) { return sum((uint64_t)high(a, b) + c + carry, true); }
uint32_t madc_hi_u32(uint32_t a, uint32_t b, uint32_t c) { return sum((uint64_t)high(a, b) + c + carry, false); }
}
