"""One block of multi-token prediction, trained to be applied step after step (FastMTP: Cai et al., arXiv:2509.18362).

Step k reads the block's output of step k - 1 and the true next token. Its attention sees the keys that it will see when
it drafts, as in EAGLE-3; in FastMTP it sees the other slots of step k instead.
"""

import torch
from torch import Tensor

from ..drafters.checkpoints.mtp_families import FAMILIES, MtpBlock
from ..drafters.checkpoints.target import Target
from ..drafters.modules.mtp import MtpHead, block_config
from ..errors import UnsupportedModelError
from .attention import Causal
from .data import Batch, move
from .features import Features
from .loss import soft_cross_entropy
from .options import TrainingOptions
from .trainer import HeadTrainer, as_master, seeded

BETA = 0.6
"""Ratio of a step's weight in the loss to that of the step before."""
PUBLISHED = MtpBlock(next(family for family in FAMILIES if family.name == "Qwen"), "mtp.")
"""The family in whose names a block is published."""


class MtpTrainer(HeadTrainer):
    """A head whose block is a decoder layer of the target's class, and starts as a copy of its last layer."""

    name = "mtp"
    takes = frozenset({"ttt_steps"})

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        try:
            head = self._build(target, options.seed)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise UnsupportedModelError(
                f"model: no block of multi-token prediction can be made of the layers of {type(target.model).__name__} "
                f"({' '.join(str(error).split())[:200]}); use algo='eagle3'"
            ) from error
        super().__init__(target, head, options.ttt_steps or 3)

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
        return soft_cross_entropy(normed, self.module.head_weight, teachers, logits, weights)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by Qwen's names, ``mtp.*``, and the target's config. Each expert has tensors of its own."""
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
