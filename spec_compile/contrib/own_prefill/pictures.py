"""`PicturePrefill`: prompts with pictures or sounds. Their text, and the pictures in it, are processed in pieces."""

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ...batching.intake import PreparedCall
from ...capture.admit import placeholders
from ...capture.copies import shallow, shared_copy
from ...capture.trace import tapped
from ...compat import CACHE
from ...passes.outputs import FINAL
from ...runtime.prompt import PICTURES, TOKEN_TYPES, Past, Prompt, extend_cache, own_prefill, read_cache
from ...runtime.state import State
from .prefill import OwnPrefill

PIECE = {"cpu": 256, "cuda": 1024}
"""Tokens of a piece. A GPU reads the weights for 256 of them, and launches each kernel of the model's own forward."""
MOST_NUMBERS = 1 << 16
"""Pictures whose contents have a number at once; those that came last."""


_numbers = count(-1, -1)


@lru_cache(MOST_NUMBERS)
def number_of(digest: bytes) -> int:
    """A number for contents with this hash, which no others are given. It is negative, so that no token has it."""
    return next(_numbers)


def digest_of(parts: dict[str, Tensor]) -> bytes:
    """A hash of named tensors: of all their bits, sizes and dtypes."""
    seen = hashlib.sha256()
    for name, part in sorted(parts.items()):
        seen.update(f"{name} {part.dtype} {[*part.shape]} ".encode())
        seen.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return seen.digest()


def contents_of(arguments: dict[str, Tensor], pictures: int) -> list[dict[str, Tensor]]:
    """The parts of a request's tensors for each picture; all of them for each, if they cannot be told apart.

    Two pictures of 4 x 4 and 4 x 8 patches have `image_grid_thw` [[1, 4, 4], [1, 4, 8]], and `pixel_values` of 48 rows:
    the first one has 16 of these, and the second one 32.
    """
    parts: list[dict[str, Tensor]] = [{} for _ in range(pictures)]
    grid = arguments.get("image_grid_thw")
    sizes = [] if grid is None else grid.prod(dim=1).tolist()
    for name, value in arguments.items():
        if name == "pixel_values" and len(sizes) == pictures and sum(sizes) == len(value):
            rows: Any = value.split(sizes)
        elif len(value) == pictures:
            rows = value
        else:
            return [arguments] * pictures
        for part, own in zip(parts, rows):
            part[name] = own
    return parts


class LanguageCall(Exception):
    """The arguments that the model's own forward has for its language model."""

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments


def stop_before_the_text(*args: Any, **kwargs: Any) -> None:
    """A language model's forward, which raises its arguments."""
    raise LanguageCall({f"argument {number}": value for number, value in enumerate(args)} | kwargs)


