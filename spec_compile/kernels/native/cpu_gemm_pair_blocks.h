// cpu_gemm_blocks.h by instructions for pairs of bfloat16.
//
// Codes are decoded in registers, again for each tile of rows. With many rows a segment of 8 bits is decoded once, into
// the first-level cache; 4 bits are decoded as fast as that is read.

constexpr int kPairRows = 6;  // of a tile: 24 of the 32 registers are sums
constexpr int64_t kManyRows = 24;

// What decoding takes besides the codes.
struct Decoder {
    __m512i table, low0, low1, high0, high1;
};

// kBits: of a code. A word has kSteps pairs of inputs; `decode` makes pair j of a vector of words.
template <int kBits> struct BlockCodes {
    static constexpr int kSteps = kBits == 4 ? 4 : 2;

    static INLINE Decoder decoder(const Product& p) {
        if constexpr (kBits == 4) {
            alignas(64) uint16_t numbers[32];  // twice, because the index is five bits long
            for (int code = 0; code < 32; code++) numbers[code] = bfloat16_of(p.table[code % 16]);
            Decoder decoder{};
            decoder.table = _mm512_load_si512(numbers);
            return decoder;
        } else {
            const ByteTables<false>& tables = kByteTables<false>;
            const __m512i order = _mm512_broadcast_i32x4(
                _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
            return {order, _mm512_load_si512(tables.low), _mm512_load_si512(tables.low + 64),
                    _mm512_load_si512(tables.high), _mm512_load_si512(tables.high + 64)};
        }
    }

    // Pair j of 4 bits.
    static INLINE __m512i pair(const Decoder& d, __m512i words, int j) {
        return _mm512_permutexvar_epi16(j ? _mm512_srli_epi32(words, 4 * j) : words, d.table);
    }

    // Both pairs of 8 bits.
    static INLINE void pairs(const Decoder& d, __m512i words, __m512i* out) {
        const __m512i codes = _mm512_shuffle_epi8(words, d.table), sizes = _mm512_abs_epi8(codes);
        const __m512i low = _mm512_permutex2var_epi8(d.low0, sizes, d.low1);
        __m512i high = _mm512_permutex2var_epi8(d.high0, sizes, d.high1);
        high = _mm512_mask_mov_epi8(high, _mm512_movepi8_mask(sizes), _mm512_set1_epi8(0x43));  // 128
        high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8(-128), 0xF8);  // with the sign
        out[0] = _mm512_unpacklo_epi8(low, high), out[1] = _mm512_unpackhi_epi8(low, high);
    }
};

// Words of a segment, and rows of x that are multiplied by them.
struct BlockTile {
    const uint8_t* words;
    const int32_t* x;
    int64_t column, x_stride, columns;  // bytes from a column of words to the next; their number
    __m512* kept;                       // [rows, kStrips]
    const float *scales, *seconds;      // [kStrips * kStrip]; seconds may be null
    const float* of_x;                  // of each row, `sums_stride` apart: sums of the segment
    int64_t sums_stride;
    __mmask16 lanes[kStrips];
};

// Vector i of words. With V = kStrips vectors the block is whole.
template <int V> INLINE __m512i words_at(const BlockTile& t, const uint8_t* words, int i) {
    const uint8_t* const at = words + 64 * i;
    return V == kStrips ? _mm512_loadu_si512(at) : _mm512_maskz_loadu_epi32(t.lanes[i], at);
}

template <int M, int V> INLINE void add_segments(const BlockTile& t, const __m512 (&sums)[M][V]) {
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
        const __m512 scales = _mm512_load_ps(t.scales + kStrip * i);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            __m512 kept = _mm512_fmadd_ps(sums[m][i], scales, t.kept[m * kStrips + i]);
            if (t.seconds)
                kept = _mm512_fmadd_ps(_mm512_load_ps(t.seconds + kStrip * i),
                                       _mm512_set1_ps(t.of_x[m * t.sums_stride]), kept);
            t.kept[m * kStrips + i] = kept;
        }
    }
}

template <class W, int V, int M> KERNEL void multiply_block(const BlockTile& t, const Decoder& d) {
    __m512 sums[M][V];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) sums[m][i] = _mm512_setzero_ps();
    const uint8_t* words = t.words;
    const int32_t* x = t.x;
    const int64_t column = t.column, x_stride = t.x_stride;
    for (int64_t c = t.columns; c > 0; c--, words += column, x += W::kSteps) {
        __m512i codes[V], numbers[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            __builtin_prefetch(words + 64 * i + kStreamAhead);
            codes[i] = words_at<V>(t, words, i);
        }
        if constexpr (W::kSteps == 4) {
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
#pragma GCC unroll 4
                for (int i = 0; i < V; i++) numbers[i] = W::pair(d, codes[i], j);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    const __m512i values = _mm512_set1_epi32(x[m * x_stride + j]);
#pragma GCC unroll 4
                    for (int i = 0; i < V; i++) sums[m][i] = Pairs::add(sums[m][i], numbers[i], values);
                }
            }
        } else {
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) {
                __m512i both[2];
                W::pairs(d, codes[i], both);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) {
                    sums[m][i] = Pairs::add(sums[m][i], both[0], _mm512_set1_epi32(x[m * x_stride]));
                    sums[m][i] = Pairs::add(sums[m][i], both[1], _mm512_set1_epi32(x[m * x_stride + 1]));
                }
            }
        }
    }
    add_segments<M, V>(t, sums);
}

template <class W, int V> KERNEL void multiply_block(const BlockTile& t, const Decoder& d, int64_t rows) {
    WITH_ROWS(rows, multiply_block<W, V, M>(t, d))
}

