// Numbers, and vectors of LANES numbers, by the instructions of a LEVEL. Each level includes this file in a namespace of
// its own; before this, and outside of it, stand the headers that the file needs.

#include "level.h"

// Single numbers.

INLINE float float_of_bits(uint32_t bits) { return std::bit_cast<float>(bits); }

INLINE uint32_t bits_of(float number) { return std::bit_cast<uint32_t>(number); }

// The bits of a float32, or of each in a vector, of which the upper half is the nearest bfloat16, ties to even.
template <class Bits> INLINE Bits rounded_bits(Bits bits) { return bits + 0x7FFF + (bits >> 16 & 1); }

INLINE uint16_t bfloat16_of(float number) {
    return number != number ? 0x7FC0 : uint16_t(rounded_bits(bits_of(number)) >> 16);
}

INLINE float float_of(float number) { return number; }
INLINE float float_of(uint16_t bfloat16) { return float_of_bits(uint32_t(bfloat16) << 16); }

// Vectors. GCC and Clang have operators for them; what these lack is here.

constexpr int kLanes = LANES;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));
#if LEVEL == 1
typedef __m256i Packed;
typedef __m128i HalfPacked;
#elif LEVEL > 1
typedef __m512i Packed;
typedef __m256i HalfPacked;
#endif

template <class Vector, class Number> INLINE Vector vector_at(const Number* at) {
    Vector v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
INLINE Floats load(const float* at) { return vector_at<Floats>(at); }
INLINE Words words_of(const uint16_t* halves) {
#if LEVEL == 0
    return __builtin_convertvector(vector_at<Halves>(halves), Words);
#else  // GCC 12 converts in several steps
    return (Words)VECTOR(cvtepu16_epi32)(vector_at<HalfPacked>(halves));
#endif
}
INLINE Floats load(const uint16_t* bfloat16) { return (Floats)(words_of(bfloat16) << 16); }
INLINE void put(float* at, Floats v) { std::memcpy(at, &v, sizeof v); }
INLINE void put(uint16_t* bfloat16, Floats v) {  // rounded as by `bfloat16_of`
    const Words rounded = rounded_bits((Words)v) >> 16;
    const Halves halves = __builtin_convertvector(v == v ? rounded : Words{} + 0x7FC0, Halves);
    std::memcpy(bfloat16, &halves, sizeof halves);
}
INLINE Floats spread(float number) { return number - Floats{}; }  // adding zeros would lose the sign of -0
INLINE Ints spread(int32_t number) { return number + Ints{}; }
INLINE Ints lanes() {
    Ints numbers{};
    for (int i = 0; i < kLanes; i++) numbers[i] = i;
    return numbers;
}

#if LEVEL == 0
INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE float sum_of(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE float largest_of(Floats v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
#else
INLINE Floats fma(Floats a, Floats b, Floats c) { return VECTOR(fmadd_ps)(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return VECTOR(max_ps)(a, b); }
#endif
#if LEVEL == 1
INLINE float sum_of(Floats v) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float largest_of(Floats v) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
#elif LEVEL > 1
INLINE float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(Floats v) { return _mm512_reduce_max_ps(v); }
#endif

// Rows become columns, in two steps: by fours of rows, and then of all.
INLINE void transpose(Floats (&rows)[kLanes]) {
#if LEVEL == 0
    const Floats a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < 4; i++) rows[i] = Floats{a[i], b[i], c[i], d[i]};
#else
    Floats fours[kLanes];  // column j + 4 * l of four rows is part l of fours[i + j]
#pragma GCC unroll 4
    for (int i = 0; i < kLanes; i += 4) {
        const Floats a = VECTOR(unpacklo_ps)(rows[i], rows[i + 1]), b = VECTOR(unpackhi_ps)(rows[i], rows[i + 1]);
        const Floats c = VECTOR(unpacklo_ps)(rows[i + 2], rows[i + 3]);
        const Floats d = VECTOR(unpackhi_ps)(rows[i + 2], rows[i + 3]);
        fours[i] = VECTOR(shuffle_ps)(a, c, 0x44), fours[i + 1] = VECTOR(shuffle_ps)(a, c, 0xEE);
        fours[i + 2] = VECTOR(shuffle_ps)(b, d, 0x44), fours[i + 3] = VECTOR(shuffle_ps)(b, d, 0xEE);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
#if LEVEL == 1
        rows[j] = _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x20);
        rows[j + 4] = _mm256_permute2f128_ps(fours[j], fours[j + 4], 0x31);
#else
        const Floats even = _mm512_shuffle_f32x4(fours[j], fours[j + 4], 0x88);
        const Floats odd = _mm512_shuffle_f32x4(fours[j], fours[j + 4], 0xDD);
        const Floats even2 = _mm512_shuffle_f32x4(fours[j + 8], fours[j + 12], 0x88);
        const Floats odd2 = _mm512_shuffle_f32x4(fours[j + 8], fours[j + 12], 0xDD);
        rows[j] = _mm512_shuffle_f32x4(even, even2, 0x88), rows[j + 4] = _mm512_shuffle_f32x4(odd, odd2, 0x88);
        rows[j + 8] = _mm512_shuffle_f32x4(even, even2, 0xDD), rows[j + 12] = _mm512_shuffle_f32x4(odd, odd2, 0xDD);
#endif
    }
#endif
}
