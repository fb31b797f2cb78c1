"""Attention to the committed slots of a cache: against a softmax, and on a GPU against the form of a CPU.

Without a GPU the kernels run in Triton's interpreter, in float32.
"""

import pytest
import torch
from attention_cases import FP8, SMALL
from places import places

from spec_compile.kernels import ops
from spec_compile.kernels.attention.backends import attend_to_committed
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.attention.tree_attention import launch

LENGTHS, SLOTS = [0, 1, 37, 129], 256


def case(place, rows, heads, size):
    generator = torch.Generator().manual_seed(0)
    shapes = (len(LENGTHS), heads[0], rows, size), *[(len(LENGTHS), heads[1], SLOTS, size)] * 2
    q, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    return [each.to(*place) for each in (q, keys, values)], torch.tensor(LENGTHS, device=place[0])


def stored(kept, keys, values):
    """Keys, values and scales as a cache of this kind holds them."""
    scales = None
    if kept == "fp8_per_token_head":
        (keys, key_scales), (values, value_scales) = ops.over_scale(keys), ops.over_scale(values)
        scales = torch.cat([key_scales, value_scales], dim=3)
    return (keys, values, None) if kept == "auto" else (keys.to(FP8), values.to(FP8), scales)


def softmax(q, keys, values, length, scale, softcap, window):
    """One row of a batch: q [H, R, D], keys and values [Hkv, S, D] -> [R, H, D]."""
    first = 0 if window is None else max(length - window, 0)
    keys, values = (
        each[:, first : max(length, 1)].repeat_interleave(len(q) // len(keys), dim=0) for each in (keys, values)
    )
    scores = q @ keys.transpose(1, 2) * scale
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    return (scores.softmax(dim=2) @ values).transpose(0, 1)


OPTIONS = [(1, (4, 2), None, None), (3, (6, 2), None, 9), (5, (3, 3), 2.0, None), (2, (4, 1), 3.0, 128)]


@pytest.mark.parametrize("rows, heads, softcap, window", OPTIONS)
def test_queries_see_the_last_committed_slots(rows, heads, softcap, window):
    (q, keys, values), lengths = case(("cpu", torch.float32), rows, heads, 24)
    kept = keys.clone(), values.clone()
    out = attend_to_committed(q, keys, values, None, lengths, 140, 0.3, softcap, window)
    for row, length in enumerate(LENGTHS):
        wanted = softmax(q[row], keys[row], values[row], length, 0.3, softcap, window)
        assert torch.allclose(out[row], wanted, atol=1e-5)
    assert torch.equal(kept[0], keys) and torch.equal(kept[1], values)


@pytest.mark.parametrize("place", places(torch.float32, torch.bfloat16))
@pytest.mark.parametrize(
    "kept, options", [("auto", OPTIONS[1]), ("fp8", OPTIONS[1]), ("fp8_per_token_head", OPTIONS[2])]
)
def test_the_kernels_see_the_same(place, kept, options):
    """The rows are the nodes of a level of a tree."""
    rows, heads, softcap, window = options
    (q, keys, values), lengths = case(place, rows, heads, 24)
    cache = stored(kept, keys, values)
    if place[0] == "cuda":
        out = attend_to_committed(q, *cache, lengths, 140, 0.3, softcap, window)
    else:  # the op runs its plain form on a CPU
        last = (lengths - 1).clamp(min=0)
        heads_of_one = q.reshape(len(q), -1, 1, q.shape[3])
        call = AttentionCall(
            heads_of_one, None, None, *cache[:2], last, None, last[:, None], None, 0.3, softcap, window, scales=cache[2]
        )
        out = launch(call, SMALL).view(*q.shape).transpose(1, 2)
    plain = [None if each is None else each.cpu() for each in cache]
    wanted = attend_to_committed(q.float().cpu(), *plain, lengths.cpu(), 140, 0.3, softcap, window)
    assert torch.allclose(out.float().cpu(), wanted, atol=1e-5 if place[1] == torch.float32 else 2e-2)
    if kept != "auto":  # what is kept is read, not what was put in
        exact = attend_to_committed(q.float().cpu(), keys.float().cpu(), values.float().cpu(), None, lengths.cpu(), 140,
                                    0.3, softcap, window)  # fmt: skip
        assert not torch.allclose(wanted, exact, atol=5e-3)
