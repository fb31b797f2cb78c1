// Draft trees from n-gram matches. match.py defines them and launches the two kernels:
//
//   ngram_scan   rows * blocks: each block reads a stretch of one row's text, its reference and the corpus, newest
//                first, and leaves its `limit` best matches, best first.
//   ngram_build  rows: takes the `limit` best of all blocks and grows the row's tree from them.
//
// The age of a position is its distance from the newest one: first the row's own text, backwards from its last token
// but one (the last has no successor), then the row's reference and then the corpus, each backwards from its end. With
// the text [a, b, c], the reference [r] and the corpus [d, e], b has age 0, a 1, r 2, e 3 and d 4. A match is better if
// it is longer, and then if it is younger; no two are equal, so the best are the same set in any order of the threads.
//
// Each round runs this code once, with cold instruction caches, so loops are unrolled only if speed needs it.
//
// WORDS (1 or 2): 64-bit words in a set of matches, so that limit <= 64 * WORDS.

typedef unsigned long long u64;

constexpr unsigned kAll = 0xffffffffu;
constexpr int kItems = SCAN_ITEMS;  // positions a thread reads at a time
constexpr int kTile = SCAN_THREADS * kItems;
constexpr int kMaxWindow = 255;
constexpr int kSorted = 256;  // at most this many keys are sorted by comparing all with all
constexpr int kUnknown = -2;

extern __shared__ __align__(16) unsigned char shared_memory[];

// Tokens of 32 or 64 bits; only the lower 32 are read.
struct Text {
    const int* tokens;
    int step;  // 1 or 2
    unsigned size;
    __device__ int operator[](unsigned i) const { return tokens[u64(i) * step]; }
};

__device__ Text choose(bool first, const Text& a, const Text& b) {
    return {first ? a.tokens : b.tokens, first ? a.step : b.step, first ? a.size : b.size};
}

__device__ unsigned clamped(long long value, int high) { return unsigned(max(0LL, min(value, (long long)high))); }

// The build may start while the scan still runs, if the device can do so; it waits before it reads.
__device__ void release_next_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ void wait_for_last_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What the threads of a warp have together. GPUs before compute capability 8.0 have no instruction for it.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
template <class Join>
__device__ unsigned fold(unsigned value, Join join) {
#pragma unroll
    for (int step = 16; step; step /= 2) value = join(value, __shfl_xor_sync(kAll, value, step));  // guard: warp-sums
    return value;
}
__device__ int sum_of_warp(int value) {
    return int(fold(unsigned(value), [](unsigned a, unsigned b) { return a + b; }));
}
__device__ unsigned least_of_warp(unsigned value) {
    return fold(value, [](unsigned a, unsigned b) { return min(a, b); });
}
__device__ unsigned most_of_warp(unsigned value) {
    return fold(value, [](unsigned a, unsigned b) { return max(a, b); });
}
#else
__device__ int sum_of_warp(int value) { return __reduce_add_sync(kAll, value); }
__device__ unsigned least_of_warp(unsigned value) { return __reduce_min_sync(kAll, value); }
__device__ unsigned most_of_warp(unsigned value) { return __reduce_max_sync(kAll, value); }
#endif

// ---- scan -------------------------------------------------------------------------------------------------------

// A key is length << 24 | (2^24 - 1 - age within the block's stretch).
struct Scan {
    unsigned keys[kTile + SLACK];
    unsigned short list[kTile];     // where in the tile the last token was seen
    int suffix[kMaxWindow + 1];     // the row's last tokens, newest first
    int histogram[kMaxWindow + 2];  // keys by length
    int tally[24];
    int listed, kept;
};

// The longest length that `limit` matches or more have, or `low`.
__device__ int crowded(const Scan& s, int low, int high, int limit) {
    int sum = 0;
#pragma unroll 1
    for (int length = high; length > low; --length)
        if ((sum += s.histogram[length]) >= limit) return length;
    return low;
}

// Drops all keys below the threshold.
__device__ void drop(Scan& s, unsigned threshold) {
    const int kept = s.kept;
    unsigned* best = reinterpret_cast<unsigned*>(s.list);
    __syncthreads();
    if (threadIdx.x == 0) s.kept = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < kept; i += SCAN_THREADS)
        if (s.keys[i] >= threshold) best[atomicAdd(&s.kept, 1)] = s.keys[i];
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < s.kept; i += SCAN_THREADS) s.keys[i] = best[i];
    __syncthreads();
}

