// Attention of a block of tokens on a CPU, where reading keys and values from memory is most of the work: each is read
// once for all tokens and all query heads that share it. `Attention` is in cpu_attention.h.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <nanobind/nanobind.h>

#include "cpu.h"
#include "cpu_attention.h"

namespace nb = nanobind;

namespace {

#define LEVEL 0
namespace plain {
#include "cpu_attention_rows.h"
}  // namespace plain

#if defined(__x86_64__)
#define LEVEL 1
namespace avx2 {
#include "cpu_attention_rows.h"
}  // namespace avx2

#define LEVEL 2
namespace avx512 {
#include "cpu_attention_rows.h"
}  // namespace avx512

#define LEVEL 3
namespace avx512_bf16 {
#include "cpu_attention_rows.h"
}  // namespace avx512_bf16
#endif

// The kernels of a level for numbers of a type.
struct Kernels {
    void (*prepare)(const Work&, int64_t, int64_t);
    void (*span)(const Work&, int64_t, int64_t, int64_t, float*);
    void (*rows_of_chunk)(const Work&, int64_t, int64_t, int64_t, int64_t, float*);
    void (*merge)(const Work&, int64_t, int64_t, int64_t, int64_t, int64_t);
    bool in_pairs;
};

#define KERNELS(level, S, pairs) {level::prepare<level::S>, level::span<level::S>, level::rows_of_chunk<level::S>, \
                                  level::merge, pairs}
#define SINGLES(level) {KERNELS(level, Singles<float>, false), KERNELS(level, Singles<uint16_t>, false)}
const Kernels kLevels[][2] = {
    SINGLES(plain),
#if defined(__x86_64__)
    SINGLES(avx2),
    SINGLES(avx512),
    {KERNELS(avx512, Singles<float>, false), KERNELS(avx512_bf16, Pairs, true)},
#endif
};

// Numbers that begin at a line of the cache.
struct Lines {
    std::vector<float> numbers;

    float* of(int64_t count) {
        constexpr uintptr_t kLine = 64;
        if (int64_t(numbers.size()) < count + kPad) numbers.resize(count + kPad);
        return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(numbers.data()) + kLine - 1) / kLine * kLine);
    }
};

constexpr int64_t kMerged = 16;  // rows whose spans are merged at a time

// What all threads do: three stages, of whose parts each thread takes the next one.
struct Job {
    const Work& work;
    const Kernels& kernels;
    bool by_rows, together;
    int64_t pairs;                     // of a sequence and a KV head
    int64_t parts;                     // of a pair in the second stage
    int64_t memory;                    // numbers that a part needs
    std::atomic<int64_t> next[3] = {};

    int64_t spans(int64_t b) const {
        const int64_t shared = work.shared_end(b);
        return work.call.ancestors ? shared / kSpan + 2 : (shared + kSpan - 1) / kSpan;
    }

    void attend(int64_t pair, int64_t part, float* scratch) const {
        const int64_t b = pair / work.call.kv_heads, h = pair % work.call.kv_heads;
        if (by_rows) {
            const int64_t begin = part * kShare;
            kernels.rows_of_chunk(work, b, h, begin, std::min(begin + kShare, work.rows()), scratch);
        } else if (part < spans(b) - (work.call.ancestors ? 1 : 0))
            kernels.span(work, b, h, part, scratch);
    }

    void stage(int number, int64_t count) {
        static thread_local Lines lines;
        float* const scratch = number == 1 ? lines.of(memory) : nullptr;
        for (int64_t i; (i = next[number]++) < count;) {
            if (number == 0) kernels.prepare(work, i / work.call.kv_heads, i % work.call.kv_heads);
            else if (number == 1) attend(i % pairs, parts - 1 - i / pairs, scratch);  // the longest ones first
            else {
                const int64_t pair = i % pairs, b = pair / work.call.kv_heads, begin = i / pairs * kMerged;
                const int64_t end = std::min(begin + kMerged, work.rows());
                kernels.merge(work, b, pair % work.call.kv_heads, begin, end, spans(b));
            }
        }
        if (together && number < 2) openmp().barrier();
    }

