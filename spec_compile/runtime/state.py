"""State: every buffer that outlives a round, at fixed addresses, for B sequences."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..cache import Cache
from ..drafting import DraftPlan
from ..graph import ModelGraph
from ..kernels.ops import append_block, places
from ..kernels.top_logits import likeliest
from ..tree import MAX_NODES, Accepted, Tree, without
from .prompt import Past

MOST_LATE = 128  # tokens of a row that a drafter may be late by
LATE_SIZES = {"cpu": (8, 16, 32, 64, MOST_LATE), "cuda": (8, 32, MOST_LATE)}  # tokens that it catches up by at once


class State(nn.Module):
    """B sequences of up to `capacity` tokens, their key-value cache, and the tree to be verified next.

    The last committed token of row b is ``tokens[b, lengths[b]]``, the root of the next tree, without keys and values.
    Cache slots below ``lengths[b]`` are committed, later ones never seen. The prompt [5, 8, 3] has length 2 and root 3.
    """

    def __init__(
        self, graph: ModelGraph, batch: int, capacity: int, device: torch.device, plan: DraftPlan | None = None
    ):  # fmt: skip
        """plan: the drafter's; None for one that proposes nothing but roots."""
        super().__init__()
        self.batch, self.dtype = batch, graph.dtype
        self.position_limit = graph.position_limit
        # Tokens below this are drafted; None: all of them.
        self.draftable = graph.common_tokens if graph.vocab_size != graph.embedded else None
        # Tokens below this are kept, because the model has no embeddings of others, after which no text goes on, see
        # `pipeline.check_gained`. None: all of them.
        self.readable = graph.embedded if graph.vocab_size > graph.embedded else None

        def buffer(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return nn.Buffer(torch.zeros(*shape, dtype=dtype, device=device), persistent=False)

        self.tokens = buffer(batch, capacity)
        self.lengths = buffer(batch)
        self.prompt_lengths = buffer(batch)
        self.min_lengths = buffer(batch)  # no end-of-sequence token before a row holds this many tokens
        self.max_lengths = buffer(batch)
        self.finished = buffer(batch, dtype=torch.bool)
        self.seed = buffer(batch)  # of the random numbers of each row, see `verify.sample.uniform`
        self.numbers = buffer(batch)  # of each row among those that share its seed
        self.is_eos = buffer(batch, graph.vocab_size, dtype=torch.bool)
        self.tree_tokens = buffer(batch, MAX_NODES)
        self.tree_parents = buffer(batch, MAX_NODES)
        self.tree_count = buffer(batch)
        self.most_nodes = buffer(batch)  # of its trees count, see `tree`
        self.most_nodes.fill_(MAX_NODES)
        self.tree_confidence = buffer(batch)
        self.temperature = buffer(batch, dtype=torch.float32)  # at which drafts are drawn
        self.top_k = buffer(batch)  # these three: see `verify.sample.RowSettings`
        self.excluded_p = buffer(batch, dtype=torch.float32)
        self.min_p = buffer(batch, dtype=torch.float32)
        size = None if plan is None or not plan.draws else (batch, plan.nodes, graph.vocab_size)
        self.tree_probs = None if size is None else buffer(*size, dtype=torch.float32)
        self.late = buffer(batch)  # the newest tokens with keys and values that the drafter has not observed yet
        taps = len(plan.taps) if plan is not None and plan.is_whole else 0
        self.late_features = buffer(batch, MOST_LATE, taps, graph.hidden_size, dtype=graph.dtype) if taps else None
        # Positions of a row minus its slots.
        self.position_offsets = buffer(batch) if graph.shifts_positions else None
        self.kv = Cache(graph, batch, capacity)
        self.on_gpu = device.type == "cuda"
        self._views: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self.root()

    @property
    def capacity(self) -> int:
        """Slots of a row. As the size of a buffer it is no constant in compiled code."""
        return self.tokens.shape[1]

    @property
    def cache(self) -> list[Tensor]:
        return self.kv.argument

    def small_buffers(self) -> list[Tensor]:
        """Every buffer except keys, values and states."""
        return [*self.buffers(recurse=False), *self.kv.states.counts, *self.kv.adapters, self.kv.table]

    def share(self, other: "State") -> None:
        """Replace the rows by the first ones of `other`, in every buffer."""
        for name, buffer in list(self.named_buffers(recurse=False)):
            setattr(self, name, getattr(other, name)[: len(buffer)])
        self.kv.share(other.kv)

    @contextmanager
    def rewound(self) -> Iterator[None]:
        """A context for the drafter's steps over earlier tokens: at its end all lengths are as before."""
        numbers = [self.lengths, self.prompt_lengths, *self.kv.states.counts]
        before = [each.clone() for each in numbers]
        yield
        for each, value in zip(numbers, before):
            each.copy_(value)

    def put_off(self, features: list[Tensor], gained: Tensor) -> None:
        """After a round over roots: its tokens are late for the drafter.

        features: for each tap the hidden states [B, 1, C] of the roots.
        gained: numbers of gained tokens [B], 1 or 0.
        """
        if self.late_features is not None:  # of a row that gained nothing the next features lie in the same place
            row = torch.arange(self.late.shape[0], device=self.late.device)
            new = torch.stack([feature[:, 0] for feature in features], dim=1)
            self.late_features[row, self.late.clamp(max=MOST_LATE - 1)] = new
        self.late.add_(gained)

    def enter(self, row: int, prompt: list[int], eos: list[int], adapter: int = 0, **numbers: int | float) -> None:
        """Begin a new sequence in one row while the others go on. The caller has to unset its `finished`.

        prompt: token ids.
        eos: ids of the tokens that end it.
        adapter: see `Cache.adapters`.
        numbers: values for the [B] buffers of these names, see `Sequence.numbers`.
        """
        numbers |= {"prompt_lengths": len(prompt), "late": 0}
        buffers = {name: self._view(name, row) for name in numbers}
        integers = [name for name, buffer in buffers.items() if buffer.dtype == torch.int64]
        # All travel in one copy, because each copy to a GPU takes as long as a small kernel. Newly pinned memory has no
        # copy under way, so that nothing waits.
        wide = [*prompt, *eos, *(numbers[name] for name in integers)]
        sent = torch.empty(len(wide), dtype=torch.int64, pin_memory=self.on_gpu)
        sent.numpy()[:] = wide
        sent = sent.to(self.tokens.device, non_blocking=True)
        # They are put into place by few launches.
        ids, ends, *values = sent.split([len(prompt), len(eos), *[1] * len(integers)])
        torch._foreach_copy_([self.tokens[row, : len(prompt)], *(buffers[name] for name in integers)], [ids, *values])
        for name in numbers.keys() - integers:
            buffers[name].fill_(numbers[name])
        self.is_eos[row].zero_().index_fill_(0, ends, True)
        self.kv.states.enter(row, len(prompt))
        for chosen in self.kv.adapters:
            chosen[row].fill_(adapter)
        self.finished[row].fill_(True)

    def set_pages(self, entries: list[tuple[int, int, int]]) -> None:
        """Change entries (row, column, page) of `Cache.table`: with (2, 1, 7) the slots 64 to 127 of row 2 lie in page
        7. A GPU gets them in one copy, and the host does not wait."""
        sent = torch.tensor([*zip(*entries)], pin_memory=self.on_gpu)
        rows, columns, pages = sent.to(self.tokens.device, non_blocking=True)
        self.kv.table[rows, columns] = pages.int()

    def _view(self, name: str, row: int) -> Tensor:
        """One row of a buffer [B]. Views are kept, because a call that has few rounds would feel the time of eight."""
        buffer = getattr(self, name)
        known = self._views.get((name, row))
        if known is None or known[0] is not buffer:
            known = self._views[name, row] = buffer, buffer[row : row + 1]
        return known[1]

    def fill(self, past: Past, lengths: list[int]) -> None:
        """Take over states, keys and values of the prompts that have entered; the first `lengths` [B] tokens count."""
        self.kv.states.fill(past.states)
        for number, (keys, values) in enumerate(past.layers):
            key_cache, value_cache, scales = self.kv.layer(number)
            first = past.length - keys.shape[2]  # a sliding window holds the last tokens only
            for row, pad in enumerate(past.padding):
                skipped = max(pad - first, 0)
                begin = torch.tensor([max(first - pad, 0)], device=key_cache.device)
                rows = slice(row, row + 1)
                pages = slice(None) if self.kv.is_paged else rows
                append_block(
                    key_cache[pages], value_cache[pages], None if scales is None else scales[pages],
                    keys[rows, :, skipped:], values[rows, :, skipped:], begin, self.kv.table[rows],
                )  # fmt: skip
        self.lengths.copy_(torch.tensor(lengths))

    def resize(self, slots: int) -> None:
        """Make room for `slots` tokens a row. The texts stay; the cache does not change."""
        longer = torch.zeros(self.batch, slots, dtype=torch.int64, device=self.tokens.device)
        longer[:, : self.capacity] = self.tokens
        self.tokens = longer

    def tree(self, nodes: int) -> Tree:
        """The first `nodes` nodes of the pending trees, and at most `most_nodes` of a row. Parents come first, so every
        prefix of a tree is a tree. Unused slots form a chain, because attention pays for each leaf: parents [-1, 0, 0]
        become [-1, 0, 0, 2, 3] of 5 nodes.

        They are copies, because the round writes the next trees into the same buffers, and Inductor of torch 2.11 may
        move a read of a view after that write.
        """
        number = torch.arange(nodes, device=self.tokens.device)
        real = number < torch.minimum(self.tree_count, self.most_nodes)[:, None]
        parents = torch.where(real, self.tree_parents[:, :nodes].clone(), number - 1)
        probs = None if self.tree_probs is None else self.tree_probs[:, :nodes].clone()
        return Tree(self.tree_tokens[:, :nodes].clone(), parents, real, probs)

    def root(self) -> None:
        """Reduce the pending trees to their roots, the last committed tokens."""
        self.tree_tokens[:, :1] = self.tokens.gather(1, self.lengths[:, None])
        self.tree_parents[:, :1] = -1
        self.tree_count.fill_(1)
        self.tree_confidence.zero_()

    def draw_tree(self) -> None:
        """Replace the tokens of the pending trees by random ones, always the same."""
        shape, generator = self.tree_tokens.shape, torch.Generator().manual_seed(0)
        self.tree_tokens.copy_(torch.randint(self.draftable or self.is_eos.shape[1], shape, generator=generator))

    def propose(
        self, tokens: Tensor, parents: Tensor, count: Tensor, confidence: Tensor, probs: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Set the trees to be verified next, without tokens that the model cannot read or generate.

        confidence: [B], the drafter's bucket of it (0: least).
        probs: [B, N, V], see `Tree`; of a drafter that draws its tokens.
        scores: [B, N] float32, logarithms of the chances that all drafts from the root to each node are accepted, as
            the drafter expects them, for `drafters.union`.
        """
        if self.draftable is not None:
            tokens, parents, count = without(tokens, parents, count, self.draftable)
        self.set_trees(tokens, parents, count, confidence, probs)

    def set_trees(
        self, tokens: Tensor, parents: Tensor, count: Tensor, confidence: Tensor, probs: Tensor | None = None
    ) -> None:  # fmt: skip
        """`propose` of any tokens that the model reads."""
        self.tree_tokens[:, : tokens.shape[1]] = tokens
        self.tree_parents[:, : tokens.shape[1]] = parents
        self.tree_count.copy_(count)
        self.tree_confidence.copy_(confidence)
        if probs is not None and self.tree_probs is not None:
            self.tree_probs[:, : probs.shape[1]] = probs

    def positions(self, offsets: Tensor, rows: Tensor | slice = slice(None)) -> Tensor:
        """Positions of the slots lengths + offsets [B, N], clamped to a learned table, outside of which nothing is
        committed: lengths [2, 9], offsets [0, 1, 1], position_limit 10 give [[2, 3, 3], [9, 9, 9]]. rows: the rows of
        which these are, [B] int64."""
        positions = self.lengths[rows, None] + offsets
        if self.position_offsets is not None:
            positions = positions + self.position_offsets[rows, None]  # guard: offsets-of-pictures
        return positions if self.position_limit is None else positions.clamp(max=self.position_limit - 1)

    def forbid_early_eos(self, logits: Tensor, depth: Tensor) -> Tensor:
        """Logits with -inf for end-of-sequence tokens after nodes [B, N] where the row would be too short."""
        return logits.masked_fill(self._is_early(depth)[:, :, None] & self.is_eos[:, None, :], float("-inf"))

    def likeliest(self, logits: Tensor, depth: Tensor) -> Tensor:
        """The likeliest token [B, N] after each node by these logits."""
        return likeliest(logits, self.is_eos, self._is_early(depth))

    def _is_early(self, depth: Tensor) -> Tensor:
        return self.lengths[:, None] + 1 + depth < self.min_lengths[:, None]  # guard: minimum-length

    def commit(self, accepted: Accepted) -> Tensor:
        """Add the accepted tokens to each unfinished row with their keys, values and states, and stop rows.

        Returns the tokens that each row [B] gained, up to its first end-of-sequence token or its limit. With lengths
        [6], path [[0, 2, 5]] and count 3, slots 6, 8 and 11 of the cache move to 6, 7 and 8.
        """
        nodes = accepted.tokens.shape[1]
        number = torch.arange(nodes, device=self.tokens.device)
        tokens = accepted.tokens.clamp(min=0)  # -1: nothing could be drawn; the engine reports it
        ends = self.is_eos.gather(1, tokens) & (number < accepted.count[:, None])
        until_end = torch.where(ends, number + 1, nodes + 1).amin(dim=1)  # guard: end-inside-a-run
        room = (self.max_lengths - (self.lengths + 1)).clamp(min=0)  # guard: limit-of-a-row
        gained = torch.minimum(torch.minimum(accepted.count, until_end), room)
        gained = torch.where(self.finished, 0, gained)  # guard: finished-rows

        slots = self.lengths[:, None] + number
        if nodes > 1 and self.tokens.device.type == "cuda":
            torch.ops.spec_compile.compact(self.kv.tensors, self.lengths, accepted.path, accepted.count, self.kv.table)
        elif nodes > 1:
            for cache in self.kv.tensors:
                source = places(cache, self.lengths[:, None] + accepted.path, self.kv.table)
                target = places(cache, slots, self.kv.table)
                cache.index_put_(target, cache[source])  # guard: accepted-keys-move
        self.kv.states.commit(accepted.path, gained)  # guard: states-are-led-on
        tokens = tokens if self.readable is None else tokens.clamp(max=self.readable - 1)
        self.tokens.scatter_(1, slots + 1, tokens)
        self.lengths.add_(gained)
        self.finished.logical_or_((gained == until_end) | (self.lengths + 1 >= self.max_lengths))
        self.root()
        return gained
