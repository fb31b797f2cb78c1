"""`Request`: the wishes of a generate() or of a request of a batch, read from the arguments of transformers' decoding
loop. `Sequence`: a row and all that it has gained so far."""

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from ..capture.admit import reads_pictures
from ..capture.checks import ANY, SINGLE
from ..capture.loras import NO_ADAPTER, Loaded
from ..compat import CACHE, STATES
from ..errors import check_int
from ..parallel.ranks import ALONE, Alone
from ..tree import MAX_NODES
from . import past as pasts
from .answer import Answer
from .past import PICTURES, TOKEN_TYPES, Past, cache_among
from .verify import Route, choose_route
from .verify.processors import MINIMA, is_known

SERVED_ARGUMENTS = {
    "attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep", "cache_position",
    "inputs_embeds", "tokenizer", "assistant_tokenizer", STATES,
}  # fmt: skip
"""Arguments of the model's forward that our loop reads."""
CRITERIA_IN_ROUND = {"MaxLengthCriteria", "EosTokenCriteria"}
"""Stopping criteria that a round checks by itself."""


@dataclass(frozen=True)
class Request:
    """The wishes of one generate(), or of one request of a batch, which has one row. Nothing in it ever changes.

    Columns count the tokens of a row, prompt and padding included: 7 new tokens after a prompt of 5 columns end at
    column 12.

    longest, shortest: columns at which every row ends, and before which no row may end.
    eos, pad: see `Answer`.
    config: the generation config, completed by transformers.
    route: decides where tokens are accepted.
    criteria: stopping criteria to be called; None if `longest` and `eos` suffice.
    seed: starts all random numbers, in [0, 2**63).
    temperature: at which drafters draw; 0 takes the likeliest token.
    references: 1-D tensors of token ids from which drafts may be copied.
    share_text: True lets later calls draft from the texts of this one. A text names the owner of those that may.
    most_nodes: nodes that rounds verify of each tree, at most; 1: no drafts.

    Only requests of a batch have these, see `Manager.add_request`:

    adapter: the name of the LoRA adapter; None: rows of this model choose none.
    returns_logprobs: True if `Output.logprobs` tells the log-probabilities of the processed scores.
    process: the model's own prefill of a prompt with pictures, a function of the draft's taps; it also returns how far
        positions run ahead of slots after it. None: the prompt is text.
    """

    longest: int
    shortest: int = 0
    eos: list[int] = field(default_factory=list)
    config: GenerationConfig | None = None
    processors: LogitsProcessorList | None = None
    route: Route = Route.GREEDY_IN_ROUND
    pad: int | None = None
    criteria: StoppingCriteriaList | None = None
    seed: int = 0
    temperature: float = 0.0
    references: list[Tensor] = field(default_factory=list)
    share_text: bool | str = True
    most_nodes: int = MAX_NODES
    adapter: str | None = None
    streaming: bool = False
    record_timestamps: bool = False
    returns_logprobs: bool = False
    cache_salt: str = ""
    client: str = ""
    process: Callable[[tuple[int, ...]], tuple[Past, int]] | None = None

    @classmethod
    def of(
        cls, input_ids: Tensor, config: GenerationConfig, processors: LogitsProcessorList,
        criteria: StoppingCriteriaList, device: torch.device,
    ) -> "Request":  # fmt: skip
        """Read the arguments of transformers' loop; ValueError if rows may end before others and no padding is set."""
        eos = next((c.eos_token_id.tolist() for c in criteria if type(c).__name__ == "EosTokenCriteria"), [])
        has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        pad = config._pad_token_tensor if has_eos else None
        if pad is None and has_eos:
            raise ValueError("If `eos_token_id` is defined, make sure that `pad_token_id` is defined.")
        keeps_scores = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
        is_plain = {type(criterion).__name__ for criterion in criteria} <= CRITERIA_IN_ROUND

        # The longest text, and the shortest.
        lengths = [each.max_length for each in criteria if type(each).__name__ == "MaxLengthCriteria"]
        longest = max(math.ceil(min(lengths, default=config.max_length)), input_ids.shape[1] + 1)
        minima = [
            each.min_length if hasattr(each, "min_length") else each.prompt_length_to_skip + each.min_new_tokens
            for each in processors if is_known(each, MINIMA)
        ]  # fmt: skip
        return cls(
            longest, max(minima, default=0), sorted(eos), config, processors,
            choose_route(config, processors, device, keeps_scores, has_first_logits=False),
            None if pad is None else int(pad), None if is_plain else criteria,
            temperature=(config.temperature or 1.0) if config.do_sample else 0.0,
        )  # fmt: skip

    def after(self, width: int, **changes: Any) -> "Request":
        """This request, whose columns count from the prompt's end, for a prompt of `width` columns."""
        shortest = width + self.shortest if self.shortest else 0
        return replace(self, shortest=shortest, longest=width + self.longest, **changes)

    def answer(
        self, ids: Tensor, streamer=None, device: torch.device | None = None, ranks: Alone = ALONE,
        keep_logprobs: bool = False,
    ) -> Answer:  # fmt: skip
        """An empty answer to prompts `ids` [B, W] int64. device: gets the results. keep_logprobs: see `Answer`."""
        criteria = self.criteria
        if criteria is not None and ranks.size > 1:  # only the first rank calls them, for all
            criteria = lambda ids, scores: torch.tensor(  # noqa: E731
                ranks.lead(lambda: self.criteria(ids, scores).tolist())
            )
        returns = bool(self.config.return_dict_in_generate)
        return Answer(
            ids, self.longest, self.eos, self.pad, criteria, streamer, returns and bool(self.config.output_scores),
            returns and bool(self.config.output_logits), device, keep_logprobs,
        )  # fmt: skip

    def sequences(self, prompt: "Prompt", adapters: list[Loaded] | None = None) -> "list[Sequence]":
        """The rows of one generate(). Columns become lengths without the padding: `longest` 12 and a prompt of 5
        columns with padding [0, 2] give rows that end at 12 and at 10 tokens."""
        width, adapters = prompt.ids.shape[1], adapters or [NO_ADAPTER] * len(prompt.tokens)
        return [
            Sequence(
                self, tokens, row, max(0, self.shortest + len(tokens) - width), self.longest + len(tokens) - width,
                self.most_nodes, adapters[row],
            )
            for row, tokens in enumerate(prompt.tokens)
        ]  # fmt: skip


