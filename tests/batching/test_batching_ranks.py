"""Continuous batching on two ranks: the answers of one process."""

from functools import partial

import pytest
import torch
from batch_requests import config, write_modules
from ranks import run_ranks
from server_fixtures import DEMO, PROMPT, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

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


def answers(rank, folder, ranks, algo="ngram", dtype="float32", blocks=None, longest=500, **options):
    """Of all requests, on the first rank; the others follow until it stops. blocks: pages of the pool, in which rows
    are taken for others."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    fast = speculate(model, algo, tensor_parallel=ranks if ranks > 1 else None, **OPTIONS | options)
    manager = fast.init_continuous_batching(
        GenerationConfig(do_sample=False),
        config(max_requests_per_batch=3, num_blocks=blocks, page_size=64),
    )
    manager.start()
    if rank > 0:
        manager._generation_thread.join(50)
        return str(manager.background_thread_status.fatal_error)
    names = []
    for number, settings in enumerate(SETTINGS * 2):
        ids = tokenizer(f"x = {number}\n{PROMPT}")["input_ids"] * (1 if blocks is None else 4)
        names.append(manager.add_request(ids, tokenizer=tokenizer, logprobs=0, prompt_logprobs=0, **settings))
    cancelled = manager.add_request(ids, max_new_tokens=longest, do_sample=True, temperature=3.0)
    outputs = {}
    while len(outputs) < len(names):
        output = manager.get_result(timeout=50)
        outputs[output.request_id] = output
    manager.cancel_request(cancelled)
    assert blocks is None or manager.metrics()["preemptions_total"] > 0
    manager.stop()
    outputs = [outputs[name] for name in names]
    scores = [[each.logprob for each in output.prompt_scores + output.scores] for output in outputs]
    return [(output.generated_tokens, output.finish_reason, output.error) for output in outputs], scores


def are_those_of_one(first, second, *arguments, **options):
    """Compare what both ranks gave with the answers of one process, and with its log-probabilities."""
    assert second == "None", second
    torch.set_num_threads(1)
    outputs, scores = answers(0, *arguments, **options)
    assert first[0] == outputs
    for ours, theirs in zip(first[1], scores, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"blocks": 4, "longest": 90, "max_cache_len": 200, "recycle": 0}], ids=["pages", "few pages"]
)
def test_two_ranks_answer_as_one(folder, tmp_path, settings):
    results = run_ranks(2, partial(answers, **settings), folder, 2, rendezvous=tmp_path / "meet")
    are_those_of_one(*results, folder, 1, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "shape"),
    [
        ("eagle3", {"num_steps": 3, "topk": 4}),
        ("dflash", {}),
        ("mtp", {"num_draft_tokens": 2}),
        pytest.param("mtp", {"num_steps": 3, "num_draft_tokens": 4}, id="modules"),
    ],
)
def test_two_ranks_with_a_head_answer_as_one(algo, shape, tmp_path):
    draft = write_modules(tmp_path) if "num_steps" in shape and algo == "mtp" else DEMO / "heads" / algo
    # In float64, because what a head draws for a sampled answer depends on the order of its own sums.
    options = {"draft": str(draft), "num_draft_tokens": 8, "dtype": "float64", **shape}
    results = run_ranks(2, partial(answers, algo=algo, **options), DEMO, 2, rendezvous=tmp_path / "meet")
    are_those_of_one(*results, DEMO, 1, algo, **options)


def error_of(attempt):
    """The text of what an attempt raises."""
    with pytest.raises((RuntimeError, ValueError)) as caught:
        attempt()
    return str(caught.value)


def uses(rank, folder):
    """What other uses of a manager give on each rank: errors that name what to do, and answers that all ranks have."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    fast = speculate(model, "ngram", tensor_parallel=2, **OPTIONS)
    prompts = [tokenizer(f"x = {number}\n{PROMPT}")["input_ids"] for number in range(5)]
    manager = fast.init_continuous_batching(GenerationConfig(do_sample=False))
    manager.start()
    errors = [error_of(lambda: fast.generate(torch.tensor(prompts[:1]), max_new_tokens=4))]
    if rank:
        errors.append(error_of(lambda: manager.add_request(prompts[0])))
        manager.join(0.0)
    else:
        assert manager.add_request(prompts[0], max_new_tokens=3) == "req_0"
        assert len(manager.get_result(timeout=50).generated_tokens) == 3
        manager.stop()
    manager.destroy()
    outputs = fast.generate_batch([*prompts, []], max_new_tokens=6, warmup=False)
    batch = [(output.generated_tokens, output.error) for output in outputs.values()]
    errors.append(error_of(lambda: fast.generate_batch([[]], warmup=False)))
    return errors, batch, fast.generate(torch.tensor(prompts[:1]), max_new_tokens=6)[0, len(prompts[0]) :].tolist()


def test_ranks_are_told_the_same(folder, tmp_path):
    (errors, *answers), (others, *same) = run_ranks(2, uses, folder, rendezvous=tmp_path / "meet")
    for told in (errors, others):
        assert "while a manager of requests does" in told[0] and "at least one token" in told[-1]
    assert "only rank 0 takes requests" in others[1]
    (batch, answer) = answers
    assert answers == same and [bool(error) for _, error in batch] == [False] * 5 + [True] and answer == batch[0][0]
