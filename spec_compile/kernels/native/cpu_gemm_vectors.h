// Numbers and vectors of AVX2 or AVX-512 for products: what numbers.h does not have.

constexpr int kMostRows = kLanes == 16 ? 6 : 3;  // rows of x in a tile of 4 outputs: three quarters of the registers

// Single numbers.

INLINE float number_at(const void* numbers, Number type, int64_t at) {
    if (type == Number::float32) return static_cast<const float*>(numbers)[at];
    const uint16_t half = static_cast<const uint16_t*>(numbers)[at];
    return type == Number::bfloat16 ? float_of(half) : _cvtsh_ss(half);
}

INLINE float rounded_bfloat16(float number) {
    return number != number ? number : float_of_bits(rounded_bits(bits_of(number)) & 0xFFFF0000u);
}

// To the nearest integer of int8, ties to even; NaN, whose row has the scale NaN, to the least.
INLINE float rounded_int8(float number) {
    const float magic = 0x1.8p23f, nearest = number + magic - magic;
    return nearest > 127.f ? 127.f : nearest > -128.f ? nearest : -128.f;
}

// To the nearest number of float8_e4m3fn, ties to even, at most 448.
INLINE float rounded_fp8(float number) {
    const float size = std::fabs(number), clamped = size > 448.f ? 448.f : size;
    const uint32_t bits = bits_of(clamped);
    const float normal = float_of_bits((bits + 0x7FFFF + (bits >> 20 & 1)) & 0xFFF00000u);
    const float magic = 0x1.8p14f, subnormal = clamped + magic - magic;  // whole numbers of two to -9
    return std::copysign(clamped < 0x1p-6f ? subnormal : normal, number);
}

// Vectors.

typedef int16_t Shorts __attribute__((vector_size(2 * LANES)));

INLINE Floats times(Floats a, Floats b) { return VECTOR(mul_ps)(a, b); }
INLINE Floats to_bfloat16(Floats v) { return (Floats)(rounded_bits((Words)v) & 0xFFFF0000u); }
INLINE Floats to_float16(Floats v) {
    return VECTOR(cvtph_ps)(VECTOR(cvtps_ph)(v, _MM_FROUND_TO_NEAREST_INT));
}

INLINE __m128i bytes_at(const uint8_t* codes) {
    return LEVEL == 1 ? _mm_loadl_epi64((const __m128i*)codes) : _mm_loadu_si128((const __m128i*)codes);
}

INLINE Floats floats_of_int8(const uint8_t* codes) {
    return VECTOR(cvtepi32_ps)(VECTOR(cvtepi8_epi32)(bytes_at(codes)));
}

// The numbers over 256: float8_e4m3fn with another bit of exponent is a float16, subnormal numbers too;
// its largest code is NaN.
INLINE Floats floats_of_fp8(const uint8_t* codes) {
    const Shorts halves = (Shorts)HALF_VECTOR(cvtepi8_epi16)(bytes_at(codes)) << 7 & short(0xBF80);
    const HalfPacked largest = HALF_VECTOR(set1_epi16)(0x3F80);
    const Shorts is_nan = (Shorts)HALF_VECTOR(cmpeq_epi16)((HalfPacked)halves & largest, largest);
    return VECTOR(cvtph_ps)((HalfPacked)(halves | (is_nan & 0x7E00)));
}

// Byte `place` of each word, an int8.
INLINE Floats floats_of_bytes(Ints words, int place) {
    return __builtin_convertvector(words << (24 - 8 * place) >> 24, Floats);
}

// As many of the first lanes, which may be more than there are, or fewer than none.
#if LEVEL > 1
INLINE __mmask16 first_lanes(int64_t count) {
    return __mmask16((1u << std::clamp(count, int64_t(0), int64_t(kLanes))) - 1);
}
#endif

// Words in the first `count` lanes, zeros in others.
INLINE Ints some_ints(const uint8_t* words, int64_t count) {
#if LEVEL == 1
    return (Ints)_mm256_maskload_epi32(reinterpret_cast<const int*>(words), (__m256i)(lanes() < int(count)));
#else
    return (Ints)_mm512_maskz_loadu_epi32(first_lanes(count), words);
#endif
}

// The numbers of codes of 4 bits.
struct Table {
    Floats numbers[16 / LANES];
};

INLINE Table table_at(const float* numbers) {
    Table table;
    for (int i = 0; i < 16 / kLanes; i++) table.numbers[i] = load(numbers + i * kLanes);
    return table;
}

