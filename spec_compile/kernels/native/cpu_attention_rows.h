// Attention of rows to blocks of keys for one LEVEL of level.h, with the vectors of numbers.h.
//
// A block's keys are turned once, so that the lanes of a vector are keys, and its values are laid out likewise. Both
// stay in the caches while all rows are multiplied by them. Each score adds up the numbers of a head in ascending
// order, and each weighted value the keys in the order of their positions, for any numbers of rows and sizes of tiles.

#include "numbers.h"

constexpr int kVectors = kLanes == 16 ? 4 : 2;  // of a tile of 6 rows: three quarters of the registers are sums

struct FloatSums {
    static INLINE Floats add(Floats sum, Floats a, Floats b) { return fma(a, b, sum); }
};

// Numbers of the caches as floats.
template <class N> struct Singles {
    typedef N Number;
    typedef FloatSums Sums;
    static constexpr int kNumbers = 1;  // of a unit
    static INLINE Floats load_units(const N* at) { return load(at); }
    static INLINE void join(const Number* first, const Number*, float* out) { put(out, load_units(first)); }
    static INLINE void put_weights(const Floats* numbers, float* out) {
        for (int64_t i = 0; i < kBlock / kLanes; i++) put(out + i * kLanes, numbers[i]);
    }
};

#if LEVEL >= 3
// Numbers of bfloat16 that are multiplied as pairs; the sums are float32.
struct Pairs {
    typedef uint16_t Number;
    typedef Pairs Sums;
    static constexpr int kNumbers = 2;  // of a unit
    static INLINE Floats add(Floats sum, Floats a, Floats b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    }
    static INLINE Floats load_units(const Number* at) { return vector_at<Floats>(at); }
    // The numbers of a key of even number, and of the next one.
    static INLINE void join(const Number* first, const Number* second, float* out) {
        put(out, (Floats)(words_of(first) | words_of(second) << 16));
    }
    static INLINE void put_weights(const Floats* numbers, float* out) {
        for (int64_t i = 0; i < kBlock / kLanes; i += 2, out += kLanes)
            put(out, (Floats)_mm512_cvtne2ps_pbh(numbers[i + 1], numbers[i]));
    }
};
#endif

// 2 ** x for x up to 126; 0 below -126.
INLINE Floats exp2_of(Floats x) {
    const Floats magic = spread(0x1.8p23f), shifted = x + magic, f = x - (shifted - magic);
    Floats p = spread(1.535336188319500e-4f);
    p = fma(p, f, spread(1.339887440266574e-3f));
    p = fma(p, f, spread(9.618437357674640e-3f));
    p = fma(p, f, spread(5.550332471162809e-2f));
    p = fma(p, f, spread(2.402264791363012e-1f));
    p = fma(p, f, spread(6.931472028550421e-1f));
    p = fma(p, f, spread(1.f));
    const Floats power = (Floats)((Words)p + ((Words)shifted << 23));
    return x < spread(-126.f) ? spread(0.f) : power;
}

// 2 ** exponent for an integer up to 0, exactly; 0 below -126.
INLINE float power_of_2(float exponent) {
    return exponent < -126.f ? 0.f : float_of_bits(uint32_t(int32_t(exponent) + 127) << 23);
}

// Memory of a thread.
struct Memory {
    float* at;
    float* take(int64_t count) {
        float* const here = at;
        at += padded(count);
        return here;
    }
};

