"""Backend "cpu": a kernel in C++ (cpu_attention.cpp) that reads keys and values once for all nodes and query heads.

Like the kernels for GPUs it adds up the keys of a token in blocks of positions, so that its bits depend on its own
position and path only: not on the tree, the batch, the sizes of chunks of a prompt, nor the number of threads.
"""

import math

import torch
from torch import Tensor

from ... import extensions
from ...cache import PAGE
from ...tree import MAX_NODES
from ..cpu import HIGHEST
from ..launching import LIBRARY, are_plain, expect
from .base import TARGETS, AttentionCall, Backend, attention_schema, from_arguments, plain_attention

_cpu_attention = extensions.load_if_built("kernels.native._cpu_attention", "attention on a CPU is slower")
LEVELS = ("C++", "AVX2", "AVX-512", "AVX-512 with BF16")
"""The instructions of each level; the kernel takes the last that the CPU has and `kernels.cpu` allows."""
BEST = None if _cpu_attention is None else min(_cpu_attention.best(), HIGHEST)
"""The level that it takes; None: there is no kernel."""
LOG2E = math.log2(math.e)
LARGEST = 1 << 16
"""The largest scale and softcap: with larger ones float32 loses digits that softmax needs."""
DTYPES = torch.float32, torch.bfloat16


def cpu_attention(call: AttentionCall) -> Tensor:
    """The call. -> [B, N, H, Dv]."""
    if not are_plain():
        return attend(call)
    return plain_attention(call, call.key_cache.shape[2] * check(call))


