"""The field `prediction`: answers stay, rounds get fewer, and its text leaves with its request."""

import random
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from server_fixtures import DEMO, EAGER, events, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile.batching.output import RequestSpeculation
from spec_compile.serve.settings import count_tokens, reference_of, usage_details

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "def mean(values):\n    return sum(values) / len(values)\n\n\ndef variance(values):"
NEW = 48
OPTIONS = EAGER | {"num_draft_tokens": 16, "adaptive": False, "share_text": False}
SERVER = dict(slots=4, max_queue=64, options=OPTIONS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The demo model whole, with a chat template."""
    folder = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def body(path, **fields):
    prompt = {"prompt": f"{PROMPT}\n"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": PROMPT}]}
    return prompt | {"max_tokens": NEW, "temperature": 0, "logit_bias": {"0": -100}} | fields


def ask(client, path, **fields):
    """Text, usage and steps of an answer, streamed or not."""
    options = {"stream_options": {"include_usage": True}} if fields.get("stream") else {}
    response = client.post(path, json=body(path, **fields, **options))
    assert response.status_code == 200, response.text
    parts = events(response) if fields.get("stream") else [response.json()]
    key = "delta" if fields.get("stream") else "message"
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [choice["text"] if path == COMPLETIONS else choice[key].get("content") for choice in choices]
    return "".join(text or "" for text in texts), parts[-1]["usage"], parts[-1]["metrics"]["speculative_decoding"]


def predicted(content):
    return {"type": "content", "content": content}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_a_right_prediction_saves_rounds(client, tokenizer, path, stream):
    plain, usage, before = ask(client, path, stream=stream)
    assert "completion_tokens_details" not in usage or usage["completion_tokens_details"] is None
    parts = [{"type": "text", "text": plain[:20]}, {"type": "text", "text": plain[20:]}]
    for content in (plain, parts):
        text, usage, after = ask(client, path, stream=stream, prediction=predicted(content))
        assert text == plain and 2 * after["num_spec_steps"] < before["num_spec_steps"]
        details, size = usage["completion_tokens_details"], len(tokenizer(plain)["input_ids"])
        accepted, rejected = (details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected"))
        assert size / 2 < accepted <= after["num_accepted_draft_tokens"] and accepted + rejected <= size
        assert rejected < size / 4


def test_a_wrong_prediction_changes_nothing(client, tokenizer):
    plain, _, before = ask(client, CHATS)
    wrong = " zebra zebra quilt\n" * 3
    text, usage, after = ask(client, CHATS, prediction=predicted(wrong))
    assert text == plain and after["num_spec_steps"] <= before["num_spec_steps"] + 2
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] <= 3
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] >= len(tokenizer(wrong)["input_ids"]) - 3
    text, usage, _ = ask(client, CHATS, prediction=predicted(plain), speculation=False)  # nothing is drafted
    assert text == plain and usage["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_other_requests_do_not_draft_from_it(client):
    plain, _, before = ask(client, CHATS)
    with ThreadPoolExecutor(2) as pool:
        told = pool.submit(ask, client, CHATS, prediction=predicted(plain))
        untold = pool.submit(ask, client, CHATS)
    (text, usage, steps), (other, other_usage, other_steps) = told.result(), untold.result()
    assert text == other == plain
    assert steps["num_spec_steps"] < before["num_spec_steps"] == other_steps["num_spec_steps"]
    assert usage["completion_tokens_details"] and not other_usage.get("completion_tokens_details")
    assert ask(client, CHATS)[2]["num_spec_steps"] == before["num_spec_steps"]
    algorithm = client.runner.requests.manager.scheduler.prefill.runtime.algorithm
    assert len(algorithm.store) == 0 and not algorithm.private


def test_openai_client(client):
    plain, _, _ = ask(client, CHATS)
    with openai.OpenAI(base_url=f"{client.base_url}/v1/", api_key="unused", max_retries=0) as sdk:
        model = sdk.models.list().data[0].id
        answer = sdk.chat.completions.create(model=model, **body(CHATS), prediction=predicted(plain))
        assert answer.choices[0].message.content == plain
        assert answer.usage.completion_tokens_details.accepted_prediction_tokens > 10
        with pytest.raises(openai.BadRequestError) as error:
            sdk.chat.completions.create(model=model, **body(CHATS), prediction={"type": "text", "content": "a"})
        assert error.value.param == "prediction"


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
@pytest.mark.parametrize(
    ("prediction", "words"),
    [
        ("a", "prediction: expected an object"), ([], "prediction: expected an object"),
        ({"type": "content"}, "prediction.content: expected"), ({"content": "a"}, "prediction.type: expected"),
        ({"type": "text", "content": "a"}, 'prediction.type: expected "content"'),
        (predicted(1), "prediction.content: expected"), (predicted([]), "prediction.content: expected"),
        (predicted(""), "prediction.content: expected"), (predicted(["a"]), "prediction.content[0]: expected an"),
        (predicted([{"type": "text"}]), "prediction.content[0].text: expected"),
        (predicted([{"type": "text", "text": "a"}, {"type": "image", "text": "a"}]), "prediction.content[1].type"),
        (predicted(" zebra" * 2000), "tokens are more than a row of"),
        (None, "a row holds no more"),
    ],
)  # fmt: skip
def test_refusals(client, path, prediction, words):
    if prediction is None:
        prediction = predicted("a" * (client.runner.requests.most_characters + 1))
    response = client.post(path, json=body(path, prediction=prediction))
    error = response.json()["error"]
    assert response.status_code == 400 and words in error["message"] and error["param"] == "prediction", error


def test_without_ngrams(folder):
    options = EAGER | {"draft": str(DEMO / "heads" / "eagle3")}
    del options["num_draft_tokens"]
    with running(folder, slots=1, algo="eagle3", options=options) as client:
        response = client.post(CHATS, json=body(CHATS, prediction=predicted("a")))
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "prediction" and "ngram=True" in error["message"]


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
