// Vectors for cpu_attention_rows.h in C++ that any CPU runs.
constexpr int kLanes = 4;
constexpr int kVectors = 2;

typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

INLINE Floats load(const float* at) {
    Floats v;
    std::memcpy(&v, at, sizeof v);
    return v;
}
INLINE void put(float* at, Floats v) { std::memcpy(at, &v, sizeof v); }
INLINE Floats spread(float number) { return Floats{number, number, number, number}; }
INLINE Floats fma(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }
INLINE Ints lanes() { return Ints{0, 1, 2, 3}; }
INLINE Ints spread(int32_t number) { return Ints{number, number, number, number}; }
INLINE float sum_of(Floats v) { return (v[0] + v[2]) + (v[1] + v[3]); }
INLINE float largest_of(Floats v) {
    const float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}

INLINE Floats load_bfloat16(const uint16_t* at) {
    uint32_t bits[4];
    for (int i = 0; i < 4; i++) bits[i] = uint32_t(at[i]) << 16;
    Floats v;
    std::memcpy(&v, bits, sizeof v);
    return v;
}

INLINE void transpose(Floats (&rows)[kLanes]) {
    const Floats a = rows[0], b = rows[1], c = rows[2], d = rows[3];
    for (int i = 0; i < 4; i++) rows[i] = Floats{a[i], b[i], c[i], d[i]};
}
