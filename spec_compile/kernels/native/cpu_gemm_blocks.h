// Products with codes in blocks of 64 outputs, see `CodeBlocks` in quantised/blocks.py: memory has them in the order in
// which sums take them, so that nothing is turned and one stream is read.
//
// A word has 8 inputs of an output in 4 bits or 4 in 8 bits. Neighbouring words are neighbouring outputs, so a vector
// has the same inputs of some outputs. A segment is a group of inputs, at most kSegment of them. Its sum is scaled when
// it ends, and added to those before it, in the same order for any number of rows.

constexpr int64_t kBlockOutputs = 64, kSegment = 256;
constexpr int64_t kStreamAhead = 8 << 10;  // bytes from what is read to what is fetched

// The outputs first .. first + count of a block of `width` outputs that begins at `begin`.
struct BlockPart {
    int64_t begin, width, first, count;
    const uint8_t* words;  // of the block's first output and input
};

INLINE BlockPart part_of(const Product& p, int64_t o, int64_t end) {
    BlockPart part;
    part.begin = o / kBlockOutputs * kBlockOutputs, part.first = o - part.begin;
    part.width = std::min(kBlockOutputs, p.outputs - part.begin);
    part.count = std::min(end - part.begin, part.width) - part.first;
    part.words = p.w + part.begin * p.row_bytes;
    return part;
}

INLINE int64_t segment_of(const Product& p) { return p.group < p.inputs ? std::min(p.group, kSegment) : kSegment; }
INLINE int64_t inputs_of_word(const Product& p) { return p.weights == Weights::blocks4 ? 8 : 4; }
INLINE int64_t stored_inputs(const Product& p) { return p.row_bytes / 4 * inputs_of_word(p); }

INLINE void floats_of(const uint8_t* from, Number type, int64_t count, float* out) {
    if (type == Number::float16) {
        uint16_t halves[kBlockOutputs] = {};
        std::memcpy(halves, from, 2 * count);
        for (int64_t i = 0; i < count; i += kLanes)
            put(out + i, VECTOR(cvtph_ps)(vector_at<HalfPacked>(halves + i)));
    } else if (type == Number::bfloat16) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
        for (int64_t i = 0; i < count; i++) out[i] = float_of(halves[i]);
    } else std::memcpy(out, from, count * sizeof(float));
}

// The scales of a part's outputs in a group, and their points or minima.
struct Units {
    alignas(64) float scales[kBlockOutputs], seconds[kBlockOutputs];
};

// rounded: weights are rounded after they are scaled. Else seconds are what the sum of x is multiplied by, in place of
// what the layout has.
template <bool kRounded> INLINE void units_at(const Product& p, const BlockPart& part, int64_t k, Units& units) {
    const int64_t size = p.scale_type == Number::float32 ? 4 : 2, both = p.second == Second::none ? 1 : 2;
    const int64_t groups = (p.inputs + p.group - 1) / p.group;
    const int64_t at = std::min(k / p.group, groups - 1);  // words may go on with zeros beyond the last group
    const uint8_t* row = static_cast<const uint8_t*>(p.scales) +
                         (part.begin * groups * both + at * both * part.width + part.first) * size;
    __builtin_prefetch(row + 512);
    floats_of(row, p.scale_type, part.count, units.scales);
    if (both == 2) floats_of(row + part.width * size, p.scale_type, part.count, units.seconds);
    if (kRounded || p.second != Second::point) return;  // guard: cpu-zero-points
    for (int64_t i = 0; i < part.count; i++) units.seconds[i] = -units.seconds[i] * units.scales[i];
}

KERNEL void sum_segments(const Product& p, const float* x, Segment* segments) {
    const int64_t segment = segment_of(p);
    for (int64_t k = 0; k < stored_inputs(p); k += segment) {
        float sum = 0.f;
        for (int64_t i = k; i < std::min(k + segment, p.inputs); i++) sum += x[i];
        segments++->sum = sum;
    }
}

// Sums [rows, kBlockOutputs] of a part plus bias, rounded once.
KERNEL void finish_block(const Product& p, const BlockPart& part, const float* kept, int64_t row, int64_t rows) {
    const int64_t o = part.begin + part.first;
    for (int64_t i = 0; i < part.count; i += kAtOnce) {
        const int64_t count = std::min(int64_t(kAtOnce), part.count - i);
        float biases[kAtOnce] = {}, numbers[kAtOnce];
        for (int64_t j = 0; j < count && p.bias; j++) biases[j] = number_at(p.bias, p.dtype, o + i + j);
        for (int64_t r = 0; r < rows; r++) {
            for (int j = 0; j < kAtOnce; j += kLanes)
                put(numbers + j, load(kept + r * kBlockOutputs + i + j) + load(biases + j));
            put_outputs(p, (row + r) * p.outputs + o + i, numbers, count);
        }
    }
}

