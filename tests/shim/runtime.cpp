// Runs kernels compiled by host.h: the threads of a block are fibers on one thread of the system, block after block. A
// result that depends on the order, of which there are ORDERS, reveals a missing barrier: fibers run from the first to
// the last, or from the last to the first; a fiber that waits yields to the next one that can run, or to one of
// another warp only when its own has none; blocks run in ascending or descending order. Shared memory is initialized
// with values that reveal their use: NaN, or the largest numbers. ASan is not informed of fibers' stacks: it would
// need them only for fake stacks, which are off, and a collective would cost twice as much.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <link.h>
#include <sys/mman.h>
#include <vector>

#include "host.h"
#undef threadIdx
#undef blockIdx

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
extern "C" const char* __asan_default_options() {
    // The interpreter is not built with ASan: the runtime is loaded late, and Python's leaks are not reported.
    return "verify_asan_link_order=0:detect_leaks=0:abort_on_error=1:handle_segv=0:detect_odr_violation=0:"
           "detect_stack_use_after_return=0";
}
#endif
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1:abort_on_error=1"; }

// Saves the registers that a call preserves, switches stacks. System V x86-64.
extern "C" void host_switch(void** save, void* to);
#if defined(__x86_64__)
asm(".text\n.globl host_switch\n.type host_switch,@function\nhost_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n"
    ".size host_switch,.-host_switch\n");
const int SAVED = 6;
#elif defined(__aarch64__)
asm(".text\n.globl host_switch\n.type host_switch,%function\nhost_switch:\n"
    "sub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
    "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
    "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x9,sp\nstr x9,[x0]\nmov sp,x1\n"
    "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\nldp x27,x28,[sp,#64]\n"
    "ldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\nldp d12,d13,[sp,#128]\n"
    "ldp d14,d15,[sp,#144]\nadd sp,sp,#160\nret\n");
#else
#error "the shim switches stacks on x86-64 and aarch64"
#endif

// Functions that only switch fibers are not instrumented.
#define UNWATCHED __attribute__((no_sanitize_address, no_sanitize_undefined))

