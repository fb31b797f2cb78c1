"""Which expert a program of the kernel of routed experts serves, and which rows.

Where there are fewer pairs of a token and an expert than experts, slot s serves the expert of pair s, unless a pair
before it has the same; else slot s is expert s. So no list of experts has to be made first, and slots with nothing to
do end at once. Import this module only where Triton is installed.
"""

import triton
import triton.language as tl

FEW, MANY = 32, 128
"""Pairs that a program looks through at a time: a warp looks through few by itself, many need all of a program."""


@triton.jit
def expert_of(ids_ptr, slot, pairs, BY_PAIR: tl.constexpr, ALONE: tl.constexpr, CHUNK: tl.constexpr):
    """The expert that a slot serves, and its number of pairs, 0 if another slot serves it. ALONE: there is one token,
    each of whose pairs has a slot, so that there is nothing to look through."""
    pair = tl.arange(0, CHUNK)
    expert, count = slot, slot * 0
    if BY_PAIR or ALONE:
        expert = tl.load(ids_ptr + slot).to(tl.int32)
    if ALONE:
        count += 1
    else:
        first = slot * 0 + pairs
        for begin in range(0, pairs, CHUNK):
            same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=-1).to(tl.int32) == expert
            count += tl.sum(same.to(tl.int32))
            first = tl.minimum(first, tl.min(tl.where(same, begin + pair, pairs)))
        if BY_PAIR:
            count = tl.where(first == slot, count, 0)
    return expert, count


@triton.jit
def pairs_of(
    ids_ptr, slot, expert, n, pairs, ALONE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The pairs of a slot's expert with the numbers n [BLOCK_N] among its own; 0 behind the last. ALONE: see
    `expert_of`."""
    pair = tl.arange(0, CHUNK)
    of_n = tl.zeros([BLOCK_N], tl.int32)
    if ALONE:
        of_n += tl.where(n == 0, slot, 0)
    else:
        before = expert * 0
        for begin in range(0, pairs, CHUNK):
            same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=-1).to(tl.int32) == expert
            number = before + tl.cumsum(same.to(tl.int32), 0) - 1
            hit = (number[None, :] == n[:, None]) & same[None, :]
            of_n += tl.sum(tl.where(hit, begin + pair[None, :], 0), 1)
            before += tl.sum(same.to(tl.int32))
    return of_n
