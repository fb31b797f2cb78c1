// Products of few rows for one level of instructions.
//
// A panel of some outputs and inputs is decoded into the L1 cache, and tiles of it are multiplied by all rows. Each sum
// of a row runs over the inputs in ascending order, one vector after the other, whatever the number of rows and the
// sizes of panels and tiles. Numbers of w that need no decoding are multiplied where they lie.

constexpr int kPanelOutputs = kAtOnce;  // of a panel with more rows than a tile has: x is then read less often

// 32 codes: those at `codes`, or if the row has fewer left a copy of these and zeros.
template <class Code> INLINE const Code* whole_or_copy(const Code* codes, int64_t left, Code* copy) {
    if (left >= 32) return codes;
    std::memset(copy, 0, 32 * sizeof(Code));
    if (left > 0) std::memcpy(copy, codes, left * sizeof(Code));
    return copy;
}

// How panels are made of w: `panel(p, output, input, count, ahead, out)`; `count` is a multiple of 32,
// and `ahead` the bytes to what comes after.
template <class Code> struct Numbers {
    static APART void panel(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, float* out) {
        const Code* w = reinterpret_cast<const Code*>(p.w + o * p.row_bytes) + k;
        for (int64_t at = 0; at < count; at += 32) {
            Code rest[32];
            const Code* numbers = whole_or_copy(w + at, p.inputs - k - at, rest);
            for (size_t line = 0; line < sizeof rest; line += 64)
                __builtin_prefetch(reinterpret_cast<const uint8_t*>(w + at) + line + ahead, 0, 2);
            for (int lane = 0; lane < 32; lane += kLanes) put(out + at + lane, load(numbers + lane));
        }
    }
};

constexpr float kFp8Unit = 256.f;  // `floats_of_fp8` over this

// Codes of 8 bits. kFp8: float8_e4m3fn, else int8.
template <bool kFp8> struct Bytes {
    static INLINE Floats floats(const uint8_t* codes, Floats scale) {
        if constexpr (kFp8) return times(floats_of_fp8(codes), scale);
        else return floats_of_int8(codes);
    }

    // Weights that are scaled before the product are rounded to the dtype of x.
    static INLINE void decode(const uint8_t* codes, Floats scale, bool rounds, float* out) {
        for (int lane = 0; lane < 32; lane += kLanes) {
            const Floats numbers = floats(codes + lane, scale);
            put(out + lane, rounds ? to_bfloat16(numbers) : numbers);
        }
    }
    static INLINE void decode(const uint8_t* codes, Floats, bool, int16_t* out) {
        for (int at = 0; at < 32; at += 2 * kLanes) {
            const Packed wide = VECTOR(cvtepi8_epi16)(vector_at<HalfPacked>(codes + at));
            std::memcpy(out + at, &wide, sizeof wide);
        }
    }

    template <class Element>
    static APART void panel(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, Element* out) {
        const uint8_t* w = p.w + o * p.row_bytes + k;
        const int64_t columns = (p.inputs + kBlock - 1) / kBlock;
        const float* blocks = static_cast<const float*>(p.scales) + o / kBlock * columns;
        const bool rounds = p.scaled_first && p.dtype == Number::bfloat16;
        Floats scale = spread(kFp8Unit * (p.scaled_first ? number_at(p.scales, p.scale_type, o) : 1.f));
        for (int64_t at = 0; at < count; at += 32) {
            if (p.weights == Weights::fp8_blocks) scale = spread(kFp8Unit * blocks[(k + at) / kBlock]);
            uint8_t rest[32];
            const uint8_t* codes = whole_or_copy(w + at, p.inputs - k - at, rest);
            __builtin_prefetch(w + at + ahead, 0, 2);
            decode(codes, scale, rounds, out + at);
        }
    }
};

// Products of panels and tiles of rows.

constexpr int kOutputs = 4;  // of a tile

// Some outputs of w and rows of x, and their sums so far.
template <class S> struct Tile {
    const typename S::Weight* w;
    const typename S::Element* x;
    int64_t w_stride, x_stride, columns, ahead;
    typename S::Sum* sums;  // [rows, kPanelOutputs]
    bool first;
};

