"""`Endpoint`: the one way of a request from its body to the manager, and of its answer to the client.

Endpoints run in the threads of `Workers` except while they wait. Streams are written on the event loop.
"""

import asyncio
import copy
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.models.auto import modeling_auto

from .answers import ReadAnswer, Thought, ToolCall
from .body import decode_body
from .call import CURRENT, HttpCall, Waiting, split_choices
from .errors import Refusal, error_object, noted, quoted, refuse
from .fields import Fields, check_fields, present
from .generation import Requests, flat_ids
from .logprobs import ChatLogprobs
from .loras import ServedAdapters
from .media import address_of, find_pictures
from .metrics import speculation_fields
from .models import LIMITS
from .prompts import ChatText, count_characters, for_template
from .settings import forbid, make_config, read_prediction, usage_details
from .tool_calls import read_tool_calls
from .tools import nested

BESIDE_PROMPT = ("chat_template_kwargs", "tools", "instructions")
"""Fields that chat templates read in addition to the messages."""


@dataclass
class Service:
    """The parts that endpoints share.

    requests: takes the requests for the one model
    adapters: knows the names that clients ask for
    variables: go to the chat template, unless a request says others
    """

    requests: Requests
    adapters: ServedAdapters
    variables: dict[str, Any] = field(default_factory=dict)
    since: int = field(default_factory=lambda: int(time.time()))

    def cards(self) -> list[dict]:
        """The model and its adapters, in OpenAI's and Anthropic's form, with vLLM's `root`, `parent` and
        `max_model_len`."""
        common = {
            "object": "model", "created": self.since, "owned_by": "spec_compile", "type": "model",
            "created_at": datetime.fromtimestamp(self.since, UTC).isoformat(),
            "max_model_len": self.requests.row_tokens, "context_length": self.requests.row_tokens,
        }  # fmt: skip
        cards = [{"id": self.adapters.base}, *self.adapters.cards()]
        return [card | {"display_name": card["id"]} | common for card in cards]

    def joins_texts(self) -> bool:
        """True if the content of a message is one text to the chat template, False if it is a list of parts."""
        name = type(self.requests.model.speculation.original).__name__
        others = (
            modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
            modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        )
        is_tokenizer = isinstance(self.requests.processor, PreTrainedTokenizerBase)
        return is_tokenizer or not any(name in mapping.values() for mapping in others)


class Endpoint:
    """One path of POST.

    fields: model of its body
    prompt_field: name of the field with the prompt
    generates: True if its requests wait for a row
    names: the client's names of fields that are called otherwise here
    """

    fields: type[Fields]
    prompt_field: str
    generates = True
    names: ClassVar[dict[str, str]] = {}

    def __init__(self, service: Service):
        self.service, self.requests = service, service.requests

    async def answer(self, request: Request) -> Response:
        """The answer to a request. Refusal if it cannot be served, before its body is read if there is no room."""
        requests = self.requests
        requests.admit(self.generates)
        try:
            async with requests.bodies.reading(request, requests.most_bytes) as data:
                requests.admit(self.generates)
                answering = self._answer(data)
                del data  # it may be large, and the answer may take long
                return await requests.workers.drive(answering)  # guard: event-loop
        except Refusal as refusal:
            refusal.rename(self.names)
            raise

    async def _answer(self, data: bytes) -> Response:
        call = CURRENT.get()
        body = decode_body(data, self.requests.most_containers)
        del data
        call.prompt_field = self.prompt_field
        call.fields = self._read(call, body)
        del body
        self._check(call)
        return await self._respond(call)

    def _read(self, call: HttpCall, body: dict) -> dict:
        """The checked fields of a body. Refusal that names a field that cannot be served."""
        return check_fields(self.fields, body, pictures=self.requests.reads_pictures)

    def _check(self, call: HttpCall) -> None:
        """Set the call's adapter. Refusal for another model, and for inputs that this one does not take."""
        requested = self._model(call)
        adapter = self.service.adapters.find(requested)
        if adapter is None:
            served = ", ".join(repr(card["id"]) for card in self.service.cards())
            reason = f"there is no model {requested[:200]!r} here, only {served}"
            raise refuse("model", reason, 404, "model_not_found")
        call.adapter = adapter

    def _model(self, call: HttpCall) -> str:
        """The name by which the client calls the model."""
        return call.fields.get("model", self.service.adapters.base)

    async def _respond(self, call: HttpCall) -> Response:
        """The answer to a checked request."""
        raise NotImplementedError

    def _check_size(self, characters: int) -> None:
        """Refuse a prompt that no row can hold."""
        most = self.requests.most_characters
        if characters > most:
            reason = f"expected at most {most} characters, because a row (max_new_tokens included) holds no more"
            raise refuse(self.prompt_field, f"{reason}; send a shorter one")

    def speculation(self, calls: Iterable[HttpCall]) -> dict:
        """The figures of complete choices."""
        return {"metrics": speculation_fields((call.output for call in calls), self.requests.num_spec_tokens)}


