"""`Prompt`: the rows to be continued. `Past`: what a cache, or the model's own forward, already has of them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    StaticIndexedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from ..capture.admit import placeholders, reads_pictures
from ..capture.checks import ANY, SINGLE, generated, random_ids
from ..capture.copies import shared_copy
from ..capture.trace import tapped
from ..compat import CACHE, STATES
from ..graph import ModelGraph
from ..kernels.ops import as_read
from ..passes.outputs import FINAL

if TYPE_CHECKING:
    from .engine import Engine
    from .state import State

# Arguments of the model's forward that our loop reads.
SERVED_ARGUMENTS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position",
    "inputs_embeds", "tokenizer", "assistant_tokenizer", STATES, "mm_encoder_outputs",
}  # fmt: skip
# Arguments of a model's forward that hold pictures, videos or sounds, or tell their sizes.
PICTURES = {
    "pixel_values", "pixel_values_videos", "image_sizes", "image_grid_thw", "video_grid_thw", "second_per_grid_ts",
    "pixel_attention_mask", "spatial_shapes", "image_position_ids", "image_merge_sizes", "input_features",
    "input_features_mask", "feature_attention_mask", "target_sizes",
}  # fmt: skip
# Checks of a model, its prompts and the arguments of a forward before it runs, by the name of the model's class.
SOUND_CHECKS: dict[str, Any] = {}
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}  # say which tokens stand for pictures
READABLE = {DynamicLayer, DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer}
# Caches of layers with states, some of which hold keys and values, too.
RECURRENT = {value for name, value in vars(cache_utils).items() if name.startswith("LinearAttention")}
INDEXED = {DynamicIndexedLayer, StaticIndexedLayer}  # caches of layers with the keys of an indexer, too
# Names of the states in such layers; the first state is numbered 0.
CONVOLUTIONS, RECURRENCES = "conv_states", "recurrent_states"
EMPTY = {getattr(cache_utils, "DummyLayer", DynamicLayer)}  # caches of layers that read another layer's keys and values


@dataclass
class Prompt:
    """The B rows to be continued.

    ids: [B, W] integers on the CPU, the argument of transformers' loop.
    tokens: token ids of each row [B lists] without padding; 0 for an unknown token.
    padding: positions of padding on the left of each row [B].
    width: positions of every row, padding and cached tokens included.
    is_embedded: True if embeddings came in place of token ids.
    has_unknown_tokens: True if a cache, embeddings or pictures came in place of some tokens.
    has_pictures: True if pictures, videos or sounds replace some tokens.
    position_offsets: for each row [B] the difference of its positions from 0, 1, 2, …, at all tokens that rounds and
        prefills process; None if more than padding on the left is masked, or if the difference is not constant.
    """

    ids: Tensor
    tokens: list[list[int]]
    padding: list[int]
    width: int
    is_embedded: bool
    has_unknown_tokens: bool
    has_pictures: bool
    position_offsets: list[int] | None

    @classmethod
    def of(
        cls, input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict,
        placeholders: frozenset[int] = frozenset(),
    ) -> "Prompt":  # fmt: skip
        """The prompts of a call of ``_sample``.

        input_ids: [B, W] integers; W is 0 if embeddings replace them. They may begin after the cached tokens.
        generation_config, model_kwargs: the arguments of ``_sample``.
        placeholders: ids of tokens that pictures replace.
        Raises RuntimeError or ValueError, as transformers does, if `input_ids` are no rows of integers, or if they
        and the cache do not make up the attention mask's width.
        """
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        if input_ids.dim() == 2 and (input_ids.shape[0] == 0 or input_ids.is_floating_point()):
            raise RuntimeError(f"input_ids: expected rows of integers, got {input_ids.dtype} {tuple(input_ids.shape)}")
        if input_ids.dim() != 2 or (input_ids.shape[1] == 0 and embeds is None):
            raise ValueError(f"input_ids: expected [batch, at least one token], got shape {tuple(input_ids.shape)}")
        ids = input_ids.cpu()  # tensors on a GPU are copied once
        mask = None if mask is None else mask.cpu().to(torch.int64)
        batch, id_width = ids.shape
        cache = cache_among(model_kwargs)
        cached = int(cache.get_seq_length()) if cache is not None else 0
        width = _width(id_width, cached, generation_config, mask) if embeds is None else embeds.shape[1]
        padding = [0] * batch
        offsets: list[int] | None = [0] * batch
        if mask is not None:
            fits = mask.shape == (batch, width)
            padding = (mask == 0).sum(dim=1).tolist() if fits else padding
            if not fits or (mask.diff(dim=1) < 0).any() or not mask.any(dim=1).all():  # not padding on the left
                offsets = None
        has_pictures, positions = _has_pictures(model_kwargs), model_kwargs.get("position_ids")
        if positions is not None and offsets is not None:
            first = cached if embeds is None and not has_pictures else width - 1
            offsets = _position_offsets(positions.cpu(), padding, width, first)
        unknown = [0] * (width - id_width)
        tokens = [(unknown + row if unknown else row)[pad:] for row, pad in zip(ids.tolist(), padding)]
        are_cached = cached > 0 and any(not placeholders.isdisjoint(row) for row in tokens)
        return cls(
            ids, tokens, padding, width, embeds is not None,
            bool(unknown) or has_pictures or are_cached, has_pictures, offsets,
        )  # fmt: skip

    def check_tokens(self, vocab_size: int) -> None:
        """Raise ValueError if a token id is not in a vocabulary of this size."""
        ids = self.ids.numpy()
        if ids.size and 0 <= ids.min() and ids.max() < vocab_size:  # most prompts, padding included
            return
        unknown = next((token for row in self.tokens for token in row if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise ValueError(f"input_ids: token id {unknown} is outside the vocabulary of {vocab_size} tokens")


def _width(id_width: int, cached: int, generation_config: GenerationConfig, mask: Tensor | None) -> int:
    """Positions of every row: the width of the mask, or without one of the ids or the cache.

    The ids are either all tokens, or those after the cache; else ValueError.
    """
    is_healed = bool(generation_config.token_healing) and not cached  # other ids may have replaced the masked ones
    if is_healed and (mask is None or mask.shape[-1] != id_width):
        return id_width
    known = getattr(generation_config, "_mask_length", None) or max(id_width, cached)
    width = known if mask is None else mask.shape[-1]
    if cached >= width or (not is_healed and width not in (id_width, cached + id_width)):
        raise ValueError(
            f"attention_mask, {CACHE}: {cached} cached and {id_width} given tokens do not make the mask's "
            f"{width}; pass all tokens, or those behind the cache and a mask over both"
        )
    return width


def _has_pictures(model_kwargs: dict) -> bool:
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    return any(value is not None for value in [*encoded.values(), *map(model_kwargs.get, PICTURES)])


def _position_offsets(positions: Tensor, padding: list[int], width: int, first: int) -> list[int] | None:
    """The offset of each row's positions [B] from 0, 1, 2, … at its first token; None if it is not constant.

    positions: positions of the last columns, [1 or B, up to W]; each offset has to be 0. For multi-axis RoPE they have
        up to 3 axes in front, or one more that counts the text; all axes must have one offset from column `first` on.

    E.g. padding [0, 2], width 5: 0 1 2 3 4 and 1 1 0 1 2 have the offsets 0. With three equal axes 4 5 6 7 8 in row 0
    gives 4.
    """
    if positions.shape[-1] > width:
        return None
    expected = (torch.arange(width) - torch.tensor(padding)[:, None])[:, width - positions.shape[-1] :]
    offsets = positions - expected
    offsets = torch.where(expected < 0, offsets[..., -1:], offsets)
    if positions.dim() < 3:
        return None if offsets.any() else [0] * len(padding)
    offsets = offsets[-3:, :, max(first - width, -positions.shape[-1]) :]
    return None if (offsets != offsets[:1, :, -1:]).any() else offsets[0, :, -1].tolist()


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
    follows_padding: True if ``generate()`` counts positions from a row's first token, as our rounds do.
    """

    attention: tuple[int, ...]
    states: tuple[tuple[int, str], ...]
    follows_padding: bool


