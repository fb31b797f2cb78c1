// Products of few rows on a CPU, where reading w from memory is most of the work: `Product` in few_rows.h.
//
// BLAS packs blocks of w before it multiplies, which pays for many rows of x only, and reads no codes of few bits.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif
#include <nanobind/nanobind.h>

#include "../openmp.h"
#include "few_rows.h"

namespace nb = nanobind;

namespace {

typedef void (*Run)(const Product&, int64_t, int64_t, Scratch&);
typedef void (*Prepare)(const Product&, int64_t);

struct Level {
    Run run;
    Prepare prepare;
    bool (*is_prepared)(const Product&);
    int64_t (*element_size)(const Product&);
    void (*norm_row)(const Product&, const Around&, int64_t, uint16_t*);
    void (*gate_row)(const uint16_t*, int64_t, uint16_t*);
};

#if defined(__x86_64__) && defined(__GNUC__)
#define INLINE KERNEL __attribute__((always_inline)) inline

namespace avx2 {
#define KERNEL __attribute__((target("avx2,fma,f16c")))
#define NATIVE 0
#include "few_rows_numbers.h"
#include "few_rows_avx2.h"
#include "few_rows_panels.h"
#include "few_rows_blocks.h"
#include "few_rows_tiles.h"
#include "few_rows_around.h"
#undef KERNEL
#undef NATIVE
}  // namespace avx2

namespace avx512 {
#define KERNEL __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#define NATIVE 0
#include "few_rows_numbers.h"
#include "few_rows_avx512.h"
#include "few_rows_panels.h"
#include "few_rows_blocks.h"
#include "few_rows_tiles.h"
#include "few_rows_around.h"
#undef KERNEL
#undef NATIVE
}  // namespace avx512

namespace avx512_bf16 {
#define KERNEL __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")))
#define NATIVE 1
#include "few_rows_numbers.h"
#include "few_rows_avx512.h"
#include "few_rows_panels.h"
#include "few_rows_blocks.h"
#include "few_rows_decode.h"
#include "few_rows_strips.h"
#include "few_rows_pairs.h"
#include "few_rows_tiles.h"
#include "few_rows_around.h"
#undef KERNEL
#undef NATIVE
}  // namespace avx512_bf16

constexpr Level kLevels[] = {
    {avx2::run, avx2::prepare, avx2::is_prepared, avx2::element_size, avx2::norm_row, avx2::gate_row},
    {avx512::run, avx512::prepare, avx512::is_prepared, avx512::element_size, avx512::norm_row, avx512::gate_row},
    {avx512_bf16::run, avx512_bf16::prepare, avx512_bf16::is_prepared, avx512_bf16::element_size,
     avx512_bf16::norm_row, avx512_bf16::gate_row},
};

// The levels that this CPU has: 0 to 3 of them.
int levels() {
    __builtin_cpu_init();
    const bool has_avx2 =
        __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool has_pairs = __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                           __builtin_cpu_supports("avx512vbmi");
    return !has_avx2 ? 0 : !has_avx512 ? 1 : !has_pairs ? 2 : 3;
}
#else
constexpr Level kLevels[] = {{nullptr, nullptr, nullptr, nullptr, nullptr, nullptr}};
int levels() { return 0; }
#endif

thread_local Scratch scratch;

struct Job {
    const Product& product;
    const Level& level;
};

constexpr int64_t kLine = 64;   // bytes of a line of the cache
constexpr int64_t kShare = 32;  // outputs that a thread takes at a time: of a panel, and their scales share lines

// One thread's share: as many blocks of outputs as any other's, rounded up.
void share_outputs(void* argument) {
    const Job& job = *static_cast<const Job*>(argument);
    const int64_t blocks = (job.product.outputs + kShare - 1) / kShare, threads = openmp().threads();
    const int64_t size = (blocks + threads - 1) / threads * kShare, begin = openmp().thread() * size;
    if (begin < job.product.outputs) {
        const int64_t end = std::min(begin + size, job.product.outputs);
        job.level.run(job.product, begin, end, scratch);
    }
}

void share_rows(void* argument) {
    const Job& job = *static_cast<const Job*>(argument);
    for (int64_t row = openmp().thread(); row < job.product.rows; row += openmp().threads())
        job.level.prepare(job.product, row);
}

// Multiply at a level, of which the first is 1.
void multiply(Product p, int level, unsigned threads) {
    static thread_local std::vector<uint8_t> rows;
    static thread_local std::vector<float> scales, segment_sums;
    static thread_local std::vector<int32_t> sums;
    const Level& kernels = kLevels[level - 1];
    const bool is_prepared = kernels.is_prepared(p), together = threads > 1 && openmp().present();
    p.prepared = const_cast<void*>(p.x);
    p.x_stride = p.inputs;
    if (!is_prepared) {
        const int64_t size = kernels.element_size(p), lines = p.padded() * size / kLine | 1;  // odd, see `is_prepared`
        p.x_stride = lines * kLine / size;
        rows.resize(p.rows * lines * kLine + kLine);
        p.prepared = reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(rows.data()) + kLine - 1) / kLine * kLine);
    }
    if (p.rounding == Rounding::int8_rows || p.rounding == Rounding::fp8_rows) {
        scales.resize(p.rows);
        p.row_scales = scales.data();
        sums.resize(p.rows);
        p.row_sums = sums.data();
    }
    if (p.has_sums()) {
        p.segments = (p.inputs + 31) / 8;  // at least as many as there are
        segment_sums.resize(p.rows * p.segments);
        p.x_sums = segment_sums.data();
    }
    Job job{p, kernels};
    if (!is_prepared && together && p.rows >= 8) openmp().parallel(share_rows, &job, threads, 0);
    else if (!is_prepared)
        for (int64_t row = 0; row < p.rows; row++) kernels.prepare(p, row);
    if (together) openmp().parallel(share_outputs, &job, threads, 0);
    else kernels.run(p, 0, p.outputs, scratch);
}

