// Attention of a block of tokens on a CPU, as every level of instructions takes it. "Row" is a query head of a token.
#pragma once
#include <cstdint>

// Where head h of token n of sequence b lies; distances are in numbers, and a head's numbers lie side by side.
struct Heads {
    const void* at;
    int64_t batch_stride, head_stride, node_stride;
};

struct Attention {
    Heads q, k, v;
    void *key_cache, *value_cache;                   // [pages, kv_heads, slots, key_dim or value_dim]
    const void *cos, *sin;                           // [batch, nodes, key_dim], or null: q and k are rotated already
    const int64_t *lengths, *ancestors, *positions;  // [batch], [batch, nodes] or null, [batch, nodes]
    const float* sinks;                              // [heads], or null
    void* out;                                       // [batch, nodes, heads, value_dim]
    // [batch, columns], or null. Slot s of sequence b is slot s % kBlock of page table[b, s / kBlock], and a page has
    // kBlock slots. Without a table there is one page for each sequence, which has all of its slots.
    const int32_t* table;
    int64_t batch, heads, kv_heads, nodes, pages, slots, columns, key_dim, value_dim;
    // A score in base 2 is q k * outer, or with softcap outer * tanh(q k * inner / (2 log2 e)).
    float inner, outer;
    bool softcap, is_bfloat16;
    int64_t window;  // 0: none
};

// Keys are taken in blocks of positions, and a block's numbers are added to those of its span, so that the order in
// which the keys of a token are added up depends on its own position only.
constexpr int64_t kBlock = 64;
constexpr int64_t kSpan = 512;
constexpr int64_t kTile = 24;   // rows that are multiplied by a block before the next ones, for the L1 cache
constexpr int64_t kShare = 96;  // rows of a prompt for which a thread reads keys and values once
constexpr int64_t kPad = 16;    // numbers of a vector of the widest level
constexpr int64_t kMostNodes = 64;

constexpr int64_t padded(int64_t count) { return (count + kPad - 1) / kPad * kPad; }

// The state of a row after some keys: the weighted values [value_columns], the peak and the total of weights.
struct Work {
    const Attention& call;
    bool in_pairs;      // the keys' and values' numbers are multiplied as pairs of bfloat16
    uint32_t* queries;  // [batch, kv_heads, rows, key_units]
    float* states;      // [batch, kv_heads, spans, rows, width]; null: units keep their own
    int64_t spans;

    int64_t group() const { return call.heads / call.kv_heads; }
    int64_t rows() const { return call.nodes * group(); }
    int64_t number_size() const { return call.is_bfloat16 ? 2 : 4; }
    // Units of 32 bits of a query or key, zeros at the end included.
    int64_t key_units() const { return padded(in_pairs ? (call.key_dim + 1) / 2 : call.key_dim); }
    int64_t value_columns() const { return padded(call.value_dim); }
    int64_t width() const { return value_columns() + kPad; }
    // Slots of the caches before a slot of KV head h of sequence b.
    int64_t slots_before(int64_t b, int64_t h, int64_t slot) const {
        if (!call.table) return (b * call.kv_heads + h) * call.slots + slot;
        const int64_t page = call.table[b * call.columns + slot / kBlock];
        return (page * call.kv_heads + h) * kBlock + slot % kBlock;
    }
    // Slots of sequence b that are taken in blocks for all rows: all in a causal chunk, or the whole blocks of
    // committed tokens.
    int64_t shared_end(int64_t b) const {
        return call.ancestors ? call.lengths[b] / kBlock * kBlock : call.lengths[b] + call.nodes;
    }
    uint32_t* queries_of(int64_t b, int64_t h) const {
        return queries + (b * call.kv_heads + h) * rows() * key_units();
    }
    float* states_of(int64_t b, int64_t h, int64_t span) const {
        return states + ((b * call.kv_heads + h) * spans + span) * rows() * width();
    }
};
