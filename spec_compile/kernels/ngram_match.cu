// Draft trees from n-gram matches; ngram_match.py says what they are, and launches the two kernels:
//
//   ngram_scan   rows * blocks: each block reads a stretch of one row's text and of the corpus, newest first, and
//                leaves its `limit` best matches, best first.
//   ngram_build  rows: takes the `limit` best of all blocks and grows the row's tree from them.
//
// The age of a position is its distance from the newest: first the row's own text, backwards from its last token but
// one (the last has no successor), then the corpus, backwards from its end. A match is better if it is longer, and
// then if it is younger; no two are equal, so the best are the same set in whatever order threads come by.
//
// WORDS (1 or 2): of 64 bits in a set of matches, so that limit <= 64 * WORDS.

#ifndef SCAN_THREADS
#define SCAN_THREADS 512
#define SCAN_BLOCKS 3  // per multiprocessor
#define BUILD_THREADS 512
#define SLACK 1024     // keys a block of the scan may hold before it reads the next tile, at least the largest limit
#endif

typedef unsigned long long u64;

constexpr unsigned kAll = 0xffffffffu;
constexpr int kItems = 8;                      // positions a thread reads at a time
constexpr int kTile = SCAN_THREADS * kItems;
constexpr int kMaxWindow = 255;
constexpr int kUnknown = -2;
constexpr int kRanked = 256;                   // so many keys are sorted by comparing all with all

extern __shared__ __align__(16) unsigned char shared_memory[];

// ---- scan -------------------------------------------------------------------------------------------------------

// A key is length << 24 | (2^24 - 1 - age within the block's stretch).
struct Scan {
    unsigned keys[kTile + SLACK];
    unsigned short list[kTile];          // where in the tile the last token was seen
    int suffix[kMaxWindow + 1];          // the row's last tokens, newest first
    int histogram[kMaxWindow + 2];       // keys by length
    int tally[24];
    int listed, kept;
};

// The longest length of which there are `limit` matches or more, or `low`.
__device__ int crowded(const Scan& s, int low, int high, int limit) {
    int sum = 0;
    for (int length = high; length > low; --length)
        if ((sum += s.histogram[length]) >= limit) return length;
    return low;
}

// Leaves the best `limit` of more keys. Ages are below 2^bits.
__device__ void shrink(Scan& s, int windows, int limit, int bits) {
    const int thread = threadIdx.x, kept = s.kept;
    if (thread < 24) s.tally[thread] = 0;
    unsigned threshold = (unsigned(crowded(s, 0, windows, limit)) << 24) | (0xffffffu & ~((1u << bits) - 1));
    __syncthreads();
    for (int bit = bits - 1; bit >= 0; --bit) {
        const unsigned higher = threshold | 1u << bit;
        int count = 0;
        for (int i = thread; i < kept; i += SCAN_THREADS) count += s.keys[i] >= higher;
        count = __reduce_add_sync(kAll, count);
        if (thread % 32 == 0 && count) atomicAdd(&s.tally[bit], count);
        __syncthreads();
        if (s.tally[bit] >= limit) threshold = higher;
    }
    unsigned* best = reinterpret_cast<unsigned*>(s.list);
    if (thread == 0) s.kept = 0;
    __syncthreads();
    for (int i = thread; i < kept; i += SCAN_THREADS)
        if (s.keys[i] >= threshold) best[atomicAdd(&s.kept, 1)] = s.keys[i];
    __syncthreads();
    for (int i = thread; i < limit; i += SCAN_THREADS) s.keys[i] = best[i];
    __syncthreads();
}