// Products of `a` [M rows, units] and a panel [units, V vectors], added to `out` times `keep` of its row, or to zeros.
template <class S, int M, int V>
KERNEL void multiply(const float* a, int64_t a_stride, const float* panel, int64_t panel_stride, int64_t units,
                     float* out, int64_t out_stride, const float* keep) {
    Floats sums[M][V];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
            sums[m][v] = keep ? load(out + m * out_stride + v * kLanes) * spread(keep[m]) : spread(0.f);
    for (int64_t u = 0; u < units; u++) {
        Floats columns[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) columns[v] = load(panel + u * panel_stride + v * kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Floats number = spread(a[m * a_stride + u]);
#pragma GCC unroll 8
            for (int v = 0; v < V; v++) sums[m][v] = S::add(sums[m][v], number, columns[v]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) put(out + m * out_stride + v * kLanes, sums[m][v]);
}

template <class S, int V>
KERNEL void multiply(int64_t rows, const float* a, int64_t a_stride, const float* panel, int64_t panel_stride,
                     int64_t units, float* out, int64_t out_stride, const float* keep) {
    WITH_ROWS(rows, multiply<S, M, V>(a, a_stride, panel, panel_stride, units, out, out_stride, keep))
}

// The same of any number of rows and columns, which are a multiple of kPad.
template <class S>
KERNEL void multiply_all(int64_t rows, const float* a, int64_t a_stride, const float* panel, int64_t columns,
                         int64_t units, float* out, int64_t out_stride, const float* keep) {
    constexpr int64_t kMostRows = 6, kWidth = kVectors * kLanes;
    const int64_t tiles = (rows + kMostRows - 1) / kMostRows, size = tiles ? (rows + tiles - 1) / tiles : 0;
    for (int64_t m = 0; m < rows; m += size) {
        const int64_t count = std::min(size, rows - m);
        const float* const some = a + m * a_stride;
        const float* const factors = keep ? keep + m : nullptr;
        float* const to = out + m * out_stride;
        int64_t c = 0;
        for (; c + kWidth <= columns; c += kWidth)
            multiply<S, kVectors>(count, some, a_stride, panel + c, columns, units, to + c, out_stride, factors);
        for (; c < columns; c += kLanes)
            multiply<S, 1>(count, some, a_stride, panel + c, columns, units, to + c, out_stride, factors);
    }
}

// The same for numbers of a cache.
template <class S, class... Arguments> INLINE void product(Arguments... arguments) {
    multiply_all<typename S::Sums>(arguments...);
}

// Rows of a cache at `at` whose length is a multiple of a vector; others are copied to `copy` and filled up with zeros.
template <class N> KERNEL void fill_up(const N** at, int64_t count, int64_t size, N* copy) {
    const int64_t whole = padded(size);
    if (size % (sizeof(N) == 2 ? 2 * kPad : kPad) == 0) return;
    for (int64_t i = 0; i < count; i++, copy += 2 * whole) {
        std::memcpy(copy, at[i], size * sizeof(N));
        std::memset(copy + size, 0, (2 * whole - size) * sizeof(N));
        at[i] = copy;
    }
}

// Keys and values as rows are multiplied by them.
template <class S> struct Panels {
    typedef typename S::Number Number;
    const Work& work;
    float *keys, *values;  // [key_units, kBlock], [kBlock / kNumbers, value_columns]
    Number *copies, *zeros;
    const Number* at[kBlock];

    KERNEL Panels(const Work& work, Memory& memory) : work(work) {
        const int64_t size = 2 * std::max(padded(work.call.key_dim), work.call.value_dim + kPad);
        keys = memory.take(work.key_units() * kBlock);
        values = memory.take(work.value_columns() * kBlock);
        copies = (Number*)memory.take(size * kBlock);
        zeros = (Number*)memory.take(size);
        std::memset(zeros, 0, size * sizeof(Number));
    }

    KERNEL const Number* slot(const void* cache, int64_t b, int64_t h, int64_t slot, int64_t size) const {
        return static_cast<const Number*>(cache) + work.slots_before(b, h, slot) * size;
    }

    // Numbers from the block at slot `first` to the next one.
    KERNEL int64_t distance(const void* cache, int64_t b, int64_t h, int64_t first, int64_t size) const {
        return slot(cache, b, h, first + kBlock, size) - slot(cache, b, h, first, size);
    }

    // The first `count` keys of the block at slot `first`; the others are zeros. `ahead` fetches the next block, too.
    APART void load_keys(int64_t b, int64_t h, int64_t first, int64_t count, bool ahead) {
        const int64_t size = work.call.key_dim, next = ahead ? distance(work.call.key_cache, b, h, first, size) : 0;
        const Number* const keys_at = slot(work.call.key_cache, b, h, first, size);
        for (int64_t i = 0; i < kBlock; i++) at[i] = keys_at + (i < count ? i : 0) * size;
        for (int64_t i = count; i < kBlock; i++) at[i] = zeros;
        fill_up(at, count, size, copies);
        for (int64_t i = 0; i < (count + kLanes - 1) / kLanes * kLanes; i += kLanes)
            for (int64_t u = 0; u < work.key_units(); u += kLanes) {
                Floats rows[kLanes];
#pragma GCC unroll 16
                for (int j = 0; j < kLanes; j++) {
                    const Number* const from = at[i + j] + u * S::kNumbers;
                    rows[j] = S::load_units(from);
                    if (next) __builtin_prefetch(at[i] + next + (u + j) * kLanes * S::kNumbers, 0, 3);  // in order
                }
                transpose(rows);
#pragma GCC unroll 16
                for (int j = 0; j < kLanes; j++) put(keys + (u + j) * kBlock + i, rows[j]);
            }
        for (int64_t u = 0; u < work.key_units() && count <= kBlock - kLanes; u++)
            for (int64_t i = (count + kLanes - 1) / kLanes * kLanes; i < kBlock; i++) keys[u * kBlock + i] = 0.f;
    }

    // Values of `count` keys, which `at` has; those `next` numbers further are fetched, too, but for 0.
    APART void join_values(int64_t count, int64_t next) {
        const int64_t size = work.call.value_dim, columns = work.value_columns();
        fill_up(at, count, size, copies);
        if (count < kBlock) at[count] = zeros;
        float* out = values;
        for (int64_t i = 0; i < count; i += S::kNumbers)
            for (int64_t c = 0; c < columns; c += kLanes, out += kLanes) {
                S::join(at[i] + c, at[i + S::kNumbers - 1] + c, out);
                if (next) __builtin_prefetch(at[i] + c + next, 0, 2);
                if (next && S::kNumbers > 1) __builtin_prefetch(at[i + 1] + c + next, 0, 2);
            }
    }

    KERNEL void load_values(int64_t b, int64_t h, int64_t first, int64_t count, bool ahead) {
        const int64_t size = work.call.value_dim;
        const Number* const values_at = slot(work.call.value_cache, b, h, first, size);
        for (int64_t i = 0; i < count; i++) at[i] = values_at + i * size;
        join_values(count, ahead ? distance(work.call.value_cache, b, h, first, size) : 0);
    }
};

// Memory for the rows that are multiplied together.
struct Tile {
    float *scores, *keep;  // [kTile, kBlock], [kTile]; weights take the places of their scores
};

// Scores of keys for which `product` gave products.
INLINE void cap(const Attention& call, float* products, int64_t count) {
    for (int64_t i = 0; i < count && call.softcap; i += kLanes) {
        Floats x = load(products + i) * spread(call.inner);
        x = x > spread(126.f) ? spread(126.f) : x < spread(-126.f) ? spread(-126.f) : x;
        put(products + i, spread(1.f) - spread(2.f) / (exp2_of(x) + spread(1.f)));
    }
}

// Put the weights of a block's scores of one row in their places. state: the row's peak and total, which become those
// after the block. Keys before `first` and from `last` on are not seen. Returns the factor of what was summed before.
template <class S>
APART float weigh(const Attention& call, float* scores, int64_t first, int64_t last, float* state) {
    constexpr int64_t kCount = kBlock / kLanes;
    Floats numbers[kCount], most = spread(-INFINITY), sum = spread(0.f);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCount; i++) {
        Floats v = load(scores + i * kLanes);
        if (first > 0 || last < kBlock) {
            const Ints place = lanes() + spread(int32_t(i * kLanes));
            v = (place >= spread(int32_t(first))) & (place < spread(int32_t(last))) ? v : spread(-INFINITY);
        }
        numbers[i] = v;
        most = larger(most, v);
    }
    const float before = state[0], highest = std::ceil(largest_of(most) * call.outer);
    const float peak = highest > before ? highest : before, base = peak == -INFINITY ? 0.f : peak;
    const float keep = power_of_2(before - base);
#pragma GCC unroll 4
    for (int64_t i = 0; i < kCount; i++) {
        numbers[i] = exp2_of(fma(numbers[i], spread(call.outer), spread(-base)));
        sum = sum + numbers[i];
    }
    S::put_weights(numbers, scores);
    state[0] = peak;
    state[1] = state[1] * keep + sum_of(sum);
    return keep;
}

// The first slot that a row with this position sees: of committed tokens, a token's slot is its position.
INLINE int64_t first_slot(const Attention& call, int64_t position) {
    return call.window ? std::max(position - call.window + 1, int64_t(0)) : 0;
}

// The slots that token n of sequence b sees in a causal chunk, or of the whole blocks of committed ones.
struct Bounds {
    int64_t first, last;
};
KERNEL Bounds bounds_of(const Work& work, int64_t b, int64_t n) {
    const Attention& call = work.call;
    const int64_t length = call.lengths[b];
    const int64_t* const positions = call.positions + b * call.nodes;
    if (call.ancestors) return {first_slot(call, positions[n]), work.shared_end(b)};
    const int64_t first = first_slot(call, positions[n]);
    int64_t m = std::min(first - length, n);  // the first of the chunk's tokens that it sees, or a later one
    while (m > 0 && positions[n] - positions[m - 1] < call.window) m--;
    return {m > 0 ? length + m : std::min(first, length), length + n + 1};
}

INLINE void clear(const Work& work, float* states, int64_t rows) {
    for (int64_t r = 0; r < rows; r++, states += work.width()) {
        std::memset(states, 0, work.width() * sizeof(float));
        states[work.value_columns()] = -INFINITY;
    }
}

// The states of `rows` rows after the shared slots from `begin` to `end`; `queries` and `states` are of row `row`.
template <class S>
KERNEL void shared_blocks(const Work& work, int64_t b, int64_t h, int64_t row, int64_t rows, int64_t begin, int64_t end,
                          float* states, Panels<S>& panels, Tile tile) {
    const int64_t group = work.group(), units = work.key_units(), columns = work.value_columns();
    const float* const queries = reinterpret_cast<const float*>(work.queries_of(b, h)) + row * units;
    const int64_t highest = bounds_of(work, b, (row + rows - 1) / group).last;
    for (int64_t at = begin; at < std::min(end, highest); at += kBlock) {
        const int64_t count = std::min(kBlock, std::min(work.shared_end(b), highest) - at);
        const bool ahead = at + 2 * kBlock <= std::min(end, highest);
        bool loaded = false;
        for (int64_t r = 0; r < rows; r += kTile) {
            const int64_t here = std::min(kTile, rows - r);
            Bounds bounds[kTile];
            bool sees = false;
            for (int64_t i = 0; i < here; i++) {
                bounds[i] = bounds_of(work, b, (row + r + i) / group);
                sees |= bounds[i].first < at + count && bounds[i].last > at;
            }
            if (!sees) continue;
            if (!loaded) panels.load_keys(b, h, at, count, ahead);
            product<S>(here, queries + r * units, units, panels.keys, kBlock, units, tile.scores, kBlock, nullptr);
            cap(work.call, tile.scores, here * kBlock);
            float* const some = states + r * work.width();
            for (int64_t i = 0; i < here; i++)
                tile.keep[i] = weigh<S>(work.call, tile.scores + i * kBlock, bounds[i].first - at, bounds[i].last - at,
                                        some + i * work.width() + columns);
            if (!loaded) panels.load_values(b, h, at, count, ahead);
            loaded = true;
            product<S>(here, tile.scores, kBlock, panels.values, columns, (count + S::kNumbers - 1) / S::kNumbers,
                       some, work.width(), tile.keep);
        }
    }
}

// The slots that a node of a tree sees after the whole blocks of committed ones, in the order of positions.
struct Path {
    int64_t count;
    int64_t slots[kBlock + kMostNodes];
};
KERNEL Path path_of(const Work& work, int64_t b, int64_t n) {
    const int64_t length = work.call.lengths[b];
    Path path{0, {}};
    for (int64_t slot = work.shared_end(b); slot < length; slot++) path.slots[path.count++] = slot;
    const uint64_t ancestors = uint64_t(work.call.ancestors[b * work.call.nodes + n]);
    for (int64_t m = 0; m < work.call.nodes; m++)
        if (ancestors >> m & 1) path.slots[path.count++] = length + m;  // guard: cpu-ancestors
    return path;
}

// Add the keys of a path to the states of its node's rows. scores: [group, 2 * kBlock] of the slots after the whole
// blocks. states: of the rows in the present span and in the next.
template <class S>
KERNEL void path_blocks(const Work& work, int64_t b, int64_t h, int64_t n, const float* scores, float* states,
                        float* next_states, Panels<S>& panels, Tile tile) {
    const Attention& call = work.call;
    const int64_t begin = work.shared_end(b), length = call.lengths[b], group = work.group();
    const int64_t columns = work.value_columns();
    const int64_t* const positions = call.positions + b * call.nodes;
    const Path path = path_of(work, b, n);
    for (int64_t at = 0; at < path.count; at += kBlock) {
        const int64_t count = std::min(kBlock, path.count - at);
        float* const some = at && (begin + at) % kSpan == 0 ? next_states : states;
        bool seen[kBlock];
        for (int64_t i = 0; i < count; i++) {
            const int64_t slot = path.slots[at + i], position = slot < length ? slot : positions[slot - length];
            seen[i] = !call.window || positions[n] - position < call.window;
            panels.at[i] = panels.slot(call.value_cache, b, h, slot, call.value_dim);
        }
        panels.join_values(count, 0);
        for (int64_t g = 0; g < group; g += kTile) {
            const int64_t here = std::min(kTile, group - g);
            for (int64_t r = 0; r < here; r++) {
                float* const arranged = tile.scores + r * kBlock;
                const float* const row = scores + (g + r) * 2 * kBlock;
                for (int64_t i = 0; i < kBlock; i++)
                    arranged[i] = i < count && seen[i] ? row[path.slots[at + i] - begin] : -INFINITY;
                tile.keep[r] = weigh<S>(call, arranged, 0, count, some + (g + r) * work.width() + columns);
            }
            product<S>(here, tile.scores, kBlock, panels.values, columns, (count + S::kNumbers - 1) / S::kNumbers,
                       some + g * work.width(), work.width(), tile.keep);
        }
    }
}

// The states of all rows after what follows the whole blocks of committed tokens: the last ones, and the tree.
template <class S>
KERNEL void tail(const Work& work, int64_t b, int64_t h, float* states, float* next_states, Panels<S>& panels,
                 Tile tile, Memory memory) {
    const int64_t begin = work.shared_end(b), end = work.call.lengths[b] + work.call.nodes, units = work.key_units();
    const float* const queries = reinterpret_cast<const float*>(work.queries_of(b, h));
    float* const scores = memory.take(work.rows() * 2 * kBlock);
    for (int64_t at = begin; at < end; at += kBlock) {
        panels.load_keys(b, h, at, std::min(kBlock, end - at), false);
        product<S>(work.rows(), queries, units, panels.keys, kBlock, units, scores + at - begin, 2 * kBlock, nullptr);
    }
    cap(work.call, scores, work.rows() * 2 * kBlock);
    for (int64_t n = 0; n < work.call.nodes; n++) {
        const int64_t row = n * work.group();
        path_blocks<S>(work, b, h, n, scores + row * 2 * kBlock, states + row * work.width(),
                       next_states + row * work.width(), panels, tile);
    }
}

// Add the states of later keys to those of a row.
KERNEL void fold(const Work& work, float* state, const float* later) {
    const int64_t columns = work.value_columns();
    const float here = state[columns], there = later[columns], peak = here > there ? here : there;
    if (there == -INFINITY) return;
    const float keep = power_of_2(here - peak), take = power_of_2(there - peak);
    for (int64_t c = 0; c < columns; c += kLanes)
        put(state + c, fma(load(later + c), spread(take), load(state + c) * spread(keep)));
    state[columns] = peak;
    state[columns + 1] = state[columns + 1] * keep + later[columns + 1] * take;
}

// The output of row `row` from its state after all keys.
KERNEL void finish(const Work& work, int64_t b, int64_t h, int64_t row, float* state) {
    const Attention& call = work.call;
    const int64_t columns = work.value_columns(), head = h * work.group() + row % work.group();
    float total = state[columns + 1];
    if (call.sinks) {
        const float sink = call.sinks[head] * 1.4426950408889634f, highest = std::ceil(sink), here = state[columns];
        const float peak = highest > here ? highest : here, keep = power_of_2(here - peak);
        float weight[kLanes];
        put(weight, exp2_of(spread(sink - peak)));
        total = total * keep + weight[0];
        for (int64_t c = 0; c < columns; c += kLanes) put(state + c, load(state + c) * spread(keep));
    }
    for (int64_t c = 0; c < columns; c += kLanes) put(state + c, load(state + c) / spread(total));
    const int64_t at = ((b * call.nodes + row / work.group()) * call.heads + head) * call.value_dim;
    if (!call.is_bfloat16) {
        std::memcpy(static_cast<float*>(call.out) + at, state, call.value_dim * sizeof(float));
        return;
    }
    uint16_t* const out = static_cast<uint16_t*>(call.out) + at;
    int64_t c = 0;
    for (; c + kLanes <= call.value_dim; c += kLanes) put(out + c, load(state + c));
    for (; c < call.value_dim; c++) out[c] = bfloat16_of(state[c]);
}

INLINE void put_one(float* at, float number) { *at = number; }
INLINE void put_one(uint16_t* at, float number) { *at = bfloat16_of(number); }

// The last numbers of each half of `rotate`, from the i-th on, fewer than a vector has.
template <class N> KERNEL void rotate_end(const N* head, const N* cos, const N* sin, int64_t i, int64_t half, N* out) {
    for (; i < half; i++) {
        const float first = float_of(head[i]), second = float_of(head[i + half]);
        const float turned = -second * float_of(sin[i]), next = first * float_of(sin[i + half]);
        put_one(out + i, __builtin_fmaf(first, float_of(cos[i]), turned));
        put_one(out + i + half, __builtin_fmaf(second, float_of(cos[i + half]), next));
    }
}

// A head turned by its angles, as Llama has it, and rounded once: with 4 numbers [a, b, c, d] becomes [a cos - c sin,
// b cos - d sin, c cos + a sin, d cos + b sin], each with its own cos and sin.
template <class N> KERNEL void rotate(const N* head, const N* cos, const N* sin, int64_t size, N* out) {
    typedef Singles<N> S;
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        if (i + kLanes > half) return rotate_end(head, cos, sin, i, half, out);
        const Floats first = S::load_units(head + i), second = S::load_units(head + i + half);
        const Floats turned = spread(-1.f) * second * S::load_units(sin + i), next = first * S::load_units(sin + i + half);
        put(out + i, fma(first, S::load_units(cos + i), turned));
        put(out + i + half, fma(second, S::load_units(cos + i + half), next));
    }
}

