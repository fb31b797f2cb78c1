"""`speculate`: the one line, and the object behind ``model.speculation``."""

import copy
import dataclasses
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import forks, kernels
from .capture import adapters
from .capture.admit import admit
from .capture.check_generation import check_generation
from .capture.checks import check_capture, check_tree
from .capture.trace import capture
from .capture.watch import Watch, config_reads, describe
from .capture.weights import SharedWeights
from .compat import COMPILE_LOCK, check_compiler
from .config import Options, parse_options
from .drafters import ALGORITHMS, parse_algorithm
from .drafters.ngram import Ngram
from .drafting import Algorithm
from .errors import check_int
from .ngram import NgramStore
from .report import html as report
from .report.explain import explain
from .runtime import past
from .runtime.engine import Engine
from .runtime.generate import SpeculativeMixin
from .runtime.request import Request
from .runtime.session import Session
from .stats import Stats


def speculate(model: PreTrainedModel, algo: str = "ngram", **options: Any) -> PreTrainedModel:
    """A model that generates faster, with the same answer.

    model: a causal language model of transformers, or peft's wrapper around one; it keeps working as before. Returns an
    object of its own class that shares its weights; its ``generate()`` takes the same arguments.
    ``result.speculation`` holds ``stats``, ``explain()``, ``report()``, ``ngram``, ``warmup()`` and ``refresh()``.

    algo: "ngram" (alias "lookahead"), "eagle", "eagle3", "naive_eagle", "mtp" ("nextn"), "dflash" or "draft_model"
    ("standalone"). options: see `config.Options` and the algorithm's own in `drafters`; ``draft=`` names the draft.

    A result of `speculate` may be given, too: its original is taken, with these options alone. It can be pickled and
    deep-copied: the copy has weights of its own, and captures and compiles anew.

    Raises TypeError (not a transformers model, unknown option), ValueError (unknown algorithm, option out of range,
    model in training mode) or UnsupportedModelError (the model cannot be rewritten exactly), before any change.
    """
    if isinstance(model, SpeculativeMixin):
        model = vars(model)["speculation"].original
    if adapters.is_wrapped(model):
        base: Any = adapters.base_of(model)
        wrapper: Any = adapters.wrap_alike(model, speculate(base, algo, **options))
        return wrapper
    name = parse_algorithm(algo)
    parsed = parse_options(ALGORITHMS[name].options, options)
    admit(model)
    if model.device.type == "cuda":
        kernels.load(model.device)
    elif parsed.compile:
        check_compiler()
    with COMPILE_LOCK:  # tracing and checking change settings of the process
        algorithm = ALGORITHMS[name].build(model, parsed)
        fast = _shadow(model)
        fast.__dict__["speculation"] = Speculation(model, fast, name, parsed, algorithm)
    return fast


