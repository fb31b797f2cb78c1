// cpu_gemm_blocks.h for rows of bfloat16 and codes that stand for whole numbers, by instructions for pairs of 16 bits.
//
// A segment of a row is rounded to multiples of a power of two, so that its largest number is 16,384 to 32,640 of them.
// Numbers of at least a 128th of the largest stay as they are. Sums of a segment are exact. Codes are decoded in
// registers, for each tile of rows again.

constexpr int kPairRows = kLanes == 16 ? 6 : 4;  // of a tile: 24 of 32 registers, or 8 of 16, are sums
constexpr int vectors_of(int rows) { return kLanes == 16 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }  // of a tile

// How words are decoded, each into kSteps pairs of inputs.

struct FourBits {  // codes are too large by 8, see `prepare_pairs`
    static constexpr int kSteps = 4;
    static INLINE Packed pair(Packed words, int j) {
        return j == 3 ? VECTOR(srli_epi16)(words, 12) : (Packed)((Words)words >> (4 * j) & 0x000F000Fu);
    }
};

struct EightBits {  // bytes 0 and 2 are a pair, and 1 and 3
    static constexpr int kSteps = 2;
    static INLINE Packed pair(Packed words, int j) {
        return VECTOR(srai_epi16)(j ? words : VECTOR(slli_epi16)(words, 8), 8);
    }
};

// A row of whole numbers, and its segments.
KERNEL void prepare_pairs(const Product& p, int64_t row, int16_t* out) {
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * p.inputs;
    const int64_t segment = segment_of(p), stored = stored_inputs(p);
    Segment* made = p.x_segments + row * p.segments;
    std::memset(out + p.inputs, 0, (p.padded() - p.inputs) * sizeof *out);
    for (int64_t k = 0; k < stored; k += segment) {
        const int64_t end = std::min(k + segment, p.inputs);
        int largest = 0, total = 0;
        for (int64_t i = k; i < end; i++) largest = std::max(largest, x[i] & 0x7FFF);
        const int exponent = std::clamp(largest >> 7, 15, 254);  // in the bits of a number: those of the scale are 1
        const float scale = float_of_bits(largest < 0x7F80 ? uint32_t(exponent - 14) << 23 : 0x7FC00000u);
        const float inverse = float_of_bits(uint32_t(268 - exponent) << 23), magic = 0x1.8p23f;
        for (int64_t i = k; i < end; i++) {
            out[i] = int16_t(bits_of(float_of(x[i]) * inverse + magic));
            total += out[i];
        }
        *made++ = {float(total) * scale, scale, p.weights == Weights::blocks4 ? -8 * total : 0};
    }
    for (int64_t k = 0; k < p.padded() && p.weights == Weights::blocks8; k += 4) std::swap(out[k + 1], out[k + 2]);
}

// Words of a segment, and rows of x that are multiplied by them.
struct BlockTile {
    const uint8_t* words;
    const int32_t* x;
    int64_t column, x_stride, columns, count;  // bytes from a column of words to the next; their number; outputs
    float* kept;                               // [rows, kBlockOutputs]
    const float *scales, *seconds;             // [kBlockOutputs]; seconds may be null
    const Segment* of_x;                       // of each row, `segments` apart
    int64_t segments;
};

template <int M, int V> INLINE void add_segments(const BlockTile& t, const Ints (&sums)[M][V]) {
#pragma GCC unroll 8
    for (int i = 0; i < V; i++) {
        const Floats scales = load(t.scales + kLanes * i);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const Segment& of_x = t.of_x[m * t.segments];
            float* const kept = t.kept + m * kBlockOutputs + kLanes * i;
            const Floats sum = __builtin_convertvector(sums[m][i], Floats);
            Floats all = fma(times(sum, spread(of_x.scale)), scales, load(kept));
            if (t.seconds) all = fma(load(t.seconds + kLanes * i), spread(of_x.sum), all);
            put(kept, all);
        }
    }
}

