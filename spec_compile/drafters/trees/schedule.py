"""`Schedule`: the sizes of a chain or a token tree that a draft grows, one forward of it ("step") a level."""

import math
from dataclasses import dataclass, replace

from ...errors import check_int
from ...kernels.top_logits import MAX_K
from ...tree import MAX_NODES


@dataclass(frozen=True)
class Schedule:
    """A chain (topk 1), or the dynamic tree of EAGLE-2 (Li et al. 2024, arXiv:2406.16858, section 4).

    num_steps: levels of the tree, grown by num_steps - 1 forwards of the draft.
    topk: candidates among a node's children, and nodes of a level that get children.
    num_draft_tokens: nodes verified, the root included (default: the root and all candidates, 64 at most).
    score_temperature: of the draft's softmax by which branches are compared.

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
        """The schedule of the first `nodes` nodes of the same trees (None: all of them).

        They are at most nodes - 1 levels deep, because each of them comes after its parents: of 5 levels with 16 nodes,
        the first 4 take 3 levels.
        """
        if nodes is None:
            return self
        return replace(self, num_steps=min(self.num_steps, nodes - 1), num_draft_tokens=nodes)

    @property
    def fed(self) -> int:
        """Slots of the nodes that are fed to the draft: those of its last forward, or of all forwards of a chain."""
        return (self.num_steps - 1) * self.topk

    @property
    def candidates(self) -> int:
        """Nodes below the root among which the best are verified."""
        return self.topk + (self.num_steps - 1) * self.topk**2
