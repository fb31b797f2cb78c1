"""Options of the algorithms that have a draft model or head, with the engines' names and meaning."""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from ..config import Options, parse_options
from . import draft_weights
from .ngram import NgramOptions
from .trees.grow import StaticTree
from .trees.schedule import Schedule

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
        """Most nodes of a path that a round accepts. drafted: those of the draft's longest path, without n-grams."""
        joined = self.joined
        if joined is None:
            return drafted
        return min(self.budget(drafted), max(drafted, 1 + joined.branch_length - joined.min_match_window_size))


@dataclass(frozen=True)
class ModuleOptions(UnionOptions):
    """Options of the algorithms that have a draft module.

    draft: a path, a name on the hub, or a module.
    topk: children of a node (1: a chain).
    num_draft_tokens: see `Options` (default: that of `Schedule`; num_steps + 1 for a chain).
    score_temperature: of the draft's probabilities by which the nodes of a tree are ranked.
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
        if draft_weights.parse(self.draft_weights) and self.draft_tensor_parallel_size not in (None, 1):
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
