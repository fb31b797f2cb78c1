"""The n-gram trie: golden trees, and random operations against a model made of plain dictionaries."""

import heapq
import os
import random
import struct
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_compile.ngram.corpus import NgramCorpus
from spec_compile.ngram.trie import NgramTrie


class Model:
    """What NgramTrie means, without regard to speed: n-grams are tuples, and everything about them a dictionary."""

    def __init__(self, D, window, breadth, capacity, match_type):
        self.D, self.window, self.breadth, self.capacity, self.match_type = D, window, breadth, capacity, match_type
        self.streams, self.last = {}, -1
        self.clear()

    def clear(self):
        self.streams.clear()
        self.count, self.touched, self.children = {}, {}, {}
        self.held = []  # occurrences, oldest first: [path so far, still growing]
        self.clock = self.evicted = 0

    def open(self):
        self.last += 1
        self.streams[self.last] = ([], [])  # tokens, the occurrences that began with its last D - 1 tokens
        return self.last

    def close(self, stream):
        del self.streams[stream]

    def extend(self, stream, ids):
        tokens, starts = self.streams[stream]
        for token in ids:
            while len(self.held) >= self.capacity or len(self.count) + self.alive(starts) + 1 > self.capacity:
                self.evict()
            new = {"path": (), "held": True}
            self.held.append(new)
            starts.append(new)
            del starts[: -self.D]
            for start in reversed(starts):
                if start["held"]:
                    self.touch(start, token)
            tokens.append(token)

    def alive(self, starts):
        return sum(start["held"] for start in starts[-(self.D - 1) :])

    def touch(self, start, token):
        parent = start["path"]
        start["path"] = path = (*parent, token)
        assert len(path) <= self.D
        self.clock += 1
        self.count[path] = self.count.get(path, 0) + 1
        self.touched[path] = self.clock
        self.children.setdefault(parent, set()).add(path)

    def evict(self):
        start = self.held.pop(0)
        start["held"] = False
        self.evicted += 1
        for depth in range(len(start["path"]), 0, -1):
            path = start["path"][:depth]
            self.count[path] -= 1
            if self.count[path] == 0:
                del self.count[path]
                self.children[path[:-1]].discard(path)

    def followers(self, path, by_count=False):
        return sorted(self.children.get(path, ()), key=lambda p: (-self.count[p] * by_count, -self.touched[p]))

    def propose(self, stream, n, base=None):
        tokens = self.streams[stream][0]
        tree, parents = [tokens[-1]], [-1]

        def add(parent, token):
            for i in range(1, len(tree)):
                if parents[i] == parent and tree[i] == token:
                    return i
            if len(tree) == n:
                return None
            tree.append(token)
            parents.append(parent)
            return len(tree) - 1

        low, high = self.window
        lengths = range(min(high, len(tokens), self.D - 1), low - 1, -1)
        paths, models = [tuple(tokens[-w:]) for w in lengths], [self] if base is None else [self, base]
        anchors = [(model, path) for path in paths for model in models if model.children.get(path)]
        (self.grow_prob if self.match_type == "PROB" else self.grow_bfs)(anchors, add, lambda: len(tree) == n)
        pad = n - len(tree)
        return tree + [0] * pad, parents + [0] * pad, len(tree), len(anchors[0][1]) if anchors else 0

    def grow_bfs(self, anchors, add, full):
        low, high = self.breadth
        for model, anchor in anchors:
            queue = [(anchor, 0)]
            while queue:
                path, node = queue.pop(0)
                breadth = max(1, low + (self.D - 1 - len(path)) * (high - low) // (self.D - 1))
                for child in model.followers(path)[:breadth]:
                    if full():
                        return
                    queue.append((child, add(node, child[-1])))

    def grow_prob(self, anchors, add, full):
        heap, order = [], 0

        def offer(model, path, node, score, match):
            nonlocal order
            total = sum(model.count[c] for c in model.children.get(path, ()))
            for child in model.followers(path, by_count=True)[: self.breadth[1]]:
                heapq.heappush(heap, (-(score * model.count[child] / total), -match, order, child, node, model))
                order += 1

        depths = sorted({len(path) for _, path in anchors}, reverse=True)
        for model, anchor in anchors:
            offer(model, anchor, 0, 0.5 ** depths.index(len(anchor)), len(anchor))
        while heap and not full():
            score, match, _, path, parent, model = heapq.heappop(heap)
            offer(model, path, add(parent, path[-1]), -score, -match)


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


TWO_TEXTS = [list(range(1, 11)), [1, 2, 3, 44, 55, 66, 77, 88, 99, 100]]


# ---- golden cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_two_continuations(match_type):
    trie = make(match_type=match_type)
    trie.add(TWO_TEXTS)
    tokens, parents, count, match = plain(trie.propose(grown(trie, [1, 2, 3]), 8))
    assert (count, match) == (8, 3)
    # BFS: level by level, the later text first. PROB: both continuations are worth 1/2 and keep it down each
    # unary path; of equal candidates the one offered first goes first.
    assert tokens == [3, 44, 4, 55, 5, 66, 6, 77]
    assert parents == [-1, 0, 0, 1, 2, 3, 4, 5]


def test_breadth_narrows_with_depth():
    trie = make(D=4, window=(1, 3), breadth=(1, 4))
    trie.add([[1, t, t + 100] for t in (10, 11, 12, 13, 14)] + [[1, 14, 115]])
    # Breadths by depth 0..3 are 4, 3, 2, 1: three followers of 1 and two of (1, 14).
    tokens, parents, count, match = plain(trie.propose(grown(trie, [9, 1]), 16))
    assert (tokens[:count], match) == ([1, 14, 13, 12, 115, 114, 113, 112], 1)
    assert parents[:count] == [-1, 0, 0, 0, 1, 1, 2, 3]


def test_recency_and_frequency():
    texts = [[5, 6, 1], [5, 6, 1], [5, 6, 2], [5, 6, 3], [5, 6, 2]]
    for match_type, followers in (("BFS", [2, 3, 1]), ("PROB", [2, 1, 3])):  # counts: 1 -> 2, 2 -> 2, 3 -> 1
        trie = make(match_type=match_type)
        trie.add(texts)
        draft = trie.propose(grown(trie, [5, 6]), 4)
        assert draft.tokens.tolist() == [6, *followers] and draft.parents.tolist() == [-1, 0, 0, 0]


def test_an_occurrence_counts_once():
    whole, pieces = make(match_type="PROB"), make(match_type="PROB")
    text = [7, 1, 7, 2, 7, 2, 7, 1, 7, 3, 7]
    a, b = grown(whole, text), pieces.open()
    for token in text:
        pieces.extend(b, [token])
        pieces.propose(b, 8)
    assert whole.stats() == pieces.stats()
    assert plain(whole.propose(a, 8)) == plain(pieces.propose(b, 8))
    # After 7: twice 1, twice 2 (less recently), once 3; so 2/5, 2/5 and, level with them, the 7 below 1.
    assert plain(pieces.propose(b, 4)) == ([7, 1, 2, 7], [-1, 0, 0, 1], 4, 1)


def test_matches_of_several_lengths_merge():
    trie = make()
    trie.add([[8, 9, 1, 2], [9, 1, 3], [9, 4]])
    tokens, parents, count, match = plain(trie.propose(grown(trie, [8, 9]), 16))
    # (8, 9) offers 1 -> 2; (9) offers 4 and 1, and below the same 1 also 3.
    assert match == 2 and tokens[:count] == [9, 1, 2, 4, 3] and parents[:count] == [-1, 0, 1, 0, 1]


def test_prob_shorter_matches_compete():
    trie = make(match_type="PROB")
    trie.add([[8, 9, t] for t in (1, 2, 3, 4)] + [[9, 5]] * 12)
    # (8, 9): four at 1/4. (9), starting at 1/2: 5 has 12 of 16, so 3/8, and goes first.
    tokens, _, count, match = plain(trie.propose(grown(trie, [8, 9]), 3))
    assert (tokens, count, match) == ([9, 5, 4], 3, 2)


def test_prob_prefers_the_longer_match_of_equals():
    trie = make(match_type="PROB")
    trie.add([[8, 9, 1, 11], [8, 9, 1, 12], [8, 9, 2, 13], [8, 9, 2, 14]] + [[9, 5]] * 4)
    # After (8, 9): 2 and 1 at 1/2, what follows them at 1/4. After (9), from 1/2: 5 at 1/4 too, so it comes last.
    tokens, parents, count, _ = plain(trie.propose(grown(trie, [8, 9]), 8))
    assert (tokens, parents, count) == ([9, 2, 1, 14, 13, 12, 11, 5], [-1, 0, 0, 1, 1, 2, 2, 0], 8)


def test_nothing_matches():
    trie = make()
    trie.add([1, 2, 3])
    assert plain(trie.propose(grown(trie, [77]), 4)) == ([77, 0, 0, 0], [-1, 0, 0, 0], 1, 0)
    assert plain(trie.propose(grown(trie, [1, 3]), 4)) == ([3, 0, 0, 0], [-1, 0, 0, 0], 1, 0)
    with pytest.raises(ValueError, match="no token yet"):
        trie.propose(trie.open(), 4)


def test_match_window_and_budget():
    trie = make(window=(2, 3))
    trie.add([1, 2, 3, 4, 5, 6])
    assert trie.propose(grown(trie, [9, 4]), 4).match == 0  # only one token matches
    assert trie.propose(grown(trie, [3, 4]), 4).match == 2
    assert trie.propose(grown(trie, [1, 2, 3, 4]), 4).match == 3
    assert plain(trie.propose(grown(trie, [3, 4]), 1)) == ([4], [-1], 1, 2)
    assert trie.propose(grown(trie, [3, 4]), 64).count == 3


def test_a_text_continues_itself():
    trie = make()
    stream = grown(trie, [1, 2, 3, 4, 1, 2])
    tokens, parents, count, match = plain(trie.propose(stream, 4))
    assert (tokens, parents, count, match) == ([2, 3, 4, 1], [-1, 0, 1, 2], 4, 2)
    stream = grown(trie := make(D=5), [6] * 50)
    assert len(trie) == 5
    assert plain(trie.propose(stream, 8)) == ([6, 6, 6, 6, 6, 0, 0, 0], [-1, 0, 1, 2, 3, 0, 0, 0], 5, 4)


def test_streams_are_independent():
    trie = make(D=3)
    trie.add([[1, 2], [3, 4]])
    assert len(trie) == 6  # 1 12 2 3 34 4, and no 23
    a, b = trie.open(), trie.open()
    for i in range(3):
        trie.extend(a, [10 + i])
        trie.extend(b, [20 + i])
    assert trie.propose(grown(trie, [10]), 4).tokens.tolist() == [10, 11, 12, 0]
    assert trie.propose(grown(trie, [20]), 4).tokens.tolist() == [20, 21, 22, 0]


# ---- eviction -----------------------------------------------------------------------------------------------


def test_capacity_is_a_hard_bound_and_the_oldest_leave():
    trie = make(D=4, capacity=40)
    stream, rng = trie.open(), random.Random(0)
    for step in range(400):
        trie.extend(stream, [rng.randrange(30)])
        held = trie.stats()
        assert held["nodes"] <= 40 and held["tokens"] + held["evicted"] == step + 1
    assert trie.stats()["evicted"] > 300
    trie = make(D=3, window=(1, 2), capacity=9)
    trie.add([[1, 2, 3], [4, 5, 6]])  # 6 nodes; then 1 + 2 more fit, and for the 6 the oldest (1, 2, 3) leaves
    assert trie.stats() | {"bytes": 0} == dict(nodes=9, tokens=5, occurrences=5, streams=0, bytes=0, evicted=1)
    assert trie.propose(grown(trie, [1]), 2).match == 0


def test_repetition_is_bounded_too():
    trie = make(D=4, capacity=100)
    grown(trie, [1] * 1000)
    assert trie.stats()["tokens"] == 100 and len(trie) == 4


def test_an_open_stream_whose_text_was_evicted():
    trie = make(D=4, capacity=20)
    stream = grown(trie, [1, 2, 3])
    trie.add([[100 + i] for i in range(20)])
    assert trie.propose(stream, 4).match == 0
    trie.add([1, 2, 3, 4])  # the same words by another text: the stream matches them, though its own are gone
    assert plain(trie.propose(stream, 2)) == ([3, 4], [-1, 0], 2, 3)
    trie.extend(stream, [9])  # (1, 2, 3, 9) must not come back: its start was evicted
    assert trie.propose(grown(trie, [2, 3]), 4).tokens.tolist() == [3, 4, 0, 0]


def test_text_is_freed():
    trie = make(capacity=2_000)
    rng = np.random.default_rng(0)
    stream = grown(trie, rng.integers(0, 1000, 20_000))
    before = trie.stats()["bytes"]
    trie.extend(stream, rng.integers(0, 1000, 100_000))
    assert trie.stats()["bytes"] <= before * 1.5


def test_what_is_too_deep_to_draft_is_not_kept():
    trie = make(D=2, window=(1, 1), capacity=100)
    rng = np.random.default_rng(0)
    stream = grown(trie, rng.integers(0, 16, 10_000))
    before = trie.stats()["bytes"]
    trie.extend(stream, rng.integers(0, 16, 800_000))
    assert trie.stats()["bytes"] <= before * 1.5


# ---- random operations against the model ----------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("open")),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.just("extend"), st.integers(0, 9), st.lists(st.integers(0, 3), max_size=12)),
        st.tuples(st.just("extend"), st.integers(0, 9), st.lists(st.integers(0, 30), max_size=12)),
        st.tuples(st.just("add"), st.lists(st.integers(0, 3), max_size=20)),
        st.tuples(st.just("propose"), st.integers(0, 9), st.integers(1, 64)),
        st.tuples(st.just("propose"), st.integers(0, 9), st.integers(1, 64)),
        st.tuples(st.just("saveload")),
        st.tuples(st.just("reset")),
    ),
    min_size=5,
    max_size=60,
)


