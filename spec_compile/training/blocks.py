"""Blocks of drafts, begun at random places of a text, and the loss of drafts that make a block in one forward."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ..kernels.ops import masked_attention
from .attention import Causal
from .data import WIDTH, Batch, move
from .features import Features
from .loss import Distilled, distil_all, likeliest
from .positions import FIXED, PositionWeights
from .trainer import Trainer

TRAINED_BLOCKS, MEASURED_BLOCKS = 512, 128
"""Blocks of a sequence at most, in training and when acceptance is measured."""
SLOTS = 1 << 16
"""Slots of all blocks of a training step at most."""
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
    positions 3 to 5. If the first slot drafts, too, slots 0 to 3 draft tokens 4 to 7.
    """

    anchors: Tensor
    counted: Tensor
    teachers: Tensor

    def slots(self) -> tuple[Tensor, Tensor]:
        """The counted slots, block by block: (indices among B * n * T slots, teachers), int64 [R]."""
        slots = self.counted.flatten().nonzero()[:, 0]
        return slots, self.teachers.flatten()[slots]

    def by_teacher(self) -> tuple[Tensor, Tensor]:
        """The same in the order of their teachers, of which blocks of logits then share more."""
        slots, teachers = self.slots()
        teachers, order = teachers.sort(stable=True)
        return slots[order], teachers


class BlockTrainer(Trainer):
    """Trainer of a draft that makes the tokens of a block in one forward."""

    causal = False
    """True if a slot does not see later slots of its block."""
    first = 1
    """The first slot of a block that drafts: 1 if slot k holds the token at its own place, 0 if it drafts the next."""
    block_size: int
    """Slots of a block."""
    position_weight = FIXED
    """The option ``per_position_loss_weight``; on the class its default."""

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The distance from the target's probabilities, a mean over the counted slots with weights.

        Papers learn from the text's tokens instead of the target's probabilities; DFlash's authors saw no difference.
        """
        most = min(TRAINED_BLOCKS, max(1, SLOTS // (len(batch.ids) * self.block_size)))
        drawn = self.draw_blocks(batch, most, torch.Generator().manual_seed(generator.initial_seed()))
        slots, teachers = drawn.by_teacher() if self.position_weight == FIXED else drawn.slots()
        at = move(slots, self.device)
        rows = [output.flatten(0, 2).index_select(0, at) for output in self.outputs(batch, features, drawn)]
        weights = self.row_weights(slots, teachers, features)
        if self.position_weight == FIXED:
            weights = weights / weights.sum().clamp(min=1e-9)
        else:
            places = slots // self.block_size, slots % self.block_size
            weights = PositionWeights(self.position_weight, weights, *places)
        logits = self.teacher_logits(features)
        return self.objective(rows, partial(distil_all, teachers=teachers, teacher_logits=logits, row_weights=weights))

    @abstractmethod
    def draft(self, batch: Batch, features: Features, drawn: Blocks) -> Tensor:
        """The normed states of all slots, [B, n, T, h]."""

    def outputs(self, batch: Batch, features: Features, drawn: Blocks) -> list[Tensor]:
        """Tensors [B, n, T, ...] of all slots: first those that `matrices` multiply, then others for `objective`."""
        return [self.draft(batch, features, drawn)]

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices, [Vd, ...], whose products with `outputs` are summed to logits."""
        return [self.module.head_weight]

    def objective(self, rows: list[Tensor], distil: Callable[..., Distilled]) -> Tensor:
        """The loss. rows: the `outputs` of counted slots, [R, ...]. distil: `distil_all` of products and a mix."""
        return distil(list(zip(rows, self.matrices))).loss

    def teacher_logits(self, features: Features) -> Callable[[Tensor], Tensor]:
        """See `distil_all`."""
        return self.shared_logits(features.states[-1])

    def slot_weights(self) -> Tensor:
        """The weights of a block's slots in the loss, [T].

        Draft k has exp(-(k - 1) / gamma), because a block's later tokens only matter if the earlier are accepted.
        """
        gamma = 7.0 if self.block_size >= 16 else self.block_size / 2
        return torch.exp((self.first - torch.arange(self.block_size)) / gamma)

    def row_weights(self, slots: Tensor, teachers: Tensor, features: Features) -> Tensor:
        """The weights of counted slots by their positions, [R], on the draft's device."""
        return move(self.slot_weights()[slots % self.block_size], self.device)

    @torch.no_grad()
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        """See `Trainer.accepted`. The blocks only depend on the batch, so that measurements can be compared."""
        drawn = self.draw_blocks(batch, MEASURED_BLOCKS, torch.Generator().manual_seed(0))
        outputs = [output.flatten(0, 2) for output in self.outputs(batch, features, drawn)]
        drafts = self.to_target(likeliest(list(zip(outputs, self.matrices))))
        counted, teachers = move(drawn.counted, self.device), move(drawn.teachers, self.device)
        right = drafts.view_as(teachers) == features.choices.flatten()[teachers]
        reached = alive = counted[:, :, self.first]
        for slot in range(self.first, steps + self.first):
            reached = reached & counted[:, :, slot]
            alive = alive & reached & right[:, :, slot]
            yield int(reached.sum()), int(alive.sum())

    def to_target(self, drafts: Tensor) -> Tensor:
        """The target's ids of rows of the output matrix."""
        ids = self.module.draft_to_target
        return drafts if ids is None else ids[drafts]

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
        # A slot drafts the token after the position `before`, whose state predicts it.
        slot = torch.arange(self.block_size)
        before = anchors[:, :, None] + slot - self.first
        inside = (before < length) & (slot >= self.first) & (score >= 0)[:, :, None]
        before = torch.where(inside, before, 0)
        counted = inside & next_supervised.gather(1, before.flatten(1)).view_as(before)
        teachers = torch.where(counted, before + torch.arange(len(next_supervised))[:, None, None] * length, 0)
        return Blocks(anchors, counted, teachers)


