"""`Trainer`, the contract between the training loop and an algorithm, and `HeadTrainer`, the base of heads.

Also the config of a new draft, which has its target's sizes unless options name others.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..drafters.checkpoints.files import Target
from ..drafters.modules.eagle import Head
from .attention import Causal, Rollout
from .data import Batch, move
from .features import Features, RolloutRows
from .loss import Products, likeliest
from .options import TrainingOptions


class Trainer(ABC):
    """A new draft for a target, and its loss.

    It is built from (target, options, counts); counts [V] int64: how often each token is supervised. Raises ValueError
    or UnsupportedModelError if no such draft can be made.
    """

    name = ""
    """The algorithm's name, as in ``algo=``."""
    supports: frozenset[str] = frozenset()
    """Options of drafts that this algorithm has."""
    learning_rate: tuple[float, float] = (0.4, 2e-3)
    """(a, b): the default is a / hidden size, but not above b."""
    optimizer = "muon"
    """The default of the option of this name."""
    taps: tuple[int, ...]
    """The target's states that the draft reads, as in `Head.taps`."""
    kept: Tensor | None
    """[K] int64: the tokens from whose logits of the target it learns (None: from all)."""
    learns_from_choices: bool
    """True if its loss needs the target's choices."""
    share = 0.0
    """The share of the training that is done, from 0 to 1, which the loop sets before each step."""
    captures = True
    """False: kernels are launched one by one, and no CUDA graph of each shape takes memory."""
    module: nn.Module
    """The draft. Its parameters are trained, in float32; tensors shared with the target are not parameters."""
    steps: int
    """Tokens of a draft on which it is trained or measured."""
    target: Target

    def adopt(self, target: Target, module: nn.Module, steps: int) -> None:
        """Set the attributes of a trainer of `module`, which drafts or is measured on `steps` tokens."""
        self.target, self.module, self.steps = target, module.eval(), steps
        self.taps, self.kept = module.taps, module.draft_to_target
        self.learns_from_choices = self.kept is not None and len(self.kept) < target.vocab_size

    @classmethod
    def of_module(cls, target: Target, module: nn.Module, steps: int) -> "Trainer":
        """The trainer of a draft that is there already, which it cannot `publish`."""
        trainer = cls.__new__(cls)
        trainer.adopt(target, module, steps)
        return trainer

    @property
    def device(self) -> torch.device:
        return self.target.embedding.device

    @cached_property
    def _rows(self) -> RolloutRows:
        return RolloutRows(trained_parameters(self.module), type(self.module).__name__, self.device, self.captures)

    @property
    def shortest(self) -> int:
        """Tokens that a sequence must have: each step needs one more, after a state and the token after it."""
        return self.steps + 2

    @abstractmethod
    def loss(self, batch: Batch, features: Features, generator: torch.Generator) -> Tensor:
        """The loss of a batch, a scalar with a gradient.

        batch: on the CPU
        features: the target's results for its ids, on the draft's device
        generator: the source of this step's random numbers
        """

    def shared_logits(self, states: Tensor) -> Callable[[Tensor], Tensor]:
        """The target's logits by the output matrix that a draft shares with it: a function from positions [n].

        states: [B, L, h]; the target's states before its output matrix
        """
        states, weight = states.flatten(0, 1), self.module.head_weight
        return lambda rows: F.linear(states[rows], weight)

    def without_undraftable(self, weights: Tensor, features: Features, teachers: Tensor) -> Tensor:
        """The weights [R] of rows, 0 for a row whose teacher [R], on the CPU, chooses none of the tokens `kept`."""
        if not self.learns_from_choices:
            return weights
        return weights * torch.isin(features.choices.flatten()[move(teachers, self.kept.device)], self.kept)

    def drafts(self, products: Products) -> Tensor:
        """The tokens of the target, int64 [R], that are likeliest by the sum of products of states and matrices."""
        rows, ids = likeliest(products), self.module.draft_to_target
        return rows if ids is None else ids[rows]

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
        """The normed outputs [R, H] of `slots` [R] (see `Batch.rollout`) among the slots of all steps."""
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
        every, step_of, teacher_of = batch.rollout(steps)
        reached = alive = torch.ones((), dtype=torch.bool, device=self.device)
        for step, (_, normed) in enumerate(self.unroll(ids, self.project(features.states), Rollout(steps), steps)):
            count, here = normed.shape[:2].numel(), step_of == step
            slots, teachers = (move(part[here], self.device) for part in (every - step * count, teacher_of))
            right = torch.zeros(count, dtype=torch.bool, device=self.device)
            counted = right.clone().index_fill_(0, slots, True)
            drafts = self.drafts([(normed.flatten(0, 1)[slots], self.module.head_weight)])
            right[slots] = drafts == choices[teachers]
            # A draft counts at a depth only if it counted, or was right, at every depth before.
            reached, alive = reached & counted, alive & right
            yield int(reached.sum()), int(alive.sum())


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


