// Products of few rows of float32 by AVX-512: out = x w^T, where reading w from memory is most of the work.
//
// BLAS packs blocks of w before it multiplies, which pays for many rows of x only. Here a tile of w rows and x rows is
// multiplied where it lies, with one vector accumulator for each of its outputs, so that w is read from memory once.
#include <algorithm>
#include <cstdint>

#include <dlfcn.h>
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace {

constexpr int64_t kLanes = 16;    // floats of a vector
constexpr int kOutputs = 4;       // rows of w in a tile
constexpr int kMostRows = 6;      // rows of x in a tile: 24 of the 32 registers are accumulators
constexpr int64_t kBlock = 24;    // rows of w that a thread takes at a time

struct Product {
    const float *x, *w;  // [rows, inputs], [outputs, inputs]
    float* out;          // [rows, outputs]
    int64_t rows, inputs, outputs;
};

#if defined(__x86_64__) && defined(__GNUC__)
#define AVX512 __attribute__((target("avx512f")))
typedef float Vector __attribute__((vector_size(64), aligned(4), may_alias));

// Outputs o .. o + O of rows m .. m + M.
template <int O, int M> AVX512 __attribute__((always_inline)) inline void tile(const Product& p, int64_t o, int64_t m) {
    const float *w = p.w + o * p.inputs, *x = p.x + m * p.inputs;
    Vector sums[O][M] = {};
    for (int64_t k = 0; k < p.inputs; k += kLanes) {
        Vector weights[O];
        for (int i = 0; i < O; i++) {
            weights[i] = *reinterpret_cast<const Vector*>(w + i * p.inputs + k);
            __builtin_prefetch(w + (i + O) * p.inputs + k, 0, 2);  // the next tile's; beyond the end it does nothing
        }
        for (int j = 0; j < M; j++) {
            const Vector values = *reinterpret_cast<const Vector*>(x + j * p.inputs + k);
            for (int i = 0; i < O; i++) sums[i][j] += weights[i] * values;
        }
    }
    for (int j = 0; j < M; j++)
        for (int i = 0; i < O; i++) {
            Vector v = sums[i][j];
            for (int64_t half = kLanes / 2; half; half /= 2)
                for (int64_t lane = 0; lane < half; lane++) v[lane] += v[lane + half];
            p.out[(m + j) * p.outputs + o + i] = v[0];
        }
}

// Outputs o .. o + O of all rows: the w rows of a tile stay in the L1 cache for all tiles of x.
template <int O> AVX512 inline void all_rows(const Product& p, int64_t o) {
    const int64_t tiles = (p.rows + kMostRows - 1) / kMostRows, size = (p.rows + tiles - 1) / tiles;
    for (int64_t m = 0; m < p.rows; m += size) switch (std::min(size, p.rows - m)) {
        case 1: tile<O, 1>(p, o, m); break;
        case 2: tile<O, 2>(p, o, m); break;
        case 3: tile<O, 3>(p, o, m); break;
        case 4: tile<O, 4>(p, o, m); break;
        case 5: tile<O, 5>(p, o, m); break;
        default: tile<O, 6>(p, o, m);
    }
}

AVX512 void multiply(const Product& p, int64_t begin, int64_t end) {
    int64_t o = begin;
    for (; o + kOutputs <= end; o += kOutputs) all_rows<kOutputs>(p, o);
    for (; o < end; o++) all_rows<1>(p, o);
}

bool supported() { return __builtin_cpu_supports("avx512f"); }
#else
void multiply(const Product&, int64_t, int64_t) {}
bool supported() { return false; }
#endif

// The OpenMP runtime that torch has loaded. With threads of another one, both would spin on the same cores.
struct OpenMP {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread)();
    int (*threads)();

    OpenMP() {
        *reinterpret_cast<void**>(&parallel) = dlsym(RTLD_DEFAULT, "GOMP_parallel");
        *reinterpret_cast<void**>(&thread) = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
        *reinterpret_cast<void**>(&threads) = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    }
    bool present() const { return parallel && thread && threads; }
};

const OpenMP& openmp() {
    static const OpenMP runtime;
    return runtime;
}

// One thread's share: as many blocks of outputs as any other's, rounded up.
void share(void* argument) {
    const Product& p = *static_cast<const Product*>(argument);
    const int64_t blocks = (p.outputs + kBlock - 1) / kBlock, threads = openmp().threads();
    const int64_t size = (blocks + threads - 1) / threads * kBlock, begin = openmp().thread() * size;
    if (begin < p.outputs) multiply(p, begin, std::min(begin + size, p.outputs));
}

void linear(uintptr_t x, uintptr_t w, uintptr_t out, int64_t rows, int64_t inputs, int64_t outputs, unsigned threads) {
    Product p{reinterpret_cast<const float*>(x), reinterpret_cast<const float*>(w), reinterpret_cast<float*>(out),
              rows, inputs, outputs};
    if (threads > 1 && openmp().present()) openmp().parallel(share, &p, threads, 0);
    else multiply(p, 0, outputs);
}

}  // namespace

NB_MODULE(_avx512, m) {
    m.def("supported", supported);
    m.def("linear", linear, nb::call_guard<nb::gil_scoped_release>());
}
