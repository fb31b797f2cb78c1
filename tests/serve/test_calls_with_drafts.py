"""Tool calls and JSON are the same with drafts and without, byte for byte, and fit their schemas."""

import json

import pytest

pytest.importorskip("xgrammar", reason="needs the extra grammars: xgrammar")

from generated_calls import fits, request, values
from server_fixtures import CHATS, DEMO, running, together
from tool_templates import save_tool_model

from spec_compile.serve import grammar_judge, tool_calls

SLOTS = 16
ALWAYS = {"compile": False, "check": False, "adaptive": False}
DRAFTS = {
    "ngram": {"algo": "ngram", "options": ALWAYS | {"num_draft_tokens": 4}},
    "mtp": {"algo": "mtp", "options": ALWAYS | {"draft": str(DEMO / "heads" / "mtp"), "num_steps": 1}},
}
FEW, MANY = range(24), range(24, 1000)
"""Numbers of requests; each is asked for with drafts and without."""


@pytest.fixture(scope="module", params=DRAFTS)
def client(request, tmp_path_factory):
    folder = save_tool_model(tmp_path_factory.mktemp("model"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (grammar_judge, tool_calls):
            patch.setattr(module, "MOST_SPACES", 1)  # a model that was not trained for JSON would fill it with spaces
        with running(folder, slots=SLOTS, **DRAFTS[request.param]) as client:
            yield client


def answers(client, bodies):
    """The answers to these chats, many of them at once."""
    responses = together(client, CHATS, bodies, SLOTS)
    assert [response.text for response in responses if response.status_code != 200] == []
    return [response.json() for response in responses]


def check(client, numbers):
    bodies = [request(number) for number in numbers]
    drafted = answers(client, bodies)
    plain = answers(client, [body | {"speculation": False} for body in bodies])
    ended = 0
    for body, *both in zip(bodies, drafted, plain):
        (choice, other) = (answer["choices"][0] for answer in both)
        for message in (choice["message"], other["message"]):
            for number, call in enumerate(message.get("tool_calls", [])):
                assert call.pop("id").endswith(f"_{number}")
        assert choice == other and both[0]["usage"] == both[1]["usage"], body
        found = values(body, choice["message"]) if choice["finish_reason"] != "length" else []
        assert all(fits(json.loads(text), schema) for schema, text in found), (body, found)
        assert found or choice["finish_reason"] == "length"
        ended += len(found) > 0
    assert ended > 0.7 * len(numbers)
    accepted = [each["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] for each in drafted]
    assert sum(accepted) > len(numbers)
    assert not any(each["metrics"]["speculative_decoding"]["num_draft_tokens"] for each in plain)


def test_dozens_of_answers_are_those_without_drafts(client):
    check(client, FEW)


@pytest.mark.slow
def test_thousands_of_answers_are_those_without_drafts(client):
    check(client, MANY)