// The numbers of a segment of 8 bits: V vectors for each pair of inputs.
template <int V> KERNEL void decode_segment(const BlockTile& t, const Decoder& d, __m512i* out) {
    using W = BlockCodes<8>;
    const uint8_t* words = t.words;
    for (int64_t c = t.columns; c > 0; c--, words += t.column, out += W::kSteps * V)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            __builtin_prefetch(words + 64 * i + kStreamAhead);
            const __m512i codes = words_at<V>(t, words, i);
            __m512i both[2];
            W::pairs(d, codes, both);
            _mm512_store_si512(out + i, both[0]), _mm512_store_si512(out + V + i, both[1]);
        }
}

// `multiply_block` of numbers by `decode_segment`, with the same sums in the same order.
template <int V, int M> APART void multiply_decoded(const BlockTile& t, const __m512i* numbers, int64_t pairs) {
    __m512 sums[M][V];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) sums[m][i] = _mm512_setzero_ps();
    const int32_t* x = t.x;
    const int64_t x_stride = t.x_stride;
    for (; pairs > 0; pairs--, numbers += V, x++) {
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const __m512i values = _mm512_set1_epi32(x[m * x_stride]);
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) sums[m][i] = Pairs::add(sums[m][i], _mm512_load_si512(numbers + i), values);
        }
    }
    add_segments<M, V>(t, sums);
}

template <int V> KERNEL void multiply_decoded(const BlockTile& t, const __m512i* numbers, int64_t pairs, int64_t rows) {
    WITH_ROWS(rows, multiply_decoded<V, M>(t, numbers, pairs))
}

// panel: memory for the numbers of a segment.
template <class W, int V>
KERNEL void multiply_segment(BlockTile t, const Decoder& d, int64_t rows, __m512i* panel) {
    const int64_t tiles = (rows + kPairRows - 1) / kPairRows, size = (rows + tiles - 1) / tiles;
    const bool is_decoded = W::kSteps == 2 && rows >= kManyRows;
    if (is_decoded) decode_segment<V>(t, d, panel);
    for (int64_t m = 0; m < rows; m += size) {
        const int64_t some = std::min(size, rows - m);
        if (is_decoded) multiply_decoded<V>(t, panel, t.columns * W::kSteps, some);
        else multiply_block<W, V>(t, d, some);
        t.x += size * t.x_stride, t.kept += size * kStrips, t.of_x += size * t.sums_stride;
    }
}

// The same of a block that is not whole.
template <class W>
APART void multiply_halves(BlockTile half, const Decoder& d, int64_t rows, int64_t outputs, __m512i* panel) {
    constexpr int V = kStrips / 2;
    for (int64_t first = 0; first < outputs; first += V * kStrip) {
        multiply_segment<W, V>(half, d, rows, panel);
        half.words += 64 * V, half.kept += V, half.scales += V * kStrip;
        if (half.seconds) half.seconds += V * kStrip;
        for (int i = 0; i < V; i++) half.lanes[i] = half.lanes[V + i];
    }
}

// Outputs begin .. end of at most kChunk rows.
template <class W>
KERNEL void pair_blocks_of(const Product& p, int64_t row, int64_t begin, int64_t end, Scratch& scratch) {
    static_assert(kSegment / 2 <= kPanelSteps && kBlockOutputs == kStrip * kStrips);
    static_assert(kSegment / 2 * kStrips * sizeof(__m512i) <= Scratch::kPanelBytes);
    __m512* const kept = reinterpret_cast<__m512*>(scratch.sums);
    __m512i* const panel = reinterpret_cast<__m512i*>(scratch.panel);
    const Decoder decoder = W::decoder(p);
    const int64_t rows = std::min(kChunk, p.rows - row), segment = segment_of(p), stored = stored_inputs(p);
    const int32_t* x = static_cast<const int32_t*>(p.prepared) + row * p.x_stride / 2;
    for (int64_t o = begin; o < end;) {
        const BlockPart part = part_of(p, o, end);
        BlockTile t{};
        t.column = part.width * 4, t.x_stride = p.x_stride / 2, t.kept = kept, t.sums_stride = p.segments;
        for (int i = 0; i < kStrips; i++)
            t.lanes[i] =
                __mmask16((1u << std::max(std::min(part.count - i * kStrip, int64_t(kStrip)), int64_t(0))) - 1);
        std::memset(kept, 0, rows * kBlockOutputs * sizeof(float));
        Units units{};
        for (int64_t k = 0; k < stored; k += segment) {
            units_at(p, part, k, units);
            as_added(p, units, part.count);
            t.words = part.words + (k / (2 * W::kSteps) * part.width + part.first) * 4;
            t.x = x + k / 2, t.columns = std::min(segment, stored - k) / (2 * W::kSteps);
            t.scales = units.scales, t.seconds = p.x_sums ? units.seconds : nullptr;
            t.of_x = p.x_sums + row * p.segments + k / segment;
            if (part.count == kBlockOutputs) multiply_segment<W, kStrips>(t, decoder, rows, panel);
            else multiply_halves<W>(t, decoder, rows, part.count, panel);
        }
        finish_block(p, part, reinterpret_cast<const float*>(kept), row, rows);
        o = part.begin + part.first + part.count;
    }
}

template <class W> KERNEL void all_pair_blocks(const Product& p, int64_t begin, int64_t end, Scratch& scratch) {
    for (int64_t row = 0; row < p.rows; row += kChunk) pair_blocks_of<W>(p, row, begin, end, scratch);
}
