// The n-gram trie: every n-gram (up to `branch_length` tokens) of the texts seen so far, with how often
// and how recently each continuation followed, and the draft trees grown from it. No Python in here.
//
// Texts are streams of tokens. Each token starts one *occurrence*: the path of the next `branch_length`
// tokens, its own included. Occurrences are held in order of arrival and leave oldest first, so the trie is
// always made of a window of the newest occurrences. Three ideas keep it small and quick:
//
//  1. One log. All streams append to one log of tokens, each linked to the next token of its stream. The
//     held occurrences are exactly the log's entries [head, tail), so evicting an occurrence frees its text.
//  2. Leaves. Deep n-grams are nearly all unique. A node that only one occurrence has reached is kept as a
//     *leaf*: it points at its token in the log, and the nodes below it are read from the text. They count
//     as nodes (`nodes` is exact) but take no memory, and an occurrence that grows inside its own leaf costs
//     an addition. A second occurrence reaching a leaf makes it an inner node with a leaf below.
//  3. Independent look-ups. A new token extends up to `branch_length` paths, at as many different nodes:
//     all their cache lines are fetched before the first is used.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "store.h"

namespace spec_compile {

struct TrieParams {
    int branch_length, min_window, max_window, min_breadth, max_breadth;
    int64_t capacity;
    bool by_frequency;   // match_type "PROB"
    int64_t vocab_size;  // ids are in [0, vocab_size)
};

constexpr int kMaxDraftTokens = 64, kMaxBranchLength = 256;

// All that decides a trie's drafts: the held tokens with their links, and the order of siblings (which also
// remembers touches of occurrences that have left).
struct Snapshot {
    std::vector<int32_t> tokens;
    std::vector<uint32_t> next;
    std::vector<int32_t> order;
    int64_t nodes = 0;
};

class Trie {
public:
    explicit Trie(const TrieParams& params)
        : params_(params), depth_(params.branch_length), capacity_(params.capacity) {
        for (int d = 0; d < depth_; ++d)  // breadth at depth d: from max at the root to min at the deepest
            breadth_.push_back(params.min_breadth +
                               (depth_ - 1 - d) * (params.max_breadth - params.min_breadth) / (depth_ - 1));
        pool_[pool_.allocate()] = Node{-1, 0, 0, 0, 0, 0, 0, 0, kIndexed};
    }

    int64_t open() {
        streams_.emplace(++last_stream_, Stream(depth_));
        return last_stream_;
    }
    int64_t length(int64_t stream) { return at(stream).length; }
    void close(int64_t stream) { at(stream); streams_.erase(stream); }

    // Throws if one of tokens[begin:end] is outside the vocabulary.
    void check(const int64_t* tokens, int64_t begin, int64_t end) const {
        for (int64_t i = begin; i < end; ++i)
            if (uint64_t(tokens[i]) >= uint64_t(params_.vocab_size))
                throw std::invalid_argument("token id " + std::to_string(tokens[i]) + " at position " +
                                            std::to_string(i) +
                                            " is outside [0, " + std::to_string(params_.vocab_size) + ")");
    }

    void extend(int64_t stream, const int64_t* tokens, int64_t n) {  // tokens: checked
        Stream& s = at(stream);
        for (int64_t i = 0; i < n; ++i) {
            if (i + 2 < n) index_.prefetch(ChildIndex::hash(kRoot, int32_t(tokens[i + 2])));
            append(s, int32_t(tokens[i]));
        }
    }

    // Writes a draft tree of at most n nodes: node 0 is the stream's last token, parents come before children,
    // siblings are distinct. Returns {nodes, longest match}. `base`: another trie of the same parameters that is
    // matched, too, and not changed; among matches of one length this trie's comes first.
    std::pair<int, int> propose(int64_t stream, int n, int64_t* tokens, int64_t* parents, Trie* base = nullptr) {
        Stream& s = at(stream);
        if (s.length == 0)
            throw std::invalid_argument("stream " + std::to_string(stream) + " holds no token yet: extend it first");
        Draft draft(tokens, parents, n, s.newest()->token);
        find_anchors(s, base);
        if (params_.by_frequency) grow_by_frequency(draft); else grow_by_recency(draft);
        return {draft.count, anchors_.empty() ? 0 : anchors_.front().place.depth};
    }

