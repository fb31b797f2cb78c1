"""EAGLE-1 heads (which EAGLE-2 drafts with, too), trained to continue the target's states (Li et al.,
arXiv:2401.15077, section 4.2)."""

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
from .options import TrainingOptions
from .sizes import draft_config, published_config
from .trainer import HeadTrainer, as_master, seeded

TOKEN_WEIGHT = 0.1
"""Weight of the cross entropy beside the distance of states."""
NOISE, NOISE_LENGTH = 0.2, 512
"""Width of the uniform noise on states, in a sequence of so many tokens; in a longer one it is smaller."""
DEPTH = 5
"""Tokens of a draft that are looked at."""


class EagleTrainer(HeadTrainer):
    """One layer (or more) that maps the state at a token and the next token to the state there."""

    name = "eagle"
    takes = frozenset({"num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"})

    def __init__(self, target: Target, options: TrainingOptions, counts: Tensor):
        self.config = draft_config(target, options)
        embedding, output = target.embedding.detach(), target.head_weight.detach()
        knobs = LayerKnobs(num_layers=self.config.num_hidden_layers)
        with seeded(options.seed):
            head = EagleHead(self.config, embedding, output, knobs, fc_bias=False)
        super().__init__(target, as_master(head, embedding), DEPTH)

    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """SmoothL1(g_t, f_{t+1}) + TOKEN_WEIGHT * cross entropy of head(g_t) with softmax(head(f_{t+1})).

        A mean over the slots t that draft a supervised token. The states that go in have noise.
        """
        ids, (states,) = move(batch.ids, self.device), features.states
        noise = torch.rand(states.shape, generator=generator, device=self.device) - 0.5
        noisy = states + (noise * (NOISE * NOISE_LENGTH / ids.shape[1])).to(states.dtype)
        ((_, outputs),) = self.unroll(ids, noisy[:, :-1], Causal(), 1)
        slots, places = batch.slots(0, self.device)
        outputs, wanted = outputs.flatten(0, 1).index_select(0, slots), states.flatten(0, 1)[places]
        share = 1 / max(1, len(slots))
        distance = F.smooth_l1_loss(outputs.float(), wanted.float(), reduction="none").mean(-1).sum() * share
        weight = self.module.head_weight
        weights = torch.full((len(slots),), TOKEN_WEIGHT * share, device=self.device)
        return distance + soft_cross_entropy(outputs, weight, lambda rows: F.linear(wanted[rows], weight), weights)

    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """SafeAILab's names; embedding and output matrix are the target's."""
        tensors = {name.replace("blocks.", "layers."): value for name, value in self.module.state_dict().items()}
        return published_config(self.config, self.target, "LlamaForCausalLMEagle", bias=False), tensors
