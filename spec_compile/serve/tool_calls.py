"""The fields `tool_choice`, `parallel_tool_calls` and `strict`: which calls an answer shall have, as a grammar."""

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from .call import HttpCall
from .call_forms import NAME, REASONING, CallForm, CallParser, FreeParser, find_call_form
from .errors import refuse, shown
from .grammar_judge import MOST_SPACES
from .grammars import check_size, read_schema

COMBINED = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
"""Names in a schema that say which values it has, so that the type object is not added."""
TEXT, LINES = {"type": "any_text"}, {"type": "regex", "pattern": r"\n{0,2}"}
"""Structural tags of xgrammar for reasoning, and for the line breaks after it."""
NO_FORM = "transformers reads no calls of this model in JSON or in parameters of XML (see its response template)"


@dataclass(frozen=True)
class ToolCalls:
    """The calls that an answer shall have.

    field: of the request, that asks for a grammar
    form: the text of the model's calls
    schemas: for each tool that may be called: its name, the field with its schema, and the schema
    required: True if the answer is calls and nothing else but reasoning; False if it is text that may have calls
    only_one: True for at most one call
    """

    field: str
    form: CallForm
    schemas: tuple[tuple[str, str, dict], ...]
    required: bool
    only_one: bool

    def grammar(self, prompt: str) -> tuple[str, str, str, list[tuple[str, str]]]:
        """The arguments of `GrammarCache.processor`. prompt: its end.

        An answer with required calls is reasoning, if the model reasons, and then calls. Other answers are any text, in
        which the text that begins a call begins one of these calls, except within reasoning.
        """
        form, is_thinking = self.form, self.form.is_thinking(prompt)
        content = {"type": "json_schema", "style": form.style, "max_whitespace_cnt": MOST_SPACES}
        calls = [
            _tag(form.begin + name + form.middle, content | {"json_schema": schema}, form.end)
            for name, _, schema in self.schemas
        ]
        _, begin, end = form.reasoning or ("", "", "")
        counted = {"at_least_one": self.required, "stop_after_first": self.only_one}
        parts: list[dict] = []
        if is_thinking:
            parts = [_tag("", TEXT, end), LINES]
        elif is_thinking is None and self.required:
            parts = [{"type": "optional", "content": _in_turn(_tag(begin, TEXT, end), LINES)}]
        if self.required:
            parts.append({"type": "tags_with_separator", "tags": calls, "separator": form.between, **counted})
        else:
            thoughts = [_tag(begin, TEXT, end)] if is_thinking is None else []
            triggers = [form.trigger, *(thought["begin"] for thought in thoughts)]
            parts.append({"type": "triggered_tags", "triggers": triggers, "tags": calls + thoughts, **counted})
        tag = {"type": "structural_tag", "format": _in_turn(*parts)}
        checks = [(path, json.dumps(schema)) for _, path, schema in self.schemas]
        return self.field, "structural_tag", json.dumps(tag), checks

    def parser(self, prompt: str) -> Any:
        """The parser of a stream, or None for transformers' own. prompt: its end."""
        tools = [{"function": {"name": name, "parameters": schema}} for name, _, schema in self.schemas]
        return CallParser(self.form, prompt, tools) if self.required else None


def _tag(begin: str, content: dict, end: str) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _in_turn(*parts: dict) -> dict:
    return {"type": "sequence", "elements": list(parts)}