    int64_t nodes() const { return nodes_; }
    int64_t occurrences() const { return log_.size(); }
    int64_t evicted() const { return int64_t(log_.head()); }
    int64_t streams() const { return int64_t(streams_.size()); }
    // Stream numbers go on where a trie that this one replaces has stopped: an old number never names a new stream.
    int64_t last_stream() const { return last_stream_; }
    void continue_numbering(int64_t last_stream) { last_stream_ = std::max(last_stream_, last_stream); }
    size_t bytes() const {
        size_t ranked = 0;
        for (auto& [id, list] : ranked_) ranked += sizeof(list) + 32 + list.capacity() * sizeof(Ranked);
        return pool_.bytes() + index_.bytes() + log_.bytes() + ranked +
               streams_.size() * (sizeof(Stream) + 4 * depth_ * sizeof(Start));
    }

    Snapshot snapshot() {
        Snapshot out;
        for (uint64_t pos = log_.head(); pos < log_.tail(); ++pos) {
            out.tokens.push_back(log_[uint32_t(pos)].token);
            out.next.push_back(log_[uint32_t(pos)].next);
        }
        for_each_branch([&](int32_t id) {
            for (int32_t c = node(id).child; c; c = node(c).older) out.order.push_back(node(c).token);
        });
        out.nodes = nodes_;
        return out;
    }

    // Fills a new, empty trie. Throws std::invalid_argument if the snapshot contradicts itself.
    void restore(const Snapshot& in) {
        const size_t n = in.tokens.size();
        auto require = [](bool ok, const char* what) { if (!ok) throw std::invalid_argument(what); };
        require(in.next.size() == n, "it has not one link for each token");
        require(in.nodes <= params_.capacity && int64_t(n) <= params_.capacity,
                "it holds more than this trie's capacity");
        capacity_ = INT64_MAX;
        std::unordered_map<size_t, int64_t> waiting;  // position of a stream's next token -> stream
        for (size_t i = 0; i < n; ++i) {
            require(in.tokens[i] >= 0 && in.tokens[i] < params_.vocab_size,
                    "it holds token ids outside the vocabulary");
            auto found = waiting.find(i);
            const int64_t stream = found == waiting.end() ? open() : found->second;
            if (found != waiting.end()) waiting.erase(found);
            append(at(stream), in.tokens[i]);
            if (in.next[i] == 0) close(stream);
            else require(i + in.next[i] < n && waiting.emplace(i + in.next[i], stream).second, "its links are broken");
        }
        require(nodes_ == in.nodes, "its number of nodes does not fit its text");  // guard: saved-tries
        size_t used = 0;
        for_each_branch([&](int32_t id) {
            std::vector<int32_t> children;
            for (int32_t c = node(id).child; c; c = node(c).older) {
                require(used < in.order.size(), "its sibling order is too short");
                children.push_back(find_child(id, in.order[used++]));
            }
            std::vector<int32_t> sorted(children);
            std::sort(sorted.begin(), sorted.end());
            require(sorted[0] && std::unique(sorted.begin(), sorted.end()) == sorted.end(),
                    "its sibling order does not fit its text");
            for (size_t i = children.size(); i-- > 0;) move_to_front(id, children[i]);
        });
        require(used == in.order.size(), "its sibling order is too long");
        capacity_ = params_.capacity;
    }

private:
    static constexpr int32_t kRoot = 0;

    // An occurrence that may still grow. `at` is its node, or ~leaf while it is inside a leaf that nothing else has reached.
    struct Start { uint64_t pos; int32_t token, at; };

    struct Stream {  // its last tokens, newest first: newest()[k] started k tokens ago
        explicit Stream(int depth) : depth(depth), begin(4 * depth), recent(4 * depth) {}
        Start* newest() { return recent.data() + begin; }
        void push(Start start) {
            if (begin == 0) {
                std::copy_backward(recent.begin(), recent.begin() + (depth - 1), recent.end());
                begin = recent.size() - (depth - 1);
            }
            recent[--begin] = start;
            ++length;
        }
        int depth;
        size_t begin;
        int64_t length = 0;
        std::vector<Start> recent;
    };

