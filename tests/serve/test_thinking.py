"""The field `thinking_token_budget`: the end of thinking comes exactly there, with drafts and without."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_fixtures import CHATS, COMPLETIONS, ask, body, refusal, running, save_model
from transformers import AutoTokenizer

from spec_compile.serve.settings import ThinkingReader

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
SERVER = dict(slots=4)


def SAVE(folder):
    tokenizer = AutoTokenizer.from_pretrained(save_model(folder))
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, ANSWER
    tokenizer.save_pretrained(folder)
    return folder


def write(client, path, **fields):
    """The text of an answer with its thinking."""
    prompt = "# a mean\n<think>" if path == COMPLETIONS else "a mean"
    answer = ask(client, path, prompt, **{"limit": 24, "ignore_eos": True} | fields)
    return answer.text if path == COMPLETIONS else f"{answer.thoughts}</think>{answer.text}"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_thinking_ends_exactly_at_the_budget(client, budget, sampling):
    free = write(client, COMPLETIONS, **sampling, limit=budget) if budget else ""
    assert "</think>" not in free
    got = write(client, COMPLETIONS, **sampling, thinking_token_budget=budget)
    thought, end, rest = got.partition("</think>")
    assert thought == free and end and rest
    assert got == write(client, COMPLETIONS, **sampling, thinking_token_budget=budget, speculation=False)
    for stream in (False, True):
        chat = write(client, CHATS, **sampling, thinking_token_budget=budget, stream=stream)
        assert [part.strip() for part in chat.split("</think>")] == [part.strip() for part in got.split("</think>")]


def test_other_requests_keep_their_answers(client):
    budgets = [None, 0, 3, None, 7]
    bodies = [{} if each is None else {"thinking_token_budget": each} for each in budgets]
    apart = [write(client, COMPLETIONS, temperature=0, **body) for body in bodies]
    with ThreadPoolExecutor(5) as pool:
        together = [*pool.map(lambda body: write(client, COMPLETIONS, temperature=0, **body), bodies)]
    assert together == apart and len({*apart}) == 4


def test_an_answer_that_does_not_think_is_free(client):
    fields = {"temperature": 0, "chat_template_kwargs": {"thinks": False}}
    assert write(client, CHATS, **fields, thinking_token_budget=0) == write(client, CHATS, **fields)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=json.dumps)
def test_a_form_begins_after_the_thinking(client, sampling):
    pytest.importorskip("xgrammar")
    fields = sampling | {"ignore_eos": False, "limit": 60, "guided_choice": ["red", "green"]}
    got = write(client, COMPLETIONS, **fields, thinking_token_budget=4)
    thought, _, rest = got.partition("</think>")
    assert thought and rest in ("red", "green")
    assert got == write(client, COMPLETIONS, **fields, thinking_token_budget=4, speculation=False)
    assert write(client, COMPLETIONS, **fields) in ("red", "green")  # it binds from the first token


def test_a_model_that_does_not_think(tmp_path):
    with running(save_model(tmp_path), slots=1) as client:
        reason = refusal(client.post(CHATS, json=body(CHATS, thinking_token_budget=3)), "thinking_token_budget")
        assert "shows no thinking" in reason and "<think> ... </think>" in reason


def test_marks_that_the_model_lacks(tokenizer):
    assert "does not have the tokens" in ThinkingReader(tokenizer, 3)._reason
