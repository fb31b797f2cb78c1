"""The fields of requests: what is served, what is accepted without effect, and errors that OpenAI's client shows."""

import itertools
import json
import re
import socket

import openai
import pytest

from server_fixtures import (  # isort: skip
    CHATS, COMPLETIONS, DIALECTS, MESSAGES, PROMPT, RESPONSES, ask, body, events, expected, read, refusal, user,
    wait_until,
)  # fmt: skip
from transformers import LogitsProcessor

from spec_compile.serve import errors
from spec_compile.serve.fields import MOST_NOTED
from spec_compile.serve.models import ChatFields, CompletionFields, ResponseFields

FIELDS = {
    CHATS: ChatFields.model_fields, COMPLETIONS: CompletionFields.model_fields, RESPONSES: ResponseFields.model_fields,
}  # fmt: skip
OF_OPENAI = pytest.mark.parametrize("path", FIELDS)
SERVER = dict(slots=4, max_queue=64, served_model_name="tiny")


# What is served


@pytest.mark.parametrize(("path", "text"), [(COMPLETIONS, PROMPT), (CHATS, "# a\n")])
def test_biases_are_those_of_generate(client, alone, path, text):
    """As OpenAI's clients send them, with ints."""
    _, tokenizer = alone
    first = tokenizer(expected(alone, PROMPT, max_new_tokens=1, do_sample=False))["input_ids"][0]
    for biases in ({str(first): -100}, {str(first): -100, "7": 100}, {"7": 2.5}):
        options = {"sequence_bias": {(int(token),): float(bias) for token, bias in biases.items()}}
        wanted = expected(alone, text, max_new_tokens=12, do_sample=False, **options)
        prompt = text if path == COMPLETIONS else "a"
        assert ask(client, path, prompt, 12, logit_bias=biases).text == wanted


class Counted(LogitsProcessor):
    """OpenAI's formula, token by token."""

    def __init__(self, width, frequency, presence):
        self.width, self.frequency, self.presence = width, frequency, presence

    def __call__(self, input_ids, scores):
        scores, answer = scores.clone(), input_ids[0, self.width :].tolist()
        for token in set(answer):
            scores[0, token] -= answer.count(token) * self.frequency + self.presence
        return scores


@pytest.mark.parametrize(("frequency", "presence"), [(1.5, 0), (-2, 0), (0, 2), (0.5, -1.5)])
@pytest.mark.parametrize("temperature", [0, 0.9])
def test_penalties_are_openais(client, alone, frequency, presence, temperature):
    penalty = Counted(len(alone[1](PROMPT)["input_ids"]), frequency, presence)
    options = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": 0.9}
    wanted = expected(alone, PROMPT, 3, max_new_tokens=40, logits_processor=[penalty], **options)
    fields = {"frequency_penalty": frequency, "presence_penalty": presence, "temperature": temperature, "seed": 3}
    assert ask(client, COMPLETIONS, PROMPT, 40, **fields).text == wanted


def test_a_limit_in_the_generation_config_is_a_limit(client, alone):
    """max_length counts the prompt."""
    width = len(alone[1](PROMPT)["input_ids"])
    fields = {"prompt": PROMPT, "generation_config": json.dumps({"max_length": width + 5})}
    answer = read(client.post(COMPLETIONS, json=fields))
    assert (answer.count, answer.reason) == (5, "length")
    fields["generation_config"] = json.dumps({"max_length": width})
    refusal(client.post(COMPLETIONS, json=fields), "generation_config")


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_stream_ends_with_the_last_character_though_it_is_incomplete(client, alone, path):
    """The answer is cut inside of a character of several bytes."""
    _, tokenizer = alone
    half = tokenizer("é", add_special_tokens=False)["input_ids"]
    half = half if len(half) > 1 else [tokenizer.convert_tokens_to_ids("Ã")]
    texts = [ask(client, path, PROMPT, 3, logit_bias={str(half[0]): 100}, stream=each).text for each in (False, True)]
    assert texts[0] == texts[1] and texts[0].endswith("\ufffd")


