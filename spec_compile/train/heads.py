"""Trainers of heads: EAGLE, EAGLE-3, P-EAGLE and multi-token prediction."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig

from ..contrib.parallel import ParallelEagle3Head
from ..drafters.checkpoints.files import Target
from ..drafters.modules.eagle import Eagle3Head, EagleHead
from ..drafters.modules.layers import LayerKnobs
from ..drafters.modules.mtp import FAMILIES, MtpBlock, MtpHead, block_config
from ..errors import UnsupportedModelError
from .attention import BlockAttention, Causal
from .blocks import Blocks, BlockTrainer, rarest_token
from .data import Batch, move
from .features import Features
from .loss import FIXED, PositionWeights, distil_all
from .options import LAYER_OPTIONS, TrainingOptions
from .trainer import HeadTrainer, as_master, check_taps, draft_config, frequent_tokens, published_config, seeded

# EAGLE-1 heads, trained to continue the target's states (Li et al., arXiv:2401.15077, section 4.2). EAGLE-2 drafts with
# the same heads.

TOKEN_WEIGHT = 0.1
"""Weight of the cross entropy in the loss, where the distance of states has 1."""
NOISE, NOISE_LENGTH = 0.2, 512
"""Width of the uniform noise on states in a sequence of `NOISE_LENGTH` tokens; it shrinks as the sequence grows."""
DEPTH = 5
"""Tokens of a draft on which acceptance is measured. The loss only looks at the first."""


class EagleTrainer(HeadTrainer):
    """A head of `num_layers` layers that predicts a token's state from the token and the state before it."""

    name = "eagle"
    supports = LAYER_OPTIONS

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options)
        embedding, output = target.embedding.detach(), target.head_weight.detach()
        knobs = LayerKnobs(num_layers=self.config.num_hidden_layers)
        with seeded(options.seed):
            head = EagleHead(self.config, embedding, output, knobs, fc_bias=False)
        self.adopt(target, as_master(head, embedding), DEPTH)

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """SmoothL1(g_t, f_{t+1}) + TOKEN_WEIGHT * cross entropy of head(g_t) with softmax(head(f_{t+1})).

        It is a mean over the slots t that draft a supervised token, where f is the target's state and g the output.
        The input states have noise, because the head drafts from inexact states (section 4.2).
        """
        ids, (states,) = move(batch.ids, self.device), features.states
        noise = torch.rand(states.shape, generator=generator, device=self.device) - 0.5
        noisy = states + (noise * (NOISE * NOISE_LENGTH / ids.shape[1])).to(states.dtype)
        ((_, outputs),) = self.unroll(ids, noisy[:, :-1], Causal(), 1)
        slots, _, teachers = batch.rollout(1)
        share = 1 / max(1, len(slots))
        outputs = outputs.flatten(0, 1).index_select(0, move(slots, self.device))
        expected = states.flatten(0, 1)[move(teachers, self.device)]
        distance = F.smooth_l1_loss(outputs.float(), expected.float(), reduction="none").mean(-1).sum() * share
        weights = torch.full((len(slots),), TOKEN_WEIGHT * share, device=self.device)
        logits = self.shared_logits(states)
        return distance + distil_all([(outputs, self.module.head_weight)], teachers, logits, weights).loss

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by SafeAILab's names. The embedding and the output matrix are the target's and not among them."""
        tensors = {name.replace("blocks.", "layers."): value for name, value in self.module.state_dict().items()}
        return published_config(self.config, self.target, "LlamaForCausalLMEagle", bias=False), tensors


# EAGLE-3 heads, trained by training-time test (Li et al., arXiv:2503.01840, section 3.2).
#
# From each slot the head continues for several tokens, each time from its previous output, as it will when it drafts.

DECAY = 0.8
"""Ratio of a step's weight in the loss to the weight of the step before."""