def cache_among(model_kwargs: dict) -> Cache | None:
    """The cache among the arguments of a model's forward; None if there is none, or if it has only states.

    A cache with only states counts no tokens.
    """
    cache = model_kwargs.get(CACHE)
    has_only_states = isinstance(cache, Cache) and bool(cache.layers) and all(cache.is_linear)
    return None if has_only_states else cache


def is_plain(cache: Any) -> bool:
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

    None if it holds something else, such as latents of keys and values (MLA) or a state for each head (Zamba), if it
    has keys of indexers, or of pictures to which layers attend if there are any (Mllama), or if nothing attends, so
    that the cache counts no tokens. A prompt of two tokens tells, and its first token after padding.
    """
    config = model.config.get_text_config(decoder=True)
    if graph.indexes or getattr(config, "cross_attention_layers", None):
        return None
    ids = random_ids(graph, 1, 3, seed=0)[0, [[0, 1], [2, 0]]].to(model.device)
    cache = getattr(generated(model, ids, ids.new_tensor([[1, 1], [0, 1]]), tokens=1), CACHE, None)
    if not isinstance(cache, Cache) or not is_plain(cache):
        return None
    cached: list[Any] = cache.layers  # keys and values or states, by the class of a layer
    attention = [number for number, layer in enumerate(cached) if getattr(layer, "keys", None) is not None]
    if shared := getattr(config, "num_kv_shared_layers", None):
        # Each reads the last earlier layer of its type: of the types s f s f, of which 2 share, 0 1 0 1.
        types = config.layer_types
        attention += [len(types) - shared - 1 - types[-shared - 1 :: -1].index(each) for each in types[-shared:]]
    follows_padding = True
    if not attention or len(attention) != len(graph.layers):
        return None
    for number, spec in zip(attention, graph.layers):
        keys, values = cached[number].keys, cached[number].values
        if (*keys.shape[1::2], *values.shape[1::2]) != (spec.kv_heads, spec.key_dim, spec.kv_heads, spec.value_dim):
            return None
        follows_padding &= torch.allclose(keys[0, :, 0], keys[1, :, 1], rtol=0, atol=0.1 * keys.abs().max().item())
    states = [
        (number, part)
        for number, layer in enumerate(cached)
        if type(layer) in RECURRENT
        for part in (CONVOLUTIONS, RECURRENCES)
        if getattr(layer, part)[0] is not None
    ]
    if len(states) != len(graph.recurrences):
        return None
    for (number, part), recurrence in zip(states, graph.recurrences):
        is_other = (part == CONVOLUTIONS) != (recurrence.kind == "convolution")
        if is_other or tuple(_as_ours(cached[number], recurrence.kind).shape[1:]) != recurrence.state:
            return None
    numbered = tuple((number, spec.kind) for (number, _), spec in zip(states, graph.recurrences))
    return Layout(tuple(attention), numbered, follows_padding)


def _as_ours(layer: Any, kind: str) -> Tensor:
    """The state of a recurrence of this kind in a layer of transformers' cache, [B, ...] as `cache.States` has it.

    There the inputs of a convolution are the last dimension, and Mamba-2's state has its two sizes swapped.
    """
    if kind == "convolution":
        return getattr(layer, CONVOLUTIONS)[0].transpose(1, 2)
    state = getattr(layer, RECURRENCES)[0]
    return state.transpose(2, 3) if kind == "decay" else state


def read_cache(cache: Cache, padding: list[int], layout: Layout) -> Past:
    """The contents of `cache`, whose rows have `padding` positions [B] on the left.

    Raises ValueError if the cache is for another batch size.
    """
    length = int(cache.get_seq_length())
    attention: list[Any] = [cache.layers[number] for number in layout.attention]
    batch = attention[0].keys.shape[0]
    if batch != len(padding):
        raise ValueError(f"{CACHE}: expected a cache of batch size {len(padding)}, got {batch}")
    # A static cache has room for more.
    layers = [(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in attention]
    states = [_as_ours(cache.layers[number], kind) for number, kind in layout.states]
    return Past(layers, states, length, padding)


def are_states_behind(state: "State", padding: list[int], length: int) -> bool:
    """True if all rows' states have seen `length` positions, or there are none."""
    if not state.kv.states.kinds:
        return True
    return [tokens + pad for tokens, pad in zip(state.lengths.tolist(), padding)] == [length] * len(padding)


