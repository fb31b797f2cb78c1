"""The steps in which a prompt is processed."""

from unittest import mock

import models
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import spec_compile
from spec_compile.compat import CACHE
from spec_compile.runtime.round import PREFILL_SIZES, STEP_COST, chunks, common_end


def without_waste(tokens, sizes):
    """The largest steps that fit, down to the smallest."""
    while tokens > 0:
        size = next((size for size in sizes if size <= tokens), sizes[-1])
        yield size
        tokens -= size


@given(st.integers(1, 200_000), st.sampled_from(sorted(PREFILL_SIZES)))
def test_all_tokens_at_no_more_than_it_costs_without_waste(tokens, device):
    sizes, fixed = PREFILL_SIZES[device], STEP_COST[device]
    found = list(chunks(tokens, sizes, fixed))
    assert set(found) <= set(sizes)
    assert sum(found[:-1]) < tokens <= sum(found)
    assert sum(found) + fixed * len(found) <= sum(size + fixed for size in without_waste(tokens, sizes))


@given(st.integers(1, 5000), st.integers(0, 5000))
def test_a_prompt_that_goes_on_has_the_rest_of_its_steps(tokens, longer):
    """After any of them, and after the steps that a longer text has, too."""
    sizes, fixed = PREFILL_SIZES["cpu"], STEP_COST["cpu"]
    found = list(chunks(tokens, sizes, fixed))
    for number in range(len(found)):
        assert list(chunks(tokens - sum(found[:number]), sizes, fixed)) == found[number:]
    end = common_end(tokens, sizes)
    whole = end // sizes[0]
    assert tokens - sizes[0] < end <= tokens
    assert list(chunks(tokens + longer, sizes, fixed))[:whole] == found[:whole] == [sizes[0]] * whole


@pytest.mark.parametrize(
    "tokens, expected",
    [(0, []), (1, [32]), (33, [128]), (300, [512]), (1025, [512, 512, 32]), (2047, [2048]), (4100, [2048, 2048, 32])],
)
def test_steps_on_a_gpu(tokens, expected):
    assert list(chunks(tokens, PREFILL_SIZES["cuda"], STEP_COST["cuda"])) == expected


def test_a_call_makes_the_steps_that_it_runs():
    """An answer of 41 tokens is continued, 40 of them in its cache: of 201 tokens 160 go through steps."""
    model = models.ADMITTED["llama"]()
    fast = spec_compile.speculate(model, compile=False, num_draft_tokens=1)
    wanted = dict(do_sample=False, eos_token_id=None, pad_token_id=0, return_dict_in_generate=True)
    ids = torch.randint(3, models.VOCAB, (2, 200), generator=torch.Generator().manual_seed(1))
    first = fast.generate(ids[:, :40], max_new_tokens=1, **wanted)
    ids = torch.cat([first.sequences, ids[:, 40:]], dim=1)
    steps = fast.speculation.engine.session(2)
    made, run = mock.Mock(wraps=steps.prompt_steps), mock.Mock(wraps=steps.prefill)
    with mock.patch.object(steps, "prompt_steps", made), mock.patch.object(steps, "prefill", run):
        whole = fast.generate(ids, max_new_tokens=3, **wanted, **{CACHE: first[CACHE]}).sequences
    assert [call.args for call in made.call_args_list] == [([160],)]
    assert [call.args[0] for call in run.call_args_list] == [160]
    assert run.call_args.args[1] >= 200
    assert torch.equal(whole, model.generate(ids, max_new_tokens=3, **wanted).sequences)
