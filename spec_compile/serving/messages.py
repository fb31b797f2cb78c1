"""Checks of messages, items of /v1/responses and tools, before transformers makes a prompt of them."""

import json
from typing import Any

from transformers.cli.serving.utils import Modality

from .errors import refuse, shown
from .fields import OBJECT, TEXT, Field, only

MESSAGE = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "annotations"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXTS = ("text", "input_text", "output_text")
PICTURES = ("image_url", "input_image", "video_url")
SOUNDS = ("input_audio", "audio_url")
PART_OF_TEXT = {"type", "text", "annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"}
ROLE = Field(lambda value: value in ROLES if isinstance(value, str) else False, f"one of {', '.join(ROLES)}")
CONTENT = Field(lambda value: isinstance(value, (str, list)), "a text or a list of parts")
ITEMS = {
    "message": {"type", "id", "status", "phase", "role", "content"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "content", "summary", "encrypted_content"},
}
"""The fields of each type of item in `input`."""
TOOL = {"type", "function"}
FUNCTION = {"name", "description", "parameters", "strict"}


def check_messages(messages: list, modality: Modality, path: str = "messages") -> list[dict]:
    """The messages of a chat without fields that are null. Refusal that names the place of a field that is not served.

    modality: of the model's inputs
    path: the client's name of the list
    """
    return [_check_message(each, modality, f"{path}[{index}]") for index, each in enumerate(messages)]


def _known(value: Any, names: set[str], path: str) -> dict:
    """An object without its nulls. Refusal if it is no object, or has other names."""
    OBJECT.check(path, value)
    fields = {name: each for name, each in value.items() if each is not None}
    for name in fields:
        if name not in names:
            raise refuse(f"{path}.{name[:80]}", "it is not served; leave it out")
    return fields


def _required(values: dict, name: str, field: Field, path: str) -> Any:
    """The value of a name, which an object must have."""
    if name not in values:
        raise refuse(f"{path}.{name}", f"expected {field.expected}; there is none")
    field.check(f"{path}.{name}", values[name])
    return values[name]


def _check_message(message: Any, modality: Modality, path: str) -> dict:
    fields = _known(message, MESSAGE, path)
    _required(fields, "role", ROLE, path)
    if "tool_calls" in fields:
        only_list = Field(lambda value: isinstance(value, list), "a list of calls")
        for index, call in enumerate(_required(fields, "tool_calls", only_list, path)):
            _check_call(call, f"{path}.tool_calls[{index}]")
        if not fields["tool_calls"]:
            del fields["tool_calls"]  # transformers would leave out the content
    for name in ("name", "tool_call_id", "reasoning_content"):
        if name in fields:
            TEXT.check(f"{path}.{name}", fields[name])
    if "annotations" in fields:
        only([]).check(f"{path}.annotations", fields.pop("annotations"))
    if "content" in fields or "tool_calls" not in fields:
        content = _required(fields, "content", CONTENT, path)
        check_parts(content, modality, f"{path}.content")
    return fields


def _check_call(call: Any, path: str) -> None:
    fields = _known(call, {"id", "type", "function", "index"}, path)
    _known(_required(fields, "function", OBJECT, path), {"name", "arguments"}, f"{path}.function")
    _required(call["function"], "name", TEXT, f"{path}.function")
    _check_arguments(call["function"].get("arguments"), f"{path}.function.arguments")


def _check_arguments(arguments: Any, path: str) -> None:
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    Field(lambda value: isinstance(parsed, dict), "a text that is a JSON object").check(path, arguments)


def check_parts(content: Any, modality: Modality, path: str) -> None:
    """Refuse parts of a content that the model does not read."""
    if isinstance(content, str):
        return
    for index, part in enumerate(content):
        place = f"{path}[{index}]"
        OBJECT.check(place, part)
        part_type = _required(part, "type", TEXT, place)
        if part_type in TEXTS:
            _required(_known(part, PART_OF_TEXT, place), "text", TEXT, place)
        elif part_type in PICTURES and modality in (Modality.VLM, Modality.MULTIMODAL):
            _check_media(part, part_type, place)
        elif part_type in SOUNDS and modality == Modality.MULTIMODAL:
            _check_media(part, part_type, place)
        else:
            reads = {Modality.VLM: "text and pictures", Modality.MULTIMODAL: "text, pictures and sound"}
            raise refuse(f"{place}.type", f"the model reads {reads.get(modality, 'only text')}, got {shown(part_type)}")