// Leaves the best `limit` of more keys. Ages are below 2^bits.
__device__ __noinline__ void shrink(Scan& s, int windows, int limit, int bits) {
    const int thread = threadIdx.x, kept = s.kept;
    if (thread < 24) s.tally[thread] = 0;
    unsigned threshold = (unsigned(crowded(s, 0, windows, limit)) << 24) | (0xffffffu & ~((1u << bits) - 1));
    __syncthreads();
#pragma unroll 1
    for (int bit = bits - 1; bit >= 0; --bit) {
        const unsigned higher = threshold | 1u << bit;
        int count = 0;
#pragma unroll 1
        for (int i = thread; i < kept; i += SCAN_THREADS) count += s.keys[i] >= higher;
        count = sum_of_warp(count);
        if (thread % 32 == 0 && count) atomicAdd(&s.tally[bit], count);
        __syncthreads();
        if (s.tally[bit] >= limit) threshold = higher;
    }
    drop(s, threshold);
}

template <int kStep>
__device__ void load(int (&tokens)[kItems], const int* newest, unsigned count) {  // entries from count on are undefined
    if (count >= kTile) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) tokens[k] = newest[-(k * SCAN_THREADS * kStep)];
    } else {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
            tokens[k] = kUnknown;
            if (k * SCAN_THREADS + threadIdx.x < count) tokens[k] = newest[-(k * SCAN_THREADS * kStep)];
        }
    }
}

// Looks at positions [begin, end) of a text, newest first; the newest has age `age` in the stretch. Keeps matches of at
// least `need` tokens, and returns the least length of which it can still use more.
__device__ int scan(Scan& s, const Text& text, unsigned begin, unsigned end, unsigned age, int windows, int limit,
                    int bits, int need) {
    const int thread = threadIdx.x, last = s.suffix[0], second = s.suffix[1];
    int tokens[kItems];  // of the tile that ends at `top`; the tile that ends at `next` is read meanwhile
#pragma unroll
    for (int k = 0; k < kItems; ++k) tokens[k] = kUnknown;
    unsigned top = end, next = end;
#pragma unroll 1
    for (bool more = true; more && need <= windows;) {
        int fresh[kItems];
        more = next > begin;
        const int* newest = text.tokens + ((long long)next - 1 - thread) * text.step;
        if (text.step == 2) load<2>(fresh, newest, next - begin);
        else load<1>(fresh, newest, next - begin);

        bool hit = false;
#pragma unroll
        for (int k = 0; k < kItems; ++k) hit |= tokens[k] == last;
        unsigned ends = 0;  // a bit for each of the thread's positions
        if (__any_sync(kAll, hit)) {
#pragma unroll
            for (int k = 0; k < kItems; ++k) ends |= unsigned(tokens[k] == last) << k;
            if (need > 1) {
                unsigned before = 0;  // does the position before hold the last token but one? Lane 31 cannot know
#pragma unroll
                for (int k = 0; k < kItems; ++k) before |= unsigned(tokens[k] == second || tokens[k] == kUnknown) << k;
                before = __shfl_down_sync(kAll, before, 1);
                if (thread % 32 != 31) ends &= before;
            }
        }
        if (__syncthreads_or(ends)) {
            if (ends) {
                int at = atomicAdd(&s.listed, __popc(ends));
#pragma unroll 1
                for (; ends; ends &= ends - 1)
                    s.list[at++] = (unsigned short)((__ffs(ends) - 1) * SCAN_THREADS + thread);
            }
            __syncthreads();
#pragma unroll 1
            for (int i = thread; i < s.listed; i += SCAN_THREADS) {
                const unsigned at = top - 1 - s.list[i];
                int length = 1;
#pragma unroll 1
                while (length < windows && unsigned(length) <= at && text[at - length] == s.suffix[length]) ++length;
                if (length >= need && at + 1 < text.size && text[at + 1] >= 0) {
                    s.keys[atomicAdd(&s.kept, 1)] = unsigned(length) << 24 | (0xffffffu - (age + end - 1 - at));
                    atomicAdd(&s.histogram[length], 1);
                }
            }
            __syncthreads();
            if (thread == 0) s.listed = 0;
            if (s.kept >= limit) need = max(need, crowded(s, need - 1, windows, limit) + 1);
            if (s.kept > SLACK) shrink(s, windows, limit, bits);
        }
#pragma unroll
        for (int k = 0; k < kItems; ++k) tokens[k] = fresh[k];
        top = next;
        next = next - begin > kTile ? next - kTile : begin;
    }
    return need;
}