    // A place in the trie: an inner node, or (inside a leaf) the token at log position `pos`.
    struct Place { int32_t node; uint32_t pos; int depth; };
    struct Anchor { Trie* trie; Place place; };

    struct Draft {
        Draft(int64_t* tokens, int64_t* parents, int n, int64_t root) : tokens(tokens), parents(parents), n(n) {
            std::fill(tokens, tokens + n, 0);
            std::fill(parents, parents + n, 0);
            tokens[0] = root;
            parents[0] = -1;
        }
        // The child of `parent` with this token, made if there is none; -1 if there is no room for it.
        int add(int parent, int32_t token) {
            for (int i = first[parent]; i; i = sibling[i])
                if (tokens[i] == token) return i;
            if (full()) return -1;
            tokens[count] = token;
            parents[count] = parent;
            sibling[count] = first[parent];
            first[parent] = int8_t(count);
            return count++;
        }
        bool full() const { return count == n; }
        int64_t *tokens, *parents;
        int n, count = 1;
        std::array<int8_t, kMaxDraftTokens> first{}, sibling{};  // 0: none; the root is nobody's child
    };

    Node& node(int32_t id) { return pool_[id]; }
    bool is_leaf(int32_t id) { return node(id).flags & kLeaf; }

    Stream& at(int64_t stream) {
        auto found = streams_.find(stream);
        if (found == streams_.end()) throw std::invalid_argument("stream " + std::to_string(stream) + " is not open");
        return found->second;
    }

    // ---- nodes and siblings -------------------------------------------------------------------------------

    int32_t find_child(int32_t parent, int32_t token) {
        const Node& p = node(parent);
        if (p.child && node(p.child).token == token) return p.child;
        return p.flags & kIndexed ? find_indexed(parent, token, ChildIndex::hash(parent, token)) : 0;
    }
    int32_t find_indexed(int32_t parent, int32_t token, uint64_t hash) {
        return index_.find(hash, [&](int32_t id) { return node(id).parent == parent && node(id).token == token; });
    }

    // The root's children need no order: a match has at least one token.
    void link(int32_t parent, int32_t id) {
        if (parent == kRoot) return;
        Node& p = node(parent);
        Node& c = node(id);
        c.newer = 0;
        c.older = p.child;
        if (p.child) node(p.child).newer = id;
        p.child = id;
    }
    void unlink(int32_t parent, int32_t id) {
        if (parent == kRoot) return;
        const Node& c = node(id);
        (c.newer ? node(c.newer).older : node(parent).child) = c.older;
        if (c.older) node(c.older).newer = c.newer;
    }
    void move_to_front(int32_t parent, int32_t id) {
        if (node(parent).child == id) return;
        unlink(parent, id);
        link(parent, id);
    }

    int32_t add_leaf(int32_t parent, int32_t token, uint32_t pos) {
        Node& p = node(parent);
        const int32_t id = pool_.allocate();
        node(id) = Node{token, parent, 1, 0, 0, 0, int32_t(pos), uint16_t(p.depth + 1), kLeaf};
        if (p.child && !(p.flags & kIndexed)) {  // no longer an only child
            index_.insert(ChildIndex::hash(parent, node(p.child).token), p.child);
            p.flags |= kIndexed;
        }
        if (p.flags & kIndexed) index_.insert(ChildIndex::hash(parent, token), id);
        link(parent, id);
        ++p.child_sum;
        if (p.flags & kRanked) rerank(parent, id, true);
        return id;
    }
    void remove(int32_t id) {
        const Node& n = node(id);
        if (node(n.parent).flags & kIndexed) index_.erase(ChildIndex::hash(n.parent, n.token), id);
        unlink(n.parent, id);
        if (n.flags & kRanked) ranked_.erase(id);
        pool_.release(id);
    }

    // One more occurrence reaches node `id`. Its first owner's text goes on in a new leaf below it.
    void touch(int32_t parent, int32_t id) {
        Node& c = node(id);
        Node& p = node(parent);
        if (c.flags & kLeaf) {
            const uint32_t pos = uint32_t(c.child), next = log_[pos].next;
            c.flags = 0;
            c.child = 0;
            if (next && c.depth < depth_) add_leaf(id, log_[pos + next].token, pos + next);
        }
        ++c.count;
        ++p.child_sum;
        if (parent != kRoot) move_to_front(parent, id);
        if (p.flags & kRanked) rerank(parent, id, true);
    }

