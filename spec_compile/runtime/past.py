"""Keys and values from transformers' caches, and to them."""

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
from ..kernels.ops import as_read

READABLE = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}
RECURRENT = {value for name, value in vars(cache_utils).items() if name.startswith("LinearAttention")}
"""Caches of layers with states, which the model itself fills (see `is_alike`)."""
EMPTY = {getattr(cache_utils, "DummyLayer", DynamicLayer)}
"""The cache of a layer that reads another layer's keys and values."""


@dataclass
class Past:
    """Keys and values of the first `length` positions of left-padded prompts.

    layers: the keys and the values of each layer, both [B, Hkv, L, D]. L is `length`, or less where the layer holds the
        last L positions alone.
    length: positions, those of padding included.
    padding: positions of padding of each row [B].
    """

    layers: list[tuple[Tensor, Tensor]]
    length: int
    padding: list[int]


def is_plain(cache) -> bool:
    """Whether `cache` is one of transformers' that hold keys and values as they were given."""
    return (
        isinstance(cache, Cache)
        and not cache.offloading
        and all(type(layer) in READABLE | RECURRENT | EMPTY for layer in cache.layers)
        and getattr(cache, "layer_class_to_replicate", None) in (None, *READABLE)
    )


def is_alike(model: PreTrainedModel, layers: Sequence[LayerSpec]) -> bool:
    """Whether the model's own cache holds the keys and values of each of `layers`, as ours does.

    It does not if it holds latents of them (MLA) or states, or if layers share them. A forward over two tokens shows.
    """
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)
    if not isinstance(cache, Cache) or not is_plain(cache) or len(cache.layers) != len(layers):
        return False
    return all(
        type(layer) not in RECURRENT
        and getattr(layer, "keys", None) is not None
        and (layer.keys.shape[1], layer.keys.shape[3]) == (spec.kv_heads, spec.key_dim)
        and (layer.values.shape[1], layer.values.shape[3]) == (spec.kv_heads, spec.value_dim)
        for layer, spec in zip(cache.layers, layers)
    )


def read(cache: Cache, padding: list[int]) -> Past:
    """The keys and values in `cache`, whose rows have `padding` positions [B] on the left.

    Raises ValueError if the cache is for another batch size.
    """
    length = int(cache.get_seq_length())
    batch = cache.layers[0].keys.shape[0]
    if batch != len(padding):
        raise ValueError(f"past_key_values: expected a cache of batch size {len(padding)}, got {batch}")
    layers = []
    for layer in cache.layers:
        cached = min(length, layer.keys.shape[2])  # a static cache has room for more
        layers.append((layer.keys[:, :, :cached], layer.values[:, :, :cached]))
    return Past(layers, length, padding)


def extend(cache: Cache, state, padding: list[int], length: int) -> None:
    """Add to `cache` the positions before `length` that it lacks, from the slots of `state`.

    Row b lies ``padding[b]`` positions further right in the cache than in the state, and its padding is zero.
    """
    begin = int(cache.get_seq_length())
    if length <= begin:
        return
    for layer in range(state.kv.layers):
        added = []
        for slots in as_read(*state.kv.layer(layer), length, state.dtype):
            block = slots.new_zeros(slots.shape[0], slots.shape[1], length - begin, slots.shape[3])
            for row, pad in enumerate(padding):
                first = max(begin, pad)
                block[row, :, first - begin :] = slots[row, :, first - pad : length - pad]
            added.append(block)
        cache.update(*added, layer)
