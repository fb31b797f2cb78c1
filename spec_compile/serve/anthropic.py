"""Anthropic's Messages API over the handler of chats: POST /v1/messages and POST /v1/messages/count_tokens."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.utils import CBWorkerDeadError

from .anthropic_fields import renamed, to_chat
from .call import CURRENT, HttpCall
from .errors import DEAD, ERROR, MESSAGES, Refusal, error_message, failed
from .fields import CHAT, check_fields
from .generation import flat_ids
from .handlers import DONE, Chat

COUNT_TOKENS = f"{MESSAGES}/count_tokens"
REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
"""Anthropic's reasons for the end of an answer, by OpenAI's."""


class Messages(Chat):
    """POST /v1/messages."""

    counts_only = False

    def _read(self, body: dict) -> dict:
        _, _, processor = self._resolve_model({})
        template = str(getattr(processor, "chat_template", None) or "")
        chat = to_chat(body, template, self._modality(), self.counts_only)
        chat["user"] = (body.get("metadata") or {}).get("user_id")
        if chat.get("stream"):
            chat["stream_options"] = {"include_usage": True}
        return check_fields(chat, CHAT, "messages")

    def _check(self, body: dict) -> dict:
        begins = body["messages"][0]["role"] == "system"
        return super()._check(body) | ({"system": body["messages"][0]["content"]} if begins else {})

    def _without(self, name: str, body: dict) -> dict:
        return body | {"messages": body["messages"][1:]} if name == "system" else super()._without(name, body)

    def _streaming(self, *args: Any, **kwargs: Any) -> StreamingResponse:
        request_id, _, _, model, inputs = args[:5]
        response = super()._streaming(*args, **kwargs)
        begun = _message(request_id, model, [], None, None, len(flat_ids(inputs["input_ids"])), 0)
        response.body_iterator = as_events(response.body_iterator, begun, CURRENT.get())
        return response

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        request_id, _, _, model = args[:4]
        answer = json.loads((await super()._non_streaming(*args, **kwargs)).body)
        (choice,), usage = answer["choices"], answer["usage"]
        content = _blocks(choice["message"])
        reason, stop = _reason(choice["finish_reason"], CURRENT.get())
        sizes = usage["prompt_tokens"], usage["completion_tokens"]
        message = _message(request_id, model, content, reason, stop, *sizes)
        return JSONResponse(message | {"metrics": answer["metrics"]})


class TokenCounts(Messages):
    """POST /v1/messages/count_tokens. It makes the prompt and generates nothing."""

    counts_only, generates = True, False

    async def _non_streaming(self, *args: Any, **kwargs: Any) -> JSONResponse:
        return JSONResponse({"input_tokens": len(flat_ids(args[4]["input_ids"]))})


def _message(
    request_id: str, model: str, content: list, reason: str | None, stop: str | None, prompt: int, answer: int
) -> dict:
    """An object of Anthropic's type message. prompt, answer: numbers of tokens."""
    return {
        "id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model, "content": content,
        "stop_reason": reason, "stop_sequence": stop, "usage": {"input_tokens": prompt, "output_tokens": answer},
    }  # fmt: skip


def _reason(finish_reason: str, call: HttpCall) -> tuple[str, str | None]:
    """The fields `stop_reason` and `stop_sequence`."""
    if finish_reason == "stop" and call.cut.found is not None:
        return "stop_sequence", call.cut.found
    return REASONS.get(finish_reason, "end_turn"), None