// Sums of floats. A segment of kTile outputs is decoded into the L1 cache, and multiplied by tiles of rows.

constexpr int kTile = 2 * kLanes;
constexpr int kTileRows = 6;
constexpr int kRegisterRows = 4;  // rows with which codes are decoded in registers
constexpr int kFewTile = kLanes == 16 ? 64 : 16;  // of few rows: with 4, 16 or 8 of the registers are sums

// The numbers of code e of words of the outputs `at` .. of a part; rounded: times their scales, as the layout rounds
// them.
template <int kBits, bool kRounded>
INLINE Floats number_of_code(const Product& p, const Table& table, const Units& units, int64_t at, Ints words, int e) {
    Floats numbers;
    if constexpr (kBits == 8) numbers = floats_of_bytes(words, e);
    else numbers = numbers_of(table, (Ints)((Words)words >> (e / 2 * 4 + e % 2 * 16)));
    if constexpr (kRounded) {
        if (p.second == Second::point) numbers = numbers - load(units.seconds + at);
        numbers = times(numbers, load(units.scales + at));
        numbers = p.rounds == Number::float16 ? to_float16(numbers) : to_bfloat16(numbers);
    }
    return numbers;
}

// Those of a segment, [count, kTile].
template <int kBits, bool kRounded>
KERNEL void numbers_of_block(const Product& p, const BlockPart& part, const Units& units, int64_t first, int64_t k,
                             int64_t count, float* out) {
    constexpr int64_t each = 32 / kBits;
    const int64_t lanes = part.count - first;
    const Table table = table_at(p.table);
    const uint8_t* words = part.words + (k / each * part.width + part.first + first) * 4;
    for (int64_t c = 0; c < count / each; c++, words += part.width * 4, out += each * kTile) {
        for (int half = 0; half < 2; half++) {
            const Ints codes = some_ints(words + 4 * kLanes * half, lanes - half * kLanes);
            if (half == 0) __builtin_prefetch(words + kStreamAhead);
#pragma GCC unroll 8
            for (int e = 0; e < each; e++)
                put(out + e * kTile + half * kLanes,
                    number_of_code<kBits, kRounded>(p, table, units, first + half * kLanes, codes, e));
        }
    }
}

template <int M>
KERNEL void multiply_floats(const float* panel, const float* x, int64_t stride, int64_t count, float* out) {
    Floats sums[M][2];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = spread(0.f);
    for (int64_t k = 0; k < count; k++, panel += kTile) {
        const Floats a = load(panel), b = load(panel + kLanes);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const Floats value = spread(x[m * stride + k]);
            sums[m][0] = fma(a, value, sums[m][0]), sums[m][1] = fma(b, value, sums[m][1]);
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++) put(out + m * kTile, sums[m][0]), put(out + m * kTile + kLanes, sums[m][1]);
}

KERNEL void multiply_floats(const float* panel, const float* x, int64_t stride, int64_t count, int64_t rows,
                            float* out) {
    WITH_ROWS(rows, multiply_floats<M>(panel, x, stride, count, out))
}

// kept: of a row's outputs of a part. scales: null if numbers were scaled. seconds: null, or by what `of_x`, the sum of
// the row's segment, is multiplied.
INLINE void add_segment(const float* sums, const float* scales, const float* seconds, float of_x, int64_t count,
                        float* kept) {
    for (int64_t i = 0; i < count; i += kLanes) {
        Floats all = load(kept + i);
        if (scales) all = fma(load(sums + i), load(scales + i), all);
        else all = load(sums + i) + all;
        if (seconds) all = fma(load(seconds + i), spread(of_x), all);
        put(kept + i, all);
    }
}

// Add the sums [rows, step] of a segment to those that are kept. of_x: the segments of the rows of x.
template <bool kRounded>
INLINE void add_rows(const Product& p, const Units& units, int64_t first, const Segment* of_x, const float* sums,
                     int64_t step, int64_t rows, float* kept) {
    const float* const scales = kRounded ? nullptr : units.scales + first;
    const float* const seconds = p.has_sums() && !kRounded ? units.seconds + first : nullptr;
    for (int64_t r = 0; r < rows; r++)
        add_segment(sums + r * step, scales, seconds, seconds ? of_x[r * p.segments].sum : 0.f,
                    std::min(step, kBlockOutputs - first), kept + r * kBlockOutputs + first);
}

