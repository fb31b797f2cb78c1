"""How the drafts of a block depend on each other: a low-rank bias for each pair of a token and the one before.

The bias of token b after token a at a place with the normed state h is ``query(h, a) . keys[b]``. Some transitions
carry a state over the places, so that all tokens before b count.

Shapes: h the draft's hidden size, V the target's tokens, Vd the draft's, r the rank, C numbers of the carried state,
``...`` any dimensions, the same in all arguments.

`Confidence` predicts acceptance (DSpark, arXiv:2607.05147) by a row of weights next to the draft's output matrix:

    c_k = sigmoid(w . [h_k ; W1[x_(k-1)]] + b)

is the probability that draft k is accepted if all before it are. h_k is the normed state of its place, x_(k-1) is the
token before it, and W1 is the table of `Markov`. Some drafts leave W1 out: then c_k only depends on h_k.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _known(ids: Tensor, table: Tensor) -> Tensor:
    """The ids, those without a row in the table as its last one: a prompt may end with a token that is never drafted,
    because the target reads more tokens than it generates."""
    return ids.clamp(max=table.shape[0] - 1)


class Transition(nn.Module):
    """The base of all transitions. Parameters have their published names."""

    flavour: str
    candidates: int | None = None
    """Number of a place's likeliest tokens that it chooses among (None: all)."""
    state_size: int = 0
    """C; 0 if only the token before counts."""
    skipped: int = 0
    """Places at the beginning that have no bias."""

    @property
    def is_first_order(self) -> bool:
        """True if only the token before and the place count."""
        return self.state_size == 0 and self.skipped == 0

    def describe(self) -> str:
        """A line for the draft's report."""
        among = "all tokens" if self.candidates is None else f"the {self.candidates} likeliest of its place"
        reads = "all tokens before it in the block" if self.state_size else "the token before it"
        return f"each draft is chosen among {among} by a bias of rank {self.keys.shape[1]} that depends on {reads}"

    @property
    def keys(self) -> Tensor:
        """[Vd, r]."""
        raise NotImplementedError

    def query(self, hidden: Tensor, previous: Tensor, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """The query [..., r] and the state [..., C] after `previous`.

        hidden [..., h].
        previous [...] int64: the target's ids.
        state [..., C]: before `previous`; zeros before the first token.
        embedding [V, h]: the target's.
        """
        raise NotImplementedError

    def embed(self, previous: Tensor) -> Tensor:
        """W1[previous] [..., r], which `Confidence` reads; previous [...] int64. Only `Markov` has a W1."""
        raise NotImplementedError


class Markov(Transition):
    """DSpark's "vanilla" head (arXiv:2607.05147): the bias is ``W2 . W1[a]``."""

    flavour = "DSpark"

    def __init__(self, hidden_size: int, vocab_size: int, rows: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, rows, bias=False)

    @property
    def keys(self) -> Tensor:
        return self.markov_w2.weight

    def query(self, hidden, previous, state, embedding):
        return self.embed(previous), state

    def embed(self, previous):
        return F.embedding(_known(previous, self.markov_w1.weight), self.markov_w1.weight)


def table_rank(transition: Transition | None) -> int:
    """Numbers that a transition's W1 has of each token; 0 if there is no W1."""
    return transition.markov_w1.embedding_dim if isinstance(transition, Markov) else 0


class GatedMarkov(Markov):
    """DSpark's "gated" head: a gate of the place's state and of W1[a] scales W1[a]."""

    def __init__(self, hidden_size: int, vocab_size: int, rows: int, rank: int):
        super().__init__(hidden_size, vocab_size, rows, rank)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def query(self, hidden, previous, state, embedding):
        before = self.embed(previous)
        return self.gate_proj(torch.cat([hidden, before], dim=-1)).sigmoid() * before, state


class RecurrentMarkov(Markov):
    """DSpark's "rnn" head: a gated state of all tokens before, as many numbers as the rank."""

    def __init__(self, hidden_size: int, vocab_size: int, rows: int, rank: int):
        super().__init__(hidden_size, vocab_size, rows, rank)
        self.state_size = rank
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def query(self, hidden, previous, state, embedding):
        joined = torch.cat([state, self.embed(previous), hidden], dim=-1)
        gate, candidate, out = self.joint_proj(joined).chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * candidate.tanh()


class Selector(Transition):
    """DFlash 2's candidate selector: ``(A[a] * W h) . B[b]``, among a place's `candidates` likeliest tokens."""

    flavour = "DFlash 2"

    def __init__(self, hidden_size: int, vocab_size: int, rows: int, rank: int, candidates: int):
        super().__init__()
        self.candidates = candidates
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(rows, rank))

    @property
    def keys(self) -> Tensor:
        return self.successor_codebook

    def query(self, hidden, previous, state, embedding):
        before = F.embedding(_known(previous, self.predecessor_codebook), self.predecessor_codebook)
        return before * self.hidden_projection(hidden), state


class Domino(Transition):
    """Domino's head (arXiv:2605.29707): a GRU reads the tokens before, a readout joins its state with the place's.

    skipped: first places, which it leaves as they are (pure_draft_prefix_len).
    """

    flavour = "Domino"

    def __init__(self, hidden_size: int, rows: int, rank: int, state_size: int, skipped: int):
        super().__init__()
        self.state_size, self.skipped = state_size, skipped
        self.prefix_gru = nn.Module()  # by `nn.GRU`'s names; its forward takes whole sequences
        self.prefix_gru.weight_ih_l0 = nn.Parameter(torch.zeros(3 * state_size, hidden_size))
        self.prefix_gru.weight_hh_l0 = nn.Parameter(torch.zeros(3 * state_size, state_size))
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + state_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, rows, bias=False)
        )

    @property
    def keys(self) -> Tensor:
        return self.embed_proj[2].weight

    def query(self, hidden, previous, state, embedding):
        reads = F.linear(F.embedding(previous, embedding), self.prefix_gru.weight_ih_l0).chunk(3, dim=-1)
        keeps = F.linear(state, self.prefix_gru.weight_hh_l0).chunk(3, dim=-1)
        reset, update = ((reads[i] + keeps[i]).sigmoid() for i in (0, 1))
        state = (1 - update) * (reads[2] + reset * keeps[2]).tanh() + update * state
        return self.embed_proj[:2](torch.cat([hidden, state], dim=-1)), state


class Confidence(nn.Module):
    """The row of weights that predicts acceptance. Parameters have their published names.

    hidden_size: the draft's.
    rank: numbers that it reads of the token before; 0 for none.
    """

    def __init__(self, hidden_size: int, rank: int = 0):
        super().__init__()
        self.hidden_size, self.rank = hidden_size, rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def describe(self) -> str:
        """A line for the draft's report."""
        reads = "its place and the token before it" if self.rank else "its place"
        return f"the draft predicts from {reads} how likely each draft is to be accepted"

    def logits(self, hidden: Tensor, before: Tensor | None = None) -> Tensor:
        """log(c / (1 - c)) [...] float32.

        hidden [..., h]: normed states.
        before [..., rank]: rows of W1; None if rank is 0. Its leading dimensions and `hidden`'s are broadcast,
            so that the candidates of a place share its state: hidden [B, P, 1, h] and before [B, P, K, rank] give
            [B, P, K].
        """
        of_place, of_token = self.proj.weight.split([self.hidden_size, self.rank], dim=1)
        logits = F.linear(hidden, of_place, self.proj.bias).float()
        if before is not None:
            logits = logits + F.linear(before, of_token).float()
        return logits[..., 0]
