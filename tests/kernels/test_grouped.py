"""Attention of few queries over key-value heads that nobody repeats, against PyTorch's own attention over repeats."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import places
from torch.nn import functional as F

from spec_compile.kernels.attention import grouped

PLACES = places(torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def tensors(place, batch, heads, kv_heads, tokens, slots, size=64, value_size=64, seed=0):
    device, dtype = place
    generator = torch.Generator().manual_seed(seed)
    shapes = (batch, heads, tokens, size), (batch, kv_heads, slots, size), (batch, kv_heads, slots, value_size)
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def repeated(q, k, v, mask, scale):
    """The meaning of the op, in float32."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.float(), k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    mask = mask.float() if mask is not None and mask.dtype != torch.bool else mask
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def compare(place, q, k, v, mask, scale=None):
    want = repeated(q, k, v, mask, scale)
    runs = [torch.ops.spec_compile.grouped_attention(q, k, v, mask, scale)]
    if place[0] == "cpu" and (mask is None or mask.dtype == torch.bool) and (mask is None or mask.shape[1] == 1):
        runs.append(grouped.launch(q, k, v, mask, q.shape[3] ** -0.5 if scale is None else scale))
    for got in runs:
        assert got.shape == want.shape and got.stride() == grouped.empty_heads(q, v).transpose(1, 2).stride()
        assert (got.float() - want).abs().max() <= TOLERANCE[place[1]] * want.abs().max().clamp(min=1)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (6, 6), (9, 3)])
@pytest.mark.parametrize("shape", [None, (1, 1, 1), (3, 1, 1), (1, 1, 4), (3, 1, 4)])
def test_masks(place, heads, kv_heads, shape):
    q, k, v = tensors(place, 3, heads, kv_heads, 4, 100, value_size=48)
    mask = None if shape is None else torch.rand(*shape, 100).to(place[0]) > 0.4
    compare(place, q, k, v, mask, 0.3)


@pytest.mark.parametrize("filled", [1, 64, 65, 300])
def test_a_cache_that_is_mostly_empty(place, filled):
    """Slots that nobody sees may hold anything, NaN too, if whole blocks of them are unseen."""
    q, k, v = tensors(place, 2, 8, 2, 1, 512)
    mask = torch.zeros(2, 1, 1, 512, dtype=torch.bool, device=place[0])
    mask[..., :filled] = True
    want = repeated(q, k, v, mask, None)
    if place[0] == "cuda":
        k[:, :, 320:], v[:, :, 320:] = torch.nan, torch.nan
    got = torch.ops.spec_compile.grouped_attention(q, k, v, mask, None)
    assert (got.float() - want).abs().max() <= TOLERANCE[place[1]]


def test_masks_of_heads_and_of_numbers(place):
    q, k, v = tensors(place, 2, 6, 2, 3, 40)
    compare(place, q, k, v, torch.rand(2, 6, 3, 40, device=place[0]) > 0.4)
    compare(place, q, k, v, torch.randn(1, 1, 3, 40, device=place[0]).to(place[1]))
    compare(place, q, k, v, torch.randn(2, 6, 1, 40, device=place[0]).to(place[1]))


def test_strides(place):
    """Queries and caches may be views: heads after tokens, a part of a longer cache."""
    q, k, v = tensors(place, 2, 8, 2, 5, 100)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    compare(place, q, k[:, :, 10:80], v[:, :, 10:80], None)
    compare(place, q[..., ::2].expand(2, 8, 5, 32), k[..., :32], v, None)


def test_a_query_that_sees_nothing_gets_zeros(place):
    q, k, v = tensors(place, 1, 4, 2, 2, 70)
    mask = torch.ones(1, 1, 2, 70, dtype=torch.bool, device=place[0])
    mask[:, :, 1] = False
    scale = q.shape[3] ** -0.5
    if place[0] == "cpu":
        assert not grouped.launch(q, k, v, mask, scale)[:, :, 1].any()
    assert not torch.ops.spec_compile.grouped_attention(q, k, v, mask, None)[:, :, 1].any()


@settings(max_examples=8)
@given(st.data())
def test_any_shape(data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    tokens, slots = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 150))
    size, value_size = data.draw(st.sampled_from([8, 24, 64])), data.draw(st.sampled_from([8, 40]))
    batch, seed = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 99))
    place = PLACES[0].values[0]
    if place[0] == "cpu" and torch.cuda.is_available():
        place = ("cuda", torch.float32)
    q, k, v = tensors(place, batch, kv_heads * group, kv_heads, tokens, slots, size, value_size, seed)
    mask = torch.rand(batch, 1, tokens, slots, device=place[0]) > 0.3
    mask[..., 0] = True
    compare(place, q, k, v, mask)
