"""Input that is large, deep, odd or of the wrong type: refused by name within two seconds, next to others' requests."""

import json
import re
import socket
import threading
import time
import tracemalloc
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server_fixtures import (  # isort: skip
    CHATS, COMPLETIONS, COUNT, JSON, MESSAGES, PROMPT, RESPONSES, ask, body, least, save_tool_model, wait_until,
)  # fmt: skip
from transformers import GenerationConfig

from spec_compile.serve.anthropic_fields import MessageFields, PromptFields
from spec_compile.serve.handlers import ChatToTokens, TextToTokens
from spec_compile.serve.models import ChatFields, CompletionFields, ResponseFields

MODELS = {
    CHATS: ChatFields, COMPLETIONS: CompletionFields, RESPONSES: ResponseFields, MESSAGES: MessageFields,
    COUNT: PromptFields,
}  # fmt: skip
FIELDS = {path: {*model.model_fields} for path, model in MODELS.items()} | {
    "/tokenize": {*ChatToTokens.model_fields, *TextToTokens.model_fields}, "/detokenize": {"model", "tokens"},
}  # fmt: skip
SECONDS = 4.0
"""The time in which a bad request is refused: two seconds, and as much again where other tests run, too."""


SAVE = save_tool_model
SERVER = dict(slots=4, max_queue=64, served_model_name="tiny")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left(client):
    yield
    manager = client.runner.requests.manager
    wait_until(lambda: manager.active_requests == 0)
    assert manager.output_router.result_handlers == {} and client.runner.requests.ailment() is None


@contextmanager
def neighbour(client):
    """Another client asks again and again, and always gets the same answer within a few seconds."""
    answers, waits, is_over = [], [], threading.Event()

    def ask_on():
        while not is_over.is_set():
            begin = time.monotonic()
            answers.append(ask(client, COMPLETIONS, PROMPT, 16).text)
            waits.append(time.monotonic() - begin)

    thread = threading.Thread(target=ask_on)
    thread.start()
    try:
        yield
    finally:
        wait_until(lambda: len(answers) > 1 or not thread.is_alive())
        is_over.set()
        thread.join()
    assert len(answers) > 1 and len({*answers}) == 1 and max(waits) < SECONDS


def send(client, path, content, **headers):
    """The status and the error's param and message of an answer that came in time."""
    begin = time.monotonic()
    response = client.post(path, content=content, headers=JSON | headers)
    took = time.monotonic() - begin
    assert took < SECONDS, f"{took:.1f} s"
    if response.status_code == 200:
        return 200, None, response.text
    error = response.json()["error"]
    assert error["message"] and len(error["message"]) < 1000
    assert error.keys() == ({"type", "message"} if path in (MESSAGES, COUNT) else {"message", "type", "param", "code"})
    return response.status_code, error.get("param"), error["message"]


HUGE = {
    "no_repeat_ngram_size": 2**31 - 1, "encoder_no_repeat_ngram_size": 2**31 - 1, "top_k": 2**31 - 1,
    "min_length": 2**31 - 1, "max_length": 2**63 - 1, "max_time": 1e308, "guidance_scale": 1e308,
    "repetition_penalty": 10**4000, "sequence_bias": [[[5], 10**4000]], "watermarking_config": {"context_width": 2**31},
    "bad_words_ids": [[5] * 2048], "suppress_tokens": [5] * 1024, "forced_eos_token_id": 2**31 - 1,
    "exponential_decay_length_penalty": [2**31 - 1, 1e5],
}  # fmt: skip


def test_large_settings_take_no_memory(client):
    """Each alone, and a neighbour in the meantime."""
    with neighbour(client):
        for name, value in HUGE.items():
            content = json.dumps(body(COMPLETIONS, PROMPT, 4, generation_config=json.dumps({name: value})))
            tracemalloc.start()
            status, _, message = send(client, COMPLETIONS, content)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert status == 200 or (status == 400 and {name, "generation_config"} & {*re.findall(r"\w+", message)})
            assert peak < 8 << 20, (name, peak)


