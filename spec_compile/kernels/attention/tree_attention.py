"""Tree attention on a GPU: append a block of keys and values to the cache, attend to the cache and to the block itself.

Import this module only where Triton is installed. One program takes one part ("split") of the committed slots for up to
`block_m` rows, a row being one query head of one node: all nodes and all query heads of a KV head share what is read of
the cache. The grid is fixed and every program finds its part from the lengths on the device, so that a captured graph
stays right as they grow. A second kernel merges the parts in their order, so that results never differ between runs.
A causal chunk larger than any tree is appended by a kernel of its own; then it is committed slots like all before it.
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...tree import MAX_NODES
from .. import dependent_launch, ops
from ..norm import rms_norm
from .block_kernels import append_kernel
from .call import Call, attention_op, from_arguments
from .kernels import attention_kernel, merge_kernel

LOG2E = math.log2(math.e)


@attention_op("spec_compile::tree_attention", rotates=True, device_types="cpu")
def tree_attention(call: Call) -> Tensor:
    """The call in plain PyTorch, which is what the op does on a CPU. -> [B, N, H, Dv]."""
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *_ = call
    if call.q_norm is not None:
        q, k = (rms_norm(x, w, call.eps, call.offset) for x, w in ((q, call.q_norm), (k, call.k_norm)))
    if call.cos is not None:
        q, k = (ops.rotated(x, call.cos, call.sin) for x in (q, k))
    max_kv_len = int(lengths.max()) + q.shape[2]
    mask = ops.tree_mask(positions, lengths, ancestors, max_kv_len, window, q.shape[1] // k.shape[1], q.dtype)
    caches = key_cache, value_cache
    if key_cache.dtype != q.dtype:
        k, v = (ops.stored(x, key_cache.dtype).to(q.dtype) for x in (k, v))
        caches = [cache.to(q.dtype) for cache in caches]
    out = ops.append_and_attend(q, k, v, *caches, lengths, mask, sinks, scale, softcap).contiguous()
    if key_cache.dtype != q.dtype:
        key_cache.copy_(caches[0])
        value_cache.copy_(caches[1])
    return out


class Tuning(NamedTuple):
    """How `launch` divides the work. block_m: rows of a program; block_n: slots it reads at a time; splits: parts of
    the cache at most; least: slots of a part at least."""

    block_m: int
    block_n: int
    splits: int
    least: int
    warps: int
    stages: int


@functools.cache
def _device(index: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory a program may take."""
    facts = torch.cuda.get_device_properties(index)
    return facts.multi_processor_count, facts.shared_memory_per_block_optin


