"""The attention of blocks: its kernels beside masks, and masks beside single blocks."""

import pytest
import torch
from torch.nn import functional as F
from trainings import NEEDS_GPU

from spec_compile.train.attention import plain_block_attention

SIZES = [(1, 1, 1, 4, 3, 5, 16), (2, 4, 2, 7, 21, 70, 24), (1, 6, 2, 16, 9, 130, 64), (1, 3, 1, 3, 33, 64, 80)]
"""Rows, query heads, key-value heads, slots of a block, blocks, length of the context, size of a head."""


def parts(sizes, dtype, device):
    """(q, k, v, keys, values), the anchors, and a gradient of the output."""
    batch, heads, kv_heads, size, blocks, length, width = sizes
    g = torch.Generator().manual_seed(blocks)

    def made(*shape):
        return torch.randn(shape, generator=g).to(device, dtype)

    anchors = torch.randint(0, length + 1, (batch, blocks), generator=g).sort(dim=1).values.to(device)
    slots = blocks * size
    own, context = (batch, kv_heads, slots, width), (batch, kv_heads, length, width)
    inputs = made(batch, heads, slots, width), made(*own), made(*own), made(*context), made(*context)
    return inputs, anchors, made(batch, heads, slots, width)


def compare(sizes, causal, dtype, device, tolerance):
    """The kernels against masks in float64."""
    kernel = pytest.importorskip("spec_compile.train.attention_kernels")
    inputs, anchors, grad = parts(sizes, dtype, device)
    how = anchors, sizes[3], 0.3, causal
    out, total = kernel.forward_blocks(*inputs, *how)
    mine = kernel.backward_blocks(grad, *inputs, *how, out, total)
    exact = [part.double().requires_grad_() for part in inputs]
    plain = plain_block_attention(*exact, *how)
    theirs = torch.autograd.grad(plain, exact, grad.double())
    for got, wanted in zip((out, *mine), (plain, *theirs)):
        assert got.dtype == dtype and got.shape == wanted.shape
        assert torch.allclose(got.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_blocks_in_kernels(sizes, causal):
    compare(sizes, causal, torch.float32, "cpu", 1e-4)


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [*SIZES, (8, 9, 3, 16, 64, 320, 64), (2, 8, 2, 7, 200, 1000, 128)], ids=str)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-3), (torch.bfloat16, 1e-1)], ids=str)
def test_blocks_on_a_gpu(sizes, causal, dtype, tolerance):
    compare(sizes, causal, dtype, "cuda", tolerance)


@pytest.mark.parametrize("causal", [False, True])
def test_a_block_sees_itself_and_the_context_before_its_anchor(causal):
    (q, k, v, keys, values), anchors, _ = parts((2, 4, 2, 5, 6, 40, 8), torch.float64, "cpu")
    out = plain_block_attention(q, k, v, keys, values, anchors, 5, 0.3, causal)
    for row, lengths in enumerate(anchors.tolist()):
        for block, anchor in enumerate(lengths):
            slots = slice(block * 5, block * 5 + 5)
            key, value = (
                torch.cat([context[row, :, :anchor], own[row, :, slots]], dim=1).repeat_interleave(2, dim=0)
                for context, own in ((keys, k), (values, v))
            )
            mask = torch.ones(5, anchor + 5, dtype=torch.bool).tril(anchor) if causal else None
            wanted = F.scaled_dot_product_attention(q[row, :, slots], key, value, mask, scale=0.3)
            assert torch.allclose(out[row, :, slots], wanted)