// Looks at positions [begin, end) of a text of `size` tokens, newest first; the newest has age `age` in the stretch.
// Keeps matches of at least `need` tokens, and raises it as far as shorter ones can no longer be among the best.
template <class Token>
__device__ void scan(Scan& s, const Token* text, unsigned size, unsigned begin, unsigned end, unsigned age, int windows,
                     int limit, int bits, int& need) {
    const int thread = threadIdx.x, last = s.suffix[0], second = s.suffix[1];
    int tokens[kItems];
    auto load = [&](unsigned top) {
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
            const unsigned back = k * SCAN_THREADS + thread;
            tokens[k] = back < top - begin ? int(text[top - 1 - back]) : kUnknown;
        }
    };
    unsigned next = end;
    load(next);
    while (next > begin && need <= windows) {
        unsigned ends = 0, ends_before = 0;  // a bit for each of the thread's positions
#pragma unroll
        for (int k = 0; k < kItems; ++k) {
            ends |= unsigned(tokens[k] == last) << k;
            ends_before |= unsigned(tokens[k] == second || tokens[k] == kUnknown) << k;
        }
        const unsigned top = next;
        next = next - begin > kTile ? next - kTile : begin;
        if (next > begin) load(next);
        ends_before = __shfl_down_sync(kAll, ends_before, 1);  // of the position before; unknown to lane 31
        if (need > 1 && thread % 32 != 31) ends &= ends_before;
        if (!__syncthreads_or(ends)) continue;

        if (ends) {
            int at = atomicAdd(&s.listed, __popc(ends));
            for (; ends; ends &= ends - 1) s.list[at++] = (__ffs(ends) - 1) * SCAN_THREADS + thread;
        }
        __syncthreads();
        for (int i = thread; i < s.listed; i += SCAN_THREADS) {
            const unsigned at = top - 1 - s.list[i];
            int length = 1;
            while (length < windows && unsigned(length) <= at && int(text[at - length]) == s.suffix[length]) ++length;
            if (length >= need && at + 1 < size && text[at + 1] >= 0) {
                s.keys[atomicAdd(&s.kept, 1)] = unsigned(length) << 24 | (0xffffffu - (age + end - 1 - at));
                atomicAdd(&s.histogram[length], 1);
            }
        }
        __syncthreads();
        if (thread == 0) s.listed = 0;
        need = max(need, crowded(s, need - 1, windows, limit) + 1);
        if (s.kept > SLACK) shrink(s, windows, limit, bits);
    }
}

// best [rows, blocks, limit]: length << 32 | (2^32 - 1 - age), best first.
// at_least [rows, max_window + 2, blocks]: how many of them have at least so many tokens, from min_window on.
extern "C" __global__ void __launch_bounds__(SCAN_THREADS, SCAN_BLOCKS) ngram_scan(
    const long long* tokens, long long stride, int columns, const long long* committed, const void* corpus_tokens,
    int corpus_wide, const long long* corpus_length, int corpus_room, int rows, int blocks, int min_span,
    int min_window, int max_window, int limit, u64* best, int* at_least) {
    Scan& s = *reinterpret_cast<Scan*>(shared_memory);
    const int thread = threadIdx.x, row = blockIdx.x % rows, block = blockIdx.x / rows;
    const long long* text = tokens + row * stride;
    const int length = int(max(0LL, min(committed[row], (long long)columns)));
    const unsigned corpus_size = unsigned(max(0LL, min(*corpus_length, (long long)corpus_room)));
    const int windows = min(max_window, length);
    const unsigned own = max(length - 1, 0);
    const unsigned total = windows < min_window ? 0 : own + corpus_size;
    const unsigned span = max((total + blocks - 1) / blocks, unsigned(min_span));
    const u64 from = min(u64(block) * span, u64(total));
    const unsigned first = unsigned(from), past = unsigned(min(from + span, u64(total)));  // ages of this stretch
    const int bits = 32 - __clz(span);

    for (int i = thread; i <= max_window + 1; i += SCAN_THREADS) s.histogram[i] = 0;
    for (int i = thread; i <= kMaxWindow; i += SCAN_THREADS) s.suffix[i] = i < windows ? int(text[length - 1 - i]) : -3;
    if (thread == 0) s.listed = s.kept = 0;
    __syncthreads();
    int need = min_window;
    if (first < min(past, own)) scan(s, text, length, own - min(past, own), own - first, 0, windows, limit, bits, need);
    if (past > own && past > first) {
        const unsigned newest = max(first, own);
        const unsigned begin = corpus_size - (past - own), end = corpus_size - (newest - own);
        if (corpus_wide)
            scan(s, static_cast<const long long*>(corpus_tokens), corpus_size, begin, end, newest - first, windows, limit, bits, need);
        else
            scan(s, static_cast<const int*>(corpus_tokens), corpus_size, begin, end, newest - first, windows, limit, bits, need);
    }
    __syncthreads();

    if (s.kept > kRanked) shrink(s, windows, limit, bits);
    const int kept = s.kept;
    best += (u64(row) * blocks + block) * limit;
    for (int i = thread; i < kept; i += SCAN_THREADS) {
        const unsigned key = s.keys[i];
        int rank = 0;
        for (int j = 0; j < kept; ++j) rank += s.keys[j] > key;
        if (rank < limit) best[rank] = u64(key >> 24) << 32 | (kAll - (first + 0xffffffu - (key & 0xffffffu)));
    }
    at_least += u64(row) * (max_window + 2) * blocks + block;
    for (int l = min_window + thread; l <= max_window + 1; l += SCAN_THREADS) {
        int sum = 0;
        for (int i = l; i <= windows; ++i) sum += s.histogram[i];
        at_least[l * blocks] = min(sum, limit);
    }
}

