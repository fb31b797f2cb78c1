"""Grammars: tokens are those of plain constrained decoding, whatever is drafted, and what does not fit is refused."""

import functools

import fake_xgrammar as fake
import models
import pytest
import torch
from distributions import FITS, fit, joint
from grammar_cases import (
    CALLS,
    EOS,
    GRAMMARS,
    NEW,
    TABLE,
    VOCAB,
    WARPERS,
    accepted,
    call,
    drawn_chains,
    guesses_of,
    plain,
)
from transformers.generation import (
    InfNanRemoveLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)

from spec_compile import speculate
from spec_compile.runtime.verify.host import ConstrainedAcceptor, HostAcceptor

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, ON_GPU])]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    fake.install(monkeypatch)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ends", [True, False], ids=["ends", "beyond the grammar's end"])
@pytest.mark.parametrize("processors", [[], [RepetitionPenaltyLogitsProcessor(1.5)]], ids=["alone", "penalty"])
def test_greedy_tokens_are_those_of_the_plain_loop(processors, ends, device):
    texts = plain(GRAMMARS, processors, ends)
    assert (texts == EOS).any()
    result, most, accept = accepted([fake.Processor(GRAMMARS), *processors], 3, texts, ends=ends, device=device)
    assert torch.equal(result, texts) and most > 2
    assert type(accept) is (HostAcceptor if processors else ConstrainedAcceptor)


def test_one_grammar_serves_all_rows():
    texts = plain([GRAMMARS[1]] * 2, [])
    assert torch.equal(accepted([fake.Processor(GRAMMARS[1])], 2, texts)[0], texts)


def test_masks_are_filled_where_a_likeliest_token_is_illegal_and_nowhere_else(monkeypatch):
    fills, fill = [], fake.GrammarMatcher.fill_next_token_bitmask
    monkeypatch.setattr(fake.GrammarMatcher, "fill_next_token_bitmask", lambda *args: fills.append(0) or fill(*args))
    texts = plain(GRAMMARS[:1], [], ends=False)
    illegal = int((TABLE[texts[0, :-1]].argmax(dim=1) != texts[0, 1:]).sum())
    fills.clear()
    result, _, accept = accepted([fake.Processor(GRAMMARS[:1])], 1, texts, ends=False)
    terminations = int(accept.only.matchers[0].is_terminated())
    assert torch.equal(result, texts) and len(fills) <= 1 + illegal + terminations


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "beyond the grammar's end"])
@pytest.mark.parametrize("name", WARPERS)
@pytest.mark.parametrize("device", DEVICES)
def test_drawn_tokens_depend_neither_on_drafts_nor_on_the_way_of_a_gpu(device, name, ends, monkeypatch):
    """The way of a GPU is `__call__` on a GPU, and `accept` elsewhere."""
    processors = lambda: [fake.Processor(GRAMMARS), *WARPERS[name]]  # noqa: E731
    texts = torch.ones(3, NEW + 1, dtype=torch.int64)
    first, _, accept = accepted(processors(), 3, texts, 11, ends=ends, device=device)
    assert (first == EOS).any() and type(accept) is (HostAcceptor if name == "penalty" else ConstrainedAcceptor)
    call, accept = ConstrainedAcceptor.__call__, ConstrainedAcceptor.accept
    for number, way in enumerate((call, accept, accept) if device == "cpu" else (HostAcceptor.__call__, call)):
        monkeypatch.setattr(ConstrainedAcceptor, "__call__", way)
        g = torch.Generator().manual_seed(number)
        result, most, _ = accepted(processors(), 3, first, 11, g, ends, device=device)
        assert torch.equal(result, first) and most > 2


def constrained(grammar):
    """The distribution of the next token at temperature 0.8 after texts [R, n]: [R, VOCAB]."""

    def conditional(texts):
        ids = torch.cat([torch.ones(len(texts), 1, dtype=torch.int64), texts], dim=1)
        weights = torch.zeros(len(texts), VOCAB, dtype=torch.float64)
        for row, tokens in enumerate(texts.tolist()):
            matcher = fake.GrammarMatcher(grammar)
            if all(map(matcher.accept_token, tokens)):
                legal = list(matcher.legal())
                weights[row, legal] = (TABLE[ids[row, -1], legal].double() / 0.8).softmax(dim=0)
        return weights

    return conditional


@pytest.mark.parametrize("way", [ConstrainedAcceptor.__call__, ConstrainedAcceptor.accept])
def test_drawn_tokens_have_the_plain_loops_distribution(way, monkeypatch):
    rows, grammar, warper = 2000, fake.grammar(VOCAB, legal=3), TemperatureLogitsWarper(0.8)
    monkeypatch.setattr(ConstrainedAcceptor, "__call__", way)
    drafts = torch.randint(3, VOCAB, (rows, 4))
    result = accepted([fake.Processor(grammar), warper], rows, drafts, seed=7, ends=False, new=3)[0][:, 1:]
    assert fit(result[None], joint(constrained(grammar), VOCAB)[None], VOCAB) > FITS


