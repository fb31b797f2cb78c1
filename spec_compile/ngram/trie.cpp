// Python bindings of the n-gram trie. spec_compile/ngram/trie.py checks arguments; only errors that would leave
// the trie or the memory in disorder are checked here, too.
#include <cstring>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "trie.h"

namespace nb = nanobind;
using namespace spec_compile;

namespace {

template <class T> T* pointer(uintptr_t address) { return reinterpret_cast<T*>(address); }

template <class T> nb::bytes to_bytes(const std::vector<T>& values) {
    return nb::bytes(values.data(), values.size() * sizeof(T));
}

template <class T> std::vector<T> from_bytes(const nb::bytes& bytes) {
    std::vector<T> values(bytes.size() / sizeof(T));
    if (!values.empty()) std::memcpy(values.data(), bytes.c_str(), values.size() * sizeof(T));
    return values;
}

// One trie and the lock around it. Every method may be called from any thread. An overlay reads a base, too, whose
// lock it takes after its own.
class Core {
public:
    using Guard = std::lock_guard<FairMutex>;

    Core(int branch_length, int min_window, int max_window, int min_breadth, int max_breadth, int64_t capacity,
         bool by_frequency, int64_t vocab_size)
        : params_{branch_length, min_window, max_window, min_breadth, max_breadth, capacity, by_frequency, vocab_size},
          trie_(std::make_unique<Trie>(checked(params_))) {}
    explicit Core(Core* base) : params_(base->params_), base_(base), trie_(std::make_unique<Trie>(params_)) {
        if (base->base_) throw std::invalid_argument("an overlay is not made of another overlay");
    }

    int64_t open() { Guard guard(mutex_); return trie_->open(); }
    void close(int64_t stream) { Guard guard(mutex_); trie_->close(stream); }
    int64_t length(int64_t stream) { Guard guard(mutex_); return trie_->length(stream); }

    // In pieces, so that other threads wait for microseconds, however long the text is.
    void extend(int64_t stream, uintptr_t tokens, int64_t n) {
        const auto* text = pointer<const int64_t>(tokens);
        { Guard guard(mutex_); trie_->length(stream); trie_->check(text, 0, n); }
        for (int64_t done = 0; done < n; done += kPiece) {
            Guard guard(mutex_);
            trie_->extend(stream, text + done, std::min(kPiece, n - done));
        }
    }

    nb::tuple propose(int64_t stream, int n, uintptr_t tokens, uintptr_t parents) {
        std::pair<int, int> result;
        {
            nb::gil_scoped_release release;
            check_budget(n);
            Guard guard(mutex_);
            result = propose_locked(stream, n, pointer<int64_t>(tokens), pointer<int64_t>(parents));
        }
        return nb::make_tuple(result.first, result.second);
    }

    void advance(uintptr_t streams_, uintptr_t tokens_, int64_t row_stride, uintptr_t committed_, int64_t batch, int n,
                 uintptr_t out_tokens_, uintptr_t out_parents_, uintptr_t out_count_, uintptr_t out_match_) {
        const auto *streams = pointer<const int64_t>(streams_), *tokens = pointer<const int64_t>(tokens_),
                   *committed = pointer<const int64_t>(committed_);
        auto *out_tokens = pointer<int64_t>(out_tokens_), *out_parents = pointer<int64_t>(out_parents_),
             *out_count = pointer<int64_t>(out_count_), *out_match = pointer<int64_t>(out_match_);
        check_budget(n);
        Guard guard(mutex_);
        for (int64_t b = 0; b < batch; ++b) {  // all rows are checked before any is added
            const int64_t seen = streams[b] < 0 ? 0 : trie_->length(streams[b]);
            if (committed[b] < std::max<int64_t>(seen, 1))
                throw std::invalid_argument("committed[" + std::to_string(b) + "] is " + std::to_string(committed[b]) +
                                            ": a row has at least one token, and a stream never gets shorter (its length is " +
                                            std::to_string(seen) + ")");
            if (streams[b] >= 0) trie_->check(tokens + b * row_stride, seen, committed[b]);
        }
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t* row = tokens + b * row_stride;
            if (streams[b] < 0) {
                std::fill_n(out_tokens + b * n, n, 0);
                std::fill_n(out_parents + b * n, n, 0);
                out_tokens[b * n] = row[committed[b] - 1];
                out_parents[b * n] = -1;
                out_count[b] = 1;
                out_match[b] = 0;
                continue;
            }
            const int64_t seen = trie_->length(streams[b]);
            trie_->extend(streams[b], row + seen, committed[b] - seen);
            std::tie(out_count[b], out_match[b]) =
                propose_locked(streams[b], n, out_tokens + b * n, out_parents + b * n);
        }
    }