// ---- build ------------------------------------------------------------------------------------------------------

struct Corpus {
    const void* tokens;
    int wide;  // int64 tokens, else int32
    unsigned size;
    __device__ int operator[](unsigned i) const {
        return wide ? int(static_cast<const long long*>(tokens)[i]) : static_cast<const int*>(tokens)[i];
    }
};

// Matches are numbered by recency. A node of the tree is the set of matches that go on with its path; its id is
// (depth - 1) * kMatches + the first of them. An anchor is a match length w: in its own tree only matches of at least
// w tokens count. Each warp grows the tree of one anchor; then all are merged, in the order in which the trie adds
// nodes: longest anchor first or, by frequency, highest score first.
constexpr int kMatches = 64 * WORDS, kOwn = 2 * WORDS, kWarps = BUILD_THREADS / 32, kNodes = 64;
constexpr unsigned short kRoot = 0xffff;

struct Set {
    u64 words[WORDS];
    __device__ bool has(int match) const { return words[WORDS == 1 ? 0 : match / 64] >> match % 64 & 1; }
    __device__ bool operator!() const { return !(words[0] | words[WORDS - 1]); }
    __device__ int first() const {  // kMatches: empty
        int at = kMatches;
#pragma unroll
        for (int i = WORDS - 1; i >= 0; --i)
            if (words[i]) at = 64 * i + __ffsll((long long)words[i]) - 1;
        return at;
    }
    __device__ int size() const { return __popcll(words[0]) + (WORDS == 1 ? 0 : __popcll(words[WORDS - 1])); }
    __device__ Set operator&(const Set& other) const {
        Set out;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) out.words[i] = words[i] & other.words[i];
        return out;
    }
    __device__ Set below(int match) const {
        Set out;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const int bits = min(max(match - 64 * i, 0), 64);
            out.words[i] = bits == 64 ? words[i] : words[i] & ((1ull << bits) - 1);
        }
        return out;
    }
};

// The set of the matches for which f(slot) holds; a lane judges kOwn of them.
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
    double scores[kNodes];  // by frequency; none is above those before it
    unsigned short ids[kNodes], parents[kNodes];
    int count;
};

struct Build {
    List lists[kWarps + 2];  // of each warp; then twice what is merged, to write one while the other is read
    Set sets[kWarps][kNodes];
    u64 found[kMatches];
    unsigned ages[kMatches];
    unsigned char lengths[kMatches];
    unsigned short children[kWarps][kNodes];
    unsigned added[(kWarps + 1) * kNodes / 32];
    int total[kMaxWindow + 2], offsets[BUILD_THREADS], sums[2][kWarps];
    // Here follow, for each depth, `equal` [kMatches] (for each match, those with the same token there; none if it has
    // no token), `where` [kMatches] and the matches' tokens, `next` [kStride].
};
constexpr int kStride = kMatches + 4;
static_assert(sizeof(Scan) <= SCAN_BYTES && sizeof(Build) <= BUILD_BYTES, "more shared memory than is asked for");

