"""Keys and values to and from transformers' caches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..graph import LayerSpec

READABLE = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}
EMPTY = {getattr(cache_utils, "DummyLayer", DynamicLayer)}
"""Of layers that read another layer's keys and values."""


@dataclass
class Past:
    """Keys and values of the first `length` places of left-padded prompts.

    layers: keys and values of each layer, [B, Hkv, up to `length`, D]: the last places, if not all. padding: how many
    of the places of each row are padding.
    """

    layers: list[tuple[Tensor, Tensor]]
    length: int
    padding: list[int]


def is_plain(cache) -> bool:
    """Whether `cache` is one of transformers' that hold what they are given as it is."""
    return (
        isinstance(cache, Cache)
        and not cache.offloading
        and all(type(layer) in READABLE | EMPTY for layer in cache.layers)
        and getattr(cache, "layer_class_to_replicate", None) in (None, *READABLE)
    )


def is_alike(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> bool:
    """Whether the model's own cache holds keys and values of `layers` as ours does: not latents of them (MLA), and none
    shared between layers. A forward over two tokens shows it."""
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    if not isinstance(cache, Cache) or not is_plain(cache) or len(cache.layers) != len(layers):
        return False
    return all(
        getattr(layer, "keys", None) is not None
        and (layer.keys.shape[1], layer.keys.shape[3]) == (spec.kv_heads, spec.key_dim)
        and (layer.values.shape[1], layer.values.shape[3]) == (spec.kv_heads, spec.value_dim)
        for layer, spec in zip(cache.layers, layers)
    )


def read(cache: Cache, padding: list[int]) -> Past:
    """What `cache` holds; ValueError if it is for another batch size."""
    length = int(cache.get_seq_length())
    batch = cache.layers[0].keys.shape[0]
    if batch != len(padding):
        raise ValueError(f"past_key_values: expected a cache of batch size {len(padding)}, got {batch}")
    layers = []
    for layer in cache.layers:
        held = min(length, layer.keys.shape[2])
        layers.append((layer.keys[:, :, :held], layer.values[:, :, :held]))
    return Past(layers, length, padding)


def extend(cache: Cache, state, padding: list[int], length: int) -> None:
    """Add to `cache` what it lacks of the places before `length`, from the slots of `state`.

    Row b lies `padding[b]` places further right in the cache than in the state; its padding is zero.
    """
    begin = int(cache.get_seq_length())
    if length <= begin:
        return
    for layer in range(len(state.cache) // 2):
        new = []
        for held in state.cache[2 * layer :][:2]:
            block = held.new_zeros(held.shape[0], held.shape[1], length - begin, held.shape[3], dtype=state.dtype)
            for row, pad in enumerate(padding):
                first = max(begin, pad)
                block[row, :, first - begin :] = held[row, :, first - pad : length - pad]
            new.append(block)
        cache.update(*new, layer)