@dataclass(eq=False, repr=False)
class Sequence:
    """A row of a generate() or of a batch: its prompt, and what it has gained so far, as the host knows it.

    row: its number in the call, or in the batch once it has a place there.
    shortest, longest: tokens, the prompt's included, before which it may not end, and at which it ends.
    most_nodes: nodes that rounds verify of its trees, at most.
    loaded: its LoRA adapter.
    tokens: collected so far.
    count, hint: real nodes of its pending tree, and the drafter's confidence; None if only the GPU knows them yet.
    is_over: True if nobody needs its outcomes any more.
    """

    request: Request
    prompt: list[int]
    row: int = -1
    shortest: int = 0
    longest: int = 0
    most_nodes: int = MAX_NODES
    loaded: Loaded = NO_ADAPTER
    tokens: list[int] = field(default_factory=list)
    count: int | None = None
    hint: int | None = None
    is_over: bool = False

    @property
    def length(self) -> int:
        """Its tokens less one, as `State.lengths` counts."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self) -> int:
        return self.longest - self.length - 1


def seed_of(seed: int | None) -> int:
    """The seed that ``generate()`` has after ``torch.manual_seed(seed)``; None: as it would have now. TypeError or
    ValueError if torch takes no such seed."""
    if seed is not None:
        check_int("seed", seed, -(1 << 63), (1 << 64) - 1)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return int(torch.randint((1 << 63) - 1, (), generator=generator))


def from_now(criterion: Callable) -> Callable:
    """The criterion; a copy that begins now if it has a time limit that has not begun."""
    if getattr(criterion, "initial_timestamp", ...) is None:
        criterion = copy.copy(criterion)
        criterion.initial_timestamp = time.time()
    return criterion


@dataclass
class Prompt:
    """The B rows to be continued.

    ids: [B, W] integers on the CPU, the argument of transformers' loop.
    tokens: token ids of each row [B lists] without padding; 0 for an unknown token.
    padding: positions of padding on the left of each row [B].
    width: positions of every row, padding and cached tokens included.
    is_left_padded: True if only padding on the left is masked, and positions count from each row's first token.
    is_embedded: True if embeddings came in place of token ids.
    has_unknown_tokens: True if a cache, embeddings or pictures came in place of some tokens.
    has_pictures: True if pictures or videos replace some tokens.
    position_offsets: for each row [B] the difference of its positions from 0, 1, 2, …, at all tokens that rounds and
        prefills process; None if `is_left_padded` is False.
    """

    ids: Tensor
    tokens: list[list[int]]
    padding: list[int]
    width: int
    is_left_padded: bool
    is_embedded: bool
    has_unknown_tokens: bool
    has_pictures: bool
    position_offsets: list[int] | None

    @classmethod
    def of(
        cls, input_ids: Tensor, generation_config, model_kwargs: dict, placeholders: frozenset[int] = frozenset()
    ) -> "Prompt":  # fmt: skip
        """The prompts of a call of ``_sample``.

        input_ids: [B, W] integers; W is 0 if embeddings replace them. They may begin after the cached tokens.
        generation_config, model_kwargs: the arguments of ``_sample``.
        placeholders: ids of tokens that pictures replace.
        Raises RuntimeError or ValueError, as transformers does, if `input_ids` are no rows of integers, or if they
        and the cache do not make up the attention mask's width.
        """
        embeds, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        _check_ids(input_ids, embeds)
        ids = input_ids.cpu()  # tensors on a GPU are copied once
        mask = None if mask is None else mask.cpu()
        batch, id_width = ids.shape
        width = _width(id_width, generation_config, model_kwargs) if embeds is None else embeds.shape[1]
        padding, is_left_padded = [0] * batch, True
        if mask is not None:
            is_left_padded = mask.dim() == 2 and mask.shape == (batch, width)
            if is_left_padded:
                seen = mask.to(torch.int64)
                is_left_padded = not bool((seen.diff(dim=1) < 0).any()) and bool(seen.any(dim=1).all())
                padding = (seen == 0).sum(dim=1).tolist()
        has_pictures, cache = _has_pictures(model_kwargs), cache_among(model_kwargs)
        cached = int(cache.get_seq_length()) if cache is not None else 0
        positions, offsets = model_kwargs.get("position_ids"), [0] * batch
        if positions is not None and is_left_padded:
            first = cached if embeds is None and not has_pictures else width - 1
            offsets = _position_offsets(positions.cpu(), padding, width, first)
            is_left_padded = offsets is not None
        unknown = [0] * (width - id_width)
        tokens = [(unknown + row if unknown else row)[pad:] for row, pad in zip(ids.tolist(), padding)]
        are_cached = cached > 0 and any(not placeholders.isdisjoint(row) for row in tokens)
        return cls(
            ids, tokens, padding, width, is_left_padded, embeds is not None,
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


def _check_ids(input_ids: Tensor, embeds: Tensor | None) -> None:
    """Refuse anything but a batch of token ids, as transformers does."""
    if input_ids.dim() == 2 and (input_ids.shape[0] == 0 or input_ids.is_floating_point()):
        raise RuntimeError(f"input_ids: expected rows of integers, got {input_ids.dtype} {tuple(input_ids.shape)}")
    if input_ids.dim() != 2 or (input_ids.shape[1] == 0 and embeds is None):
        raise ValueError(f"input_ids: expected [batch, at least one token], got shape {tuple(input_ids.shape)}")


def _width(id_width: int, generation_config, model_kwargs: dict) -> int:
    """Positions of every row: the width of the mask, or without one of the ids or the cache.

    The ids are either all tokens, or those after the cache; else ValueError.
    """
    cache, mask = cache_among(model_kwargs), model_kwargs.get("attention_mask")
    cached = int(cache.get_seq_length()) if cache is not None else 0
    is_healed = bool(generation_config.token_healing) and not cached  # other ids may have replaced the masked ones
    if is_healed and (mask is None or mask.shape[-1] != id_width):
        return id_width
    if mask is not None:
        width = mask.shape[-1]
    else:
        width = getattr(generation_config, "_mask_length", None) or max(id_width, cached)
    if cached >= width or (not is_healed and width not in (id_width, cached + id_width)):
        raise ValueError(
            f"attention_mask, {CACHE}: {cached} cached and {id_width} given tokens do not make the mask's "
            f"{width}; pass all tokens, or those behind the cache and a mask over both"
        )
    return width


def _has_pictures(model_kwargs: dict) -> bool:
    encoded = model_kwargs.get("mm_encoder_outputs") or {}
    values = [*encoded.values(), model_kwargs.get("pixel_values"), model_kwargs.get("pixel_values_videos")]
    return any(value is not None for value in values)


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


def unserved(engine, prompt: Prompt, generation_config, model_kwargs: dict) -> str | None:
    """The first wish that only transformers' own loop fulfils, or None. engine: a `ServedEngine`."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return "torch.autocast"
    if generation_config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name, None):
                return name
    if not prompt.is_left_padded:
        return "attention_mask / position_ids (anything but padding on the left)"
    if any(prompt.position_offsets) and not engine.described.shifts_positions:
        return "position_ids (of several axes)"
    is_reader = reads_pictures(engine.original)
    if prompt.has_pictures and not is_reader:
        return "pixel_values (of a model that is not among those whose pictures are served)"
    if any(prompt.padding) and engine.served_batches != ANY:
        return "attention_mask (padding on the left, which the model's own positions do not follow)"
    if len(prompt.tokens) > 1 and engine.served_batches == SINGLE:  # guard: mixed-rows
        return "input_ids (several rows, which the model itself mixes)"
    cache = pasts.cache_among(model_kwargs)
    if cache is not None and not pasts.is_plain(cache):
        return f"{CACHE} / cache_implementation ({type(cache).__name__})"
    is_filled = cache is not None and cache.get_seq_length() > 0
    is_own = prompt.is_embedded or prompt.has_pictures
    if is_own and engine.loras is not None:
        return "inputs_embeds or pixel_values (of a model whose rows choose adapters)"
    if (is_filled or is_own) and engine.cache_layout is None:
        name = CACHE if is_filled else "inputs_embeds" if prompt.is_embedded else "pixel_values"
        return f"{name} (the model's own cache holds something else than the keys and values of each layer)"
    is_asked_for = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    captured = engine.described
    if cache is not None and is_asked_for and captured.clamps_prompts:
        return f"{CACHE} (the model's forward over several tokens leaves other states than single steps)"
    if any(spec.kind == "selective" for spec in captured.recurrences) and (is_filled or (is_own and is_asked_for)):
        return f"{CACHE} (the model's forward over several tokens does not read the states in a cache)"
    makes_cache = model_kwargs.get("use_cache", True) and not {CACHE, STATES} & model_kwargs.keys()
    if captured.recurrences and makes_cache and generation_config.return_dict_in_generate:
        return f"return_dict_in_generate (of a model that makes its {CACHE} itself)"
    states = model_kwargs.get(STATES)
    is_asked_for = generation_config.return_dict_in_generate or getattr(states, "_is_user_defined", False)
    if states is not None and states is not cache and is_asked_for:
        return f"{STATES} (of a model without attention)"
    types = [model_kwargs[name] for name in sorted(TOKEN_TYPES & model_kwargs.keys()) if is_reader]
    cached = cache.get_seq_length() if is_filled else 0
    if not prompt.has_pictures and any(each is not None and each[..., cached:].any() for each in types):
        return "token_type_ids (of pictures that are not there)"
    served = SERVED_ARGUMENTS | (PICTURES | TOKEN_TYPES if is_reader else set())
    no_pictures = {"mm_encoder_outputs": {}}  # tells a model that reads pictures that there are none
    others = ((name, value) for name, value in model_kwargs.items() if name not in served)
    others = ((name, value) for name, value in others if value is not None)
    return next((name for name, value in others if name not in no_pictures or value != no_pictures[name]), None)