struct Options {
    int branch_length, min_window, max_window, min_breadth, max_breadth, by_frequency, limit;
    __device__ int breadth(int depth) const {
        return min_breadth + (branch_length - 1 - depth) * (max_breadth - min_breadth) / (branch_length - 1);
    }
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

// Takes the best matches of what the blocks of the scan found, numbers them by recency, and returns how many they are.
// Sets `total`: blocks' matches by least length.
__device__ int gather(Build& s, const u64* best, const int* at_least, const Options& o, int blocks) {
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    for (int l = o.min_window + warp; l <= o.max_window + 1; l += kWarps) {
        int sum = 0;
#pragma unroll 4
        for (int block = lane; block < blocks; block += 32) sum += at_least[l * blocks + block];
        sum = __reduce_add_sync(kAll, sum);
        if (lane == 0) s.total[l] = sum;
    }
    __syncthreads();
    int cut = o.max_window;  // all longer ones are taken, and the youngest of this length
    while (cut >= o.min_window && s.total[cut] < o.limit) --cut;
    const int longer = s.total[cut + 1], room = cut < o.min_window ? 0 : o.limit - longer;
    const int mine = thread < blocks ? at_least[(cut + 1) * blocks + thread] : 0;
    const int equal = thread < blocks && room ? at_least[cut * blocks + thread] - mine : 0;
    int before = sum_of_lower_lanes(mine), equal_before = sum_of_lower_lanes(equal);
    if (lane == 31) s.sums[0][warp] = before + mine, s.sums[1][warp] = equal_before + equal;
    __syncthreads();
    int equals = 0;
    for (int i = 0; i < kWarps; ++i) {
        if (i == warp) equal_before += equals;
        if (i < warp) before += s.sums[0][i];
        equals += s.sums[1][i];
    }
    s.offsets[thread] = before + min(equal_before, room);
    const int count = longer + min(equals, room);
    __syncthreads();
    auto block_of = [&](int i) {  // the last whose offset is not above i
        int block = 0;
        for (int step = BUILD_THREADS / 2; step; step /= 2)
            if (s.offsets[block + step] <= i) block += step;
        return block;
    };
    for (int i = thread; i < count; i += BUILD_THREADS) {
        const int block = block_of(i);
        s.found[i] = best[u64(block) * o.limit + (i - s.offsets[block])];
    }
    __syncthreads();
    for (int i = thread; i < count; i += BUILD_THREADS) {
        const int block = block_of(i), from = s.offsets[block];
        const int past = block + 1 < BUILD_THREADS ? s.offsets[block + 1] : count;
        int number = from;
        for (int j = from; j < past; ++j) number += unsigned(s.found[j]) > unsigned(s.found[i]);
        s.ages[number] = kAll - unsigned(s.found[i]);
        s.lengths[number] = (unsigned char)(s.found[i] >> 32);
    }
    for (int i = count + thread; i < kMatches; i += BUILD_THREADS) s.lengths[i] = 0;
    __syncthreads();
    return count;
}

// One warp's work: the tree of the anchor of `window` tokens, from the `counted` of all matches.
struct Grower {
    List& list;
    Set* sets;                // of the nodes in the list, where they are grown by frequency
    unsigned short* offsets;  // [kNodes], room for by_recency
    const Set* equal;         // [deepest, kMatches]
    const Set all, counted;
    const Options& o;
    const int window, deepest, room;
    int count = 0;

    __device__ bool ends(int depth) const { return depth == deepest || window + depth == o.branch_length; }

