"""One request in many ways: equal answers are counted, and another answer is found."""

import functools

from models import ADMITTED, prompts

import spec_compile
from spec_compile.batching.sequence import BatchSequence
from spec_compile.tools.audit_requests import AGAIN, InManyWays, Manner, promises

PROMPTS = [row[0].tolist() for row in prompts()[0][:3]]
OPTIONS = dict(max_new_tokens=10, pad_token_id=0, eos_token_id=None)
SCORES = "log-probabilities by score()"


@functools.cache
def fast():
    return spec_compile.speculate(ADMITTED["llama"](), compile=False, check=False, max_cache_len=512)


def ways(seed=None):
    return InManyWays(fast(), PROMPTS, OPTIONS, seed)


def test_every_way_is_compared():
    manners = [*ways().run([2, 2])]
    assert len({manner.name for manner in manners}) == 7  # each batch once
    assert all(manner.of == len(PROMPTS) and not manner.promised and not manner.drawn for manner in manners)
    assert all(manner.equal == manner.of for manner in manners if manner.name != SCORES)
    reused = {manner.name: manner.reused for manner in manners}
    assert reused["after a common prefix, 2 rows"] > 0


def test_drawn_answers_have_their_own_seeds():
    manners = [*ways(seed=4).run([2])]
    assert all(manner.drawn for manner in manners)
    assert all(manner.equal == manner.of for manner in manners if manner.name != SCORES)
    assert not any("half" in manner.name for manner in manners)
    assert ways(seed=4)._generate(ways(seed=4)._asked[1]) != ways(seed=5)._generate(ways(seed=5)._asked[1])


def test_another_answer_is_found(monkeypatch):
    gain = BatchSequence.gain
    monkeypatch.setattr(BatchSequence, "gain", lambda self, tokens: gain(self, [(token + 1) % 96 for token in tokens]))
    for manner in ways().run([2]):
        if manner.name == AGAIN:
            assert manner.equal == manner.of
        elif manner.name != SCORES:
            assert manner.equal == 0 and manner.first_differences == [0, 0, 0]


def test_what_is_promised(monkeypatch):
    """Bits of rounds and of prompts."""
    runtime = fast().speculation.engine.runtime
    for graph in (runtime.verify, runtime.prefill, None):
        monkeypatch.setattr(
            "spec_compile.tools.audit_requests.variant_parts", lambda each, graph=graph: ["a product"] * (each is graph)
        )
        assert promises(fast()) == (graph is None)


def test_differences_are_counted():
    manner = Manner("together", drawn=False, promised=False)
    for ours, expected in (([1, 2], [1, 2]), ([1, 2], [1, 2, 3]), ([1], [2])):
        manner.compare(ours, expected)
    assert (manner.of, manner.equal, manner.first_differences) == (3, 1, [0, 2])
