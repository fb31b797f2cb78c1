"""`Manager`: transformers' continuous batching over our rounds."""

import os
import threading
import time
from collections.abc import Iterator
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

from .intake import Intake
from .output import Output
from .request_options import check_config
from .scheduler import take_scheduler
from .worker import Worker


class Manager(ContinuousBatchingManager):
    """Answers requests that come at any time, each as its own ``generate()`` would, with its own options.

    It is made by ``init_continuous_batching()`` and has the methods of transformers' manager. A thread runs rounds over
    the requests that are under way; other threads' ``generate()`` go between the rounds. Every request that was handed
    in delivers one last output, whatever happens.

    generation_config: for requests that bring none; None: the model's, as it is when a request comes. metrics: see
    `Metrics`. observers: functions that are called with every last `Output`, in that thread.
    """

    def __init__(
        self, model, generation_config: GenerationConfig | None, continuous_batching_config: ContinuousBatchingConfig,
        workload_hints=None,
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
            self.scheduler = take_scheduler(engine, config.max_requests_per_batch, workload_hints)
        self.scheduler.check = engine.refuse_changes
        self._intake = Intake(model, self.scheduler.capacity, config.seed, config.return_logprobs)
        self._process = os.getpid()

        # transformers' inherited methods read these:
        self.output_router, self.background_thread_status = OutputRouter(), BackgroundThreadStatus()
        self.warmed_up = False
        self._generation_thread: threading.Thread | None = None

        self._worker = Worker(engine, self.scheduler, self.background_thread_status, self.output_router)
        self.metrics, self.observers = self._worker.metrics, self._worker.observers

    @property
    def generation_config(self) -> GenerationConfig:
        """For requests that bring none."""
        return self.model.generation_config if self._config is None else self._config

    @property
    def num_return_sequences(self) -> int:
        """Sequences of a request that does not say how many."""
        return self.generation_config.num_return_sequences or 1

    @property
    def is_of_this_process(self) -> bool:
        """True if it was made in this process, rather than in one that this was forked from."""
        return os.getpid() == self._process

    # --- the life of the thread

    def switch_to_cb_friendly_attn(self, *args, **kwargs) -> None:
        """Nothing: our attention serves."""

    def warmup(self) -> None:
        """Compile and capture what rounds and prompts of all widths need."""
        with self._engine.turns, torch.inference_mode(False), torch.no_grad():
            self.scheduler.warmup()
        self.warmed_up = True

    def start(self) -> None:
        self._refuse_elsewhere("start()")
        if self.is_running():
            return
        self._worker.open()
        self._generation_thread = threading.Thread(target=self._worker.run, name="spec_compile batches", daemon=True)
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
        self._worker.wake_up.set()
        if block:
            self.join(time.perf_counter(), timeout)

    def destroy(self) -> None:
        """Stop at once. The next manager takes over the rows, with all that is compiled."""
        self.stop(hard_stop=True)
        has_died = self.background_thread_status.fatal_error is not None
        if self.scheduler is not None and self.is_of_this_process and not has_died:
            self._worker.clear()
            self._engine.idle_batch = self.scheduler
        self.scheduler = None

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
        return time.perf_counter() - self._worker.last_round if is_busy else 0.0

    # --- requests

    @property
    def active_requests(self) -> int:
        """Requests that wait or run. Unlike the gauges of `metrics` it counts those that change rows just now."""
        return len(self._worker.sequences)

    @property
    def queue_room(self) -> int | None:
        """Requests that may still be added to those that wait; None: any number."""
        bound = self.continuous_batching_config.max_queue_size
        return max(0, bound - len(self.scheduler.waiting)) if bound and self.scheduler is not None else None

    def add_request(
        self, input_ids, request_id: str | None = None, max_new_tokens: int | None = None, streaming: bool = False,
        record_timestamps: bool = False, eos_token_id: int | list[int] | None = None, *,
        generation_config: GenerationConfig | None = None, tokenizer: Any = None, seed: int | None = None,
        **options: Any,
    ) -> str:  # fmt: skip
        """Hand in a request; returns its id.

        input_ids: token ids, a list or 1-D tensor, or the one row of a 2-D one. request_id: a name that no request
        under way has; None makes one.
        max_new_tokens, eos_token_id: None: as the config says; without a limit the row is filled. A negative id ends
        nothing. streaming: whether every round's tokens are delivered, not only the whole answer. record_timestamps:
        whether `Output.timestamps` has the time of every token. generation_config: replaces the manager's for this
        request. tokenizer: for `stop_strings`. seed: the answer is that of ``generate()`` after
        ``torch.manual_seed(seed)``; None: one is drawn. options: fields of a GenerationConfig, `logits_processor` and
        `stopping_criteria`, `speculation` as in ``generate()``, `reference` (texts that only this request drafts from,
        until it ends; as in ``generate()`` else), `adapter_name` (of its LoRA adapter, of a model with `max_loras`;
        "__base__" is none, and without a name it has the active one), `logprobs` and `prompt_logprobs` (numbers of
        likeliest tokens to tell next to the log-probability of each token of the answer, and of the prompt, in
        `Output.scores` and `Output.prompt_scores`), `logprobs_temperature` (divides their logits; 1.0 by default),
        `stops_in_prompt` (False: a stop string counts only if all of it is in the answer), and what a processor returns
        for pictures (`pixel_values` and the like).

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
        named = {name: options.pop(name, None) for name in ("eos_token_id", "tokenizer", "seed")}
        try:
            sequences = [
                self._intake.sequences(
                    ids, self.generation_config if generation_config is None else generation_config, name,
                    max_new_tokens, streaming, record_timestamps, **named, options=options,
                )
                for ids, name in zip(inputs, request_ids or [None] * len(inputs))
            ]  # fmt: skip
            bound = self.continuous_batching_config.max_queue_size
            self._worker.hand_in([sequence for each in sequences for sequence in each], bound, self._require_open)
        except (TypeError, ValueError):
            self.metrics.reject("invalid")
            raise
        return [each[-1].request_id for each in sequences]

    def cancel_request(self, request_id: str) -> None:
        """End a request with all its sequences; its row is free within two rounds, and it delivers one last output."""
        self._refuse_elsewhere("cancel_request()")
        self._worker.cancel(request_id)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Output | None:
        """The next output that no handler takes, or None after `timeout` seconds, or if none can come any more.

        Raises RuntimeError where it would wait for rounds that wait for this thread.
        """
        if timeout is None and self.output_router.output_queue.empty() and self.is_running():
            self._refuse_waiting("get_result()", "or pass a timeout")
        return super().get_result(request_id, timeout)

    def _require_open(self) -> None:
        """RuntimeError if no request is taken any more."""
        denial = self.background_thread_status.can_accept_new_requests()
        if denial is None and self.scheduler is None:
            denial = "the manager was destroyed; call init_continuous_batching() again"
        if denial is None and not self._worker.is_open:
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
