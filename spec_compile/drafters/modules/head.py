"""`Head`: the base of the heads of EAGLE-1, 2, 3 and of multi-token prediction.

A head continues a text from the target's states. Slot t of its sequence holds the pair (f_t, x_{t+1}): the target's
state at token t and the embedding of the token after it; the slot has RoPE position t and predicts x_{t+2}. Further
tokens are drafted by feeding the head its own output in place of a state (Li et al., EAGLE, arXiv:2401.15077, section
4.1; EAGLE-3, arXiv:2503.01840, section 3.1).

Shapes: B rows, T slots, h the target's hidden size, H the head's, V the vocabulary, Vd the words a head can draft.
"""

import itertools

from torch import Tensor, nn

from ...capture.adapters import shallow


class Head(nn.Module):
    """A draft head: ``project`` target states once, then ``forward`` for each drafted token.

    embedding [V, H], head_weight [Vd, H]: may be the target's own parameters; moving or casting the head would then
    move or cast the target.
    draft_to_target [Vd] int64: the target's id of each row of head_weight (None: row i is token i).
    """

    flavour = ""
    """The name of the format, for reports."""
    taps: tuple[int, ...]
    """States the head reads: 0 the embeddings, i the residual stream after layer i, `FINAL` after the final norm."""
    layers: int
    """Attention layers, which call ``spec_compile::attention`` once each, numbered from 0."""
    hidden_size: int
    all_rows: tuple[Tensor, ...] = ()
    """The output matrix that the rows of `head_weight` were taken from, if `restrict` was called."""
    report: list[str]
    """Lines on the tensors that were loaded, how they were read, and those that were left out."""

    def __init__(self, embedding: Tensor, head_weight: Tensor, hidden_size: int, taps: tuple[int, ...], layers: int):
        super().__init__()
        self.embedding, self.head_weight = embedding, head_weight
        self.register_buffer("draft_to_target", None, persistent=False)
        self.hidden_size, self.taps, self.layers = hidden_size, tuple(taps), layers
        self.report: list[str] = []
        self.open_knobs: dict[str, list[tuple[str, dict]]] = {}

    def restrict(self, ids: Tensor) -> "Head":
        """Another head of the same weights that drafts only the tokens `ids` [Vd]."""
        head = shallow(self)
        head.all_rows, head.draft_to_target = (self.head_weight,), ids
        head.head_weight = nn.Parameter(self.head_weight.detach()[ids], requires_grad=False)
        head.report = [*self.report, f"token_map: drafts {len(ids)} tokens"]
        return head

    def refresh(self) -> None:
        """Copy the rows of a restricted output matrix again."""
        for weight in self.all_rows:
            self.head_weight.data.copy_(weight.detach()[self.draft_to_target])

    def project(self, features: list[Tensor]) -> Tensor:
        """The tapped states, each [B, T, h], in the order of `taps` -> the state [B, T, H] of `forward`."""
        return features[0]

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, positions [B, T] int64, state [B, T, H] -> (recycled, normed), each [B, T, H].

        recycled: the state for the next draft token.
        normed: the factor of ``head_weight``.
        """
        raise NotImplementedError

    def readings(self) -> list["Head"]:
        """This head, and the same weights under every other meaning that its checkpoint leaves open.

        `open_knobs` maps a knob to its other meanings, each a name and the attributes that it changes.
        """
        readings = []
        for choice in itertools.product(*([("", {}), *others] for others in self.open_knobs.values())):
            reading = shallow(self)
            reading.report = [*self.report, *(f"read as: {name}" for name, _ in choice if name)]
            for _, attributes in choice:
                for name, value in attributes.items():
                    setattr(reading, name, value)
            readings.append(reading)
        return readings
