// Products by instructions for pairs of bfloat16 and fours of 8 bits, and of float32: sixteen outputs in the lanes of a
// vector.
//
// A panel of 64 outputs and at most 256 inputs is decoded into the L1 cache: a vector has the same two inputs (or
// four, or one) of sixteen outputs, so that sums need no totals across lanes, and scales of groups are vectors. All rows are
// multiplied by it. Each sum of a row runs over the inputs in ascending order, whatever the number of rows.
// Meanwhile the next panel is fetched from memory.

constexpr int kStrip = 16;                // outputs of a vector
constexpr int kStrips = 4;                // vectors of outputs in a panel; the last of a thread may have 2
constexpr int kUnit = 64;                 // inputs, of which a panel has some times as many
constexpr int64_t kPanelInputs = 256;
constexpr int kPanelSteps = kPanelInputs / 2;
constexpr int kStripRows = 6;             // rows of x in a tile: 24 of the 32 registers are sums
constexpr int64_t kFewRows = 4;           // rows with which decoding takes longer than products

// Sums of products of bfloat16.
struct Pairs {
    typedef __m512 Sum;
    static constexpr int kInputs = 2;
    static INLINE Sum first(int32_t) { return _mm512_setzero_ps(); }
    static INLINE Sum add(Sum sum, __m512i w, __m512i x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
    static INLINE __m512 floats(Sum sum) { return sum; }
};

struct Singles {
    typedef __m512 Sum;
    static constexpr int kInputs = 1;
    static INLINE Sum first(int32_t) { return _mm512_setzero_ps(); }
    static INLINE Sum add(Sum sum, __m512i w, __m512i x) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), sum);
    }
    static INLINE __m512 floats(Sum sum) { return sum; }
};

// Exact sums of products of w plus 128, without a sign, and x. They begin with what this is too much.
struct Fours {
    typedef __m512i Sum;
    typedef int8_t Element;
    static constexpr int kInputs = 4;
    static INLINE Sum first(int32_t of_row) { return _mm512_set1_epi32(-128 * of_row); }
    // With the intrinsic GCC 12 copies sums between registers, and has too few.
    static INLINE Sum add(Sum sum, __m512i w, __m512i x) {
        __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
        return sum;
    }
    static INLINE __m512 floats(Sum sum) { return _mm512_cvtepi32_ps(sum); }
};

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

INLINE __m512 floats_of_halves(__m512i words, bool upper) {  // bfloat16
    const __m512i bits = upper ? words : _mm512_slli_epi32(words, 16);
    return _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(int(0xFFFF0000))));
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
    static constexpr bool kScaled = false;
    static INLINE void put(const Product&, int64_t, int64_t, int64_t, int line, const __m512i* t, __m512i* out) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) _mm512_store_si512(out + 16 * line + j, t[j]);
    }
};

struct IntStrips {
    static constexpr int kBits = 8;
    static constexpr bool kScaled = false;
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
    static constexpr bool kScaled = false;
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

// Nibbles, see `Nibbles` in few_rows_panels.h. Numbers of codes are exact, and sums of groups are scaled.
template <Units kUnits> struct NibbleStrips {
    static constexpr int kBits = 4;
    static constexpr bool kScaled = true;
    static constexpr bool kHalf = kUnits == Units::centred_float16 || kUnits == Units::float16;
    static constexpr bool kCentred = kUnits == Units::centred_float16 || kUnits == Units::centred_bfloat16;
    static constexpr bool kZeros = kUnits == Units::bfloat16 || kUnits == Units::float16;

    static INLINE __m512 half(__m512i words, bool upper) {
        if (!kHalf) return floats_of_halves(words, upper);
        return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(upper ? _mm512_srli_epi32(words, 16) : words));
    }

    static INLINE __m512i units(const Product& p, int64_t o, int64_t row) {
        const int32_t* at = static_cast<const int32_t*>(p.scales) + row * p.outputs + o;
        __builtin_prefetch(at + kStrips * kStrip);  // of the next outputs: rows of units lie far apart
        return _mm512_maskz_loadu_epi32(lanes_of(p, o), at);
    }