// best [rows, blocks, limit]: length << 32 | (2^32 - 1 - age), best first.
// at_least [rows, max_window + 2, blocks]: how many of them have w tokens or more, for each w from min_window on.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS, SCAN_BLOCKS) ngram_scan(
    const long long* tokens, long long stride, int columns, const long long* committed, const void* corpus_tokens,
    int corpus_wide, const long long* corpus_length, int corpus_room, const int* references, int reference_room,
    const long long* reference_lengths, int rows, int blocks, int min_span,
    int min_window, int max_window, int limit, u64* best, int* at_least) {
    release_next_kernel();
    Scan& s = *reinterpret_cast<Scan*>(shared_memory);
    const int thread = threadIdx.x, row = blockIdx.x % rows, block = blockIdx.x / rows;
    const unsigned length = clamped(committed[row], columns);
    const Text text{reinterpret_cast<const int*>(tokens + row * stride), 2, length};
    const Text corpus{static_cast<const int*>(corpus_tokens), corpus_wide + 1, clamped(corpus_length[row], corpus_room)};
    const Text reference{references + u64(row) * reference_room, 1, clamped(reference_lengths[row], reference_room)};
    const int windows = min(max_window, int(length));
    const unsigned own = length ? length - 1 : 0, near = own + reference.size;  // ages of the corpus begin at `near`
    const unsigned total = windows < min_window ? 0 : near + corpus.size;
    const unsigned span = max((total + blocks - 1) / blocks, unsigned(min_span));
    const unsigned first = unsigned(min(u64(block) * span, u64(total)));  // ages of this stretch
    const unsigned past = unsigned(min(u64(first) + span, u64(total)));
    const int bits = 32 - __clz(span);

#pragma unroll 1
    for (int i = thread; i <= max_window + 1; i += SCAN_THREADS) s.histogram[i] = 0;
#pragma unroll 1
    for (int i = thread; i <= kMaxWindow; i += SCAN_THREADS) s.suffix[i] = i < windows ? text[length - 1 - i] : -3;
    if (thread == 0) s.listed = s.kept = 0;
    __syncthreads();
    int need = min_window;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {  // the text, the reference, the corpus: ages from `low` to `high`
        const unsigned low = part == 0 ? 0 : part == 1 ? own : near, high = part == 0 ? own : part == 1 ? near : total;
        const unsigned young = max(first, low), old = min(past, high);
        if (young >= old) continue;
        const unsigned end = high - young;
        const Text its = choose(part == 0, text, choose(part == 1, reference, corpus));
        need = scan(s, its, end - (old - young), end, young - first, windows, limit, bits, need);
    }
    __syncthreads();
    if (s.kept > limit) drop(s, unsigned(crowded(s, 0, windows, limit)) << 24);
    if (s.kept > kSorted) shrink(s, windows, limit, bits);
    const int kept = s.kept;
    best += (u64(row) * blocks + block) * limit;
#pragma unroll 1
    for (int i = thread; i < kept; i += SCAN_THREADS) {
        const unsigned key = s.keys[i];
        int rank = 0;
#pragma unroll 4
        for (int j = 0; j < kept; ++j) rank += s.keys[j] > key;
        if (rank < limit) best[rank] = u64(key >> 24) << 32 | (kAll - (first + 0xffffffu - (key & 0xffffffu)));
    }
    at_least += u64(row) * (max_window + 2) * blocks + block;
#pragma unroll 1
    for (int l = min_window + SCAN_THREADS - 1 - thread; l <= max_window + 1; l += SCAN_THREADS) {
        int sum = 0;
#pragma unroll 4
        for (int i = l; i <= windows; ++i) sum += s.histogram[i];
        at_least[l * blocks] = min(sum, limit);
    }
}

// ---- build ------------------------------------------------------------------------------------------------------

// Matches are numbered by recency. A node of the tree is the set of matches that go on with its path; its id is
// (depth - 1) * kMatches + the first of them. An anchor is a match length w: in its own tree only matches of at least
// w tokens count. Each warp grows the tree of one anchor; then all are merged, in the order in which the trie adds
// nodes: longest anchor first or, by frequency, highest score first.
constexpr int kMatches = 64 * WORDS, kOwn = 2 * WORDS, kWarps = BUILD_THREADS / 32, kNodes = 64;
constexpr int kEntries = (kWarps + 1) * kNodes;
constexpr unsigned short kRoot = 0xffff;

