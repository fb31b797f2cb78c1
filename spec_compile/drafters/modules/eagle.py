"""The heads of EAGLE-1 and EAGLE-2 (arXiv:2401.15077, arXiv:2406.16858) and of EAGLE-3 (arXiv:2503.01840)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ...passes.tap_hidden_states import FINAL
from .head import Head
from .layers import ONE_LAYER, JoinedLayer, Layer, LayerKnobs, rotary


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


class ParallelEagle3Head(Eagle3Head):
    """P-EAGLE (arXiv:2602.01469): EAGLE-3 that also reads masks, in place of tokens that are not drafted yet.

    mask_hidden [1, 1, taps * h] replaces the target's states at a mask, the token `mask_token_id`.
    """

    flavour = "P-EAGLE"
    mask_token_id: int

    def __init__(
        self, config: LlamaConfig, embedding: Tensor, taps: tuple[int, ...], feature_size: int, *args, **flags
    ):
        super().__init__(config, embedding, taps, feature_size, *args, **flags)
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, feature_size * len(taps)))

    @torch.no_grad()
    def mask_state(self) -> Tensor:
        """The state of a mask [1, 1, H]."""
        return self.project(list(self.mask_hidden.chunk(len(self.taps), dim=-1)))
