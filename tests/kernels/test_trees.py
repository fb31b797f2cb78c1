"""Trees by the kernels and by the plain forms, whose own tests are elsewhere: lattices in test_linked_drafts, recycled
tokens in test_recycle, merged trees in test_union."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from merged_trees import HEAD, TRIE, arguments, both_sources, check, large
from places import GPU, places
from recycled import CASES, check_trees, plain_trees, table_of

from spec_compile.drafters.recycle import LEVELS, unrolled
from spec_compile.drafters.trees.merge import (
    CELLS,
    KEPT,
    LAYOUT,
    Drafts,
    learn_from,
    merge,
    merge_into,
)  # fmt: skip
from spec_compile.drafters.trees.propose import block_tree, grow_table, lattice_tree
from spec_compile.kernels.trees import launch, launch_learn, launch_merge, launch_unroll

PLACES = places(torch.float32)
plain_learning = learn_from.__wrapped__
LONG = (3, 2, 15), (2, 16, 40), (15, 16, 64)


@pytest.mark.parametrize(
    "length, count, nodes", [(1, 3, 4), (4, 5, 17), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in LONG)]
)
def test_the_kernel_of_lattices(place, length, count, nodes):
    """The bits of the plain form, with ties, certain tokens and impossible ones."""
    generator = torch.Generator().manual_seed(nodes)
    tokens = torch.stack([torch.randperm(99, generator=generator)[:count] for _ in range(3 * length)])
    tokens, root = tokens.view(3, length, count), torch.tensor([7, 98, 0])
    table = (3 * torch.randn(3, length, count, count, generator=generator)).log_softmax(dim=3)
    table[1] = table[1].round()  # ties
    table[2, :, :, 0], table[2, :, :, 1:] = 0.0, -torch.inf
    got = launch(*(x.to(place[0]) for x in (root, tokens, table)), nodes)
    want = grow_table(root, tokens, table, nodes)
    for ours, plain in zip(got, want):
        assert torch.equal(ours.cpu(), plain)


def test_independent_places_by_the_kernel(place):
    """What `block_tree` gives: the same trees, and of those with ties the same scores."""
    length, count, nodes = 4, 5, 17
    logits = 3 * torch.randn(3, length, count, generator=torch.Generator().manual_seed(0))
    scores = logits.log_softmax(dim=2).sort(dim=2, descending=True).values
    scores[1] = scores[1].round()  # ties
    scores[2, :, 2:] = -torch.inf
    tokens, root = torch.arange(3 * length * count).view(3, length, count), torch.tensor([7, 98, 0])
    table = scores[:, :, None].expand(-1, -1, count, -1)
    ids, parents, totals = (x.cpu() for x in launch(*(x.to(place[0]) for x in (root, tokens, table)), nodes))
    want = block_tree(root, scores, tokens, nodes)
    assert torch.equal(totals, want[2])
    assert torch.equal(ids[0], want[0][0]) and torch.equal(parents[0], want[1][0])
    for row in range(3):  # every node is a token of the place below its parent's, with the parent's score and its own
        depth = {-1: -2, 0: -1}
        for node, above in enumerate(parents[row].tolist()):
            depth[node] = depth[above] + 1
            if node:
                rank = tokens[row, depth[node]].tolist().index(ids[row, node])
                assert totals[row, node] == totals[row, above] + scores[row, depth[node], rank]
        assert len(set(zip(ids[row].tolist(), parents[row].tolist()))) == nodes


def test_more_nodes_than_a_lattice_has_are_refused():
    with pytest.raises(ValueError, match="nodes: 2 candidates at each of 2 places"):
        lattice_tree(torch.tensor([1]), torch.arange(4).view(1, 2, 2), torch.zeros(1, 2, 2, 2), 8)


@settings(max_examples=200 if GPU else 25, deadline=None)
@given(*CASES)
def test_recycled_trees_by_the_kernel(place, vocab, count, rows, nodes, most, seed):
    def unroll(table, root, reads, nodes):
        return launch_unroll(*(x.to(place[0]) for x in (table, root, reads.contiguous())), nodes, LEVELS)

    check_trees(unroll, vocab, count, rows, nodes, most, seed)


def test_unrolling_as_an_operator():
    arguments = table_of(20, 3, 0, 40), torch.tensor([3, 7]), torch.tensor([True, False]), 9
    torch.library.opcheck(torch.ops.spec_compile.recycle_unroll.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, count, nodes", [(1, 8, 16), (32, 16, 64)])
def test_recycled_trees_in_a_graph(rows, count, nodes):
    """Replayed over other tables and roots; nothing waits for the host."""
    table, root = table_of(50000, count, 0, 100).cuda(), torch.zeros(rows, dtype=torch.int64, device="cuda")
    reads = torch.ones(rows, dtype=torch.bool, device="cuda")
    unrolled(table, root, reads, nodes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = unrolled(table, root, reads, nodes)
    for seed in range(3):
        table.copy_(table_of(50000, count, seed, 100))
        root.random_(50000)
        graph.replay()
        for ours, plain in zip(found, plain_trees(table.cpu(), root.cpu(), reads.cpu(), nodes), strict=True):
            assert torch.equal(ours.cpu(), plain)


# --- two trees as one


def buffers(rows, size, device):
    """The slots of the roots, and drafts, to be written."""
    kinds = [torch.float32 if name == "priors" else torch.int64 for name in Drafts._fields]
    begins = torch.full((rows,), -7, device=device)
    return begins, Drafts(*(torch.full((rows, size), -7, dtype=kind, device=device) for kind in kinds))


def there(sources, place):
    """The arguments of `merge`, on another device."""
    head, scores, trie, match, counts = sources
    head, trie = ([x.to(place[0]) for x in source] for source in (head, trie))
    return head, scores.to(place[0]), trie, match.to(place[0]), counts.to(place[0])


@settings(max_examples=200 if GPU else 25, deadline=None)
@given(st.lists(both_sources(), min_size=1, max_size=3), st.integers(2, 14), st.integers(0, 3))
def test_merged_trees_by_the_kernel(place, rows, nodes, seed):
    sources = arguments(rows, seed)
    begins, drafts = buffers(len(rows), HEAD + TRIE, place[0])
    lengths = torch.arange(5, 5 + len(rows))
    found = launch_merge(lengths.to(place[0]), *there(sources, place), begins, drafts, nodes, **LAYOUT)
    drafts = Drafts(*(x.cpu() for x in drafts))
    check(rows, sources[-1], nodes, *(x.cpu() for x in found), drafts)
    assert torch.equal(begins.cpu(), lengths)
    right = merge(*sources, nodes)[-1]
    for name in ("tokens", "above", "ancestors", "depth", "cells"):
        assert torch.equal(getattr(drafts, name), getattr(right, name)), name
    torch.testing.assert_close(drafts.priors, right.priors, rtol=1e-5, atol=1e-6)


def outcomes(rows, head, trie, seed):
    """The arguments of `learn_from`: random trees, of which a text follows some paths."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    def trees(nodes):
        parents = torch.stack([numbers(0, max(node, 1), rows) for node in range(nodes)], dim=1)
        parents[:, 0] = -1
        return [numbers(0, 3, rows, nodes), parents, numbers(1, nodes + 1, rows)]

    scores = -torch.rand(rows, head, generator=generator)
    sources = trees(head), scores, trees(trie), numbers(1, 9, rows), torch.rand(2, CELLS, generator=generator)
    begins, drafts = buffers(rows, head + trie, "cpu")
    begin = numbers(3, 9, rows)
    merge_into(begin, *sources, begins, [*drafts], min(head, trie))
    begins[numbers(0, 4, rows) == 0] = -1
    return sources[-1], drafts, begins, begin, begin + numbers(1, 7, rows), numbers(0, 3, rows, 14), head


