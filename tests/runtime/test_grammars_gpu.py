"""Grammars on a GPU: tokens are those of transformers' loop, and of the acceptor that goes one level at a time."""

import fake_xgrammar as fake
import grammar_cases as grammars
import models
import pytest
import torch

from spec_compile import speculate
from spec_compile.runtime.verify.host import ConstrainedAcceptor, HostAcceptor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    fake.install(monkeypatch)


def test_greedy_acceptor():
    texts = grammars.plain(grammars.GRAMMARS, [])
    result, most, accept = grammars.accepted([fake.Processor(grammars.GRAMMARS)], 3, texts, device="cuda")
    assert torch.equal(result, texts) and most > 2 and type(accept) is ConstrainedAcceptor


@pytest.mark.parametrize("name", ["temperature", "top-k"])
def test_drawing_acceptor(name, monkeypatch):
    texts = torch.ones(3, grammars.NEW + 1, dtype=torch.int64)
    for way in (HostAcceptor.__call__, ConstrainedAcceptor.__call__, ConstrainedAcceptor.__call__):
        monkeypatch.setattr(ConstrainedAcceptor, "__call__", way)
        processors = [fake.Processor(grammars.GRAMMARS), *grammars.WARPERS[name]]
        result, most, _ = grammars.accepted(processors, 3, texts, 11, device="cuda")
        assert way is HostAcceptor.__call__ or torch.equal(result, texts)
        texts = result
    assert most > 2


@pytest.fixture(scope="module")
def tiny():
    model = models.ADMITTED["llama"]().to("cuda")
    return model, speculate(model, compile=False, max_cache_len=256)


@pytest.mark.parametrize("name", grammars.CALLS)
def test_generate(name, tiny):
    model, fast = tiny
    expected = grammars.call(model, **grammars.CALLS[name])
    fast.speculation.ngram.add(expected[0].tolist())
    assert torch.equal(grammars.call(fast, **grammars.CALLS[name]), expected)


def test_sampling_depends_on_the_seed_alone(tiny):
    options = dict(grammar=[0, 1], rows=2, do_sample=True, temperature=0.8, top_p=0.9)
    answers = []
    for _ in range(3):
        torch.manual_seed(3)
        answers.append(grammars.call(tiny[1], **options))
        tiny[1].speculation.ngram.add(answers[0][0].tolist())
    assert torch.equal(answers[0], answers[1]) and torch.equal(answers[0], answers[2])
