"""PARD (arXiv:2504.18583): a draft model that drafts all tokens of a chain in one forward, at masks after the text.

The row of the root drafts the first token, the rows of num_steps - 1 masks the others. The masks' keys and values are
of no use: tokens that were accepted in their slots are fed again, before the next root.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafting import Drafter, DraftPlan
from ..graph import ModelGraph
from ..runtime.state import State
from .draft_model import DraftModel, ModelDrafter, capture_draft, map_one, open_draft
from .options import ParallelOptions
from .vocab_mapping import VocabMapping

MASKS = ("pard_token", "ptd_token_id")
"""Names of the mask's id in published configs, as vLLM looks for them."""


class Pard(DraftModel):
    """Drafts of one model, all in one forward."""

    def __init__(
        self, draft: PreTrainedModel, graph: ModelGraph, options: ParallelOptions, mapping: VocabMapping, mask: int
    ):  # fmt: skip
        """graph: of `draft`. mapping: of its tokens and the target's. mask: the id of the masks."""
        super().__init__(draft, graph, options, mapping)
        self.mask, self.proposer, self.refill = mask, options.proposer(draft.device), options.path - 1
        fed = self.refill + options.num_steps
        self.plan = DraftPlan(options.nodes, lookahead_slots=fed, draws=options.draws)

    def drafter(self, batch: int, slots: int) -> Drafter:
        return PardDrafter(self, batch, slots)

    def explain(self) -> list[str]:
        line = f"PARD: {self.schedule.num_steps} tokens are drafted in one forward, masked by token {self.mask}"
        return [line, *super().explain()]


class PardDrafter(ModelDrafter):
    """Feeds accepted tokens, the root and the masks to the draft model."""

    def __init__(self, algorithm: Pard, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.proposer, self.mask = algorithm.proposer, algorithm.mask
        self.wanted = algorithm.schedule.num_steps

    def propose(self, state: State, max_kv_len: int) -> None:
        self.proposer.propose(state, self.output(state.tokens, state.lengths.clone(), max_kv_len))

    def output(self, tokens: Tensor, lengths: Tensor, max_kv_len: int) -> Tensor:
        """Logits [B, num_steps, V] of the drafts after the roots, which stand at `lengths` [B] in tokens [B, T].

        refill = 2, num_steps = 3 and a root r at slot 5 give the rows [t3, t4, r, mask, mask]; the last 3 draft.
        """
        begin = (lengths - self.refill).clamp(min=0)
        slots = begin[:, None] + torch.arange(self.refill + self.wanted, device=begin.device)
        ids = self.mapping.read(tokens.gather(1, slots.clamp(max=tokens.shape[1] - 1)))
        ids = torch.where(slots <= lengths[:, None], ids, self.mask)
        chain = (torch.ones_like(slots) << torch.arange(1, slots.shape[1] + 1, device=begin.device)) - 1
        rows = (lengths - begin)[:, None] + torch.arange(self.wanted, device=begin.device)
        return self._run(ids, slots, begin, chain, max_kv_len, rows)


def read_mask(draft: PreTrainedModel) -> int:
    """The id of the mask; ValueError if the config of `draft` has none, or one that it has no embedding for."""
    config, rows = draft.config, draft.get_input_embeddings().weight.shape[0]
    mask = next((getattr(config, name) for name in MASKS if getattr(config, name, None) is not None), None)
    if not isinstance(mask, int) or isinstance(mask, bool) or not 0 <= mask < rows:
        raise ValueError(
            f"draft: its config must have a {' or '.join(MASKS)} below {rows}, its embeddings, it has {mask!r}; a "
            "draft model without masks goes with algo='draft_model'"
        )
    return mask


def build(model: PreTrainedModel, options: ParallelOptions) -> Pard:
    """The algorithm for `options.draft`: a model, a path or a name on the hub."""
    draft = open_draft(model, options)
    mask = read_mask(draft)
    graph = capture_draft(model, draft, options)
    return Pard(draft, graph, options, map_one(model, draft, graph), mask)
