"""lm-evaluation-harness over HTTP gives the log-likelihoods that it gives with the model itself."""

import json

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'lm-eval[api]'")
for package in ("requests", "datasets"):
    pytest.importorskip(package, reason=f"needs lm-eval[api]: {package}")

from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from server_fixtures import DEMO, running
from transformers import AutoModelForCausalLM, AutoTokenizer

CLOSE = 1e-4
DOCS = [
    {"question": "import os\nimport", "choices": [" os.path as path", " sys", " def", "\n"], "answer": 1},
    {"question": "for index in range(9):\n", "choices": ["        return values", "    print(index)"], "answer": 1},
    {"question": "# naïve 😀\nclass A:\n    def", "choices": [" __init__(self", " é", " __len__"], "answer": 0},
]
"""Questions with choices, as arc_easy has them. Some choices are what the model would write itself."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    (folder / "docs.jsonl").write_text("".join(f"{json.dumps(doc)}\n" for doc in DOCS))
    config = {
        "task": "code_easy", "dataset_path": "json", "test_split": "test", "output_type": "multiple_choice",
        "dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}, "cache_dir": str(folder)},
        "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "target_delimiter": "",
    }  # fmt: skip
    task = ConfigurableTask(config=config)
    task.build_all_requests(rank=0, world_size=1)
    return task


@pytest.fixture(scope="module")
def plain():
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype="float32").eval()
    return HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(DEMO), batch_size=1)


@pytest.fixture(scope="module")
def address():
    with running(DEMO, slots=4, served_model_name="tiny") as client:
        yield f"{client.base_url}/v1/completions"


@pytest.mark.parametrize("batch", [1, 5])
def test_the_log_likelihoods_are_those_of_the_model(task, plain, address, batch):
    served = LocalCompletionsAPI(
        base_url=address, model="tiny", tokenizer=str(DEMO), tokenizer_backend="huggingface", batch_size=batch
    )
    assert len(task.instances) == sum(len(doc["choices"]) for doc in DOCS)
    wanted, told = plain.loglikelihood(task.instances), served.loglikelihood(task.instances)
    assert [score for score, _ in told] == pytest.approx([score for score, _ in wanted], abs=CLOSE)
    assert [greedy for _, greedy in told] == [greedy for _, greedy in wanted]
    assert {greedy for _, greedy in told} == {True, False}


def test_rolling_log_likelihoods_and_answers(plain, address):
    """Perplexity, and generate_until with a list of prompts."""
    served = LocalCompletionsAPI(
        base_url=address, model="tiny", tokenizer=str(DEMO), tokenizer_backend="huggingface", batch_size=4
    )
    texts = [Instance("loglikelihood_rolling", {}, (doc["question"],), index) for index, doc in enumerate(DOCS)]
    assert served.loglikelihood_rolling(texts) == pytest.approx(plain.loglikelihood_rolling(texts), abs=CLOSE)
    settings = {"until": ["<never>"], "max_gen_toks": 8, "do_sample": False}
    asked = [Instance("generate_until", {}, (doc["question"], settings), index) for index, doc in enumerate(DOCS)]
    with torch.no_grad():
        assert served.generate_until(asked) == plain.generate_until(asked)