def attend(call: AttentionCall, level: int | None = None) -> Tensor:
    """The call by the kernel, at a level of instructions (None: the best). See `check` for what is raised; the kernel
    checks lengths, positions, pages and addresses."""
    columns = check(call)
    q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in call[:3])  # the numbers of a head side by side
    lengths, positions = call.lengths.contiguous(), call.positions.contiguous()
    ancestors = None if call.ancestors is None else call.ancestors.contiguous()
    sinks = None if call.sinks is None else call.sinks.float().contiguous()
    cos, sin = (None if x is None else x.contiguous() for x in (call.cos, call.sin))
    outer = call.scale if call.softcap is None else call.softcap
    inner = 0.0 if call.softcap is None else call.scale / call.softcap * 2 * LOG2E
    out = call.empty_output()
    batch, heads, nodes, key_dim = q.shape
    if not batch or not nodes:
        return out
    pages, kv_heads, slots, value_dim = call.value_cache.shape
    table = call.table.contiguous() if columns > 1 else None
    _cpu_attention.attend(
        q.data_ptr(), q.stride(), k.data_ptr(), k.stride(), v.data_ptr(), v.stride(), call.key_cache.data_ptr(),
        call.value_cache.data_ptr(), 0 if cos is None else cos.data_ptr(), 0 if sin is None else sin.data_ptr(),
        lengths.data_ptr(), 0 if ancestors is None else ancestors.data_ptr(), positions.data_ptr(),
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(), 0 if table is None else table.data_ptr(),
        (batch, heads, kv_heads, nodes, pages, slots, columns, key_dim, value_dim), inner, outer * LOG2E,
        call.softcap is not None, q.dtype == torch.bfloat16, call.window or 0, BEST if level is None else level,
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def check(call: AttentionCall) -> int:
    """TypeError and ValueError for tensors of other dtypes and shapes than `AttentionCall` states; it reads none.

    -> the pages of a row: 1, or more with a table that has as many columns.

    Every layer of a round comes here, so it makes nothing but comparisons.
    """
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window = call[:12]
    if k is None or v is None:
        raise TypeError("k, v: expected tensors, got None")
    if not call.scales is call.q_norm is call.k_norm is call.chunk is call.slopes is call.chosen is None:
        raise TypeError("scales, q_norm, k_norm, chunk, slopes, chosen: expected None, because the kernel has none")
    dtype = q.dtype
    if dtype not in DTYPES:
        raise TypeError(f"q: expected float32 or bfloat16, got {dtype}")
    sizes, caches, value_sizes = q.shape, key_cache.shape, value_cache.shape
    if len(sizes) != 4 or len(caches) != 4 or len(value_sizes) != 4:
        raise ValueError("q, key_cache, value_cache: expected tensors of 4 dimensions")
    batch, heads, nodes, key_dim = sizes
    kv_heads, slots, value_dim = caches[1], caches[2], value_sizes[3]
    columns = 1 if call.table is None or call.table.shape == (batch, 1) else _columns(call.table, batch, slots)
    pages, row_slots = (batch if columns == 1 else caches[0]), slots * columns
    if not (heads and kv_heads and key_dim and value_dim) or heads % kv_heads:
        raise ValueError(
            f"q: expected a multiple of the cache's heads, and at least one number a head, got {heads} query heads for "
            f"{kv_heads} heads of {key_dim} and {value_dim} numbers"
        )
    block, keys, shared = (batch, nodes), (batch, kv_heads, nodes), (pages, kv_heads, slots)
    if k.shape != (*keys, key_dim) or v.shape != (*keys, value_dim) or not k.dtype is v.dtype is dtype:
        expect("k", k, (*keys, key_dim), dtype)
        expect("v", v, (*keys, value_dim), dtype)
    is_other = caches != (*shared, key_dim) or value_sizes != (*shared, value_dim)
    if is_other or not key_cache.dtype is value_cache.dtype is dtype:
        expect("key_cache", key_cache, (*shared, key_dim), dtype)
        expect("value_cache", value_cache, (*shared, value_dim), dtype)
    if positions.shape != block or lengths.shape != block[:1] or not lengths.dtype is positions.dtype is torch.int64:
        expect("lengths", lengths, block[:1], torch.int64)
        expect("positions", positions, block, torch.int64)
    if not key_cache.is_contiguous() or not value_cache.is_contiguous():
        raise ValueError("key_cache, value_cache: expected contiguous tensors")
    if row_slots < nodes or row_slots >= 1 << 31:
        raise ValueError(f"key_cache: expected {nodes} to 2 ** 31 - 1 slots of a row, got {row_slots}")
    if ancestors is not None:
        expect("ancestors", ancestors, block, torch.int64)
        if nodes > MAX_NODES:
            raise ValueError(f"ancestors: expected at most {MAX_NODES} nodes, got {nodes}")
    if sinks is not None:
        expect("sinks", sinks, (heads,), sinks.dtype if sinks.is_floating_point() else dtype)
    if call.cos is not None or call.sin is not None:
        _check_angles(call, (batch, nodes, key_dim))
    if not 0 < scale <= LARGEST or (softcap is not None and not 0 < softcap <= LARGEST):
        raise ValueError(f"scale, softcap: expected numbers above 0, at most {LARGEST}, got {scale}, {softcap}")
    if window is not None and window < 1:
        raise ValueError(f"window: expected an int of 1 or more, got {window}")
    return columns


def _columns(table: Tensor, batch: int, slots: int) -> int:
    """The columns of a table that has several, for pages of `slots` slots."""
    columns = table.shape[1] if table.dim() == 2 else 1
    expect("table", table, (batch, columns), torch.int32)
    if not columns or slots != PAGE:
        raise ValueError(f"table: expected pages of {PAGE} slots, got {columns} of {slots} in a row")
    return columns


def _check_angles(call: AttentionCall, shape: tuple[int, ...]) -> None:
    if call.cos is None or call.sin is None:
        raise TypeError("cos, sin: expected both or neither")
    if shape[2] % 2:
        raise ValueError(f"cos: expected heads of an even number of numbers, got {shape[2]}")
    expect("cos", call.cos, shape, call.q.dtype)
    expect("sin", call.sin, shape, call.q.dtype)


def _empty_output(call: AttentionCall) -> Tensor:
    """The fake result, for which sizes that are not known yet are not compared."""
    others = (x for x in call if isinstance(x, Tensor))
    if any(x.device != call.q.device for x in others):
        raise ValueError(f"q: expected all tensors on its device, {call.q.device}")
    if all(isinstance(size, int) for x in call if isinstance(x, Tensor) for size in x.shape):
        check(call)
    return call.empty_output()


LIBRARY.define("cpu_attention" + attention_schema())
LIBRARY.impl("cpu_attention", from_arguments(cpu_attention), "CPU")
torch.library.register_fake("spec_compile::cpu_attention", from_arguments(_empty_output))
TARGETS.add(torch.ops.spec_compile.cpu_attention.default)
BACKEND = Backend(
    "cpu", lambda use: torch.ops.spec_compile.cpu_attention.default, frozenset({"cpu"}), frozenset(DTYPES),
    takes=frozenset({"cos", "sin"}),
)  # fmt: skip
