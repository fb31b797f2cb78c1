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
