"""Anthropic's Messages API over the handler of chats: POST /v1/messages and POST /v1/messages/count_tokens."""

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from transformers.cli.serving.utils import CBWorkerDeadError, Modality

from .call import CURRENT, HttpCall
from .errors import DEAD, ERROR, MESSAGES_PATH, Refusal, error_message, failed, refuse, shown
from .fields import (
    ANY,
    CHAT,
    COUNT,
    FLAG,
    LIST,
    MESSAGES,
    OBJECT,
    PENALTIES,
    SAMPLING,
    SIZE,
    TEXT,
    VLLM,
    Field,
    check_fields,
    check_object,
    object_of,
    only,
    present,
)
from .generation import flat_ids
from .handlers import DONE, Chat

COUNT_TOKENS = f"{MESSAGES_PATH}/count_tokens"
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

    add(MESSAGES_PATH, make(Messages))
    add(COUNT_TOKENS, make(TokenCounts))


# Requests in the form of Anthropic's Messages API, turned into requests of /v1/chat/completions.

STOP = PENALTIES["stop"]
WORDS = Field(lambda value: isinstance(value, (str, list)), "a text or a list of blocks")
STOPS = Field(
    lambda value: value == [] or (isinstance(value, list) and STOP.accepts(value)), f"a list: {STOP.expected}"
)
CACHE = {"cache_control": ANY}
"""Marks for Anthropic's cache of prompts. The server shares beginnings of prompts without them."""
PROMPT = {
    "model": TEXT,
    "messages": MESSAGES,
    "system": WORDS,
    "tools": LIST,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "output_config": OBJECT,
    "chat_template_kwargs": OBJECT,
} | CACHE
"""Fields of the prompt, which POST /v1/messages/count_tokens has, too."""
MESSAGE_FIELDS = SAMPLING | {name: VLLM[name] for name in VLLM if name != "thinking_token_budget"} | PROMPT | {
    "max_tokens": COUNT,
    "stop_sequences": STOPS,
    "top_k": SIZE,
    "metadata": Field(object_of(user_id=TEXT), "an object with user_id"),
    "service_tier": Field(lambda value: value in ("auto", "standard_only"), '"auto" or "standard_only"'),
} | dict.fromkeys(("container", "inference_geo", "mcp_servers", "context_management"), only())  # fmt: skip
BLOCK = {"type": TEXT} | CACHE
BLOCKS = {
    "text": BLOCK | {"text": TEXT, "citations": only([])},
    "image": BLOCK | {"source": OBJECT},
    "tool_use": BLOCK | {"id": TEXT, "name": TEXT, "input": OBJECT, "caller": ANY},
    "tool_result": BLOCK | {"tool_use_id": TEXT, "content": WORDS, "is_error": FLAG},
    "thinking": BLOCK | {"thinking": TEXT, "signature": TEXT},
}
"""The fields of each type of block."""
NEEDED = {
    "text": ("text",), "image": ("source",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
}  # fmt: skip
SPOKEN = {"user": ("text", "image", "tool_result"), "assistant": ("text", "tool_use", "thinking")}
"""The types of blocks that each role may have."""
TOOL = CACHE | {
    "type": only("custom"), "name": TEXT, "description": TEXT, "input_schema": OBJECT, "strict": only(False),
    "eager_input_streaming": ANY, "defer_loading": only(False),
}  # fmt: skip
CHOICE = {
    "type": Field(lambda value: value in ("auto", "none", "any", "tool"), "auto, none, any or tool"),
    "name": TEXT, "disable_parallel_tool_use": FLAG,
}  # fmt: skip
THINKING = {
    "type": Field(lambda value: value in ("enabled", "disabled", "adaptive"), "enabled, disabled or adaptive"),
    "budget_tokens": COUNT, "display": only("summarized"),
}  # fmt: skip
ERROR_PREFIX = "Error: "
"""Stands before a result of a tool that is an error, because chat templates have no field for that."""
RENAMED = {
    "stop": "stop_sequences", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format", "thinking_token_budget": "thinking.budget_tokens",
}  # fmt: skip
"""The client's names of fields that chats call otherwise."""
SWITCH = re.compile(r"\b(?:if|not|and|or)\s+thinking\b|\bthinking\s+(?:is|==)\s")
"""A chat template that reads a variable `thinking`."""


def to_chat(body: dict, template: str, modality: Modality, counts_only: bool = False) -> dict:
    """The body of /v1/chat/completions for a body of /v1/messages. Refusal that names the client's field.

    template: the model's chat template
    modality: of the model's inputs
    counts_only: True for a body of /v1/messages/count_tokens
    """
    fields = check_fields(body, PROMPT if counts_only else MESSAGE_FIELDS, "messages")
    if not counts_only and "max_tokens" not in fields:
        raise refuse("max_tokens", f"expected {COUNT.expected}; there is none")
    same = (*SAMPLING, *VLLM, "max_tokens", "chat_template_kwargs")
    chat = {name: fields[name] for name in present(same, fields)}
    system = [{"role": "system", "content": _system(fields["system"])}] if fields.get("system") else []
    chat["messages"] = system + _messages(fields["messages"], modality)
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if fields.get("tools"):
        chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields["tools"])]
    if "tool_choice" in fields:
        chat |= _choice(fields["tool_choice"])
    chat |= _output(fields.get("output_config", {}))
    if "thinking" in fields:
        _think(fields["thinking"], chat, template, counts_only)
    return chat


def renamed(refusal: Refusal) -> tuple[str, str | None]:
    """The reason and the field of a refusal with the client's names."""
    reason, param = str(refusal.detail), refusal.param
    if param in RENAMED and reason.startswith(param):
        reason, param = RENAMED[param] + reason[len(param) :], RENAMED[param]
    return reason, param