    // Depth by depth: every counted match goes down to the child that has its next token, if that is one of the first
    // `breadth`; the first match of a child stands for it.
    __device__ void by_recency() {
        Set node[kOwn];   // of this lane's matches, those (counted or not) in its node
        bool in[kOwn];    // the match is counted and its node in the list
        int place[kOwn];  // the node's, counted from the first node of its depth
#pragma unroll
        for (int i = 0; i < kOwn; ++i) node[i] = all, in[i] = counted.has(match_in(i)), place[i] = 0;
        int width = 1;  // nodes of this depth
        for (int depth = 0; !ends(depth) && count < room; ++depth) {
            const int breadth = o.breadth(window + depth);
            Set child[kOwn];
            int first[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                child[i] = node[i] & equal[depth * kMatches + match_in(i)];
                first[i] = (child[i] & counted).first();
            }
            const Set children = set_of([&](int i) { return in[i] && first[i] == match_in(i); });
            int sibling[kOwn];
#pragma unroll
            for (int i = 0; i < kOwn; ++i) sibling[i] = (children & node[i]).below(first[i]).size();
            const Set kept = set_of([&](int i) { return in[i] && first[i] == match_in(i) && sibling[i] < breadth; });
            const int next_width = kept.size();
            if (next_width == 0) break;
            int next_place[kOwn];
            bool several = false;
#pragma unroll
            for (int i = 0; i < kOwn; ++i) several |= in[i] && first[i] != kMatches && kept.has(first[i]) && sibling[i];
            if (width == 1) {
#pragma unroll
                for (int i = 0; i < kOwn; ++i) next_place[i] = sibling[i];
            } else if (next_width == width && !__any_sync(kAll, several)) {  // a child each
#pragma unroll
                for (int i = 0; i < kOwn; ++i) next_place[i] = place[i];
            } else {
                const int lane = threadIdx.x % 32;
                offsets[lane] = offsets[lane + 32] = 0;
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kOwn; ++i)
                    if (in[i] && first[i] == match_in(i) && sibling[i] == 0)
                        offsets[place[i]] = (unsigned short)min((kept & node[i]).size(), kNodes);
                __syncwarp();
                const int low = offsets[lane], high = offsets[lane + 32];
                const int before = sum_of_lower_lanes(low), all_low = __shfl_sync(kAll, before + low, 31);
                offsets[lane] = (unsigned short)before;
                offsets[lane + 32] = (unsigned short)(all_low + sum_of_lower_lanes(high));
                __syncwarp();
#pragma unroll
                for (int i = 0; i < kOwn; ++i) next_place[i] = (in[i] ? offsets[place[i]] : 0) + sibling[i];
            }
#pragma unroll
            for (int i = 0; i < kOwn; ++i) {
                in[i] = in[i] && first[i] != kMatches && kept.has(first[i]) && count + next_place[i] < room;
                if (in[i] && first[i] == match_in(i)) {
                    list.ids[count + next_place[i]] = (unsigned short)(depth * kMatches + child[i].first());
                    list.parents[count + next_place[i]] =
                        depth ? (unsigned short)((depth - 1) * kMatches + node[i].first()) : kRoot;
                }
                node[i] = child[i];
                place[i] = next_place[i];
            }
            width = next_width;
            count = min(count + width, room);
        }
    }

    // The best candidate is added and its children become candidates, which stand in the slots of the first of their
    // counted matches.
    __device__ void by_frequency(double start) {
        double scores[kOwn];  // 0: none
        unsigned orders[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) scores[i] = 0, orders[i] = kAll;
        offer(-1, all, 0, start, scores, orders);
        double lowest = start;
        while (count < room) {
            double score = 0;
            unsigned order = kAll;
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (scores[i] > score || (scores[i] == score && orders[i] < order)) score = scores[i], order = orders[i];
            const u64 bits = u64(__double_as_longlong(score));
            const unsigned high = __reduce_max_sync(kAll, unsigned(bits >> 32));
            if (high == 0) break;
            const unsigned low = __reduce_max_sync(kAll, unsigned(bits >> 32) == high ? unsigned(bits) : 0);
            const u64 highest = u64(high) << 32 | low;
            order = __reduce_min_sync(kAll, bits == highest ? order : kAll);
            score = __longlong_as_double((long long)highest);
            lowest = min(lowest, score);
            const int match = order & 255, parent = int(order >> 8) - 1;
            const unsigned short parent_id = parent < 0 ? kRoot : list.ids[parent];
            const int depth = parent < 0 ? 0 : parent_id / kMatches + 1;  // of the parent
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (orders[i] == order) scores[i] = 0, orders[i] = kAll;
            const Set here = (parent < 0 ? all : sets[parent]) & equal[depth * kMatches + match];
            if (threadIdx.x % 32 == 0) {
                sets[count] = here;
                list.ids[count] = (unsigned short)(depth * kMatches + here.first());
                list.parents[count] = parent_id;
                list.scores[count] = lowest;
            }
            __syncwarp();
            offer(count, here, depth + 1, score, scores, orders);
            ++count;
        }
    }

