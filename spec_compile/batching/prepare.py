"""What transformers prepares for a request, by its own ``generate()`` that stops before its decoding loop."""

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode

from ..capture.adapters import shallow
from ..capture.pictures import placeholders
from ..errors import did_you_mean
from ..runtime import own_prefill
from ..runtime import past as pasts
from ..runtime.accept import Route, choose_route
from ..runtime.accept.grammars import check_grammars
from ..runtime.answer import Answer
from ..runtime.own_prefill import PICTURES, TOKEN_TYPES
from ..runtime.past import Past
from ..runtime.prepared import Inputs, Plans, make_key
from ..runtime.prompt import Prompt
from ..runtime.read_call import longest_width, make_answer, shortest_width, unserved

ARGUMENTS = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
"""Arguments of ``generate()`` that a request may have besides the fields of a GenerationConfig."""
SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


@dataclass
class Prepared:
    """What a request asks for.

    config: its generation config, completed. processors: transformers' logits processors. route: how tokens are
    accepted. shortest, longest: tokens of the row, prompt included, before which it may not end and at which it ends.
    make_answer: gives the `Answer` that takes its tokens. has_criteria: whether something besides `longest` and
    end-of-sequence tokens ends it. process: the model's own prefill, given the taps of the draft, of a prompt with
    pictures: what came of it, and how far positions run ahead of slots behind it; None: the prompt is text.
    """

    config: GenerationConfig
    processors: LogitsProcessorList
    route: Route
    shortest: int
    longest: int
    make_answer: Callable[[], Answer]
    has_criteria: bool = False
    process: Callable[[tuple[int, ...]], tuple[Past, list[Tensor] | None, int]] | None = None


