"""Requests are prepared by transformers' own ``generate()``, which stops before its decoding loop."""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
)

from ..capture.adapters import shallow
from ..capture.pictures import placeholders
from ..compat import CACHE
from ..runtime import own_prefill
from ..runtime import past as pasts
from ..runtime.accept.processors import ROWWISE, is_known
from ..runtime.accept.thinking import check_processors
from ..runtime.ask import CRITERIA_IN_ROUND, Ask, unserved
from ..runtime.own_prefill import PICTURES, TOKEN_TYPES
from ..runtime.past import Past
from ..runtime.prepared import Inputs, Remembered, make_key
from ..runtime.prompt import Prompt
from .request_options import bound_ngrams, check_config, check_known, check_values, check_watermark, find_culprit
from .stop_strings import StopStrings, check_stops

CALLBACKS = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
"""Arguments of ``generate()`` that a request may have besides the fields of a GenerationConfig."""
STOPS_IN_PROMPT = "stops_in_prompt"
"""Option of a request: whether a stop string may begin in the prompt, as transformers has it."""
SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
ONLY_GENERATE = ("return_dict_in_generate", "token_healing")
"""Settings that only ``generate()`` serves, besides those that `unserved` finds."""
FORGETFUL_CRITERIA = CRITERIA_IN_ROUND | {"MaxTimeCriteria", "StopStringCriteria"}
"""transformers' stopping criteria that remember nothing of the tokens that they have seen."""


@dataclass
class Prepared:
    """A request for one prompt, ready to wait for a row.

    ask: all that it asks for; a time limit begins with `Ask.from_now`. remembers: True if a processor or a criterion
    may remember what it has seen, so that it serves one sequence. process: the model's own prefill of a prompt with
    pictures, a function of the draft's taps; it returns keys and values, hidden states, and how far positions run ahead
    of slots after it. None: the prompt is text.
    """

    ask: Ask
    remembers: bool = False
    process: Callable[[tuple[int, ...]], tuple[Past, list[Tensor] | None, int]] | None = None