namespace {
const size_t STACK = 256 << 10;
const int MOST = 1024;  // threads of a block
enum State { READY, AT_BARRIER, IN_WARP, DONE };
// Bits of an order.
enum { BACKWARDS = 1, WARP_BY_WARP = 2, LAST_BLOCK_FIRST = 4, ORDERS = 8 };

struct Copy {
    void* to;
    const void* from;
    unsigned nbytes;
};

struct Fiber {
    HostThread where;
    uint8_t* stack;
    void* sp;
    State state;
    bool waited;  // for the previous launch
    // Asynchronous copies, where their groups end, and the number of complete ones of both; the vectors keep their memory.
    std::vector<Copy> copies;
    std::vector<size_t> groups;
    size_t copied, groups_over;
};

struct Warp {
    alignas(16) uint8_t slots[2][32][64];
    int parity, count, kind;
};

Fiber fibers[MOST];
Warp warps[MOST / 32];
int count, live, at_barrier, barrier_kind, current, order;
void* launch_sp;
void (*kernel)(const void*);
const void* arguments;
const char* kernel_name = "?";
uint8_t* dynamic_shared;
size_t dynamic_capacity;
void* unready;  // memory that the previous launch writes, and its bytes
uint64_t unready_nbytes;

// The next of `n` threads from `first` on that can run, cyclically; -1 if there is none.
UNWATCHED int next_of(int first, int n) {
    int i = current - first;
    for (int step = 0; step < n; step++) {
        i = order & BACKWARDS ? (i ? i : n) - 1 : i + 1 < n ? i + 1 : 0;
        if (fibers[first + i].state == READY) return first + i;
    }
    return -1;
}

UNWATCHED int next_ready() {
    const int own = order & WARP_BY_WARP ? next_of(current / 32 * 32, 32) : -1;
    return own < 0 ? next_of(0, count) : own;
}

// Zero-initialized memory of a kernel's library: what it declares as shared.
struct Zeros {
    const void* function;
    uint8_t* begin;
    size_t nbytes;
};

int find_zeros(dl_phdr_info* library, size_t, void* to) {
    Zeros& found = *(Zeros*)to;
    bool here = false;
    for (int i = 0; i < library->dlpi_phnum; i++) {
        const auto& part = library->dlpi_phdr[i];
        if (part.p_type != PT_LOAD) continue;
        here |= (uintptr_t)found.function - library->dlpi_addr - part.p_vaddr < part.p_memsz;
        if (!(part.p_flags & PF_W) || part.p_memsz == part.p_filesz) continue;
        found.begin = (uint8_t*)(library->dlpi_addr + part.p_vaddr + part.p_filesz);
        found.nbytes = part.p_memsz - part.p_filesz;
    }
    if (!here) found.begin = nullptr, found.nbytes = 0;
    return here;
}

// The initial contents of a block's shared memory. Neither this nor the space between variables is instrumented.
UNWATCHED void spoil(volatile uint8_t* p, size_t nbytes, uint8_t with) {
    for (; nbytes && (uintptr_t)p % 8; nbytes--) *p++ = with;
    for (; nbytes >= 8; nbytes -= 8, p += 8) *(volatile uint64_t*)p = with * 0x0101010101010101ull;
    for (; nbytes; nbytes--) *p++ = with;
}

UNWATCHED void hand_over() {
    const int from = current, to = next_ready();
    if (to < 0) {
        if (live) host_fail("threads wait for others that never come");
        host_switch(&fibers[from].sp, launch_sp);
        return;
    }
    current = to;
    host_thread = &fibers[to].where;
    host_switch(&fibers[from].sp, fibers[to].sp);
}

UNWATCHED void release_barrier() {
    at_barrier = 0;
    for (int i = 0; i < count; i++)
        if (fibers[i].state == AT_BARRIER) fibers[i].state = READY;
}

void fiber_main() {
    kernel(arguments);
    fibers[current].state = DONE;
    live--;
    if (live && at_barrier == live) release_barrier();
    hand_over();
    abort();
}

void prepare(Fiber& f) {
    uintptr_t top = ((uintptr_t)f.stack + STACK) & ~(uintptr_t)15;
#if defined(__x86_64__)
    void** sp = (void**)(top - 8);  // as after a call: 8 beyond a multiple of 16
    *--sp = (void*)fiber_main;
    for (int i = 0; i < SAVED; i++) *--sp = nullptr;
    f.sp = sp;
#else
    uint8_t* sp = (uint8_t*)top - 160;
    memset(sp, 0, 160);
    void* entry = (void*)fiber_main;
    memcpy(sp + 88, &entry, sizeof entry);
    f.sp = sp;
#endif
    // Unpoisons a kernel's stack when it ends; fiber_main, at the top, does not end.
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region((uint8_t*)top - 1024, 1024);
#endif
    f.state = READY;
    f.waited = false;
    f.copies.clear();
    f.groups.clear();
    f.copied = f.groups_over = 0;
}

void run_block(Dim3 block, Dim3 threads, Dim3 blocks) {
    const int n = count = (int)(threads.x * threads.y * threads.z);
    for (int i = 0; i < n; i++) {
        Fiber& f = fibers[i];
        const unsigned u = (unsigned)i;
        f.where = {{u % threads.x, u / threads.x % threads.y, u / threads.x / threads.y}, block, threads, blocks};
        prepare(f);
    }
    for (int i = 0; i < n / 32; i++) warps[i].count = warps[i].parity = 0;
#if defined(__SANITIZE_ADDRESS__)
    if (unready_nbytes) __asan_poison_memory_region(unready, unready_nbytes);
#endif
    live = n;
    at_barrier = 0;
    current = order & BACKWARDS ? n - 1 : 0;
    host_thread = &fibers[current].where;
    host_switch(&launch_sp, fibers[current].sp);
}
}  // namespace

