"""What the runtime asks of those who propose trees: an `Algorithm` for a model, and its `Drafter` for a batch size."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .config import Options
from .drafters.trees.draw import draw_chain
from .drafters.trees.grow import grow
from .drafters.trees.schedule import Schedule
from .drafters.trees.static import StaticTree
from .drafters.trees.step import Step
from .graph import ModelGraph
from .runtime.state import State
from .tree import Accepted


class Drafter(nn.Module):
    """What a round asks of a drafter. The methods marked [graph] run inside the compiled round.

    `span`: slots of a cache to look at on a CPU, at least those that hold anything when the round ends.
    """

    fuses: bool = True
    """Whether on a GPU `propose` is compiled in one piece with what comes before it. Else `compile` is called once for
    each kind of round, and compiles parts of it."""

    seconds: float = 0.0
    """Time spent proposing on the host, ever (0 where it is part of the graph)."""

    def small_buffers(self) -> list[Tensor]:
        """The buffers that a round changes and that must be put back after a round of warm-up."""
        return list(self.buffers())

    def compile(self, compiler) -> None:
        """Compile the parts of `propose` by `compiler`, a `runtime.steps.compile.PartCompiler`."""

    def resized(self, slots: int) -> None:
        """Its caches have so many slots now: what was compiled for others is of no use."""

    def mute(self) -> None:
        """The rounds that follow are warm-up: leave no trace outside `small_buffers`."""

    def begin(
        self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True
    ) -> None:
        """A new call of generate(): `prompts`, one a row, and `references` that the output may copy from. share_text:
        whether later calls may draft from what this one reads and writes."""

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], span: int) -> None:
        """[graph] A chunk of the prompts: tokens and positions [B, T] at slots ``state.lengths`` onwards, and the
        hidden states [B, T, C] that were asked for."""

    def observe(self, state: State, features: list[Tensor], accepted: Accepted, begin: Tensor, span: int) -> None:
        """[graph] Hidden states [B, N, C] of the verified nodes, and which were accepted. begin [B]: ``state.lengths``
        before they were committed."""

    def propose(self, state: State, span: int) -> None:
        """[graph] Call ``state.propose`` with the trees to verify next, siblings distinct, parents first."""
        raise NotImplementedError

    def end(self, lengths: list[int]) -> None:
        """The call of generate() is over, however it ended; `lengths`: tokens of each row less one, if it began."""


class Algorithm:
    """A way of drafting for one model, ready to make drafters of any batch size."""

    taps: tuple[int, ...] = ()
    """Hidden states of the target that `prefill` and `observe` are given, numbered as in `passes.Settings`."""

    draws: bool = False
    """Whether it draws its tokens at random, and gives ``state.propose`` the distributions they were drawn from."""

    varies: bool = False
    """Whether trees come in all sizes up to ``num_draft_tokens``, so that rounds of several sizes are compiled."""

    adaptive: bool = False
    """Whether fewer nodes may be verified than were proposed, if that has paid so far."""

    reach: int = 0
    """Slots beyond the verified nodes that its drafters use."""

    graph: ModelGraph | None = None
    """The draft that runs in its rounds, with a cache of its own."""

    draft_module: nn.Module | None = None
    """The draft whose weights ``speculation.refresh()`` takes over, as the user knows it."""

    def refresh(self) -> None:
        """Weights have changed in place: compute anew what was copied from them."""

    @property
    def token_bytes(self) -> int:
        """Bytes that its own cache takes for each token of a sequence."""
        return self.graph.token_bytes if self.graph else 0

    def drafter(self, batch: int, slots: int) -> Drafter:
        """The drafter for `batch` sequences of up to `slots` tokens."""
        raise NotImplementedError

    def documents(self, reference) -> list[Tensor]:
        """The texts in generate()'s `reference`, checked."""
        raise ValueError("reference: only algo='ngram' copies from a reference; leave it out")

    def explain(self) -> list[str]:
        """Lines about it for ``speculation.explain()``."""
        return []


def propose_grown(
    state: State,
    schedule: Schedule | StaticTree,
    draws: bool,
    logits: Tensor,
    hidden: Tensor,
    step: Step,
    draft_to_target: Tensor | None = None,
) -> None:
    """Grow trees (see `grow`), or chains that are drawn, below the last committed tokens and propose them."""
    root, probs = state.tree_tokens[:, 0].clone(), None
    if draws:
        place = state.lengths + 1 - state.prompt_lengths
        tokens, parents, probs = draw_chain(
            schedule, root, logits, hidden, step, state.temperature, state.seed, place, state.is_eos.shape[0],
            draft_to_target,
        )  # fmt: skip
    else:
        tokens, parents, _ = grow(schedule, root, logits, hidden, step, draft_to_target)
    count = torch.full_like(root, tokens.shape[1])
    state.propose(tokens, parents, count, torch.zeros_like(count), probs)


@dataclass(frozen=True)
class DraftOptions(Options):
    """Options of the algorithms that have a draft model or head, with the engines' names and meaning.

    draft: the draft: a path, a name on the hub, or a module. num_steps: levels of the tree. topk: children of a node
    (1: a chain). num_draft_tokens: see `Options` (default: what `Schedule` says; for a chain num_steps + 1).
    score_temperature: of the draft's probabilities by which the nodes of a tree are chosen. draft_sample_method:
    "greedy", or "probabilistic": where tokens are sampled the drafts, a chain, are drawn too, at the same temperature,
    and tested against what they were drawn from.
    """

    draft: Any = None
    num_draft_tokens: int | None = None
    num_steps: int = 3
    topk: int = 1
    score_temperature: float = 1.0
    draft_sample_method: str = "greedy"

    def __post_init__(self):
        super().__post_init__()
        if self.draft_sample_method not in ("greedy", "probabilistic"):
            raise ValueError(
                f"draft_sample_method: expected 'greedy' or 'probabilistic', got {self.draft_sample_method!r}"
            )
        if self.draws and self.topk != 1:
            raise ValueError(f"topk: drafts that are drawn ('probabilistic') are chains: it must be 1, not {self.topk}")
        object.__setattr__(self, "num_draft_tokens", self.schedule.nodes)

    @property
    def draws(self) -> bool:
        """See `Algorithm.draws`."""
        return self.draft_sample_method == "probabilistic"

    @property
    def schedule(self) -> Schedule | StaticTree:
        """How the draft's trees grow; ValueError where the options contradict each other."""
        return Schedule(self.num_steps, self.topk, self.num_draft_tokens, self.score_temperature)