class Speculation:
    """What is behind ``model.speculation``: statistics, reports and control of one speculative model."""

    fork_order = 2

    def __init__(self, model: PreTrainedModel, fast: nn.Module, name: str, options: Options, algorithm: Algorithm):
        self.algorithm, self.options = name, options
        self._model, self._lock = model, threading.RLock()
        self._references: list[torch.Tensor] = []
        self._said: set[str] = set()
        self._share_text = True
        with config_reads(model) as reads:
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
            check_tree(type(model).__name__, graph, self._engine.runtime.verify)
        self.serves_padding = not options.check or check_generation(model, graph)
        """Whether batches padded on the left are served: the model's own positions follow the padding."""
        self._weights = SharedWeights(model, algorithm.draft_module)
        self._watch = Watch(model, fast, self._weights.slots, reads)
        self._calls, self._is_forked = 0, False
        forks.register(self)

    @property
    def original(self) -> PreTrainedModel:
        """The model that `speculate` was given."""
        return self._model

    def rebuilds(self, original: PreTrainedModel) -> tuple[Callable, tuple]:
        """What makes a model like this one of a copy of its `original`, as ``__reduce_ex__`` gives it."""
        options = {field.name: getattr(self.options, field.name) for field in dataclasses.fields(self.options)}
        return partial(speculate, algo=self.algorithm, **options), (original,)

    @property
    def ngram(self) -> NgramStore:
        """With algo="ngram" its `NgramTrie`, on a GPU its `NgramCorpus`; AttributeError with any other."""
        algorithm = self._engine.runtime.algorithm
        if not isinstance(algorithm, Ngram):
            raise AttributeError(
                f"algo={self.algorithm!r} keeps no n-grams; only speculate(model, algo='ngram') has speculation.ngram"
            )
        return algorithm.store

    @cached_property
    def caches_alike(self) -> bool:
        """Whether transformers' cache of this model holds what ours does (see `past.is_alike`)."""
        return past.is_alike(self._model, self._engine.runtime.verify.layers)

    @property
    def stats(self) -> Stats:
        """Counters since the start or ``stats.reset()``."""
        return self._engine.runtime.stats

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

    def report(self, path: str | Path, tokenizer: Any = None) -> Path:
        """Write a page (HTML in one file, for any browser, without a network) about the last generate() that was
        recorded: its text by rounds, accept lengths, times, and every tree with what was accepted; returns its path.
        With algo="ngram" the trees show pieces of other calls' texts, unless these ran with ``share_text=False``.

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

        do_sample: for sampling and logits processors, too, whose rounds come in two halves. TypeError or ValueError,
        naming the argument, if one is of another kind or out of range.
        """
        check_int("batch_size", batch_size, 1, 1 << 16)
        if not isinstance(do_sample, bool):
            raise TypeError(f"do_sample must be True or False, not {type(do_sample).__name__}")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of a line, not {type(progress).__name__}")
        with self._lock, torch.inference_mode(False), torch.no_grad(), self.reporting(progress):
            session = self._engine.session(batch_size)
            session.build_prefill()
            for nodes in self._engine.runtime.sizes:
                for part in ("round", "look", "finish") if do_sample else ("round",):
                    session.step(part, nodes)

    def compile_anew(self) -> None:
        """Compile one round for a single sequence again, for tools that watch compilation."""
        with self._lock:
            Session(self._engine.runtime, 1).step("round", self._engine.runtime.sizes[-1])

    def refresh(self) -> None:
        """Take over new weights, without capturing or compiling anew.

        Call it after parameters or buffers of the model, or of a draft that was passed as a module, were replaced or
        moved (``load_state_dict(assign=True)``, ``layer.weight = nn.Parameter(...)``, ``model.to(...)`` and back).
        Their values are copied into the memory that the graphs read, and the tensors become views of it, so that an
        optimizer that holds them goes on, and later steps in place are seen. (One that holds a flat buffer of which
        they were parts, as DeepSpeed's and FSDP's do, must be made anew.) What drafts copied from weights is computed
        anew. The answer is right after changes in place without it; then it keeps the drafts good. The graphs'
        memory stays allocated as long as this object lives, wherever the model is moved.

        Raises, before anything is copied: ValueError if a tensor is of another shape, dtype or device, has no values,
        or is tied otherwise than at speculate(), or if something besides tensors has changed; RuntimeError if called
        inside a generate() of this model. It waits for a generate() in another thread.
        """
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._calls:
                raise RuntimeError("refresh(): a generate() of this model is running; call refresh() when it is over")
            others = [change for change in self._watch.changes() if change.remedy == "speculate"]
            if others:
                raise ValueError(describe(others))
            self._weights.take_over()
            self._engine.refresh()

    @contextmanager
    def reporting(self, progress: Callable[[str], None] | None) -> Iterator[None]:
        """While inside, `progress` is given a line when something begins or ends to compile."""
        before = self._engine.runtime.say
        self._engine.runtime.say = progress or before
        try:
            yield
        finally:
            self._engine.runtime.say = before

    @contextmanager
    def generating(self, reference: Any, share_text: bool | None = None) -> Iterator[None]:
        """One call of generate() at a time: it owns the state until it ends. Arguments: see `generate`."""
        if share_text is not None and not isinstance(share_text, bool):
            raise TypeError(f"share_text must be True, False or None, not {type(share_text).__name__}")
        with self._lock, torch.inference_mode(False), torch.no_grad():
            if self._is_forked:
                self._adopt()
            if changes := self._watch.changes():
                raise RuntimeError(describe(changes))
            before = self._references, self._share_text
            self._references = [] if reference is None else self._engine.runtime.algorithm.documents(reference)
            self._share_text = getattr(self.options, "share_text", True) if share_text is None else share_text
            self._calls += 1
            try:
                yield
            finally:
                self._references, self._share_text = before
                self._calls -= 1

    def step_aside(self, argument: str) -> None:
        """Say, once for each `argument`, that transformers' own loop runs."""
        if argument not in self._said:
            self._said.add(argument)
            warnings.warn(
                f"{argument}: only transformers' own generate() does this; it runs, without speculation", stacklevel=4
            )

    def admit_request(self, prompts: list[list[int]], room: int) -> None:
        """ValueError if the model or the memory cannot take `prompts` and `room` more tokens a row."""
        vocab, positions = self._engine.runtime.verify.vocab_size, self._engine.runtime.verify.position_limit
        foreign = next((token for prompt in prompts for token in prompt if not 0 <= token < vocab), None)
        if foreign is not None:
            raise ValueError(f"input_ids: token id {foreign} is outside the vocabulary of {vocab} tokens")
        tokens = max(map(len, prompts)) + room
        if positions is not None and tokens > positions:
            raise ValueError(
                f"max_new_tokens: prompt and new tokens make {tokens} tokens, the model has learned positions for "
                f"{positions}; ask for at most {positions - max(map(len, prompts))}"
            )
        if tokens > self._engine.room(len(prompts)):  # then the cache will grow
            self._engine.runtime.check_memory(len(prompts), tokens, "max_new_tokens")

    def run(self, request: Request) -> Iterator[list[list[int]]]:
        """See `Engine.run`."""
        request.references, request.share_text = self._references, self._share_text
        request.eos = [token for token in request.eos if 0 <= token < self._engine.runtime.verify.vocab_size]
        return self._engine.run(request)

    def _adopt(self) -> None:
        """The first call in a forked process."""
        if self._engine.runtime.device.type == "cuda":
            raise RuntimeError(
                "a process that was forked cannot use the GPU of its parent; start it by 'spawn', and call speculate() "
                "there"
            )
        self._engine.forget_running()
        self._calls, self._is_forked = 0, False

    def before_fork(self) -> None:
        """See `forks`. A generate() in another thread is not waited for: the child does without what it uses."""

    def after_fork(self, in_child: bool) -> None:
        """See `forks`."""
        if in_child and not self._lock._is_owned():  # type: ignore[attr-defined]
            self._lock, self._is_forked = threading.RLock(), True


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
    shadow: Any = adapters.shallow(model, type(cls.__name__, (SpeculativeMixin, cls), names))
    shadow.generation_config = copy.deepcopy(model.generation_config)
    shadow.__dict__.pop("generate", None)  # one set on the object is run by `SpeculativeMixin.generate`
    return shadow
