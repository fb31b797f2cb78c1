"""`Trainer`, the contract between the training loop and an algorithm, and `HeadTrainer`, the base of heads."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..drafters.checkpoints.target import Target
from ..drafters.modules.head import Head
from .attention import Causal, Rollout
from .capture import RolloutRows
from .data import Batch, move
from .features import Features
from .loss import likeliest


class Trainer(ABC):
    """A new draft for a target, and its loss.

    It is built from (target, options, counts); counts [V] int64: how often each token is supervised. Raises ValueError
    or UnsupportedModelError if no such draft can be made.
    """

    name = ""
    """The algorithm's name, as in ``algo=``."""
    takes: frozenset[str] = frozenset()
    """The options in `ABOUT_THE_DRAFT` that this algorithm has."""
    learning_rate: tuple[float, float] = (0.4, 2e-3)
    """(a, b): the default is a / hidden size, but not above b."""
    optimizer = "muon"
    """The default of the option of this name."""
    taps: tuple[int, ...]
    """The target's states that the draft reads, as in `Head.taps`."""
    kept: Tensor | None = None
    """[K] int64: the tokens from whose logits of the target it learns (None: from all)."""
    learns_from_choices = False
    """True if its loss needs the target's choices."""
    share = 0.0
    """The share of the training that is done, from 0 to 1, which the loop sets before each step."""
    captures = True
    """False: kernels are launched one by one, and no CUDA graph of each shape takes memory."""
    module: nn.Module
    """The draft. Its parameters are trained, in float32; tensors shared with the target are not parameters."""
    steps: int
    """Tokens of a draft on which it is trained or measured."""

    @property
    def shortest(self) -> int:
        """Tokens that a sequence must have: each step needs one more, after a state and the token after it."""
        return self.steps + 2

    @abstractmethod
    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The loss of a batch, a scalar with a gradient.

        batch: on the CPU
        features: of its ids, on the draft's device
        generator: the source of this step's random numbers
        """

    def shared_logits(self, states: Tensor) -> Callable[[Tensor], Tensor]:
        """The target's logits by the output matrix that a draft shares with it: a function from positions [n].

        states: [B, L, h]; the target's states before its output matrix
        """
        states, weight = states.flatten(0, 1), self.module.head_weight
        return lambda rows: F.linear(states[rows], weight)

    @abstractmethod
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        """For each depth from 1 to `steps`: (drafts that reach it, drafts that equal the target's choices down to it).

        A draft reaches a depth if all tokens down to it are supervised.
        """

    @abstractmethod
    def publish(self) -> tuple[dict, dict[str, Tensor]]:
        """The draft's ``config.json``, and its tensors by published names."""


class HeadTrainer(Trainer):
    """Trainer of a `Head`, which drafts one token after the other, each from its previous output."""

    module: Head

    def __init__(self, target: Target, module: Head, steps: int):
        self.target, self.module, self.steps = target, module.eval(), steps
        self.taps, self.device = module.taps, target.embedding.device
        self.kept = module.draft_to_target
        self.learns_from_choices = self.kept is not None and len(self.kept) < target.vocab_size

    @cached_property
    def _rows(self) -> RolloutRows:
        return RolloutRows(trained_parameters(self.module).values(), type(self.module).__name__, self.captures)

    @classmethod
    def of_module(cls, target: Target, module: Head, steps: int) -> "HeadTrainer":
        """The trainer of a head that is there already, which it cannot `publish`. The arguments are the attributes."""
        trainer = cls.__new__(cls)
        HeadTrainer.__init__(trainer, target, module, steps)
        return trainer

    def unroll(self, ids: Tensor, state: Tensor, attention: Causal, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The head's outputs as it drafts from every slot at once, with the text's tokens in place of drafts.

        ids: [B, T + 1] int64
        state: [B, T, H]

        In step i, slot t reads token t + 1 + i of the text at position t + i, with `state` in step 0 and with its
        previous output after that. Past the end of the text it reads padding. Yields (recycled, normed) of each step,
        both [B, T, H].
        """
        positions = torch.arange(state.shape[1], device=ids.device).expand(len(ids), -1)
        for step in range(steps):
            tokens = F.pad(ids[:, 1 + step :], (0, step))
            with attention:
                state, normed = self.module(tokens, positions + step, state)
            yield state, normed

    def rolled_out(self, batch: Batch, features: Features, slots: Tensor) -> Tensor:
        """The normed outputs [R, H] of `slots` [R] (see `Batch.rollout`) among those of all steps."""
        return self._rows(self._normed, [move(batch.ids, self.device), *features.states], move(slots, self.device))

    def _normed(self, ids: Tensor, *states: Tensor) -> list[Tensor]:
        """The normed outputs of each step, [B, L - 1, H], for ids [B, L] and the target's tapped states [B, L, h]."""
        unrolled = self.unroll(ids, self.project(states), Rollout(self.steps), self.steps)
        return [normed for _, normed in unrolled]

    def project(self, states: Sequence[Tensor]) -> Tensor:
        """The head's input [B, L - 1, H] for the target's tapped states, each [B, L, h].

        The last position makes no slot, because no token follows it.
        """
        return self.module.project([state[:, :-1] for state in states])

    @torch.no_grad()
    def accepted(self, batch: Batch, features: Features, steps: int) -> Iterator[tuple[int, int]]:
        ids, choices = move(batch.ids, self.device), features.choices.flatten()
        reached = alive = None
        for ahead, (_, normed) in enumerate(self.unroll(ids, self.project(features.states), Rollout(steps), steps)):
            slots, teachers = (move(part, self.device) for part in batch.slots(ahead))
            right = torch.zeros(normed.shape[:2].numel(), dtype=torch.bool, device=self.device)
            counted = right.clone().index_fill_(0, slots, True)
            right[slots] = self._drafts(normed.flatten(0, 1)[slots]) == choices[teachers]
            # A draft counts at a depth only if it counted, or was right, at every depth before.
            reached = counted if reached is None else reached & counted
            alive = right if alive is None else alive & right
            yield int(reached.sum()), int(alive.sum())

    def _drafts(self, normed: Tensor) -> Tensor:
        """The tokens, int64 [R], that the head drafts from normed outputs [R, H]."""
        weight, ids = self.module.head_weight, self.module.draft_to_target
        drafts = likeliest([(normed, weight)])
        return drafts if ids is None else ids[drafts]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """A context in which random weights only depend on `seed`. It restores the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def as_master(head: Head, embedding: Tensor) -> Head:
    """The head, ready to be trained on the device of `embedding`.

    Its parameters are float32, or float64 if the embedding is: updates would vanish in 16 bits.
    """
    for module in head.modules():
        if type(module) is LlamaRMSNorm:
            module.__class__ = FusedNorm
    return head.to(embedding.device, torch.promote_types(embedding.dtype, torch.float32))


class FusedNorm(LlamaRMSNorm):
    """RMS norm by one kernel in each direction, where transformers launches ten, which takes a small head's time."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.variance_epsilon)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of a module that are trained, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
