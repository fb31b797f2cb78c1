// A product of few rows, out = x w^T, as every level of instructions takes it.
#pragma once
#include <cstdint>

enum class Number : int { float32, bfloat16, float16 };

// What w is: numbers, codes of 8 bits, or codes of 4 or 8 bits in the order of `CodeBlocks` in quantised/blocks.py.
enum class Weights : int { float32, bfloat16, int8, fp8, fp8_blocks, blocks4, blocks8 };

// To what activations are rounded before the product, and by how many numbers that share a scale.
enum class Rounding : int { none, int8_rows, fp8_rows, fp8_blocks };

// What `CodeBlocks` have beside a scale: what is taken from a number before it is scaled, or added after that.
enum class Second : int { none, point, minimum };

constexpr int64_t kBlock = 128;  // inputs, and outputs, of a scale of `fp8_blocks`
constexpr int64_t kChunk = 64;   // rows whose sums are kept at once

// A segment of a prepared row, see cpu_gemm_blocks.h: its sum; and of whole numbers, by what they are multiplied, and
// with what a sum of products begins.
struct Segment {
    float sum, scale;
    int32_t first;
};

struct Product {
    const void* x;        // [rows, inputs] of `dtype`
    const uint8_t* w;     // [outputs, row_bytes]
    // [outputs] of `scale_type`, then the activations' if it is `constant`; of blocks [outputs / 128, inputs / 128]
    // float; units of `CodeBlocks`.
    const void* scales;
    const void* bias;     // [outputs] of `dtype`, or null
    void* out;            // [rows, outputs] of `dtype`
    int64_t rows, inputs, outputs, row_bytes;
    Number dtype, scale_type;
    Weights weights;
    Rounding rounding;
    bool scaled_first;  // codes are times their scale, rounded to `dtype`, before the product and not after it
    bool constant;      // all rows of activations have one scale
    const float* table;  // [16]: the numbers of codes of 4 bits
    int64_t group;       // inputs that share units of `CodeBlocks`
    Second second;
    Number rounds;   // to what weights in `CodeBlocks` are rounded; float32: not at all
    void* prepared;  // x as the sums take it
    float* row_scales;  // of x that is rounded by rows
    int32_t* row_sums;  // the same codes' sums
    int64_t x_stride;  // from one prepared row to the next
    Segment* x_segments;  // [rows, segments]
    int64_t segments;
    bool whole;  // codes stand for whole numbers: in 8 bits, or in 4 bits if `table` is -8, -7 and so on

    // Inputs of a prepared row, in whole vectors. Weights beyond the inputs are zeros, or are multiplied by zeros.
    int64_t padded() const { return (inputs + 63) / 64 * 64; }
    bool in_blocks() const { return weights == Weights::blocks4 || weights == Weights::blocks8; }
    bool has_sums() const { return in_blocks() && second != Second::none; }
};

// The norm before a product of bfloat16 and the gate after it, see cpu_gemm_around.h.
struct Around {
    const void* norm;      // [inputs]: the weight of an RMSNorm of x; or null
    const void* residual;  // [rows, inputs]: added to x before the norm; or null
    void* stream;          // [rows, inputs]: memory for this sum
    float eps, offset;
    bool rounds_first;  // the normed row is rounded before it is multiplied by the weight, to which nothing is added
    bool is_gated;      // the first half of the outputs is a gate of the second
};

// Memory of a thread.
struct Scratch {
    static constexpr int64_t kPanelBytes = 32 << 10, kSumBytes = 64 << 10;
    alignas(64) unsigned char panel[kPanelBytes];
    alignas(64) unsigned char sums[kSumBytes];
};

// What gives the outputs begin .. end of at most kChunk rows, once x is prepared.
typedef void (*Kernel)(const Product&, int64_t row, int64_t begin, int64_t end, Scratch&);

// The kernels for a level of instructions, each from its cpu_gemm_LEVEL.cpp.
struct Level {
    Kernel (*kernel_of)(const Product&);
    void (*prepare)(const Product&, int64_t row);
    bool (*is_prepared)(const Product&);
    int64_t (*element_size)(const Product&);
    void (*norm_row)(const Product&, const Around&, int64_t row, uint16_t* normed);
    void (*gate_row)(const uint16_t* row, int64_t outputs, uint16_t* out);
};
extern const Level kAvx2, kAvx512, kAvx512Bf16;
