// Single numbers for few_rows_tiles.h, by the instructions of each TARGET.

INLINE float float_of_bits(uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    std::memcpy(&bits, &number, 4);
    return bits;
}

INLINE float number(const void* numbers, Number type, int64_t at) {
    if (type == Number::float32) return static_cast<const float*>(numbers)[at];
    const uint16_t half = static_cast<const uint16_t*>(numbers)[at];
    return type == Number::bfloat16 ? float_of_bits(uint32_t(half) << 16) : _cvtsh_ss(half);
}

INLINE float rounded_bfloat16(float number) {  // to nearest, ties to even
    const uint32_t bits = bits_of(number), nearest = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u;
    return number != number ? number : float_of_bits(nearest);
}

INLINE uint16_t bfloat16_of(float number) {
    return uint16_t((bits_of(rounded_bfloat16(number)) | (number != number ? 0x400000u : 0u)) >> 16);
}

// To the nearest integer of int8, ties to even; NaN, whose row has the scale NaN, to the least.
INLINE float rounded_int8(float number) {
    const float magic = 0x1.8p23f, nearest = number + magic - magic;
    return nearest > 127.f ? 127.f : nearest > -128.f ? nearest : -128.f;
}

// To the nearest number of float8_e4m3fn, ties to even, at most 448.
INLINE float rounded_fp8(float number) {
    const float size = std::fabs(number), clamped = size > 448.f ? 448.f : size;
    const uint32_t bits = bits_of(clamped);
    const float normal = float_of_bits((bits + 0x7FFFF + (bits >> 20 & 1)) & 0xFFF00000u);
    const float magic = 0x1.8p14f, subnormal = clamped + magic - magic;  // whole numbers of two to -9
    return std::copysign(clamped < 0x1p-6f ? subnormal : normal, number);
}