class BlockAttention(Causal):
    """Attention of blocks: a slot sees its block, and the context before the block's anchor."""

    def __init__(self, anchors: Tensor, length: int, size: int, device: torch.device):
        """anchors: see `Blocks`. length: of the context. size: slots of a block."""
        super().__init__()
        # Blocks that attend together: their range, the length of context that one of them sees at most, their anchors.
        self.size, self.groups = size, []
        step = max(1, ROWS // size)
        for begin in range(0, anchors.shape[1], step):
            group = anchors[:, begin : begin + step]
            seen = min(length, -(-int(group.max()) // WIDTH) * WIDTH)
            self.groups.append((slice(begin, begin + step), seen, move(group, device)))
        self.masks: dict[tuple[int, bool], Tensor] = {}

    def attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
    ) -> Tensor:
        """The attention of all slots, [B, n * T, H, D].

        q: [B, H, n, T, D]
        k, v: [B, Hkv, n, T, D]
        keys, values: [B, Hkv, L, D]; of the context, which the blocks of a sequence share
        causal: True if a slot does not see later slots of its block
        """
        groups, parts = q.shape[1] // k.shape[1], []
        for number, (blocks, seen, _) in enumerate(self.groups):
            # The slots of a group, [B, H, blocks * T, D], whose keys and values follow those of the context.
            own_q, own_k, own_v = (heads[:, :, blocks].flatten(2, 3) for heads in (q, k, v))
            joined = (torch.cat(pair, dim=2) for pair in ((keys[:, :, :seen], own_k), (values[:, :, :seen], own_v)))
            mask = self._mask(number, causal, groups, q.dtype)
            parts.append(masked_attention(own_q, *joined, mask, None, scale, None))
        return torch.cat(parts, dim=1)

    def _mask(self, number: int, causal: bool, groups: int, dtype: torch.dtype) -> Tensor:
        """The mask of a group of blocks, 0 or minus infinity, [B, 1, groups * blocks * T, seen + blocks * T].

        groups: query heads that share keys, which `masked_attention` takes as rows
        """
        if (number, causal) not in self.masks:
            _, seen, anchors = self.groups[number]
            device, count = anchors.device, anchors.shape[1] * self.size
            context = torch.arange(seen, device=device) < anchors.repeat_interleave(self.size, dim=1)[:, :, None]
            slot = torch.arange(count, device=device)
            block = slot[:, None] // self.size == slot // self.size
            block = block & (slot[:, None] >= slot) if causal else block
            visible = torch.cat([context, block.expand(len(anchors), -1, -1)], dim=2)[:, None]
            mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)
            self.masks[number, causal] = mask.repeat(1, 1, groups, 1)
        return self.masks[number, causal]