// GCC unrolls loops early if it is told to, and then keeps all sums in registers.
template <class S, int O, int M, bool kAhead> KERNEL void multiply(Tile<S> t) {
    typename S::Sum sums[O][M];
    typename S::Sum* const kept = t.sums;
    const typename S::Weight* w = t.w;
    const typename S::Element* x = t.x;
    const int64_t w_stride = t.w_stride, x_stride = t.x_stride, columns = t.columns, ahead = t.ahead;
    if (t.first) {
#pragma GCC unroll 8
        for (int j = 0; j < M; j++)
#pragma GCC unroll 8
            for (int i = 0; i < O; i++) sums[i][j] = typename S::Sum{};
    } else {
#pragma GCC unroll 8
        for (int j = 0; j < M; j++)
#pragma GCC unroll 8
            for (int i = 0; i < O; i++) sums[i][j] = kept[j * kPanelOutputs + i];
    }
    for (int64_t k = 0; k < columns; k += S::kStep) {
        decltype(S::load(w)) weights[O];
#pragma GCC unroll 8
        for (int i = 0; i < O; i++) {
            weights[i] = S::load(w + i * w_stride + k);
            if (kAhead) __builtin_prefetch(w + i * w_stride + k + ahead, 0, 2);  // beyond the end it does nothing
        }
#pragma GCC unroll 8
        for (int j = 0; j < M; j++) {
            const auto values = S::load(x + j * x_stride + k);
#pragma GCC unroll 8
            for (int i = 0; i < O; i++) sums[i][j] = S::add(sums[i][j], weights[i], values);
        }
    }
#pragma GCC unroll 8
    for (int j = 0; j < M; j++)
#pragma GCC unroll 8
        for (int i = 0; i < O; i++) kept[j * kPanelOutputs + i] = sums[i][j];
}

template <class S, int O, bool kAhead> KERNEL void multiply(const Tile<S>& t, int64_t rows) {
    WITH_ROWS(rows, multiply<S, O, std::min(M, kMostRows), kAhead>(t))
}

// All rows of a chunk times the outputs of a panel, which stays in the L1 cache.
template <class S, bool kAhead> KERNEL void panel_times_rows(Tile<S> t, int64_t outputs, int64_t rows) {
    const int64_t tiles = (rows + kMostRows - 1) / kMostRows, size = (rows + tiles - 1) / tiles;
    for (int64_t m = 0; m < rows; m += size, t.x += size * t.x_stride, t.sums += size * kPanelOutputs) {
        const int64_t count = std::min(size, rows - m);
        Tile<S> part = t;
        int64_t o = 0;
        for (; o + kOutputs <= outputs; o += kOutputs, part.w += kOutputs * t.w_stride, part.sums += kOutputs)
            multiply<S, kOutputs, kAhead>(part, count);
        for (; o < outputs; o++, part.w += t.w_stride, part.sums++) multiply<S, 1, false>(part, count);
    }
}

// The outputs of a panel: sums times scales plus bias, rounded once.
template <class S>
KERNEL void finish(const Product& p, const typename S::Sum* sums, int64_t row, int64_t rows, int64_t o,
                   int64_t outputs) {
    const bool codes = p.weights == Weights::int8 || p.weights == Weights::fp8;
    float scales[kPanelOutputs] = {}, biases[kPanelOutputs] = {}, numbers[kPanelOutputs] = {};
    for (int64_t i = 0; i < outputs; i++) {
        scales[i] = codes && !p.scaled_first ? number_at(p.scales, p.scale_type, o + i) : 1.f;
        biases[i] = p.bias ? number_at(p.bias, p.dtype, o + i) : 0.f;
    }
    for (int64_t r = row; r < row + rows; r++, sums += kPanelOutputs) {
        const float scale = p.row_scales ? p.row_scales[r] : 1.f;
        for (int64_t i = 0; i < outputs; i += 4) totals_of(sums + i, numbers + i);
        for (int64_t i = 0; i < kPanelOutputs; i++) numbers[i] = numbers[i] * scales[i] * scale + biases[i];
        put_outputs(p, r * p.outputs + o, numbers, outputs);
    }
}

