"""EAGLE-1 heads, trained to continue the target's states (Li et al., arXiv:2401.15077, section 4.2).

EAGLE-2 drafts with the same heads.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..drafters.checkpoints.target import Target
from ..drafters.modules.eagle import EagleHead
from ..drafters.modules.layers import LayerKnobs
from .attention import Causal
from .data import Batch, move
from .features import Features
from .loss import soft_cross_entropy
from .options import LAYER_OPTIONS, TrainingOptions
from .sizes import draft_config, published_config
from .trainer import HeadTrainer, as_master, seeded

TOKEN_WEIGHT = 0.1
"""Weight of the cross entropy in the loss, where the distance of states has 1."""
NOISE, NOISE_LENGTH = 0.2, 512
"""Width of the uniform noise on states in a sequence of `NOISE_LENGTH` tokens; it shrinks as the sequence grows."""
DEPTH = 5
"""Tokens of a draft on which acceptance is measured. The loss only looks at the first."""


class EagleTrainer(HeadTrainer):
    """A head of `num_layers` layers that predicts a token's state from the token and the state before it."""

    name = "eagle"
    takes = LAYER_OPTIONS

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options)
        embedding, output = target.embedding.detach(), target.head_weight.detach()
        knobs = LayerKnobs(num_layers=self.config.num_hidden_layers)
        with seeded(options.seed):
            head = EagleHead(self.config, embedding, output, knobs, fc_bias=False)
        super().__init__(target, as_master(head, embedding), DEPTH)

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """SmoothL1(g_t, f_{t+1}) + TOKEN_WEIGHT * cross entropy of head(g_t) with softmax(head(f_{t+1})).

        It is a mean over the slots t that draft a supervised token, where f is the target's state and g the output.
        The input states have noise, because the head drafts from inexact states (section 4.2).
        """
        ids, (states,) = move(batch.ids, self.device), features.states
        noise = torch.rand(states.shape, generator=generator, device=self.device) - 0.5
        noisy = states + (noise * (NOISE * NOISE_LENGTH / ids.shape[1])).to(states.dtype)
        ((_, outputs),) = self.unroll(ids, noisy[:, :-1], Causal(), 1)
        slots, teachers = batch.slots(0)
        share = 1 / max(1, len(slots))
        outputs = outputs.flatten(0, 1).index_select(0, move(slots, self.device))
        expected = states.flatten(0, 1)[move(teachers, self.device)]
        distance = F.smooth_l1_loss(outputs.float(), expected.float(), reduction="none").mean(-1).sum() * share
        weights = torch.full((len(slots),), TOKEN_WEIGHT * share, device=self.device)
        logits = self.shared_logits(states)
        return distance + soft_cross_entropy(outputs, self.module.head_weight, teachers, logits, weights)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The tensors by SafeAILab's names. The embedding and the output matrix are the target's and not among them."""
        tensors = {name.replace("blocks.", "layers."): value for name, value in self.module.state_dict().items()}
        return published_config(self.config, self.target, "LlamaForCausalLMEagle", bias=False), tensors
