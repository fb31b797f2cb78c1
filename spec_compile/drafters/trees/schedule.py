"""Schedules: how a draft model grows a chain or a token tree, one call of it ("step") a level.

A schedule knows nothing of the draft but its `Step`, and works on tensors of static shapes alone, so that it can be
compiled and captured. Slots and depths are those of a draft whose slot t predicts the token after next (EAGLE, MTP): a
node of depth d is fed d - 1 slots behind the draft's committed ones, and the root, whose children the logits at the
last committed slot predict, is not fed at all.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ...compat import argmax
from ...errors import check_int
from ...kernels.ops import gather_rows
from ...kernels.top_logits import MAX_K, best_tokens
from ...runtime.accept.random_numbers import counter, draw, uniform
from ...tree import MAX_NODES

DRAFT_STREAM = MAX_NODES
"""The number of `uniform` that draws a draft's token: verification takes those below, one a child and one."""


class Step(Protocol):
    """One forward of the draft over a block of R nodes."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: Tensor, offset: int, wanted: int
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, R] int64, ids of the target; hidden [B, R, C]: the draft's output at each node's parent.

        ancestors [B, R] int64: bit j of row i says that i sees row j of the block, itself included. depth [R] int64:
        1 for a child of the root; a node's position is that of the first free slot + depth - 1. The block lies `offset`
        slots behind the committed ones and sees all that lies before it.
        -> the draft's output [B, R, C], and the logits [B, wanted, Vd] of the last `wanted` rows.
        """


@dataclass(frozen=True)
class Schedule:
    """A chain (topk 1), or the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4).

    num_steps: levels of the tree, grown by num_steps - 1 forwards of the draft. topk: children of a node that are
    looked at, and nodes of a level that get children. num_draft_tokens: nodes verified, the root included (default:
    all there are, 64 at most). score_temperature: of the draft's softmax by which branches are compared.
    """

    num_steps: int = 5
    topk: int = 4
    num_draft_tokens: int | None = None
    score_temperature: float = 1.0

    def __post_init__(self):
        check_int("num_steps", self.num_steps, 1, MAX_NODES - 1, "levels of the tree")
        check_int("topk", self.topk, 1, MAX_K, "children of a node")
        if self.num_draft_tokens is None:
            object.__setattr__(self, "num_draft_tokens", min(MAX_NODES, 1 + self.candidates))
        check_int("num_draft_tokens", self.num_draft_tokens, 2, MAX_NODES, "nodes verified, the root included")
        if not isinstance(self.score_temperature, int | float) or isinstance(self.score_temperature, bool):
            raise TypeError(f"score_temperature must be a number, not {type(self.score_temperature).__name__}")
        if not 0 < self.score_temperature < math.inf:
            raise ValueError(f"score_temperature must be positive and finite, not {self.score_temperature}")
        if (self.num_steps - 1) * self.topk > MAX_NODES:
            raise ValueError(
                f"(num_steps - 1) * topk must be at most {MAX_NODES}, the nodes of one forward of the draft, not "
                f"{(self.num_steps - 1) * self.topk}: lower num_steps or topk"
            )
        if self.num_draft_tokens > 1 + self.candidates:
            rule = "num_steps + 1 in a chain (topk 1)" if self.topk == 1 else "1 + topk + (num_steps - 1) * topk ** 2"
            raise ValueError(
                f"num_draft_tokens must be at most {1 + self.candidates} = {rule}, not {self.num_draft_tokens}: "
                "lower it, or raise num_steps or topk"
            )

    @property
    def fed(self) -> int:
        """Nodes that are fed to the draft at most at once, or one after the other."""
        return (self.num_steps - 1) * self.topk

    @property
    def candidates(self) -> int:
        """Nodes below the root that are looked at."""
        return self.topk + (self.num_steps - 1) * self.topk**2


