"""`Engine`: one captured model with a session for each batch size; it runs the rounds of calls, in turns."""

import dataclasses
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from .. import forks, passes
from ..capture.admit import decoder_of
from ..capture.changes import Watch, describe
from ..capture.checks import ANY
from ..capture.copies import NO_LORAS
from ..capture.kinds import is_known
from ..capture.loras import Loaded, Loras, without_adapters
from ..capture.trace import capture
from ..capture.weights import SharedWeights
from ..compat import COMPILE_LOCK, forget_shapes
from ..compile.cold_start import ColdStart, background, compiles_at_once
from ..compile.part import Parts
from ..config import Options, promises_bits
from ..drafting import Algorithm
from ..graph import ModelGraph
from ..outcome import Recording
from ..passes.row_invariance import require_kernels_of_experts, require_same_bits
from ..quantised import update
from ..stats import Clock
from ..tree import MAX_NODES
from .pipeline import Call
from .preparation import LONGEST, CalledDraft, Remembered, read_limit
from .prompt import Layout, Prompt, layout_of
from .runtime import PrefixBudget, Runtime, max_positions
from .session import Session, StepKind
from .turns import Agreement, FairLock

SIZES = {"cpu": (1, 4, 16, 64), "cuda": (1, 2, 4, 8, 16, 32, 64)}  # nodes that a round may verify
SESSIONS = 4  # number of batch sizes kept ready


