// The few CUDA functions that match.cu uses, and `launch`, which runs a kernel of it: SOURCE is its file.
#include <algorithm>
#include <csetjmp>
#include <cstring>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>
#define __device__
#define __global__
#define __shared__
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __noinline__
using std::max; using std::min;
extern "C" { alignas(16) unsigned char shared_memory[256 << 10]; }
struct int4 { int x, y, z, w; };
struct { unsigned x; } threadIdx, blockIdx;

// Every thread is a context of its own, run in turn until it waits for its warp or its block.
enum State { kRuns, kWarp, kBlock, kDone };
constexpr int kThreads = 128, kStack = 256 << 10;
static State states[kThreads];
static ucontext_t contexts[kThreads];
static jmp_buf at[kThreads], scheduler;
static bool begun[kThreads];
static std::vector<char> stacks(kThreads* kStack);
static void (*body)(void**);
static void** arguments;
static unsigned warp_rounds[kThreads], block_rounds[kThreads];
static unsigned long long values[kThreads / 32][2][32];
static int any[3];

__attribute__((noinline)) void wait_as(State state) {
    const int me = threadIdx.x;
    states[me] = state;
    if (!_setjmp(at[me])) _longjmp(scheduler, 1);
}
static void start() { body(arguments); wait_as(kDone); }
__attribute__((noinline)) void resume(int thread) {
    threadIdx.x = thread;
    if (_setjmp(scheduler)) return;
    if (begun[thread]) _longjmp(at[thread], 1);
    begun[thread] = true;
    setcontext(&contexts[thread]);
}
static bool run_block() {
    std::memset(shared_memory, 0xcd, sizeof shared_memory);
    for (int i = 0; i < kThreads; ++i) {
        states[i] = kRuns, begun[i] = false, warp_rounds[i] = block_rounds[i] = 0;
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks.data() + i * kStack;
        contexts[i].uc_stack.ss_size = kStack;
        contexts[i].uc_link = nullptr;
        makecontext(&contexts[i], start, 0);
    }
    any[0] = any[1] = any[2] = 0;
    for (;;) {
        bool moved = false;
        for (int i = 0; i < kThreads; ++i)
            if (states[i] == kRuns) resume(i), moved = true;
        auto release = [&](int from, int to, State state) {
            if (std::all_of(states + from, states + to, [&](State s) { return s == state; }))
                std::fill(states + from, states + to, kRuns), moved = true;
        };
        for (int i = 0; i < kThreads; i += 32) release(i, i + 32, kWarp);
        release(0, kThreads, kBlock);
        if (std::all_of(states, states + kThreads, [](State s) { return s == kDone; })) return true;
        if (!moved) return false;  // threads wait for each other in different places
    }
}

void __syncthreads() { wait_as(kBlock); }
int __syncthreads_or(int value) {
    const unsigned round = block_rounds[threadIdx.x]++;
    any[(round + 1) % 3] = 0;
    any[round % 3] |= value;
    wait_as(kBlock);
    return any[round % 3];
}
void __syncwarp() { wait_as(kWarp); }
template <class T> auto exchange(T value) {  // what each lane gave
    const int lane = threadIdx.x % 32;
    auto& slots = values[threadIdx.x / 32][warp_rounds[threadIdx.x]++ % 2];
    slots[lane] = 0;
    std::memcpy(&slots[lane], &value, sizeof value);
    wait_as(kWarp);
    return [&slots](int other) { T out; std::memcpy(&out, &slots[other], sizeof out); return out; };
}
unsigned __ballot_sync(unsigned, bool value) {
    const auto all = exchange(int(value));
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= unsigned(all(i)) << i;
    return bits;
}
template <class T, class F> T shuffle(T value, F lane) {  // what the lane gave that `lane` computes from this one
    const auto all = exchange(value);
    const int from = lane(int(threadIdx.x % 32));
    return from < 0 || from > 31 ? value : all(from);
}
template <class T> T __shfl_up_sync(unsigned, T v, int by) { return shuffle(v, [=](int me) { return me - by; }); }
template <class T> T __shfl_down_sync(unsigned, T v, int by) { return shuffle(v, [=](int me) { return me + by; }); }
template <class T> T __shfl_xor_sync(unsigned, T v, int by) { return shuffle(v, [=](int me) { return me ^ by; }); }
template <class T> T __shfl_sync(unsigned, T v, int from) { return shuffle(v, [=](int) { return from; }); }
bool __any_sync(unsigned, bool value) { return __ballot_sync(0, value); }
template <class T, class F> T reduce(T value, F f) {
    const auto all = exchange(value);
    T out = all(0);
    for (int i = 1; i < 32; ++i) out = f(out, all(i));
    return out;
}
template <class T> T __reduce_add_sync(unsigned, T v) { return reduce(v, [](T a, T b) { return a + b; }); }
unsigned __reduce_max_sync(unsigned, unsigned v) { return reduce(v, [](unsigned a, unsigned b) { return max(a, b); }); }
unsigned __reduce_min_sync(unsigned, unsigned v) { return reduce(v, [](unsigned a, unsigned b) { return min(a, b); }); }
template <class T> T atomicAdd(T* p, T v) { T old = *p; *p += v; return old; }
unsigned atomicOr(unsigned* p, unsigned v) { unsigned old = *p; *p |= v; return old; }
unsigned atomicMin(unsigned* p, unsigned v) { unsigned old = *p; *p = min(*p, v); return old; }
int __popc(unsigned v) { return __builtin_popcount(v); }
int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
int __ffsll(long long v) { return __builtin_ffsll(v); }
int __ffs(unsigned v) { return __builtin_ffs(int(v)); }
int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
double __longlong_as_double(long long v) { double out; std::memcpy(&out, &v, 8); return out; }
long long __double_as_longlong(double v) { long long out; std::memcpy(&out, &v, 8); return out; }

#include SOURCE

template <class... A, std::size_t... I> void call(void (*kernel)(A...), void** p, std::index_sequence<I...>) {
    kernel(*static_cast<A*>(p[I])...);
}
template <class... A> void call(void (*kernel)(A...), void** p) { call(kernel, p, std::index_sequence_for<A...>()); }
extern "C" int launch(const char* name, int grid, int shared_bytes, void** p) {
    if (shared_bytes > int(sizeof shared_memory)) return 2;
    const bool scan = !std::strcmp(name, "ngram_scan");
    body = scan ? +[](void** p) { call(ngram_scan, p); } : +[](void** p) { call(ngram_build, p); };
    arguments = p;
    for (int i = 0; i < grid; ++i) {
        blockIdx.x = i;
        if (!run_block()) return 1;
    }
    return 0;
}
