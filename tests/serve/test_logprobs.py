"""`logprobs`, `top_logprobs` and `echo` in the forms of OpenAI's client, whole and in streams."""

import math
import operator
from functools import reduce
from itertools import pairwise

import pytest
import torch
from server_fixtures import COMPLETIONS, ask, body, load_alone, refusal, save_tool_model, scripted, user

from spec_compile.batching.output import TokenScore
from spec_compile.batching.request_options import TokenBytes
from spec_compile.serve.logprobs import LEAST, ChatLogprobs, CompletionLogprobs, read_top

PROMPT, CLOSE = "# é 😀\ndef mean(values):\n    re", 1e-4
CHAT = {"model": "tiny", "messages": user("a mean"), "max_tokens": 12, "logprobs": True}
SAVE = save_tool_model
SERVER = dict(slots=4, served_model_name="tiny")


@pytest.fixture(scope="module")
def alone(folder):
    model, tokenizer = load_alone(folder)
    return model.speculation.original, tokenizer


def complete(sdk, **fields):
    return sdk.completions.create(**{"model": "tiny", "prompt": PROMPT, "max_tokens": 12} | fields)


def are_right(alone, told, ids, top):
    """Compare a field of completions with one forward over these ids."""
    model, tokenizer = alone
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    bytes_of = TokenBytes(tokenizer).of
    assert told.tokens == [bytes_of(token).decode(errors="backslashreplace") for token in ids]
    assert told.token_logprobs[0] is None and told.top_logprobs[0] is None
    own = wanted[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert told.token_logprobs[1:] == pytest.approx(own, abs=CLOSE)
    for token, logprob, likeliest, row in zip(told.tokens[1:], own, told.top_logprobs[1:], wanted):
        expected = {tokenizer.decode([each]): float(row[each]) for each in row.topk(top).indices.tolist()}
        assert likeliest == pytest.approx(expected | {token: logprob}, abs=CLOSE)
        assert top == 0 or (max(likeliest.values()) == likeliest[token]) == (logprob == row.max())


def joined(chunks):
    """The fields of the chunks of a stream of completions as one."""
    parts = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    return {name: reduce(operator.add, (getattr(part, name) for part in parts)) for name in vars(parts[0])}


@pytest.mark.parametrize("top", [0, 1, 5])
def test_an_echoed_prompt(sdk, alone, top):
    answer = complete(sdk, echo=True, logprobs=top)
    (choice,), (_, tokenizer) = answer.choices, alone
    assert choice.text.startswith(PROMPT) and choice.finish_reason == "length"
    ids = tokenizer(PROMPT)["input_ids"] + tokenizer(choice.text[len(PROMPT) :])["input_ids"]
    assert len(ids) == answer.usage.total_tokens and answer.usage.completion_tokens == 12
    are_right(alone, choice.logprobs, ids, top)
    for (start, end), token in zip(pairwise(choice.logprobs.text_offset), choice.logprobs.tokens):
        assert choice.text[start:end] == token or token.startswith("\\x")
    without = complete(sdk, logprobs=top)
    assert without.choices[0].text == choice.text[len(PROMPT) :]
    assert without.choices[0].logprobs.tokens == choice.logprobs.tokens[-12:]
    shifted = [place - len(PROMPT) for place in choice.logprobs.text_offset[-12:]]
    assert without.choices[0].logprobs.text_offset == shifted
    assert complete(sdk, echo=True).choices[0].logprobs is None


@pytest.mark.parametrize("echo", [True, False])
def test_a_stream_tells_what_the_whole_answer_does(sdk, client, echo):
    """Also of tokens without a text of their own."""
    with scripted(client, "x é 😀\n"):
        (whole,) = complete(sdk, echo=echo, logprobs=2).choices
        chunks = [*complete(sdk, echo=echo, logprobs=2, stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    told, wanted = joined(chunks), vars(whole.logprobs)
    for name in ("tokens", "text_offset"):
        assert told[name] == wanted[name]
    values = zip(told["token_logprobs"][1:], wanted["token_logprobs"][1:])
    assert all(one == pytest.approx(other, abs=CLOSE) for one, other in values)
    assert [*map(set, told["top_logprobs"][1:])] == [*map(set, wanted["top_logprobs"][1:])]


@pytest.mark.parametrize("stream", [False, True])
def test_only_the_prompt(sdk, alone, stream):
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = complete(sdk, echo=True, max_tokens=0, logprobs=1, stream=stream, **options)
    chunks = [*answer] if stream else [answer]
    assert chunks[-1].usage.completion_tokens == 0
    chunks = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT
    assert chunks[-1].choices[0].finish_reason == "length"
    ids = alone[1](PROMPT)["input_ids"]
    are_right(alone, chunks[0].choices[0].logprobs, ids, 1)
    assert len(joined(chunks)["tokens"]) == len(ids)


def test_a_chat(sdk):
    (choice,) = sdk.chat.completions.create(**CHAT, top_logprobs=3).choices
    content = choice.logprobs.content
    text = b"".join(bytes(each.bytes) for each in content).decode()
    assert len(content) == 12 and text.strip() == choice.message.content  # without the spaces around it
    for each in content:
        assert len(each.top_logprobs) == 3 and bytes(each.bytes).decode() == each.token
        best = max(each.top_logprobs, key=lambda top: top.logprob)
        assert (best.token, best.logprob) == (each.token, each.logprob)  # greedy
    chunks = [*sdk.chat.completions.create(**CHAT, top_logprobs=3, stream=True)]
    streamed = [chunk.choices[0] for chunk in chunks if chunk.choices[0].logprobs is not None]
    for each in streamed:
        assert "".join(one.token for one in each.logprobs.content) == each.delta.content
    told = [one for each in streamed for one in each.logprobs.content]
    assert [one.token for one in told] == [one.token for one in content]
    assert [one.logprob for one in told] == pytest.approx([one.logprob for one in content], abs=CLOSE)
    (choice,) = sdk.chat.completions.create(**CHAT).choices
    assert [each.top_logprobs for each in choice.logprobs.content] == [[]] * 12
    assert sdk.chat.completions.create(**CHAT | {"logprobs": False}).choices[0].logprobs is None


def test_tokens_of_calls_and_thoughts_are_told_too(sdk, client):
    """Every token of the answer, the end included, whole and in a stream."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    script = '<think>so</think>hi<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    fields = CHAT | {"tools": tools, "max_tokens": 60}
    with scripted(client, script):
        whole = sdk.chat.completions.create(**fields)
        chunks = [*sdk.chat.completions.create(**fields, stream=True)]
    told = [one for chunk in chunks for one in (getattr(chunk.choices[0].logprobs, "content", None) or [])]
    assert whole.choices[0].message.tool_calls and whole.choices[0].finish_reason == "tool_calls"
    wanted = whole.choices[0].logprobs.content
    assert "".join(one.token for one in wanted) == script + "<|endoftext|>"
    assert [one.token for one in told] == [one.token for one in wanted]
    assert len(told) == whole.usage.completion_tokens


def test_a_model_whose_prompts_are_processed_otherwise(client, monkeypatch):
    """It refuses log-probabilities of the prompt, and nothing else."""
    monkeypatch.setattr(client.runner.requests, "_clamps_prompts", True)
    refusal(client.post(COMPLETIONS, json=body(COMPLETIONS, echo=True, logprobs=1)), "echo")
    assert ask(client, COMPLETIONS, echo=True) and ask(client, COMPLETIONS, logprobs=1)


def test_impossible_tokens_and_tokens_of_one_text(alone):
    _, tokenizer = alone
    texts = {1: b"a", 2: b"a", 3: b"\xf0\x9f", 4: b"b"}
    scores = [
        TokenScore(1, -2.0, ((2, -1.0), (3, -1.5))),
        TokenScore(3, -math.inf, ((4, 0.0), (1, -math.inf))),
    ]
    told = CompletionLogprobs(tokenizer, texts.get, None).write(scores)
    assert told["tokens"] == ["a", "\\xf0\\x9f"] and told["token_logprobs"] == [-2.0, LEAST]
    assert told["top_logprobs"] == [{"a": -1.0, "\\xf0\\x9f": -1.5}, {"b": 0.0, "a": LEAST, "\\xf0\\x9f": LEAST}]
    chat = ChatLogprobs(tokenizer, texts.get)
    assert chat.write(scores)["content"][1]["bytes"] == [0xF0, 0x9F]
    assert chat.take() is None
    chat.add(scores[:1])
    chat.end_chunk()
    chat.add(scores[1:])
    assert [len(chat.take()["content"]) for _ in range(2)] == [1, 1] and chat.take() is None
    assert read_top({}) is None and read_top({"logprobs": True}) == 0 and read_top({"logprobs": 0}) == 0