def _check_media(part: dict, part_type: str, path: str) -> None:
    name = "image_url" if part_type == "input_image" else part_type
    fields = _known(part, {"type", name, "detail"}, path)
    value = _required(
        fields, name, Field(lambda value: isinstance(value, (str, dict)), "an address, or an object with it"), path
    )
    if isinstance(value, dict):
        inner = _known(value, {"url", "detail"} if part_type != "input_audio" else {"data", "format"}, f"{path}.{name}")
        _required(inner, "data" if part_type == "input_audio" else "url", TEXT, f"{path}.{name}")
        fields = fields | inner
    elif part_type in ("video_url", "audio_url"):
        OBJECT.check(f"{path}.{name}", value)
    if "detail" in fields:
        only("auto").check(f"{path}.detail", fields["detail"])


def check_input(items: str | list, modality: Modality, has_instructions: bool) -> str | list[dict]:
    """The field `input` of /v1/responses without nulls. Refusal as in `check_messages`."""
    if isinstance(items, str):
        return items
    for index, item in enumerate(items):
        OBJECT.check(f"input[{index}]", item)
    if "role" not in items[0] and items[0].get("type") not in ITEMS:  # parts of one message
        check_parts(items, modality, "input")
        return items
    checked = [_check_item(item, modality, f"input[{index}]") for index, item in enumerate(items)]
    if "role" not in checked[0]:
        raise refuse("input[0]", f"expected a message first, got an item of type {shown(checked[0].get('type'))}")
    if has_instructions and checked[0]["role"] == "system":
        raise refuse("instructions", "the input begins with a message of the system; give one of them")
    for index, item in enumerate(checked):
        follower = checked[index + 1] if index + 1 < len(checked) else {}
        if item.get("type") == "reasoning" and follower.get("role") != "assistant":
            raise refuse(f"input[{index}]", "reasoning is read only right before a message of the assistant")
    return checked


def _check_item(item: dict, modality: Modality, path: str) -> dict:
    item_type = item.get("type") or "message"
    if not isinstance(item_type, str) or item_type not in ITEMS:
        raise refuse(f"{path}.type", f"expected one of {', '.join(ITEMS)}, got {shown(item_type)}")
    fields = _known(item, ITEMS[item_type], path)
    if item_type == "message":
        _required(fields, "role", ROLE, path)
        check_parts(_required(fields, "content", CONTENT, path), modality, f"{path}.content")
    elif item_type == "function_call":
        _required(fields, "call_id", TEXT, path)
        _required(fields, "name", TEXT, path)
        _check_arguments(fields.get("arguments"), f"{path}.arguments")
    elif item_type == "function_call_output":
        _required(fields, "call_id", TEXT, path)
        check_parts(_required(fields, "output", CONTENT, path), modality, f"{path}.output")
    else:
        only([]).check(f"{path}.summary", fields.get("summary", []))
        if "encrypted_content" in fields:
            only().check(f"{path}.encrypted_content", fields["encrypted_content"])
        parts = fields.get("content", [])
        CONTENT.check(f"{path}.content", parts)
        for index, part in enumerate(parts):
            _required(_known(part, {"type", "text"}, f"{path}.content[{index}]"), "text", TEXT, f"{path}.content")
    return fields


def check_tools(tools: list) -> None:
    """Refuse tools that are not functions. Chats and /v1/responses have a form each."""
    for index, tool in enumerate(tools):
        path = f"tools[{index}]"
        OBJECT.check(path, tool)
        Field(lambda value: value == "function", '"function", because nothing else is served').check(
            f"{path}.type", tool.get("type")
        )
        function = tool
        if "function" in tool:
            function = _required(_known(tool, TOOL, path), "function", OBJECT, path)
            path += ".function"
        fields = _known(function, FUNCTION | {"type"}, path)
        _required(fields, "name", TEXT, path)
        if "description" in fields:
            TEXT.check(f"{path}.description", fields["description"])
        OBJECT.check(f"{path}.parameters", fields.get("parameters", {}))
        only(False).check(f"{path}.strict", fields.get("strict", False))


def count_characters(value: Any) -> int:
    """The characters of all texts in decoded JSON."""
    total, level = 0, [value]
    while level:
        total += sum(len(each) for each in level if isinstance(each, str))
        containers = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return total
