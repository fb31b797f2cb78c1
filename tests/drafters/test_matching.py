"""The n-gram drafter of a GPU, on a CPU: whose texts a row drafts from, and which texts stay."""

import functools

import ngram_plain  # noqa: F401 - kernels for a CPU
import pytest
import torch
from batch_requests import MODEL, PROMPTS, collect, generated
from transformers import AutoModelForCausalLM, GenerationConfig

from spec_compile import speculate
from spec_compile.drafters.ngram import MatchingDrafter
from spec_compile.ngram import MOST_OWNERS
from spec_compile.ngram.corpus import NgramCorpus
from spec_compile.ngram.store import MatchOptions


def test_private_texts_are_forgotten():
    """The references of a call leave, and the answer is never added."""
    corpus = NgramCorpus(1000, 96, torch.device("cpu"))
    corpus.add([1, 2, 3])
    drafter = MatchingDrafter(corpus, MatchOptions(), 4, 1, 6)
    state = torch.nn.Module()
    state.tokens = torch.tensor([[7, 8, 9, 10, 0, 0]])
    for share_text, added in ((False, []), (True, [5, 6, -1, 7, 8, 9, -1]), (False, [])):
        before = corpus.text[: len(corpus)].tolist()
        drafter.start(state, [[7, 8]], [torch.tensor([5, 6])], share_text)
        assert corpus.text[: len(corpus)].tolist() == [*before, 5, 6, -1]
        drafter.finish([2])
        assert corpus.text[: len(corpus)].tolist() == [*before, *added] and int(corpus.length) == len(corpus)


def test_references_of_a_row():
    """Only their row drafts from them, they move with it, and nothing is left in the store."""
    corpus = NgramCorpus(1000, 96, torch.device("cpu"))
    drafter = MatchingDrafter(corpus, MatchOptions(), 4, 2, 8)
    state, proposed = torch.nn.Module(), []
    state.tokens, state.lengths = torch.tensor([[1, 2, 0, 0], [1, 2, 0, 0]]), torch.tensor([1, 1])
    state.propose = lambda tokens, *others: proposed.append(tokens.tolist())
    drafter.enter(0, True, [])
    drafter.enter(1, True, [torch.tensor([1, 2, 5]), torch.tensor([2, 6])])
    drafter.propose(state, 4)
    drafter.resize(16)
    for buffer in drafter.row_buffers():  # as `Rows.move_row` moves them
        buffer[0] = buffer[1]
    drafter.enter(1, True, [])
    drafter.propose(state, 4)
    assert proposed == [[[2, 0, 0, 0], [2, 5, 6, 0]], [[2, 5, 6, 0], [2, 0, 0, 0]]]
    drafter.leave(state, 0, 1, True)
    assert corpus.text[: len(corpus)].tolist() == [1, 2, -1]
    drafter.enter(0, False, [torch.tensor([1, 2, 5])])
    drafter.leave(state, 0, 1, False)
    assert corpus.text[: len(corpus)].tolist() == [1, 2, -1]


def test_texts_of_owners():
    """A row with an owner drafts from its owner's texts, the newest first, and its references; not from the corpus or
    another owner's. Rows without a name draft from their own text only. Nothing of them goes to the corpus."""
    corpus = NgramCorpus(10_000, 96, torch.device("cpu"))
    corpus.add([1, 2, 3])
    drafter = MatchingDrafter(corpus, MatchOptions(), 3, 2, 8)
    state, proposed = torch.nn.Module(), []
    state.lengths = torch.tensor([1, 1])
    state.propose = lambda tokens, *others: proposed.append(tokens.tolist())

    def end(owner, *tokens):
        state.tokens = torch.tensor([[*tokens], [*tokens]])
        drafter.leave(state, 0, len(tokens) - 1, owner)

    def drafts(*owners):
        state.tokens = torch.tensor([[1, 2, 0, 0], [1, 2, 0, 0]])
        for row, owner in enumerate(owners):
            drafter.enter(row, owner, [torch.tensor([9, 9])])
        drafter.propose(state, 4)
        return proposed.pop()

    end("ann", 1, 2, 5, 6)
    end("", 1, 2, 7, 8)
    assert drafts("ann", "bob") == [[2, 5, 6], [2, 0, 0]] and drafts("", True) == [[2, 0, 0], [2, 3, 0]]
    end("ann", 1, 2, 4, 4)
    assert drafts("ann", False) == [[2, 4, 4], [2, 3, 0]]
    for number in range(MOST_OWNERS):
        end(f"{number}", 1, 2, 7, 8)
    assert drafts("ann", "255") == [[2, 0, 0], [2, 7, 8]] and len(corpus.owned) == MOST_OWNERS
    assert corpus.text[: len(corpus)].tolist() == [1, 2, 3, -1]
    corpus.reset()
    assert drafts("255", "254") == [[2, 0, 0], [2, 0, 0]]


@functools.cache
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.mark.parametrize("share_text", [True, False])
def test_requests_with_references(share_text):
    """The store of a GPU in the place of the trie, with the plain version of its kernels."""
    one = speculate(model(), compile=False, check=False, adaptive=False, share_text=share_text, recycle=0)
    wanted = generated(one, PROMPTS[0], max_new_tokens=40, eos_token_id=[])
    algorithm = one.speculation.engine.runtime.algorithm
    algorithm.store = NgramCorpus(10_000, 4096, torch.device("cpu"))
    manager = one.init_continuous_batching(GenerationConfig(pad_token_id=0))
    manager.start()
    try:
        for name, reference in (("told", [[7, 8], PROMPTS[0] + wanted]), ("untold", None)):
            manager.add_request(PROMPTS[0], name, max_new_tokens=40, eos_token_id=-1, reference=reference)
        outputs = collect(manager, 2)
    finally:
        manager.destroy()
    told, untold = outputs["told"], outputs["untold"]
    assert told.generated_tokens == untold.generated_tokens == wanted
    assert told.speculation.steps <= 5 and untold.speculation.steps > told.speculation.steps
    assert len(algorithm.store) == (2 * len(PROMPTS[0] + wanted) + 2 if share_text else 0)
