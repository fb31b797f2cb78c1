"""The text of a model's calls, as its chat template writes it, and calls read from pieces of an answer."""

import json

import pytest
from server_fixtures import DEMO, TEMPLATE
from tool_templates import PROMPT, TEMPLATES, Model, call, chat_template, response_template
from transformers import AutoTokenizer

from spec_compile.serve.answers import FreeParser, items_of
from spec_compile.serve.tool_calls import CallParser, find_call_form

QWEN = ('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n", "json")
THOUGHT = ("reasoning_content", "<think>", "</think>")
HARD = {"a": "}</tool_call>\n<tool_call>", "b": '"\\}', "c": [{}, 10**30, 1.5]}
"""Arguments that a parser may take for the end of a call."""


def form_of(chat, response):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template, tokenizer.response_template = chat, response
    return find_call_form(tokenizer, Model)


@pytest.mark.parametrize(
    ("name", "parts", "reasoning"),
    [
        ("qwen2.5", QWEN, None),
        ("qwen3", QWEN, THOUGHT),
        ("thinking", QWEN, THOUGHT),
        ("qwen3.5", ("<tool_call>\n<function=", ">\n", "\n</function>\n</tool_call>", "\n", "qwen_xml"), None),
    ],
)
def test_the_form_is_that_of_the_chat_template(name, parts, reasoning):
    form = form_of(*TEMPLATES[name])
    assert (form.begin, form.middle, form.end, form.between, form.style) == parts
    assert form.reasoning == reasoning and form.trigger == "<tool_call>"


def test_text_between_calls_is_found():
    chat = chat_template("{{ ', ' if not loop.first }}[{{ c.arguments | tojson }} for {{ c.name }}]")
    assert form_of(chat, response_template(r"\[", r"\]")) is None  # the name comes last
    chat = chat_template('{{ ", " if not loop.first }}[{"name": "{{ c.name }}", "input": {{ c.arguments | tojson }}}]')
    renamed = response_template(r"\[(?={)", r"(?<=})\]")
    function = {"name": "{content.name}", "arguments": "{content.input}"}
    renamed["fields"]["tool_calls"]["transform"] = {"type": "function", "function": function}
    form = form_of(chat, renamed)
    assert (form.begin, form.end, form.between) == ('[{"name": "', "}]", "\n, ")


REASONS = {
    "no response template": (TEMPLATES["qwen2.5"][0], None),
    "a template without calls": (TEMPLATE, TEMPLATES["qwen2.5"][1]),
    "a template that fails": ("{{ raise_exception('no') }}", TEMPLATES["qwen2.5"][1]),
    "calls that are not read": (TEMPLATES["qwen2.5"][0], response_template("<call>")),
    "another form of arguments": (chat_template("<tool_call>{{ c.name }}: {{ c.arguments.key }}</tool_call>"),
                                  TEMPLATES["qwen2.5"][1]),
    "a response template without calls": (TEMPLATES["qwen2.5"][0], response_template(tool_calls={})),
    "JSON of other names": (chat_template('<tool_call>{"f": "{{ c.name }}", "x": {{ c.arguments }}}</tool_call>'),
                            TEMPLATES["qwen2.5"][1]),
}  # fmt: skip


@pytest.mark.parametrize("templates", REASONS.values(), ids=REASONS)
def test_models_whose_calls_transformers_does_not_read_have_none(templates):
    assert form_of(*templates) is None


def read(parser, pieces):
    """Reasoning, and the names and arguments of calls."""
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finalize()[1]
    thoughts = "".join(event["text"] for event in events if event["type"] == "region_chunk")
    calls = [event["value"]["function"] for event in events if event["type"] == "region_close"]
    return thoughts, [(each["name"], each["arguments"]) for each in calls]


@pytest.mark.parametrize("prompt", [PROMPT, f"{PROMPT}<think>\n"])
@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("space", ["\n", ""])
def test_calls_are_read_from_pieces_of_any_size(prompt, size, space):
    """Without spaces the text that ends a call may also be in an argument."""
    chat, response = TEMPLATES["qwen3"]
    form = form_of(chat.replace("}\n</tool", f"}}{space}</tool"), response)
    text = f"{call('f', HARD)}\n{call('g-1.x', {})}".replace("}\n</tool", f"}}{space}</tool")
    wanted = [("f", json.dumps(HARD)), ("g-1.x", "{}")]
    thought = f"a <tool_call> </thin, {call('f', {})}"
    start = "" if "think" in prompt else "<think>"
    text = f"{start}{thought}</think>\n\n{text}"
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert read(CallParser(form, prompt), [*pieces, "<|im_end|>"]) == (thought, wanted)


def test_reasoning_that_the_prompt_has_ended_does_not_begin_again():
    form = form_of(*TEMPLATES["qwen3"])
    assert read(CallParser(form, f"{PROMPT}<think>\n\n</think>\n\n"), [call("f", {})]) == ("", [("f", "{}")])
    assert form.is_thinking("say <think>") and form.is_thinking(f"<think> or not\n{PROMPT}") is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_a_call_that_is_cut_off_is_left_out(name):
    form = form_of(*TEMPLATES[name])
    texts = {
        "qwen3": [call("f", HARD), call("g", HARD)],
        "qwen3.5": [f"<tool_call>\n<function={each}>\n<parameter=a>\n7\n</parameter>\n</function>\n</tool_call>"
                    for each in "fg"],
    }[name]  # fmt: skip
    text = "\n".join(texts)
    for size in range(len(text) + 1):
        _, calls = read(CallParser(form, PROMPT), [text[:size]])
        assert [called for called, _ in calls] == ["f", "g"][: (size >= len(texts[0])) + (size == len(text))]
    assert read(CallParser(form_of(*TEMPLATES["qwen3"]), PROMPT), ["<think>so </thi"]) == ("so </thi", [])


def test_parameters_of_xml_have_the_types_of_the_schema():
    form = form_of(*TEMPLATES["qwen3.5"])
    tools = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    parameters = "<parameter=n>\n7\n</parameter>\n<parameter=s>\n7\n</parameter>"
    text = f"<tool_call>\n<function=f>\n{parameters}\n</function>\n</tool_call>"
    ((name, arguments),) = read(CallParser(form, PROMPT, tools), [text])[1]
    assert (name, arguments) == ("f", {"n": 7, "s": "7"})


def test_a_call_that_is_cut_off_is_no_content():
    parser = FreeParser(TEMPLATES["qwen3"][1], prefix=PROMPT)
    items = items_of([*parser.feed('hi<tool_call>\n{"name": "f"'), *parser.finalize()[1]])
    assert items == ["hi"]