@st.composite
def parameters(draw):
    D = draw(st.integers(2, 7))
    low = draw(st.integers(1, D - 1))
    breadth = draw(st.integers(1, 4))
    return dict(
        D=D,
        window=(low, draw(st.integers(low, D - 1))),
        breadth=(breadth, draw(st.integers(breadth, 6))),
        capacity=draw(st.one_of(st.integers(2 * D, 6 * D), st.just(100_000))),
        match_type=draw(st.sampled_from(["BFS", "PROB"])),
    )


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(parameters(), operations)
def test_against_the_model(tmp_path_factory, params, steps):
    run_against_model(params, steps, tmp_path_factory.getbasetemp() / "trie")


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
@pytest.mark.parametrize("seed", range(6))
def test_long_runs_against_the_model(tmp_path, match_type, seed):
    """Longer texts than Hypothesis makes: wide nodes, many evictions, streams that sleep for a while."""
    rng = random.Random(seed)
    D = rng.choice([2, 4, 8])
    params = dict(
        D=D,
        window=(1, D - 1),
        breadth=(1, rng.choice([1, 2, 3])),
        match_type=match_type,
        capacity=rng.choice([4 * D, 300, 5000]),
    )
    steps = [("open",)] * 3
    for _ in range(400):
        ids = [min(int(rng.expovariate(0.2)), 60) for _ in range(rng.randrange(8))]
        which, n = rng.randrange(3), rng.choice([4, 16, 64])
        steps += rng.choices([("extend", which, ids), ("propose", which, n), ("add", ids)], [4, 3, 2])
        if rng.random() < 0.01:
            steps += [("saveload",)] + [("open",)] * 3
    proposals, grew = run_against_model(params, steps, tmp_path / "trie")
    assert proposals > 50 and grew > 20