class Generating(Endpoint):
    """An endpoint that makes a prompt and generates.

    stream: class of its streams
    """

    stream: "type[Stream]"

    def _check(self, call: HttpCall) -> None:
        super()._check(call)
        if "prediction" in call.fields:
            call.prediction = read_prediction(call.fields["prediction"], self.requests)

    async def _respond(self, call: HttpCall) -> Response:
        await self._prepare(call)
        try:
            prompts = [*self._prompts(call)]
        except HTTPException:
            raise
        except Exception as error:
            is_told = isinstance(error, TemplateError)  # in the words of the template
            reason = quoted(error) if is_told else f"the log has the reason under error {noted(error)}"
            raise refuse(self._culprit(call), f"it cannot be made a prompt of: {reason}") from error
        if "truncate_prompt_tokens" in call.fields:
            prompts = [(self._cut(call, inputs), echo) for inputs, echo in prompts]
        call.is_prepared, call.pictures = True, {}
        self.requests.bodies.drop(call)
        return await self._generate(call, prompts)

    async def _prepare(self, call: HttpCall) -> None:
        """Get what the prompt needs."""

    def _cut(self, call: HttpCall, inputs: dict) -> dict:
        """The last tokens of a prompt, as `truncate_prompt_tokens` asks. -1: as many as leave room for the answer."""
        if inputs.keys() - {"input_ids", "attention_mask", "token_type_ids"}:
            raise refuse("truncate_prompt_tokens", "a prompt with pictures cannot be cut; leave it out")
        most, wanted = call.fields["truncate_prompt_tokens"], max(call.fields.get(name, 1) for name in LIMITS)
        most = max(1, self.requests.row_tokens - wanted) if most == -1 else most
        return {"input_ids": flat_ids(inputs["input_ids"])[-most:]}

    def _prompts(self, call: HttpCall) -> Iterator[tuple[dict, str | None]]:
        """The model's inputs for each prompt, and the text with which its answers begin, or None."""
        raise NotImplementedError

    def _culprit(self, call: HttpCall) -> str:
        """The field of which no prompt could be made."""
        return self.prompt_field

    async def _generate(self, call: HttpCall, prompts: list[tuple[dict, str | None]]) -> Response:
        """The answer of the model."""
        requests = self.requests
        config, call.limit_field = make_config(call.fields, requests.model.generation_config, requests.vocab_size)
        forbid(config, call.fields.get("bad_words", []), requests.tokenizer)
        calls = split_choices(call, prompts, requests.max_queue)
        for each in calls:
            each.logprobs = self._logprobs(each)
        if call.fields.get("stream"):
            pieces: asyncio.Queue = asyncio.Queue()
            for each in calls:
                requests.stream(each, copy.copy(config), pieces, self._parser(each))
            return StreamingResponse(self.stream(self, call).events(pieces), media_type="text/event-stream")
        futures = [requests.ask(each, copy.copy(config)) for each in calls]
        outputs = [await Waiting(future) for future in futures]
        answers = [requests.read(each, output, self._parser(each)) for each, output in zip(calls, outputs)]
        return JSONResponse(self._whole(call, answers))

    def _parser(self, call: HttpCall) -> Any:
        """The parser of a choice, or None for text."""
        return None

    def _logprobs(self, call: HttpCall) -> ChatLogprobs | None:
        """The log-probabilities of a choice that wants some."""
        return None

    def _whole(self, call: HttpCall, answers: list[ReadAnswer]) -> dict:
        """The body of a complete answer. answers: of each choice"""
        raise NotImplementedError


