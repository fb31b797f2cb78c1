// A product of few rows, out = x w^T, as every level of instructions takes it.
#pragma once
#include <cstdint>

enum class Number : int { float32, bfloat16, float16 };

// What w is: numbers, codes of 8 bits, or nibbles in the order of `Words` in quantised/nibbles.py.
enum class Weights : int { float32, bfloat16, int8, fp8, fp8_blocks, nibbles };

// To what activations are rounded before the product, and by how many numbers that share a scale.
enum class Rounding : int { none, int8_rows, fp8_rows, fp8_blocks };

// What the scales of nibbles are, see `Nibbles` and `TableNibbles`.
enum class Units : int { centred_bfloat16, centred_float16, bfloat16, float16, table };

constexpr int64_t kBlock = 128;  // inputs, and outputs, of a scale of `fp8_blocks`
constexpr int64_t kChunk = 64;   // rows whose sums are kept at once

struct Product {
    const void* x;        // [rows, inputs] of `dtype`
    const uint8_t* w;     // [outputs, row_bytes]
    // [outputs] of `scale_type`, then the activations' if it is `constant`; of blocks [outputs / 128, inputs / 128]
    // float; units of nibbles.
    const void* scales;
    const void* bias;     // [outputs] of `dtype`, or null
    void* out;            // [rows, outputs] of `dtype`
    int64_t rows, inputs, outputs, row_bytes;
    Number dtype, scale_type;
    Weights weights;
    Rounding rounding;
    bool scaled_first;  // codes are times their scale, rounded to `dtype`, before the product and not after it
    bool constant;      // all rows of activations have one scale
    Units units;
    int64_t group;   // inputs of a scale of nibbles
    int turn;        // bits by which words of nibbles are turned to the left
    void* prepared;  // x as the sums take it
    float* row_scales;  // of x that is rounded by rows
    int32_t* row_sums;  // the same codes' sums
    int64_t x_stride;  // from one prepared row to the next

    // Inputs of a prepared row, in whole vectors. Weights beyond the inputs are zeros, or are multiplied by zeros.
    int64_t padded() const { return (inputs + 63) / 64 * 64; }
};

// Memory of a thread.
struct Scratch {
    static constexpr int64_t kPanelBytes = 32 << 10, kSumBytes = 64 << 10;
    alignas(64) unsigned char panel[kPanelBytes];
    alignas(64) unsigned char sums[kSumBytes];
};