def _system(value: str | list) -> str:
    blocks = [{"type": "text", "text": value}] if isinstance(value, str) else value
    return "\n".join(_block(block, ("text",), f"system[{index}]")["text"] for index, block in enumerate(blocks))


def _messages(messages: list, modality: Modality) -> list[dict]:
    """Messages of a chat; those of one role in a row become one, as in Anthropic's API."""
    merged: list[tuple[str, list[tuple[str, dict]]]] = []
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        role = Field(lambda value: isinstance(value, str) and value in SPOKEN, "user or assistant")
        fields = check_object(message, {"role": role, "content": WORDS}, ("role", "content"), path)
        role, content = fields["role"], fields["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        read = [
            (f"{path}.content[{number}]", _block(block, SPOKEN[role], f"{path}.content[{number}]"))
            for number, block in enumerate(blocks)
        ]
        if merged and merged[-1][0] == role:
            merged[-1][1].extend(read)
        else:
            merged.append((role, read))
    if merged[-1][0] == "assistant":
        raise refuse(f"messages[{len(messages) - 1}]", "the last one is the assistant's; the server begins each answer")
    chat: list[dict] = []
    for role, blocks in merged:
        chat += _of_user(blocks, modality) if role == "user" else [_of_assistant([block for _, block in blocks])]
    return chat


def _block(block: Any, types: tuple[str, ...], path: str) -> dict:
    """A block without nulls. Refusal if it is none of these types."""
    OBJECT.check(path, block)
    block_type = block.get("type")
    if block_type not in types:
        raise refuse(f"{path}.type", f"expected {' or '.join(types)} here, got {shown(block_type)}")
    return check_object(block, BLOCKS[block_type], NEEDED[block_type], path)


def _of_user(blocks: list[tuple[str, dict]], modality: Modality) -> list[dict]:
    """Results of tools, each a message, and a message with all the rest."""
    chat, parts = [], []
    for path, block in blocks:
        if block["type"] == "tool_result":
            chat.append(_result(block, path))
        elif block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
        else:
            parts.append({"type": "image_url", "image_url": {"url": _address(block["source"], path, modality)}})
    if all(part["type"] == "text" for part in parts):
        text = "\n".join(part["text"] for part in parts)
        return [*chat, {"role": "user", "content": text}] if parts or not chat else chat
    return [*chat, {"role": "user", "content": parts}]


def _result(block: dict, path: str) -> dict:
    content = block.get("content", "")
    if isinstance(content, list):
        read = [_block(part, ("text",), f"{path}.content[{number}]") for number, part in enumerate(content)]
        content = "\n".join(part["text"] for part in read)
    prefix = ERROR_PREFIX if block.get("is_error") else ""
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": prefix + content}


def _address(source: dict, path: str, modality: Modality) -> str:
    """The address of a picture. Refusal if the model reads none."""
    if modality not in (Modality.VLM, Modality.MULTIMODAL):
        raise refuse(f"{path}.type", "the model reads only text, got an image")
    kind = source.get("type")
    if kind == "url":
        return check_object(source, {"type": TEXT, "url": TEXT}, ("url",), f"{path}.source")["url"]
    only("base64").check(f"{path}.source.type", kind)
    names = {"type": TEXT, "media_type": TEXT, "data": TEXT}
    data = check_object(source, names, names, f"{path}.source")
    return f"data:{data['media_type']};base64,{data['data']}"


def _of_assistant(blocks: list[dict]) -> dict:
    """One message of an assistant."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    functions = [{"name": each["name"], "arguments": json.dumps(each["input"])} for each in uses]
    calls = [{"id": each["id"], "type": "function", "function": made} for each, made in zip(uses, functions)]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tool(tool: Any, path: str) -> dict:
    OBJECT.check(path, tool)
    if tool.get("type") is not None:  # tools that Anthropic's own servers run have other fields, too
        TOOL["type"].check(f"{path}.type", tool["type"])
    fields = check_object(tool, TOOL, ("name", "input_schema"), path)
    function = {"name": fields["name"], "parameters": fields["input_schema"]}
    if "description" in fields:
        function["description"] = fields["description"]
    return {"type": "function", "function": function}


def _choice(value: dict) -> dict:
    choice = check_object(value, CHOICE, ("type",), "tool_choice")
    if (choice["type"] == "tool") is not ("name" in choice):
        raise refuse("tool_choice.name", "the type tool has it, and no other type")
    named = {"type": "function", "function": {"name": choice.get("name")}}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    return {"tool_choice": kinds[choice["type"]]} | (
        {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    )


def _output(value: dict) -> dict:
    config = check_object(value, {"effort": only(), "format": OBJECT}, (), "output_config")
    if "format" not in config:
        return {}
    names = {"type": only("json_schema"), "schema": OBJECT}
    schema = check_object(config["format"], names, names, "output_config.format")["schema"]
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}}


def _think(value: dict, chat: dict, template: str, counts_only: bool) -> None:
    """Add to a chat how it shall think."""
    thinking = check_object(value, THINKING, ("type",), "thinking")
    is_on, budget = thinking["type"] != "disabled", thinking.get("budget_tokens")
    if (thinking["type"] == "enabled") is (budget is None):
        raise refuse("thinking.budget_tokens", "the type enabled has it, and no other type")
    if budget is not None and not counts_only:
        if budget >= chat["max_tokens"]:
            raise refuse("thinking.budget_tokens", f"expected less than max_tokens, {chat['max_tokens']}, got {budget}")
        chat["thinking_token_budget"] = budget
    switch = "enable_thinking" if "enable_thinking" in template else "thinking" if SWITCH.search(template) else None
    if switch is not None:
        chat["chat_template_kwargs"] = {switch: is_on} | chat.get("chat_template_kwargs", {})