def same_counts(found, right):
    torch.testing.assert_close(found.cpu(), right, rtol=1e-5, atol=1e-6)


@settings(max_examples=100 if GPU else 20, deadline=None)
@given(st.integers(1, 9), st.integers(2, 20), st.integers(2, 20), st.integers(0, 1000))
def test_outcomes_are_learnt_by_the_kernel(place, rows, head, trie, seed):
    """Of cells that no draft tested, not a bit changes."""
    counts, drafts, *where, size = outcomes(rows, head, trie, seed)
    found = counts.clone().to(place[0])
    launch_learn(found, [x.to(place[0]) for x in drafts], *(x.to(place[0]) for x in where), size, KEPT)
    right = counts.clone()
    plain_learning(right, drafts, *where, size)
    same_counts(found, right)
    assert torch.equal(found.cpu() == counts, right == counts)


@pytest.mark.parametrize(
    "head, trie, nodes",
    [
        (2, 16, 16),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((64, 64, 64), (33, 16, 16), (2, 64, 9))),
    ],
)
def test_large_trees_by_the_kernel(place, head, trie, nodes):
    rows = [large(head, trie, seed) for seed in range(2)]
    sources = arguments(rows, nodes, head, trie)
    begins, drafts = buffers(2, head + trie, place[0])
    found = launch_merge(torch.tensor([4, 5]).to(place[0]), *there(sources, place), begins, drafts, nodes, **LAYOUT)
    check(rows, sources[-1], nodes, *(x.cpu() for x in found), Drafts(*(x.cpu() for x in drafts)), head)


