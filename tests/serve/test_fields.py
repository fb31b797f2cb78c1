"""The fields of requests: what is served, what is refused and by which name, and errors that OpenAI's client shows."""

import itertools
import json
import re
import socket

import openai
import pytest
from server_fixtures import PROMPT, events, expected, wait_until
from transformers import LogitsProcessor
from typer.main import get_command

from spec_compile.serve import errors
from spec_compile.serve.fields import MOST_NOTED
from spec_compile.serve.models import ChatFields, CompletionFields, ResponseFields

CHATS, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES = {
    CHATS: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    COMPLETIONS: {"prompt": "a", "max_tokens": 2},
    RESPONSES: {"input": "a", "max_output_tokens": 2},
}
FIELDS = {
    CHATS: ChatFields.model_fields, COMPLETIONS: CompletionFields.model_fields, RESPONSES: ResponseFields.model_fields,
}  # fmt: skip
JSON = {"Content-Type": "application/json"}
SERVER = dict(slots=4, max_queue=64, served_model_name="tiny")


def ask(client, path, **fields):
    return client.post(path, json=BODIES[path] | fields)


def refusal(response, status, field):
    """The reason, of an error in OpenAI's form with this status and field."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["param"] == field, error
    assert field is None or field in error["message"]
    return error["message"]


# What is served


def test_biases_are_those_of_generate(client, alone):
    """As OpenAI's clients send them, with ints; on both endpoints."""
    _, tokenizer = alone
    first = tokenizer(expected(alone, PROMPT, max_new_tokens=1, do_sample=False))["input_ids"][0]
    for biases in ({str(first): -100}, {str(first): -100, "7": 100}, {"7": 2.5}):
        options = {"sequence_bias": {(int(token),): float(bias) for token, bias in biases.items()}}
        wanted = expected(alone, PROMPT, max_new_tokens=12, do_sample=False, **options)
        answer = ask(client, COMPLETIONS, prompt=PROMPT, max_tokens=12, logit_bias=biases).json()
        assert answer["choices"][0]["text"] == wanted
        wanted = expected(alone, "# a\n", max_new_tokens=12, do_sample=False, **options)
        answer = ask(client, CHATS, max_tokens=12, logit_bias=biases).json()
        assert answer["choices"][0]["message"]["content"] == wanted


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
    width = len(alone[1](PROMPT)["input_ids"])
    options = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": 0.9}
    wanted = expected(
        alone, PROMPT, 3, max_new_tokens=40, logits_processor=[Counted(width, frequency, presence)], **options
    )
    fields = {"frequency_penalty": frequency, "presence_penalty": presence, "temperature": temperature, "seed": 3}
    answer = ask(client, COMPLETIONS, prompt=PROMPT, max_tokens=40, **fields).json()
    assert answer["choices"][0]["text"] == wanted


def test_a_limit_in_the_generation_config_is_a_limit(client, alone):
    """max_length counts the prompt."""
    width = len(alone[1](PROMPT)["input_ids"])
    body = {"prompt": PROMPT, "generation_config": json.dumps({"max_length": width + 5})}
    answer = client.post(COMPLETIONS, json=body).json()
    assert answer["usage"]["completion_tokens"] == 5 and answer["choices"][0]["finish_reason"] == "length"
    body["generation_config"] = json.dumps({"max_length": width})
    refusal(client.post(COMPLETIONS, json=body), 400, "generation_config")


def test_responses_are_streamed_only_if_the_client_asks(sdk):
    whole = sdk.responses.create(model="tiny", input="a mean", max_output_tokens=8)
    assert whole.output_text and whole.model == "tiny"
    streamed = sdk.responses.create(model="tiny", input="a mean", max_output_tokens=8, stream=True)
    parts = [event.delta for event in streamed if event.type == "response.output_text.delta"]
    assert "".join(parts) == whole.output_text


