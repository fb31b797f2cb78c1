"""Backend "flashinfer": FlashInfer's kernels over our static cache.

Inside a CUDA graph, trees go to kernels that read lengths on the device (`xqa`). Prompts, and trees with
``cuda_graphs=False``, go to a kernel that takes lengths from the host and knows no trees: it attends to the committed
slots, PyTorch attends to the tree itself, and `merge` adds both.
"""

import importlib.metadata
import math
from collections.abc import Callable

import torch
from packaging.version import Version
from torch import Tensor

from ...tree import MAX_NODES
from .. import HALF
from ..ops import append
from . import xqa
from .base import Backend, Use
from .call import AttentionCall, attention_op
from .merge import add_sinks, merge

MIN_VERSION = "0.6.1"
"""The first version whose XQA takes trees."""


@attention_op("spec_compile::flashinfer_attention")
def attention(call: AttentionCall) -> Tensor:
    """The call, which reads the lengths on the host. -> [B, N, H, Dv]."""
    return _with_lengths_on_host(call)


def _with_lengths_on_host(call: AttentionCall) -> Tensor:
    q, k, v, key_cache, value_cache, lengths, ancestors, _, sinks, scale, softcap, window, *_ = call
    append(key_cache, k, lengths)
    append(value_cache, v, lengths)
    rows = []
    for row, length in enumerate(lengths.tolist()):
        queries, end = q[row].transpose(0, 1).contiguous(), length + q.shape[2]
        if ancestors is None:
            out, lse = part(queries, key_cache[row, :, :end], value_cache[row, :, :end], scale, softcap, window, True)
        else:
            out, lse = block(q[row], k[row], v[row], ancestors[row], scale, softcap)
            if length:
                prefix = key_cache[row, :, :length], value_cache[row, :, :length]
                out, lse = merge(*part(queries, *prefix, scale, softcap, None, False), out, lse)
        rows.append(out if sinks is None else add_sinks(out, lse, sinks))
    return torch.stack(rows).to(q.dtype)


@attention_op("spec_compile::flashinfer_tree_attention")
def tree_attention(call: AttentionCall) -> Tensor:
    """The call, which reads the lengths on the host only for chunks of more than 64 tokens. -> [B, N, H, D]."""
    if call.q.shape[2] > MAX_NODES:
        return _with_lengths_on_host(call)
    append(call.key_cache, call.k, call.lengths)
    append(call.value_cache, call.v, call.lengths)
    return xqa.attention(call.q, call.key_cache, call.value_cache, call.lengths, call.ancestors, call.sinks, call.scale)


def part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, D] to k, v [Hkv, S, D]; causal: the queries are those of the last N slots.

    -> out [N, H, D], natural log-sum-exp [N, H].
    """
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        q, k.transpose(0, 1), v.transpose(0, 1), causal=causal, sm_scale=scale, logits_soft_cap=softcap,
        window_left=-1 if window is None else window - 1, return_lse=True,
    )  # fmt: skip
    return out, lse * math.log(2)  # it gives logarithms of base 2


def block(
    q: Tensor, k: Tensor, v: Tensor, ancestors: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention of a tree to itself: q [H, N, D], k, v [Hkv, N, D], ancestors [N] -> as `part`, in float32."""
    q, k, v = q.float(), *(x.float().repeat_interleave(q.shape[0] // k.shape[0], 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = (ancestors[:, None] >> torch.arange(q.shape[1], device=q.device)) & 1
    scores = scores.masked_fill(seen == 0, -math.inf)
    return (scores.softmax(2) @ v).transpose(0, 1), scores.logsumexp(2).transpose(0, 1)


def load(use: Use) -> Callable:
    try:
        installed = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            f"attention_backend: 'flashinfer' needs FlashInfer: pip install \"flashinfer-python>={MIN_VERSION}\""
        ) from None
    if Version(installed) < Version(MIN_VERSION):
        raise ImportError(
            f"attention_backend: 'flashinfer' needs FlashInfer {MIN_VERSION} or later, {installed} is installed: "
            f'pip install -U "flashinfer-python>={MIN_VERSION}"'
        )
    ops = torch.ops.spec_compile
    return (ops.flashinfer_tree_attention if use.captured else ops.flashinfer_attention).default


BACKEND = Backend(
    "flashinfer",
    load,
    frozenset({"cuda"}),
    frozenset(HALF),
    causal=frozenset({"window", "softcap", "sinks"}),
    trees=frozenset({"softcap", "sinks"}),
    captured=frozenset({"sinks"}),
    sizes=frozenset({64, 128, 256}),
)
