// Vectors of AVX2 for cpu_attention_rows.h.
constexpr int kLanes = 8;
constexpr int kVectors = 2;  // of a tile: with 6 rows, 12 of the 16 registers are sums

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

INLINE Floats load(const float* at) { return _mm256_loadu_ps(at); }
INLINE void put(float* at, Floats v) { _mm256_storeu_ps(at, v); }
INLINE Floats spread(float number) { return _mm256_set1_ps(number); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Ints lanes() { return Ints{0, 1, 2, 3, 4, 5, 6, 7}; }
INLINE Ints spread(int32_t number) { return (Ints)_mm256_set1_epi32(number); }

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

INLINE Floats load_bfloat16(const uint16_t* at) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)at)), 16));
}

INLINE void transpose(Floats (&rows)[kLanes]) {
    __m256 pairs[8], fours[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        fours[i] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm256_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
        fours[i + 2] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm256_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x20);
        rows[i + 4] = _mm256_permute2f128_ps(fours[i], fours[i + 4], 0x31);
    }
}
