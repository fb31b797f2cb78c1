"""`speculate`, the one call that users need, and `Speculation`, the object at ``model.speculation``."""

import dataclasses
import gc
import inspect
import reprlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from . import kernels, passes
from .batching.model import BatchingMixin, score, speculative
from .capture import copies, loras
from .capture.admit import admit, decoder_of, in_served_dtype
from .capture.changes import Watch, config_reads
from .capture.checks import ANY, check_capture, check_generation, check_tree
from .capture.kinds import is_known
from .capture.quantised import hold_one_layout
from .capture.ranks import facts, share_memory
from .capture.replaced import underlying
from .capture.rounded import rounded_weights
from .capture.trace import capture
from .capture.weights import SharedWeights
from .compat import COMPILE_LOCK, check_compiler
from .compile.cold_start import compiles_at_once
from .compile.start import PURPOSES, Start, StartArtefact, opened_artefacts, timed
from .config import Options, parse_options
from .drafters import ALGORITHMS, build, check_draft, describe_options, parse_algorithm
from .drafting import Algorithm
from .errors import UnsupportedModelError, check_int, log
from .graph import ModelGraph
from .inventory import configs_of
from .kernels.cpu import fit_threads
from .ngram import NgramStore
from .parallel.start import find_ranks
from .registry import load_contrib, side
from .runtime.compiled_steps import build_compiled, share_parts
from .runtime.engine import Engine
from .runtime.session import StepKind
from .runtime.state import MOST_LATE
from .stats import Stats


def speculate(model: PreTrainedModel, algo: str = "ngram", **options: Any) -> PreTrainedModel:
    """A model that generates faster, with the same answer.

    model: a causal language model of transformers, or peft's wrapper around one. It keeps working as before. A
        result of `speculate` stands for its original, whose earlier options do not count, and a result of
        ``torch.compile`` for what was compiled.
    algo: proposes tokens; `drafters.ALGORITHMS` has all, `ALIASES` their other names.
    options: listed below; ``draft=`` names the draft.

    Returns an object of the model's class that shares its weights, and whose ``generate()`` takes the same arguments.
    Its ``speculation`` has ``stats``, ``explain()``, ``report()``, ``ngram``, ``warmup()``, ``refresh()``,
    ``release()``, ``save()``.
    It can be pickled and deep-copied; the copy has its weights for itself, and starts anew.

    Raises TypeError (not a transformers model, unknown option), ValueError (unknown algorithm, option out of range,
    model in training mode with dropout or other noise) or UnsupportedModelError (the model cannot be rewritten
    exactly), before any change.
    """
    model, options = underlying(model), {name: underlying(value) for name, value in options.items()}
    if isinstance(model, BatchingMixin):
        model = vars(model)["speculation"].original
    if copies.is_wrapped(model):
        base: Any = copies.base_of(model)
        wrapper: Any = copies.wrap_alike(model, speculate(base, algo, **options))
        return wrapper
    for stand_in in copies.STAND_INS:
        model = stand_in(model)
    name = parse_algorithm(algo, options.get("draft"))
    ranks = find_ranks(options.get("tensor_parallel"), model)
    with ranks.together("speculate()", parts := dict[str, Any]()):
        parsed = parse_options(ALGORITHMS[name].options, options)
        check_draft(algo, parsed)
        plain: Any = loras.without_adapters(model) if parsed.max_loras and hasattr(model, "peft_config") else model
        plain = decoder_of(plain)
        inventory = admit(plain, parsed.exact)
        if ranks.size > 1:
            parts |= facts(model, name, options)
            parsed = dataclasses.replace(parsed, tensor_parallel=ranks)
        # Refuse kernels that do not load, and a CPU without a compiler.
        if model.device.type == "cuda":
            kernels.load(model.device)
        elif compiles_at_once(parsed):
            check_compiler()
        if model.device.type == "cpu":
            fit_threads()
        in_served_dtype(inventory, parsed.convert_bfloat16)
    share_memory(ranks, model.device)
    # Tracing and checking change settings of the process, and run no code that the user had compiled.
    rounded = rounded_weights(inventory, parsed.weights, ranks.size)
    with COMPILE_LOCK, torch.compiler.set_stance("force_eager"), rounded:
        with ranks.together("speculate()", {}):
            with opened_artefacts() as drafts:
                algorithm = build(name, inventory, parsed)
            fast = speculative(model)
            speculation = Speculation(model, plain, fast, name, parsed, algorithm, drafts)
        with ranks.call():
            speculation._check_rewritten()
        fast.__dict__["speculation"] = speculation
    return fast