    // The scales of outputs o .. o + 16 in the group of input k.
    static INLINE __m512 scales(const Product& p, int64_t o, int64_t k) {
        const int64_t group = k / p.group;
        if (kZeros) return half(units(p, o, group), false);
        const int64_t pair = p.group < 256 ? group / 2 : group;  // two groups have their scales side by side
        const bool second = p.group < 256 && group % 2;
        if (kCentred) {
            const __m512 small = _mm512_set1_ps(kHalf ? 0x1p-9f : 0x1p-65f);
            return _mm512_mul_ps(_mm512_mul_ps(half(units(p, o, pair), second), small), small);
        }
        const float* both = static_cast<const float*>(p.scales) + ((1 + pair) * p.outputs + o) * 2;
        __builtin_prefetch(both + 2 * kStrips * kStrip), __builtin_prefetch(both + 2 * kStrips * kStrip + 16);
        const uint64_t lanes = (uint64_t(1) << 2 * std::min(p.outputs - o, int64_t(kStrip))) - 1;
        const __m512 first = _mm512_maskz_loadu_ps(__mmask16(lanes), both);
        const __m512 last = _mm512_maskz_loadu_ps(__mmask16(lanes >> 16), both + 16);
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        return _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(second)), last);
    }

    // bfloat16 numbers of the codes, twice; with zero points of codes minus these, whose last five bits are the index.
    static INLINE __m512i table(const Product& p) {
        alignas(64) uint16_t numbers[32];
        for (int code = 0; code < 32; code++) {
            const float number = kZeros ? float(code < 16 ? code : code - 32) : float(code % 16 - 8);
            numbers[code] = bfloat16_of(
                kUnits == Units::table ? static_cast<const float*>(p.scales)[code % 16] : number);
        }
        return _mm512_load_si512(numbers);
    }

    // The zero points of a group, in both halves of each lane.
    static INLINE __m512i zeros(const Product& p, int64_t o, int64_t group) {
        const __m512 added = half(units(p, o, group), true);
        const __m512i zero = _mm512_cvtps_epi32(_mm512_sub_ps(_mm512_set1_ps(kHalf ? -1024.f : -128.f), added));
        const __m512i low = _mm512_and_si512(zero, _mm512_set1_epi32(0xFFFF));
        return _mm512_or_si512(low, _mm512_slli_epi32(zero, 16));
    }

    static INLINE void put(const Product& p, int64_t o, int64_t k, int64_t count, int line, const __m512i* t,
                           __m512i* out) {
        const __m512i numbers = table(p), four = _mm512_set1_epi32(0x000F000F);
        const int from_nibble = p.group == 32 ? 32 : 64, from_line = p.group == 32 ? 128 : 32;
        for (int j = 0; j < 4; j++) {
            const int64_t input = from_nibble * j + from_line * line;
            if (input >= count) return;
            __m512i* const at = out + input / 2;
            const __m512i bits = _mm512_set1_epi32(p.turn + 4 * j);
            const __m512i zero = kZeros ? zeros(p, o, (k + input) / p.group) : _mm512_setzero_si512();
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                __m512i codes = _mm512_rorv_epi32(t[i], bits);
                if (kZeros) codes = _mm512_sub_epi16(_mm512_and_si512(codes, four), zero);
                _mm512_store_si512(at + i, _mm512_permutexvar_epi16(codes, numbers));
            }
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
    const int64_t end = W::kScaled ? p.row_bytes : p.inputs * W::kBits / 8;
    // Of nibbles, columns that are 64 or more apart share a line.
    const int lines = W::kScaled ? (p.group == 32 && count <= 128 ? 1 : 2) : int(count * W::kBits / 512);
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

// Steps of a panel, and rows of x that are multiplied by it.
template <class S> struct StripTile {
    const __m512i* w;           // [kStrips, kPanelSteps]
    const int32_t* x;           // [rows, x_stride]
    int64_t x_stride, steps;
    __m512i* kept;              // [rows, kStrips]
    const __m512* scales;       // [kStrips] of these steps, or null
    const uint8_t *ahead, *end;  // what to fetch: at each `turn` steps a row of `row_bytes`, of which `ahead_bytes`
    int64_t turn, row_bytes, ahead_bytes;
};

template <class S, int V, int M> KERNEL void multiply_strips(const StripTile<S>& t) {
    typename S::Sum sums[M][V];
    typename S::Sum* const kept = reinterpret_cast<typename S::Sum*>(t.kept);
#pragma GCC unroll 6
    for (int j = 0; j < M; j++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) sums[j][i] = t.scales ? S::first(0) : kept[j * kStrips + i];
    const uint8_t* ahead = t.ahead;
    const __m512i* w = t.w;
    const int32_t* x = t.x;
    const int64_t x_stride = t.x_stride;
    int64_t turn = 1;  // steps until the next row is fetched
    for (int64_t steps = t.steps; steps > 0; steps--, w++, x++) {
        if (--turn == 0) {
            turn = t.turn;
            for (int64_t at = 0; at < t.ahead_bytes && ahead < t.end; at += 64) __builtin_prefetch(ahead + at, 0, 2);
            ahead += t.row_bytes;
        }
        __m512i weights[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) weights[i] = _mm512_load_si512(w + i * kPanelSteps);
#pragma GCC unroll 6
        for (int j = 0; j < M; j++) {
            const __m512i values = _mm512_set1_epi32(x[j * x_stride]);
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) sums[j][i] = S::add(sums[j][i], weights[i], values);
        }
    }
#pragma GCC unroll 6
    for (int j = 0; j < M; j++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            const int at = j * kStrips + i;
            if constexpr (S::kInputs == 2) {
                if (t.scales) sums[j][i] = _mm512_fmadd_ps(sums[j][i], t.scales[i], kept[at]);
            }
            kept[at] = sums[j][i];
        }
}

