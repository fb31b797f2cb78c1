"""Multi-token prediction by several modules, each of which drafts one token (DeepSeek-V3, arXiv:2412.19437, 2.2).

Module k, from 0, reads at slot t the output of module k - 1 at slot t, or the target's state if k is 0, and the token
x_{t + k + 1}; it predicts x_{t + k + 2}. After n committed slots the root is x_n. So k slots of module k need tokens
that are only drafted yet, and its cache has k committed slots less than the target's: with n = 5, slots 0 to 4 of
module 0, and slots 0 to 3 of module 1, whose slot 4 is paired with each draft of depth 1.

A node of depth d lies at slot n - k + d - 1 of module k. So a level of a tree runs its module over all nodes above.
"""

import torch
from torch import Tensor, nn

from .. import passes
from ..cache import Cache
from ..drafters.heads import KINDS, HeadAlgorithm, HeadDrafter, HeadOptions
from ..drafters.modules.eagle import Head
from ..drafters.modules.mtp import MtpHead
from ..drafters.shared_draft import DraftHead, keep_row
from ..drafters.trees.grow import Step
from ..kernels.ops import gather_rows
from ..runtime.state import State


class MtpModules(HeadAlgorithm):
    """Drafts of a head with further modules, as many of them as its trees have levels.

    ValueError if the trees have more levels than there are modules.
    """

    checked = 1  # no module reads its own output

    @classmethod
    def fits(cls, head: Head, options: HeadOptions) -> bool:
        """True if a head has further modules that trees with these options use."""
        return bool(getattr(head, "further", ())) and options.schedule.num_steps > 1

    def __init__(self, head: MtpHead, options: HeadOptions):
        super().__init__(head, options)
        levels, modules = self.schedule.num_steps, 1 + len(head.further)
        if levels > modules:
            raise ValueError(
                f"num_steps: this checkpoint has {modules} modules, each of which drafts one token, so trees have at "
                f"most {modules} levels, not {levels}; lower num_steps"
            )
        if options.window is not None:
            raise ValueError("draft_window_size: it is for drafts of one module, not of several; leave it out")
        further = head.further[: levels - 1]
        captured = [self._capture(module, options) for module in further]
        self.further = [passes.run(graph, self.settings, self.weights.pipeline()) for graph in captured]
        self.further_logits = [
            self.logits
            if module.head_weight is head.head_weight
            else DraftHead(module.head_weight, self.settings.ranks, self.weights)
            for module in further
        ]

    @property
    def ahead(self) -> int:
        return 1 + len(self.further)

    @property
    def token_bytes(self) -> int:
        return super().token_bytes + sum(graph.token_bytes for graph in self.further)

    def drafter(self, batch: int, slots: int) -> "MtpModulesDrafter":
        return MtpModulesDrafter(self, batch, slots)