def extend_cache(cache: Cache, state: "State", padding: list[int], length: int, layout: Layout) -> None:
    """Add to `cache` the positions before `length` that it lacks, from the slots of `state`, and the states.

    Row b lies ``padding[b]`` positions further right in the cache, whose padding is zero: with padding [0, 2] the slots
    0, 1, 2 of row 1 are its positions 2, 3, 4.
    """
    begin = int(cache.get_seq_length())
    if length <= begin:
        return
    for number in sorted({*layout.attention}):
        added = list[Tensor]()
        for slots in as_read(*state.kv.layer(layout.attention.index(number)), length, state.dtype, state.kv.table):
            block = slots.new_zeros(slots.shape[0], slots.shape[1], length - begin, slots.shape[3])
            for row, pad in enumerate(padding):
                first = max(begin, pad)
                block[row, :, first - begin :] = slots[row, :, first - pad : length - pad]
            added.append(block)
        cache.update(added[0], added[1], number)
    for recurrence, (number, kind) in enumerate(layout.states):
        after, _ = state.kv.states[recurrence]
        if kind == "convolution":
            cache.update_conv_state(after.transpose(1, 2), number)
        else:
            cache.update_recurrent_state(after.transpose(2, 3) if kind == "decay" else after, number)


def own_prefill(
    model: Any, prompt: "Prompt", input_ids: Tensor, generation_config: GenerationConfig, model_kwargs: dict,
    taps: tuple[int, ...],
) -> tuple[Cache, Past]:  # fmt: skip
    """Process prompts by the forward of `model`, which speculates, with the arguments of ``_sample``.

    The last tokens are left to the first round, unless one stands for a picture, or there are embeddings or a cache.
    """
    kwargs, engine = model_kwargs | {"use_cache": True}, model.speculation.engine
    SOUND_CHECKS.get(type(engine.original).__name__, lambda *_: None)(engine.original, input_ids, kwargs)
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
    runner: Any = shared_copy(engine.original) if is_tapped else model
    tap: AbstractContextManager[list[Tensor]] = tapped(runner, taps) if is_tapped else nullcontext([])
    with tap as features:
        output = runner._prefill(input_ids, generation_config, kwargs)
    cache = getattr(output, CACHE)
    past = read_cache(cache, prompt.padding, engine.cache_layout)
    past.first_logits = None if leaves_last else output.logits[:, -1].float()
    past.features = features if has_all_tokens else None
    return cache, past


