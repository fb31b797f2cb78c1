"""The config of a new draft, which has its target's sizes unless options name others."""

import torch
from torch import Tensor
from transformers import LlamaConfig, PreTrainedConfig

from ..drafters.checkpoints.target import Target
from .options import TrainingOptions

FULL_VOCABULARY = 40_000
"""Tokens of a vocabulary up to which a draft can propose all of them."""
KEPT_TOKENS = 32_000
"""Tokens of a larger vocabulary that a draft can propose by default."""


def draft_config(target: Target, options: TrainingOptions, layers: int = 1) -> LlamaConfig:
    """The config of a draft's layers.

    layers: their number by default. Raises ValueError, naming the option, if such layers cannot be built.
    """
    config, size = target.config, target.hidden_size
    heads, head_dim = _heads(config, options)
    if options.num_key_value_heads is not None:
        kv_heads = options.num_key_value_heads
    else:
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        kv_heads = kv_heads if heads % kv_heads == 0 else heads
    if heads % kv_heads:
        raise ValueError(f"num_key_value_heads: {heads} query heads cannot share {kv_heads}; choose a divisor")
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=size,
        intermediate_size=options.intermediate_size or getattr(config, "intermediate_size", None) or 4 * size,
        num_hidden_layers=options.num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
        rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(config)},
        tie_word_embeddings=False,
    )


def _heads(config: PreTrainedConfig, options: TrainingOptions) -> tuple[int, int]:
    """(query heads, size of each).

    A fused attention kernel must take the size: a multiple of 8 up to 256. A target's other size becomes 64.
    """
    heads = options.num_attention_heads or config.num_attention_heads
    if options.head_dim is not None:
        head_dim = options.head_dim
    else:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if head_dim % 8 or head_dim > 256:
            head_dim = 64
    if head_dim % 8 or head_dim > 256:
        raise ValueError(f"head_dim: expected a multiple of 8 up to 256, got {head_dim}")
    return heads, head_dim


def _rope_theta(config: PreTrainedConfig) -> float:
    """The target's RoPE base, of its full attention where layers differ; 10000 if it has none."""
    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    return float(rope.get("rope_theta", 10000.0))


def published_config(config: LlamaConfig, target: Target, architecture: str, **more) -> dict:
    """The ``config.json`` of a draft, in the form of published ones. more: entries to add or replace."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings",
    )  # fmt: skip
    ends = {name: getattr(target.config, name, None) for name in ("bos_token_id", "eos_token_id")}
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **{name: getattr(config, name) for name in names},
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        **ends,
        "torch_dtype": str(target.embedding.dtype).removeprefix("torch."),
        **more,
    }


def check_taps(taps: tuple[int, ...], num_layers: int, excluded_first: int | None = None) -> None:
    """ValueError if the target has no such states, or if the first one is excluded."""
    in_range = taps and 0 <= taps[0] <= taps[-1] <= num_layers and taps[0] != excluded_first
    if not in_range or list(taps) != sorted(set(taps)):
        but = "" if excluded_first is None else f" the first of them not {excluded_first} (no published list says it),"
        raise ValueError(
            f"taps: expected states from 0 to {num_layers}, ascending,{but} got {', '.join(map(str, taps)) or 'none'}"
        )


def frequent_tokens(counts: Tensor, size: int | None, always: list[int]) -> Tensor | None:
    """The `size` most frequent tokens, int64 [size], ascending, with those of `always` among them; None for all tokens.

    counts int64 [V]: see `data.count_tokens`. size: None for the default. Raises ValueError if `size` is not possible.
    """
    vocab_size = len(counts)
    size = size or (vocab_size if vocab_size <= FULL_VOCABULARY else KEPT_TOKENS)
    if not len(always) < size <= vocab_size:
        raise ValueError(
            f"draft_vocab_size: expected {len(always) + 1} to {vocab_size}, the target's vocabulary, got {size}"
        )
    if size == vocab_size:
        return None
    ranks = counts.clone()
    ranks[always] = torch.iinfo(ranks.dtype).max
    return ranks.argsort(descending=True, stable=True)[:size].sort().values
