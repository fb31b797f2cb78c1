"""Best trees over a lattice of drafts, by the kernel and by the plain form, whose own test is in test_linked_drafts."""

import pytest
import torch
from places import INTERPRETER, ON_GPU

from spec_compile.drafters.trees.lattice import grow_table, lattice_tree
from spec_compile.kernels.lattice import launch

LONG = (3, 2, 15), (2, 16, 40), (15, 16, 64)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU), pytest.param("cpu", marks=INTERPRETER)])
@pytest.mark.parametrize(
    "places, count, nodes", [(1, 3, 4), (4, 5, 17), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in LONG)]
)
def test_the_kernel_of_lattices(device, places, count, nodes):
    """The bits of the plain form, with ties, certain tokens and impossible ones."""
    generator = torch.Generator().manual_seed(nodes)
    tokens = torch.stack([torch.randperm(99, generator=generator)[:count] for _ in range(3 * places)])
    tokens, root = tokens.view(3, places, count), torch.tensor([7, 98, 0])
    table = (3 * torch.randn(3, places, count, count, generator=generator)).log_softmax(dim=3)
    table[1] = table[1].round()  # ties
    table[2, :, :, 0], table[2, :, :, 1:] = 0.0, -torch.inf
    got = launch(*(x.to(device) for x in (root, tokens, table)), nodes)
    want = grow_table(root, tokens, table, nodes)
    for ours, plain in zip(got, want):
        assert torch.equal(ours.cpu(), plain)


def test_more_nodes_than_a_lattice_has_are_refused():
    with pytest.raises(ValueError, match="nodes: 2 candidates at each of 2 places"):
        lattice_tree(torch.tensor([1]), torch.arange(4).view(1, 2, 2), torch.zeros(1, 2, 2, 2), 8)