def unserved(engine: "Engine", prompt: Prompt, generation_config: GenerationConfig, model_kwargs: dict) -> str | None:
    """The first wish that only transformers' own loop fulfils, or None."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "torch.autocast"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                return name
    if prompt.position_offsets is None:
        return "attention_mask / position_ids (anything but padding on the left)"
    if any(prompt.position_offsets) and not engine.described.shifts_positions:
        return "position_ids (of several axes)"
    is_reader = reads_pictures(engine.original)
    if prompt.has_pictures and not is_reader:
        return "pixel_values or input_features (of a model whose pictures and sounds are not served)"
    if any(prompt.padding) and engine.served_batches != ANY:
        return "attention_mask (padding on the left, which the model's own positions do not follow)"
    if len(prompt.tokens) > 1 and engine.served_batches == SINGLE:  # guard: mixed-rows
        return "input_ids (several rows, which the model itself mixes)"
    cache = cache_among(model_kwargs)
    if cache is not None and not is_plain(cache):
        return f"{CACHE} / cache_implementation ({type(cache).__name__})"
    cached = cache.get_seq_length() if cache is not None else 0
    is_own = prompt.is_embedded or prompt.has_pictures
    if is_own and engine.loras is not None:
        return "inputs_embeds or pixel_values (of a model whose rows choose adapters)"
    if (cached or is_own) and engine.cache_layout is None:
        name = CACHE if cached else "inputs_embeds" if prompt.is_embedded else "pixel_values"
        return f"{name} (the model's own cache holds something else than the keys and values of each layer)"
    is_asked_for = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    if any(prompt.padding) and (is_own or (cache is not None and is_asked_for)):  # guard: own-positions
        if engine.cache_layout is not None and not engine.cache_layout.follows_padding:
            return "attention_mask (padding on the left, which the model's own positions do not follow)"
    captured = engine.described
    if cache is not None and is_asked_for and captured.clamps_prompts:
        return f"{CACHE} (the model's forward over several tokens leaves other states than single steps)"
    if any(spec.kind == "selective" for spec in captured.recurrences) and (cached or (is_own and is_asked_for)):
        return f"{CACHE} (the model's forward over several tokens does not read the states in a cache)"
    makes_cache = model_kwargs.get("use_cache", True) and not {CACHE, STATES} & model_kwargs.keys()
    if captured.recurrences and makes_cache and generation_config.return_dict_in_generate:
        return f"return_dict_in_generate (of a model that makes its {CACHE} itself)"
    states = model_kwargs.get(STATES)
    is_asked_for = generation_config.return_dict_in_generate or getattr(states, "_is_user_defined", False)
    if states is not None and states is not cache and is_asked_for:
        return f"{STATES} (of a model without attention)"
    types = [model_kwargs[name] for name in sorted(TOKEN_TYPES & model_kwargs.keys()) if is_reader]
    if not prompt.has_pictures and any(each is not None and each[..., cached:].any() for each in types):
        return "token_type_ids (of pictures that are not there)"
    served = SERVED_ARGUMENTS | (PICTURES | TOKEN_TYPES if is_reader else set())
    return next((name for name, value in model_kwargs.items() if name not in served and value is not None), None)
