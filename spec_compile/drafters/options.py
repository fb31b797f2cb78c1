"""Options of the algorithms that have a draft model or head, with the engines' names and meaning."""

from dataclasses import dataclass
from typing import Any

from ..config import Options
from .trees.schedule import Schedule
from .trees.static import StaticTree

SAMPLE_METHODS = ("greedy", "probabilistic")


@dataclass(frozen=True)
class DraftOptions(Options):
    """Options of the algorithms that grow trees.

    draft: a path, a name on the hub, or a module. num_steps: levels of the tree. topk: children of a node (1: a chain).
    num_draft_tokens: see `Options` (default: what `Schedule` says; for a chain num_steps + 1). score_temperature: of
    the draft's probabilities by which the nodes of a tree are ranked. draft_sample_method: "greedy", or
    "probabilistic": where tokens are sampled the drafts, a chain, are drawn too, at the same temperature, and tested
    against what they were drawn from. draft_tensor_parallel_size: with tensor_parallel, how many ranks share the draft:
    1 (it is whole on each), as many as share the model, or None: what takes less time.
    """

    draft: Any = None
    num_draft_tokens: int | None = None
    num_steps: int = 3
    topk: int = 1
    score_temperature: float = 1.0
    draft_sample_method: str = "greedy"
    draft_tensor_parallel_size: int | None = None

    def __post_init__(self):
        super().__post_init__()
        check_sample_method(self.draft_sample_method, self.topk)
        _ = self.schedule  # raises where the options contradict each other

    @property
    def draws(self) -> bool:
        """See `DraftPlan.draws`."""
        return self.draft_sample_method == "probabilistic"

    @property
    def schedule(self) -> Schedule | StaticTree:
        """How the draft's trees grow; ValueError where the options contradict each other."""
        return Schedule(self.num_steps, self.topk, self.num_draft_tokens, self.score_temperature)


def check_sample_method(method: str, topk: int) -> None:
    """ValueError unless `method` is one of `SAMPLE_METHODS`, and trees are chains (topk 1) where drafts are drawn."""
    if method not in SAMPLE_METHODS:
        raise ValueError(f"draft_sample_method: expected 'greedy' or 'probabilistic', got {method!r}")
    if method == "probabilistic" and topk != 1:
        raise ValueError(f"topk: drafts that are drawn ('probabilistic') are chains: it must be 1, not {topk}")
