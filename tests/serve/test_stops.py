"""Stop strings: where the text of an answer ends, whole and in streams, on all routes, and why it ends there."""

import json

import pytest

from server_fixtures import (  # isort: skip
    CHATS, COMPLETIONS, DIALECTS, MESSAGES, RESPONSES, ask, body, events, save_tool_model, scripted,
)  # fmt: skip

REASONS = {
    MESSAGES: {"stop": "stop_sequence", "end": "end_turn", "length": "max_tokens"},
    RESPONSES: {"stop": "completed", "end": "completed", "length": "incomplete"},
}
SAVE = save_tool_model
SERVER = dict(slots=4, served_model_name="tiny")


def end(client, path, stops=None, limit=60, **fields):
    """The text of an answer, the reason of its end, and its number of tokens."""
    if stops is not None:
        fields |= {
            MESSAGES: {"stop_sequences": stops}, RESPONSES: {"generation_config": json.dumps({"stop_strings": stops})},
        }.get(path, {"stop": stops})  # fmt: skip
    answer = ask(client, path, limit=limit, temperature=0, **fields)
    return answer.text, answer.reason, answer.count


def cut(text, stops, keeps=False):
    """The right text of an answer of which no token comes after a stop string, character by character."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[:end] if keeps else text[: end - len(stop)]
    return text


TEXTS = {
    "the rest of a token": ("for x in 1:\n      return x", ["1:\n"]),
    "across tokens": ("it is so END of it", ["o END o"]),
    "several": ("it is so END of it", ["of", "END", "never"]),
    "a prefix of another": ("it is END of it", ["END of", "EN"]),
    "one within another": ("it is END of it", ["END", "N"]),
    "characters of several bytes": ("x é 😀 y 😀é z", ["😀é"]),
    "half a character of several bytes": ("x é 😀 ÿ z", ["😀 "]),
    "nothing is left": ("END of it", ["END"]),
    "only a beginning": ("it is EN", ["END", "NO"]),
    "no stop": ("it is so", ["never"]),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("path", DIALECTS)
def test_the_text_ends_before_the_stop_string(client, path, name):
    text, stops = TEXTS[name]
    with scripted(client, text):
        for keeps in (False, True) if path != RESPONSES else (False,):
            fields = {"include_stop_str_in_output": True} if keeps else {}
            wanted = cut(text, stops, keeps)
            told, reason, count = end(client, path, stops, **fields)
            streamed = end(client, path, stops, stream=True, **fields)
            assert streamed == ((wanted if path != COMPLETIONS else told), reason, count)
            assert told == (wanted if path == COMPLETIONS else wanted.strip())  # a template's content is stripped
            ends = "end" if not any(stop in text for stop in stops) else "stop"
            assert reason == REASONS.get(path, {"stop": "stop", "end": "stop"})[ends]


@pytest.mark.parametrize("path", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_at_the_limit_is_a_stop(client, tokenizer, path, stream):
    """A stop string, and an end of the model's, that are the last permitted token."""
    text = "it is so END"
    reasons = REASONS.get(path, {"stop": "stop", "end": "stop", "length": "length"})
    size = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    with scripted(client, text):
        assert end(client, path, ["END"], size, stream=stream)[1:] == (reasons["stop"], size)
        assert end(client, path, ["END"], size - 1, stream=stream)[1:] == (reasons["length"], size - 1)
        assert end(client, path, None, size + 1, stream=stream)[1:] == (reasons["end"], size + 1)
        assert end(client, path, None, size, stream=stream)[1:] == (reasons["length"], size)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "logprobs"), [(COMPLETIONS, 0), (CHATS, True)])
def test_an_end_of_the_requests_at_the_limit_is_a_stop(client, tokenizer, path, logprobs, stream):
    (choice,) = client.post(path, json=body(path, limit=4, temperature=0, logprobs=logprobs)).json()["choices"]
    told = choice["logprobs"]
    tokens = told["tokens"] if path == COMPLETIONS else [each["token"] for each in told["content"]]
    last = tokenizer(tokens[-1], add_special_tokens=False)["input_ids"]
    assert len(last) == 1 and tokens[-1] not in tokens[:-1]
    assert end(client, path, None, 4, stream=stream)[1:] == ("length", 4)
    assert end(client, path, None, 4, stream=stream, stop_token_ids=last)[1:] == ("stop", 4)


