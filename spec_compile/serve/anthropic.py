"""Anthropic's Messages API over the handler of chats: POST /v1/messages and POST /v1/messages/count_tokens."""

import json
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from .answers import ReadAnswer, Thought, ToolCall
from .anthropic_fields import RENAMED, to_chat
from .call import HttpCall
from .endpoint import Stream, usage_of
from .errors import Refusal, error_message
from .fields import check_fields, read_object
from .generation import flat_ids
from .handlers import Chat, called, finish_reason
from .models import ChatFields

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's reasons for the end of an answer, by OpenAI's."""


def _usage(prompt: int, answer: int = 0, cached: int = 0) -> dict:
    """The tokens of a message; `input_tokens` leaves out what was in the cache. prompt: all of the prompt"""
    read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"input_tokens": prompt - cached, "output_tokens": answer} | read


def _used(choice: HttpCall) -> dict:
    """The usage of a complete answer."""
    usage = usage_of([choice])
    return _usage(usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def _message(call: HttpCall, model: str, content: list, reason: dict, usage: dict) -> dict:
    """An object of Anthropic's type message. reason: of its end"""
    head = {"id": f"msg_{call.http_id}", "type": "message", "role": "assistant", "model": model, "content": content}
    return head | reason | {"usage": usage}


def _reason(choice: HttpCall, has_calls: bool) -> dict[str, str | None]:
    """The fields with the reason of the end."""
    reason = finish_reason(choice, has_calls)
    if reason == "stop" and choice.cut.found is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.cut.found}
    return {"stop_reason": REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _blocks(call: HttpCall, answer: ReadAnswer) -> list[dict]:
    """The content of an answer."""
    blocks: list[dict] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content})
    for number, item in enumerate(answer.calls):
        name, given = called(call, item, number)["id"], read_object(item.arguments)
        given = {"arguments": item.arguments} if given is None else given  # the model has written no JSON object
        blocks.append({"type": "tool_use", "id": name, "name": item.name, "input": given})
    return blocks


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name} | fields)}\n\n"


class MessageStream(Stream):
    """The events of a message. Its blocks come in order; each is closed before the next one begins."""

    def __init__(self, endpoint: Any, call: HttpCall):
        super().__init__(endpoint, call)
        self._index, self._open, self._calls = -1, "", 0

    def begin(self) -> str:
        (choice,) = self.call.choices
        reason = {"stop_reason": None, "stop_sequence": None}
        begun = _message(self.call, self.model, [], reason, _usage(choice.prompt_length))
        return _event("message_start", message=begun) + _event("ping")

    def write(self, choice: HttpCall, item: str | Thought | ToolCall) -> str:
        """The events of an item. A call is a block; a text goes on with an open block of its type."""
        if isinstance(item, ToolCall):
            number = called(self.call, item, self._calls)["id"]
            self._calls += 1
            block: dict[str, Any] = {"type": "tool_use", "id": number, "name": item.name, "input": {}}
            return self._add(block, {"type": "input_json_delta", "partial_json": item.arguments}, is_new=True)
        kind = "thinking" if isinstance(item, Thought) else "text"
        block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return self._add(block, {"type": f"{kind}_delta", kind: item})

    def _add(self, block: dict, delta: dict, is_new: bool = False) -> str:
        """A part of a block. block: how the block begins. is_new: True if the part begins a block in any case."""
        begun = ""
        if is_new or self._open != block["type"]:
            begun = self._close()
            self._index, self._open = self._index + 1, block["type"]
            begun += _event("content_block_start", index=self._index, content_block=block)
        return begun + _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> str:
        """The end of the open block, if there is one."""
        signature = {"type": "signature_delta", "signature": ""}
        ended = ""
        if self._open == "thinking":
            ended = _event("content_block_delta", index=self._index, delta=signature)
        if self._open:
            ended += _event("content_block_stop", index=self._index)
        self._open = ""
        return ended

    def end(self, choice: HttpCall, is_last: bool) -> str:
        """The last events, with the reason of the end and the usage."""
        delta = _reason(choice, self._calls > 0)
        last = _event("message_delta", delta=delta, usage=_used(choice), **self.endpoint.speculation([choice]))
        return self._close() + last + _event("message_stop")

    def error(self, refusal: Refusal) -> str:
        return _event("error", error=error_message(refusal)["error"])


class MessagesEndpoint(Chat):
    """POST /v1/messages."""

    stream, counts_only, names = MessageStream, False, RENAMED

    async def answer(self, request: Request) -> Response:
        """The answer to a request, with its id in Anthropic's header, too."""
        response = await super().answer(request)
        response.headers["request-id"] = request.state.request_id
        return response

    def _read(self, call: HttpCall, body: dict) -> dict:
        template = str(getattr(self.requests.processor, "chat_template", None) or "")
        pictures, thinks = self.requests.reads_pictures, self.requests.thinking.is_able
        chat = to_chat(body, template, pictures, thinks, self.counts_only)
        call.clamps_limit = True  # clients send the most that some model can write, such as 32000
        chat["user"] = (body.get("metadata") or {}).get("user_id")
        return check_fields(ChatFields, chat, pictures=pictures)

    def _lacking(self, fields: dict) -> Iterator[tuple[str, dict]]:
        yield from super()._lacking(fields)
        if fields["messages"][0]["role"] == "system":
            yield "system", fields | {"messages": fields["messages"][1:]}

    def _whole(self, call: HttpCall, answers: list[ReadAnswer]) -> dict:
        ((answer, choice),) = zip(answers, call.choices)
        reason = _reason(choice, bool(answer.calls))
        message = _message(call, self._model(call), _blocks(call, answer), reason, _used(choice))
        return message | self.speculation([choice])


class TokenCounts(MessagesEndpoint):
    """POST /v1/messages/count_tokens. It makes the prompt and generates nothing."""

    counts_only, generates = True, False

    async def _generate(self, call: HttpCall, prompts: list[tuple[dict, str | None]]) -> Response:
        ((inputs, _),) = prompts
        return JSONResponse({"input_tokens": len(flat_ids(inputs["input_ids"]))})