struct Set {
    u64 words[WORDS];
    __device__ bool has(int match) const { return (match < 64 ? words[0] : words[WORDS - 1]) >> match % 64 & 1; }
    __device__ int first() const {  // kMatches: empty
        if (WORDS == 2 && !words[0]) return words[WORDS - 1] ? 63 + __ffsll((long long)words[WORDS - 1]) : kMatches;
        return words[0] ? __ffsll((long long)words[0]) - 1 : kMatches;
    }
    __device__ int size() const { return __popcll(words[0]) + (WORDS == 1 ? 0 : __popcll(words[WORDS - 1])); }
    __device__ int size_below(int match) const {
        const u64 below = (1ull << match % 64) - 1;
        if (WORDS == 1 || match < 64) return __popcll(words[0] & below);
        return __popcll(words[0]) + __popcll(words[WORDS - 1] & below);
    }
    __device__ Set operator&(const Set& other) const {
        Set out;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) out.words[i] = words[i] & other.words[i];
        return out;
    }
};

// The set of the matches for which f(slot) holds; each lane computes kOwn of them.
__device__ int match_in(int slot) { return int(threadIdx.x % 32) + 32 * slot; }
template <class F>
__device__ Set set_of(F f) {
    Set out;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const unsigned low = __ballot_sync(kAll, f(2 * i));
        out.words[i] = u64(__ballot_sync(kAll, f(2 * i + 1))) << 32 | low;
    }
    return out;
}

// Nodes in the order in which one anchor adds them, or all anchors so far.
struct List {
    double scores[kNodes];  // only by frequency; they never rise
    unsigned short ids[kNodes], parents[kNodes];
    int count;
};

struct Build {
    List lists[kWarps + 2];  // one of each warp; then two of the merge, one to write while the other is read
    Set sets[kWarps][kNodes];
    u64 found[kMatches];
    unsigned ages[kMatches];
    unsigned short ranks[kEntries], children[kWarps][kNodes];
    unsigned added[kEntries / 32];
    int added_before[kEntries / 32], total[kMaxWindow + 2], breadth[kMaxWindow + 1], offsets[BUILD_THREADS];
    int sums[2][kWarps];
    unsigned char lengths[kMatches];
    // After these come, for each depth, `equal` [kMatches] (for each match, the matches with the same token there; none
    // if it has no token), `where` [kMatches] and the matches' tokens, `next` [kStride].
};
constexpr int kStride = kMatches + 4;
static_assert(sizeof(Scan) <= SCAN_BYTES && sizeof(Build) <= BUILD_BYTES, "more shared memory than is asked for");
static_assert(BUILD_THREADS >= kMatches && SLACK >= kMatches && kTile >= 2 * SLACK, "blocks are too small");

struct Options {
    int branch_length, min_window, max_window, max_breadth, by_frequency, limit;
};

__device__ int sum_of_lower_lanes(int value) {
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kAll, sum, step);
        if (int(threadIdx.x % 32) >= step) sum += other;
    }
    return sum - value;
}

// The greatest length that `least` or more matches have, or one less than min_window.
__device__ int longest_of(const Build& s, const Options& o, int least) {
    int longest = o.min_window - 1;
#pragma unroll 1
    for (int l = o.min_window; l <= o.max_window; l += 32) {
        const int mine = l + threadIdx.x % 32;
        const unsigned those = __ballot_sync(kAll, mine <= o.max_window && s.total[mine] >= least);
        if (those) longest = l + 31 - __clz(those);
    }
    return longest;
}

