// The storage of the n-gram trie (trie.h): the text, the nodes, and the index of children. Each grows in
// pieces, so that capacity costs nothing until it is used and no insertion waits for a large copy.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>
#if defined(__GNUC__)
#define SPEC_COMPILE_PREFETCH(address) __builtin_prefetch(address, 1)
#else
#define SPEC_COMPILE_PREFETCH(address) ((void)(address))
#endif

namespace spec_compile {

// The held texts: a queue of tokens addressed by position; `next` is the distance to the next token of the
// same stream, 0 at its end. Positions are used modulo 2^32, far above what a trie can hold.
class TextLog {
public:
    struct Entry { int32_t token; uint32_t next; };

    Entry& operator[](uint32_t pos) { return chunks_[(pos >> kBits) & (chunks_.size() - 1)][pos & (kChunk - 1)]; }
    uint64_t head() const { return head_; }
    uint64_t tail() const { return tail_; }
    int64_t size() const { return int64_t(tail_ - head_); }

    uint64_t push(int32_t token) {
        if (tail_ % kChunk == 0 || chunks_.empty()) add_chunk();
        (*this)[uint32_t(tail_)] = {token, 0};
        return tail_++;
    }
    void pop() {
        auto& chunk = chunks_[(uint32_t(head_) >> kBits) & (chunks_.size() - 1)];
        if (++head_ % kChunk == 0) { spare_ = std::move(chunk); }
    }
    size_t bytes() const {
        size_t used = spare_ ? 1 : 0;
        for (auto& chunk : chunks_) used += chunk ? 1 : 0;
        return used * kChunk * sizeof(Entry) + chunks_.capacity() * sizeof(chunks_[0]);
    }

private:
    static constexpr int kBits = 12;
    static constexpr uint32_t kChunk = 1u << kBits;
    using Chunk = std::unique_ptr<Entry[]>;

    void add_chunk() {
        uint64_t first = head_ >> kBits, last = tail_ >> kBits;
        if (last - first + 1 > chunks_.size()) {  // a ring of chunk pointers, doubled when full
            std::vector<Chunk> bigger(std::max<size_t>(8, chunks_.size() * 2));
            for (uint64_t i = first; i < last; ++i)
                bigger[i & (bigger.size() - 1)] = std::move(chunks_[i & (chunks_.size() - 1)]);
            chunks_.swap(bigger);
        }
        chunks_[last & (chunks_.size() - 1)] = spare_ ? std::move(spare_) : Chunk(new Entry[kChunk]);
    }

    std::vector<Chunk> chunks_;
    Chunk spare_;
    uint64_t head_ = 0, tail_ = 0;
};

// 32 bytes, two to a cache line. Ids are indices into the pool; 0 is the root, and "none" in a link.
struct alignas(32) Node {
    int32_t token, parent;
    uint32_t count;      // occurrences through this node
    uint32_t child_sum;  // sum of its children's counts
    int32_t newer, older;  // siblings by last touch
    int32_t child;         // inner node: the most recently touched child; leaf: log position of its token
    uint16_t depth, flags;
};
enum : uint16_t {
    kLeaf = 1,     // one occurrence, nodes below are in the text
    kIndexed = 2,  // this node's children are in the ChildIndex; an only child is found without it
    kRanked = 4,   // this node's most frequent children are kept in `ranked_`
};

class NodePool {
public:
    Node& operator[](int32_t id) { return chunks_[uint32_t(id) >> kBits][id & (kChunk - 1)]; }

