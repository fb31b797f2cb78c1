"""Continuous batching on two ranks: the answers of one process."""

from functools import partial

import pytest
import torch
from ranks import run_ranks
from server_fixtures import DEMO, PROMPT, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from spec_compile import speculate

OPTIONS = {"compile": False, "num_draft_tokens": 8, "check": False}
SETTINGS = [
    {"max_new_tokens": 20},
    {"max_new_tokens": 30, "do_sample": True, "temperature": 0.8, "seed": 5},
    {"max_new_tokens": 12, "repetition_penalty": 1.3},
    {"max_new_tokens": 25, "stop_strings": ["1"]},
    {"max_new_tokens": 9, "do_sample": True, "top_p": 0.7, "repetition_penalty": 1.2, "seed": 6},
    {"max_new_tokens": 40},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def answers(rank, folder, ranks, algo="ngram", dtype="float32", **options):
    """Of all requests, on the first rank; the others follow until it stops."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    fast = speculate(model, algo, tensor_parallel=ranks if ranks > 1 else None, **OPTIONS | options)
    manager = fast.init_continuous_batching(
        GenerationConfig(do_sample=False), ContinuousBatchingConfig(max_requests_per_batch=3)
    )
    manager.start()
    if rank > 0:
        manager._generation_thread.join(50)
        return str(manager.background_thread_status.fatal_error)
    names = []
    for number, settings in enumerate(SETTINGS * 2):
        ids = tokenizer(f"x = {number}\n{PROMPT}")["input_ids"]
        names.append(manager.add_request(ids, tokenizer=tokenizer, **settings))
    cancelled = manager.add_request(ids, max_new_tokens=500, do_sample=True, temperature=3.0)
    outputs = {}
    while len(outputs) < len(names):
        output = manager.get_result(timeout=50)
        outputs[output.request_id] = output
    manager.cancel_request(cancelled)
    manager.stop()
    return [(outputs[name].generated_tokens, outputs[name].finish_reason, outputs[name].error) for name in names]


def test_two_ranks_answer_as_one(folder, tmp_path):
    first, second = run_ranks(2, answers, folder, 2, rendezvous=tmp_path / "meet")
    assert second == "None", second
    torch.set_num_threads(1)
    assert first == answers(0, folder, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("algo", "shape"), [("eagle3", {"num_steps": 3, "topk": 4}), ("dflash", {}), ("mtp", {})])
def test_two_ranks_with_a_head_answer_as_one(algo, shape, tmp_path):
    nodes = 2 if algo == "mtp" else 8
    # In float64, because what a head draws for a sampled answer depends on the order of its own sums.
    options = {"draft": str(DEMO / "heads" / algo), "num_draft_tokens": nodes, "dtype": "float64", **shape}
    first, second = run_ranks(2, partial(answers, algo=algo, **options), DEMO, 2, rendezvous=tmp_path / "meet")
    assert second == "None", second
    torch.set_num_threads(1)
    assert first == answers(0, DEMO, 1, algo, **options)