def test_what_transformers_leaves_out_of_a_message_reaches_the_template(client, alone, monkeypatch):
    """The name, the reasoning, and the content beside calls; a developer is the system to a template without one."""
    template = (
        "{% for m in messages %}{{ m.role }} {{ m.name }} {{ m.reasoning_content }} {{ m.content }}\n{% endfor %}"
    )
    monkeypatch.setattr(client.runner.requests.processor, "chat_template", template)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "user", "name": "Ada", "content": [{"type": "text", "text": "hello"}], "tool_calls": None},
        {"role": "assistant", "reasoning_content": "so", "content": "yes", "tool_calls": [call], "annotations": []},
    ]
    rendered = "system   short\nuser Ada  hello\nassistant  so yes\n"
    wanted = expected(alone, rendered, max_new_tokens=8, do_sample=False)
    assert ask(client, CHATS, limit=8, messages=messages).text == wanted


# Fields without effect

IGNORED = dict.fromkeys(
    ("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"), "a"
) | {"metadata": {"a": "b"}, "prompt_cache_options": {"a": "b"}, "store": True}  # fmt: skip
EMPTY = [
    {"logit_bias": {}}, {"stop": []}, {"stop": ""}, {"stop_token_ids": []}, {"tools": []}, {"metadata": {}},
    {"bad_words": []}, {"stream_options": {}}, {"functions": []}, {"chat_template_kwargs": {}}, {"suffix": ""},
    {"generation_config": json.dumps({"stop_strings": ""})}, {"user": ""}, {"include": []}, {"instructions": ""},
    {"generation_config": '{"stop_strings": [], "bad_words_ids": [], "sequence_bias": [], "suppress_tokens": []}'},
    {"logit_bias": {}, "generation_config": json.dumps({"sequence_bias": []})}, {"text": {}}, {"reasoning": {}},
    {"context_management": []}, {"prompt_cache_options": {}}, {"reasoning_effort": ""},
]  # fmt: skip


@pytest.mark.parametrize("path", [CHATS, RESPONSES])
def test_fields_without_effect_are_accepted(client, path):
    assert ask(client, path, **IGNORED).text == ask(client, path).text


@pytest.mark.parametrize("path", [*DIALECTS, "/tokenize"])
def test_unknown_fields_are_ignored_and_told_once(client, caplog, monkeypatch, path):
    """Clients send what other servers know. A name of theirs writes no lines of the log."""
    monkeypatch.setattr("spec_compile.serve.fields.NOTED", noted := set())
    least = body(path) if path in DIALECTS else {"messages": user("a")}
    if "messages" in least:
        least["messages"][0]["weight"] = 1
    odd = {"speed": 9, "a\nb": [], "x" * 100_000: {}}
    for _ in range(2):
        assert client.post(path, json=least | odd).status_code == 200
    told = [each.message for each in caplog.records if "which is ignored" in each.message]
    assert len(told) == 3 + ("messages" in least) and all(len(line) < 200 and line.isprintable() for line in told)
    many = {f"n{number}": 1 for number in range(1000)}
    assert client.post(path, json=least | many).status_code == 200 and len(noted) == MOST_NOTED


@OF_OPENAI
def test_empty_values_have_no_effect(client, path):
    """OpenAI's and vLLM's APIs take them for values that are not given."""
    plain = ask(client, path, temperature=0)
    known = [given for given in EMPTY if given.keys() <= FIELDS[path].keys()]
    assert len(known) > 8
    for given in known:
        answer = ask(client, path, temperature=0, **given)
        assert (answer.text, answer.reason, answer.usage) == (plain.text, plain.reason, plain.usage), given


@OF_OPENAI
def test_no_field_of_openais_is_dropped(client, path):
    """Each that its clients know is served, accepted without effect, or refused by its name."""
    from openai.types.chat import completion_create_params as chat
    from openai.types.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

    known = {
        CHATS: chat.CompletionCreateParamsStreaming.__mutable_keys__,
        COMPLETIONS: CompletionCreateParamsBase.__mutable_keys__,
        RESPONSES: ResponseCreateParamsStreaming.__mutable_keys__,
    }[path]
    taken = (
        "temperature", "top_p", "frequency_penalty", "presence_penalty", "reasoning", "text", "prompt_cache_options"
    )  # fmt: skip
    for name, value in itertools.product({*known} - {"user", "metadata"}, ({"a": {}}, 0.125)):
        response = client.post(path, json=body(path) | {name: value})
        if response.status_code != 200:
            refusal(response, name)
        else:
            assert name in taken or name not in FIELDS[path]


