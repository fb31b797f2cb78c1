"""POST /tokenize and /detokenize: the tokens that a completion or a chat of the same prompt has."""

import pytest
from server_fixtures import CHATS, ask, save_tool_model, user
from transformers import AutoTokenizer

from spec_compile.serve.handlers import ChatToTokens

MESSAGES = user("a mean of values")
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
SAVE = save_tool_model
SERVER = dict(slots=2, served_model_name="tiny")


def told(client, path, **fields):
    response = client.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("text", ["def mean(values):\n", "", "ä ü 漢"])
@pytest.mark.parametrize("special", [None, True, False])
def test_a_text(client, folder, text, special):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    own = {} if special is None else {"add_special_tokens": special}
    found = told(client, "/tokenize", prompt=text, return_token_strs=True, **own)
    ids = tokenizer(text, add_special_tokens=special is not False)["input_ids"]
    assert found["tokens"] == ids and found["count"] == len(ids)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert told(client, "/detokenize", tokens=ids, model="tiny") == {"prompt": tokenizer.decode(ids)}


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}])
def test_a_chat_has_the_tokens_of_its_prompt(client, folder, fields):
    found = told(client, "/tokenize", messages=MESSAGES, add_generation_prompt=True, **fields)
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True, **fields
    )["input_ids"]
    assert found["tokens"] == prompt and found["token_strs"] is None
    assert fields.keys() <= ChatToTokens.model_fields.keys()
    answer = ask(client, CHATS, "a mean of values", 4, **fields)
    assert answer.usage["prompt_tokens"] == found["count"] < found["max_model_len"]
