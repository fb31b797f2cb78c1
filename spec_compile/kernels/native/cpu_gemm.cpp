// Products of few rows on a CPU, where reading w from memory is most of the work: `Product` in cpu_gemm.h.
//
// BLAS packs blocks of w before it multiplies, which pays for many rows of x only, and reads no codes of few bits.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include <nanobind/nanobind.h>

#include "cpu.h"
#include "cpu_gemm.h"

namespace nb = nanobind;

namespace {

#if defined(__x86_64__) && defined(__GNUC__)
constexpr const Level* kLevels[] = {&kAvx2, &kAvx512, &kAvx512Bf16};
#else
constexpr const Level* kLevels[] = {nullptr};
#endif

// The number of `kLevels` that this CPU has: the last one needs all instructions of LEVEL 4.
int levels() {
    const int level = level_of_cpu();
    return level == 4 ? 3 : std::min(level, 2);
}

thread_local Scratch scratch;

constexpr int64_t kLine = 64;   // bytes of a line of the cache
constexpr int64_t kShare = 32;  // outputs that a thread takes at a time: of a panel, and their scales share lines

// Multiply at a level, of which the first is 1.
void multiply(Product p, int level, unsigned threads) {
    static thread_local std::vector<uint8_t> rows;
    static thread_local std::vector<float> scales;
    static thread_local std::vector<Segment> segments;
    static thread_local std::vector<int32_t> sums;
    const Level& kernels = *kLevels[level - 1];
    const bool is_prepared = kernels.is_prepared(p);
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
    if (p.in_blocks()) {
        p.segments = (p.inputs + 31) / 8;  // at least as many as there are
        segments.resize(p.rows * p.segments);
        p.x_segments = segments.data();
    }
    if (!is_prepared) for_parts(p.rows, p.rows >= 8 ? threads : 1, [&](int64_t row) { kernels.prepare(p, row); });
    const Kernel kernel = kernels.kernel_of(p);
    // Each thread has as many blocks of outputs as any other, rounded up.
    const int64_t blocks = (p.outputs + kShare - 1) / kShare, size = (blocks + threads - 1) / threads * kShare;
    for_parts(threads, threads, [&](int64_t thread) {
        const int64_t begin = thread * size, end = std::min(begin + size, p.outputs);
        for (int64_t row = 0; row < p.rows && begin < end; row += kChunk) kernel(p, row, begin, end, scratch);
    });
}

// `multiply` with the norm before it and the gate after it, whose p.out has half of the outputs.
void multiply_around(Product p, const Around& a, int level, unsigned threads) {
    static thread_local std::vector<uint16_t> normed, wide;
    const Level& kernels = *kLevels[level - 1];
    const unsigned some = p.rows >= 4 ? threads : 1;
    normed.resize(a.norm ? p.rows * p.inputs : 0), wide.resize(a.is_gated ? p.rows * p.outputs : 0);
    uint16_t* const x = normed.data();
    if (a.norm) for_parts(p.rows, some, [&](int64_t row) { kernels.norm_row(p, a, row, x + row * p.inputs); });
    Product inner = p;
    if (a.norm) inner.x = x;
    if (a.is_gated) inner.out = wide.data();
    multiply(inner, level, threads);
    const int64_t outputs = p.outputs / 2;
    const uint16_t* const both = wide.data();
    uint16_t* const out = static_cast<uint16_t*>(p.out);
    if (a.is_gated)
        for_parts(p.rows, some, [&](int64_t row) {
            kernels.gate_row(both + 2 * row * outputs, outputs, out + row * outputs);
        });
}

template <class Type> Type* pointer(uintptr_t address) { return reinterpret_cast<Type*>(address); }

void require(bool condition, const char* message) {
    if (!condition) throw nb::value_error(message);
}

// Refuse a size that is not as expected.
void require_size(const char* what, int64_t expected, int64_t size) {
    if (size == expected) return;
    const std::string sizes = std::to_string(expected) + ", got " + std::to_string(size);
    require(false, (std::string(what) + ": expected " + sizes).c_str());
}

// Refuse an address that is null, or no multiple of a number's size.
void require_memory(const char* name, const void* at, int64_t size) {
    if (at && reinterpret_cast<uintptr_t>(at) % size == 0) return;
    const std::string bytes = std::to_string(size) + " bytes";
    require(false, (std::string(name) + ": expected memory that begins at a multiple of " + bytes).c_str());
}

int64_t size_of(Number type) { return type == Number::float32 ? 4 : 2; }

// Bytes of a number, a code or a word of weights.
int64_t size_of(Weights weights) {
    switch (weights) {
        case Weights::bfloat16: return 2;
        case Weights::int8: case Weights::fp8: case Weights::fp8_blocks: return 1;
        default: return 4;
    }
}

constexpr int64_t kMostRoundedInputs = 1 << 16;  // products of bytes, whose sum is an int32

// Refuse a product whose weights, scales or bias are not of its sizes. columns: of the tensor of weights. scale_rows,
// scale_columns: of that of scales. bias_count: -1 without a bias.
void check(const Product& p, int64_t columns, int64_t scale_rows, int64_t scale_columns, int64_t bias_count) {
    const int64_t in_word = p.weights == Weights::blocks4 ? 8 : 4;
    require(p.inputs > 0, "x: expected rows of at least one input");
    require_size("weight: its second size", p.in_blocks() ? (p.inputs + 31) / 32 * 32 / in_word : p.inputs, columns);
    if (p.outputs) require_memory("weight", p.w, size_of(p.weights));
    if (bias_count >= 0) require_size("bias: its size", p.outputs, bias_count);
    if (bias_count > 0) require_memory("bias", p.bias, size_of(p.dtype));
    if (p.weights == Weights::float32 || p.weights == Weights::bfloat16)
        return require(!p.scales, "scales: expected none for weights of numbers");
    int64_t rows = p.outputs + p.constant, each = 1;
    if (p.weights == Weights::fp8_blocks) {
        rows = (p.outputs + kBlock - 1) / kBlock, each = (p.inputs + kBlock - 1) / kBlock;
        require(p.scale_type == Number::float32, "scales: expected float32 for blocks of FP8");
    } else if (p.in_blocks()) {
        const bool is_read = p.group % 8 == 0 && (p.group <= 256 || p.group % 256 == 0);
        require(p.group > 0 && (p.group >= p.inputs || is_read),
                "kind: expected groups of all inputs, of a multiple of 8 up to 256, or of a multiple of 256");
        each = (p.inputs + p.group - 1) / p.group * (p.second == Second::none ? 1 : 2);
    }
    require(p.rounding == Rounding::none || p.rounding == Rounding::fp8_blocks || p.inputs <= kMostRoundedInputs,
            "x: expected at most 65,536 inputs that are rounded to 8 bits");
    require_size("scales: their first size", rows, scale_rows);
    require_size("scales: their second size", each, scale_columns);
    if (p.outputs) require_memory("scales", p.scales, size_of(p.scale_type));
}

// The constants of a product, as `constants` of cpu_gemm.py has them.
Product product_of(uintptr_t w, uintptr_t scales, uintptr_t bias, int64_t inputs, int64_t outputs, int64_t columns,
                   int64_t scale_rows, int64_t scale_columns, int64_t bias_count, int dtype, int scale_type,
                   int weights, int rounding, bool scaled_first, bool constant, uintptr_t table, int64_t group,
                   int second, int rounds) {
    Product p{};
    p.w = pointer<const uint8_t>(w), p.scales = pointer<const void>(scales), p.bias = pointer<const void>(bias);
    p.inputs = inputs, p.outputs = outputs, p.row_bytes = columns * size_of(Weights(weights));
    p.dtype = Number(dtype), p.scale_type = Number(scale_type), p.weights = Weights(weights);
    p.rounding = Rounding(rounding), p.scaled_first = scaled_first, p.constant = constant;
    p.table = pointer<const float>(table), p.group = group, p.second = Second(second), p.rounds = Number(rounds);
    check(p, columns, scale_rows, scale_columns, bias_count);
    p.whole = p.in_blocks();
    for (int code = 0; code < 16 && p.weights == Weights::blocks4; code++) p.whole &= p.table[code] == code - 8;
    return p;
}

// Products of bfloat16, each of the result of the one before it. With a residual stream those that have a norm add their
// input to it first.
class Chain {
  public:
    explicit Chain(int level) : level(level) {}