def large():
    """Bodies that are too large, as (path, content, status, a word of the message)."""
    filled = json.dumps(body(COMPLETIONS))[:-1].encode()
    biases = b",".join(b'"%d":1' % token for token in range(1_000_000))
    messages = b",".join([b'{"role":"user","content":"a"}'] * 1_000_000)
    yield COMPLETIONS, b'{"prompt":"' + b"a" * 20_000_000 + b'"}', 413, "bytes"
    yield COMPLETIONS, filled + b',"logit_bias":{' + biases + b"}}", 413, "bytes"
    yield COMPLETIONS, filled + b',"logit_bias":{' + biases[: biases.index(b',"50000"')] + b"}}", 400, "logit_bias"
    yield CHATS, b'{"messages":[' + messages + b"]}", 413, "bytes"
    yield CHATS, b'{"messages":[' + messages[: 30 * 30_000 - 1] + b"]}", 400, "messages"
    for path, name in ((COMPLETIONS, "stop"), (CHATS, "stop"), (MESSAGES, "stop_sequences")):
        for stops in ([str(number) for number in range(10_000)], ["x" * 1_000_000]):
            yield path, json.dumps(body(path) | {name: stops}).encode(), 400, name
    for opened, closed in ((b"[", b"]"), (b'{"a":', b"}")):  # Python's decoder raises RecursionError for both
        deep = filled + b',"seed":' + opened * 20_000 + b"1" + closed * 20_000 + b"}"
        yield COMPLETIONS, deep, 422, "in each other"
    yield COMPLETIONS, filled + b',"seed":[' + b",".join([b"1"] * 400_000) + b"]}", 400, "seed"
    yield COMPLETIONS, filled + b',"' + b"a" * 900_000 + b'":1}', 200, "choices"
    yield COMPLETIONS, filled + b"," + b",".join(b'"%d":1' % number for number in range(90_000)) + b"}", 200, "choices"
    yield "/detokenize", json.dumps({"tokens": [5] * 300_000}).encode(), 400, "tokens"


def test_large_bodies_are_refused_in_time(client):
    with neighbour(client):
        for path, content, status, word in large():
            got, _, message = send(client, path, content)
            assert got == status and word in message, (path, content[:80], got, message)


def test_odd_texts_are_refused_or_answered(client):
    """Halves of surrogate pairs, NUL, marks that turn the direction of text, emoji, and characters of other planes."""
    for odd in ("\x00", "\u202e\u2066", "\ufeff", "\U0001f469\u200d\U0001f4bb", "e" + "\u0301" * 500, "\ufffe"):
        for path in FIELDS:
            assert send(client, path, json.dumps(least(path) | {"model": odd}).encode())[:2] in (
                (404, "model"),
                (404, None),
            )
            if path in (CHATS, MESSAGES):
                content = json.dumps(body(path, odd))
                assert send(client, path, content.encode())[0] == 200
        told = client.post("/tokenize", json={"prompt": odd}).json()
        assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": odd}
    for path in FIELDS:
        for name in ("model", "user", "\ud800"):
            content = json.dumps(least(path) | {name: "\ud83d"}).encode()
            assert send(client, path, content)[0] in (400, 422)


def test_odd_headers_are_refused_or_without_effect(client):
    content = json.dumps(body(COMPLETIONS)).encode()
    for name in (b"a" * 257, b"\xff\xfe", "\u202e".encode(), b"a b"):
        status, _, message = send(client, COMPLETIONS, content, **{"X-Request-Id": name})
        assert status == 400 and message.startswith("X-Request-Id")
    assert json.loads(send(client, COMPLETIONS, content, **{"X-Request-Id": b"a" * 256})[2])["id"] == "a" * 256
    assert send(client, COMPLETIONS, content, **{"Authorization": b"\xff\x80", "User-Agent": b"\xe2\x80\xae"})[0] == 200
    assert send(client, COMPLETIONS, content, **{"Content-Type": b"application/json\xff"})[0] == 415
    for header in (b"X-Request-Id: a\0b", b"X: " + b"a" * 1_000_000, b"\xff\xfe: a", b"Content-Length: 99999999999999"):
        with socket.create_connection((client.base_url.host, client.base_url.port), SECONDS) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + header + b"\r\nContent-Type: a\r\n\r\n")
            if not header.startswith(b"Content-Length"):  # the server waits for that body
                assert raw.recv(100).startswith(b"HTTP/1.1 400")
    assert send(client, "/v1/\u202e%00", content)[0] == 404


