// The largest logits of rows, and the sums of their softmax. Meanings are in kernels/top_logits.py.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "../../kernels/native/cpu.h"

namespace spec_compile {

constexpr int kMostLogits = 16, kStretch = 64;
constexpr int kPart = 1024;  // logits that are summed up in float32
constexpr float kLeast = -std::numeric_limits<float>::infinity(), kLargest = std::numeric_limits<float>::max();

#define SPEC_COMPILE_INLINE inline __attribute__((always_inline))
#pragma GCC diagnostic ignored "-Wpsabi"  // all functions with vectors are inlined

struct BFloat16 { uint16_t bits; };

inline float clean(float x) { return x == x ? std::min(x, kLargest) : kLeast; }
inline float clean(BFloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return clean(number);
}

template <class T, int N> struct Vector {
    typedef T Type __attribute__((vector_size(sizeof(T) * N)));
};

// Operations on N numbers, as many as a register of the instructions holds.
template <int N> struct Lanes {
    using Numbers = typename Vector<float, N>::Type;
    using Bits = typename Vector<int32_t, N>::Type;

    SPEC_COMPILE_INLINE static void read(Numbers& x, const BFloat16* logits) {
        typename Vector<uint16_t, N>::Type half;
        std::memcpy(&half, logits, sizeof half);
        const Bits bits = __builtin_convertvector(half, Bits) << 16;
        read(x, reinterpret_cast<const float*>(&bits));
    }
    SPEC_COMPILE_INLINE static void read(Numbers& x, const float* logits) {
        std::memcpy(&x, logits, sizeof x);
        x = x == x ? (x < kLargest ? x : kLargest - Numbers{}) : kLeast - Numbers{};
    }

    // Replaces x <= 0 by 2 ** x, at least 2 ** -126: a polynomial of the fraction, and the rest as the exponent's bits.
    SPEC_COMPILE_INLINE static void raise(Numbers& x) {
        constexpr float kRound = 12582912;  // 1.5 * 2 ** 23: adding it rounds
        x = x > -126.0f ? x : -126.0f - Numbers{};
        const Numbers shifted = x + kRound, fraction = x - (shifted - kRound);
        x = fraction * 1.540353e-4f + 1.333356e-3f;
        for (float factor : {9.618129e-3f, 5.550411e-2f, 0.2402265f, 0.6931472f, 1.0f}) x = x * fraction + factor;
        Bits bits, exponent;
        std::memcpy(&bits, &x, sizeof bits);
        std::memcpy(&exponent, &shifted, sizeof bits);
        bits += exponent << 23;
        std::memcpy(&x, &bits, sizeof bits);
    }
};

// Writes the largest logit of each stretch, and returns the largest of all.
template <int N, class T> SPEC_COMPILE_INLINE float find_maxima(const T* logits, int64_t vocab, float* maxima) {
    float most = kLeast;
    for (int64_t begin = 0; begin < vocab; begin += kStretch) {
        float best = kLeast;
        if (begin + kStretch <= vocab) {
            typename Lanes<N>::Numbers lanes, next;
            Lanes<N>::read(lanes, logits + begin);
            for (int i = N; i < kStretch; i += N) {
                Lanes<N>::read(next, logits + begin + i);
                lanes = next > lanes ? next : lanes;
            }
            for (int i = 0; i < N; i++) best = std::max(best, lanes[i]);
        } else {
            for (int64_t i = begin; i < vocab; i++) best = std::max(best, clean(logits[i]));
        }
        maxima[begin / kStretch] = best;
        most = std::max(most, best);
    }
    return most;
}

template <int N, class T>
SPEC_COMPILE_INLINE double sum_powers(const T* logits, int64_t vocab, float peak, float scale) {
    double total = 0;
    for (int64_t begin = 0; begin < vocab; begin += kPart) {
        typename Lanes<N>::Numbers sums{}, x;
        const int64_t end = std::min(begin + kPart, vocab);
        int64_t i = begin;
        for (; i + N <= end; i += N) {
            Lanes<N>::read(x, logits + i);
            x = (x - peak) * scale;
            Lanes<N>::raise(x);
            sums += x;
        }
        for (int lane = 0; lane < N; lane++) total += sums[lane];
        for (; i < end; i++) total += std::exp2((clean(logits[i]) - peak) * scale);
    }
    return total;
}

// Keeps the first of the entries that come by rising id: the largest, the lower id of equal ones.
struct First {
    int most, count = 0;
    std::array<float, kMostLogits> values;
    std::array<int64_t, kMostLogits> ids;

