"""Schedules against a slow growth in Python, over a draft whose output depends on each node's whole path; drawn chains
by distribution. runtime/test_sampling.py has the distribution of what is accepted of them."""

import math

import numpy
import pytest
import torch
from distributions import FITS, p_value
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile import compat
from spec_compile.drafters.trees import grow as drawing
from spec_compile.drafters.trees.grow import EAGLE1_CHOICES, Schedule, StaticTree, draw_chain, grow
from spec_compile.kernels.top_logits import top_logits
from spec_compile.runtime.verify.sample import accept_chain, chain_numbers, counter

INF = math.inf
GPU = torch.cuda.is_available()


# --- a draft that is a table


class Draft:
    """Logits of a path of tokens from a table [B, P, Vd] of a state, which the hidden states carry on, plus a sum over
    the nodes that a row sees, as keys and values would give it."""

    def __init__(self, table):
        self.table = table
        self.keys = table.new_empty(len(table), 0, dtype=torch.int64)
        self.calls = []

    def begin(self):
        """Logits [B, Vd] and hidden [B, 2] at the last committed slot."""
        ones = torch.ones(len(self.table), device=self.table.device)
        return self.table[:, 1 % self.table.shape[1]], torch.stack([ones, 3 * ones], dim=1)

    def __call__(self, tokens, hidden, ancestors, depth, offset, wanted):
        self.calls.append((tokens.shape[1], offset, wanted))
        number = torch.arange(tokens.shape[1], device=tokens.device)
        keys = (tokens + 1) * depth**2
        sees = ancestors[:, :, None] >> number & 1
        total = self.keys[:, :offset].sum(dim=1, keepdim=True) + (sees * keys[:, None]).sum(dim=2)
        self.keys = torch.cat([self.keys[:, :offset], keys], dim=1)
        state = (hidden[:, :, 0].long() * 31 + tokens + 7) % 1021
        carried = (hidden[:, :, 1] * 5 + tokens) % 1021
        row = torch.arange(len(tokens), device=tokens.device)[:, None]
        logits = self.table[row, (state + carried.long() + total) % self.table.shape[1]]
        return torch.stack([state.float(), carried], dim=2), logits[:, -wanted:]


def logits_after(table, path):
    """What a `Draft` of one row gives after a path of tokens below the root."""
    state, carried, total = 1, 3, 0
    for depth, token in enumerate(path, 1):
        state, carried, total = (
            (state * 31 + token + 7) % 1021,
            (carried * 5 + token) % 1021,
            total + (token + 1) * depth**2,
        )
    return table[(state + carried + total) % len(table)] if path else table[1 % len(table)]


def children(table, path, ranks, temperature, draft_to_target):
    """[(log-probability, token)] of the likeliest children."""
    logprobs, ids = top_logits(logits_after(table, path)[None], ranks, temperature)
    return list(zip(logprobs[0].numpy(), (int(draft_to_target[i]) for i in ids[0])))


def slow_tree(schedule, table, draft_to_target):
    """[(path, score)] of the nodes of an EAGLE-2 tree, or of a chain, best first."""
    candidates, frontier = {(): numpy.float32(0)}, [()]
    for _ in range(schedule.num_steps):
        found = {}
        for path in frontier:
            for logprob, token in children(table, path, schedule.topk, schedule.score_temperature, draft_to_target):
                found[*path, token] = candidates[path] + logprob
        candidates |= found
        frontier = sorted(found, key=lambda path: -found[path])[: schedule.topk]
    best = sorted(candidates, key=lambda path: -candidates[path])
    return [(path, candidates[path]) for path in best[: schedule.nodes]]


def slow_static(choices, table, draft_to_target):
    """[(path, score)] of a static tree, level by level."""
    nodes = {(): ((), numpy.float32(0))}
    for ranks in sorted(choices, key=lambda ranks: (len(ranks), ranks)):
        path, score = nodes[tuple(ranks[:-1])]
        logprob, token = children(table, path, ranks[-1] + 1, 1.0, draft_to_target)[-1]
        nodes[tuple(ranks)] = (*path, token), score + logprob
    return list(nodes.values())


def read(tokens, parents, scores):
    """[(path, score)] of one row's nodes, checked to be a tree whose parents come first and whose siblings differ."""
    paths = [()]
    assert parents[0] == -1 and scores[0] == 0
    for number, (token, parent) in enumerate(zip(tokens.tolist()[1:], parents.tolist()[1:]), 1):
        assert 0 <= parent < number
        assert scores[number] <= scores[parent]
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths)
    return list(zip(paths, scores.numpy()))


