"""Keys, values and states that the model's own forward and transformers' caches have of a prompt."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..capture.admit import placeholders
from ..capture.copies import shared_copy
from ..capture.trace import tapped
from ..compat import CACHE
from ..graph import ModelGraph
from ..kernels.ops import as_read
from ..passes.outputs import FINAL

if TYPE_CHECKING:
    from .request import Prompt

PICTURES = {
    "pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts",
    "mm_encoder_outputs",
}  # fmt: skip
"""Arguments of a model's forward that hold pictures and videos."""
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Arguments that say which tokens stand for pictures."""
READABLE = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}
RECURRENT = {value for name, value in vars(cache_utils).items() if name.startswith("LinearAttention")}
"""Caches of layers with states, some of which hold keys and values, too."""
INDEXED = {DynamicIndexedLayer, StaticIndexedLayer}
"""Caches of layers with the keys of an indexer, too."""
CONVOLUTIONS, STATES = "conv_states", "recurrent_states"
"""Names of the states in such layers; the first state is numbered 0."""
EMPTY = {getattr(cache_utils, "DummyLayer", DynamicLayer)}
"""Caches of layers that read another layer's keys and values."""


@dataclass
class Past:
    """Keys and values of the first `length` positions of left-padded prompts, and the states after them.

    layers: keys and values of each layer, both [B, Hkv, L, D]; of the last L <= `length` positions.
    states: each recurrence's state [B, ...], as `cache.States` has them.
    length: positions, padding included.
    padding: positions of padding of each row [B].
    first_logits: the target's logits [B, V] float32 after the prompts, if they are known; `length` is all of them then.
    features: the hidden states [B, L, C] at each tap of the draft; None if embeddings or a cache replace tokens.
    """

    layers: list[tuple[Tensor, Tensor]]
    states: list[Tensor]
    length: int
    padding: list[int]
    first_logits: Tensor | None = None
    features: list[Tensor] | None = None


@dataclass(frozen=True)
class Layout:
    """Where a model's own cache has the contents of ours.

    attention: the cache's layer for each attention of the graph.
    states: the cache's layer for each recurrence, and its kind.
    """

    attention: tuple[int, ...]
    states: tuple[tuple[int, str], ...]


def cache_among(model_kwargs: dict) -> Cache | None:
    """The cache among the arguments of a model's forward; None if there is none, or if it has only states.

    A cache with only states counts no tokens.
    """
    cache = model_kwargs.get(CACHE)
    has_only_states = isinstance(cache, Cache) and bool(cache.layers) and all(cache.is_linear)
    return None if has_only_states else cache


def is_plain(cache) -> bool:
    """True if `cache` is transformers' own and holds keys and values unchanged."""
    return (
        isinstance(cache, Cache)
        and type(cache).__module__ == cache_utils.__name__  # MiniMax's own class holds states, too
        and not cache.offloading
        and all(type(layer) in READABLE | RECURRENT | INDEXED | EMPTY for layer in cache.layers)
        and getattr(cache, "layer_class_to_replicate", None) in (None, *READABLE)
    )