GUESSES = guesses_of(TABLE)


def test_drawn_chains_have_the_plain_loops_distribution():
    rows, grammar, warper = 3000, fake.grammar(VOCAB, legal=3), TemperatureLogitsWarper(0.8)
    legal = torch.zeros(VOCAB)
    legal[[token for edges in grammar.edges for token in edges]] = 1
    guesses = GUESSES * (legal + 0.02)
    result, _, accept = drawn_chains([fake.Processor(grammar), warper], rows, 3, guesses)
    assert type(accept) is ConstrainedAcceptor
    assert fit(result[None], joint(constrained(grammar), VOCAB)[None], VOCAB) > FITS


def test_drawn_chains_under_a_grammar_that_ends():
    """Texts are legal up to the end, and beyond it go on under the mask of the last token."""
    for ends in (True, False):
        result, rounds, accept = drawn_chains([fake.Processor(GRAMMARS)], 3, NEW, GUESSES, ends=ends)
        assert rounds < NEW and not any(accept.only.ahead)
        for row, tokens in enumerate(result.tolist()):
            matcher = fake.GrammarMatcher(GRAMMARS[row])
            while tokens and not matcher.is_terminated():
                assert matcher.accept_token(tokens.pop(0))
            assert not ends or not any(tokens)


def test_drawn_chains_where_a_grammar_leaves_no_token():
    """Raises when such a token is reached, and not when it is only drafted."""
    grammar = fake.CompiledGrammar([{5: 1, 6: 0}, {}], set(), fake.TokenizerInfo(VOCAB))
    guesses = torch.zeros(VOCAB, VOCAB)
    guesses[:, 5] = 1
    processors = [fake.Processor(grammar), SuppressTokensLogitsProcessor([5], device="cpu")]
    assert (drawn_chains(processors, 1, 6, guesses)[0] == 6).all()
    with pytest.raises(RuntimeError, match="cannot sample"):
        drawn_chains([fake.Processor(grammar)], 1, NEW, guesses)
    with pytest.raises(RuntimeError, match="the grammar of row 0 does not allow token"):
        drawn_chains([fake.Processor(grammar), InfNanRemoveLogitsProcessor()], 1, NEW, guesses)


def test_a_grammar_that_leaves_no_token_raises_where_plain_decoding_does():
    grammar = fake.CompiledGrammar([{5: 1}, {}], set(), fake.TokenizerInfo(VOCAB))
    with pytest.raises(RuntimeError, match="logits_processor: the grammar of row 0 does not allow token 0"):
        accepted([fake.Processor(grammar)], 1, torch.ones(1, NEW + 1, dtype=torch.int64))


@functools.cache
def tiny(device="cpu"):
    model = models.ADMITTED["llama"]().to(device)
    return model, speculate(model, compile=False, adaptive=False, max_cache_len=256)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_generate(name, device):
    model, fast = tiny(device)
    expected = call(model, **CALLS[name])
    fast.speculation.ngram.add(expected[0].tolist())
    assert torch.equal(call(fast, **CALLS[name]), expected)


SIZE = models.VOCAB


@pytest.mark.parametrize(
    "grammars, message",
    [
        (fake.grammar(SIZE - 8), f"its vocabulary has {SIZE - 8} tokens and the model's .* {SIZE};"),
        ([fake.grammar(SIZE)] * 2, "expected one grammar, or one for each of 1 rows, got 2"),
        (fake.CompiledGrammar([{}], set(), fake.TokenizerInfo(SIZE)), "grammar 0 allows no first token"),
        (fake.grammar(SIZE), "it has served a call"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(grammars, message):
    fast, processor = tiny()[1], fake.Processor(grammars)
    call = dict(inputs=models.prompts()[0][0], max_new_tokens=2, logits_processor=[processor])
    if "served" in message:
        fast.generate(**call)
    rounds = fast.speculation.stats.rounds
    with pytest.raises(ValueError, match=f"logits_processor: xgrammar's LogitsProcessor: {message}"):
        fast.generate(**call)
    assert fast.speculation.stats.rounds == rounds


def test_a_request_among_others_has_a_grammar_of_its_own():
    model, fast = tiny()
    size, prompt = model.config.vocab_size, models.prompts()[0][0]
    processors = lambda: [fake.Processor(fake.grammar(size, legal=20, states=4))]  # noqa: E731
    options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
    expected = model.generate(prompt, logits_processor=processors(), **options)[0, prompt.shape[1] :].tolist()
    with fast.continuous_batching_context_manager() as manager:
        names = [
            manager.add_request(prompt[0].tolist(), max_new_tokens=12, eos_token_id=-1, logits_processor=processors())
            for _ in range(2)
        ]
        with pytest.raises(ValueError, match="its vocabulary has 8 tokens"):
            manager.add_request(prompt[0].tolist(), logits_processor=[fake.Processor(fake.grammar(8))])
        outputs = {name: manager.get_result(name, timeout=60) for name in names}
    assert [output.generated_tokens for output in outputs.values()] == [expected] * 2