    void run() {
        stage(0, pairs);
        stage(1, pairs * parts);
        if (!by_rows) stage(2, pairs * ((work.rows() + kMerged - 1) / kMerged));
    }
};

// Numbers that a part of the second stage needs, as `Memory` hands them out.
int64_t memory_of(const Work& work, bool by_rows) {
    const int64_t units = work.key_units(), columns = work.value_columns();
    const int64_t copy = 2 * std::max(padded(work.call.key_dim), work.call.value_dim + kPad);
    const int64_t panels = (units + columns + copy) * kBlock + padded(copy), tile = kTile * kBlock + padded(kTile);
    return panels + tile + (by_rows ? 2 * kShare * work.width() : work.rows() * 2 * kBlock) + 8 * kPad;
}

void attend(const Attention& call, int level, unsigned threads) {
    static thread_local Lines queries, states;
    const Kernels& kernels = kLevels[level][call.is_bfloat16];
    Work work{call, kernels.in_pairs, nullptr, nullptr, 0};
    const bool by_rows = !call.ancestors && work.rows() > 2 * kShare;
    const int64_t pairs = call.batch * call.kv_heads;
    Job job{work, kernels, by_rows, false, pairs, 0, memory_of(work, by_rows)};
    for (int64_t b = 0; b < call.batch; b++) work.spans = std::max(work.spans, job.spans(b));
    job.parts = by_rows ? (work.rows() + kShare - 1) / kShare : work.spans - (call.ancestors ? 1 : 0);
    work.queries = reinterpret_cast<uint32_t*>(queries.of(pairs * work.rows() * work.key_units()));
    if (!by_rows) work.states = states.of(pairs * work.spans * work.rows() * work.width());
    threads = unsigned(std::min(int64_t(threads), pairs * job.parts));
    job.together = threads > 1 && openmp().present();
    if (job.together) openmp().parallel([](void* argument) { static_cast<Job*>(argument)->run(); }, &job, threads, 0);
    else job.run();
}

[[noreturn]] void refuse(const std::string& message) { throw nb::value_error(message.c_str()); }

// Bytes of an argument, none for null.
struct Bytes {
    const char* name;
    uintptr_t begin, end;
    bool meets(const Bytes& other) const { return begin < other.end && other.begin < end; }
};

Bytes bytes_of(const char* name, const void* at, int64_t numbers, int64_t size) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(at);
    if (begin % size) refuse(std::string(name) + ": expected an address that is a multiple of a number's size");
    return {name, begin, begin + uintptr_t(at ? numbers * size : 0)};
}

Bytes bytes_of(const char* name, const Heads& x, const Attention& call, int64_t heads, int64_t size, int64_t numbers) {
    if (!x.at) refuse(std::string(name) + ": it has no memory");
    return bytes_of(name, x.at, (call.batch - 1) * x.batch_stride + (heads - 1) * x.head_stride +
                                    (call.nodes - 1) * x.node_stride + numbers, size);
}

// Refuse addresses with which the kernel would write over what it reads.
void check_memory(const Attention& call) {
    const int64_t size = call.is_bfloat16 ? 2 : 4, slots = call.pages * call.kv_heads * call.slots;
    const int64_t tokens = call.batch * call.nodes;
    const Bytes written[] = {bytes_of("key_cache", call.key_cache, slots * call.key_dim, size),
                             bytes_of("value_cache", call.value_cache, slots * call.value_dim, size)};
    const Bytes read[] = {
        bytes_of("q", call.q, call, call.heads, size, call.key_dim),
        bytes_of("k", call.k, call, call.kv_heads, size, call.key_dim),
        bytes_of("v", call.v, call, call.kv_heads, size, call.value_dim),
        bytes_of("cos", call.cos, tokens * call.key_dim, size), bytes_of("sin", call.sin, tokens * call.key_dim, size),
        bytes_of("lengths", call.lengths, call.batch, 8), bytes_of("ancestors", call.ancestors, tokens, 8),
        bytes_of("positions", call.positions, tokens, 8), bytes_of("sinks", call.sinks, call.heads, 4),
        bytes_of("table", call.table, call.batch * call.columns, 4)};
    for (const Bytes& cache : written) {
        if (!cache.begin) refuse(std::string(cache.name) + ": it has no memory");
        for (const Bytes& other : read)
            if (cache.meets(other)) refuse(std::string(other.name) + ": expected other memory than the caches'");
    }
    if (!call.lengths || !call.positions) refuse("lengths, positions: they have no memory");
    if (written[0].meets(written[1])) refuse("value_cache: expected other memory than that of key_cache");
}

