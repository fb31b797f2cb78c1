"""P-EAGLE (arXiv:2602.01469): EAGLE-3 heads that draft all tokens of a chain in one forward, at masks.

The last committed slot drafts the first token. After it come num_steps - 1 masks: pairs of the mask's embedding and a
learned state, in the slots that the next accepted tokens are written to.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..drafting import Drafter, DraftPlan
from ..runtime.state import State
from .checkpoints.load import load_head
from .heads import HeadAlgorithm, HeadDrafter
from .modules.eagle import ParallelEagle3Head
from .options import ParallelOptions
from .self_check import best_reading


@dataclass(frozen=True)
class ParallelHeadOptions(ParallelOptions):
    """Options of P-EAGLE.

    rope_theta: base of the head's RoPE, if its config is known to be wrong.
    """

    rope_theta: float | None = None


class ParallelHeads(HeadAlgorithm):
    """Drafts of one `head`, all in one forward."""

    def __init__(self, head: ParallelEagle3Head, options: ParallelHeadOptions):
        super().__init__(head, options)
        self.proposer, self.longest = options.proposer(head.head_weight.device), options.path
        self.plan = DraftPlan(options.nodes, head.taps, self.schedule.fed, options.draws)
        self.mask = head.mask_state()

    def drafter(self, batch: int, slots: int) -> Drafter:
        return ParallelHeadDrafter(self, batch, slots)

    def refresh(self) -> None:
        super().refresh()
        self.mask.copy_(self.head.mask_state())


class ParallelHeadDrafter(HeadDrafter):
    """Runs a head over committed tokens, and once over the masks after them."""

    def __init__(self, algorithm: ParallelHeads, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.proposer, self.mask = algorithm.proposer, algorithm.mask

    def propose(self, state: State, max_kv_len: int) -> None:
        lengths, masks = state.lengths.clone(), self.schedule.num_steps - 1
        logits = self.logits(self.normed.clone())[:, None]
        if masks:
            positions = lengths[:, None] + torch.arange(masks, device=lengths.device)
            ids = torch.full_like(positions, self.head.mask_token_id)
            states = self.mask.expand(ids.shape[0], masks, -1).contiguous()
            _, normed = self.block(ids, positions, states, lengths, None, self.cache.tensors, max_kv_len)
            logits = torch.cat([logits, self.logits(normed)], dim=1)
        self.proposer.propose(state, logits, 0, self.head.draft_to_target)


def build(model: PreTrainedModel, options: ParallelHeadOptions) -> ParallelHeads:
    """The algorithm with the head that `options` names, in the reading that has most first drafts accepted."""
    head = load_head(options.draft, model, "p_eagle", rope_theta=options.rope_theta)
    return ParallelHeads(best_reading(model, head, options, drafts=1), options)