    // norm_count: -1 without a norm. The other arguments are those of `product_of`.
    template <class... Constants>
    void add(uintptr_t norm, int64_t norm_count, float eps, float offset, bool rounds_first, bool is_gated,
             Constants... constants) {
        const Product p = product_of(constants...);
        if (norm_count >= 0) {
            require_size("norm: its size", p.inputs, norm_count);
            require_memory("norm", pointer<const void>(norm), 2);
            last_norm = links.size();
        }
        require(!is_gated || p.outputs % 2 == 0, "weight: expected an even number of outputs, those of a gate first");
        if (!links.empty()) {
            const Link& before = links.back();
            const int64_t given = before.product.outputs / (before.around.is_gated ? 2 : 1);
            require_size("weights: the inputs of a product after another", given, p.inputs);
        }
        links.push_back({p, {pointer<const void>(norm), nullptr, nullptr, eps, offset, rounds_first, is_gated}});
    }

    // residual, stream: the residual stream, and memory for what becomes of it; or null.
    void run(uintptr_t x, uintptr_t residual, uintptr_t stream, uintptr_t out, int64_t rows, unsigned threads) const {
        if (!rows) return;
        require_memory("x", pointer<void>(x), 2);
        if (residual) require_memory("residual", pointer<void>(residual), 2);
        static thread_local std::vector<uint16_t> results[2], sums[2];
        const void *now = pointer<const void>(x), *before = pointer<const void>(residual);
        for (size_t i = 0; i < links.size(); i++) {
            auto [product, around] = links[i];
            results[i % 2].resize(rows * product.outputs);
            product.x = now, product.rows = rows;
            product.out = i + 1 < links.size() ? results[i % 2].data() : pointer<void>(out);
            if (around.norm && before) {
                sums[i % 2].resize(rows * product.inputs);
                around.residual = before;
                around.stream = i < last_norm ? sums[i % 2].data() : pointer<void>(stream);
                before = around.stream;
            }
            multiply_around(product, around, level, threads);
            now = product.out;
        }
    }

