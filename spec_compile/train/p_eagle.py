"""P-EAGLE heads (arXiv:2602.01469): EAGLE-3 whose tokens after the first are drafted at masks, in the same forward.

From random places of a text a chain of masks continues it (SpecForge: specforge/core/peagle.py; speculators:
models/peagle). The embedding is the target's; there it may be trained, too.
"""

import torch
from torch import Tensor

from ..drafters.checkpoints.target import Target
from ..drafters.modules.eagle import ParallelEagle3Head
from .blocks import BlockAttention, Blocks, BlockTrainer
from .data import Batch
from .dflash import rarest_token
from .eagle3 import can_draft, new_head, published_head
from .features import Features
from .options import LAYER_OPTIONS, TrainingOptions
from .sizes import draft_config

KEPT, LEAST = 0.7, 0.2
"""The weight of depth d is KEPT^d, at least LEAST: the share of its rows that published trainers keep in memory
(``down_sample_ratio``, ``down_sample_ratio_min``). Here fewer chains are drawn instead, each with all depths."""


class PEagleTrainer(BlockTrainer):
    """Four layers over three of the target's states. A block's slot d drafts the token d + 1 after the anchor."""

    name = "p_eagle"
    takes = LAYER_OPTIONS | {"draft_vocab_size", "taps", "num_depths", "per_position_loss_weight"}
    first = 0
    module: ParallelEagle3Head

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.target, self.device = target, target.embedding.device
        self.config = draft_config(target, options, layers=4)
        self.module = new_head(target, options, counts, self.config, ParallelEagle3Head).eval()
        self.module.mask_token_id = rarest_token(counts)
        self.block_size = self.steps = options.num_depths or 8
        self.position_weight = options.per_position_loss_weight or self.position_weight
        self.taps, self.kept = self.module.taps, self.module.draft_to_target
        self.learns_from_choices = len(self.kept) < target.vocab_size

    def tokens(self, batch: Batch, drawn: Blocks) -> tuple[Tensor, Tensor]:
        """See `BlockTrainer`. A row of the head's layers has L - 1 slots of the text and then n * (T - 1) masks."""
        rows, masks, length = len(batch.ids), self.block_size - 1, batch.ids.shape[1] - 1
        # An anchor's token is read by the slot before it, with that slot's state. Masks come at the next places.
        places = (drawn.anchors.clamp(min=1)[:, :, None] + torch.arange(masks)).flatten(1)
        ids = torch.cat([batch.ids[:, 1:], torch.full_like(places, self.module.mask_token_id)], dim=1)
        return ids, torch.cat([torch.arange(length).expand(rows, -1), places], dim=1)

    def states(self, ids: Tensor, positions: Tensor, anchors: Tensor, states: list[Tensor]) -> Tensor:
        head, masks, length = self.module, self.block_size - 1, states[0].shape[1] - 1
        text = head.project([state[:, :-1] for state in states])
        mask = head.project(list(head.mask_hidden.to(text.dtype).chunk(len(self.taps), dim=-1)))
        count = ids.shape[1] - length
        with ParallelAttention(anchors, length, masks):
            _, normed = head(ids, positions, torch.cat([text, mask.to(text.dtype).expand(len(ids), count, -1)], dim=1))
        last = (anchors - 1).clamp(min=0)
        first = normed[:, :length].gather(1, last[:, :, None].expand(-1, -1, normed.shape[2]))
        return torch.cat([first[:, :, None], normed[:, length:].unflatten(1, (anchors.shape[1], masks))], dim=2)

    def teacher_logits(self, features: Features):
        return features.logits

    def slot_weights(self) -> Tensor:
        return (KEPT ** torch.arange(self.block_size)).clamp(min=LEAST)

    def row_weights(self, slots: Tensor, teachers: Tensor, features: Features) -> Tensor:
        """See `BlockTrainer`. A row has none if the target's choice is not among the kept tokens."""
        weights = super().row_weights(slots, teachers, features)
        return weights * can_draft(self.kept, features, teachers) if self.learns_from_choices else weights

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """EAGLE-3's files, with the mask's token as vLLM reads it (``ptd_token_id``)."""
        more = {"ptd_token_id": self.module.mask_token_id, "num_depths": self.block_size, "parallel_drafting": True}
        return published_head(self.module, self.config, self.target, **more)


class ParallelAttention(BlockAttention):
    """Attention of a text and of chains of masks: a mask sees the text up to its anchor, and the masks before it."""

    def __init__(self, anchors: Tensor, length: int, masks: int):
        """anchors: see `Blocks`. length: slots of the text. masks: of each chain."""
        super().__init__(anchors, masks)
        self.length, self.shape = length, (anchors.shape[1], masks)

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`. q [B, H, L + n * T, D]; k, v [B, Hkv, L + n * T, D]."""
        text, chains = zip(*((heads[:, :, : self.length], heads[:, :, self.length :]) for heads in (q, k, v)))
        out = super().attend(*text, sinks, scale, window, softcap, layer)
        if not self.size:
            return out
        chains = [heads.unflatten(2, self.shape) for heads in chains]
        return torch.cat([out, self.attend_blocks(*chains, *text[1:], scale, causal=True)], dim=1)
