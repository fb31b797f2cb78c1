"""Requests that are refused: by the name of the field that is at fault, in the form of the dialect."""

import json
import re

import pytest

from server_fixtures import (  # isort: skip
    CHATS, COMPLETIONS, COUNT, DIALECTS, JSON, MESSAGES, RESPONSES, body, least, refusal, save_tool_model, user,
    wait_until,
)  # fmt: skip

from spec_compile.batching.output import MOST_TOP

SAVE = save_tool_model
SERVER = dict(slots=4, max_queue=64, served_model_name="tiny")


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def predicted(content):
    return {"type": "content", "content": content}


def image(**source):
    return user([{"type": "image", "source": source}])


SALTS = {"cache_salt: expected a text of 1 to 256 characters": ["", "s" * 257, 5, ["s"]]}
CHOICES = {
    "temperature": ["hot", -1, 1e-9, 1e9, True],
    "seed": [1 << 64, -(1 << 63) - 1, "7", 1.5, True],
    "max_tokens": [0, -1, 10**13, (1 << 63) - 1, 1 << 70, "ten", 2.5, 100_000_000, 3000],
    "top_p": [0, 1.1, []],
    "frequency_penalty": [2.1, -2.1, "a"],
    "stop": [["a"] * 17, "x" * 257, ["x" * 40] * 64, "x" * 50_000, {}, [""], [1]],
    "logit_bias": [{"a": 1}, {"-1": 1}, {"07": 1}, {"7": 101}, {"7": "1"}, {"4097": 1}, {"9" * 5000: 1}, [],
                   {str(token): 1 for token in range(1025)}],
    "generation_config": [
        "{", "[]", {}, '{"max_new_tokens": "ten"}', '{"max_new_tokens": 9223372036854775807}', '{"top_k": "a"}',
        '{"temperature": NaN}', '{"eos_token_id": "a"}', '{"eos_token_id": 5000}', '{"num_return_sequences": 2}',
        '{"bad_words_ids": 5}', '{"bad_words_ids": [[1, 2]' + ", [1, 2]" * 64 + "]}", '{"token_healing": true}',
        '{"max_length": 1}', '{"min_new_tokens": 2000}', '{"watermarking_config": {"bias": "a"}}',
        '{"sequence_bias": [[[1], 2.0], [[1], 3.0]]}', '{"output_scores": true}',
    ],
    "generation_config.speed: unknown": ['{"speed": 9}'],
    "generation_config.num_beams: expected 1": ['{"num_beams": 2}'],
    "repetition_penalty": [0, -1, 1e9, "a", True],
    "min_p": [-0.1, 1.1, "a"],
    "top_k": [-2, 1.5, "a", 1 << 40],
    "stop_token_ids": [5, ["a"], [-1], [1.5], [4097], [1] * 1025, {}],
    "ignore_eos": [1, "true"],
    "min_tokens": [-1, 1.5, 3, 1 << 40],
    "thinking_token_budget": [-1, 1.5, "3", True, 1 << 31],
    "n": [0, 65, 129, 1.0, True],
    "stream": ["yes"],
    "stream_options": [{"include_usage": True}],
    "prediction: expected an object": ["a", []],
    "prediction.content: expected": [{"type": "content"}, predicted(1), predicted([]), predicted("")],
    "prediction.type: expected": [{"content": "a"}, {"type": "text", "content": "a"}],
    "prediction.content[0]: expected an": [predicted(["a"])],
    "prediction.content[0].text: expected": [predicted([{"type": "text"}])],
    "prediction.content[1].type": [predicted([{"type": "text", "text": "a"}, {"type": "image", "text": "a"}])],
    "prediction: 8000 tokens are more than a row of": [predicted(" zebra" * 2000)],
    "prediction: expected at most": [predicted("a" * 1_000_000)],
    "structured_outputs": [{"json": {}, "regex": "a"}, {"structural_tag": "a"}, {"json": 5}],
    "guided_json": ["{", "[]", "[" * 20_000, '{"a": ' * 200 + "1" + "}" * 200, {"enum": ["a" * 100] * 400}],
    "guided_regex": ["", "a" * 40_000, "(" * 600 + ")" * 600],
    "guided_choice": [[], [1], [""], ["a"] * 1025],
    "guided_grammar": [""],
} | SALTS  # fmt: skip
REFUSED = {
    COMPLETIONS: CHOICES | {
        "prompt": [None, 5, [], ["a", 5], [[5], []], [5, -1], [True], [[5], "a"], ["a"] * 65, ["a"] * 1025,
                   ["a", "b " * 60_000]],
        "prompt: expected at least one token": ["", ["a", ""]],
        "prompt: token id": ["<unknown>", [5, 1 << 30]],
        "prompt: 3001 tokens leave no room": ["a " * 3000],
        "prompt: expected at most": ["a" * 1_000_000],
        "best_of": [2, 3],
        "echo": [1],
        "logprobs": [True, MOST_TOP + 1, -1],
    },
    CHATS: CHOICES | {
        "messages": [None, [], "a", [5], [{"content": "a"}], [{"role": "robot", "content": "a"}], user([1]),
                     user([{"type": "image_url", "image_url": {"url": "http://a"}}]),
                     [{"role": "user", "content": "a", "audio": {"id": "a"}}],
                     [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]],
        "tool_choice": ["required", named("f"), "any", {}, {"type": "function"}, {"type": "allowed_tools"}, named(5),
                        {"type": "function", "name": "stop"} | named("stop"), [], 1, allowed("auto"),
                        allowed("none", "stop"), allowed("auto", 5), allowed("auto", "stop") | {"mode": "auto"},
                        {"type": "allowed_tools", "mode": "auto"}, {"type": "allowed_tools", "allowed_tools": "stop"}],
        "tools": [[{"type": "functoin", "name": "f"}], [{"type": "custom", "custom": {}}]],
        "functions": [[{"name": "f"}]],
        "function_call": [{"name": "f"}],
        "modalities": [["audio"]],
        "audio": [{"voice": "a", "format": "wav"}],
        "reasoning_effort": ["most"],
        "verbosity": ["loud"],
        "web_search_options": [{}],
        "chat_template_kwargs": [{"none": False}, {"tokenize": False}, {"chat_template": "{{ 1 }}"}],
        "logprobs": [1],
        "top_logprobs": [2],
        "response_format": [
            {}, {"type": "xml"}, {"type": ["text"]}, {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"name": "a"}},
            {"type": "json_schema", "json_schema": {"schema": {}}},
            {"type": "json_object", "json_schema": {"name": "a", "schema": {}}},
        ],
    },
    RESPONSES: SALTS | {
        "text": [{"format": {"type": "xml"}}, {"format": {"type": "json_schema", "name": "a"}}, {"verbosity": 1}],
        "tool_choice": ["required"],
        "previous_response_id": ["resp_1"],
        "background": [True],
        "include": [["message.output_text.logprobs"], [1], "a"],
        "truncation": ["some"],
        "max_tool_calls": [0],
        "conversation": ["a"],
        "reasoning": [{"effort": "most"}, {"summary": "long"}],
        "prompt": [{"id": "a"}],
        "n": [2],
        "input": [[{"type": "input_image", "image_url": "http://a"}]],
    },
    MESSAGES: SALTS | {
        "max_tokens: expected": [None, 0],
        "messages: expected": [[]],
        "messages[0]: expected": [["a"]],
        "messages[0].role": [[{"role": "robot", "content": "a"}]],
        "messages[0].content": [[{"role": "user"}]],
        "messages[0].content[0]: expected": [user(["a"])],
        "messages[0].content[0].text: expected": [user([{"type": "text"}])],
        "messages[0].content[0].source": [user([{"type": "document", "source": {}}]), user([{"type": "document"}])],
        "messages[0].content[0].type": [user([{"type": "tool_use", "id": "1", "name": "a", "input": {}}])],
        "messages[0].content[0].type: the model reads only text": [image(type="url", url="http://a"), image()],
        "temperature: expected": ["hot"],
        "top_k: expected": [-2],
        "stop_sequences: expected": ["a", [""]],
        "system: expected": [3],
        "system[0].type: expected text": [[{"type": "image"}]],
        "tools[0].input_schema": [[{"name": "a"}]],
        "tools[0].type": [[{"type": "functoin"}]],
        "tool_choice.type": [{"type": "some"}],
        "tool_choice.name": [{"type": "tool"}, {"type": "auto", "name": "a"}],
        "thinking.budget_tokens": [{"type": "enabled"}, {"type": "disabled", "budget_tokens": 3},
                                   {"type": "enabled", "budget_tokens": 2}],
        "output_config.effort": [{"effort": "most"}],
        "container: expected": ["a"],
    },
    "/tokenize": {
        "prompt": [None, 3, "a" * 500_000],
        "messages": [[]],
        "add_generation_prompt": ["no"],
        "tools": [[{"type": "custom"}]],
    },
    "/detokenize": {"tokens": [None, [-1], [1 << 30], ["a"]]},
}  # fmt: skip
"""By path and by the beginning of the message, which is the name of a field: values of this field."""
SETTINGS = {"temperature": 0.5, "do_sample": True, "max_new_tokens": 3, "min_new_tokens": 3}
TOGETHER = [
    (COMPLETIONS, "best_of", {"n": 2, "best_of": 3}),
    (COMPLETIONS, "max_tokens", {"max_tokens": -1, "echo": True}),
    (COMPLETIONS, "logprobs", {"prompt": ["a" * 500] * 64, "echo": True, "logprobs": MOST_TOP, "max_tokens": 500}),
    (CHATS, "logprobs", {"logprobs": True, "top_logprobs": MOST_TOP, "n": 64, "max_tokens": 500}),
    (CHATS, "top_logprobs", {"logprobs": False, "top_logprobs": 2}),
    (CHATS, "top_logprobs", {"logprobs": True, "top_logprobs": MOST_TOP + 1}),
    (CHATS, "top_logprobs", {"logprobs": True, "top_logprobs": True}),
    (CHATS, "max_tokens", {"max_tokens": 5, "max_completion_tokens": 6}),
    (CHATS, "guided_choice", {"guided_regex": "a", "guided_choice": ["a"]}),
    (CHATS, "min_tokens", {"guided_regex": "a+", "min_tokens": 1}),
    (CHATS, "generation_config", {"guided_regex": "a+", "generation_config": '{"min_length": 3}'}),
    ("/tokenize", "prompt", {"prompt": "a", "messages": user("a")}),
] + [
    (COMPLETIONS, name, {name: value, "generation_config": json.dumps(SETTINGS | {other: setting})})
    for name, value, other, setting in (
        ("temperature", 0.9, "temperature", 0.5), ("temperature", 0, "temperature", 0.5),
        ("max_tokens", 5, "max_new_tokens", 3), ("top_k", 5, "top_k", 6), ("min_p", 0.5, "min_p", 0.25),
        ("repetition_penalty", 1.5, "repetition_penalty", 1.25), ("min_tokens", 2, "min_new_tokens", 3),
        ("ignore_eos", True, "eos_token_id", 3),
    )
]  # fmt: skip
"""Paths, names, and fields that contradict each other, or their settings in `generation_config`."""