// Append a head's keys and values to the cache, and lay out its queries.
template <class S> KERNEL void prepare(const Work& work, int64_t b, int64_t h) {
    typedef typename S::Number Number;
    const Attention& call = work.call;
    const int64_t group = work.group(), units = work.key_units(), size = units * S::kNumbers;
    uint32_t* out = work.queries_of(b, h);
    for (int64_t n = 0; n < call.nodes; n++) {
        const auto head_of = [&](const Heads& heads, int64_t head) {
            const int64_t at = b * heads.batch_stride + head * heads.head_stride + n * heads.node_stride;
            return static_cast<const Number*>(heads.at) + at;
        };
        const int64_t slot = work.slots_before(b, h, call.lengths[b] + n);
        const int64_t key_bytes = call.key_dim * sizeof(Number), value_bytes = call.value_dim * sizeof(Number);
        const auto copy_turned = [&](Number* to, const Number* from) {
            const int64_t at = (b * call.nodes + n) * call.key_dim;
            if (!call.cos) std::memcpy(to, from, key_bytes);
            else rotate(from, static_cast<const Number*>(call.cos) + at, static_cast<const Number*>(call.sin) + at,
                        call.key_dim, to);
        };
        copy_turned(static_cast<Number*>(call.key_cache) + slot * call.key_dim, head_of(call.k, h));
        std::memcpy(static_cast<Number*>(call.value_cache) + slot * call.value_dim, head_of(call.v, h), value_bytes);
        for (int64_t g = 0; g < group; g++, out += units) {
            Number* const numbers = reinterpret_cast<Number*>(out);
            copy_turned(numbers, head_of(call.q, h * group + g));
            if (sizeof(Number) * S::kNumbers == 4)
                std::memset(numbers + call.key_dim, 0, (size - call.key_dim) * sizeof(Number));
            else  // each becomes a unit, the last one first, because they share memory
                for (int64_t i = units; i-- > 0;) {
                    uint16_t number = 0;
                    if (i < call.key_dim) std::memcpy(&number, reinterpret_cast<const char*>(out) + 2 * i, 2);
                    out[i] = uint32_t(number) << 16;
                }
        }
    }
}