EAGLE1_CHILDREN = {
    (): 4,
    **{(0,): 3, (1,): 2, (2,): 2, (3,): 1},
    **{(0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1},
    **{(0, 0, 0): 3, (0, 0, 0, 0): 2},
}
EAGLE1_CHOICES = [(*path, rank) for path, count in EAGLE1_CHILDREN.items() for rank in range(count)]
"""The tree of 25 drafts, 26 nodes, of EAGLE-1 (Li et al. 2024, arXiv:2401.15077): paths of child ranks."""


def _sorted_paths(choices: Collection[Sequence[int]]) -> list[tuple[int, ...]]:
    """Of every node below the root its path of child ranks, shortest first, (0, 2) being the third likeliest child of
    the root's likeliest. TypeError or ValueError unless each of `choices` is there once, and its parent too."""
    if not isinstance(choices, Collection) or any(isinstance(p, str) or not isinstance(p, Sequence) for p in choices):
        raise TypeError(f'tree_choices must be paths of child ranks ([[0], [0, 1]]) or "eagle1", not {choices!r}')
    for rank in (rank for path in choices for rank in path):
        check_int("a rank in tree_choices", rank, 0, MAX_K - 1)
    paths = sorted(map(tuple, choices), key=lambda path: (len(path), path))
    check_int("the number of tree_choices", len(paths), 1, MAX_NODES - 1, "paths of a static tree")
    known = {(), *paths}
    if len(known) != len(paths) + 1:
        raise ValueError("tree_choices must hold every path once, and no empty path (the root)")
    for path in paths:
        if path[:-1] not in known:
            raise ValueError(f"tree_choices must hold the parent of every path: add {list(path[:-1])}, of {list(path)}")
    return paths


class StaticTree(nn.Module):
    """A tree of one shape, as EAGLE-1 grows it: a node's children are its likeliest tokens, of the ranks chosen.

    Move it to the draft's device: its tables are buffers.
    """

    def __init__(self, choices: Collection[Sequence[int]] = tuple(EAGLE1_CHOICES)):
        """`choices`: see `_sorted_paths`."""
        super().__init__()
        paths = _sorted_paths(choices)
        number = {path: place for place, path in enumerate([(), *paths])}
        self.num_draft_tokens, self.num_steps = len(number), len(paths[-1])
        self._table("parents", [-1, *(number[path[:-1]] for path in paths)])

        parents = [()]  # nodes of the level before that have children
        fed = {}  # nodes that are fed to the draft, and their rows
        self.widths, self.ranks = [], []
        for level in range(1, self.num_steps + 1):
            own = [path for path in paths if len(path) == level]
            inner = [path for path in own if any(other[:-1] == path for other in paths)]
            ranks = 1 + max(path[-1] for path in own)
            self._table(f"picked_{level}", [parents.index(path[:-1]) * ranks + path[-1] for path in own])
            self._table(f"inner_{level}", [own.index(path) for path in inner])
            self._table(f"above_{level}", [parents.index(path[:-1]) for path in inner])
            self.widths.append(len(inner))
            self.ranks.append(ranks)
            for path in inner:
                fed[path] = len(fed)
            parents = inner
        seen = [sum(1 << fed[path[:end]] for end in range(1, len(path) + 1)) for path in fed]
        self._table("ancestors", seen)
        self._table("depth", [len(path) for path in fed])
        self.fed = len(fed)

    def _table(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def forward(
        self, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `grow`. Scores are at temperature 1."""
        batch, device = root.shape[0], root.device
        tokens, scores = [root[:, None]], [torch.zeros(batch, 1, device=device)]
        fed_tokens, fed_hidden = root.new_empty(batch, 0), hidden.new_empty(batch, 0, hidden.shape[1])
        above, hidden, logits = scores[0], hidden[:, None], logits[:, None]
        for level, (width, ranks) in enumerate(zip(self.widths, self.ranks), 1):
            inner, picked = getattr(self, f"inner_{level}"), getattr(self, f"picked_{level}")
            below, ids = (x.index_select(1, picked) for x in _children(above, logits, ranks, 1.0, draft_to_target))
            tokens.append(ids)
            scores.append(below)
            if width:
                above = below.index_select(1, inner)
                fed_tokens = torch.cat([fed_tokens, ids.index_select(1, inner)], dim=1)
                fed_hidden = torch.cat([fed_hidden, hidden.index_select(1, getattr(self, f"above_{level}"))], dim=1)
                rows = fed_tokens.shape[1]
                ancestors = self.ancestors[:rows].expand(batch, rows)
                hidden, logits = step(fed_tokens, fed_hidden, ancestors, self.depth[:rows], 0, width)
                hidden = hidden[:, -width:]
        return torch.cat(tokens, dim=1), self.parents.expand(batch, -1), torch.cat(scores, dim=1)


def grow(
    schedule: Schedule | StaticTree,
    root: Tensor,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The trees to be verified: tokens, parents [B, N] int64 and scores [B, N] float32.

    root [B]: the last committed tokens; logits [B, Vd], hidden [B, C]: the draft's output at the last committed slot;
    draft_to_target [Vd]: the target's id of each of the draft's, all different (None: they are the same). A score is
    the sum of log-probabilities down from the root, whose own is 0: no child has a higher one than its parent. Parents
    come before children and siblings differ. Of an EAGLE-2 tree the nodes go from the best score down, so that its
    first n are the tree of n nodes. ValueError if Vd is less than topk, or the highest rank of a static tree.
    """
    if isinstance(schedule, StaticTree):
        return schedule(root, logits, hidden, step, draft_to_target)
    return (_grow_chain if schedule.topk == 1 else _grow_tree)(schedule, root, logits, hidden, step, draft_to_target)


def _children(
    above: Tensor, logits: Tensor, ranks: int, temperature: float, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores and tokens [B, P * ranks] of the likeliest children of P nodes with scores [B, P], logits [B, P, Vd]."""
    batch, nodes, vocab = logits.shape
    scores, ids = best_tokens(logits.reshape(batch * nodes, vocab), ranks, temperature)
    scores = above[:, :, None] + scores.view(batch, nodes, ranks)
    tokens = ids if draft_to_target is None else draft_to_target[ids]
    return scores.view(batch, nodes * ranks), tokens.view(batch, nodes * ranks)


def _best(scores: Tensor, count: int) -> Tensor:
    """The places [B, count] of the highest scores, of equal ones the first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _grow_chain(
    schedule: Schedule, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, scores = [root[:, None]], [torch.zeros(root.shape[0], 1, device=root.device)]
    for level in range(1, schedule.num_draft_tokens):
        if level > 1:
            hidden, logits = _feed(step, tokens[-1], hidden, level - 1)
        score, token = _children(scores[-1], logits[:, None], 1, schedule.score_temperature, draft_to_target)
        tokens.append(token)
        scores.append(score)
    return torch.cat(tokens, dim=1), _chain(root, len(tokens)), torch.cat(scores, dim=1)


def _feed(step: Step, token: Tensor, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """One node [B, 1] of a chain -> the draft's output [B, C] and logits [B, Vd]."""
    itself = torch.ones_like(token)
    hidden, logits = step(token, hidden[:, None], itself, token.new_full((1,), depth), depth - 1, 1)
    return hidden[:, 0], logits[:, 0]


def _chain(root: Tensor, nodes: int) -> Tensor:
    """Parents [B, N] of a chain."""
    return torch.arange(-1, nodes - 1, device=root.device).expand(root.shape[0], nodes)


def _grow_tree(
    schedule: Schedule, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Candidates are numbered as they are found, the root being 0: a parent's number is below its children's, and its
    score not, so that with the lower number first among equals no node comes before its parent."""
    batch, topk, device = root.shape[0], schedule.topk, root.device
    number = torch.arange(MAX_NODES, device=device)
    tokens, scores = [root[:, None]], [torch.zeros(batch, 1, device=device)]
    above = [torch.full((batch, 1), -1, device=device)]  # candidate that is each candidate's parent

    frontier = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # candidates that get children
    frontier_scores, hidden, logits = scores[0], hidden[:, None], logits[:, None]
    fed_tokens, fed_hidden = root.new_empty(batch, 0), hidden.new_empty(batch, 0, hidden.shape[2])
    ancestors = seen = root.new_empty(batch, 0)
    first = 1  # candidate of the level
    for level in range(1, schedule.num_steps + 1):
        below, ids = _children(frontier_scores, logits, topk, schedule.score_temperature, draft_to_target)
        tokens.append(ids)
        scores.append(below)
        above.append(frontier.repeat_interleave(topk, dim=1))
        if level == schedule.num_steps:
            break
        chosen = _best(below, topk)
        frontier, frontier_scores = first + chosen, below.gather(1, chosen)
        first += below.shape[1]
        own = torch.ones_like(chosen) << number[fed_tokens.shape[1] :][:topk]
        seen = own if level == 1 else own | seen.gather(1, chosen // topk)
        ancestors = torch.cat([ancestors, seen], dim=1)
        fed_tokens = torch.cat([fed_tokens, ids.gather(1, chosen)], dim=1)
        fed_hidden = torch.cat([fed_hidden, gather_rows(hidden, chosen // topk)], dim=1)
        depth = number[: fed_tokens.shape[1]] // topk + 1
        hidden, logits = step(fed_tokens, fed_hidden, ancestors, depth, 0, topk)
        hidden = hidden[:, -topk:]

    tokens, scores, above = (torch.cat(parts, dim=1) for parts in (tokens, scores, above))
    kept = _best(scores, schedule.num_draft_tokens)
    parents = above.gather(1, kept)[:, :, None] == kept[:, None, :]
    parents = torch.where(parents, number[: kept.shape[1]], 0).sum(dim=2)
    parents = torch.where(number[: kept.shape[1]] == 0, -1, parents)
    return tokens.gather(1, kept), parents, scores.gather(1, kept)


def draw_chain(
    schedule: Schedule,
    root: Tensor,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    temperature: Tensor,
    seed: int | Tensor,
    place: Tensor,
    vocab_size: int,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A chain whose tokens are drawn from the draft: tokens, parents [B, N] int64, and probs [B, N, vocab_size].

    temperature [B]: of the draft's softmax; where it is 0, the likeliest token has all the probability. seed, place
    [B]: of `uniform`, place counting the tokens of a row between its prompt and the root's child. vocab_size:
    the target's. Row i of the float32 probs is what node i's child was drawn from; the last is zeros. The rest is as
    in `grow`.

    The tokens verified stay distributed as the target's only if what is cut off the chain before verification does not
    depend on the tokens cut off. ValueError unless the schedule is a chain.
    """
    if schedule.topk != 1:
        raise ValueError(f"topk must be 1 (a chain) for drafts that are drawn, not {schedule.topk}")
    if draft_to_target is None and logits.shape[1] != vocab_size:
        raise ValueError(
            f"logits must have vocab_size = {vocab_size} columns without draft_to_target, not {logits.shape[1]}"
        )
    tokens, probs = [root[:, None]], []
    sequence = counter(root.shape[0], root.device)
    for level in range(1, schedule.num_draft_tokens):
        if level > 1:
            hidden, logits = _feed(step, tokens[-1], hidden, level - 1)
        own = _distribution(logits, temperature)
        token = draw(own.double(), uniform(seed, sequence, place + level - 1, DRAFT_STREAM))[:, None]
        if draft_to_target is not None:
            own = own.new_zeros(own.shape[0], vocab_size).index_copy(1, draft_to_target, own)
            token = draft_to_target[token]
        tokens.append(token)
        probs.append(own)
    probs.append(torch.zeros_like(probs[0]))
    return torch.cat(tokens, dim=1), _chain(root, len(tokens)), torch.stack(probs, dim=1)


def _distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits [B, Vd] / temperature [B]) in float32; the likeliest alone at 0, or if there is none."""
    logits = logits.float().nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)
    likeliest = torch.arange(logits.shape[1], device=logits.device) == argmax(logits)[:, None]
    peak = logits.amax(dim=1, keepdim=True)
    weights = ((logits - peak) / temperature[:, None]).softmax(dim=1)
    drawn = (temperature[:, None] > 0) & weights.isfinite().all(dim=1, keepdim=True)
    return torch.where(drawn, weights, likeliest.to(weights.dtype))
