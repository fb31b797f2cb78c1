"""How likely the drafts of a head and of n-grams are to be accepted: each source's own estimate, corrected by the
outcomes of its drafts so far.

A draft belongs to one cell of a table. The cells of a head's drafts are told apart by depth and by the head's own
probability, those of n-grams by the length of the match, by rank and by depth, and those of drafts that both propose by
the length of the match and the head's probability. A cell counts the drafts that were accepted and how many its sources
had expected, and their ratio corrects the next draft of the cell. Drafts count if their parent was accepted, verified
or not: the text shows if they would have been accepted.
"""

import torch
from torch import Tensor

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
"""Bounds of a probability. With the upper one a path's score stays below that of its beginning, however sums round."""
WEIGHT = 4.0
"""A source's own estimate counts as much as so many accepted drafts."""
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


def cells_of_both(match: Tensor, bins: Tensor) -> Tensor:
    """The cells [B, H] of a head's drafts that n-grams propose, too. match [B]: see `trie_cells`; bins [B, H]: see
    `head_cells`."""
    return FIRST_OF_BOTH + bucket(match, MATCHES)[:, None] * BINS + bins


def bucket(values: Tensor, bounds: tuple[int, ...]) -> Tensor:
    """The number of `bounds`, which ascend, below each value: bounds (1, 2, 4) and value 3 give 2. int64."""
    return sum((values > bound).to(torch.int64) for bound in bounds)


def corrected(counts: Tensor, priors: Tensor, cells: Tensor) -> Tensor:
    """The probabilities that drafts are accepted, if their parents are.

    counts [2, CELLS] float32: drafts accepted and expected.
    priors, cells: of the drafts.
    """
    ratio = (counts[0] + WEIGHT) / (counts[1] + WEIGHT)
    return (priors * ratio[cells]).clamp(LEAST, MOST)


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