// Refuse numbers with which the kernel would leave the cache, or would sum over other slots than the call sees.
void check_numbers(const Attention& call) {
    if (call.table && call.slots != kBlock)
        refuse("key_cache: expected pages of " + std::to_string(kBlock) + " slots, got " + std::to_string(call.slots));
    const auto at = [](int64_t b) { return "[" + std::to_string(b) + "]"; };
    for (int64_t b = 0; b < call.batch; b++) {
        const int64_t length = call.lengths[b], most = call.slots * call.columns - call.nodes;
        if (length < 0 || length > most)
            refuse("lengths" + at(b) + ": expected 0 to " + std::to_string(most) + ", so that " +
                   std::to_string(call.nodes) + " tokens fit into the cache, got " + std::to_string(length));
        for (int64_t c = 0; call.table && c * kBlock < length + call.nodes; c++) {
            const int64_t page = call.table[b * call.columns + c];
            if (page < 0 || page >= call.pages)
                refuse("table" + at(b) + at(c) + ": expected 0 to " + std::to_string(call.pages - 1) +
                       ", a page of the cache, got " + std::to_string(page));
        }
        int64_t least = length;
        for (int64_t n = 0; n < call.nodes && call.window; n++) {
            const int64_t position = call.positions[b * call.nodes + n];
            if (position < least || position > INT32_MAX)
                refuse("positions" + at(b) + at(n) + ": expected at least lengths" + at(b) +
                       ", ascending in a causal chunk, and below 2 ** 31, got " + std::to_string(position));
            if (!call.ancestors) least = position + 1;
        }
    }
    if (!(std::isfinite(call.outer) && call.outer > 0 && std::isfinite(call.inner) && call.inner >= 0))
        refuse("scale, softcap: expected positive finite factors");
}

Heads heads_of(uintptr_t at, nb::tuple strides) {
    return {reinterpret_cast<const void*>(at), nb::cast<int64_t>(strides[0]), nb::cast<int64_t>(strides[1]),
            nb::cast<int64_t>(strides[2])};
}

}  // namespace

NB_MODULE(_cpu_attention, m) {
    m.def("best", [] { return std::min(level_of_cpu(), 3); });
    m.def("attend", [](uintptr_t q, nb::tuple q_strides, uintptr_t k, nb::tuple k_strides, uintptr_t v,
                       nb::tuple v_strides, uintptr_t key_cache, uintptr_t value_cache, uintptr_t cos, uintptr_t sin,
                       uintptr_t lengths, uintptr_t ancestors, uintptr_t positions, uintptr_t sinks, uintptr_t out,
                       uintptr_t table, nb::tuple shape, float inner, float outer, bool softcap, bool is_bfloat16,
                       int64_t window, int level, unsigned threads) {
        const auto size = [&](int i) { return nb::cast<int64_t>(shape[i]); };
        const Attention call{heads_of(q, q_strides), heads_of(k, k_strides), heads_of(v, v_strides),
                             reinterpret_cast<void*>(key_cache), reinterpret_cast<void*>(value_cache),
                             reinterpret_cast<const void*>(cos), reinterpret_cast<const void*>(sin),
                             reinterpret_cast<const int64_t*>(lengths), reinterpret_cast<const int64_t*>(ancestors),
                             reinterpret_cast<const int64_t*>(positions), reinterpret_cast<const float*>(sinks),
                             reinterpret_cast<void*>(out), reinterpret_cast<const int32_t*>(table), size(0), size(1),
                             size(2), size(3), size(4), size(5), size(6), size(7), size(8), inner, outer, softcap,
                             is_bfloat16, window};
        check_memory(call);
        check_numbers(call);
        nb::gil_scoped_release without_lock;
        attend(call, level, threads);
    });
}
