"""Requests in the form of Anthropic's Messages API, turned into requests of /v1/chat/completions."""

import json
import re
from typing import Annotated, Any

from pydantic import FailFast, ValidationInfo, WrapValidator

from .errors import refuse, shown

from .fields import (  # isort: skip
    ANY, COUNT, EFFORT, FLAG, OBJECT, SIZE, SOME_MESSAGES, STOPS, TEXT, Fields, Kind, check_fields, one_of, only,
    present, record, text_or, wrong,
)  # fmt: skip
from .models import VllmSampling
from .tools import HOSTED

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
    "thinking": ("thinking",), "document": ("source",), "search_result": ("content",),
    "tool_reference": ("tool_name",),
}  # fmt: skip
"""The types of blocks, and the fields that each must have."""
TOLD = "text", "image", "document", "search_result", "tool_reference"
"""The types of blocks that the result of a tool may have."""
SPOKEN = {"user": ("tool_result", *TOLD), "assistant": ("text", "tool_use", "thinking"), "system": ("text",)}
"""The types of blocks that each role may have."""
HOSTED_BLOCKS = re.compile(
    r"server_tool_use|mcp_tool_use|\w+_tool_result|redacted_thinking|container_upload|compaction"
)
"""Types of blocks about tools that Anthropic's own servers run, and of blocks that only they can read."""


Cached = record(cache_control=ANY)
"""Anthropic's mark for its cache of prompts. The server shares beginnings of prompts without it."""


class Source(Fields):
    """A picture, by its address or as data; or the text of a document."""

    needed = ("type",)
    by_type = {"url": ("url",), "text": ("data",), "base64": ("media_type", "data")}
    type: one_of("url", "base64", "text") = None
    url: TEXT = None
    media_type: TEXT = None
    data: TEXT = None


def _if_read(value: Any, handler: Any, info: ValidationInfo) -> Any:
    """A source in a block that may have one. Other blocks are refused as a whole."""
    is_source = isinstance(value, dict) and (value.get("type") == "text" or info.context["pictures"])
    return handler(value) if is_source else value


class TextBlock(Cached):
    """A block of text, where no other block may be."""

    needed, by_type = ("type",), {"text": ("text",)}
    type: Kind(lambda value: value == "text", "text here") = None
    text: TEXT = None
    citations: ANY = None


Texts = Annotated[list[TextBlock], FailFast(), text_or("a text or a list of blocks")]


class ToldBlock(Cached):
    """A block of the result of a tool."""

    needed, hosted = ("type",), ("blocks", HOSTED_BLOCKS)
    type: TEXT = None
    text: TEXT = None
    citations: ANY = None
    title: TEXT = None
    context: TEXT = None
    tool_name: TEXT = None
    source: Annotated[Source, WrapValidator(_if_read)] = None
    content: Texts = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        kind = values["type"]
        if kind == "image" and not context["pictures"]:
            raise wrong("type", "the model reads only text, got an image")
        for name in NEEDED.get(kind, ()):
            cls.need(values, name)
        is_text = isinstance(values.get("source"), dict) and values["source"].get("type") == "text"
        if kind == "document" and not is_text:
            raise wrong("source", 'the model reads documents as {"type": "text", "data": ...}')
        if kind == "image" and is_text:
            raise wrong("source.type", "expected url or base64, got a text")


class MessageBlock(ToldBlock):
    """A block of a message."""

    id: TEXT = None
    name: TEXT = None
    input: OBJECT = None
    caller: ANY = None
    tool_use_id: TEXT = None
    content: Annotated[list[ToldBlock], FailFast(), text_or("a text or a list of blocks")] = None
    is_error: FLAG = None
    thinking: TEXT = None
    signature: TEXT = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        super()._check_all(values, context)
        _check_types("content", values.get("content", ()), TOLD)


def _check_types(field: str, blocks: str | list[dict], types: tuple[str, ...]) -> None:
    """Refuse blocks that may not be here."""
    for index, block in enumerate(() if isinstance(blocks, str) else blocks):
        if block["type"] not in types and not HOSTED_BLOCKS.fullmatch(block["type"]):
            raise wrong(f"{field}[{index}].type", f"expected {' or '.join(types)} here, got {shown(block['type'])}")


class AnthropicMessage(Fields):
    """A message."""

    needed = ("role", "content")
    role: one_of(*SPOKEN) = None
    content: Annotated[list[MessageBlock], FailFast(), text_or("a text or a list of blocks")] = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        _check_types("content", values["content"], SPOKEN[values["role"]])


class AnthropicTool(Cached):
    """A tool. Tools that Anthropic's own servers run, or that its models know, have other types."""

    needed, hosted = ("name", "input_schema"), ("tools", HOSTED)
    type: only("custom") = None
    name: TEXT = None
    description: TEXT = None
    input_schema: OBJECT = None
    strict: FLAG = None
    defer_loading: FLAG = None
    eager_input_streaming: FLAG = None
    allowed_callers: ANY = None
    input_examples: ANY = None

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
    display: one_of("summarized", "omitted") = None

    @classmethod
    def _check_all(cls, values: dict, context: dict) -> None:
        if (values["type"] == "enabled") is not ("budget_tokens" in values):
            raise wrong("budget_tokens", "the type enabled has it, and no other type")