// Takes the best matches of all blocks of the scan, numbers them by recency, and returns how many they are.
// Sets `total`: the blocks' matches by least length.
__device__ int gather(Build& s, const u64* best, const int* at_least, const Options& o, int blocks) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
#pragma unroll 1
    for (int l = o.min_window + warp; l <= o.max_window + 1; l += kWarps) {
        int sum = 0;
#pragma unroll 4
        for (int block = lane; block < blocks; block += 32) sum += at_least[l * blocks + block];
        sum = sum_of_warp(sum);
        if (lane == 0) s.total[l] = sum;
    }
    __syncthreads();
    const int cut = longest_of(s, o, o.limit);  // all longer ones are taken, and the youngest of this length
    const int longer = s.total[cut + 1], room = cut < o.min_window ? 0 : o.limit - longer;
    const int mine = thread < blocks ? at_least[(cut + 1) * blocks + thread] : 0;
    const int equal = thread < blocks && room ? at_least[cut * blocks + thread] - mine : 0;
    int before = sum_of_lower_lanes(mine), equal_before = sum_of_lower_lanes(equal);
    if (lane == 31) s.sums[0][warp] = before + mine, s.sums[1][warp] = equal_before + equal;
    __syncthreads();
    int equals = 0;
#pragma unroll 1
    for (int i = 0; i < kWarps; ++i) {
        if (i == warp) equal_before += equals;
        if (i < warp) before += s.sums[0][i];
        equals += s.sums[1][i];
    }
    s.offsets[thread] = before + min(equal_before, room);
    __syncthreads();
    const int count = longer + min(equals, room);
    int block = 0, from = 0;
    if (thread < count) {  // from the last block whose offset is not above this thread's number
#pragma unroll 1
        for (int step = BUILD_THREADS / 2; step; step /= 2)
            if (s.offsets[block + step] <= thread) block += step;
        from = s.offsets[block];
        s.found[thread] = best[u64(block) * o.limit + (thread - from)];
    }
    __syncthreads();
    if (thread < count) {
        const int past = block + 1 < BUILD_THREADS ? s.offsets[block + 1] : count;
        const u64 found = s.found[thread];
        int number = from;
#pragma unroll 1
        for (int i = from; i < past; ++i) number += unsigned(s.found[i]) > unsigned(found);
        s.ages[number] = kAll - unsigned(found);
        s.lengths[number] = (unsigned char)(found >> 32);
    }
    __syncthreads();
    return count;
}

// One warp's work: the tree of the anchor of `window` tokens, from the `counted` of all matches.
struct Grower {
    List& list;
    Set* sets;                 // of the nodes in the list; only by frequency
    unsigned short* children;  // [kNodes], room for by_recency
    const Set* equal;          // [deepest, kMatches]
    const int* breadths;
    const Set all, counted;
    const Options& o;
    const int window, deepest, room;
    int count = 0;

    __device__ bool ends(int depth) const { return depth == deepest || window + depth == o.branch_length; }

