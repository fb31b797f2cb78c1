"""PARD (arXiv:2504.18583): a draft model that drafts all tokens of a chain in one forward, at masks behind the text.

The row of the root drafts the first token, the rows of num_steps - 1 masks the others. What the masks leave in the
cache is of no use: tokens that were accepted in their places are fed again, before the next root.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..drafting import Drafter, DraftPlan
from ..graph import ModelGraph
from ..runtime.state import State
from .draft_model import DraftModel, ModelDrafter, capture_draft, open_draft, vocabulary
from .options import ParallelOptions

MASKS = ("pard_token", "ptd_token_id")
"""Names of the mask's id in published configs, as vLLM looks for them."""


class Pard(DraftModel):
    """Drafts of one model, all in one forward."""

    def __init__(
        self, draft: PreTrainedModel, graph: ModelGraph, options: ParallelOptions, vocab_size: int, mask: int
    ):  # fmt: skip
        """graph: of `draft`. vocab_size: of the target. mask: the token that masks are."""
        super().__init__(draft, graph, options, vocab_size)
        self.mask, self.places, self.refill = mask, options.places(draft.device), options.path - 1
        fed = self.refill + options.num_steps
        self.plan = DraftPlan(options.nodes, lookahead_slots=fed, draws=options.draws)

    def drafter(self, batch: int, slots: int) -> Drafter:
        return PardDrafter(self, batch, slots)

    def explain(self) -> list[str]:
        line = f"PARD: {self.schedule.num_steps} tokens are drafted in one forward, masked by token {self.mask}"
        return [line, *super().explain()]


class PardDrafter(ModelDrafter):
    """Feeds the draft model what was accepted, the root and the masks."""

    def __init__(self, algorithm: Pard, batch: int, slots: int):
        super().__init__(algorithm, batch, slots)
        self.places, self.mask = algorithm.places, algorithm.mask
        self.wanted = algorithm.schedule.num_steps

    def propose(self, state: State, max_kv_len: int) -> None:
        lengths = state.lengths.clone()
        begin = (lengths - self.refill).clamp(min=0)
        slots = begin[:, None] + torch.arange(self.refill + self.wanted, device=begin.device)
        ids = state.tokens.gather(1, slots.clamp(max=state.capacity - 1)).clamp(max=self.graph.vocab_size - 1)
        ids = torch.where(slots <= lengths[:, None], ids, self.mask)
        chain = (torch.ones_like(slots) << torch.arange(1, slots.shape[1] + 1, device=begin.device)) - 1
        rows = (lengths - begin)[:, None] + torch.arange(self.wanted, device=begin.device)
        logits: Tensor = self._run(ids, slots, begin, chain, max_kv_len, rows)
        self.places.propose(state, logits)


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
    draft = open_draft(model, options, "pard")
    mask = read_mask(draft)
    return Pard(draft, capture_draft(model, draft, options), options, vocabulary(model), mask)