def test_a_stream_ends_with_the_last_character_though_it_is_incomplete(client, alone):
    """The answer is cut inside of a character of several bytes."""
    _, tokenizer = alone
    half = tokenizer("é", add_special_tokens=False)["input_ids"]
    half = half if len(half) > 1 else [tokenizer.convert_tokens_to_ids("Ã")]
    fields = {"prompt": PROMPT, "max_tokens": 3, "logit_bias": {str(half[0]): 100}}
    text = ask(client, COMPLETIONS, **fields).json()["choices"][0]["text"]
    assert text.endswith("\ufffd")
    with client.stream("POST", COMPLETIONS, json=fields | {"stream": True}) as response:
        assert "".join(chunk["choices"][0]["text"] for chunk in events(response)) == text
    chat = BODIES[CHATS] | {"logit_bias": {str(half[0]): 100}}
    text = client.post(CHATS, json=chat).json()["choices"][0]["message"]["content"]
    with client.stream("POST", CHATS, json=chat | {"stream": True}) as response:
        chunks = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(response)]
    assert "".join(chunks) == text and text.endswith("\ufffd")


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
    answer = ask(client, CHATS, messages=messages, max_tokens=8).json()
    assert answer["choices"][0]["message"]["content"] == wanted


def test_fields_without_effect_are_accepted(client):
    texts = ("user", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
    objects = {"metadata": {"a": "b"}, "prompt_cache_options": {"a": "b"}}
    fields = dict.fromkeys(texts, "a") | objects | {"store": True}
    for path in (CHATS, RESPONSES):
        assert ask(client, path, **fields).status_code == 200
    assert ask(client, CHATS, stream=True, stream_options={"include_usage": True}).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES, "/v1/messages", "/tokenize"])
def test_unknown_fields_are_ignored_and_told_once(client, caplog, monkeypatch, path):
    """Clients send what other servers know. A name of theirs writes no lines of the log."""
    monkeypatch.setattr("spec_compile.serve.fields.NOTED", noted := set())
    body = BODIES.get(path) or BODIES[CHATS]
    body = {"messages": body["messages"]} if path == "/tokenize" else body
    odd = {"speed": 9, "a\nb": [], "x" * 100_000: {}}
    if "messages" in body:
        body = body | {"messages": [{"role": "user", "content": "a", "weight": 1}]}
    for _ in range(2):
        assert client.post(path, json=body | odd).status_code == 200
    told = [each.message for each in caplog.records if "which is ignored" in each.message]
    assert len(told) == 3 + ("messages" in body) and all(len(line) < 200 and line.isprintable() for line in told)
    many = {f"n{number}": 1 for number in range(1000)}
    assert client.post(path, json=body | many).status_code == 200 and len(noted) == MOST_NOTED


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES])
def test_empty_values_have_no_effect(client, path):
    """OpenAI's and vLLM's APIs take them for values that are not given."""
    settings = {"stop_strings": [], "bad_words_ids": [], "sequence_bias": [], "suppress_tokens": []}
    cases = [
        {"logit_bias": {}}, {"stop": []}, {"stop": ""}, {"stop_token_ids": []}, {"tools": []}, {"metadata": {}},
        {"bad_words": []}, {"stream_options": {}}, {"functions": []}, {"chat_template_kwargs": {}}, {"suffix": ""},
        {"generation_config": json.dumps(settings)}, {"generation_config": json.dumps({"stop_strings": ""})},
        {"logit_bias": {}, "generation_config": json.dumps({"sequence_bias": []})}, {"user": ""}, {"include": []},
        {"instructions": ""}, {"text": {}}, {"reasoning": {}}, {"context_management": []}, {"prompt_cache_options": {}},
    ]  # fmt: skip

    def told(answer):
        parts = {name: answer[name] for name in ("choices", "output", "usage") if name in answer}
        return json.dumps(parts).replace(answer["id"].removeprefix("resp_"), "")

    plain, known = told(ask(client, path, temperature=0).json()), 0
    for given in cases:
        if given.keys() <= FIELDS[path].keys():
            response = ask(client, path, temperature=0, **given)
            assert response.status_code == 200 and told(response.json()) == plain, (given, response.text)
            known += 1
    assert known > 8