    // Depth by depth: every counted match goes down to the child with its next token, if that child is one of the first
    // `breadth`. The first match of a child represents it.
    __device__ void by_recency() {
        Set node[kOwn];   // the matches, counted or not, in the node of each of this lane's matches
        bool in[kOwn];    // the match is counted and its node is in the list
        int place[kOwn];  // number of the node among those of its depth
#pragma unroll
        for (int i = 0; i < kOwn; ++i) node[i] = all, in[i] = counted.has(match_in(i)), place[i] = 0;
        int width = 1;  // nodes of this depth
#pragma unroll 1
        for (int depth = 0; !ends(depth) && count < room; ++depth) {
            const int breadth = breadths[window + depth];
            Set child[kOwn];
            int first[kOwn], sibling[kOwn];
            bool stands[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                child[i] = node[i] & equal[depth * kMatches + match_in(i)];
                first[i] = (child[i] & counted).first();
                in[i] = in[i] && first[i] != kMatches;
                stands[i] = in[i] && first[i] == match_in(i);
            }
            const Set standing = set_of([&](int i) { return stands[i]; });
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                sibling[i] = (standing & node[i]).size_below(first[i]);
                in[i] = in[i] && sibling[i] < breadth;
            }
            const Set kept = set_of([&](int i) { return stands[i] && in[i]; });
            const int next_width = kept.size();
            bool several = false;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) several |= in[i] && sibling[i];
            if (width > 1 && (next_width != width || __any_sync(kAll, several))) {  // some have not one child each
                const int lane = threadIdx.x % 32;
                children[lane] = children[lane + 32] = 0;
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kOwn; ++i)
                    if (stands[i] && sibling[i] == 0) children[place[i]] = (unsigned short)(kept & node[i]).size();
                __syncwarp();
                const int low = children[2 * lane], high = children[2 * lane + 1];
                const int before = sum_of_lower_lanes(low + high);
                children[2 * lane] = (unsigned short)before;
                children[2 * lane + 1] = (unsigned short)(before + low);
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kOwn; ++i)
                    if (in[i]) place[i] = children[place[i]];
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                place[i] += sibling[i];
                const int at = count + place[i];
                in[i] = in[i] && at < room;
                if (in[i] && stands[i]) {
                    list.ids[at] = (unsigned short)(depth * kMatches + child[i].first());
                    list.parents[at] = depth ? (unsigned short)((depth - 1) * kMatches + node[i].first()) : kRoot;
                }
                node[i] = child[i];
            }
            if (next_width == 0) break;
            width = next_width;
            count = min(count + width, room);
        }
    }

    // The best candidate is added and its children become candidates, again and again: the most frequent children, and
    // the most recent among equals. A candidate is kept in the slot of the first of its counted matches.
    __device__ void by_frequency(double start) {
        double scores[kOwn];  // 0: none
        unsigned orders[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) scores[i] = 0, orders[i] = kAll;
        Set here = all;
        double score = start, lowest = start;
        int depth = 0;
#pragma unroll 1
        for (int node = -1;; ++node) {
            if (!ends(depth)) {
                const Set mine = here & counted;
                int counts[kOwn];
                bool any[kOwn];
#pragma unroll
                for (int i = 0; i < kOwn; ++i) {
                    const Set child = mine & equal[depth * kMatches + match_in(i)];
                    any[i] = child.has(match_in(i));
                    counts[i] = any[i] && child.first() == match_in(i) ? child.size() : 0;
                }
                const int sum = set_of([&](int i) { return any[i]; }).size();
                int children = set_of([&](int i) { return counts[i] > 0; }).size();
#pragma unroll 1
                for (; children > o.max_breadth; --children) {
                    unsigned worst = kAll;
#pragma unroll
                    for (int i = 0; i < kOwn; ++i)
                        if (counts[i]) worst = min(worst, unsigned(counts[i] << 8 | (255 - match_in(i))));
                    worst = least_of_warp(worst);
#pragma unroll
                    for (int i = 0; i < kOwn; ++i)
                        if (unsigned(counts[i] << 8 | (255 - match_in(i))) == worst) counts[i] = 0;
                }
#pragma unroll
                for (int i = 0; i < kOwn; ++i) {
                    if (!counts[i]) continue;
                    scores[i] = sum == 1 ? score : score * counts[i] / sum;
                    orders[i] = unsigned((node + 1) << 8 | match_in(i));
                }
            }
            if (count == room) break;
            score = 0;
            unsigned order = kAll;
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (scores[i] > score || (scores[i] == score && orders[i] < order))
                    score = scores[i], order = orders[i];
            const u64 bits = u64(__double_as_longlong(score));
            const unsigned high = most_of_warp(unsigned(bits >> 32));
            if (high == 0) break;
            const unsigned low = most_of_warp(unsigned(bits >> 32) == high ? unsigned(bits) : 0);
            const u64 highest = u64(high) << 32 | low;
            order = least_of_warp(bits == highest ? order : kAll);
            score = __longlong_as_double((long long)highest);
            lowest = min(lowest, score);
            const int match = order & 255, parent = int(order >> 8) - 1;
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (orders[i] == order) scores[i] = 0, orders[i] = kAll;
            const unsigned short parent_id = parent < 0 ? kRoot : list.ids[parent];
            depth = parent < 0 ? 0 : parent_id / kMatches + 1;
            here = (parent < 0 ? all : sets[parent]) & equal[depth * kMatches + match];
            if (threadIdx.x % 32 == 0) {
                sets[count] = here;
                list.ids[count] = (unsigned short)(depth * kMatches + here.first());
                list.parents[count] = parent_id;
                list.scores[count] = lowest;
            }
            __syncwarp();
            ++count, ++depth;
        }
    }
};

