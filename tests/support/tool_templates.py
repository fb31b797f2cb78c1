"""Chat templates and response templates with tool calls, in the forms of Qwen 2.5, Qwen 3 and Qwen 3.5."""

import json
from pathlib import Path

from server_fixtures import DEMO, save_model
from transformers import AutoConfig, AutoTokenizer

CALL = '<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function={{ c.name }}>\n{% for key, value in c.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


def chat_template(call: str = CALL, thought: str = "", prefill: str = "") -> str:
    r"""A template that lists the tools first. call: the text of `c`, a call; thought and prefill: before an answer."""
    return (
        "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + thought + "{% endif %}{{ m.content }}"
        "{% for each in m.tool_calls or [] %}{% set c = each.function %}{{ '\n' if not loop.first or m.content }}"
        + call
        + "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + prefill
        + "{% endif %}"
    )


def response_template(opening: str = r"\s*<tool_call>", closing: str = r"</tool_call>", **fields: dict) -> dict:
    """transformers' response template of calls in JSON. fields: others"""
    calls = {
        "open_pattern": opening, "close_pattern": closing, "repeats": True, "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }  # fmt: skip
    content = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"}
    fields = {"tool_calls": calls, "content": content} | fields
    return {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": fields}


REASONING = {"reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"}}
XML_CALLS = {
    "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>", "close_pattern": r"</function>\s*</tool_call>",
    "repeats": True, "content": "xml-inline",
    "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}  # fmt: skip
TEMPLATES = {
    "qwen2.5": (chat_template(), response_template()),
    "qwen3": (chat_template(thought="<think>\n\n</think>\n\n"), response_template(**REASONING)),
    "thinking": (chat_template(prefill="<think>\n"), response_template(**REASONING)),
    "qwen3.5": (chat_template(XML_CALL), response_template(tool_calls=XML_CALLS)),
}


def save_tool_model(folder: Path, name: str = "qwen2.5") -> Path:
    """The model of `save_model`, whose tokenizer has one of `TEMPLATES`."""
    save_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATES[name]
    tokenizer.save_pretrained(folder)
    return folder


def tool(name: str, parameters: dict | None, **fields) -> dict:
    """A tool in the form of chats."""
    return {"type": "function", "function": {"name": name, "parameters": parameters} | fields}


PROMPT = "<|im_start|>assistant\n"
"""How an answer begins under these templates."""


def call(name: str, arguments: dict) -> str:
    """The text of a call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class Model:
    """Has the config that transformers looks at."""

    config = AutoConfig.from_pretrained(DEMO)
