"""What the training loop asks of an algorithm: `Trainer`, and what all heads that draft token by token share."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..drafters.checkpoints.target import Target
from ..drafters.modules.head import Head
from .attention import Causal, Rollout
from .data import Batch, move
from .features import Features
from .loss import blocks


class Trainer(ABC):
    """A new draft for `target`, and how it learns.

    Made of (target, options, counts): `counts` [V] says how often each token is supervised. ValueError or
    UnsupportedModelError if no such draft can be made.
    """

    name = ""
    """Its ``algo``."""
    takes: frozenset[str] = frozenset()
    """Of the options about the draft itself, those that this algorithm has."""
    learning_rate: tuple[float, float] = (0.4, 2e-3)
    """The default: the first over the hidden size, the second at most."""
    taps: tuple[int, ...]
    """States of the target that it reads, as in `Head.taps`."""
    kept: Tensor | None = None
    """Ids of the tokens whose logits of the target it learns from (None: it does without)."""
    module: nn.Module
    """The draft, whose parameters are its own, in float32; what it shares with the target are plain tensors."""
    steps: int
    """Tokens of a draft that are looked at."""

    @property
    def shortest(self) -> int:
        """Tokens that a sequence must have."""
        return self.steps + 2

    @abstractmethod
    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The loss to descend, a scalar. batch: on the CPU. generator: for all that is random in this step."""

    @abstractmethod
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        """Of each depth up to `steps`: how many drafts reach it, and how many are the target's choices down to it."""

    @abstractmethod
    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The draft's ``config.json`` and tensors, by published names."""


class HeadTrainer(Trainer):
    """Heads (`Head`) that draft token by token, each from their own last output."""

    module: Head

    def __init__(self, target: Target, module: Head, steps: int):
        self.target, self.module, self.steps = target, module.eval(), steps
        self.taps, self.device = module.taps, target.embedding.device

    def unroll(self, ids: Tensor, state: Tensor, attention: Causal, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """(recycled, normed), each [B, T, H], of step after step from every slot at once, the text given.

        ids [B, T + 1] int64, state [B, T, H]. In step i, slot t reads token t + 1 + i of the text at position t + i,
        and from step 1 on its own last output; where the text has ended it reads padding.
        """
        positions = torch.arange(state.shape[1], device=ids.device).expand(len(ids), -1)
        for step in range(steps):
            tokens = F.pad(ids[:, 1 + step :], (0, step))
            with attention:
                state, normed = self.module(tokens, positions + step, state)
            yield state, normed

    def project(self, features: Features) -> Tensor:
        """The states of the slots [B, L - 1, H]: the last token has none after it."""
        return self.module.project([state[:, :-1] for state in features.states])

    @torch.no_grad()
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        ids, choices = move(batch.ids, self.device), features.choices.flatten()
        reached = alive = None
        for ahead, (_, normed) in enumerate(self.unroll(ids, self.project(features), Rollout(), steps)):
            slots, places = batch.slots(ahead, self.device)
            right = torch.zeros(normed.shape[:2].numel(), dtype=torch.bool, device=self.device)
            there = right.clone().index_fill_(0, slots, True)
            right[slots] = self._drafts(normed.flatten(0, 1)[slots]) == choices[places]
            reached = there if reached is None else reached & there
            alive = right if alive is None else alive & right
            yield int(reached.sum()), int(alive.sum())

    def _drafts(self, normed: Tensor) -> Tensor:
        """The tokens [R] that are drafted from the rows [R, H]."""
        weight, ids = self.module.head_weight, self.module.draft_to_target
        drafts = torch.cat([F.linear(normed[here], weight).argmax(-1) for here in blocks(len(normed), len(weight))])
        return drafts if ids is None else ids[drafts]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random weights of modules made here depend on `seed` alone; the global random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def as_master(head: Head, embedding: Tensor) -> Head:
    """The head on the device of `embedding`, its parameters in float32 (or float64, if that is the embedding's)."""
    for module in head.modules():
        if type(module) is LlamaRMSNorm:
            module.__class__ = FusedNorm
    return head.to(embedding.device, torch.promote_types(embedding.dtype, torch.float32))


class FusedNorm(LlamaRMSNorm):
    """The same in one kernel each way, where small heads would spend their time on launching ten."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.variance_epsilon)


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
