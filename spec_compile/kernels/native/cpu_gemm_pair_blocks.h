// cpu_gemm_blocks.h by instructions for pairs of bfloat16.
//
// Codes are decoded in registers, again for each tile of rows. With many rows a segment of 8 bits is decoded once, into
// the first-level cache; 4 bits are decoded as fast as that is read.

constexpr int kPairRows = 6;  // of a tile: 24 of the 32 registers are sums
constexpr int64_t kManyRows = 24;

// How words are decoded, each into kSteps pairs of inputs: `pair` makes one of them, `pairs` makes both.

struct FourBits {
    static constexpr int kSteps = 4;
    __m512i table;

    KERNEL explicit FourBits(const Product& p) {
        alignas(64) uint16_t numbers[32];  // twice, because the index is five bits long
        for (int code = 0; code < 32; code++) numbers[code] = bfloat16_of(p.table[code % 16]);
        table = _mm512_load_si512(numbers);
    }
    INLINE __m512i pair(__m512i words, int j) const {
        return _mm512_permutexvar_epi16(j ? _mm512_srli_epi32(words, 4 * j) : words, table);
    }
};

struct EightBits {
    static constexpr int kSteps = 2;
    ByteDecoder<false> bytes;
    __m512i order;

    KERNEL explicit EightBits(const Product&) {
        order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    }
    INLINE void pairs(__m512i words, __m512i* out) const { bytes.pairs(_mm512_shuffle_epi8(words, order), out); }
};

// Words that are pairs, by `decode_segment`.
struct Decoded {
    static constexpr int kSteps = 1;
    INLINE __m512i pair(__m512i words, int) const { return words; }
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

template <class W, int V, int M> KERNEL void multiply_block(const BlockTile& t, const W& decoder) {
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
            if (W::kSteps > 1) __builtin_prefetch(words + 64 * i + kStreamAhead);
            codes[i] = words_at<V>(t, words, i);
        }
        if constexpr (W::kSteps != 2) {
#pragma GCC unroll 4
            for (int j = 0; j < W::kSteps; j++) {
#pragma GCC unroll 4
                for (int i = 0; i < V; i++) numbers[i] = decoder.pair(codes[i], j);
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
                decoder.pairs(codes[i], both);
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

template <class W, int V> KERNEL void multiply_block(const BlockTile& t, const W& decoder, int64_t rows) {
    WITH_ROWS(rows, multiply_block<W, V, M>(t, decoder))
}

// The numbers of a segment of 8 bits: V vectors for each pair of inputs.
template <int V> KERNEL void decode_segment(const BlockTile& t, const EightBits& decoder, __m512i* out) {
    const uint8_t* words = t.words;
    for (int64_t c = t.columns; c > 0; c--, words += t.column, out += 2 * V)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            __builtin_prefetch(words + 64 * i + kStreamAhead);
            __m512i both[2];
            decoder.pairs(words_at<V>(t, words, i), both);
            _mm512_store_si512(out + i, both[0]), _mm512_store_si512(out + V + i, both[1]);
        }
}

// panel: memory for the numbers of a segment.
template <class W, int V>
KERNEL void multiply_segment(BlockTile t, const W& decoder, int64_t rows, __m512i* panel) {
    if constexpr (W::kSteps == 2) {
        if (rows >= kManyRows) {
            decode_segment<V>(t, decoder, panel);
            t.words = reinterpret_cast<const uint8_t*>(panel), t.column = V * 64, t.columns *= W::kSteps;
            return multiply_segment<Decoded, V>(t, Decoded{}, rows, panel);
        }
    }
    const int64_t tiles = (rows + kPairRows - 1) / kPairRows, size = (rows + tiles - 1) / tiles;
    for (int64_t m = 0; m < rows; m += size) {
        multiply_block<W, V>(t, decoder, std::min(size, rows - m));
        t.x += size * t.x_stride, t.kept += size * kStrips, t.of_x += size * t.sums_stride;
    }
}

// The same of a block that is not whole.
template <class W>
APART void multiply_halves(BlockTile half, const W& decoder, int64_t rows, int64_t outputs, __m512i* panel) {
    constexpr int V = kStrips / 2;
    for (int64_t first = 0; first < outputs; first += V * kStrip) {
        multiply_segment<W, V>(half, decoder, rows, panel);
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
    const W decoder(p);
    const int64_t rows = std::min(kChunk, p.rows - row), segment = segment_of(p), stored = stored_inputs(p);
    const int32_t* x = static_cast<const int32_t*>(p.prepared) + row * p.x_stride / 2;
    for (int64_t o = begin; o < end;) {
        const BlockPart part = part_of(p, o, end);
        BlockTile t{};
        t.column = part.width * 4, t.x_stride = p.x_stride / 2, t.kept = kept, t.sums_stride = p.segments;
        for (int i = 0; i < kStrips; i++)
            t.lanes[i] = first_lanes(part.count - i * kStrip);
        std::memset(kept, 0, rows * kBlockOutputs * sizeof(float));
        Units units{};
        for (int64_t k = 0; k < stored; k += segment) {
            units_at<false>(p, part, k, units);
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
