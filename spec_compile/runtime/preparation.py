"""transformers' preparation of a call of ``generate()``, kept for the next call that is alike.

transformers copies and validates the generation config several times for a call. For common calls the outcome depends
only on the values of a `Key`, so it is prepared once. Other calls, and those with a warning, are prepared every time.
"""

import logging
import marshal
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from ..capture.replaced import HOOKS, METHODS, is_trusted
from .agreement import SCALARS, is_plain
from .request import Prompt, Request
from .verify import Route
from .verify.processors import MINIMA, OF_SCORES, is_known

OPTIONS = {
    "max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "eos_token_id", "pad_token_id", "bos_token_id",
}  # fmt: skip
"""Generation options that may differ from their defaults in calls whose preparation is kept."""
UNUSED = {"transformers_version", "max_length", "min_length"}
"""Values of a prepared config that `OPTIONS` decide, or that nothing reads."""
PROCESSORS = OF_SCORES | {"RepetitionPenaltyLogitsProcessor"}
"""Logits processors that remember nothing and do not depend on the width of the prompt."""
MOST = 32
"""Requests that are kept: the last used ones."""
LOOPS = {*HOOKS, "_beam_search", "_assisted_decoding", "_optimize_model_for_decode"}
"""Methods that prepare nothing. All others of `METHODS` must be transformers' own."""
LOGGER = logging.getLogger("transformers")
"""Its level changes the warnings of transformers."""

_methods = attrgetter(*METHODS)
_own_methods = dict(zip(METHODS, _methods(GenerationMixin)))

Key = tuple[Any, ...]


def read_inputs(args: tuple, kwargs: dict) -> tuple[Tensor, Tensor | None, Any, dict] | None:
    """The ids [B, W] int64 of ``generate()``, its attention mask [B, W] or None, its streamer and other arguments; None
    if the inputs have an uncommon form."""
    if len(args) > 1 or (args and "inputs" in kwargs):
        return None
    others = dict(kwargs)
    inputs, ids = args[0] if args else others.pop("inputs", None), others.pop("input_ids", None)
    mask, streamer = others.pop("attention_mask", None), others.pop("streamer", None)
    ids = inputs if ids is None else ids if inputs is None else None
    if type(ids) is not Tensor or ids.dtype is not torch.int64 or ids.dim() != 2 or not ids.numel():
        return None
    if mask is None:  # transformers warns about some batches without a mask
        return (ids, None, streamer, others) if ids.shape[0] == 1 else None
    if type(mask) is not Tensor or mask.shape != ids.shape or mask.device != ids.device or mask.is_floating_point():
        return None
    return ids, mask, streamer, others


def read_prompt(ids: Tensor, mask: Tensor | None, padding: int | None) -> Prompt | None:
    """The prompts, read with one copy; None if the mask has a zero, or if transformers infers a mask from tokens
    `padding`."""
    numbers = (ids if mask is None else torch.cat((ids, mask))).cpu()
    batch, width = ids.shape
    ids, seen = numbers[:batch], numbers[batch:].numpy()
    if (seen != 1).any() or (mask is None and padding is not None and (ids.numpy() == padding).any()):
        return None
    none = [0] * batch
    return Prompt(ids, ids.tolist(), none, width, True, False, False, False, none)


class Remembered:
    """Requests that transformers has prepared for one model, without what differs from call to call.

    Their columns count from the end of the prompt, and they have no processors that set a minimum length.
    """

    def __init__(self) -> None:
        self.awaited: Key | None = None
        """The key of the call that transformers prepares, until `keep`."""
        self._kept: OrderedDict[Key, tuple[Request, int | None]] = OrderedDict()

    def find(self, key: Key | None) -> tuple[Request, int | None] | None:
        """The request of this key, if it is kept, and the token from which transformers infers a missing mask, if it
        does."""
        found = self._kept.get(key)
        if found is not None:
            self._kept.move_to_end(key)
        return found

    @contextmanager
    def awaiting(self, key: Key | None) -> Iterator[None]:
        """A context in which transformers prepares the call of this key. A streamer may make other calls in it."""
        before, self.awaited = self.awaited, key
        try:
            yield
        finally:
            self.awaited = before

    def keep(self, model, prompt: Prompt, request: Request) -> None:
        """Keep the request of the `awaited` key, if later calls may use it."""
        key, self.awaited = self.awaited, None
        config, processors = request.config, request.processors
        if key is None or any(prompt.padding) or not _prepares_as_transformers(type(model).__bases__[1]):
            return
        if not all(is_known(each, PROCESSORS | MINIMA) for each in processors):
            return
        if request.criteria is not None or not _has_options_alone(config):
            return

        # Lengths have to be numbers of new tokens, and ends of sequence tokens.
        least, most = config.min_new_tokens or 0, config.max_new_tokens
        if type(most) is not int or least > most or (least and request.route is Route.ON_HOST):
            return
        pad = config._pad_token_tensor
        if any(token < 0 for token in request.eos) or (pad is not None and pad.numel() != 1):
            return
        padding = None if pad is None or int(pad) in request.eos else int(pad)

        # Leave out all that depends on the width of the prompt.
        others = type(processors)(each for each in processors if not is_known(each, MINIMA))
        # transformers ignores the least number of new tokens if nothing ends a row.
        kept = replace(request, processors=others, shortest=least if request.eos else 0, longest=most)
        self._kept[key] = kept, padding
        if len(self._kept) > MOST:
            self._kept.popitem(last=False)


def make_key(model, device: torch.device, ids: Tensor, mask: Tensor | None, options: dict) -> Key | None:
    """All values that transformers reads to prepare a call of `model`; None if it must prepare the call itself.

    device: the model's device. options: the other arguments of the call.
    """
    config = options.pop("generation_config", None)
    configs = [model.generation_config] if config is None else [model.generation_config, config]
    if not options.keys() <= OPTIONS or {*map(type, configs)} != {GenerationConfig} or ids.device != device:
        return None
    configs = [*map(vars, configs)]
    if any(values.get(name) is not None for values in configs for name in ("max_length", "min_length")):
        return None  # transformers warns if they come with max_new_tokens or min_new_tokens
    values = [value for part in (*configs, options) for value in part.values() if type(value) not in SCALARS]
    if not all(map(is_plain, values)):
        return None
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        return None
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None
    if not vars(model).keys().isdisjoint(METHODS):
        return None
    read = {name: value for name, value in vars(model.config).items() if type(value) in SCALARS or is_plain(value)}
    facts = marshal.dumps((options, *configs, read, LOGGER.getEffectiveLevel()), 2)  # tells 1, 1.0 and True apart
    methods = _methods(type(model)), _methods(type(model).__bases__[1])  # ours, and the model's own class's
    return facts, len(ids), mask if mask is None else mask.dtype, device, model.main_input_name, methods


def _prepares_as_transformers(cls: type) -> bool:
    """True if a model's class prepares calls only by the methods that `GenerationMixin` had at import."""
    return all(
        getattr(cls, name) is own and is_trusted(GenerationMixin, own)
        for name, own in _own_methods.items()
        if name not in LOOPS
    )


def _has_options_alone(config: GenerationConfig) -> bool:
    """True if all options of a prepared config besides `OPTIONS` have their defaults."""
    defaults = vars(GenerationConfig()) | GenerationConfig._get_default_generation_params()
    return all(
        name in OPTIONS | UNUSED
        or name.startswith("_")
        or (name in defaults and (value == defaults[name] or (value is False and defaults[name] is None)))
        for name, value in vars(config).items()
    )
