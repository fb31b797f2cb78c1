"""`Requests`, between the handlers of HTTP requests and the manager: it adds requests and gives out answers."""

import asyncio
import copy
import queue
import random
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestStatus

from ..batching.output import Output
from ..batching.request_options import TokenBytes
from ..capture.admit import reads_pictures
from ..runtime.prompt import TOKEN_TYPES
from .answers import FreeParser, ReadAnswer, StopCut, items_of, read_answer, response_template
from .body import Bodies
from .call import HttpCall, Workers
from .door import Policy
from .errors import DEAD, Refusal, failed, quoted, refuse, shown
from .followers import Followers
from .grammars import GrammarCache, read_form
from .infill_tokens import InfillTokens
from .logprobs import check_told, read_top
from .metrics import PrometheusMetrics
from .settings import BUDGET, AllowedTokens, CountPenalties, ThinkingReader, check_ids, end_of, reference_of
from .shadow import Answered, Shadow

FULL = "the queue is full; try again later"
MOST_UNREAD = 4096
"""Pieces of text that may wait for a slow client; then its request is cancelled."""
LONGEST_ROUND = 30.0
"""Seconds without the end of a round, while rows are active, after which the server counts as unhealthy."""
MOST_BYTES, BYTES_A_TOKEN, PICTURE_BYTES = 1 << 20, 32, 64 << 20
"""Bytes that a body may have are the sum of: a fixed part, a part for each token of a row, and a part for pictures."""
ENDING = 64
"""Tokens at the end of a prompt that are read, to see if the model is thinking."""
MOST_CONTAINERS = 50_000
"""Lists and objects that a body may have, in addition to two for each token of a row."""


class Streamer:
    """Turns the tokens of a choice into what a client sees: texts, `Thought`s, `ToolCall`s, a Refusal; None at the end.

    All tokens of a round become one piece of text. The first piece is the prompt if the call echoes it. Text that may
    be the beginning of a stop string waits.

    pieces: takes pairs of the choice and the item
    parser: reads the answer; None if all of it is text
    """

    def __init__(self, call: HttpCall, tokenizer: Any, pieces: asyncio.Queue, parser: Any):
        self._call, self._tokenizer, self._pieces, self._parser = call, tokenizer, pieces, parser
        self._skips = call.skips_special_tokens(parser)
        self._decoder = DecodeStream([], skip_special_tokens=self._skips)
        self._is_partial, self._is_begun = False, False
        self._told, self._length = 0, 0  # tokens, and characters of all of them

    def put(self, item: Any) -> None:
        """Give an item out."""
        self._pieces.put_nowait((self._call, item))

    def take(self, output: Output) -> None:
        """Take the new tokens of an output."""
        scores = self._call.logprobs
        if not self._is_begun and output.error is None:
            self._begin(output)
        if scores is not None:
            scores.add(output.scores[self._told :])
        text = self._call.cut.feed(self._text(output)) + (self._call.cut.rest() if output.is_finished() else "")
        if text:
            for item in [text] if self._parser is None else items_of(self._parser.feed(text)):
                self.put(item)
                if scores is not None:
                    scores.end_chunk()

    def _begin(self, output: Output) -> None:
        """The echoed prompt, and what the prompt has begun already."""
        self._is_begun = True
        if self._call.echo is not None:
            self.put(self._call.echo)
            if self._call.logprobs is not None:
                self._call.logprobs.add_prompt(output)
        for item in [] if self._parser is None or self._call.continues else items_of(self._parser.initial_events):
            self.put(item)

    def _text(self, output: Output) -> str:
        """The text of the new tokens."""
        tokens = output.generated_tokens[self._told :]
        self._told = len(output.generated_tokens)
        pieces = [self._decoder.step(self._tokenizer._tokenizer, token) for token in tokens]
        if pieces:
            self._is_partial = pieces[-1] is None  # the token does not end a character, or is not text
        text = "".join(filter(None, pieces))
        if output.is_finished() and self._is_partial:
            answer = self._tokenizer.decode(output.generated_tokens, skip_special_tokens=self._skips)
            text += answer[self._length + len(text) :]
        self._length += len(text)
        return text

    def end(self) -> None:
        """Give out the end. A call that is cut off is left out."""
        if self._parser is not None:
            with suppress(ValueError, RuntimeError):
                for item in items_of(self._parser.finalize()[1]):
                    self.put(item)
        self.put(None)


