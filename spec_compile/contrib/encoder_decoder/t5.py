"""T5 and its relatives: their decoders add a learned bias for each head and distance to the scores of attention."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...capture.modules import heads_of
from .decoder import attend_to_source, classes_of, hold_example

FAMILIES = classes_of("longt5", "mt5", "pop2piano", "t5", "umt5")
"""See `decoder.FAMILIES`."""


def attend_by_distance(module: Any, attend: Callable) -> None:
    """A change of a `Decoder`, see `capture.modules`: distances become biases, and sources become states."""
    for block in module.get_decoder().block:
        own, cross = block.layer[0].SelfAttention, block.layer[1].EncDecAttention
        shares = "position_bias" in inspect.signature(type(own).forward).parameters  # UMT5 has biases in each layer
        if own.has_relative_attention_bias:
            own.register_buffer("buckets", buckets_of(own), persistent=False)
        own.forward = partial(attend_to_text, own, attend, shares)
        hold_example(module, cross, cross.k, cross.v, cross.key_value_proj_dim)
        cross.forward = partial(attend_to_states, cross, shares)


def buckets_of(part: Any) -> Tensor:
    """The bucket of each distance up to the largest that is told from others, int64 [D]."""
    most, buckets = part.relative_attention_max_distance, part.relative_attention_num_buckets
    named = {"bidirectional": False, "num_buckets": buckets, "max_distance": most}
    known = inspect.signature(part._relative_position_bucket).parameters
    steps = torch.arange(most + 1, device=part.relative_attention_bias.weight.device)
    return part._relative_position_bucket(-steps, **{name: value for name, value in named.items() if name in known})


def attend_to_text(
    part: Any, attend: Callable, shares: bool, hidden_states: Tensor, position_bias: Tensor | None = None, **_
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Attention to decoder tokens. position_bias: the biases [H, D], if an earlier layer has them."""
    if position_bias is None:
        position_bias = part.relative_attention_bias(part.buckets).T.contiguous()
    q, k, v = (heads_of(project(hidden_states), part.key_value_proj_dim) for project in (part.q, part.k, part.v))
    out, _ = attend(part, q, k, v, None, scaling=1.0, slopes=position_bias)
    return part.o(out.flatten(2)), *([position_bias] if shares else []), None


def attend_to_states(part: Any, shares: bool, hidden_states: Tensor, *_, **__) -> tuple[Tensor | None, ...]:
    """Attention to a source, which has no biases."""
    return part.o(attend_to_source(part, part.q(hidden_states))), *([None] if shares else []), None
