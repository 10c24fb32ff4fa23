// Threads of a GPU as fibers of one CPU thread: stacks, order, barriers, launches. emulate.h gives them
// CUDA's names.
//
// A fiber runs until it waits at a barrier of its warp or block. Then another fiber of the same warp runs,
// and if all of the warp wait for the block, another warp. So a warp runs as far ahead of the others as
// barriers allow, and code that lacks a barrier computes other results. The order of blocks, warps and lanes
// is drawn from a seed; that of warps and lanes again after each barrier of the block.
//
// An error ends the launch and gives a message with block, thread and line: threads that wait at different
// lines of one barrier, or for threads that returned. Shared memory is all ones at the start of a block: NaN
// as a float.
//
// With -fsanitize=thread each fiber is a thread to the sanitizer and only barriers order fibers, so a lacking
// barrier is reported in every run, with both lines. Each block then runs on an OS thread of its own, that is
// with shared memory of its own, and nothing orders blocks: two blocks that access one address without
// atomics are reported too.
#pragma once
#include <link.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <utility>

// The emulator itself is not instrumented: its own accesses are no events of the kernel.
#if defined(__SANITIZE_THREAD__)
#define HIDDEN __attribute__((noinline, no_sanitize("thread")))
#define SANITIZED(what) what
extern "C" {
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void* __tsan_get_current_fiber();
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#else
#define HIDDEN __attribute__((noinline))
#define SANITIZED(what)
#endif

struct dim3 { unsigned x = 1, y = 1, z = 1; };

namespace emu {
constexpr int MOST_THREADS = 1024, WARP = 32;
constexpr size_t STACK = 64 << 10;

// A line of a kernel: that of the call in which it is the default argument.
struct Place {
    const char* file; int line;
    static constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
// Each passage of a barrier is a generation. edge: what the sanitizer orders by; two, used in turns, so that
// a fiber that leaves is not ordered after one that arrives for the next generation.
struct Barrier { int arrived, size; Place place; unsigned generation; char edge[2]; };
struct Fiber {
    void* stack_pointer; void* sanitizer; dim3 thread; int index;
    bool returned; Barrier* at; unsigned generation, exchanges; Place place;
};

inline Fiber fibers[MOST_THREADS], host, *self;           // self: the fiber that runs
inline Barrier of_block, of_warp[MOST_THREADS / WARP];
inline uint64_t slots[2][MOST_THREADS], random_state;     // slots: values that lanes exchange
inline int warp_order[MOST_THREADS / WARP], lane_order[WARP], lane_place[WARP], threads, warps;
inline dim3 block_index, block_size, grid_size;
inline void (*body)(void*);
inline void* body_arguments;
inline char *stacks, *message, begun, ended;
inline size_t message_size;
inline bool failed;
inline thread_local char touched;

// Saves the registers that a call preserves, and exchanges stacks. Only x86-64.
asm(R"(.text
.type emu_switch,@function
emu_switch: push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15
  mov %rsp,(%rdi); mov %rsi,%rsp
  pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret
.size emu_switch,.-emu_switch)");
extern "C" void emu_switch(void** saved, void* to) asm("emu_switch");

HIDDEN inline void switch_to(Fiber* to) {
    Fiber* from = self;
    self = to;
    SANITIZED(__tsan_switch_to_fiber(to->sanitizer, 1));                // 1: the switch itself orders nothing
    emu_switch(&from->stack_pointer, to->stack_pointer);
}

// Ends the launch: the fibers are left as they are, and the host continues.
[[noreturn]] HIDDEN inline void fail(int thread, Place place, const char* what, int other_line = 0) {
    const int n = snprintf(message, message_size, "block (%u, %u, %u), thread %d, %s:%d: ", block_index.x,
                           block_index.y, block_index.z, thread, place.file, place.line);
    if (n < int(message_size)) snprintf(message + n, message_size - n, what, other_line);
    failed = true;
    switch_to(&host);
    __builtin_unreachable();
}

// ---- the order of fibers

HIDDEN inline unsigned draw(unsigned below) {             // xorshift, Marsaglia 2003
    random_state ^= random_state << 13; random_state ^= random_state >> 7; random_state ^= random_state << 17;
    return (random_state >> 16) % below;
}
template <class I> HIDDEN void shuffle(I* numbers, int count) {
    for (int i = count - 1; i > 0; --i) {
        const int j = draw(i + 1);
        const I kept = numbers[i];
        numbers[i] = numbers[j]; numbers[j] = kept;
    }
}
HIDDEN inline void draw_order() {
    shuffle(warp_order, warps);
    shuffle(lane_order, WARP);
    for (int i = 0; i < WARP; ++i) lane_place[lane_order[i]] = i;
}
HIDDEN inline bool can_run(int i) {
    const Fiber& f = fibers[i];
    return i < threads && !f.returned && !(f.at && f.at->generation == f.generation);
}
HIDDEN inline int first_that_can_run() {
    for (int w = 0; w < warps; ++w)
        for (int k = 0; k < WARP; ++k)
            if (const int i = warp_order[w] * WARP + lane_order[k]; can_run(i)) return i;
    return -1;
}
// Lets another fiber run: of this warp, else of the first warp that has one. Without any, all returned, or
// they wait for something that cannot happen.
HIDDEN inline void run_another() {
    const int first = self->index / WARP * WARP, place = lane_place[self->index % WARP];
    for (int k = 1; k <= WARP; ++k) {
        const int i = first + lane_order[(place + k) % WARP];
        if (can_run(i)) return i == self->index ? void() : switch_to(&fibers[i]);
    }
    if (const int i = first_that_can_run(); i >= 0) return switch_to(&fibers[i]);
    for (int i = 0; i < threads; ++i)
        if (!fibers[i].returned)
            fail(i, fibers[i].place, "waits for threads that returned or wait elsewhere");
    switch_to(&host);
}

// ---- barriers

HIDDEN inline void wait(Barrier& b, Place place) {
    if (b.arrived == 0) b.place = place;
    else if (b.place.line != place.line || b.place.file != place.file)
        fail(self->index, place, "waits here, but another of its group waits at line %d", b.place.line);
    self->at = &b; self->place = place; self->generation = b.generation;
    SANITIZED(char* edge = &b.edge[b.generation & 1]; __tsan_release(edge));
    if (++b.arrived == b.size) {
        b.arrived = 0; ++b.generation;
        if (&b == &of_block) draw_order();
    } else run_another();
    self->at = nullptr;
    SANITIZED(__tsan_acquire(edge));
}

inline int warp_size() { return of_warp[self->index / WARP].size; }

// Gives `value` to the warp and returns the values of its lanes. They stay until the exchange after the next
// one: two rows of slots, used in turns, so that an exchange waits once.
template <class T> HIDDEN const uint64_t* exchange(unsigned mask, T value, Place place) {
    static_assert(sizeof(T) <= 8);
    const int warp = self->index / WARP, size = of_warp[warp].size;
    const unsigned all = size == WARP ? ~0u : (1u << size) - 1;
    if ((mask & all) != all) fail(self->index, place, "the mask leaves out lanes of the warp");
    uint64_t* slot = slots[self->exchanges++ & 1];
    slot[self->index] = 0;
    __builtin_memcpy(&slot[self->index], &value, sizeof value);
    wait(of_warp[warp], place);
    return slot + warp * WARP;
}
// The value that lane `source` passes; the calling lane's value if the warp has no such lane.
template <class T> HIDDEN T of_lane(unsigned mask, T value, int source, Place place) {
    const uint64_t* lanes = exchange(mask, value, place);
    if (source >= 0 && source < warp_size()) __builtin_memcpy(&value, &lanes[source], sizeof value);
    return value;
}
HIDDEN inline unsigned ballot(unsigned mask, bool predicate, Place place) {
    const uint64_t* lanes = exchange(mask, int(predicate), place);
    unsigned bits = 0;
    for (int i = 0; i < warp_size(); ++i) bits |= unsigned(lanes[i] != 0) << i;
    return bits & mask;
}

// ---- launches

HIDDEN inline void entry() {
    SANITIZED(__tsan_acquire(&begun));
    body(body_arguments);
    self->returned = true;
    SANITIZED(__tsan_release(&ended));
    run_another();
    __builtin_unreachable();
}
// __shared__ variables are thread_local, so this library's TLS segment holds them all, and little else.
HIDDEN inline void poison_shared_memory() {
    touched = 1;                              // allocates the segment here, not in a fiber
    dl_iterate_phdr([](dl_phdr_info* info, size_t, void* here) {
        bool ours = false;
        const auto each = [&](auto f) { for (int i = 0; i < info->dlpi_phnum; ++i) f(info->dlpi_phdr[i]); };
        const uintptr_t offset = uintptr_t(here) - info->dlpi_addr;
        each([&](auto& p) { ours |= p.p_type == PT_LOAD && offset - p.p_vaddr < p.p_memsz; });
        each([&](auto& p) {
            if (ours && p.p_type == PT_TLS) __builtin_memset(info->dlpi_tls_data, 0xff, p.p_memsz);
        });
        return 0;
    }, reinterpret_cast<void*>(&poison_shared_memory));
}
// A fiber of the sanitizer costs a millisecond, so blocks use the same ones, in an order that is drawn anew
// for each block: to the sanitizer, what one of them does in two blocks has an order.
#if defined(__SANITIZE_THREAD__)
inline void* sanitizer_fibers[MOST_THREADS];
inline int stack_of[MOST_THREADS], sanitizer_count;
HIDDEN inline void draw_sanitizer_fibers() {
    for (; sanitizer_count < threads; ++sanitizer_count)
        sanitizer_fibers[sanitizer_count] = __tsan_create_fiber(0);
    for (int i = 0; i < threads; ++i) stack_of[i] = i;
    shuffle(stack_of, threads);
}
#endif
HIDDEN inline void* run_block(void*) {
    poison_shared_memory();
    warps = (threads + WARP - 1) / WARP;
    of_block = {0, threads};
    for (int w = 0; w < warps; ++w) {
        of_warp[w] = {0, threads - w * WARP < WARP ? threads - w * WARP : WARP};
        warp_order[w] = w;
    }
    for (int i = 0; i < WARP; ++i) lane_order[i] = i;
    draw_order();
    SANITIZED(draw_sanitizer_fibers());
    for (unsigned i = 0; i < unsigned(threads); ++i) {
        int stack = i;
        SANITIZED(stack = stack_of[i]);
        void** top = reinterpret_cast<void**>(stacks + STACK * (stack + 1));
        *--top = nullptr; *--top = reinterpret_cast<void*>(entry);
        for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
        const unsigned in_plane = block_size.x * block_size.y;
        const dim3 thread{i % block_size.x, i % in_plane / block_size.x, i / in_plane};
        fibers[i] = {top, nullptr, thread, int(i)};
        SANITIZED(fibers[i].sanitizer = sanitizer_fibers[stack]);
    }
    SANITIZED(host.sanitizer = __tsan_get_current_fiber(); __tsan_release(&begun));
    self = &host;
    switch_to(&fibers[first_that_can_run()]);
    return nullptr;
}
HIDDEN inline void run_grid(unsigned* order, unsigned blocks) {
    for (unsigned i = 0; i < blocks; ++i) order[i] = i;
    shuffle(order, blocks);
    for (unsigned i = 0; i < blocks && !failed; ++i) {
        const unsigned b = order[i];
        block_index = {b % grid_size.x, b / grid_size.x % grid_size.y, b / (grid_size.x * grid_size.y)};
#if defined(__SANITIZE_THREAD__)
        pthread_t thread;
        pthread_create(&thread, nullptr, run_block, nullptr);
        pthread_join(thread, nullptr);
#else
        run_block(nullptr);
#endif
    }
    SANITIZED(__tsan_acquire(&ended));        // the host sees what the blocks wrote
}
// Runs the kernel; from one thread of the process at a time. arguments: their addresses, as cuLaunchKernel
// takes them. Returns 0, 1 for sizes that no GPU takes, or 2 with the error in `text`.
template <class... A>
int launch(void (*kernel)(A...), const unsigned* grid, const unsigned* block, void** arguments, uint64_t seed,
           char* text, size_t text_size) {
    struct Call { void (*kernel)(A...); void** arguments; } call{kernel, arguments};
    body = [](void* p) {
        const Call& c = *static_cast<Call*>(p);
        [&]<size_t... I>(std::index_sequence<I...>) {
            c.kernel(*static_cast<A*>(c.arguments[I])...);
        }(std::index_sequence_for<A...>{});
    };
    body_arguments = &call;
    grid_size = {grid[0], grid[1], grid[2]}; block_size = {block[0], block[1], block[2]};
    message = text; message_size = text_size; failed = false;
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2], most_z = 65535;
    threads = block[0] * block[1] * block[2];
    if (threads < 1 || threads > MOST_THREADS || block[2] > 64) return 1;
    if (blocks < 1 || blocks >> 31 || grid[1] > most_z || grid[2] > most_z) return 1;
    if (!stacks) stacks = static_cast<char*>(mmap(nullptr, STACK * MOST_THREADS, PROT_READ | PROT_WRITE,
                                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    random_state = (seed + 1) * 0x9E3779B97F4A7C15u;
    auto* order = static_cast<unsigned*>(malloc(blocks * sizeof(unsigned)));
    run_grid(order, unsigned(blocks));
    free(order);
    return failed ? 2 : 0;
}
}  // namespace emu