# Whose fault it is


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_no_field_is_blamed_for_a_failure_of_the_server(client, monkeypatch, path):
    from spec_compile.serve import endpoint

    requests = client.runner.requests
    for place, name in ((endpoint, "make_config"), (requests, "_options"), (requests, "_check_room"),
                        (endpoint, "read_prediction"), (endpoint, "read_tool_calls")):  # fmt: skip
        if path == CHATS or name != "read_tool_calls":
            monkeypatch.setattr(place, name, lambda *args: max([]))
            response = client.post(path, json=body(path, prediction={"type": "content", "content": "a"}))
            assert response.status_code == 500 and "max()" not in response.text, name
            monkeypatch.undo()


def test_a_template_that_fails_blames_the_field_on_which_it_fails(client, monkeypatch):
    requests = client.runner.requests
    template = (
        "{% if tools and tools[0].function.name == 'f' %}{{ raise_exception('no') }}{% endif %}{{ word.x.y }}"
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% for each in messages %}{{ each.content }}{{ each.name.x.y if each.name }}{% endfor %}"
    )
    monkeypatch.setattr(requests.processor, "chat_template", template)
    word = {"chat_template_kwargs": {"word": {"x": {"y": "a"}}}}
    assert client.post(CHATS, json=body(CHATS) | word).status_code == 200
    nested, flat = {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}
    system, named = {"role": "system", "content": "a"}, {"role": "user", "content": "a", "name": "b"}
    for path, fields in (
        (CHATS, {"tools": [nested]}), (CHATS, {"messages": [system]}), (CHATS, {"messages": [named]}),
        (RESPONSES, {"tools": [flat]}), (RESPONSES, {"instructions": "a"}), (MESSAGES, {"system": "a"}),
    ):  # fmt: skip
        (blamed,) = fields
        reason = refusal(client.post(path, json=body(path) | word | fields), blamed)
        assert reason.startswith(f"{blamed}: it cannot be made a prompt of")
    monkeypatch.setattr(requests.processor, "chat_template", "{% if word is defined %}{{ word.x.y }}{% endif %}a")
    refusal(client.post(CHATS, json=body(CHATS, chat_template_kwargs={"word": {}})), "chat_template_kwargs")


def test_a_prompt_that_fills_the_row_is_refused(client, alone):
    """It would get no token."""
    row, (token,) = client.runner.requests.row_tokens, alone[1]("a")["input_ids"]
    text = alone[1].decode([token] * row)
    while len(alone[1](text)["input_ids"]) < row:
        text += "a"
    assert "no room" in refusal(client.post(COMPLETIONS, json=body(COMPLETIONS, text, 1)), "prompt")


# What OpenAI's client shows


def test_openais_client_shows_the_reason(sdk, client, monkeypatch):
    create = sdk.completions.create
    with pytest.raises(openai.BadRequestError, match="max_tokens") as caught:
        create(model="tiny", prompt="a", max_tokens=10**13)
    assert caught.value.param == "max_tokens" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match="'other'") as caught:
        create(model="other", prompt="a")
    assert caught.value.code == "model_not_found" and caught.value.param == "model"
    with pytest.raises(openai.NotFoundError, match="/v1/embeddings"):
        sdk.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.NotFoundError, match="/v1/audio/transcriptions"):
        sdk.audio.transcriptions.create(model="tiny", file=b"a")
    monkeypatch.setattr(client.runner.requests, "_options", lambda *args: {"logits_processor": [fail]})
    with pytest.raises(openai.APIError, match="its log has the reason"):
        list(create(model="tiny", prompt="a", stream=True))
    stream = sdk.responses.create(model="tiny", input="a", stream=True)
    (error,) = [each.message for each in stream if each.type == "error"]
    assert "its log has the reason" in error


def fail(*args, **kwargs):
    raise ArithmeticError('no "more"')


@pytest.mark.parametrize(("method", "path", "status"), [("GET", COMPLETIONS, 405), ("POST", "/nothing", 404)])
def test_other_routes_are_refused_in_openais_form(client, method, path, status):
    assert path in refusal(client.request(method, path), None, status)


def test_a_served_name_stands_for_the_model(client, sdk, folder):
    assert [model.id for model in sdk.models.list().data] == ["tiny"] and sdk.models.retrieve("tiny").id == "tiny"
    for model in ("none", str(folder)):
        refusal(client.get(f"/v1/models/{model}"), "model", 404)
    for path, streamed in itertools.product(FIELDS, (False, True)):
        response = client.post(path, json=body(path, model="tiny", stream=streamed))
        assert response.status_code == 200 and '"tiny"' in response.text and str(folder) not in response.text