template <class S, int V> KERNEL void multiply_strips(const StripTile<S>& t, int64_t rows) {
    switch (rows) {
        case 1: return multiply_strips<S, V, 1>(t);
        case 2: return multiply_strips<S, V, 2>(t);
        case 3: return multiply_strips<S, V, 3>(t);
        case 4: return multiply_strips<S, V, 4>(t);
        case 5: return multiply_strips<S, V, 5>(t);
        case 6: return multiply_strips<S, V, 6>(t);
    }
}

// All rows of a chunk times a segment of a panel. Each tile fetches a part of what comes next.
template <class S> KERNEL void rows_times_strips(StripTile<S> t, int64_t rows, int64_t outputs) {
    const int64_t tiles = (rows + kStripRows - 1) / kStripRows, size = (rows + tiles - 1) / tiles;
    const int64_t bytes = t.ahead_bytes, part = (bytes / 64 + tiles - 1) / tiles * 64;
    for (int64_t m = 0, at = 0; m < rows; m += size, at += part, t.ahead += part) {
        t.ahead_bytes = std::max(std::min(part, bytes - at), int64_t(0));
        if (outputs > kStrip * kStrips / 2) multiply_strips<S, kStrips>(t, std::min(size, rows - m));
        else multiply_strips<S, kStrips / 2>(t, std::min(size, rows - m));
        t.x += size * t.x_stride, t.kept += size * kStrips;
    }
}

// The outputs o .. o + 64 of rows, as far as `lanes_of` has them: sums times scales plus bias, rounded once.
template <class S>
KERNEL void finish_strips(const Product& p, const __m512i* kept, int64_t row, int64_t rows, int64_t o, int64_t end) {
    const bool codes = p.weights == Weights::int8 || p.weights == Weights::fp8;
    for (int i = 0; i < kStrips && o < end; i++, o += kStrip) {
        const __mmask16 lanes = lanes_of(p, o);
        const __m512 scales = codes ? numbers_at(p, p.scales, p.scale_type, o) : _mm512_set1_ps(1.f);
        const __m512 biases = p.bias ? numbers_at(p, p.bias, p.dtype, o) : _mm512_setzero_ps();
        for (int64_t r = 0; r < rows; r++) {
            const typename S::Sum sum = reinterpret_cast<const typename S::Sum*>(kept)[r * kStrips + i];
            const __m512 scale = _mm512_set1_ps(p.row_scales ? p.row_scales[row + r] : 1.f);
            const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(S::floats(sum), scales), scale);
            const __m512 numbers = _mm512_add_ps(scaled, biases);
            const int64_t at = (row + r) * p.outputs + o;
            if (p.dtype == Number::float32) _mm512_mask_storeu_ps(static_cast<float*>(p.out) + at, lanes, numbers);
            else _mm256_mask_storeu_epi16(static_cast<uint16_t*>(p.out) + at, lanes,
                                          (__m256i)_mm512_cvtneps_pbh(numbers));
        }
    }
}

