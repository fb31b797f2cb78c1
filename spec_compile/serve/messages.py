"""Checks of messages, items of /v1/responses and tools, before transformers makes a prompt of them."""

import json
from typing import Any

from transformers.cli.serving.utils import Modality

from .errors import refuse, shown
from .fields import ANY, FLAG, LIST, OBJECT, TEXT, Field, check_object, only
from .media import PARTS as PICTURES

TEXTS = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def _is_json(value: Any, kind: type = object) -> bool:
    """True for a value of this kind, or JSON of one."""
    try:
        return isinstance(json.loads(value) if isinstance(value, str) else value, kind)
    except (ValueError, RecursionError):
        return False


ROLE = Field(lambda value: isinstance(value, str) and value in ROLES, f"one of {', '.join(ROLES)}")
CONTENT = Field(lambda value: isinstance(value, (str, list)), "a text or a list of parts")
ARGUMENTS = Field(lambda value: _is_json(value, dict), "a text that is a JSON object")
GAINED = Field(lambda value: isinstance(value, (str, dict)), "a text")
"""Arguments of a call of /v1/responses. The model has written them, and not always as an object."""
ADDRESS = Field(lambda value: isinstance(value, (str, dict)), "an address, or an object with it")
MESSAGE = {
    "role": ROLE,
    "content": CONTENT,
    "name": TEXT,
    "tool_calls": LIST,
    "tool_call_id": TEXT,
    "reasoning_content": TEXT,
    "annotations": only([]),
}
CALL = {"id": ANY, "type": ANY, "index": ANY, "function": OBJECT}
CALLED = {"name": TEXT, "arguments": ARGUMENTS}
TEXT_PART = {"type": TEXT, "text": TEXT} | dict.fromkeys(
    ("annotations", "logprobs", "cache_control", "prompt_cache_breakpoint"), ANY
)
ITEM = {"type": ANY, "id": ANY, "status": ANY}
ITEMS = {
    "message": ITEM | {"phase": ANY, "role": ROLE, "content": CONTENT, "annotations": only([])},
    "function_call": ITEM | {"call_id": TEXT, "name": TEXT, "arguments": GAINED},
    "function_call_output": ITEM | {"call_id": TEXT, "output": CONTENT},
    "reasoning": ITEM | {"content": CONTENT, "summary": only([]), "encrypted_content": only()},
}
"""The fields of each type of item in `input`."""
REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""The fields that an item of each type must have."""
TOOL = {"type": ANY, "function": OBJECT}
FUNCTION = {"type": ANY, "name": TEXT, "description": TEXT, "parameters": OBJECT, "strict": FLAG}


def check_messages(messages: list, modality: Modality, path: str = "messages") -> list[dict]:
    """The messages of a chat without fields that are null. Refusal that names the place of a field that is not served.

    modality: of the model's inputs
    path: the client's name of the list
    """
    return [_check_message(each, modality, f"{path}[{index}]") for index, each in enumerate(messages)]


def _check_message(message: Any, modality: Modality, path: str) -> dict:
    fields = check_object(message, MESSAGE, ("role",), path)
    fields.pop("annotations", None)
    for index, call in enumerate(fields.get("tool_calls", [])):
        call_path = f"{path}.tool_calls[{index}]"
        called = check_object(call, CALL, ("function",), call_path)["function"]
        check_object(called, CALLED, CALLED, f"{call_path}.function")
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]  # transformers would leave out the content
    if "content" not in fields and "tool_calls" not in fields:
        raise refuse(f"{path}.content", f"expected {CONTENT.expected}; there is none")
    check_parts(fields.get("content", ""), modality, f"{path}.content")
    return fields


def check_parts(content: str | list, modality: Modality, path: str) -> None:
    """Refuse parts of a content that the model does not read."""
    for index, part in enumerate(content if isinstance(content, list) else ()):
        part_path = f"{path}[{index}]"
        OBJECT.check(part_path, part)
        part_type = part.get("type")
        TEXT.check(f"{part_path}.type", part_type)
        if part_type in TEXTS:
            check_object(part, TEXT_PART, ("text",), part_path)
        elif part_type in PICTURES and modality in (Modality.VLM, Modality.MULTIMODAL):
            _check_picture(part, part_path)
        else:
            reads = "only text" if modality is Modality.LLM else "text and pictures here, no videos and no sound"
            raise refuse(f"{part_path}.type", f"the model reads {reads}, got {shown(part_type)}")


def _check_picture(part: dict, path: str) -> None:
    """Refuse a picture with other fields than its address."""
    fields = check_object(
        part, {"type": TEXT, "image_url": ADDRESS, "detail": only("auto")}, ("type", "image_url"), path
    )
    if isinstance(fields["image_url"], dict):
        check_object(fields["image_url"], {"url": TEXT, "detail": only("auto")}, ("url",), f"{path}.image_url")


def check_input(items: str | list, modality: Modality, has_instructions: bool) -> str | list[dict]:
    """The field `input` of /v1/responses without nulls. Refusal as in `check_messages`.

    transformers reads reasoning before a message of the assistant, so an empty one is put between reasoning and a call.
    """
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
    read: list[dict] = []
    for item, follower in zip(checked, [*checked[1:], {}]):
        read.append(item)
        if item.get("type") == "reasoning" and follower.get("role") != "assistant":
            read.append({"role": "assistant", "content": ""})
    return read


def _check_item(item: dict, modality: Modality, path: str) -> dict:
    item_type = item.get("type") or "message"
    if not isinstance(item_type, str) or item_type not in ITEMS:
        raise refuse(f"{path}.type", f"expected one of {', '.join(ITEMS)}, got {shown(item_type)}")
    fields = check_object(item, ITEMS[item_type], REQUIRED[item_type], path)
    if item_type == "reasoning":
        for index, part in enumerate(fields.get("content", [])):
            check_object(part, {"type": ANY, "text": TEXT}, ("text",), f"{path}.content[{index}]")
    else:
        name = "output" if item_type == "function_call_output" else "content"
        check_parts(fields.get(name, ""), modality, f"{path}.{name}")
    if item_type == "function_call" and not _is_json(fields["arguments"]):
        fields["arguments"] = json.dumps(fields["arguments"])  # transformers reads JSON; templates get the text again
    return fields


def check_tools(tools: list) -> None:
    """Refuse tools that are not functions. Chats and /v1/responses have a form each."""
    for index, tool in enumerate(tools):
        path, function = f"tools[{index}]", tool
        OBJECT.check(path, tool)
        only("function").check(f"{path}.type", tool.get("type"))
        if "function" in tool:
            function = check_object(tool, TOOL, ("function",), path)["function"]
            path += ".function"
        check_object(function, FUNCTION, ("name",), path)


def count_characters(value: Any) -> int:
    """The characters of all texts in decoded JSON."""
    total, level = 0, [value]
    while level:
        total += sum(len(each) for each in level if isinstance(each, str))
        containers = [each for each in level if isinstance(each, (dict, list))]
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    return total
