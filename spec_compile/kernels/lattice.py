"""The kernel of `drafters.trees.propose.lattice_tree`: the best tree over a table of log-probabilities, in one launch.

Import this module only where Triton is installed. A program has a row, and takes nodes from the best down: every node
offers the best of its children that are not in the tree yet, and the best offer of all nodes becomes the next node.

    candidates at place 0: a (-0.1), b (-2.5); below a at place 1: c (-0.3), d (-1.6)
    the root offers a: node 1 = a, score -0.1. The root offers b (-2.5) and a offers c (-0.4): node 2 = c.
    c offers a child, a offers d (-1.7), the root b (-2.5), and so on.
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
    """An int32 for each score, in the same order; 0.0 and -0.0 have the same one."""
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _offer(
    logprobs, place, candidate, score, taken, places, count, stride_place, stride_before, BLOCK_K: tl.constexpr
):  # fmt: skip
    """The best child of a node that is not in the bits `taken`: its number, its score, and True if there is one.

    place: where the children stand. candidate: the node's number among the candidates of the place before. score: the
    node's score.
    """
    # The scores of the children that are not taken, the lower number first among equals.
    k = tl.arange(0, BLOCK_K)
    free = (k < tl.where(place < places, count, 0)) & (((taken >> k) & 1) == 0)
    below = score + tl.load(logprobs + place * stride_place + candidate * stride_before + k, mask=free, other=0.0)
    order = tl.where(free, _order(below), -2147483648)
    best = tl.min(tl.where(order == tl.max(order, 0), k, BLOCK_K), 0)
    return best, tl.sum(tl.where(k == best, below, 0.0), 0), tl.max(free.to(tl.int32), 0) != 0


@triton.jit
def _of(values, number, index):
    """values[index] of values [BLOCK_N]."""
    return tl.sum(tl.where(number == index, values, 0), 0)


@triton.jit(do_not_specialize=["places", "nodes"])
def lattice_kernel(
    root, tokens,  # [B], [B, P, K] int64
    logprobs,  # [B, P, K, K] by its strides: of each candidate after each candidate of the place before
    ids, parents, scores,  # [B, nodes], written
    places, count, nodes, stride_row, stride_place, stride_before, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tree of one row a program. Grid (B)."""
    # The root is node 0.
    row = tl.program_id(0).to(tl.int64)
    tokens += row * places * count
    logprobs += row * stride_row
    ids += row * nodes
    parents += row * nodes
    scores += row * nodes
    tl.store(ids, tl.load(root + row))
    tl.store(parents, tl.full([], -1, tl.int64))
    tl.store(scores, tl.full([], 0.0, tl.float32))

    # For each node: the place of its children, its number as a candidate, its score, the bits of its children in the
    # tree, and its offer: the child's number, score and order.
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

    # One node after the other, from the best down.
    for node in range(1, nodes):
        # Take the best offer. Ties go to the first place, and then to the lowest parent, as in the plain form.
        tie = tl.where(order == tl.max(order, 0), place * BLOCK_N + number, 2147483647)
        above = tl.min(tie, 0) % BLOCK_N
        at, chosen, total = _of(place, number, above), _of(offer, number, above), _of(offered, number, above)
        tl.store(ids + node, tl.load(tokens + at * count + chosen))
        tl.store(parents + node, above.to(tl.int64))
        tl.store(scores + node, total)

        # The parent offers its next child, and the new node its first one.
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