// Merges the warps' lists into lists[kWarps + merged], the first `room` distinct nodes of which become
// lists[kWarps + !merged]. `where` (all ones before) gets the place of each id in the order of all.
__device__ void merge(Build& s, unsigned* where, int merged, bool by_frequency, int room) {
    const int thread = threadIdx.x;
    auto list = [&](int number) -> const List& { return s.lists[number ? number - 1 : kWarps + merged]; };
#pragma unroll 1
    for (int entry = thread; entry < kEntries; entry += BUILD_THREADS) {
        const int number = entry / kNodes, i = entry % kNodes;
        s.ranks[entry] = 0xffff;
        if (i >= list(number).count) continue;
        int rank = i;
        if (by_frequency) {
            const double score = list(number).scores[i];
#pragma unroll 1
            for (int other = 0; other <= kWarps; ++other) {
                const List& theirs = list(other);
                int low = 0, high = other == number ? 0 : theirs.count;  // how many of them come before
#pragma unroll 1
                while (low < high) {
                    const int middle = (low + high) / 2;
                    const double their = theirs.scores[middle];
                    if (their > score || (their == score && other < number)) low = middle + 1;
                    else high = middle;
                }
                rank += low;
            }
        } else {
#pragma unroll 4
            for (int other = 0; other < number; ++other) rank += list(other).count;
        }
        s.ranks[entry] = (unsigned short)rank;
        atomicMin(&where[list(number).ids[i]], unsigned(rank));
    }
    __syncthreads();
#pragma unroll 1
    for (int entry = thread; entry < kEntries; entry += BUILD_THREADS) {
        const unsigned rank = s.ranks[entry];
        if (rank == 0xffff) continue;
        if (where[list(entry / kNodes).ids[entry % kNodes]] == rank) atomicOr(&s.added[rank / 32], 1u << rank % 32);
        else s.ranks[entry] = 0xffff;
    }
    __syncthreads();
    List& out = s.lists[kWarps + !merged];
    if (thread < 32) {
        int sum = 0;
#pragma unroll 1
        for (int begin = 0; begin < kEntries / 32; begin += 32) {
            const int word = begin + thread, mine = word < kEntries / 32 ? __popc(s.added[word]) : 0;
            const int before = sum + sum_of_lower_lanes(mine);
            if (word < kEntries / 32) s.added_before[word] = before;
            sum = __shfl_sync(kAll, before + mine, 31);
        }
        if (thread == 0) out.count = min(sum, room);
    }
    __syncthreads();
#pragma unroll 1
    for (int entry = thread; entry < kEntries; entry += BUILD_THREADS) {
        const unsigned rank = s.ranks[entry];
        if (rank == 0xffff) continue;
        const int at = s.added_before[rank / 32] + __popc(s.added[rank / 32] & ((1u << rank % 32) - 1));
        if (at >= room) continue;
        const List& from = list(entry / kNodes);
        out.scores[at] = from.scores[entry % kNodes];
        out.ids[at] = from.ids[entry % kNodes];
        out.parents[at] = from.parents[entry % kNodes];
    }
    __syncthreads();
}

