"""Attention to one chunk of keys by itself, and the exact sum of such partial results.

Import this module only where Triton is installed. Shapes: M rows of a tile, C keys of a chunk, D* a head size. A
partial softmax (base 2; Milakov & Gimelshein 2018) is acc [M, Dv], the sum of weighted values, peak [M], an integer at
or above the largest score, and total [M], the sum of the weights 2 ** (score - peak). Because peaks are integers, every
factor between two of them is a power of two, and scaling by it rounds nothing. So partial results may be scaled at any
time, and only the order in which they are added counts.
"""

import triton
import triton.language as tl


@triton.jit
def power_of_2(exponent):
    """2 ** exponent of float32 integers up to 0, exactly; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def with_alibi(scores, slope, key_position, position, outer):
    """Scores [M, C] and what `ops.alibi` adds to them, which `outer` multiplies, too. slope, position [M], key_position
    [C]. The product and the sum are named, because a compiler could fuse them in one place alone."""
    rounded = key_position.to(tl.float32).to(slope.dtype).to(tl.float32)
    distance = rounded[None, :] - position.to(tl.float32)[:, None]
    return tl.fma((slope.to(tl.float32) * (1.4426950408889634 / outer))[:, None], distance, scores)


@triton.jit
def score(query, keys, PRECISION: tl.constexpr):
    """The products [M, C] of query [M, Dk] with keys [C, Dk]."""
    return tl.dot(query, tl.trans(keys), input_precision=PRECISION)


@triton.jit
def attend_to_chunk(
    scores, values, seen, slope, key_position, position, inner, outer,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The partial softmax acc, peak, total of what `score` has of keys [C], over values [C, Dv].

    seen [M, C]: which scores count; None: all. slope [M]: of the rows, see `with_alibi`; None: they
    have none. inner, outer: factors of the scores in and behind tanh.
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
    acc = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return acc, peak, tl.sum(weights, 1)


@triton.jit
def fold(acc, peak, total, next_acc, next_peak, next_total):
    """The sum of two partial softmaxes. One that saw nothing (peak: minus infinity) changes no bit of the other."""
    higher = tl.maximum(peak, next_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    keep, take = power_of_2(peak - base), power_of_2(next_peak - base)
    return acc * keep[:, None] + next_acc * take[:, None], higher, total * keep + next_total * take