// A segment of few rows and kFewTile outputs, decoded in registers: [M, kFewTile] sums, as `multiply_floats` has them.
template <int kBits, bool kRounded, int M>
INLINE void multiply_codes(const Product& p, const BlockPart& part, const Units& units, int64_t first, const float* x,
                           int64_t k, int64_t count, float* out) {
    constexpr int each = 32 / kBits, V = kFewTile / kLanes;
    const Table table = table_at(p.table);
    const int64_t column = part.width * 4, stride = p.x_stride;
    const uint8_t* words = part.words + (k / each * part.width + part.first + first) * 4;
    Floats sums[M][V];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) sums[m][i] = spread(0.f);
    int64_t some[V];
    for (int i = 0; i < V; i++) some[i] = part.count - first - i * kLanes;
    for (int64_t c = 0; c < count / each; c++, words += column, x += each) {
        Ints codes[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
            __builtin_prefetch(words + 4 * kLanes * i + kStreamAhead);
            codes[i] = some_ints(words + 4 * kLanes * i, some[i]);
        }
#pragma GCC unroll 8
        for (int e = 0; e < each; e++) {
#pragma GCC unroll 4
            for (int i = 0; i < V; i++) {
                const int64_t at = first + i * kLanes;
                const Floats numbers = number_of_code<kBits, kRounded>(p, table, units, at, codes[i], e);
#pragma GCC unroll 4
                for (int m = 0; m < M; m++) sums[m][i] = fma(numbers, spread(x[m * stride + e]), sums[m][i]);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) put(out + m * kFewTile + i * kLanes, sums[m][i]);
}

// All segments of some rows and a part, added to kept [rows, kBlockOutputs]. M: the number of few rows, 0 of more.
// panel: memory for the numbers of a segment.
template <int kBits, bool kRounded, int M>
APART void rows_of_part(const Product& p, const BlockPart& part, int64_t row, int64_t rows, float* panel, float* kept) {
    constexpr int64_t kWidth = M ? kFewTile : kTile, kRows = M ? M : kTileRows;
    const int64_t segment = segment_of(p), stored = stored_inputs(p);
    const float* const prepared = static_cast<const float*>(p.prepared) + row * p.x_stride;
    Units units{};
    if (M) rows = M;
    for (int64_t k = 0; k < stored; k += segment) {
        const int64_t count = std::min(segment, stored - k);
        units_at<kRounded>(p, part, k, units);
        for (int64_t first = 0; first < part.count; first += kWidth) {
            if (!M) numbers_of_block<kBits, kRounded>(p, part, units, first, k, count, panel);
            for (int64_t m = 0; m < rows; m += kRows) {
                const float* const x = prepared + m * p.x_stride + k;
                const Segment* const of_x = p.x_segments + (row + m) * p.segments + k / segment;
                const int64_t some = M ? M : std::min(kRows, rows - m);
                float sums[kRows * kWidth];
                if constexpr (M) multiply_codes<kBits, kRounded, M>(p, part, units, first, x, k, count, sums);
                else multiply_floats(panel, x, p.x_stride, count, some, sums);
                add_rows<kRounded>(p, units, first, of_x, sums, kWidth, some, kept + m * kBlockOutputs);
            }
        }
    }
}

// Outputs begin .. end of at most kChunk rows.
template <int kBits, bool kRounded>
KERNEL void float_blocks_of(const Product& p, int64_t row, int64_t begin, int64_t end, Scratch& scratch) {
    static_assert(kSegment * kTile * sizeof(float) <= Scratch::kPanelBytes);
    float* const panel = reinterpret_cast<float*>(scratch.panel);
    float* const kept = reinterpret_cast<float*>(scratch.sums);
    const int64_t rows = std::min(kChunk, p.rows - row);
    for (int64_t o = begin; o < end;) {
        const BlockPart part = part_of(p, o, end);
        std::memset(kept, 0, rows * kBlockOutputs * sizeof(float));
        if (rows > kRegisterRows) rows_of_part<kBits, kRounded, 0>(p, part, row, rows, panel, kept);
        else WITH_ROWS(rows, rows_of_part<kBits, kRounded, std::min(M, kRegisterRows)>(p, part, row, M, panel, kept))
        finish_block(p, part, kept, row, rows);
        o = part.begin + part.first + part.count;
    }
}
