"""Random operations on a trie against a model made of plain dictionaries: whole runs, overlays and batches."""

import heapq
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tries import check_tree, grown, make, outputs, plain


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


def test_an_overlay_keeps_what_it_lies_on():
    trie = make()
    trie.add([1, 2, 3, 4, 5])
    above = trie.overlay()
    above.add([1, 2, 30, 40])
    with pytest.raises(ValueError, match="an overlay is not made of another overlay"):
        above.overlay()
    del trie
    assert plain(above.propose(grown(above, [1, 2]), 6)) == ([2, 30, 40, 3, 4, 5], [-1, 0, 1, 0, 3, 4], 6, 2)
    above.reset()
    assert plain(above.propose(grown(above, [1, 2]), 6))[0] == [2, 3, 4, 5, 0, 0]


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
    refused(ValueError, "tokens must be contiguous", tokens=torch.ones(8, 2, dtype=torch.int64).T)
    refused(ValueError, "rows that do not overlap", tokens=torch.ones(1, 8, dtype=torch.int64).expand(2, 8))
    refused(ValueError, "1 to 64 nodes", out_tokens=torch.zeros(2, 65, dtype=torch.int64))