class Eagle3Trainer(HeadTrainer):
    """A head of `num_layers` layers over three of the target's states, with an output matrix to train."""

    name = "eagle3"
    supports = LAYER_OPTIONS | {"draft_vocab_size", "taps", "ttt_steps", "per_position_loss_weight"}
    position_weight = FIXED

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options)
        head = new_head(target, options, counts, self.config)
        self.adopt(target, head, options.ttt_steps or 7)
        self.position_weight = options.per_position_loss_weight or self.position_weight

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The sum over steps i of DECAY^i times the cross entropy with the target's probabilities of the kept tokens.

        Each step's is a mean over all slots, where a slot has no loss if its token is not supervised or if the target's
        choice is not among the kept tokens, so that the head cannot draft it. With other ``per_position_loss_weight``
        the steps from a slot are a chain, and the loss is a weighted mean over their rows.
        """
        slots, step_of, teachers = batch.rollout(self.steps)
        slots_in_batch = len(batch.ids) * (batch.ids.shape[1] - 1)
        if self.position_weight != FIXED:
            chains = slots - step_of * slots_in_batch
            order = (chains * self.steps + step_of).argsort()
            slots, step_of, teachers, chains = (values[order] for values in (slots, step_of, teachers, chains))
        weights = move((DECAY ** torch.arange(self.steps) / slots_in_batch)[step_of], self.device)
        weights = self.without_undraftable(weights, features, teachers)
        if self.position_weight != FIXED:
            weights = PositionWeights(self.position_weight, weights, chains, step_of)
        outputs = self.rolled_out(batch, features, slots)
        return distil_all([(outputs, self.module.head_weight)], teachers, features.logits, weights).loss

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        return published_head(self.module, self.config, self.target)


def new_head(
    target: Target, options: TrainingOptions, counts: Tensor, config: LlamaConfig,
    head_class: type[Eagle3Head] = Eagle3Head,
) -> Eagle3Head:  # fmt: skip
    """A head to train, whose output matrix begins as the target's rows of the kept tokens.

    counts: see `Trainer`. config: describes its layers.
    """
    ends = target.config.eos_token_id
    ends = [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]
    kept = frequent_tokens(counts, options.draft_vocab_size, ends)
    taps = default_taps(target.num_layers) if options.taps is None else options.taps
    published_layer_ids(taps, target.num_layers)
    output = nn.Parameter(target.head_weight.detach()[kept.to(target.head_weight.device)].clone())
    knobs = LayerKnobs(num_layers=config.num_hidden_layers)
    with seeded(options.seed):
        head = head_class(config, target.embedding.detach(), taps, target.hidden_size, output, layer=knobs)
        if isinstance(head, ParallelEagle3Head):
            nn.init.normal_(head.mask_hidden)
    head.draft_to_target = kept
    return as_master(head, target.embedding)


def published_head(head: Eagle3Head, config: LlamaConfig, target: Target, **more) -> tuple[dict, dict[str, Tensor]]:
    """The config, and the tensors by the names of SpecForge and SGLang: ``midlayer``, or ``layers.N`` if several.

    config: describes the head's layers. more: entries of the published config.
    """
    first = "midlayer" if head.layers == 1 else "layers.0"
    tensors = {}
    for name, value in head.state_dict().items():
        name = name.replace("blocks.0.", f"{first}.").replace("blocks.", "layers.")
        tensors["lm_head.weight" if name == "head_weight" else name] = value
    kept, size = head.draft_to_target.cpu(), target.vocab_size
    # d2t: the difference of the target's token and the draft's. t2d: True for a token that can be drafted.
    tensors["d2t"] = kept - torch.arange(len(kept))
    tensors["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, kept, True)
    layer_ids = published_layer_ids(head.taps, target.num_layers)
    published = published_config(
        config, target, "LlamaForCausalLMEagle3",
        draft_vocab_size=len(kept),
        eagle_config={"eagle_aux_hidden_state_layer_ids": layer_ids, "use_aux_hidden_state": True},
        **more,
    )  # fmt: skip
    return published, tensors


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Taps of an early, a middle and a late layer, as in the paper; in a small model the first, middle and last."""
    if num_layers < 7:
        return tuple(sorted({0, num_layers // 2, num_layers}))
    return 2, num_layers // 2, num_layers - 3


def published_layer_ids(taps: tuple[int, ...], num_layers: int) -> list[int]:
    """The list of layers by which a published ``config.json`` names `taps`.

    A list that begins with 1 names the layers whose outputs are tapped, any other those whose inputs are.
    Raises ValueError if no list can name them or if the target has no such states.
    """
    check_taps(taps, num_layers, excluded_first=1)
    return [tap - 1 for tap in taps] if taps[0] == 2 else list(taps)


# P-EAGLE heads (arXiv:2602.01469): EAGLE-3 whose tokens after the first are drafted at masks, in the same forward.
#
# From random places of a text a chain of masks continues it (SpecForge: specforge/core/peagle.py; speculators:
# models/peagle). The embedding is the target's; there it may be trained, too.

KEPT, LEAST = 0.7, 0.2
"""The weight of depth d is KEPT^d, at least LEAST: the share of its rows that published trainers keep in memory
(``down_sample_ratio``, ``down_sample_ratio_min``). Here fewer chains are drawn instead, each with all depths."""


class PEagleTrainer(BlockTrainer):
    """Four layers over three of the target's states. A block's slot d drafts the token d + 1 after the anchor."""

    name = "p_eagle"
    supports = LAYER_OPTIONS | {"draft_vocab_size", "taps", "num_depths", "per_position_loss_weight"}
    first = 0
    module: ParallelEagle3Head

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options, layers=4)
        head = new_head(target, options, counts, self.config, ParallelEagle3Head)
        head.mask_token_id = rarest_token(counts)
        self.block_size = options.num_depths or 8
        self.adopt(target, head, self.block_size)
        self.position_weight = options.per_position_loss_weight or self.position_weight

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


# One block of multi-token prediction, trained to be applied step after step (FastMTP: Cai et al., arXiv:2509.18362).
#
# Step k reads the block's output of step k - 1 and the true next token. Its attention sees the keys that it will see
# when it drafts, as in EAGLE-3; in FastMTP it sees the other slots of step k instead.

BETA = 0.6
"""Ratio of a step's weight in the loss to the weight of the step before."""
PUBLISHED = MtpBlock(next(family for family in FAMILIES if family.name == "Qwen"), "mtp.")
"""The family in whose names a block is published."""


class MtpTrainer(HeadTrainer):
    """A head whose block is a decoder layer of the target's class, and starts as a copy of its last layer."""

    name = "mtp"
    supports = frozenset({"ttt_steps"})

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        try:
            head = self._build(target, options.seed)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"model: no block of multi-token prediction can be made of the layers of {type(target.model).__name__} "
                f"({' '.join(str(error).split())[:200]}); use algo='eagle3'"
            ) from error
        self.adopt(target, head, options.ttt_steps or 3)

    def _build(self, target: Target, seed: int) -> MtpHead:
        """The head. It runs on two tokens once, so that a layer that cannot serve is refused before the training."""
        decoder = target.model.get_decoder()
        last = decoder.layers[-1]
        config = block_config(target.config, any(name.startswith("mlp.experts.") for name in last.state_dict()))
        config._experts_implementation = "eager"
        embedding, output, family = target.embedding.detach(), target.head_weight.detach(), PUBLISHED.family
        knobs = {"embedding_first": family.embedding_first, "zero_first": family.zero_first}
        with seeded(seed):
            head = MtpHead(decoder, config, embedding, output, **knobs)
        head.block.load_state_dict(last.state_dict())
        head = as_master(head, embedding)
        ids = torch.arange(2, device=embedding.device)[None]
        with torch.no_grad(), Causal():
            head(ids, ids, next(head.parameters()).new_zeros(1, 2, head.hidden_size))
        return head

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The weighted mean over steps k, with weights BETA^k, of the cross entropy with the target's probabilities.

        Each step's is a mean over the slots that draft a supervised token in it.
        """
        slots, step_of, teachers = batch.rollout(self.steps)
        shares = BETA ** torch.arange(self.steps)
        shares = shares / shares.sum() / step_of.bincount(minlength=self.steps).clamp(min=1)
        normed = self.rolled_out(batch, features, slots)
        logits, weights = self.shared_logits(features.states[0]), move(shares[step_of], self.device)
        return distil_all([(normed, self.module.head_weight)], teachers, logits, weights).loss

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by Qwen's names, ``mtp.*``, and the target's config. Each expert has its own tensors."""
        tensors = {}
        for name, value in self.module.state_dict().items():
            tensors.update(_apart(PUBLISHED.theirs(name), value))
        config = {**self.target.config.to_dict(), "num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
        return config, tensors


def _apart(name: str, value: Tensor) -> dict[str, Tensor]:
    """The tensor by its name. One of all experts (``experts.gate_up_proj``) becomes tensors of each expert."""
    stem, _, joined_name = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(joined_name)
    if parts is None or not stem.endswith(".experts"):
        return {name: value}
    return {
        f"{stem}.{expert}.{part}.weight": weight
        for expert, joined in enumerate(value)
        for part, weight in zip(parts, joined.chunk(len(parts)))
    }
