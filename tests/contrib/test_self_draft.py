"""Drafts by the target itself over a part of its cache: the pages that it sees against plain loops, what it drafts
against transformers' own forward under a mask, and whole rounds against plain decoding."""

import functools
import itertools
from types import SimpleNamespace

import draft_rounds as rounds
import models
import pytest
import torch
from batch_requests import answers_are_those_of_generate, demo
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile import speculate
from spec_compile.cache import PAGE
from spec_compile.contrib.self_draft import SelfDraft, SelfOptions, build
from spec_compile.errors import UnsupportedModelError
from spec_compile.runtime.draft_budget import WholeTreeBudget

OPTIONS = dict(sink_tokens=1, window=64, adaptive=False, compile=False, check=False)
STEPS = 3
LONG = 300


@functools.cache
def fast(**options):
    options = OPTIONS | dict(num_steps=STEPS, max_cache_len=600) | options
    return models.speculate_captured(rounds.target("llama"), "self", **options)


# --- the pages that are seen


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pages_are_those_of_plain_loops(data):
    sinks, window, width = (data.draw(st.integers(1, most)) for most in (3, 5, 14))
    lengths = data.draw(st.lists(st.integers(0, width * PAGE - 1), min_size=1, max_size=3))
    order = data.draw(st.permutations(range(1, len(lengths) * width + 1)))
    table = torch.tensor(order, dtype=torch.int32).view(len(lengths), width)
    algorithm = SelfDraft("a model", SelfOptions(sink_tokens=sinks * PAGE - 5, window=window * PAGE))
    algorithm.take(models.captured(rounds.target("llama")))
    view, begin = algorithm.drafter(len(lengths), 1).view(table, torch.tensor(lengths))
    for length, pages, row, committed in zip(lengths, table.tolist(), view.tolist(), begin.tolist()):
        last = length // PAGE
        seen = [page for column, page in enumerate(pages[: last + 1]) if column < sinks or column > last - window]
        assert row[: len(seen)] == seen
        if last + 1 < width:
            assert row[len(seen)] == pages[last + 1]  # for the drafts that go on there
        assert committed == length - (last + 1 - len(seen)) * PAGE


def test_the_example():
    algorithm = SelfDraft("a model", SelfOptions(window=3 * PAGE))
    algorithm.take(models.captured(rounds.target("llama")))
    table = torch.arange(40, 60, dtype=torch.int32).expand(2, -1)
    view, begin = algorithm.drafter(2, 1).view(table, torch.tensor([700, 200]))
    assert (view - 40).tolist() == [[0, 8, 9, 10, 11], [0, 1, 2, 3, 4]] and begin.tolist() == [252, 200]


# --- what is drafted


