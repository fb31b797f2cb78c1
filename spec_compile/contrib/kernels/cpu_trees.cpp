// Trees of drafts on a CPU: recycled tokens, two trees as one, and what their outcomes teach. Meanings and layouts are
// in drafters/recycle.py and drafters/trees/merge.py. A tree has at most 64 nodes, so that loops over pairs are short.
// Logits are read here, too, see cpu_top_logits.h.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>

#include "cpu_top_logits.h"

namespace nb = nanobind;

namespace {

constexpr int kMost = 64;  // nodes of a tree
using spec_compile::kLeast;

// Arguments are tuples of addresses and sizes, because each argument of a call takes time.
struct Given {
    nb::tuple values;
    template <class T> T* at(int i) const { return reinterpret_cast<T*>(nb::cast<uintptr_t>(values[i])); }
    int64_t size(int i) const { return nb::cast<int64_t>(values[i]); }
    float number(int i) const { return nb::cast<float>(values[i]); }
};

int nodes_of(int64_t size) {
    if (size < 1 || size > kMost) throw std::invalid_argument("nodes: expected 1 to 64 of a tree");
    return int(size);
}

// The tree below a root, best node first. A node offers its candidates, and the best offer becomes the next node. An
// offer is ((loss * 8 + level) * 1024 + number) << 23 | token; with 8 candidates, node 2 offers the numbers 16 to 23.
int64_t unroll(const int32_t* table, int64_t vocab, int count, int64_t root, bool reads, int nodes, int levels,
               int64_t* ids, int64_t* parents, float* scores) {
    constexpr int64_t kNone = 2047;  // the loss of a missing candidate, above 6 * 255
    std::array<int64_t, kMost * 16> offers;
    int64_t token = root, chosen = -1, level = 0, loss = 0, found = 0;
    for (int node = 0, end = 0; node < nodes; node++) {
        const bool is_real = reads && loss < kNone;
        found += is_real;
        ids[node] = token;
        parents[node] = chosen < 0 ? -1 : chosen / count;
        scores[node] = is_real ? 0.0f - float(loss) * 0.0625f : kLeast;
        for (int child = 0; child < count; child++) {
            offers[end] = INT64_MAX;
            if (level < levels && token >= 0 && token < vocab) {
                const int64_t entry = table[token * count + child];
                const int64_t total = std::min(entry < 0 ? kNone : loss + (entry & 255), kNone);
                offers[end] = ((total * 8 + level) * 1024 + end) << 23 | std::max<int64_t>(entry >> 8, 0);
            }
            end++;
        }
        const auto best = std::min_element(offers.begin(), offers.begin() + end);
        token = *best & 0x7FFFFF;
        const int64_t place = *best >> 23;
        chosen = place & 1023, level = (place >> 10 & 7) + 1, loss = place >> 13;
        *best = INT64_MAX;
    }
    return std::max<int64_t>(found, 1);
}

// Constants of drafters/trees/merge.py.
struct Layout {
    float weight, least, most;
    int64_t depths, bins, lowest, ranks, of_trie, of_both;
    std::vector<int64_t> matches, stages;

    static int64_t bucket(int64_t value, const std::vector<int64_t>& bounds) {
        return std::count_if(bounds.begin(), bounds.end(), [&](int64_t bound) { return value > bound; });
    }
    float within(float p) const { return std::min(std::max(p, least), most); }
};

uint64_t mixed(uint64_t bits) {  // the finaliser of SplitMix64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9;
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB;
    return bits ^ bits >> 31;
}

// A tree of one source, by node. Slots that are not in use hold children of the root.
struct Source {
    const int64_t *tokens, *parents;
    int size;
    std::array<int, kMost> above, depth;
    std::array<uint64_t, kMost> ancestors, keys;  // keys: equal for equal paths from the root
    std::array<bool, kMost> is_used;

