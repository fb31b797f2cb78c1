"""tool_choice, parallel_tool_calls and strict: calls that fit their schemas, streamed or not, and what is refused."""

import json

import pytest
from server_fixtures import CHATS, DEMO, RESPONSES, TEMPLATE, body, events, read, refusal, running, save_model
from tool_templates import PROMPT, TEMPLATES, Model, call, chat_template, response_template, save_tool_model, tool
from transformers import AutoTokenizer

from spec_compile.serve import grammar_judge, grammars, tool_calls
from spec_compile.serve.errors import Refusal
from spec_compile.serve.grammars import has_finite_value
from spec_compile.serve.tool_calls import read_tool_calls

PLACE = {"type": "object", "properties": {"place": {"type": "string", "maxLength": 6}}, "required": ["place"]}
TIME = {
    "type": "object",
    "properties": {"hours": {"type": "integer", "minimum": 0, "maximum": 23}, "zone": {"enum": ["UTC", "CET", None]}},
    "required": ["hours", "zone"],
}
TOOLS = [tool("find_place", PLACE, description="a place"), tool("set-time", TIME), tool("stop", None)]
FITS = {
    "find_place": lambda value: value.keys() == {"place"} and len(value["place"]) <= 6,
    "set-time": lambda value: value.keys() == {"hours", "zone"} and value["hours"] in range(24)
    and value["zone"] in ("UTC", "CET", None),
    "stop": lambda value: value == {},
}  # fmt: skip
FLAT = [{"type": "function"} | {name: each for name, each in tool["function"].items() if each} for tool in TOOLS]
"""The tools in the form of /v1/responses."""
ONE = {"parallel_tool_calls": False}
SAMPLINGS = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9, "seed": 9}]
SAVE = save_tool_model


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed_tools(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def chat(content="the weather in Oslo", **fields):
    return body(CHATS, content, 500, tools=TOOLS) | fields


@pytest.fixture(scope="module")
def few_spaces():
    """A model that was not trained for calls would fill them with spaces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_calls, "MOST_SPACES", 1)
        yield


@pytest.fixture(scope="module")
def client(folder, few_spaces):
    pytest.importorskip("xgrammar")
    with running(folder, slots=4, served_model_name="tiny") as client:
        yield client


def answer(client, path=CHATS, **fields):
    """The calls, with drafts, without and of a stream, and the reason for the end. There is no text."""
    asked = chat(**fields) if path == CHATS else fields
    found = [read(client.post(path, json=asked | extra)) for extra in ({}, {"speculation": False}, {"stream": True})]
    assert not any(each.text for each in found)
    assert found[0].calls == found[1].calls == found[2].calls and len({each.reason for each in found}) == 1
    assert all(FITS[name](json.loads(arguments)) for name, arguments in found[0].calls), found[0].calls
    return found[0].calls, found[0].reason


# What is answered


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
def test_a_named_tool_is_called_once(client, sampling):
    for name in ("set-time", "stop"):
        calls, reason = answer(client, tool_choice=named(name), **ONE, **sampling)
        assert [each for each, _ in calls] == [name] and reason == "tool_calls"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
def test_required_calls_one_tool_or_more(client, sampling):
    calls, reason = answer(client, tool_choice="required", **ONE, **sampling)
    assert len(calls) == 1 and reason == "tool_calls"
    bias = {client.runner.requests.tokenizer.eos_token_id: -100}
    calls, reason = answer(client, tool_choice="required", max_tokens=120, logit_bias=bias, **sampling)
    assert len(calls) > 1 and reason == "length"  # it may not end by itself


def test_a_call_that_is_cut_off_is_left_out(client):
    whole, _ = answer(client, tool_choice=named("find_place"), **ONE)
    calls, reason = answer(client, tool_choice=named("find_place"), **ONE, max_tokens=12)
    assert len(whole) == 1 and calls == [] and reason == "length"


def test_responses_take_their_own_form_of_tools(client):
    one = {"type": "function", "name": "set-time"}
    for choice in ("required", {"type": "allowed_tools", "mode": "required", "tools": [one]}, one):
        fields = body(RESPONSES, "the weather", 300, tools=FLAT, tool_choice=choice, **ONE)
        ((name, _),), _ = answer(client, RESPONSES, **fields)
        assert client.post(RESPONSES, json=fields).json()["tool_choice"] == choice
    assert name == "set-time"


def test_calls_of_a_stream_are_numbered(client):
    bias = {client.runner.requests.tokenizer.eos_token_id: -100}
    chunks = events(client.post(CHATS, json=chat(tool_choice="required", max_tokens=120, logit_bias=bias, stream=True)))
    calls = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == [*range(len(calls))] and len(calls) > 1
    assert all(call["type"] == "function" for call in calls)


def test_openais_client_reads_the_calls(sdk):
    fields = chat(**ONE) | {"model": "tiny", "tool_choice": named("set-time")}
    (choice,) = sdk.chat.completions.create(**fields).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "set-time"
    assert FITS["set-time"](json.loads(call.function.arguments))
    with sdk.chat.completions.stream(**fields) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments
    message = {"role": "assistant", "tool_calls": [call.model_dump()]}
    reply = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    fields["messages"] = [*fields["messages"], message, reply]
    (choice,) = sdk.chat.completions.create(**fields | {"tool_choice": "auto", "max_tokens": 4}).choices
    assert choice.message.content


def test_none_and_auto_are_free_text(client):
    plain = chat(max_tokens=12)
    for fields in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}):
        found = read(client.post(CHATS, json=plain | fields))
        assert found.reason == "length" and not found.calls
    untold = plain | {"tools": [], "tool_choice": "none", "parallel_tool_calls": False}
    told = plain | {"tool_choice": "none"}
    assert client.post(CHATS, json=untold).json()["choices"] == client.post(CHATS, json=told).json()["choices"]


# Calls that begin by themselves


@pytest.fixture(scope="module")
def chatty(tmp_path_factory, few_spaces):
    """A server whose model calls a tool by a comma, to which answers are biased."""
    pytest.importorskip("xgrammar")
    folder = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = chat_template(', {"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}};')
    tokenizer.response_template = response_template(r",", r"(?<=}});")
    tokenizer.save_pretrained(folder)
    with running(folder, slots=4) as client:
        client.bias = {tokenizer.convert_tokens_to_ids(","): 9}
        yield client


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fields", [{}, ONE], ids=json.dumps)
def test_strict_tools_fit_once_a_call_has_begun(chatty, fields, streamed):
    tools = [tool(each["function"]["name"], each["function"]["parameters"], strict=True) for each in TOOLS]
    fields = fields | {"tools": tools, "max_tokens": 120, "stream": streamed, "logit_bias": chatty.bias}
    asked = chat("mean of [1, 2, 3] is", **fields)
    found = [read(chatty.post(CHATS, json=asked | extra)) for extra in ({}, {"speculation": False})]
    assert found[0].text.strip() == found[1].text.strip() and "," not in found[0].text
    assert found[0].calls == found[1].calls
    assert all(FITS[name](json.loads(arguments)) for name, arguments in found[0].calls)
    assert len(found[0].calls) == 1 if "parallel_tool_calls" in fields else len(found[0].calls) > 1


def test_a_free_call_that_is_cut_off_is_left_out(chatty):
    """Without strict the comma is followed by anything; transformers' parser would fail at the end."""
    asked = chat("mean of [1, 2, 3] is", max_tokens=60, logit_bias=chatty.bias)
    found = read(chatty.post(CHATS, json=asked))
    assert found.reason == "length" and not found.calls and "," not in found.text


# The grammars

SET = {"hours": 7, "zone": "CET"}


def plan(template="qwen2.5", tools=TOOLS, **fields):
    """What the fields ask for, for a model with this template."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATES.get(template, (TEMPLATE, None))
    return read_tool_calls({"tools": tools} | fields, tokenizer, Model)


ONE_CALL, OTHER = call("set-time", SET), call("find_place", {"place": "Oslo"})
BAD = [
    call("set-time", {"hours": 24, "zone": "UTC"}),
    call("set-time", {"hours": 3}),
    call("nothing", {}),
    "<tool_call>a",
]
STRICT = [tool("set-time", TIME, strict=True), tool("find_place", PLACE)]
THOUGHT = f"<think>\nI call {BAD[0]}.\n</think>\n\n"
CASES = {
    "required": ("qwen2.5", PROMPT, {"tool_choice": "required"},
                 [ONE_CALL, f"{ONE_CALL}\n{OTHER}"],
                 ["", "yes", f"so {ONE_CALL}", ONE_CALL + OTHER, THOUGHT + ONE_CALL]),
    "one": ("qwen2.5", PROMPT, {"tool_choice": "required", **ONE}, [ONE_CALL, OTHER], ["", f"{ONE_CALL}\n{OTHER}"]),
    "named": ("qwen2.5", PROMPT, {"tool_choice": named("set-time")}, [ONE_CALL, f"{ONE_CALL}\n{ONE_CALL}"], [OTHER]),
    "thought": ("qwen3", PROMPT, {"tool_choice": "required", **ONE},
                [ONE_CALL, THOUGHT + ONE_CALL], ["", THOUGHT, f"so {ONE_CALL}", THOUGHT + THOUGHT + ONE_CALL]),
    "thinking": ("thinking", f"{PROMPT}<think>\n", {"tool_choice": "required", **ONE},
                 [f"so </think>\n\n{ONE_CALL}", f"{OTHER}</think>{ONE_CALL}"], [ONE_CALL, "so </think>\n\n"]),
    "thought over": ("thinking", f"{PROMPT}<think>\n\n</think>\n\n", {"tool_choice": "required", **ONE},
                     [ONE_CALL], [THOUGHT + ONE_CALL]),
    "strict": ("qwen2.5", PROMPT, {"tools": STRICT},
               ["", "yes", ONE_CALL, f"so {ONE_CALL} and {OTHER}.", call("find_place", {"a": [1]})], []),
    "strict and one": ("qwen2.5", PROMPT, {"tools": STRICT, **ONE}, ["", f"so {ONE_CALL}"], [f"{ONE_CALL}{OTHER}"]),
    "strict thought": ("qwen3", PROMPT, {"tools": STRICT}, [f"{THOUGHT}so {ONE_CALL}"], [THOUGHT + BAD[0]]),
    "allowed": ("qwen2.5", PROMPT, {"tool_choice": allowed_tools("required", "set-time", "stop")},
                [ONE_CALL, f"{ONE_CALL}\n{call('stop', {})}"], ["", "yes", OTHER]),
    "allowed and auto": ("qwen2.5", PROMPT, {"tool_choice": allowed_tools("auto", "find_place")},
                         ["", "yes", f"so {OTHER}", call("find_place", {"a": 1})], [ONE_CALL, f"{OTHER}{ONE_CALL}"]),
    "strict thinking": ("thinking", f"{PROMPT}<think>", {"tools": STRICT}, [f"{BAD[0]}</think>{ONE_CALL}"], [ONE_CALL]),
}  # fmt: skip


@pytest.mark.parametrize(("template", "prompt", "fields", "allowed", "refused"), CASES.values(), ids=CASES)
def test_a_grammar_allows_these_answers(template, prompt, fields, allowed, refused):
    xgrammar = pytest.importorskip("xgrammar")
    _, kind, text, _ = plan(template, **fields).grammar(prompt)
    compiled = grammars.compile_grammar(grammar_judge.bytes_info(), kind, text)

    def fits(answer):
        matcher = xgrammar.GrammarMatcher(compiled)
        return matcher.accept_string(answer) and matcher.is_completed()

    assert [answer for answer in allowed if not fits(answer)] == []
    bad = [each for each in BAD if template != "thinking"]
    assert [answer for answer in [*refused, *bad] if fits(answer)] == []


def test_parameters_of_xml_are_held_to_the_schema():
    xgrammar = pytest.importorskip("xgrammar")
    _, kind, text, _ = plan("qwen3.5", tool_choice="required").grammar(PROMPT)
    compiled = grammars.compile_grammar(grammar_judge.bytes_info(), kind, text)
    begin = "<tool_call>\n<function=set-time>\n<parameter=hours>\n{}\n</parameter>\n<parameter=zone>\n"
    text = f"{begin}CET\n</parameter>\n</function>\n</tool_call>"
    for hours, fits in ((7, True), (24, False)):
        matcher = xgrammar.GrammarMatcher(compiled)
        assert matcher.accept_string(text.format(hours)) == fits and matcher.is_completed() == fits


def test_without_a_choice_there_is_no_grammar():
    assert plan() is None and plan(tool_choice="none", **ONE) is None and plan(tools=[], **ONE) is None
    assert plan("none of them", tools=STRICT) is None  # transformers' server reads no calls of such a model
    assert plan(**ONE).only_one and not plan(**ONE).required


# What is refused


def refused(field, **fields):
    """The reason for a refusal that names the field."""
    with pytest.raises(Refusal) as caught:
        plan(**fields)
    assert caught.value.status_code == 400 and caught.value.detail.startswith(f"{field}:"), caught.value.detail
    return caught.value.detail


TYPED = {"type": "function", "name": "f", "parameters": {"type": "array"}}


def test_choices_that_cannot_be_kept_are_refused():
    assert "no tools" in refused("tool_choice", tools=[], tool_choice="required")
    assert "no tool" in refused("tool_choice", tool_choice=named("nothing"))
    assert "no tools" in refused("tool_choice", tools=[], tool_choice=allowed_tools("auto", "stop"))
    assert "nothing" in refused("tool_choice", tool_choice=allowed_tools("auto", "stop", "nothing"))
    for choice in ("required", allowed_tools("auto", "stop")):
        assert "response template" in refused("tool_choice", template="none of them", tool_choice=choice)
    names = ("two words", "", "a" * 65, '"', "é\n")
    for name in names:
        refused("tools[0].function.name", tools=[tool(name, PLACE)], tool_choice="required")
    refused("tools[1].parameters", tools=[FLAT[0], TYPED], tool_choice="required")
    for bad in ({"a": [{}] * 600}, {"$ref": "#"}, {"enum": ["a" * 40_000]}):
        refused("tools[0].function.parameters", tools=[tool("f", bad)], tool_choice="required")
        refused("tools[0].function.parameters", tools=[tool("f", bad, strict=True)])
        assert plan(tools=[tool("f", bad)], **ONE) is not None  # its arguments are any object


def test_schemas_that_cannot_be_compiled_are_refused_by_their_place(client):
    bad = {"type": "object", "properties": {"a": {"type": "strange"}}, "required": ["a"]}
    pattern = {"type": "object", "properties": {"a": {"pattern": "(a", "type": "string"}}}
    for schema in (bad, {"$ref": "#/nowhere"}, pattern):
        for choice in ("required", "auto"):
            tools = [TOOLS[0], tool("f", schema, strict=choice == "auto")]
            message = refusal(client.post(CHATS, json=chat(tools=tools, tool_choice=choice)), "tools")
            assert message.startswith("tools[1].function.parameters: it cannot be compiled"), message
    for fields, name in (
        ({"response_format": {"type": "json_object"}}, "tool_choice"), ({"min_tokens": 3}, "min_tokens"),
    ):  # fmt: skip
        refusal(client.post(CHATS, json=chat(tool_choice="required") | fields), name)


def test_a_schema_that_is_compiled_for_long_is_named(monkeypatch):
    pytest.importorskip("xgrammar")
    monkeypatch.setattr(grammars, "SECONDS", 0.3)
    slow = {"type": "object", "minProperties": 400, "properties": {f"p{n}": {"type": "string"} for n in range(500)}}
    cache = grammars.GrammarCache(AutoTokenizer.from_pretrained(DEMO), 4096, None)
    with pytest.raises(Refusal, match=r"tools\[1\].function.parameters: it takes more than"):
        cache.processor(*plan(tools=[TOOLS[0], tool("f", slow)], tool_choice="required").grammar(PROMPT))


FINITE = [
    {}, {"type": "array", "items": {"$ref": "#"}}, {"type": "object", "properties": {"a": {"$ref": "#"}}},
    {"anyOf": [{"$ref": "#"}, {"type": "null"}]}, {"$ref": "#/nowhere"}, {"$ref": "other.json"},
    {"$defs": {"a/b": {"type": "integer"}}, "allOf": [{"$ref": "#/$defs/a~1b"}]}, {"enum": [{"$ref": "#"}]},
    {"type": ["object", "null"], "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"required": 5, "allOf": 5},
]  # fmt: skip
ENDLESS = [
    {"$ref": "#"}, {"anyOf": [{"$ref": "#"}]}, {"allOf": [{}, {"$ref": "#"}]},
    {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]  # fmt: skip


def test_schemas_of_endless_values_are_found():
    assert all(map(has_finite_value, FINITE)) and not any(map(has_finite_value, ENDLESS))
    chain = {
        "$defs": {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)},
        "$ref": "#/$defs/a0",
    }
    assert has_finite_value(chain)  # 2 ** 60 paths
    chain["$defs"]["a60"] = {"$ref": "#/$defs/a0"}
    assert not has_finite_value(chain)
