"""Options of the algorithms that have a draft model or head, with the engines' names and meaning."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..cache import Cache
from ..capture.admit import Inventory
from ..config import Options, parse_options
from ..errors import check_int
from ..graph import ModelGraph
from ..kernels import ops
from .ngram import NgramOptions
from .shared_draft import parse_formats
from .trees.grow import Schedule, StaticTree

COMMON = [field.name for field in fields(Options)]


@dataclass(frozen=True)
class UnionOptions(Options):
    """Options of the algorithms whose trees can be joined with n-grams.

    ngram: True, or a dict of options of algo="ngram": the trees also get continuations of the same words in earlier
    text, with `num_draft_tokens` as the one budget (default then: 16, or the draft's own number if that is more).
    """

    ngram: Any = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.ngram, bool | dict):
            got = type(self.ngram).__name__
            raise TypeError(f"ngram: expected True, False or a dict of options of algo='ngram', got {got}")
        for name in self.ngram if isinstance(self.ngram, dict) else ():
            if name in COMMON:
                raise ValueError(f"ngram: {name!r} is an option of n-grams and draft together; pass {name}= beside it")
            if name == "recycle":
                raise ValueError("ngram: 'recycle' is an option of algo=\"ngram\" only; leave it out")
        if self.joined is not None and self.draws:
            raise ValueError(
                "draft_sample_method: drafts that are drawn ('probabilistic') are tested against what they were drawn "
                "from, which n-grams do not have; pass 'greedy', or leave ngram out"
            )

    @property
    def draws(self) -> bool:
        """See `DraftPlan.draws`."""
        return False

    @cached_property
    def joined(self) -> NgramOptions | None:
        """The options of the n-grams that the trees are joined with, or None."""
        if self.ngram is False:
            return None
        common = {name: getattr(self, name) for name in COMMON} | {"num_draft_tokens": self.budget(1)}
        try:
            return parse_options(NgramOptions, common | (self.ngram if isinstance(self.ngram, dict) else {}))
        except (TypeError, ValueError) as error:
            raise type(error)(f"ngram: {error}") from error

    @property
    def share_text(self) -> bool:
        """See `NgramOptions`."""
        return self.joined is None or self.joined.share_text

    def budget(self, drafted: int) -> int:
        """Nodes of a joined tree. drafted: nodes of the draft's tree, without n-grams."""
        return self.num_draft_tokens or max(drafted, Options.num_draft_tokens)

    def draft_nodes(self, most: int) -> int | None:
        """Nodes of the draft's tree, without n-grams: `num_draft_tokens`, or `most` if a joined tree has more."""
        nodes = self.num_draft_tokens
        return nodes if nodes is None or self.joined is None else min(nodes, most)

    def longest(self, drafted: int) -> int:
        """Most nodes of a path that a round accepts. drafted: nodes of the draft's longest path, without n-grams."""
        joined = self.joined
        if joined is None:
            return drafted
        return min(self.budget(drafted), max(drafted, 1 + joined.branch_length - joined.min_match_window_size))


@dataclass(frozen=True)
class ModuleOptions(UnionOptions):
    """Options of the algorithms that have a draft module.

    draft: a path, a name on the hub, or a module.
    topk: children of a node (1: a chain).
    num_draft_tokens: see `Options` (default: see `Schedule`; num_steps + 1 for a chain).
    score_temperature: divides the draft's logits in the probabilities by which the nodes of a tree are ranked.
    draft_sample_method: "greedy", or "probabilistic": if tokens are sampled, the drafts, a chain, are drawn too, at the
    same temperature, and tested against the probabilities that they were drawn from.
    draft_tensor_parallel_size: with tensor_parallel, how many ranks share the draft: 1 (it is whole on each), as many
    as share the model, or None: the faster of the two.
    draft_weights: "fp8", "int8" or "int4": round the draft's weights at load and read these copies in their place; or a
    dict of these for "layers" and "output", its output matrix, which may be the target's. No answer depends on it.
    """

    draft: Any = None
    num_draft_tokens: int | None = None
    topk: int = 1
    score_temperature: float = 1.0
    draft_sample_method: str = "greedy"
    draft_tensor_parallel_size: int | None = None
    draft_weights: Any = None

    def __post_init__(self):
        super().__post_init__()
        method = self.draft_sample_method
        if parse_formats(self.draft_weights) and self.draft_tensor_parallel_size not in (None, 1):
            raise ValueError(
                "draft_weights: weights in fewer bits are whole on each rank; leave draft_tensor_parallel_size out"
            )
        if method not in ("greedy", "probabilistic"):
            raise ValueError(f"draft_sample_method: expected 'greedy' or 'probabilistic', got {method!r}")
        if self.draws and self.topk != 1:
            raise ValueError(f"topk: drafts that are drawn ('probabilistic') are chains: it must be 1, not {self.topk}")

    @property
    def draws(self) -> bool:
        """See `DraftPlan.draws`."""
        return self.draft_sample_method == "probabilistic"

    @property
    def draft_ranks(self) -> int | None:
        """How many ranks share the draft; None: the faster."""
        return 1 if self.draft_weights else self.draft_tensor_parallel_size


@dataclass(frozen=True)
class DraftOptions(ModuleOptions):
    """Options of the algorithms that grow trees.

    num_steps: levels of the tree.
    """

    num_steps: int = 3

    def __post_init__(self):
        super().__post_init__()
        _ = self.schedule  # raises if the options contradict each other

    @property
    def schedule(self) -> Schedule | StaticTree:
        """How the draft's trees grow; ValueError if the options contradict each other."""
        nodes = self.draft_nodes(Schedule(self.num_steps, self.topk).nodes)
        return Schedule(self.num_steps, self.topk, nodes, self.score_temperature)


# Attention of a draft over the first and the last slots of its context, and nothing between them.
#
# After long texts a draft that was trained on short ones drafts worse, and its attention takes longer. Neither happens
# if it sees a few slots of the beginning ("sinks"), which get much of the attention, and a window at the end. Positions
# stay as they are in the text, unlike in StreamingLLM (Xiao et al., arXiv:2309.17453, section 3.2).

SINKS = 4
"""First slots that are seen by default."""
LARGEST = 1 << 31
"""Bound of both options."""


@dataclass(frozen=True)
class WindowOptions(Options):
    """Options of the drafts that can attend to a part of their context.

    draft_window_size: tokens of the text's end that the draft's attention sees, if the text is longer (default: all).
    draft_sink_size: tokens of the text's beginning that it sees besides (default: 4).
    """

    draft_window_size: int | None = None
    draft_sink_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        size, sinks = self.draft_window_size, self.draft_sink_size
        if size is None:
            if sinks is not None:
                raise ValueError("draft_sink_size: it is of the window in draft_window_size; give that, too")
            return
        check_int("draft_window_size", size, 1, LARGEST, "tokens of the text's end")
        if sinks is not None:
            check_int("draft_sink_size", sinks, 0, LARGEST, "tokens of the text's beginning")
        self._check_room(self.max_cache_len, "max_cache_len")

    @property
    def window(self) -> "Window | None":
        """The part of a text that the draft's attention sees, or None for everything."""
        if self.draft_window_size is None:
            return None
        return Window(self.draft_window_size, SINKS if self.draft_sink_size is None else self.draft_sink_size)

    def check_window(self, graph: ModelGraph, target: Inventory) -> None:
        """ValueError if the draft's graph has windows already, or if no text of `target` is as long as the window."""
        if self.window is None:
            return
        positions = getattr(target.config, "max_position_embeddings", None)
        self._check_room(positions, f"the tokens that {target.name} holds")
        windows = sorted({layer.window for layer in graph.layers if layer.window is not None})
        if windows:
            raise ValueError(
                f"draft_window_size: this draft's checkpoint has layers with windows of their own, of "
                f"{', '.join(map(str, windows))} tokens; leave the option out"
            )

    def _check_room(self, tokens: int | None, name: str) -> None:
        if self.window is not None and tokens is not None and self.window.slots > tokens:
            raise ValueError(
                f"draft_window_size: a window of {self.window.size} and {self.window.sinks} sinks are more than "
                f"{name}, {tokens}, so that no text would be longer; lower it, or leave it out"
            )


@dataclass(frozen=True)
class Window:
    """The first `sinks` slots of a cache and the last `size` committed ones."""

    size: int
    sinks: int

    @property
    def slots(self) -> int:
        """Most committed slots that are seen."""
        return self.sinks + self.size

    def describe(self) -> str:
        """A line for reports."""
        return f"attention sees the first {self.sinks} tokens of a text and its last {self.size}"

    def view(self, cache: Cache, lengths: Tensor, rows: int) -> tuple[list[Tensor], Tensor]:
        """A copy of the slots that are seen, as a smaller cache with one page a row: (its `Cache.argument`, its
        committed slots [B]).

        lengths [B] int64: the committed slots of `cache`.
        rows: slots of the copy after the committed ones, for a block to be written.

        sinks = 1, size = 2 and lengths = 5 copy the slots [0, 3, 4] and have 3 committed slots.
        """
        slot = torch.arange(self.slots + rows, device=lengths.device)
        first = (lengths - self.size).clamp(min=self.sinks)  # of the window
        source = torch.where(slot < self.sinks, slot, slot - self.sinks + first[:, None]).clamp(max=cache.slots - 1)
        copies = [each[ops.places(each, source, cache.table)] for each in cache.tensors]
        table = torch.arange(lengths.shape[0], dtype=torch.int32, device=lengths.device)[:, None]
        return [*copies, table], lengths.clamp(max=self.slots)


def seen(
    window: Window | None, cache: Cache, lengths: Tensor, rows: int, max_kv_len: int
) -> tuple[list[Tensor], Tensor, int]:
    """The arguments of a block of up to `rows` rows after `lengths` [B] committed slots: the cache or a view of it, the
    slots [B] that are committed in it, and the slots to look at."""
    if window is None:
        return cache.argument, lengths, max_kv_len
    return *window.view(cache, lengths, rows), window.slots + rows


def write_back(cache: Cache, begin: Tensor, view: list[Tensor], lengths: Tensor, rows: int) -> None:
    """Put the block of `rows` slots that lies at slots lengths [B] of a view into the cache, at slots begin [B]."""
    source = lengths[:, None] + torch.arange(rows, device=lengths.device)
    for each, copy in zip(cache.tensors, view):
        ops.append(each, copy[ops.places(copy, source)], begin, cache.table)