def check(schedule, table, draft_to_target=None):
    batch, _, vocab = table.shape
    root = torch.arange(batch) + 50
    draft = Draft(table)
    tokens, parents, scores = grow(schedule, root, *draft.begin(), draft, draft_to_target)
    assert tokens.shape == parents.shape == scores.shape == (batch, schedule.nodes)
    assert tokens.dtype == parents.dtype == torch.int64 and scores.dtype == torch.float32
    assert torch.equal(tokens[:, 0], root)
    for row in range(batch):
        ids = range(vocab) if draft_to_target is None else draft_to_target.tolist()
        if isinstance(schedule, Schedule):
            expected = slow_tree(schedule, table[row], ids)
        else:
            expected = slow_static(schedule.choices, table[row], ids)
        assert read(tokens[row], parents[row], scores[row]) == expected
    return draft


VALUES = {
    "any": lambda shape: 3 * torch.randn(shape),
    "equal": lambda shape: torch.zeros(shape),
    "ties": lambda shape: torch.randint(-1, 2, shape).float(),
    "few": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.8, -INF),
    "none": lambda shape: torch.full(shape, -INF),
    "certain": lambda shape: torch.randn(shape).scatter(-1, torch.randint(shape[-1], (*shape[:-1], 1)), 1e4),
    "broken": lambda shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.3, math.nan),
}


