"""What generate() is given that no model can serve is refused by name, before anything is allocated for it."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from models import ADMITTED, HYBRIDS, prompts
from transformers import GenerationConfig, MaxLengthCriteria

from spec_compile import speculate

IDS = prompts()[0][0]
OPTIONS = dict(do_sample=False, eos_token_id=None, pad_token_id=0)
MOST = "expected at most 2147483647, got"
REFUSED = [
    (dict(max_new_tokens="5"), TypeError, r"max_new_tokens: expected a number, got str \('5'\)"),
    (dict(max_new_tokens=2**63 - 1), ValueError, f"max_new_tokens: {MOST} 9223372036854775807"),
    (dict(max_new_tokens=math.inf), ValueError, f"max_new_tokens: {MOST} inf"),
    (dict(max_new_tokens=math.nan), ValueError, f"max_new_tokens: {MOST} nan"),
    (dict(max_length="50"), TypeError, "max_length: expected a number"),
    (dict(max_length=int(1e30)), ValueError, "max_length: expected at most"),
    (dict(min_new_tokens="3"), TypeError, "min_new_tokens: expected a number"),
    (dict(min_length=2**63), ValueError, "min_length: expected at most"),
    (dict(max_time="1"), TypeError, "max_time: expected a number"),
    (dict(do_sample=True, top_p="x"), TypeError, "top_p: expected a number"),
    (dict(num_return_sequences="2"), TypeError, "num_return_sequences: expected a number"),
    (dict(do_sample=True, num_return_sequences=10**9), ValueError, "num_return_sequences: expected at most 65536"),
    (dict(eos_token_id="x"), TypeError, r"eos_token_id: expected token ids, got str \('x'\)"),
    (dict(eos_token_id=[3, None]), TypeError, "eos_token_id: expected token ids, got NoneType"),
    (dict(eos_token_id=2**70), ValueError, "eos_token_id: expected token ids of 64 bits"),
    (dict(eos_token_id=5, pad_token_id="x"), TypeError, "pad_token_id: expected token ids"),
    (dict(eos_token_id=5, pad_token_id=2**70), ValueError, "pad_token_id: expected token ids of 64 bits"),
    (dict(prefill_chunk_size="x"), TypeError, "prefill_chunk_size: expected an int"),
    (dict(prefill_chunk_size=1.5), TypeError, "prefill_chunk_size: expected an int, got float"),
    (dict(prefill_chunk_size=0), RuntimeError, "prefill_chunk_size: expected at least 1"),
    (dict(generation_config={"top_k": 3}), TypeError, "generation_config: expected a GenerationConfig, got d"),
    (dict(generation_config="x"), TypeError, "generation_config: expected a GenerationConfig, got str"),
    (dict(generation_config=GenerationConfig(max_new_tokens=2**62)), ValueError, "max_new_tokens: expected at most"),
    (dict(seed=3), ValueError, "'seed'"),
    (dict(token_healing=True), ValueError, "token healing.*`tokenizer` argument"),
    (dict(do_sample=True, temperature=0.0), ValueError, "temperature"),
    (dict(do_sample=True, temperature="hot"), ValueError, "temperature"),
]


@pytest.fixture(scope="module")
def fast():
    return speculate(ADMITTED["llama"](), compile=False, check=False)


@pytest.mark.parametrize(
    ("options", "error", "message"), REFUSED, ids=[str(row[0])[:50].replace(" ", "") for row in REFUSED]
)
def test_a_wrong_option_is_named(fast, options, error, message):
    """Also after a call that is alike but for it, whose preparation is kept."""
    for _ in range(2):
        fast.generate(IDS, **{**OPTIONS, "max_new_tokens": 3})
    limit = {} if "max_length" in options or "generation_config" in options else {"max_new_tokens": 3}
    with pytest.raises(error, match=message):
        fast.generate(IDS, **{**OPTIONS, **limit, **options})


def test_a_wrong_value_of_the_models_own_config_is_named(fast):
    fast.generation_config.max_length = 2**63 - 1
    try:
        with pytest.raises(ValueError, match="max_length: expected at most"):
            fast.generate(IDS, **OPTIONS)
    finally:
        fast.generation_config = fast.speculation.original.generation_config


@pytest.mark.parametrize("options", [dict(max_new_tokens=10**8), dict(max_length=10**9), dict(max_new_tokens=2**40)])
def test_nothing_is_allocated_for_what_is_refused(fast, options):
    fast.generate(IDS, **OPTIONS, max_new_tokens=3)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^max_(new_tokens|length)"):
            fast.generate(IDS, **{**OPTIONS, **options})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert fast.generate(IDS, **OPTIONS, max_new_tokens=3).shape == (1, 27)


class Begun:
    """A streamer that ends a call which has begun."""

    def put(self, value):
        assert value.dim() == 2, "work has begun"

    def end(self):
        pass


def test_a_criterion_bounds_the_length_of_a_model_whose_texts_take_no_memory():
    fast = speculate(HYBRIDS["mamba"](), compile=False, check=False)
    with pytest.raises(ValueError, match=r"max_new_tokens: prompt and new tokens make .* at most 2147483647"):
        limit = MaxLengthCriteria(2**62)
        fast.generate(IDS, **OPTIONS, max_new_tokens=3, stopping_criteria=[limit], streamer=Begun())


GIVEN = [
    dict(max_new_tokens=np.int64(3)), dict(max_new_tokens=torch.tensor(3)), dict(max_new_tokens=3.0),
    dict(max_new_tokens=3, eos_token_id=np.array([5, 6])), dict(max_new_tokens=3, eos_token_id=torch.tensor([5, 6])),
    dict(max_new_tokens=3, eos_token_id=[5, np.int64(6)]),
    dict(max_new_tokens=3, max_time=np.float32(100)),
]  # fmt: skip


@pytest.mark.parametrize("options", GIVEN, ids=str)
def test_numbers_of_all_kinds_are_taken(fast, options):
    options = {**OPTIONS, **options}
    assert torch.equal(fast.generate(IDS, **options), fast.speculation.original.generate(IDS, **options))
