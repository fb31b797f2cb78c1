"""The fields `tool_choice`, `parallel_tool_calls` and `strict`: which calls an answer shall have, as a grammar."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers.utils.chat_parsing import parse_response

from .answers import REASONING, response_template
from .errors import refuse, shown
from .grammar_judge import MOST_SPACES
from .grammars import check_size, read_schema
from .tools import functions_of

# The text of a model's tool calls, found in its chat template, and the calls that an answer of such a text has.

NAMES = "first_sample_call", "second_sample_call"
"""Names of the calls that the chat template writes for `find_call_form`."""
SAMPLE = {"key": "value"}
"""The arguments of these calls."""
STYLES = {
    "json": r'\{\s*"key"\s*:\s*"value"\s*\}',
    "qwen_xml": r"<parameter=key>\s*value\s*</parameter>",
}
"""Forms of arguments by xgrammar's names for them, and patterns of `SAMPLE` in each."""


@dataclass(frozen=True)
class CallForm:
    r"""The text of a model's calls: begin, a name, middle, arguments and end, with `between` from one call to the next.

    style: how arguments are written, see `STYLES`
    reasoning: the field of the model's reasoning with the texts that open and close it, or None
    template: transformers' response template, which reads such calls

    For example the models of Qwen 2.5 have ``<tool_call>\n{"name": "``, ``", "arguments": ``, ``}\n</tool_call>`` and a
    line break between two calls.
    """

    begin: str
    middle: str
    end: str
    between: str
    style: str
    reasoning: tuple[str, str, str] | None
    template: dict = field(compare=False)

    @property
    def trigger(self) -> str:
        """The text that begins every call: begin up to its first white space, such as ``<tool_call>``."""
        return self.begin.split(maxsplit=1)[0]

    def is_thinking(self, prompt: str) -> bool | None:
        """True if a prompt ends in reasoning that is open, False if it ends after some, None if it ends without any."""
        if self.reasoning is None:
            return False
        _, begin, end = self.reasoning
        ending = prompt.rstrip()
        return False if ending.endswith(end.strip()) else True if ending.endswith(begin.strip()) else None


def find_call_form(processor: Any, model: Any) -> CallForm | None:
    """The text of the model's calls, or None if transformers' server reads none, or only calls of another kind.

    processor: the model's processor or tokenizer, with a chat template

    The chat template writes a message with two calls. The patterns of the response template find their bounds.
    """
    template = response_template(processor, model)
    calls = (template or {}).get("fields", {}).get("tool_calls", {})
    text = _sample_text(processor)
    if template is None or text is None or not calls.get("repeats") or not all(name in text for name in NAMES):
        return None
    first, second = map(text.rindex, NAMES)
    opening, closing = _pattern(calls, "open"), _pattern(calls, "close")
    starts = [match.start() + len(match[0]) - len(match[0].lstrip()) for match in opening.finditer(text)]
    starts = [max((start for start in starts if start <= place), default=None) for place in (first, second)]
    match = closing.search(text, first)
    if None in starts or match is None or not first < match.end() <= starts[1]:
        return None
    begin, inside = text[starts[0] : first], text[first + len(NAMES[0]) : match.end()]
    for style, pattern in STYLES.items():
        if arguments := re.search(pattern, inside):
            middle, end = inside[: arguments.start()], inside[arguments.end() :]
            between = text[match.end() : starts[1]]
            form = CallForm(begin, middle, end, between, style, _reasoning(template, processor), template)
            calls = [f"{begin}{name}{middle}{arguments[0]}{end}" for name in NAMES]
            return form if _is_read(between.join(calls), template) else None
    return None


def _sample_text(processor: Any) -> str | None:
    """The chat template's text of a message with two calls, or None if it writes none."""
    calls = [
        {"id": f"{name[:9]}", "type": "function", "function": {"name": name, "arguments": SAMPLE}} for name in NAMES
    ]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    tools = [{"type": "function", "function": {"name": "sample", "description": "", "parameters": {}}}]
    try:
        return processor.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception:  # a template may raise anything, for example that it takes one call at a time
        return None


def _pattern(part: dict, name: str) -> re.Pattern:
    literals = part.get(name, [])
    literals = [literals] if isinstance(literals, str) else literals
    return re.compile(part.get(f"{name}_pattern") or "|".join(map(re.escape, literals)), re.DOTALL)


def _reasoning(template: dict, processor: Any) -> tuple[str, str, str] | None:
    """The model's reasoning, if its chat template knows the text that opens it."""
    for name in REASONING:
        begin, end = (template["fields"].get(name, {}).get(key) for key in ("open", "close"))
        if isinstance(begin, str) and isinstance(end, str) and begin.strip() in str(processor.chat_template):
            return name, begin, end
    return None


def _is_read(text: str, template: dict) -> bool:
    """True if transformers reads the two sample calls from the text."""
    try:
        calls = parse_response(text, template, prefix="").get("tool_calls")
    except ValueError:
        return False
    wanted = [{"name": name, "arguments": SAMPLE} for name in NAMES]
    return [call.get("function") for call in calls or []] == wanted


