"""Trees of a head and of n-grams, and a slow reference of what `drafters.trees.merge` makes of them."""

import math
from collections import Counter
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from spec_compile.drafters.trees.merge import CELLS, LEAST, MOST, WEIGHT, SourceTrees


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


def large(head, trie, seed):
    """As `both_sources`, trees of these sizes."""
    random = Random(seed)

    def tree(size):
        nodes = {(): None}
        while len(nodes) < size:
            nodes[(*random.choice([*nodes][-9:]), random.randrange(4))] = None
        number = {path: place for place, path in enumerate(nodes)}
        return [(1, -1), *((path[-1], number[path[:-1]]) for path in [*nodes][1:])]

    ours, theirs = tree(head), tree(trie)
    return ours, [0.0] + [-random.randint(1, 48) / 16 for _ in ours[1:]], theirs, random.randint(1, 14)


HEAD, TRIE = 9, 10
"""Slots of the trees of `both_sources`."""


def arguments(rows, seed, head=HEAD, trie=TRIE):
    """The arguments of `merge` but the number of nodes, for rows of `both_sources`."""
    counts = torch.rand(2, CELLS, generator=torch.Generator().manual_seed(seed)) * 20
    scores = torch.tensor([scores_of(*row[:2], head) for row in rows])
    head, trie = (joined([tensors(row[at], size) for row in rows]) for at, size in ((0, head), (2, trie)))
    return head, scores, trie, torch.tensor([row[3] for row in rows]), counts


def check(rows, counts, nodes, tokens, parents, count, hint, drafts, head=HEAD):
    """The results of `merge` are right."""
    assert tokens.shape == parents.shape == (len(rows), nodes)
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
        for begin, source in ((0, row[0]), (head, row[2])):
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