def _blocks(message: dict) -> list[dict]:
    """The content of an answer, of OpenAI's message."""
    blocks: list[dict] = []
    if thoughts := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if text := message.get("content"):
        blocks.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or []:
        name, arguments = call["function"]["name"], _arguments(call["function"]["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
    return blocks


def _arguments(text: str) -> dict:
    """The arguments of a call. If the model has written no JSON object, they are its text under `arguments`."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _event(name: str, **fields: Any) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name} | fields)}\n\n"


class ContentEvents:
    """The events of an answer's blocks, in order; each block is closed before the next one begins."""

    def __init__(self) -> None:
        self._index, self._open, self._call = -1, "", -1

    def add(self, block: dict, delta: dict, is_new: bool = False) -> Iterator[str]:
        """A part of a block. block: how the block begins. is_new: True if the part begins a block in any case."""
        if is_new or self._open != block["type"]:
            yield from self.close()
            self._index, self._open = self._index + 1, block["type"]
            yield _event("content_block_start", index=self._index, content_block=block)
        yield _event("content_block_delta", index=self._index, delta=delta)

    def text(self, text: str) -> Iterator[str]:
        """A part of a text."""
        if text:
            yield from self.add({"type": "text", "text": ""}, {"type": "text_delta", "text": text})

    def thinking(self, text: str) -> Iterator[str]:
        """A part of the thinking."""
        if text:
            start = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self.add(start, {"type": "thinking_delta", "thinking": text})

    def call(self, call: dict) -> Iterator[str]:
        """A call of a tool, or a part of one: `index` tells calls apart, and the first part has the name."""
        function, index = call.get("function") or {}, call["index"]
        start = {"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": {}}
        delta = {"type": "input_json_delta", "partial_json": function.get("arguments") or ""}
        is_new, self._call = index != self._call, index
        yield from self.add(start, delta, is_new)

    def close(self) -> Iterator[str]:
        """The end of the open block, if there is one."""
        if self._open == "thinking":
            yield _event("content_block_delta", index=self._index, delta={"type": "signature_delta", "signature": ""})
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""


async def as_events(chunks: AsyncIterator[str], begun: dict, call: HttpCall) -> AsyncIterator[str]:
    """Anthropic's events for the chunks of a chat, the last of which has the usage.

    begun: the message before its content
    """
    yield _event("message_start", message=begun) + _event("ping")
    content, reason = ContentEvents(), None
    async for several in chunks:
        events: list[str] = []
        for line in filter(None, several.replace(DONE, "").split("\n\n")):
            if line.startswith(ERROR):
                reason = line.removeprefix(ERROR).removesuffix('"}')
                status = 500 if call.error is None else call.error.status_code
                yield "".join(events) + _event("error", error=error_message(status, reason, "")["error"])
                return
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                events += _of_choice(choice, content)
                reason = choice.get("finish_reason", reason)
            if chunk.get("usage") is not None:
                events += _end(chunk, content, begun["usage"], *_reason(reason, call))
        if events:
            yield "".join(events)


def _of_choice(choice: dict, content: ContentEvents) -> Iterator[str]:
    """The events of one chunk."""
    delta = choice["delta"]
    yield from content.thinking(delta.get("reasoning_content") or "")
    yield from content.text(delta.get("content") or "")
    for call in delta.get("tool_calls") or []:
        yield from content.call(call)


def _end(chunk: dict, content: ContentEvents, usage: dict, reason: str, stop: str | None) -> Iterator[str]:
    """The last events. chunk: with the usage"""
    yield from content.close()
    used = usage | {"output_tokens": chunk["usage"]["completion_tokens"]}
    delta = {"stop_reason": reason, "stop_sequence": stop}
    yield _event("message_delta", delta=delta, usage=used, metrics=chunk["metrics"])
    yield _event("message_stop")


async def _in_anthropics_form(answering: Awaitable, request_id: str) -> Any:
    """An answer, with errors in Anthropic's form. A body that OpenAI's door refuses with 422 is refused with 400."""
    headers = None
    try:
        response = await answering
    except HTTPException as error:
        status, headers = error.status_code, error.headers
        reason = renamed(error)[0] if isinstance(error, Refusal) else str(error.detail)
    except CBWorkerDeadError:
        status, reason = 503, DEAD
    except Exception as error:
        status, reason = 500, failed(error)
    else:
        response.headers["request-id"] = request_id
        if response.status_code < 400:
            return response
        status, reason = response.status_code, json.loads(response.body)["error"]["message"]
    status = 400 if status == 422 else status
    return JSONResponse(error_message(status, reason, request_id), status, {"request-id": request_id} | (headers or {}))


def add_messages(app: FastAPI, make: Callable[[type], Any]) -> None:
    """Add the two routes. make: returns a handler of a class"""

    def add(path: str, handler: Any) -> None:
        async def answer(request: Request) -> Any:
            async def answering() -> Any:
                return await handler.answer(request)

            return await _in_anthropics_form(answering(), request.state.request_id)

        app.post(path)(answer)

    add(MESSAGES, make(Messages))
    add(COUNT_TOKENS, make(TokenCounts))
