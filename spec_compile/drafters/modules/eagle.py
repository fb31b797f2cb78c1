"""The heads of EAGLE-1 and EAGLE-2 (arXiv:2401.15077, arXiv:2406.16858) and of EAGLE-3 (arXiv:2503.01840), and `Head`,
which is also the base of multi-token prediction.

A head continues a text from the target's states. Slot t of its sequence holds the pair (f_t, x_{t+1}): the target's
state at token t and the embedding of the token after it; the slot has RoPE position t and predicts x_{t+2}. Further
tokens are drafted by feeding the head its own output in place of a state (Li et al., EAGLE, arXiv:2401.15077, section
4.1; EAGLE-3, arXiv:2503.01840, section 3.1).

Shapes: B rows, T slots, h the target's hidden size, H the head's, V the vocabulary, Vd the words a head can draft.
"""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...capture.copies import shallow
from ...passes.outputs import FINAL
from .layers import ONE_LAYER, JoinedLayer, Layer, LayerKnobs, rotary


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


class EagleHead(Head):
    """EAGLE-1 and EAGLE-2 (one set of weights): u = fc [embedding; state], then decoder layers.

    The state is the target's after its final norm. The output of the last layer is recycled.

    embedding_norm, state_norm: RMSNorms before fc (HASS).
    input_norm: the first layer has an input norm, too.
    output_norm: an RMSNorm before the output matrix.
    recycle_normed: the output after that norm is recycled (Mistral).
    embedding_first: the order of fc's input.
    """

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        head_weight: Tensor,
        layer: LayerKnobs = ONE_LAYER,
        fc_bias: bool = True,
        embedding_norm: bool = False,
        state_norm: bool = False,
        input_norm: bool = False,
        output_norm: bool = False,
        recycle_normed: bool = False,
        embedding_first: bool = True,
    ):
        super().__init__(embedding, head_weight, config.hidden_size, (FINAL,), layer.num_layers)
        self.embedding_first, self.recycle_normed = embedding_first, recycle_normed
        self.embedding_norm, self.state_norm, self.output_norm = (
            LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) if wanted else nn.Identity()
            for wanted in (embedding_norm, state_norm, output_norm)
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.blocks = nn.ModuleList(
            Layer(config, i, layer, input_norm=input_norm or i > 0) for i in range(layer.num_layers)
        )
        self.rotary_emb = rotary(config, embedding.device)

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.embedding_norm(F.embedding(input_ids, self.embedding)), self.state_norm(state)]
        x = self.fc(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))
        rope = self.rotary_emb(x, positions)
        for block in self.blocks:
            x = block(x, rope)
        normed = self.output_norm(x)
        return (normed if self.recycle_normed else x), normed


class Eagle3Head(Head):
    """EAGLE-3: fc joins several of the target's states; the first layer reads [embedding; state], 2H wide.

    draft_vocab_size: rows of the head's own output matrix (None: `head_weight` is given).
    feature_size: h.
    fc: False: the one tapped state is the head's state (``use_aux_hidden_state: false``).
    fc_norm: an RMSNorm for each tapped state.
    norm_before_fc: one over all of them.
    recycle_normed: the output after the final norm is recycled (EAGLE-3.1).
    norm_before_residual: see `JoinedLayer`.
    """

    flavour = "EAGLE-3"

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        taps: tuple[int, ...],
        feature_size: int,
        head_weight: Tensor | None = None,
        draft_vocab_size: int | None = None,
        layer: LayerKnobs = ONE_LAYER,
        fc: bool = True,
        fc_bias: bool = False,
        fc_norm: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        recycle_normed: bool = False,
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        if head_weight is None:
            head_weight = nn.Parameter(torch.zeros(draft_vocab_size, size))
        super().__init__(embedding, head_weight, size, taps, layer.num_layers)
        self.recycle_normed = recycle_normed
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(feature_size, eps) for _ in taps) if fc_norm else None
        self.input_norm = LlamaRMSNorm(feature_size * len(taps), eps) if norm_before_fc else nn.Identity()
        self.fc = nn.Linear(feature_size * len(taps), size, bias=fc_bias) if fc else nn.Identity()
        first = JoinedLayer(config, 0, layer, norm_before_residual)
        self.blocks = nn.ModuleList([first, *(Layer(config, i, layer) for i in range(1, layer.num_layers))])
        self.norm = LlamaRMSNorm(size, eps)
        self.rotary_emb = rotary(config, embedding.device)

    def project(self, features: list[Tensor]) -> Tensor:
        if self.fc_norm is not None:
            features = [norm(feature) for norm, feature in zip(self.fc_norm, features)]
        return self.fc(self.input_norm(torch.cat(features, dim=-1)))

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        rope = self.rotary_emb(state, positions)
        first, *others = self.blocks
        x = first(F.embedding(input_ids, self.embedding), state, rope)
        for block in others:
            x = block(x, rope)
        normed = self.norm(x)
        return (normed if self.recycle_normed else x), normed
