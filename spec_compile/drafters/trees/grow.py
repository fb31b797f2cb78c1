"""How a draft grows trees of the sizes in a `Schedule`: `grow` takes its likeliest tokens, `draw_chain` draws them.

Both know nothing of the draft but its `Step`, one forward a level. All tensors have static shapes, so that they can be
compiled and captured. Slots and depths fit a draft whose slot t predicts the token after next (EAGLE, MTP): a
node of depth d is fed in slot d - 1 after the draft's committed ones. The root, whose children the logits at the last
committed slot predict, is not fed at all.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...compat import argmax
from ...errors import check_int
from ...kernels.ops import gather_rows
from ...kernels.top_logits import MAX_K, top_logits
from ...runtime.verify.sample import draw, uniform
from ...tree import MAX_NODES


@dataclass(frozen=True)
class Schedule:
    """A chain (topk 1), or the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4).

    num_steps: levels of the tree, grown by num_steps - 1 forwards of the draft.
    topk: candidates among a node's children, and nodes of a level that get children.
    num_draft_tokens: nodes verified, the root included (default: the root and all candidates, 64 at most).
    score_temperature: divides the logits in the softmax by which branches are compared.

    TypeError or ValueError, naming the argument, if one is out of range or they contradict each other.
    """

    num_steps: int = 5
    topk: int = 4
    num_draft_tokens: int | None = None
    score_temperature: float = 1.0

    def __post_init__(self):
        check_int("num_steps", self.num_steps, 1, MAX_NODES - 1, "levels of the tree")
        check_int("topk", self.topk, 1, MAX_K, "children of a node")
        check_int("num_draft_tokens", self.nodes, 2, MAX_NODES, "nodes verified, the root included")
        if not isinstance(self.score_temperature, int | float) or isinstance(self.score_temperature, bool):
            raise TypeError(f"score_temperature must be a number, not {type(self.score_temperature).__name__}")
        if not 0 < self.score_temperature < math.inf:
            raise ValueError(f"score_temperature must be positive and finite, not {self.score_temperature}")
        if (self.num_steps - 1) * self.topk > MAX_NODES:
            raise ValueError(
                f"(num_steps - 1) * topk must be at most {MAX_NODES}, the nodes of one forward of the draft, not "
                f"{(self.num_steps - 1) * self.topk}: lower num_steps or topk"
            )
        if self.nodes > 1 + self.candidates:
            rule = "num_steps + 1 in a chain (topk 1)" if self.topk == 1 else "1 + topk + (num_steps - 1) * topk ** 2"
            raise ValueError(
                f"num_draft_tokens must be at most {1 + self.candidates} = {rule}, not {self.nodes}: "
                "lower it, or raise num_steps or topk"
            )

    @property
    def nodes(self) -> int:
        """Nodes of a tree, the root included."""
        return min(MAX_NODES, 1 + self.candidates) if self.num_draft_tokens is None else self.num_draft_tokens

    def first(self, nodes: int | None) -> "Schedule":
        """The schedule of the first `nodes` nodes of the same trees (None: all). Parents come first: of 5 levels with
        16 nodes, the first 4 take 3 levels."""
        if nodes is None:
            return self
        return replace(self, num_steps=min(self.num_steps, nodes - 1), num_draft_tokens=nodes)

    @property
    def fed(self) -> int:
        """Slots of the nodes that are fed to the draft: by its last forward, or by all forwards of a chain."""
        return (self.num_steps - 1) * self.topk

    @property
    def candidates(self) -> int:
        """Nodes below the root among which the best are verified."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def ranks(self) -> list[int]:
        """For each level, candidates below each node of the level before that gets children."""
        return [self.topk] * self.num_steps

    def inner(self, level: int, scores: Tensor) -> Tensor:
        """The columns of a level's candidates, with these scores [B, M], that get children."""
        return highest(scores, self.topk)

    def pick(self, tokens: Tensor, above: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The verified ones of all candidates: see `best_nodes`."""
        return best_nodes(tokens, above, scores, self.nodes)


class Step(Protocol):
    """One forward of the draft over a block of R nodes."""

    def __call__(
        self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: Tensor, offset: int, wanted: int
    ) -> tuple[Tensor, Tensor]:
        """tokens [B, R] int64: ids of the target.
        hidden [B, R, C]: the draft's output at each node's parent.
        ancestors [B, R] int64: bit j of row i is set if i sees row j of the block, itself included.
        depth [R] int64: 1 for a child of the root; a node's position is the first free slot + depth - 1.
        offset: slots between the committed ones and the block, which sees them all.
        wanted: rows whose logits are used.

        Returns the draft's output [B, R, C], and the logits [B, wanted, Vd] of the last `wanted` rows.
        """


def children(
    above: Tensor, logits: Tensor, ranks: int, temperature: float, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores and tokens [B, P * ranks] of the likeliest children of P nodes with scores [B, P], logits [B, P, Vd]."""
    batch, nodes, vocab = logits.shape
    scores, ids = top_logits(logits.reshape(batch * nodes, vocab), ranks, temperature)
    scores = above[:, :, None] + scores.view(batch, nodes, ranks)
    tokens = ids if draft_to_target is None else draft_to_target[ids]
    return scores.view(batch, nodes * ranks), tokens.view(batch, nodes * ranks)


def feed(step: Step, token: Tensor, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """One node [B, 1] of a chain -> the draft's output [B, C] and logits [B, Vd]."""
    itself = torch.ones_like(token)
    hidden, logits = step(token, hidden[:, None], itself, token.new_full((1,), depth), depth - 1, 1)
    return hidden[:, 0], logits[:, 0]


def chain_parents(root: Tensor, nodes: int) -> Tensor:
    """Parents [B, N] of a chain: [-1, 0, 1, ...]."""
    return torch.arange(-1, nodes - 1, device=root.device).expand(root.shape[0], nodes)


def chain_scores(logprobs: Tensor) -> Tensor:
    """Scores [B, N] of a chain below its root, from the log-probabilities [B, N - 1] of its drafts."""
    return F.pad(logprobs.cumsum(dim=1), (1, 0))


def expected_drafts(scores: Tensor) -> Tensor:
    """How many drafts of each tree are expected to be accepted: [B] int64, from 0 to the depth of the tree.

    scores [B, N] float32: sums from the root, which is first, down to each node, of the logarithms of the chances that
    a draft is accepted if those above it are. Not a number counts as no chance.

    The expected number is the sum over all drafts of exp(score), rounded. A chain of drafts with chances of 0.9, 0.5
    and 0.5 has exp(score) = [0.9, 0.45, 0.225], which sum to 1.575: 2. It never exceeds the depth, because the chances
    of siblings sum to at most 1.
    """
    return scores[:, 1:].exp().nan_to_num(0.0).sum(dim=1).round().long()


EAGLE1_CHILDREN = {
    (): 4,
    **{(0,): 3, (1,): 2, (2,): 2, (3,): 1},
    **{(0, 0): 3, (0, 1): 2, (0, 2): 2, (1, 0): 1},
    **{(0, 0, 0): 3, (0, 0, 0, 0): 2},
}
EAGLE1_CHOICES = [(*path, rank) for path, count in EAGLE1_CHILDREN.items() for rank in range(count)]
"""The tree of 25 drafts, 26 nodes, of EAGLE-1 (Li et al. 2024, arXiv:2401.15077): paths of child ranks."""


def _sorted_paths(choices: Collection[Sequence[int]]) -> list[tuple[int, ...]]:
    """The path of child ranks of every node below the root, shortest first; (0, 2) is the third likeliest child of the
    root's likeliest. TypeError or ValueError unless each of `choices` is there once, and its parent too."""
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
    """A tree of one shape, as EAGLE-1 grows it: a node's children are its likeliest tokens, by the ranks in `choices`.

    It stands in for a `Schedule`. Its tables are buffers, so move it to the draft's device. kept: the candidates that
    are nodes, in the numbers of `_grow_tree`. inner: the columns of a level's candidates that get children. The choices
    (0,), (1,), (1, 0) and (1, 2) give the parents [-1, 0, 0, 2, 2], at level 1 inner [1] of 2 ranks, at level 2 3 ranks
    below that node, and kept [0, 1, 2, 3, 5].
    """

    score_temperature = 1.0

    def __init__(self, choices: Collection[Sequence[int]] = tuple(EAGLE1_CHOICES)):
        """`choices`: see `_sorted_paths`."""
        super().__init__()
        paths = _sorted_paths(choices)
        number = {path: place for place, path in enumerate([(), *paths])}
        self.nodes, self.num_steps = len(number), len(paths[-1])
        self._table("parents", [-1, *(number[path[:-1]] for path in paths)])

        parents, kept, first = [()], [0], 1  # nodes of the level before that have children; candidate of the level
        self.ranks = list[int]()
        for level in range(1, self.num_steps + 1):
            level_paths = [path for path in paths if len(path) == level]
            ranks = 1 + max(path[-1] for path in level_paths)
            columns = {path: parents.index(path[:-1]) * ranks + path[-1] for path in level_paths}
            kept += [first + column for column in columns.values()]
            first += len(parents) * ranks
            parents = [path for path in level_paths if any(other[:-1] == path for other in paths)]
            self._table(f"inner_{level}", [columns[path] for path in parents])
            self.ranks.append(ranks)
        self._table("kept", kept)
        self.fed = len({path[:-1] for path in paths} - {()})

    def _table(self, name: str, values: list[int]) -> None:
        self.register_buffer(name, torch.tensor(values, dtype=torch.int64), persistent=False)

    def inner(self, level: int, scores: Tensor) -> Tensor:
        return getattr(self, f"inner_{level}").expand(scores.shape[0], -1)

    def pick(self, tokens: Tensor, above: Tensor, scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        tokens, scores = (x.index_select(1, self.kept) for x in (tokens, scores))
        return tokens, self.parents.expand(tokens.shape[0], -1), scores


def grow(
    schedule: Schedule | StaticTree,
    root: Tensor,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The trees to be verified: tokens, parents [B, N] int64 and scores [B, N] float32.

    root [B]: the last committed tokens.
    logits [B, Vd], hidden [B, C]: the draft's output at the last committed slot.
    draft_to_target [Vd]: the target's id of each of the draft's, all different (None: they are the same).

    A score is the sum of log-probabilities down from the root, whose score is 0, so no child's is above its parent's.
    Parents come before children and siblings differ. The nodes of an EAGLE-2 tree go from the best score down, so its
    first n nodes are the tree of n nodes. ValueError if Vd is less than topk, or than the ranks of a static tree.
    """
    is_chain = isinstance(schedule, Schedule) and schedule.topk == 1
    return (_grow_chain if is_chain else _grow_tree)(schedule, root, logits, hidden, step, draft_to_target)


def highest(scores: Tensor, count: int) -> Tensor:
    """The columns [B, count] of the highest scores [B, M]; the first of equal ones comes first."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def best_nodes(tokens: Tensor, above: Tensor, scores: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The best of M numbered nodes, from the best down: tokens, parents [B, nodes] int64 and scores [B, nodes].

    tokens, scores [B, M]: the root is number 0.
    above [B, M]: the number of each node's parent, -1 for the root.

    A parent has a lower number than its children and no lower score. Among equal scores the lower number comes first,
    so no node comes before its parent. above = [-1, 0, 0, 2], scores = [0, -3, -1, -2] and nodes = 3 keep the numbers
    [0, 2, 3], whose parents are [-1, 0, 1].
    """
    kept = highest(scores, nodes)
    number = torch.arange(nodes, device=kept.device)
    parents = above.gather(1, kept)[:, :, None] == kept[:, None, :]
    parents = torch.where(number == 0, -1, torch.where(parents, number, 0).sum(dim=2))
    return tokens.gather(1, kept), parents, scores.gather(1, kept)


def _grow_chain(
    schedule: Schedule, root: Tensor, logits: Tensor, hidden: Tensor, step: Step, draft_to_target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, scores = [root[:, None]], [torch.zeros(root.shape[0], 1, device=root.device)]
    for level in range(1, schedule.nodes):
        if level > 1:
            hidden, logits = feed(step, tokens[-1], hidden, level - 1)
        score, token = children(scores[-1], logits[:, None], 1, schedule.score_temperature, draft_to_target)
        tokens.append(token)
        scores.append(score)
    return torch.cat(tokens, dim=1), chain_parents(root, len(tokens)), torch.cat(scores, dim=1)


def _grow_tree(
    schedule: Schedule | StaticTree, root: Tensor, logits: Tensor, hidden: Tensor, step: Step,
    draft_to_target: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Candidates are numbered level by level, the root being 0; the schedule picks nodes among all.

    A level's next frontier, its best candidates or static ones, is fed to the draft, in rows after the levels before.
    With topk = 2, rows [0, 1 | 2, 3] have the depths [1, 1 | 2, 2]; if rows 2 and 3 are children of row 1, their
    ancestors are [0b0110, 0b1010].
    """
    batch, device = root.shape[0], root.device
    number = torch.arange(MAX_NODES, device=device)
    tokens, scores = [root[:, None]], [torch.zeros(batch, 1, device=device)]
    above = [torch.full((batch, 1), -1, device=device)]  # number of each candidate's parent

    frontier = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # candidates that get children
    frontier_scores, hidden, logits = scores[0], hidden[:, None], logits[:, None]
    fed_tokens, fed_hidden = root.new_empty(batch, 0), hidden.new_empty(batch, 0, hidden.shape[2])
    ancestors = seen = root.new_empty(batch, 0)
    depth = root.new_empty(0)
    first = 1  # candidate of the level
    for level, ranks in enumerate(schedule.ranks, 1):
        # The frontier's children become candidates.
        below, ids = children(frontier_scores, logits, ranks, schedule.score_temperature, draft_to_target)
        tokens.append(ids)
        scores.append(below)
        above.append(frontier.repeat_interleave(ranks, dim=1))
        if level == schedule.num_steps:
            break
        # Some of them are the next frontier, and are fed to the draft after all frontiers before.
        best = schedule.inner(level, below)
        width = best.shape[1]
        frontier, frontier_scores = first + best, below.gather(1, best)
        first += below.shape[1]
        itself = torch.ones_like(best) << number[fed_tokens.shape[1] :][:width]
        seen = itself if level == 1 else itself | seen.gather(1, best // ranks)
        ancestors = torch.cat([ancestors, seen], dim=1)
        fed_tokens = torch.cat([fed_tokens, ids.gather(1, best)], dim=1)
        fed_hidden = torch.cat([fed_hidden, gather_rows(hidden, best // ranks)], dim=1)
        depth = torch.cat([depth, depth.new_full((width,), level)])
        hidden, logits = step(fed_tokens, fed_hidden, ancestors, depth, 0, width)
        hidden = hidden[:, -width:]

    tokens, scores, above = (torch.cat(parts, dim=1) for parts in (tokens, scores, above))
    return schedule.pick(tokens, above, scores)


DRAFT_STREAM = MAX_NODES
"""The stream of `uniform` that draws the first draft of a chain; later drafts take the streams after it. Verification
takes the streams below it, at the same position."""


def draw_chain(
    schedule: Schedule,
    root: Tensor,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    temperature: Tensor,
    seed: int | Tensor,
    sequence: Tensor,
    place: Tensor,
    vocab_size: int,
    draft_to_target: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A chain whose tokens are drawn from the draft: tokens, parents [B, N] int64, probs [B, N, vocab_size] float32.

    temperature [B]: of the draft's softmax; at 0 the likeliest token has all the probability.
    seed, sequence, place [B]: of `uniform`; place counts the tokens of a row between its prompt and the root's child.
    vocab_size: the target's.
    For the other arguments see `grow`.

    Node i's child was drawn from row i of probs; the last row is zeros. Verified tokens are distributed as the target's
    only if the length to which the chain is cut before verification does not depend on the tokens cut off. No number is
    taken twice, because every chain of a row has another place (see `verify.sample.chain_numbers`). ValueError unless
    the schedule is a chain.
    """
    if schedule.topk != 1:
        raise ValueError(f"topk must be 1 (a chain) for drafts that are drawn, not {schedule.topk}")
    if draft_to_target is None and logits.shape[1] != vocab_size:
        raise ValueError(
            f"logits must have vocab_size = {vocab_size} columns without draft_to_target, not {logits.shape[1]}"
        )
    tokens, probs = [root[:, None]], []
    for level in range(1, schedule.nodes):
        if level > 1:
            hidden, logits = feed(step, tokens[-1], hidden, level - 1)
        distribution = _distribution(logits, temperature)
        token = draw(distribution.double(), uniform(seed, sequence, place, DRAFT_STREAM + level - 1))[:, None]
        if draft_to_target is not None:
            everywhere = distribution.new_zeros(distribution.shape[0], vocab_size)
            distribution = everywhere.index_copy(1, draft_to_target, distribution)
            token = draft_to_target[token]
        tokens.append(token)
        probs.append(distribution)
    probs.append(torch.zeros_like(probs[0]))
    return torch.cat(tokens, dim=1), chain_parents(root, len(tokens)), torch.stack(probs, dim=1)


def _distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """softmax(logits [B, Vd] / temperature [B]) in float32; at 0, or if that is not finite, 1 for the likeliest."""
    logits = logits.float().nan_to_num(-math.inf, torch.finfo(torch.float32).max, -math.inf)
    likeliest = torch.arange(logits.shape[1], device=logits.device) == argmax(logits)[:, None]
    peak = logits.amax(dim=1, keepdim=True)
    weights = ((logits - peak) / temperature[:, None]).softmax(dim=1)
    drawn = (temperature[:, None] > 0) & weights.isfinite().all(dim=1, keepdim=True)
    return torch.where(drawn, weights, likeliest.to(weights.dtype))
