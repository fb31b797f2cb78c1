"""Multi-token prediction: a decoder layer of the target's own class, which reads [norm(embedding); norm(state)].

DeepSeek-V3 (arXiv:2412.19437, section 2.2), and after it GLM-4.5, MiMo and Qwen3-Next: u = fc [norm_e(embedding);
norm_h(state)], y = layer(u), and the target's output head multiplies norm(y).
"""

import copy
import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, PreTrainedConfig

from ...capture.copies import shallow
from ...capture.modules import connect
from ...capture.trace import HARMLESS
from ...errors import UnsupportedModelError
from ...kernels import ops
from ...passes.outputs import FINAL
from .eagle import Head

IMPLEMENTATION = "spec_compile_draft"
"""The name of `_attend` among transformers' attention functions; only configs made here use it."""


class MtpHead(Head):
    """One module of multi-token prediction, which drafts all tokens if there is no other.

    decoder: the target's (``model.get_decoder()``), whose layer, norm and rotary classes are built from `config`.
    config: see `block_config`.
    embedding_first: the order of fc's input (MiMo has the state first).
    zero_first: the slot at position 0 has an embedding of zeros.
    recycle_normed: the output after the final norm is recycled.
    recycle_state: the state itself is recycled, so that each module reads the target's (MiMo-V2).
    fc_bias, output_norm: True if there are such tensors.
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
        recycle_state: bool = False,
        fc_bias: bool = False,
        output_norm: bool = True,
    ):
        super().__init__(embedding, head_weight, config.hidden_size, (tap,), layers=1)
        self.embedding_first, self.zero_first = embedding_first, zero_first
        self.recycle_normed, self.recycle_state = recycle_normed, recycle_state
        self.further = nn.ModuleList()
        """The modules for the second draft token and later ones, of this class."""
        self.block = make_block(decoder.layers[-1], config)
        connect(self.block, _attend)
        make_norm = norm_class(decoder.layers[-1])
        eps = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.embedding_norm, self.state_norm, self.norm = (make_norm(config.hidden_size, eps=eps) for _ in range(3))
        if not output_norm:
            self.norm = nn.Identity()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=fc_bias)
        self.rotary_emb, self.rotary_arguments = None, ()
        if hasattr(decoder, "rotary_emb"):
            with torch.device(next(decoder.parameters()).device):
                self.rotary_emb = type(decoder.rotary_emb)(config)
            by_type = "layer_type" in inspect.signature(self.rotary_emb.forward).parameters
            self.rotary_arguments = (config.layer_types[0],) if by_type else ()
        self.axes = len(getattr(self.rotary_emb, "mrope_section", ()))
        """Axes of multimodal positions, which are all equal in a text (0: positions have one axis)."""

    def forward(self, input_ids: Tensor, positions: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        embedding = F.embedding(input_ids, self.embedding)
        if self.zero_first:
            embedding = embedding * (positions != 0)[:, :, None]
        parts = [self.embedding_norm(embedding), self.state_norm(state)]
        x = self.fc(torch.cat(parts if self.embedding_first else parts[::-1], dim=-1))
        if self.rotary_emb is not None:
            positions = positions.expand(self.axes, -1, -1) if self.axes else positions
            turns = self.rotary_emb(x, positions, *self.rotary_arguments)
            x = self.block(x, attention_mask=None, position_embeddings=turns)
        else:
            x = self.block(x)
        x = x[0] if isinstance(x, tuple) else x  # GLM-5's layers also give the choice of their indexer
        normed = self.norm(x)
        return (state if self.recycle_state else normed if self.recycle_normed else x), normed

    def restrict(self, ids: Tensor) -> "MtpHead":
        head = super().restrict(ids)
        head.further = nn.ModuleList(self._restricted(module, head, ids) for module in self.further)
        return head

    def _restricted(self, module: "MtpHead", head: "MtpHead", ids: Tensor) -> "MtpHead":
        """One of the `further` modules with the output matrix of `head`, or with the rows `ids` of its own."""
        if module.head_weight is not self.head_weight:
            return module.restrict(ids)
        module = shallow(module)
        module.head_weight, module.draft_to_target = head.head_weight, ids
        return module

    def refresh(self) -> None:
        super().refresh()
        for module in self.further:
            module.refresh()


class HalfLayers(nn.ModuleList):
    """The halves of a layer, as Nemotron-H builds them: attention, then a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor:
        for half in self:
            x = half(x)
        return x


class SingleLayer(nn.Module):
    """Attention and an MLP, made of the parts of LongCat-Flash's layers, which have two of each and a mixture."""

    def __init__(self, like: nn.Module, config: PreTrainedConfig):
        super().__init__()
        self.self_attn, self.mlp = type(like.self_attn[0])(config, 0), type(like.mlps[0])(config)
        self.input_layernorm, self.post_attention_layernorm = (
            norm_class(like)(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, x: Tensor, **kwargs) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), **kwargs)[0]
        return x + self.mlp(self.post_attention_layernorm(x))


def make_block(like: nn.Module, config: PreTrainedConfig) -> nn.Module:
    """A decoder layer of the kind of `like` with the config of `block_config`."""
    if isinstance(getattr(like, "mlps", None), nn.ModuleList):
        return SingleLayer(like, config)
    if getattr(config, "mtp_layers_block_type", None):
        return HalfLayers(type(like)(config, number) for number in range(len(config.layers_block_type)))
    return type(like)(config, 0)


def norm_class(layer: nn.Module) -> type[nn.Module]:
    """The class of a decoder layer's norms."""
    names = ("input_layernorm", "norm", "post_attention_layernorm")  # EXAONE 4 has norms after its parts only
    norm = next(getattr(layer, name) for name in names if hasattr(layer, name))
    return type(norm[0] if isinstance(norm, nn.ModuleList) else norm)


def block_config(config: PreTrainedConfig, sparse: bool, layer_type: str = "full_attention") -> PreTrainedConfig:
    """A copy of the target's text config in which layer 0 is a module of multi-token prediction.

    It attends through ``spec_compile::attention`` as `layer_type` says, and has a mixture of experts if `sparse`.
    """
    if getattr(config, "is_heterogeneous", False) and layer_type in config.layer_types:
        config = config.per_layer_config[layer_type]  # in Step, layers with a window have more heads
    config = copy.deepcopy(config)
    changes = {
        "layer_types": getattr(config, "mtp_layers_block_type", None) or [layer_type],
        "mlp_layer_types": ["sparse" if sparse else "dense"],
        "indexer_types": ["full"],
        "first_k_dense_replace": 0 if sparse else 1,
        "mlp_only_layers": [] if sparse else [0],
        "decoder_sparse_step": 1,
        "moe_layer_start_index": 0 if sparse else 1,
        "moe_layer_interval": 1,
    }
    for name, value in changes.items():
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config.num_hidden_layers = 1
    config._attn_implementation = IMPLEMENTATION
    return config


def _attend(
    module, query, key, value, attention_mask,
    scaling=None, dropout=0.0, sliding_window=None, softcap=None, s_aux=None, indices=None, **extra,
):  # fmt: skip
    """``spec_compile::attention`` with the signature of transformers' attention functions."""
    unknown = sorted(name for name, value in extra.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise UnsupportedModelError(
            f"draft: {type(module).__name__} passes {', '.join(unknown)} to attention, which is unknown here"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    inputs = query, key, value, s_aux, scale, sliding_window, softcap, module.layer_idx
    return ops.attention(*inputs, chosen=indices), None


AttentionInterface.register(IMPLEMENTATION, _attend)
