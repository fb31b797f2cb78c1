"""`n`, and lists of prompts: each choice is the answer that it would be in a request of its own."""

import json
import socket
from collections import defaultdict
from contextlib import ExitStack

import pytest
from server_fixtures import CHATS, COMPLETIONS, ask, body, events, wait_until

PROMPTS = ["def mean(values):\n", "a", "# é\nimport"]
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
DRAWN = {"temperature": 1.2, "seed": 5, "max_tokens": 12}
SERVER = dict(slots=3, max_queue=16, served_model_name="tiny")


@pytest.fixture(scope="module")
def singles(client):
    """A function that returns the answer of a request with one choice."""

    def answer(prompt, number, **fields):
        fields = {"prompt": prompt} | DRAWN | {"seed": DRAWN["seed"] + number} | fields
        return client.post(COMPLETIONS, json=fields).json()

    return answer


def streamed(chunks):
    """The text, the reason of the end, and the tokens of each choice of a stream."""
    texts, reasons, tokens = defaultdict(str), {}, defaultdict(list)
    for chunk in chunks:
        if chunk.get("usage"):
            assert chunk["choices"] == []
            continue
        (choice,) = chunk["choices"]
        delta = choice["delta"].get("content") if "delta" in choice else choice["text"]
        texts[choice["index"]] += delta or ""
        tokens[choice["index"]] += (choice.get("logprobs") or {}).get("tokens", [])
        if choice.get("finish_reason") is not None:
            reasons[choice["index"]] = choice["finish_reason"]
    return texts, reasons, tokens


@pytest.mark.parametrize("form", ["texts", "ids"])
def test_each_choice_is_the_answer_of_a_request_of_its_own(client, singles, tokenizer, form):
    """More choices than rows: three prompts with two choices each, over three rows."""
    prompts = PROMPTS if form == "texts" else [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    fields = {"prompt": prompts, "n": 2, "best_of": 2, "logprobs": 1, "echo": form == "texts"} | DRAWN
    wanted = [singles(p, i, logprobs=1, echo=form == "texts") for p in PROMPTS for i in range(2)]
    answer = client.post(COMPLETIONS, json=fields).json()
    assert [choice["index"] for choice in answer["choices"]] == [*range(6)]
    for choice, one in zip(answer["choices"], wanted):
        assert choice["text"] == one["choices"][0]["text"]
        assert choice["finish_reason"] == one["choices"][0]["finish_reason"]
        assert choice["logprobs"]["tokens"] == one["choices"][0]["logprobs"]["tokens"]
    usages = [one["usage"] for one in wanted]
    prompt = sum(usage["prompt_tokens"] for usage in usages[::2])
    tokens = sum(usage["completion_tokens"] for usage in usages)
    counts = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    assert answer["usage"] == counts | {"prompt_tokens_details": answer["usage"]["prompt_tokens_details"]}
    figures = answer["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == len(figures["per_step_drafted"]) >= 6
    with client.stream("POST", COMPLETIONS, json=fields | STREAM) as response:
        chunks = events(response)
    texts, reasons, told = streamed(chunks)
    for index, choice in enumerate(answer["choices"]):
        assert texts[index] == choice["text"] and reasons[index] == choice["finish_reason"]
        assert told[index] == choice["logprobs"]["tokens"]
    assert chunks[-1]["usage"] == answer["usage"] and chunks[-1]["metrics"]
    assert not any("usage" in chunk or "metrics" in chunk for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_one_list_of_ids_is_one_prompt(client, singles, tokenizer):
    answer = client.post(COMPLETIONS, json={"prompt": tokenizer(PROMPTS[0])["input_ids"], "echo": True} | DRAWN).json()
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPTS[0] + singles(PROMPTS[0], 0)["choices"][0]["text"]


def test_chats(sdk):
    fields = body(CHATS, model="tiny") | DRAWN
    wanted = [sdk.chat.completions.create(**fields | {"seed": 5 + i}).choices[0].message.content for i in range(4)]
    answer = sdk.chat.completions.create(**fields, n=4)
    assert [choice.message.content for choice in answer.choices] == wanted and len({*wanted}) > 1
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3] and answer.usage.completion_tokens == 48
    chunks = [chunk.model_dump() for chunk in sdk.chat.completions.create(**fields, n=4, **STREAM)]
    assert [text for _, text in sorted(streamed(chunks)[0].items())] == wanted
    assert chunks[-1]["usage"] == answer.usage.model_dump()


def test_a_prediction_counts_in_each_choice(client):
    text = ask(client, COMPLETIONS, PROMPTS[0], 8, temperature=0).text
    fields = body(COMPLETIONS, PROMPTS[0], 8, temperature=0, prediction={"type": "content", "content": text + " else"})
    details = [
        client.post(COMPLETIONS, json=fields | {"n": n}).json()["usage"]["completion_tokens_details"] for n in (1, 2)
    ]
    one, two = (each["rejected_prediction_tokens"] for each in details)
    assert two == 2 * one > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_all_choices(client, stream):
    """Also those that still wait for a row."""
    requests = client.runner.requests
    ended = []
    requests.manager.observers.append(lambda output: ended.append(output.finish_reason))
    fields = {"prompt": ["a", "b"], "n": 4, "max_tokens": 1500, "ignore_eos": True, "stream": stream}
    try:
        if stream:
            with ExitStack() as stack:
                response = stack.enter_context(client.stream("POST", COMPLETIONS, json=fields))
                next(response.iter_lines())
                with requests.manager.pause():  # no round runs while the client leaves
                    stack.close()
        else:
            sent, address = json.dumps(fields), (client.base_url.host, client.base_url.port)
            head = "Host: localhost\r\nContent-Type: application/json\r\nContent-Length"
            with requests.manager.pause(), socket.create_connection(address) as connection:
                connection.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\n{head}: {len(sent)}\r\n\r\n{sent}".encode())
                wait_until(lambda: requests.active() == 8)
        wait_until(lambda: ended.count("cancelled") == 8)  # an earlier request may be told to the observer, too
    finally:
        requests.manager.observers.pop()
    assert requests.active() == 0


def test_choices_that_find_no_room_cancel_the_others(client):
    """The queue takes 16 requests; all of one HTTP request or none."""
    requests = client.runner.requests
    with requests.manager.pause():
        requests.manager.add_request([5, 6], max_new_tokens=2)
        response = client.post(COMPLETIONS, json={"prompt": "a", "n": 16, "max_tokens": 2})
    assert response.status_code == 429 and response.json()["error"]["code"] == "queue_full"
    wait_until(lambda: requests.active() == 0)
