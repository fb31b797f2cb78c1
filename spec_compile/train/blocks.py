"""Blocks of drafts, begun at random places of a text, and the loss of drafts that make a block in one forward."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention import BlockLayout, Causal, block_attention
from .data import Batch, move
from .features import Features
from .loss import DPACE, FIXED, Distilled, PositionWeights, distil_all
from .trainer import Trainer

TRAINED_BLOCKS, MEASURED_BLOCKS = 512, 128
"""Blocks of a sequence at most, in training and when acceptance is measured."""
POSITIONS = 4
"""Positions of a batch for each block of a sequence. Neighbouring blocks are much alike: more of them would slow a step
down more than they teach, and the next epoch draws others."""
SLOTS = 1 << 16
"""Slots of all blocks of a training step at most."""


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

    def filled(self, count: int) -> "Blocks":
        """`count` blocks of each sequence, the further ones without counted slots."""
        more = count - self.anchors.shape[1]
        anchors = torch.cat([self.anchors, self.anchors[:, -1:].expand(-1, more)], dim=1)
        return Blocks(anchors, *(F.pad(values, (0, 0, 0, more)) for values in (self.counted, self.teachers)))


class BlockTrainer(Trainer):
    """Trainer of a draft that makes the tokens of a block in one forward."""

    causal = False
    """True if a slot does not see later slots of its block."""
    first = 1
    """The first slot of a block that drafts: 1 if slot k holds the token at its own place, 0 if it drafts the next."""
    block_size: int
    """Slots of a block."""
    position_weight = DPACE
    """The option ``per_position_loss_weight``; on the class its default."""

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The distance from the target's probabilities, a mean over the counted slots with weights.

        Papers learn from the text's tokens instead of the target's probabilities; DFlash's authors saw no difference.
        """
        rows, length = batch.ids.shape
        most = max(1, min(TRAINED_BLOCKS, SLOTS // (rows * self.block_size), length // POSITIONS))
        drawn = self.draw_blocks(batch, most, torch.Generator().manual_seed(generator.initial_seed()))
        if self.device.type == "cuda":
            drawn = drawn.filled(most)  # the graphs are for one number of blocks
        slots, teachers = drawn.slots()
        if self.position_weight == FIXED:  # in the order of teachers, of which blocks of logits then share more
            teachers, order = teachers.sort(stable=True)
            slots = slots[order]
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

    def draft(self, batch: Batch, features: Features, drawn: Blocks) -> Tensor:
        """The normed states of all slots, [B, n, T, h], by CUDA graphs where they can be captured."""
        read = [move(values, self.device) for values in (*self.tokens(batch, drawn), drawn.anchors)]
        shape = *drawn.anchors.shape, self.block_size
        every = torch.arange(shape[0] * shape[1] * shape[2], device=self.device)
        states = self._rows(self._listed, [*read, *features.states[: len(self.module.taps)]], every)
        return states.unflatten(0, shape)

    def _listed(self, *given: Tensor) -> list[Tensor]:
        ids, places, anchors, *states = given
        return [self.states(ids, places, anchors, states)]

    @abstractmethod
    def tokens(self, batch: Batch, drawn: Blocks) -> tuple[Tensor, Tensor]:
        """The ids and positions that the draft reads, int64, on the CPU."""

    @abstractmethod
    def states(self, ids: Tensor, positions: Tensor, anchors: Tensor, states: list[Tensor]) -> Tensor:
        """The normed states of all slots, [B, n, T, h], by operations that wait for nothing.

        ids, positions: see `tokens`
        anchors: [B, n] int64; see `Blocks`
        states: [B, L, h]; of the target at each tap
        """

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
        drafts = self.drafts(list(zip(outputs, self.matrices)))
        counted, teachers = move(drawn.counted, self.device), move(drawn.teachers, self.device)
        right = drafts.view_as(teachers) == features.choices.flatten()[teachers]
        reached = alive = counted[:, :, self.first]
        for slot in range(self.first, steps + self.first):
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

    def __init__(self, anchors: Tensor, size: int):
        """anchors: see `Blocks`, on the draft's device. size: slots of a block."""
        super().__init__()
        self.anchors, self.size = anchors, size

    def attend_blocks(
        self, q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool
    ) -> Tensor:
        """The attention of all slots, [B, n * T, H, D].

        q: [B, H, n, T, D]
        k, v: [B, Hkv, n, T, D]
        keys, values: [B, Hkv, L, D]; of the context, which the blocks of a sequence share
        causal: True if a slot does not see later slots of its block
        """
        q, k, v = (heads.flatten(2, 3) for heads in (q, k, v))
        layout = BlockLayout(self.anchors, self.size, causal)
        return block_attention(q, k, v, keys, values, layout, scale).transpose(1, 2)