  private:
    struct Link {
        Product product;
        Around around;
    };
    int level;
    size_t last_norm = 0;
    std::vector<Link> links;
};

}  // namespace

NB_MODULE(_cpu_gemm, m) {
    nb::set_leak_warnings(false);  // chains that are kept live until the process ends
    m.def("levels", levels);
    m.def("multiply",
          [](uintptr_t x, uintptr_t out, int64_t rows, int level, unsigned threads, uintptr_t w, uintptr_t scales,
             uintptr_t bias, int64_t inputs, int64_t outputs, int64_t columns, int64_t scale_rows,
             int64_t scale_columns, int64_t bias_count, int dtype, int scale_type, int weights, int rounding,
             bool scaled_first, bool constant, uintptr_t table, int64_t group, int second, int rounds) {
              Product p = product_of(w, scales, bias, inputs, outputs, columns, scale_rows, scale_columns, bias_count,
                                     dtype, scale_type, weights, rounding, scaled_first, constant, table, group, second,
                                     rounds);
              if (!rows) return;
              require_memory("x", pointer<void>(x), size_of(p.dtype));
              p.x = pointer<const void>(x), p.out = pointer<void>(out), p.rows = rows;
              multiply(p, level, threads);
          },
          nb::call_guard<nb::gil_scoped_release>());
    nb::class_<Chain>(m, "Chain")
        .def(nb::init<int>())
        .def("add", &Chain::add<uintptr_t, uintptr_t, uintptr_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                int, int, int, int, bool, bool, uintptr_t, int64_t, int, int>)
        .def("run", &Chain::run, nb::call_guard<nb::gil_scoped_release>());
}