// Outputs begin .. end of at most kChunk rows. W: void where numbers are multiplied where they lie.
template <class S, class W>
KERNEL void chunk_of(const Product& p, int64_t row, int64_t begin, int64_t end, Scratch& scratch) {
    static_assert(sizeof(typename S::Sum) * kChunk * kPanelOutputs <= Scratch::kSumBytes);
    constexpr bool kDirect = std::is_void_v<W>;
    typedef typename S::Element Element;
    typedef typename S::Weight Weight;
    typename S::Sum* sums = reinterpret_cast<typename S::Sum*>(scratch.sums);
    Element* panel = reinterpret_cast<Element*>(scratch.panel);
    const Element* x = static_cast<const Element*>(p.prepared);
    const int64_t rows = std::min(kChunk, p.rows - row), outputs = rows > kMostRows ? kPanelOutputs : kOutputs;
    const int64_t most = kDirect ? p.padded() : Scratch::kPanelBytes / int64_t(sizeof(Element)) / outputs;
    for (int64_t o = begin; o < end; o += outputs) {
        const int64_t here = std::min(outputs, end - o);
        for (int64_t k = 0; k < p.padded(); k += most) {
            const int64_t columns = std::min(most, p.padded() - k);
            // Bytes from these weights to those that come next: of these outputs, or the first of the next ones.
            const bool last = k + most >= p.padded();
            const int64_t ahead = (last ? -k : most) * p.row_bytes / p.inputs + (last ? outputs * p.row_bytes : 0);
            Tile<S> t{nullptr, x + row * p.x_stride + k, most, p.x_stride, columns, 0, sums, k == 0};
            if constexpr (kDirect) {
                t.w = reinterpret_cast<const Weight*>(p.w + o * p.row_bytes) + k;
                t.w_stride = p.row_bytes / int64_t(sizeof(Weight));
                t.ahead = ahead / int64_t(sizeof(Weight));
            } else {
                t.w = panel;
                for (int64_t i = 0; i < here; i++) W::panel(p, o + i, k, columns, ahead, panel + i * most);
            }
            panel_times_rows<S, kDirect>(t, here, rows);
        }
        finish<S>(p, sums, row, rows, o, here);
    }
}

// Rows of x as the sums take them.

INLINE void put_element(float* at, float number) { *at = number; }
INLINE void put_element(int8_t* at, float number) { *at = int8_t(number); }
INLINE void put_element(int16_t* at, float number) { *at = int16_t(number); }
INLINE void put_element(uint16_t* at, float number) { *at = bfloat16_of(number); }

// Inputs k .. k + count of a row of x, and zeros beyond the last; `count` is at most a block.
APART void floats_of_row(const Product& p, int64_t row, int64_t k, int64_t count, float* out) {
    const int64_t there = std::clamp(p.inputs - k, int64_t(0), count), size = p.dtype == Number::float32 ? 4 : 2;
    floats_of(static_cast<const uint8_t*>(p.x) + (row * p.inputs + k) * size, p.dtype, there, out);
    std::fill(out + there, out + count, 0.f);
}

APART float largest_of(const float* numbers, int64_t count) {
    uint32_t largest = 0;  // of the bits without the sign, which are in the order of sizes; NaN is the largest
    for (int64_t i = 0; i < count; i++) largest = std::max(largest, bits_of(numbers[i]) & 0x7FFFFFFFu);
    return float_of_bits(largest);
}

// `row` to `out`, of `padded` elements. Every step is rounded to the dtype of x.
template <class Element> KERNEL void prepare_row(const Product& p, int64_t row, Element* out) {
    float buffer[kBlock];
    int32_t total = 0;
    if (sizeof(Element) == sizeof(uint16_t) && p.rounding == Rounding::none) {  // bfloat16
        std::memcpy(out, static_cast<const Element*>(p.x) + row * p.inputs, p.inputs * sizeof(Element));
        std::memset(out + p.inputs, 0, (p.padded() - p.inputs) * sizeof(Element));
        return;
    }
    const bool wide = p.dtype == Number::float32, by_row = p.row_scales != nullptr;
    float scale = 1.f;
    if (by_row) {
        float largest = 0.f;
        for (int64_t k = 0; k < p.inputs && !p.constant; k += kBlock) {
            floats_of_row(p, row, k, kBlock, buffer);
            const float both[] = {largest, largest_of(buffer, kBlock)};
            largest = largest_of(both, 2);
        }
        const float unrounded = largest / (p.rounding == Rounding::int8_rows ? 127.5f : 448.f);
        const float chosen = p.constant ? number_at(p.scales, p.scale_type, p.outputs) : unrounded;
        p.row_scales[row] = scale = wide ? chosen : rounded_bfloat16(chosen);
        scale = scale > 0.f ? scale : 1.f;
    }
    for (int64_t k = 0; k < p.padded(); k += kBlock) {
        const int64_t count = std::min(kBlock, p.padded() - k);
        floats_of_row(p, row, k, count, buffer);
        if (p.rounding == Rounding::fp8_blocks) {
            const float largest = largest_of(buffer, count);
            scale = largest > 0.f ? largest / 448.f : 1.f;
            for (int64_t i = 0; i < count; i++) buffer[i] = rounded_fp8(buffer[i] / scale) * scale;
        } else if (by_row) {
            for (int64_t i = 0; i < count; i++) buffer[i] /= scale;
            for (int64_t i = 0; i < count && !wide; i++) buffer[i] = rounded_bfloat16(buffer[i]);
            if (p.rounding == Rounding::fp8_rows)
                for (int64_t i = 0; i < count; i++) buffer[i] = rounded_fp8(buffer[i]);
            else
                for (int64_t i = 0; i < count; i++) buffer[i] = rounded_int8(buffer[i]), total += int32_t(buffer[i]);
        }
        for (int64_t i = 0; i < count; i++) put_element(out + k + i, buffer[i]);
    }
    if (by_row) p.row_sums[row] = total;
}