class Templated(Generating):
    """An endpoint whose prompt is made by the chat template."""

    def __init__(self, service: Service):
        super().__init__(service)
        self._joins_texts = service.joins_texts()

    def _messages(self, fields: dict) -> list[dict]:
        """The messages of a chat, of checked fields."""
        return fields["messages"]

    def _check(self, call: HttpCall) -> None:
        super()._check(call)
        fields, processor = call.fields, self.requests.processor
        template = getattr(processor, "chat_template", None)
        if template is None:
            raise refuse(self.prompt_field, "the model has no chat template; use /v1/completions")
        if fields.get("tool_choice") == "none" or not nested(fields.get("tools", [])):
            fields.pop("tools", None)
        elif "tools" not in str(template):  # guard: tools
            raise refuse("tools", "the model's chat template takes no tools; leave them out")
        for name in fields.get("chat_template_kwargs", {}):
            if name not in ChatText.of(processor).variables:  # guard: template-variables
                raise refuse(f"chat_template_kwargs.{name[:80]}", "the model's chat template has no such variable")
        call.tool_calls = read_tool_calls(fields, processor, self.requests.model)
        shown = sum(len(address_of(part)) for _, part in find_pictures(fields[self.prompt_field], self.prompt_field))
        texts = [fields.get(name) for name in (self.prompt_field, *BESIDE_PROMPT)]
        self._check_size(count_characters(texts) - shown)

    async def _prepare(self, call: HttpCall) -> None:
        """Load the pictures, and find a sign for control tokens in the client's texts."""
        prompt = call.fields[self.prompt_field]
        call.pictures = await self.requests.policy.media.load([*find_pictures(prompt, self.prompt_field)])
        beside = [call.fields.get(name) for name in BESIDE_PROMPT]
        call.sign = ChatText.of(self.requests.processor).sign(prompt, beside)

    def _prompts(self, call: HttpCall) -> Iterator[tuple[dict, str | None]]:
        yield self._render(call, call.fields, tokenize=True, return_dict=True), None

    def _render(self, call: HttpCall, fields: dict, **options: Any) -> Any:
        """Apply the chat template to these fields. Control tokens in the client's texts are broken."""
        processor = self.requests.processor
        knows_developers = "developer" in str(processor.chat_template)
        messages = for_template(self._messages(fields), self._joins_texts, knows_developers, call.pictures)
        tools, variables = nested(fields.get("tools", [])) or None, fields.get("chat_template_kwargs", {})
        if call.sign:
            texts = ChatText.of(processor)
            messages = [texts.broken_message(each, call.sign) for each in messages]
            tools, variables = texts.broken(tools, call.sign), texts.broken(variables, call.sign)
        if "reasoning_effort" in fields and "reasoning_effort" in ChatText.of(processor).variables:
            variables = {"reasoning_effort": fields["reasoning_effort"]} | variables
        variables = self.service.variables | variables
        continues = fields.get("continue_final_message", False)
        begins = fields.get("add_generation_prompt", not continues)
        variables |= {"add_generation_prompt": begins, "continue_final_message": continues}
        return processor.apply_chat_template(messages, tools=tools, **options, **variables)

    def _culprit(self, call: HttpCall) -> str:
        """The field without which the chat template, which has failed, makes a prompt; else the prompt's."""
        if not self._is_rendered(call, call.fields):
            for name, others in self._lacking(call.fields):
                if self._is_rendered(call, others):
                    return name
        return self.prompt_field

    def _lacking(self, fields: dict) -> Iterator[tuple[str, dict]]:
        """Each field that the template reads in addition to the messages, and the fields without it."""
        for name in present(BESIDE_PROMPT, fields):
            yield name, {other: value for other, value in fields.items() if other != name}

    def _is_rendered(self, call: HttpCall, fields: dict) -> bool:
        try:
            self._render(call, fields, tokenize=False)
        except Exception:  # a template may raise anything
            return False
        return True

    def _parser(self, call: HttpCall) -> Any:
        return self.requests.parser(call, nested(call.fields.get("tools", [])))


class Stream:
    """Writes the events of an answer.

    endpoint: answers the request
    call: is the request
    """

    def __init__(self, endpoint: Any, call: HttpCall):
        self.endpoint, self.call = endpoint, call
        self.model = endpoint._model(call)

    async def events(self, pieces: asyncio.Queue) -> AsyncIterator[str]:
        """The events; those that can be written at the same time come as one text. An error in a choice ends all.

        pieces: pairs of a choice and an item, see `Streamer`
        """
        if begun := self.begin():
            yield begun
        left, made = len(self.call.choices), []
        while left:
            ready = [await pieces.get()]
            while not pieces.empty():
                ready.append(pieces.get_nowait())
            for choice, item in ready:
                if isinstance(item, Refusal):
                    yield "".join([*made, self.error(item)])
                    return
                left -= item is None
                made.append(self.end(choice, left == 0) if item is None else self.write(choice, item))
            if text := "".join(made):
                yield text
            made = []

    def begin(self) -> str:
        """The events before the first item."""
        return ""

    def write(self, choice: HttpCall, item: str | Thought | ToolCall) -> str:
        """The events of an item."""
        raise NotImplementedError

    def end(self, choice: HttpCall, is_last: bool) -> str:
        """The events after the last item of a choice. is_last: True if all choices are complete"""
        raise NotImplementedError

    def error(self, refusal: Refusal) -> str:
        """The last event of an answer that has failed."""
        return event({"error": error_object(refusal)})


def event(data: dict) -> str:
    """A server-sent event."""
    return f"data: {json.dumps(data)}\n\n"


def usage_of(calls: list[HttpCall], n: int = 1) -> dict:
    """The usage of complete choices: of the prompt of each n choices once, and of all answers."""
    prompt = sum(call.prompt_length for call in calls[::n])
    answer = sum(len(call.output.generated_tokens) for call in calls)
    cached = sum(call.output.speculation.reused_prompt_tokens for call in calls[::n])
    usage: dict[str, Any] = {
        "prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
    details: Counter[str] = Counter()
    for call in calls if calls[0].prediction is not None else ():
        details.update(usage_details(call.prediction, call.output.generated_tokens, call.output.speculation))
    return usage | ({"completion_tokens_details": {**details}} if calls[0].prediction is not None else {})