class PromptFields(Cached):
    """The fields of the prompt: POST /v1/messages/count_tokens."""

    needed = ("messages",)
    model: TEXT = None
    messages: Annotated[list[AnthropicMessage], FailFast(), SOME_MESSAGES] = None
    system: Texts = None
    tools: list[AnthropicTool] = None
    tool_choice: ToolChoice = None
    thinking: Thinking = None
    output_config: record(
        effort=EFFORT, format=record("type", "schema", type=only("json_schema"), schema=OBJECT), task_budget=ANY
    ) = None
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
    context_management: OBJECT = None


SAME = {*VllmSampling.model_fields, "max_tokens", "chat_template_kwargs"}
"""Fields that chats have, too."""


def to_chat(body: dict, template: str, pictures: bool, thinks: bool, counts_only: bool = False) -> dict:
    """The body of /v1/chat/completions for a body of /v1/messages. Refusal that names the client's field.

    template: the model's chat template
    pictures: True if the model reads pictures
    thinks: True if the model thinks; then a budget bounds it
    counts_only: True for a body of /v1/messages/count_tokens
    """
    fields = check_fields(PromptFields if counts_only else MessageFields, body, pictures=pictures)
    chat = {name: value for name, value in fields.items() if name in SAME}
    if fields.get("system"):
        chat["messages"] = [{"role": "system", "content": _joined(fields["system"])}]
    chat["messages"] = chat.get("messages", []) + _messages(fields["messages"])
    if fields.get("stop_sequences"):
        chat["stop"] = fields["stop_sequences"]
    if chat["messages"][-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    if "effort" in fields.get("output_config", {}):
        chat["reasoning_effort"] = fields["output_config"]["effort"]
    if fields.get("tools"):
        chat["tools"] = [*map(_tool, fields["tools"])]
    if "tool_choice" in fields:
        chat |= _choice(fields["tool_choice"])
    if "format" in fields.get("output_config", {}):
        named = {"name": "answer", "schema": fields["output_config"]["format"]["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": named}
    if "thinking" in fields:
        _think(fields["thinking"], chat, template, thinks and not counts_only)
    return chat


def _joined(blocks: str | list[dict]) -> str:
    """The text of blocks of text."""
    return blocks if isinstance(blocks, str) else "\n".join(block["text"] for block in blocks)


def _messages(messages: list[dict]) -> list[dict]:
    """Messages of a chat; several of one role in a row become one, as in Anthropic's API. A message of the system among
    them is the user's, because templates take one at the beginning only."""
    merged: list[tuple[str, list[dict]]] = []
    for message in messages:
        role, content = "user" if message["role"] == "system" else message["role"], message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if merged and merged[-1][0] == role:
            merged[-1][1].extend(blocks)
        else:
            merged.append((role, [*blocks]))
    chat: list[dict] = []
    for role, blocks in merged:
        chat += _of_user(blocks) if role == "user" else [_of_assistant(blocks)]
    return chat


def _of_user(blocks: list[dict]) -> list[dict]:
    """Results of tools, each a message, and a message with all the rest."""
    chat, parts = [], []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content", "")
            told = [{"type": "text", "text": content}] if isinstance(content, str) else [*map(_part, content)]
            texts = [part for part in told if part["type"] == "text"]
            parts += [part for part in told if part["type"] != "text"]  # templates show no pictures of tools
            content = (ERROR_PREFIX if block.get("is_error") else "") + _joined(texts)
            chat.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif block["type"] in TOLD:
            parts.append(_part(block))
    if any(part["type"] != "text" for part in parts):
        return [*chat, {"role": "user", "content": parts}]
    return [*chat, {"role": "user", "content": _joined(parts)}] if parts or not chat else chat


def _part(block: dict) -> dict:
    """A block as a part of a chat's message: a picture, or the text of a document, of a finding or of a tool's name."""
    kind, source = block["type"], block.get("source", {})
    if kind == "image":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
        return {"type": "image_url", "image_url": {"url": source["url"] if source["type"] == "url" else url}}
    if kind == "tool_reference":
        return {"type": "text", "text": f"The tool {block['tool_name']} is there."}
    text = block["text"] if kind == "text" else source["data"] if kind == "document" else _joined(block["content"])
    titles = [block[name] for name in present(("title", "context"), block)]
    return {"type": "text", "text": "\n".join([*titles, text])}


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
    if HOSTED.fullmatch(tool.get("type", "custom")):
        return tool
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    more = {name: tool[name] for name in present(("description", "strict"), tool)}
    return {"type": "function", "function": function | more}


def _choice(choice: dict) -> dict:
    named = {"type": "function", "function": {"name": choice.get("name")}}
    kinds = {"auto": "auto", "none": "none", "any": "required", "tool": named}
    return {"tool_choice": kinds[choice["type"]]} | (
        {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    )


def _think(thinking: dict, chat: dict, template: str, is_bound: bool) -> None:
    """Add to a chat how it shall think. is_bound: True if a budget bounds it; else it has no effect"""
    is_on, budget = thinking["type"] != "disabled", thinking.get("budget_tokens")
    if budget is not None and is_bound:
        if budget >= chat["max_tokens"]:
            raise refuse("thinking.budget_tokens", f"expected less than max_tokens, {chat['max_tokens']}, got {budget}")
        chat["thinking_token_budget"] = budget
    switch = "enable_thinking" if "enable_thinking" in template else "thinking" if SWITCH.search(template) else None
    if switch is not None:
        chat["chat_template_kwargs"] = {switch: is_on} | chat.get("chat_template_kwargs", {})
