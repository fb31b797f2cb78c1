"""Fields and paths of other engines: words and tokens that are forbidden, cut prompts, token ids, middles of texts."""

import pytest
from server_fixtures import DEMO, PROMPT, events, load_alone, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from spec_compile.serve.infill_tokens import InfillTokens

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
HELLO = [{"role": "user", "content": "hello"}]
SERVER = dict(slots=4, served_model_name="tiny", allowed_origins=["https://pages.example"])


def SAVE(folder):
    """A random model whose tokenizer has tokens for the middles of texts."""
    save_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(MARKS, special_tokens=True)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    return load_alone(folder)


def post(client, path: str, status: int = 200, **body) -> dict:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def complete(client, **body) -> dict:
    asked = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "return_token_ids": True} | body
    return post(client, COMPLETIONS, **asked)["choices"][0]


def test_token_ids_are_told(client, alone):
    tokenizer = alone[1]
    choice = complete(client, n=2, temperature=1.0, seed=1)
    ids = tokenizer(PROMPT)["input_ids"]
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 16
    assert tokenizer.decode(choice["token_ids"], skip_special_tokens=True) == choice["text"]
    body = {"messages": HELLO, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    whole = post(client, CHATS, **body)["choices"][0]
    chunks = events(client.post(CHATS, json=body | {"stream": True}))
    told = [token for chunk in chunks for part in chunk["choices"] for token in part.get("token_ids", [])]
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert told == whole["token_ids"] and prompts == [whole["prompt_token_ids"]]


def test_only_allowed_tokens_come(client):
    free = complete(client)["token_ids"]
    allowed = [*sorted({*free})[:3], 5, 6]
    for fields in ({}, {"temperature": 1.0, "seed": 2}):
        assert {*complete(client, allowed_token_ids=allowed, **fields)["token_ids"]} <= {*allowed}
    reason = post(client, COMPLETIONS, 400, prompt="a", allowed_token_ids=[1 << 20])["error"]["message"]
    assert reason.startswith("allowed_token_ids: token id 1048576 is outside the vocabulary")


def test_forbidden_words_do_not_come(client, alone):
    tokenizer = alone[1]
    free = complete(client)
    word = tokenizer.decode(free["token_ids"][0]).strip() or tokenizer.decode(free["token_ids"][1]).strip() or "x"
    without = complete(client, bad_words=[word], max_tokens=48)
    ids = [tokenizer(each, add_special_tokens=False)["input_ids"] for each in (word, f" {word}")]
    for each in ids:
        assert not any(without["token_ids"][at : at + len(each)] == each for at in range(48))


@pytest.mark.parametrize(("most", "left"), [(3, 3), (10_000, None), (-1, None)])
def test_prompts_are_cut_on_the_left(client, alone, most, left):
    ids = alone[1](PROMPT)["input_ids"]
    assert complete(client, truncate_prompt_tokens=most)["prompt_token_ids"] == (ids[-left:] if left else ids)
    chat = {"messages": HELLO, "max_tokens": 4, "return_token_ids": True}
    whole = post(client, CHATS, **chat)["choices"][0]["prompt_token_ids"]
    cut = post(client, CHATS, **chat, truncate_prompt_tokens=most)["choices"][0]["prompt_token_ids"]
    assert cut == (whole[-left:] if left else whole)


def test_prompts_that_fit_no_row_are_cut_to_what_fits(client):
    room = post(client, "/tokenize", prompt="a")["max_model_len"]
    choice = complete(client, prompt=[5] * (room + 100), truncate_prompt_tokens=-1)
    assert len(choice["prompt_token_ids"]) == room - 16 and len(choice["token_ids"]) == 16


def test_special_tokens_are_shown_if_asked_for(client, alone):
    tokenizer = alone[1]
    mark = tokenizer.convert_tokens_to_ids(MARKS[0])
    shown, hidden = (
        complete(client, allowed_token_ids=[mark], skip_special_tokens=skips, max_tokens=3)["text"]
        for skips in (False, True)
    )
    assert shown == 3 * MARKS[0] and hidden == ""
    body = {"prompt": "a", "allowed_token_ids": [mark], "skip_special_tokens": False, "max_tokens": 3, "stream": True}
    chunks = events(client.post(COMPLETIONS, json=body))
    assert "".join(part["text"] for chunk in chunks for part in chunk["choices"]) == 3 * MARKS[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False, "stop": [], "priority": 0},
        {"spaces_between_special_tokens": True, "logits_processors": [], "prompt_logprobs": None, "bad_words": []},
        {"reasoning_effort": "high", "verbosity": "low", "add_generation_prompt": True, "documents": []},
    ],
    ids=str,
)  # fmt: skip
def test_values_without_effect_are_accepted(client, fields):
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    assert post(client, CHATS, **body, **fields)["choices"] == post(client, CHATS, **body)["choices"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_beam_search", True), ("length_penalty", 2.0), ("logits_processors", ["a.b"]), ("prompt_logprobs", 1),
        ("priority", 3), ("reasoning_effort", "most"), ("verbosity", 1), ("bad_words", [" "]), ("bad_words", "a"),
        ("allowed_token_ids", []), ("truncate_prompt_tokens", 0), ("skip_special_tokens", "no"),
        ("continue_final_message", True), ("chat_template", "{{ messages }}"), ("documents", [{"text": "a"}]),
    ],
    ids=str,
)  # fmt: skip
def test_bad_values_are_refused_by_their_name(client, name, value):
    error = post(client, CHATS, 400, messages=HELLO, **{name: value})["error"]
    assert error["param"] == name and error["message"].startswith(f"{name}: "), error


