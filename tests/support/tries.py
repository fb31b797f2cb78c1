"""Tries for tests: ways to make, fill and read them."""

import torch

from spec_compile.ngram.trie import NgramTrie


def make(D=18, window=(1, 12), breadth=(1, 10), capacity=10_000_000, match_type="BFS", **extra):
    return NgramTrie(
        branch_length=D,
        min_match_window_size=window[0],
        max_match_window_size=min(window[1], D - 1),
        min_bfs_breadth=breadth[0],
        max_bfs_breadth=breadth[1],
        capacity=capacity,
        match_type=match_type,
        **extra,
    )


def grown(trie, ids):
    stream = trie.open()
    trie.extend(stream, ids)
    return stream


def plain(draft):
    return draft.tokens.tolist(), draft.parents.tolist(), draft.count, draft.match


def check_tree(tokens, parents, count):
    assert parents[0] == -1
    assert all(0 <= parents[i] < i for i in range(1, count))
    assert len({(parents[i], tokens[i]) for i in range(1, count)}) == count - 1
    assert tokens[count:] == [0] * (len(tokens) - count) == parents[count:]


def outputs(batch, n):
    return [torch.full(shape, -7) for shape in ((batch, n), (batch, n), (batch,), (batch,))]
