"""vLLM's fields of sampling and of ends: the answers are those of generate()."""

import json

import pytest
from server_fixtures import CHATS, COMPLETIONS, PROMPT, ask, expected

PROMPTS = {COMPLETIONS: PROMPT, CHATS: PROMPT.rstrip()}
TEXTS = {COMPLETIONS: PROMPT, CHATS: f"# {PROMPT}"}
PATHS = pytest.mark.parametrize("path", PROMPTS)
GREEDY, SAMPLED = {"temperature": 0}, {"temperature": 1.4, "seed": 5}
SERVER = dict(slots=4)


def choice(client, path, **fields):
    """The text of an answer and the reason for its end."""
    answer = ask(client, path, PROMPTS[path], 24, **fields)
    return answer.text, answer.reason


def wanted(alone, path, sampling, **options):
    """The text of generate()."""
    settings = {"do_sample": True, "temperature": 1.4} if sampling is SAMPLED else {"do_sample": False}
    return expected(alone, TEXTS[path], sampling.get("seed", 0), max_new_tokens=24, **settings | options)


@PATHS
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"repetition_penalty": 2}, {"repetition_penalty": 2.0}),
        ({"min_p": 0.3}, {"min_p": 0.3}),
        ({"top_k": 2}, {"top_k": 2}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"top_k": 8, "repetition_penalty": 1.3}, {"top_k": 8, "repetition_penalty": 1.3}),
    ],
    ids=json.dumps,
)
def test_sampling_is_that_of_generate(client, alone, path, sampling, fields, options):
    assert choice(client, path, **sampling, **fields)[0] == wanted(alone, path, sampling, **options)


def test_each_field_of_sampling_changes_an_answer(client):
    """Otherwise the test above would pass if they were dropped."""
    plain = choice(client, COMPLETIONS, **SAMPLED)
    for fields in ({"repetition_penalty": 2}, {"min_p": 0.3}, {"top_k": 2}, {"top_k": -1}):
        assert choice(client, COMPLETIONS, **SAMPLED, **fields) != plain, fields


@pytest.fixture(scope="module")
def ends(alone):
    """Two tokens of the greedy answer, the first of which comes earlier."""
    model, tokenizer = alone
    ids = tokenizer(PROMPT, return_tensors="pt")
    answer = model.generate(**ids, max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    answer = answer[0, ids["input_ids"].shape[1] :].tolist()
    first = next(token for index, token in enumerate(answer) if index >= 3 and token not in answer[:index])
    later = next(token for token in answer[answer.index(first) + 2 :] if answer.index(token) > answer.index(first) + 1)
    return first, later


def test_stop_token_ids_end_an_answer_as_the_models_own(client, alone, ends):
    first, later = ends
    for fields, eos in (
        ({"stop_token_ids": [later]}, [later]),
        ({"stop_token_ids": [later, first]}, [first, later]),
        ({"stop_token_ids": [later], "generation_config": json.dumps({"eos_token_id": first})}, [first, later]),
    ):
        text, reason = choice(client, COMPLETIONS, **GREEDY, **fields)
        assert (text, reason) == (wanted(alone, COMPLETIONS, GREEDY, eos_token_id=eos), "stop"), fields
    neutral = choice(client, COMPLETIONS, **GREEDY, stop_token_ids=[], ignore_eos=False, min_tokens=0)
    assert neutral == choice(client, COMPLETIONS, **GREEDY)


def test_no_end_is_an_end_if_the_client_ignores_them(client, alone, ends, monkeypatch):
    """The ids of `stop_token_ids` still are."""
    first, later = ends
    model = client.runner.requests.model
    monkeypatch.setattr(model.generation_config, "eos_token_id", first)
    short = choice(client, COMPLETIONS, **GREEDY)
    assert short == (wanted(alone, COMPLETIONS, GREEDY, eos_token_id=first), "stop")
    whole = choice(client, COMPLETIONS, **GREEDY, ignore_eos=True)
    assert whole == (wanted(alone, COMPLETIONS, GREEDY, eos_token_id=-1), "length") and len(whole[0]) > len(short[0])
    between = choice(client, COMPLETIONS, **GREEDY, ignore_eos=True, stop_token_ids=[later])
    assert between == (wanted(alone, COMPLETIONS, GREEDY, eos_token_id=later), "stop")
    assert choice(client, COMPLETIONS, **GREEDY, stop_token_ids=[later]) == short


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_min_tokens_forbid_the_ends_until_then(client, alone, ends, sampling):
    options = {"eos_token_id": [*ends], "min_new_tokens": 20}
    text, _ = choice(client, COMPLETIONS, **sampling, min_tokens=20, ignore_eos=True, stop_token_ids=[*ends])
    assert text == wanted(alone, COMPLETIONS, sampling, **options)
    fields = {"min_tokens": 20, "stop_token_ids": [*ends], "temperature": 0}
    assert ask(client, COMPLETIONS, PROMPT, 24, **fields).count >= 20