    // ---- growing and evicting -----------------------------------------------------------------------------

    // If a start's leaf has been split since, walks down to where the start is now. `newest` points at the
    // last of the start's `depth` tokens. False: it is still the only one inside its leaf.
    bool settle(Start& start, const Start* newest, int depth) {
        if (start.at >= 0) return true;
        int32_t id = ~start.at;
        while (!is_leaf(id) && node(id).depth < depth) id = find_child(id, newest[depth - node(id).depth - 1].token);
        start.at = is_leaf(id) ? ~id : id;
        return start.at >= 0;
    }

    // How many of the stream's last branch_length - 1 occurrences are held: the longest may have been evicted.
    int growing(Stream& s) {
        int n = int(std::min<int64_t>(s.length, depth_ - 1));
        while (n && s.newest()[n - 1].pos < log_.head()) --n;
        return n;
    }

    void append(Stream& s, int32_t token) {
        int old = growing(s);
        while (nodes_ + old + 1 > capacity_ || log_.size() >= capacity_) {
            evict_oldest();
            old = growing(s);
        }
        const uint64_t pos = log_.push(token);
        s.push({pos, token, kRoot});
        Start* starts = s.newest();

        // Find the child each start goes to. No two starts are at the same depth, so none changes what
        // another finds here; only a start inside a leaf (at < 0) may be moved by a shorter one.
        struct Probe { uint64_t hash; int32_t child; bool search; } probes[kMaxBranchLength];
        for (int d = 0; d <= old; ++d) {
            const int32_t at = starts[d].at;
            probes[d] = {0, 0, false};
            if (at < 0) continue;
            const Node& p = node(at);
            if (p.child && node(p.child).token == token) { probes[d].child = p.child; continue; }
            if (!(p.flags & kIndexed)) continue;
            probes[d] = {ChildIndex::hash(at, token), 0, true};
            index_.prefetch(probes[d].hash);
        }
        for (int d = 0; d <= old; ++d) {
            if (!probes[d].search) continue;
            probes[d].child = index_.find(probes[d].hash, [](int32_t) { return true; });  // only by the hash
            if (probes[d].child) SPEC_COMPILE_PREFETCH(&node(probes[d].child));
        }
        for (int d = 0; d <= old; ++d) {  // d: how many tokens the start had before this one
            Start& start = starts[d];
            int32_t child = probes[d].child;
            if (start.at < 0) {
                if (!settle(start, starts + 1, d)) { ++nodes_; continue; }
                child = find_child(start.at, token);
            } else if (probes[d].search && child && (node(child).parent != start.at || node(child).token != token)) {
                child = find_indexed(start.at, token, probes[d].hash);  // two keys with one hash
            }
            if (child) {
                touch(start.at, child);
                start.at = child;
                if (node(child).child) SPEC_COMPILE_PREFETCH(&node(node(child).child));
            } else {
                start.at = ~add_leaf(start.at, token, uint32_t(pos));
                ++nodes_;
            }
        }
        if (old) log_[uint32_t(starts[1].pos)].next = uint32_t(pos - starts[1].pos);  // starts[1] is held
    }

    void evict_oldest() {
        int32_t path[kMaxBranchLength], id = kRoot;
        int length = 0;
        uint32_t pos = uint32_t(log_.head());
        for (;; pos += log_[pos].next) {
            const int32_t parent = id;
            id = find_child(parent, log_[pos].token);
            path[length++] = id;
            --node(id).count;
            --node(parent).child_sum;
            if (node(parent).flags & kRanked) rerank(parent, id, false);
            if (is_leaf(id) || length == depth_ || !log_[pos].next) break;
        }
        if (is_leaf(id))  // and the nodes below it, which are only in the text
            for (int d = length; d < depth_ && log_[pos].next; ++d, --nodes_) pos += log_[pos].next;
        while (length && node(path[length - 1]).count == 0) {
            remove(path[--length]);
            --nodes_;
        }
        log_.pop();
    }

    // ---- matching and draft trees ---------------------------------------------------------------------------

