"""Anthropic's Messages API, by its client and by plain HTTP: the answers are those of chats."""

import itertools
import json

import pytest

from server_fixtures import (  # isort: skip
    CHATS, COUNT, MESSAGES, RESPONSES, ask, body, least, refusal, running, save_model, save_tool_model, scripted, user,
)  # fmt: skip

from spec_compile.serve.answers import StopCut
from spec_compile.serve.anthropic_fields import RENAMED, to_chat
from spec_compile.serve.errors import Refusal, refuse

BODY = body(MESSAGES, "a mean", 24)
TOOLS = [{"name": "look", "description": "looks", "input_schema": {"type": "object", "properties": {}}}]
SPOKEN = (
    '<think>so it is</think>It is END done.<tool_call>{"name": "look", "arguments": {"place": "Rome"}}</tool_call>'
    '<tool_call>{"name": "go", "arguments": {}}</tool_call>'
)
SAVE = save_tool_model
SERVER = dict(slots=4, served_model_name="tiny")


@pytest.fixture(scope="module")
def sdk(client):
    anthropic = pytest.importorskip("anthropic", reason="needs anthropic, the client")
    with anthropic.Anthropic(base_url=str(client.base_url), api_key="unused", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A client of a server whose model takes no tools."""
    with running(save_model(tmp_path_factory.mktemp("plain")), slots=1) as client:
        yield client


def counts(usage: dict) -> tuple[int, int]:
    """The tokens of a prompt, of which some may have been in the cache, and of its answer."""
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]


def tell(client, **fields):
    """The body of an answer."""
    response = client.post(MESSAGES, json=BODY | fields)
    assert response.status_code == 200, response.text
    return response.json()


def stream(client, **fields):
    """The events of a stream, by name and data."""
    response = client.post(MESSAGES, json=BODY | {"max_tokens": 200, "stream": True} | fields)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    parts = [part.split("\n") for part in response.text.split("\n\n") if part]
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]
    assert all(name == data["type"] for name, data in found)
    return found


@pytest.mark.parametrize(
    ("fields", "others"),
    [
        ({"temperature": 0}, {}), ({"temperature": 1.0, "seed": 3, "top_p": 0.9, "top_k": 30}, {}),
        ({"temperature": 0, "stop_sequences": ["1"]}, {"stop": ["1"]}),
        ({"temperature": 0, "system": "be brief"}, {}), ({"temperature": 0, "stop_sequences": []}, {}),
        ({"temperature": 0, "system": [], "tools": [], "mcp_servers": [], "metadata": {}, "output_config": {}}, {}),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_answers_are_those_of_chats(client, fields, others):
    ours = ("system", "stop_sequences", "mcp_servers", "output_config")
    same = {name: value for name, value in fields.items() if name not in ours}
    if fields.get("system"):
        same["messages"] = [{"role": "system", "content": fields["system"]}, *BODY["messages"]]
    wanted, got = ask(client, CHATS, "a mean", 24, **same, **others), tell(client, **fields)
    stop, told = others.get("stop", [None])[0], (wanted.usage["prompt_tokens"], wanted.count)
    assert got["content"] == [{"type": "text", "text": wanted.text}] and (stop is None or stop not in wanted.text)
    assert counts(got["usage"]) == told
    assert (got["stop_reason"], got["stop_sequence"]) == (("stop_sequence", stop) if stop else ("max_tokens", None))
    assert (got["type"], got["role"], got["model"]) == ("message", "assistant", "tiny") and got["id"].startswith("msg_")
    counted = {name: fields[name] for name in fields if name == "system"}
    assert client.post(COUNT, json=least(COUNT) | {"messages": BODY["messages"]} | counted).json() == {
        "input_tokens": told[0]
    }


def test_an_answer_with_thinking_text_and_calls(client):
    with scripted(client, SPOKEN):
        got = tell(client, tools=TOOLS, max_tokens=200)
    thinking, text, first, second = got["content"]
    assert thinking == {"type": "thinking", "thinking": "so it is", "signature": ""}
    assert text == {"type": "text", "text": "It is END done."}
    assert first | {"id": 0} == {"type": "tool_use", "id": 0, "name": "look", "input": {"place": "Rome"}}
    assert second | {"id": 0} == {"type": "tool_use", "id": 0, "name": "go", "input": {}}
    assert first["id"] != second["id"] and got["stop_reason"] == "tool_use"


def test_events_come_in_order(client):
    with scripted(client, SPOKEN):
        whole, found = tell(client, tools=TOOLS, max_tokens=200), stream(client, tools=TOOLS)
    names = [name for name, _ in found]
    assert names[:2] == ["message_start", "ping"] and names[-2:] == ["message_delta", "message_stop"]
    start = found[0][1]["message"]
    assert start["content"] == [] and counts(start["usage"]) == (counts(whole["usage"])[0], 0)
    blocks = []
    for name, data in found[2:-2]:
        if name == "content_block_start":
            assert data["index"] == len(blocks)
            blocks.append(dict(data["content_block"]))
            pieces = []
        elif name == "content_block_delta":
            assert data["index"] == len(blocks) - 1
            pieces.append(next(value for key, value in data["delta"].items() if key != "type"))
        else:
            assert name == "content_block_stop" and data["index"] == len(blocks) - 1
            key = {"thinking": "thinking", "text": "text", "tool_use": "input"}[blocks[-1]["type"]]
            blocks[-1][key] = json.loads("".join(pieces)) if key == "input" else "".join(pieces)
    assert [block | {"id": 0} for block in blocks] == [block | {"id": 0} for block in whole["content"]]
    last = found[-2][1]
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert counts(last["usage"]) == counts(whole["usage"])
    assert "speculative_decoding" in last["metrics"]


def test_a_stream_is_cut_before_the_stop_sequence(client):
    with scripted(client, SPOKEN):
        found = stream(client, stop_sequences=["never", "END"])
    texts = [data["delta"]["text"] for _, data in found if data.get("delta", {}).get("type") == "text_delta"]
    assert "".join(texts) == "It is "
    assert found[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "END"}


def test_a_cut_does_not_depend_on_the_pieces():
    for text, stops in itertools.product(("aENDbEND", "aENED", "EN", "xNDE", "aEEND"), (["END"], ["ND", "END"], [])):
        found = [(text.find(stop) + len(stop), stop) for stop in stops if stop in text]
        end, stop = min(found, key=lambda each: (each[0], -len(each[1])), default=(len(text), None))
        for marks in itertools.product((False, True), repeat=len(text) - 1):
            cut, out, piece = StopCut(stops), "", ""
            for letter, ends in zip(text, (*marks, True)):
                piece += letter
                if ends:
                    out, piece = out + cut.feed(piece), ""
            out += cut.rest()
            assert (out, cut.found) == (text[: end - len(stop or "")], stop)
        assert (StopCut(stops).whole(text), StopCut(stops, True).whole(text)) == (out, text[:end])


def test_thinking_budgets(client):
    thinking = {"type": "enabled", "budget_tokens": 3}
    chat = to_chat(BODY | {"thinking": thinking}, "{{ enable_thinking }}", False, True)
    assert chat["thinking_token_budget"] == 3 and chat["chat_template_kwargs"] == {"enable_thinking": True}
    free, got = (tell(client, system="<think>", temperature=0, **each) for each in ({}, {"thinking": thinking}))
    assert "</think>" not in free["content"][0]["text"]  # it begins in the prompt, and its budget is spent there
    assert got["content"][0]["text"].startswith("</think>") and got["stop_reason"] == "max_tokens"
    off = to_chat(BODY | {"thinking": {"type": "disabled"}}, "{% if not thinking %}", False, True)
    assert off["chat_template_kwargs"] == {"thinking": False} and "thinking_token_budget" not in off


def test_messages_become_those_of_a_chat():
    blocks = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "citations": []}]},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "so", "signature": ""}, {"type": "text", "text": "d"},
            {"type": "tool_use", "id": "1", "name": "look", "input": {"x": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "e"}], "is_error": True},
            {"type": "text", "text": "f", "cache_control": {"type": "ephemeral"}}]},
    ]  # fmt: skip
    system = [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}]
    more = {"tools": TOOLS, "tool_choice": {"type": "any"}, "stop_sequences": ["x"], "metadata": {"user_id": "u"}}
    chat = to_chat({"messages": blocks, "system": system, "max_tokens": 5} | more, "", False, True)
    function = {"name": "look", "arguments": '{"x": 1}'}
    assert chat == {
        "max_tokens": 5, "stop": ["x"], "tool_choice": "required",
        "tools": [{"type": "function", "function": {"name": "look", "description": "looks",
                                                    "parameters": TOOLS[0]["input_schema"]}}],
        "messages": [
            {"role": "system", "content": "s\nt"}, {"role": "user", "content": "a\nb\nc"},
            {"role": "assistant", "content": "d", "reasoning_content": "so",
             "tool_calls": [{"id": "1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "1", "content": "Error: e"}, {"role": "user", "content": "f"},
        ],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ({"type": "url", "url": "http://a/b.png"}, "http://a/b.png"),
        ({"type": "base64", "media_type": "image/png", "data": "QQ=="}, "data:image/png;base64,QQ=="),
    ],
    ids=["url", "base64"],
)
def test_pictures_go_to_models_that_read_them(source, url):
    content = [{"type": "text", "text": "a"}, {"type": "image", "source": source}]
    asked = BODY | {"messages": user(content)}
    parts = to_chat(asked, "", True, True)["messages"][0]["content"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
    for wrong in ({"type": "base64", "data": "QQ=="}, {"type": "text", "data": "a"}):
        with pytest.raises(Refusal, match=r"messages\[0\].content\[1\].source"):
            to_chat(BODY | {"messages": user([content[0], {"type": "image", "source": wrong}])}, "", True, True)
    with pytest.raises(Refusal, match=r"messages\[0\].content\[1\].type: the model reads only text"):
        to_chat(asked, "", False, True)


def test_errors_have_the_clients_names():
    for name, theirs in (("stop", "stop_sequences"), ("parallel_tool_calls", "tool_choice.disable_parallel_tool_use")):
        refusal = refuse(name, "no")
        refusal.rename(RENAMED)
        assert (refusal.detail, refusal.param) == (f"{theirs}: no", theirs)
    refusal = refuse("messages[0].role", "no")
    refusal.rename(RENAMED)
    assert (refusal.detail, refusal.param) == ("messages[0].role: no", "messages")
    asked = BODY | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert to_chat(asked, "", False, False)["parallel_tool_calls"] is False


@pytest.mark.parametrize(
    ("place", "name", "value", "status", "kind"),
    [("workers", "busy", 1 << 20, 429, "rate_limit_error"), ("", "is_draining", True, 503, "overloaded_error"),
     ("", "_check_room", None, 500, "api_error")],
)  # fmt: skip
def test_other_errors_have_the_form(client, monkeypatch, place, name, value, status, kind):
    monkeypatch.setattr(getattr(client.runner.requests, place) if place else client.runner.requests, name, value)
    response = client.post(MESSAGES, json=BODY)
    assert response.status_code == status and response.json()["error"]["type"] == kind
    assert status != 429 or response.headers["retry-after"]
    assert status == 500 or response.json()["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES])
def test_a_model_without_tools(plain, path):
    flat = {"name": "look", "parameters": TOOLS[0]["input_schema"]}
    tools = {CHATS: [{"type": "function", "function": flat}], RESPONSES: [{"type": "function"} | flat]}.get(path, TOOLS)
    assert "takes no tools" in refusal(plain.post(path, json=body(path, tools=tools)), "tools")
    assert ask(plain, path, tools=tools, tool_choice={"type": "none"} if path == MESSAGES else "none")


def test_an_answer_in_a_form(client):
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "schema": {"enum": ["red", "green"]}}
    got = tell(client, temperature=0, output_config={"format": form})
    assert json.loads(got["content"][0]["text"]) in ("red", "green") and got["stop_reason"] == "end_turn"
    response = client.post(MESSAGES, json=BODY | {"output_config": {"format": form | {"schema": {"type": "a"}}}})
    assert response.json()["error"]["message"].startswith("output_config.format")


def test_anthropics_client(client, sdk):
    with scripted(client, SPOKEN):
        asked = BODY | {"max_tokens": 200, "model": "tiny", "tools": TOOLS}
        got = sdk.messages.create(**asked)
        with sdk.messages.stream(**asked) as streamed:
            text = "".join(streamed.text_stream)
            final = streamed.get_final_message()
    assert [block.type for block in got.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert text == got.content[1].text and got.stop_reason == final.stop_reason == "tool_use"
    assert got.content[2].input == final.content[2].input == {"place": "Rome"}
    assert counts(vars(got.usage)) == counts(vars(final.usage))
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "sunny"} for block in got.content[2:]]
    messages = [*BODY["messages"], {"role": "assistant", "content": got.content}, {"role": "user", "content": results}]
    counted = sdk.messages.count_tokens(model="tiny", messages=messages, tools=TOOLS).input_tokens
    follow = sdk.messages.create(**asked | {"messages": messages, "max_tokens": 8})
    assert counts(vars(follow.usage))[0] == counted > counts(vars(got.usage))[0] and follow.stop_reason == "max_tokens"


def test_anthropics_client_shows_errors(sdk):
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="top_p: expected") as error:
        sdk.messages.create(**BODY, model="tiny", extra_body={"top_p": 3})
    assert error.value.body["error"]["type"] == "invalid_request_error" and error.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        sdk.messages.create(**BODY, model="other")
