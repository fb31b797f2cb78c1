"""Prompts that ride along with rounds: answers are those of ``generate()``, whatever rides with what."""

import functools

import pytest
from batch_requests import ALGORITHMS, TEXT, demo, generated, stopped, tokenizer

from spec_compile import speculate
from spec_compile.batching import prefill
from spec_compile.runtime.runtime import Runtime

LONG = tokenizer()(TEXT).input_ids


@functools.cache
def fast(name):
    options = ALGORITHMS.get(name, {}) | dict(max_cache_len=320, attention_backend="sdpa")
    if options.get("draft") == "itself":
        options["draft"] = demo()
    return speculate(demo(), name.split()[0], compile=False, check=False, **options)


@pytest.fixture
def rode(monkeypatch):
    """The pieces that rode along. A CPU takes turns by itself, because its products cost the same apart."""
    pieces = []
    monkeypatch.setattr(Runtime, "mixes", True)
    monkeypatch.setitem(prefill.PREFILL_ROWS, "cpu", 4)
    of_rows = prefill.PrefillRows.rode
    monkeypatch.setattr(prefill.PrefillRows, "rode", lambda self, piece: (pieces.append(piece), of_rows(self, piece)))
    return pieces


@pytest.mark.sweep(["eagle3 tree"])
@pytest.mark.parametrize("name", ["ngram", *ALGORITHMS])
def test_answers_are_those_of_generate(name, rode):
    manager, run = stopped(fast(name), max_requests_per_batch=6, max_batch_tokens=64)
    prompts = [LONG[3 * n : 3 * n + 1 + 37 * n % 190] for n in range(14)]
    for number, prompt in enumerate(prompts):
        # The host chooses the tokens of two requests, whose rounds take no prompts with them.
        more = dict(repetition_penalty=1.2) if number in (5, 6) else {}
        manager.add_request(prompt, f"r{number}", max_new_tokens=20, eos_token_id=-1, **more)
    outputs = run()
    assert len(rode) >= 5 and {piece.prompts.batch for piece in rode} == {1, 4}
    for number, prompt in enumerate(prompts):
        more = dict(repetition_penalty=1.2) if number in (5, 6) else {}
        alone = generated(fast(name), prompt, max_new_tokens=20, eos_token_id=None, pad_token_id=0, **more)
        assert outputs[f"r{number}"].generated_tokens == alone
    manager.destroy()


def test_a_piece_of_too_few_tokens_is_refused(rode):
    with pytest.raises(ValueError, match="max_batch_tokens: expected at least 64, got 63"):
        stopped(fast("ngram"), max_batch_tokens=63)