def check(client, path, words, fields):
    """The same is refused whether the answer is a stream or not, and nothing of it stays."""
    name, manager = re.match(r"\w+", words)[0], client.runner.requests.manager
    base = {} if path == "/tokenize" and "prompt" in fields else least(path)
    if "generation_config" in fields:
        del base["max_tokens"]
    is_streamed = path in DIALECTS and not {"stream", "stream_options"} & fields.keys()
    for stream in ({}, {"stream": True}) if is_streamed else ({},):
        message = refusal(client.post(path, json=base | fields | stream), name)
        assert words in message, message
        wait_until(lambda: manager.output_router.result_handlers == {} and manager.active_requests == 0)


@pytest.mark.parametrize(("path", "words"), [(path, words) for path in REFUSED for words in REFUSED[path]])
def test_bad_values_are_refused_by_the_name_of_the_field(client, path, words):
    for value in REFUSED[path][words]:
        check(client, path, words, {re.match(r"\w+", words)[0]: value})


@pytest.mark.parametrize(("path", "name", "fields"), TOGETHER, ids=str)
def test_fields_that_contradict_each_other_are_refused(client, path, name, fields):
    check(client, path, name, fields)


def test_fields_that_repeat_the_settings_are_taken(client):
    config = json.dumps({"temperature": 0.5, "do_sample": True, "max_new_tokens": 3, "top_k": 6})
    fields = {"max_tokens": 3, "temperature": 0.5, "top_k": 6, "generation_config": config}
    assert client.post(COMPLETIONS, json=body(COMPLETIONS) | fields).status_code == 200