class Engine:
    """One captured model, its sessions and its calls.

    original: the captured model.
    name: the algorithm's name.
    watch: finds changes of the model since its capture.
    weights: the memory that the graphs read.
    rebuild: makes a copy of `original` speculative with the same options.
    speculate: makes a model speculative.

    `turns` is its lock: `generating` takes it for a call; `run` and `session` expect that their caller has it.
    """

    fork_order = 2
    watch: Watch
    weights: SharedWeights
    rebuild: Callable[[PreTrainedModel], PreTrainedModel]
    speculate: Callable[..., PreTrainedModel]

    def __init__(
        self, original: PreTrainedModel, name: str, graph: ModelGraph | None, algorithm: Algorithm, options: Options,
        graphs: dict[str, ModelGraph] | None = None,
    ):  # fmt: skip
        """graph: as captured; None if `graphs` has the rewritten ones, by purpose."""
        if options.max_loras and options.ranks.size > 1:
            raise ValueError("max_loras: adapters are chosen for each row in one process; leave out tensor_parallel")
        self.original, self.name, self.options, device, plan = original, name, options, original.device, algorithm.plan
        # The adapters that rows may choose; None: no row chooses one.
        self.loras = Loras(original, options.max_loras, options.max_lora_rank) if options.max_loras else None

        # The graphs.
        self.settings = self._settings(plan.taps)
        graphs = graphs or {
            purpose: passes.run(graph, settings) for purpose, settings in self.settings.items() if graph is not None
        }
        self._captured = graph
        self.described = graph or graphs["verify"]  # describes the layers of the model, as captured or rewritten
        if options.cuda_graphs:
            require_kernels_of_experts(graphs["verify"])
        if promises_bits(options.exact, device.type):
            require_same_bits(options.exact, graphs)
        sizes = (*(n for n in SIZES[device.type] if n < plan.nodes and plan.sizes != "fixed"), plan.nodes)
        limit = max_positions(original.config, self.described.position_limit, options)
        self.runtime = Runtime(graphs["verify"], graphs["prefill"], algorithm, options, device, sizes, limit)
        forget_shapes(*(each.gm for each in (graph, *graphs.values()) if each is not None))
        if options.max_cache_len is not None:
            self.runtime.check_memory(1, options.max_cache_len)
        self.prefix_budget = PrefixBudget.of(self.runtime)
        self.served_batches = ANY  # see `check_generation`: in other batches the model's own rows differ from its texts

        # Its sessions, and who runs rounds.
        self.turns, self.agreement, self.remembered = FairLock(), Agreement(options.ranks), Remembered()
        self.sessions: OrderedDict[tuple[int, int], Session] = OrderedDict()  # by nesting depth and batch size
        self.running: list[tuple[Session, Clock]] = []  # calls under way; streamers, criteria, processors may nest them
        self.batches: weakref.WeakSet = weakref.WeakSet()  # schedulers of requests over this engine's runtime
        self.idle_batch: Any = None  # a scheduler without a manager, kept for its compiled steps
        # Models with drafts that calls have named: the last one of each algorithm, None if it is not served.
        self.called_drafts: dict[str, tuple[CalledDraft, PreTrainedModel | None]] = {}
        self.most_nodes = MAX_NODES  # nodes that rounds verify of each tree, at most; 1 is plain decoding
        self.records = False
        self.recording: Recording | None = None  # the last generate() that ran while `records` was set
        self.online: Any = None  # learns from finished answers by `keep(prompt, answer)`, see `train.online`

        # The call under way.
        self.looped = False  # whether any decoding loop ran in the last generate()
        self.call_options: tuple = ()  # the arguments of `generating`
        # Fields of its `Request` that arguments of ours set.
        self.wishes: dict[str, Any] = {"most_nodes": plan.nodes}
        # The adapters of its prompts; one for all of them, or one for each.
        self._adapters, self._has_one_adapter = list[Loaded](), True
        self._announced: set[str] = set()
        self._calls, self._is_forked = 0, False
        if options.compile and not compiles_at_once(options):
            self.runtime.cold_start = ColdStart(device, self.turns, self._may_change)
        forks.register(self)

    def _settings(self, taps: tuple[int, ...]) -> dict[str, passes.Settings]:
        """The settings with which `passes.run` makes each graph of the runtime."""
        options, low_rank = self.options, {} if self.loras is None else self.loras.parts
        return {
            purpose: passes.Settings(
                options.merge_linears, taps, options.attention(purpose), options.ranks, options.expert_parallel,
                low_rank, options.exact,
            )
            for purpose in ("verify", "prefill")
        }  # fmt: skip

    def _may_change(self) -> bool:
        """True if no answer would see parts change. On a CPU in float32 its tokens are the same in either tier."""
        is_exact = self.runtime.device.type == "cpu" and self.runtime.verify.dtype == torch.float32
        return not self._calls and (is_exact or not any(batch.is_busy for batch in [*self.batches]))

    @cached_property
    def decoder(self) -> Any:
        """The causal language model that was captured if `original` is an encoder-decoder, else None."""
        return decoder_of(self.original) if self.original.config.is_encoder_decoder else None

    @cached_property
    def cache_layout(self) -> Layout | None:
        return layout_of(self.decoder or self.original, self.described)

    @property
    def captured(self) -> ModelGraph:
        """The captured graph, which is traced now if the start was from an artefact."""
        if self._captured is None:
            model = decoder_of(self.original if self.loras is None else without_adapters(self.original))
            with COMPILE_LOCK, torch.compiler.set_stance("force_eager"):
                self._captured = capture(model, whole=not is_known(model))
        return self._captured

    def refuse_changes(self) -> None:
        """RuntimeError if the model has changed since it was captured."""
        if changes := self.watch.changes():  # guard: model-changes
            raise RuntimeError(describe(changes))

    @contextmanager
    def generating(
        self, reference: Any, share_text: bool | None = None, speculation: Any = None, adapter_names: Any = None
    ) -> Iterator[None]:  # fmt: skip
        """The context of one generate() with these arguments; other threads' calls wait. TypeError for wrong types,
        ValueError for wrong values."""
        most_nodes = read_limit(speculation, self.runtime.algorithm.plan.nodes)
        if share_text is not None and not isinstance(share_text, bool):
            raise TypeError(f"share_text must be True, False or None, not {type(share_text).__name__}")
        with self.turns, torch.inference_mode(False), torch.no_grad(), self.agreement.awaited():
            self.adopt()
            before = self.wishes, self.call_options
            self.call_options = reference, share_text, speculation, adapter_names
            references = [] if reference is None else self.runtime.algorithm.documents(reference)
            shares = getattr(self.options, "share_text", True) if share_text is None else share_text
            self.wishes = {"references": references, "share_text": shares, "most_nodes": most_nodes}
            self.agreement.add("the references", [each.tolist() for each in references])
            self.agreement.add("share_text or the n-gram store", (shares, self.runtime.algorithm.stored))
            self.agreement.add("speculation", most_nodes)
            self._calls += 1
            try:
                with self._with_adapters(adapter_names):
                    yield
            finally:
                self.wishes, self.call_options = before
                self._calls -= 1

    @contextmanager
    def _with_adapters(self, names: Any) -> Iterator[None]:
        """A context that holds the adapters of a call's prompts. names: one a prompt; None: the active one for all."""
        if self.loras is None:
            if names is not None:
                raise NotImplementedError(NO_LORAS)
            yield
            return
        if names is not None and not isinstance(names, (list, tuple)):
            raise TypeError(f"adapter_names: expected a list of names, one a prompt, got {type(names).__name__}")
        _ = self.cache_layout  # asks the model's own forward, which has other rows than this call
        before, taken = (self._adapters, self._has_one_adapter), list[Loaded]()
        try:
            for name in [self.loras.active] if names is None else names:
                taken.append(self.loras.take(name))
            self._adapters, self._has_one_adapter = taken, names is None
            with self.loras.in_own_forward(None if names is None else [each.name for each in taken]):
                yield
        finally:
            self._adapters, self._has_one_adapter = before
            for each in taken:
                self.loras.release(each)

    def row_adapters(self, rows: int, sequences: int = 1) -> list[Loaded] | None:
        """The adapters of this call's rows, `sequences` for each prompt. ValueError unless there is one name a prompt.

        Names ["a", "b"] and two sequences give the rows a, a, b, b.
        """
        if self.loras is None:
            return None
        adapters = self._adapters
        if self._has_one_adapter:
            return adapters * rows
        if len(adapters) * sequences != rows:
            raise ValueError(
                f"adapter_names: expected one name for each of {rows // sequences} prompts, got {len(adapters)}"
            )
        return [adapter for adapter in adapters for _ in range(sequences)]

    def step_aside(self, argument: str, more: str = "") -> None:
        """Warn, once for each `argument`, that transformers' own loop runs because of it. more: ends the warning"""
        if argument not in self._announced:
            self._announced.add(argument)
            told = f"{argument}: only transformers' own generate() does this; it runs, without speculation{more}"
            warnings.warn(told, stacklevel=4)

    def admit_request(self, prompt: Prompt, room: int) -> None:
        """Raise ValueError if the model or the memory cannot take `prompt` and `room` more tokens a row."""
        positions = self.runtime.verify.position_limit
        prompt.check_tokens(self.runtime.verify.embedded)
        batch, tokens = len(prompt.tokens), max(map(len, prompt.tokens)) + room
        if positions is not None and tokens > positions:
            raise ValueError(
                f"max_new_tokens: prompt and new tokens make {tokens} tokens, the model has learned positions for "
                f"{positions}; ask for at most {positions - tokens + room}"
            )
        if tokens > LONGEST:
            raise ValueError(f"max_new_tokens: prompt and new tokens make {tokens} tokens; expected at most {LONGEST}")
        session = self.sessions.get((len(self.running), batch))
        if tokens > (self.runtime.capacity(batch) if session is None else session.capacity):  # the cache will grow
            self.runtime.check_memory(batch, tokens, "max_new_tokens")

    def session(self, batch: int) -> Session:
        """The session for a batch size and the present nesting depth: a call inside another has its own buffers. At
        most SESSIONS are kept, the last used ones."""
        key = len(self.running), batch
        if key not in self.sessions or self.sessions[key].is_growing:  # a growth that failed, or that a fork cut off
            self.sessions[key] = Session(self.runtime, batch)
        self.sessions[key].renew()
        self.sessions.move_to_end(key)
        busy = [session for session, _ in self.running]
        idle = [other for other, session in self.sessions.items() if other != key and session not in busy]
        for other in idle[: max(len(self.sessions) - SESSIONS, 0)]:
            del self.sessions[other]
        return self.sessions[key]

    @torch.no_grad()
    def run(self, call: Call) -> Generator[list[list[int]], None, None]:
        """Generate; yields for each round the tokens that each row gained, none once it has finished. The caller may
        run another call between two rounds. In the end the answers are learned from, if anybody does that."""
        # The time of a call that this one interrupts stands still.
        session, stats = self.session(len(call.sequences)), self.runtime.stats
        clock = Clock(stats)
        recording = Recording(call.prompts) if self.records else None
        for sequence in call.sequences:
            sequence.most_nodes = min(sequence.most_nodes, self.most_nodes)
        for _, outer in self.running[-1:]:
            outer.spend("host")
        self.running.append((session, clock))
        spent_before = dict(stats.seconds)

        # Prompts, then rounds.
        try:
            call.start(self.runtime, session)
            clock.spend("prefill")
            while not call.is_over:
                drafting = session.drafter.seconds
                call.launch()
                in_flight, outcomes = call.collect()
                seconds = clock.spend("verify")
                stats.move("verify", "draft", session.drafter.seconds - drafting)
                if recording:
                    counts = {each.row: each.count for each in call.sequences if not each.is_over}
                    recording.add(in_flight.nodes, seconds, counts, {each.row: told for each, told in outcomes})
                yield call.learn(in_flight, outcomes)
                clock.spend("host")
        finally:
            self.running.remove((session, clock))
            self.runtime.guard(session.drafter.finish, call.lengths)
            self.runtime.records.keep()
            if recording:
                recording.seconds = {name: spent - spent_before[name] for name, spent in stats.seconds.items()}
                self.recording = recording
            for _, outer in self.running[-1:]:
                outer.restart()

        # Others learn from the answers.
        shares = call.request.share_text
        learns = self.online is not None and shares and not call.has_unknown_tokens  # guard: share-text
        for sequence in call.sequences if learns else ():
            self.online.keep(sequence.prompt, sequence.tokens)

    def compile_anew(self) -> None:
        """Compile one round for a single sequence again, for tools such as depyf."""
        with self.turns:
            runtime = dataclasses.replace(self.runtime, parts=Parts(), examples={}, cold_start=None)
            Session(runtime, 1).get(StepKind.ROUND, runtime.sizes[-1])

    def take_over(self) -> None:
        """See `Speculation.refresh`."""
        with self.turns, torch.inference_mode(False), torch.no_grad():
            self.adopt()
            if self._calls or any(batch.is_busy for batch in self.batches):
                raise RuntimeError("refresh(): a generate() of this model is running; call refresh() when it is over")
            changes = [change for change in self.watch.changes() if change.remedy == "speculate"]
            if changes:
                raise ValueError(describe(changes))
            self.weights.take_over()
            self.called_drafts.clear()
            if self.loras is not None:
                self.loras.forget()
            # The drafter's copies are of the old weights, and so are its keys and values of earlier calls.
            self.runtime.algorithm.refresh()
            for session in self.sessions.values():
                session.answers = []
            for scheduler in self.batches:
                scheduler.prefixes.forget()
            if self.options.ranks.size > 1:
                self.options.ranks.slices.refresh()
                update()  # copies that were made of the rank's parts

    def release(self) -> None:
        """See `Speculation.release`."""
        with self.turns:
            self.adopt()
            if self._calls:
                raise RuntimeError("release(): a generate() of this model is running; call release() when it is over")
            self.sessions.clear()
            self.runtime.examples.clear()  # made again if another step is compiled
            self.idle_batch = None
            for _, model in self.called_drafts.values():
                if model is not None:
                    vars(model)["speculation"].engine.release()

    @contextmanager
    def reporting(self, progress: Callable[[str], None] | None) -> Iterator[None]:
        """A context in which `progress` is called with a line when a step begins or ends to compile."""
        before = self.runtime.say
        self.runtime.say = progress or before
        try:
            yield
        finally:
            self.runtime.say = before

    def adopt(self) -> None:
        """At the first use in a forked process, make this object usable there. RuntimeError on a GPU."""
        if not self._is_forked:
            return
        if self.runtime.device.type == "cuda":
            raise RuntimeError(
                "a process that was forked cannot use the GPU of its parent; start it by 'spawn', and call speculate() "
                "there"
            )
        # Other threads' calls end. Their sessions stay usable, because a call first sets every buffer that it reads.
        for session, _ in self.running:
            session.drafter.finish([])
            session.answers = []
        self.running.clear()
        self.batches = weakref.WeakSet(filter(None, [self.idle_batch]))  # managers have no thread here
        self._calls, self._is_forked = 0, False
        if self.runtime.cold_start is not None and self.runtime.cold_start.waits:
            background.care_for(self.runtime.cold_start)

    def before_fork(self) -> None:
        """See `forks`. Nothing waits for a generate() in another thread, because the child uses none of its state."""

    def after_fork(self, in_child: bool) -> None:
        if in_child:
            self._is_forked |= not self.turns.is_mine
            self.turns.renew()
