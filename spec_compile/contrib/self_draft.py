"""Drafts by the target itself, which attends to a part of its cache: the first tokens of the text and the last ones
(MagicDec, arXiv:2408.11049; TriForce, arXiv:2404.11912).

A draft step is a round over one node, with a table that leaves out the pages between. Keys are cached after their
rotation, so a slot is read at its true position wherever its page stands in the table. A step writes to the slots that
the next round verifies: no slot that a draft has written is committed before the whole model has written it again.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import PAGE
from ..capture.admit import Inventory
from ..compile.part import PartCompiler
from ..compile.regions import compile_regions
from ..drafters import ALGORITHMS, Entry
from ..drafters.options import LARGEST, UnionOptions
from ..drafters.trees.grow import Schedule
from ..drafters.trees.propose import propose_grown
from ..drafting import Algorithm, Drafter, DraftPlan
from ..errors import UnsupportedModelError, check_int
from ..graph import ModelGraph
from ..runtime.state import State


@dataclass(frozen=True)
class SelfOptions(UnionOptions):
    """Options of the target's own drafts.

    num_draft_tokens: nodes verified, the root included (default: num_steps + 1).
    num_steps: tokens drafted, each by a step of the target.
    sink_tokens: first tokens of the text that these steps see, rounded up to pages of 64.
    window: last tokens that they see, rounded up likewise, the room in the last page included.
    """

    num_draft_tokens: int | None = None
    num_steps: int = 2
    sink_tokens: int = 64
    window: int = 1024

    def __post_init__(self):
        super().__post_init__()
        check_int("sink_tokens", self.sink_tokens, 1, LARGEST, "tokens of the text's beginning")
        check_int("window", self.window, 1, LARGEST, "tokens of the text's end")
        _ = self.schedule  # raises if the options contradict each other

    @property
    def schedule(self) -> Schedule:
        """The chain of all drafts."""
        return Schedule(self.num_steps, 1, self.draft_nodes(self.num_steps + 1))


class SelfDraft(Algorithm):
    """Drafts of the model called `name`."""

    target: ModelGraph

    def __init__(self, name: str, options: SelfOptions):
        self.name, self.options, self.schedule = name, options, options.schedule
        steps = self.schedule.num_steps
        self.plan = DraftPlan(self.schedule.nodes, lookahead_slots=steps, levels=steps, paged=True)

    def take(self, target: ModelGraph) -> None:
        whole = all(
            layer.window is layer.chunk is None and not (layer.slopes or layer.indexed) for layer in target.layers
        )
        if target.recurrences or not whole:
            raise UnsupportedModelError(
                f"algo='self': {self.name} has layers that do not attend to all tokens, whose drafts would not be its "
                "own over a part of the text; pass algo='ngram', or a head"
            )
        self.target = target

    def drafter(self, batch: int, slots: int) -> Drafter:
        return SelfDrafter(self)

    def explain(self) -> list[str]:
        options = self.options
        return [f"the model drafts for itself over the first {options.sink_tokens} and last {options.window} tokens"]


class SelfDrafter(Drafter):
    """Runs rounds over one node and a part of the cache.

    sinks, window: pages that are seen of the beginning and of the end, the page of the root included.
    """

    fuses = False  # its layers are compiled once, not once a step

    def __init__(self, algorithm: SelfDraft):
        super().__init__()
        self.target, self.schedule = algorithm.target, algorithm.schedule
        self.sinks, self.window = (-(-n // PAGE) for n in (algorithm.options.sink_tokens, algorithm.options.window))
        self.columns = self.sinks + self.window + 1  # drafts may go on in the page after the root's
        self.compiler: PartCompiler | None = None
        self.model: Callable[..., tuple] = self.target.gm.forward

    def compile(self, compiler: PartCompiler) -> None:
        if self.compiler is not compiler:
            self.compiler, self.model = compiler, compile_regions(self.target, compiler, "draft").forward

    def view(self, table: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The pages that are seen [B, n] int32 of a table, and the committed slots in them [B].

        With 1 page of sinks and 3 of the window, a row of 700 slots, whose root is in page 10, sees the columns 0, 8,
        9, 10 and 11. They leave out 7 * 64 slots, so 252 are seen. A row of 200 slots sees all: 0, 1, 2, 3, 4.
        """
        first = (lengths // PAGE - self.window + 1).clamp(min=self.sinks)  # column of the window
        number = torch.arange(self.columns, device=lengths.device)
        column = torch.where(number < self.sinks, number, number - self.sinks + first[:, None])
        return table.gather(1, column.clamp(max=table.shape[1] - 1)), lengths - (first - self.sinks) * PAGE

    def propose(self, state: State, max_kv_len: int, nodes: int | None = None) -> None:
        table, begin = self.view(state.kv.table, state.lengths)
        cache, slots = [*state.cache[:-1], table], min(max_kv_len, self.columns * PAGE)

        def step(tokens, hidden, ancestors, depth, offset, wanted) -> tuple[Tensor, Tensor]:
            """See `trees.grow.Step`; the root has depth 0."""
            ids = tokens.clamp(max=self.target.embedded - 1).contiguous()
            positions = state.positions(depth).contiguous()
            return hidden, self.model(ids, positions, begin + depth, torch.ones_like(ids), cache, slots)[0]

        root = state.tree_tokens[:, :1]
        _, logits = step(root, None, None, root.new_zeros(1), 0, 1)
        propose_grown(state, self.schedule, False, logits[:, 0], logits[:, 0, :1], step, None, nodes)


def build(target: Inventory, options: SelfOptions) -> SelfDraft:
    """The algorithm for a model in one process."""
    if options.ranks.size > 1:
        raise ValueError("tensor_parallel: algo='self' drafts in one process; leave it out, or pass another algorithm")
    return SelfDraft(target.name, options)


ALGORITHMS["self"] = Entry(SelfOptions, build)
