"""DFlash drafts (arXiv:2602.06036, section 4): whole blocks, begun at random places of a text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..drafters.checkpoints.target import Target
from ..drafters.modules.dflash import DFlashDraft
from ..drafters.modules.layers import LayerKnobs
from ..passes.tap_hidden_states import FINAL
from .attention import Causal
from .data import Batch, move
from .features import Features
from .loss import blocks, soft_cross_entropy
from .options import TrainingOptions
from .sizes import draft_config, published_config
from .trainer import Trainer, as_master, seeded

ANCHORS, LOOKED_AT = 512, 128
"""Blocks begun in a sequence at most, in training and when acceptance is measured."""
SLOTS = 1 << 16
"""Slots of the blocks of a step at most."""
STATES = 5
"""States of the target that a draft reads."""
SCORES = 1 << 27
"""Scores of attention that are held at once."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of T slots, n of each of B sequences.

    anchors [B, n] int64: the place of the first token of each. counted [B, n, T] bool: the slots whose token is
    supervised; all False in blocks that are only there because other sequences have more. places [B, n, T]: of the
    state that decides each slot's token, flat in B * L; 0 where not counted. slots [R]: those that are counted, flat in
    B * n * T. All on the draft's device.
    """

    anchors: Tensor
    counted: Tensor
    places: Tensor
    slots: Tensor


class DFlashTrainer(Trainer):
    """Five layers (or others) over five of the target's states. The mask is the token that the data needs least."""

    name = "dflash"
    takes = frozenset(
        {
            "num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "taps",
            "block_size",
        }
    )  # fmt: skip
    learning_rate = (2.4, 2e-3)

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.target, self.device = target, target.embedding.device
        self.config = draft_config(target, options, layers=5)
        self.block_size = options.block_size or 16
        taps = default_taps(target.num_layers) if options.taps is None else options.taps
        check_taps(taps, target.num_layers)
        self.mask = len(counts) - 1 - int(counts.flip(0).argmin())
        knobs = LayerKnobs(num_layers=self.config.num_hidden_layers, qk_norm=True)
        embedding, output = target.embedding.detach(), target.head_weight.detach()
        with seeded(options.seed):
            draft = DFlashDraft(self.config, embedding, output, taps, self.block_size, self.mask, knobs)
        self.module = as_master(draft, embedding).eval()
        self.taps, self.steps = (*taps, FINAL), self.block_size - 1

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """Cross entropy with the target's probabilities, of slot k weighted with exp(-(k - 1) / gamma).

        A weighted mean over the slots with a supervised token. The paper has the text's own tokens in place of the
        target's probabilities; its authors found no difference.
        """
        most = min(ANCHORS, max(1, SLOTS // (len(batch.ids) * self.block_size)))
        chosen = self.choose(batch, most, torch.Generator().manual_seed(generator.initial_seed()))
        normed = self.draft(batch, features, chosen).flatten(0, 2).index_select(0, chosen.slots)
        gamma = 7.0 if self.block_size >= 16 else self.block_size / 2
        weights = torch.exp((1 - chosen.slots % self.block_size) / gamma)
        place, final = chosen.places.flatten()[chosen.slots], features.states[-1].flatten(0, 1)
        weight = self.module.head_weight
        return soft_cross_entropy(
            normed,
            weight,
            lambda rows: F.linear(final[place[rows]], weight),
            weights / weights.sum().clamp(min=1e-9),
        )

    @torch.no_grad()
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        """See `Trainer.accepted`; of blocks at places that depend on the batch alone."""
        chosen = self.choose(batch, LOOKED_AT, torch.Generator().manual_seed(0))
        normed, weight = self.draft(batch, features, chosen).flatten(0, 2), self.module.head_weight
        drafts = torch.cat([F.linear(normed[here], weight).argmax(-1) for here in blocks(len(normed), len(weight))])
        right = drafts.view_as(chosen.places) == features.choices.flatten()[chosen.places]
        reached = alive = chosen.counted[:, :, 1]
        for slot in range(1, steps + 1):
            reached = reached & chosen.counted[:, :, slot]
            alive = alive & reached & right[:, :, slot]
            yield int(reached.sum()), int(alive.sum())

    def choose(self, batch: Batch, most: int, generator: torch.Generator) -> Blocks:
        """Up to `most` blocks of each sequence, at random among the places where the first token and the next are
        supervised."""
        length, wanted = batch.wanted.shape[1], batch.wanted
        possible = F.pad(wanted[:, :-1], (1, 0)) & wanted
        count = max(1, min(most, int(possible.sum(1).max())))
        score, anchors = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1.0).topk(count)
        before = anchors[:, :, None] + torch.arange(self.block_size) - 1  # the places that decide the slots' tokens
        inside = (before < length) & (torch.arange(self.block_size) > 0) & (score >= 0)[:, :, None]
        before = torch.where(inside, before, 0)
        counted = inside & wanted.gather(1, before.flatten(1)).view_as(before)
        places = torch.where(counted, before + torch.arange(len(wanted))[:, None, None] * length, 0)
        slots = counted.flatten().nonzero()[:, 0]
        return Blocks(*(move(part, self.device) for part in (anchors, counted, places, slots)))

    def draft(self, batch: Batch, features: Features, chosen: Blocks) -> Tensor:
        """What the output matrix multiplies, [B, n, T, h], for each slot."""
        draft, (rows, count) = self.module, chosen.anchors.shape
        first = move(batch.ids, self.device).gather(1, chosen.anchors)[:, :, None]
        ids = F.pad(first, (0, self.block_size - 1), value=self.mask).flatten(0, 1)
        positions = (chosen.anchors[:, :, None] + torch.arange(self.block_size, device=self.device)).flatten(0, 1)
        x = F.embedding(ids, draft.embedding)
        rope = draft.rotary_emb(x, positions)
        with BlockAttention(draft, draft.project(features.states[:-1]), chosen.anchors):
            for block in draft.blocks:
                x = block(x, rope)
        return draft.norm(x).unflatten(0, (rows, count))

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """z-lab's names; embedding and output matrix are the target's."""
        tensors = {name.replace("blocks.", "layers."): value for name, value in self.module.state_dict().items()}
        config = published_config(
            self.config, self.target, "DFlashDraftModel",
            model_type="qwen3",
            num_target_layers=self.target.num_layers,
            block_size=self.block_size,
            layer_types=["full_attention"] * self.config.num_hidden_layers,
            dflash_config={"target_layer_ids": [tap - 1 for tap in self.module.taps], "mask_token_id": self.mask},
        )  # fmt: skip
        return config, tensors


class BlockAttention(Causal):
    """Each slot of a block sees its whole block, and of its sequence's context what lies before the block's anchor.

    context [B, L, h], of which each layer makes keys and values; anchors [B, n]. Blocks come as rows, [B * n, ...].
    """

    def __init__(self, draft: DFlashDraft, context: Tensor, anchors: Tensor):
        super().__init__()
        self.draft, self.context, self.anchors = draft, context, anchors
        positions = torch.arange(context.shape[1], device=context.device)[None]
        self.rope = draft.rotary_emb(context, positions)

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`."""
        own, rows = self.draft.blocks[layer].self_attn, self.anchors.shape
        keys, values = (part(self.context).unflatten(2, (-1, own.head_dim)) for part in (own.k_proj, own.v_proj))
        keys = own.k_norm(keys).transpose(1, 2)
        keys, values = apply_rotary_pos_emb(keys, keys, *self.rope)[1], values.transpose(1, 2)
        groups = q.shape[1] // k.shape[1]
        k, v, keys, values = (heads.repeat_interleave(groups, dim=1) for heads in (k, v, keys, values))
        q, k, v = (heads.unflatten(0, rows).transpose(1, 2) for heads in (q, k, v))
        size = max(1, SCORES // (q[:, :, :1, :, 0].numel() * (keys.shape[2] + k.shape[3])))
        parts = [
            checkpoint(
                block_attention, *(heads[:, :, n : n + size] for heads in (q, k, v)), keys, values,
                self.anchors[:, n : n + size], scale, use_reentrant=False,
            )
            for n in range(0, rows[1], size)
        ]  # fmt: skip
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(0, 1).transpose(1, 2)


def block_attention(
    q: Tensor, k: Tensor, v: Tensor, context_keys: Tensor, context_values: Tensor, anchors: Tensor, scale: float
) -> Tensor:
    """softmax over the context before each anchor and the block itself.

    q, k, v [B, H, n, T, D], context_keys and context_values [B, H, L, D], anchors [B, n] -> [B, H, n, T, D].
    """
    shape, length = q.shape[2:4], context_keys.shape[2]
    outside = (q.flatten(2, 3) @ context_keys.mT).unflatten(2, shape)
    hidden = torch.arange(length, device=q.device) >= anchors[:, None, :, None, None]
    scores = torch.cat([outside.masked_fill(hidden, -math.inf), q @ k.mT], dim=-1)
    shares = (scores.float() * scale if scores.dtype.itemsize == 2 else scores * scale).softmax(-1).to(scores.dtype)
    out = (shares[..., :length].flatten(2, 3) @ context_values).unflatten(2, shape)
    return out + shares[..., length:] @ v


def default_taps(num_layers: int) -> tuple[int, ...]:
    """States that lie evenly between the second layer and the last but two, or in small models the first and last."""
    if num_layers >= STATES + 3:
        return tuple(2 + round(i * (num_layers - 4) / (STATES - 1)) for i in range(STATES))
    count = min(STATES, num_layers)
    return tuple(1 + round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))


def check_taps(taps: tuple[int, ...], num_layers: int) -> None:
    """ValueError if the target has no such states."""
    if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= num_layers:
        raise ValueError(
            f"taps: expected states from 0 to {num_layers}, ascending, got {', '.join(map(str, taps)) or 'none'}"
        )
