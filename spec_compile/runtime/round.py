"""The round: verify, accept, commit, propose, as plain PyTorch."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..compile.regions import Regions
from ..drafting import Drafter, caches
from ..errors import log
from ..graph import ModelGraph
from ..kernels.attention.base import riding
from ..outcome import pack
from ..tree import MAX_NODES, Accepted, Tree, ancestry
from .state import State
from .verify.sample import follow


class DraftGuard:
    """Runs a draft's parts. After an error in one of them it runs none any more, and rounds are plain steps.

    raises: True: errors are not caught, because other ranks would go on drafting.
    error: the error; None if there was none.
    """

    def __init__(self, raises: bool = False) -> None:
        self.raises = raises
        self.error: Exception | None = None

    def __call__(self, part: Callable[..., None], *arguments: Any) -> None:
        """Run a part of the draft, unless an earlier one has failed. A trace gets the error, because its caller may run
        the part as it is."""
        if self.error is not None:
            return
        try:
            part(*arguments)
        except Exception as error:
            if self.raises or get_proxy_mode() is not None:
                raise
            self.error = error
            log.warning(
                "the draft has failed (%s: %s) and is left out from now on; answers go on with plain steps",
                type(error).__name__, error, exc_info=error,
            )  # fmt: skip


class Round(nn.Module):
    """One round of speculative decoding over the first N nodes of the pending trees.

    A round verifies the trees that the last round proposed, and proposes the next ones, so that its caller knows how
    many nodes these have. Its parts (`prepare`, `verify`, `conclude`, `finish`) exchange plain tensors, so that each is
    compiled by itself (see `compiled_steps`).
    """

    verify: nn.Module

    def __init__(
        self, graph: ModelGraph, drafter: Drafter, state: State, guard: DraftGuard, nodes: int | None,
        next_nodes: int | None,
    ):  # fmt: skip
        """nodes: None if each call gives the number. next_nodes: of the trees that it proposes, None for whole ones; 1
        leaves them only roots, and the accepted tokens late for the drafter (see `Prefill.catch_up`)."""
        super().__init__()
        self.verify, self.drafter, self.state = graph.gm, drafter, state
        self.guard, self.nodes, self.next_nodes, self.proposes = guard, nodes, next_nodes, next_nodes != 1

    def forward(self, max_kv_len: int, nodes: int = 0, verify: Callable | None = None) -> Tensor:
        """Returns int64 [B, 5 + 4 N], which `outcome.unpack` reads. max_kv_len: visible slots, >= lengths.max() + N.
        verify: in place of the round's."""
        return self.conclude(*self._verified(max_kv_len, nodes, verify))

    def look(self, max_kv_len: int, nodes: int = 0, verify: Callable | None = None) -> list[Tensor]:
        """The first half of a round whose tokens are chosen outside: the target's logits [B, N, V] and features."""
        logits, tree, _, _, features, _ = self._verified(max_kv_len, nodes, verify)
        if self.proposes:
            self.guard(self.drafter.see, self.state, Tree(*tree), logits)
        return [logits, *features]

    def finish(self, path: Tensor, tokens: Tensor, count: Tensor, features: list[Tensor], max_kv_len: int) -> Tensor:
        """The second half, with the parts of an `Accepted`; returns as `forward` does."""
        tree = self.state.tree(path.shape[1])
        depth = ancestry(tree.parents, self.nodes or MAX_NODES)[1]
        return self._finish((tree.tokens, tree.parents, tree.real), depth, path, tokens, count, features, max_kv_len)

    def prepare(self, nodes: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """The trees (tokens, parents, real), their ancestors and depths, and the positions of their nodes."""
        tree = self.state.tree(self.nodes or nodes)
        ancestors, depth = ancestry(tree.parents, self.nodes or MAX_NODES)
        return (tree.tokens, tree.parents, tree.real), ancestors, depth, self.state.positions(depth)

    def _verified(self, max_kv_len: int, nodes: int, verify: Callable | None) -> tuple[Any, ...]:
        """The arguments of `conclude`."""
        tree, ancestors, depth, positions = self.prepare(nodes)
        inputs = tree[0], positions, self.state.lengths, ancestors, self.state.cache, max_kv_len
        logits, *features = (verify or self.verify)(*inputs)
        return logits, tree, ancestors, depth, features, max_kv_len

    def conclude(
        self, logits: Tensor, tree: tuple[Tensor, ...], ancestors: Tensor, depth: Tensor, features: list[Tensor],
        max_kv_len: int,
    ) -> Tensor:  # fmt: skip
        path, tokens, count = self.accept(logits, tree, ancestors, depth)
        return self._finish(tree, depth, path, tokens, count, features, max_kv_len)

    def _finish(
        self, tree: tuple[Tensor, ...], depth: Tensor, path: Tensor, tokens: Tensor, count: Tensor,
        features: list[Tensor], max_kv_len: int,
    ) -> Tensor:  # fmt: skip
        gained = self.settle(path, tokens, count, features, max_kv_len)
        if self.proposes:
            few = () if self.next_nodes is None else (self.next_nodes,)
            self.guard(self.drafter.propose, self.state, max_kv_len, *few)
            if self.guard.error is not None:
                self.state.root()
        return self.outcome(gained, tree, depth, path, tokens)

    def accept(self, logits: Tensor, tree: tuple[Tensor, ...], ancestors: Tensor, depth: Tensor) -> tuple[Tensor, ...]:
        """The choice of greedy decoding: the parts of an `Accepted`."""
        if self.proposes:  # a plain step spares what drafts cost
            self.guard(self.drafter.see, self.state, Tree(*tree), logits)
        accepted = follow(Tree(*tree), ancestors, depth, self.state.likeliest(logits, depth))
        return accepted.path, accepted.tokens, accepted.count

    def settle(self, path: Tensor, tokens: Tensor, count: Tensor, features: list[Tensor], max_kv_len: int) -> Tensor:
        """Commit accepted tokens and tell the drafter. Returns the numbers of gained tokens [B]."""
        accepted, begin = Accepted(path, tokens, count), self.state.lengths.clone()
        gained = self.state.commit(accepted)
        if self.proposes:
            self.guard(self.drafter.observe, self.state, features, accepted, begin, max_kv_len)
        else:
            self.state.put_off(features, gained)
        return gained

    def outcome(self, gained: Tensor, tree: tuple[Tensor, ...], depth: Tensor, path: Tensor, tokens: Tensor) -> Tensor:
        state, (drafted, parents, real) = self.state, tree
        deepest = torch.where(real, depth, 0).amax(dim=1)
        return pack(
            gained, state.finished, state.tree_count, state.tree_confidence, deepest, tokens, path, drafted, parents
        )


class Prefill(nn.Module):
    """Processes a chunk of the prompts, except the last token, which is the root of the first tree."""

    model: nn.Module

    def __init__(self, graph: ModelGraph, drafter: Drafter, state: State, guard: DraftGuard):
        super().__init__()
        self.model, self.drafter, self.state, self.guard = graph.gm, drafter, state, guard

    def forward(
        self, size: int, max_kv_len: int, features: list[Tensor] | None = None, is_for_both: bool = True
    ) -> list[Tensor]:
        """Process the next `size` tokens of every row; those after a prompt's end are never seen.

        features: for each tap the hidden states [B, size, C] of these tokens, if the target has processed them already.
        is_for_both: False if the drafter will process these tokens later, from the features that are returned then.
        """
        state = self.state
        ids, positions = self.prepare(size)
        if features is None:
            features = self.model(ids, positions, state.lengths, None, state.cache, max_kv_len)
        if is_for_both:
            self.conclude(ids, positions, features, max_kv_len)
        ends = torch.maximum(state.prompt_lengths - 1, state.lengths)  # unchanged without a prompt, in warm-up
        state.lengths.copy_(torch.minimum(state.lengths + size, ends))  # guard: end-of-a-prompt
        return [] if is_for_both else features

    def catch_up(self, max_kv_len: int, size: int) -> None:
        """The drafter processes the tokens that it is late by, `size` at most: a prompt that ends with the root."""
        state, late = self.state, self.state.late_features
        with state.rewound():
            state.prompt_lengths.copy_(state.lengths + 1)
            state.lengths.sub_(state.late)
            features = [] if late is None else [late[:, :size, tap].contiguous() for tap in range(late.shape[2])]
            self.forward(size, max_kv_len, features)
        state.late.zero_()

    def conclude(self, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        state = self.state
        if state.position_offsets is not None:
            positions = positions - state.position_offsets[:, None]  # a drafter's positions are its slots
        self.guard(self.drafter.prefill, state, ids, positions, features, max_kv_len)

    def prepare(self, size: int) -> tuple[Tensor, Tensor]:
        """The next `size` tokens of every row and their positions."""
        state = self.state
        offsets = torch.arange(size, device=state.tokens.device)[None, :]
        ids = state.tokens.gather(1, (state.lengths[:, None] + offsets).clamp(max=state.capacity - 1))
        if state.kv.states.kinds:  # slots after a prompt are never seen, but a state would change
            state.kv.states.valid.copy_((state.prompt_lengths - 1 - state.lengths).clamp(0, size))
        return ids, state.positions(offsets)


class RidingVerify:
    """`Round.verify` over the rows of a round and a piece of prompts, in one pass over the weights.

    A piece consists of slices of `unit` tokens, each of one prompt. The tokens of a slice are further rows of the
    round, each with as many tokens as the trees have nodes. With trees of 2 nodes, the slice [a b c d] of a prompt from
    slot 10 on is the rows [a b] and [c d], with 10 and 12 committed slots in the same pages. All rows append their keys
    before any row attends, so [c d] sees [a b], and the next slice of this prompt in the piece sees both.
    """

    def __init__(self, verify: Callable, prefill: Prefill, slices: Tensor, unit: int, drafter: Drafter | None):
        """slices: [2, n] int64, read whenever the piece is computed: a row of the prompts for each slice, and the slot
        at which it begins. Slices of a prompt follow each other; equal ones do no harm.
        prefill: over the same pool of pages. unit: a multiple of the nodes. drafter: has a row for each slice, in pages
        of the prompts' drafter; None if drafts remember nothing."""
        self.verify, self.prefill, self.slices, self.unit, self.drafter = verify, prefill, slices, unit, drafter

    def __call__(
        self, tokens: Tensor, positions: Tensor, lengths: Tensor, ancestors: Tensor, cache: list[Tensor],
        max_kv_len: int,
    ) -> list[Tensor]:  # fmt: skip
        """The target's logits [B, N, V] and features of the trees. The prompts go on by the piece."""
        # The tokens of the slices [n, unit], and the rows of nodes that they are.
        prompts, (batch, nodes), (row, begin) = self.prefill.state, tokens.shape, self.slices
        count, number = self.unit // nodes, torch.arange(self.unit, device=row.device)
        slots = begin[:, None] + number
        ids = prompts.tokens[row[:, None], slots.clamp(max=prompts.capacity - 1)]
        slot_positions = prompts.positions(slots - prompts.lengths[row][:, None], row)
        chains = ((2 << number[:nodes]) - 1).expand(len(row), count, nodes)

        def joined(own: Tensor, other: Tensor) -> Tensor:
            return torch.cat([own, other.reshape(-1, *own.shape[1:])])

        # One pass over the weights; the head is only for the trees, where it stands apart.
        pools = len(prompts.kv.tensors)
        tables = [other[row] for other in prompts.cache[pools:]]
        of_rows = [joined(own, other.repeat_interleave(count, 0)) for own, other in zip(cache[pools:], tables)]
        narrow = {"rows": batch} if isinstance(self.verify, Regions) else {}
        with riding(begin, tables[-1], count):
            logits, *features = self.verify(
                joined(tokens, ids), joined(positions, slot_positions),
                joined(lengths, begin[:, None] + number[::nodes]), joined(ancestors, chains),
                [*cache[:pools], *of_rows], max_kv_len, **narrow,
            )  # fmt: skip
        if self.drafter is not None:
            of_slices = [feature[batch:].reshape(len(row), self.unit, -1) for feature in features]
            self._draft(self.drafter, ids, slots, of_slices, max_kv_len)
        ends = torch.minimum(begin + self.unit, prompts.prompt_lengths[row] - 1)
        prompts.lengths.copy_(prompts.lengths.scatter_reduce(0, row, ends, "amax"))  # guard: ends-of-slices
        return [each[:batch] for each in (logits, *features)]

    def _draft(self, drafter: Drafter, ids: Tensor, slots: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        """The draft processes the slices [n, unit], too. features: [n, unit, C] each."""
        prompts, (row, begin) = self.prefill.state, self.slices
        # Each slice is a row with the pages and the buffers of its prompt. All caches have one table.
        caches(drafter)[0].table.copy_(prompts.kv.table[row])
        buffers = [*zip(drafter.row_buffers(), self.prefill.drafter.row_buffers())]
        for of_slices, of_prompts in buffers:
            of_slices.copy_(of_prompts[row])
        numbers = dict(lengths=begin, prompt_lengths=prompts.prompt_lengths[row], capacity=prompts.capacity)
        state = SimpleNamespace(tokens=prompts.tokens[row], **numbers)
        self.prefill.guard(drafter.prefill, state, ids, slots, features, max_kv_len)

        # A prompt goes on from its last slice: slices of the prompts 0, 2 and 2 have the last ones 0, 2 and 2.
        last = ((row[:, None] == row) * torch.arange(len(row), device=row.device)).amax(1)
        for of_slices, of_prompts in buffers:
            of_prompts[row] = of_slices[last]


# Tokens of each row that a step may take, largest first. On a CPU one compiled step takes any number of tokens, and
# takes longer for more: 200 tokens of SmolLM2-135M in 4 bits take 70 ms as 224 and 84 ms as 256.
PREFILL_SIZES = {"cpu": (*range(512, 0, -32),), "cuda": (2048, 512, 128, 32)}
STEP_COST = {"cpu": 32, "cuda": 128}  # the fixed cost of a step, in tokens: the weights are read once a step


def chunks(tokens: int, sizes: tuple[int, ...], fixed: int) -> Iterator[int]:
    """Sizes of the steps for `tokens` tokens. The last step may be larger than the rest if it is cheaper than several:
    with sizes (512, 128, 32) and fixed 32, 600 tokens give 512, 128, and 140 tokens give 128, 32.

    A prompt that resumes at a multiple of sizes[0] takes the same remaining steps: 1,200 tokens give 512, 512, 128, 32,
    32, and from token 512 on 512, 128, 32, 32.
    """
    while tokens > sizes[0]:
        yield sizes[0]
        tokens -= sizes[0]
    while tokens > 0:
        size = _cheapest(tokens, sizes, fixed)[1]
        yield size
        tokens -= size


def common_end(tokens: int, sizes: tuple[int, ...]) -> int:
    """The last of the ends of steps for `tokens` tokens that the steps of every longer text have, too: with sizes (512,
    128, 32) of 1,200 tokens 1,024, of 500 none, which is 0."""
    return max(tokens, 0) // sizes[0] * sizes[0]


def _cheapest(tokens: int, sizes: tuple[int, ...], fixed: int) -> tuple[int, int]:
    """(cost, first size) of the cheapest steps for at most sizes[0] tokens."""
    enough = min(size for size in sizes if size >= tokens)
    at_once = enough + fixed, enough
    first = max((size for size in sizes if size < tokens), default=None)
    if first is None:
        return at_once
    return min(at_once, (first + fixed + _cheapest(tokens - first, sizes, fixed)[0], first))