def test_merging_and_learning_as_operators():
    counts, drafts, begins, begin, lengths, text, size = outcomes(2, 5, 4, 0)
    torch.library.opcheck(
        torch.ops.spec_compile.learn_from.default, (counts, [*drafts], begins, begin, lengths, text, size)
    )
    source = [begin.new_ones(2, 4), torch.tensor([[-1, 0, 1, 1]] * 2), begin.new_full((2,), 4)]
    scores, kept = -torch.rand(2, 4), buffers(2, 8, "cpu")
    arguments = lengths, source, scores, [x.clone() for x in source], begin, counts, kept[0], [*kept[1]], 4
    torch.library.opcheck(torch.ops.spec_compile.merge_into.default, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("rows, size", [(1, 16), (40, 16), (3, 64)])
def test_learning_and_merging_in_a_graph(rows, size):
    """What is learnt from the drafts of one round corrects the next one's, which replace them."""
    place = "cuda", torch.float32
    first, second = ([large(size, size, rows * turn + row) for row in range(rows)] for turn in (0, 1))
    sources = there(arguments(first, 0, size, size), place)
    begins, drafts = buffers(rows, 2 * size, place[0])
    lengths = torch.arange(rows, device="cuda") + 3
    text, after = torch.randint(4, (rows, rows + 20), device="cuda"), lengths.clone()

    def round_():
        learn_from(sources[-1], [*drafts], begins, lengths, after, text, size)
        return merge_into(lengths, *sources, begins, [*drafts], size)

    round_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = round_()
    after += 5
    for rows_now in (first, second):
        for ours, new in zip(sources[:4], there(arguments(rows_now, 0, size, size), place)):
            for old, value in zip(ours, new) if isinstance(ours, list) else [(ours, new)]:
                old.copy_(value)
        right = sources[-1].cpu()
        plain_learning(right, [x.cpu() for x in drafts], *(x.cpu() for x in (begins, lengths, after, text)), size)
        graph.replay()
        torch.testing.assert_close(sources[-1].cpu(), right, rtol=1e-5, atol=1e-6)
        check(rows_now, right, size, *(x.cpu() for x in found), Drafts(*(x.cpu() for x in drafts)), size)
