"""Best trees over a lattice of drafts, by the kernel and by the plain form, whose own test is in test_linked_drafts."""

import pytest
import torch
from places import places

from spec_compile.drafters.trees.propose import block_tree, grow_table, lattice_tree
from spec_compile.kernels.lattice import launch

PLACES = places(torch.float32)
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