    Source(const int64_t* ids, const int64_t* over, int64_t count, int nodes) : tokens(ids), parents(over), size(nodes) {
        for (int i = 0; i < size; i++) {
            const bool is_below = i && parents[i] > 0 && parents[i] < i;
            above[i] = is_below ? int(parents[i]) : 0;
            depth[i] = i ? (parents[i] >= 0) + depth[above[i]] : 0;
            ancestors[i] = uint64_t(1) << i | (i ? ancestors[above[i]] : 0);
            keys[i] = mixed(uint64_t(tokens[i] * kMost + depth[i])) + (i ? keys[above[i]] : 0);
            is_used[i] = i < count;
        }
    }
};

// The last node of the other source on the same path as each node, or -1.
std::array<int, kMost> partners(const Source& own, const Source& other) {
    std::array<int, kMost> found;
    for (int i = 0; i < own.size; i++) {
        found[i] = -1;
        for (int j = 0; j < other.size; j++)
            if (own.is_used[i] && other.is_used[j] && own.keys[i] == other.keys[j] && own.depth[i] == other.depth[j])
                found[i] = j;
    }
    return found;
}

struct Kept {
    int64_t *tokens, *above, *ancestors, *depth, *cells;
    float* priors;
};

// The best tree of both, and its drafts.
void merge(const Source& head, const float* scores, const Source& trie, int64_t match, const float* counts,
           int64_t cells_of_all, const Layout& layout, int nodes, int64_t* tokens, int64_t* parents, int64_t* count,
           int64_t* confidence, const Kept& kept) {
    const int size = head.size, all = size + trie.size;
    const auto partner = partners(trie, head), number = partners(head, trie);
    std::array<float, 2 * kMost> priors, likely, worth;
    std::array<int64_t, 2 * kMost> cells;
    std::array<int, 2 * kMost> up;
    std::array<bool, 2 * kMost> is_draft;

    // The probabilities that the sources expect, and the cells that correct them. First n-grams'.
    std::array<bool, kMost> is_main;
    const int64_t of_match = Layout::bucket(match, layout.matches);
    for (int i = 0; i < trie.size; i++) {
        int rank = 0;
        for (int j = 0; j < i; j++) rank += trie.parents[j] == trie.parents[i] && trie.is_used[j];
        is_main[i] = rank == 0 && (i == 0 || is_main[trie.above[i]]);
        const float share = is_main[i] ? 1.0f : rank == 0 ? 0.6f : rank == 1 ? 0.2f : 0.1f;
        const float length = float(std::max<int64_t>(match + trie.depth[i] - 1, 1));
        const int64_t group = is_main[i] ? 0 : std::min<int64_t>(rank + 1, layout.ranks - 1);
        priors[size + i] = layout.within(share * length / (length + 1));
        cells[size + i] = layout.of_trie + (of_match * layout.ranks + group) * int64_t(layout.stages.size() + 1) +
                          Layout::bucket(trie.depth[i], layout.stages);
        up[size + i] = partner[trie.above[i]] >= 0 ? partner[trie.above[i]] : size + trie.above[i];
        is_draft[size + i] = trie.is_used[i] && partner[i] < 0;
    }
    for (int i = 0; i < size; i++) {
        const float logprob = scores[i] - scores[head.above[i]];
        const float p = layout.within(std::isnan(logprob) ? 0.0f : std::exp(logprob));
        const int64_t bin = int64_t(std::floor(std::log(p / (1 - p)))) - layout.lowest;
        const int64_t place = std::min(std::max<int64_t>(bin, 0), layout.bins - 1);
        const int64_t level = std::min(std::max<int64_t>(head.depth[i], 1), layout.depths) - 1;
        priors[i] = number[i] < 0 ? p : 1 - (1 - p) * (1 - priors[size + number[i]]);
        cells[i] = number[i] < 0 ? level * layout.bins + place : layout.of_both + of_match * layout.bins + place;
        up[i] = head.above[i];
        is_draft[i] = head.is_used[i] && i;
    }

    // The probability of each draft after its parent, and of its path. A node of both sources is the head's.
    for (int i = 0; i < all; i++) {
        const float ratio = (counts[cells[i]] + layout.weight) / (counts[cells_of_all + cells[i]] + layout.weight);
        likely[i] = is_draft[i] ? layout.within(priors[i] * ratio) : 0.0f;
    }
    for (int i = 0; i < all; i++) {
        float total = 0;
        for (int j = 0; j < all; j++) total += up[i] == up[j] ? likely[j] : 0.0f;
        const float own = is_draft[i] ? std::log(likely[i] / std::max(total, 1.0f)) : 0.0f;
        const int local = i < size ? i : i - size;
        const float both = i >= size && partner[local] >= 0 ? worth[partner[local]] : 0.0f;
        worth[i] = is_draft[i] ? own + (local ? worth[up[i]] : 0.0f) : both;
    }

    // The best of them.
    std::array<int, 2 * kMost> order, place;
    for (int i = 0; i < all; i++) {
        order[i] = i;
        if (i && !is_draft[i]) worth[i] = kLeast;
    }
    std::stable_sort(order.begin(), order.begin() + all, [&](int a, int b) { return worth[a] > worth[b]; });
    for (int i = 0; i < all; i++) place[order[i]] = i;
    float expected = 0;
    *count = 0;
    for (int i = 0; i < nodes; i++) {
        const int node = i < all ? order[i] : 0;
        const bool is_real = i < all && worth[node] > kLeast;
        tokens[i] = !is_real ? 0 : node < size ? head.tokens[node] : trie.tokens[node - size];
        parents[i] = !is_real ? 0 : i ? (place[up[node]] < nodes ? place[up[node]] : 0) : -1;
        *count += is_real;
        expected += i && is_real ? std::exp(worth[node]) : 0.0f;
    }
    *confidence = int64_t(std::nearbyint(expected));
    for (int i = 0; i < all; i++) {
        const Source& source = i < size ? head : trie;
        const int local = i < size ? i : i - size;
        kept.tokens[i] = source.tokens[local];
        kept.above[i] = source.above[local];
        kept.ancestors[i] = int64_t(source.ancestors[local]);
        kept.depth[i] = source.depth[local];
        kept.cells[i] = is_draft[i] ? cells[i] : -1;
        kept.priors[i] = priors[i];
    }
}

// Adds what the text from slot `begin` on shows of the drafts of one source.
void learn(const Kept& drafts, int first, int size, const int64_t* text, int64_t capacity, int64_t begin,
           int64_t gained, std::vector<float>& hits, std::vector<float>& expected, std::vector<bool>& found) {
    uint64_t right = 0;
    for (int i = 0; i < size; i++) {
        const int64_t depth = drafts.depth[first + i], slot = std::min(begin + depth, capacity - 1);
        const bool is_right = depth == 0 || (depth <= gained && drafts.tokens[first + i] == text[slot]);
        right |= uint64_t(is_right) << i;
    }
    const auto follows = [&](int i) { return (uint64_t(drafts.ancestors[first + i]) & ~right) == 0; };
    for (int i = 0; i < size; i++) {
        const int64_t cell = drafts.cells[first + i];
        if (cell < 0 || drafts.depth[first + i] > gained || !follows(int(drafts.above[first + i]))) continue;
        found[cell] = true;
        hits[cell] += follows(i);
        expected[cell] += drafts.priors[first + i];
    }
}

}  // namespace