def test_no_field_is_blamed_for_another(client, monkeypatch):
    """A failure of the server's own is its failure, and a template's names the field that the template fails on."""
    from spec_compile.serve import endpoint

    requests = client.runner.requests
    for place, name in ((endpoint, "make_config"), (requests, "_options"), (requests, "_check_room"),
                        (requests, "read_prediction"), (endpoint, "read_tool_calls")):  # fmt: skip
        for path in (COMPLETIONS, CHATS):
            if path == CHATS or name != "read_tool_calls":
                monkeypatch.setattr(place, name, lambda *args: max([]))
                response = ask(client, path, prediction={"type": "content", "content": "a"})
                assert response.status_code == 500 and "max()" not in response.text, (path, name)
                monkeypatch.undo()
    template = (
        "{% if tools and tools[0].function.name == 'f' %}{{ raise_exception('no') }}{% endif %}{{ word.x.y }}"
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% for each in messages %}{{ each.content }}{{ each.name.x.y if each.name }}{% endfor %}"
    )
    monkeypatch.setattr(requests.processor, "chat_template", template)
    word = {"chat_template_kwargs": {"word": {"x": {"y": "a"}}}}
    assert ask(client, CHATS, **word).status_code == 200
    nested, flat = {"type": "function", "function": {"name": "f"}}, {"type": "function", "name": "f"}
    system, named = {"role": "system", "content": "a"}, {"role": "user", "content": "a", "name": "b"}
    for path, fields, blamed in (
        (CHATS, {"tools": [nested]}, "tools"), (CHATS, {"messages": [system]}, "messages"),
        (CHATS, {"messages": [named]}, "messages"), (RESPONSES, {"tools": [flat]}, "tools"),
        (RESPONSES, {"instructions": "a"}, "instructions"),
    ):  # fmt: skip
        assert "cannot be made a prompt" in refusal(ask(client, path, **word, **fields), 400, blamed)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, "system": "a"} | word
    error = client.post("/v1/messages", json=body).json()["error"]
    assert error["message"].startswith("system: it cannot be made a prompt of"), error
    monkeypatch.setattr(requests.processor, "chat_template", "{% if word is defined %}{{ word.x.y }}{% endif %}a")
    refusal(ask(client, CHATS, chat_template_kwargs={"word": {}}), 400, "chat_template_kwargs")


# What is refused


