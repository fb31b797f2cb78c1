// Vectors of AVX2, FMA and F16C for few_rows_tiles.h.
constexpr int kLanes = 8;
constexpr int kMostRows = 3;  // rows of x in a tile of 4 outputs: 12 of the 16 registers are sums

typedef __m256 Floats;
struct Table {
    Floats low, high;  // the numbers of codes below 8, and of the others
};

INLINE Floats floats_of_bfloat16(const uint16_t* codes) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)codes)), 16));
}

INLINE Floats floats_of_int8(const uint8_t* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)codes)));
}

// The numbers over 256: float8_e4m3fn with another bit of exponent is a float16, subnormal numbers too;
// its largest code is NaN.
INLINE Floats floats_of_fp8(const uint8_t* codes) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)codes));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(short(0xBF80)));
    const __m128i largest = _mm_set1_epi16(0x3F80);
    const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(halves, largest), largest);
    return _mm256_cvtph_ps(_mm_or_si128(halves, _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00))));
}

INLINE Floats spread(float number) { return _mm256_set1_ps(number); }
INLINE Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
INLINE void put(float* at, Floats v) { _mm256_storeu_ps(at, v); }

INLINE Floats to_bfloat16(Floats v) {  // rounded to nearest, ties to even
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), last);
    return _mm256_castsi256_ps(_mm256_and_si256(sum, _mm256_set1_epi32(int(0xFFFF0000))));
}

INLINE Floats to_float16(Floats v) { return _mm256_cvtph_ps(_mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT)); }

typedef __m256i Ints;

INLINE Floats floats_at(const float* at) { return _mm256_loadu_ps(at); }
INLINE Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
INLINE Floats minus(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
INLINE Floats fused(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
INLINE Table table_at(const float* numbers) { return {floats_at(numbers), floats_at(numbers + 8)}; }
INLINE Ints shifted_right(Ints words, int bits) { return _mm256_srli_epi32(words, bits); }

// The first `count` words, and zeros.
INLINE Ints some_ints(const uint8_t* words, int64_t count) {
    const Ints lanes = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(words), lanes);
}

// The numbers of the lowest four bits of each word.
INLINE Floats numbers_of(const Table& table, Ints codes) {
    const Floats low = _mm256_permutevar8x32_ps(table.low, codes), high = _mm256_permutevar8x32_ps(table.high, codes);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
}

// Byte `place` of each word, an int8.
INLINE Floats floats_of_bytes(Ints words, int place) {
    const Ints highest = _mm256_slli_epi32(words, 24 - 8 * place);
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(highest, 24));
}

struct FloatSums {
    typedef float Element;
    typedef __m256 Sum;
    static constexpr int kStep = 8;
    static INLINE Sum zero() { return _mm256_setzero_ps(); }
    static INLINE __m256 load(const float* at) { return _mm256_loadu_ps(at); }
    static INLINE __m256 load_weights(const float* at) { return load(at); }
    static INLINE Sum add(Sum sum, __m256 a, __m256 b) { return _mm256_fmadd_ps(a, b, sum); }
    static INLINE void totals_of(const Sum* s, int32_t, float* out) {
        const __m256 four = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(four), _mm256_extractf128_ps(four, 1)));
    }
};

struct IntSums {
    typedef int16_t Element;
    typedef __m256i Sum;
    static constexpr int kStep = 16;
    static INLINE Sum zero() { return _mm256_setzero_si256(); }
    static INLINE __m256i load(const int16_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
    static INLINE __m256i load_weights(const int16_t* at) { return load(at); }
    static INLINE Sum add(Sum sum, __m256i a, __m256i b) { return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b)); }
    static INLINE void totals_of(const Sum* s, int32_t, float* out) {
        const __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(s[0], s[1]), _mm256_hadd_epi32(s[2], s[3]));
        const __m128i exact = _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
        _mm_storeu_ps(out, _mm_cvtepi32_ps(exact));
    }
};

INLINE void int16_of_int8(const uint8_t* codes, int16_t* out) {  // 32 of them
    for (int at = 0; at < 32; at += 16)
        _mm256_storeu_si256((__m256i*)(out + at), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + at))));
}