// Outputs begin .. end of at most kChunk rows.
template <class S, class W>
KERNEL void strips_of(const Product& p, int64_t row, int64_t begin, int64_t end, Scratch& scratch) {
    static_assert(kStrips * kPanelSteps * 64 <= Scratch::kPanelBytes && kChunk * kStrips * 64 <= Scratch::kSumBytes);
    __m512i* const panel = reinterpret_cast<__m512i*>(scratch.panel);
    __m512i* const kept = reinterpret_cast<__m512i*>(scratch.sums);
    const int64_t rows = std::min(kChunk, p.rows - row), x_stride = p.x_stride / S::kInputs, padded = p.padded();
    const int32_t* x = static_cast<const int32_t*>(p.prepared) + row * x_stride;
    const int64_t largest = std::min(kPanelInputs, int64_t(kPanelSteps * S::kInputs));
    const int64_t panels = (padded + largest - 1) / largest;  // of one size if nibbles do not say which
    const int64_t most = W::kScaled ? kPanelInputs : (padded / kUnit + panels - 1) / panels * kUnit;
    const int64_t segment = W::kScaled ? std::min(p.group, kPanelInputs) : most;
    for (int64_t o = begin; o < end; o += kStrips * kStrip) {
        for (int64_t r = 0; r < rows; r++)
            for (int i = 0; i < kStrips; i++)
                reinterpret_cast<typename S::Sum*>(kept)[r * kStrips + i] =
                    S::first(p.row_sums ? p.row_sums[row + r] : 0);
        for (int64_t k = 0; k < padded; k += most) {
            const int64_t count = std::min(most, padded - k), bytes = most * W::kBits / 8;
            const int64_t ahead = k + most < padded ? bytes : kStrips * kStrip * p.row_bytes - k * W::kBits / 8;
            for (int i = 0; i < kStrips && o + i * kStrip < end; i++)
                decode<W>(p, o + i * kStrip, k, count, rows <= kFewRows ? ahead : 0, panel + i * kPanelSteps);
            const int64_t whole = count / S::kInputs / (kStrips * kStrip);
            const int64_t turn = whole && (!W::kScaled || count == most) ? whole : 1;  // segments have whole turns
            StripTile<S> t{panel, x + k / S::kInputs, x_stride, 0, kept, nullptr, nullptr, nullptr, turn,
                           p.row_bytes, bytes};
            if (rows > kFewRows) {
                t.ahead = p.w + o * p.row_bytes + k * W::kBits / 8 + ahead;
                t.end = t.ahead + kStrips * kStrip * p.row_bytes;
            }
            for (int64_t at = 0; at < count; at += segment) {
                __m512 scales[kStrips];
                t.steps = std::min(segment, count - at) / S::kInputs;
                if constexpr (W::kScaled) {
                    for (int i = 0; i < kStrips && o + i * kStrip < end; i++)
                        scales[i] = W::scales(p, o + i * kStrip, k + at);
                    t.scales = scales;
                }
                rows_times_strips<S>(t, rows, end - o);
                t.w += t.steps, t.x += t.steps;
                t.ahead += t.steps / turn * p.row_bytes;
            }
        }
        finish_strips<S>(p, kept, row, rows, o, end);
    }
}

template <class S, class W> KERNEL void all_strips_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    for (int64_t row = 0; row < p.rows; row += kChunk) strips_of<S, W>(p, row, begin, end, scratch);
}

KERNEL void pairs_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    switch (p.weights) {
        case Weights::bfloat16: return all_strips_of<Pairs, NumberStrips<16>>(p, begin, end, scratch);
        case Weights::int8: return all_strips_of<Pairs, ByteStrips<false>>(p, begin, end, scratch);
        case Weights::nibbles: break;
        default: return all_strips_of<Pairs, ByteStrips<true>>(p, begin, end, scratch);
    }
    switch (p.units) {
        case Units::centred_bfloat16:
            return all_strips_of<Pairs, NibbleStrips<Units::centred_bfloat16>>(p, begin, end, scratch);
        case Units::centred_float16:
            return all_strips_of<Pairs, NibbleStrips<Units::centred_float16>>(p, begin, end, scratch);
        case Units::bfloat16: return all_strips_of<Pairs, NibbleStrips<Units::bfloat16>>(p, begin, end, scratch);
        case Units::float16: return all_strips_of<Pairs, NibbleStrips<Units::float16>>(p, begin, end, scratch);
        case Units::table: return all_strips_of<Pairs, NibbleStrips<Units::table>>(p, begin, end, scratch);
    }
}

KERNEL void singles_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    all_strips_of<Singles, NumberStrips<32>>(p, begin, end, scratch);
}

KERNEL void fours_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    all_strips_of<Fours, IntStrips>(p, begin, end, scratch);
}