extern "C" {
HostThread* host_thread;

void host_fail(const char* what) {
    fprintf(stderr, "shim: %s: %s", kernel_name, what);
    if (host_thread)
        fprintf(stderr, " (block %u %u %u, thread %u)", host_thread->block.x, host_thread->block.y, host_thread->block.z,
                host_thread->thread.x);
    for (int i = 0; i < count && i < 64; i++) fprintf(stderr, "%s%d", i ? "" : "; states ", (int)fibers[i].state);
    fprintf(stderr, "\n");
    fflush(stderr);
    abort();
}

UNWATCHED void host_sync_threads(int kind) {
    if (at_barrier && barrier_kind != kind) host_fail("threads are at different barriers");
    barrier_kind = kind;
    if (++at_barrier == live) {
        release_barrier();
        return;
    }
    fibers[current].state = AT_BARRIER;
    hand_over();
}

UNWATCHED const void* host_exchange(int kind, const void* mine, unsigned nbytes) {
    Warp& w = warps[(size_t)current / 32];
    if (nbytes > 64) host_fail("more than 64 bytes a lane");
    if (w.count && w.kind != kind) host_fail("lanes of a warp are at different operations");
    w.kind = kind;
    const int parity = w.parity;
    if (nbytes) memcpy(w.slots[parity][current % 32], mine, nbytes);
    if (++w.count == 32) {
        w.count = 0;
        w.parity ^= 1;
        const int first = current / 32 * 32;
        for (int i = first; i < first + 32; i++)
            if (fibers[i].state == IN_WARP) fibers[i].state = READY;
    } else {
        fibers[current].state = IN_WARP;
        hand_over();
    }
    return w.slots[parity];
}

uint8_t* host_dynamic_shared() { return dynamic_shared; }

void host_copy_async(void* to, const void* from, unsigned nbytes) {
    if ((uintptr_t)to % nbytes || (uintptr_t)from % nbytes) host_fail("an asynchronous copy of unaligned addresses");
    memset(to, 0xa5, nbytes);  // a premature use of it is detected, and a premature copy
    fibers[current].copies.push_back({to, from, nbytes});
}

void host_end_group() { fibers[current].groups.push_back(fibers[current].copies.size()); }

void host_wait_groups(unsigned pending) {
    Fiber& f = fibers[current];
    for (; f.groups.size() - f.groups_over > pending; f.groups_over++)
        for (; f.copied < f.groups[f.groups_over]; f.copied++) {
            const Copy& c = f.copies[f.copied];
            memcpy(c.to, c.from, c.nbytes);
        }
}

// From now on launches are programmatic dependent ones, and the previous launch writes this memory.
void host_not_ready(void* p, uint64_t nbytes) { unready = p, unready_nbytes = nbytes; }

void host_wait_for_previous() {
#if defined(__SANITIZE_ADDRESS__)
    if (unready_nbytes) __asan_unpoison_memory_region(unready, unready_nbytes);
#endif
    fibers[current].waited = true;
}

void host_check_waited() {
    if (!fibers[current].waited) host_fail("a thread ends that has not waited for the launch before");
}

// function: a KERNEL's address; args: its arguments; which: of the orders.
void host_launch(void* function, const char* name, const unsigned* grid, const unsigned* block, uint64_t shared, const void* args,
                 int which) {
    const unsigned n = block[0] * block[1] * block[2];
    kernel = (void (*)(const void*))function;
    kernel_name = name;
    arguments = args;
    host_thread = nullptr;
    if (!n || n % 32 || n > MOST) host_fail("a block is 32 to 1024 threads, whole warps");
    if (shared > 227u << 10) host_fail("more than 227 KiB of shared memory");
    if (grid[1] > 65535 || grid[2] > 65535) host_fail("a grid has at most 65535 blocks in y and z");
    order = which % ORDERS;
    for (unsigned i = 0; i < n; i++) {
        if (fibers[i].stack) continue;
        void* p = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED) host_fail("no memory for stacks");
        fibers[i].stack = (uint8_t*)p;
    }
    if (dynamic_capacity < shared + 4096) {
        dynamic_capacity = shared + 4096;
        dynamic_shared = (uint8_t*)aligned_alloc(4096, (dynamic_capacity + 8191) / 4096 * 4096);
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(dynamic_shared, dynamic_capacity);
    __asan_poison_memory_region(dynamic_shared + shared, dynamic_capacity - shared);
#endif
    static Zeros own;
    if (own.function != function) {
        own = {function, nullptr, 0};
        dl_iterate_phdr(find_zeros, &own);
    }
    const Dim3 threads = {block[0], block[1], block[2]}, blocks = {grid[0], grid[1], grid[2]};
    const uint64_t all = (uint64_t)grid[0] * grid[1] * grid[2];
    const uint8_t with = order & WARP_BY_WARP ? 0x7f : 0xff;
    for (uint64_t i = 0; i < all; i++) {
        const uint64_t at = order & LAST_BLOCK_FIRST ? all - 1 - i : i;
        spoil(dynamic_shared, shared, with);
        spoil(own.begin, own.nbytes, with);
        run_block({(unsigned)(at % grid[0]), (unsigned)(at / grid[0] % grid[1]), (unsigned)(at / grid[0] / grid[1])}, threads,
                  blocks);
    }
    host_thread = nullptr;
}

// Device memory: with a poisoned zone on both sides, and filled with NaNs.
void* host_allocate(uint64_t nbytes) {
    const uint64_t zone = 256, room = (nbytes + 255) / 256 * 256;
    uint8_t* p = (uint8_t*)aligned_alloc(256, room + 2 * zone);
    if (!p) return nullptr;
    memset(p, 0xff, room + 2 * zone);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(p, zone);
    __asan_poison_memory_region(p + zone + nbytes, room - nbytes + zone);
#endif
    return p + zone;
}

void host_free(void* p, uint64_t nbytes) {
    const uint64_t zone = 256, room = (nbytes + 255) / 256 * 256;
    uint8_t* start = (uint8_t*)p - zone;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(start, room + 2 * zone);
#endif
    free(start);
    (void)room;
}
}
