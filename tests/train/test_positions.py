"""Weights of a block's positions against their published definitions, by loops."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from position_weights import slow_weights

from spec_compile.train import loss
from spec_compile.train import loss as positions
from spec_compile.train.loss import FIXED, NAMES, PositionWeights

OPEN = [name for name in NAMES if name != FIXED]
ROWS = st.lists(st.lists(st.tuples(*[st.floats(0.05, 1.0)] * 2, st.booleans(), st.booleans()), max_size=5), max_size=6)
"""Chains of rows: (fixed weight, probability, right, counted). A row that is not counted is left out."""


@settings(max_examples=25)
@given(ROWS, st.sampled_from(OPEN), st.integers(1, 7))
def test_weights_of_positions(chains, name, size):
    """Blocks of whole chains have the weights of one block, whatever their size."""
    chains = [{p: row[:3] for p, row in enumerate(chain) if row[3]} for chain in chains]
    rows = [(n, p, *row) for n, chain in enumerate(chains) for p, row in chain.items()]
    numbers, places, fixed, q, right = (torch.tensor(part) for part in zip(*rows)) if rows else [torch.zeros(0)] * 5
    weigh = PositionWeights(name, fixed.float(), numbers.long(), places.long())
    blocks = weigh.blocks(size)
    assert [n for block in blocks for n in range(len(rows))[block]] == list(range(len(rows)))
    assert all({n for n, *_ in rows[a]}.isdisjoint({n for n, *_ in rows[b]}) for a, b in itertools.pairwise(blocks))
    got = torch.cat([weigh(block, q[block].float(), right[block].bool()) for block in blocks])
    extra = sum(fixed.tolist()) / max(1, sum(map(bool, chains)))
    wanted = [weight for chain in chains for weight in slow_weights(name, chain, extra).values()]
    assert got.tolist() == pytest.approx(wanted, rel=1e-4)


def test_a_row_without_weight_is_no_link():
    weigh = PositionWeights("dpace", torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 0]), torch.arange(3))
    got = weigh(slice(0, 3), torch.tensor([0.5, 0.1, 0.5]), torch.tensor([True] * 3))
    assert got.tolist() == pytest.approx([0.75 + 0.75**2, 0.0, 0.75**2])


def test_the_chain_term_is_the_expected_accepted_length():
    """Its gradient is that of the mean over positions m of the probability that m drafts are right."""
    g = torch.Generator().manual_seed(0)
    states = torch.randn(6, 4, generator=g, dtype=torch.float64, requires_grad=True)
    matrix, choices = torch.randn(9, 4, generator=g, dtype=torch.float64), torch.randint(9, (6,), generator=g)
    teacher = torch.zeros(6, 9, dtype=torch.float64).scatter(1, choices[:, None], 1e3)
    fixed, numbers = torch.rand(6, generator=g, dtype=torch.float64), torch.tensor([0, 0, 0, 0, 1, 1])
    weigh = PositionWeights("chain", fixed, numbers, torch.tensor([0, 1, 2, 3, 0, 1]))
    made = loss.distil_all([(states, matrix)], torch.arange(6), teacher.__getitem__, weigh)
    q = (states @ matrix.T).softmax(-1).gather(1, choices[:, None])[:, 0]
    lengths = [q[rows].cumprod(0).mean() for rows in (slice(0, 4), slice(4, 6))]
    slow = fixed @ -q.log() - positions.EXTRA * fixed.sum() / 2 * sum(lengths)
    scale = made.weights[5] / (fixed[5] + positions.EXTRA * fixed.sum() / 2 / 2 * q[4:].prod())
    wanted = torch.autograd.grad(slow * scale.detach(), states)[0]
    assert torch.allclose(torch.autograd.grad(made.loss, states)[0], wanted)
    assert made.weights.sum() == pytest.approx(1)
