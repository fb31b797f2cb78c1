// Vectors of AVX-512 for cpu_attention_rows.h.
constexpr int kLanes = 16;
constexpr int kVectors = 4;  // of a tile: with 6 rows, 24 of the 32 registers are sums

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));

INLINE Floats load(const float* at) { return _mm512_loadu_ps(at); }
INLINE void put(float* at, Floats v) { _mm512_storeu_ps(at, v); }
INLINE Floats spread(float number) { return _mm512_set1_ps(number); }
INLINE Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Ints lanes() { return (Ints)_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Ints spread(int32_t number) { return (Ints)_mm512_set1_epi32(number); }
INLINE float sum_of(Floats v) { return _mm512_reduce_add_ps(v); }
INLINE float largest_of(Floats v) { return _mm512_reduce_max_ps(v); }

INLINE Floats load_bfloat16(const uint16_t* at) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)at)), 16));
}

INLINE void transpose(Floats (&rows)[kLanes]) {
    __m512 pairs[16], fours[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        pairs[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // column j + 4 * l of rows i to i + 3 is lane l of fours[i + j]
        fours[i] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0x44);
        fours[i + 1] = _mm512_shuffle_ps(pairs[i], pairs[i + 2], 0xEE);
        fours[i + 2] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0x44);
        fours[i + 3] = _mm512_shuffle_ps(pairs[i + 1], pairs[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512 even = _mm512_shuffle_f32x4(fours[j], fours[j + 4], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(fours[j], fours[j + 4], 0xDD);
        const __m512 next_even = _mm512_shuffle_f32x4(fours[j + 8], fours[j + 12], 0x88);
        const __m512 next_odd = _mm512_shuffle_f32x4(fours[j + 8], fours[j + 12], 0xDD);
        rows[j] = _mm512_shuffle_f32x4(even, next_even, 0x88);
        rows[j + 4] = _mm512_shuffle_f32x4(odd, next_odd, 0x88);
        rows[j + 8] = _mm512_shuffle_f32x4(even, next_even, 0xDD);
        rows[j + 12] = _mm512_shuffle_f32x4(odd, next_odd, 0xDD);
    }
}

#if NATIVE
// Numbers are multiplied as pairs of bfloat16, the sums are float32.
struct Pairs {
    typedef uint16_t Number;
    typedef Pairs Sums;
    static constexpr int kNumbers = 2;  // of a unit
    static INLINE Floats add(Floats sum, Floats a, Floats b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    static INLINE Floats load_units(const Number* at) { return load((const float*)at); }
    // The numbers of a key of even number, and of the next one.
    static INLINE void join(const Number* first, const Number* second, float* out) {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)first));
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)second));
        put(out, (Floats)_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
    static INLINE void put_weights(float* at, Floats first, Floats second) {
        put(at, (Floats)_mm512_cvtne2ps_pbh(second, first));
    }
};
#endif
