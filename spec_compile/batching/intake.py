"""`Intake`: the arguments of ``add_request()``, made into sequences that are ready for a row.

transformers' own ``generate()`` prepares a request, and stops before its decoding loop.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

from ..capture.admit import placeholders
from ..capture.copies import shallow
from ..drafting import Algorithm
from ..runtime.generate import SpeculativeMixin
from ..runtime.preparation import Remembered, make_key, read_limit
from ..runtime.prompt import PICTURES, TOKEN_TYPES, Prompt, unserved
from ..runtime.request import CRITERIA_IN_ROUND, Request, seed_of
from ..runtime.verify.processors import ROWWISE, is_known
from ..runtime.verify.thinking import check_processors
from .output import Scores
from .request_options import (
    StopStrings,
    bound_ngrams,
    check_config,
    check_known,
    check_stops,
    check_values,
    check_watermark,
    find_culprit,
    read_sequences,
)
from .sequence import BatchSequence

CALLBACKS = {"logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"}
STOPS_IN_PROMPT = "stops_in_prompt"
"""Option of a request: whether a stop string may begin in the prompt, as transformers has it."""
SERVED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
ONLY_GENERATE = ("return_dict_in_generate", "token_healing")
"""Settings that only ``generate()`` serves, besides those that `unserved` finds."""
FORGETFUL_CRITERIA = CRITERIA_IN_ROUND | {"MaxTimeCriteria", "StopStringCriteria"}
"""transformers' stopping criteria that remember nothing of the tokens that they have seen."""


@dataclass(eq=False)
class PreparedCall(Exception):
    """The arguments of transformers' decoding loop. They are raised, so that no ``generate()`` goes on with them."""

    input_ids: Tensor
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    model_kwargs: dict


