"""`Manager`: transformers' continuous batching over our rounds."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    BackgroundThreadStatus,
    ContinuousBatchingManager,
    OutputRouter,
)

from ..runtime.generate import refuse_changes
from .job import Job, seed_of
from .metrics import Metrics
from .output import Output
from .prepare import Preparer, without_end
from .slots import take_scheduler

log = logging.getLogger("spec_compile")

IDLE = 0.1
"""Seconds after which an idle thread looks whether it is to stop."""


class Manager(ContinuousBatchingManager):
    """Answers requests that come at any time, each as ``generate()`` alone would, with options of its own.

    It is made by ``init_continuous_batching()`` and has the methods of transformers' manager. A thread runs rounds over
    the requests that are under way; other threads' ``generate()`` go between the rounds.

    metrics: see `Metrics`. observers: functions that are called with every last `Output`, in that thread.
    """

    def __init__(
        self, model, generation_config: GenerationConfig, continuous_batching_config: ContinuousBatchingConfig,
        workload_hints=None,
    ):  # fmt: skip
        self.model, self.generation_config = model, generation_config
        self.continuous_batching_config = config = continuous_batching_config
        self.num_return_sequences = generation_config.num_return_sequences or 1
        if config.scheduler_type != "fifo":
            raise ValueError(f"scheduler_type: expected 'fifo', got {config.scheduler_type!r}")
        if config.return_logprobs:
            raise ValueError("return_logprobs: log-probabilities are not computed; leave it out")
        self._speculation = model.speculation
        engine = self._speculation.engine
        with self._speculation.turns.of_a_round():
            self.scheduler = take_scheduler(engine, config.max_requests_per_batch, workload_hints)
        self.scheduler.check = partial(refuse_changes, self._speculation)
        self.prepare = Preparer(model, self.scheduler.capacity)
        self.metrics = Metrics(self.scheduler)
        self.observers: list[Callable[[Output], None]] = []
        self._endless = without_end(generation_config), without_end(model.generation_config)
        self._jobs: dict[str, Job] = {}
        self._seeds = None if config.seed is None else count(config.seed)
        self._last_round = time.perf_counter()

        # What transformers' methods that are inherited read:
        self.output_router, self.background_thread_status = OutputRouter(), BackgroundThreadStatus()
        self.batch_processor = None
        self.is_tp_driver, self.warmed_up, self._use_prefix_sharing = True, False, False
        self._generation_thread: threading.Thread | None = None
        self._request_counter, self._request_lock = 0, threading.Lock()
        self._wake_up_loop = threading.Event()

    # --- the life of the thread

    def switch_to_cb_friendly_attn(self, *args, **kwargs) -> None:
        """Nothing: our attention serves."""

    def warmup(self) -> None:
        """Compile and capture what rounds and prompts of all widths need."""
        with self._speculation.turns.of_a_round():
            self.scheduler.warmup()
        self.warmed_up = True

    def start(self) -> None:
        """Start the thread."""
        if self.is_running():
            return
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(target=self._run, name="spec_compile batches", daemon=True)
        self._generation_thread.start()

    def stop(
        self, block: bool = True, timeout: float | None = None, keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:  # fmt: skip
        """Stop the thread once all requests are over, or with `hard_stop` at once: what is under way fails then.

        block: whether to wait for it, at most `timeout` seconds. keep_for_next_session: whether the model's next
        ``init_continuous_batching()`` returns this manager again.
        """
        if self._generation_thread is None:
            return
        status = BackgroundThreadStatus.HARD_STOP if hard_stop else BackgroundThreadStatus.FLUSH_AND_STOP
        self.background_thread_status.request_stop(status, 0)
        self._wake_up_loop.set()
        if block:
            self.join(time.perf_counter(), timeout)
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self

    def destroy(self) -> None:
        """Stop at once. The next manager takes over the rows, with all that is compiled."""
        self.stop(hard_stop=True)
        if self.scheduler is not None and self.background_thread_status.fatal_error is None:
            self._clear()
            self._speculation.engine.idle_batch = self.scheduler
        self.scheduler = None

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context in which no round runs, so that weights can be changed; requests go on behind it."""
        with self._speculation.turns:
            yield

    def stalled_seconds(self) -> float:
        """Seconds since a round last ended; 0.0 if no request is under way."""
        is_busy = self.scheduler is not None and self.scheduler.is_busy
        return time.perf_counter() - self._last_round if is_busy else 0.0

    # --- requests

    @property
    def active_requests(self) -> int:
        """Requests that wait or run. Unlike the gauges of `metrics` it counts those that change rows just now."""
        return len(self._jobs)

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
        whether `Output.timestamps` has the time of every token. generation_config: of this request in place of the
        manager's. tokenizer: for `stop_strings`. seed: the answer is that of ``generate()`` after
        ``torch.manual_seed(seed)``; None: one is drawn. options: fields of a GenerationConfig, `logits_processor` and
        `stopping_criteria`, and what a processor returns for pictures (`pixel_values` and the like).

        Raises, before anything is handed in: ValueError or TypeError, naming the argument, for what cannot be served;
        queue.Full if as many requests wait as `max_queue_size` allows; RuntimeError if the thread stops or has died.
        """
        denial = self.background_thread_status.can_accept_new_requests()
        if denial or self.scheduler is None:
            self.metrics.reject("stopping")
            raise RuntimeError(denial or "the manager was destroyed; call init_continuous_batching() again")
        try:
            jobs = self._make_jobs(
                input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id,
                generation_config, tokenizer, seed, options,
            )  # fmt: skip
        except (TypeError, ValueError):
            self.metrics.reject("invalid")
            raise
        self._hand_in(jobs)
        return jobs[-1].request_id

    def cancel_request(self, request_id: str) -> None:
        """End a request; its row is free within two rounds, and it delivers one last output."""
        with self._request_lock:
            job = self._jobs.get(request_id)
        if job is not None:
            job.is_cancelled = True
            self._wake_up_loop.set()

    def _make_jobs(
        self, input_ids, request_id, max_new_tokens, streaming, record_timestamps, eos_token_id, generation_config,
        tokenizer, seed, options,
    ) -> list[Job]:  # fmt: skip
        """The requests for one prompt: one for each of `num_return_sequences`, the one of this id last."""
        prompt = self._read_prompt(input_ids)
        config, defaults = generation_config or self.generation_config, self.model.generation_config
        mask = options.pop("attention_mask", None)
        if mask is not None and not torch.as_tensor(mask).all():
            raise ValueError("attention_mask: a request has one prompt without padding; leave it out")
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        ends = [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
        if ends is not None:
            ends = [token for token in ends if token >= 0]
            if ends:
                options["eos_token_id"] = ends
            else:
                config, defaults = (
                    self._endless if generation_config is None else (without_end(config), self._endless[1])
                )
        sequences = options.pop("num_return_sequences", None) or config.num_return_sequences or 1
        prepared = self.prepare(prompt, config, defaults, tokenizer, options)
        if seed is None and self._seeds is not None:
            seed = next(self._seeds)
        seed = seed_of(seed) if prepared.config.do_sample else 0
        if request_id is None:
            with self._request_lock:
                request_id, self._request_counter = f"req_{self._request_counter}", self._request_counter + 1
        names = [*(f"{request_id}__child#{number}" for number in range(sequences - 1)), request_id]
        share_text = getattr(self._speculation.options, "share_text", True)
        return [
            Job(name, prompt, prepared, seed, number, streaming, record_timestamps, share_text)
            for number, name in enumerate(names)
        ]

    def _read_prompt(self, input_ids) -> list[int]:
        ids = input_ids.tolist() if isinstance(input_ids, torch.Tensor) else list(input_ids)
        if len(ids) == 1 and isinstance(ids[0], list):  # as a processor gives them
            (ids,) = ids
        if not ids:
            raise ValueError("input_ids: expected at least one token, got none")
        vocab = self._speculation.engine.runtime.verify.vocab_size
        for token in ids:
            if type(token) is not int:
                raise TypeError(f"input_ids: expected token ids, got {type(token).__name__}")
            if not 0 <= token < vocab:
                raise ValueError(f"input_ids: token id {token} is outside the vocabulary of {vocab} tokens")
        return ids

    def _hand_in(self, jobs: list[Job]) -> None:
        bound = self.continuous_batching_config.max_queue_size
        with self._request_lock:
            if bound and len(self.scheduler.waiting) + len(jobs) > bound:
                self.metrics.reject("queue_full")
                raise queue.Full(f"max_queue_size: {bound} requests wait already")
            for job in jobs:
                if job.request_id in self._jobs:
                    raise ValueError(f"request_id: {job.request_id!r} is under way already")
            self._jobs |= {job.request_id: job for job in jobs}
            self.scheduler.waiting.extend(jobs)
        self._wake_up_loop.set()

    # --- the thread

    def _run(self) -> None:
        """Run rounds until somebody says that it is enough; on other ranks than the first, until that one says so."""
        ranks, device = self._speculation.options.ranks, self._speculation.engine.runtime.device
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            with ranks.call():
                self._run_rounds() if ranks.leads else self._follow_rounds()
                self._clear()
        except BaseException as error:  # of the device, or a bug: nobody can go on
            log.exception("the thread of continuous batching died")
            self.background_thread_status.record_fatal_error(error)
            self._speculation.engine.batches.discard(self.scheduler)
            self._fail_all(error)
        finally:
            self.background_thread_status.mark_as_stopped()

    def _run_rounds(self) -> None:
        status, ranks = self.background_thread_status, self._speculation.options.ranks
        while status.local_status != BackgroundThreadStatus.HARD_STOP:
            if self.scheduler.is_busy:
                with self._speculation.turns.of_a_round():
                    ranks.lead(lambda: [True])
                    news = self.scheduler.step()
                self._last_round = time.perf_counter()
                self._deliver(news)
            elif status.local_status == BackgroundThreadStatus.FLUSH_AND_STOP:
                break
            else:
                self._wake_up_loop.wait(IDLE)
                self._wake_up_loop.clear()
                self._last_round = time.perf_counter()
        ranks.lead(lambda: [False])

    def _follow_rounds(self) -> None:
        ranks = self._speculation.options.ranks
        while any(ranks.lead(list)):  # another round
            with self._speculation.turns.of_a_round():
                self.scheduler.step()

    def _clear(self) -> None:
        """End all requests."""
        error = RuntimeError("the manager was stopped")
        with self._speculation.turns.of_a_round():
            self.scheduler.clear(error)
        self._fail_all(error)

    def _fail_all(self, error: BaseException) -> None:
        with self._request_lock:
            jobs = [*self._jobs.values()]
        for job in jobs:
            job.fail(error)
        self._deliver(jobs)

    def _deliver(self, news: list[Job]) -> None:
        """Hand out what there is of these requests."""
        outputs = [job.output() for job in news if job.is_over or job.streaming]
        for job in news:
            if job.is_over:
                with self._request_lock:
                    self._jobs.pop(job.request_id, None)
                self.metrics.finish(job)
        for output in outputs:
            try:
                self.output_router.deliver(output)
            except RuntimeError:  # the event loop of its reader is closed
                log.warning("request %s: nobody reads its output any more", output.request_id)
            if output.is_finished():
                for observer in self.observers:
                    observer(output)
