"""Tables of recycled tokens, and a check of their trees against the plain form."""

import torch
from hypothesis import strategies as st

from spec_compile.drafters.recycle import LEVELS, unrolled

plain_trees = unrolled.__wrapped__
"""`unrolled` in plain PyTorch, whatever a CPU runs in its place."""
CASES = (
    st.integers(1, 40), st.integers(1, 16), st.integers(1, 5), st.integers(1, 64), st.sampled_from([1, 3, 40, 256]),
    st.integers(0, 1000),
)  # fmt: skip
"""Arguments of `check_trees` after the function."""


def table_of(vocab, count, seed, most):
    """A table [vocab, count] of recycled tokens: with ties, certain tokens, empty rows, and candidates that lack."""
    generator = torch.Generator().manual_seed(seed)
    ids, bits = (torch.randint(high, (vocab, count), generator=generator) for high in (vocab, most))
    table = ids << 8 | bits.sort(dim=1).values
    table[torch.rand(vocab, count, generator=generator) < 0.2] = -1
    table[torch.rand(vocab, generator=generator) < 0.1] = -1
    return table.int()


def check_trees(unroll, vocab, count, rows, nodes, most, seed):
    """`unroll` has the bits of the plain form, in slots without a node, too. It takes a table, roots and rows that
    read, which may have strides, and nodes."""
    nodes = min(nodes, sum(count**level for level in range(LEVELS + 1)))
    table, root = table_of(vocab, count, seed, most), torch.randint(vocab, (rows, 2))[:, 0]
    reads = (torch.arange(2 * rows) % 3 != 2)[::2]
    got = unroll(table, root, reads, nodes)
    for ours, plain in zip(got, plain_trees(table, root, reads, nodes), strict=True):
        assert ours.dtype == plain.dtype and torch.equal(ours.cpu(), plain)
