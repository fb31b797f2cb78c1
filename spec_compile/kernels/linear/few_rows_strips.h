// Products by instructions for pairs of bfloat16 and fours of 8 bits, and of float32: sixteen outputs in the lanes of a
// vector.
//
// A panel of 64 outputs and at most 256 inputs is decoded into the L1 cache by few_rows_decode.h. All rows are
// multiplied by it, and meanwhile the next panel is fetched from memory. Sums need no totals across lanes. Each sum of a
// row runs over the inputs in ascending order, whatever the number of rows.

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

template <class S, class W> KERNEL void all_strips_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    for (int64_t row = 0; row < p.rows; row += kChunk) strips_of<S, W>(p, row, begin, end, scratch);
}

KERNEL void pairs_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    switch (p.weights) {
        case Weights::bfloat16: return all_strips_of<Pairs, NumberStrips<16>>(p, begin, end, scratch);
        case Weights::int8: return all_strips_of<Pairs, ByteStrips<false>>(p, begin, end, scratch);
        default: return all_strips_of<Pairs, ByteStrips<true>>(p, begin, end, scratch);
    }
}

KERNEL void singles_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    all_strips_of<Singles, NumberStrips<32>>(p, begin, end, scratch);
}

KERNEL void fours_of(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    all_strips_of<Fours, IntStrips>(p, begin, end, scratch);
}
