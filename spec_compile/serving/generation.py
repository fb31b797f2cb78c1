"""Between transformers' request handlers and our manager: what goes in, what comes out, and what is refused."""

import asyncio
import json
import queue
import uuid
from collections.abc import Callable
from typing import Any

import torch
from fastapi import HTTPException
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.cli.serving.utils import (
    CBGenerateManager,
    CBStreamer,
    CBWorkerDeadError,
    GenerationState,
    _StreamError,
    response_events_to_chunks,
)

from ..capture.pictures import reads_pictures
from ..runtime.own_prefill import TOKEN_TYPES
from .call import CURRENT
from .followers import Followers
from .metrics import Metrics

MOST_UNREAD = 4096
"""Pieces of text that may wait for a slow client; then its request is cancelled."""
DEFAULT_LIMIT = 1024
"""New tokens at most of a request that does not say, as in transformers' server."""
LONGEST_ROUND = 30.0
"""Seconds without the end of a round, while rows are active, after which the server counts as unhealthy."""
RETRY_SECONDS = 1
"""What Retry-After says when the queue is full, or the server ends."""


class Streamer(CBStreamer):
    """transformers' streamer, which makes one piece of text of what a round has gained, not one of each token."""

    def put(self, output: Any) -> None:
        """Take the new tokens of an output."""
        tokens = output.generated_tokens[self._prev_len :]
        self._prev_len = self.total_tokens = len(output.generated_tokens)
        pieces = [self._decode_stream.step(self._tokenizer, token) for token in tokens]
        text = "".join(filter(None, pieces))  # None: the token does not end a character
        if text:
            items = [text] if self._parser is None else response_events_to_chunks(self._parser.feed(text))
            for item in items:
                self._queue.put_nowait(item)


