"""Blocks of drafts, begun at random places of a text, and the loss of drafts that make a block in one forward."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from ..contrib.linked.draft import MARKOV, LinkedDraft
from ..contrib.linked.transitions import Confidence, Domino
from ..drafters.checkpoints.files import Target
from ..drafters.modules.dflash import DFlashDraft
from ..drafters.modules.layers import LayerKnobs
from ..passes.outputs import FINAL
from .attention import BlockAttention
from .data import Batch, move
from .features import Features
from .loss import DPACE, FIXED, Distilled, Mix, PositionWeights, distil_all
from .options import LAYER_OPTIONS, TrainingOptions
from .trainer import Trainer, as_master, check_taps, draft_config, published_config, seeded

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
        weights = move(self.slot_weights()[slots % self.block_size], self.device)
        weights = self.without_undraftable(weights, features, teachers)
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
        given = [*read, *features.states[: len(self.module.taps)]]
        listed = lambda ids, places, anchors, *states: [self.states(ids, places, anchors, [*states])]  # noqa: E731
        return self._rows(listed, given, every).unflatten(0, shape)

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

        A block begins where the token after it is supervised, as a round's begins: the first one of an answer at the
        prompt's last token. Everything is computed on the CPU, so that nothing waits for a GPU.
        """
        length, next_supervised = batch.next_supervised.shape[1], batch.next_supervised
        possible = F.pad(next_supervised[:, 1:], (1, 0))
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


# Trainers of drafts of blocks: DFlash (arXiv:2602.06036, section 4), JetSpec, DSpark and Domino.


STATES = 5
"""States of the target that a draft reads by default."""


