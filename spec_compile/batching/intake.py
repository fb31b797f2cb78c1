"""`Intake`: the arguments of ``add_request()``, made into jobs."""

import copy
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ..drafting import Algorithm
from ..runtime.draft_limit import read_limit
from .job import Job, seed_of
from .logprobs import Scores
from .prepare import CALLBACKS, Prepared, Preparer
from .request_options import check_config, read_sequences


class Intake:
    """Reads requests for one speculative `model`, in any number of threads at once.

    prepare: makes what a request asks for. seed: of the first request that has none of its own; the next one has the
    next number. None: all have one that is drawn. returns_logprobs: see `Job`.
    """

    def __init__(self, model: nn.Module, prepare: Preparer, seed: int | None, returns_logprobs: bool = False):
        self._model, self.prepare, self._returns_logprobs = model, prepare, returns_logprobs
        self._lock, self._numbers = threading.Lock(), count()
        self._seeds: Iterator[int] | None = None if seed is None else count(seed)

    def jobs(
        self, input_ids: Any, config: GenerationConfig, request_id: str | None = None,
        max_new_tokens: int | None = None, streaming: bool = False, record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None, tokenizer: Any = None, seed: int | None = None,
        options: dict[str, Any] | None = None,
    ) -> list[Job]:  # fmt: skip
        """The requests for one prompt: one for each of `num_return_sequences`, the one of `request_id` last.

        config: of the request. The other arguments: see `Manager.add_request`, also for what is raised.
        """
        prompt, options = self._read_prompt(input_ids), dict(options or {})
        check_config("generation_config", config)
        defaults = self._model.generation_config
        mask = options.pop("attention_mask", None)
        if mask is not None and not torch.as_tensor(mask).all():
            raise ValueError("attention_mask: a request has one prompt without padding; leave it out")
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        if eos_token_id is not None:
            ends = [token for token in _as_ends(eos_token_id) if token >= 0]
            if ends:
                options["eos_token_id"] = ends
            else:
                config, defaults = _without_end(config), _without_end(defaults)
        algorithm = self._model.speculation.engine.runtime.algorithm
        most_nodes = read_limit(options.pop("speculation", None), algorithm.plan.nodes)
        references = self._read_references(algorithm, options.pop("reference", None))
        adapter = self._read_adapter(options.pop("adapter_name", None))
        share_text = self._read_sharing(options.pop("share_text", None))
        whose = {name: _read_text(name, options.pop(name, None)) for name in ("cache_salt", "client")}
        scored = [options.pop(name, None) for name in ("logprobs", "prompt_logprobs", "logprobs_temperature")]
        number = options.pop("num_return_sequences", None)
        sequences = read_sequences(number, config.num_return_sequences, defaults.num_return_sequences)
        prepare = partial(self.prepare, prompt, config, defaults, tokenizer)
        prepared = [prepare(options)]
        for number in range(1, sequences):
            prepared.append(prepare(self._renewed(options, number)) if prepared[0].remembers else prepared[0])
        if seed is None and self._seeds is not None:
            with self._lock:
                seed = next(self._seeds)
        scores = [Scores.read(*scored) for _ in prepared]
        if scored[1] is not None:
            self._check_prompt_scores(prepared[0])
        seed = seed_of(seed) if prepared[0].ask.config.do_sample else 0
        name = self._name() if request_id is None else request_id
        names = [*(child_name(name, number) for number in range(sequences - 1)), name]
        return [
            Job(
                name, prompt, each, seed, number, streaming, record_timestamps, share_text, most_nodes, references,
                scores[number], adapter, returns_logprobs=self._returns_logprobs, **whose,
            )
            for number, (name, each) in enumerate(zip(names, prepared))
        ]  # fmt: skip

    def _check_prompt_scores(self, prepared: Prepared) -> None:
        """ValueError if log-probabilities of this prompt cannot be told."""
        if prepared.process is not None:
            raise ValueError("prompt_logprobs: they are not told of prompts with pictures; leave it out")
        if self._model.speculation.engine.runtime.verify.clamps_prompts:
            raise ValueError("prompt_logprobs: the model processes prompts unlike tokens of an answer; leave it out")

    def _name(self) -> str:
        with self._lock:
            return f"req_{next(self._numbers)}"

    def _read_prompt(self, input_ids: Any) -> list[int]:
        ids = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else input_ids
        if isinstance(ids, (str, bytes)) or not hasattr(ids, "__iter__"):
            raise TypeError(f"input_ids: expected token ids, got {type(ids).__name__}; run the tokenizer first")
        ids = list(ids)
        if len(ids) == 1 and isinstance(ids[0], list):  # as a processor gives them
            (ids,) = ids
        if not ids:
            raise ValueError("input_ids: expected at least one token, got none")
        others = {*map(type, ids)} - {int}
        if others:
            raise TypeError(f"input_ids: expected token ids, got {min(each.__name__ for each in others)}")
        vocab = self._model.speculation.engine.runtime.verify.embedded
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab:
                raise ValueError(f"input_ids: token id {token} is outside the vocabulary of {vocab} tokens")
        return ids

    def _read_adapter(self, name: Any) -> str | None:
        """The adapter that a request names, or else the active one; None if rows choose none."""
        loras = self._model.speculation.engine.loras
        if loras is None:
            if name is not None:
                raise ValueError(
                    "adapter_name: the active adapters were captured by speculate(); leave it out, or pass max_loras "
                    "to speculate(), so that each request chooses one"
                )
            return None
        if name is None:
            return loras.active
        loras.check_name(name, "adapter_name")
        return name

    def _read_sharing(self, share_text: Any) -> bool | str:
        """See `Job.share_text`. Texts that the model's options forget are not kept for their owners, either."""
        shares: bool = getattr(self._model.speculation.options, "share_text", True)
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
        if slots > self.prepare.room:
            raise ValueError(
                f"reference: {slots} tokens, one between two texts included, are more than a row of "
                f"{self.prepare.room} holds; give fewer"
            )
        return references

    def _renewed(self, options: dict[str, Any], number: int) -> dict[str, Any]:
        """The options for sequence `number`, with copies of what remembers the tokens that it has seen.

        ValueError if something cannot be copied.
        """
        memo = {id(model): model for model in (self._model, self._model.speculation.original)}
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


def child_name(request_id: str, number: int) -> str:
    """The name of sequence `number` of a request, but for the last one, which has the request's own."""
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


def _without_end(config: GenerationConfig) -> GenerationConfig:
    """A copy of `config` without end-of-sequence tokens."""
    config = copy.copy(config)
    config.eos_token_id = None
    return config
