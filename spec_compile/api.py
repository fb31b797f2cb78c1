"""`speculate`, the one call that users need, and `Speculation`, the object at ``model.speculation``."""

import dataclasses
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import forks, kernels, passes
from .batching.model import BatchingMixin, shadow
from .capture import adapters
from .capture.admit import admit
from .capture.check_generation import check_generation
from .capture.checks import check_capture, check_tree
from .capture.compiled import underlying
from .capture.config_reads import config_reads
from .capture.ranks import facts, share_memory
from .capture.trace import capture
from .capture.watch import Watch, describe
from .capture.weights import SharedWeights
from .compat import COMPILE_LOCK, check_compiler
from .config import Options, parse_options
from .drafters import ALGORITHMS, build, check_draft, describe_options, parse_algorithm
from .drafting import Algorithm
from .errors import check_int
from .ngram import NgramStore
from .parallel.start import find_ranks
from .report.accounts import Accounts
from .runtime import past
from .runtime.agreement import Agreement
from .runtime.check_options import LONGEST
from .runtime.engine import Engine
from .runtime.prepared import Remembered
from .runtime.prompt import Prompt
from .runtime.request import Request
from .runtime.runtime import max_positions
from .runtime.session import Session
from .runtime.steps.build import Step
from .runtime.steps.code import Code, shared_code
from .runtime.turns import Turns


def speculate(model: PreTrainedModel, algo: str = "ngram", **options: Any) -> PreTrainedModel:
    """A model that generates faster, with the same answer.

    model: a causal language model of transformers, or peft's wrapper around one. It keeps working as before. Of a
    result of `speculate` the original is used, with these options alone. Of what ``torch.compile`` has made of a model,
    or of its parts, the functions and modules that were compiled are used.
    algo: what proposes tokens, "ngram" unless told otherwise; `drafters.ALGORITHMS` has all, `ALIASES` their other
    names. options: those of every algorithm and of this one, which are listed below; ``draft=`` names the draft.

    Returns an object of the model's class that shares its weights, and whose ``generate()`` takes the same arguments.
    Its ``speculation`` has ``stats``, ``explain()``, ``report()``, ``ngram``, ``warmup()`` and ``refresh()``. It can be
    pickled and deep-copied; the copy has its weights for itself, and captures and compiles anew.

    Raises TypeError (not a transformers model, unknown option), ValueError (unknown algorithm, option out of range,
    model in training mode) or UnsupportedModelError (the model cannot be rewritten exactly), before any change.
    """
    model, options = underlying(model), {name: underlying(value) for name, value in options.items()}
    if isinstance(model, BatchingMixin):
        model = vars(model)["speculation"].original
    if adapters.is_wrapped(model):
        base: Any = adapters.base_of(model)
        wrapper: Any = adapters.wrap_alike(model, speculate(base, algo, **options))
        return wrapper
    name = parse_algorithm(algo)
    ranks = find_ranks(options.get("tensor_parallel"), model)
    with ranks.together("speculate()", parts := dict[str, Any]()):
        parsed = parse_options(ALGORITHMS[name].options, options)
        check_draft(algo, parsed)
        admit(model, parsed.exact)
        if ranks.size > 1:
            parts |= facts(model, name, options)
            parsed = dataclasses.replace(parsed, tensor_parallel=ranks)
        # Whatever cannot work is refused here: kernels that do not load, a CPU without a compiler.
        if model.device.type == "cuda":
            kernels.load(model.device)
        elif parsed.compile:
            check_compiler()
    share_memory(ranks, model.device)
    # Tracing and checking change settings of the whole process. They run no code that the user had compiled.
    with COMPILE_LOCK, torch.compiler.set_stance("force_eager"):
        with ranks.together("speculate()", {}):
            algorithm = build(name, model, parsed)
            fast = shadow(model)
            speculation = Speculation(model, fast, name, parsed, algorithm)
        with ranks.call():
            speculation.check_rewritten()
        fast.__dict__["speculation"] = speculation
    return fast


speculate.__doc__ = f"{inspect.cleandoc(speculate.__doc__ or '')}\n\n{describe_options()}\n"


