// Python bindings of the n-gram trie. spec_compile/ngram/trie.py checks arguments for people; what would leave the
// trie or the memory in disorder is checked here, too, whoever calls.
#include <algorithm>
#include <cstring>
#include <tuple>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "trie.h"

namespace nb = nanobind;
using namespace spec_compile;

namespace {

// The int64 numbers of an array, which stays as it is while this lives. The last dimension is contiguous.
class Numbers {
public:
    Numbers(nb::handle array, const char* name, int dims, bool is_written = false) : name_(name) {
        if (PyObject_GetBuffer(array.ptr(), &view_, is_written ? PyBUF_RECORDS : PyBUF_RECORDS_RO) != 0) {
            PyErr_Clear();
            fail(nb::exception_type::type_error, is_written ? "must be a writable array of int64" : kInt64);
        }
        const char* format = view_.format ? view_.format : "B";
        if (format[0] == '@' || format[0] == '=') ++format;
        if (view_.itemsize != 8 || (std::strcmp(format, "l") != 0 && std::strcmp(format, "q") != 0)) {
            PyBuffer_Release(&view_);
            fail(nb::exception_type::type_error, kInt64);
        }
        const char* wrong = nullptr;
        if (view_.ndim != dims) wrong = "has another number of dimensions";
        else if (size(dims - 1) > 1 && view_.strides[dims - 1] != 8) wrong = "must be contiguous";
        else if (dims == 2 && size(0) > 1 && (view_.strides[0] % 8 || view_.strides[0] / 8 < size(1)))
            wrong = "must have rows that do not overlap";
        else if (reinterpret_cast<uintptr_t>(view_.buf) % 8) wrong = "must lie at a multiple of 8 bytes";
        if (wrong) {
            PyBuffer_Release(&view_);
            fail(nb::exception_type::value_error, wrong);
        }
    }
    Numbers(const Numbers&) = delete;
    ~Numbers() { PyBuffer_Release(&view_); }