    // Calls f(token, place) for the children of a place, most recent first, while f returns true.
    template <class F> void for_children(const Place& at, F f) {
        if (at.depth == depth_) return;
        if (is_leaf(at.node)) {
            const uint32_t next = log_[at.pos].next;
            if (next) f(log_[at.pos + next].token, Place{at.node, at.pos + next, at.depth + 1});
            return;
        }
        for (int32_t c = node(at.node).child; c; c = node(c).older)
            if (!f(node(c).token, Place{c, uint32_t(node(c).child), at.depth + 1})) return;
    }
    bool has_children(const Place& at) {
        bool any = false;
        for_children(at, [&](int32_t, const Place&) { any = true; return false; });
        return any;
    }

    // The places of the stream's last w tokens that have children, longest first, here and in `base`.
    void find_anchors(Stream& s, Trie* base) {
        anchors_.clear();
        Start* newest = s.newest();
        const int held = growing(s);
        for (int w = int(std::min<int64_t>({params_.max_window, s.length, depth_ - 1})); w >= params_.min_window; --w) {
            Place place{kRoot, 0, 0};
            if (locate(place, newest, held, w) && has_children(place)) anchors_.push_back({this, place});
            place = {kRoot, 0, 0};
            if (base && base->descend(place, newest, w) && base->has_children(place)) anchors_.push_back({base, place});
        }
    }
    bool locate(Place& place, Start* newest, int held, int w) {
        if (w > held) return descend(place, newest, w);  // this stream's own occurrence was evicted
        if (!settle(newest[w - 1], newest, w)) return false;  // the only one in its leaf: nothing follows
        place = {newest[w - 1].at, 0, w};
        return true;
    }
    bool descend(Place& place, const Start* newest, int w) {
        while (place.depth < w) {
            const int32_t token = newest[w - place.depth - 1].token;
            if (is_leaf(place.node)) {
                const uint32_t next = log_[place.pos].next;
                if (!next || log_[place.pos + next].token != token) return false;
                place = {place.node, place.pos + next, place.depth + 1};
            } else {
                const int32_t c = find_child(place.node, token);
                if (!c) return false;
                place = {c, uint32_t(node(c).child), place.depth + 1};
            }
        }
        return true;
    }

    void grow_by_recency(Draft& draft) {
        std::array<std::pair<Place, int>, kMaxDraftTokens> queue;  // an anchor reaches a draft node once
        for (const auto& [trie, anchor] : anchors_) {
            int head = 0, tail = 0;
            queue[tail++] = {anchor, 0};
            while (head < tail && !draft.full()) {
                const auto [place, parent] = queue[head++];
                int breadth = place.depth < depth_ ? breadth_[place.depth] : 0;
                trie->for_children(place, [&, parent = parent](int32_t token, const Place& child) {
                    const int i = draft.add(parent, token);
                    if (i < 0) return false;
                    queue[tail++] = {child, i};
                    return --breadth > 0;
                });
            }
        }
    }

    struct Candidate { double score; int match; uint32_t order; int32_t token; int parent; Trie* trie; Place place; };
    static bool worse(const Candidate& a, const Candidate& b) {
        if (a.score != b.score) return a.score < b.score;
        if (a.match != b.match) return a.match < b.match;
        return a.order > b.order;
    }

    void grow_by_frequency(Draft& draft) {
        heap_.clear();
        uint32_t order = 0;
        double start = 1.0;
        int match = anchors_.empty() ? 0 : anchors_.front().place.depth;
        for (const auto& [trie, anchor] : anchors_) {  // an anchor (parent -1): as much as its best child can be
            if (anchor.depth < match) start /= 2;
            match = anchor.depth;
            heap_.push_back({start, match, order++, 0, -1, trie, anchor});
        }
        while (!heap_.empty() && !draft.full()) {
            std::pop_heap(heap_.begin(), heap_.end(), worse);
            const Candidate best = heap_.back();
            heap_.pop_back();
            const int i = best.parent < 0 ? 0 : draft.add(best.parent, best.token);
            const Place& place = best.place;
            Trie& trie = *best.trie;
            auto offer = [&](double score, int32_t token, const Place& child) {
                heap_.push_back({score, best.match, order++, token, i, &trie, child});
                std::push_heap(heap_.begin(), heap_.end(), worse);
            };
            if (place.depth == depth_ || trie.is_leaf(place.node)) {
                trie.for_children(place, [&](int32_t token, const Place& child) {
                    offer(best.score, token, child);
                    return false;
                });
                continue;
            }
            const double sum = trie.node(place.node).child_sum;
            const auto& children = trie.most_frequent(place.node);
            for (size_t k = 0; k < children.size() && k < size_t(params_.max_breadth); ++k) {
                const Node& c = trie.node(children[k].node);
                offer(best.score * c.count / sum, c.token, {children[k].node, uint32_t(c.child), place.depth + 1});
            }
        }
    }