def of_transformers(model, text, sinks, window):
    """The drafts after `text` by transformers' forward, whose last rows see a part of the text."""
    root, drafts = len(text) - 1, []
    first = max(root // PAGE - window + 1, sinks) * PAGE
    for _ in range(STEPS):
        ids = torch.tensor([[*text, *drafts]])
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        seen[root:, sinks * PAGE : first] = False
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        drafts.append(int(model(ids, attention_mask=mask[None, None]).logits[0, -1].argmax()))
    return drafts


@torch.no_grad()
def test_drafts_are_those_of_transformers_under_a_mask():
    """The text goes over the border of a page while it is drafted."""
    model, others = rounds.target("llama"), 0

    def look(session, row, text):
        nonlocal others
        drafts = rounds.tree_of(session, row)[0][1:]
        assert drafts == of_transformers(model, text, 1, 1)
        others += drafts != of_transformers(model, text, 1, 9)

    for batch, length in ((1, LONG), (2, LONG + 60), (1, 30)):
        answer, looks = rounds.followed(fast(), rounds.prompts(batch, length), look, 30)
        assert looks >= 7 and torch.equal(answer, rounds.generated(model, rounds.prompts(batch, length), 30))
    assert others > 20


@pytest.mark.parametrize("batch", [1, 3])
def test_all_drafts_are_accepted_if_all_is_seen(batch):
    system = fast(window=512)
    system.speculation.stats.reset()
    rounds.generated(system, rounds.prompts(batch, 150), 120)
    assert system.speculation.stats.accept_length == STEPS + 1


# --- answers


@pytest.mark.parametrize("ngram", [False, True])
@pytest.mark.parametrize("length", [23, LONG])
def test_answers_are_plain_decodings(length, ngram):
    system, model = fast(ngram=ngram), rounds.target("llama")
    mask = (torch.arange(length) >= torch.tensor([[0], [5], [length - 2]])).long()
    for batch, more in ((1, {}), (3, dict(attention_mask=mask))):
        ids = rounds.prompts(batch, length)
        assert torch.equal(rounds.generated(system, ids, **more), rounds.generated(model, ids, **more))


@pytest.mark.parametrize("name", ["gpt2", "deepseek_v3", "mixtral"])
def test_other_models(name):
    model, ids = models.ADMITTED[name](), rounds.prompts(2, 200)
    system = speculate(model, "self", **OPTIONS)
    assert torch.equal(rounds.generated(system, ids), rounds.generated(model, ids))


def test_a_model_that_generates_tokens_which_it_cannot_read():
    model = models.with_outputs(models.VOCAB + 30)
    system = speculate(model, "self", **OPTIONS)
    ids = rounds.prompts(2, 200)
    assert torch.equal(rounds.generated(system, ids, 8), rounds.generated(model, ids, 8))


def test_sampled_answers_are_those_without_drafts():
    answers = []
    for speculation in (None, False):
        torch.manual_seed(3)
        options = dict(do_sample=True, temperature=0.8, top_p=0.9, speculation=speculation)
        answers.append(rounds.generated(fast(), rounds.prompts(3, LONG), **options))
    assert torch.equal(*answers)


@pytest.mark.parametrize("ngram", [False, True])
@torch.no_grad()
def test_no_slot_that_a_draft_has_written_is_committed(monkeypatch, ngram):
    """Between two rounds, which verify all drafts, few or none, whatever lies after the committed slots is replaced.

    Some rows finish early.
    """
    sizes = itertools.cycle([4, 1, 4, 4, 2, 1, 1, 4, 2])
    if not ngram:
        monkeypatch.setattr(WholeTreeBudget, "choose", lambda policy, *known: next(sizes))
    system, ids = fast(ngram=ngram), rounds.prompts(3, 180)
    ends = rounds.generated(rounds.target("llama"), ids)[:2, -20].tolist()

    def poison(session, row, text):
        state = session.state
        for number, length in enumerate(state.lengths.tolist()):
            for slot in range(length, length + 12):
                page = int(state.kv.table[number, slot // PAGE])
                for tensor in state.kv.tensors:
                    tensor[page, :, slot % PAGE] = 1e4

    answer, looks = rounds.followed(system, ids, poison, 40, eos_token_id=ends)
    assert looks > 5 and torch.equal(answer, rounds.generated(rounds.target("llama"), ids, 40, eos_token_id=ends))


def test_a_conversation_goes_on_from_its_cache():
    rounds.goes_on_from_a_cache(fast(), rounds.target("llama"), rounds.prompts(1, 200))


def test_a_scaled_cache_grows():
    """Keys and values in 8 bits have scales, which lie in the same pages."""
    system, ids = fast(max_cache_len=250, kv_cache_dtype="fp8_per_token_head", window=512), rounds.prompts(2, 200)
    plain = rounds.generated(system, ids, 80, speculation=False)
    system.speculation.engine.release()
    system.speculation.stats.reset()
    assert torch.equal(rounds.generated(system, ids, 80), plain)
    assert system.speculation.stats.accept_length == STEPS + 1


def test_a_cache_grows():
    system, model = fast(max_cache_len=100), rounds.target("llama")
    for batch in (1, 2):
        for new in (30, 300):
            ids = rounds.prompts(batch, 90)
            assert torch.equal(rounds.generated(system, ids, new), rounds.generated(model, ids, new))
        session = system.speculation.engine.session(batch)
        assert session.capacity > 300 and session.state.kv.table.flatten().tolist() == [
            *range(1, session.state.kv.table.numel() + 1)
        ]


@pytest.mark.parametrize("ngram", [False, True])
def test_requests(ngram):
    """They share pages of prompts, and rows move."""
    outputs = answers_are_those_of_generate(speculate(demo(), "self", ngram=ngram, **OPTIONS), 12, seed=4, slots=3)
    assert sum(output.speculation.accepted for output in outputs.values()) > 50


def test_rows_with_adapters():
    """Rows draft with the adapters that they answer with."""
    pytest.importorskip("peft")
    from lora_models import NAMES, call, ids, two_adapters

    model, prompts = two_adapters(), ids(4, 100)
    system = speculate(model, "self", max_loras=2, **OPTIONS | dict(window=256))
    system.speculation.stats.reset()
    answers = system.generate(**call(prompts), adapter_names=NAMES)
    assert torch.equal(answers, model.generate(**call(prompts), adapter_names=NAMES))
    assert system.speculation.stats.accept_length == 3


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
def test_compiled_rounds_draft_the_same(batch):
    rounds.same_when_compiled(lambda compile: fast(compile=compile), rounds.prompts(batch, LONG), 12)


# --- options and models that are refused


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        (dict(window=0), ValueError, "window"),
        (dict(window=True), TypeError, "window"),
        (dict(sink_tokens=0), ValueError, "sink_tokens"),
        (dict(sink_tokens="64"), TypeError, "sink_tokens"),
        (dict(num_steps=0), ValueError, "num_steps"),
        (dict(num_steps=2, num_draft_tokens=9), ValueError, "num_draft_tokens"),
        (dict(ngram=3), TypeError, "ngram"),
    ],
)
def test_wrong_options(options, error, name):
    with pytest.raises(error, match=name):
        speculate(rounds.target("llama"), "self", **options)


def test_several_processes_are_refused():
    with pytest.raises(ValueError, match="tensor_parallel"):
        build(None, SimpleNamespace(ranks=SimpleNamespace(size=2)))


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_next", "deepseek_v32"])
def test_models_with_other_attention_are_refused_by_name(name):
    model = (models.ADMITTED | models.HYBRIDS | models.INDEXED)[name]()
    with pytest.raises(UnsupportedModelError, match=f"algo='self': {type(model).__name__}"):
        speculate(model, "self", compile=False, check=False)