load_contrib()  # before its algorithms are described
speculate.__doc__ = f"{inspect.cleandoc(speculate.__doc__ or '')}\n\n{describe_options()}\n"


class Speculation:
    """The object at ``model.speculation``: statistics, reports and control of one speculative model."""

    def __init__(
        self, model: PreTrainedModel, plain: PreTrainedModel, fast: nn.Module, name: str, options: Options,
        algorithm: Algorithm, drafts: list[StartArtefact],
    ):  # fmt: skip
        """plain: the model to capture, without its adapters. drafts: artefacts from which `algorithm` was built."""
        self.original, self._plain, self.options = model, plain, options
        self._fast = weakref.ref(fast)  # weak, because `fast` refers to this object
        self.seconds: dict[str, float] = {}
        """The time of each stage of the start."""
        hold_one_layout(plain)
        self._artefact = StartArtefact(plain, algorithm.draft_module, options, name, self.seconds, drafts)
        found, graph = self._artefact.read(), None
        self.is_from_artefact = found is not None
        """True if nothing was captured, rewritten and checked, because an earlier start had done so."""
        if found is None:
            # Capture, and compare the graph with the model's own forward. reads: the config values that it depends on.
            with config_reads(configs_of(plain)) as reads:
                graph, self._runnable = self._capture()
        with timed(self.seconds, "passes"):
            engine = Engine(model, name, graph, algorithm, options, None if found is None else found.graphs)
        self.engine, self._reads = engine, found.reads if found else reads
        engine.served_batches = ANY if found is None else found.served_batches
        share_parts(model, name, engine.runtime).store = self._artefact.parts()
        engine.runtime.records.open(self._artefact, f"record_{algorithm.plan.nodes}")
        others = loras.of_adapters(model) if options.max_loras else set()  # their changes count from call to call
        engine.weights = SharedWeights(model, algorithm.draft_module, others)
        models = filter(None, (model, copies.ORIGINS.get(model)))
        watched = {part: path for each in models for path, part in each.named_modules() if part not in others}
        engine.watch = Watch(watched, fast, engine.weights.slots, self._reads)
        own = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
        engine.rebuild, engine.speculate = partial(speculate, algo=name, **own), speculate

    def _capture(self) -> tuple[ModelGraph, ModelGraph]:
        """The captured graph, and the same as it runs on its ranks; UnsupportedModelError if it differs from the model.

        A graph from a few layers of each kind is replaced by one of all layers if it differs. Code that nobody knows is
        captured whole if it is not checked, or if only one of several ranks might see the difference.
        """
        model, options = self._plain, self.options
        may_repeat = options.check and options.ranks.size == 1
        whole = not may_repeat and not is_known(model)
        while True:
            with timed(self.seconds, "capture"):
                graph = capture(model, whole)
                runnable = passes.runnable(graph, options.ranks, options.expert_parallel)
            try:
                if options.check:
                    with timed(self.seconds, "checks"):
                        check_capture(model, runnable)  # guard: capture-is-checked
                return graph, runnable
            except UnsupportedModelError as error:
                if not graph.traced_layers or not may_repeat:
                    raise
                name = type(model).__name__
                log.info("each layer is captured, because the layers of %s are not alike (%s)", name, error)
                whole = True

    def _check_rewritten(self) -> None:
        """UnsupportedModelError if the rewritten graph, or transformers' loop, differs from the captured graph."""
        if self.is_from_artefact:
            return
        if self.options.check:
            model = self._plain
            with timed(self.seconds, "checks"):
                prefill, verify = self.engine.runtime.prefill, self.engine.runtime.verify
                check_tree(type(model).__name__, self._runnable, verify)  # guard: trees-are-checked
                self.engine.served_batches = check_generation(model, self._runnable, prefill, verify)
        self._artefact.write(self._found())

    def _found(self) -> Start:
        """All that this start has found out."""
        graphs = {purpose: getattr(self.engine.runtime, purpose) for purpose in PURPOSES}
        return Start(graphs, self._reads, self.engine.served_batches)

    def __repr__(self) -> str:
        """The algorithm, options that are not at their default (such as the draft), the device and the dtype."""
        parts = [f"algo={self.engine.name!r}"]
        for field in dataclasses.fields(self.options):
            value = getattr(self.options, field.name)
            if value is not field.default and (type(value) is not type(field.default) or value != field.default):
                parts.append(f"{field.name}={_short(value)}")
        parts += [f"device={str(self.engine.runtime.device)!r}", f"dtype={self.engine.described.dtype}"]
        return f"Speculation({', '.join(parts)})"

    @property
    def stats(self) -> Stats:
        """Counters since the start or ``stats.reset()``."""
        return self.engine.runtime.stats

    @property
    def online(self) -> Any:
        """The training of the draft while it serves, which `train_while_serving` began; None if there is none."""
        return self.engine.online

    def explain(self) -> str:
        """A readable account of the changes by each pass, and of a round."""
        return side("tools.explain").explain(self)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """A context in which generate() records every tree that it verifies, for `report`. The last call is kept."""
        before, self.engine.records = self.engine.records, True
        try:
            yield
        finally:
            self.engine.records = before

    def report(self, path: str | Path, tokenizer: Any = None) -> Path:
        """Write an HTML page about the last generate() that was recorded, and return its path.

        It shows text by rounds, accept lengths, times, and every tree with its accepted nodes. It needs no network.
        With n-grams the trees show parts of other calls' texts, unless these ran with ``share_text=False``.

        path: the file.
        tokenizer: the model's, to show text in place of token ids.

        Raises RuntimeError if nothing was recorded, and TypeError if `tokenizer` cannot decode.
        """
        if self.engine.recording is None:
            raise RuntimeError(
                "no generate() was recorded; run it inside `with model.speculation.recording():`, then call report()"
            )
        about = type(self.original).__name__, self.engine.name
        return side("tools.page").write(self.engine.recording, path, tokenizer, *about)

    def audit(self, prompts: Sequence, tokenizer: Any = None, **options: Any) -> Any:
        """Decode prompts plainly and speculatively, and compare the two: `spec_compile.audit` of this model."""
        return side("tools.audit").audit(self._fast(), prompts, tokenizer, **options)

    def save(self, folder: str | Path) -> None:
        """Copy what this start has found out to a folder, from which ``speculate(..., artefact=folder)`` starts.

        Raises ValueError if there is no artefact of this model, because of the model or of ``cache=False``; OSError if
        the folder cannot be written.
        """
        self._artefact.save(self._found(), folder)

    @property
    def ngram(self) -> NgramStore:
        """The store of n-grams, an `NgramTrie` on a CPU, an `NgramCorpus` on a GPU. AttributeError if there is none."""
        store = self.engine.runtime.algorithm.store
        if store is None:
            raise AttributeError(
                f"algo={self.engine.name!r} keeps no n-grams; only algo='ngram' and heads with ngram=True have "
                "speculation.ngram"
            )
        return store

    def warmup(
        self, batch_size: int = 1, progress: Callable[[str], None] | None = None, do_sample: bool = False
    ) -> None:
        """Compile everything for a batch size now rather than in the first ``generate()``.

        batch_size: rows.
        progress: called with a line when a step begins or ends to compile.
        do_sample: True also compiles for sampling and logits processors, whose rounds have two halves.
        Raises TypeError or ValueError, naming the argument, if one has another type or is out of range.
        """
        check_int("batch_size", batch_size, 1, 1 << 16)
        if not isinstance(do_sample, bool):
            raise TypeError(f"do_sample must be True or False, not {type(do_sample).__name__}")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress must be a function of a line, not {type(progress).__name__}")
        kinds = (StepKind.ROUND, StepKind.LOOK, StepKind.FINISH) if do_sample else (StepKind.ROUND,)

        def build() -> None:
            session = self.engine.session(batch_size)
            rounds = [(kind, nodes) for nodes in session.policies[StepKind.ROUND].sizes for kind in kinds]
            session.make([*session.prompt_steps(), *rounds, *session.proposal_steps(MOST_LATE)], is_ahead=True)

        with self.engine.turns, torch.inference_mode(False), torch.no_grad(), self.engine.reporting(progress):
            build_compiled(self.engine.runtime, build)

    def score(
        self, ids: Any, temperature: float = 1.0, adapter_names: Sequence[str | None] | None = None
    ) -> list[torch.Tensor]:  # fmt: skip
        """The log-probabilities that the target gives to texts, each token after the tokens before it.

        ids: token ids of one text, [T] integers, or of several, a list of such or [B, T].
        temperature: divides the logits, above 0.
        adapter_names: the LoRA adapter of each text, of a model with `max_loras`.

        Returns for each text a float32 tensor [T - 1] on the CPU, in nats: entry t is
        ``log_softmax(logits after tokens 0 to t / temperature)[token t + 1]``. They are `Output.prompt_scores` of
        requests, by the same steps. If a request with ``logprobs=0`` gave an answer, the last entries of
        ``score(prompt + answer)`` are its log-probabilities (with ``logprobs_temperature``, if another than 1.0):
        up to rounding, and bit for bit on a GPU in 16 bits unless `explain()` names parts that prevent it.

        Raises TypeError or ValueError if a text is empty, fills a row of the batch, has a token outside the vocabulary,
        or is for a model that processes prompts unlike tokens of an answer; RuntimeError if nobody holds the
        speculative model any more; and what ``generate_batch()`` raises.
        """
        if (fast := self._fast()) is None:
            raise RuntimeError("score(): the speculative model is gone; keep the result of speculate() as long as this")
        return score(fast, ids, temperature, adapter_names)

    def refresh(self) -> None:
        """Take over new weights, without capturing or compiling anew.

        Call it after parameters or buffers of the model, or of a draft that was passed as a module, were replaced or
        moved (``load_state_dict(assign=True)``, ``layer.weight = nn.Parameter(...)``, ``model.to(...)`` and back).
        Their values are copied into the memory that the graphs read, and the tensors become views of it. So an
        optimizer that refers to them goes on, and the graphs see its later steps in place. An optimizer with a flat
        buffer, as in DeepSpeed and FSDP, must be made anew, because its tensors were views of that buffer. Drafts
        compute anew all that they had computed from weights: after changes in place the answer is right without this
        call, but fewer drafts are accepted. The graphs' memory stays allocated as long as this object lives.

        Raises ValueError, before anything is copied, if a tensor has another shape, dtype or device, has no values, or
        is tied otherwise than at speculate(), or if something besides tensors has changed.
        Raises RuntimeError inside a generate() of this model. It waits for a generate() in another thread.
        """
        self.engine.take_over()

    def release(self) -> None:
        """Give back the memory of the rows of ``generate()``: caches, states and buffers of all batch sizes.

        So does the memory of rows that stopped managers have left, with the prefixes that were kept for them. A later
        call makes them again. Weights, compiled code, n-grams and statistics stay, and so do the rows of a manager that
        runs. On a GPU the memory is free for other processes, too.

        Raises RuntimeError inside a generate() of this model. It waits for a generate() in another thread.
        """
        self.engine.release()
        fast: Any = self._fast()
        manager = None if fast is None else vars(fast).get("_cached_continuous_batching_manager")
        if manager is not None and not manager.is_running():
            fast.destroy_cached_continuous_batching_manager()
        del manager
        gc.collect()  # rounds and their buffers refer to each other
        if self.engine.runtime.on_gpu:
            torch.cuda.empty_cache()


def _short(value: Any) -> str:
    """A value in one line: texts and numbers in full, lists shortened, and the class of any other object."""
    if isinstance(value, str | Path | bool | int | float):
        return repr(str(value) if isinstance(value, Path) else value)
    return reprlib.repr(value) if isinstance(value, list | tuple | dict) else f"<{type(value).__name__}>"
