"""`merge`: the drafts of a head and of n-grams as one tree of the drafts that are likeliest to be accepted.

Each source estimates how likely its drafts are, and their outcomes correct that. A draft belongs to one cell of a
table. A head's drafts have cells by their depth and the head's own probability, drafts of n-grams by the length of the
match, their rank and their depth, and drafts that both propose by the length of the match and the head's probability. A
cell counts the drafts that were accepted and how many its sources had expected, and their ratio
corrects the next draft of the cell. Drafts count if their parent was accepted, verified or not: the text shows if they
would have been accepted.

All tensors have static shapes, so that `merge` can be compiled and captured.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.launching import one_launch
from ...runtime.verify.sample import mix
from ...tree import MAX_NODES, ancestry
from .grow import best_nodes, expected_drafts

DEPTHS, BINS, LOWEST = 8, 11, -6
"""A head's depths that are told apart, and bins of its probability, each a unit of log-odds wide, from `LOWEST` on."""
MATCHES = (1, 2, 3, 4, 6, 8, 11)
"""The longest match of each bucket but the last."""
RANKS, STAGES = 4, (1, 2, 4)
"""N-grams' ranks that are told apart (see `trie_cells`), and the greatest depth of each bucket but the last."""
FIRST_OF_TRIE = DEPTHS * BINS
FIRST_OF_BOTH = FIRST_OF_TRIE + (len(MATCHES) + 1) * RANKS * (len(STAGES) + 1)
CELLS = FIRST_OF_BOTH + (len(MATCHES) + 1) * BINS

LEAST, MOST = 1e-4, 0.99
"""Bounds of a probability. With the upper one a path scores less than its beginning, however sums round."""
WEIGHT = 4.0
"""A source's own estimate counts as much as this many accepted drafts."""
KEPT = 0.99
"""A cell's counts are multiplied by this when a round adds to them."""


