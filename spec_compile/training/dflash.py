"""DFlash drafts (arXiv:2602.06036, section 4): whole blocks, begun at random places of a text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..drafters.checkpoints.target import Target
from ..drafters.modules.dflash import DFlashDraft
from ..drafters.modules.layers import LayerKnobs
from ..kernels.ops import masked_attention
from ..passes.tap_hidden_states import FINAL
from .attention import Causal
from .data import WIDTH, Batch, move
from .features import Features
from .loss import likeliest
from .options import LAYER_OPTIONS, TrainingOptions
from .sizes import check_taps, draft_config, published_config
from .trainer import Trainer, as_master, seeded

TRAINED_BLOCKS, MEASURED_BLOCKS = 512, 128
"""Blocks of a sequence at most, in training and when acceptance is measured."""
SLOTS = 1 << 16
"""Slots of all blocks of a training step at most."""
STATES = 5
"""States of the target that a draft reads by default."""
ROWS = 256
"""Slots of blocks that attend together; each attends to the context and to all of these slots, most of them masked."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of T slots, n of each of B sequences, on the CPU.

    anchors: [B, n] int64; the position of each block's first token, ascending
    counted: [B, n, T] bool; True for a slot whose token is supervised. Sequences with fewer blocks than others are
        filled up with blocks that have no such slot.
    teachers: [B, n, T] int64; the index among B * L positions whose state predicts the slot's token, 0 if not counted

    For L = 8, T = 4 and an anchor at 3 of the first sequence, slots 1 to 3 hold tokens 4 to 6, and their teachers are
    positions 3 to 5.
    """

    anchors: Tensor
    counted: Tensor
    teachers: Tensor

    def slots(self) -> tuple[Tensor, Tensor]:
        """The counted slots in the order of their teachers: (indices among B * n * T slots, teachers), int64 [R]."""
        slots = self.counted.flatten().nonzero()[:, 0]
        teachers, order = self.teachers.flatten()[slots].sort(stable=True)
        return slots[order], teachers


class DFlashTrainer(Trainer):
    """Five layers over five of the target's states, unless options name other numbers.

    The mask token, which fills a block's slots after the first, is the token that is supervised least often.
    """

    name = "dflash"
    takes = LAYER_OPTIONS | {"taps", "block_size"}
    learning_rate = (2.4, 2e-3)
    causal = False
    """True if a slot does not see later slots of its block."""

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
            causal = (self.causal,) * knobs.num_layers
            draft = DFlashDraft(self.config, embedding, output, taps, self.block_size, self.mask, knobs, causal=causal)
        self.module = as_master(draft, embedding).eval()
        self.taps, self.steps = (*taps, FINAL), self.block_size - 1

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """Cross entropy with the target's probabilities, a mean over the counted slots with weights.

        The paper learns from the text's tokens instead of the target's probabilities; its authors saw no difference.
        """
        most = min(TRAINED_BLOCKS, max(1, SLOTS // (len(batch.ids) * self.block_size)))
        drawn = self.draw_blocks(batch, most, torch.Generator().manual_seed(generator.initial_seed()))
        slots, teachers = drawn.slots()
        weights = self.slot_weights()[slots % self.block_size]
        normed = self.draft(batch, features, drawn).flatten(0, 2).index_select(0, move(slots, self.device))
        weights = move(weights / weights.sum().clamp(min=1e-9), self.device)
        return self.distillation_loss(normed, teachers, features.states[-1], weights)  # the last tap is FINAL

    def slot_weights(self) -> Tensor:
        """The weights of a block's slots in the loss, [T].

        Slot k has exp(-(k - 1) / gamma), because a draft's later tokens only matter if the earlier are accepted.
        """
        gamma = 7.0 if self.block_size >= 16 else self.block_size / 2
        return torch.exp((1 - torch.arange(self.block_size)) / gamma)

    @torch.no_grad()
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        """See `Trainer.accepted`. The blocks only depend on the batch, so that measurements can be compared."""
        drawn = self.draw_blocks(batch, MEASURED_BLOCKS, torch.Generator().manual_seed(0))
        drafts = likeliest(self.draft(batch, features, drawn).flatten(0, 2), self.module.head_weight)
        counted, teachers = move(drawn.counted, self.device), move(drawn.teachers, self.device)
        right = drafts.view_as(teachers) == features.choices.flatten()[teachers]
        reached = alive = counted[:, :, 1]
        for slot in range(1, steps + 1):
            reached = reached & counted[:, :, slot]
            alive = alive & reached & right[:, :, slot]
            yield int(reached.sum()), int(alive.sum())

    def draw_blocks(self, batch: Batch, most: int, generator: torch.Generator) -> Blocks:
        """Up to `most` blocks of each sequence, begun at random positions.

        A block begins where a token and the one after it are supervised. Everything is computed on the CPU, so that
        nothing waits for a GPU.
        """
        length, next_supervised = batch.next_supervised.shape[1], batch.next_supervised
        possible = F.pad(next_supervised[:, :-1], (1, 0)) & next_supervised
        count = max(1, min(most, int(possible.sum(1).max())))
        score, anchors = torch.rand(possible.shape, generator=generator).masked_fill(~possible, -1.0).topk(count)
        anchors, order = anchors.sort(dim=1)  # neighbours see about the same context
        score = score.gather(1, order)
        # Slot k holds the token at anchor + k, which the state at the position before it predicts.
        before = anchors[:, :, None] + torch.arange(self.block_size) - 1
        inside = (before < length) & (torch.arange(self.block_size) > 0) & (score >= 0)[:, :, None]
        before = torch.where(inside, before, 0)
        counted = inside & next_supervised.gather(1, before.flatten(1)).view_as(before)
        teachers = torch.where(counted, before + torch.arange(len(next_supervised))[:, None, None] * length, 0)
        return Blocks(anchors, counted, teachers)

    def draft(self, batch: Batch, features: Features, drawn: Blocks) -> Tensor:
        """The normed states of all slots, [B, n, T, h], which the output matrix multiplies."""
        draft, (rows, count) = self.module, drawn.anchors.shape
        first = batch.ids.gather(1, drawn.anchors)[:, :, None]
        ids = F.pad(first, (0, self.block_size - 1), value=self.mask).flatten(0, 1)
        positions = (drawn.anchors[:, :, None] + torch.arange(self.block_size)).flatten(0, 1)
        ids, positions = move(ids, self.device), move(positions, self.device)
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
    """Attention of DFlash's blocks: a slot sees its block, and the context before the block's anchor.

    A slot sees its whole block, or in causal layers of the draft only itself and earlier slots. A layer passes queries,
    keys and values with a row for each block, [B * n, ...].
    """

    def __init__(self, draft: DFlashDraft, context: Tensor, anchors: Tensor):
        """context: [B, L, h], of which each layer makes keys and values. anchors: see `Blocks`."""
        super().__init__()
        self.draft, self.context, self.shape = draft, context, anchors.shape
        positions = torch.arange(context.shape[1], device=context.device)[None]
        self.rope = draft.rotary_emb(context, positions)
        # Blocks that attend together: their range, the length of context that one of them sees at most, their anchors.
        size, self.groups = max(1, ROWS // draft.block_size), []
        for begin in range(0, anchors.shape[1], size):
            group = anchors[:, begin : begin + size]
            seen = min(context.shape[1], -(-int(group.max()) // WIDTH) * WIDTH)
            self.groups.append((slice(begin, begin + size), seen, move(group, context.device)))
        self.masks: dict[tuple[int, bool], Tensor] = {}

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`."""
        module = self.draft.blocks[layer].self_attn
        # Keys and values of the context are made once a sequence, [B, Hkv, L, D], and shared by its n blocks.
        projections = module.k_proj, module.v_proj
        keys, values = (project(self.context).unflatten(2, (-1, module.head_dim)) for project in projections)
        keys = module.k_norm(keys).transpose(1, 2)
        keys, values = apply_rotary_pos_emb(keys, keys, *self.rope)[1], values.transpose(1, 2)
        groups, parts = q.shape[1] // k.shape[1], []
        q, k, v = (heads.unflatten(0, self.shape).transpose(1, 2) for heads in (q, k, v))
        for number, (blocks, seen, _) in enumerate(self.groups):
            # The slots of a group, [B, H, blocks * T, D], whose keys and values follow those of the context.
            own_q, own_k, own_v = (heads[:, :, blocks].flatten(2, 3) for heads in (q, k, v))
            joined = (torch.cat(pair, dim=2) for pair in ((keys[:, :, :seen], own_k), (values[:, :, :seen], own_v)))
            mask = self._mask(number, self.draft.causal[layer], groups, own_q.dtype)
            parts.append(masked_attention(own_q, *joined, mask, None, scale, None))
        return torch.cat(parts, dim=1).unflatten(1, (self.shape[1], -1)).flatten(0, 1)

    def _mask(self, number: int, causal: bool, groups: int, dtype: torch.dtype) -> Tensor:
        """The mask of a group of blocks, 0 or minus infinity, [B, 1, groups * blocks * T, seen + blocks * T].

        groups: query heads that share keys, which `masked_attention` takes as rows
        """
        if (number, causal) not in self.masks:
            (_, seen, anchors), size = self.groups[number], self.draft.block_size
            device, count = anchors.device, anchors.shape[1] * size
            context = torch.arange(seen, device=device) < anchors.repeat_interleave(size, dim=1)[:, :, None]
            slot = torch.arange(count, device=device)
            block = slot[:, None] // size == slot // size
            block = block & (slot[:, None] >= slot) if causal else block
            visible = torch.cat([context, block.expand(len(anchors), -1, -1)], dim=2)[:, None]
            mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)
            self.masks[number, causal] = mask.repeat(1, 1, groups, 1)
        return self.masks[number, causal]


def default_taps(num_layers: int) -> tuple[int, ...]:
    """`STATES` taps, evenly from layer 2 to the last but two; in a small model from the first to the last layer."""
    if num_layers >= STATES + 3:
        return tuple(2 + round(i * (num_layers - 4) / (STATES - 1)) for i in range(STATES))
    count = min(STATES, num_layers)
    return tuple(1 + round(i * (num_layers - 1) / max(1, count - 1)) for i in range(count))
