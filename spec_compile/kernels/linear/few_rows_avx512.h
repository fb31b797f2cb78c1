// Vectors of AVX-512 for few_rows_tiles.h, in few_rows_avx512.cpp and few_rows_avx512_bf16.cpp. NATIVE is 1 in the
// second, where few_rows_strips.h multiplies bfloat16 and integers.
constexpr int kLanes = 16;
constexpr int kMostRows = 6;  // rows of x in a tile of 4 outputs: 24 of the 32 registers are sums

typedef __m512 Floats;
struct Table {
    Floats numbers;
};

INLINE Floats floats_of_bfloat16(const uint16_t* codes) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)codes)), 16));
}

INLINE Floats floats_of_int8(const uint8_t* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
}

// The numbers over 256: float8_e4m3fn with another bit of exponent is a float16, subnormal numbers too;
// its largest code is NaN.
INLINE Floats floats_of_fp8(const uint8_t* codes) {
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(short(0xBF80)));
    const __m256i largest = _mm256_set1_epi16(0x3F80);
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, largest), largest);
    return _mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x7E00))));
}

INLINE Floats spread(float number) { return _mm512_set1_ps(number); }
INLINE Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
INLINE void put(float* at, Floats v) { _mm512_storeu_ps(at, v); }

INLINE Floats to_bfloat16(Floats v) {  // rounded to nearest, ties to even
    const __m512i bits = _mm512_castps_si512(v);
    const __m512i last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), last);
    return _mm512_castsi512_ps(_mm512_and_si512(sum, _mm512_set1_epi32(int(0xFFFF0000))));
}

INLINE Floats to_float16(Floats v) { return _mm512_cvtph_ps(_mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }

typedef __m512i Ints;

INLINE Floats floats_at(const float* at) { return _mm512_loadu_ps(at); }
INLINE Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
INLINE Floats minus(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
INLINE Table table_at(const float* numbers) { return {floats_at(numbers)}; }
INLINE Ints shifted_right(Ints words, int bits) { return _mm512_srli_epi32(words, bits); }

// The first `count` words, and zeros.
INLINE Ints some_ints(const uint8_t* words, int64_t count) {
    return _mm512_maskz_loadu_epi32(__mmask16((1u << count) - 1), words);
}

// The numbers of the lowest four bits of each word.
INLINE Floats numbers_of(const Table& table, Ints codes) { return _mm512_permutexvar_ps(codes, table.numbers); }

// Byte `place` of each word, an int8.
INLINE Floats floats_of_bytes(Ints words, int place) {
    const Ints highest = _mm512_slli_epi32(words, 24 - 8 * place);
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(highest, 24));
}

// The totals of four sums.
INLINE __m128 totals(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512d first = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512d second = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    const __m512 four = _mm512_add_ps(_mm512_castpd_ps(first), _mm512_castpd_ps(second));
    const __m256 two = _mm256_add_ps(_mm512_castps512_ps256(four), _mm512_extractf32x8_ps(four, 1));
    return _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1));
}

INLINE __m128i totals(__m512i a, __m512i b, __m512i c, __m512i d) {
    const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    const __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti32x8_epi32(four, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

struct FloatSums {
    typedef float Element;
    typedef __m512 Sum;
    static constexpr int kStep = 16;
    static INLINE Sum zero() { return _mm512_setzero_ps(); }
    static INLINE __m512 load(const float* at) { return _mm512_loadu_ps(at); }
    static INLINE __m512 load_weights(const float* at) { return load(at); }
    static INLINE Sum add(Sum sum, __m512 a, __m512 b) { return _mm512_fmadd_ps(a, b, sum); }
    static INLINE void totals_of(const Sum* s, int32_t, float* out) {
        _mm_storeu_ps(out, totals(s[0], s[1], s[2], s[3]));
    }
};

#if !NATIVE
struct IntSums {
    typedef int16_t Element;
    typedef __m512i Sum;
    static constexpr int kStep = 32;
    static INLINE Sum zero() { return _mm512_setzero_si512(); }
    static INLINE __m512i load(const int16_t* at) { return _mm512_loadu_si512(at); }
    static INLINE __m512i load_weights(const int16_t* at) { return load(at); }
    static INLINE Sum add(Sum sum, __m512i a, __m512i b) { return _mm512_add_epi32(sum, _mm512_madd_epi16(a, b)); }
    static INLINE void totals_of(const Sum* s, int32_t, float* out) {
        _mm_storeu_ps(out, _mm_cvtepi32_ps(totals(s[0], s[1], s[2], s[3])));
    }
};

INLINE void int16_of_int8(const uint8_t* codes, int16_t* out) {  // 32 of them
    _mm512_storeu_si512(out, _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)codes)));
}
#endif