def test_a_stop_string_is_looked_for_in_the_answer_alone(client):
    """OpenAI and vLLM do not read the prompt; an echo is no part of the answer, either."""
    with scripted(client, "\nmore\n\nend"):
        for stream in (False, True):
            told = end(client, COMPLETIONS, ["\n\n"], stream=stream, prompt="a\n\nb\n", echo=True)
            assert told[:2] == ("a\n\nb\n\nmore", "stop")


def test_the_stream_holds_back_only_what_may_be_a_stop_string(client):
    with scripted(client, "it is EN, so END of it"):
        fields = body(COMPLETIONS, limit=60, stop=["END"], stream=True, speculation=False)
        chunks = [chunk["choices"][0]["text"] for chunk in events(client.post(COMPLETIONS, json=fields))]
    assert "".join(chunks) == "it is EN, so " and len([*filter(None, chunks)]) > 3
    assert not any("".join(chunks[:number]).endswith("E") for number in range(len(chunks)))


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_log_probabilities_are_those_of_all_tokens(client, path):
    """As in OpenAI's and vLLM's answers, also of the tokens that the stop string ends, whose text is not told."""
    fields = body(path, limit=60, stop=["1:\n"], logprobs=1 if path == COMPLETIONS else True)
    with scripted(client, "x é 1:\n      return"):
        whole = client.post(path, json=fields).json()
        chunks = events(client.post(path, json=fields | {"stream": True}))
    (choice,) = whole["choices"]
    streamed = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0].get("logprobs")]
    if path == CHATS:
        entries = choice["logprobs"]["content"]
        text = b"".join(bytes(each["bytes"]) for each in entries).decode()
        assert [each["token"] for part in streamed for each in part["content"]] == [each["token"] for each in entries]
    else:
        told = choice["logprobs"]
        entries, offsets = told["tokens"], told["text_offset"]
        assert [token for part in streamed for token in part["tokens"]] == entries
        assert [place for part in streamed for place in part["text_offset"]] == offsets == sorted(offsets)
        text = "x é 1:\n      "
        pieces = [(place, token) for place, token in zip(offsets, entries) if not token.startswith("\\x")]
        assert all(text.startswith(token, place) for place, token in pieces)
    assert text.startswith("x é 1:\n") and len(entries) == whole["usage"]["completion_tokens"]
    assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]).strip() == "x é"


def test_each_choice_has_its_own_end(client):
    fields = body(COMPLETIONS, ["a", "b"], 40, n=2, temperature=1.5, seed=1, stop=["e", "\n"])
    free = client.post(COMPLETIONS, json=fields | {"stop": None}).json()["choices"]
    for stream in (False, True):
        response = client.post(COMPLETIONS, json=fields | {"stream": stream})
        choices = [each for part in (events(response) if stream else [response.json()]) for each in part["choices"]]
        for index, choice in enumerate(free):
            own = [each for each in choices if each["index"] == index]
            assert "".join(each["text"] for each in own) == cut(choice["text"], fields["stop"])
            assert own[-1]["finish_reason"] == ("stop" if {*"e\n"} & {*choice["text"]} else "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_thoughts_and_calls_too(client, stream):
    """It is looked for in all that the model writes, as in vLLM."""
    call = '<tool_call>{"name": "look", "arguments": {"place": "END"}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    for text, thoughts, content in (
        ("<think>so END it is</think>yes", "so ", ""), (f"<think>so</think>it is {call}", "so", "it is "),
    ):  # fmt: skip
        with scripted(client, text):
            answer = ask(client, CHATS, limit=90, stop="END", tools=tools, stream=stream)
        assert answer.reason == "stop" and not answer.calls
        assert (answer.thoughts, answer.text) == (
            (thoughts, content) if stream else (thoughts.strip(), content.strip())
        )