NOT_SERVED = [
    (COMPLETIONS, {"n": 129}), (COMPLETIONS, {"best_of": 3}),
    (CHATS, {"tool_choice": "required"}), (CHATS, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    (CHATS, {"functions": [{"name": "f"}]}), (CHATS, {"function_call": {"name": "f"}}),
    (CHATS, {"modalities": ["audio"]}), (CHATS, {"audio": {"voice": "a", "format": "wav"}}),
    (CHATS, {"reasoning_effort": "low"}), (CHATS, {"verbosity": "low"}), (CHATS, {"web_search_options": {}}),
    (CHATS, {"response_format": {"type": "xml"}}), (CHATS, {"n": True}),
    (CHATS, {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHATS, {"tools": [{"type": "custom", "custom": {"name": "f"}}]}),
    (CHATS, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHATS, {"chat_template_kwargs": {"tokenize": False}}),
    (CHATS, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
    (CHATS, {"stream_options": {"include_usage": True}}),
    (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a"}}]}]}),
    (CHATS, {"messages": [{"role": "user", "content": "a", "audio": {"id": "a"}}]}),
    (CHATS, {"messages": [{"role": "robot", "content": "a"}]}),
    (CHATS, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {}}}}),
    (RESPONSES, {"previous_response_id": "resp_1"}), (RESPONSES, {"tool_choice": "required"}),
    (RESPONSES, {"background": True}), (RESPONSES, {"include": ["reasoning.encrypted_content"]}),
    (RESPONSES, {"truncation": "auto"}), (RESPONSES, {"max_tool_calls": 1}), (RESPONSES, {"conversation": "a"}),
    (RESPONSES, {"reasoning": {"effort": "low"}}), (RESPONSES, {"prompt": {"id": "a"}}),
    (RESPONSES, {"input": [{"type": "input_image", "image_url": "http://a"}]}),
    (RESPONSES, {"input": [{"role": "system", "content": "a"}], "instructions": "b"}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "fields"), NOT_SERVED, ids=lambda value: json.dumps(value)[:50])
def test_what_would_change_the_answer_is_refused_by_its_name(client, path, fields):
    for streamed in (False, True):
        if "stream_options" in fields and streamed:
            continue
        name = next(iter({**fields, "instructions": 0} if "instructions" in fields else fields))
        name = "instructions" if "instructions" in fields else name
        refusal(ask(client, path, **fields, stream=streamed), 400, name)


def test_no_field_of_openais_is_dropped(client):
    """Each that its clients know is served, accepted without effect, or refused by its name."""
    from openai.types.chat import completion_create_params as chat
    from openai.types.completion_create_params import CompletionCreateParamsBase
    from openai.types.responses.response_create_params import ResponseCreateParamsStreaming

    known = {
        CHATS: chat.CompletionCreateParamsStreaming.__mutable_keys__,
        COMPLETIONS: CompletionCreateParamsBase.__mutable_keys__,
        RESPONSES: ResponseCreateParamsStreaming.__mutable_keys__,
    }
    for path, names in known.items():
        for name in {*names} - {"user", "metadata"}:
            for value in ({"a": {}}, 0.125):
                response = ask(client, path, **{name: value})
                taken = ("temperature", "top_p", "frequency_penalty", "presence_penalty", "reasoning", "text",
                             "prompt_cache_options")  # fmt: skip
                if response.status_code != 200:
                    refusal(response, 400, name)
                else:
                    assert name in taken or name not in FIELDS[path]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", ["hot", -1, 1e-9, 1e9, True]),
        ("seed", [1 << 64, -(1 << 63) - 1, "7", 1.5]),
        ("max_tokens", [0, 10**13, (1 << 63) - 1, 1 << 70, "ten", 2.5, 100_000_000]),
        ("top_p", [0, 1.1, []]),
        ("frequency_penalty", [2.1, -2.1, "a"]),
        ("stop", [["a"] * 17, "x" * 257, ["x" * 40] * 64, "x" * 50_000, {}, [""], [1]]),
        ("logit_bias", [{"a": 1}, {"-1": 1}, {"07": 1}, {"7": 101}, {"7": "1"}, {"4097": 1}, {"9" * 5000: 1}, [],
                        {str(token): 1 for token in range(1025)}]),
        ("generation_config", [
            "{", "[]", {}, '{"max_new_tokens": "ten"}', '{"max_new_tokens": 9223372036854775807}', '{"top_k": "a"}',
            '{"temperature": NaN}', '{"eos_token_id": "a"}', '{"eos_token_id": 5000}', '{"num_return_sequences": 2}',
            '{"bad_words_ids": 5}', '{"bad_words_ids": [[1, 2]' + ", [1, 2]" * 64 + "]}", '{"token_healing": true}',
            '{"max_length": 1}', '{"min_new_tokens": 2000}', '{"watermarking_config": {"bias": "a"}}',
            '{"sequence_bias": [[[1], 2.0], [[1], 3.0]]}', '{"output_scores": true}', '{"speed": 9}',
        ]),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_the_name_of_the_field(client, name, values):
    for value, path in itertools.product(values, (COMPLETIONS, CHATS)):
        body = {field: given for field, given in BODIES[path].items() if field != "max_tokens"}
        refusal(client.post(path, json=body | {name: value}), 400, name)


def test_fields_that_contradict_each_other_are_refused(client):
    config = json.dumps({"temperature": 0.5, "do_sample": True, "max_new_tokens": 3})
    refusal(ask(client, COMPLETIONS, temperature=0.9, generation_config=config), 400, "temperature")
    refusal(ask(client, COMPLETIONS, temperature=0, generation_config=config), 400, "temperature")
    refusal(ask(client, COMPLETIONS, max_tokens=5, generation_config=config), 400, "max_tokens")
    refusal(ask(client, CHATS, max_tokens=5, max_completion_tokens=6), 400, "max_tokens")
    assert ask(client, COMPLETIONS, max_tokens=3, temperature=0.5, generation_config=config).status_code == 200


def test_a_prompt_that_fills_the_row_is_refused(client, alone):
    """It would get no token."""
    row, (token,) = client.runner.requests.row_tokens, alone[1]("a")["input_ids"]
    text = alone[1].decode([token] * row)
    while len(alone[1](text)["input_ids"]) < row:
        text += "a"
    body = {"prompt": text, "max_tokens": 1}
    assert "no room" in refusal(client.post(COMPLETIONS, json=body), 400, "prompt")
    assert "characters" in refusal(client.post(COMPLETIONS, json={"prompt": "a" * 1_000_000}), 400, "prompt")


@pytest.mark.parametrize(
    ("status", "says", "content"),
    [
        (422, "JSON", b""), (422, "UTF-8", b'{"prompt": "\xff"}'), (422, "NaN", b'{"prompt": "a", "top_p": NaN}'),
        (422, "twice", b'{"prompt": "a", "prompt": "b"}'), (422, "in each other", b'{"prompt":' + b"[" * 20_000),
        (422, "in each other", b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}"), (413, "brackets", b"[" * 100_000),
        (400, "temperature", b'{"prompt": "a", "temperature": 1e999}'), (413, "bytes", b" " * 1_200_000),
        (422, "JSON", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"), (400, "surrogate", b'{"prompt": "\\ud800"}'),
    ],
    ids=range(11),
)  # fmt: skip
def test_bodies_that_are_no_json_are_refused(client, status, says, content):
    for path in BODIES:
        error = client.post(path, content=content, headers=JSON).json()["error"]
        response = client.post(path, content=content, headers=JSON)
        assert response.status_code == status or path != COMPLETIONS, response.text
        assert says in error["message"] or path != COMPLETIONS, error
    response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert "Content-Type" in refusal(response, 415, None)


# What OpenAI's client shows


def test_openais_client_shows_the_reason(sdk):
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


def test_a_failure_in_a_stream_is_shown(sdk, client, monkeypatch):
    def fail(*args, **kwargs):
        raise ArithmeticError('no "more"')

    manager = client.runner.requests.manager
    add = manager.add_request
    monkeypatch.setattr(manager, "add_request", lambda *args, **kwargs: add(*args, **kwargs, stopping_criteria=[fail]))
    with pytest.raises(openai.APIError, match="its log has the reason"):
        list(sdk.completions.create(model="tiny", prompt="a", stream=True))
    stream = sdk.responses.create(model="tiny", input="a", stream=True)
    (error,) = [each.message for each in stream if each.type == "error"]
    assert "its log has the reason" in error and "more" not in error


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/completions", 405), ("POST", "/nothing", 404)])
def test_other_routes_are_refused_in_openais_form(client, method, path, status):
    assert path in refusal(client.request(method, path), status, None)


def test_a_served_name_stands_for_the_model(client, sdk, folder):
    assert [model.id for model in sdk.models.list().data] == ["tiny"] and sdk.models.retrieve("tiny").id == "tiny"
    for model in ("none", str(folder)):
        refusal(client.get(f"/v1/models/{model}"), 404, "model")
        for path in BODIES:
            refusal(ask(client, path, model=model), 404, "model")
    for path, streamed in itertools.product(BODIES, (False, True)):
        response = ask(client, path, model="tiny", stream=streamed)
        assert response.status_code == 200 and '"tiny"' in response.text and str(folder) not in response.text


def test_only_flags_that_do_something_are_taken():
    """Of transformers' own, those for its cache, its compilation and several models are not there."""
    from spec_compile.__main__ import application
    from spec_compile.serve.server import build

    command = get_command(application).commands["serve"]
    flags = {flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")}
    assert flags - {"--help"} == {
        "--algo", "--draft", "--options", "--slots", "--max-queue", "--tensor-parallel", "--served-model-name",
        "--lora-modules", "--max-loras", "--max-lora-rank", "--allow-runtime-lora-updating", "--lora-root", "--grace",
        "--attn-implementation", "--quantization", "--reasoning", "--chat-template-kwargs", "--device", "--dtype",
        "--trust-remote-code", "--host", "--port", "--enable-cors", "--log-level", "--default-seed",
        "--train-while-serving", "--online-training", "--api-key", "--api-key-file", "--allowed-hosts",
        "--metrics-host", "--metrics-port", "--max-connections", "--max-connections-per-address", "--request-timeout",
        "--allowed-media-domains", "--allowed-local-media-path", "--limit-mm-per-prompt",
        "--share-texts", "--isolate-prefixes",
    }  # fmt: skip
    with pytest.raises(TypeError, match="cb_block_size"):
        build("nowhere", cb_block_size=16)


# Errors that are told


def exhausting():
    """Settings with which no token can be drawn, each with the names that are told; None for some that leave one."""
    config = lambda **values: {"generation_config": json.dumps({"do_sample": True} | values)}  # noqa: E731
    bias = {"sequence_bias": [[[5], 1e30]], "repetition_penalty": 1e-5}
    yield {"temperature": 1e-5} | config(**bias), ["temperature", "generation_config.sequence_bias"]
    every = [[[token], -1e30] for token in range(1024)]
    yield config(sequence_bias=every, guidance_scale=1e5, top_k=1, min_p=1.0), None


@pytest.mark.parametrize("number", range(2))
def test_settings_that_leave_no_token_are_refused_by_name(client, alone, number):
    """In a stream, too. The others, and those that do leave one, are answered as by plain decoding."""
    fields, names = [*exhausting()][number]
    if names is None:
        assert ask(client, COMPLETIONS, **fields).status_code == 200
        return
    for path in (COMPLETIONS, CHATS):
        error = ask(client, path, **fields).json()["error"]
        with client.stream("POST", path, json=BODIES[path] | fields | {"stream": True}) as response:
            assert events(response)[-1:] == [{"error": error}], response.status_code
        assert error["param"] == names[0].partition(".")[0] and error["type"] == "invalid_request_error"
        assert all(name in error["message"] for name in names) and "no token is left" in error["message"]
    wanted = expected(alone, "a", max_new_tokens=2, do_sample=False)
    assert ask(client, COMPLETIONS, temperature=0).json()["choices"][0]["text"] == wanted


class Heap:
    """An object whose text has its address."""


FAULTS = {
    "an object": ValueError(Heap()), "a path": OSError(2, "none", "/etc/shadow"), "a key": KeyError("messages"),
    "lines": RuntimeError("\n2026-01-01 root logged in\x1b[31m"), "a long one": RuntimeError("no" * 10_000),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES, "/v1/messages"])
def test_the_text_of_an_exception_is_for_the_log(client, monkeypatch, caplog, path, fault):
    """Whether it is raised before the rounds, in a round, in a stream, or outside of all handlers."""
    body = BODIES.get(path) or BODIES[CHATS]
    secrets = ("0x", "shadow", "KeyError", "logged in", "nono", "Traceback", 'File "')

    def fail(*args, **kwargs):
        raise FAULTS[fault]

    def told(response):
        name = re.search(r"error ([0-9a-f]{16})", response.text)[1]
        assert not any(secret in response.text for secret in secrets), response.text
        (record,) = [each.message for each in caplog.records if each.message.startswith(f"error {name}: ")]
        assert all(line.startswith("    | ") and line.isprintable() for line in record.splitlines()[1:])
        assert str(FAULTS[fault]).strip()[:5] in record.replace("\\\\", "\\")

    requests = client.runner.requests
    monkeypatch.setattr(requests, "_options", fail)
    response = client.post(path, json=body)
    assert response.status_code == 500
    told(response)
    monkeypatch.setattr(requests, "_options", lambda *args: {"logits_processor": [fail]})
    for stream in (False, True):
        response = client.post(path, json=body | {"stream": stream})
        assert response.status_code == (200 if stream else 500)
        told(response)
    monkeypatch.setattr(requests, "admit", fail)
    told(client.post(path, json=body))


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