def test_frequent_continuations_that_fall_behind():
    trie = make(D=2, window=(1, 1), breadth=(1, 1), capacity=60, match_type="PROB")
    for _ in range(5):
        trie.add([[7, 1], [7, 2], [7, 3], [7, 4]])
    trie.add([[7, 5]] * 4)
    stream = grown(trie, [7])
    assert trie.propose(stream, 2).tokens.tolist() == [7, 4]
    trie.add([50] * (60 - 49 + 16))  # the first two of each of 1 to 4 leave: three are left of each, but four of 5
    assert trie.stats()["evicted"] == 16
    assert trie.propose(stream, 2).tokens.tolist() == [7, 5]


@pytest.mark.parametrize("seed", range(4))
def test_many_continuations_against_the_model(tmp_path, seed):
    """One token with many followers, whose order by count changes as occurrences come and leave."""
    rng = random.Random(seed)
    params = dict(D=3, window=(1, 1), breadth=(1, 1 + seed % 2), capacity=(150, 400)[seed // 2], match_type="PROB")
    steps = [("open",)]
    for _ in range(600):
        ids = [i for _ in range(rng.randrange(1, 4)) for i in (99, min(int(rng.expovariate(0.12)), 60))]
        steps += [("add", ids), ("extend", 0, [99]), ("propose", 0, 4)]
    proposals, grew = run_against_model(params, steps, tmp_path / "trie")
    assert proposals == grew == 600


def run_against_model(params, steps, path):
    trie, model, proposals, grew = make(**params), Model(**params), 0, 0
    streams = []  # open ones: (number in the trie, number in the model)
    for kind, *args in steps:
        if kind in ("close", "extend", "propose"):
            if not streams:
                continue
            ours, theirs = streams[args[0] % len(streams)]
        if kind == "open":
            streams.append((trie.open(), model.open()))
        elif kind == "add":
            trie.add(args[0])
            other = model.open()
            model.extend(other, args[0])
            model.close(other)
        elif kind in ("saveload", "reset"):
            if kind == "reset":
                trie.reset()
                model.clear()
            else:
                trie.save(path)
                trie = make(**params)
                trie.load(path)
                model.streams.clear()
                model.evicted = 0
            streams.clear()
        elif kind == "close":
            streams.remove((ours, theirs))
            trie.close(ours)
            model.close(theirs)
        elif kind == "extend":
            trie.extend(ours, args[1])
            model.extend(theirs, args[1])
        elif kind == "propose" and model.streams[theirs][0]:
            got = plain(trie.propose(ours, args[1]))
            assert got == model.propose(theirs, args[1])
            check_tree(*got[:3])
            proposals += 1
            grew += got[2] > 1
        held = trie.stats()
        assert held["nodes"] == len(model.count) <= params["capacity"]
        assert held["tokens"] == len(model.held) and held["evicted"] == model.evicted
        assert held["streams"] == len(model.streams)
    return proposals, grew


# ---- overlays -----------------------------------------------------------------------------------------------

texts = st.lists(st.integers(0, 3), max_size=12)
turns = st.lists(
    st.one_of(
        st.tuples(st.just("shared"), texts),
        st.tuples(st.just("private"), st.integers(0, 1), texts),
        st.tuples(st.just("private"), st.integers(0, 1), texts),
        st.tuples(st.just("renew"), st.integers(0, 1)),
    ),
    min_size=5,
    max_size=30,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(parameters(), turns, st.integers(2, 64))
def test_overlays_draft_from_both_and_leave_no_trace(params, steps, n):
    """What is read into overlays changes no draft of the trie that they lie on: the model never sees it."""
    trie, model = make(**params), Model(**params)
    shared = trie.open(), model.open()

    def overlay():
        above, slow = trie.overlay(), Model(**params)
        return above, slow, above.open(), slow.open()

    overlays = [overlay(), overlay()]
    for kind, *args in steps:
        if kind == "renew":
            overlays[args[0]] = overlay()
        elif kind == "shared":
            trie.extend(shared[0], args[0])
            model.extend(shared[1], args[0])
        else:
            above, slow, ours, theirs = overlays[args[0]]
            above.extend(ours, args[1])
            slow.extend(theirs, args[1])
            if slow.streams[theirs][0]:
                got = plain(above.propose(ours, n))
                assert got == slow.propose(theirs, n, base=model)
                check_tree(*got[:3])
        if model.streams[shared[1]][0]:
            assert plain(trie.propose(shared[0], n)) == model.propose(shared[1], n)
        assert trie.stats()["nodes"] == len(model.count) and trie.stats()["evicted"] == model.evicted


@pytest.mark.parametrize("match_type", ["BFS", "PROB"])
def test_an_overlay(match_type):
    trie = make(match_type=match_type)
    trie.add([1, 2, 3, 4, 5])
    above = trie.overlay()
    above.add([1, 2, 30, 40])
    stream = grown(above, [1, 2])
    draft = above.propose(stream, 6)
    children = [token for token, parent in zip(draft.tokens.tolist(), draft.parents.tolist()) if parent == 0]
    assert set(children) == {3, 30} and draft.match == 2
    assert plain(trie.propose(grown(trie, [1, 2]), 6))[2] == 4
    with pytest.raises(ValueError, match="an overlay is not made of another overlay"):
        above.overlay()
    del trie  # the overlay keeps what it lies on
    assert plain(above.propose(stream, 6)) == plain(draft)
    above.reset()
    assert plain(above.propose(grown(above, [1, 2]), 6))[0] == [2, 3, 4, 5, 0, 0]


# ---- batches ------------------------------------------------------------------------------------------------


def outputs(batch, n):
    return [torch.full(shape, -7) for shape in ((batch, n), (batch, n), (batch,), (batch,))]


def test_advance_is_extend_and_propose():
    rng = np.random.default_rng(1)
    batch, n, size = 4, 16, 200
    together, apart = make(), make()
    # A view of a wider buffer, so that the row stride is not the row length.
    tokens = torch.from_numpy(rng.integers(0, 6, (batch, size + 9)))[:, :size]
    streams = torch.tensor([together.open() for _ in range(batch)])
    other = [apart.open() for _ in range(batch)]
    streams[2] = -1
    committed = torch.full((batch,), 5)
    while int(committed.max()) <= size:
        out = outputs(batch, n)
        together.advance(streams, tokens, committed, *out)
        for b in range(batch):
            got = out[0][b].tolist(), out[1][b].tolist(), int(out[2][b]), int(out[3][b])
            if b == 2:
                last = int(tokens[b, committed[b] - 1])
                assert got == ([last] + [0] * (n - 1), [-1] + [0] * (n - 1), 1, 0)
                continue
            apart.extend(other[b], tokens[b, apart.length(other[b]) : committed[b]])
            assert got == plain(apart.propose(other[b], n))
            check_tree(*got[:3])
        committed += torch.from_numpy(rng.integers(0, 5, batch))
    assert together.stats() == apart.stats() and len(together) > 1000
    assert int(out[2].sum()) > 2 * batch


def test_advance_refuses_before_it_inserts():
    trie = make(vocab_size=50)
    streams, tokens = torch.tensor([trie.open(), trie.open()]), torch.ones(2, 8, dtype=torch.int64)
    committed, out = torch.tensor([4, 4]), outputs(2, 4)
    trie.advance(streams, tokens, committed, *out)
    before = trie.stats()

    def refused(error, match, **change):
        args = dict(streams=streams, tokens=tokens, committed=committed)
        args |= dict(zip(("out_tokens", "out_parents", "out_count", "out_match"), out))
        with pytest.raises(error, match=match):
            trie.advance(**(args | change))
        assert trie.stats() == before

    refused(ValueError, "only 8 columns", committed=torch.tensor([6, 9]))
    refused(ValueError, r"committed\[1\] is 3", committed=torch.tensor([6, 3]))
    refused(ValueError, r"committed\[1\] is 0", streams=torch.tensor([0, -1]), committed=torch.tensor([6, 0]))
    refused(ValueError, "stream 9 is not open", streams=torch.tensor([0, 9]), committed=torch.tensor([6, 6]))
    foreign = tokens.clone()
    foreign[1, 5] = 50
    refused(ValueError, r"token id 50 .*\[0, 50\)", tokens=foreign, committed=torch.tensor([6, 6]))
    refused(TypeError, "committed must be int64", committed=committed.int())
    refused(TypeError, "streams must be an int64 CPU tensor", streams=[0, 1])
    refused(ValueError, r"streams must have shape \[2\]", streams=torch.tensor([0]))
    refused(ValueError, "out_parents must have shape", out_parents=torch.zeros(2, 5, dtype=torch.int64))
    refused(ValueError, "out_count must be contiguous", out_count=torch.zeros(4, dtype=torch.int64)[::2])
    refused(ValueError, "contiguous rows", tokens=torch.ones(8, 2, dtype=torch.int64).T)
    refused(ValueError, "contiguous rows", tokens=torch.ones(1, 8, dtype=torch.int64).expand(2, 8))
    refused(ValueError, "from 1 to 64", out_tokens=torch.zeros(2, 65, dtype=torch.int64))


# ---- files --------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    for match_type in ("BFS", "PROB"):
        trie = make(match_type=match_type, capacity=30_000)
        rng = np.random.default_rng(2)
        texts = [rng.zipf(1.5, 3000).clip(0, 500) for _ in range(4)]
        trie.add(texts)
        assert trie.stats()["evicted"] > 100
        for text in texts:
            grown(trie, text[:50])
        trie.save(tmp_path / "trie")
        assert [p.name for p in tmp_path.iterdir()] == ["trie"]
        again = make(match_type=match_type, capacity=30_000)
        again.add([1, 2, 3])
        stale = again.open()
        again.load(str(tmp_path / "trie"))
        with pytest.raises(ValueError, match="not open"):
            again.extend(stale, [1])
        assert again.open() > stale
        ours, theirs = trie.stats(), again.stats()
        assert (ours["nodes"], ours["tokens"]) == (theirs["nodes"], theirs["tokens"])
        trees = 0
        for i in range(0, 3000, 40):  # and they stay alike while both go on growing and evicting
            a, b = (plain(t.propose(grown(t, texts[i % 4][i : i + 20]), 32)) for t in (trie, again))
            assert a == b
            trees += a[2] > 1
        assert trees > 30
        assert len(trie) == len(again)


def test_touches_of_what_was_evicted_are_saved(tmp_path):
    """A stream that slept touches (5, 1) last; its occurrence then leaves, and 1 stays the most recent."""
    trie = make(D=3, window=(1, 2), capacity=20)
    sleeper = grown(trie, [5])
    trie.add([[2] * 8, [5, 1], [5, 2]])
    trie.extend(sleeper, [1])
    trie.close(sleeper)
    trie.add([2] * 7)
    assert trie.stats()["evicted"] == 1
    trie.save(tmp_path / "trie")
    again = make(D=3, window=(1, 2), capacity=20)
    again.load(tmp_path / "trie")
    for one in (trie, again):
        assert one.propose(grown(one, [5]), 3).tokens.tolist() == [5, 1, 2]


def test_damaged_files(tmp_path):
    trie = make(D=4, capacity=50)
    trie.add([[1, 2, 3, 2, 1, 2], [2, 3, 4]])
    good, bad = tmp_path / "good", tmp_path / "bad"
    trie.save(good)
    data = good.read_bytes()
    target = make(D=4, capacity=50)
    target.add([5, 6, 7])
    before, draft = target.stats(), plain(target.propose(stream := grown(target, [5]), 4))
    before = target.stats()

    def refused(content, reason="cannot load this n-gram trie"):
        bad.write_bytes(content)
        with pytest.raises(ValueError, match=reason) as caught:
            target.load(bad)
        assert str(bad) in str(caught.value)
        assert target.stats() == before

    assert len(data) > 100
    for cut in range(len(data)):
        refused(data[:cut])
    for i in range(len(data)):
        refused(data[:i] + bytes([data[i] ^ 0x41]) + data[i + 1 :])
    refused(data + b"\0", "announces")
    refused(b"", "not written by")
    refused(b"PK\3\4" + bytes(200), "not written by")
    refused(data[:8] + struct.pack("<I", 2) + data[12:], "version is 2")
    assert plain(target.propose(stream, 4)) == draft
    with pytest.raises(FileNotFoundError):
        target.load(tmp_path / "absent")
    target.load(good)
    assert len(target) == len(trie)


# ---- corpora, the stores of a GPU, and their files ------------------------------------------------------------


def corpus_of(*texts, capacity=1000, vocab_size=100):
    corpus = NgramCorpus(capacity, vocab_size, torch.device("cpu"))
    corpus.add([list(text) for text in texts])
    return corpus


def held(corpus):
    return corpus.text[: int(corpus.length)].tolist()


def interleaved(*texts):
    """A trie whose log has the texts token by token in turn."""
    trie = make(D=4)
    streams = [trie.open() for _ in texts]
    for place in range(max(map(len, texts))):
        for stream, text in zip(streams, texts):
            trie.extend(stream, text[place : place + 1])
    return trie


TEXTS = ([1, 2, 3, 4], [9], [5, 6, 7, 1, 2, 8])


def test_corpora_and_tries_read_each_others_files(tmp_path):
    ended = [token for text in TEXTS for token in (*text, -1)]
    stores = {"corpus": corpus_of(*TEXTS), "trie": make(D=4), "interleaved": interleaved(*TEXTS)}
    stores["trie"].add([list(text) for text in TEXTS])
    for name, store in stores.items():
        store.save(tmp_path / name)
        corpus = corpus_of([50, 51])
        corpus.load(tmp_path / name)
        assert held(corpus) == ended and len(corpus) == len(ended)
        corpus.add([60])
        assert held(corpus) == [*ended, 60, -1]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(stores)

    trie = make(D=4, vocab_size=100)
    trie.add([50, 51])
    trie.load(tmp_path / "corpus")
    for text in ([1, 2], [6, 7], [3]):
        ours, theirs = (plain(one.propose(grown(one, text), 9)) for one in (trie, stores["trie"]))
        assert ours == theirs
    assert trie.propose(grown(trie, [50]), 9).count == 1


def test_empty_stores_are_saved_and_loaded(tmp_path):
    for store in (corpus_of(), make(D=4)):
        store.save(tmp_path / "file")
        for other in (corpus_of([1, 2]), make(D=4)):
            other.load(tmp_path / "file")
            assert other.stats()["tokens"] == 0


def test_damaged_corpora(tmp_path):
    path = tmp_path / "corpus"
    corpus_of(*TEXTS).save(path)
    good = path.read_bytes()
    damaged = [good[:n] for n in range(0, len(good), 3)] + [good + b"x", b"", b"PK\x03\x04" + good[4:]]
    damaged += [good[:i] + bytes([good[i] ^ 1 << i % 8]) + good[i + 1 :] for i in range(len(good))]
    for data in damaged:
        path.write_bytes(data)
        for store in (corpus_of([1, 2]), make(D=4)):
            before = store.stats()
            with pytest.raises(ValueError, match=f"{path}: cannot load this n-gram (corpus|trie): "):
                store.load(path)
            assert store.stats() == before


def test_corpora_that_do_not_fit(tmp_path):
    path = tmp_path / "corpus"
    corpus_of(*TEXTS).save(path)
    with pytest.raises(ValueError, match=r"its texts take 14 tokens, this corpus holds 13: pass capacity=14 or more"):
        corpus_of(capacity=13).load(path)
    for store in (corpus_of(vocab_size=9), make(D=4, vocab_size=9)):
        with pytest.raises(ValueError, match="holds token id 9, outside the vocabulary"):
            store.load(path)
    with pytest.raises(ValueError, match="capacity must be from 2"):
        corpus_of(capacity=1)


def test_a_corpus_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "corpus"
    corpus_of([1, 2]).save(path)
    monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        corpus_of(*TEXTS).save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]
    corpus = corpus_of()
    corpus.load(path)
    assert held(corpus) == [1, 2, -1]


def test_texts_leave_a_corpus_again():
    corpus = corpus_of([1, 2], capacity=20)
    places = corpus.append(torch.tensor([3, 4, 5]))
    corpus.add([6])
    corpus.remove(places)
    assert held(corpus) == [1, 2, -1, 6, -1]
    places = corpus.append(torch.tensor([7] * 4))
    corpus.add([8] * 6)  # the oldest half leaves
    corpus.add([9] * 3)
    before = held(corpus)
    corpus.remove(places)
    assert 7 in before and 7 not in held(corpus) and held(corpus)[-4:] == [9, 9, 9, -1]
    corpus.reset()
    corpus.add([1])
    corpus.remove(places)  # it has left long since
    assert held(corpus) == [1, -1]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), max_size=9)), max_size=30))