@st.composite
def tables(draw, least):
    """Logits [B, P, Vd] with Vd >= least, and the target's ids of the draft's, or None."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    vocab = draw(st.integers(max(5, least), 200))
    table = VALUES[draw(st.sampled_from(list(VALUES)))]((draw(st.integers(1, 3)), 97, vocab))
    table = table.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))
    return table, torch.randperm(3 * vocab)[:vocab] if draw(st.booleans()) else None


@st.composite
def dynamic(draw):
    topk = draw(st.integers(1, 10))
    steps = draw(st.integers(1, min(7, 1 + 64 // topk)))
    most = min(64, Schedule(steps, topk, 2 if steps * topk > 1 else None).candidates + 1)
    return Schedule(steps, topk, draw(st.integers(2, most)), draw(st.sampled_from([1.0, 0.5, 2])))


@settings(max_examples=150)
@given(st.data())
def test_trees_of_any_shape(data):
    schedule = data.draw(dynamic())
    check(schedule, *data.draw(tables(least=schedule.topk)))


@pytest.mark.parametrize("shape", [(7, 10, 60), (1, 16, 9), (63, 1, 64)])
def test_the_largest_trees(shape):
    check(Schedule(*shape), VALUES["any"]((2, 97, 40)))


@st.composite
def shapes(draw):
    """Choices of a static tree: every new node hangs on an old one."""
    choices = {()}
    for _ in range(draw(st.integers(1, 63))):
        parent = draw(st.sampled_from(sorted(choices)))
        choices.add((*parent, draw(st.integers(0, 6 if draw(st.booleans()) else 0))))
    choices = sorted(choices - {()})
    return draw(st.permutations(choices))


def static(choices):
    tree = StaticTree(choices)
    tree.choices = [tuple(path) for path in choices]
    return tree


@settings(max_examples=100)
@given(shapes(), tables(least=7))
def test_static_trees_of_any_shape(choices, table):
    check(static(choices), *table)


@pytest.mark.parametrize("choices", [[[0]], [[1]], [[0] * n for n in range(1, 64)], EAGLE1_CHOICES], ids=len)
def test_static_trees(choices):
    check(static(choices), VALUES["any"]((2, 97, 20)))


def test_the_tree_of_eagle_1():
    """The widths of the levels, and that the default is it."""
    tree = StaticTree()
    assert tree.nodes == 26 and tree.num_steps == 5
    assert [sum(len(path) == level for path in EAGLE1_CHOICES) for level in range(1, 6)] == [4, 8, 8, 3, 2]
    assert EAGLE1_CHOICES[:4] == [(0,), (1,), (2,), (3,)] and (1, 0, 0) in EAGLE1_CHOICES
    assert tree.parents.tolist()[:13] == [-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 4]


def test_forwards_of_the_draft():
    """Rows, offset and wanted rows of each: a chain goes on slot by slot, a tree feeds all its frontiers anew."""
    table = torch.randn(1, 97, 20)
    assert check(Schedule(4, 1), table).calls == [(1, 0, 1), (1, 1, 1), (1, 2, 1)]
    assert check(Schedule(6, 1, 3), table).calls == [(1, 0, 1)]
    assert check(Schedule(4, 3, 5), table).calls == [(3, 0, 3), (6, 0, 3), (9, 0, 3)]
    assert check(Schedule(1, 4), table).calls == []
    assert check(static(EAGLE1_CHOICES), table).calls == [(4, 0, 4), (8, 0, 4), (9, 0, 1), (10, 0, 1)]


@settings(max_examples=100)
@given(st.data())
def test_the_first_nodes_take_fewer_forwards(data):
    whole = data.draw(dynamic())
    table, draft_to_target = data.draw(tables(least=whole.topk))
    few = whole.first(data.draw(st.integers(2, whole.nodes)))
    root, drafts, trees = torch.arange(len(table)), [], []
    for schedule in (whole, few):
        drafts.append(Draft(table))
        trees.append(grow(schedule, root, *drafts[-1].begin(), drafts[-1], draft_to_target))
    for all_nodes, first in zip(*trees):
        assert torch.equal(all_nodes[:, : few.nodes], first)
    levels = min(whole.num_steps, few.nodes - 1)
    assert few.num_steps == levels and drafts[1].calls == drafts[0].calls[: levels - 1]
    assert whole.first(None) is whole


# --- options


def test_defaults():
    nodes = {(5, 1): 6, (1, 3): 4, (2, 2): 7, (5, 4): 64}
    assert {shape: Schedule(*shape).nodes for shape in nodes} == nodes


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(num_steps=0), "num_steps must be from 1 to 63"),
        (dict(num_steps=64, topk=1), "num_steps must be from 1 to 63"),
        (dict(topk=0), "topk must be from 1 to 16"),
        (dict(topk=17), "topk must be from 1 to 16"),
        (dict(num_draft_tokens=1), "num_draft_tokens must be from 2 to 64"),
        (dict(num_draft_tokens=65), "num_draft_tokens must be from 2 to 64"),
        (dict(num_steps=3, topk=1, num_draft_tokens=5), r"at most 4 = num_steps \+ 1 .*lower it"),
        (dict(num_steps=2, topk=2, num_draft_tokens=8), "at most 7 = .*raise num_steps or topk"),
        (dict(num_steps=8, topk=10), r"\(num_steps - 1\) \* topk must be at most 64.*70: lower"),
        (dict(score_temperature=0), "score_temperature must be positive"),
        (dict(score_temperature=math.nan), "score_temperature must be positive"),
        (dict(num_steps=2.0), "num_steps"),
        (dict(topk=True), "topk"),
        (dict(score_temperature="1"), "score_temperature"),
    ],
)
def test_refused_values(options, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Schedule(**options)


@pytest.mark.parametrize(
    "choices, words",
    [
        ([], "tree_choices must be from 1 to 63"),
        ([[0], [0]], "once"),
        ([[], [0]], "once"),
        ([[0], [1, 0]], r"add \[1\], of \[1, 0\]"),
        ([[0], [16]], "a rank in tree_choices must be from 0 to 15"),
        ([[-1]], "a rank in tree_choices must be from 0 to 15"),
        ([[i] for i in range(16)] + [[i, j] for i in range(16) for j in range(3)], "tree_choices must be from 1 to 63"),
    ],
)
def test_refused_choices(choices, words):
    with pytest.raises(ValueError, match=words):
        StaticTree(choices)


def test_refused_logits():
    table = torch.zeros(1, 5, 3)
    root, draft = torch.zeros(1).long(), Draft(table)
    with pytest.raises(ValueError, match="at most the 3 logits"):
        grow(Schedule(2, 4), root, *draft.begin(), draft)
    drawn = torch.ones(1), 0, root, root
    with pytest.raises(ValueError, match="topk must be 1"):
        draw_chain(Schedule(2, 4), root, *draft.begin(), draft, *drawn, 3)
    with pytest.raises(ValueError, match="vocab_size = 4"):
        draw_chain(Schedule(2, 1), root, *draft.begin(), draft, *drawn, 4)


# --- drawn chains


VOCAB, DRAFTED = 5, torch.tensor([4, 0, 2, 1])
"""The target's tokens, and those of them that the draft knows."""


def own(path):
    return [DRAFTED.tolist().index(token) for token in path]


