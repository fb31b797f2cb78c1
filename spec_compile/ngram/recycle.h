// Drafts on a CPU: entries of a table of recycled tokens (spec_compile/drafters/recycle.py), and the trees of two sources
// as one (spec_compile/drafters/trees/merge.py).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

// Compiled for each level of vector instructions; the first call takes the best that the CPU has.
#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__linux__)
#define SPEC_COMPILE_LEVELS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define SPEC_COMPILE_LEVELS
#endif

namespace spec_compile {

constexpr int kStretch = 64;  // logits that are skipped at once if none is among the best so far

SPEC_COMPILE_LEVELS inline void widen(const uint16_t* bfloats, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = std::bit_cast<float>(uint32_t(bfloats[i]) << 16);
}

// NaN is less than any number here.
SPEC_COMPILE_LEVELS inline float largest(const float* x, int64_t n) {
    float lanes[16];
    std::fill_n(lanes, 16, -std::numeric_limits<float>::infinity());
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; ++j) lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < n; ++i) lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
    return *std::max_element(lanes, lanes + 16);
}

// The sum of e^(x - peak), whose terms are off by at most 1 in 5,000: 2^(n + f) with a polynomial for 2^f, 0 < f <= 1.
SPEC_COMPILE_LEVELS inline float sum_of_powers(const float* x, int64_t n, float peak) {
    float total = 0.0f, terms[kStretch], lanes[kStretch] = {};
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int count = int(std::min<int64_t>(kStretch, n - begin));
        for (int i = 0; i < count; ++i) {
            const float below = x[begin + i] < peak ? x[begin + i] - peak : x[begin + i] >= peak ? 0.0f : -80.0f;
            const float bits = std::max(below, -80.0f) * 1.44269504f;
            const int whole = int(bits) - 1;
            const float f = bits - float(whole);
            const float power = 1.0f + f * (0.695556856f + f * (0.226173572f + f * 0.0781455737f));
            terms[i] = power * std::bit_cast<float>((whole + 127) << 23);
        }
        for (int i = 0; i < count; ++i) lanes[i] += terms[i];
    }
    for (float lane : lanes) total += lane;
    return total;
}

// Writes k entries for a row of n logits: the largest first, the lower id first among equal ones. Ids from `vocab` on
// and logits of -inf are none. See recycle.py for `unit` and `low`.
inline void write_entries(const float* x, int64_t n, int64_t vocab, int k, int unit, int low, int32_t* entries) {
    constexpr float kNone = -std::numeric_limits<float>::infinity(), kMost = std::numeric_limits<float>::max();
    std::vector<std::pair<float, int64_t>> best(k, {kNone, -1});
    for (int64_t begin = 0; begin < n; begin += kStretch) {
        const int64_t end = std::min(begin + kStretch, n);
        if (!(largest(x + begin, end - begin) > best.back().first)) continue;
        for (int64_t i = begin; i < end; ++i) {
            const float logit = std::min(x[i], kMost);
            if (!(logit > best.back().first)) continue;
            auto place = best.end() - 1;
            for (; place != best.begin() && (place - 1)->first < logit; --place) *place = *(place - 1);
            *place = {logit, i};
        }
    }
    const float peak = best[0].first, total = peak > kNone ? std::log(sum_of_powers(x, n, peak)) : 0.0f;
    for (int i = 0; i < k; ++i) {
        const auto [logit, id] = best[i];
        const float bits = std::nearbyint(std::min(float(unit) * (peak - logit + total), float(low)));
        entries[i] = id < 0 || id >= vocab ? -1 : int32_t(id << 8 | std::max(0, int(bits)));
    }
}

// A tree of one source: of its `nodes` slots the first `count` are in use.
struct SourceTree {
    const int64_t *tokens, *parents;
    int nodes, count;
};

// The constants of merge.py.
struct MergeRules {
    int depths, bins, lowest, ranks, first_of_trie, first_of_both;
    float least, most, weight;
    std::vector<int64_t> matches, stages;
};

// What `merge` returns for a row: the tree, and the drafts of both sources.
struct MergedRow {
    int64_t *tokens, *parents, *count, *confidence, *token, *above, *ancestors, *depth, *cell;
    float* prior;
};

inline int bucket(int64_t value, const std::vector<int64_t>& bounds) {
    return int(std::count_if(bounds.begin(), bounds.end(), [&](int64_t bound) { return value > bound; }));
}

