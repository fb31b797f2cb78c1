"""N-grams and a head's drafts in one tree: the merge against a slow reference, what is learnt, and options.

test_draft_rounds.py has what a round learns.
"""

import draft_rounds as rounds
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_trees import arguments, both_sources, check, tensors

from spec_compile import speculate
from spec_compile.contrib.parallel import ParallelOptions
from spec_compile.drafters.dflash import DFlashOptions
from spec_compile.drafters.heads import HeadOptions
from spec_compile.drafters.options import DraftOptions
from spec_compile.drafters.trees.merge import CELLS, followed, learnt, merge

# --- the merge


@settings(max_examples=40, deadline=None)
@given(st.lists(both_sources(), min_size=2, max_size=2), st.integers(2, 14), st.integers(0, 3))
def test_merged_trees_are_the_best_drafts_of_both(rows, nodes, seed):
    sources = arguments(rows, seed)
    check(rows, sources[-1], nodes, *merge(*sources, nodes))


def test_a_source_that_is_right_gets_the_budget():
    """Both sources continue the same text differently: what was accepted before decides which of them is verified."""
    chain = [(1, -1), (2, 0), (3, 1), (4, 2)]
    head, trie = tensors(chain, 4), tensors([(1, -1), (5, 0), (6, 1), (7, 2)], 4)
    scores, match = torch.tensor([[0.0, -0.7, -1.4, -2.1]]), torch.tensor([3])
    counts, taken = torch.zeros(2, CELLS), {}
    for name, text in (("trie", [5, 6, 7]), ("head", [2, 3, 4])):
        for _ in range(40):
            tokens, *_, drafts = merge(head, scores, trie, match, counts, 4)
            ahead = torch.tensor([[0, *text, 0, *text]])
            on_path = torch.cat([
                followed(drafts.tokens[:, part], drafts.ancestors[:, part], drafts.depth[:, part], ahead[:, part],
                         torch.tensor([3]))
                for part in (slice(0, 4), slice(4, 8))
            ], dim=1)  # fmt: skip
            below = torch.cat([on_path[:, :4].gather(1, drafts.above[:, :4]),
                               on_path[:, 4:].gather(1, drafts.above[:, 4:])], dim=1)  # fmt: skip
            counts = learnt(counts, drafts.priors, drafts.cells, below & (drafts.cells >= 0), on_path)
        taken[name] = tokens[0, 1:].tolist()
    assert taken == {"trie": [5, 6, 7], "head": [2, 3, 4]}


# --- options

DRAWN = dict(draft_sample_method="probabilistic")


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (DraftOptions, dict(ngram="yes"), TypeError, "ngram: expected True, False or a dict"),
        (DraftOptions, dict(ngram=dict(match_typ="BFS")), TypeError, "ngram: unknown option 'match_typ'. Did you mean"),
        (DraftOptions, dict(ngram=dict(match_type=3)), TypeError, "ngram: match_type: expected str"),
        (HeadOptions, dict(ngram=dict(recycle=8)), ValueError, "ngram: 'recycle' is an option of algo=\"ngram\" only"),
        (HeadOptions, dict(ngram=dict(num_draft_tokens=8)), ValueError, "ngram: 'num_draft_tokens' is an option of n-"),
        (
            DFlashOptions,
            dict(ngram=dict(adaptive=True)),
            ValueError,
            "ngram: 'adaptive' is an option of n-",
        ),
        (DraftOptions, dict(ngram=True, **DRAWN), ValueError, "draft_sample_method: .* which n-grams do not have"),
        (DFlashOptions, dict(ngram=True, **DRAWN), ValueError, "draft_sample_method: .* which n-grams do not have"),
        (DraftOptions, dict(ngram=True, num_draft_tokens=65), ValueError, "num_draft_tokens: expected 1 to 64"),
        (ParallelOptions, dict(ngram=True, num_draft_tokens=1), ValueError, "num_draft_tokens must be from 2 to 64"),
    ],
)
def test_options_that_contradict_each_other(kind, options, error, message):
    with pytest.raises(error, match=message):
        kind(**options)


@pytest.mark.parametrize(
    ("options", "own", "budget", "longest"),
    [
        (dict(), 4, 4, 4),
        (dict(ngram=True), 4, 16, 16),
        (dict(ngram=True, num_draft_tokens=32), 4, 32, 18),
        (dict(ngram=dict(branch_length=6, max_match_window_size=3)), 4, 16, 6),
        (dict(ngram=True, topk=4, num_steps=5, num_draft_tokens=16), 16, 16, 16),
        (dict(ngram=True, num_steps=2, num_draft_tokens=2), 2, 2, 2),
    ],
)
def test_one_budget(options, own, budget, longest):
    """The head drafts as much of the budget as it can, and a path may be as long as n-grams are."""
    parsed = DraftOptions(**options)
    assert parsed.schedule.nodes == own
    assert (parsed.budget(own) if parsed.joined else own) == budget
    assert parsed.longest(min(own, parsed.schedule.num_steps + 1)) == longest


def test_ngrams_are_refused_before_the_head_is_read():
    with pytest.raises(ValueError, match="max_match_window_size"):
        speculate(rounds.target("llama"), "eagle3", draft="/no/such", ngram=dict(max_match_window_size=99))
