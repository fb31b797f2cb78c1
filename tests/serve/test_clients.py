"""Programs that take a wrapped model: lm-evaluation-harness, and specdec_bench's engine."""

import asyncio
import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from server_fixtures import EAGER, PROMPT
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "peers"))

import specdec_bench
from specdec_bench import SpecCompileModel

TEXTS = ["def mean(values):\n", "import json\n\nx =", "class Stack:\n    def"]


@pytest.fixture(scope="module")
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


@pytest.fixture(scope="module")
def fast(plain):
    return speculate(plain, **EAGER)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_lm_eval_gives_the_same_scores(plain, fast, folder, batch_size):
    pytest.importorskip("lm_eval", reason="needs lm_eval, the lm-evaluation-harness")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = AutoTokenizer.from_pretrained(folder)

    def scores(model):
        harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
        options = {"until": ["1"], "max_gen_toks": 16, "do_sample": False}
        until = [Instance("generate_until", {}, (text, options), number) for number, text in enumerate(TEXTS)]
        pairs = [Instance("loglikelihood", {}, (text, " x = 1"), number) for number, text in enumerate(TEXTS)]
        return harness.generate_until(until), harness.loglikelihood(pairs)

    rounds = fast.speculation.stats.rounds
    assert scores(fast) == scores(plain)
    assert fast.speculation.stats.rounds > rounds


def engine(folder, **settings):
    options = {"device": "cpu", "dtype": "float32", "compile": False, "check": False}
    theirs = {"draft_model_dir": None, "speculative_num_steps": 3, "parallel_drafting": False, "block_size": None}
    return SpecCompileModel(str(folder), 2, {"temperature": 0.0}, **theirs | options | settings)


def test_specdec_bench_gets_a_chunk_a_round(folder, plain):
    """The contract of its engines, with three requests at once."""
    model = engine(folder, speculative_algorithm="NGRAM", speculative_num_draft_tokens=8, tokenizer_path="unused")
    ids = AutoTokenizer.from_pretrained(folder)("x = [1, 1, 1, 1, 1,")["input_ids"]

    async def ask():
        return await asyncio.gather(*(model.run(ids, 40, -1, number, 0) for number in range(3)))

    answers = asyncio.run(ask())
    model.stop()
    wanted = plain.generate(torch.tensor([ids]), max_new_tokens=40, do_sample=False, eos_token_id=[], pad_token_id=0)
    for answer in answers:
        chunks, times = answer["output_ids"][0], answer["token_times"]
        assert [token for chunk in chunks for token in chunk] == wanted[0, len(ids) :].tolist()
        assert len(chunks) < 40 and len(times) == len(chunks) + 1 and times == sorted(times)
    config = model.get_serving_config()
    assert config["algo"] == "ngram" and json.loads(json.dumps(config))["options"]["num_draft_tokens"] == 8


def test_specdec_bench_strips_the_end(folder):
    model = engine(folder, speculative_algorithm="NONE")
    ids = AutoTokenizer.from_pretrained(folder)(PROMPT)["input_ids"]
    whole = asyncio.run(model.run(ids, 12, -1, "a", 0))["output_ids"][0]
    assert all(len(chunk) == 1 for chunk in whole)  # plain decoding
    end = whole[3][0]
    cut = asyncio.run(model.run(ids, 12, end, "a", 1))["output_ids"][0]
    assert cut == whole[: whole.index([end])]
    model.sampling_kwargs["temperature"] = 5.0  # what a sweep does
    model.sampling_kwargs["seed"] = 3
    drawn, again = (asyncio.run(model.run(ids, 12, -1, "a", 0))["output_ids"][0] for _ in range(2))
    model.stop()
    assert drawn == again != whole


WORDS = [
    ("EAGLE3", dict(topk=4), "eagle3", dict(topk=4, num_steps=3, draft="head")),
    ("EAGLE3", dict(parallel_drafting=True), "p_eagle", dict(num_steps=3, draft="head")),
    ("DFLASH", dict(block_size=8), "dflash", dict(block_size=8, draft="head")),
    ("DSPARK", {}, "dspark", dict(block_size=None, draft="head")),
    ("PARD", dict(speculative_num_steps=7), "pard", dict(num_steps=7, draft="head")),
    ("NGRAM", dict(draft_model_dir=None), "ngram", dict(num_draft_tokens=4)),
    (None, {}, "ngram", dict(num_draft_tokens=1)),
]


@pytest.mark.parametrize(("theirs", "settings", "algo", "options"), WORDS)
def test_specdec_bench_words(monkeypatch, theirs, settings, algo, options):
    """What is asked of the library for what run.py is told."""
    ours = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(specdec_bench, "speculate", ours)
    monkeypatch.setattr(specdec_bench.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: torch.nn.Identity())
    with pytest.raises(KeyboardInterrupt):
        engine("nowhere", **{"speculative_algorithm": theirs, "draft_model_dir": "head"} | settings)
    assert ours.call_args.args[1] == algo
    assert ours.call_args.kwargs == {"compile": False, "check": False} | options


def test_specdec_bench_sampling():
    assert specdec_bench.sampling({"temperature": 1.0})["top_k"] == 0  # not transformers' default of 50
    assert specdec_bench.sampling({"temperature": 0, "top_p": 0.9}) == {"do_sample": False, "repetition_penalty": 1.0}
    for name, kwargs in (("beam_width", {"beam_width": 2}), ("max_tokens", {"max_tokens": 3})):
        with pytest.raises(ValueError, match=name):
            specdec_bench.sampling(kwargs)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"speculative_algorithm": "EAGLE9"}, "speculative_algorithm"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_algorithm": "NGRAM", "parallel_drafting": True}, "parallel_drafting"),
        ({"speculative_algorithm": "EAGLE3", "block_size": 8}, "block_size"),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 65}, "num_draft_tokens"),
    ],
)
def test_specdec_bench_is_told_what_is_not_served(folder, settings, name):
    with pytest.raises(ValueError, match=name):
        engine(folder, **settings)
