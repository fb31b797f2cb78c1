"""Attention to the committed slots of a cache, against a softmax.

Without a GPU the kernels run in Triton's interpreter, in float32.
"""

import pytest
import torch
from attention_cases import FP8, SMALL
from places import INTERPRETER

from spec_compile.kernels import ops
from spec_compile.kernels.attention.backends import attend_to_committed
from spec_compile.kernels.attention.base import AttentionCall
from spec_compile.kernels.attention.tree_attention import launch

LENGTHS, SLOTS = [0, 1, 37, 129], 256
CLOSE = {torch.float32: dict(atol=1e-5, rtol=1e-5), torch.bfloat16: dict(atol=2e-2, rtol=1e-5)}
OPTIONS = [(1, (4, 2), None, None), (3, (6, 2), None, 9), (5, (3, 3), 2.0, None), (2, (4, 1), 3.0, 128)]


def stored(kept, x):
    """Keys or values as a cache of this kind holds them, their scales, and the numbers that are read from it."""
    if kept == "auto":
        return x, None, x.float()
    codes, scales = ops.over_scale(x) if kept == "fp8_per_token_head" else (x, None)
    return codes.to(FP8), scales, codes.to(FP8).float() * (1 if scales is None else scales)


def softmax(q, keys, values, length, scale, softcap, window):
    """One row of a batch: q [H, R, D], keys and values [Hkv, S, D] -> [R, H, D]."""
    seen = slice(0 if window is None else max(length - window, 0), max(length, 1))
    keys, values = (each[:, seen].repeat_interleave(len(q) // len(each), dim=0) for each in (keys, values))
    scores = q @ keys.transpose(1, 2) * scale
    scores = scores if softcap is None else (scores / softcap).tanh() * softcap
    return (scores.softmax(dim=2) @ values).transpose(0, 1)


@pytest.mark.parametrize("by_kernel", [True, pytest.param(False, marks=INTERPRETER)], ids=["kernel", "plain"])
@pytest.mark.parametrize("kept", ["auto", "fp8", "fp8_per_token_head"])
@pytest.mark.parametrize("rows, heads, softcap, window", OPTIONS)
def test_queries_see_the_last_committed_slots(place, rows, heads, softcap, window, kept, by_kernel):
    """The rows are the nodes of a level of a tree. What is kept is read, not what was put in."""
    q = torch.randn(len(LENGTHS), heads[0], rows, 24).to(*place)
    stores = [stored(kept, torch.randn(len(LENGTHS), heads[1], SLOTS, 24).to(*place)) for _ in "kv"]
    (keys, key_scales, exact_keys), (values, value_scales, exact_values) = stores
    scales = None if key_scales is None else torch.cat([key_scales, value_scales], dim=3)
    lengths = torch.tensor(LENGTHS, device=place[0])
    if place[0] == "cuda" or not by_kernel:
        out = attend_to_committed(q, keys, values, scales, lengths, 140, 0.3, softcap, window)
    else:  # the op runs its plain form on a CPU
        last, heads_of_one = (lengths - 1).clamp(min=0), q.reshape(len(q), -1, 1, q.shape[3])
        rest = last, None, last[:, None], None, 0.3, softcap, window
        call = AttentionCall(heads_of_one, None, None, keys, values, *rest, scales=scales)
        out = launch(call, SMALL).view(*q.shape).transpose(1, 2)
    for row, length in enumerate(LENGTHS):
        wanted = softmax(q[row].float(), exact_keys[row], exact_values[row], length, 0.3, softcap, window)
        torch.testing.assert_close(out[row].float(), wanted, **CLOSE[place[1]])
