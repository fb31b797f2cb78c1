// Products by instructions for pairs of bfloat16 and fours of 8 bits, and of float32: sixteen outputs in the lanes of a
// vector.
//
// A panel of 64 outputs and at most 256 inputs is decoded into the L1 cache. All rows are
// multiplied by it, and meanwhile the next panel is fetched from memory. Sums need no totals across lanes. Each sum of a
// row runs over the inputs in ascending order, whatever the number of rows.

// Panels of w: a vector has the same two inputs (of integers four, of float32 one) of sixteen
// outputs, one in each lane of 32 bits.

constexpr int kStrip = 16;                // outputs of a vector
constexpr int kStrips = 4;                // vectors of outputs in a panel; the last of a thread may have 2
constexpr int kUnit = 64;                 // inputs, of which a panel has some times as many
constexpr int64_t kPanelInputs = 256;
constexpr int kPanelSteps = kPanelInputs / 2;

// Numbers o .. o + 16 of an array of `outputs`, zeros beyond its end.
INLINE __m512 numbers_at(const Product& p, const void* numbers, Number type, int64_t o) {
    const __mmask16 lanes = first_lanes(p.outputs - o);
    if (type == Number::float32) return _mm512_maskz_loadu_ps(lanes, static_cast<const float*>(numbers) + o);
    const __m256i halves = _mm256_maskz_loadu_epi16(lanes, static_cast<const uint16_t*>(numbers) + o);
    if (type == Number::float16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// How strips are decoded: `put` takes the columns of a line of a panel. kBits: of a weight.

// Numbers as they are, and int8 plus 128.
template <int kBitsOfNumber> struct WordStrips {
    static constexpr int kBits = kBitsOfNumber;
    static constexpr int kVectors = 16;  // of a line
    static INLINE void put(const Floats* t, __m512i* out) {
        const __m512i flips = _mm512_set1_epi8(kBits == 8 ? -128 : 0);
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) _mm512_store_si512(out + j, _mm512_xor_si512((__m512i)t[j], flips));
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

// Codes of 8 bits as bfloat16, without rounding: of each 8 bytes the first four in out[0]. kFp8: float8_e4m3fn, else
// int8.
template <bool kFp8> struct ByteDecoder {
    __m512i low0, low1, high0, high1;

    INLINE ByteDecoder() {
        const ByteTables<kFp8>& tables = kByteTables<kFp8>;
        low0 = _mm512_load_si512(tables.low), low1 = _mm512_load_si512(tables.low + 64);
        high0 = _mm512_load_si512(tables.high), high1 = _mm512_load_si512(tables.high + 64);
    }
    INLINE void pairs(__m512i codes, __m512i* out) const {
        const __m512i sizes = kFp8 ? codes : _mm512_abs_epi8(codes);
        const __m512i low = _mm512_permutex2var_epi8(low0, sizes, low1);
        __m512i high = _mm512_permutex2var_epi8(high0, sizes, high1);
        if (!kFp8) high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(sizes), _mm512_set1_epi8(0x43));  // 128
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xF8);  // with the sign
        out[0] = _mm512_unpacklo_epi8(low, high), out[1] = _mm512_unpackhi_epi8(low, high);
    }
};

template <bool kFp8> struct ByteStrips {
    static constexpr int kBits = 8;
    static constexpr int kVectors = 32;
    static INLINE void put(const Floats* t, __m512i* out) {
        const ByteDecoder<kFp8> decoder;
#pragma GCC unroll 16
        for (int j = 0; j < 16; j++) {
            __m512i both[2];
            decoder.pairs((__m512i)t[j], both);
            const __m512 first = _mm512_castsi512_ps(both[0]), second = _mm512_castsi512_ps(both[1]);
            _mm512_store_ps(out + 2 * j, _mm512_shuffle_ps(first, second, 0x88));
            _mm512_store_ps(out + 2 * j + 1, _mm512_shuffle_ps(first, second, 0xDD));
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
        Floats t[kStrip];
#pragma GCC unroll 16
        for (int i = 0; i < kStrip; i++) t[i] = vector_at<Floats>(from + i * stride);
        transpose(t);  // lane i of t[j] is word j of line i
        W::put(t, out + W::kVectors * line);
    }
}

// Sums of strips.

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

// Steps of a panel, and rows of x that are multiplied by it.
template <class S> struct StripTile {
    const __m512i* w;           // [kStrips, kPanelSteps]
    const int32_t* x;           // [rows, x_stride]
    int64_t x_stride, steps;
    __m512i* kept;              // [rows, kStrips]
    const uint8_t *ahead, *end;  // what to fetch: at each `turn` steps a row of `row_bytes`, of which `ahead_bytes`
    int64_t turn, row_bytes, ahead_bytes;
};

template <class S, int V, int M> KERNEL void multiply_strips(const StripTile<S>& t) {
    typename S::Sum sums[M][V];
    typename S::Sum* const kept = reinterpret_cast<typename S::Sum*>(t.kept);
#pragma GCC unroll 6
    for (int j = 0; j < M; j++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) sums[j][i] = kept[j * kStrips + i];
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
        for (int i = 0; i < V; i++) kept[j * kStrips + i] = sums[j][i];
}

template <class S, int V> KERNEL void multiply_strips(const StripTile<S>& t, int64_t rows) {
    WITH_ROWS(rows, multiply_strips<S, V, M>(t))
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

// The outputs o .. o + 64 of rows, as far as there are any: sums times scales plus bias, rounded once.
template <class S>
KERNEL void finish_strips(const Product& p, const __m512i* kept, int64_t row, int64_t rows, int64_t o, int64_t end) {
    const bool codes = p.weights == Weights::int8 || p.weights == Weights::fp8;
    for (int i = 0; i < kStrips && o < end; i++, o += kStrip) {
        const int64_t count = p.outputs - o;
        const __m512 scales = codes ? numbers_at(p, p.scales, p.scale_type, o) : _mm512_set1_ps(1.f);
        const __m512 biases = p.bias ? numbers_at(p, p.bias, p.dtype, o) : _mm512_setzero_ps();
        for (int64_t r = 0; r < rows; r++) {
            const typename S::Sum sum = reinterpret_cast<const typename S::Sum*>(kept)[r * kStrips + i];
            const __m512 scale = _mm512_set1_ps(p.row_scales ? p.row_scales[row + r] : 1.f);
            const __m512 scaled = _mm512_mul_ps(_mm512_mul_ps(S::floats(sum), scales), scale);
            float numbers[kAtOnce];
            put(numbers, scaled + biases);
            put_outputs(p, (row + r) * p.outputs + o, numbers, count);
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
    const int64_t panels = (padded + largest - 1) / largest;
    const int64_t most = (padded / kUnit + panels - 1) / panels * kUnit;
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
            StripTile<S> t{};
            t.w = panel, t.x = x + k / S::kInputs, t.x_stride = x_stride, t.steps = count / S::kInputs, t.kept = kept;
            t.turn = std::max(t.steps / (kStrips * kStrip), int64_t(1));
            t.row_bytes = p.row_bytes, t.ahead_bytes = bytes;
            if (rows > kFewRows) {
                t.ahead = p.w + o * p.row_bytes + k * W::kBits / 8 + ahead;
                t.end = t.ahead + kStrips * kStrip * p.row_bytes;
            }
            rows_times_strips<S>(t, rows, end - o);
        }
        finish_strips<S>(p, kept, row, rows, o, end);
    }
}
