"""Options of `train_draft` and `train_while_serving`, checked before any work starts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..contrib.linked.draft import MARKOV
from ..errors import check_int
from ..tree import MAX_NODES
from .loss import NAMES

LAYER_OPTIONS = frozenset({"num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"})
"""Options of a draft's layers."""
MOST_SHARE = 0.2
"""The largest share of the wall time for training while serving. Calls keep four fifths anyway; see `FairLock`."""


def integer(default: int | None = None, low: int = 1, high: int = 1 << 31, note: str = "") -> Any:
    """A field with an int from `low` to `high`."""
    return field(default=default, metadata={"check": lambda name, value: check_int(name, value, low, high, note)})


def number(default: float | None, expected: str, fits: Callable[[float], bool]) -> Any:
    """A field with a number. expected: what `fits` demands, in words."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"{name} must be a number, not {type(value).__name__}")
        if not fits(value):
            raise ValueError(f"{name} must be {expected}, not {value}")

    return field(default=default, metadata={"check": check})


def positive(default: float | None) -> Any:
    """A field with a finite number above 0."""
    return number(default, "positive and finite", lambda value: 0 < value < math.inf)


def one_of(known: Sequence[str]) -> Any:
    """A field with one of the names `known`, or None."""

    def check(name: str, value: Any) -> None:
        if value not in known:
            raise ValueError(f"{name}: expected one of {', '.join(known)}, got {value!r}")

    return field(default=None, metadata={"check": check})


def layer_numbers() -> Any:
    """A field with a list of numbers of layers, or None."""

    def check(name: str, value: Any) -> None:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise TypeError(f"{name} must be a list of numbers of layers, not {type(value).__name__}")
        for each in value:
            check_int(f"a number in {name}", each, 0, 1 << 31)

    return field(default=None, metadata={"check": check})


class Checked:
    """The base of options. Each field has a check; None passes where it is the default."""

    def __post_init__(self):
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None or each.default is not None:
                each.metadata["check"](each.name, value)


@dataclass(frozen=True)
class TrainingOptions(Checked):
    """Options of `train_draft`.

    steps, minutes: when to end; give one (default: 30 minutes)
    batch_size: sequences a step
    sequence_length: tokens a sequence at most (default: 2048, or what the target can hold)
    learning_rate: the highest (default: by the size of the head)
    optimizer: "adamw", or "muon" for the matrices of layers and AdamW for all else (default: muon)
    warmup: share of the training in which it rises
    clip: largest norm of a gradient
    seed: seeds the weights, the order of the data and all else that is random
    num_layers, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: sizes of the draft, except in
        mtp (default: one layer, for p_eagle four, for drafts of blocks five, with the target's sizes)
    draft_vocab_size: tokens that an EAGLE-3 or P-EAGLE head can draft, the most frequent of the data (default: all of
        up to 40,000, or else 32,000)
    taps: states of the target that eagle3, p_eagle and drafts of blocks read (0: the embeddings, i: the residual stream
        after layer i; default: three, for drafts of blocks five, from early to late)
    ttt_steps: draft tokens that are unrolled in training (default: 7 for eagle3, 3 for mtp)
    num_depths: tokens that a P-EAGLE head drafts in one forward (default: 8)
    block_size: slots of a block, the first of which is the last token of the text (default: 16, for dspark 7)
    markov_rank, markov_head_type: size and kind of DSpark's table (default: 256; "vanilla", or "gated" or "rnn")
    emb_dim, gru_hidden_dim: sizes of Domino's readout and of its state (default: 256, 1024)
    per_position_loss_weight: weights of a block's positions, or of eagle3's steps, in the loss: "fixed-exp-decay",
        "dpace", "first-error" or "chain" (default: "dpace", for eagle3 and dspark "fixed-exp-decay")
    checkpoint_minutes: between two checkpoints
    """

    steps: int | None = integer()
    minutes: float | None = positive(None)
    batch_size: int = integer(8)
    sequence_length: int | None = integer()
    learning_rate: float | None = positive(None)
    optimizer: str | None = one_of(("adamw", "muon"))
    warmup: float = number(0.04, "a share of the training, from 0 to below 1", lambda value: 0 <= value < 1)
    clip: float = positive(0.5)
    seed: int = integer(0, low=0)
    num_layers: int | None = integer()
    intermediate_size: int | None = integer()
    num_attention_heads: int | None = integer()
    num_key_value_heads: int | None = integer()
    head_dim: int | None = integer()
    draft_vocab_size: int | None = integer()
    taps: tuple[int, ...] | None = layer_numbers()
    ttt_steps: int | None = integer()
    num_depths: int | None = integer()
    block_size: int | None = integer(low=2, high=MAX_NODES, note="slots of a block, the root's included")
    markov_rank: int | None = integer()
    markov_head_type: str | None = one_of(tuple(MARKOV))
    emb_dim: int | None = integer()
    gru_hidden_dim: int | None = integer()
    per_position_loss_weight: str | None = one_of(NAMES)
    checkpoint_minutes: float = number(5.0, "finite and not negative", lambda value: 0 <= value < math.inf)

    def __post_init__(self):
        if self.steps is not None and self.minutes is not None:
            raise ValueError("steps and minutes: give one of them, which says when to end")
        super().__post_init__()
        if self.steps is None and self.minutes is None:
            object.__setattr__(self, "minutes", 30.0)
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(self.taps))


@dataclass(frozen=True)
class OnlineOptions(Checked):
    """Options of `train_while_serving`.

    buffer_tokens: tokens of texts, prompts included, that are kept in the host's memory
    share: most of the wall time that training takes
    learning_rate: the highest (default: by the size of the head)
    steps_between_swaps: steps after which the trained weights go into service, or are dropped
    """

    buffer_tokens: int = integer(1 << 16, low=1 << 8)
    share: float = number(0.1, f"above 0 and at most {MOST_SHARE}", lambda value: 0 < value <= MOST_SHARE)
    learning_rate: float | None = positive(None)
    steps_between_swaps: int = integer(50)