class Speculation(Accounts):
    """The object at ``model.speculation``: statistics, reports and control of one speculative model."""

    fork_order = 2

    def __init__(self, model: PreTrainedModel, fast: nn.Module, name: str, options: Options, algorithm: Algorithm):
        self.algorithm, self.options = name, options
        self._model, self.turns = model, Turns()
        self._references: list[torch.Tensor] = []
        self._announced, self._share_text = set[str](), True
        # Capture, and compare the graph with the model's own forward. reads: the config values that it depends on.
        with config_reads(model) as reads:
            graph = capture(model)
        self._runnable = passes.runnable(graph, options.ranks)
        if options.check:
            check_capture(model, self._runnable)
        self.looped = False
        """Whether a decoding loop of transformers, or ours, ran in the last generate()."""
        limit = max_positions(model, graph.position_limit, options)
        self.engine = Engine(graph, algorithm, options, model.device, limit)
        """The loop that runs rounds, with its sessions and their steps."""
        self.engine.runtime.code = shared_code(model, name, self.engine.runtime)
        self.serves_padding = True
        """Whether batches padded on the left are served: the model's own positions follow the padding."""
        self.weights = SharedWeights(model, algorithm.draft_module)
        """The memory of weights that the graphs read."""
        self.watch = Watch(model, fast, self.weights.slots, reads)
        """The model as it was captured, compared with what it is at every call."""
        self.agreement = Agreement(options.ranks)
        """What the ranks of tensor parallelism agree on in each generate()."""
        self.remembered = Remembered()
        """What transformers has prepared for calls before."""
        self._calls, self._is_forked = 0, False
        forks.register(self)

    def check_rewritten(self) -> None:
        """UnsupportedModelError if the rewritten graph, or transformers' loop, differs from the captured graph."""
        if self.options.check:
            check_tree(type(self._model).__name__, self._runnable, self.engine.runtime.verify)
            self.serves_padding = check_generation(self._model, self._runnable)

    @property
    def original(self) -> PreTrainedModel:
        """The model that `speculate` was given."""
        return self._model

    def rebuilds(self, original: PreTrainedModel) -> tuple[Callable, tuple]:
        """How ``__reduce_ex__`` makes a model like this one of a copy of its `original`: (function, arguments)."""
        options = {field.name: getattr(self.options, field.name) for field in dataclasses.fields(self.options)}
        return partial(speculate, algo=self.algorithm, **options), (original,)

    @property
    def ngram(self) -> NgramStore:
        """The store of n-grams, an `NgramTrie` on a CPU, an `NgramCorpus` on a GPU. AttributeError if there is none."""
        store = self.engine.runtime.algorithm.store
        if store is None:
            raise AttributeError(
                f"algo={self.algorithm!r} keeps no n-grams; only algo='ngram' and heads with ngram=True have "
                "speculation.ngram"
            )
        return store

    @cached_property
    def cache_layout(self) -> past.Layout | None:
        """Where transformers' cache of this model has the contents of ours (see `past.layout_of`)."""
        return past.layout_of(self._model, self.engine.captured)

    def warmup(
        self, batch_size: int = 1, progress: Callable[[str], None] | None = None, do_sample: bool = False
    ) -> None:
        """Compile everything for a batch size now rather than in the first ``generate()``.

        batch_size: rows. progress: called with a line when a step begins or ends to compile. do_sample: whether to
        compile for sampling and logits processors, too, whose rounds come in two halves.
        Raises TypeError or ValueError, naming the argument, if one has another type or is out of range.
        """
        check_int("batch_size", batch_size, 1, 1 << 16)
        if not isinstance(do_sample, bool):
            raise TypeError(f"do_sample must be True or False, not {type(do_sample).__name__}")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of a line, not {type(progress).__name__}")
        with self.turns, torch.inference_mode(False), torch.no_grad(), self.reporting(progress):
            steps = self.engine.session(batch_size).steps
            steps.build_prefill()
            for nodes in self.engine.runtime.sizes:
                for kind in (Step.ROUND, Step.LOOK, Step.FINISH) if do_sample else (Step.ROUND,):
                    steps.get(kind, nodes)
            steps.build_proposal()

    def compile_anew(self) -> None:
        """Compile one round for a single sequence again, so that tools such as depyf can watch it."""
        with self.turns:
            runtime = dataclasses.replace(self.engine.runtime, code=Code(), examples={})
            Session(runtime, 1).steps.get(Step.ROUND, runtime.sizes[-1])

    def refresh(self) -> None:
        """Take over new weights, without capturing or compiling anew.

        Call it after parameters or buffers of the model, or of a draft that was passed as a module, were replaced or
        moved (``load_state_dict(assign=True)``, ``layer.weight = nn.Parameter(...)``, ``model.to(...)`` and back).
        Their values are copied into the memory that the graphs read, and the tensors become views of it. So an
        optimizer that refers to them goes on, and the graphs see its later steps in place. An optimizer with a flat
        buffer, as in DeepSpeed and FSDP, must be made anew, because its tensors were views of that buffer. What drafts
        have computed from weights is computed anew: after changes in place the answer is right without this call, but
        fewer drafts are accepted. The graphs' memory stays allocated as long as this object lives.

        Raises ValueError, before anything is copied, if a tensor has another shape, dtype or device, has no values, or
        is tied otherwise than at speculate(), or if something besides tensors has changed.
        Raises RuntimeError inside a generate() of this model. It waits for a generate() in another thread.
        """
        with self.turns, torch.inference_mode(False), torch.no_grad():
            self.adopt()
            if self._calls or any(batch.is_busy for batch in self.engine.batches):
                raise RuntimeError("refresh(): a generate() of this model is running; call refresh() when it is over")
            changes = [change for change in self.watch.changes() if change.remedy == "speculate"]
            if changes:
                raise ValueError(describe(changes))
            self.weights.take_over()
            self.engine.refresh()
            self.options.ranks.refresh()

    @contextmanager
    def reporting(self, progress: Callable[[str], None] | None) -> Iterator[None]:
        """A context in which `progress` is called with a line when a step begins or ends to compile."""
        before = self.engine.runtime.say
        self.engine.runtime.say = progress or before
        try:
            yield
        finally:
            self.engine.runtime.say = before

    @contextmanager
    def generating(self, reference: Any, share_text: bool | None = None) -> Iterator[None]:
        """The context of one generate(), whose arguments these are; TypeError if they are of another type.

        Other threads' calls wait until it ends.
        """
        if share_text is not None and not isinstance(share_text, bool):
            raise TypeError(f"share_text must be True, False or None, not {type(share_text).__name__}")
        with self.turns, torch.inference_mode(False), torch.no_grad(), self.agreement.awaited():
            self.adopt()
            before = self._references, self._share_text
            self._references = [] if reference is None else self.engine.runtime.algorithm.documents(reference)
            self._share_text = getattr(self.options, "share_text", True) if share_text is None else share_text
            self.agreement.add("the references", [reference.tolist() for reference in self._references])
            stored = self.engine.runtime.algorithm.stored
            self.agreement.add("share_text or the n-gram store", (self._share_text, stored))
            self._calls += 1
            try:
                yield
            finally:
                self._references, self._share_text = before
                self._calls -= 1

    def step_aside(self, argument: str) -> None:
        """Warn, once for each `argument`, that transformers' own loop runs because of it."""
        if argument not in self._announced:
            self._announced.add(argument)
            warnings.warn(
                f"{argument}: only transformers' own generate() does this; it runs, without speculation", stacklevel=4
            )

    def admit_request(self, prompt: Prompt, room: int) -> None:
        """Raise ValueError if the model or the memory cannot take `prompt` and `room` more tokens a row."""
        vocab, positions = self.engine.runtime.verify.vocab_size, self.engine.runtime.verify.position_limit
        prompt.check_tokens(vocab)
        batch, tokens = len(prompt.tokens), max(map(len, prompt.tokens)) + room
        if positions is not None and tokens > positions:
            raise ValueError(
                f"max_new_tokens: prompt and new tokens make {tokens} tokens, the model has learned positions for "
                f"{positions}; ask for at most {positions - tokens + room}"
            )
        if tokens > LONGEST:
            raise ValueError(f"max_new_tokens: prompt and new tokens make {tokens} tokens; expected at most {LONGEST}")
        if tokens > self.engine.room(batch):  # then the cache will grow
            self.engine.runtime.check_memory(batch, tokens, "max_new_tokens")

    def run(self, request: Request) -> Iterator[list[list[int]]]:
        """Answer a request with the references and options of this call; see `Engine.run`."""
        request.references, request.share_text = self._references, self._share_text
        request.eos = [token for token in request.eos if 0 <= token < self.engine.runtime.verify.vocab_size]
        return self.engine.run(request)

    def adopt(self) -> None:
        """Make this object usable in a forked process, at its first use there. RuntimeError on a GPU."""
        if not self._is_forked:
            return
        if self.engine.runtime.device.type == "cuda":
            raise RuntimeError(
                "a process that was forked cannot use the GPU of its parent; start it by 'spawn', and call speculate() "
                "there"
            )
        self.engine.forget_running()
        self._calls, self._is_forked = 0, False

    def before_fork(self) -> None:
        """See `forks`. Nothing waits for a generate() in another thread, because the child uses none of its state."""

    def after_fork(self, in_child: bool) -> None:
        """See `forks`."""
        if in_child:
            self._is_forked |= not self.turns.is_mine
            self.turns.renew()
