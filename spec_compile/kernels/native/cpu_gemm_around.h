// The addition and the RMSNorm before a product of bfloat16, and the gate after it, by the instructions of each TARGET.
// Each row is computed by itself, in one order.

constexpr int kSums = 16;  // partial sums of squares: number k of a row is added to sum k % 16

// A row of x plus `residual`, which becomes the stream, then its norm, which is written to `normed`. Each step is
// rounded as PyTorch does without a compiler.
KERNEL void norm_row(const Product& p, const Around& a, int64_t row, uint16_t* normed) {
    const int64_t size = p.inputs;
    const uint16_t* x = static_cast<const uint16_t*>(p.x) + row * size;
    if (a.residual) {
        const uint16_t* residual = static_cast<const uint16_t*>(a.residual) + row * size;
        uint16_t* stream = static_cast<uint16_t*>(a.stream) + row * size;
        for (int64_t k = 0; k < size; k++) stream[k] = bfloat16_of(float_of(x[k]) + float_of(residual[k]));
        x = stream;
    }
    float sums[kSums] = {}, total = 0.f;
    int64_t k = 0;
    for (; k + kSums <= size; k += kSums)
        for (int i = 0; i < kSums; i++) sums[i] += float_of(x[k + i]) * float_of(x[k + i]);
    for (int i = 0; k + i < size; i++) sums[i] += float_of(x[k + i]) * float_of(x[k + i]);
    for (int i = 0; i < kSums; i++) total += sums[i];
    const float inverse = 1.f / std::sqrt(total / float(size) + a.eps);
    const uint16_t* weight = static_cast<const uint16_t*>(a.norm);
    if (a.rounds_first)
        for (k = 0; k < size; k++)
            normed[k] = bfloat16_of(rounded_bfloat16(float_of(x[k]) * inverse) * float_of(weight[k]));
    else
        for (k = 0; k < size; k++)
            normed[k] = bfloat16_of(float_of(x[k]) * inverse * (float_of(weight[k]) + a.offset));
}

// e to the x, to a few last bits; infinity for x above 88.
INLINE float power_of_e(float x) {
    const float inside = x < -87.f ? -87.f : x > 88.f ? 88.f : x;
    const float magic = 0x1.8p23f, shifted = inside * 0x1.715476p+0f + magic, whole = shifted - magic;
    const float rest = inside - whole * 0x1.62e4p-1f - whole * 0x1.7f7d1cp-20f;
    float sum = 1.9875691500e-4f;  // the coefficients of Cephes' expf
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest + 1.f;
    sum = sum * rest + 1.f;
    return x > 88.f ? std::numeric_limits<float>::infinity() : float_of_bits(bits_of(sum) + (bits_of(shifted) << 23));
}

// silu(gate) * up of a row [2 * outputs], the gate's half first, rounded after each.
KERNEL void gate_row(const uint16_t* row, int64_t outputs, uint16_t* out) {
    for (int64_t o = 0; o < outputs; o++) {
        const float gate = float_of(row[o]), activated = gate / (1.f + power_of_e(-gate));
        out[o] = bfloat16_of(rounded_bfloat16(activated) * float_of(row[outputs + o]));
    }
}