@torch.no_grad()
def copy_weights(source: dict[str, Tensor], to: nn.Module) -> None:
    """Copy tensors in place to the parameters of these names, in their dtypes."""
    parameters = dict(to.named_parameters())
    for name, value in source.items():
        parameters[name].copy_(value)


FULL_VOCABULARY = 40_000
"""Tokens of a vocabulary up to which a draft can propose all of them."""
KEPT_TOKENS = 32_000
"""Tokens of a larger vocabulary that a draft can propose by default."""


def draft_config(target: Target, options: TrainingOptions, layers: int = 1) -> LlamaConfig:
    """The config of a draft's layers.

    layers: their number by default. Raises ValueError, naming the option, if such layers cannot be built.
    """
    config, size = target.config, target.hidden_size
    heads, head_dim = options.num_attention_heads or config.num_attention_heads, options.head_dim
    if head_dim is None:
        head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        head_dim = 64 if head_dim % 8 or head_dim > 256 else head_dim
    if head_dim % 8 or head_dim > 256:  # no fused attention kernel takes it
        raise ValueError(f"head_dim: expected a multiple of 8 up to 256, got {head_dim}")
    kv_heads = options.num_key_value_heads
    if kv_heads is None:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {heads} query heads cannot share {kv_heads}; choose a divisor")
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)  # where layers differ
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=size,
        intermediate_size=options.intermediate_size or getattr(config, "intermediate_size", None) or 4 * size,
        num_hidden_layers=options.num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
        rope_parameters={"rope_type": "default", "rope_theta": float(rope.get("rope_theta", 10000.0))},
        tie_word_embeddings=False,
    )


def published_config(config: LlamaConfig, target: Target, architecture: str, **more) -> dict:
    """The ``config.json`` of a draft, in the form of published ones. more: entries to add or replace."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    ends = {name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id")}
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **{name: getattr(config, name) for name in names},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        **ends,
        "torch_dtype": str(target.embedding.dtype).removeprefix("torch."),
        **more,
    }


def check_taps(taps: tuple[int, ...], num_layers: int, excluded_first: int | None = None) -> None:
    """ValueError if the target has no such states, or if the first one is excluded."""
    in_range = taps and 0 <= taps[0] <= taps[-1] <= num_layers and taps[0] != excluded_first
    if not in_range or list(taps) != sorted(set(taps)):
        but = "" if excluded_first is None else f" the first of them not {excluded_first} (no published list says it),"
        raise ValueError(
            f"taps: expected states from 0 to {num_layers}, ascending,{but} got {', '.join(map(str, taps)) or 'none'}"
        )


def frequent_tokens(counts: Tensor, size: int | None, always: list[int]) -> Tensor:
    """The `size` most frequent tokens, int64 [size], ascending, with `always` among them.

    counts int64 [V]: see `data.count_tokens`. size: None for the default. Raises ValueError if `size` is not possible.
    """
    vocab_size = len(counts)
    size = size or (vocab_size if vocab_size <= FULL_VOCABULARY else KEPT_TOKENS)
    if not len(always) < size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size: expected {len(always) + 1} to {vocab_size}, the target's vocabulary, got {size}"
        )
    ranks = counts.clone()
    ranks[always] = torch.iinfo(ranks.dtype).max
    return ranks.argsort(descending=True, stable=True)[:size].sort().values
