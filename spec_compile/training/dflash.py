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

TRAINED_BLOCKS, MEASURED_BLOCKS = 512, 128
"""Blocks of a sequence at most, in training and when acceptance is measured."""
SLOTS = 1 << 16
"""Slots of all blocks of a training step at most."""
STATES = 5
"""States of the target that a draft reads by default."""
SCORES = 1 << 27
"""Attention scores in memory at a time."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of T slots, n of each of B sequences.

    anchors [B, n] int64: the position of each block's first token. counted [B, n, T] bool: the slots whose token is
    supervised. A block that only fills a row, because other sequences have more of them, counts none. teachers
    [B, n, T] int64: the index among B * L positions whose state predicts the slot's token; 0 where it is not counted.
    slots [R] int64: the counted ones' indices among B * n * T slots. All are on the draft's device.
    """

    anchors: Tensor
    counted: Tensor
    teachers: Tensor
    slots: Tensor


class DFlashTrainer(Trainer):
    """Five layers over five of the target's states, unless options say otherwise.

    The mask, which fills a block's slots after the first, is the token that is supervised least often.
    """

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
        """Cross entropy with the target's probabilities, a mean over the counted slots with weights.

        Slot k weighs exp(-(k - 1) / gamma), because a draft's later tokens only matter if the earlier are accepted. The
        paper learns from the text's tokens where this takes the target's probabilities; its authors saw no difference.
        """
        most = min(TRAINED_BLOCKS, max(1, SLOTS // (len(batch.ids) * self.block_size)))
        drawn = self.draw_blocks(batch, most, torch.Generator().manual_seed(generator.initial_seed()))
        normed = self.draft(batch, features, drawn).flatten(0, 2).index_select(0, drawn.slots)
        gamma = 7.0 if self.block_size >= 16 else self.block_size / 2
        weights = torch.exp((1 - drawn.slots % self.block_size) / gamma)
        # The last state is the one before the output matrix: its product is the teacher's logits, made row by row.
        teachers, final = drawn.teachers.flatten()[drawn.slots], features.states[-1].flatten(0, 1)
        weight = self.module.head_weight
        return soft_cross_entropy(
            normed,
            weight,
            lambda rows: F.linear(final[teachers[rows]], weight),
            weights / weights.sum().clamp(min=1e-9),
        )

    @torch.no_grad()
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        """See `Trainer.accepted`. The blocks depend on the batch alone, so that measurements can be compared."""
        drawn = self.draw_blocks(batch, MEASURED_BLOCKS, torch.Generator().manual_seed(0))
        normed, weight = self.draft(batch, features, drawn).flatten(0, 2), self.module.head_weight
        drafts = torch.cat([F.linear(normed[rows], weight).argmax(-1) for rows in blocks(len(normed), len(weight))])
        right = drafts.view_as(drawn.teachers) == features.choices.flatten()[drawn.teachers]
        reached = alive = drawn.counted[:, :, 1]
        for slot in range(1, steps + 1):
            reached = reached & drawn.counted[:, :, slot]
            alive = alive & reached & right[:, :, slot]
            yield int(reached.sum()), int(alive.sum())

    def draw_blocks(self, batch: Batch, most: int, generator: torch.Generator) -> Blocks:
        """Up to `most` blocks of each sequence, begun at random positions.

        A block begins where a token and the one after it are supervised. Everything is computed on the CPU, so that
        nothing waits for a GPU, and moved at the end.
        """
        length, next_supervised = batch.next_supervised.shape[1], batch.next_supervised
        possible = F.pad(next_supervised[:, :-1], (1, 0)) & next_supervised
        count = max(1, min(most, int(possible.sum(1).max())))
        score, anchors = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1.0).topk(count)
        # Slot k holds the token at anchor + k, which the state at the position before it predicts.
        before = anchors[:, :, None] + torch.arange(self.block_size) - 1
        inside = (before < length) & (torch.arange(self.block_size) > 0) & (score >= 0)[:, :, None]
        before = torch.where(inside, before, 0)
        counted = inside & next_supervised.gather(1, before.flatten(1)).view_as(before)
        teachers = torch.where(counted, before + torch.arange(len(next_supervised))[:, None, None] * length, 0)
        slots = counted.flatten().nonzero()[:, 0]
        return Blocks(*(move(part, self.device) for part in (anchors, counted, teachers, slots)))

    def draft(self, batch: Batch, features: Features, drawn: Blocks) -> Tensor:
        """The normed states of all slots, [B, n, T, h], which the output matrix multiplies."""
        draft, (rows, count) = self.module, drawn.anchors.shape
        first = move(batch.ids, self.device).gather(1, drawn.anchors)[:, :, None]
        ids = F.pad(first, (0, self.block_size - 1), value=self.mask).flatten(0, 1)
        positions = (drawn.anchors[:, :, None] + torch.arange(self.block_size, device=self.device)).flatten(0, 1)
        x = F.embedding(ids, draft.embedding)
        rope = draft.rotary_emb(x, positions)
        with BlockAttention(draft, draft.project(features.states[:-1]), drawn.anchors):
            for block in draft.blocks:
                x = block(x, rope)
        return draft.norm(x).unflatten(0, (rows, count))

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by z-lab's names. The embedding and the output matrix are the target's and not among them."""
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
    """Attention of DFlash's blocks: a slot sees every slot of its block, and the context before the block's anchor.

    context [B, L, h]: each layer makes keys and values of it. anchors [B, n] int64: positions. The queries, keys and
    values that a layer passes have a row for each block, [B * n, ...].
    """

    def __init__(self, draft: DFlashDraft, context: Tensor, anchors: Tensor):
        super().__init__()
        self.draft, self.context, self.anchors = draft, context, anchors
        positions = torch.arange(context.shape[1], device=context.device)[None]
        self.rope = draft.rotary_emb(context, positions)

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`."""
        module, rows = self.draft.blocks[layer].self_attn, self.anchors.shape
        # Keys and values of the context are made once a sequence, [B, Hkv, L, D], and shared by its n blocks.
        projections = module.k_proj, module.v_proj
        keys, values = (project(self.context).unflatten(2, (-1, module.head_dim)) for project in projections)
        keys = module.k_norm(keys).transpose(1, 2)
        keys, values = apply_rotary_pos_emb(keys, keys, *self.rope)[1], values.transpose(1, 2)
        groups = q.shape[1] // k.shape[1]
        k, v, keys, values = (heads.repeat_interleave(groups, dim=1) for heads in (k, v, keys, values))
        q, k, v = (heads.unflatten(0, rows).transpose(1, 2) for heads in (q, k, v))
        # A few blocks at a time, recomputed in the backward, because the scores of all would not fit in memory.
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
    """Attention with one softmax over the context before each anchor and the block itself.

    q, k, v [B, H, n, T, D], context_keys and context_values [B, H, L, D], anchors [B, n] -> [B, H, n, T, D].
    """
    shape, length = q.shape[2:4], context_keys.shape[2]
    context_scores = (q.flatten(2, 3) @ context_keys.mT).unflatten(2, shape)
    hidden = torch.arange(length, device=q.device) >= anchors[:, None, :, None, None]
    scores = torch.cat([context_scores.masked_fill(hidden, -math.inf), q @ k.mT], dim=-1)
    shares = (scores.float() * scale if scores.dtype.itemsize == 2 else scores * scale).softmax(-1).to(scores.dtype)
    out = (shares[..., :length].flatten(2, 3) @ context_values).unflatten(2, shape)
    return out + shares[..., length:] @ v


def default_taps(num_layers: int) -> tuple[int, ...]:
    """`STATES` taps, evenly from layer 2 to the last but two; in a small model from the first to the last layer."""
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