def read_tool_calls(fields: dict, processor: Any, model: Any) -> ToolCalls | None:
    """The calls that an answer shall have, or None if no grammar is needed.

    fields: of the request, checked
    processor: the model's processor or tokenizer

    Refusal that names `tool_choice` for a tool that is not there, and the field of a schema that cannot be served.
    """
    (mode, names), tools = _read_choice(fields.get("tool_choice", "auto")), fields.get("tools", [])
    required, is_chosen = mode == "required", mode == "required" or names is not None
    if not tools:
        if is_chosen:
            raise refuse("tool_choice", "there are no tools; send some in `tools`")
        return None
    functions = [(tool.get("function", tool), index) for index, tool in enumerate(tools)]
    if names is not None:
        for name in names:
            if all(function["name"] != name for function, _ in functions):
                raise refuse("tool_choice", f"there is no tool {shown(name)} in `tools`")
        functions = [(function, index) for function, index in functions if function["name"] in names]
    is_strict = any(function.get("strict") for function, _ in functions)
    only_one = fields.get("parallel_tool_calls") is False
    if mode == "none" or not (is_chosen or is_strict or only_one):
        return None
    form = find_call_form(processor, model)
    if form is None:
        if is_chosen:
            raise refuse("tool_choice", f"{NO_FORM}; leave it out")
        return None  # no text of such a model comes back as a call
    field = "tool_choice" if is_chosen else "tools" if is_strict else "parallel_tool_calls"
    schemas = [_schema_of(function, index, tools[index], required) for function, index in functions]
    return ToolCalls(field, form, tuple(schemas), required, only_one)


def _read_choice(choice: str | dict) -> tuple[str, list[str] | None]:
    """The mode of a choice of tools: none, auto or required; and the names of the tools that it allows, or None: all.

    choice: the field, checked, in the form of chats or in that of /v1/responses
    """
    if isinstance(choice, str):
        return choice, None
    if choice["type"] == "function":
        return "required", [choice.get("function", choice)["name"]]
    allowed = choice.get("allowed_tools", choice)
    return allowed["mode"], [tool.get("function", tool)["name"] for tool in allowed["tools"]]


def _schema_of(function: dict, index: int, tool: dict, required: bool) -> tuple[str, str, dict]:
    """The name of a tool, the field with its schema, and the schema that its arguments are held to."""
    path = f"tools[{index}].function" if "function" in tool else f"tools[{index}]"
    if not re.fullmatch(NAME, function["name"]):
        raise refuse(f"{path}.name", "expected 1 to 64 letters, digits, underscores, dashes and dots")
    path += ".parameters"
    if not (required or function.get("strict")):
        return function["name"], path, {"type": "object"}
    given = function.get("parameters") or {"properties": {}}  # OpenAI's empty list of parameters
    schema = given if COMBINED & given.keys() else {"type": "object"} | given
    if "type" in schema and schema["type"] != "object":
        raise refuse(path, f"expected a schema of the type object, got {shown(schema['type'])}")
    check_size(path, read_schema(path, schema))
    return function["name"], path, schema


class AnswerReader:
    """Takes the place of the model's processor when transformers' handlers read an answer.

    It reads them as a stream is read, see `FreeParser`; of text around calls transformers would keep the last part.

    template: transformers' response template of the model
    call: the request
    """

    def __init__(self, processor: Any, template: dict, call: HttpCall):
        self.processor, self.response_template, self._call = processor, template, call

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """See transformers."""
        return self.processor.decode(*args, **kwargs)

    def parse_response(self, ids: list[int], template: dict, prefix: str, **tools: Any) -> dict:
        """The message of an answer with these token ids. prefix: the prompt; tools: of the request"""
        calls = self._call.tool_calls
        parser = (calls and calls.parser(prefix)) or FreeParser(template, prefix=prefix, **tools)
        events = [*parser.initial_events, *parser.feed(self._call.cut.whole(self.decode(ids)))]
        with suppress(ValueError):
            events += parser.finalize()[1]
        items = response_events_to_chunks(events)
        thoughts = [item for item in items if isinstance(item, ReasoningText)]
        calls = [{"function": vars(item)} for item in items if isinstance(item, ToolCall)]
        content = [item for item in items if type(item) is str]
        names = dict.fromkeys(REASONING, "".join(thoughts).strip() or None)
        return {"content": "".join(content).strip(), "tool_calls": calls, **names}
