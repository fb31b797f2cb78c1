"""Attention to one chunk of keys by itself, and the exact sum of such partial results.

Import this module only where Triton is installed. Shapes: M rows of a tile, C keys of a chunk, D* a head size. A
partial softmax (base 2; Milakov & Gimelshein 2018) over keys j is

    peak [M]       an integer, ceil(max_j score_j)
    total [M]      sum_j 2 ** (score_j - peak)
    acc [M, Dv]    sum_j 2 ** (score_j - peak) * value_j

so that acc / total is the attention to these keys. Because peaks are integers, every factor between two of them is a
power of two, and to scale by it rounds nothing. So a partial result may be scaled at any time, and only the order in
which partial results are added decides the bits of their sum. Example: peaks 5 and 3 give acc + next_acc * 2 ** -2.
"""

import triton
import triton.language as tl


def key_columns(size: int) -> int:
    """The columns of a block of keys of `size` numbers: the power of two that holds them, and at least the 16 that a
    product on tensor cores sums. Example: 16 for heads of 8, 128 for heads of 80.
    """
    return max(triton.next_power_of_2(size), 16)


@triton.jit
def power_of_2(exponent):
    """2 ** exponent of float32 integers up to 0, exactly; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def with_alibi(scores, slope, key_position, position, outer):
    """Scores [M, C] plus `ops.alibi` in base 2 over `outer`, because the caller multiplies all by `outer` later.

    slope, position [M]; key_position [C]. The product and the sum are an explicit fma, because a compiler could fuse
    them in one kernel and not in another.
    """
    rounded = key_position.to(tl.float32).to(slope.dtype).to(tl.float32)
    distance = rounded[None, :] - position.to(tl.float32)[:, None]
    return tl.fma((slope.to(tl.float32) * (1.4426950408889634 / outer))[:, None], distance, scores)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. PRECISION: Triton's for float32, or "wide": numbers of 16 bits are multiplied as float32, by a
    GPU whose tensor cores Triton does not use."""
    if PRECISION == "wide":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def score(query, keys, PRECISION: tl.constexpr):
    """The products [M, C] of query [M, Dk] with keys [C, Dk]."""
    return product(query, tl.trans(keys), PRECISION)


@triton.jit
def attend_to_chunk(
    scores, values, seen, slope, key_position, position, inner, outer,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial softmax acc, peak, total of products from `score` [M, C] over values [C, Dv].

    The score is outer * products, or with SOFTCAP outer * tanh(inner * products / (2 log2 e)); see
    `tree_attention._factors`. seen [M, C]: True where a row sees a key; None: everywhere. slope, position [M],
    key_position [C]: see `with_alibi`; slope None: no biases.
    """
    if SOFTCAP:
        scores = 1 - 2 * (1 / (tl.exp2(scores * inner) + 1))  # tanh
    if slope is not None:
        scores = with_alibi(scores, slope, key_position, position, outer)
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    peak = tl.ceil(tl.max(scores, 1) * outer)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(tl.fma(scores, outer, -base[:, None]))
    acc = product(weights.to(values.dtype), values, PRECISION)
    return acc, peak, tl.sum(weights, 1)


@triton.jit
def fold(acc, peak, total, next_acc, next_peak, next_total):
    """The sum of two partial softmaxes. One that saw no key (peak: minus infinity) changes no bit of the other."""
    higher = tl.maximum(peak, next_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep, take = power_of_2(peak - base), power_of_2(next_peak - base)
    return acc * keep[:, None] + next_acc * take[:, None], higher, total * keep + next_total * take


@triton.jit
def fold_row(acc, peak, total, next_acc, next_peak, next_total):
    """`fold` of one row: acc [Dv], peak and total numbers."""
    higher = tl.maximum(peak, next_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep, take = power_of_2(peak - base), power_of_2(next_peak - base)
    return acc * keep + next_acc * take, higher, total * keep + next_total * take