class CallParser:
    """Reads an answer that is held to calls, piece by piece, with the method and the events of transformers' parsers.

    form: how the calls are written
    prompt: its end
    tools: the request's, in the form of chats; they say which arguments of `qwen_xml` are numbers

    transformers' parsers end a call at the first text that closes one, and an argument may contain that text. Here a
    call in JSON ends where its JSON ends. A call that is cut off is not read.
    """

    def __init__(self, form: CallForm, prompt: str, tools: list[dict] | None = None):
        self.form, self.tools = form, tools
        self.initial_events: list[dict] = []  # of the prompt, which has none that a client sees
        self._is_thinking = form.is_thinking(prompt)
        self._rest = ""
        self._begin = re.compile(f"{re.escape(form.begin)}({NAME}){re.escape(form.middle)}")

    def feed(self, text: str) -> list[dict]:
        """The events of the next piece of an answer."""
        self._rest += text
        return [*self._thoughts(), *self._calls()]

    def finalize(self) -> tuple[dict, list[dict]]:
        """A message, which nobody reads, and the last events: the end of reasoning that is cut off."""
        is_cut = self._is_thinking and self._rest
        return {}, [self._thought(self._rest)] if is_cut else []

    def _thought(self, text: str) -> dict:
        return {"type": "region_chunk", "field": self.form.reasoning[0], "text": text}

    def _thoughts(self) -> Iterator[dict]:
        if self._is_thinking is False:
            return
        _, begin, end = self.form.reasoning
        if self._is_thinking is None:
            start = self._rest.lstrip()
            if len(start) < len(begin) and begin.startswith(start):
                return  # more of it may come
            self._is_thinking = start.startswith(begin)
            self._rest = start.removeprefix(begin)
        if self._is_thinking:
            thought, mark, after = self._rest.partition(end)
            kept = 0 if mark else max(size for size in range(len(end)) if thought.endswith(end[:size]))
            thought, kept_text = thought[: len(thought) - kept], thought[len(thought) - kept :]
            self._rest, self._is_thinking = (after, False) if mark else (kept_text, True)
            if thought:
                yield self._thought(thought)

    def _calls(self) -> Iterator[dict]:
        while self._is_thinking is False:
            rest = self._rest.lstrip().removeprefix(self.form.between.strip()).lstrip()
            begin = self._begin.match(rest)
            end = begin and self._find_end(rest, begin.end())
            if not end:
                return
            self._rest = rest[end:]
            yield {"type": "region_close", "field": "tool_calls", "value": self._read(rest[:end], begin)}

    def _find_end(self, text: str, start: int) -> int | None:
        """The place after a call whose arguments begin at `start`, or None if it is not complete."""
        end = text.find(self.form.end, start)
        if end >= 0 and self.form.style == "json":
            try:
                _, end = DECODER.raw_decode(text, start)
            except (ValueError, RecursionError):
                return None
        return end + len(self.form.end) if end >= 0 and text.startswith(self.form.end, end) else None

    def _read(self, text: str, begin: re.Match) -> dict:
        if self.form.style == "json":
            return {"function": {"name": begin[1], "arguments": text[begin.end() : len(text) - len(self.form.end)]}}
        return parse_response(text, self.form.template, prefix="", tools=self.tools)["tool_calls"][0]


NAME = r"[\w.-]{1,64}"
"""Names of functions as OpenAI takes them, and with dots."""
DECODER = json.JSONDecoder(parse_int=float)
"""It finds the end of JSON. Python limits the digits of an int."""


# The calls that an answer shall have.

COMBINED = {"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"}
"""Names in a schema that say which values it has, so that the type object is not added."""
TEXT, LINES = {"type": "any_text"}, {"type": "regex", "pattern": r"\n{0,2}"}
"""Structural tags of xgrammar for reasoning, and for the line breaks after it."""
NO_FORM = "transformers reads no calls of this model in JSON or in parameters of XML (see its response template)"


@dataclass(frozen=True)
class ToolCalls:
    """The calls that an answer shall have.

    field: the request's field that asks for a grammar
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

    fields: the request's, checked
    processor: the model's processor or tokenizer

    Refusal that names `tool_choice` for a tool that is not there, and the field of a schema that cannot be served.
    """
    (mode, names), tools = _read_choice(fields.get("tool_choice", "auto")), fields.get("tools", [])
    required, is_chosen = mode == "required", mode == "required" or names is not None
    functions = [(function, index) for index, tool in enumerate(tools) for function in functions_of(tool)]
    if not functions:
        if is_chosen:
            raise refuse("tool_choice", "there are no tools; send some in `tools`")
        return None
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

    choice: the field, checked, in the form of chats or of /v1/responses
    """
    if isinstance(choice, str):
        return choice, None
    if choice["type"] in ("function", "custom"):
        return "required", [choice.get(choice["type"], choice)["name"]]
    allowed = choice.get("allowed_tools", choice)
    return allowed["mode"], [tool.get(tool["type"], tool)["name"] for tool in allowed["tools"]]


def _schema_of(function: dict, index: int, tool: dict, required: bool) -> tuple[str, str, dict]:
    """The name of a tool, the field with its schema, and the schema that its arguments are held to."""
    path = f"tools[{index}].{tool['type']}" if tool["type"] in tool else f"tools[{index}]"
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
