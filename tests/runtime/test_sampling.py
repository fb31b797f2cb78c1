"""Sampling: the random numbers, the draw and the test of drawn drafts by themselves; then what is sampled against its
exact distribution, over trees of every fill, with processors, and with drafts that were themselves drawn."""

import copy
import functools
import itertools
import math

import models
import pytest
import torch
from distributions import FITS, PLACES, fit, joint, p_value
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from spec_compile import speculate
from spec_compile.errors import RequestError
from spec_compile.runtime.answer import Answer
from spec_compile.runtime.pipeline import Call
from spec_compile.runtime.request import Request, Sequence
from spec_compile.runtime.verify.host import HostAcceptor
from spec_compile.runtime.verify.sample import DrawInRound, accept_drawn, draw, probabilities, uniform

LAST = 1 - 2.0**-52
"""The largest number that `uniform` gives."""


# --- the random numbers


def split_mix(seed, *counters):
    """`uniform` in Python's own integers."""

    def mix(bits):
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
        return bits ^ bits >> 31

    bits = mix((seed + 0x9E3779B97F4A7C15) % 2**64)
    for counter in counters:
        bits = mix((bits + (counter + 1) * 0x9E3779B97F4A7C15) % 2**64)
    return (bits >> 12) / 2**52


@pytest.mark.parametrize("stream", [0, 1, 2, 63])
def test_uniform_is_split_mix(stream):
    counters = list(itertools.product([0, 1, 2, 77, 2**31, 2**40], repeat=2))
    sequence, position = torch.tensor(counters).unbind(dim=1)
    for seed in (0, 1, 12345, 2**40 + 7, 2**63 - 2):
        got = uniform(seed, sequence, position, stream)
        assert got.dtype == torch.float64
        assert got.tolist() == [split_mix(seed, *pair, stream) for pair in counters]


# --- the draw

weight = st.just(0.0) | st.floats(2.0**-100, 1.0)
number = st.sampled_from([0.0, 2.0**-52, 0.5, LAST]) | st.integers(0, 2**52 - 1).map(lambda n: n * 2.0**-52)


