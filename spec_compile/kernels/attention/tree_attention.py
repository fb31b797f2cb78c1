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
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...tree import MAX_NODES
from .. import dependent_launch, ops
from ..norm import rms_norm
from ..ptx import prefetch_l2
from .call import Call, attention_op, from_arguments

LOG2E = math.log2(math.e)


@attention_op("spec_compile::tree_attention", rotates=True, device_types="cpu")
def tree_attention(call: Call) -> Tensor:
    """The call in plain PyTorch, which is what the op does on a CPU. -> [B, N, H, Dv]."""
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *_ = call
    if call.q_norm is not None:
        q, k = (rms_norm(x, w, call.eps, call.offset) for x, w in ((q, call.q_norm), (k, call.k_norm)))
    if call.cos is not None:
        q, k = (ops.rotated(x, call.cos, call.sin) for x in (q, k))
    span = int(lengths.max()) + q.shape[2]
    mask = ops.tree_mask(positions, lengths, ancestors, span, window, q.shape[1] // k.shape[1], q.dtype)
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


def launch(call: Call, config: Tuning | None = None) -> Tensor:
    """`tree_attention` by the kernels, as `config` says (None: as `tuning` does).

    The kernels for a tree are launched early (see `dependent_launch`), those for a causal chunk as ever.
    """
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *turning = call
    cos, sin, q_norm, k_norm, eps, offset = turning
    batch, heads, nodes, key_dim = q.shape
    kv_heads, capacity, value_dim = k.shape[1], key_cache.shape[2], v.shape[3]
    group = heads // kv_heads
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if cos is not None and not cos.shape == sin.shape == (batch, nodes, key_dim):
        shapes = f"{list(cos.shape)} and {list(sin.shape)}"
        raise ValueError(f"cos, sin: expected {[batch, nodes, key_dim]}, a row for each of k's, got {shapes}")
    if q_norm is not None and (cos is None or not q_norm.shape == k_norm.shape == (key_dim,)):
        shapes = f"{list(q_norm.shape)} and {list(k_norm.shape)}"
        raise ValueError(f"q_norm, k_norm: expected weights [{key_dim}], with cos and sin, got {shapes}")
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
        _append[(triton.cdiv(nodes, 32), batch * kv_heads)](
            *block, cos, sin, k_norm, *strides, nodes, capacity, *norm, BLOCK=32, **keys
        )
    _attention[(tiles * splits, batch * kv_heads)](
        q, *block, ancestors, positions, sinks, cos, sin, q_norm, k_norm, out, parts, sums, *q.stride()[:3], *strides,
        positions.stride(0), nodes, splits, least, capacity,
        scale / softcap * 2 * LOG2E if softcap is not None else 0.0,
        (softcap if softcap is not None else scale) * LOG2E, *norm, SOFTCAP=softcap is not None,
        BLOCK_OWN=min(max(triton.next_power_of_2(nodes), 16), block_n), ALONE=splits == 1,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        **shared, **keys, num_warps=warps, num_stages=stages, **options,
    )  # fmt: skip
    if splits > 1:
        _merge[(nodes * heads, batch)](
            lengths, positions, out, parts, sums, positions.stride(0), nodes, splits, least,
            HEADS=heads, CHUNK=min(triton.next_power_of_2(splits), 16), **shared, **values, num_warps=1, **options,
        )  # fmt: skip
    return out


tree_attention.register_kernel("cuda")(from_arguments(launch))


@triton.jit
def _plan(
    lengths, positions, batch, stride_p, node, nodes, splits, least,
    WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, APPENDED: tl.constexpr,
):  # fmt: skip
    """length: committed slots. Those that some of the nodes see, with the block if it is APPENDED: first .. stop, in
    parts of `size`. owner: the split that also takes what lies in no cache, and the last: one without a part if there
    is one, so that nobody waits for it."""
    length = tl.load(lengths + batch).to(tl.int32)
    stop = length
    if APPENDED:
        stop += tl.minimum(tl.max(node, 0) + 1, nodes)
    first = tl.zeros_like(length)
    if WINDOW is not None:
        position = tl.load(positions + batch * stride_p + node, mask=node < nodes, other=1 << 30).to(tl.int32)
        first = tl.minimum(tl.maximum(tl.min(position, 0) - WINDOW + 1, 0), length)
        if APPENDED:  # positions ascend
            first = tl.where(first < length, first, length + tl.maximum(tl.min(node, 0) - WINDOW + 1, 0))
    size = tl.maximum(tl.cdiv(tl.cdiv(stop - first, splits), BLOCK_N) * BLOCK_N, least)
    owner = tl.minimum(tl.cdiv(stop - first, size), splits - 1)
    return length, first, stop, size, owner


@triton.jit
def _step(
    q, k, v, seen, acc, peak, total, inner, outer, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """One block of keys and values into a running softmax (base 2). seen: which scores count; None: all."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        scores = 1 - 2 / (tl.exp2(scores * inner) + 1)  # tanh
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1) * outer)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * outer - base[:, None])
    keep = tl.exp2(peak - base)
    total = total * keep + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * keep[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def _stored(x, cache):
    """`ops.stored`."""
    dtype: tl.constexpr = cache.dtype.element_ty
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0)
    return x.to(dtype)


@triton.jit
def _prefetch_slots(cache, begin, end, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Fetch the first BLOCK_N of the slots begin .. end to the L2 cache, by lines of 128 bytes."""
    LINE: tl.constexpr = 1024 // cache.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = BLOCK_D // LINE if BLOCK_D > LINE else 1
    slot = tl.maximum(tl.minimum(begin + tl.arange(0, BLOCK_N), end - 1), 0)
    column = tl.minimum(tl.arange(0, LINES) * LINE, D - 1)
    prefetch_l2((cache + slot[:, None] * D + column[None, :]).to(tl.int64))


@triton.jit
def _scaled(x, weight, offset, dtype: tl.constexpr, ROUND_FIRST: tl.constexpr):
    """The end of `rms_norm`, rounded as it rounds."""
    if ROUND_FIRST:
        x = x.to(dtype).to(tl.float32) * weight.to(tl.float32)
    else:
        x *= weight.to(tl.float32) + offset
    return x.to(dtype).to(tl.float32)


@triton.jit
def _load_rotated(
    at, dim, cos, sin, norm, eps, offset, mask, D: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr
):
    """The rows [R, D] at the addresses [R, 1] as `rotated` turns them, normed before if `norm` is the weight [D], and
    rounded once after the rotation. cos, sin: addresses [R, 1]."""
    half: tl.constexpr = D // 2
    across = tl.where(dim < half, dim + half, dim - half)
    across = tl.multiple_of(tl.max_contiguous(across, ALIGNED), ALIGNED)[None, :]
    first, dim = (dim < half)[None, :], dim[None, :]
    loaded = tl.load(at + dim, mask=mask, other=0.0)
    dtype: tl.constexpr = loaded.dtype
    x = loaded.to(tl.float32)
    other = tl.load(at + across, mask=mask, other=0.0).to(tl.float32)
    if norm is not None:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = _scaled(x * scale, tl.load(norm + dim, mask=dim < D, other=0.0), offset, dtype, ROUND_FIRST)
        weight = tl.load(norm + across, mask=dim < D, other=0.0)
        other = _scaled(other * scale, weight, offset, dtype, ROUND_FIRST)
    straight = x * tl.load(cos + dim, mask=mask, other=0.0).to(tl.float32)
    turned = tl.where(first, -other, other) * tl.load(sin + dim, mask=mask, other=0.0).to(tl.float32)
    return (straight + turned).to(dtype)


@triton.jit
def _take(
    k, v, key_cache, value_cache, stride_kn, stride_vn, token, nodes, length, capacity, keep,
    cos, sin, turn, norm, eps, offset,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """Keys and values of the block's tokens `token` as the cache holds them; with `keep` it does from now on."""
    dk, dv = tl.arange(0, BLOCK_DK)[None, :], tl.arange(0, BLOCK_DV)[None, :]
    inside = (token < nodes)[:, None]
    at, mask = k + token[:, None] * stride_kn, inside & (dk < DK)
    if cos is None:
        keys = tl.load(at + dk, mask=mask, other=0.0)
    else:
        angle = (turn + token)[:, None] * DK
        keys = _load_rotated(
            at, tl.arange(0, BLOCK_DK), cos + angle, sin + angle, norm, eps, offset, mask, DK, ALIGNED, ROUND_FIRST
        )
    values = tl.load(v + token[:, None] * stride_vn + dv, mask=inside & (dv < DV), other=0.0)
    keys, values = _stored(keys, key_cache), _stored(values, value_cache)
    if keep:
        slot = (length + token)[:, None]
        inside = inside & (slot < capacity)
        tl.store(key_cache + slot * DK + dk, keys, mask=inside & (dk < DK))
        tl.store(value_cache + slot * DV + dv, values, mask=inside & (dv < DV))
    return keys, values


@triton.jit(do_not_specialize=["nodes"])
def _append(
    k, v, key_cache, value_cache, lengths, cos, sin, k_norm,
    stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, nodes, capacity, eps, offset,
    BLOCK: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, BLOCK_DK: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr,
):  # fmt: skip
    """A causal chunk into the cache, BLOCK tokens of a KV head a program."""
    group = tl.program_id(1).to(tl.int64)
    batch, kv_head = group // KV_HEADS, group % KV_HEADS
    _take(
        k + batch * stride_kb + kv_head * stride_kh, v + batch * stride_vb + kv_head * stride_vh,
        key_cache + group * capacity * DK, value_cache + group * capacity * DV, stride_kn, stride_vn,
        tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), nodes, tl.load(lengths + batch).to(tl.int32), capacity, True,
        cos, sin, batch * nodes, k_norm, eps, offset, DK, BLOCK_DK, DV, BLOCK_DV, ALIGNED, ROUND_FIRST,
    )  # fmt: skip


@triton.jit(do_not_specialize=["nodes", "splits", "least"])
def _attention(
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, cos, sin, q_norm, k_norm, out, parts, sums,
    stride_qb, stride_qh, stride_qn, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn, stride_p,
    nodes, splits, least, capacity, inner, outer, eps, offset,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_OWN: tl.constexpr, ALONE: tl.constexpr,
    DK: tl.constexpr, BLOCK_DK: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    ALIGNED: tl.constexpr, ROUND_FIRST: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
    APPENDED: tl.constexpr,
):  # fmt: skip
    """APPENDED: the block is a causal chunk, and lies in the cache already."""
    if EARLY:
        gdc_launch_dependents()  # the merge may take its place on the GPU, and wait there
    tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    tile, split = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if APPENDED:
        tile = tiles - 1 - tile  # those with the most to see begin first
    batch, kv_head = (tl.program_id(1) // KV_HEADS).to(tl.int64), (tl.program_id(1) % KV_HEADS).to(tl.int64)
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    node, head = row // GROUP, kv_head * GROUP + row % GROUP
    length, first, stop, size, owner = _plan(
        lengths, positions, batch, stride_p, node, nodes, splits, least, WINDOW, BLOCK_N, APPENDED
    )
    key_cache += tl.program_id(1).to(tl.int64) * capacity * DK
    value_cache += tl.program_id(1).to(tl.int64) * capacity * DV
    begin = first + split * size
    end = tl.minimum(begin + size, tl.minimum(stop, capacity))
    if EARLY:
        _prefetch_slots(key_cache, begin, end, DK, BLOCK_DK, BLOCK_N)
        _prefetch_slots(value_cache, begin, end, DV, BLOCK_DV, BLOCK_N)
        gdc_wait()
    if split > owner:
        return

    real = row < nodes * GROUP
    dk, dv = tl.arange(0, BLOCK_DK), tl.arange(0, BLOCK_DV)
    real_dk, real_dv = (dk < DK)[None, :], (dv < DV)[None, :]
    q_at = q + batch * stride_qb + head[:, None] * stride_qh + node[:, None] * stride_qn
    if cos is None:
        query = tl.load(q_at + dk[None, :], mask=real[:, None] & real_dk, other=0.0)
    else:
        turn = (batch * nodes + node)[:, None] * DK
        mask = real[:, None] & real_dk
        query = _load_rotated(q_at, dk, cos + turn, sin + turn, q_norm, eps, offset, mask, DK, ALIGNED, ROUND_FIRST)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if WINDOW is not None:
        position = tl.load(positions + batch * stride_p + node, mask=real, other=0).to(tl.int32)

    slot = tl.arange(0, BLOCK_N)
    if WINDOW is None:  # blocks that need no mask
        whole = end
        if APPENDED:
            whole = tl.minimum(end, length + tile * BLOCK_M // GROUP + 1)
        whole = begin + tl.maximum(whole - begin, 0) // BLOCK_N * BLOCK_N
        for start in range(begin, whole, BLOCK_N):
            at = start + slot
            keys = tl.load(key_cache + at[:, None] * DK + dk[None, :], mask=real_dk, other=0.0).to(query.dtype)
            values = tl.load(value_cache + at[:, None] * DV + dv[None, :], mask=real_dv, other=0.0).to(query.dtype)
            acc, peak, total = _step(query, keys, values, None, acc, peak, total, inner, outer, SOFTCAP, PRECISION)
        begin = whole
    for start in tl.range(begin, end, BLOCK_N, num_stages=1 if WINDOW is None and not APPENDED else None):
        at = start + slot
        inside = at < end
        keys = tl.load(key_cache + at[:, None] * DK + dk[None, :], mask=inside[:, None] & real_dk, other=0.0)
        values = tl.load(value_cache + at[:, None] * DV + dv[None, :], mask=inside[:, None] & real_dv, other=0.0)
        keys, values = keys.to(query.dtype), values.to(query.dtype)
        seen = inside[None, :]
        if APPENDED:
            seen = seen & (at[None, :] - length <= node[:, None])
        if WINDOW is not None:
            there = at
            if APPENDED:
                own = tl.load(positions + batch * stride_p + at - length, mask=inside & (at >= length), other=0)
                there = tl.where(at < length, at, own.to(tl.int32))
            seen = seen & (position[:, None] - there[None, :] < WINDOW)
        acc, peak, total = _step(query, keys, values, seen, acc, peak, total, inner, outer, SOFTCAP, PRECISION)

    if split == owner and sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
        higher = tl.maximum(peak, sink)
        keep = tl.exp2(peak - higher)
        total = total * keep + tl.exp2(sink - higher)
        acc *= keep[:, None]
        peak = higher
    if split == owner and not APPENDED:  # the block itself; of its tiles, the last sees and appends all of it
        k += batch * stride_kb + kv_head * stride_kh
        v += batch * stride_vb + kv_head * stride_vh
        last = nodes
        if ancestors is None:
            last = tl.minimum(nodes, (tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1)
        else:
            bits = tl.load(ancestors + batch * nodes + node, mask=real, other=0)
        own = tl.arange(0, BLOCK_OWN)
        for start in tl.range(0, last, BLOCK_OWN, num_stages=1):
            j = start + own
            keys, values = _take(
                k, v, key_cache, value_cache, stride_kn, stride_vn, j, nodes, length, capacity, tile == tiles - 1,
                cos, sin, batch * nodes, k_norm, eps, offset, DK, BLOCK_DK, DV, BLOCK_DV, ALIGNED, ROUND_FIRST,
            )  # fmt: skip
            keys, values = keys.to(query.dtype), values.to(query.dtype)
            if ancestors is None:
                seen = j[None, :] <= node[:, None]
            else:
                here = bits >> start
                if BLOCK_OWN <= 32:
                    here = here.to(tl.int32)
                seen = ((here[:, None] >> own[None, :].to(here.dtype)) & 1) != 0
            inside = j < nodes
            seen = seen & inside[None, :]
            if WINDOW is not None:
                there = tl.load(positions + batch * stride_p + j, mask=inside, other=0).to(tl.int32)
                seen = seen & (position[:, None] - there[None, :] < WINDOW)
            acc, peak, total = _step(query, keys, values, seen, acc, peak, total, inner, outer, SOFTCAP, PRECISION)

    if ALONE:
        out_at = out + batch * nodes * (KV_HEADS * GROUP * DV) + (node * (KV_HEADS * GROUP) + head)[:, None] * DV
        tl.store(out_at + dv[None, :], acc / total[:, None], mask=real[:, None] & real_dv)
    else:
        part = (tl.program_id(1) * tiles + tile).to(tl.int64) * splits + split
        r = tl.arange(0, BLOCK_M)
        tl.store(parts + part * (BLOCK_M * DV) + r[:, None] * DV + dv[None, :], acc, mask=real[:, None] & real_dv)
        tl.store(sums + part * (2 * BLOCK_M) + r, peak)
        tl.store(sums + part * (2 * BLOCK_M) + BLOCK_M + r, total)


@triton.jit(do_not_specialize=["nodes", "splits", "least"])
def _merge(
    lengths, positions, out, parts, sums, stride_p, nodes, splits, least,
    HEADS: tl.constexpr, WINDOW: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr, APPENDED: tl.constexpr,
):  # fmt: skip
    """out = the parts' sums weighed by their peaks, one row a program."""
    if EARLY:
        gdc_launch_dependents()
    batch = tl.program_id(1).to(tl.int64)
    node, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    row = node * GROUP + head % GROUP
    tile = row // BLOCK_M
    tile_nodes = (tile * BLOCK_M + tl.arange(0, BLOCK_M)) // GROUP
    _, _, _, _, owner = _plan(
        lengths, positions, batch, stride_p, tile_nodes, nodes, splits, least, WINDOW, BLOCK_N, APPENDED
    )
    if EARLY:
        gdc_wait()
    tiles = tl.cdiv(nodes * GROUP, BLOCK_M)
    part = ((batch * (HEADS // GROUP) + head // GROUP) * tiles + tile) * splits
    parts += (part * BLOCK_M + row % BLOCK_M) * DV
    sums += part * 2 * BLOCK_M + row % BLOCK_M
    dv = tl.arange(0, BLOCK_DV)
    peak, total = float("-inf"), 0.0
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, owner + 1, CHUNK):
        split = start + tl.arange(0, CHUNK)
        there = split <= owner
        inside = there[:, None] & (dv < DV)[None, :]
        peaks = tl.load(sums + split * (2 * BLOCK_M), mask=there, other=float("-inf"))
        totals = tl.load(sums + split * (2 * BLOCK_M) + BLOCK_M, mask=there, other=0.0)
        chunk = tl.load(parts + split[:, None] * (BLOCK_M * DV) + dv[None, :], mask=inside, other=0.0)
        higher = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        keep, weights = tl.exp2(peak - base), tl.exp2(peaks - base)
        total = total * keep + tl.sum(totals * weights, 0)
        acc = acc * keep + tl.sum(chunk * weights[:, None], 0)
        peak = higher
    at = out + ((batch * nodes + node) * HEADS + head) * DV + dv
    tl.store(at, acc / total, mask=dv < DV)