def layout_of(model: PreTrainedModel, graph: ModelGraph) -> Layout | None:
    """Where the model's own cache has the keys and values of each attention of `graph`, and each recurrence's state.

    None if it holds something else, such as latents of keys and values (MLA) or a state for each head (Zamba), if
    layers share keys and values, if it has keys of indexers, or if nothing attends, so that the cache counts no tokens.
    A forward of two tokens tells.
    """
    if getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None):
        return None  # keys of pictures, which layers attend to if there are any (Mllama)
    if graph.indexes:
        return None
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    cache = getattr(model(input_ids=ids, use_cache=True), CACHE, None)
    if not isinstance(cache, Cache) or not is_plain(cache):
        return None
    attention = [number for number, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    if not attention or len(attention) != len(graph.layers):
        return None
    for number, spec in zip(attention, graph.layers):
        keys, values = cache.layers[number].keys, cache.layers[number].values
        sizes = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
        if sizes != ((spec.kv_heads, spec.key_dim), (spec.kv_heads, spec.value_dim)):
            return None
    states = [
        (number, part)
        for number, layer in enumerate(cache.layers)
        if type(layer) in RECURRENT
        for part in (CONVOLUTIONS, STATES)
        if getattr(layer, part)[0] is not None
    ]
    if len(states) != len(graph.recurrences):
        return None
    for (number, part), spec in zip(states, graph.recurrences):
        if (part == CONVOLUTIONS) != (spec.kind == "convolution"):
            return None
        if tuple(_as_ours(cache.layers[number], spec.kind).shape[1:]) != spec.state:
            return None
    kinds = [spec.kind for spec in graph.recurrences]
    return Layout(tuple(attention), tuple((number, kind) for (number, _), kind in zip(states, kinds)))


def _as_ours(layer, kind: str) -> Tensor:
    """The state of a recurrence of this kind in a layer of transformers' cache, [B, ...] as `cache.States` has it.

    There the inputs of a convolution are the last dimension, and Mamba-2's state has its two sizes swapped.
    """
    if kind == "convolution":
        return getattr(layer, CONVOLUTIONS)[0].transpose(1, 2)
    state = getattr(layer, STATES)[0]
    return state.transpose(2, 3) if kind == "decay" else state


def read(cache: Cache, padding: list[int], layout: Layout) -> Past:
    """The contents of `cache`, whose rows have `padding` positions [B] on the left.

    Raises ValueError if the cache is for another batch size.
    """
    length = int(cache.get_seq_length())
    attention = [cache.layers[number] for number in layout.attention]
    batch = attention[0].keys.shape[0]
    if batch != len(padding):
        raise ValueError(f"{CACHE}: expected a cache of batch size {len(padding)}, got {batch}")
    layers = []
    for layer in attention:
        cached = min(length, layer.keys.shape[2])  # a static cache has room for more
        layers.append((layer.keys[:, :, :cached], layer.values[:, :, :cached]))
    states = [_as_ours(cache.layers[number], kind) for number, kind in layout.states]
    return Past(layers, states, length, padding)


def are_states_behind(state, padding: list[int], length: int) -> bool:
    """True if all rows' states have seen `length` positions, or there are none."""
    if not state.kv.states.kinds:
        return True
    return [tokens + pad for tokens, pad in zip(state.lengths.tolist(), padding)] == [length] * len(padding)


def extend(cache: Cache, state, padding: list[int], length: int, layout: Layout) -> None:
    """Add to `cache` the positions before `length` that it lacks, from the slots of `state`, and the states.

    Row b lies ``padding[b]`` positions further right in the cache, whose padding is zero: with padding [0, 2] the slots
    0, 1, 2 of row 1 are its positions 2, 3, 4.
    """
    begin = int(cache.get_seq_length())
    if length <= begin:
        return
    for layer, number in enumerate(layout.attention):
        added = []
        for slots in as_read(*state.kv.layer(layer), length, state.dtype):
            block = slots.new_zeros(slots.shape[0], slots.shape[1], length - begin, slots.shape[3])
            for row, pad in enumerate(padding):
                first = max(begin, pad)
                block[row, :, first - begin :] = slots[row, :, first - pad : length - pad]
            added.append(block)
        cache.update(*added, number)
    for recurrence, (number, kind) in enumerate(layout.states):
        after, _ = state.kv.states[recurrence]
        if kind == "convolution":
            cache.update_conv_state(after.transpose(1, 2), number)
        else:
            cache.update_recurrent_state(after.transpose(2, 3) if kind == "decay" else after, number)


def own_prefill(
    model, prompt: "Prompt", input_ids: Tensor, generation_config, model_kwargs: dict, taps: tuple[int, ...]
) -> tuple[Cache, Past]:
    """Process prompts by the forward of `model`, which speculates, with the arguments of ``_sample``.

    The last tokens are left to the first round, unless one stands for a picture, or there are embeddings or a cache.
    """
    kwargs, engine = model_kwargs | {"use_cache": True}, model.speculation.engine
    cache = cache_among(kwargs)
    is_first = cache is None or cache.get_seq_length() == 0
    pictures, has_all_tokens = placeholders(engine.original.config), is_first and not prompt.is_embedded
    leaves_last = has_all_tokens and all(row[-1] not in pictures for row in prompt.tokens)
    if leaves_last:
        input_ids = input_ids[:, :-1]
        for name in {"attention_mask", "position_ids", *TOKEN_TYPES} & kwargs.keys():
            kwargs[name] = None if kwargs[name] is None else kwargs[name][..., :-1]
    if FINAL in taps and "logits_to_keep" in kwargs:
        kwargs["logits_to_keep"] = 0  # the tap of the last layer needs every token
    is_tapped = has_all_tokens and bool(taps)
    runner = shared_copy(engine.original) if is_tapped else model
    with tapped(runner, taps) if is_tapped else nullcontext([]) as features:
        output = runner._prefill(input_ids, generation_config, kwargs)
    cache = getattr(output, CACHE)
    past = read(cache, prompt.padding, engine.cache_layout)
    past.first_logits = None if leaves_last else output.logits[:, -1].float()
    past.features = features if has_all_tokens else None
    return cache, past