NB_MODULE(_cpu_trees, m) {
    // table, vocab, count, root, stride, reads, batch, nodes, levels; ids, parents, scores, used
    m.def("unroll", [](nb::tuple values) {
        const Given g{values};
        const int nodes = nodes_of(g.size(7));
        for (int64_t b = 0; b < g.size(6); b++)
            g.at<int64_t>(12)[b] = unroll(g.at<int32_t>(0), g.size(1), int(g.size(2)), g.at<int64_t>(3)[b * g.size(4)],
                                          g.at<bool>(5)[b], nodes, int(g.size(8)), g.at<int64_t>(9) + b * nodes,
                                          g.at<int64_t>(10) + b * nodes, g.at<float>(11) + b * nodes);
    });
    // logits, true for bfloat16, rows, vocab, k, temperature, level, threads; log-probabilities or 0, ids; banned,
    // applies and nodes, or 0 of each
    m.def("read_logits", [](nb::tuple values) {
        const Given g{values};
        const int64_t vocab = g.size(3), k = g.size(4);
        if (k < 1 || k > std::min<int64_t>(spec_compile::kMostLogits, vocab))
            throw std::invalid_argument("k: expected 1 to 16, and at most the logits of a row");
        const spec_compile::Rows rows{g.at<void>(0),    vocab,          int(k), g.number(5), g.at<float>(8),
                                      g.at<int64_t>(9), g.at<uint8_t>(10), g.at<uint8_t>(11), g.size(12)};
        using spec_compile::read_row_for;
        const auto read = g.size(1) ? read_row_for<spec_compile::BFloat16>(g.size(6)) : read_row_for<float>(g.size(6));
        const int64_t count = g.size(2), threads = std::max<int64_t>(1, std::min(count, g.size(7)));
        nb::gil_scoped_release release;
        for_parts(count, unsigned(threads), [&](int64_t row) { read(rows, row); });
    });
    // lengths, batch, size, others, nodes, cells; tokens, parents, count of the head, scores; tokens, parents, count,
    // match of n-grams, counts; tokens, parents, count, confidence, begins, and the six of the drafts
    m.def("merge", [](nb::tuple values, nb::tuple numbers, nb::tuple bounds, nb::tuple stages) {
        const Given g{values}, n{numbers};
        Layout layout{n.number(0), n.number(1), n.number(2), n.size(3), n.size(4), n.size(5),
                      n.size(6),   n.size(7),   n.size(8),   {},        {}};
        for (nb::handle each : bounds) layout.matches.push_back(nb::cast<int64_t>(each));
        for (nb::handle each : stages) layout.stages.push_back(nb::cast<int64_t>(each));
        const int size = nodes_of(g.size(2)), others = nodes_of(g.size(3)), nodes = nodes_of(g.size(4));
        for (int64_t b = 0; b < g.size(1); b++) {
            const Source head(g.at<int64_t>(6) + b * size, g.at<int64_t>(7) + b * size, g.at<int64_t>(8)[b], size);
            const Source trie(g.at<int64_t>(10) + b * others, g.at<int64_t>(11) + b * others, g.at<int64_t>(12)[b],
                              others);
            const int64_t at = b * (size + others);
            const Kept kept{g.at<int64_t>(20) + at, g.at<int64_t>(21) + at, g.at<int64_t>(22) + at,
                            g.at<int64_t>(23) + at, g.at<int64_t>(24) + at, g.at<float>(25) + at};
            merge(head, g.at<float>(9) + b * size, trie, g.at<int64_t>(13)[b], g.at<float>(14), g.size(5), layout,
                  nodes, g.at<int64_t>(15) + b * nodes, g.at<int64_t>(16) + b * nodes, g.at<int64_t>(17) + b,
                  g.at<int64_t>(18) + b, kept);
            g.at<int64_t>(19)[b] = g.at<int64_t>(0)[b];
        }
    });
    // counts, cells, batch, size, all; the six of the drafts; begins, begin, lengths, text, stride, capacity
    m.def("learn", [](nb::tuple values, float share) {
        const Given g{values};
        const int size = nodes_of(g.size(3)), all = size + nodes_of(g.size(4) - size);
        std::vector<float> hits(g.size(1)), expected(g.size(1));
        std::vector<bool> found(g.size(1));
        for (int64_t b = 0; b < g.size(2); b++) {
            const int64_t at = b * all, begin = g.at<int64_t>(12)[b];
            const int64_t gained = g.at<int64_t>(11)[b] == begin ? g.at<int64_t>(13)[b] - begin : 0;
            const Kept drafts{g.at<int64_t>(5) + at, g.at<int64_t>(6) + at, g.at<int64_t>(7) + at,
                              g.at<int64_t>(8) + at, g.at<int64_t>(9) + at, g.at<float>(10) + at};
            const int64_t* text = g.at<int64_t>(14) + b * g.size(15);
            learn(drafts, 0, size, text, g.size(16), begin, gained, hits, expected, found);
            learn(drafts, size, all - size, text, g.size(16), begin, gained, hits, expected, found);
        }
        float* counts = g.at<float>(0);
        for (int64_t cell = 0; cell < g.size(1); cell++) {
            if (!found[cell]) continue;
            counts[cell] = share * counts[cell] + hits[cell];
            counts[g.size(1) + cell] = share * counts[g.size(1) + cell] + expected[cell];
        }
    });
}