    // Children by (count, recency). A node with many children lists its first few in `ranked_`; all others rank
    // below the last of these. The list is four times as long as needed, so that it can lose some.
    struct Ranked { int32_t node; uint32_t count; uint64_t touched; };
    size_t rank_limit() const { return 4 * size_t(params_.max_breadth); }

    const std::vector<Ranked>& most_frequent(int32_t parent) {
        if (node(parent).flags & kRanked) {
            const auto& list = ranked_[parent];
            if (list.size() >= size_t(params_.max_breadth)) return list;
        }
        scratch_.clear();
        uint64_t touched = clock_;
        size_t children = 0;
        for (int32_t c = node(parent).child; c; c = node(c).older, ++children) {
            const Ranked entry{c, node(c).count, touched--};
            if (scratch_.size() == rank_limit()) {
                if (scratch_.back().count >= entry.count) continue;
                scratch_.pop_back();
            }
            scratch_.insert(std::upper_bound(scratch_.begin(), scratch_.end(), entry, above), entry);
        }
        if (children > rank_limit()) {
            node(parent).flags |= kRanked;
            return ranked_[parent] = scratch_;
        }
        if (node(parent).flags & kRanked) {
            node(parent).flags &= ~kRanked;
            ranked_.erase(parent);
        }
        return scratch_;
    }
    static bool above(const Ranked& a, const Ranked& b) {
        return a.count != b.count ? a.count > b.count : a.touched > b.touched;
    }
    void rerank(int32_t parent, int32_t id, bool touched) {
        auto& list = ranked_[parent];
        auto found = std::find_if(list.begin(), list.end(), [&](const Ranked& e) { return e.node == id; });
        const bool listed = found != list.end();
        if (!listed && !touched) return;
        const Ranked entry{id, node(id).count, touched ? ++clock_ : found->touched};
        if (listed) list.erase(found);
        auto place = std::upper_bound(list.begin(), list.end(), entry, above);
        // At the end of the list only a listed child that rose is sure to outrank all that are not listed.
        if (place == list.end() && !(listed && touched)) return;
        list.insert(place, entry);
        if (list.size() > rank_limit()) list.pop_back();
    }

    // Visits every node with at least two children, in an order that depends on the texts and sibling order only.
    template <class F> void for_each_branch(F f) {
        std::vector<int32_t> stack, tokens;
        for (uint64_t pos = log_.head(); pos < log_.tail(); ++pos) tokens.push_back(log_[uint32_t(pos)].token);
        std::sort(tokens.begin(), tokens.end());
        tokens.erase(std::unique(tokens.begin(), tokens.end()), tokens.end());
        for (int32_t token : tokens) {
            stack.push_back(find_child(kRoot, token));
            while (!stack.empty()) {
                const int32_t id = stack.back();
                stack.pop_back();
                if (is_leaf(id) || !node(id).child) continue;
                if (node(node(id).child).older) f(id);
                for (int32_t c = node(id).child; c; c = node(c).older) stack.push_back(c);
            }
        }
    }

    TrieParams params_;
    int depth_;
    int64_t capacity_, last_stream_ = -1, nodes_ = 0;
    std::vector<int> breadth_;
    NodePool pool_;
    ChildIndex index_;
    TextLog log_;
    std::unordered_map<int64_t, Stream> streams_;
    std::unordered_map<int32_t, std::vector<Ranked>> ranked_;
    uint64_t clock_ = uint64_t(1) << 40;
    std::vector<Anchor> anchors_;
    std::vector<Candidate> heap_;
    std::vector<Ranked> scratch_;
};

}  // namespace spec_compile