class Requests:
    """Puts requests of handlers into the manager, each with its own settings, and gives out their answers."""

    def __init__(self, model: Any, processor: Any, config: ContinuousBatchingConfig):
        """processor: the model's processor or tokenizer."""
        self.model, self.processor = model, processor
        self.manager = model.init_continuous_batching(continuous_batching_config=config)
        runtime = model.speculation.engine.runtime
        self.num_spec_tokens: int = runtime.sizes[-1] - 1
        self.vocab_size: int = runtime.verify.vocab_size
        self.embedded: int = runtime.verify.embedded
        self._clamps_prompts: bool = runtime.verify.clamps_prompts
        self.chooses_adapters = model.speculation.engine.loras is not None
        self.has_ngrams = runtime.algorithm.store is not None
        self.shadow = Shadow(self.manager)
        self.metrics = PrometheusMetrics(self.manager.metrics, self.shadow)
        self.row_tokens: int = self.manager.metrics()["slot_tokens"]
        self.most_unread, self.max_queue = MOST_UNREAD, config.max_queue_size
        self.reads_pictures, self.policy = reads_pictures(model.speculation.original, "image"), Policy()
        self.most_bytes = MOST_BYTES + BYTES_A_TOKEN * self.row_tokens + PICTURE_BYTES * self.reads_pictures
        self.bodies = Bodies(self.most_bytes)
        self.most_containers = MOST_CONTAINERS + 2 * self.row_tokens
        self.tokenizer, self.workers = getattr(processor, "tokenizer", processor), Workers()
        self.most_characters = self.row_tokens * max(map(len, self.tokenizer.get_vocab()))
        ends = model.generation_config.eos_token_id
        self.grammars = GrammarCache(self.tokenizer, self.vocab_size, ends, self.workers.waits)
        self.thinking = ThinkingReader(self.tokenizer, self.vocab_size)
        self.infill = InfillTokens.of(self.tokenizer)
        self.is_draining = False
        self.followers: Followers | None = None
        self.manager.warmup()
        self.manager.start()

    @cached_property
    def bytes_of(self) -> Callable[[int], bytes]:
        """The bytes that a token stands for."""
        return TokenBytes(self.tokenizer).of

    def is_alive(self) -> bool:
        """True while the manager's thread and the processes of all ranks work."""
        return self._death() is None

    def _death(self) -> str | None:
        """The reason for clients why the server cannot go on; None while the worker and the ranks live."""
        if self.manager.background_thread_status.fatal_error is not None:
            return DEAD
        return None if self.followers is None else self.followers.ailment()

    def ailment(self) -> str | None:
        """The reason why the server cannot answer now, or None."""
        if death := self._death():
            return death
        if self.is_draining:
            return "the server is ending"
        stalled = self.manager.stalled_seconds()
        if stalled > LONGEST_ROUND:
            return f"requests are active, but no round has ended for {stalled:.0f} seconds"
        return None

    def admit(self, generates: bool = True) -> None:
        """Refuse a request if the server cannot answer, or if as many are being prepared, or wait, as may wait."""
        if ailment := self.ailment():
            raise Refusal(503, ailment, retries=True)
        if not self.workers.has_room(self.max_queue) or (generates and self.manager.queue_room == 0):
            self.manager.metrics.reject("queue_full")
            raise Refusal(429, FULL, code="queue_full", retries=True)

    def stream(self, call: HttpCall, config: GenerationConfig, pieces: asyncio.Queue, parser: Any = None) -> None:
        """Add the request of a choice, whose items go into `pieces`; see `Streamer`. Refusal if it cannot be taken."""
        streamer = Streamer(call, self.tokenizer, pieces, parser)

        def take(output: Output) -> None:
            try:
                streamer.take(output)
                if output.finish_reason in ("error", "cancelled"):
                    streamer.put(end_of(output, call.fields, self._death()))
                elif output.is_finished():
                    streamer.end()
                elif pieces.qsize() > self.most_unread:
                    self.manager.cancel_request(call.request_id)
            except Exception as error:  # raised by the parser; it ends this request and not the event loop
                streamer.put(Refusal(500, failed(error)))
                self.manager.cancel_request(call.request_id)

        self._add(call, config, take, streaming=True)

    def ask(self, call: HttpCall, config: GenerationConfig) -> asyncio.Future:
        """Add the request of a choice. The future is done with its answer. Refusal if the request cannot be taken."""
        future = call.loop.create_future()

        def take(output: Output) -> None:
            if not future.done():  # it is done once the client has left
                future.set_result(output)

        self._add(call, config, take, streaming=False)
        return future

    def read(self, call: HttpCall, output: Output, parser: Any = None) -> ReadAnswer:
        """The parts of a complete choice. Refusal if it has failed. parser: see `Streamer`"""
        if output.error is not None:
            raise end_of(output, call.fields, self._death())
        text = self.tokenizer.decode(output.generated_tokens, skip_special_tokens=call.skips_special_tokens(parser))
        text = call.cut.whole(text)
        return ReadAnswer(text) if parser is None else read_answer(parser, text, call.continues)

    def parser(self, call: HttpCall, tools: list[dict] | None) -> Any:
        """The parser of a chat's answer; None if the form of the model's answers is not known, or if the client wants
        the special tokens and has no tools: then the answer is one text.

        tools: the request has these, in the form of chats
        """
        if not call.fields.get("skip_special_tokens", True) and not tools:
            return None
        prompt = self.tokenizer.decode(flat_ids(call.inputs["input_ids"]))
        template = response_template(self.processor, self.model)
        held = call.tool_calls and call.tool_calls.parser(prompt)
        return held or (None if template is None else FreeParser(template, prefix=prompt, tools=tools))

    def _add(self, call: HttpCall, config: GenerationConfig, take: Callable, streaming: bool) -> None:
        """Add a request to the manager, whose outputs go to `take` on the event loop. Refusal if it cannot be taken.

        The call keeps only the ids of its inputs.
        """
        inputs, name = call.inputs, uuid.uuid4().hex
        ids = flat_ids(inputs["input_ids"])
        call.inputs = {"input_ids": ids}
        handlers = self.manager.output_router.result_handlers

        def observe(output: Any) -> None:
            call.output = output
            if output.is_finished():
                handlers.pop(name, None)
                self.metrics.observe(output)
                if asked is not None and output.error is None and output.finish_reason in ("stop", "length"):
                    self.shadow.take(replace(asked, tokens=[*output.generated_tokens]))
            if call.drops_answer:
                call.output = output = replace(output, generated_tokens=[], scores=[], finish_reason="length")
            take(output)

        start = ids[:1] if self.model.config.is_encoder_decoder else ids  # as long as the prompt of a decoder
        self._check_room(call, start, config)
        common = self._pictures(inputs) | {"tokenizer": self.tokenizer, "stops_in_prompt": False}
        common |= {"adapter_name": call.adapter} if self.chooses_adapters else {}
        options, seed, asked = self._options(call, start, config) | common, call.fields.get("seed"), None
        if self.shadow.wants() and config.max_time is None:
            seed = random.getrandbits(63) if seed is None else seed
            kept = copy.deepcopy(config)
            asked = Answered(call, ids, [], seed, kept, lambda: self._options(call, start, config) | common)
        options |= call.belonging(self.policy.share_texts, self.policy.isolate_prefixes)
        call.cut = self._cut(call, config)
        call.request_id, is_added = name, False
        handlers[name] = (observe, call.loop)  # the manager's own method needs to be called on the event loop
        try:
            if call.is_gone:
                raise Refusal(400, "the client has left")
            self.policy.media.hold(name, options.values(), handlers)
            self.manager.add_request(
                ids, name, streaming=streaming, record_timestamps=True, generation_config=config, seed=seed,
                speculation=call.fields.get("speculation"), **options,
            )  # fmt: skip
            is_added = True
        except queue.Full as error:
            raise Refusal(429, f"{FULL} ({error})", code="queue_full", retries=True) from error
        except (ValueError, TypeError) as error:
            raise Refusal(400, quoted(error)) from error
        except RuntimeError as error:
            if ailment := self.ailment() or self.manager.background_thread_status.can_accept_new_requests():
                raise Refusal(503, ailment, retries=True) from error
            raise
        finally:
            if not is_added:
                call.request_id = None
                handlers.pop(name, None)
        if call.is_gone:  # it left while the request was added, when there was nothing to cancel  # guard: early-leaver
            self.manager.cancel_request(name)

    def _cut(self, call: HttpCall, config: GenerationConfig) -> StopCut:
        """Ends the text at the stop strings of a request, or else of the model."""
        stops = config.stop_strings if config.stop_strings is not None else self.manager.generation_config.stop_strings
        stops = [stops] if isinstance(stops, str) else stops or []
        return StopCut(stops, call.fields.get("include_stop_str_in_output", False))

    def _check_room(self, call: HttpCall, ids: list[int], config: GenerationConfig) -> None:
        """Set how many tokens the request may have; Refusal, before any memory is taken, if a row has no room."""
        if not ids:
            raise refuse(call.prompt_field, "expected at least one token, got none")
        check_ids(call.prompt_field, ids, self.embedded)
        room = self.row_tokens - len(ids)
        if room < 1:
            reason = f"{len(ids)} tokens leave no room for a new one (max_new_tokens) in a row of {self.row_tokens}"
            raise refuse(call.prompt_field, f"{reason}; send a shorter one")
        if config.max_new_tokens is not None and (call.limit_field is None or call.clamps_limit):
            config.max_new_tokens = min(config.max_new_tokens, room)
        elif config.max_new_tokens is None:
            config.max_new_tokens, config.max_length = config.max_length - len(ids), None
            if config.max_new_tokens < 1:
                raise refuse(call.limit_field, f"the prompt has {len(ids)} tokens already; ask for more")
        if config.max_new_tokens > room:  # guard: limit-comes-first
            reason = f"a prompt of {len(ids)} tokens and {shown(config.max_new_tokens)} new ones (max_new_tokens)"
            reason = f"{reason} do not fit in a row of {self.row_tokens}; ask for at most {room}"
            raise refuse(call.limit_field or call.prompt_field, reason)
        if len(call.prediction or []) > room:
            reason = f"{len(call.prediction)} tokens are more than a row of {self.row_tokens} holds after a prompt of"
            raise refuse("prediction", f"{reason} {len(ids)}; send a shorter one")
        least = max(config.min_new_tokens or 0, (config.min_length or 0) - len(ids))
        if least > config.max_new_tokens:
            field = "min_tokens" if "min_tokens" in call.fields else "generation_config"
            raise refuse(field, f"at least {least} new tokens are more than {config.max_new_tokens}")

    def _options(self, call: HttpCall, ids: list[int], config: GenerationConfig) -> dict[str, Any]:
        """Options of `add_request` in addition to the config: processors for penalties and for the answer's form, a
        reference, and numbers of log-probabilities."""
        options: dict[str, Any] = {"reference": reference_of(ids, call.prediction)} if call.prediction else {}
        if call.logprobs is not None:
            options["logprobs"] = top = read_top(call.fields)
            if call.echo is not None:
                if self._clamps_prompts:
                    raise refuse("echo", "the model processes prompts unlike answers, so it has no logprobs of prompts")
                options["prompt_logprobs"] = top
            check_told(call, top, config.max_new_tokens + (len(ids) if call.echo is not None else 0), self.row_tokens)
        processors: list[Any] = []
        penalties = [call.fields.get(name, 0) for name in ("frequency_penalty", "presence_penalty")]
        if any(penalties):
            processors.append(CountPenalties(len(ids), *penalties))
        if "allowed_token_ids" in call.fields:
            processors.append(AllowedTokens(call.fields["allowed_token_ids"]))
        form, grammar = self._form(call, ids), None
        if form is not None:
            if config.min_new_tokens or config.min_length:  # they forbid the end, which may be all that the form allows
                field = "min_tokens" if "min_tokens" in call.fields else "generation_config"
                raise refuse(field, f"{form[0]} decides where the answer ends; leave out one of them")
            grammar = self.grammars.processor(*form)
        grammar = self.thinking.processor(call.fields, grammar)
        processors += [] if grammar is None else [grammar]
        return options | {"logits_processor": processors} if processors else options

    def _form(self, call: HttpCall, ids: list[int]) -> tuple | None:
        """The arguments of `GrammarCache.processor`, or None for free text. ids: of the prompt"""
        form, calls = read_form(call.fields), call.tool_calls
        if calls is None or (form is not None and not calls.required):  # an answer in a form has no calls
            return form
        if form is not None:
            raise refuse("tool_choice", f"{form[0]} asks for a form, too; give one of them")
        if BUDGET in call.fields:
            raise refuse(BUDGET, "tools that bind the answer cannot tell where thinking ends; leave one out")
        return calls.grammar(self.tokenizer.decode(ids[-ENDING:]))

    def _pictures(self, inputs: dict) -> dict[str, Tensor]:
        """The outputs of a processor other than ids, as tensors. Refusal if they cannot be tensors."""
        others = inputs.keys() - {"input_ids", "attention_mask"} - (set() if self.reads_pictures else TOKEN_TYPES)
        try:
            return {name: _as_tensor(inputs[name]) for name in others}
        except (RuntimeError, TypeError, ValueError) as error:
            raise Refusal(400, f"{', '.join(sorted(others))}: expected tensors, got another form") from error

    def active(self) -> int:
        """Requests that wait or run."""
        return self.manager.active_requests

    def stop(self) -> None:
        """End the manager. Every request that it has not answered ends in an error."""
        self.is_draining = True
        self.shadow.close()
        if self.manager.is_running():
            self.manager.stop(block=True, timeout=10, hard_stop=True)
        self.end_all(self._death() or "the server was stopped")
        if self.followers is not None:
            self.followers.stop()

    def end_all(self, reason: str) -> None:
        """End by an error all requests that are still open."""
        for name, (take, loop) in [*self.manager.output_router.result_handlers.items()]:
            output = Output(name, error=reason, status=RequestStatus.FAILED, finish_reason="error", error_status=500)
            with suppress(RuntimeError):  # its event loop is closed
                loop.call_soon_threadsafe(take, output)


def flat_ids(ids: list) -> list[int]:
    """The ids of one text. A processor returns a list for each text."""
    return ids[0] if len(ids) == 1 and isinstance(ids[0], list) else ids


def _as_tensor(values: Any) -> Tensor:
    """A tensor made of a tensor, an array, or lists of them or of numbers."""
    if isinstance(values, list | tuple) and values and not isinstance(values[0], int | float):
        return torch.stack([_as_tensor(value) for value in values])
    return torch.as_tensor(values)
