"""Multi-token prediction: one decoder layer of the target's own class, which reads [norm(embedding); norm(state)].

DeepSeek-V3 (arXiv:2412.19437, section 2.2), and after it GLM-4.5, MiMo and Qwen3-Next: u = fc [norm_e(embedding);
norm_h(state)], y = layer(u), and the target's output head multiplies norm(y).
"""

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

from ...capture.trace import HARMLESS
from ...errors import UnsupportedModelError
from ...kernels import ops
from ...passes.tap_hidden_states import FINAL
from .head import Head

IMPLEMENTATION = "spec_compile_draft"
"""The name of `_attend` among transformers' attention functions; only configs made here use it."""


class MtpHead(Head):
    """One block of multi-token prediction, used again and again.

    decoder: the target's (``model.get_decoder()``), whose layer, norm and rotary classes are built from `config`.
    config: see `block_config`.
    embedding_first: the order of fc's input (MiMo has the state first).
    zero_first: the slot at position 0 has an embedding of zeros.
    recycle_normed: the output after the final norm is recycled.
    """

    def __init__(
        self,
        decoder: nn.Module,
        config: PreTrainedConfig,
        embedding: Tensor,
        head_weight: Tensor,
        tap: int = FINAL,
        embedding_first: bool = True,
        zero_first: bool = True,
        recycle_normed: bool = True,
    ):
        super().__init__(embedding, head_weight, config.hidden_size, (tap,), layers=1)
        self.embedding_first, self.zero_first, self.recycle_normed = embedding_first, zero_first, recycle_normed
        like = decoder.layers[-1]
        self.block = type(like)(config, 0)
        make_norm = type(like.input_layernorm)
        self.embedding_norm, self.state_norm, self.norm = (
            make_norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        with torch.device(embedding.device):
            self.rotary_emb = type(decoder.rotary_emb)(config)
        self.axes = len(getattr(self.rotary_emb, "mrope_section", ()))
        """Axes of multimodal positions, which are all equal in a text (0: positions have one axis)."""

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedding = F.embedding(input_ids, self.embedding)
        if self.zero_first:
            embedding = embedding * (positions != 0)[:, :, None]
        parts = [self.embedding_norm(embedding), self.state_norm(state)]
        x = self.fc(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))
        positions = positions.expand(self.axes, -1, -1) if self.axes else positions
        x = self.block(x, attention_mask=None, position_embeddings=self.rotary_emb(x, positions))
        normed = self.norm(x)
        return (normed if self.recycle_normed else x), normed


def block_config(config: PreTrainedConfig, sparse: bool) -> PreTrainedConfig:
    """A copy of the target's text config in which layer 0 is a block of multi-token prediction.

    It has full attention through ``spec_compile::attention``, and a mixture of experts if `sparse`.
    """
    config = copy.deepcopy(config)
    changes = {
        "layer_types": ["full_attention"],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config.num_hidden_layers = 1
    config._attn_implementation = IMPLEMENTATION
    return config


def _attend(
    module, query, key, value, attention_mask,
    scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None, **extra,
):  # fmt: skip
    """``spec_compile::attention`` with the signature of transformers' attention functions."""
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"draft: {type(module).__name__} passes {', '.join(unknown)} to attention, which is unknown here"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return ops.attention(query, key, value, s_aux, scale, sliding_window, softcap, module.layer_idx), None


AttentionInterface.register(IMPLEMENTATION, _attend)