    int32_t allocate() {
        if (!free_.empty()) { int32_t id = free_.back(); free_.pop_back(); return id; }
        if ((uint32_t(used_) >> kBits) == chunks_.size()) chunks_.emplace_back(new Node[kChunk]);
        return used_++;
    }
    void release(int32_t id) { free_.push_back(id); }
    size_t bytes() const {
        return chunks_.size() * (kChunk * sizeof(Node) + sizeof(chunks_[0])) + free_.capacity() * sizeof(int32_t);
    }

private:
    static constexpr int kBits = 12;
    static constexpr int32_t kChunk = 1 << kBits;
    std::vector<std::unique_ptr<Node[]>> chunks_;
    std::vector<int32_t> free_;
    int32_t used_ = 0;
};

// (parent, token) -> child, by open addressing. The upper hash bits pick one of many small tables that grow
// each on its own, so no insertion waits for more than a thousandth of the entries to move.
class ChildIndex {
public:
    static uint64_t hash(int32_t parent, int32_t token) {
        uint64_t h = (uint64_t(uint32_t(parent)) << 32 | uint32_t(token)) * 0x9E3779B97F4A7C15ull;
        h = (h ^ h >> 32) * 0xD6E8FEB86659FD93ull;
        return h ^ h >> 32;
    }
    void prefetch(uint64_t h) const {
        const Table& t = tables_[h >> kShift];
        SPEC_COMPILE_PREFETCH(t.slots.get() + (uint32_t(h) & t.mask));
    }
    // The id filed under `h` for which `is_it(id)` holds, or 0.
    template <class F> int32_t find(uint64_t h, F is_it) const {
        const Table& t = tables_[h >> kShift];
        if (!t.slots) return 0;
        for (uint32_t i = uint32_t(h) & t.mask; t.slots[i].node; i = (i + 1) & t.mask)
            if (t.slots[i].hash == uint32_t(h) && is_it(t.slots[i].node)) return t.slots[i].node;
        return 0;
    }
    void insert(uint64_t h, int32_t node) {
        Table& t = tables_[h >> kShift];
        if (!t.slots || ++t.used * 4 > (t.mask + 1) * 3) grow(t);
        place(t, {uint32_t(h), node});
    }
    void erase(uint64_t h, int32_t node) {
        Table& t = tables_[h >> kShift];
        uint32_t hole = uint32_t(h) & t.mask;
        while (t.slots[hole].node != node) hole = (hole + 1) & t.mask;
        for (uint32_t i = (hole + 1) & t.mask; t.slots[i].node; i = (i + 1) & t.mask) {
            uint32_t home = t.slots[i].hash & t.mask;  // move back a later entry that may fill the hole
            if (((i - home) & t.mask) >= ((i - hole) & t.mask)) { t.slots[hole] = t.slots[i]; hole = i; }
        }
        t.slots[hole].node = 0;
        --t.used;
    }
    size_t bytes() const {
        size_t slots = 0;
        for (auto& t : tables_) slots += t.slots ? t.mask + 1 : 0;
        return slots * sizeof(Slot) + tables_.size() * sizeof(Table);
    }

private:
    struct Slot { uint32_t hash; int32_t node; };  // node 0: empty
    struct Table { std::unique_ptr<Slot[]> slots; uint32_t mask = 0, used = 0; };
    static constexpr int kShift = 54;

    static void place(Table& t, Slot slot) {
        uint32_t i = slot.hash & t.mask;
        while (t.slots[i].node) i = (i + 1) & t.mask;
        t.slots[i] = slot;
    }
    static void grow(Table& t) {
        uint32_t size = t.slots ? (t.mask + 1) * 2 : 8;
        Table bigger{std::make_unique<Slot[]>(size), size - 1, std::max(t.used, 1u)};
        for (uint32_t i = 0; t.slots && i <= t.mask; ++i)
            if (t.slots[i].node) place(bigger, t.slots[i]);
        t = std::move(bigger);
    }
    std::vector<Table> tables_ = std::vector<Table>(size_t(1) << (64 - kShift));
};

class FairMutex {  // first come, first served: a long add() lets a round in between its pieces
public:
    void lock() {
        std::unique_lock<std::mutex> hold(mutex_);
        const uint64_t ticket = next_++;
        turn_.wait(hold, [&] { return ticket == serving_; });
    }
    void unlock() {
        { std::lock_guard<std::mutex> hold(mutex_); ++serving_; }
        turn_.notify_all();
    }

private:
    std::mutex mutex_;
    std::condition_variable turn_;
    uint64_t next_ = 0, serving_ = 0;
};

}  // namespace spec_compile
