"""A server of an encoder-decoder: prompts of /v1/completions are sources."""

import encoder_decoders as tiny
import pytest
from server_fixtures import DEMO, running
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(DEMO)
    tokenizer.save_pretrained(folder)
    tiny.build("bart", vocab_size=len(tokenizer)).save_pretrained(folder)
    return folder


def test_completions(folder):
    model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = ["def mean(values):", "import json\nimport os\n", "class Stack:\n    pass" * 5]
    with running(folder) as client:
        for text in texts:
            ids = tokenizer(text, return_tensors="pt").input_ids
            wanted = model.generate(ids, max_new_tokens=12)[0, 1:]
            fields = {"model": str(folder), "prompt": text, "max_tokens": 12, "temperature": 0}
            answer = client.post("/v1/completions", json=fields).json()
            assert answer["choices"][0]["text"] == tokenizer.decode(wanted, skip_special_tokens=True)
            assert answer["usage"]["prompt_tokens"] == ids.shape[1] and answer["usage"]["completion_tokens"] == 12
        refused = client.post("/v1/completions", json=fields | {"prompt": [5] * 129})
        assert refused.status_code == 400 and "the encoder has positions for 128 tokens" in refused.text
        # As many new tokens as the decoder has positions, whatever the length of the source.
        whole = client.post("/v1/completions", json=fields | {"max_tokens": 127}).json()
        assert whole["usage"]["completion_tokens"] == 127