def head_cells(logprobs: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A head's probabilities [B, H] float32 of its drafts, their cells, and their bins of the probability.

    logprobs [B, H]: the head's, of each draft after its parent.
    depth [B, H] int64.

    A bin is ``floor(log(p / (1 - p))) - LOWEST``, a cell ``(depth - 1) * BINS + bin``: p = 0.5 at depth 2 is bin 6 of
    cell 17.
    """
    priors = logprobs.float().exp().clamp(LEAST, MOST)
    bins = ((priors / (1 - priors)).log().floor().to(torch.int64) - LOWEST).clamp(0, BINS - 1)
    return priors, (depth.clamp(1, DEPTHS) - 1) * BINS + bins, bins


def trie_cells(match: Tensor, rank: Tensor, is_main: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
    """The probabilities [B, T] float32 of n-grams' drafts before anything is learnt, and their cells.

    match [B] int64: length of the longest match.
    rank [B, T] int64: a draft's number among its siblings.
    is_main [B, T] bool: True if it continues the most recent of the longest matches.
    depth [B, T] int64.

    Four ranks are told apart: main drafts, other first children, second children, and later ones. A cell is
    ``FIRST_OF_TRIE + (match's bucket * RANKS + rank) * (len(STAGES) + 1) + depth's bucket``: a main draft at depth 2
    after a match of 3 tokens has the buckets 2 and 1, and the cell FIRST_OF_TRIE + 33.
    """
    group = torch.where(is_main, 0, (rank + 1).clamp(max=RANKS - 1))
    length = (match[:, None] + depth - 1).clamp(min=1).float()  # a draft that is accepted makes the match longer
    share = torch.where(is_main, 1.0, torch.where(rank == 0, 0.6, torch.where(rank == 1, 0.2, 0.1)))
    priors = (share * length / (length + 1)).clamp(LEAST, MOST)
    return priors, FIRST_OF_TRIE + (bucket(match, MATCHES)[:, None] * RANKS + group) * (len(STAGES) + 1) + bucket(
        depth, STAGES
    )


def bucket(values: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """The number of `bounds`, which ascend, below each value: bounds (1, 2, 4) and value 3 give 2. int64."""
    return sum((values > bound).to(torch.int64) for bound in bounds)


def followed(tokens: Tensor, ancestors: Tensor, depth: Tensor, text: Tensor, gained: Tensor) -> Tensor:
    """True for the nodes [B, N] of trees that a text has followed from the root.

    tokens, ancestors, depth [B, N] int64: of the trees (see `tree.ancestry`).
    text [B, N] int64: the text's token at each node's depth.
    gained [B] int64: depths that the text has.
    """
    right = ((tokens == text) & (depth <= gained[:, None])) | (depth == 0)
    bits = right.to(torch.int64) << torch.arange(tokens.shape[1], device=tokens.device)
    return (ancestors & bits.sum(dim=1, keepdim=True)) == ancestors


def learnt(counts: Tensor, priors: Tensor, cells: Tensor, tested: Tensor, accepted: Tensor) -> Tensor:
    """The counts [2, CELLS] after a round.

    priors [B, M] float32, cells [B, M] int64: of the drafts.
    tested [B, M] bool: the drafts that count.
    accepted [B, M] bool.
    """
    in_cell = tested.flatten()[:, None] & (cells.flatten()[:, None] == torch.arange(CELLS, device=cells.device))
    values = torch.stack([accepted.flatten().float(), priors.flatten()])  # [2, B * M]
    added = torch.where(in_cell, values[:, :, None], 0.0).sum(dim=1)
    return torch.where(in_cell.any(dim=0), KEPT * counts + added, counts)


class SourceTrees(NamedTuple):
    """Trees of one source: tokens, parents [B, N] int64, and count [B] int64, the nodes in use, which come first."""

    tokens: Tensor
    parents: Tensor
    count: Tensor


class Drafts(NamedTuple):
    """The drafts of both sources, [B, H + T], remembered until their outcome is known: first the H nodes of the head,
    then the T nodes of n-grams.

    tokens, ancestors, depth: int64.
    above: int64; parents in the source's own numbers.
    cells: int64; -1 for roots, for slots without a draft, and for n-grams' drafts that the head proposes, too.
    priors: float32; the probability that the sources expected.
    """

    tokens: Tensor
    above: Tensor
    ancestors: Tensor
    depth: Tensor
    cells: Tensor
    priors: Tensor


def merge(
    head: SourceTrees, scores: Tensor, trie: SourceTrees, match: Tensor, counts: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Drafts]:
    """The best trees of at most `nodes` nodes: tokens, parents [B, nodes], count, confidence [B] int64, and drafts.

    head, trie: trees with the same roots.
    scores [B, H] float32: sums of the head's log-probabilities from the root down.
    match [B] int64: length of the match that n-grams continue.
    counts [2, CELLS] float32: drafts accepted and expected, whose ratio corrects the sources' probabilities.

    A draft is worth the product of the corrected probabilities on its path. If siblings' probabilities sum to more than
    1, each is divided by the sum. A draft of both sources is one node with the prior 1 - (1 - p)(1 - q). The trees go
    from the best node down; slots after the last hold token 0 and parent 0. The confidence is their `expected_drafts`.
    """
    size = head.tokens.shape[1]
    of_head, above, head_keys, head_ancestors, head_depth = _read(head)
    of_trie, trie_above, trie_keys, trie_ancestors, trie_depth = _read(trie)

    # The same path has the same key: pair up nodes.
    pairs = (trie_keys[:, :, None] == head_keys[:, None, :]) & (trie_depth[:, :, None] == head_depth[:, None, :])
    pairs = pairs & of_trie[:, :, None] & of_head[:, None, :]  # [B, T, H]
    partner, has_partner = _last(pairs), pairs.any(dim=2)  # of n-grams' nodes
    number, is_doubled = _last(pairs.mT), pairs.any(dim=1)  # of the head's

    # The probabilities that the sources expect, and the cells that correct them.
    logprobs = (scores - scores.gather(1, above)).nan_to_num(-math.inf)
    head_priors, cells, bins = head_cells(logprobs, head_depth)
    trie_priors, trie_numbers = trie_cells(match, *_ranks(trie, of_trie, trie_ancestors), trie_depth)
    both_cells = FIRST_OF_BOTH + bucket(match, MATCHES)[:, None] * BINS + bins
    both = 1 - (1 - head_priors) * (1 - trie_priors.gather(1, number))
    priors = torch.cat([torch.where(is_doubled, both, head_priors), trie_priors], dim=1)
    cells = torch.cat([torch.where(is_doubled, both_cells, cells), trie_numbers], dim=1)

    # One numbering of all nodes: the head's from 0, n-grams' from `size`; a node of both sources is the head's. With
    # size = 4, a child of n-grams' node 2 has the parent 6, or 1 if that node is also the head's node 1.
    moved = torch.where(has_partner.gather(1, trie_above), partner.gather(1, trie_above), size + trie_above)
    parents = torch.cat([above, moved], dim=1)
    is_root = torch.arange(parents.shape[1], device=parents.device) == 0
    is_draft = torch.cat([of_head, of_trie & ~has_partner], dim=1) & ~is_root  # guard: drafted-twice

    # The probability of each draft after its parent, and of its path.
    ratio = (counts[0] + WEIGHT) / (counts[1] + WEIGHT)
    likely = torch.where(is_draft, (priors * ratio[cells]).clamp(LEAST, MOST), 0.0)
    siblings = parents[:, :, None] == parents[:, None, :]
    likely = likely / torch.where(siblings, likely[:, None, :], 0.0).sum(dim=2).clamp(min=1.0)
    logs = torch.where(is_draft, likely.log(), 0.0)  # 0 of roots
    head_logs, trie_logs = logs.split([size, logs.shape[1] - size], dim=1)
    trie_logs = torch.where(has_partner, head_logs.gather(1, partner), trie_logs)
    worth = torch.cat([_path_sums(head_logs, head_ancestors), _path_sums(trie_logs, trie_ancestors)], dim=1)
    worth = torch.where(is_draft | is_root, worth, -math.inf)

    tokens = torch.cat([head.tokens, trie.tokens], dim=1)
    best, best_parents, best_worth = best_nodes(tokens, torch.where(is_root, -1, parents), worth, nodes)
    is_real = best_worth > -math.inf
    tree = torch.where(is_real, best, 0), torch.where(is_real, best_parents, 0), is_real.sum(dim=1)
    drafts = Drafts(
        tokens, torch.cat([above, trie_above], dim=1), torch.cat([head_ancestors, trie_ancestors], dim=1),
        torch.cat([head_depth, trie_depth], dim=1), torch.where(is_draft, cells, -1), priors,
    )  # fmt: skip
    return *tree, expected_drafts(best_worth), drafts


def _read(source: SourceTrees) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For the nodes [B, N] of trees: True if they are in use; their parents; keys int64 of their paths from the root;
    their ancestors; their depths (see `ancestry`).

    Keys are equal for equal paths, and for different ones with odds of 2**-64. A draft whose key is another's by chance
    is left out, and only that draft is lost.
    """
    number = torch.arange(source.tokens.shape[1], device=source.tokens.device)
    ancestors, depth = ancestry(source.parents)
    keys = _path_sums(mix(source.tokens * MAX_NODES + depth), ancestors)
    return number < source.count[:, None], source.parents.clamp(min=0), keys, ancestors, depth


def _path_sums(values: Tensor, ancestors: Tensor) -> Tensor:
    """Sums of values [B, N] from the root down to each node.

    ancestors [B, N]: as bits; a chain of three nodes has [0b001, 0b011, 0b111].
    """
    number = torch.arange(ancestors.shape[1], device=ancestors.device)
    is_above = (ancestors[:, :, None] >> number) & 1 == 1  # [i, j]: node j is i or above it
    return torch.where(is_above, values[:, None, :], 0).sum(dim=2)


def _last(pairs: Tensor) -> Tensor:
    """The last column [B, R] that is set in each row of pairs [B, R, C]; 0 where none is."""
    return torch.where(pairs, torch.arange(pairs.shape[2], device=pairs.device), 0).amax(dim=2)


def _ranks(trie: SourceTrees, is_used: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """A draft's number [B, T] among its siblings, and True if it and all above it are first children."""
    number = torch.arange(is_used.shape[1], device=is_used.device)
    older = (trie.parents[:, :, None] == trie.parents[:, None, :]) & is_used[:, None, :]
    rank = (older & (number < number[:, None])).sum(dim=2)
    return rank, _path_sums((rank > 0).to(torch.int64), ancestors) == 0


LAYOUT = dict(
    CELLS=CELLS, WEIGHT=WEIGHT, LEAST=LEAST, MOST=MOST, DEPTHS=DEPTHS, BINS=BINS, LOWEST=LOWEST, MATCHES=MATCHES,
    RANKS=RANKS, STAGES=STAGES, FIRST_OF_TRIE=FIRST_OF_TRIE, FIRST_OF_BOTH=FIRST_OF_BOTH,
)  # fmt: skip


def empty_trees(lengths, head, scores, trie, longest, counts, begins, drafts, nodes):
    """Memory for the results of `merge_into`."""
    tree, summary = lengths.new_empty(lengths.shape[0], nodes), torch.empty_like(lengths)
    return tree, torch.empty_like(tree), summary, torch.empty_like(summary)


@one_launch("merge_into", empty_trees, "launch_merge", writes=("begins", "drafts"), **LAYOUT)
def merge_into(
    lengths: Tensor, head: list[Tensor], scores: Tensor, trie: list[Tensor], longest: Tensor, counts: Tensor,
    begins: Tensor, drafts: list[Tensor], nodes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """`merge`, whose drafts are kept, with the lengths [B] of the texts that they continue.

    longest: `merge`'s match, a name that Inductor takes for itself in an op that writes.
    """
    tokens, parents, count, confidence, new = merge(
        SourceTrees(*head), scores, SourceTrees(*trie), longest, counts, nodes
    )
    for buffer, values in zip([begins, *drafts], [lengths, *new]):
        buffer.copy_(values)
    return tokens, parents, count, confidence


@one_launch("learn_from", lambda *inputs: None, "launch_learn", writes=("counts",), kept=KEPT)
def learn_from(
    counts: Tensor, drafts: list[Tensor], begins: Tensor, begin: Tensor, lengths: Tensor, text: Tensor, size: int
) -> None:
    """Count the outcomes of the drafts below the roots in the slots `begin` [B], now that the text goes on.

    begins [B]: the slots below which the drafts were proposed.
    lengths [B], text [B, S]: committed slots, and the tokens of all slots.
    size: nodes of the head.
    """
    # Read the text at the depth of each draft.
    known = Drafts(*drafts)
    gained = torch.where(begins == begin, lengths - begin, 0)
    slots = (begin[:, None] + known.depth).clamp(max=text.shape[1] - 1)
    columns = known.tokens, known.ancestors, known.depth, text.gather(1, slots)
    # Drafts count if their parent was accepted; parents are numbered within each source.
    sides = zip(*(column.tensor_split([size], dim=1) for column in columns))
    on_path = torch.cat([followed(*side, gained) for side in sides], dim=1)
    first = torch.where(torch.arange(on_path.shape[1], device=on_path.device) < size, 0, size)
    tested = on_path.gather(1, first + known.above) & (known.cells >= 0) & (known.depth <= gained[:, None])
    counts.copy_(learnt(counts, known.priors, known.cells, tested, on_path))
