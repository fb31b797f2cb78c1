"""`speculate`: the one line, and the object behind ``model.speculation``."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import torch
from transformers import Cache, PreTrainedModel

from . import adapters, kernels, report
from .admit import admit
from .capture import capture
from .check_generation import check_generation
from .checks import check_capture, check_tree
from .config import Options, parse_options
from .drafters import ALGORITHMS, parse_algorithm
from .drafters.base import Algorithm
from .explain import explain
from .runtime import past
from .runtime.engine import Engine, Request
from .runtime.generate import SpeculativeMixin
from .runtime.session import Session
from .stats import Stats


def speculate(model: PreTrainedModel, algo: str = "ngram", **options) -> PreTrainedModel:
    """A model that generates faster, with the same answer.

    model: a causal language model of transformers, or peft's wrapper around one; it keeps working as before. Returns an
    object of its own class that shares its weights; its ``generate()`` takes the same arguments.
    ``result.speculation`` holds ``stats``, ``explain()``, ``report()``, ``ngram`` and ``warmup()``.

    algo: "ngram" (alias "lookahead"), "eagle", "eagle3", "naive_eagle", "mtp" ("nextn"), "dflash" or "draft_model"
    ("standalone"). options: see `config.Options` and the algorithm's own in `drafters`; ``draft=`` names the draft.

    Raises TypeError (not a transformers model, unknown option), ValueError (unknown algorithm, option out of range,
    model in training mode) or UnsupportedModelError (the model cannot be rewritten exactly), before any change.
    """
    if adapters.is_wrapped(model):
        return adapters.wrap_alike(model, speculate(adapters.base_of(model), algo, **options))
    name = parse_algorithm(algo)
    parsed = parse_options(ALGORITHMS[name].options, options)
    admit(model)
    if model.device.type == "cuda":
        kernels.load(model.device)
    algorithm = ALGORITHMS[name].build(model, parsed)
    fast = _shadow(model)
    fast.__dict__["speculation"] = Speculation(model, name, parsed, algorithm)
    return fast


class Speculation:
    """What is behind ``model.speculation``: statistics, reports and control of one speculative model."""

    def __init__(self, model: PreTrainedModel, name: str, options: Options, algorithm: Algorithm):
        self.algorithm, self.options = name, options
        self._model, self._lock, self._references, self._said = model, threading.RLock(), [], set()
        graph = capture(model)
        if options.check:
            check_capture(model, graph)
        self.looped = False
        """Whether a decoding loop of transformers, or ours, ran in the last generate()."""
        self._engine = Engine(
            graph,
            algorithm,
            options,
            model.device,
            _max_positions(model, graph.position_limit, options),
        )
        if options.check:
            check_tree(type(model).__name__, graph, self._engine.verify)
        self.serves_padding = not options.check or check_generation(model, graph)
        """Whether batches padded on the left are served: the model's own positions follow the padding."""
        self._tuned = adapters.tuned_layers(model)
        self._weights = self._addresses()

    @property
    def original(self) -> PreTrainedModel:
        """The model that `speculate` was given."""
        return self._model

    @property
    def ngram(self):
        """With algo="ngram" its `NgramTrie`, on a GPU its `NgramCorpus`."""
        return self._engine.algorithm.store

    @cached_property
    def caches_alike(self) -> bool:
        """Whether transformers' cache of this model holds what ours does (see `past.is_alike`)."""
        return past.is_alike(self._model, self._engine.verify.layers)

    @property
    def stats(self) -> Stats:
        """Counters since the start or ``stats.reset()``."""
        return self._engine.stats

    def explain(self) -> str:
        """What each pass changed, and what a round does."""
        return explain(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While inside, generate() keeps every tree that it verifies, for `report`: memory on the host, until the next
        call that is recorded."""
        before, self._engine.records = self._engine.records, True
        try:
            yield
        finally:
            self._engine.records = before

    def report(self, path, tokenizer=None) -> Path:
        """Write a page (HTML in one file, for any browser, without a network) about the last generate() that was
        recorded: its text by rounds, accept lengths, times, and every tree with what was accepted; returns its path.

        tokenizer: of the model, to show text in place of token ids. Raises RuntimeError if nothing was recorded,
        TypeError if `tokenizer` cannot decode.
        """
        if self._engine.recording is None:
            raise RuntimeError(
                "no generate() was recorded; run it inside `with model.speculation.recording():`, then call report()"
            )
        return report.write(self._engine.recording, path, tokenizer, type(self._model).__name__, self.algorithm)

    def warmup(
        self, batch_size: int = 1, progress: Callable[[str], None] | None = None, do_sample: bool = False
    ) -> None:
        """Compile all for a batch size now, not in the first ``generate()``; `progress` is given a line a step.

        do_sample: for sampling and logits processors, too, whose rounds come in two halves.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad(), self.reporting(progress):
            session = self._engine.session(batch_size)
            session.build_prefill()
            for nodes in self._engine.sizes:
                for part in ("round", "look", "finish") if do_sample else ("round",):
                    session.step(part, nodes)

    def compile_anew(self) -> None:
        """Compile one round for a single sequence again, for tools that watch compilation."""
        with self._lock:
            Session(self._engine, 1).step("round", self._engine.sizes[-1])

    @contextmanager
    def reporting(self, progress: Callable[[str], None] | None) -> Iterator[None]:
        """While inside, `progress` is given a line when something begins or ends to compile."""
        before = self._engine.report
        self._engine.report = progress or before
        try:
            yield
        finally:
            self._engine.report = before

    @contextmanager
    def generating(self, reference) -> Iterator[None]:
        """One call of generate() at a time: it owns the state until it ends. `reference`: see `generate`."""
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._addresses() != self._weights:
                raise RuntimeError(
                    "the model's weights or adapters were moved, replaced or switched after speculate(); call "
                    "speculate() again"
                )
            before = self._references
            self._references = [] if reference is None else self._engine.algorithm.documents(reference)
            try:
                yield
            finally:
                self._references = before

    def step_aside(self, argument: str) -> None:
        """Say, once for each `argument`, that transformers' own loop runs."""
        if argument not in self._said:
            self._said.add(argument)
            warnings.warn(
                f"{argument}: only transformers' own generate() does this; it runs, without speculation", stacklevel=4
            )

    def admit_request(self, prompts: list[list[int]], room: int) -> None:
        """ValueError if the model or the cache cannot take `prompts` and `room` more tokens a row."""
        vocab = self._engine.verify.vocab_size
        foreign = next((token for prompt in prompts for token in prompt if not 0 <= token < vocab), None)
        if foreign is not None:
            raise ValueError(f"input_ids: token id {foreign} is outside the vocabulary of {vocab} tokens")
        capacity, wanted = self._engine.capacity(len(prompts)), max(map(len, prompts)) + room
        if wanted > capacity:
            raise ValueError(
                f"max_length: prompt and new tokens make {wanted} tokens, the cache holds {capacity} a "
                f"sequence; ask for fewer, or raise it with speculate(model, max_cache_len={wanted})"
            )

    def run(self, request: Request) -> Iterator[list[list[int]]]:
        """See `Engine.run`."""
        request.references = self._references
        request.eos = [token for token in request.eos if 0 <= token < self._engine.verify.vocab_size]
        return self._engine.run(request)

    def extend(self, cache: Cache, padding: list[int], length: int) -> None:
        """Bring a transformers cache up to `length` places after a run (see `past.extend`)."""
        past.extend(cache, self._engine.session(len(padding)).state, padding, length)

    def _addresses(self) -> list:
        return [parameter.data_ptr() for parameter in self._model.parameters()] + adapters.switches(self._tuned)


def _max_positions(model: PreTrainedModel, table: int | None, options: Options) -> int:
    """Tokens a sequence may have by default; ValueError if more are asked for than a learned position table has."""
    if table is not None and (options.max_cache_len or 0) > table:
        raise ValueError(
            f"max_cache_len: the model has learned positions for {table} tokens, got {options.max_cache_len}"
        )
    config = model.config.get_text_config(decoder=True)
    return table or getattr(config, "max_position_embeddings", None) or 1 << 20


def _shadow(model: PreTrainedModel) -> PreTrainedModel:
    """Another object of the model's class, with our generate() in front, that shares all modules and parameters."""
    cls = type(model)
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    shadow = adapters.shallow(model, type(cls.__name__, (SpeculativeMixin, cls), names))
    shadow.generation_config = copy.deepcopy(model.generation_config)
    shadow.__dict__.pop("generate", None)  # one set on the object is run by `SpeculativeMixin.generate`
    return shadow