    int64_t size(int dim) const { return view_.shape[dim]; }
    int64_t* row(int64_t b) const { return data() + (size(0) > 1 ? b * (view_.strides[0] / 8) : 0); }
    int64_t* data() const { return static_cast<int64_t*>(view_.buf); }
    void expect(int64_t rows, int64_t columns = 1) const {
        if (size(0) != rows || (view_.ndim == 2 && size(1) != columns))
            fail(nb::exception_type::value_error,
                 ("must have shape [" + std::to_string(rows) +
                  (view_.ndim == 2 ? ", " + std::to_string(columns) : "") + "]").c_str());
    }

private:
    static constexpr const char* kInt64 = "must be an array of int64";
    [[noreturn]] void fail(nb::exception_type type, const char* what) const {
        throw nb::builtin_exception(type, (std::string(name_) + " " + what).c_str());
    }
    Py_buffer view_;
    const char* name_;
};

template <class T> nb::bytes to_bytes(const std::vector<T>& values) {
    return nb::bytes(values.data(), values.size() * sizeof(T));
}

template <class T> std::vector<T> from_bytes(const nb::bytes& bytes) {
    if (bytes.size() % sizeof(T)) throw std::invalid_argument("it has a part of a number");
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
    void extend(int64_t stream, nb::handle tokens) {
        const Numbers ids(tokens, "tokens", 1);
        const int64_t n = ids.size(0), *text = ids.data();
        nb::gil_scoped_release release;
        { Guard guard(mutex_); trie_->length(stream); trie_->check(text, 0, n); }
        for (int64_t done = 0; done < n; done += kPiece) {
            Guard guard(mutex_);
            trie_->extend(stream, text + done, std::min(kPiece, n - done));
        }
    }

    nb::tuple propose(int64_t stream, nb::handle tokens, nb::handle parents) {
        const Numbers out_tokens(tokens, "out_tokens", 1, true), out_parents(parents, "out_parents", 1, true);
        const int n = budget(out_tokens.size(0));
        out_parents.expect(n);
        std::pair<int, int> result;
        {
            nb::gil_scoped_release release;
            Guard guard(mutex_);
            result = propose_locked(stream, n, out_tokens.data(), out_parents.data());
        }
        return nb::make_tuple(result.first, result.second);
    }

    void advance(nb::handle streams_, nb::handle tokens_, nb::handle committed_, nb::handle out_tokens_,
                 nb::handle out_parents_, nb::handle out_count_, nb::handle out_match_) {
        const Numbers streams(streams_, "streams", 1), tokens(tokens_, "tokens", 2),
            committed(committed_, "committed", 1), out_tokens(out_tokens_, "out_tokens", 2, true),
            out_parents(out_parents_, "out_parents", 2, true),
            out_count(out_count_, "out_count", 1, true), out_match(out_match_, "out_match", 1, true);
        const int64_t batch = tokens.size(0);
        const int n = budget(out_tokens.size(1));
        for (auto* each : {&streams, &committed, &out_tokens, &out_parents, &out_count, &out_match})
            each->expect(batch, n);
        nb::gil_scoped_release release;
        Guard guard(mutex_);
        // Copies, which another thread cannot change between the check and the use.
        const std::vector<int64_t> ids(streams.data(), streams.data() + batch);
        const std::vector<int64_t> ends(committed.data(), committed.data() + batch);
        std::vector<int64_t> sorted(ids);
        std::sort(sorted.begin(), sorted.end());
        for (int64_t b = 0; b < batch; ++b) {  // all rows are checked before any is added
            const int64_t seen = ids[b] < 0 ? 0 : trie_->length(ids[b]);
            if (b && sorted[b] >= 0 && sorted[b] == sorted[b - 1])
                throw std::invalid_argument("streams holds " + std::to_string(sorted[b]) + " twice");
            if (ends[b] < std::max<int64_t>(seen, 1))
                throw std::invalid_argument("committed[" + std::to_string(b) + "] is " + std::to_string(ends[b]) +
                                            ": a row has at least one token, and a stream never gets shorter (its length is " +
                                            std::to_string(seen) + ")");
            if (ends[b] > tokens.size(1))
                throw std::invalid_argument("committed holds " + std::to_string(ends[b]) + ", but tokens has only " +
                                            std::to_string(tokens.size(1)) + " columns");
            if (ids[b] >= 0) trie_->check(tokens.row(b), seen, ends[b]);  // guard: rows-checked
        }
        for (int64_t b = 0; b < batch; ++b) {
            const int64_t* row = tokens.row(b);
            int64_t *draft = out_tokens.row(b), *above = out_parents.row(b);
            if (ids[b] < 0) {
                std::fill_n(draft, n, 0);
                std::fill_n(above, n, 0);
                draft[0] = row[ends[b] - 1];
                above[0] = -1;
                out_count.data()[b] = 1;
                out_match.data()[b] = 0;
                continue;
            }
            const int64_t seen = trie_->length(ids[b]);
            trie_->extend(ids[b], row + seen, ends[b] - seen);
            std::tie(out_count.data()[b], out_match.data()[b]) = propose_locked(ids[b], n, draft, above);
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
    void hold() { mutex_.lock(); is_held_ = true; }
    void release(bool in_child) {
        if (!is_held_) throw std::invalid_argument("release() without hold()");
        is_held_ = false;
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
    static int budget(int64_t n) {
        if (n < 1 || n > kMaxDraftTokens)
            throw std::invalid_argument("a draft tree has 1 to 64 nodes, not " + std::to_string(n));
        return int(n);
    }

    TrieParams params_;
    Core* base_ = nullptr;
    FairMutex mutex_;
    bool is_held_ = false;
    std::unique_ptr<Trie> trie_;
};

}  // namespace

NB_MODULE(_ngram_trie, m) {
    using Release = nb::call_guard<nb::gil_scoped_release>;
    nb::class_<Core>(m, "Core", "The core of ngram.trie.NgramTrie; arrays are buffers of int64.")
        .def(nb::init<int, int, int, int, int, int64_t, bool, int64_t>(), nb::arg("branch_length"), nb::arg("min_w"),
             nb::arg("max_w"), nb::arg("min_b"), nb::arg("max_b"), nb::arg("capacity"), nb::arg("match_type_is_prob"),
             nb::arg("vocab_size") = int64_t(1) << 31)
        .def("overlay", [](Core& base) { return new Core(&base); }, nb::keep_alive<0, 1>())
        .def("open", &Core::open, Release())
        .def("close", &Core::close, nb::arg("stream"), Release())
        .def("length", &Core::length, nb::arg("stream"), Release())
        .def("extend", &Core::extend, nb::arg("stream"), nb::arg("tokens"))
        .def("propose", &Core::propose, nb::arg("stream"), nb::arg("out_tokens"), nb::arg("out_parents"))
        .def("advance", &Core::advance, nb::arg("streams"), nb::arg("tokens"), nb::arg("committed"),
             nb::arg("out_tokens"), nb::arg("out_parents"), nb::arg("out_count"), nb::arg("out_match"))
        .def("stats", &Core::stats)
        .def("hold", &Core::hold, Release())
        .def("release", &Core::release, nb::arg("in_child"))
        .def("reset", &Core::reset, Release())
        .def("snapshot", &Core::snapshot)
        .def("restore", &Core::restore, nb::arg("nodes"), nb::arg("tokens"), nb::arg("next"), nb::arg("order"));
}