@pytest.mark.parametrize("path", [*REFUSED, COUNT])
def test_another_model_is_refused(client, folder, path):
    for model in ("other", str(folder)):
        assert f"no model '{model}'" in refusal(client.post(path, json=least(path) | {"model": model}), "model", 404)


@pytest.mark.parametrize(
    ("status", "says", "content"),
    [
        (422, "JSON", b""), (422, "JSON", b"{bad"), (422, "body", b"[1]"), (422, "UTF-8", b'{"prompt": "\xff"}'),
        (422, "NaN", b'{"prompt": "a", "top_p": NaN}'), (422, "twice", b'{"prompt": "a", "prompt": "b"}'),
        (422, "in each other", b'{"prompt":' + b"[" * 20_000),
        (422, "in each other", b'{"prompt":' + b"[" * 200 + b"]" * 200 + b"}"), (413, "brackets", b"[" * 100_000),
        (400, "temperature", b'{"prompt": "a", "temperature": 1e999}'), (413, "bytes", b" " * 1_200_000),
        (422, "JSON", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"), (400, "surrogate", b'{"prompt": "\\ud800"}'),
        (422, "UTF-8", b'{"prompt":"\xed\xa0\x80"}'),
    ],
    ids=range(14),
)  # fmt: skip
def test_bodies_that_are_no_json_are_refused(client, status, says, content):
    for path in (COMPLETIONS, CHATS, RESPONSES, MESSAGES):
        response = client.post(path, content=content, headers=JSON)
        if path == COMPLETIONS:
            assert response.status_code == status and says in response.json()["error"]["message"], response.text
        kind = "request_too_large" if status == 413 else "invalid_request_error"
        assert response.is_client_error and response.json()["error"]["type"] in (kind, "invalid_request_error")
    response = client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": "text/plain"})
    assert "Content-Type" in refusal(response, None, 415)


NUMBERS = {
    COMPLETIONS: ("temperature", "top_p", "seed", "max_tokens", "frequency_penalty", "presence_penalty", "min_p",
                  "repetition_penalty", "top_k", "min_tokens", "thinking_token_budget"),
    CHATS: ("max_completion_tokens", "top_logprobs"),
    RESPONSES: ("max_output_tokens", "temperature"),
    MESSAGES: ("max_tokens", "top_k"),
}  # fmt: skip
"""Fields that are numbers."""


@pytest.mark.parametrize(
    ("text", "status"),
    [("1e999", 400), ("-1e999", 400), ("18446744073709551616", 400), ("-18446744073709551617", 400),
     ("9" * 4000, 400), ("9" * 5000, 422), ("NaN", 422), ("-Infinity", 422), ("true", 400), ('"1"', 400)],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_no_number_is_too_odd(client, text, status):
    """Python reads 1e999 as infinity; JSON has no NaN; Python converts no int of more than 4,300 digits."""
    for path, names in NUMBERS.items():
        for name in names:
            fields = {field: value for field, value in body(path).items() if field != name}
            content = f'{json.dumps(fields)[:-1]}, "{name}": {text}}}'
            response = client.post(path, content=content, headers=JSON)
            assert response.status_code == (400 if path == MESSAGES else status), response.text
            if status == 400:
                assert refusal(response, name).startswith(name)