class DFlashTrainer(BlockTrainer):
    """Five layers over five of the target's states, unless options name other numbers.

    The mask token, which fills a block's slots after the first, is the token that is supervised least often.
    """

    name = "dflash"
    supports = LAYER_OPTIONS | {"taps", "block_size", "per_position_loss_weight"}
    learning_rate = (2.4, 2e-3)
    default_block_size = 16
    architecture = "DFlashDraftModel"
    draft_class = DFlashDraft
    published = (("blocks.", "layers."),)
    """Parts of our names of tensors, each with the published one."""

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options, layers=5)
        self.position_weight = options.per_position_loss_weight or self.position_weight
        taps = default_taps(target.num_layers) if options.taps is None else options.taps
        check_taps(taps, target.num_layers)
        block_size = options.block_size or self.default_block_size
        knobs = LayerKnobs(num_layers=self.config.num_hidden_layers, qk_norm=True)
        embedding, output = target.embedding.detach(), target.head_weight.detach()
        with seeded(options.seed):
            draft = self.draft_class(
                self.config, embedding, output, taps, block_size, rarest_token(counts), knobs,
                sample_from_anchor=self.first == 0, causal=(self.causal,) * knobs.num_layers,
            )  # fmt: skip
            self.link(draft, options)
        self.adopt(target, as_master(draft, embedding), block_size - self.first)

    def adopt(self, target: Target, module: DFlashDraft, steps: int) -> None:
        super().adopt(target, module, steps)
        self.block_size, self.mask, self.taps = module.block_size, module.mask_token_id, (*module.taps, FINAL)

    def link(self, draft: DFlashDraft, options: TrainingOptions) -> None:
        """Give a new draft its further parts, with weights to begin with; DFlash has none."""

    def tokens(self, batch: Batch, drawn: Blocks) -> tuple[Tensor, Tensor]:
        """See `BlockTrainer`. A block is a row, [B * n, T]: its anchor's token and masks."""
        first = batch.ids.gather(1, drawn.anchors)[:, :, None]
        ids = F.pad(first, (0, self.block_size - 1), value=self.mask).flatten(0, 1)
        return ids, (drawn.anchors[:, :, None] + torch.arange(self.block_size)).flatten(0, 1)

    def states(self, ids: Tensor, positions: Tensor, anchors: Tensor, states: list[Tensor]) -> Tensor:
        draft = self.module
        with DFlashAttention(draft, draft.project(states), anchors):
            return draft.states(ids, positions).unflatten(0, anchors.shape)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by z-lab's names. The embedding and the output matrix are the target's and not among them."""
        tensors = self.module.state_dict()
        for ours, theirs in self.published:
            tensors = {name.replace(ours, theirs): value for name, value in tensors.items()}
        own = {"target_layer_ids": [tap - 1 for tap in self.module.taps], "mask_token_id": self.mask}
        config = published_config(
            self.config, self.target, self.architecture,
            model_type="qwen3",
            num_target_layers=self.target.num_layers,
            block_size=self.block_size,
            layer_types=["full_attention"] * self.config.num_hidden_layers,
            dflash_config=own | self.further(),
        )  # fmt: skip
        return config, tensors

    def further(self) -> dict:
        """More entries of the published ``dflash_config``."""
        return {}


class DFlashAttention(BlockAttention):
    """Attention of DFlash's blocks, whose context is made of the target's states.

    A slot sees its whole block, or in causal layers of the draft only itself and earlier slots. A layer passes queries,
    keys and values with a row for each block, [B * n, ...].
    """

    def __init__(self, draft: DFlashDraft, context: Tensor, anchors: Tensor):
        """context: [B, L, h], of which each layer makes keys and values. anchors: see `Blocks`."""
        super().__init__(anchors, draft.block_size)
        self.draft, self.context, self.shape = draft, context, anchors.shape
        positions = torch.arange(context.shape[1], device=context.device)[None]
        self.rope = draft.rotary_emb(context, positions)

    def attend(self, q, k, v, sinks, scale, window, softcap, layer):
        """As in `Causal`."""
        module = self.draft.blocks[layer].self_attn
        # Keys and values of the context are made once a sequence, [B, Hkv, L, D], and shared by its n blocks.
        projections = module.k_proj, module.v_proj
        keys, values = (project(self.context).unflatten(2, (-1, module.head_dim)) for project in projections)
        keys = module.k_norm(keys).transpose(1, 2)
        keys, values = apply_rotary_pos_emb(keys, keys, *self.rope)[1], values.transpose(1, 2)
        q, k, v = (heads.unflatten(0, self.shape).transpose(1, 2) for heads in (q, k, v))
        out = self.attend_blocks(q, k, v, keys, values, scale, self.draft.causal[layer])
        return out.unflatten(1, (self.shape[1], -1)).flatten(0, 1)


def rarest_token(counts: Tensor) -> int:
    """The token that is supervised least often, the last of several. counts: [V]."""
    return len(counts) - 1 - int(counts.flip(0).argmin())


def default_taps(num_layers: int) -> tuple[int, ...]:
    """`STATES` taps, evenly from layer 2 to the last but two; in a small model from the first to the last layer."""
    first, last = (2, num_layers - 2) if num_layers >= STATES + 3 else (1, num_layers)
    count = min(STATES, num_layers)
    return tuple(first + round(i * (last - first) / max(1, count - 1)) for i in range(count))


class JetSpecTrainer(DFlashTrainer):
    """JetSpec (arXiv:2606.18394): a DFlash draft in which a slot sees, of its block, only itself and earlier slots.

    All slots have the same weight in the loss, because an early slot does not see the later ones and cannot help them.
    """

    name = "jetspec"
    causal = True

    def slot_weights(self) -> Tensor:
        return torch.ones(self.block_size)

    def further(self) -> dict:
        return {"causal_head": True}


# DSpark and Domino drafts: DFlash whose drafts depend on those before them in the block.
#
# The true tokens of the text stand in place of these drafts.

SPREAD = 0.02
"""Standard deviation of new weights of a transition, as ``initializer_range`` of published configs."""
RANK = 256
"""Numbers of the low-rank table of a transition by default."""
DISTANCE = Mix(cross_entropy=0.1, l1=0.9)
"""DSpark's distance of distributions (arXiv:2607.05147; DeepSpec: ce_loss_alpha, l1_loss_alpha)."""
GAMMA = 4.0
"""Decay of the weights of DSpark's slots (DeepSpec: loss_decay_gamma)."""
GRU_SIZE, UNLINKED = 1024, 1
"""Domino's state (SpecForge: gru_hidden_dim), and the first places without a bias (pure_draft_prefix_len)."""
BASE_UNTIL = 0.5
"""The share of a training in which Domino's loss without the transition fades (lambda_base_decay_ratio)."""


class LinkedTrainer(DFlashTrainer):
    """Blocks whose first slot drafts, too, and a transition: logits are U h + keys . query(h, tokens before)."""

    first = 0
    draft_class = LinkedDraft

    def outputs(self, batch: Batch, features: Features, drawn: Blocks) -> list[Tensor]:
        states, before = self.draft(batch, features, drawn), self.tokens_before(batch, drawn)
        outputs, confidence = [states, self.queries(states, before)], self.module.confidence
        if confidence is not None:
            outputs.append(confidence.logits(states, self.module.transition.embed(before)))
        return outputs

    @property
    def matrices(self) -> list[Tensor]:
        return [self.module.head_weight, self.module.transition.keys]

    def tokens_before(self, batch: Batch, drawn: Blocks) -> Tensor:
        """The text's token before each slot's draft, [B, n, T] int64, on the draft's device."""
        # Slot k drafts after the token at anchor + k.
        length = batch.ids.shape[1]
        places = (drawn.anchors[:, :, None] + torch.arange(self.block_size)).clamp(max=length - 1).flatten(1)
        return move(batch.ids.gather(1, places), self.device).view(*drawn.anchors.shape, self.block_size)

    def queries(self, states: Tensor, before: Tensor) -> Tensor:
        """The queries of the transition, [B, n, T, r]; zeros at places that it skips.

        states: [B, n, T, h]
        before: [B, n, T] int64; the token before each slot's draft
        """
        transition, queries = self.module.transition, []
        embedding = self.module.embedding
        carried = states.new_zeros(*states.shape[:2], transition.state_size)
        if transition.is_first_order:
            return transition.query(states, before, carried, embedding)[0]
        for slot in range(self.block_size):
            query, carried = transition.query(states[:, :, slot], before[:, :, slot], carried, embedding)
            queries.append(torch.zeros_like(query) if slot < transition.skipped else query)
        return torch.stack(queries, dim=2)