struct RowsJob {
    const Product& product;
    const Around& around;
    const Level& level;
    uint16_t *normed, *wide;
};

void share_norms(void* argument) {
    const RowsJob& job = *static_cast<const RowsJob*>(argument);
    for (int64_t row = openmp().thread(); row < job.product.rows; row += openmp().threads())
        job.level.norm_row(job.product, job.around, row, job.normed + row * job.product.inputs);
}

void share_gates(void* argument) {
    const RowsJob& job = *static_cast<const RowsJob*>(argument);
    const int64_t outputs = job.product.outputs / 2;
    for (int64_t row = openmp().thread(); row < job.product.rows; row += openmp().threads())
        job.level.gate_row(job.wide + row * 2 * outputs, outputs,
                           static_cast<uint16_t*>(job.product.out) + row * outputs);
}

// `multiply` with the norm before it and the gate after it, whose p.out has half of the outputs.
void multiply_around(Product p, const Around& a, int level, unsigned threads) {
    static thread_local std::vector<uint16_t> normed, wide;
    const Level& kernels = kLevels[level - 1];
    const bool together = threads > 1 && openmp().present() && p.rows >= 4;
    normed.resize(a.norm ? p.rows * p.inputs : 0), wide.resize(a.is_gated ? p.rows * p.outputs : 0);
    RowsJob job{p, a, kernels, normed.data(), wide.data()};
    if (a.norm && together) openmp().parallel(share_norms, &job, threads, 0);
    else if (a.norm)
        for (int64_t row = 0; row < p.rows; row++) kernels.norm_row(p, a, row, normed.data() + row * p.inputs);
    Product inner = p;
    if (a.norm) inner.x = normed.data();
    if (a.is_gated) inner.out = wide.data();
    multiply(inner, level, threads);
    if (a.is_gated && together) openmp().parallel(share_gates, &job, threads, 0);
    else if (a.is_gated)
        for (int64_t row = 0; row < p.rows; row++)
            kernels.gate_row(wide.data() + row * p.outputs, p.outputs / 2,
                             static_cast<uint16_t*>(p.out) + row * (p.outputs / 2));
}

}  // namespace

NB_MODULE(_few_rows, m) {
    m.def("levels", levels);
    m.def("multiply",
          [](uintptr_t x, uintptr_t w, uintptr_t scales, uintptr_t bias, uintptr_t out, int64_t rows,
             int64_t inputs, int64_t outputs, int64_t row_bytes, int dtype, int scale_type, int weights, int rounding,
             bool scaled_first, bool constant, uintptr_t table, int64_t group, int second, int rounds, int level,
             unsigned threads, uintptr_t norm, uintptr_t residual, uintptr_t stream, float eps, float offset,
             bool rounds_first, bool is_gated) {
              const Product p{reinterpret_cast<const void*>(x), reinterpret_cast<const uint8_t*>(w),
                              reinterpret_cast<const void*>(scales), reinterpret_cast<const void*>(bias),
                              reinterpret_cast<void*>(out),
                              rows, inputs, outputs, row_bytes, Number(dtype), Number(scale_type), Weights(weights),
                              Rounding(rounding), scaled_first, constant, reinterpret_cast<const float*>(table), group,
                              Second(second), Number(rounds), nullptr, nullptr, nullptr, 0, nullptr, 0};
              const Around around{reinterpret_cast<const void*>(norm), reinterpret_cast<const void*>(residual),
                                  reinterpret_cast<void*>(stream), eps, offset, rounds_first, is_gated};
              if (norm || is_gated) multiply_around(p, around, level, threads);
              else multiply(p, level, threads);
          },
          nb::call_guard<nb::gil_scoped_release>());
}