@functools.cache
def tuning(rows: int, groups: int, key_dim: int, value_dim: int, itemsize: int, device: int) -> Tuning:
    """For `rows` rows a KV head and `groups` = B * Hkv."""
    processors, memory = _device(device)
    wide = key_dim + value_dim > 256
    block_m, most, warps = (16, 128, 4) if rows <= 16 else (64, 128, 4) if rows <= 64 or wide else (128, 128, 8)
    if itemsize == 4:  # no tensor cores: what does not fit into registers is slow, and takes long to compile
        block_m, most, warps = 16, 32, 8
    key_dim, value_dim = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    slot = (key_dim + value_dim) * itemsize
    room = memory - 1024 - block_m * key_dim * itemsize
    block = min((64 if block_m == 128 else 32) * 1024, room // 2)
    block_n = min(max(1 << ((block // slot).bit_length() - 1), 16), most)
    stages = min(max(room // (block_n * slot), 1), 4)
    splits = min(max(processors // (groups * triton.cdiv(rows, block_m)), 1), 128)
    return Tuning(block_m, block_n, splits, 256 if block_m == 128 else 64, warps, stages)


def _check(call: Call) -> None:
    """ValueError for arguments that the kernels would misread."""
    batch, _, nodes, key_dim = call.q.shape
    if call.scale <= 0:
        raise ValueError(f"scale must be positive, not {call.scale}")
    if call.cos is not None and not call.cos.shape == call.sin.shape == (batch, nodes, key_dim):
        shapes = f"{list(call.cos.shape)} and {list(call.sin.shape)}"
        raise ValueError(f"cos, sin: expected {[batch, nodes, key_dim]}, a row for each of k's, got {shapes}")
    if call.q_norm is not None and (call.cos is None or not call.q_norm.shape == call.k_norm.shape == (key_dim,)):
        shapes = f"{list(call.q_norm.shape)} and {list(call.k_norm.shape)}"
        raise ValueError(f"q_norm, k_norm: expected weights [{key_dim}], with cos and sin, got {shapes}")


def launch(call: Call, config: Tuning | None = None) -> Tensor:
    """`tree_attention` by the kernels, as `config` says (None: as `tuning` does).

    The kernels for a tree are launched early (see `dependent_launch`), those for a causal chunk as ever.
    """
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *turning = call
    cos, sin, q_norm, k_norm, eps, offset = turning
    batch, heads, nodes, key_dim = q.shape
    kv_heads, capacity, value_dim = k.shape[1], key_cache.shape[2], v.shape[3]
    group = heads // kv_heads
    _check(call)
    if config is None:
        config = tuning(group * nodes, batch * kv_heads, key_dim, value_dim, q.element_size(), q.device.index)
    block_m, block_n, splits, least, warps, stages = config
    tiles = triton.cdiv(nodes * group, block_m)
    q, k, v, positions = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v, positions))
    ancestors, cos, sin = (x if x is None else x.contiguous() for x in (ancestors, cos, sin))

    out = call.empty_output()
    parts, sums = out, lengths  # never touched where there is one split
    if splits > 1:
        parts = q.new_empty(batch * kv_heads * tiles, splits, block_m, value_dim, dtype=torch.float32)
        sums = q.new_empty(batch * kv_heads * tiles, splits, 2, block_m, dtype=torch.float32)
    early = ancestors is not None and dependent_launch.available(q)
    options = {"launch_pdl": True} if early else {}
    appended = nodes > MAX_NODES
    shared = {"WINDOW": window, "GROUP": group, "BLOCK_M": block_m, "BLOCK_N": block_n}
    shared |= {"EARLY": early, "APPENDED": appended}
    values = {"DV": value_dim, "BLOCK_DV": triton.next_power_of_2(value_dim)}
    keys = {"KV_HEADS": kv_heads, "DK": key_dim, "BLOCK_DK": triton.next_power_of_2(key_dim), **values}
    keys |= {"ALIGNED": key_dim // 2 & -(key_dim // 2), "ROUND_FIRST": offset is None}
    block = k, v, key_cache, value_cache, lengths
    strides = *k.stride()[:3], *v.stride()[:3]
    norm = eps, 0.0 if offset is None else offset
    if appended:
        append_kernel[(triton.cdiv(nodes, 32), batch * kv_heads)](
            *block, cos, sin, k_norm, *strides, nodes, capacity, *norm, BLOCK=32, **keys
        )
    attention_kernel[(tiles * splits, batch * kv_heads)](
        q, *block, ancestors, positions, sinks, cos, sin, q_norm, k_norm, out, parts, sums, *q.stride()[:3], *strides,
        positions.stride(0), nodes, splits, least, capacity,
        scale / softcap * 2 * LOG2E if softcap is not None else 0.0,
        (softcap if softcap is not None else scale) * LOG2E, *norm, SOFTCAP=softcap is not None,
        BLOCK_OWN=min(max(triton.next_power_of_2(nodes), 16), block_n), ALONE=splits == 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **shared, **keys, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(nodes * heads, batch)](
            lengths, positions, out, parts, sums, positions.stride(0), nodes, splits, least,
            HEADS=heads, CHUNK=min(triton.next_power_of_2(splits), 16), **shared, **values, num_warps=1, **options,
        )  # fmt: skip
    return out


tree_attention.register_kernel("cuda")(from_arguments(launch))
