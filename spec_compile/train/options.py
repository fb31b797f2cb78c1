"""Options of `train_draft`, checked before any work starts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..drafters.checkpoints.dflash_config import MARKOV
from ..errors import check_int
from ..tree import MAX_NODES
from .positions import NAMES

LARGEST = 1 << 31
"""The largest value of an integer option."""
OPTIMIZERS = "adamw", "muon"
LAYER_OPTIONS = frozenset({"num_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"})
"""Options of a draft's layers."""
SIZES = ("draft_vocab_size", "ttt_steps", "num_depths", "markov_rank", "emb_dim", "gru_hidden_dim")
"""Further sizes of drafts and of their unrolled steps."""
ABOUT_THE_DRAFT = (
    *sorted(LAYER_OPTIONS), *SIZES, "taps", "block_size", "markov_head_type", "per_position_loss_weight",
)  # fmt: skip
"""Options that only some algorithms have."""


@dataclass(frozen=True)
class TrainingOptions:
    """Options of `train_draft`.

    steps, minutes: when to end; give one (default: 30 minutes)
    batch_size: sequences a step
    sequence_length: tokens a sequence at most (default: 2048, or what the target can hold)
    learning_rate: the highest (default: by the size of the head)
    optimizer: "adamw", or "muon" for the matrices of layers and AdamW for all else (default: muon)
    warmup: share of the training in which it rises
    clip: largest norm of a gradient
    seed: of the weights, the order of the data and all else that is random
    num_layers, intermediate_size, num_attention_heads, num_key_value_heads, head_dim: of the draft's layers, except in
        mtp (default: one layer, for p_eagle four, for drafts of blocks five, with the target's sizes)
    draft_vocab_size: tokens that an EAGLE-3 or P-EAGLE head can draft, the most frequent of the data (default: all of
        up to 40,000, or else 32,000)
    taps: states of the target that eagle3, p_eagle and drafts of blocks read (0: the embeddings, i: the residual stream
        after layer i; default: three, for drafts of blocks five, from early to late)
    ttt_steps: draft tokens that are unrolled in training (default: 7 for eagle3, 3 for mtp)
    num_depths: tokens that a P-EAGLE head drafts in one forward (default: 8)
    block_size: slots of a block, the first of which is the last token of the text (default: 16, for dspark 7)
    markov_rank, markov_head_type: of DSpark's table (default: 256; "vanilla", or "gated" or "rnn")
    emb_dim, gru_hidden_dim: of Domino's readout and of its state (default: 256, 1024)
    per_position_loss_weight: weights of a block's positions, or of eagle3's steps, in the loss: "fixed-exp-decay",
        "dpace", "first-error" or "chain" (default: "dpace", for eagle3 and dspark "fixed-exp-decay")
    checkpoint_minutes: between two checkpoints
    """

    steps: int | None = None
    minutes: float | None = None
    batch_size: int = 8
    sequence_length: int | None = None
    learning_rate: float | None = None
    optimizer: str | None = None
    warmup: float = 0.04
    clip: float = 0.5
    seed: int = 0
    num_layers: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None
    ttt_steps: int | None = None
    num_depths: int | None = None
    block_size: int | None = None
    markov_rank: int | None = None
    markov_head_type: str | None = None
    emb_dim: int | None = None
    gru_hidden_dim: int | None = None
    per_position_loss_weight: str | None = None
    checkpoint_minutes: float = 5.0

    def __post_init__(self):
        if self.steps is not None and self.minutes is not None:
            raise ValueError("steps and minutes: give one of them, which says when to end")
        if self.steps is None and self.minutes is None:
            object.__setattr__(self, "minutes", 30.0)
        for name in ("steps", "batch_size", "sequence_length", *sorted(LAYER_OPTIONS), *SIZES):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, LARGEST)
        check_int("seed", self.seed, 0, LARGEST)
        for name, known in (
            ("markov_head_type", tuple(MARKOV)), ("per_position_loss_weight", NAMES), ("optimizer", OPTIMIZERS),
        ):  # fmt: skip
            if getattr(self, name) not in (None, *known):
                raise ValueError(f"{name}: expected one of {', '.join(known)}, got {getattr(self, name)!r}")
        if self.block_size is not None:
            check_int("block_size", self.block_size, 2, MAX_NODES, "slots of a block, the root's included")
        for name in ("minutes", "learning_rate", "clip"):
            if name == "clip" or getattr(self, name) is not None:
                check_number(name, getattr(self, name), 0.0, math.inf, "positive and finite")
        for name, most, expected in (
            ("warmup", 1.0, "a share of the training, from 0 to below 1"),
            ("checkpoint_minutes", math.inf, "finite and not negative"),
        ):
            if getattr(self, name) != 0:
                check_number(name, getattr(self, name), 0.0, most, expected)
        if self.taps is not None:
            if isinstance(self.taps, str) or not isinstance(self.taps, Sequence):
                raise TypeError(f"taps must be a list of numbers of layers, not {type(self.taps).__name__}")
            for tap in self.taps:
                check_int("a number in taps", tap, 0, LARGEST)
            object.__setattr__(self, "taps", tuple(self.taps))


def check_number(name: str, value, above: float, below: float, expected: str) -> None:
    """TypeError unless `value` is a number, ValueError unless it is between `above` and `below`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not above < value < below:
        raise ValueError(f"{name} must be {expected}, not {value}")