// See `merge`. hits, expected: the counts of each cell.
inline void merge_row(const SourceTree& head, const float* scores, const SourceTree& trie, int64_t match,
                      const float* hits, const float* expected, int nodes, const MergeRules& rules, const MergedRow& out) {
    constexpr int kMost = 128;
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    const int size = head.nodes, all = size + trie.nodes, length = bucket(match, rules.matches);
    const auto bounded = [&](float p) { return std::min(std::max(p, rules.least), rules.most); };
    std::array<bool, kMost> is_draft;
    for (int i = 0; i < all; ++i) {
        const SourceTree& source = i < size ? head : trie;
        const int begin = i < size ? 0 : size, own = i - begin, up = int(std::max<int64_t>(source.parents[own], 0));
        out.token[i] = source.tokens[own];
        out.above[i] = up;
        out.ancestors[i] = int64_t(1) << own | 1 | (own ? out.ancestors[begin + up] : 0);
        out.depth[i] = source.parents[own] < 0 ? 0 : out.depth[begin + up] + 1;
        is_draft[i] = own > 0 && own < source.count;
    }

    // The head's node of the same path; -1 if there is none.
    std::array<int, kMost> partner, double_of, above, later{};
    partner.fill(-1), double_of.fill(-1);
    partner[0] = double_of[0] = 0;
    for (int t = 1; t < trie.count; ++t)
        for (int h = 1; h < head.count && partner[out.above[size + t]] >= 0; ++h)
            if (head.tokens[h] == trie.tokens[t] && out.above[h] == partner[out.above[size + t]])
                partner[t] = h, double_of[h] = t;

    // The probabilities that the sources expect, and their cells; first those of n-grams.
    for (int i = size, t = 0; t < trie.nodes; ++i, ++t) {
        int rank = 0;
        for (int other = 1; other < std::min(t, trie.count); ++other) rank += trie.parents[other] == trie.parents[t];
        later[t] = (t ? later[out.above[i]] : 0) + (rank > 0);
        const int group = later[t] == 0 ? 0 : std::min(rank + 1, rules.ranks - 1);
        const float share = later[t] == 0 ? 1.0f : rank == 0 ? 0.6f : rank == 1 ? 0.2f : 0.1f;
        const float tokens = float(std::max<int64_t>(match + out.depth[i] - 1, 1));
        out.prior[i] = bounded(share * tokens / (tokens + 1));
        out.cell[i] = rules.first_of_trie + (length * rules.ranks + group) * int64_t(rules.stages.size() + 1) +
                      bucket(out.depth[i], rules.stages);
        above[i] = partner[out.above[i]] >= 0 ? partner[out.above[i]] : size + int(out.above[i]);
        is_draft[i] = is_draft[i] && partner[t] < 0;
    }
    for (int h = 0; h < size; ++h) {
        const float logprob = scores[h] - scores[out.above[h]], p = bounded(std::isnan(logprob) ? 0 : std::exp(logprob));
        const int bin = std::clamp(int(std::floor(std::log(p / (1 - p)))) - rules.lowest, 0, rules.bins - 1);
        const int twin = double_of[h];
        out.prior[h] = twin < 0 ? p : 1 - (1 - p) * (1 - out.prior[size + twin]);
        out.cell[h] = twin < 0 ? (std::clamp<int64_t>(out.depth[h], 1, rules.depths) - 1) * rules.bins + bin
                               : rules.first_of_both + length * rules.bins + bin;
        above[h] = int(out.above[h]);
    }

    // The worth of each path, and the best of them. A node's parent comes before it, or is the head's.
    std::array<float, kMost> likely{}, sums{}, worth;
    std::array<int, kMost> order, number{};
    for (int i = 0; i < all; ++i) {
        if (!is_draft[i]) out.cell[i] = -1;
        else likely[i] = bounded(out.prior[i] * ((hits[out.cell[i]] + rules.weight) / (expected[out.cell[i]] + rules.weight)));
        sums[above[i]] += likely[i];
        order[i] = i;
    }
    for (int i = 0; i < all; ++i)
        worth[i] = i == 0 ? 0 : is_draft[i] ? worth[above[i]] + std::log(likely[i] / std::max(sums[above[i]], 1.0f)) : kNone;
    std::stable_sort(order.begin(), order.begin() + all, [&](int a, int b) { return worth[a] > worth[b]; });
    float drafts = 0;
    *out.count = 0;
    for (int i = 0; i < nodes; ++i) {
        const int kept = i < all ? order[i] : 0;
        const bool is_real = i < all && worth[kept] > kNone;
        if (is_real) number[kept] = i;
        out.tokens[i] = is_real ? out.token[kept] : 0;
        out.parents[i] = !is_real ? 0 : i ? number[above[kept]] : -1;
        *out.count += is_real;
        drafts += is_real && i ? std::exp(worth[kept]) : 0;
    }
    *out.confidence = int64_t(std::nearbyint(drafts));
}

}  // namespace spec_compile
