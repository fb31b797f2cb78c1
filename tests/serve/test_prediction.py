"""The field `prediction`: answers stay, rounds get fewer, and its text leaves with its request."""

import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from server_fixtures import CHATS, COMPLETIONS, DEMO, EAGER, ask, body, refusal, running, save_whole

from spec_compile.batching.output import RequestSpeculation
from spec_compile.serve.settings import count_tokens, reference_of, usage_details

PROMPT = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef variance(values):"
NEW, GREEDY = 48, {"temperature": 0, "logit_bias": {"0": -100}}
OPTIONS = EAGER | {"num_draft_tokens": 16, "adaptive": False, "share_text": False}
SAVE = save_whole
SERVER = dict(slots=4, max_queue=64, options=OPTIONS)


def answer(client, path, **fields):
    """Text, usage and figures of an answer, streamed or not."""
    given = ask(client, path, f"{PROMPT}\n" if path == COMPLETIONS else PROMPT, NEW, **GREEDY, **fields)
    return given.text, given.usage, given.figures


def predicted(content):
    return {"type": "content", "content": content}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_a_right_prediction_saves_rounds(client, tokenizer, path, stream):
    plain, usage, before = answer(client, path, stream=stream)
    assert "completion_tokens_details" not in usage or usage["completion_tokens_details"] is None
    parts = [{"type": "text", "text": plain[:20]}, {"type": "text", "text": plain[20:]}]
    for content in (plain, parts):
        text, usage, after = answer(client, path, stream=stream, prediction=predicted(content))
        assert text == plain and 2 * after["num_spec_steps"] < before["num_spec_steps"]
        details, size = usage["completion_tokens_details"], len(tokenizer(plain)["input_ids"])
        accepted, rejected = (details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected"))
        assert size / 2 < accepted <= after["num_accepted_draft_tokens"] and accepted + rejected <= size
        assert rejected < size / 4


def test_a_wrong_prediction_changes_nothing(client, tokenizer):
    plain, _, before = answer(client, CHATS)
    wrong = " zebra zebra quilt\n" * 3
    text, usage, after = answer(client, CHATS, prediction=predicted(wrong))
    assert text == plain and after["num_spec_steps"] <= before["num_spec_steps"] + 2
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] <= 3
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] >= len(tokenizer(wrong)["input_ids"]) - 3
    text, usage, _ = answer(client, CHATS, prediction=predicted(plain), speculation=False)  # nothing is drafted
    assert text == plain and usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_other_requests_do_not_draft_from_it(client):
    plain, _, before = answer(client, CHATS)
    with ThreadPoolExecutor(2) as pool:
        told = pool.submit(answer, client, CHATS, prediction=predicted(plain))
        untold = pool.submit(answer, client, CHATS)
    (text, usage, steps), (other, other_usage, other_steps) = told.result(), untold.result()
    assert text == other == plain
    assert steps["num_spec_steps"] < before["num_spec_steps"] == other_steps["num_spec_steps"]
    assert usage["completion_tokens_details"] and not other_usage.get("completion_tokens_details")
    assert answer(client, CHATS)[2]["num_spec_steps"] == before["num_spec_steps"]
    algorithm = client.runner.requests.manager.scheduler.prefill.runtime.algorithm
    assert len(algorithm.store) == 0 and not algorithm.ngram.private


def test_openai_client(client, sdk):
    plain, _, _ = answer(client, CHATS)
    fields = body(CHATS, PROMPT, NEW, model=sdk.models.list().data[0].id, **GREEDY)
    given = sdk.chat.completions.create(**fields, prediction=predicted(plain))
    assert given.choices[0].message.content == plain
    assert given.usage.completion_tokens_details.accepted_prediction_tokens > 10
    with pytest.raises(openai.BadRequestError) as error:
        sdk.chat.completions.create(**fields, prediction={"type": "text", "content": "a"})
    assert error.value.param == "prediction"


def test_without_ngrams(folder):
    options = EAGER | {"draft": str(DEMO / "heads" / "eagle3")}
    del options["num_draft_tokens"]
    with running(folder, slots=1, algo="eagle3", options=options) as client:
        response = client.post(CHATS, json=body(CHATS, prediction=predicted("a")))
        assert "ngram=True" in refusal(response, "prediction")


# Counts of tokens


def test_the_first_draft_is_the_beginning_of_the_prediction():
    assert reference_of([7, 8], [1, 2]) == [7, 8, 1, 2]
    assert reference_of([*range(100, 200)], [1]) == [*range(188, 200), 1]


@pytest.mark.parametrize(
    ("prediction", "answer", "common"),
    [
        ([1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 3, 8, 5, 6, 7], 4), ([1, 2], [1, 2, 1, 2], 2), ([], [1], 0), ([1], [], 0),
        ([1, 2, 3, 4], [2, 3, 4], 1), ([5, 1, 2, 3, 1, 2, 3], [1, 2, 3, 1, 2, 3], 4), ([1, 2, 3], [3, 2, 1], 1),
    ],
)  # fmt: skip
def test_common_tokens(prediction, answer, common):
    drafts = [True] * len(answer)
    assert count_tokens(prediction, answer, drafts) == (common, len(prediction) - common)
    assert count_tokens(prediction, answer, [False] * len(answer)) == (0, len(prediction) - common)


def test_counts_never_exceed_the_prediction():
    rng = random.Random(0)
    for _ in range(300):
        prediction, answer = ([rng.randrange(3) for _ in range(rng.randrange(30))] for _ in range(2))
        drafts = [rng.random() < 0.5 for _ in range(rng.randrange(len(answer) + 1))]
        accepted, missing = count_tokens(prediction, answer, drafts)
        assert 0 <= accepted <= sum(drafts) and 0 <= missing and accepted + missing <= len(prediction)


def test_tokens_of_the_target_are_no_drafts():
    """Two rounds: two drafts and the target's own token, then only the target's."""
    speculation = RequestSpeculation()
    speculation.count(3, 2, 3)
    speculation.count(3, 0, 1)
    details = usage_details([1, 2, 3, 4, 5], [1, 2, 3, 4], speculation)
    assert details == {"accepted_prediction_tokens": 2, "rejected_prediction_tokens": 1}
