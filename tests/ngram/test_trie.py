"""The n-gram trie: golden trees, eviction, arguments, and several threads."""

import threading

import numpy as np
import pytest
import torch
from tries import check_tree, grown, make, outputs, plain

from spec_compile.ngram.trie import NgramTrie

PROB, NARROW = dict(match_type="PROB"), dict(D=4, window=(1, 3), breadth=(1, 4))
TWO = [list(range(1, 11)), [1, 2, 3, 44, 55, 66, 77, 88, 99, 100]]
BY_LEVEL = [3, 44, 4, 55, 5, 66, 6, 77], [-1, 0, 0, 1, 2, 3, 4, 5]
FIVE = [[5, 6, 1], [5, 6, 1], [5, 6, 2], [5, 6, 3], [5, 6, 2]]
LONGER = [[8, 9, 1, 11], [8, 9, 1, 12], [8, 9, 2, 13], [8, 9, 2, 14], *[[9, 5]] * 4]
GOLDEN = {  # how a trie is made, its texts, those of a stream, num_draft_tokens -> match, tokens and parents
    # Level by level, the later text first.
    "two continuations": ({}, TWO, [1, 2, 3], 8, 3, *BY_LEVEL),
    # Both continuations are worth 1/2 and keep it; of equal candidates the one offered first goes first.
    "two continuations, PROB": (PROB, TWO, [1, 2, 3], 8, 3, *BY_LEVEL),
    # Breadths by depth 0..3 are 4, 3, 2, 1: three followers of 1 and two of (1, 14).
    "breadth narrows": (NARROW, [*([1, t, t + 100] for t in range(10, 15)), [1, 14, 115]], [9, 1], 16, 1,
                        [1, 14, 13, 12, 115, 114, 113, 112], [-1, 0, 0, 0, 1, 1, 2, 3]),
    "the most recent first": ({}, FIVE, [5, 6], 4, 2, [6, 2, 3, 1], [-1, 0, 0, 0]),
    "the most frequent first": (PROB, FIVE, [5, 6], 4, 2, [6, 2, 1, 3], [-1, 0, 0, 0]),
    # After (8, 9): 2 and 1 at 1/2, what follows them at 1/4. After (9), from 1/2: 5 at 1/4 too, so it comes last.
    "the longer match of equals": (PROB, LONGER, [8, 9], 8, 2, [9, 2, 1, 14, 13, 12, 11, 5], [-1, 0, 0, 1, 1, 2, 2, 0]),
    "an unknown token": ({}, [[1, 2, 3]], [77], 4, 0, [77], [-1]),
    "an end": ({}, [[1, 2, 3]], [1, 3], 4, 0, [3], [-1]),
    "less than the window": (dict(window=(2, 3)), TWO, [9, 5], 4, 0, [5], [-1]),
    "more than the window": (dict(window=(2, 3)), TWO, [1, 2, 3, 4], 4, 3, [4, 5, 6, 7], [-1, 0, 1, 2]),
    "no drafts": (dict(window=(2, 3)), TWO, [3, 4], 1, 2, [4], [-1]),
    "a text continues itself": ({}, [], [1, 2, 3, 4, 1, 2], 4, 2, [2, 3, 4, 1], [-1, 0, 1, 2]),
    "one token": (dict(D=5), [], [6] * 50, 8, 4, [6] * 5, [-1, 0, 1, 2, 3]),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_trees(name):
    how, texts, ids, n, match, tokens, parents = GOLDEN[name]
    trie, pad = make(**how), [0] * (n - len(tokens))
    trie.add(texts)
    assert plain(trie.propose(grown(trie, ids), n)) == (tokens + pad, parents + pad, len(tokens), match)


def test_the_oldest_leave_where_capacity_ends():
    trie = make(D=3, window=(1, 2), capacity=9)
    trie.add([[1, 2, 3], [4, 5, 6]])  # 6 nodes; then 1 + 2 more fit, and for the 6 the oldest (1, 2, 3) leaves
    assert trie.stats() | {"bytes": 0} == dict(nodes=9, tokens=5, occurrences=5, streams=0, bytes=0, evicted=1)
    assert trie.propose(grown(trie, [1]), 2).match == 0


def test_text_is_freed():
    trie = make(capacity=2_000)
    rng = np.random.default_rng(0)
    stream = grown(trie, rng.integers(0, 1000, 20_000))
    before = trie.stats()["bytes"]
    trie.extend(stream, rng.integers(0, 1000, 100_000))
    assert trie.stats()["bytes"] <= before * 1.5


@pytest.mark.parametrize(
    "name, bad",
    [
        ("branch_length", [1, 257, 0, -1]),
        ("min_match_window_size", [0, 18, 13]),
        ("max_match_window_size", [0, 18]),
        ("min_bfs_breadth", [0, 11, 1 << 21]),
        ("max_bfs_breadth", [0]),
        ("capacity", [0, 35, 2**31]),
        ("vocab_size", [0, 2**31 + 1]),
        ("match_type", ["DFS", ""]),
    ],
)
def test_parameter_ranges(name, bad):
    blamed = {("min_match_window_size", 13): "max_match_window_size", ("min_bfs_breadth", 11): "max_bfs_breadth"}
    for value in bad:
        with pytest.raises(ValueError, match=f"^{blamed.get((name, value), name)} must be"):
            NgramTrie(**{name: value})
    with pytest.raises(TypeError, match=f"^{name} must be"):
        NgramTrie(**{name: 1.5})


def test_parameter_limits_are_usable():
    trie = NgramTrie(branch_length=256, max_match_window_size=255, capacity=20_000, match_type="prob")
    stream = grown(trie, list(range(40)) * 20)
    assert trie.propose(stream, 64).count == 64 and len(trie) == sum(min(256, 800 - i) for i in range(40))
    trie = NgramTrie(branch_length=256, max_match_window_size=255, capacity=512)
    trie.add(list(range(40)) * 20)
    assert 256 < len(trie) <= 512
    trie = NgramTrie(branch_length=2, max_match_window_size=1, capacity=5, match_type="bfs")
    assert plain(trie.propose(grown(trie, [1, 2, 1]), 2)) == ([1, 2], [-1, 0], 2, 1)
    assert NgramTrie(capacity=2**31 - 1).stats()["bytes"] < 8 << 20  # capacity costs nothing until used


def test_what_add_takes():
    ids = [3, 1, 2]
    one = [ids, tuple(ids), range(3), [np.int64(i) for i in ids], np.array(ids), np.array(ids, np.uint16)]
    one += [torch.tensor(ids), torch.tensor(ids, dtype=torch.int32), torch.tensor([3, 0, 1, 0, 2, 0])[::2]]
    for form in [*one, *([form] for form in one), [np.array(ids), []]]:
        trie = make()
        trie.add(form)
        assert len(trie) == 6 and trie.stats()["streams"] == 0
    trie = make()
    trie.add([])
    trie.add(torch.empty(0, dtype=torch.int64))
    assert len(trie) == 0 and trie


@pytest.mark.parametrize(
    "ids, error, match",
    [
        ("text", TypeError, "ids must be .*tokenize"),
        (["text"], TypeError, r"ids\[0\] must be"),
        (7, TypeError, "not int"),
        (None, TypeError, "not NoneType"),
        ([1.0, 2.0], TypeError, "float32"),
        ([True, False], TypeError, "bool"),
        (torch.ones(2), TypeError, "float32"),
        (torch.ones(2, 2, dtype=torch.int64), ValueError, "must be 1-D"),
        ([1, 2, -1], ValueError, "token id -1, outside"),
        ([1, 100], ValueError, r"token id 100, outside the vocabulary \[0, 100\)"),
        ([[1, 2], [3, 100]], ValueError, r"ids\[1\] holds token id 100"),
        ([[1, 2], 3], TypeError, r"ids\[1\] must be"),
        ([2**70], TypeError, "ids must be"),
    ],
)
def test_what_add_refuses(ids, error, match):
    trie = make(vocab_size=100)
    with pytest.raises(error, match=match):
        trie.add(ids)
    assert len(trie) == 0 and trie.stats()["streams"] == 0


def test_streams_that_are_not_open():
    trie = make()
    stream = grown(trie, [1, 2])
    trie.close(stream)
    for call in (trie.close, trie.length, lambda s: trie.extend(s, [1]), lambda s: trie.propose(s, 4)):
        with pytest.raises(ValueError, match="is not open"):
            call(stream)
    with pytest.raises(ValueError, match="no token yet"):
        trie.propose(trie.open(), 4)
    survivor = grown(trie, [1])
    trie.reset()
    with pytest.raises(ValueError, match="is not open"):
        trie.extend(survivor, [1])
    assert trie.open() > survivor
    for n in (0, 65):
        with pytest.raises(ValueError, match="num_draft_tokens must be from 1 to 64"):
            trie.propose(stream, n)


def test_repr():
    trie = make(vocab_size=9)
    trie.add([1, 2, 3])
    assert repr(trie).startswith("NgramTrie(6 of 10,000,000 nodes, 3 tokens, 0 open streams, ")
    assert "vocab_size=9" in repr(trie)


def test_threads():
    trie = make(capacity=1_000_000)
    rng = np.random.default_rng(3)
    documents = [[rng.integers(0, 50, 2000) for _ in range(5)] for _ in range(4)]
    rounds, failures, seen = 200, [], []
    rows = torch.from_numpy(rng.integers(0, 50, (2, 3 * rounds)))

    def guarded(work):
        def run():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=run)

    def advance():
        streams = torch.tensor([trie.open() for _ in range(2)])
        for i in range(1, rounds + 1):
            out = outputs(2, 16)
            trie.advance(streams, rows, torch.tensor([3 * i, 2 * i]), *out)
            for b in range(2):
                check_tree(out[0][b].tolist(), out[1][b].tolist(), int(out[2][b]))
            seen.append(trie.stats()["tokens"])

    threads = [guarded(lambda d=d: trie.add(d)) for d in documents] + [guarded(advance)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert trie.stats()["tokens"] == 4 * 5 * 2000 + 5 * rounds and len(seen) == rounds
    alone = make(capacity=1_000_000)
    alone.add([text for part in documents for text in part])
    alone.add([rows[0, : 3 * rounds], rows[1, : 2 * rounds]])
    assert len(alone) == len(trie)  # which n-grams there are does not depend on who came first
