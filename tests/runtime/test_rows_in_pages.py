"""Rows whose pages lie anywhere in a pool have what contiguous ones have: commits, prompts, and windows of drafts."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_compile.cache import PAGE
from spec_compile.drafters.options import Window, write_back
from spec_compile.graph import LayerSpec, ModelGraph
from spec_compile.kernels.ops import first_slots
from spec_compile.runtime.prompt import Past
from spec_compile.runtime.state import State
from spec_compile.tree import Accepted

ROWS, SLOTS, NODES = 3, 4 * PAGE, 7
SPEC = LayerSpec(heads=4, kv_heads=2, key_dim=16, value_dim=8, scale=1.0, window=None, softcap=None, sinks=False)
LENGTHS = st.lists(st.sampled_from([0, 1, 60, 63, 64, 65, 127, 180, SLOTS - NODES]), min_size=ROWS, max_size=ROWS)


def states():
    """A state with contiguous rows, and one with the same slots in pages of a pool."""
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    module.weight = torch.nn.Parameter(torch.zeros(1))  # which says where the graph is
    graph = ModelGraph(module, (SPEC, SPEC), 96, 8, torch.float32, None, "")
    whole, parts = (State(graph, ROWS, SLOTS, torch.device("cpu")) for _ in range(2))
    table = 1 + torch.randperm(15)[: ROWS * SLOTS // PAGE].view(ROWS, -1).int()
    parts.kv.use_pages(16, table)
    for rows, pool in zip(whole.kv.tensors, parts.kv.tensors):
        pool.copy_(torch.randn(pool.shape))
        rows.copy_(first_slots(pool, SLOTS, table))
    return whole, parts


def assert_same(whole, parts):
    for rows, pool in zip(whole.kv.tensors, parts.kv.tensors):
        assert torch.equal(first_slots(pool, SLOTS, parts.kv.table), rows)
    for one, other in zip(whole.buffers(recurse=False), parts.buffers(recurse=False)):
        assert torch.equal(one, other)


@settings(max_examples=20)
@given(lengths=LENGTHS, seed=st.integers(0, 99))
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_commits(compiled, lengths, seed):
    rng, both = random.Random(seed), states()
    before = both[1].kv.tensors[0].clone()
    path = torch.tensor([[0, *sorted(rng.choices(range(1, NODES), k=NODES - 1))] for _ in range(ROWS)])
    count = torch.tensor([rng.randint(1, NODES) for _ in range(ROWS)])
    accepted = Accepted(path, torch.randint(96, path.shape), count)
    for state in both:
        state.lengths.copy_(torch.tensor(lengths).clamp(max=SLOTS - NODES - 1))
        state.max_lengths.fill_(SLOTS)
        commit = torch.compile(state.commit, backend="aot_eager") if compiled else state.commit
        commit(accepted)
    assert_same(*both)
    changed = before.ne(both[1].kv.tensors[0]).flatten(1).any(1).nonzero().flatten()
    assert set(changed.tolist()) <= set(both[1].kv.table.flatten().tolist())


@given(padding=st.lists(st.sampled_from([0, 1, 63, 64, 70]), min_size=ROWS, max_size=ROWS))
@settings(max_examples=10)
def test_prompts(padding):
    both = states()
    layers = [(torch.randn(ROWS, 2, 130, 16), torch.randn(ROWS, 2, 130, 8)) for _ in range(2)]
    for state in both:
        state.fill(Past(layers, [], 150, padding), [150 - pad for pad in padding])
    assert_same(*both)


@given(lengths=LENGTHS)
@settings(max_examples=20)
def test_windows(lengths):
    """What a draft sees of a row, and the block that it writes back to it."""
    both, window, rows = states(), Window(size=70, sinks=3), 5
    lengths, views = torch.tensor(lengths), []
    for state in both:
        view, seen = window.view(state.kv, lengths, rows)
        views.append([*(each.clone() for each in view), seen])
        for number, each in enumerate(view[:-1]):
            each.copy_(torch.arange(each.numel()).view(each.shape) + number)
        write_back(state.kv, lengths, view, seen, rows)
    assert all(map(torch.equal, *views))
    assert_same(*both)
