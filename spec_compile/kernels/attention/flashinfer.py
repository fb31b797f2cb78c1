"""Backend "flashinfer", a preview: FlashInfer's kernels over the committed slots. Not run on a GPU yet.

Its kernels that read lengths on the device give no log-sum-exp, and those that give one have their lengths from the
host: so a CUDA graph cannot hold this backend, and it serves prompts, or with ``cuda_graphs=False`` anything. A kernel
that knows no token trees serves them in two parts, the committed slots and the block itself (`merge`).
"""

import importlib.util
import math
from collections.abc import Callable

import torch
from torch import Tensor

from .append import append
from .base import HALF, Backend
from .merge import add_sinks, merge


@torch.library.custom_op("spec_compile::flashinfer_attention", mutates_args=("key_cache", "value_cache"))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lengths: Tensor,
    ancestors: Tensor | None,
    positions: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> Tensor:
    """See `base.Backend`. Reads the lengths on the host. -> [B, N, H, Dv]."""
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


@attention.register_fake
def _(q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window):
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None, window: int | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Attention of q [N, H, D] to k, v [Hkv, S, D], of which a causal chunk is the last N.

    -> out [N, H, D], natural log-sum-exp [N, H].
    """
    from flashinfer import single_prefill_with_kv_cache

    out, lse = single_prefill_with_kv_cache(
        q, k.contiguous(), v.contiguous(), causal=causal, kv_layout="HND", sm_scale=scale, logits_soft_cap=softcap,
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


def load() -> Callable:
    if importlib.util.find_spec("flashinfer") is None:
        raise ImportError("attention_backend: 'flashinfer' needs FlashInfer: pip install flashinfer-python")
    return torch.ops.spec_compile.flashinfer_attention.default


BACKEND = Backend(
    "flashinfer",
    load,
    frozenset({"cuda"}),
    HALF,
    causal=frozenset({"window", "softcap", "sinks"}),
    trees=frozenset({"softcap", "sinks"}),
    captured=False,
    sizes=frozenset({64, 128, 256}),
)
