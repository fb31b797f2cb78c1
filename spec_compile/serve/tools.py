"""The tools of a request as functions, which chat templates read, and the tools that nobody here can run."""

import re
from collections.abc import Iterator

from .answers import ToolCall
from .fields import read_object

HOSTED = re.compile(
    r"(web_search|web_fetch|file_search|code_interpreter|code_execution|image_generation|computer(_use)?|mcp(_toolset)?"
    r"|local_shell|shell|bash|apply_patch|text_editor|memory|advisor|tool_search(_tool_\w+)?|x_search"
    r"|advanced_tool_use)(_preview)?([_-]\d[\d_-]*)?"
)
"""Types of tools that a service of OpenAI or Anthropic runs, or that only their models know how to call. A client that
talks to any server sends them, so they are left out of the prompt."""
HOSTED_ITEMS = re.compile(
    r"(web_search|file_search|code_interpreter|image_generation|computer|mcp|local_shell|shell|apply_patch|tool_search)"
    r"_\w+|compaction"
)
"""Types of items in `input` about calls of such tools."""
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""The parameters of a custom tool, which takes free text: its call is a call of a function with this one argument."""


def functions_of(tool: dict) -> Iterator[dict]:
    """A checked tool in the form of chats or of /v1/responses as functions of a chat; none for a hosted one.

    For example {"type": "custom", "name": "patch", "format": {"type": "grammar", "definition": "start: ..."}} gives
    {"name": "patch", "description": "Its input follows this grammar:\\nstart: ...", "parameters": INPUT}. The grammar
    is told to the model and does not bind it. A function "go" in a namespace "web" is called "web.go".
    """
    kind = tool["type"]
    given = tool.get(kind, {name: each for name, each in tool.items() if name != "type"})
    if kind == "namespace":
        for each in tool.get("tools", ()):
            for function in functions_of(each):
                yield function | {"name": f"{tool['name']}.{function['name']}"}
    elif kind == "function":
        yield given
    elif kind == "custom":
        form = given.get("format", {})
        grammar = form.get("definition", form.get("grammar", {}).get("definition"))
        told = [given.get("description"), grammar and f"Its input follows this grammar:\n{grammar}"]
        yield {"name": given["name"], "description": "\n".join(filter(None, told)), "parameters": INPUT}


def nested(tools: list[dict]) -> list[dict]:
    """Tools in the form of chats, which templates read."""
    return [{"type": "function", "function": each} for tool in tools for each in functions_of(tool)]


def is_custom(name: str, tools: list[dict]) -> bool:
    """True if a function is a custom tool, by its name in `functions_of`."""
    functions = (function for tool in tools for function in functions_of(tool))
    return any(function["name"] == name and function.get("parameters") is INPUT for function in functions)


def in_namespace(name: str, tools: list[dict]) -> dict[str, str]:
    """The fields of a call that name its function, which may be in the namespace of one of the tools."""
    space, _, function = name.rpartition(".")
    spaces = {tool["name"] for tool in tools if tool["type"] == "namespace"}
    return {"namespace": space, "name": function} if space in spaces else {"name": name}


def input_of(call: ToolCall) -> str:
    """The free text of a call of a custom tool. Arguments of another form than `INPUT` are the text themselves."""
    value = read_object(call.arguments) or {}
    is_input = value.keys() == {"input"} and isinstance(value["input"], str)
    return value["input"] if is_input else call.arguments