// Outputs: tokens, parents [rows, nodes]; count, match [rows]. deepest: most tokens of a continuation.
extern "C" __global__ void __launch_bounds__(BUILD_THREADS, 1) ngram_build(
    const long long* tokens, long long stride, int columns, const long long* committed, const void* corpus_tokens,
    int corpus_wide, const long long* corpus_length, int corpus_room, const int* references, int reference_room,
    const long long* reference_lengths, int blocks, const u64* best, const int* at_least,
    int branch_length, int min_window, int max_window, int min_breadth, int max_breadth, int by_frequency, int limit,
    int deepest, int nodes, long long* out_tokens, long long* out_parents, long long* out_count, long long* out_match) {
    Build& s = *reinterpret_cast<Build*>(shared_memory);
    Set* equal = reinterpret_cast<Set*>(shared_memory + BUILD_BYTES);
    unsigned* where = reinterpret_cast<unsigned*>(equal + deepest * kMatches);
    int* next = reinterpret_cast<int*>(where + deepest * kMatches);
    const Options o{branch_length, min_window, max_window, max_breadth, by_frequency, limit};
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x, room = nodes - 1;
    const unsigned length = clamped(committed[row], columns);
    const Text text{reinterpret_cast<const int*>(tokens + row * stride), 2, length};
    const Text corpus{static_cast<const int*>(corpus_tokens), corpus_wide + 1, clamped(corpus_length[row], corpus_room)};
    const Text reference{references + u64(row) * reference_room, 1, clamped(reference_lengths[row], reference_room)};

#pragma unroll 1
    for (int depth = BUILD_THREADS - 1 - thread; depth < branch_length; depth += BUILD_THREADS)
        s.breadth[depth] =
            min_breadth + (branch_length - 1 - depth) * (max_breadth - min_breadth) / (branch_length - 1);
    wait_for_last_kernel();
    best += u64(row) * blocks * limit;
    at_least += u64(row) * (max_window + 2) * blocks;
    const int count = gather(s, best, at_least, o, blocks);
    const int longest = count ? longest_of(s, o, 1) : 0;

    const unsigned own = length ? length - 1 : 0, near = own + reference.size;
#pragma unroll 1
    for (int depth = lane; depth < deepest; depth += 32) {
        constexpr int kEach = kMatches / kWarps > 4 ? 4 : kMatches / kWarps;
#pragma unroll 1
        for (int begin = warp; begin < kMatches; begin += kEach * kWarps) {
            int token[kEach];
#pragma unroll
            for (int i = 0; i < kEach; ++i) {
                const int match = begin + i * kWarps;
                token[i] = -1;
                if (match >= count) continue;
                const unsigned age = s.ages[match];
                const unsigned high = age < own ? own : age < near ? near : near + corpus.size;
                const Text its = choose(age < own, text, choose(age < near, reference, corpus));
                const unsigned at = high - age + depth;
                if (at < its.size) token[i] = its[at];
            }
#pragma unroll
            for (int i = 0; i < kEach; ++i) next[depth * kStride + begin + i * kWarps] = token[i];
        }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < deepest * kMatches * kOwn; i += BUILD_THREADS) {  // half a word each
        const int depth = i / (kMatches * kOwn), match = i % kMatches, half = i / kMatches % kOwn;
        const int token = next[depth * kStride + match];
        const int4* tokens = reinterpret_cast<const int4*>(next + depth * kStride + 32 * half);
        unsigned same = 0;
#pragma unroll
        for (int m = 0; m < 32; m += 4) {
            const int4 four = tokens[m / 4];
            same |= unsigned(four.x == token) << m | unsigned(four.y == token) << (m + 1) |
                    unsigned(four.z == token) << (m + 2) | unsigned(four.w == token) << (m + 3);
        }
        reinterpret_cast<unsigned*>(equal)[(depth * kMatches + match) * kOwn + half] = token < 0 ? 0 : same;
    }
    int merged = 0;
    if (thread == 0) s.lists[kWarps].count = 0;
    const Set all = set_of([&](int i) { return match_in(i) < count; });
#pragma unroll 1
    for (int first = 0; longest && room && first <= longest - min_window; first += kWarps) {
#pragma unroll 1
        for (int i = thread; i < deepest * kMatches; i += BUILD_THREADS) where[i] = kAll;
#pragma unroll 1
        for (int i = thread; i < kEntries / 32; i += BUILD_THREADS) s.added[i] = 0;
        __syncthreads();
        const int window = longest - first - warp;
        const Set counted = set_of([&](int i) { return match_in(i) < count && int(s.lengths[match_in(i)]) >= window; });
        Grower grower{s.lists[warp], s.sets[warp], s.children[warp], equal,   s.breadth, all,
                      counted,       o,            window,           deepest, room};
        auto half_to_the = [](int n) { return __longlong_as_double((long long)(1023 - n) << 52); };
        if (window >= min_window) {
            if (by_frequency) grower.by_frequency(half_to_the(first + warp));
            else grower.by_recency();
        }
        if (lane == 0) s.lists[warp].count = grower.count;
        __syncthreads();
        merge(s, where, merged, by_frequency, room);
        merged = !merged;
        const List& out = s.lists[kWarps + merged];
        if (out.count == room && (!by_frequency || out.scores[room - 1] >= half_to_the(first + kWarps))) break;
    }
    __syncthreads();

    const List& out = s.lists[kWarps + merged];
#pragma unroll 1
    for (int i = thread; i < out.count; i += BUILD_THREADS) where[out.ids[i]] = i + 1;
    __syncthreads();
#pragma unroll 1
    for (int i = thread; i < nodes; i += BUILD_THREADS) {
        long long token = 0, parent = 0;
        if (i == 0) {
            token = length ? text[length - 1] : 0;
            parent = -1;
        } else if (i <= out.count) {
            const int id = out.ids[i - 1];
            token = next[id / kMatches * kStride + id % kMatches];
            parent = out.parents[i - 1] == kRoot ? 0 : where[out.parents[i - 1]];
        }
        out_tokens[row * nodes + i] = token;
        out_parents[row * nodes + i] = parent;
    }
    if (thread == 0) {
        out_count[row] = out.count + 1;
        out_match[row] = longest;
    }
}