def test_corpora_without_what_was_removed(steps):
    """As long as nothing has to leave, a corpus is one that never had the removed texts."""
    corpus, other = corpus_of(), corpus_of()
    for private, ids in steps:
        places = corpus.append(torch.tensor(ids, dtype=torch.int64))
        if private:
            corpus.remove(places)
        else:
            other.add(ids)
        assert held(corpus) == held(other) and len(corpus) == len(other)


def test_files_that_do_not_fit(tmp_path):
    path = tmp_path / "trie"
    trie = make(D=4, capacity=500)
    trie.add(list(range(100)))
    trie.save(path)
    for other, reason in (
        (make(D=5, capacity=500), "branch_length is 4, this trie's 5"),
        (make(D=4, capacity=300), "more than this trie's capacity"),
        (make(D=4, capacity=500, vocab_size=99), "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=reason):
            other.load(path)
        assert len(other) == 0
    with pytest.raises(OSError):
        trie.save(tmp_path / "no" / "such" / "folder")


def test_contradictory_snapshots_are_refused():
    """Behind the checksum: what a hand-made file could hold."""
    trie = make(D=3, window=(1, 2))
    trie.add([[1, 2], [1, 3], [1, 2, 3]])
    nodes, tokens, links, order = trie._core.snapshot()
    assert order == struct.pack("<2i", 2, 3)
    for change, reason in (
        ((nodes + 1, tokens, links, order), "number of nodes"),
        ((nodes, tokens, links[:-4], order), "one link for each"),
        ((nodes, tokens, links[:-4] + struct.pack("<I", 1), order), "links"),
        ((nodes, tokens, struct.pack("<7I", 2, 1, 1, 0, 1, 1, 0), order), "links|number"),
        ((nodes, tokens, links, order[:4]), "too short"),
        ((nodes, tokens, links, order + order), "too long"),
        ((nodes, tokens, links, order[:4] * 2), "sibling order"),
        ((nodes, tokens, links, struct.pack("<2i", 2, 9)), "sibling order"),
        ((nodes, struct.pack("<i", -1) + tokens[4:], links, order), "vocabulary"),
    ):
        with pytest.raises(ValueError, match=reason):
            trie._core.restore(*change)
        assert len(trie) == nodes
    trie._core.restore(nodes, tokens, links, order)
    assert len(trie) == nodes


# ---- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, bad",
    [
        ("branch_length", [1, 257, 0, -1]),
        ("min_match_window_size", [0, 18, 13]),
        ("max_match_window_size", [0, 18]),
        ("min_bfs_breadth", [0, 11]),
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


# ---- threads ------------------------------------------------------------------------------------------------


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