// The numbers of the lowest four bits of each word.
INLINE Floats numbers_of(const Table& table, Ints codes) {
#if LEVEL == 1
    const Floats low = _mm256_permutevar8x32_ps(table.numbers[0], (__m256i)codes);
    const Floats high = _mm256_permutevar8x32_ps(table.numbers[1], (__m256i)codes);
    return _mm256_blendv_ps(low, high, (Floats)(codes << 28));
#else
    return _mm512_permutexvar_ps((__m512i)codes, table.numbers[0]);
#endif
}

constexpr int kAtOnce = 16;  // outputs that are written at once

template <class Element> INLINE void copy(const Element* numbers, int64_t count, Element* out) {
    if (count == kAtOnce) std::memcpy(out, numbers, kAtOnce * sizeof(Element));
    else for (int64_t i = 0; i < count; i++) out[i] = numbers[i];
}

// Write outputs [count], of the memory of kAtOnce, rounded once: from the `at`-th on.
INLINE void put_outputs(const Product& p, int64_t at, const float* numbers, int64_t count) {
    float* const floats = static_cast<float*>(p.out) + at;
    uint16_t* const halves = static_cast<uint16_t*>(p.out) + at;
#if LEVEL == 4
    const __m512 all = load(numbers);
    if (p.dtype == Number::float32) _mm512_mask_storeu_ps(floats, first_lanes(count), all);
    else _mm256_mask_storeu_epi16(halves, first_lanes(count), (__m256i)_mm512_cvtneps_pbh(all));
#else
    if (p.dtype == Number::float32) return copy(numbers, count, floats);
    uint16_t rounded[kAtOnce];
    for (int i = 0; i < kAtOnce; i++) rounded[i] = bfloat16_of(numbers[i]);
    copy(rounded, count, halves);
#endif
}

// How tiles are summed: an Element of prepared rows, and a Weight of panels or where it lies, of which a vector is
// multiplied and added at once.

struct FloatSums {
    typedef float Element, Weight;
    typedef Floats Sum;
    static constexpr int kStep = kLanes;
    static INLINE Floats load(const float* at) { return vector_at<Floats>(at); }
    static INLINE Sum add(Sum sum, Floats a, Floats b) { return fma(a, b, sum); }
};

struct HalfSums : FloatSums {  // weights of bfloat16 are not copied
    typedef uint16_t Weight;
    using FloatSums::load;
    static INLINE Floats load(const uint16_t* at) { return ::load(at); }
};

struct IntSums {
    typedef int16_t Element, Weight;
    typedef Ints Sum;
    static constexpr int kStep = 2 * kLanes;
    static INLINE Packed load(const int16_t* at) { return vector_at<Packed>(at); }
    static INLINE Sum add(Sum sum, Packed a, Packed b) {
#if LEVEL == 4  // not by the intrinsic, see `Fours`
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
#else
        const Packed products = VECTOR(madd_epi16)(a, b);
        // Not by +: the compiler would add products of several steps first, and keep these in memory meanwhile.
        __asm__("vpaddd %1, %0, %0" : "+v"(sum) : "v"(products));
        return sum;
#endif
    }
};

// Sums of neighbouring lanes of a and b, or with AVX-512 of lanes that are two apart.
template <class Sum> INLINE Sum pair_sums(Sum a, Sum b) {
#if LEVEL == 1
    return (Sum)_mm256_shuffle_ps((Floats)a, (Floats)b, 0x88) + (Sum)_mm256_shuffle_ps((Floats)a, (Floats)b, 0xDD);
#else
    return (Sum)_mm512_unpacklo_ps((Floats)a, (Floats)b) + (Sum)_mm512_unpackhi_ps((Floats)a, (Floats)b);
#endif
}

// The totals of four sums.
template <class Sum> INLINE void totals_of(const Sum* s, float* out) {
    typedef decltype(s[0][0] + s[0][0]) Number;
    typedef Number Four __attribute__((vector_size(16)));
    const Sum ab = pair_sums(s[0], s[1]), cd = pair_sums(s[2], s[3]);
#if LEVEL == 1
    const Floats four = (Floats)pair_sums(ab, cd);
    const Four total = (Four)_mm256_castps256_ps128(four) + (Four)_mm256_extractf128_ps(four, 1);
#else
    typedef Number Eight __attribute__((vector_size(32)));
    const Sum low = (Sum)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd);
    const Floats four = (Floats)(low + (Sum)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    const __m256 two = (__m256)((Eight)_mm512_castps512_ps256(four) + (Eight)_mm512_extractf32x8_ps(four, 1));
    const Four total = (Four)_mm256_castps256_ps128(two) + (Four)_mm256_extractf128_ps(two, 1);
#endif
    const auto floats = __builtin_convertvector(total, float __attribute__((vector_size(16))));
    std::memcpy(out, &floats, sizeof floats);
}