@given(st.lists(st.tuples(st.lists(weight, min_size=7, max_size=7).filter(any), number), min_size=1, max_size=9))
def test_draw(rows):
    def slow(weights, u):
        sums = list(itertools.accumulate(weights))
        return next(token for token, running in enumerate(sums) if running > u * sums[-1])

    weights, u = (torch.tensor(part, dtype=torch.float64) for part in zip(*rows))
    tokens = draw(weights, u)
    assert tokens.tolist() == [slow(*row) for row in rows]
    assert (weights.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("size", [2, 1000, 150_000])
def test_ends_of_a_draw(size):
    """u at 0 and at its largest give the first and the last token that has a weight, in a vocabulary of any size."""
    weights = torch.rand(50, size, dtype=torch.float64)
    weights *= torch.rand(50, size) < torch.tensor([0.9, 0.02]).repeat(25)[:, None]
    weights[weights.sum(dim=1) == 0, 0] = 1e-9
    places = torch.where(weights > 0, torch.arange(size), -1)
    assert torch.equal(draw(weights, torch.full((50,), LAST, dtype=torch.float64)), places.amax(dim=1))
    first = places.where(places >= 0, size).amin(dim=1)
    assert torch.equal(draw(weights, torch.zeros(50, dtype=torch.float64)), first)


def test_probabilities():
    scores = torch.randn(4, 9)
    scores[1, 2:] = -torch.inf
    got = probabilities(scores, scores)
    assert got.dtype == torch.float64 and (got[1, 2:] == 0).all()
    torch.testing.assert_close(got, scores.double().exp() / scores.double().exp().sum(dim=1, keepdim=True))
    for wrong in ([0.0, torch.nan, 1.0], [0.0, torch.inf, 1.0], [-torch.inf] * 3):
        both = torch.tensor([[0.0, 1.0, 2.0], wrong])
        with pytest.raises(RequestError, match="cannot sample"):  # by the processors of the call
            probabilities(both, torch.zeros(2, 3))
        with pytest.raises(RuntimeError, match="cannot sample") as of_the_model:
            probabilities(both, both)
        assert not isinstance(of_the_model.value, RequestError)


# --- the test of drawn drafts

TARGET = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
CASES = {
    "usual": (TARGET, [0.1, 0.5, 0.05, 0.05, 0.3]),
    "equal": (TARGET, TARGET.tolist()),
    "disjoint": ([0, 0.3, 0.7, 0, 0], [0.5, 0, 0, 0.3, 0.2]),
    "zeros": ([0.5, 0, 0.2, 0.3, 0], [0.2, 0.2, 0, 0.5, 0.1]),
    "one-hot target": ([0, 0, 1, 0, 0], [0.2, 0.2, 0.3, 0.1, 0.2]),
    "one-hot draft": (TARGET, [0, 1, 0, 0, 0]),
    "not normalised": (TARGET, [0.2, 1.0, 0.1, 0.1, 0.6]),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_drawn_drafts_leave_the_target(name, count):
    """Tokens after a node whose children were drawn without replacement have the target's distribution."""
    rows, (target, draft) = 3000, (torch.as_tensor(part, dtype=torch.float64) for part in CASES[name])
    count = min(count, int((draft > 0).sum()))
    children = torch.multinomial(draft.expand(rows, -1), count).tolist()
    numbers = torch.rand(rows, count + 1, dtype=torch.float64)
    tokens = torch.stack([accept_drawn(target, draft, *row) for row in zip(children, numbers)])
    assert p_value(tokens.bincount(minlength=len(target))[None], rows * target[None]) > FITS


class Halved(LogitsProcessor):
    """One that the walk does not know: the token before last becomes less likely."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -2:-1], torch.full((len(scores), 1), -math.log(2)))


# --- generate()

VOCAB, PAD = 32, 0
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
PROMPTS = [[5, 9, 5, 30, 11], [7, 8, 21], [12]]


@functools.cache
def tiny():
    sizes = dict(SIZES, vocab_size=VOCAB, max_position_embeddings=64)
    return models.build("LlamaConfig", "LlamaForCausalLM", sizes, dict(head=0.6))


@functools.cache
def speculative(**options):
    """Its trie holds texts of the model's own."""
    fast = speculate(tiny(), compile=False, max_cache_len=32, **options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        firsts = torch.arange(3, VOCAB)[:, None].repeat(20, 1)
        fast.speculation.ngram.add(list(generated(tiny(), new=24, input_ids=firsts, attention_mask=firsts > 0)))
    return fast


@functools.cache
def padded(*numbers):
    """Some of the prompts, padded on the left."""
    prompts = [PROMPTS[number] for number in numbers]
    width = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    return dict(input_ids=ids, attention_mask=(ids != PAD).long())


BOTH = padded(0, 1)


def generated(model, new=PLACES, **options):
    """New tokens after both prompts, or others."""
    options = dict(BOTH, do_sample=True, top_k=0, max_new_tokens=new, eos_token_id=None, pad_token_id=PAD) | options
    return model.generate(**options)[:, options["input_ids"].shape[1] :]


def samples(fast, rows, **options):
    """[2, rows, PLACES] after both prompts, 250 rows at a time, because states of many take memory and so time."""
    parts = [generated(fast, num_return_sequences=250, **options).view(2, 250, PLACES) for _ in range(rows // 250)]
    return torch.cat(parts, dim=1)


def generate_fits(drawn, eos_token_id=(), **options):
    """Against the chance of every text after either prompt, from the model and transformers alone."""

    def conditional(prompt, mask, texts):
        out = tiny().generate(
            torch.cat([prompt.repeat(len(texts), 1), texts], dim=1),
            attention_mask=torch.cat([mask.repeat(len(texts), 1), torch.ones_like(texts)], dim=1),
            **dict(do_sample=True, top_k=0, eos_token_id=None, pad_token_id=PAD) | options,
            max_new_tokens=1, output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        ended = torch.isin(texts, torch.tensor(eos_token_id)).any(dim=1, keepdim=True)
        return torch.where(ended, torch.arange(VOCAB) == PAD, out.scores[0].double().softmax(dim=-1))

    chances = [joint(functools.partial(conditional, *row), VOCAB) for row in zip(*BOTH.values())]
    return fit(drawn, torch.stack(chances), VOCAB)


TREES = {
    8: dict(num_draft_tokens=8, adaptive=False, min_bfs_breadth=3, max_bfs_breadth=3, match_type="PROB"),
    5: dict(num_draft_tokens=8, adaptive=False, min_bfs_breadth=4, max_match_window_size=1, branch_length=2, recycle=0),
    1: dict(num_draft_tokens=1),
}
"""How to get trees of so many real nodes."""


@pytest.mark.sweep("nodes8-repetition_penalty nodes5-min_p")
@pytest.mark.parametrize(
    "nodes, options",
    [
        (8, dict()),
        (8, dict(top_k=4, temperature=1.4)),
        (8, dict(top_p=0.8)),
        (8, dict(repetition_penalty=1.5)),
        (8, dict(eos_token_id=[16, 28])),
        (5, dict(min_p=0.05)),
        (1, dict(top_p=0.9, repetition_penalty=0.8)),
    ],
    ids=lambda value: "+".join(value) or "plain" if isinstance(value, dict) else f"nodes{value}",
)
def test_generate(nodes, options):
    fast = speculative(**TREES[nodes])
    stats = fast.speculation.stats
    stats.reset()
    drawn = samples(fast, 3000, **options)
    assert set(stats.nodes) == {1 if nodes == 1 else 8}
    assert stats.offered[:1] == [stats.steps] * (nodes > 1)
    assert all(0.2 < share < 0.8 for share in stats.acceptance_by_depth[:1])
    assert generate_fits(drawn, **options) > FITS


@functools.cache
def noisy():
    """A draft model: the model with other weights, a bit."""
    draft, generator = copy.deepcopy(tiny()), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.15 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


@functools.cache
def drafted(**options):
    return speculate(tiny(), "draft_model", draft=noisy(), adaptive=False, compile=False, max_cache_len=32, **options)


DRAFTS = {
    "drawn": dict(num_steps=3, draft_sample_method="probabilistic"),
    "chain": dict(num_steps=3),
    "tree": dict(num_steps=2, topk=3, num_draft_tokens=8),
    "union": dict(num_steps=2, topk=3, num_draft_tokens=8, ngram=True),
}
PLAIN, HOT, PENALTY = dict(), dict(temperature=1.4, top_k=9), dict(repetition_penalty=1.5)
LOCKSTEP = dict(logits_processor=LogitsProcessorList([Halved()]))


@pytest.mark.sweep(["drawn-{}", "drawn-lockstep"])
@pytest.mark.parametrize(
    "draft, options",
    [
        *itertools.product(["drawn", "chain", "tree"], [PLAIN, HOT, PENALTY]),
        ("union", PLAIN),
        pytest.param("drawn", LOCKSTEP, id="drawn-lockstep"),
    ],
    ids=str,
)
def test_generate_with_a_draft_model(draft, options):
    draft = DRAFTS[draft]
    stats = drafted(**draft).speculation.stats
    stats.reset()
    drawn = samples(drafted(**draft), 3000, **options)
    assert options is LOCKSTEP or 0.1 < stats.acceptance_by_depth[0] < 0.95
    assert generate_fits(drawn, **options) > FITS


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_drawn_drafts_are_accepted_as_often_as_the_distributions_overlap(temperature):
    """Leviathan et al. 2023, section 3.2: the chance is the sum of the lesser probabilities."""
    fast = drafted(num_steps=1, draft_sample_method="probabilistic")
    p, q = ((m(**padded(0)).logits[0, -1] / temperature).double().softmax(dim=-1) for m in (tiny(), noisy()))
    chance, rows = torch.minimum(p, q).sum().item(), 4000
    fast.speculation.stats.reset()
    generated(fast, 2, temperature=temperature, num_return_sequences=rows, **padded(0))
    accepted = sum(gained == 2 for gained in fast.speculation.stats.trace[0])
    assert abs(accepted - rows * chance) < 4 * math.sqrt(rows * chance * (1 - chance))


# --- what the answer depends on


def answer(seed=None, fast=None, **options):
    """Twenty tokens a row, with a seed or as the random state has it."""
    if seed is not None:
        torch.manual_seed(seed)
    return generated(fast or speculative(**TREES[8]), new=20, temperature=1.2, **options)


def test_the_seed_decides():
    first, second = answer(1), answer()
    assert not torch.equal(first, second)
    assert torch.equal(answer(1), first) and torch.equal(answer(), second)
    assert not torch.equal(answer(2), first)


@pytest.mark.parametrize("options", [dict(), dict(top_k=9, repetition_penalty=1.2)], ids=["plain", "processors"])
def test_drafts_do_not_change_the_answer(options):
    first = answer(1, speculative(num_draft_tokens=1), num_return_sequences=3, **options)
    for nodes in (4, 16):
        for adaptive in (True, False):
            fast = speculative(num_draft_tokens=nodes, adaptive=adaptive)
            fast.speculation.stats.reset()
            assert torch.equal(answer(1, fast, num_return_sequences=3, **options), first), (nodes, adaptive)
            assert adaptive or fast.speculation.stats.accept_length > 1


def test_every_row_has_numbers_of_its_own():
    rows = answer(1, num_return_sequences=6, **padded(0))
    assert len(rows.unique(dim=0)) == 6
    assert torch.equal(answer(1, **padded(0)), rows[:1])


# --- the sampler, that draws at all nodes at once


def ran(processors, sampler, eos=(), least=0, fast=None, temperature=0.0):
    """Twenty tokens after each of three prompts, from the rounds themselves: drawn in them, or by the walk."""
    fast = fast or speculative(**TREES[8])
    inputs = padded(0, 1, 2)["input_ids"]
    request = Request(20, eos=list(eos), seed=9, temperature=temperature)
    sequences = [Sequence(request, p, row, len(p) + least, len(p) + 20) for row, p in enumerate(PROMPTS)]
    if sampler:
        acceptor = DrawInRound(processors)
    else:
        answer = Answer(inputs, inputs.shape[1] + 20, list(eos), PAD)
        acceptor = HostAcceptor(answer, LogitsProcessorList(processors), seed=9)
    rows = [[] for _ in PROMPTS]
    for gained in fast.speculation.engine.run(Call(request, sequences, acceptor)):
        for row, tokens in zip(rows, gained):
            row += tokens
    return rows


@pytest.mark.parametrize(
    "processors, ends",
    [
        ([TemperatureLogitsWarper(1.2), TopKLogitsWarper(9)], dict()),
        ([TopPLogitsWarper(0.9)], dict()),
        ([MinNewTokensLengthLogitsProcessor(5, 6, [15, 16, 28], device="cpu")], dict(eos=[15, 16, 28], least=6)),
    ],
    ids=["top-k", "top-p", "minimum"],
)
def test_the_sampler_draws_as_the_walk(processors, ends):
    rows = ran(processors, sampler=False, **ends)
    assert ran(processors, sampler=True, **ends) == rows
    assert all(6 < len(row) < 20 for row in rows) if ends else [len(row) for row in rows] == [20] * 3
    assert speculative(**TREES[8]).speculation.stats.accept_length > 1


def test_scores_of_drawn_chains():
    """Those of the tokens, and the tokens are the same if nobody asks for scores."""
    fast, options = drafted(**DRAFTS["drawn"]), dict(max_new_tokens=20, do_sample=True, eos_token_id=None, **padded(0))
    options |= dict(top_k=9, repetition_penalty=1.3)
    torch.manual_seed(3)
    plain = fast.generate(**options)
    torch.manual_seed(3)
    out = fast.generate(output_scores=True, output_logits=True, return_dict_in_generate=True, **options)
    assert torch.equal(out.sequences, plain) and fast.speculation.stats.accept_length > 1
    logits = tiny()(out.sequences).logits[:, -21:-1]
    torch.testing.assert_close(torch.stack(out.logits, dim=1), logits)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3), TopKLogitsWarper(9)])
    for place, scores in enumerate(out.scores):
        torch.testing.assert_close(scores, processors(out.sequences[:, : place - 20], logits[:, place].clone()))


def test_the_sampler_finds_nothing_to_draw():
    with pytest.raises(RuntimeError, match="cannot sample"):
        ran([SuppressTokensLogitsProcessor(range(VOCAB))], sampler=True)


# --- edges


def test_tokens_that_are_excluded():
    fast, every = speculative(**TREES[8]), list(range(VOCAB))
    assert (generated(fast, new=20, suppress_tokens=every[:7] + every[8:]) == 7).all()
    with pytest.raises(RuntimeError, match="cannot sample"):
        generated(fast, suppress_tokens=every)
    assert torch.equal(answer(1), answer(1, speculative(num_draft_tokens=1)))
