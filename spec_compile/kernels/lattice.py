"""The kernel of `drafters.trees.lattice.lattice_tree`: the best tree over a table of log-probabilities, in one launch.

Import this module only where Triton is installed. A program takes a row, and takes up nodes from the
best down: every node offers the best of its children that are left, and the best offer comes next.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch(root: Tensor, tokens: Tensor, logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `lattice_tree`."""
    batch, places, count = tokens.shape
    ids, parents = (root.new_empty(batch, nodes) for _ in range(2))
    scores = torch.empty(batch, nodes, dtype=logprobs.dtype, device=logprobs.device)
    logprobs = logprobs if logprobs.stride(3) == 1 else logprobs.contiguous()  # a table of equal rows may be one row
    lattice_kernel[(batch,)](
        root.contiguous(), tokens.contiguous(), logprobs, ids, parents, scores, places, count, nodes,
        *logprobs.stride()[:3],
        BLOCK_N=max(triton.next_power_of_2(nodes), 2), BLOCK_K=max(triton.next_power_of_2(count), 2), num_warps=1,
    )  # fmt: skip
    return ids, parents, scores


@triton.jit
def _order(score):
    """int32 that orders as the scores do; 0 and -0 alike."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _offer(
    logprobs, place, candidate, score, taken, places, count, stride_place, stride_before, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Of a node's children that are not in the bits `taken` the best: its number and score, and whether there is one.

    The children stand at `place`; the node is this candidate of the place before, with this score.
    """
    k = tl.arange(0, BLOCK_K)
    free = (k < tl.where(place < places, count, 0)) & (((taken >> k) & 1) == 0)
    below = score + tl.load(logprobs + place * stride_place + candidate * stride_before + k, mask=free, other=0.0)
    order = tl.where(free, _order(below), -2147483648)
    best = tl.min(tl.where(order == tl.max(order, 0), k, BLOCK_K), 0)
    return best, tl.sum(tl.where(k == best, below, 0.0), 0), tl.max(free.to(tl.int32), 0) != 0


@triton.jit
def _of(values, number, index):
    """The entry of values [BLOCK_N] at an index."""
    return tl.sum(tl.where(number == index, values, 0), 0)


@triton.jit(do_not_specialize=["places", "nodes"])
def lattice_kernel(
    root, tokens, logprobs, ids, parents, scores, places, count, nodes, stride_row, stride_place, stride_before,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ids, parents, scores [B, nodes] of the trees below root [B]; tokens [B, P, K]; logprobs [B, P, K, K], of strides
    stride_row, stride_place, stride_before and 1. Grid (B)"""
    row = tl.program_id(0).to(tl.int64)
    tokens += row * places * count
    logprobs += row * stride_row
    ids += row * nodes
    parents += row * nodes
    scores += row * nodes
    tl.store(ids, tl.load(root + row))
    tl.store(parents, tl.full([], -1, tl.int64))
    tl.store(scores, tl.full([], 0.0, tl.float32))

    # By node: the place of its children, which candidate it is, its score, the children that are nodes, and its offer.
    number = tl.arange(0, BLOCK_N)
    place, candidate = tl.zeros([BLOCK_N], tl.int32), tl.zeros([BLOCK_N], tl.int32)
    score, taken = tl.zeros([BLOCK_N], tl.float32), tl.zeros([BLOCK_N], tl.int32)
    zero = tl.full([], 0, tl.int32)
    first, value, _ = _offer(logprobs, zero, zero, 0.0, zero, places, count, stride_place, stride_before, BLOCK_K)
    offer, order = tl.zeros([BLOCK_N], tl.int32), tl.full([BLOCK_N], -2147483648, tl.int32)
    offered = tl.zeros([BLOCK_N], tl.float32)
    offer = tl.where(number == 0, first, offer)
    offered = tl.where(number == 0, value, offered)
    order = tl.where(number == 0, _order(value), order)
    for node in range(1, nodes):
        # Of equal offers the one at the first place, and then that of the lowest parent, as in the plain form's sort.
        tie = tl.where(order == tl.max(order, 0), place * BLOCK_N + number, 2147483647)
        above = tl.min(tie, 0) % BLOCK_N
        at, chosen, total = _of(place, number, above), _of(offer, number, above), _of(offered, number, above)
        tl.store(ids + node, tl.load(tokens + at * count + chosen))
        tl.store(parents + node, above.to(tl.int64))
        tl.store(scores + node, total)

        # The parent offers its next child, and the node its first.
        taken = tl.where(number == above, taken | (1 << chosen), taken)
        place, candidate = tl.where(number == node, at + 1, place), tl.where(number == node, chosen, candidate)
        score = tl.where(number == node, total, score)
        left = _of(taken, number, above)
        best, value, exists = _offer(
            logprobs, at, _of(candidate, number, above), _of(score, number, above), left, places, count,
            stride_place, stride_before, BLOCK_K,
        )  # fmt: skip
        offer, offered = tl.where(number == above, best, offer), tl.where(number == above, value, offered)
        order = tl.where(number == above, tl.where(exists, _order(value), -2147483648), order)
        best, value, exists = _offer(
            logprobs, at + 1, chosen, total, zero, places, count, stride_place, stride_before, BLOCK_K
        )
        offer, offered = tl.where(number == node, best, offer), tl.where(number == node, value, offered)
        order = tl.where(number == node, tl.where(exists, _order(value), -2147483648), order)