class MtpModulesDrafter(HeadDrafter):
    """Runs all modules over committed tokens, and one module over each level of the tree that it grows.

    carried [B, K - 1, H]: of K modules; entry k - 1 is the output of module k - 1 at the first slot that is not
        committed in module k.
    origin [B] int64: one more than the first slot that the modules run over, because the slots before it have been
        copied; 0 in a row that has not begun.
    """

    def __init__(self, algorithm: MtpModules, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.blocks = nn.ModuleList(graph.gm for graph in algorithm.further)
        self.further_logits = nn.ModuleList(algorithm.further_logits)
        self.further_caches = nn.ModuleList(Cache(graph, batch, slots) for graph in algorithm.further)
        carried = self.hidden.new_zeros(batch, len(self.blocks), self.hidden.shape[1])
        self.register_buffer("carried", carried, persistent=False)
        origin = torch.zeros(batch, dtype=torch.int64, device=self.hidden.device)
        self.register_buffer("origin", origin, persistent=False)

    def start(self, state: State, prompts: list[list[int]], references: list[Tensor], share_text: bool = True) -> None:
        super().start(state, prompts, references, share_text)
        self.carried.zero_()
        self.origin.copy_(state.lengths + 1)

    def prefill(self, state: State, ids: Tensor, positions: Tensor, features: list[Tensor], max_kv_len: int) -> None:
        begin = state.lengths + 1
        self.origin.copy_(torch.where(self.origin == 0, begin, torch.minimum(self.origin, begin)))
        super().prefill(state, ids, positions, features, max_kv_len)

    def slots_of(self, number: int, slots: Tensor) -> Tensor:
        """The slots [B] of module `number` that are committed if the target has committed `slots` [B].

        With slots = 70, the second module (number = 1) has 69 of them; if 70 were copied, it has them all.
        """
        return torch.maximum(slots - number, self.origin - 1).clamp(min=0)

    def _follow(self, state: State, begin: Tensor, gained: Tensor, recycled: Tensor, max_kv_len: int) -> None:
        """Each module runs over as many slots as the first, which lie `number` slots earlier.

        With begin = 5, gained = 2 and number = 1, slots 4 and 5 are committed: the carried output is that at slot 4,
        `recycled` has those at slots 5 and 6, and the one at slot 6 is carried next. The first slots that it runs over
        have nothing to carry: with begin = 0 the slots and the outputs begin at 0.
        """
        number_of_row = torch.arange(recycled.shape[1], device=begin.device)
        first = begin
        for number, (block, cache) in enumerate(zip(self.blocks, self.further_caches), 1):
            carried, before = self.carried[:, number - 1], first
            first = self.slots_of(number, begin)
            shifted = torch.cat([carried.clone()[:, None], recycled[:, :-1]], dim=1)
            states = torch.where((first < before)[:, None, None], shifted, recycled)
            places = first[:, None] + number_of_row
            ids = state.tokens.gather(1, (places + number + 1).clamp(max=state.capacity - 1))
            row = begin + gained - number - before  # guard: seam-of-rounds
            keep_row(carried, recycled, row, (gained > 0) & (row >= 0))
            recycled, _ = block(ids.clamp(min=0), places, states, first, None, cache.argument, max_kv_len)

    def _steps(self, lengths: Tensor, max_kv_len: int) -> Step:
        return ModuleSteps(self, lengths, max_kv_len)


class ModuleSteps:
    """The forwards that grow a tree, the k-th of which is one of module k over all nodes of depth 1 to k.

    tokens, out: the nodes of the last forward [B, R], and its output [B, R, H].
    """

    def __init__(self, drafter: MtpModulesDrafter, lengths: Tensor, max_kv_len: int):
        self.drafter, self.lengths, self.max_kv_len, self.number = drafter, lengths, max_kv_len, 0
        self.tokens = lengths.new_empty(lengths.shape[0], 0)
        self.out = drafter.hidden.new_empty(lengths.shape[0], 0, drafter.hidden.shape[1])

    def __call__(
        self, tokens: Tensor, hidden: Tensor, ancestors: Tensor, depth: Tensor, offset: int, wanted: int
    ) -> tuple[Tensor, Tensor]:
        """See `trees.grow.Step`. The states come from this module, not from `hidden`."""
        self.number += 1
        drafter, number, given = self.drafter, self.number, tokens.shape[1]
        if offset:  # a chain, whose nodes were fed to the module before, not to this one
            tokens = torch.cat([self.tokens, tokens], dim=1)
            row = torch.arange(tokens.shape[1], device=tokens.device)
            ancestors, depth = ((torch.full_like(row, 2) << row) - 1).expand_as(tokens), row + 1
        above = torch.cat([drafter.carried[:, number - 1 : number].clone(), self.out], dim=1)
        states = gather_rows(above, parents_of(ancestors))
        slots = drafter.slots_of(number, self.lengths)
        places = slots[:, None] + depth - 1
        block, cache = drafter.blocks[number - 1], drafter.further_caches[number - 1].argument
        out, normed = block(tokens, places, states, slots, ancestors, cache, self.max_kv_len)
        self.tokens, self.out = tokens, out
        return out[:, -given:], drafter.further_logits[number - 1](normed[:, -wanted:])


def parents_of(ancestors: Tensor) -> Tensor:
    """One more than the row of each node's parent [B, R] int64; 0 for a child of the root.

    ancestors [B, R] int64: bit j of row i is set if i sees row j, itself included; parents come first. The ancestors
    [0b001, 0b010, 0b110] give [0, 0, 2].
    """
    row = torch.arange(ancestors.shape[1], device=ancestors.device)
    sees = (ancestors[:, :, None] >> row) & 1
    return torch.where(row < row[:, None], sees * (row + 1), 0).amax(dim=2)


KINDS.append(MtpModules)
