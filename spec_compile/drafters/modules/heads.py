"""Draft heads: `Head`, which EAGLE-1, 2, 3 and multi-token prediction share, and the blocks of the EAGLE family.

A head continues a text from the target's states. Slot t of its sequence holds the pair (f_t, x_{t+1}): the target's
state at token t and the embedding of the token after it; the slot has RoPE position t and predicts x_{t+2}. Further
tokens are drafted by feeding the head its own output in place of a state (Li et al., EAGLE, arXiv:2401.15077, section
4.1; EAGLE-3, arXiv:2503.01840, section 3.1).

Shapes: B rows, T slots, h the target's hidden size, H the head's, V the vocabulary, Vd the words a head can draft.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from ...capture.adapters import shallow
from ...kernels import ops
from ...passes.tap_hidden_states import FINAL


class Head(nn.Module):
    """A draft head: ``project`` target states once, then ``forward`` for each drafted token.

    embedding [V, H] and head_weight [Vd, H] may be the target's own parameters: moving or casting the head would move
    or cast the target. draft_to_target [Vd] int64: the target's id of each row of head_weight (None: row i is token i).
    """

    flavour = ""
    """Whose format this is, for reports."""
    taps: tuple[int, ...]
    """States the head reads: 0 the embeddings, i the residual stream after layer i, `FINAL` behind the final norm."""
    layers: int
    """Attention layers, which call ``spec_compile::attention`` once each, numbered from 0."""
    hidden_size: int
    all_rows: tuple[Tensor, ...] = ()
    """The output matrix that the rows of `head_weight` were taken from, if `restrict` was called."""
    report: list[str]
    """What was loaded, how it was read, and what was left out, a sentence a line."""

    def __init__(self, embedding: Tensor, head_weight: Tensor, hidden_size: int, taps: tuple[int, ...], layers: int):
        super().__init__()
        self.embedding, self.head_weight = embedding, head_weight
        self.register_buffer("draft_to_target", None, persistent=False)
        self.hidden_size, self.taps, self.layers = hidden_size, tuple(taps), layers
        self.report: list[str] = []
        self.open_knobs: dict[str, list[tuple[str, dict]]] = {}

    def restrict(self, ids: Tensor) -> "Head":
        """Another head of the same weights that drafts the tokens `ids` [Vd] alone."""
        head = shallow(self)
        head.all_rows, head.draft_to_target = (self.head_weight,), ids
        head.head_weight = nn.Parameter(self.head_weight.detach()[ids], requires_grad=False)
        head.report = [*self.report, f"token_map: drafts {len(ids)} tokens"]
        return head

    def refresh(self) -> None:
        """Take the rows of a restricted output matrix anew from the whole one."""
        for weight in self.all_rows:
            self.head_weight.data.copy_(weight.detach()[self.draft_to_target])

    def project(self, features: list[Tensor]) -> Tensor:
        """The tapped states, each [B, T, h], in the order of `taps` -> what `forward` takes as its state [B, T, H]."""
        return features[0]

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, positions [B, T] int64, state [B, T, H] -> (recycled, normed), each [B, T, H].

        recycled: the state for the next draft token. normed: what ``head_weight`` multiplies.
        """
        raise NotImplementedError

    def readings(self) -> list["Head"]:
        """This head, and the same weights under every other meaning that its checkpoint leaves open.

        `open_knobs` maps a knob to its other meanings, each a name and the attributes that it changes.
        """
        found = []
        for choice in itertools.product(*([("", {}), *others] for others in self.open_knobs.values())):
            reading = shallow(self)
            reading.report = [*self.report, *(f"read as: {name}" for name, _ in choice if name)]
            for _, attributes in choice:
                for name, value in attributes.items():
                    setattr(reading, name, value)
            found.append(reading)
        return found


@dataclass(frozen=True)
class LayerKnobs:
    """What draft layers differ in, besides the sizes, activation and RoPE of their config.

    num_layers. qkv_bias, output_bias: of the attention's projections. qk_norm: an RMSNorm over each query and key head
    (Qwen3). windows: the sliding window of each layer, itself included (None: full attention).
    """

    num_layers: int = 1
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()