    void add(float value, int64_t id) {
        if (count == most && !(value > values[count - 1])) return;
        int place = count < most ? count++ : count - 1;
        for (; place && value > values[place - 1]; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = value;
        ids[place] = id;
    }
};

// Rows of logits, and what is asked of each. banned: one byte a token, or null; those count as the least.
struct Rows {
    const void* logits;
    int64_t vocab;
    int k;
    float temperature;
    float* logprobs;  // null: only ids are asked for
    int64_t* ids;
    const uint8_t* banned;  // of the rows of each sequence
    const uint8_t* applies;
    int64_t nodes;
};

template <int N, class T> SPEC_COMPILE_INLINE void read_row(const Rows& rows, int64_t row) {
    const int64_t vocab = rows.vocab;
    std::vector<float> maxima(vocab / kStretch + 1);
    const T* logits = static_cast<const T*>(rows.logits) + row * vocab;
    const uint8_t* banned = rows.applies && rows.applies[row] ? rows.banned + row / rows.nodes * vocab : nullptr;
    const float peak = find_maxima<N>(logits, vocab, maxima.data());
    First stretches{rows.k}, best{rows.k};
    if (banned) {  // each token counts, because the best of a stretch may be banned
        for (int64_t i = 0; i < vocab; i++) best.add(banned[i] ? kLeast : clean(logits[i]), i);
    } else {
        for (int64_t i = 0; i * kStretch < vocab; i++) stretches.add(maxima[i], i);
        std::sort(stretches.ids.begin(), stretches.ids.begin() + stretches.count);
        for (int s = 0; s < stretches.count; s++)
            for (int64_t i = stretches.ids[s] * kStretch; i < std::min((stretches.ids[s] + 1) * kStretch, vocab); i++)
                best.add(clean(logits[i]), i);
    }
    std::copy(best.ids.begin(), best.ids.begin() + rows.k, rows.ids + row * rows.k);
    if (!rows.logprobs) return;
    const float scale = std::min(1.44269504f / rows.temperature, kLargest);
    const float total = peak > kLeast ? float(std::log(sum_powers<N>(logits, vocab, peak, scale))) : 0.0f;
    for (int i = 0; i < rows.k; i++) {
        const float value = best.values[i], logprob = (value - peak) / rows.temperature - total;
        rows.logprobs[row * rows.k + i] = value > kLeast ? std::min(logprob, 0.0f) : kLeast;
    }
}

using ReadRow = void (*)(const Rows&, int64_t);

// The same code for the instructions of each level.
#define SPEC_COMPILE_READ_ROW(name, lanes, target)                              \
    template <class T> target inline void name(const Rows& rows, int64_t row) { \
        read_row<lanes, T>(rows, row);                                          \
    }
SPEC_COMPILE_READ_ROW(read_row_plain, 4, )
#if defined(__x86_64__)
SPEC_COMPILE_READ_ROW(read_row_avx2, 8, __attribute__((target("avx2,fma"))))
SPEC_COMPILE_READ_ROW(read_row_avx512, 16, __attribute__((target("avx512f,avx2,fma"))))
#endif

// level: the place in kernels.cpu.LEVELS that kernels may take at most.
template <class T> ReadRow read_row_for(int64_t level) {
#if defined(__x86_64__)
    level = std::min<int64_t>(level, level_of_cpu());
    if (level >= 2) return read_row_avx512<T>;
    if (level == 1) return read_row_avx2<T>;
#endif
    return read_row_plain<T>;
}

}  // namespace spec_compile
