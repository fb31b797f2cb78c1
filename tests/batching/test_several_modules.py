"""Drafts of several modules of multi-token prediction in batches: they are those of a request without others."""

import itertools

import batch_requests
import pytest
import torch
from batch_requests import MODEL, PROMPTS, TEXT, collect, managed, tokenizer, write_modules
from transformers import AutoModelForCausalLM

from spec_compile import speculate
from spec_compile.contrib.mtp_modules import MtpModules
from spec_compile.runtime.runtime import Runtime

LONG = (tokenizer()(TEXT).input_ids * 2)[:450]
OTHER = LONG[::-1][:100]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["chain", "tree"])
def fast(request, tmp_path_factory):
    """The demo model with three modules, every round of which drafts."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    options = dict(num_steps=3, topk=request.param, compile=False, check=False, adaptive=False)
    fast = speculate(model, "mtp", draft=write_modules(tmp_path_factory.mktemp("modules")), **options)
    assert isinstance(fast.speculation.engine.runtime.algorithm, MtpModules)
    return fast


def answer(manager, prompt, new=20):
    return batch_requests.answer(manager, prompt, max_new_tokens=new, eos_token_id=-1)


def test_later_modules_know_what_a_row_has_lost(fast):
    """Their drafts do not depend on how much of the prompt was copied."""
    with managed(fast) as manager:
        first = answer(manager, LONG)
        answer(manager, OTHER)
        second = answer(manager, LONG + first.generated_tokens + OTHER[:9])
    with managed(fast) as manager:
        anew = answer(manager, second.prompt_ids)
    assert second.speculation.reused_prompt_tokens >= 448 and anew.speculation.reused_prompt_tokens == 0
    assert second.generated_tokens == anew.generated_tokens
    assert second.speculation.per_step_accepted == anew.speculation.per_step_accepted


def test_rows_that_requests_enter_and_leave(fast):
    """Requests of different lengths, with prompts that earlier ones begin with: each round accepts what it accepts if
    no other request is under way."""
    prompts = [*PROMPTS, LONG[:70], LONG[:69] + PROMPTS[0], PROMPTS[0] + OTHER[:3], LONG[:70] + OTHER[:5]]
    asked = [*zip(prompts, itertools.cycle([9, 24, 14]))]
    with managed(fast, slots=3) as manager:
        names = [manager.add_request(ids, max_new_tokens=new, eos_token_id=-1) for ids, new in asked]
        outputs = collect(manager, len(names))
    together = [outputs[name] for name in names]
    assert any(output.speculation.reused_prompt_tokens for output in together)
    for (prompt, new), ours in zip(asked, together):
        with managed(fast) as manager:
            theirs = answer(manager, prompt, new)
        assert ours.generated_tokens == theirs.generated_tokens
        assert ours.speculation.per_step_accepted == theirs.speculation.per_step_accepted
    assert max(max(output.speculation.per_step_accepted) for output in together) > 1


def test_prompts_take_turns_with_rounds(fast, monkeypatch):
    """A module after the first goes on from what it made of the slice before, which rides along in the same piece."""
    monkeypatch.setattr(Runtime, "mixes", True)
    manager, _ = batch_requests.stopped(fast, max_requests_per_batch=2)
    assert manager.scheduler.prefill.step_sizes == []
    manager.destroy()