    nb::dict stats() {
        int64_t nodes, tokens, streams, bytes, evicted;
        {
            nb::gil_scoped_release release;
            Guard guard(mutex_);
            nodes = trie_->nodes(), tokens = trie_->occurrences(), streams = trie_->streams();
            bytes = int64_t(trie_->bytes()), evicted = trie_->evicted();
        }
        nb::dict out;
        out["nodes"] = nodes;
        out["tokens"] = tokens;
        out["occurrences"] = tokens;  // each held token starts one
        out["streams"] = streams;
        out["bytes"] = bytes;
        out["evicted"] = evicted;
        return out;
    }

    void reset() {
        replace(std::make_unique<Trie>(params_));
    }

    nb::tuple snapshot() {
        Snapshot s;
        {
            nb::gil_scoped_release release;
            Guard guard(mutex_);
            s = trie_->snapshot();
        }
        return nb::make_tuple(s.nodes, to_bytes(s.tokens), to_bytes(s.next), to_bytes(s.order));
    }

    void restore(int64_t nodes, nb::bytes tokens, nb::bytes next, nb::bytes order) {
        const Snapshot s{from_bytes<int32_t>(tokens), from_bytes<uint32_t>(next), from_bytes<int32_t>(order), nodes};
        nb::gil_scoped_release release;
        auto fresh = std::make_unique<Trie>(params_);
        fresh->restore(s);
        replace(std::move(fresh));
    }

    // Around a fork of the process: no other thread is in the trie meanwhile. The child has no waiting threads.
    void hold() { mutex_.lock(); }
    void release(bool in_child) {
        if (in_child) new (&mutex_) FairMutex();
        else mutex_.unlock();
    }

private:
    std::pair<int, int> propose_locked(int64_t stream, int n, int64_t* tokens, int64_t* parents) {
        if (!base_) return trie_->propose(stream, n, tokens, parents);
        Guard guard(base_->mutex_);
        return trie_->propose(stream, n, tokens, parents, base_->trie_.get());
    }
    void replace(std::unique_ptr<Trie> fresh) {  // the old trie is freed outside the lock
        Guard guard(mutex_);
        fresh->continue_numbering(trie_->last_stream());
        trie_.swap(fresh);
    }

    static constexpr int64_t kPiece = 1024;

    static const TrieParams& checked(const TrieParams& p) {
        if (p.branch_length < 2 || p.branch_length > kMaxBranchLength || p.min_window < 1 || p.max_window < p.min_window ||
            p.max_window >= p.branch_length || p.min_breadth < 1 || p.max_breadth < p.min_breadth ||
            p.max_breadth > (1 << 20) || p.capacity < 2 * p.branch_length || p.capacity > INT32_MAX || p.vocab_size < 1 ||
            p.vocab_size > int64_t(1) << 31)
            throw std::invalid_argument("n-gram trie: a parameter is out of range");
        return p;
    }
    static void check_budget(int n) {
        if (n < 1 || n > kMaxDraftTokens)
            throw std::invalid_argument("a draft tree has 1 to 64 nodes, not " + std::to_string(n));
    }

    TrieParams params_;
    Core* base_ = nullptr;
    FairMutex mutex_;
    std::unique_ptr<Trie> trie_;
};

}  // namespace

NB_MODULE(_ngram_trie, m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Core>(m, "Core", "The core of ngram.trie.NgramTrie; pointers are addresses of int64 arrays.")
        .def(nb::init<int, int, int, int, int, int64_t, bool, int64_t>(), nb::arg("branch_length"), nb::arg("min_w"),
             nb::arg("max_w"), nb::arg("min_b"), nb::arg("max_b"), nb::arg("capacity"), nb::arg("match_type_is_prob"),
             nb::arg("vocab_size") = int64_t(1) << 31)
        .def("overlay", [](Core& base) { return new Core(&base); }, nb::keep_alive<0, 1>())
        .def("open", &Core::open, Release())
        .def("close", &Core::close, nb::arg("stream"), Release())
        .def("length", &Core::length, nb::arg("stream"), Release())
        .def("extend", &Core::extend, nb::arg("stream"), nb::arg("ptr"), nb::arg("n"), Release())
        .def("propose", &Core::propose, nb::arg("stream"), nb::arg("n"), nb::arg("out_tokens_ptr"),
             nb::arg("out_parents_ptr"))
        .def("advance", &Core::advance, nb::arg("streams_ptr"), nb::arg("tokens_ptr"), nb::arg("row_stride"),
             nb::arg("committed_ptr"), nb::arg("batch"), nb::arg("n"), nb::arg("out_tokens_ptr"),
             nb::arg("out_parents_ptr"),
             nb::arg("out_count_ptr"), nb::arg("out_match_ptr"), Release())
        .def("stats", &Core::stats)
        .def("hold", &Core::hold, Release())
        .def("release", &Core::release, nb::arg("in_child"))
        .def("reset", &Core::reset, Release())
        .def("snapshot", &Core::snapshot)
        .def("restore", &Core::restore, nb::arg("nodes"), nb::arg("tokens"), nb::arg("next"), nb::arg("order"));
}
