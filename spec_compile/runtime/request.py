"""What one ``generate()`` asks of the engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..tree import Accepted, Tree
from .accept.draw import Sampler
from .past import Past
from .state import State


@dataclass
class Request:
    """What one generate() asks for. Lengths count a row's own tokens, prompt included and padding not.

    share_text: whether later calls may draft from this one's texts. past: keys and values that exist already;
    unknown: of tokens that are not in `prompts`. first_logits [B, V]: of the token after the prompts, if they are
    known; then `past` covers the whole prompts. choose: makes an `Accepted` of verified trees and their logits
    [B, N, V], in place of greedy acceptance inside the round. sampler, seed: draws inside the round. temperature: at
    which drafts are drawn, if the drafter draws (0: the likeliest ones). stopped: rows that the caller has ended; it
    may add to them. state: what `Engine.run` ran it on, for whoever reads its cache.
    """

    prompts: list[list[int]]
    min_lengths: list[int]
    max_lengths: list[int]
    eos: list[int] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)
    share_text: bool = True
    past: Past | None = None
    unknown: bool = False
    first_logits: Tensor | None = None
    choose: Callable[[Tree, Tensor], Accepted] | None = None
    sampler: Sampler | None = None
    seed: int = 0
    temperature: float = 0.0
    prefill_chunk_size: int | None = None
    stopped: set[int] = field(default_factory=set)
    state: State | None = None