def test_effort_reaches_templates_that_read_it(client):
    processor = client.runner.requests.processor
    template = processor.chat_template
    processor.chat_template = "{{ reasoning_effort }}" + template
    try:
        sizes = [
            post(client, CHATS, messages=HELLO, max_tokens=1, **fields)["usage"]["prompt_tokens"]
            for fields in ({"reasoning_effort": "low"}, {"reasoning_effort": "low low low low"[:3]}, {})
        ]
        given = {"chat_template_kwargs": {"reasoning_effort": ""}, "reasoning_effort": "high"}
        assert sizes[0] == sizes[1] > sizes[2]
        assert post(client, CHATS, messages=HELLO, max_tokens=1, **given)["usage"]["prompt_tokens"] == sizes[2]
    finally:
        processor.chat_template = template


def test_middles_are_filled_in(client, alone):
    tokenizer = alone[1]
    prefix, suffix, middle, file = tokenizer.convert_tokens_to_ids(MARKS)
    before, after = (tokenizer(text)["input_ids"] for text in ("def a():\n", "return 1\n"))
    ids = [prefix, *before, suffix, *after, middle]
    completed = complete(client, prompt="def a():\n", suffix="return 1\n")
    assert completed["prompt_token_ids"] == ids
    same = complete(client, prompt=ids, stop_token_ids=[prefix, suffix, middle, file])
    assert (completed["text"], completed["token_ids"]) == (same["text"], same["token_ids"])
    body = {"input_prefix": "def a():\n", "input_suffix": "return 1\n", "n_predict": 16, "temperature": 0}
    answer = post(client, "/infill", **body)
    assert answer["content"] == completed["text"] and answer["tokens_evaluated"] == len(ids) and answer["stop"] is True
    stream = events(client.post("/infill", json=body | {"stream": True}))
    assert "".join(each["content"] for each in stream) == completed["text"] and stream[-1]["stop"] is True
    extra = [{"filename": "b.py", "text": "b = 1\n"}]
    more = post(client, "/infill", **body, input_extra=extra, prompt="x", top_k=1, repeat_penalty=1.0)
    file_ids = [file, *tokenizer("b.py\nb = 1\n")["input_ids"]]
    assert more["tokens_evaluated"] == len(ids) + len(file_ids) + len(tokenizer("x")["input_ids"])


def test_middles_need_marks(client, monkeypatch):
    monkeypatch.setattr(client.runner.requests, "infill", None)
    for path, body, name in (
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_prefix"),
    ):
        error = post(client, path, 400, **body)["error"]
        assert error["param"] == name and "no tokens to fill in the middle" in error["message"]
    assert InfillTokens.of(AutoTokenizer.from_pretrained(DEMO)) is None


def test_suffixes_come_first_for_mistral(alone):
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.add_tokens(["[PREFIX]", "[SUFFIX]"], special_tokens=True)
    prefix, suffix = tokenizer.convert_tokens_to_ids(["[PREFIX]", "[SUFFIX]"])
    before, after = (tokenizer(text)["input_ids"] for text in ("a", "c"))
    assert InfillTokens.of(tokenizer).prompt(tokenizer, "a", "c") == [suffix, *after, prefix, *before]


def test_other_paths_say_what_is_here(client):
    error = post(client, "/v1/embeddings", 404, input="a", model="tiny")["error"]
    assert error["message"].startswith("/v1/embeddings is not served: this is a model that generates text")
    card = client.get("/v1/models").json()["data"][0]
    room = post(client, "/tokenize", prompt="a")["max_model_len"]
    assert card["max_model_len"] == card["context_length"] == room and card["display_name"] == "tiny"
    assert client.head("/").status_code == 200


def test_pages_of_allowed_origins_may_read_answers(client):
    for origin, status in (("https://pages.example", 200), ("https://other.example", 403)):
        response = client.get("/v1/models", headers={"Origin": origin})
        allowed = response.headers.get("access-control-allow-origin")
        assert (response.status_code, allowed) == (status, origin if status == 200 else None)
