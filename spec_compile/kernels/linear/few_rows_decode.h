// Panels of w for few_rows_strips.h: a vector has the same two inputs (of integers four, of float32 one) of sixteen
// outputs, one in each lane of 32 bits.

constexpr int kStrip = 16;                // outputs of a vector
constexpr int kStrips = 4;                // vectors of outputs in a panel; the last of a thread may have 2
constexpr int kUnit = 64;                 // inputs, of which a panel has some times as many
constexpr int64_t kPanelInputs = 256;
constexpr int kPanelSteps = kPanelInputs / 2;

// Sixteen lines of 64 bytes, `stride` bytes apart, as columns of words: lane i of t[j] is word j of line i.
INLINE void columns_of(const uint8_t* lines, int64_t stride, __m512i* t) {
    __m512i u[4][4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const uint8_t* four = lines + 4 * i * stride;
        const __m512i a = _mm512_loadu_si512(four), b = _mm512_loadu_si512(four + stride);
        const __m512i c = _mm512_loadu_si512(four + 2 * stride), d = _mm512_loadu_si512(four + 3 * stride);
        const __m512i ab = _mm512_unpacklo_epi32(a, b), cd = _mm512_unpacklo_epi32(c, d);
        const __m512i ab2 = _mm512_unpackhi_epi32(a, b), cd2 = _mm512_unpackhi_epi32(c, d);
        u[i][0] = _mm512_unpacklo_epi64(ab, cd), u[i][1] = _mm512_unpackhi_epi64(ab, cd);
        u[i][2] = _mm512_unpacklo_epi64(ab2, cd2), u[i][3] = _mm512_unpackhi_epi64(ab2, cd2);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        const __m512i even = _mm512_shuffle_i32x4(u[0][j], u[1][j], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(u[0][j], u[1][j], 0xDD);
        const __m512i even2 = _mm512_shuffle_i32x4(u[2][j], u[3][j], 0x88);
        const __m512i odd2 = _mm512_shuffle_i32x4(u[2][j], u[3][j], 0xDD);
        t[j] = _mm512_shuffle_i32x4(even, even2, 0x88), t[8 + j] = _mm512_shuffle_i32x4(even, even2, 0xDD);
        t[4 + j] = _mm512_shuffle_i32x4(odd, odd2, 0x88), t[12 + j] = _mm512_shuffle_i32x4(odd, odd2, 0xDD);
    }
}

INLINE __mmask16 lanes_of(const Product& p, int64_t o) {
    return __mmask16((1u << std::max(std::min(p.outputs - o, int64_t(kStrip)), int64_t(0))) - 1);
}

// Numbers o .. o + 16 of an array of `outputs`, zeros beyond its end.
INLINE __m512 numbers_at(const Product& p, const void* numbers, Number type, int64_t o) {
    const __mmask16 lanes = lanes_of(p, o);
    if (type == Number::float32) return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(numbers) + o);
    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(numbers) + o);
    if (type == Number::float16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// How strips are decoded: `put` takes the columns of line `line` of a panel at input k. kBits: of a weight.

template <int kBitsOfNumber> struct NumberStrips {
    static constexpr int kBits = kBitsOfNumber;
    static INLINE void put(const Product&, int64_t, int64_t, int64_t, int line, const __m512i* t, __m512i* out) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) _mm512_store_si512(out + 16 * line + j, t[j]);
    }
};

struct IntStrips {
    static constexpr int kBits = 8;
    static INLINE void put(const Product&, int64_t, int64_t, int64_t, int line, const __m512i* t, __m512i* out) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++)
            _mm512_store_si512(out + 16 * line + j, _mm512_xor_si512(t[j], _mm512_set1_epi8(-128)));
    }
};

// The bytes of bfloat16 numbers without a sign: of 0 to 127, or of the codes of float8_e4m3fn.
template <bool kFp8> struct ByteTables {
    alignas(64) uint8_t low[128], high[128];
    constexpr ByteTables() : low(), high() {
        for (int code = 0; code < 128; code++) {
            float number = float(code);
            if (kFp8) {
                number = (code < 8 ? code & 7 : 8 + (code & 7)) * 0x1p-9f;
                for (int exponent = 1; exponent < code >> 3; exponent++) number *= 2.f;
            }
            const uint32_t bits = kFp8 && code == 127 ? 0x7FC00000u : std::bit_cast<uint32_t>(number);
            low[code] = uint8_t(bits >> 16), high[code] = uint8_t(bits >> 24);
        }
    }
};
template <bool kFp8> constexpr ByteTables<kFp8> kByteTables;

// Codes of 8 bits as bfloat16, without rounding. kFp8: float8_e4m3fn, else int8.
template <bool kFp8> struct ByteStrips {
    static constexpr int kBits = 8;
    static INLINE void put(const Product&, int64_t, int64_t, int64_t, int line, const __m512i* t, __m512i* out) {
        const ByteTables<kFp8>& tables = kByteTables<kFp8>;
        const __m512i low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
        const __m512i high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            const __m512i sizes = kFp8 ? t[j] : _mm512_abs_epi8(t[j]);
            const __m512i low = _mm512_permutex2var_epi8(low0, sizes, low1);
            __m512i high = _mm512_permutex2var_epi8(high0, sizes, high1);
            if (!kFp8) high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(sizes), _mm512_set1_epi8(0x43));  // 128
            high = _mm512_ternarylogic_epi32(high, t[j], _mm512_set1_epi8(-128), 0xF8);  // with the sign
            const __m512 first = _mm512_castsi512_ps(_mm512_unpacklo_epi8(low, high));
            const __m512 second = _mm512_castsi512_ps(_mm512_unpackhi_epi8(low, high));
            _mm512_store_ps(out + 32 * line + 2 * j, _mm512_shuffle_ps(first, second, 0x88));
            _mm512_store_ps(out + 32 * line + 2 * j + 1, _mm512_shuffle_ps(first, second, 0xDD));
        }
    }
};

// Lines of a panel whose rows are not whole, with zeros beyond the end.
INLINE void copy_of_lines(const uint8_t* lines, int64_t stride, int64_t rows, int64_t left, uint8_t* copy) {
    std::memset(copy, 0, kStrip * 64);
    for (int64_t i = 0; i < rows && left > 0; i++)
        std::memcpy(copy + 64 * i, lines + i * stride, std::min(left, int64_t(64)));
}

// Inputs k .. k + count of outputs o .. o + 16. ahead: bytes to those that come next, or 0.
template <class W>
KERNEL void decode(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, __m512i* out) {
    const int64_t first = k * W::kBits / 8, rows = std::min(p.outputs - o, int64_t(kStrip));
    const int64_t end = p.inputs * W::kBits / 8;
    const int lines = int(count * W::kBits / 512);
    alignas(64) uint8_t copy[kStrip * 64];
    for (int line = 0; line < lines; line++) {
        const uint8_t* from = p.w + o * p.row_bytes + first + 64 * line;
        int64_t stride = p.row_bytes;
        if (ahead)
            for (int i = 0; i < kStrip; i++) __builtin_prefetch(from + i * stride + ahead, 0, 2);
        if (rows < kStrip || end - first - 64 * line < 64) {
            copy_of_lines(from, stride, rows, end - first - 64 * line, copy);
            from = copy, stride = 64;
        }
        __m512i t[16];
        columns_of(from, stride, t);
        W::put(p, o, k, count, line, t, out);
    }
}
