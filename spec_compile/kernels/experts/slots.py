"""The expert that a program of the kernel of routed experts serves, and the rows of that expert.

Every program has a slot, and finds its expert in `ids` by itself, so no list of experts has to be made first. A pair is
a token and one of its experts. With at most as many pairs as experts (BY_PAIR), slot s serves the expert of pair s,
unless an earlier pair has the same expert; with more pairs, slot s serves expert s. Slots without work end at once.

    ids = [[5, 2], [2, 7]]: pairs 0 .. 3 of experts 5, 2, 2, 7
    8 experts: slot 0 serves expert 5 (pair 0), slot 1 expert 2 (pairs 1 and 2), slot 2 none, slot 3 expert 7 (pair 3)

Import this module only where Triton is installed.
"""

import triton
import triton.language as tl

FEW, MANY = 32, 128
"""Pairs that a program looks through at a time (CHUNK): one warp looks through FEW, a whole program through MANY."""


@triton.jit
def expert_of(
    ids_ptr, slot, pairs, BY_PAIR: tl.constexpr, ONE_TOKEN: tl.constexpr, CHUNK: tl.constexpr, FIRST: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    """The expert that a slot serves, less FIRST, and how many pairs it has; 0 if another slot or GPU serves it.

    ids_ptr: [pairs]. ONE_TOKEN: each pair has another expert, so there is nothing to look through.
    FIRST, HELD: the first expert of this GPU, and how many it has; HELD = 0: all. In the example above with FIRST = 4
    and HELD = 4, slot 0 serves expert 5, slot 3 expert 7, and slots 1 and 2 none.
    """
    pair = tl.arange(0, CHUNK)
    expert, count = slot, slot * 0
    if BY_PAIR or ONE_TOKEN:
        expert = tl.load(ids_ptr + slot).to(tl.int32) - FIRST
    if ONE_TOKEN:
        count += 1
    else:
        first = slot * 0 + pairs
        for begin in range(0, pairs, CHUNK):
            same = tl.load(ids_ptr + begin + pair, mask=begin + pair < pairs, other=-1).to(tl.int32) == expert + FIRST
            count += tl.sum(same.to(tl.int32))
            first = tl.minimum(first, tl.min(tl.where(same, begin + pair, pairs)))
        if BY_PAIR:
            count = tl.where(first == slot, count, 0)
    if HELD:
        count = tl.where((expert >= 0) & (expert < HELD), count, 0)
    return expert, count


@triton.jit
def pairs_of(
    ids_ptr, slot, expert, n, pairs, ONE_TOKEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Pair number n [BLOCK_N] of the slot's expert, counted among the pairs of that expert; 0 after the last.

    In the example above, slot 1 and n = [0, 1, 2] give [1, 2, 0]. ONE_TOKEN: see `expert_of`.
    """
    pair = tl.arange(0, CHUNK)
    of_n = tl.zeros([BLOCK_N], tl.int32)
    if ONE_TOKEN:
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