    // The most frequent children, of equals the most recent.
    __device__ void offer(int node, const Set& here, int depth, double score, double* scores, unsigned* orders) {
        if (ends(depth)) return;
        const Set mine = here & counted;
        int counts[kOwn];
        bool any[kOwn];
#pragma unroll
        for (int i = 0; i < kOwn; ++i) {
            const Set child = mine & equal[depth * kMatches + match_in(i)];
            any[i] = mine.has(match_in(i)) && child.has(match_in(i));
            counts[i] = any[i] && child.first() == match_in(i) ? child.size() : 0;
        }
        const int sum = set_of([&](int i) { return any[i]; }).size();
        for (int children = set_of([&](int i) { return counts[i] > 0; }).size(); children > o.max_breadth; --children) {
            unsigned worst = kAll;
#pragma unroll
            for (int i = 0; i < kOwn; ++i)
                if (counts[i]) worst = min(worst, unsigned(counts[i] << 8 | (255 - match_in(i))));
            worst = __reduce_min_sync(kAll, worst);
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
};

// Merges the warps' lists into lists[kWarps + merged], the first `room` distinct nodes of which become
// lists[kWarps + !merged]. `where` (all ones before) gets the place of each id in the order of all.
__device__ void merge(Build& s, unsigned* where, int merged, bool by_frequency, int room) {
    auto list = [&](int number) -> const List& { return s.lists[number ? number - 1 : kWarps + merged]; };
    auto rank = [&](int number, int i) {
        int sum = i;
        const double score = list(number).scores[i];
        for (int other = 0; other <= kWarps; ++other) {
            const List& theirs = list(other);
            if (other == number) continue;
            if (!by_frequency) {
                sum += other < number ? theirs.count : 0;
                continue;
            }
            int low = 0, high = theirs.count;  // how many of them come before
            while (low < high) {
                const int middle = (low + high) / 2;
                const double their = theirs.scores[middle];
                if (their > score || (their == score && other < number)) low = middle + 1;
                else high = middle;
            }
            sum += low;
        }
        return unsigned(sum);
    };
    constexpr int kEntries = (kWarps + 1) * kNodes, kRounds = (kEntries + BUILD_THREADS - 1) / BUILD_THREADS;
    unsigned ranks[kRounds];
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        const int number = (round * BUILD_THREADS + threadIdx.x) / kNodes, i = threadIdx.x % kNodes;
        ranks[round] = kAll;
        if (number > kWarps || i >= list(number).count) continue;
        ranks[round] = rank(number, i);
        atomicMin(&where[list(number).ids[i]], ranks[round]);
    }
    __syncthreads();
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        if (ranks[round] == kAll) continue;
        const int number = (round * BUILD_THREADS + threadIdx.x) / kNodes, i = threadIdx.x % kNodes;
        if (where[list(number).ids[i]] == ranks[round]) atomicOr(&s.added[ranks[round] / 32], 1u << ranks[round] % 32);
        else ranks[round] = kAll;
    }
    __syncthreads();
    List& out = s.lists[kWarps + !merged];
    if (threadIdx.x == 0) {
        int sum = 0;
        for (int i = 0; i < kEntries / 32; ++i) sum += __popc(s.added[i]);
        out.count = min(sum, room);
    }
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
        if (ranks[round] == kAll) continue;
        const int number = (round * BUILD_THREADS + threadIdx.x) / kNodes, i = threadIdx.x % kNodes;
        int at = __popc(s.added[ranks[round] / 32] & ((1u << ranks[round] % 32) - 1));
        for (unsigned word = 0; word < ranks[round] / 32; ++word) at += __popc(s.added[word]);
        if (at >= room) continue;
        out.scores[at] = list(number).scores[i];
        out.ids[at] = list(number).ids[i];
        out.parents[at] = list(number).parents[i];
    }
    __syncthreads();
}

