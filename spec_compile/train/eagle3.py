"""EAGLE-3 heads, trained by training-time test (Li et al., arXiv:2503.01840, section 3.2).

From each slot the head continues for several tokens, each time from its previous output, as it will when it drafts.
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from ..drafters.checkpoints.target import Target
from ..drafters.modules.eagle import Eagle3Head, ParallelEagle3Head
from ..drafters.modules.layers import LayerKnobs
from .data import Batch, move
from .features import Features
from .loss import soft_cross_entropy
from .options import LAYER_OPTIONS, TrainingOptions
from .positions import FIXED, PositionWeights
from .sizes import check_taps, draft_config, frequent_tokens, published_config
from .trainer import HeadTrainer, as_master, seeded

DECAY = 0.8
"""Ratio of a step's weight in the loss to that of the step before."""


class Eagle3Trainer(HeadTrainer):
    """A head of `num_layers` layers over three of the target's states, with an output matrix to train."""

    name = "eagle3"
    takes = LAYER_OPTIONS | {"draft_vocab_size", "taps", "ttt_steps", "per_position_loss_weight"}
    position_weight = FIXED

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options)
        head = new_head(target, options, counts, self.config)
        super().__init__(target, head, options.ttt_steps or 7)
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
        if self.learns_from_choices:
            weights = weights * can_draft(self.kept, features, teachers)
        if self.position_weight != FIXED:
            weights = PositionWeights(self.position_weight, weights, chains, step_of)
        outputs = self.rolled_out(batch, features, slots)
        return soft_cross_entropy(outputs, self.module.head_weight, teachers, features.logits, weights)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        return published_head(self.module, self.config, self.target)


def new_head(
    target: Target, options: TrainingOptions, counts: Tensor, config: LlamaConfig,
    head_class: type[Eagle3Head] = Eagle3Head,
) -> Eagle3Head:  # fmt: skip
    """A head to train, whose output matrix begins as the target's rows of the kept tokens.

    counts: see `Trainer`. config: of its layers.
    """
    kept = frequent_tokens(counts, options.draft_vocab_size, _listed(target.config.eos_token_id))
    kept = torch.arange(target.vocab_size) if kept is None else kept
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


def can_draft(kept: Tensor, features: Features, teachers: Tensor) -> Tensor:
    """True for each teacher [R], on the CPU, whose choice is among the tokens `kept` [K]; [R] bool, on their device."""
    return torch.isin(features.choices.flatten()[move(teachers, kept.device)], kept)


def published_head(head: Eagle3Head, config: LlamaConfig, target: Target, **more) -> tuple[dict, dict[str, Tensor]]:
    """The config, and the tensors by the names of SpecForge and SGLang: ``midlayer``, or ``layers.N`` if several.

    config: of the head's layers. more: entries of the published config.
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


def _listed(ids) -> list[int]:
    """A config's one token id, several, or none, as a list."""
    return [] if ids is None else list(ids) if isinstance(ids, (list, tuple)) else [ids]
