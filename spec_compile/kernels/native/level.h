// The instructions of a LEVEL, which each file or namespace that has kernels defines before this file:
//   0  C++ that any CPU runs
//   1  AVX2, FMA and F16C
//   2  AVX-512
//   3  AVX-512 with BF16, whose instructions multiply pairs of bfloat16
//   4  the same with VNNI and VBMI, which multiply fours of 8 bits and look bytes up
#undef KERNEL
#undef LANES
#undef VECTOR
#undef HALF_VECTOR
#if LEVEL == 0
#define KERNEL
#define LANES 4
#elif LEVEL == 1
#define KERNEL __attribute__((target("avx2,fma,f16c")))
#define LANES 8
#define VECTOR(name) _mm256_##name
#define HALF_VECTOR(name) _mm_##name
#else
#if LEVEL == 2
#define KERNEL __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")))
#elif LEVEL == 3
#define KERNEL __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma,f16c")))
#else
#define KERNEL \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")))
#endif
#define LANES 16
#define VECTOR(name) _mm512_##name
#define HALF_VECTOR(name) _mm256_##name
#endif

#ifndef INLINE
#define INLINE KERNEL __attribute__((always_inline)) inline
// Large functions compile in less time if they are not inlined into one.
#define APART KERNEL __attribute__((noinline))
// Make a call with a number of rows, 1 to 6, as the constant M.
#define WITH_ROWS(rows, ...)                                \
    switch (rows) {                                         \
        case 1: { constexpr int M = 1; __VA_ARGS__; break; } \
        case 2: { constexpr int M = 2; __VA_ARGS__; break; } \
        case 3: { constexpr int M = 3; __VA_ARGS__; break; } \
        case 4: { constexpr int M = 4; __VA_ARGS__; break; } \
        case 5: { constexpr int M = 5; __VA_ARGS__; break; } \
        case 6: { constexpr int M = 6; __VA_ARGS__; break; } \
    }
#endif
