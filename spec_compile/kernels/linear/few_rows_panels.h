// Panels of some outputs and inputs of w for few_rows_tiles.h.

constexpr int kPanelOutputs = 16;    // of a panel with more rows than a tile has: x is then read less often

// 32 codes: those at `codes`, or if the row has fewer left a copy of these and zeros.
template <class Code> INLINE const Code* whole_or_copy(const Code* codes, int64_t left, Code* copy) {
    if (left >= 32) return codes;
    std::memset(copy, 0, 32 * sizeof(Code));
    if (left > 0) std::memcpy(copy, codes, left * sizeof(Code));
    return copy;
}

// How panels are made of w: `panel(p, output, input, count, ahead, out)`; `count` is a multiple of 32,
// and `ahead` the bytes to what comes after.
template <class Element> struct Direct {
    static constexpr bool kDirect = true;
    static INLINE void panel(const Product&, int64_t, int64_t, int64_t, int64_t, Element*) {}
};

// The same where rows do not end with a vector.
template <class Element> struct Copied {
    static constexpr bool kDirect = false;
    static KERNEL void panel(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, Element* out) {
        const int64_t there = std::max(std::min(count, p.inputs - k), int64_t(0)), size = sizeof(Element);
        const uint8_t* w = p.w + o * p.row_bytes + k * size;
        for (int64_t at = 0; at < there * size; at += 64) __builtin_prefetch(w + at + ahead, 0, 2);
        std::memcpy(out, w, there * size);
        std::memset(out + there, 0, (count - there) * size);
    }
};

struct Bfloat16s {
    static constexpr bool kDirect = false;
    static KERNEL void panel(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, float* out) {
        const uint16_t* w = reinterpret_cast<const uint16_t*>(p.w + o * p.row_bytes) + k;
        for (int64_t at = 0; at < count; at += 32) {
            uint16_t rest[32];
            const uint16_t* codes = whole_or_copy(w + at, p.inputs - k - at, rest);
            __builtin_prefetch(reinterpret_cast<const uint8_t*>(w + at) + ahead, 0, 2);
            for (int lane = 0; lane < 32; lane += kLanes) put(out + at + lane, floats_of_bfloat16(codes + lane));
        }
    }
};

constexpr float kFp8Unit = 256.f;  // `floats_of_fp8` over this

// Codes of 8 bits. kFp8: float8_e4m3fn, else int8.
template <bool kFp8> struct Bytes {
    static constexpr bool kDirect = false;

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
#if !NATIVE
    static INLINE void decode(const uint8_t* codes, Floats, bool, int16_t* out) { int16_of_int8(codes, out); }
#endif

    template <class Element>
    static KERNEL void panel(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, Element* out) {
        const uint8_t* w = p.w + o * p.row_bytes + k;
        const int64_t columns = (p.inputs + kBlock - 1) / kBlock;
        const float* blocks = static_cast<const float*>(p.scales) + o / kBlock * columns;
        const bool rounds = p.scaled_first && p.dtype == Number::bfloat16;
        Floats scale = spread(kFp8Unit * (p.scaled_first ? number(p.scales, p.scale_type, o) : 1.f));
        for (int64_t at = 0; at < count; at += 32) {
            if (p.weights == Weights::fp8_blocks) scale = spread(kFp8Unit * blocks[(k + at) / kBlock]);
            uint8_t rest[32];
            const uint8_t* codes = whole_or_copy(w + at, p.inputs - k - at, rest);
            __builtin_prefetch(w + at + ahead, 0, 2);
            decode(codes, scale, rounds, out + at);
        }
    }
};

// Nibbles in blocks of 256 inputs, two vectors of half-words. Nibble j of half-word h of vector v is that of input
// 64 j + 32 v + h, or with groups of 32 of input 128 v + 32 j + h; see `Words` in quantised/nibbles.py.
template <Units kUnits> struct Nibbles {
    static constexpr bool kDirect = false;
    static constexpr bool kHalf = kUnits == Units::centred_float16 || kUnits == Units::float16;
    static constexpr bool kCentred = kUnits == Units::centred_float16 || kUnits == Units::centred_bfloat16;

    // The numbers of an output's codes in a group, rounded as the layout says, then to the dtype of x.
    // pairs: two groups have their scales side by side.
    static INLINE Table table(const Product& p, int64_t o, int64_t group, bool pairs, bool rounds) {
        const int64_t pair = pairs ? group / 2 : group, second = pairs ? group % 2 : 0;
        if constexpr (kUnits == Units::table) {
            const float* numbers = static_cast<const float*>(p.scales);
            const Table unrounded = scaled(numbers, numbers[((1 + pair) * p.outputs + o) * 2 + second]);
            return rounds ? rounded(unrounded, false) : unrounded;
        }
        constexpr Number type = kHalf ? Number::float16 : Number::bfloat16;
        Table numbers;
        if constexpr (kCentred) {
            // Scales are times two to 18, or to 130, a number too large for one factor.
            constexpr float small = kHalf ? 0x1p-9f : 0x1p-65f;
            numbers = line(number(p.scales, type, (pair * p.outputs + o) * 2 + second) * small, 8.f, small);
        } else {
            const int64_t unit = (group * p.outputs + o) * 2;
            const float zero = -number(p.scales, type, unit + 1) - (kHalf ? 1024.f : 128.f);
            numbers = line(number(p.scales, type, unit), zero, 1.f);
        }
        numbers = rounded(numbers, kHalf);
        return kHalf && rounds ? rounded(numbers, false) : numbers;
    }

    static KERNEL void panel(const Product& p, int64_t o, int64_t k, int64_t count, int64_t ahead, float* out) {
        const uint8_t* row = p.w + o * p.row_bytes + k / 2;
        const bool pairs = p.group < 256;
        const bool rounds = p.dtype == Number::bfloat16;
        const int64_t groups = pairs ? 256 / p.group : 1;  // of a block
        int64_t group = pairs ? k / 256 * groups : k / p.group, rest = pairs ? 0 : p.group - k % p.group;
        const uint32_t* units = static_cast<const uint32_t*>(p.scales) + group * p.outputs + o + kPanelOutputs;
        for (int64_t at = 0; at < count / p.group && o % kPanelOutputs == 0; at++)
            __builtin_prefetch(units + at * p.outputs);  // of the next outputs, which share a line
        for (int64_t block = 0; block < count; block += 256, row += 128) {
            __builtin_prefetch(row + ahead, 0, 2);
            __builtin_prefetch(row + ahead + 64, 0, 2);
            if (p.group == 32) {
                for (int vector = 0; vector < 2 && block + 128 * vector < count; vector++, group += 4) {
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++, out += 32) {
                        look_up(table(p, o, group + j, true, rounds), row + 64 * vector, p.turn + 4 * j, out);
                    }
                }
                continue;
            }
            Table numbers = table(p, o, group, pairs, rounds);
            for (int j = 0; j < 4; j++, out += 64) {
                if (j && j * groups % 4 == 0 && pairs)
                    numbers = table(p, o, group + j * groups / 4, true, rounds);
                look_up(numbers, row, p.turn + 4 * j, out);
                look_up(numbers, row + 64, p.turn + 4 * j, out + 32);
            }
            rest -= 256;
            if (pairs) group += groups;
            else if (rest <= 0) group++, rest += p.group;
        }
    }
};