# Errors that are told


def test_settings_that_leave_no_token_are_refused_by_name(client, alone):
    """In a stream, too. The others, and those that do leave one, are answered as by plain decoding."""
    bias = json.dumps({"do_sample": True, "sequence_bias": [[[5], 1e30]], "repetition_penalty": 1e-5})
    names, fields = ("temperature", "generation_config.sequence_bias"), {"temperature": 1e-5, "generation_config": bias}
    for path in (COMPLETIONS, CHATS):
        error = client.post(path, json=body(path) | fields).json()["error"]
        streamed = events(client.post(path, json=body(path) | fields | {"stream": True}))
        assert streamed[-1:] == [{"error": error}] and error["type"] == "invalid_request_error"
        assert error["param"] == names[0] and all(name in error["message"] for name in names)
        assert "no token is left" in error["message"]
    wanted = expected(alone, "a", max_new_tokens=2, do_sample=False)
    assert ask(client, COMPLETIONS, temperature=0).text == wanted
    every = {"sequence_bias": [[[token], -1e30] for token in range(1024)], "guidance_scale": 1e5, "top_k": 1}
    config = json.dumps(every | {"do_sample": True, "min_p": 1.0})
    assert client.post(COMPLETIONS, json=body(COMPLETIONS, generation_config=config)).status_code == 200


class Heap:
    """An object whose text has its address."""


FAULTS = {
    "an object": ValueError(Heap()), "a path": OSError(2, "none", "/etc/shadow"), "a key": KeyError("messages"),
    "lines": RuntimeError("\n2026-01-01 root logged in\x1b[31m"), "a long one": RuntimeError("no" * 10_000),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", DIALECTS)
def test_the_text_of_an_exception_is_for_the_log(client, monkeypatch, caplog, path, fault):
    """Whether it is raised before the rounds, in a round, in a stream, or outside of all handlers. Others go on."""
    secrets = ("0x", "shadow", "KeyError", "logged in", "nono", "Traceback", 'File "')
    plain = ask(client, path).text

    def fail(*args, **kwargs):
        raise FAULTS[fault]

    def told(response):
        assert "the server failed; its log has the reason under error" in response.text
        name = re.search(r"error ([0-9a-f]{16})", response.text)[1]
        assert not any(secret in response.text for secret in secrets), response.text
        (record,) = [each.message for each in caplog.records if each.message.startswith(f"error {name}: ")]
        assert all(line.startswith("    | ") and line.isprintable() for line in record.splitlines()[1:])
        assert str(FAULTS[fault]).strip()[:5] in record.replace("\\\\", "\\")

    requests = client.runner.requests
    monkeypatch.setattr(requests, "_options", fail)
    response = client.post(path, json=body(path))
    assert response.status_code == 500
    told(response)
    monkeypatch.setattr(requests, "_options", lambda *args: {"logits_processor": [fail]})
    for stream in (False, True):
        response = client.post(path, json=body(path, stream=stream))
        assert response.status_code == (200 if stream else 500)
        assert "[DONE]" not in response.text
        told(response)
    monkeypatch.setattr(requests, "admit", fail)
    told(client.post(path, json=body(path)))
    monkeypatch.undo()
    assert requests.ailment() is None and ask(client, path).text == plain


def test_a_client_that_leaves_before_its_body_has_come_is_no_error(client, caplog):
    with socket.create_connection((client.base_url.host, client.base_url.port), 10) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        raw.sendall(b"Content-Length: 100\r\n\r\n{")
        wait_until(lambda: client.runner.requests.bodies._timers)
    wait_until(lambda: not client.runner.requests.bodies._timers)
    assert not [each for each in caplog.records if each.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("a <a.B object at 0x7f12345678> b", "a <object> b"), ("at 0x7ffff7a0 end", "at <object> end"), ("0x1f", "0x1f"),
     ("a\nb\x1b[0m\u202ec", "a b\ufffd[0m\ufffdc"), ("x" * 2000, "x" * 900 + "...")],
)  # fmt: skip
def test_messages_to_clients_are_tidy(given, wanted):
    assert errors.tidy(given) == wanted == str(errors.Refusal(400, given).detail)
    assert errors.quoted(ValueError("no ~/a/b, /root/x.py or ../c/d at https://a/b/c")) == (
        "no <path>, <path> or <path> at https://a/b/c"
    )
