"""Inkling: in each layer a query mixes its own bias for each distance, and short convolutions follow projections."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..capture.modules import MODULES, Attend, heads_of
from ..capture.recurrences import OF_FAMILY


def attend_by_distance(module: nn.Module, attend: Attend) -> None:
    """Attention whose biases are a table [B, T, H, D] with 0 in its last column, for all larger distances. Layers
    without a window scale scores by the logarithm of the position, which they are told."""
    config, extent = module.config, module.rel_logits_proj
    floor = None if module.is_sliding else config.log_scaling_n_floor

    def forward(hidden_states: Tensor, positions: Tensor, **_) -> tuple[Tensor, None]:
        q, k, v, mix = (getattr(module, f"{name}_proj")(hidden_states) for name in "qkvr")
        q, k, v = (heads_of(x, module.head_dim) for x in (q, module.k_sconv(k), module.v_sconv(v)))
        q, k, biases = module.q_norm(q), module.k_norm(k), mix.unflatten(2, (module.num_heads, -1)) @ extent.proj
        if floor is not None:
            steps = torch.log(((positions + 1).float() / floor).clamp(min=1.0))
            scale = (1.0 + config.log_scaling_alpha * steps)[:, :, None, None]
            q, biases = (q.float() * scale.transpose(1, 2)).to(q.dtype), (biases.float() * scale).to(biases.dtype)
        out, _ = attend(
            module, q, k, v, None, scaling=module.scaling, sliding_window=module.sliding_window,
            slopes=F.pad(biases, (0, 1)),
        )  # fmt: skip
        return module.o_proj(out.flatten(2)), None

    module.forward = forward


def tell_layers_their_positions(module: Any, attend: Attend) -> None:
    own = module.forward
    module.forward = lambda *args, position_ids, **named: own(
        *args, position_ids=position_ids, positions=position_ids, **named
    )


MODULES |= {
    "transformers.models.inkling.modeling_inkling.InklingAttention": attend_by_distance,
    "transformers.models.inkling.modeling_inkling.InklingTextModel": tell_layers_their_positions,
}
OF_FAMILY["inkling_text"] = dict.fromkeys(("hybrid", "hybrid_sliding"), ({"attention", "convolution"},))