class StopsBeforeTheLoop:
    """Put in front of a model's own class, makes ``generate()`` raise what it has prepared."""

    def _sample(
        self, input_ids: Tensor, logits_processor: LogitsProcessorList, stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig, synced_gpus: bool = False, streamer: Any = None, **model_kwargs: Any,
    ) -> None:  # fmt: skip
        raise PreparedCall(input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

    def _maybe_prepare_encoder_kwargs_for_generation(self, inputs: Tensor, model_kwargs: dict, *_: Any) -> dict:
        """Read no pictures yet."""
        return model_kwargs

    def _validate_generation_mode(
        self, generation_mode: GenerationMode, generation_config: GenerationConfig, generation_mode_kwargs: dict
    ) -> None:
        if generation_mode not in SERVED_MODES:
            raise ValueError(
                f"{generation_mode.value.replace('_', ' ')}: only generate() does this; a request is greedy or sampled"
            )


class Intake:
    """Reads requests for one speculative `model`, in any number of threads at once. Requests alike are prepared once.

    room: tokens that a row has room for.
    seed: seed of the first request that brings none; the next one has the next number. None: seeds are drawn.
    returns_logprobs: see `Request`.
    """

    arguments = CALLBACKS | PICTURES | TOKEN_TYPES
    """Arguments of ``generate()`` that a request may have besides the fields of a GenerationConfig."""
    stops = StopsBeforeTheLoop
    of_pictures: Callable[..., Any]
    """Makes a `Request.process` for a prompt with pictures or sounds; `contrib.own_prefill` has it."""

    def __init__(self, model: SpeculativeMixin, room: int, seed: int | None = None, returns_logprobs: bool = False):
        self._model, self._engine, self._room = model, model.speculation.engine, room
        self._returns_logprobs = returns_logprobs
        self._lock, self._numbers = threading.Lock(), count()
        self._seeds: Iterator[int] | None = None if seed is None else count(seed)
        self._remembered = Remembered()
        cls = type(self._engine.original)
        self._class = type(cls.__name__, (self.stops, cls), {"__module__": cls.__module__})
        self._ids = torch.zeros(1, 1, dtype=torch.int64, device=self._engine.runtime.device)
        """Stand for the ids of every prompt in the keys of `_remembered`."""

    def sequences(
        self, input_ids: Any, config: GenerationConfig, request_id: str | None = None, /, **options: Any
    ) -> list[BatchSequence]:
        """The sequences for one prompt, `num_return_sequences` of them; the last one has the name `request_id`.

        config: the request's config. options: see `Manager.add_request`, also for what is raised.
        """
        # Read the options that only requests have.
        prompt = self._read_prompt(input_ids)
        check_config("generation_config", config)
        defaults, algorithm = self._model.generation_config, self._engine.runtime.algorithm
        tokenizer, seed = options.pop("tokenizer", None), options.pop("seed", None)
        mask = options.pop("attention_mask", None)
        if mask is not None and not torch.as_tensor(mask).all():
            raise ValueError("attention_mask: a request has one prompt without padding; leave it out")
        if options.get("max_new_tokens", 0) is None:
            del options["max_new_tokens"]
        if (eos_token_id := options.pop("eos_token_id", None)) is not None:
            ends = [token for token in _as_ends(eos_token_id) if token >= 0]
            if ends:
                options["eos_token_id"] = ends
            else:
                config, defaults = copy.copy(config), copy.copy(defaults)
                config.eos_token_id = defaults.eos_token_id = None
        wishes = {
            "most_nodes": read_limit(options.pop("speculation", None), algorithm.plan.nodes),
            "references": self._read_references(algorithm, options.pop("reference", None)),
            "adapter": self._read_adapter(options.pop("adapter_name", None)),
            "share_text": self._read_sharing(options.pop("share_text", None)),
            **{name: _read_text(name, options.pop(name, None)) for name in ("cache_salt", "client")},
            **{name: options.pop(name, False) for name in ("streaming", "record_timestamps")},
            "returns_logprobs": self._returns_logprobs,
        }  # fmt: skip
        scored = [options.pop(name, None) for name in ("logprobs", "prompt_logprobs", "logprobs_temperature")]
        number = options.pop("num_return_sequences", None)
        number = read_sequences(number, config.num_return_sequences, defaults.num_return_sequences)

        # Have transformers prepare it, anew for each sequence if something remembers the tokens that it has seen.
        prepare = partial(self._request, prompt, config, defaults, tokenizer)
        requests = [prepare(options)]
        for index in range(1, number):
            requests.append(prepare(self._renewed(options, index)) if _remembers(requests[0]) else requests[0])
        if seed is None and self._seeds is not None:
            with self._lock:
                seed = next(self._seeds)
        scores = [Scores.read(*scored) for _ in requests]
        if scored[1] is not None and requests[0].process is not None:
            raise ValueError("prompt_logprobs: they are not told of prompts with pictures or a source; leave it out")
        if scored[1] is not None and self._engine.runtime.verify.clamps_prompts:
            raise ValueError("prompt_logprobs: the model processes prompts unlike tokens of an answer; leave it out")
        wishes["seed"] = seed_of(seed) if requests[0].config.do_sample else 0
        if request_id is None:
            with self._lock:
                request_id = f"req_{next(self._numbers)}"
        names = [*(child_name(request_id, index) for index in range(number - 1)), request_id]
        return [
            BatchSequence(replace(each, **wishes), prompt, request_id=name, sequence_index=index, scores=scores[index])
            for index, (name, each) in enumerate(zip(names, requests))
        ]

    def _read_prompt(self, input_ids: Any, name: str = "input_ids") -> list[int]:
        ids = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else input_ids
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            raise TypeError(f"{name}: expected token ids, got {type(ids).__name__}; run the tokenizer first")
        ids = list(ids)
        if len(ids) == 1 and isinstance(ids[0], list):  # as a processor gives them
            (ids,) = ids
        if not ids:
            raise ValueError(f"{name}: expected at least one token, got none")
        others = {*map(type, ids)} - {int}
        if others:
            raise TypeError(f"{name}: expected token ids, got {min(each.__name__ for each in others)}")
        vocab = self._engine.runtime.verify.embedded
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab:
                raise ValueError(f"{name}: token id {token} is outside the vocabulary of {vocab} tokens")
        return ids

    def _read_adapter(self, name: Any) -> str | None:
        """The adapter that a request names, or else the active one; None if rows choose none."""
        loras = self._engine.loras
        if loras is None and name is not None:
            raise ValueError(
                "adapter_name: the active adapters were captured by speculate(); leave it out, or pass max_loras to "
                "speculate(), so that each request chooses one"
            )
        if loras is None or name is None:
            return None if loras is None else loras.active
        loras.check_name(name, "adapter_name")
        return name

    def _read_sharing(self, share_text: Any) -> bool | str:
        """See `Request.share_text`. Texts that the model's options forget are not kept for their owners, either."""
        shares: bool = getattr(self._engine.options, "share_text", True)
        if share_text is None:
            return shares
        if not isinstance(share_text, bool | str):
            raise TypeError(f"share_text must be True, False, None or a text, not {type(share_text).__name__}")
        return share_text if shares or isinstance(share_text, bool) else False

    def _read_references(self, algorithm: Algorithm, reference: Any) -> list[torch.Tensor]:
        """The texts in a request's `reference`. ValueError or TypeError if it cannot have them."""
        if reference is None:
            return []
        references = [text for text in algorithm.documents(reference) if len(text)]
        slots = sum(len(text) + 1 for text in references) - 1
        if slots > self._room:
            raise ValueError(
                f"reference: {slots} tokens, one between two texts included, are more than a row of "
                f"{self._room} holds; give fewer"
            )
        return references

    def _renewed(self, options: dict[str, Any], number: int) -> dict[str, Any]:
        """The options for sequence `number`, with copies of what remembers the tokens that it has seen.

        ValueError if something cannot be copied.
        """
        memo = {id(model): model for model in (self._model, self._engine.original)}
        options = dict(options)
        for name in CALLBACKS & options.keys():
            try:
                options[name] = copy.deepcopy(options[name], dict(memo))  # guard: own-processors
            except Exception as error:
                raise ValueError(
                    f"num_return_sequences: each sequence needs {name} for itself, and a copy of it fails "
                    f"({type(error).__name__}: {error}); add one request for each sequence"
                ) from error
        if allowed := options.get("prefix_allowed_tokens_fn"):
            options["prefix_allowed_tokens_fn"] = lambda row, ids: allowed(row + number, ids)
        return options

    # --- transformers' preparation

    def _request(
        self, prompt: list[int], config: GenerationConfig, defaults: GenerationConfig, tokenizer: Any, options: dict
    ) -> Request:
        """The request, ready for a row; TypeError or ValueError if it cannot be served.

        prompt: token ids.
        config, defaults: the request's config, and values for all that it leaves open.
        options: fields of a GenerationConfig that go over `config`, `arguments`, and `STOPS_IN_PROMPT`.
        """
        room = self._room
        if len(prompt) >= room:  # guard: longest-prompt
            raise ValueError(
                f"input_ids: a prompt of {len(prompt)} tokens leaves no room for an answer in a row of the batch, "
                f"which holds {room}; shorten it, or pass a larger max_cache_len to speculate()"
            )

        # The generation config of this request, and what else generate() has as an argument.
        config, defaults, arguments = copy.copy(config), copy.copy(defaults), {}
        check_known(options, {*vars(config), *self.arguments, STOPS_IN_PROMPT})
        for name, value in options.items():
            if name == STOPS_IN_PROMPT:
                if not isinstance(value, bool):
                    raise TypeError(f"{name}: expected a bool, got {value!r:.80}")
            elif name in self.arguments:
                arguments[name] = value
            else:
                setattr(config, name, value)
        config.num_return_sequences = 1  # each sequence is prepared as a request
        config.prompt_lookup_num_tokens = None  # asks for n-gram drafts, which speculate() decides
        check_values(vars(config))
        check_watermark(config.watermarking_config)
        bound_ngrams(config, len(prompt), room)

        # Stop strings are ours, and a request without a limit fills its row.
        stops = config.stop_strings if config.stop_strings is not None else defaults.stop_strings
        stops = [] if stops is None else check_stops(stops, tokenizer)
        config.stop_strings = defaults.stop_strings = None
        limits = [getattr(each, name) for each in (config, defaults) for name in ("max_new_tokens", "max_length")]
        has_limit = any(limit is not None for limit in limits)
        if not has_limit:
            config.max_new_tokens = room
        request = self._prepare(prompt, config, defaults, tokenizer, arguments)
        if not has_limit:
            request = replace(request, longest=room)
        if request.longest > room:
            raise ValueError(
                f"max_new_tokens: a prompt of {len(prompt)} tokens and {request.longest - len(prompt)} new ones make "
                f"{request.longest}, and a row of the batch holds {room}; ask for fewer, or pass a larger "
                "max_cache_len to speculate()"
            )
        if not stops:
            return request
        criteria: list = request.criteria or [
            MaxLengthCriteria(request.longest), *([EosTokenCriteria(request.eos)] if request.eos else [])
        ]  # fmt: skip
        stop = StopStrings(tokenizer, stops, 0 if options.get(STOPS_IN_PROMPT, True) else len(prompt))
        return replace(request, criteria=StoppingCriteriaList([*criteria, stop]))

    def _prepare(
        self, prompt: list[int], config: GenerationConfig, defaults: GenerationConfig, tokenizer: Any, arguments: dict
    ) -> Request:
        """The request as transformers prepares it, from an earlier one that was alike if there is one."""
        copied: Any = shallow(self._model, self._class)
        copied.generation_config = defaults
        device = self._ids.device
        key = None if arguments else make_key(copied, device, self._ids, None, {"generation_config": config})
        with self._lock:
            found = self._remembered.find(key)
        if found is not None:
            return found[0].after(len(prompt))
        call = self._ask_transformers(copied, torch.tensor([prompt]), config, tokenizer, arguments)
        read = Prompt.of(call.input_ids, call.config, call.model_kwargs, placeholders(self._engine.original.config))
        reason = next((name for name in ONLY_GENERATE if getattr(call.config, name, None)), None)
        reason = reason or unserved(self._engine, read, call.config, call.model_kwargs)
        if reason is not None:
            raise ValueError(f"{reason}: only generate() does this; leave it out")
        check_processors(call.processors, 1, self._engine.runtime.verify.vocab_size)
        request = Request.of(call.input_ids, call.config, call.processors, call.criteria, device)
        with self._lock, self._remembered.awaiting(key):
            self._remembered.keep(copied, read, request)

        # Drop tables that nobody reads, and let time limits begin later.
        for processor in call.processors:
            if is_known(processor, {"WatermarkLogitsProcessor"}) and processor.seeding_scheme == "lefthash":
                processor.fixed_table = None  # 8 MB, which another scheme reads
        own: Sequence = arguments.get("stopping_criteria") or ()
        for criterion in call.criteria:
            if type(criterion).__name__ == "MaxTimeCriteria" and not any(criterion is one for one in own):
                criterion.initial_timestamp = None
        return replace(request, process=self.own_prefill(read, call, arguments))

    def _ask_transformers(
        self, copied: Any, ids: Tensor, config: GenerationConfig, tokenizer: Any, arguments: dict
    ) -> PreparedCall:
        """The arguments of transformers' decoding loop for a prompt `ids` [1, W]; ValueError, naming the option, if it
        fails on one."""
        device, given = self._ids.device, {} if tokenizer is None else {"tokenizer": tokenizer}
        arguments = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in arguments.items()}
        ids = ids.to(device)

        def generate(config: GenerationConfig) -> PreparedCall:
            with torch.inference_mode(False), torch.no_grad():
                try:
                    mask = torch.ones_like(ids)
                    copied.generate(ids, attention_mask=mask, generation_config=config, **given, **arguments)
                except PreparedCall as call:
                    return call
            raise TypeError(f"generate: {type(copied).__name__} runs a loop that no request has")

        try:
            return generate(copy.deepcopy(config))
        except Exception as error:
            names = [name for name in vars(config) if not name.startswith("_")]
            if isinstance(error, (TypeError, ValueError)) and any(name in str(error) for name in names):
                raise
            name = find_culprit(config, generate)
            raise ValueError(f"{name}: transformers cannot serve it: {type(error).__name__}: {error}") from error

    def own_prefill(self, prompt: Prompt, call: PreparedCall, arguments: dict[str, Any]) -> Any:
        """See `Request.process`. arguments: of the request, besides its config."""
        return self.of_pictures(self._model, prompt, call, arguments) if prompt.has_pictures else None


def _remembers(request: Request) -> bool:
    """True if a processor or a criterion may remember what it has seen, so that it serves one sequence."""
    criteria = [each for each in request.criteria or () if not isinstance(each, StopStrings)]
    return not (
        all(is_known(each, ROWWISE) for each in request.processors)
        and all(is_known(each, FORGETFUL_CRITERIA) for each in criteria)
    )


def child_name(request_id: str, number: int | str) -> str:
    """The name of sequence `number` of a request, but for the last one, which has the request's own; number "": how
    they all begin."""
    return f"{request_id}__child#{number}"


def _read_text(name: str, value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: expected a text, not {type(value).__name__}")
    return value or ""


def _as_ends(value: Any) -> list[int]:
    ends = [value] if isinstance(value, int) else value
    ends = ends.tolist() if isinstance(ends, torch.Tensor) else ends
    if not isinstance(ends, (list, tuple)) or not all(type(token) is int for token in ends):
        raise TypeError(f"eos_token_id: expected a token id or a list of them, got {value!r:.80}")
    return [*ends]
