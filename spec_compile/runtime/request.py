"""`Request`: one ``generate()`` as the engine runs it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from ..capture.loras import Loaded
from ..tree import MAX_NODES
from .accept.draw import DrawInRound
from .accept.host import HostAcceptor
from .past import Past
from .state import State


@dataclass
class Request:
    """One ``generate()`` as the engine runs it, for B rows.

    Lengths count the tokens of a row, its prompt included and its padding not.

    prompts: token ids of each row [B lists], without padding.
    min_lengths: tokens of each row [B] before which it may not end.
    max_lengths: tokens of each row [B] at which it ends.
    eos: ids of the tokens that end a row.
    ids: the prompts as [B, W] int64 on the CPU, if they have one length; None: nobody has them as a tensor.
    references: 1-D tensors of token ids from which drafts may be copied.
    share_text: True lets later calls draft from the texts of this one.
    past: existing keys and values of the first prompt tokens.
    position_offsets: positions minus slots of each row [B]; None: 0.
    has_unknown_tokens: True if `prompts` has 0 for tokens of which only keys and values are known, or has tokens of
        pictures, whose keys and values are not those of their ids.
    first_logits: [B, V] float, the target's logits after the prompts if known; `past` then covers the whole prompts,
        and `acceptor` is a `HostAcceptor`.
    features: for each tap of the draft the target's hidden states [B, L, C] of the first L positions of the prompts,
        padding included, which `past` covers; None if unknown.
    acceptor: accepts tokens; None accepts greedily inside the round (see `accept.Route`).
    seed: of the random numbers of `DrawInRound` and of drafters that draw, in [0, 2**63).
    temperature: at which such drafters draw; 0 takes the likeliest token.
    prefill_chunk_size: most tokens of each row in a step of the prefill; None leaves it to the engine.
    check: raises if the model has changed; called once, while the GPU computes, before a token is given out.
    stopped: indices of rows that the caller has ended; it may add to them between two rounds.
    adapters: the adapter of each row [B]; None: no row has one.
    most_nodes: nodes that rounds verify of each tree, at most; 1: no drafts.
    state: set by `Engine.run`, so that the caller can read its cache.
    """

    prompts: list[list[int]]
    min_lengths: list[int]
    max_lengths: list[int]
    eos: list[int] = field(default_factory=list)
    ids: Tensor | None = None
    references: list[Tensor] = field(default_factory=list)
    share_text: bool = True
    past: Past | None = None
    position_offsets: list[int] | None = None
    has_unknown_tokens: bool = False
    first_logits: Tensor | None = None
    features: list[Tensor] | None = None
    acceptor: HostAcceptor | DrawInRound | None = None
    seed: int = 0
    temperature: float = 0.0
    prefill_chunk_size: int | None = None
    check: Callable[[], None] | None = None
    stopped: set[int] = field(default_factory=set)
    most_nodes: int = MAX_NODES
    adapters: list[Loaded] | None = None
    state: State | None = None

    @property
    def host_acceptor(self) -> HostAcceptor | None:
        """The acceptor, if tokens are accepted on the host, between the two halves of a round."""
        return self.acceptor if isinstance(self.acceptor, HostAcceptor) else None

    @property
    def draw_in_round(self) -> DrawInRound | None:
        """The acceptor, if tokens are drawn inside the round."""
        return self.acceptor if isinstance(self.acceptor, DrawInRound) else None