class Requests(CBGenerateManager):
    """Puts requests of handlers into the manager, each with its own settings, and takes out their answers."""

    def __init__(self, model: Any, config: ContinuousBatchingConfig):
        super().__init__(config)
        self.manager = model.init_continuous_batching(continuous_batching_config=config)
        self.num_spec_tokens: int = model.speculation.engine.runtime.sizes[-1] - 1
        self.metrics = Metrics(self.manager.metrics)
        self.most_unread = MOST_UNREAD
        self._reads_pictures = reads_pictures(model.speculation.original)
        self.is_draining = False
        self.followers: Followers | None = None
        self.manager.warmup()
        self.manager.start()

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        """Nothing, because the manager runs since the start and takes the settings of each request."""

    def is_alive(self) -> bool:
        """Whether the manager's thread works, and the processes of all ranks."""
        return self._death() is None

    def _death(self) -> str | None:
        """What the worker died of, if it did."""
        error = self.manager.background_thread_status.fatal_error
        if error is not None:
            return f"the worker died: {error}"
        return None if self.followers is None else self.followers.ailment()

    def ailment(self) -> str | None:
        """Why the server cannot answer now, or None."""
        if death := self._death():
            return death
        if self.is_draining:
            return "the server is ending"
        stalled = self.manager.stalled_seconds()
        if stalled > LONGEST_ROUND:
            return f"requests are active, but no round has ended for {stalled:.0f} seconds"
        return None

    def generate_streaming(
        self, model: Any, processor: Any, inputs: dict, gen_config: GenerationConfig, request_id: str,
        response_parser: Any = None,
    ) -> tuple[asyncio.Queue, CBStreamer]:  # fmt: skip
        """See transformers; HTTPException if the request cannot be taken."""
        name, pieces = uuid.uuid4().hex, asyncio.Queue()
        tokenizer = getattr(processor, "tokenizer", processor)
        streamer = Streamer(
            self.manager, name, tokenizer._tokenizer, asyncio.get_running_loop(), pieces, response_parser
        )

        def take(output: Any) -> None:
            try:
                streamer.put(output)
                if output.finish_reason in ("error", "cancelled"):
                    reason = output.error or "cancelled, because the client reads too slowly"
                    pieces.put_nowait(_StreamError(json.dumps(reason)[1:-1]))  # transformers puts it between quotes
                elif output.is_finished():
                    streamer.end()
                elif pieces.qsize() > self.most_unread:
                    self.manager.cancel_request(name)
            except Exception as error:  # of the parser: the request's own, which must not end the event loop
                pieces.put_nowait(_StreamError(json.dumps(str(error))[1:-1]))
                self.manager.cancel_request(name)

        self._add(name, inputs, gen_config, tokenizer, take, streaming=True)
        return pieces, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: dict, gen_config: GenerationConfig, request_id: str
    ) -> tuple[str, int, list[int]]:
        """See transformers; HTTPException if the request cannot be taken, RuntimeError if it fails."""
        name, future = uuid.uuid4().hex, asyncio.get_running_loop().create_future()

        def take(output: Any) -> None:
            if not future.done():  # it is, once the client has left
                future.set_result(output)

        tokenizer = getattr(processor, "tokenizer", processor)
        self._add(name, inputs, gen_config, tokenizer, take, streaming=False)
        output = await future
        if not self.is_alive():
            raise CBWorkerDeadError(f"the worker died: {output.error}")
        if output.error is not None:
            raise HTTPException(500, f"the request failed: {output.error}")
        text = processor.decode(output.generated_tokens, skip_special_tokens=True)
        return text, len(inputs["input_ids"]), output.generated_tokens

    def _add(
        self, name: str, inputs: dict, config: GenerationConfig, tokenizer: Any, take: Callable, streaming: bool
    ) -> None:
        """Add a request to the manager, whose outputs go to `take`. HTTPException if it cannot be taken.

        inputs: what the tokenizer or the processor returned. Its `input_ids` become one list, which handlers count.
        """
        call, ids = CURRENT.get(), inputs["input_ids"]
        if len(ids) == 1 and isinstance(ids[0], list):  # of a processor
            (ids,) = ids
            inputs["input_ids"] = ids

        def observe(output: Any) -> None:
            call.output = output
            if output.is_finished():
                self.metrics.observe(output)
            take(output)

        if ailment := self.ailment():
            raise HTTPException(503, ailment, {"Retry-After": str(RETRY_SECONDS)})
        if not call.has_own_limit:  # what is left of a row, if that is less than transformers' default
            room = self.manager.metrics()["slot_tokens"] - len(ids)
            config.max_new_tokens = max(1, min(config.max_new_tokens or DEFAULT_LIMIT, room))
        seed = getattr(config, "seed", None)
        self.manager.register_result_handler(name, observe)
        try:
            self.manager.add_request(
                ids, name, streaming=streaming, record_timestamps=True, generation_config=config, tokenizer=tokenizer,
                seed=seed, **self._pictures(inputs),
            )  # fmt: skip
            call.request_id = name
        except queue.Full as error:
            reason = "the queue is full; try again later"
            raise HTTPException(429, reason, {"Retry-After": str(RETRY_SECONDS)}) from error
        except (ValueError, TypeError) as error:
            raise HTTPException(400, str(error)) from error
        except RuntimeError as error:
            raise HTTPException(503, str(error), {"Retry-After": str(RETRY_SECONDS)}) from error
        finally:
            if call.request_id is None:
                self.manager.output_router.result_handlers.pop(name, None)

    def _pictures(self, inputs: dict) -> dict[str, Tensor]:
        """What a processor returned besides ids; ValueError if it does not make tensors."""
        others = inputs.keys() - {"input_ids", "attention_mask"} - (set() if self._reads_pictures else TOKEN_TYPES)
        try:
            return {name: _as_tensor(inputs[name]) for name in others}
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"{', '.join(sorted(others))}: expected tensors, got another form: {error}") from error

    def active(self) -> int:
        """Requests that wait or run."""
        return self.manager.active_requests

    def stop(self) -> None:
        """End the manager; what still runs fails."""
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=10, hard_stop=True)
        if self.followers is not None:
            self.followers.stop()


def _as_tensor(values: Any) -> Tensor:
    """A tensor, an array, or lists of these or of numbers, as a tensor."""
    if isinstance(values, list | tuple) and values and not isinstance(values[0], int | float):
        return torch.stack([_as_tensor(value) for value in values])
    return torch.as_tensor(values)


class State(GenerationState):
    """transformers' state of generation, with one manager of ours for the one model."""

    requests: Requests

    def open(self, model: Any, slots: int | None, max_queue: int) -> None:
        """Make the manager, compile its rounds, and start it."""
        config = self._cb_config or ContinuousBatchingConfig()
        config.max_requests_per_batch, config.max_queue_size = slots, max_queue
        self.requests = Requests(model, config)

    def use_continuous_batching(self, model: Any, modality: Any) -> bool:
        """True, for every model."""
        return True

    def get_manager(self, model_id: str, use_cb: bool = False) -> Requests:
        """The manager of the one model."""
        return self.requests