class Attention(nn.Module):
    """Grouped-query attention of a draft layer. x [B, T, inputs] -> [B, T, H]."""

    def __init__(self, config: LlamaConfig, number: int, inputs: int, knobs: LayerKnobs):
        super().__init__()
        self.number, self.head_dim = number, config.head_dim
        self.window = knobs.windows[number] if knobs.windows else None
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(inputs, queries, bias=knobs.qkv_bias)
        self.k_proj = nn.Linear(inputs, keys, bias=knobs.qkv_bias)
        self.v_proj = nn.Linear(inputs, keys, bias=knobs.qkv_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=knobs.output_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if knobs.qk_norm else nn.Identity()
        self.k_norm = LlamaRMSNorm(self.head_dim, config.rms_norm_eps) if knobs.qk_norm else nn.Identity()

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (project(x).unflatten(2, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        q, k = apply_rotary_pos_emb(q, k, *rope)
        out = ops.attention(q, k, v, None, self.head_dim**-0.5, self.window, None, self.number)
        return self.o_proj(out.flatten(2))


class Layer(nn.Module):
    """A pre-norm decoder layer; without `input_norm`, attention takes the residual stream as it is.

    inputs: width of what attention reads, H unless given.
    """

    def __init__(
        self, config: LlamaConfig, number: int, knobs: LayerKnobs, inputs: int | None = None, input_norm: bool = True
    ):
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = LlamaRMSNorm(size, config.rms_norm_eps) if input_norm else nn.Identity()
        self.self_attn = Attention(config, number, inputs or size, knobs)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        return self._attend(x, self.input_layernorm(x), rope)

    def _attend(self, residual: Tensor, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = residual + self.self_attn(x, rope)
        return x + self.mlp(self.post_attention_layernorm(x))


class JoinedLayer(Layer):
    """The first layer of EAGLE-3: attention reads [norm(embedding); norm(state)], the residual stream is the state.

    norm_before_residual: the residual stream starts from the normed state instead.
    """

    def __init__(self, config: LlamaConfig, number: int, knobs: LayerKnobs, norm_before_residual: bool):
        super().__init__(config, number, knobs, inputs=2 * config.hidden_size)
        self.norm_before_residual = norm_before_residual
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedding: Tensor, state: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        normed = self.hidden_norm(state)
        x = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return self._attend(normed if self.norm_before_residual else state, x, rope)


class EagleHead(Head):
    """EAGLE-1 and EAGLE-2 (one set of weights): u = fc [embedding; state], then decoder layers.

    The state is the target's after its final norm; it is recycled as it leaves the last layer, and read there, too.
    embedding_norm, state_norm: RMSNorms in front of fc (HASS). input_norm: the first layer has its own. output_norm:
    one in front of the output head. embedding_first: the order of fc's input.
    """

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        head_weight: Tensor,
        layer: LayerKnobs = LayerKnobs(),
        fc_bias: bool = True,
        embedding_norm: bool = False,
        state_norm: bool = False,
        input_norm: bool = False,
        output_norm: bool = False,
        embedding_first: bool = True,
    ):
        super().__init__(embedding, head_weight, config.hidden_size, (FINAL,), layer.num_layers)
        self.embedding_first = embedding_first
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
        return x, self.output_norm(x)


class Eagle3Head(Head):
    """EAGLE-3: fc joins several of the target's states; the first layer reads [embedding; state], 2H wide.

    draft_vocab_size: rows of the head's own output matrix (None: `head_weight` is given). feature_size: h. fc: without
    it the one tapped state is the head's (``use_aux_hidden_state: false``). fc_norm: an RMSNorm for each tapped state.
    norm_before_fc: one over all of them. recycle_normed: what goes round is the output behind the final norm
    (EAGLE-3.1). norm_before_residual: see `JoinedLayer`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        embedding: Tensor,
        taps: tuple[int, ...],
        feature_size: int,
        head_weight: Tensor | None = None,
        draft_vocab_size: int | None = None,
        layer: LayerKnobs = LayerKnobs(),
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


def rotary(config: LlamaConfig, device: torch.device) -> LlamaRotaryEmbedding:
    """The rotary embedding of a draft's own config: (x, positions [B, T]) -> cos, sin [B, T, head_dim]."""
    with torch.device(device):
        return LlamaRotaryEmbedding(config)