class Preparer:
    """Prepares requests for one model, in any thread. Requests alike are prepared once.

    fast: the model. room: tokens a row has room for.
    """

    def __init__(self, fast, room: int):
        self._fast, self._speculation, self.room = fast, fast.speculation, room
        self._lock, self._plans = threading.Lock(), Plans()
        cls = type(fast.speculation.original)
        self._shadow = shallow(fast, type(cls.__name__, (_StopsBeforeTheLoop, cls), {"__module__": cls.__module__}))
        device = fast.speculation.engine.runtime.device
        self._alike = Inputs(torch.zeros(1, 1, dtype=torch.int64, device=device), None, None)
        """Stands for the ids of every prompt in the keys of `_plans`."""

    def __call__(
        self, prompt: list[int], config: GenerationConfig, defaults: GenerationConfig, tokenizer, options: dict
    ) -> Prepared:
        """What a request asks for; TypeError or ValueError if it cannot be served.

        prompt: token ids. config: of the request. defaults: for what `config` leaves open. options: fields of a
        GenerationConfig that go over `config`, `ARGUMENTS`, and `PICTURES` with their `TOKEN_TYPES`.
        """
        config, arguments = copy.copy(config), {}
        config.num_return_sequences = 1  # each sequence is a request
        for name, value in options.items():
            if name in ARGUMENTS | PICTURES | TOKEN_TYPES:
                arguments[name] = value
            elif name in vars(config):
                setattr(config, name, value)
            elif name != "prompt_lookup_num_tokens":
                known = sorted({*vars(config), *ARGUMENTS})
                raise TypeError(f"unknown option {name!r} of a request.{did_you_mean(name, known)}")
        config.prompt_lookup_num_tokens = None  # asks for n-gram drafts, which speculate() decides
        lengths = (getattr(each, name) for each in (config, defaults) for name in ("max_new_tokens", "max_length"))
        has_limit = any(length is not None for length in lengths)
        if not has_limit:
            config.max_new_tokens = self.room
        with self._lock:  # `Plans` are for one thread at a time, and so is the shadow's default config
            self._shadow.generation_config = defaults
            prepared = self._prepare(prompt, config, tokenizer, arguments)
        if not has_limit:
            prepared.longest = self.room
        if prepared.longest > self.room:
            raise ValueError(
                f"max_new_tokens: a prompt of {len(prompt)} tokens and {prepared.longest - len(prompt)} new ones make "
                f"{prepared.longest}, and a row of the batch holds {self.room}; ask for fewer, or pass a larger "
                "max_cache_len to speculate()"
            )
        return prepared

    def _prepare(self, prompt: list[int], config: GenerationConfig, tokenizer, arguments: dict) -> Prepared:
        key = None
        if tokenizer is None and not arguments:
            key = make_key(self._shadow, self._alike.ids.device, self._alike, {"generation_config": config})
        plan = self._plans.find(key)
        ids = torch.tensor([prompt])
        if plan is not None:
            (least, most), width = plan.new_tokens, len(prompt)
            return Prepared(
                plan.config, plan.processors, plan.route, width + least if least else 0, width + most,
                lambda: Answer(ids, width + most, plan.eos, plan.pad),
            )  # fmt: skip
        with self._plans.awaiting(key):
            return self._prepare_anew(ids, config, tokenizer, arguments)

    def _prepare_anew(self, ids: Tensor, config: GenerationConfig, tokenizer, arguments: dict) -> Prepared:
        """By transformers, for a prompt `ids` [1, W]."""
        device, given = self._alike.ids.device, {} if tokenizer is None else {"tokenizer": tokenizer}
        arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        with self._speculation.turns:  # because a GPU allows nobody else to take memory while a graph is captured
            call = self._shadow.generate(
                ids.to(device), attention_mask=torch.ones_like(ids, device=device),
                generation_config=copy.deepcopy(config), **given, **arguments,
            )  # fmt: skip
            prompt = Prompt.of(call.input_ids, call.config, call.model_kwargs, placeholders(self._speculation.original))
            reason = unserved(self._speculation, prompt, call.config, call.model_kwargs)
        if reason is not None or call.config.return_dict_in_generate:
            raise ValueError(f"{reason or 'return_dict_in_generate'}: only generate() does this; leave it out")
        check_grammars(call.processors, 1, self._speculation.engine.runtime.verify.vocab_size)
        longest = longest_width(call.input_ids, call.criteria, call.config)

        def answer() -> Answer:
            return make_answer(ids, prompt, longest, call.criteria, call.config, None)

        first = answer()
        route = choose_route(call.config, call.processors, device, first.keeps_scores, has_first_logits=False)
        self._plans.keep(self._shadow, prompt, call.config, call.processors, call.criteria, first, route)
        shortest, has_criteria = shortest_width(call.processors), first.criteria is not None
        prepared = Prepared(call.config, call.processors, route, shortest, longest, answer, has_criteria)
        if prompt.has_pictures:
            self._check_pictures(prompt)
            prepared.process = partial(self._process, prompt, call)
        return prepared

    def _check_pictures(self, prompt: Prompt) -> None:
        """ValueError if pictures are where a batch does not read them."""
        if prompt.tokens[0][-1] in placeholders(self._speculation.original):
            raise ValueError("input_ids: a prompt that ends in a picture is served by generate(); put text behind it")
        if self._speculation.options.ranks.size > 1:
            raise ValueError("pixel_values: pictures are read in one process; leave out tensor_parallel")

    def _process(
        self, prompt: Prompt, call: "_Call", taps: tuple[int, ...]
    ) -> tuple[Past, list[Tensor] | None, int]:  # fmt: skip
        """See `Prepared.process`."""
        kwargs = copy.copy(call.model_kwargs)
        kwargs["past_key_values"] = copy.deepcopy(kwargs["past_key_values"])  # empty; another sequence may need it, too
        own = own_prefill.run(self._fast, prompt, call.input_ids, call.config, kwargs, taps)
        past = pasts.read(own.cache, prompt.padding, self._speculation.cache_layout)
        return past, own.features, prompt.position_offsets[0]


@dataclass
class _Call:
    """What transformers gives to its decoding loop."""

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


def without_end(config: GenerationConfig) -> GenerationConfig:
    """A copy of `config` without end-of-sequence tokens."""
    config = copy.deepcopy(config)
    config.eos_token_id = None
    return config
