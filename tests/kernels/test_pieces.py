"""Pieces of prompts among the rows of a round: kernels take them as causal chunks, with the bits of rows apart."""

import pytest
import torch
from places import places

from spec_compile.cache import PAGE
from spec_compile.kernels.attention.base import AttentionCall, plain_attention, riding

tree_attention = pytest.importorskip("spec_compile.kernels.attention.tree_attention")
OWN, PAGES, HEADS, KV_HEADS, SIZE = [70, 3, 128], 40, 4, 2, 16
FIRST = [61, 0]
"""The committed slots of two prompts."""


def call_of(count, nodes, device, dtype, window=None):
    """Rows of a chain of nodes, and after them pieces of `count` such rows of two prompts, at random pages."""
    generator = torch.Generator().manual_seed(count)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(device, dtype)  # noqa: E731
    order = (1 + torch.randperm(PAGES - 1, generator=generator)).int().to(device)
    each = torch.tensor([1] * 3 + [count] * 2).to(device)
    lengths = torch.tensor([*OWN, *(first + nodes * n for first in FIRST for n in range(count))]).to(device)
    rows, number = len(lengths), torch.arange(nodes, device=device)
    return AttentionCall(
        draw(rows, nodes, HEADS, SIZE).transpose(1, 2), draw(rows, nodes, KV_HEADS, SIZE).transpose(1, 2),
        draw(rows, nodes, KV_HEADS, SIZE).transpose(1, 2), draw(PAGES, KV_HEADS, PAGE, SIZE),
        draw(PAGES, KV_HEADS, PAGE, SIZE), lengths, ((2 << number) - 1).repeat(rows, 1), lengths[:, None] + number,
        None, 0.25, None, window, cos=draw(rows, nodes, SIZE), sin=draw(rows, nodes, SIZE),
        table=order[: 5 * 4].view(5, 4).repeat_interleave(each, 0),
    )  # fmt: skip


@pytest.mark.sweep("None-1-1-interpreter 20-33-1-interpreter 20-1-3-interpreter None-11-3-interpreter")
@pytest.mark.parametrize("place", places(torch.bfloat16))
@pytest.mark.parametrize("count, nodes", [(1, 1), (33, 1), (1, 3), (11, 3)])
@pytest.mark.parametrize("window", [None, 20])
def test_pieces_have_the_bits_of_rows(place, count, nodes, window):
    device, dtype = place
    apart, together, plain = (call_of(count, nodes, device, dtype, window) for _ in range(3))
    expected = tree_attention.launch(apart)
    with riding(together.lengths[3::count].contiguous(), together.table[3::count].contiguous(), count):
        found = tree_attention.launch(together)
    if dtype == torch.bfloat16:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    close = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(found, plain_attention(plain, 4 * PAGE), rtol=close, atol=close)
    assert torch.equal(apart.key_cache, together.key_cache) and torch.equal(apart.value_cache, together.value_cache)


@pytest.mark.parametrize("by_query", [False, True])
def test_biases_by_distance_of_pieces(by_query):
    apart, together = (call_of(3, 2, "cpu", torch.float32) for _ in range(2))
    sizes = (len(apart.lengths), 2, HEADS, 9) if by_query else (HEADS, 9)
    slopes = torch.randn(*sizes, generator=torch.Generator().manual_seed(5))
    expected = tree_attention.launch(apart._replace(slopes=slopes))
    with riding(together.lengths[3::3].contiguous(), together.table[3::3].contiguous(), 3):
        found = tree_attention.launch(together._replace(slopes=slopes))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_rows_that_do_not_add_up_are_refused():
    call = call_of(1, 1, "cpu", torch.float32)
    with riding(call.lengths[3:], call.table[3:], 3), pytest.raises(ValueError, match="2 pieces of 3 rows, got 5 rows"):
        tree_attention.launch(call)