class PicturePrefill(OwnPrefill):
    """Has the model's own forward process a prompt with pictures or sounds, as transformers calls it.

    It makes embeddings of all of the prompt at once. If its language model takes them with nothing but positions and a
    mask of columns, that is called for a piece of the prompt at a time, and can begin after what is known. Else it
    processes the prompt as a whole: Gemma-3 attends in both directions inside a picture, and Qwen3-VL adds features of
    pictures to several layers.
    """

    def __init__(self, model: Any, prompt: Prompt, call: PreparedCall, arguments: dict[str, Any]):
        """arguments: of the request, pictures among them. ValueError if only ``generate()`` serves the prompt."""
        self._engine = engine = model.speculation.engine
        ids, places = prompt.tokens[0], placeholders(engine.original.config)
        if ids[-1] in places:
            raise ValueError("input_ids: a prompt that ends in a picture is served by generate(); add text after it")
        if engine.options.ranks.size > 1:
            raise ValueError("pixel_values: pictures are read in one process; leave out tensor_parallel")
        self._model, self._prompt, self._call = model, prompt, call
        self.end, self.offset = len(ids) - 1, (prompt.position_offsets or [0])[0]
        self.until = max((number for number, token in enumerate(ids, 1) if token in places), default=math.inf)
        # The sums of the model's own forward are not promised to be the same in any piece.
        if engine.options.exact == "auto" and self.until < math.inf:
            self.keys = self._numbered(ids, places, arguments)

    def _numbered(self, ids: list[int], places: frozenset[int], arguments: dict[str, Any]) -> list[int] | None:
        """See `OwnPrefill`. None if the request says of other tokens that they stand for pictures."""
        is_place = torch.tensor([token in places for token in ids])
        for name in TOKEN_TYPES & arguments.keys():
            if arguments[name] is not None and not torch.equal(arguments[name].flatten().cpu() != 0, is_place):
                return None
        given = {name: arguments[name] for name in PICTURES & arguments.keys()}
        given = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.dim()}
        runs = [[*run] for _, run in groupby(ids, key=lambda token: token if token in places else -1)]
        parts = iter(contents_of(given, sum(run[0] in places for run in runs)))
        return [
            token
            for run in runs
            for token in (run if run[0] not in places else [number_of(digest_of(next(parts)))] * len(run))
        ]

    def begins(self, known: int) -> bool:
        return super().begins(known) or self._embedded is not None

    def pieces(self, state: State, known: int, taps: tuple[int, ...]) -> Iterator[Past]:
        engine, embedded = self._engine, self._embedded
        del self._embedded  # another sequence, or a second time, reads the pictures again
        if embedded is None:
            yield self._whole(taps)
            return
        cache, layout, size = DynamicCache(), engine.cache_layout, PIECE[engine.runtime.device.type]
        extend_cache(cache, state, [0], known, layout)
        runner = shared_copy(engine.original) if taps else engine.original
        for begin in range(known, self.end, size):
            end = min(begin + size, self.end)
            tap: AbstractContextManager[list[Tensor]] = tapped(runner, taps) if taps else nullcontext([])
            with tap as features:
                runner.get_decoder()(**cut(embedded, begin, end) | {CACHE: cache})
            past = read_cache(cache, [0], layout)
            layers = [(keys[:, :, begin:], values[:, :, begin:]) for keys, values in past.layers]
            yield Past(layers, [], end, [0], features=features)

    def _whole(self, taps: tuple[int, ...]) -> Past:
        """The prompt, processed at once. Its keys and values serve others if the cache has all of them."""
        call, cache = self._call, copy.deepcopy(self._call.model_kwargs[CACHE])  # empty
        if any(type(layer) is DynamicSlidingWindowLayer for layer in getattr(cache, "layers", [])):
            if {*map(type, cache.layers)} <= {DynamicLayer, DynamicSlidingWindowLayer}:
                cache = DynamicCache()  # without a config, no layer drops tokens
        kwargs = call.model_kwargs | {CACHE: cache}
        past = own_prefill(self._model, self._prompt, call.input_ids, call.config, kwargs, taps)[1]
        if any(keys.shape[2] < past.length for keys, _ in past.layers):
            self.keys = None
        return past

    @cached_property
    def _embedded(self) -> dict[str, Any] | None:
        """The arguments of the language model for all tokens but the last; None if it takes no part of them."""
        engine = self._engine
        described, taps = engine.described, engine.runtime.algorithm.plan.taps
        # A recurrence's own forward may not go on from a state, and a tap of the head needs all of a forward.
        if described.recurrences or described.indexes or FINAL in taps or engine.cache_layout is None:
            return None
        outer: Any = shallow(engine.original)
        path = next((name for name, each in outer.named_modules() if each is engine.original.get_decoder()), "")
        module = outer
        for name in path.split("."):
            if name not in module._modules:
                return None
            module._modules[name] = module = shallow(module._modules[name])
        vars(module)["forward"] = stop_before_the_text
        call = self._call
        kwargs = call.model_kwargs | {"use_cache": True, CACHE: DynamicCache()}
        for name in {"attention_mask", "position_ids", *TOKEN_TYPES} & kwargs.keys():
            kwargs[name] = None if kwargs[name] is None else kwargs[name][..., :-1]
        try:
            outer._prefill(call.input_ids[:, :-1], call.config, kwargs)
        except LanguageCall as told:
            if is_divisible(told.arguments, self.end):
                return told.arguments
        return None


def is_divisible(arguments: dict[str, Any], length: int) -> bool:
    """True if `cut` knows all tensors among a language model's arguments for `length` tokens."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor | dict | list | tuple)}
    shapes = {name: value.shape for name, value in tensors.items() if isinstance(value, Tensor)}
    known = {
        "inputs_embeds": lambda shape: len(shape) == 3 and shape[:2] == (1, length),
        "attention_mask": lambda shape: shape == (1, length),
        "position_ids": lambda shape: shape[-1] == length,
        "cache_position": lambda shape: shape == (length,),
    }
    return "inputs_embeds" in shapes and all(
        name in known and name in shapes and known[name](shapes[name]) for name in tensors
    )


def cut(arguments: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The arguments of a language model for the tokens from `begin` to `end` - 1, which attend to all before them."""
    part = {"inputs_embeds": lambda x: x[:, begin:end], "attention_mask": lambda x: x[:, :end]}
    part |= dict.fromkeys(("position_ids", "cache_position"), lambda x: x[..., begin:end])
    return {
        name: part[name](value) if name in part and isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }
