"""Trees of drafts, in one launch each: the best over tables of log-probabilities, and the best of two trees.

Import this module only where Triton is installed. There is a table of a block's places, and one of recycled tokens. A
program has a row, and takes nodes from the best down: every node offers all its children, and the best offer of all
nodes becomes the next node.

    candidates at place 0: a (-0.1), b (-2.5); below a at place 1: c (-0.3), d (-1.6)
    the root offers a and b: node 1 = a, score -0.1. a offers c (-0.4) and d (-1.7): node 2 = c.
    c offers its children, a still offers d (-1.7), the root b (-2.5), and so on.

An offer is one int64 that orders as (-score, level, number), as the plain forms do. With K candidates after a node,
candidate c after node n has the number n * K + c: with K = 4, node 2 offers the numbers 8 to 11.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import top_logits
from .primitives import rounded
from .top_logits import BLOCK

launch_top_logits, launch_likeliest = top_logits.launch, top_logits.launch_likeliest

SIZE_OF_WARP = 256
"""Offers that one warp of a program compares."""


def launch(root: Tensor, tokens: Tensor, logprobs: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `drafters.trees.propose.lattice_tree`."""
    batch, places, count = tokens.shape
    size = triton.next_power_of_2(nodes * count)
    ids, parents = (root.new_empty(batch, nodes) for _ in range(2))
    scores = torch.empty(batch, nodes, dtype=logprobs.dtype, device=logprobs.device)
    logprobs = logprobs if logprobs.stride(3) == 1 else logprobs.contiguous()  # a table of equal rows may be one row
    lattice_kernel[(batch,)](
        root.contiguous(), tokens.contiguous(), logprobs, ids, parents, scores, places, count, nodes,
        *logprobs.stride()[:3], SIZE=size, num_warps=min(max(size // SIZE_OF_WARP, 1), 4),
    )  # fmt: skip
    return ids, parents, scores


def launch_unroll(table: Tensor, root: Tensor, reads: Tensor, nodes: int, levels: int) -> tuple[Tensor, ...]:
    """See `drafters.recycle.unrolled`."""
    batch, count = len(root), table.shape[1]
    ids, parents = (root.new_empty(batch, nodes) for _ in range(2))
    scores, used = torch.empty(batch, nodes, dtype=torch.float32, device=root.device), root.new_empty(batch)
    rows, columns = triton.next_power_of_2(nodes), triton.next_power_of_2(count)
    unroll_kernel[(batch,)](
        table, root, root.stride(0), reads, ids, parents, scores, used, count, nodes, LEVELS=levels, ROWS=rows,
        COLUMNS=columns, num_warps=min(max(rows * columns // (2 * SIZE_OF_WARP), 1), 4),
    )  # fmt: skip
    return ids, parents, scores, used


def launch_renew(table: Tensor, tokens: Tensor, logits: Tensor, block: int = BLOCK) -> None:
    """See `drafters.recycle.renew`."""
    top_logits.launch(logits, table.shape[1], 1.0, block, table=table, tokens=tokens.contiguous())


@triton.jit(do_not_specialize=["places", "nodes"])
def lattice_kernel(
    root, tokens,  # [B], [B, P, K] int64
    logprobs,  # [B, P, K, K] by its strides: of each candidate after each candidate of the place before
    ids, parents, scores,  # [B, nodes], written
    places, count, nodes, stride_row, stride_place, stride_before, SIZE: tl.constexpr,
):  # fmt: skip
    """The tree of one row a program. Grid (B)."""
    # The root is node 0.
    row = tl.program_id(0).to(tl.int64)
    tokens += row * places * count
    logprobs += row * stride_row
    tl.store(ids + row * nodes, tl.load(root + row))
    tl.store(parents + row * nodes, tl.full([], -1, tl.int64))
    tl.store(scores + row * nodes, tl.full([], 0.0, tl.float32))

    number = tl.arange(0, SIZE)
    offers = tl.full([SIZE], 0x7FFFFFFFFFFFFFFF, tl.int64)
    place, candidate, score = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0.0, tl.float32)
    for node in range(1, nodes):
        # The node before offers its children. Bits of floats >= 0 order as the floats.
        child = number - (node - 1) * count
        is_new = (child >= 0) & (child < tl.where(place < places, count, 0))
        below = tl.load(logprobs + place * stride_place + candidate * stride_before + child, mask=is_new, other=0.0)
        loss = (0.0 - (score + below)).to(tl.int32, bitcast=True).to(tl.int64)
        offers = tl.where(is_new, loss << 16 | (place * 1024 + number).to(tl.int64), offers)

        # Take the best.
        best = tl.min(offers, 0)
        offers = tl.where(offers == best, 0x7FFFFFFFFFFFFFFF, offers)
        chosen = (best & 1023).to(tl.int32)
        place, candidate = ((best >> 10) & 63).to(tl.int32) + 1, chosen % count
        score = 0.0 - (best >> 16).to(tl.int32).to(tl.float32, bitcast=True)
        tl.store(ids + row * nodes + node, tl.load(tokens + (place - 1) * count + candidate))
        tl.store(parents + row * nodes + node, (chosen // count).to(tl.int64))
        tl.store(scores + row * nodes + node, score)


@triton.jit(do_not_specialize=["stride_root", "nodes"])
def unroll_kernel(
    table,  # [V, K] int32, see `drafters.recycle.UNIT`
    root, stride_root, reads,  # [B] int64 by its stride; [B] bool
    ids, parents, scores, used,  # [B, nodes], [B], written
    count, nodes, LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The tree of one row a program. Grid (B). Losses in the table's units are so small that an offer is an int32, by
    which a warp finds the least in one instruction: loss * 8 + level, times 1024, plus number. K <= COLUMNS."""
    NONE: tl.constexpr = 2047  # the loss of a missing candidate, above 6 * 255
    row = tl.program_id(0).to(tl.int64)
    token, chosen = tl.load(root + row * stride_root).to(tl.int32), tl.full([], -1, tl.int32)
    level, loss, found = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32), tl.full([], 0, tl.int64)
    is_read = tl.load(reads + row) != 0

    # Offers [node, candidate], and their tokens.
    of_node, candidate = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)
    number = of_node * count + candidate[None, :]
    offers, tokens = tl.full([ROWS, COLUMNS], 0x7FFFFFFF, tl.int32), tl.zeros([ROWS, COLUMNS], tl.int32)
    for node in range(nodes):
        # Store the node that was taken. The root's chosen is -1, and so is its parent.
        is_real = is_read & (loss < NONE)
        found += is_real.to(tl.int64)
        tl.store(ids + row * nodes + node, token.to(tl.int64))
        tl.store(parents + row * nodes + node, tl.where(chosen < 0, -1, chosen // count).to(tl.int64))
        tl.store(scores + row * nodes + node, tl.where(is_real, 0.0 - loss * 0.0625, float("-inf")))

        # It offers its children.
        exists = candidate < tl.where(level < LEVELS, count, 0)
        entry = tl.load(table + token * count + candidate, mask=exists, other=-1)
        total = tl.minimum(tl.where(entry < 0, NONE, loss + (entry & 255)), NONE)
        is_new = (of_node == node) & exists[None, :]
        offers = tl.where(is_new, ((total * 8 + level) * 1024)[None, :] + number, offers)
        tokens = tl.where(is_new, tl.maximum(entry >> 8, 0)[None, :], tokens)

        # Take the best.
        best = tl.min(offers)
        chosen, level, loss = best & 1023, ((best >> 10) & 7) + 1, best >> 13
        token = tl.max(tl.where(number == chosen, tokens, 0))
        offers = tl.where(number == chosen, 0x7FFFFFFF, offers)
    tl.store(used + row, tl.maximum(found, 1))


# Two trees as one, see `drafters.trees.merge`. The nodes of both have one numbering: the head's nodes begin at 0,
# n-grams' nodes at BLOCK. With BLOCK = 16 node 2 of n-grams is number 18.


def launch_merge(
    lengths: Tensor, head: Sequence[Tensor], scores: Tensor, trie: Sequence[Tensor], longest: Tensor, counts: Tensor,
    begins: Tensor, drafts: Sequence[Tensor], nodes: int, **layout,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `drafters.trees.merge.merge_into`. layout: constants of `drafters.trees.merge` by their names."""
    batch, size = head[0].shape
    others = trie[0].shape[1]
    tokens, parents = (lengths.new_empty(batch, nodes) for _ in range(2))
    count, confidence = (lengths.new_empty(batch) for _ in range(2))
    block = triton.next_power_of_2(max(size, others, CHUNK.value))
    merge_kernel[(batch,)](
        *(x.contiguous() for x in (*head, scores, *trie, longest)), counts, lengths, tokens, parents, count, confidence,
        begins, *drafts, size, others, nodes,
        BLOCK=block, PASSES=(block - 1).bit_length(), num_warps=block // CHUNK.value, **layout,
    )  # fmt: skip
    return tokens, parents, count, confidence


def launch_learn(
    counts: Tensor, drafts: Sequence[Tensor], begins: Tensor, begin: Tensor, lengths: Tensor, text: Tensor, head: int,
    kept: float,
) -> None:  # fmt: skip
    """See `drafters.trees.merge.learn_from`."""
    batch, others = len(begin), drafts[0].shape[1] - head
    block = triton.next_power_of_2(max(head, others, 2))
    learn_kernel[(triton.cdiv(counts.shape[1], 16),)](
        counts, *(drafts[number] for number in (0, 2, 3, 4, 5)), begins, begin, lengths, text, text.stride(0),
        text.shape[1], batch, head, others, kept, CELLS=counts.shape[1], BLOCK=block,
        LINES=min(triton.next_power_of_2(2 * batch), 256 // block), BLOCK_CELLS=16, num_warps=4,
    )  # fmt: skip


@triton.jit
def _down(values, above, PASSES: tl.constexpr):
    """Sums [M] from the root down to each node; roots, which are their own parents, have the value 0.

    Each pass doubles how many nodes of a path are summed, as in `tree.ancestry`.
    """
    for _ in tl.static_range(PASSES):
        values += tl.gather(values, above, 0)
        above = tl.gather(above, above, 0)
    return values


# Nodes are compared with all others, CHUNK of them at a time, so that the comparisons fit into registers.

CHUNK: tl.constexpr = tl.constexpr(16)


@triton.jit
def relatives(key, depth, parent, source):
    """The last node of the other source on the same path, or -1; and each node's number among its siblings.

    source: 0 for the head's nodes, 1 for n-grams', 2 for slots that are not in use.
    """
    n = tl.arange(0, key.shape[0])
    other, rank = n * 0 - 1, n * 0
    for start in range(0, key.shape[0], CHUNK):
        j = start + tl.arange(0, CHUNK)
        theirs = tl.gather(source, j, 0)[None, :]
        same = (key[:, None] == tl.gather(key, j, 0)[None, :]) & (depth[:, None] == tl.gather(depth, j, 0)[None, :])
        other = tl.maximum(other, tl.max(tl.where(same & (source[:, None] + theirs == 1), j[None, :], -1), 1))
        older = (parent[:, None] == tl.gather(parent, j, 0)[None, :]) & (theirs == 1) & (j[None, :] < n[:, None])
        rank += tl.sum(older.to(tl.int32), 1)
    return other, rank


@triton.jit
def sums_of_siblings(up, values):
    """For each node the sum of the values of all nodes with the same parent `up`."""
    total = values * 0
    for start in range(0, up.shape[0], CHUNK):
        j = start + tl.arange(0, CHUNK)
        siblings = up[:, None] == tl.gather(up, j, 0)[None, :]
        total += tl.sum(tl.where(siblings, tl.gather(values, j, 0)[None, :], 0.0), 1)
    return total


@triton.jit
def places(worth):
    """Each node's place, from the best down; the lower number comes first among equals."""
    n = tl.arange(0, worth.shape[0])
    place = n * 0
    for start in range(0, worth.shape[0], CHUNK):
        j = start + tl.arange(0, CHUNK)
        theirs, ours = tl.gather(worth, j, 0)[None, :], worth[:, None]
        place += tl.sum(((theirs > ours) | ((theirs == ours) & (j[None, :] < n[:, None]))).to(tl.int32), 1)
    return place


@triton.jit
def _bucket(values, BOUNDS: tl.constexpr):
    """`drafters.trees.merge.bucket`."""
    total = (values > BOUNDS[0]).to(tl.int32)
    for place in tl.static_range(1, len(BOUNDS)):
        total += (values > BOUNDS[place]).to(tl.int32)
    return total


@triton.jit
def estimates(
    score, match, rank, is_main, depth, above, number, is_trie, LEAST, MOST, DEPTHS: tl.constexpr, BINS: tl.constexpr,
    LOWEST: tl.constexpr, MATCHES: tl.constexpr, RANKS: tl.constexpr, STAGES: tl.constexpr,
    FIRST_OF_TRIE: tl.constexpr, FIRST_OF_BOTH: tl.constexpr,
):  # fmt: skip
    """The probabilities that the sources expect, and their cells: `drafters.trees.merge.head_cells` and `trie_cells`.

    score: sums from the root down. number: for a node of the head, the node of n-grams on the same path, or -1.
    """
    # The head's.
    logprob = score - tl.gather(score, above, 0)
    p = tl.minimum(tl.maximum(tl.exp(tl.where(logprob == logprob, logprob, float("-inf"))), LEAST), MOST)
    bins = tl.minimum(tl.maximum(tl.floor(tl.log(p / (1 - p))).to(tl.int32) - LOWEST, 0), BINS - 1)
    head_cell = (tl.minimum(tl.maximum(depth, 1), DEPTHS) - 1) * BINS + bins

    # N-grams'.
    group = tl.where(is_main, 0, tl.minimum(rank + 1, RANKS - 1))
    length = tl.maximum(match + depth - 1, 1).to(tl.float32)
    share = tl.where(is_main, 1.0, tl.where(rank == 0, 0.6, tl.where(rank == 1, 0.2, 0.1)))
    q = tl.minimum(tl.maximum(share * length / (length + 1), LEAST), MOST)
    trie_cell = (_bucket(match, MATCHES) * RANKS + group) * (len(STAGES) + 1) + _bucket(depth, STAGES) + FIRST_OF_TRIE

    # Both sources'.
    both = 1 - (1 - p) * (1 - tl.gather(q, tl.maximum(number, 0), 0))
    both_cell = FIRST_OF_BOTH + _bucket(match, MATCHES) * BINS + bins
    prior = tl.where(is_trie, q, tl.where(number < 0, p, both))
    return prior, tl.where(is_trie, trie_cell, tl.where(number < 0, head_cell, both_cell))


@triton.jit(do_not_specialize=["size", "others", "nodes"])
def merge_kernel(
    head_tokens, head_parents, head_count, scores,  # [B, size], [B, size], [B] int64, [B, size] float32
    trie_tokens, trie_parents, trie_count, match,  # [B, others], [B, others], [B], [B] int64
    counts, lengths,  # [2, CELLS] float32, [B]
    tokens, parents, count, confidence,  # [B, nodes], [B, nodes], [B], [B], written
    begins, kept_tokens, kept_above, kept_ancestors, kept_depth, kept_cells, kept_priors,  # [B], [B, size + others]
    size, others, nodes, CELLS: tl.constexpr, WEIGHT, LEAST, MOST,
    DEPTHS: tl.constexpr, BINS: tl.constexpr, LOWEST: tl.constexpr, MATCHES: tl.constexpr, RANKS: tl.constexpr,
    STAGES: tl.constexpr, FIRST_OF_TRIE: tl.constexpr, FIRST_OF_BOTH: tl.constexpr,
    BLOCK: tl.constexpr, PASSES: tl.constexpr,
):  # fmt: skip
    """The tree of one row a program. Grid (B)."""
    # Load both trees. Slots that are not in use hold children of the root.
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, 2 * BLOCK)
    is_trie, local = n >= BLOCK, n % BLOCK
    exists, at = local < tl.where(is_trie, others, size), tl.where(is_trie, row * others, row * size) + local
    in_head, in_trie = exists & (n < BLOCK), exists & is_trie
    token = tl.load(head_tokens + at, mask=in_head, other=0) + tl.load(trie_tokens + at, mask=in_trie, other=0)
    parent = tl.load(head_parents + at, mask=in_head, other=0) + tl.load(trie_parents + at, mask=in_trie, other=0)
    is_used = exists & (local < tl.where(is_trie, tl.load(trie_count + row), tl.load(head_count + row)))
    above = tl.maximum(parent, 0).to(tl.int32)
    source_above, above = above, above + n - local
    is_below, bit = local > 0, tl.full([], 1, tl.int64) << local.to(tl.int64)
    depth = _down((is_below & (parent >= 0)).to(tl.int32), above, PASSES)
    ancestors = _down(tl.where(is_below, bit, 0), above, PASSES) | 1

    # The same path has the same key: pair up nodes.
    key = (token * 64 + depth).to(tl.uint64) * 0xBF58476D1CE4E5B9
    key = _down(tl.where(is_below, ((key ^ (key >> 31)) * 0x94D049BB133111EB).to(tl.int64), 0), above, PASSES)
    other, rank = relatives(key, depth, parent, tl.where(is_used, is_trie.to(tl.int32), 2))
    partner, number = tl.where(is_trie, other, -1), tl.where(is_trie, -1, other)

    # The probabilities that the sources expect, and the cells that correct them.
    is_main = _down((is_below & (rank > 0)).to(tl.int32), above, PASSES) == 0
    score, longest = tl.load(scores + at, mask=in_head, other=0.0), tl.load(match + row).to(tl.int32)
    prior, cell = estimates(
        score, longest, rank, is_main, depth, above, number, is_trie, LEAST, MOST, DEPTHS, BINS, LOWEST, MATCHES,
        RANKS, STAGES, FIRST_OF_TRIE, FIRST_OF_BOTH,
    )  # fmt: skip

    # The probability of each draft after its parent, and of its path. A node of both sources is the head's.
    moved = tl.gather(partner, above, 0)
    up = tl.where(moved < 0, above, moved)
    is_draft = is_used & (partner < 0) & (n > 0)
    hits = tl.load(counts + cell, mask=is_draft, other=0.0)
    ratio = (hits + WEIGHT) / (tl.load(counts + CELLS + cell, mask=is_draft, other=0.0) + WEIGHT)
    likely = tl.where(is_draft, tl.minimum(tl.maximum(prior * ratio, LEAST), MOST), 0.0)
    likely = tl.where(is_draft, likely / tl.maximum(sums_of_siblings(up, likely), 1.0), 1.0)
    worth = _down(tl.log(likely), up, PASSES)
    worth = tl.where(is_draft | (n == 0), worth, float("-inf"))

    # The best of them.
    place = places(worth)
    is_real, out = (worth > float("-inf")) & (place < nodes), row * nodes + place
    tl.store(tokens + out, tl.where(is_real, token, 0), mask=place < nodes)
    over = tl.where(n == 0, -1, tl.where(is_real, tl.gather(place, up, 0), 0))
    tl.store(parents + out, over.to(tl.int64), mask=place < nodes)
    tl.store(count + row, tl.sum(is_real.to(tl.int64), 0))
    expected = tl.sum(tl.where(is_real & (n > 0), tl.exp(worth), 0.0), 0)
    tl.store(confidence + row, rounded(expected).to(tl.int64))

    # Remember the drafts.
    at = row * (size + others) + tl.where(is_trie, size, 0) + local
    tl.store(begins + row, tl.load(lengths + row))
    tl.store(kept_tokens + at, token, mask=exists)
    tl.store(kept_above + at, source_above.to(tl.int64), mask=exists)
    tl.store(kept_ancestors + at, ancestors, mask=exists)
    tl.store(kept_depth + at, depth.to(tl.int64), mask=exists)
    tl.store(kept_cells + at, tl.where(is_draft, cell, -1).to(tl.int64), mask=exists)
    tl.store(kept_priors + at, prior, mask=exists)


@triton.jit(do_not_specialize=["capacity", "batch", "size", "others"])
def learn_kernel(
    counts,  # [2, CELLS] float32, written
    tokens, ancestors, depths, cells, priors,  # [B, size + others] of `drafters.trees.merge.Drafts`
    begins, begin, lengths, text,  # [B], [B], [B], [B, capacity] int64
    stride, capacity, batch, size, others, kept,
    CELLS: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr, BLOCK_CELLS: tl.constexpr,
):  # fmt: skip
    """BLOCK_CELLS cells a program, which reads all drafts. Grid (CELLS / BLOCK_CELLS).

    A line has the drafts of one source in one row: row 3's drafts of n-grams are line 7.
    """
    cell = tl.program_id(0) * BLOCK_CELLS + tl.arange(0, BLOCK_CELLS)
    hits, expected = tl.zeros([BLOCK_CELLS], tl.float32), tl.zeros([BLOCK_CELLS], tl.float32)
    found = tl.zeros([BLOCK_CELLS], tl.int32)
    for first in range(0, 2 * batch, LINES):
        # Read the text at the depth of each draft.
        line, node = (first + tl.arange(0, LINES))[:, None], tl.arange(0, BLOCK)[None, :]
        row, is_row = (line // 2).to(tl.int64), line < 2 * batch
        exists = is_row & (node < tl.where(line % 2 == 1, others, size))
        at = row * (size + others) + line % 2 * size + node
        start = tl.load(begin + row, mask=is_row, other=0)
        is_next = tl.load(begins + row, mask=is_row, other=-1) == start
        gained = tl.where(is_next, tl.load(lengths + row, mask=is_row, other=0) - start, 0)
        depth, above = tl.load(depths + at, mask=exists, other=0), tl.load(ancestors + at, mask=exists, other=0)
        now = tl.load(text + row * stride + tl.minimum(start + depth, capacity - 1), mask=exists, other=-1)

        # The nodes that the text has followed, as bits. Drafts count if their parent was accepted.
        right = ((tl.load(tokens + at, mask=exists, other=-2) == now) & (depth <= gained)) | (depth == 0)
        bit = tl.full([], 1, tl.int64) << node.to(tl.int64)
        wrong = above & ~tl.sum(tl.where(right, bit, 0), 1)[:, None]
        kind = tl.load(cells + at, mask=exists, other=-1)
        is_tested = ((wrong & ~bit) == 0) & (depth <= gained)
        kind = tl.reshape(tl.where(is_tested, kind, -1).to(tl.int32), [LINES * BLOCK, 1])
        is_accepted = tl.reshape((wrong == 0).to(tl.float32), [LINES * BLOCK, 1])
        prior = tl.reshape(tl.load(priors + at, mask=exists, other=0.0), [LINES * BLOCK, 1])
        in_cell = kind == cell[None, :]
        hits += tl.sum(tl.where(in_cell, is_accepted, 0.0), 0)
        expected += tl.sum(tl.where(in_cell, prior, 0.0), 0)
        found += tl.sum(in_cell.to(tl.int32), 0)
    is_new = (found > 0) & (cell < CELLS)
    tl.store(counts + cell, tl.load(counts + cell, mask=is_new, other=0.0) * kept + hits, mask=is_new)
    at = counts + CELLS + cell
    tl.store(at, tl.load(at, mask=is_new, other=0.0) * kept + expected, mask=is_new)