KERNEL Tile tile_of(Memory& memory) {
    return {memory.take(kTile * kBlock), memory.take(kTile)};
}

// All rows of a span, of which a tree's last one has the tail, too, and writes two.
template <class S> KERNEL void span(const Work& work, int64_t b, int64_t h, int64_t number, float* scratch) {
    Memory memory{scratch};
    Panels<S> panels(work, memory);
    const Tile tile = tile_of(memory);
    const int64_t begin = number * kSpan, shared = work.shared_end(b), end = std::min(begin + kSpan, shared);
    float* const states = work.states_of(b, h, number);
    clear(work, states, work.rows());
    if (begin < end) shared_blocks<S>(work, b, h, 0, work.rows(), begin, end, states, panels, tile);
    if (!work.call.ancestors || number != shared / kSpan) return;
    float* const next = work.states_of(b, h, number + 1);
    clear(work, next, work.rows());
    tail<S>(work, b, h, states, next, panels, tile, memory);
}

// The outputs of all rows from their spans.
KERNEL void merge(const Work& work, int64_t b, int64_t h, int64_t begin, int64_t end, int64_t spans) {
    float* const first = work.states_of(b, h, 0);
    for (int64_t row = begin; row < end; row++) {
        for (int64_t s = 1; s < spans; s++)
            fold(work, first + row * work.width(), work.states_of(b, h, s) + row * work.width());
        finish(work, b, h, row, first + row * work.width());
    }
}

// All spans of some rows of a causal chunk.
template <class S>
KERNEL void rows_of_chunk(const Work& work, int64_t b, int64_t h, int64_t begin, int64_t end, float* scratch) {
    Memory memory{scratch};
    Panels<S> panels(work, memory);
    const Tile tile = tile_of(memory);
    float* const states = memory.take((end - begin) * work.width());
    float* const later = memory.take((end - begin) * work.width());
    clear(work, states, end - begin);
    for (int64_t at = 0; at < work.shared_end(b); at += kSpan) {
        clear(work, later, end - begin);
        const int64_t last = std::min(at + kSpan, work.shared_end(b));
        shared_blocks<S>(work, b, h, begin, end - begin, at, last, later, panels, tile);
        for (int64_t r = 0; r < end - begin; r++) fold(work, states + r * work.width(), later + r * work.width());
    }
    for (int64_t r = begin; r < end; r++) finish(work, b, h, r, states + (r - begin) * work.width());
}

#undef LEVEL