class DSparkTrainer(LinkedTrainer):
    """DSpark (arXiv:2607.05147): a Markov head, and a prediction of each draft's acceptance.

    The loss is 0.1 * cross entropy + 0.9 * L1 distance + the binary cross entropy of the prediction c with the chance
    1 - L1 / 2 that a draft is accepted (deepseek-ai/DeepSpec, deepspec/modeling/dspark/loss.py, which takes the cross
    entropy with the text's tokens).
    """

    name = "dspark"
    supports = DFlashTrainer.supports | {"markov_rank", "markov_head_type"}
    default_block_size = 7
    position_weight = FIXED
    architecture = "DSparkDraftModel"
    published = *DFlashTrainer.published, ("transition.", "markov_head."), ("confidence.", "confidence_head.")

    def link(self, draft: LinkedDraft, options: TrainingOptions) -> None:
        self.kind, self.rank, config = options.markov_head_type or "vanilla", options.markov_rank or RANK, self.config
        draft.transition = MARKOV[self.kind](config.hidden_size, config.vocab_size, config.vocab_size, self.rank)
        draft.confidence = Confidence(config.hidden_size, self.rank)
        spread(draft.transition)
        spread(draft.confidence)

    def objective(self, rows: list[Tensor], distil: Callable[..., Distilled]) -> Tensor:
        made = distil(list(zip(rows, self.matrices)), mix=DISTANCE)
        overlaps, weights = (values.float() for values in (made.overlaps, made.weights))
        predicted = F.binary_cross_entropy_with_logits(rows[-1].float(), overlaps, weights, reduction="sum")
        return made.loss + predicted

    def slot_weights(self) -> Tensor:
        return torch.exp(-torch.arange(self.block_size) / GAMMA)

    def further(self) -> dict:
        """SpecForge's form: DFlash's files with a ``projector_type``, without copies of the target's matrices."""
        return {
            "projector_type": "dspark", "sample_from_anchor": True, "markov_rank": self.rank,
            "markov_head_type": self.kind, "enable_confidence_head": True, "confidence_head_with_markov": True,
        }  # fmt: skip


class DominoTrainer(LinkedTrainer):
    """Domino (arXiv:2605.29707): a GRU reads the tokens before a draft.

    The loss is (1 - l) * distance + l * distance without the transition, with l from 1 to 0 over the first half of the
    training (sgl-project/SpecForge, specforge/core/domino.py).
    """

    name = "domino"
    supports = DFlashTrainer.supports | {"emb_dim", "gru_hidden_dim"}
    published = *DFlashTrainer.published, ("transition.", "")

    def link(self, draft: LinkedDraft, options: TrainingOptions) -> None:
        self.rank, size, config = options.emb_dim or RANK, options.gru_hidden_dim or GRU_SIZE, self.config
        transition = Domino(config.hidden_size, config.vocab_size, self.rank, size, UNLINKED)
        spread(transition.embed_proj)
        for parameter in transition.prefix_gru.parameters():
            torch.nn.init.uniform_(parameter, -(size**-0.5), size**-0.5)  # as in `torch.nn.GRU`
        draft.transition = transition

    def objective(self, rows: list[Tensor], distil: Callable[..., Distilled]) -> Tensor:
        products = list(zip(rows, self.matrices))
        base = max(0.0, 1 - self.share / BASE_UNTIL)
        linked = (1 - base) * distil(products).loss
        return linked + base * distil(products[:1]).loss if base else linked

    def further(self) -> dict:
        return {
            "projector_type": "domino", "shift_label": True, "pure_draft_prefix_len": UNLINKED, "emb_dim": self.rank,
            "gru_hidden_dim": self.module.transition.state_size,
        }  # fmt: skip


def spread(module: nn.Module) -> None:
    """New weights for a part of a transition."""
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=SPREAD) if parameter.dim() > 1 else torch.nn.init.zeros_(parameter)
