"""Several modules of multi-token prediction in whole rounds: drafts are those of modules without caches, and answers
are plain decoding's."""

import models
import pytest
import torch
from draft_rounds import SCHEDULES, generated, head, plain, prompts, target
from mtp_rounds import checked, with_further

from spec_compile import speculate
from spec_compile.compat import CACHE
from spec_compile.contrib.mtp_modules import parents_of
from spec_compile.tree import ancestry


@pytest.fixture(scope="module")
def modules():
    """Three modules for the target "llama", the first of which is often right."""
    return with_further(head("mtp", "llama"))


@pytest.mark.sweep("chain union")
@pytest.mark.parametrize("schedule", ["chain", "tree", "union"])
def test_module_k_drafts_token_k(modules, schedule):
    options = SCHEDULES[schedule] | dict(draft=modules, compile=False, check=False, adaptive=False, max_cache_len=200)
    system = models.speculate_captured(target("llama"), "mtp", **options)
    for batch in (1, 3):
        answer, count = checked(system, modules, target("llama"), prompts(batch))
        assert torch.equal(answer, plain("llama", batch)[:, : answer.shape[1]]) and count > 5
    assert system.speculation.stats.accept_length > 1.03


def later_slots(system, length):
    """The keys and values of a text of `length` tokens in the modules after the first, as far as they are committed."""
    caches = enumerate(system.speculation.engine.session(1).drafter.further_caches, start=1)
    return [tensor[:, :, : length - 1 - number].clone() for number, cache in caches for tensor in cache.tensors]


def test_a_call_that_goes_on_from_a_cache(modules):
    """From that of the call before it, or of an earlier one: drafts, keys and values are those of a call without it."""
    options = dict(draft=modules, compile=False, check=False, adaptive=False, max_cache_len=200, num_steps=3, topk=2)
    system, model = models.speculate_captured(target("llama"), "mtp", **options), target("llama")
    for between in (False, True):
        first = generated(system, prompts(1), 9, return_dict_in_generate=True)
        if between:
            generated(system, prompts(1).flip(1), 5)
        ids = torch.cat([first.sequences, prompts(1)[:, :2]], dim=1)
        ((asked, answered),) = system.speculation.engine.session(1).answers
        assert between or first.sequences.tolist() == [asked + answered]
        answer, count = checked(system, modules, model, ids, 9, **{CACHE: getattr(first, CACHE)})
        slots = later_slots(system, answer.shape[1])
        assert torch.equal(answer, generated(model, ids, 9)) and count > 2
        generated(system, ids, 9)
        for got, expected in zip(slots, later_slots(system, answer.shape[1]), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def test_answers_are_the_same_after_rounds_without_drafts(modules):
    """Prompts come in chunks, rows of a batch are of different lengths, and one is shorter than the modules."""
    options = dict(draft=modules, compile=False, check=False, max_cache_len=200, num_steps=3, topk=2)
    system = models.speculate_captured(target("llama"), "mtp", **options)
    ids, mask = prompts(3), torch.arange(23) >= torch.tensor([[0], [21], [22]])
    answer = generated(system, ids, attention_mask=mask.long())
    assert torch.equal(answer, generated(target("llama"), ids, attention_mask=mask.long()))


def test_more_levels_than_modules_are_refused(modules):
    options = dict(draft=modules, compile=False, check=False)
    with pytest.raises(ValueError, match=r"num_steps: this checkpoint has 3 modules.*at most 3 levels, not 4"):
        speculate(target("llama"), "mtp", num_steps=4, **options)
    with pytest.raises(ValueError, match="at most 3 levels, not 5"):
        speculate(target("llama"), "mtp", tree_choices="eagle1", **options)
    with pytest.raises(ValueError, match="draft_window_size: it is for drafts of one module"):
        speculate(target("llama"), "mtp", num_steps=2, draft_window_size=8, **options)


def test_parents_follow_from_ancestors():
    parents = torch.tensor([[-1, -1, 0, 1, 1, 3]])
    rows = torch.cat([torch.full((1, 1), -1), parents + 1], dim=1)  # below a root, whose bit is dropped
    ancestors = ancestry(rows)[0][:, 1:] >> 1
    assert parents_of(ancestors).tolist() == (parents + 1).tolist()
    assert parents_of(torch.tensor([[0b001, 0b010, 0b110]])).tolist() == [[0, 0, 2]]
