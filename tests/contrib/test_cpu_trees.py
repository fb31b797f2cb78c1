"""Likeliest tokens and trees on a CPU in C++ and by the plain forms, whose own tests are in test_top_logits,
test_recycle and test_union."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_trees import HEAD, TRIE, arguments, both_sources, check, large
from recycled import CASES, check_trees, table_of

from spec_compile.contrib.kernels import cpu_trees
from spec_compile.contrib.kernels.cpu_trees import learn, merge, unroll
from spec_compile.drafters.trees import merge as plain
from spec_compile.drafters.trees.merge import Drafts
from spec_compile.kernels.cpu import LEVELS
from spec_compile.kernels.launching import CPU_KERNELS
from spec_compile.kernels.top_logits import likeliest, top_logits

plain_learning = plain.learn_from.__wrapped__


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize(
    "vocab, k, temperature", [(1, 1, 1.0), (63, 16, 0.5), (64, 1, 3.0), (1100, 16, 1.0), (49152, 8, 1.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_likeliest_tokens(monkeypatch, level, vocab, k, temperature, dtype):
    """Each level takes the best instructions up to it that this CPU has. Many logits of bfloat16 are equal."""
    monkeypatch.setattr(cpu_trees, "HIGHEST", level)
    drawn = 4 * torch.randn(3, 2 * vocab, generator=torch.Generator().manual_seed(vocab))
    logits = drawn.to(dtype)[:, ::2]
    found, right = cpu_trees.top_logits(logits, k, temperature), top_logits.__wrapped__(logits, k, temperature)
    assert torch.equal(found[1], right[1])
    torch.testing.assert_close(found[0], right[0], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("level", range(len(LEVELS)))
@pytest.mark.parametrize("vocab", [1, 63, 1100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_likeliest_token_of_each_node(monkeypatch, level, vocab, dtype):
    """The second sequence bans most tokens, after some nodes; the first one bans the likeliest."""
    monkeypatch.setattr(cpu_trees, "HIGHEST", level)
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randint(-9, 9, (2, 5, vocab), generator=generator).to(dtype)
    banned = torch.stack([logits[0, 0] == logits[0, 0].amax(), torch.rand(vocab, generator=generator) < 0.9])
    applies = torch.tensor([[True, False, True, False, False], [False, True, True, True, False]])
    right = likeliest.__wrapped__(logits, banned, applies)
    assert torch.equal(cpu_trees.likeliest(logits, banned, applies), right)
    if vocab > 1:
        assert not torch.equal(right, logits.argmax(-1))


@pytest.mark.parametrize("k", [0, 10, 17])
def test_too_many_likeliest_tokens_are_refused(k):
    logits, out = torch.zeros(1, 9), torch.zeros(32, dtype=torch.int64)
    with pytest.raises(ValueError, match="k: expected 1 to 16, and at most the logits of a row"):
        cpu_trees._native.read_logits((logits.data_ptr(), False, 1, 9, k, 1.0, 0, 1, 0, out.data_ptr(), 0, 0, 0))


@settings(max_examples=100, deadline=None)
@given(*CASES)
def test_recycled_trees(vocab, count, rows, nodes, most, seed):
    check_trees(unroll, vocab, count, rows, nodes, most, seed)


def buffers(rows, size):
    """The slots of the roots, and drafts, to be written."""
    kinds = [torch.float32 if name == "priors" else torch.int64 for name in Drafts._fields]
    return torch.full((rows,), -7), Drafts(*(torch.full((rows, size), -7, dtype=kind) for kind in kinds))


def check_merging(rows, sources, nodes, head, trie):
    """The drafts of a merge, whose every result is right."""
    (begins, drafts), lengths = buffers(len(rows), head + trie), torch.arange(5, 5 + len(rows))
    found = merge(
        lengths, *map(list, sources[:1]), sources[1], list(sources[2]), *sources[3:], begins, [*drafts], nodes
    )
    check(rows, sources[-1], nodes, *found, drafts, head)
    assert torch.equal(begins, lengths)
    right = plain.merge(*sources, nodes)[-1]
    for name in ("tokens", "above", "ancestors", "depth", "cells"):
        assert torch.equal(getattr(drafts, name), getattr(right, name)), name
    torch.testing.assert_close(drafts.priors, right.priors, rtol=1e-5, atol=1e-6)
    return drafts


@settings(max_examples=100, deadline=None)
@given(st.lists(both_sources(), min_size=1, max_size=3), st.integers(2, 14), st.integers(0, 3))
def test_merged_trees(rows, nodes, seed):
    check_merging(rows, arguments(rows, seed), nodes, HEAD, TRIE)


@pytest.mark.parametrize("head, trie, nodes", [(2, 16, 16), (64, 64, 64), (33, 16, 16), (2, 64, 9)])
def test_large_merged_trees(head, trie, nodes):
    rows = [large(head, trie, seed) for seed in range(2)]
    check_merging(rows, arguments(rows, nodes, head, trie), nodes, head, trie)


@pytest.mark.parametrize("seed", range(8))
def test_outcomes(seed):
    """Of cells that no draft tested, not a bit changes. One row's drafts are of another text."""
    head, trie, generator = 12, 16, torch.Generator().manual_seed(seed)
    rows = [large(head, trie, 3 * seed + row) for row in range(3)]
    sources = arguments(rows, seed, head, trie)
    drafts = check_merging(rows, sources, 16, head, trie)
    begins, text = torch.tensor([5, 6, -1]), torch.randint(4, (3, 14), generator=generator)
    lengths, counts = begins + torch.randint(1, 7, (3,), generator=generator), [sources[-1].clone() for _ in range(2)]
    for learns, table in zip((learn, plain_learning), counts):
        learns(table, [*drafts], begins, torch.tensor([5, 6, 7]), lengths, text, head)
    torch.testing.assert_close(*counts, rtol=1e-5, atol=1e-6)
    assert torch.equal(*(table == sources[-1] for table in counts)) and not torch.equal(counts[0], sources[-1])


def test_operators():
    """Rounds on a CPU call them, and a compiler may trace them."""
    rows = [large(5, 4, 1)]
    head, scores, trie, match, counts = arguments(rows, 0, 5, 4)
    (begins, drafts), length = buffers(1, 9), torch.tensor([4])
    merging = length, [*head], scores, [*trie], match, counts, begins, [*drafts], 4
    merge(*merging)
    text = torch.zeros(1, 9, dtype=torch.int64)
    calls = {
        "likeliest": (torch.arange(24.0).view(2, 3, 4), torch.eye(4)[2:] > 0, torch.ones(2, 3, dtype=torch.bool)),
        "top_logits": (torch.arange(24.0).view(2, 12), 3, 1.0),
        "recycle_unroll": (table_of(20, 3, 0, 40), torch.tensor([3, 7]), torch.tensor([True, False]), 9),
        "merge_into": merging,
        "learn_from": (counts, [*drafts], begins, length, length + 2, text, 5),
    }
    assert calls.keys() == CPU_KERNELS.keys()
    for name, given_ in calls.items():
        torch.library.opcheck(CPU_KERNELS[name], given_)


@pytest.mark.parametrize("nodes", [0, 65])
def test_trees_of_other_sizes_are_refused(nodes):
    with pytest.raises(ValueError, match="nodes: expected 1 to 64"):
        unroll(table_of(9, 2, 0, 9), torch.tensor([1]), torch.tensor([True]), nodes)
