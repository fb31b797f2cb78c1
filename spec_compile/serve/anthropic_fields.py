"""Requests in the form of Anthropic's Messages API, turned into requests of /v1/chat/completions."""

import json
import re
from typing import Annotated, Any

from pydantic import FailFast, Field, ValidationInfo, WrapValidator

from .errors import Refusal, refuse, shown

from .fields import (  # isort: skip
    ANY, COUNT, FLAG, OBJECT, SIZE, STOPS, TEXT, Fields, Kind, check_fields, one_of, only, present, record, some,
    text_or, wrong,
)  # fmt: skip
from .models import VllmSampling

ERROR_PREFIX = "Error: "
"""Stands before a result of a tool that is an error, because chat templates have no field for that."""
RENAMED = {
    "stop": "stop_sequences", "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format", "thinking_token_budget": "thinking.budget_tokens",
}  # fmt: skip
"""The client's names of fields that chats call otherwise."""
SWITCH = re.compile(r"\b(?:if|not|and|or)\s+thinking\b|\bthinking\s+(?:is|==)\s")
"""A chat template that reads a variable `thinking`."""
NEEDED = {
    "text": ("text",), "image": ("source",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
}  # fmt: skip
"""The types of blocks, and the fields that each must have."""
SPOKEN = {"user": ("text", "image", "tool_result"), "assistant": ("text", "tool_use", "thinking")}
"""The types of blocks that each role may have."""


class Cached(Fields):
    """Anthropic's mark for its cache of prompts. The server shares beginnings of prompts without it."""

    cache_control: ANY = None


class Source(Fields):
    """A picture, by its address or as data."""

    needed = ("type",)
    type: one_of("url", "base64") = None
    url: TEXT = None
    media_type: TEXT = None
    data: TEXT = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        for name in ("url",) if values["type"] == "url" else ("media_type", "data"):
            cls.need(values, name)


def _if_read(value: Any, handler: Any, info: ValidationInfo) -> Any:
    """A source for a model that reads pictures; others refuse the block as a whole."""
    return handler(value) if info.context["pictures"] else value


class TextBlock(Cached):
    """A block of text, where no other block may be."""

    needed = ("type",)
    type: Kind(lambda value: value == "text", "text here") = None
    text: TEXT = None
    citations: only([]) = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        cls.need(values, "text")


Texts = Annotated[list[TextBlock], FailFast(), text_or("a text or a list of blocks")]


class MessageBlock(Cached):
    """A block of a message."""

    needed = ("type",)
    type: TEXT = None
    text: TEXT = None
    citations: only([]) = None
    source: Annotated[Source, WrapValidator(_if_read)] = None
    id: TEXT = None
    name: TEXT = None
    input: OBJECT = None
    caller: ANY = None
    tool_use_id: TEXT = None
    content: Texts = None
    is_error: FLAG = None
    thinking: TEXT = None
    signature: TEXT = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if values["type"] == "image" and not context["pictures"]:
            raise wrong("type", "the model reads only text, got an image")
        for name in NEEDED.get(values["type"], ()):
            cls.need(values, name)


class AnthropicMessage(Fields):
    """A message of the user or of the assistant."""

    needed = ("role", "content")
    role: one_of(*SPOKEN) = None
    content: Annotated[list[MessageBlock], FailFast(), text_or("a text or a list of blocks")] = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        types = SPOKEN[values["role"]]
        for index, block in enumerate(() if isinstance(values["content"], str) else values["content"]):
            if block["type"] not in types:
                reason = f"expected {' or '.join(types)} here, got {shown(block['type'])}"
                raise wrong(f"content[{index}].type", reason)


class AnthropicTool(Cached):
    """A tool. Tools that Anthropic's own servers run have other types."""

    needed = ("name", "input_schema")
    type: only("custom") = None
    name: TEXT = None
    description: TEXT = None
    input_schema: OBJECT = None
    strict: only(False) = None
    defer_loading: only(False) = None

    @classmethod
    def need(cls, values: dict, name: str) -> None:
        """Refuse a tool of another type before its fields."""
        if values.get("type", "custom") == "custom":
            super().need(values, name)


class ToolChoice(Fields):
    """Which tools the answer may or must call."""

    needed = ("type",)
    type: one_of("auto", "none", "any", "tool") = None
    name: TEXT = None
    disable_parallel_tool_use: FLAG = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if (values["type"] == "tool") is not ("name" in values):
            raise wrong("name", "the type tool has it, and no other type")


class Thinking(Fields):
    """How the answer shall think."""

    needed = ("type",)
    type: one_of("enabled", "disabled", "adaptive") = None
    budget_tokens: COUNT = None
    display: only("summarized") = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if (values["type"] == "enabled") is not ("budget_tokens" in values):
            raise wrong("budget_tokens", "the type enabled has it, and no other type")


class OutputFormat(Fields):
    """The form of the answer."""

    needed = ("type", "schema")
    type: only("json_schema") = None
    schema_: OBJECT = Field(None, alias="schema")


class PromptFields(Cached):
    """The fields of the prompt: POST /v1/messages/count_tokens."""

    needed = ("messages",)
    model: TEXT = None
    messages: Annotated[list[AnthropicMessage], FailFast(), some("a list of at least one message")] = None
    system: Texts = None
    tools: list[AnthropicTool] = None
    tool_choice: ToolChoice = None
    thinking: Thinking = None
    output_config: record(effort=only(), format=OutputFormat) = None
    chat_template_kwargs: OBJECT = None


class MessageFields(VllmSampling, PromptFields):
    """POST /v1/messages."""

    needed = ("messages", "max_tokens")
    max_tokens: COUNT = None
    stop_sequences: Kind(
        lambda value: value == [] or (isinstance(value, list) and STOPS.accepts(value)), f"a list: {STOPS.expected}"
    ) = None
    top_k: SIZE = None
    metadata: record(user_id=TEXT) = None
    n: only(1) = None
    service_tier: one_of("auto", "standard_only") = None
    container: only() = None
    inference_geo: only() = None
    mcp_servers: only() = None
    context_management: only() = None


SAME = {*VllmSampling.model_fields, "max_tokens", "chat_template_kwargs"}
"""Fields that chats have, too."""


def to_chat(body: dict, template: str, pictures: bool, counts_only: bool = False) -> dict:
    """The body of /v1/chat/completions for a body of /v1/messages. Refusal that names the client's field.

    template: the model's chat template
    pictures: True if the model reads pictures
    counts_only: True for a body of /v1/messages/count_tokens
    """
    fields = check_fields(PromptFields if counts_only else MessageFields, body, pictures=pictures)
    chat = {name: value for name, value in fields.items() if name in SAME}
    if fields.get("system"):
        chat["messages"] = [{"role": "system", "content": _joined(fields["system"])}]
    chat["messages"] = chat.get("messages", []) + _messages(fields["messages"])
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if fields.get("tools"):
        chat["tools"] = [*map(_tool, fields["tools"])]
    if "tool_choice" in fields:
        chat |= _choice(fields["tool_choice"])
    if "format" in fields.get("output_config", {}):
        named = {"name": "answer", "schema": fields["output_config"]["format"]["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    if "thinking" in fields:
        _think(fields["thinking"], chat, template, counts_only)
    return chat


def renamed(refusal: Refusal) -> tuple[str, str | None]:
    """The reason and the field of a refusal with the client's names."""
    reason, param = str(refusal.detail), refusal.param
    if param in RENAMED and reason.startswith(param):
        reason, param = RENAMED[param] + reason[len(param) :], RENAMED[param]
    return reason, param


def _joined(blocks: str | list[dict]) -> str:
    """The text of blocks of text."""
    return blocks if isinstance(blocks, str) else "\n".join(block["text"] for block in blocks)


def _messages(messages: list[dict]) -> list[dict]:
    """Messages of a chat; several of one role in a row become one, as in Anthropic's API."""
    merged: list[tuple[str, list[dict]]] = []
    for message in messages:
        role, content = message["role"], message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if merged and merged[-1][0] == role:
            merged[-1][1].extend(blocks)
        else:
            merged.append((role, [*blocks]))
    if merged[-1][0] == "assistant":
        raise refuse(f"messages[{len(messages) - 1}]", "the last one is the assistant's; the server begins each answer")
    chat: list[dict] = []
    for role, blocks in merged:
        chat += _of_user(blocks) if role == "user" else [_of_assistant(blocks)]
    return chat


def _of_user(blocks: list[dict]) -> list[dict]:
    """Results of tools, each a message, and a message with all the rest."""
    chat, parts = [], []
    for block in blocks:
        if block["type"] == "tool_result":
            prefix = ERROR_PREFIX if block.get("is_error") else ""
            content = prefix + _joined(block.get("content", ""))
            chat.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif block["type"] == "text":
            parts.append({"type": "text", "text": block["text"]})
        else:
            source = block["source"]
            url = source["url"] if source["type"] == "url" else f"data:{source['media_type']};base64,{source['data']}"
            parts.append({"type": "image_url", "image_url": {"url": url}})
    if any(part["type"] != "text" for part in parts):
        return [*chat, {"role": "user", "content": parts}]
    return [*chat, {"role": "user", "content": _joined(parts)}] if parts or not chat else chat


def _of_assistant(blocks: list[dict]) -> dict:
    """One message of an assistant."""
    uses = [block for block in blocks if block["type"] == "tool_use"]
    functions = [{"name": each["name"], "arguments": json.dumps(each["input"])} for each in uses]
    calls = [{"id": each["id"], "type": "function", "function": made} for each, made in zip(uses, functions)]
    thoughts = [block["thinking"] for block in blocks if block["type"] == "thinking"]
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = _joined([block for block in blocks if block["type"] == "text"])
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message


def _tool(tool: dict) -> dict:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function | {name: tool[name] for name in present(("description",), tool)}}


def _choice(choice: dict) -> dict:
    named = {"type": "function", "function": {"name": choice.get("name")}}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    return {"tool_choice": kinds[choice["type"]]} | (
        {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    )


def _think(thinking: dict, chat: dict, template: str, counts_only: bool) -> None:
    """Add to a chat how it shall think."""
    is_on, budget = thinking["type"] != "disabled", thinking.get("budget_tokens")
    if budget is not None and not counts_only:
        if budget >= chat["max_tokens"]:
            raise refuse("thinking.budget_tokens", f"expected less than max_tokens, {chat['max_tokens']}, got {budget}")
        chat["thinking_token_budget"] = budget
    switch = "enable_thinking" if "enable_thinking" in template else "thinking" if SWITCH.search(template) else None
    if switch is not None:
        chat["chat_template_kwargs"] = {switch: is_on} | chat.get("chat_template_kwargs", {})
