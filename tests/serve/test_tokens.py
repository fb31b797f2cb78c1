"""POST /tokenize and /detokenize: the tokens that a completion or a chat of the same prompt has."""

import pytest
from server_fixtures import save_tool_model
from transformers import AutoTokenizer

from spec_compile.serve.handlers import ChatToTokens

MESSAGES = [{"role": "user", "content": "a mean of values"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SAVE = save_tool_model
SERVER = dict(slots=2, served_model_name="tiny")


def ask(client, path, **body):
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["def mean(values):\n", "", "ä ü 漢"])
@pytest.mark.parametrize("special", [None, True, False])
def test_a_text(client, folder, text, special):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = {} if special is None else {"add_special_tokens": special}
    told = ask(client, "/tokenize", prompt=text, return_token_strs=True, **own)
    ids = tokenizer(text, add_special_tokens=special is not False)["input_ids"]
    assert told["tokens"] == ids and told["count"] == len(ids)
    assert told["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert ask(client, "/detokenize", tokens=ids, model="tiny") == {"prompt": tokenizer.decode(ids)}


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_a_chat_has_the_tokens_of_its_prompt(client, folder, fields):
    told = ask(client, "/tokenize", messages=MESSAGES, add_generation_prompt=True, **fields)
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True, **fields
    )["input_ids"]
    assert told["tokens"] == prompt and told["token_strs"] is None
    assert fields.keys() <= ChatToTokens.model_fields.keys()
    answer = ask(client, "/v1/chat/completions", messages=MESSAGES, max_tokens=4, **fields)
    assert answer["usage"]["prompt_tokens"] == told["count"] < told["max_model_len"]


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("/tokenize", {}, 400, "prompt"), ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a" * 500_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, 400, "add_generation_prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"), ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [1 << 30]}, 400, "tokens"), ("/detokenize", {"tokens": ["a"]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)  # fmt: skip
def test_bad_bodies_are_refused_by_field(client, path, body, status, field):
    response = client.post(path, json=body)
    assert response.status_code == status and response.json()["error"]["param"] == field, response.text