def schemas():
    """Schemas that recur, or that are far larger than their text."""
    yield {"$ref": "#"}
    yield {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    deep = {}
    for _ in range(40):
        deep = {"type": "array", "items": deep}
    yield deep
    yield {"$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(40)}, "$ref": "#/$defs/d0"}
    yield {"type": "object", "properties": {f"a{i}": {"type": "integer"} for i in range(500)}}
    yield {"type": "string", "pattern": "(a{1,1000}){1,1000}"}
    yield {"type": "array", "minItems": 10**9, "items": {"type": "string", "maxLength": 10**9}}
    yield {"enum": ["x" * 30_000]}
    yield {"type": "\u202e\x00"}


def test_schemas_of_tools_and_forms_that_explode(client):
    """Each is answered in time or refused by its field, and the server still compiles others afterwards."""
    pytest.importorskip("xgrammar")
    with neighbour(client):
        for schema in schemas():
            function = {"name": "f", "parameters": schema, "strict": True}
            tools = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
            answer = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            for fields in (tools, {"response_format": answer}, {"guided_json": schema}):
                status, param, message = send(client, CHATS, json.dumps(body(CHATS) | fields).encode())
                assert status == 200 or (status == 400 and param in {*fields, "messages"}), (schema, message)
        for fields in ({"guided_regex": "(" * 400}, {"guided_regex": "\x00"}, {"guided_grammar": "root ::= root"}):
            status, param, _ = send(client, COMPLETIONS, json.dumps(body(COMPLETIONS) | fields).encode())
            assert status == 400 and param == next(iter(fields))
        content = body(CHATS) | {"guided_json": {"type": "integer"}}
        assert send(client, CHATS, json.dumps(content).encode())[0] == 200


ODD = st.sampled_from(
    [-1, 1 << 31, 1 << 63, 1 << 64, 10**30, 1e308, 5e-324, float("1e999"), "", "\x00", "\u202e", "{", "tiny",
     [[]] * 50, ["a"] * 50, [None], {"type": "text"}, [{"role": "user"}], [{"type": "function"}],
     [{"type": "reasoning"}], [{"role": "assistant", "tool_calls": [{}]}], [{"type": "input_text"}],
     {"type": "tool"}, {"json": {}},
     {"type": "json_schema", "json_schema": {}}, {"type": "content", "content": [{}]}, {"include_usage": 1}]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | ODD,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
SETTINGS = st.builds(
    lambda name, value: json.dumps({name: value}), st.sampled_from([*GenerationConfig().to_dict()]), VALUES
)
"""Texts of the field `generation_config`."""


@given(st.data())
@settings(max_examples=100)
def test_any_json_in_a_field_is_answered_or_refused(client, data):
    """Never a failure, never an endless wait, and the error has the form of the endpoint. 501: xgrammar is missing."""
    path = data.draw(st.sampled_from([*FIELDS]))
    name = data.draw(st.sampled_from(sorted(FIELDS[path])))
    value = data.draw(SETTINGS if name == "generation_config" else VALUES)
    fields = least(path) | {name: value}
    if name != "stream" and "stream" in FIELDS[path]:
        fields["stream"] = data.draw(st.booleans())
    status, param, text = send(client, path, json.dumps(fields).encode())
    assert status in (200, 400, 404, 422, 501), (path, fields, text)
    assert status != 422 or "no JSON" in text or param is not None, text
    assert '"error": {' not in text
