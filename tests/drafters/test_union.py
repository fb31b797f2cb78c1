"""N-grams and a head's drafts in one tree: the merge against a slow reference, what is learnt, and options.

test_draft_rounds.py has what a round learns.
"""

import math
from collections import Counter

import draft_rounds as rounds
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile import speculate
from spec_compile.contrib.parallel import ParallelOptions
from spec_compile.drafters.dflash import DFlashOptions
from spec_compile.drafters.heads import HeadOptions
from spec_compile.drafters.options import DraftOptions
from spec_compile.drafters.trees.merge import CELLS, LEAST, MOST, WEIGHT, SourceTrees, followed, learnt, merge

# --- the merge


def depth_bucket(depth):
    return 0 if depth == 1 else 1 if depth == 2 else 2 if depth <= 4 else 3


def match_bucket(match):
    return next((n for n, bound in enumerate((1, 2, 3, 4, 6, 8, 11)) if match <= bound), 7)


def bounded(p):
    return min(max(p, LEAST), MOST)


def paths_of(tree):
    """Of each node of [(token, parent)], the first being the root: the tokens on its path."""
    paths = [()]
    for token, parent in tree[1:]:
        paths.append((*paths[parent], token))
    return paths


def reference(head, logprobs, trie, match, counts):
    """{path: (worth, prior, cell)} of all drafts. head, trie: [(token, parent)]; logprobs: of the head's nodes."""
    ours, theirs = paths_of(head), paths_of(trie)
    priors, cells = {}, {}
    for path, logprob in list(zip(ours, logprobs))[1:]:
        p = bounded(math.exp(logprob))
        bin_ = min(max(math.floor(math.log(p / (1 - p))) + 6, 0), 10)
        priors[path], cells[path] = p, (min(len(path), 8) - 1) * 11 + bin_
        if path in theirs:
            cells[path] = 88 + 128 + match_bucket(match) * 11 + bin_
    ranks, main = {(): 0}, {(): True}
    for node, (path, (_, parent)) in enumerate(zip(theirs, trie)):
        if node == 0:
            continue
        ranks[path] = sum(1 for other in range(1, node) if trie[other][1] == parent)
        main[path] = main[path[:-1]] and ranks[path] == 0
        length, kind = match + len(path) - 1, 0 if main[path] else min(ranks[path] + 1, 3)
        share = 1.0 if main[path] else {0: 0.6, 1: 0.2}.get(ranks[path], 0.1)
        p = bounded(share * length / (length + 1))
        if path in priors:
            priors[path] = 1 - (1 - priors[path]) * (1 - p)
        else:
            priors[path] = p
            cells[path] = 88 + (match_bucket(match) * 4 + kind) * 4 + depth_bucket(len(path))
    after = {}
    for path, p in priors.items():
        hits, expected = counts[:, cells[path]]
        after[path] = bounded(p * (hits + WEIGHT) / (expected + WEIGHT))
    siblings = Counter()
    for path, p in after.items():
        siblings[path[:-1]] += p
    worth = {}
    for path in sorted(after, key=len):
        worth[path] = worth.get(path[:-1], 0.0) + math.log(after[path] / max(1.0, siblings[path[:-1]]))
    return {path: (worth[path], priors[path], cells[path]) for path in worth}


@st.composite
def trees(draw, most=9):
    """[(token, parent)]: siblings differ, parents come first; tokens are few, so that trees have paths in common."""
    tree, taken = [(1, -1)], set()
    for _ in range(draw(st.integers(0, most - 1))):
        child = draw(st.integers(0, len(tree) - 1)), draw(st.integers(0, 3))
        if child not in taken:
            taken.add(child)
            tree.append((child[1], child[0]))
    return tree


def tensors(tree, size):
    """A `SourceTrees` of one row of `size` slots."""
    rows = [*tree, *[(0, 0)] * (size - len(tree))]
    tokens, parents = (torch.tensor([column]) for column in zip(*rows))
    return SourceTrees(tokens, parents, torch.tensor([len(tree)]))


def joined(sources):
    return SourceTrees(*(torch.cat(parts) for parts in zip(*sources)))


@st.composite
def both_sources(draw):
    """A head's tree and its log-probabilities, n-grams' tree, and the length of the match."""
    head, trie = draw(trees()), draw(trees())
    logprobs = [0.0] + [-draw(st.integers(1, 128)) / 16 for _ in head[1:]]  # exact in float32, and so are their sums
    return head, logprobs, trie, draw(st.integers(1, 14))


def scores_of(head, logprobs, size):
    scores = [0.0]
    for (_, parent), logprob in zip(head[1:], logprobs[1:]):
        scores.append(scores[parent] + logprob)
    return scores + [0.0] * (size - len(scores))


@settings(max_examples=40, deadline=None)
@given(st.lists(both_sources(), min_size=2, max_size=2), st.integers(2, 14), st.integers(0, 3))
def test_merged_trees_are_the_best_drafts_of_both(rows, nodes, seed):
    counts = torch.rand(2, CELLS, generator=torch.Generator().manual_seed(seed)) * 20
    head = joined([tensors(row[0], 9) for row in rows])
    trie = joined([tensors(row[2], 10) for row in rows])
    scores = torch.tensor([scores_of(*row[:2], 9) for row in rows])
    match = torch.tensor([row[3] for row in rows])
    tokens, parents, count, hint, drafts = merge(head, scores, trie, match, counts, nodes)
    assert tokens.shape == parents.shape == (2, nodes)
    for number, row in enumerate(rows):
        right = reference(*row, counts.double().numpy())
        size = int(count[number])
        assert size == min(nodes, 1 + len(right))
        assert tokens[number, size:].tolist() == parents[number, size:].tolist() == [0] * (nodes - size)
        merged = list(zip(tokens[number, :size].tolist(), parents[number, :size].tolist()))
        assert merged[0] == (1, -1) and all(0 <= parent < node for node, (_, parent) in enumerate(merged[1:], 1))
        paths = paths_of(merged)[1:]
        assert len({*paths}) == len(paths) and {*paths} <= right.keys()
        best = sorted((worth for worth, _, _ in right.values()), reverse=True)[: size - 1]
        np.testing.assert_allclose([right[path][0] for path in paths], best, atol=1e-4)
        assert abs(int(hint[number]) - np.exp(best).sum()) < 0.5 + 1e-4

        # What is remembered: each draft once, with the cell and the prior of the reference.
        kept = {}
        for begin, source in ((0, row[0]), (9, row[2])):
            for node, path in enumerate(paths_of(source)):
                cell = int(drafts.cells[number, begin + node])
                assert int(drafts.depth[number, begin + node]) == len(path)
                if cell >= 0:
                    assert path not in kept
                    kept[path] = cell, float(drafts.priors[number, begin + node])
        assert kept.keys() == right.keys()
        for path, (cell, prior) in kept.items():
            assert prior == pytest.approx(right[path][1], rel=1e-4)
            assert cell == right[path][2]


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