def drawn(table, temperature, schedule, rows, seed=5, **options):
    draft = Draft(table.expand(rows, -1, -1))
    root = torch.full((rows,), 3)
    place = torch.full((rows,), 2)
    temperature = torch.full((rows,), temperature)
    return draw_chain(schedule, root, *draft.begin(), draft, temperature, seed, torch.arange(rows), place, **options)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_chains_are_drawn_from_the_draft(temperature):
    """Each token given all before it; probs are the distributions it was drawn from, in the target's ids."""
    table = torch.randn(1, 97, 4)
    table[0, ::3, 2] = -INF
    rows = 40_000
    tokens, parents, probs = drawn(table, temperature, Schedule(3, 1), rows, vocab_size=VOCAB, draft_to_target=DRAFTED)
    assert probs.shape == (rows, 4, VOCAB) and probs.dtype == torch.float32
    assert parents[0].tolist() == [-1, 0, 1, 2] and (tokens[:, 0] == 3).all() and not probs[:, 3].any()
    assert len({tuple(row) for row in tokens.tolist()}) > 20
    seen = 0
    for level in (1, 2, 3):
        for path in {tuple(row) for row in tokens[:, 1:level].tolist()}:
            there = (tokens[:, 1:level] == torch.tensor(path)).all(dim=1)
            q = torch.zeros(VOCAB).scatter(0, DRAFTED, (logits_after(table[0], path) / temperature).softmax(0))
            torch.testing.assert_close(probs[there, level - 1], q.expand(int(there.sum()), -1))
            counts = tokens[there, level].bincount(minlength=VOCAB)
            assert p_value(counts[None], int(there.sum()) * q[None]) > FITS
            seen += 1
    assert seen > 10


def test_temperature_0_is_the_argmax():
    table = VALUES["ties"]((1, 97, 4)).repeat(2, 1, 1)
    table[:, ::4] = math.nan
    draft, root = Draft(table), torch.tensor([3, 3])
    options = torch.tensor([0.0, 1.0]), 5, torch.arange(2), torch.tensor([0, 0])
    tokens, _, probs = draw_chain(Schedule(7, 1), root, *draft.begin(), draft, *options, VOCAB, DRAFTED)
    draft = Draft(table)
    expected, _, _ = grow(Schedule(7, 1), root, *draft.begin(), draft, DRAFTED)
    assert torch.equal(tokens[0], expected[0])
    assert torch.equal(probs[0, :-1], torch.nn.functional.one_hot(expected[0, 1:], VOCAB).float())
    assert probs.isfinite().all() and (probs[1, :-1].amax(dim=1) < 1).any()


def test_no_number_is_taken_twice(monkeypatch):
    """By drawn chains that begin at any place of two rows, and by what tests them."""
    taken, uniform = [], drawing.uniform
    monkeypatch.setattr(drawing, "uniform", lambda *args: taken.append(uniform(*args)) or taken[-1])
    place = torch.arange(30).repeat(2)
    rows = torch.arange(2).repeat_interleave(30)
    draft, ones = Draft(torch.randn(60, 97, VOCAB)), torch.ones(60)
    draw_chain(Schedule(7, 1), place * 0, *draft.begin(), draft, ones, 9, rows, place, VOCAB)
    tests = chain_numbers(torch.full_like(rows, 9), rows, place, 8)
    every = torch.cat([tests.flatten(), *taken])
    assert len(every) == 60 * (8 + 7) and len(every.unique()) == len(every)
    assert torch.equal(tests[:, 0], uniform(9, rows, place))  # the number of a round without drafts


# --- compiled


def grown(table, static, *_):
    """A tree, a chain and a static tree, as one function."""
    root, found = torch.zeros_like(table[:, 0, 0], dtype=torch.int64), []
    for schedule in (Schedule(4, 3, 12), Schedule(3, 1), static):
        draft = Draft(table)
        found += grow(schedule, root, *draft.begin(), draft)
    return found


def verified(table, _, seed, place):
    """A drawn chain, and what is accepted of it."""
    draft, temperature = Draft(table), torch.ones_like(place, dtype=torch.float32)
    tokens, _, probs = draw_chain(
        Schedule(4, 1), place, *draft.begin(), draft, temperature, seed, counter(2, place.device), place, table.shape[2]
    )
    target = probs.double() + 0.1
    target = target / target.sum(dim=2, keepdim=True)
    real, u = torch.ones_like(tokens, dtype=torch.bool), chain_numbers(seed, counter(2, place.device), place, 5)
    accepted = accept_chain(target, probs, tokens, real, u)
    return tokens, probs, accepted.tokens, accepted.count


def inputs(vocab):
    return torch.randn(2, 97, vocab), StaticTree(), torch.tensor([4]), torch.tensor([7, 0])


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        if one.is_floating_point():
            torch.testing.assert_close(one.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)
        else:
            assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no CUDA device")
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("run", [grown, verified])
def test_captured(run, compile):
    """One CUDA graph, replayed on new logits, against the CPU."""
    table, *rest = inputs(1500)
    there = [x.to("cuda", copy=True) if isinstance(x, torch.Tensor) else StaticTree().cuda() for x in (table, *rest)]
    fast = torch.compile(run, fullgraph=True, options=compat.GPU_OPTIONS) if compile else run
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            fast(*there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        found = fast(*there)
    for values in VALUES.values():
        table.copy_(values(table.shape))
        there[0].copy_(table)
        graph.replay()
        torch.cuda.synchronize()
        same(found, run(table, *rest))
