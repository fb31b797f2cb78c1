"""`Manager`: transformers' continuous batching over our rounds."""

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)
from transformers.generation.continuous_batching.utils import WorkloadHints

from ..errors import RequestError, log
from ..runtime.generate import SpeculativeMixin
from ..runtime.verify.sample import RowSettings
from .intake import Intake, child_name
from .metrics import Metrics
from .output import Output
from .request_options import check_config
from .scheduler import take_scheduler
from .sequence import BatchSequence

IDLE = 0.1
"""Seconds after which an idle thread looks whether it is to stop."""


class Manager(ContinuousBatchingManager):
    """Answers requests that come at any time, each as its own ``generate()`` would, with its own options.

    It is made by ``init_continuous_batching()`` and has the methods of transformers' manager. A thread runs rounds over
    the requests that are under way; other threads' ``generate()`` go between the rounds. Every request that was handed
    in delivers one last output, whatever happens.

    generation_config: for requests that bring none; None: the model's, as it is when a request comes. metrics: see
    `Metrics`. observers: functions that are called with every last `Output`, in that thread.
    """

    model: SpeculativeMixin

    def __init__(
        self, model: SpeculativeMixin, generation_config: GenerationConfig | None,
        continuous_batching_config: ContinuousBatchingConfig, workload_hints: WorkloadHints | None = None,
    ):  # fmt: skip
        if generation_config is not None:
            check_config("generation_config", generation_config)
        self.model, self._config = model, generation_config
        self.continuous_batching_config = config = continuous_batching_config
        if config.scheduler_type != "fifo":
            raise ValueError(f"scheduler_type: expected 'fifo', got {config.scheduler_type!r}")
        self._engine = engine = model.speculation.engine
        with engine.turns, torch.inference_mode(False), torch.no_grad():
            engine.adopt()
            self.scheduler = take_scheduler(engine, config, workload_hints)
        self.scheduler.check = engine.refuse_changes
        intake = Intake if engine.decoder is None else engine.decoder.intake
        self._intake = intake(model, self.scheduler.capacity, config.seed, config.return_logprobs)
        self._process = os.getpid()

        # transformers' inherited methods read these:
        self.output_router, self.background_thread_status = OutputRouter(), BackgroundThreadStatus()
        self.warmed_up = False
        self._generation_thread: threading.Thread | None = None  # type: ignore[assignment]

        self.metrics = Metrics(self.scheduler, engine)
        self.observers: list[Callable[[Output], None]] = []
        self._sequences: dict[str, BatchSequence] = {}
        """The sequences that wait or run, by name."""
        self._last_round = time.perf_counter()
        """When a round last ended, or nothing was to be done."""
        self._wake_up = threading.Event()
        """Set when something is to be done."""
        self._is_open, self._lock = True, threading.Lock()
        """True if requests are taken. Changed under the lock, so that none comes after all others were ended."""

    @property
    def generation_config(self) -> GenerationConfig:  # type: ignore[override]
        """For requests that bring none."""
        return self.model.generation_config if self._config is None else self._config

    @property
    def num_return_sequences(self) -> int:  # type: ignore[override]
        """Sequences of a request that does not say how many."""
        return self.generation_config.num_return_sequences or 1

    @property
    def is_of_this_process(self) -> bool:
        """True if it was made in this process, rather than in one that this was forked from."""
        return os.getpid() == self._process

    # --- the life of the thread

    def switch_to_cb_friendly_attn(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: our attention serves."""

    def warmup(self) -> None:
        """Compile and capture what rounds and prompts of all widths need, and drawn rounds if requests sample by
        default."""
        config, settings = self.generation_config, None
        if config.do_sample:
            excluded = 1 - config.top_p if config.top_p is not None and config.top_p < 1 else -1.0
            settings = RowSettings(config.top_k or 0, excluded, config.min_p or 0.0)
        with self._engine.turns, torch.inference_mode(False), torch.no_grad():
            self.scheduler.warmup(settings)
        self.warmed_up = True

    def start(self) -> None:
        self._refuse_elsewhere("start()")
        if self.is_running():
            return
        self.background_thread_status.clear()
        with self._lock:
            self._is_open = True
        self._generation_thread = threading.Thread(target=self._run, name="spec_compile batches", daemon=True)
        self._generation_thread.start()

    def stop(
        self, block: bool = True, timeout: float | None = None, keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:  # fmt: skip
        """Stop the thread once all requests are over, or with `hard_stop` at once: what is under way fails then.

        block: whether to wait for it, at most `timeout` seconds. keep_for_next_session: whether the model's next
        ``init_continuous_batching()`` returns this manager again.
        Raises RuntimeError if it would wait for itself: inside `pause`, in a processor, criterion or streamer.
        In a process that was forked from the manager's it does nothing.
        """
        if not self.is_of_this_process:
            return
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self
        if self._generation_thread is None:
            return
        if block and timeout is None:
            self._refuse_waiting("stop()", "or pass block=False")
        status = BackgroundThreadStatus.HARD_STOP if hard_stop else BackgroundThreadStatus.FLUSH_AND_STOP
        self.background_thread_status.request_stop(status, 0)
        self._wake_up.set()
        if block:
            self.join(time.perf_counter(), timeout)

    def destroy(self) -> None:
        """Stop at once. The next manager takes over the rows, with all that is compiled."""
        self.stop(hard_stop=True)
        has_died = self.background_thread_status.fatal_error is not None
        if self.scheduler is not None and self.is_of_this_process and not has_died:
            self._clear()
            self._engine.idle_batch = self.scheduler
        self.scheduler = None  # type: ignore[assignment]  # no method serves any more

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which no round runs, so that weights can be changed; requests go on after it."""
        with self._engine.turns:
            try:
                yield
            finally:
                if self.scheduler is not None:
                    self.scheduler.prefixes.distrusts_weights = True
                if self._engine.loras is not None:
                    self._engine.loras.forget()

    def stalled_seconds(self) -> float:
        """Seconds since a round last ended; 0.0 if no request is under way."""
        is_busy = self.scheduler is not None and self.scheduler.is_busy
        return time.perf_counter() - self._last_round if is_busy else 0.0

    # --- requests

    @property
    def active_requests(self) -> int:
        """Requests that wait or run. Unlike the gauges of `metrics` it counts those that change rows just now."""
        return len(self._sequences)

    @property
    def queue_room(self) -> int | None:
        """Requests that may still be added to those that wait; None: any number."""
        bound = self.continuous_batching_config.max_queue_size
        return max(0, bound - len(self.scheduler.waiting)) if bound and self.scheduler is not None else None

    def add_request(
        self, input_ids: Any = None, request_id: str | None = None, max_new_tokens: int | None = None,
        streaming: bool = False, record_timestamps: bool = False, eos_token_id: int | list[int] | None = None, *,
        generation_config: GenerationConfig | None = None, tokenizer: Any = None, seed: int | None = None,
        **options: Any,
    ) -> str:  # fmt: skip
        """Hand in a request; returns its id.

        input_ids: token ids, a list or 1-D tensor, or the one row of a 2-D one. request_id: a name that no request
        under way has; None makes one.
        max_new_tokens, eos_token_id: None: as the config says; without a limit the row is filled. A negative id ends
        nothing. streaming: whether every round's tokens are delivered, not only the whole answer. record_timestamps:
        whether `Output.timestamps` has the time of every token. generation_config: replaces the manager's for this
        request. tokenizer: for `stop_strings`. seed: the answer equals what ``generate()`` gives after
        ``torch.manual_seed(seed)``; None: one is drawn. options: fields of a GenerationConfig, `logits_processor` and
        `stopping_criteria`, `speculation` as in ``generate()``, `reference` (texts that only this request drafts from,
        until it ends; as in ``generate()`` else), `adapter_name` (of its LoRA adapter, of a model with `max_loras`;
        "__base__" is none, and without a name it has the active one), `logprobs` and `prompt_logprobs` (numbers of
        likeliest tokens to tell next to the log-probability of each token of the answer, and of the prompt, in
        `Output.scores` and `Output.prompt_scores`), `logprobs_temperature` (divides their logits; 1.0 by default),
        `stops_in_prompt` (False: a stop string counts only if all of it is in the answer), and what a processor returns
        for pictures (`pixel_values` and the like). An encoder-decoder has the arguments of ``generate()``: `input_ids`
        or `input_features` are the source, and `decoder_input_ids` the prompt.

        Texts that say whose the request is: `share_text`, with n-grams, may be True, False or None as in
        ``generate()``, or the name of the text's owner: the request drafts only from texts of the same owner, only
        these requests draft from its text, and nobody else does with "". A prompt starts with keys and values of
        requests with the same `cache_salt` only ("" by default). Requests take turns by `client` ("" by default).

        Raises, before anything is handed in: ValueError or TypeError, naming the argument, for what cannot be served;
        queue.Full if as many requests wait as `max_queue_size` allows; RuntimeError if the thread stops or has died, in
        a forked process, and on other ranks than the first.
        """
        (name,) = self.add_requests(
            [input_ids], max_new_tokens, streaming, record_timestamps, request_ids=[request_id],
            eos_token_id=eos_token_id, generation_config=generation_config, tokenizer=tokenizer, seed=seed, **options,
        )  # fmt: skip
        return name

    def add_requests(
        self, inputs: list, max_new_tokens: int | None = None, streaming: bool = False,
        record_timestamps: bool = False, *, request_ids: list[str | None] | None = None,
        generation_config: GenerationConfig | None = None, **options: Any,
    ) -> list[str]:  # fmt: skip
        """Hand in a request for each prompt, all or none; returns their ids. See `add_request`."""
        self._refuse_elsewhere("add_request()")
        self._require_open()
        config = self.generation_config if generation_config is None else generation_config
        options |= dict(max_new_tokens=max_new_tokens, streaming=streaming, record_timestamps=record_timestamps)
        names = request_ids or [None] * len(inputs)
        try:
            sequences = [self._intake.sequences(ids, config, name, **options) for ids, name in zip(inputs, names)]
            self._hand_in([sequence for each in sequences for sequence in each])
        except (TypeError, ValueError):
            self.metrics.reject("invalid")
            raise
        return [each[-1].request_id for each in sequences]

    def _hand_in(self, sequences: list[BatchSequence]) -> None:
        """Take requests of one client, all or none. If several clients wait, each has an equal share of the queue.

        Raises queue.Full if more would wait; TypeError or ValueError for a name that cannot be, or is in use.
        """
        bound = self.continuous_batching_config.max_queue_size
        names = [sequence.request_id for sequence in sequences]
        with self._lock:
            # Is there room in the queue, for this client among the others?
            self._require_open()
            waiting = self.scheduler.waiting
            clients = Counter(sequence.request.client for sequence in [*waiting, *sequences])
            share, added = bound // len(clients), len(sequences)  # guard: shares-of-the-queue
            if bound and clients[sequences[0].request.client] > share:
                self.metrics.reject("queue_full")
                whose = f" of each of {len(clients)} clients" if len(clients) > 1 else ""
                own = clients[sequences[0].request.client] - added
                raise queue.Full(f"max_queue_size: {share} requests{whose} may wait, {own} do, and {added} were added")

            # Names tell requests apart in outputs and when they are cancelled.
            for name in names:
                if not isinstance(name, str):
                    raise TypeError(f"request_id: expected a text, got {type(name).__name__}")
                if name in self._sequences or names.count(name) > 1:
                    raise ValueError(f"request_id: {name!r} is under way already")
            self._sequences |= dict(zip(names, sequences))
            waiting.extend(sequences)
        self._wake_up.set()

    def cancel_request(self, request_id: str) -> None:
        """End a request with all its sequences; its row is free within two rounds, and it delivers one last output."""
        self._refuse_elsewhere("cancel_request()")
        with self._lock:
            for name, sequence in self._sequences.items():
                if name == request_id or name.startswith(child_name(request_id, "")):
                    sequence.is_cancelled = True
        self._wake_up.set()

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Output | None:
        """The next output that no handler takes, or None after `timeout` seconds, or if none can come any more.

        Raises RuntimeError where it would wait for rounds that wait for this thread.
        """
        if timeout is None and self.output_router.output_queue.empty() and self.is_running():
            self._refuse_waiting("get_result()", "or pass a timeout")
        output = super().get_result(request_id, timeout)
        return output if isinstance(output, Output) else None

    def _require_open(self) -> None:
        """RuntimeError if no request is taken any more."""
        denial = self.background_thread_status.can_accept_new_requests()
        if denial is None and self.scheduler is None:
            denial = "the manager was destroyed; call init_continuous_batching() again"
        if denial is None and not self._is_open:
            denial = "the manager has stopped; call start() again"
        if denial is not None:
            self.metrics.reject("stopping")
            raise RuntimeError(denial)

    def _refuse_elsewhere(self, method: str) -> None:
        """RuntimeError in a process that does not have the thread, or that follows another rank."""
        if not self.is_of_this_process:  # guard: forks
            raise RuntimeError(
                f"{method}: this manager runs in process {self._process}, from which process {os.getpid()} was forked; "
                "call init_continuous_batching() here for a manager of this process"
            )
        if method == "add_request()" and not self._engine.options.ranks.leads:
            raise RuntimeError(
                "add_request(): only rank 0 takes requests, and the other ranks follow it; wait for their end with "
                "manager.join(0.0), or call generate_batch() on all ranks alike"
            )

    def _refuse_waiting(self, method: str, otherwise: str) -> None:
        """RuntimeError if rounds wait for the thread that calls `method`, which would wait for rounds."""
        if self._engine.turns.is_mine or threading.current_thread() is self._generation_thread:
            raise RuntimeError(
                f"{method}: inside pause(), or in a processor, criterion, streamer or observer, it would wait for "
                f"rounds that wait for this thread; call it afterwards, {otherwise}"
            )

    # --- the thread

    def _run(self) -> None:
        """Run rounds until somebody says that it is enough; on other ranks than the first, until that one says so."""
        ranks, device = self._engine.options.ranks, self._engine.runtime.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with self._engine.agreement.serving(), ranks.call():
                self._run_rounds() if ranks.leads else self._follow_rounds()
                self._clear()
        except BaseException as error:  # of the device, or a bug: nobody can go on
            log.exception("the thread of continuous batching died")
            self.background_thread_status.record_fatal_error(error)  # type: ignore[arg-type]
            self._engine.batches.discard(self.scheduler)
            self._fail_all(error)
        finally:
            self.background_thread_status.mark_as_stopped()

    def _run_rounds(self) -> None:
        status, ranks, turns = self.background_thread_status, self._engine.options.ranks, self._engine.turns
        while status.local_status != BackgroundThreadStatus.HARD_STOP:
            if self.scheduler.is_busy:
                with turns.rounds():
                    while self.scheduler.is_busy and status.local_status != BackgroundThreadStatus.HARD_STOP:
                        with turns.of_a_round():
                            ranks.lead(lambda: [True])
                            news = self.scheduler.step()
                        self._last_round = time.perf_counter()
                        self._deliver(news)
            elif status.local_status == BackgroundThreadStatus.FLUSH_AND_STOP and self._close(if_idle=True):
                break
            else:
                self._wake_up.wait(IDLE)
                self._wake_up.clear()
                self._last_round = time.perf_counter()
        ranks.lead(lambda: [False])

    def _follow_rounds(self) -> None:
        ranks = self._engine.options.ranks
        while any(ranks.lead(list, is_patient=True)):  # another round
            with self._engine.turns.of_a_round():
                self.scheduler.step()

    def _close(self, if_idle: bool = False) -> bool:
        """Take no more requests, with `if_idle` only if none waits; returns whether none is taken."""
        with self._lock:
            self._is_open &= if_idle and bool(self.scheduler.waiting)
            return not self._is_open

    def _clear(self) -> None:
        self._close()
        error = RequestError("the manager was stopped", 500)
        with self._engine.turns.of_a_round():
            self.scheduler.clear(error)
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        self._close()
        with self._lock:
            sequences = [*self._sequences.values()]
        for sequence in sequences:
            sequence.fail(error)
            self.scheduler.adapters.release(sequence)
        self._deliver(sequences)

    def _deliver(self, news: list[BatchSequence]) -> None:
        """Hand out what there is of these requests. An error here is the reader's, not the request's."""
        outputs = [sequence.output() for sequence in news if sequence.is_over or sequence.request.streaming]
        for sequence in news:
            if sequence.is_over:
                with self._lock:
                    self._sequences.pop(sequence.request_id, None)
                self.metrics.finish(sequence)
                # A draft learns from it, unless its text is forgotten or ids do not say all of its prompt.
                shares = sequence.request.share_text is not False and sequence.request.process is None
                if self._engine.online is not None and shares and sequence.finish_reason in ("stop", "length"):
                    self._engine.online.keep(sequence.prompt, sequence.tokens)
        for output in outputs:
            try:
                self.output_router.deliver(output)
            except RuntimeError:  # the event loop of its reader is closed
                log.warning("request %s: nobody reads its output any more", output.request_id)
            for observer in self.observers if output.is_finished() else ():
                try:
                    observer(output)
                except Exception:
                    log.exception("request %s: an observer failed", output.request_id)
