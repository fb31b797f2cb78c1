"""The field `thinking_token_budget`: the end of thinking comes exactly there, with drafts and without."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_fixtures import events, running, save_model
from transformers import AutoTokenizer

from spec_compile.serve.settings import ThinkingReader

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEMPLATE = (
    "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    "{% if thinks is defined and not thinks %}<think></think>{% else %}<think>{% endif %}"
)
ANSWER = {
    "start_anchor": "\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"close": "<|never|>", "content": "text"},
    },
}
SAMPLINGS = [{"temperature": 0}, {"temperature": 1.2, "seed": 4}]
BODIES = {CHATS: {"messages": [{"role": "user", "content": "a mean"}]}, COMPLETIONS: {"prompt": "# a mean\n<think>"}}
SERVER = dict(slots=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, ANSWER
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def ask(client, path, **fields):
    """The text of an answer with its thinking."""
    response = client.post(path, json=BODIES[path] | {"max_tokens": 24, "ignore_eos": True} | fields)
    assert response.status_code == 200, response.text
    if path == COMPLETIONS:
        return response.json()["choices"][0]["text"]
    if not fields.get("stream"):
        message = response.json()["choices"][0]["message"]
        return f"{message.get('reasoning_content', '')}</think>{message['content']}"
    deltas = [event["choices"][0]["delta"] for event in events(response)]
    thinking, content = ("".join(each.get(name) or "" for each in deltas) for name in ("reasoning_content", "content"))
    return f"{thinking}</think>{content}"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_ends_exactly_at_the_budget(client, budget, sampling):
    free = ask(client, COMPLETIONS, **sampling, max_tokens=budget) if budget else ""
    assert "</think>" not in free
    got = ask(client, COMPLETIONS, **sampling, thinking_token_budget=budget)
    thought, end, rest = got.partition("</think>")
    assert thought == free and end and rest
    assert got == ask(client, COMPLETIONS, **sampling, thinking_token_budget=budget, speculation=False)
    for stream in (False, True):
        chat = ask(client, CHATS, **sampling, thinking_token_budget=budget, stream=stream)
        assert [part.strip() for part in chat.split("</think>")] == [part.strip() for part in got.split("</think>")]


def test_other_requests_keep_their_answers(client):
    budgets = [None, 0, 3, None, 7]
    bodies = [{} if each is None else {"thinking_token_budget": each} for each in budgets]
    apart = [ask(client, COMPLETIONS, temperature=0, **body) for body in bodies]
    with ThreadPoolExecutor(5) as pool:
        together = [*pool.map(lambda body: ask(client, COMPLETIONS, temperature=0, **body), bodies)]
    assert together == apart and len({*apart}) == 4


def test_an_answer_that_does_not_think_is_free(client):
    fields = {"temperature": 0, "chat_template_kwargs": {"thinks": False}}
    assert ask(client, CHATS, **fields, thinking_token_budget=0) == ask(client, CHATS, **fields)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
def test_a_form_begins_after_the_thinking(client, sampling):
    pytest.importorskip("xgrammar")
    fields = sampling | {"ignore_eos": False, "max_tokens": 60, "guided_choice": ["red", "green"]}
    got = ask(client, COMPLETIONS, **fields, thinking_token_budget=4)
    thought, _, rest = got.partition("</think>")
    assert thought and rest in ("red", "green")
    assert got == ask(client, COMPLETIONS, **fields, thinking_token_budget=4, speculation=False)
    assert ask(client, COMPLETIONS, **fields) in ("red", "green")  # it binds from the first token


@pytest.mark.parametrize("value", [-1, 1.5, "3", True, 1 << 31])
def test_wrong_values(client, value):
    response = client.post(COMPLETIONS, json=BODIES[COMPLETIONS] | {"thinking_token_budget": value})
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_token_budget"


def test_a_model_that_does_not_think(tmp_path):
    with running(save_model(tmp_path), slots=1) as client:
        response = client.post(CHATS, json=BODIES[CHATS] | {"thinking_token_budget": 3})
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "thinking_token_budget"
        assert "shows no thinking" in error["message"] and "<think> ... </think>" in error["message"]


def test_marks_that_the_model_lacks(tokenizer):
    assert "does not have the tokens" in ThinkingReader(tokenizer, 3)._reason