// kWhole: no vector ends beyond the outputs.
template <class W, int V, int M, bool kWhole> INLINE void multiply_block(const BlockTile& t) {
    Ints sums[M][V];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int i = 0; i < V; i++) sums[m][i] = spread(t.of_x[m * t.segments].first);
    const uint8_t* words = t.words;
    const int32_t* x = t.x;
    const int64_t column = t.column, x_stride = t.x_stride, count = t.count;
    for (int64_t c = t.columns; c > 0; c--, words += column, x += W::kSteps) {
        Packed codes[V], numbers[V];
#pragma GCC unroll 8
        for (int i = 0; i < V; i++) {
            const uint8_t* const at = words + 4 * kLanes * i;
            __builtin_prefetch(at + kStreamAhead);
            codes[i] = kWhole ? vector_at<Packed>(at) : (Packed)some_ints(at, count - kLanes * i);
        }
#pragma GCC unroll 4
        for (int j = 0; j < W::kSteps; j++) {
#pragma GCC unroll 8
            for (int i = 0; i < V; i++) numbers[i] = W::pair(codes[i], j);
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) {
                const Packed values = (Packed)spread(x[m * x_stride + j]);
#pragma GCC unroll 8
                for (int i = 0; i < V; i++) sums[m][i] = IntSums::add(sums[m][i], numbers[i], values);
            }
        }
    }
    add_segments(t, sums);
}

template <class W, int V, int M, bool kWhole> INLINE void multiply_tiles(BlockTile t) {
    constexpr int64_t kStep = V * kLanes;
    for (; t.count > 0; t.count -= kStep) {
        multiply_block<W, V, M, kWhole>(t);
        t.words += 4 * kStep, t.kept += kStep, t.scales += kStep, t.seconds += t.seconds ? kStep : 0;
    }
}

template <class W, int M> APART void multiply_tiles(const BlockTile& t) {
    if (t.count == kBlockOutputs) multiply_tiles<W, vectors_of(M), M, true>(t);
    else multiply_tiles<W, 2, M, false>(t);
}

// Outputs begin .. end of at most kChunk rows.
template <class W>
KERNEL void pair_blocks_of(const Product& p, int64_t row, int64_t begin, int64_t end, Scratch& scratch) {
    float* const kept = reinterpret_cast<float*>(scratch.sums);
    const int64_t rows = std::min(kChunk, p.rows - row), segment = segment_of(p), stored = stored_inputs(p);
    const int64_t tiles = (rows + kPairRows - 1) / kPairRows, size = (rows + tiles - 1) / tiles;
    BlockTile t{};
    t.x_stride = p.x_stride / 2, t.segments = p.segments;
    for (int64_t o = begin; o < end;) {
        const BlockPart part = part_of(p, o, end);
        t.column = part.width * 4, t.count = part.count;
        std::memset(kept, 0, rows * kBlockOutputs * sizeof(float));
        Units units{};
        for (int64_t k = 0; k < stored; k += segment) {
            units_at<false>(p, part, k, units);
            t.words = part.words + (k / (2 * W::kSteps) * part.width + part.first) * 4;
            t.columns = std::min(segment, stored - k) / (2 * W::kSteps);
            t.scales = units.scales, t.seconds = p.has_sums() ? units.seconds : nullptr;
            for (int64_t m = 0; m < rows; m += size) {
                t.x = static_cast<const int32_t*>(p.prepared) + (row + m) * t.x_stride + k / 2;
                t.kept = kept + m * kBlockOutputs, t.of_x = p.x_segments + (row + m) * p.segments + k / segment;
                WITH_ROWS(std::min(size, rows - m), multiply_tiles<W, std::min(M, kPairRows)>(t))
            }
        }
        finish_block(p, part, kept, row, rows);
        o = part.begin + part.first + part.count;
    }
}