class Preparer:
    """Prepares requests for one model, in any number of threads at once. Requests alike are prepared once.

    fast: the model. room: tokens a row has room for.
    """

    def __init__(self, fast, room: int):
        self._fast, self._engine, self.room = fast, fast.speculation.engine, room
        self._lock, self._remembered = threading.Lock(), Remembered()
        cls = type(self._engine.original)
        self._class = type(cls.__name__, (_StopsBeforeTheLoop, cls), {"__module__": cls.__module__})
        device = self._engine.runtime.device
        self._alike = Inputs(torch.zeros(1, 1, dtype=torch.int64, device=device), None, None)
        """Stands for the ids of every prompt in the keys of `_remembered`."""

    def __call__(
        self, prompt: list[int], config: GenerationConfig, defaults: GenerationConfig, tokenizer, options: dict
    ) -> Prepared:
        """The request, ready for a row; TypeError or ValueError if it cannot be served.

        prompt: token ids. config: of the request. defaults: for what `config` leaves open. options: fields of a
        GenerationConfig that go over `config`, `CALLBACKS`, `PICTURES` with their `TOKEN_TYPES`, and `STOPS_IN_PROMPT`.
        """
        if len(prompt) >= self.room:  # guard: longest-prompt
            raise ValueError(
                f"input_ids: a prompt of {len(prompt)} tokens leaves no room for an answer in a row of the batch, "
                f"which holds {self.room}; shorten it, or pass a larger max_cache_len to speculate()"
            )
        check_config("generation_config", config)
        config, defaults, arguments = copy.copy(config), copy.copy(defaults), {}
        extras = CALLBACKS | PICTURES | TOKEN_TYPES
        check_known(options, {*vars(config), *extras, STOPS_IN_PROMPT})
        for name, value in options.items():
            if name == STOPS_IN_PROMPT:
                if not isinstance(value, bool):
                    raise TypeError(f"{name}: expected a bool, got {value!r:.80}")
            elif name in extras:
                arguments[name] = value
            else:
                setattr(config, name, value)
        config.num_return_sequences = 1  # each sequence is a request
        config.prompt_lookup_num_tokens = None  # asks for n-gram drafts, which speculate() decides
        check_values(vars(config))
        check_watermark(config.watermarking_config)
        bound_ngrams(config, len(prompt), self.room)
        stops = config.stop_strings if config.stop_strings is not None else defaults.stop_strings
        stops = [] if stops is None else check_stops(stops, tokenizer)
        config.stop_strings = defaults.stop_strings = None
        begin = 0 if options.get(STOPS_IN_PROMPT, True) else len(prompt)
        stop = StopStrings(tokenizer, stops, begin) if stops else None
        limits = [getattr(each, name) for each in (config, defaults) for name in ("max_new_tokens", "max_length")]
        has_limit = any(limit is not None for limit in limits)
        if not has_limit:
            config.max_new_tokens = self.room
        prepared = self._prepare(prompt, config, defaults, tokenizer, arguments, stop)
        ask = prepared.ask
        if not has_limit:
            ask.longest = self.room
        if ask.longest > self.room:
            raise ValueError(
                f"max_new_tokens: a prompt of {len(prompt)} tokens and {ask.longest - len(prompt)} new ones make "
                f"{ask.longest}, and a row of the batch holds {self.room}; ask for fewer, or pass a larger "
                "max_cache_len to speculate()"
            )
        return prepared

    def _prepare(
        self, prompt: list[int], config: GenerationConfig, defaults: GenerationConfig, tokenizer, arguments: dict,
        stop: StopStrings | None,
    ) -> Prepared:  # fmt: skip
        shadow: Any = shallow(self._fast, self._class)
        shadow.generation_config = defaults
        key, ids = None, torch.tensor([prompt])
        if not arguments:
            key = make_key(shadow, self._alike.ids.device, self._alike, {"generation_config": config})
        with self._lock:
            preparation = self._remembered.find(key)
        if preparation is not None:
            return Prepared(_stopped(preparation.ask.after(len(prompt)), stop))
        call = self._ask_transformers(shadow, ids, config, tokenizer, arguments)
        read = Prompt.of(call.input_ids, call.config, call.model_kwargs, placeholders(self._engine.original))
        reason = next((name for name in ONLY_GENERATE if getattr(call.config, name, None)), None)
        reason = reason or unserved(self._engine, read, call.config, call.model_kwargs)
        if reason is not None:
            raise ValueError(f"{reason}: only generate() does this; leave it out")
        check_processors(call.processors, 1, self._engine.runtime.verify.vocab_size)
        return self._by_transformers(shadow, key, call, read, arguments.get("stopping_criteria") or (), stop)

    def _ask_transformers(
        self, shadow, ids: Tensor, config: GenerationConfig, tokenizer, arguments: dict
    ) -> "_Call":  # fmt: skip
        """The arguments of transformers' decoding loop for a prompt `ids` [1, W]; ValueError, naming the option, if it
        fails on one."""
        device, given = self._alike.ids.device, {} if tokenizer is None else {"tokenizer": tokenizer}
        arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        ids = ids.to(device)

        def generate(config: GenerationConfig) -> _Call:
            with torch.inference_mode(False), torch.no_grad():
                mask = torch.ones_like(ids)
                return shadow.generate(ids, attention_mask=mask, generation_config=config, **given, **arguments)

        try:
            return generate(copy.deepcopy(config))
        except Exception as error:
            names = [name for name in vars(config) if not name.startswith("_")]
            if isinstance(error, (TypeError, ValueError)) and any(name in str(error) for name in names):
                raise
            name = find_culprit(config, generate)
            raise ValueError(f"{name}: transformers cannot serve it: {type(error).__name__}: {error}") from error

    def _by_transformers(
        self, shadow, key, call: "_Call", prompt: Prompt, own: Sequence, stop: StopStrings | None
    ) -> Prepared:  # fmt: skip
        """By the `call` that transformers has prepared, which may be remembered for this `key`. own: criteria that came
        with the request, whose time limits have begun."""
        ask = Ask.of(call.input_ids, call.config, call.processors, call.criteria, self._alike.ids.device)
        with self._lock, self._remembered.awaiting(key):
            self._remembered.keep(shadow, prompt, ask)
        for processor in call.processors:
            if is_known(processor, {"WatermarkLogitsProcessor"}) and processor.seeding_scheme == "lefthash":
                processor.fixed_table = None  # 8 MB, which another scheme reads
        remembers = not all(is_known(processor, ROWWISE) for processor in call.processors)
        remembers |= not all(is_known(criterion, FORGETFUL_CRITERIA) for criterion in call.criteria)
        for criterion in call.criteria:
            if type(criterion).__name__ == "MaxTimeCriteria" and not any(criterion is one for one in own):
                criterion.initial_timestamp = None
        prepared = Prepared(_stopped(ask, stop), remembers)
        if prompt.has_pictures:
            self._check_pictures(prompt)
            prepared.process = partial(self._process, prompt, call)
        return prepared

    def _check_pictures(self, prompt: Prompt) -> None:
        """ValueError if pictures are where a batch does not read them."""
        if prompt.tokens[0][-1] in placeholders(self._engine.original):
            raise ValueError("input_ids: a prompt that ends in a picture is served by generate(); add text after it")
        if self._engine.options.ranks.size > 1:
            raise ValueError("pixel_values: pictures are read in one process; leave out tensor_parallel")

    def _process(
        self, prompt: Prompt, call: "_Call", taps: tuple[int, ...]
    ) -> tuple[Past, list[Tensor] | None, int]:  # fmt: skip
        """See `Prepared.process`."""
        kwargs = copy.copy(call.model_kwargs)
        kwargs[CACHE] = copy.deepcopy(kwargs[CACHE])  # empty; another sequence may need it, too
        own = own_prefill.run(self._fast, prompt, call.input_ids, call.config, kwargs, taps)
        past = pasts.read(own.cache, prompt.padding, self._engine.cache_layout)
        return past, own.features, prompt.position_offsets[0]


def _stopped(ask: Ask, stop: StopStrings | None) -> Ask:
    """The ask, which also ends at its stop strings from now on."""
    if stop is not None:
        criteria = ask.criteria
        if criteria is None:
            ends = [EosTokenCriteria(ask.eos)] if ask.eos else []
            criteria = StoppingCriteriaList([MaxLengthCriteria(ask.longest), *ends])
        ask.criteria = StoppingCriteriaList([*criteria, stop])
    return ask


@dataclass
class _Call:
    """The arguments of transformers' decoding loop."""

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: list
    config: GenerationConfig
    model_kwargs: dict


class _StopsBeforeTheLoop:
    """Put in front of a model's own class, makes ``generate()`` return what it has prepared."""

    def _sample(
        self, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus=False, streamer=None,
        **model_kwargs,
    ):  # fmt: skip
        return _Call(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_mode not in SERVED_MODES:
            raise ValueError(
                f"{generation_mode.value.replace('_', ' ')}: only generate() does this; a request is greedy or sampled"
            )