// Outputs: tokens, parents [rows, nodes]; count, match [rows]. `deepest`: continuations have at most so many tokens.
extern "C" __global__ void __launch_bounds__(BUILD_THREADS, 1) ngram_build(
    const long long* tokens, long long stride, int columns, const long long* committed, const void* corpus_tokens,
    int corpus_wide, const long long* corpus_length, int corpus_room, int blocks, const u64* best, const int* at_least,
    int branch_length, int min_window, int max_window, int min_breadth, int max_breadth, int by_frequency, int limit,
    int deepest, int nodes, long long* out_tokens, long long* out_parents, long long* out_count, long long* out_match) {
    Build& s = *reinterpret_cast<Build*>(shared_memory);
    Set* equal = reinterpret_cast<Set*>(shared_memory + BUILD_BYTES);
    unsigned* where = reinterpret_cast<unsigned*>(equal + deepest * kMatches);
    int* next = reinterpret_cast<int*>(where + deepest * kMatches);
    const Options o{branch_length, min_window, max_window, min_breadth, max_breadth, by_frequency, limit};
    const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, row = blockIdx.x, room = nodes - 1;
    const long long* text = tokens + row * stride;
    const Corpus corpus{corpus_tokens, corpus_wide, unsigned(max(0LL, min(*corpus_length, (long long)corpus_room)))};
    const unsigned length = unsigned(max(0LL, min(committed[row], (long long)columns)));

    const int count = gather(s, best + u64(row) * blocks * limit, at_least + u64(row) * (max_window + 2) * blocks, o, blocks);
    int longest = max_window;
    while (longest >= min_window && s.total[longest] == 0) --longest;
    if (longest < min_window) longest = 0;

    const unsigned own = length ? length - 1 : 0;
    for (int depth = lane; depth < deepest; depth += 32) {
        constexpr int kEach = (kMatches + kWarps - 1) / kWarps;
        int token[kEach];
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const int match = warp + i * kWarps;
            token[i] = -1;
            if (match >= count) continue;
            const unsigned age = s.ages[match], ahead = unsigned(depth) + 1;
            if (age < own) {
                const unsigned at = own - 1 - age + ahead;
                if (at < length) token[i] = int(text[at]);
            } else {
                const unsigned at = corpus.size - 1 - (age - own) + ahead;
                if (at < corpus.size) token[i] = corpus[at];
            }
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (warp + i * kWarps < kMatches) next[depth * kStride + warp + i * kWarps] = token[i];
    }
    __syncthreads();
    for (int i = thread; i < deepest * kMatches; i += BUILD_THREADS) {
        const int4* tokens = reinterpret_cast<const int4*>(next + i / kMatches * kStride);
        const int token = next[i / kMatches * kStride + i % kMatches];
        Set same{};
#pragma unroll
        for (int m = 0; m < kMatches; m += 4) {
            const int4 four = tokens[m / 4];
            same.words[m / 64] |= u64((four.x == token) | (four.y == token) << 1 | (four.z == token) << 2 |
                                      (four.w == token) << 3) << m % 64;
        }
        equal[i] = token < 0 ? Set{} : same;
    }
    int merged = 0;
    if (thread == 0) s.lists[kWarps].count = 0;
    const Set all = set_of([&](int i) { return match_in(i) < count; });
    for (int first = 0; longest && room && first <= longest - min_window; first += kWarps) {
        for (int i = thread; i < deepest * kMatches; i += BUILD_THREADS) where[i] = kAll;
        for (int i = thread; i < (kWarps + 1) * kNodes / 32; i += BUILD_THREADS) s.added[i] = 0;
        __syncthreads();
        const int window = longest - first - warp;
        const Set counted = set_of([&](int i) { return int(s.lengths[match_in(i)]) >= window; }) & all;
        Grower grower{s.lists[warp], s.sets[warp], s.children[warp], equal, all, counted, o, window, deepest, room};
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
    for (int i = thread; i < out.count; i += BUILD_THREADS) where[out.ids[i]] = i + 1;
    __syncthreads();
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
