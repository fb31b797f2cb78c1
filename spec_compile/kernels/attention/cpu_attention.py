"""Backend "cpu": a kernel in C++ (cpu_attention.cpp) that reads keys and values once for all nodes and query heads.

Like the kernels for GPUs it adds up the keys of a token in blocks of positions, so that its bits depend on its own
position and path only: not on the tree, the batch, the sizes of chunks of a prompt, nor the number of threads.
"""

import math

import torch
from torch import Tensor

from ... import extensions
from .. import ops
from ..cpu_level import HIGHEST
from ..plain import are_plain
from . import sdpa
from .base import Backend
from .call import TARGETS, AttentionCall, from_arguments, schema_of

_cpu_attention = extensions.load_if_built("kernels.attention._cpu_attention", "attention on a CPU is slower")
LEVELS = ("C++", "AVX2", "AVX-512", "AVX-512 with BF16")
"""The instructions of each level; the kernel takes the last that the CPU has and `cpu_level` allows."""
BEST = None if _cpu_attention is None else min(_cpu_attention.best(), HIGHEST)
"""The level that it takes; None: there is no kernel."""
LOG2E = math.log2(math.e)
DTYPES = torch.float32, torch.bfloat16
TAKES = frozenset({"cos", "sin"})
"""See `base.Backend.takes`."""


def cpu_attention(call: AttentionCall) -> Tensor:
    """The call. -> [B, N, H, Dv]."""
    if not are_plain():
        return attend(call)
    if call.cos is not None:
        q, k = (ops.rotated(x, call.cos, call.sin) for x in call[:2])
        call = call._replace(q=q, k=k, cos=None, sin=None)
    return sdpa.attention(*call)


def attend(call: AttentionCall, level: int | None = None) -> Tensor:
    """The call by the kernel, at a level of instructions (None: the best)."""
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in call[:3])
    lengths, positions = call.lengths.contiguous(), call.positions.contiguous()
    ancestors = None if call.ancestors is None else call.ancestors.contiguous()
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    cos, sin = (None if x is None else x.contiguous() for x in (call.cos, call.sin))
    outer = call.scale if call.softcap is None else call.softcap
    inner = 0.0 if call.softcap is None else call.scale / call.softcap * 2 * LOG2E
    out = call.empty_output()
    batch, heads, nodes, key_dim = q.shape
    _, kv_heads, slots, value_dim = call.value_cache.shape
    _cpu_attention.attend(
        q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride(), call.key_cache.data_ptr(),
        call.value_cache.data_ptr(), 0 if cos is None else cos.data_ptr(), 0 if sin is None else sin.data_ptr(),
        lengths.data_ptr(), 0 if ancestors is None else ancestors.data_ptr(), positions.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        (batch, heads, kv_heads, nodes, slots, key_dim, value_dim), inner, outer * LOG2E, call.softcap is not None,
        q.dtype == torch.bfloat16, call.window or 0, BEST if level is None else level, torch.get_num_threads(),
    )  # fmt: skip
    return out


# `torch.library.custom_op` would add 15 microseconds to each of the layers of a round.
_LIBRARY = torch.library.Library("spec_compile", "FRAGMENT")
_LIBRARY.define("cpu_attention" + schema_of(TAKES))
_LIBRARY.impl("cpu_attention", from_arguments(cpu_attention, TAKES), "CPU")
torch.library.register_fake("spec_compile::cpu_attention", from_arguments(AttentionCall.empty_output, TAKES))
TARGETS.add(torch.ops.spec_compile.cpu_attention.default)
BACKEND = Backend(
    "cpu", lambda use: torch.ops.spec_compile.cpu_attention.default, frozenset({"cpu"}), frozenset(DTYPES),
    takes=TAKES,
)  # fmt: skip