// True if the sums take pairs of whole numbers, pairs of bfloat16, or integers; else they take float.
INLINE bool takes_pairs(const Product& p) { return p.whole && p.dtype == Number::bfloat16; }
INLINE bool takes_bfloat16(const Product& p) {
    return LEVEL == 4 && p.dtype == Number::bfloat16 && p.rounding != Rounding::fp8_blocks && !p.in_blocks();
}
#if LEVEL == 4
typedef Fours::Element Integer;
#else
typedef IntSums::Element Integer;
#endif
INLINE bool takes_integers(const Product& p) { return p.weights == Weights::int8 && p.rounding == Rounding::int8_rows; }

// True if the rows of x are as they are taken. With more of them, their distance would put them into the same few lines
// of the L1 cache.
KERNEL bool is_prepared(const Product& p) {
    const bool same = p.dtype == Number::float32 || takes_bfloat16(p);
    return same && p.rounding == Rounding::none && p.inputs == p.padded() && p.rows <= kMostRows && !p.has_sums();
}

// Bytes of an element of a prepared row.
KERNEL int64_t element_size(const Product& p) {
    return takes_integers(p) ? sizeof(Integer) : takes_bfloat16(p) || takes_pairs(p) ? sizeof(uint16_t) : sizeof(float);
}

KERNEL void prepare(const Product& p, int64_t row) {
    void* const out = static_cast<uint8_t*>(p.prepared) + row * p.x_stride * element_size(p);
    if (takes_integers(p)) return prepare_row(p, row, static_cast<Integer*>(out));
    if (takes_pairs(p)) return prepare_pairs(p, row, static_cast<int16_t*>(out));
    if (takes_bfloat16(p)) return prepare_row(p, row, static_cast<uint16_t*>(out));
#if LEVEL == 4
    kAvx512.prepare(p, row);
#else
    prepare_row(p, row, static_cast<float*>(out));
    if (p.has_sums()) sum_segments(p, static_cast<float*>(out), p.x_segments + row * p.segments);
#endif
}

KERNEL Kernel kernel_of(const Product& p) {
    if (takes_pairs(p)) return p.weights == Weights::blocks4 ? pair_blocks_of<FourBits> : pair_blocks_of<EightBits>;
#if LEVEL == 4
    if (takes_integers(p)) return strips_of<Fours, WordStrips<8>>;
    if (takes_bfloat16(p) && p.weights == Weights::bfloat16) return strips_of<Pairs, WordStrips<16>>;
    if (takes_bfloat16(p) && p.weights == Weights::int8) return strips_of<Pairs, ByteStrips<false>>;
    if (takes_bfloat16(p)) return strips_of<Pairs, ByteStrips<true>>;
    return p.weights == Weights::float32 ? strips_of<Singles, WordStrips<32>> : kAvx512.kernel_of(p);
#else
    const bool rounded = p.rounds != Number::float32 && p.dtype == Number::float32;
    if (p.weights == Weights::blocks8) return float_blocks_of<8, false>;
    if (p.weights == Weights::blocks4) return rounded ? float_blocks_of<4, true> : float_blocks_of<4, false>;
    if (takes_integers(p)) return chunk_of<IntSums, Bytes<false>>;
    // Numbers of many rows are copied, because rows of w as they lie share the same few lines of the L1 cache.
    const bool copied = p.inputs != p.padded() || p.rows > kMostRows;
    if (p.weights == Weights::float32) return copied ? chunk_of<FloatSums, Numbers<float>> : chunk_of<FloatSums, void>;
    if (p.weights == Weights::bfloat16)
        return copied ? chunk_of<FloatSums, Numbers<uint16_t>> : chunk_of<HalfSums, void>;
    return p.weights == Weights::int8 ? chunk_of<FloatSums, Bytes<false>> : chunk_of<FloatSums, Bytes<true>>;
#endif
}
