"""Tree attention on a GPU: append a block of keys and values to the cache, attend to the cache and to the block itself.

Import this module only where Triton is installed. A tree takes three launches:

1. `append_kernel` norms and rotates queries and keys, and appends keys and values to the cache.
2. `tree_kernel` computes partial softmaxes over spans of the cache, and over the tail with the tree itself. A row is
   one query head of one node, so that all nodes and query heads of a KV head share what is read of the cache.
3. `merge_spans_kernel` adds up the parts of each row.

The grids are fixed and every program finds its work from the lengths on the device, so a captured graph stays right as
lengths grow. In 16 bits the output of a token has the same bits whether the token is a single root or a node of any
tree, and whatever else is in the batch, because the bounds of chunks and spans, in which keys are summed, are functions
of positions.

A causal chunk larger than any tree is appended, too, and then attends to the cache only, in one launch that sums keys
in the same order (`prompt_kernel`).
"""

import functools
import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...tree import MAX_NODES
from ..card import card_of, launches_early, multiplied_bytes, precision
from ..launching import on_gpu
from ..norms import rms_norm  # noqa: F401, defines an op that the plain form calls
from ..ops import is_paged
from .base import LAUNCHES, PIECES, AttentionCall, attention_op, from_arguments, plain_attention
from .block_kernels import append_kernel, prompt_kernel
from .partial_softmax import first_log2, key_columns, merge_spans_kernel, most_spans
from .tail_tiles import COLUMNS, nodes_per_tile, tail_tiles
from .tree_kernel import tree_kernel

LOG2E = math.log2(math.e)
MOST_COLUMNS = 128
"""Columns of values in a program of a tree; two sums of them must fit into registers."""
FEW = 16
"""Up to this many tiles of rows, a multiprocessor runs one program that reads further ahead, rather than two."""
MANY = 128
"""From this many tiles of rows on, a program takes all spans of its rows. Four trees of 64 nodes are 128 tiles of 64
rows with the heads of Llama-3.1-8B; on an H200 a layer took 40 us over 1,024 tokens and 198 over 8,192, and 53 and 281
with programs of a span each. With 64 tiles it took 1.04 to 1.28 times as long as those."""


@attention_op("spec_compile::tree_attention", device_types="cpu")
def tree_attention(call: AttentionCall) -> Tensor:
    """The call in plain PyTorch, which the op runs on a CPU. -> [B, N, H, Dv]."""
    return plain_attention(call, int(call.lengths.max()) + call.q.shape[2]).contiguous()


class Tuning(NamedTuple):
    """How `launch` divides the work. Rows, keys and spans are powers of two."""

    block_m: int  # rows of a program
    block_n: int  # keys of a chunk
    least: int  # the fewest slots of a span
    warps: int
    stages: int  # of Triton's pipeline
    most: int = 32  # the most spans of a token
    whole: bool = False  # a program takes all spans of its rows, for a tree


ROWS, KEYS = {2: 64, 4: 16, 8: 16}, 16
"""Rows of a program by the bytes of a number, and the fewest keys of a chunk."""
LARGEST_CHUNK = 64
"""The most keys of a chunk, each of which lies in one page."""


def least_memory(key_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes of shared memory that programs of heads of these sizes take at least."""
    key_dim, value_dim = triton.next_power_of_2(key_dim), min(triton.next_power_of_2(value_dim), MOST_COLUMNS)
    return (ROWS[itemsize] * key_dim + KEYS * (key_dim + value_dim)) * itemsize


@functools.cache
def prompt_tuning(key_dim: int, value_dim: int, itemsize: int, device: int) -> Tuning:
    """The tuning for a chunk larger than any tree. On an H200 two programs of 64 rows on a multiprocessor took 0.88 of
    the time of one with 128 rows."""
    order = tree_tuning(1, 1, key_dim, value_dim, itemsize, device)
    if itemsize == 4:
        return order
    key_dim, columns = triton.next_power_of_2(key_dim), min(triton.next_power_of_2(value_dim), MOST_COLUMNS)
    room = card_of(torch.device("cuda", device)).memory - 1024 - order.block_m * key_dim * itemsize
    return order._replace(stages=min(max(room // (order.block_n * (key_dim + columns) * itemsize), 1), 3))


@functools.cache
def tree_tuning(rows: int, pairs: int, key_dim: int, value_dim: int, itemsize: int, device: int) -> Tuning:
    """The tuning for a tree with `rows` rows for each of `pairs` = B * Hkv, from ``benchmarks/kernels/attention.py`` on
    an H200.

    block_n, least and most decide the bits of results, so they depend only on the sizes of heads. Programs that take a
    span each write and read a part of every row for each, so where tiles of rows keep all multiprocessors busy by
    themselves, programs that take all spans are faster.
    """
    # The shared memory that is left after the queries, and how many keys and values fit into it.
    memory = card_of(torch.device("cuda", device)).memory
    key_dim, value_dim = triton.next_power_of_2(key_dim), min(triton.next_power_of_2(value_dim), MOST_COLUMNS)
    block_m, largest, warps = ROWS[itemsize], LARGEST_CHUNK, 4
    if itemsize == 4:
        largest, warps = 32, 8
    slot = (key_dim + value_dim) * itemsize
    room = memory - 1024 - 128 * key_dim * itemsize
    block_n = min(max(1 << (max(room // slot, 1).bit_length() - 1), KEYS), largest)

    # Few tiles of rows read further ahead; many take all spans.
    tiles = pairs * triton.cdiv(rows, block_m)
    stages = min(max(room // (block_n * slot), 1), 4 if tiles <= FEW else 3)
    return Tuning(block_m, block_n, 128, warps, stages, whole=tiles >= MANY)


def _check(call: AttentionCall) -> None:
    """Raise ValueError for arguments that the kernels would misread."""
    batch, _, nodes, key_dim = call.q.shape
    if call.k is None and call.cos is not None:
        raise ValueError("k: expected keys to rotate, got None with cos and sin")
    if call.scale <= 0:
        raise ValueError(f"scale must be positive, not {call.scale}")
    if call.cos is not None and not call.cos.shape == call.sin.shape == (batch, nodes, key_dim):
        shapes = f"{list(call.cos.shape)} and {list(call.sin.shape)}"
        raise ValueError(f"cos, sin: expected {[batch, nodes, key_dim]}, a row for each of k's, got {shapes}")
    if call.q_norm is not None and (call.cos is None or not call.q_norm.shape == call.k_norm.shape == (key_dim,)):
        shapes = f"{list(call.q_norm.shape)} and {list(call.k_norm.shape)}"
        raise ValueError(f"q_norm, k_norm: expected weights [{key_dim}], with cos and sin, got {shapes}")
    if is_paged(call.table) and call.key_cache.shape[2] % LARGEST_CHUNK:
        size = call.key_cache.shape[2]
        raise ValueError(f"table: expected pages of a multiple of {LARGEST_CHUNK} slots, got pages of {size}")


def launch(call: AttentionCall, config: Tuning | None = None) -> Tensor:
    """`tree_attention` by the kernels. config: None: by `prompt_tuning` or `tree_tuning`."""
    _check(call)
    batch, heads, nodes, key_dim = call.q.shape
    kv_heads, value_dim = call.key_cache.shape[1], call.value_cache.shape[3]
    size = multiplied_bytes(call.q.dtype, call.q.device)
    rows, facts = heads // kv_heads * nodes, (key_dim, value_dim, size, call.q.device.index)

    # Kernels read rows of q, k, v and positions by their strides, and the others as they lie. Rows of one page need no
    # table.
    named = {name: getattr(call, name) for name in ("q", "k", "v", "positions")}
    named = {name: x for name, x in named.items() if x is not None and x.stride(-1) != 1}
    call = call._replace(**{name: x.contiguous() for name, x in named.items()})
    call = call._replace(table=call.table if is_paged(call.table) else None)
    named = {name: getattr(call, name) for name in ("ancestors", "cos", "sin", "slopes", "table")}
    call = call._replace(**{name: x if x is None else x.contiguous() for name, x in named.items()})

    # Launch what the arguments ask for.
    for argument, launch_with in LAUNCHES.items():
        if getattr(call, argument) is not None:
            return launch_with(call, _append(call, 32, 4, early=False))
    if nodes > MAX_NODES:
        return _launch_prompt(call, config or prompt_tuning(*facts))
    if pieces := PIECES.get():
        return _launch_apart(call, *pieces, facts)
    return _launch_tree(call, config or tree_tuning(rows, batch * kv_heads, *facts))


def _launch_apart(call: AttentionCall, lengths: Tensor, table: Tensor, rows: int, facts: tuple) -> Tensor:
    """The last rows, pieces of prompts (`base.riding`), as causal chunks, and the others as trees. facts: the other
    arguments of `tree_tuning`."""
    batch, heads, nodes, key_dim = call.q.shape
    prompts, own = len(lengths), batch - len(lengths) * rows
    lengths, table = (x.to(call.q.device) for x in (lengths, table))
    if own <= 0:
        raise ValueError(f"riding: expected trees and {prompts} pieces of {rows} rows, got {batch} rows")

    # All blocks are in the cache before any row attends.
    queries, out = _append(call, min(triton.next_power_of_2(nodes), 4), 1, early=False), call.empty_output()
    done = call._replace(q=queries, k=None, v=None, cos=None, sin=None, q_norm=None, k_norm=None)
    named = ["q", "lengths", "ancestors", "positions", "tiles", "table"]
    named += ["slopes"] if call.slopes is not None and call.slopes.dim() == 4 else []
    of_rows = {name: x for name in named if (x := getattr(done, name)) is not None}
    trees = done._replace(**{name: x[:own] for name, x in of_rows.items()})
    tuning = tree_tuning(heads // call.key_cache.shape[1] * nodes, own * call.key_cache.shape[1], *facts)
    _launch_tree(trees, tuning, out[:own])

    # A piece is a chunk of rows * nodes tokens. A copy is made only if the nodes of a head lie side by side.
    chunk = queries[own:].unflatten(0, (prompts, rows)).transpose(1, 2).reshape(prompts, heads, rows * nodes, key_dim)
    joined = {name: of_rows[name][own:] for name in ("positions", "slopes") if name in of_rows}
    joined = {name: x.reshape(prompts, rows * nodes, *x.shape[2:]) for name, x in joined.items()}
    done = done._replace(q=chunk, lengths=lengths, ancestors=None, tiles=None, table=table, **joined)
    _launch_prompt(done, prompt_tuning(*facts), out[own:].view(prompts, rows * nodes, heads, -1))
    return out


def _constants(call: AttentionCall, value_columns: int) -> dict:
    """The constants that all kernels have."""
    key_dim, value_dim = call.q.shape[3], call.value_cache.shape[3]
    return {
        "KV_HEADS": call.key_cache.shape[1], "PAGE": 0 if call.table is None else call.key_cache.shape[2],
        "DK": key_dim, "BLOCK_DK": key_columns(key_dim), "DV": value_dim, "BLOCK_DV": value_columns,
    }  # fmt: skip


def _factors(call: AttentionCall) -> tuple[float | None, float, int, int]:
    """The factors `inner` and `outer` of q . k that give a score in base 2, and what kernels take after them: the
    stride of nodes in slopes [B, N, H, D] or 0, and DISTANCES: D of slopes, or 1 for ALiBi and none.

    Without softcap c the score is q . k * outer, outer = scale * log2 e. With it the score is tanh(q . k * scale / c)
    * outer, outer = c * log2 e; kernels compute tanh(x) as 1 - 2 / (2 ** (q . k * inner) + 1).
    """
    outer = call.scale if call.softcap is None else call.softcap
    inner = None if call.softcap is None else call.scale / call.softcap * 2 * LOG2E
    sizes = () if call.slopes is None else call.slopes.shape
    distances = sizes[-1] if len(sizes) > 1 else 1
    stride = sizes[2] * distances if len(sizes) == 4 else 0
    return inner, outer * LOG2E, stride, distances


def _append(call: AttentionCall, block: int, warps: int, early: bool) -> Tensor:
    """Append the block to the cache, `block` tokens a program, unless it is there. -> the queries, rotated if asked."""
    if call.k is None:
        return call.q
    q, k, v, key_cache, value_cache, lengths, *_ = call
    batch, heads, nodes, key_dim = q.shape
    rotates = call.cos is not None
    rotated = q.new_empty(batch, heads, nodes, key_dim) if rotates else q
    half = key_dim // 2
    append_kernel[(triton.cdiv(nodes, block), batch, k.shape[1] + heads * rotates)](
        q, k, v, rotated, key_cache, value_cache, call.scales, call.table, lengths, call.cos, call.sin, call.q_norm,
        call.k_norm, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], nodes, call.slots, call.eps, call.offset or 0.0,
        BLOCK=block, HEADS=heads, ALIGNED=half & -half, ROUND_FIRST=call.offset is None, EARLY=early,
        **_constants(call, triton.next_power_of_2(v.shape[3])), num_warps=warps, launch_pdl=early,
    )  # fmt: skip
    return rotated


def _launch_prompt(call: AttentionCall, config: Tuning, out: Tensor | None = None) -> Tensor:
    """Append a causal chunk, then attend to the cache only. out: where the result goes; None makes it."""
    q, _, _, key_cache, value_cache, lengths, _, positions, *_ = call
    batch, heads, nodes, _ = q.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[3]
    group, columns = heads // kv_heads, min(triton.next_power_of_2(value_dim), MOST_COLUMNS)
    out, rotated = call.empty_output() if out is None else out, _append(call, 32, 4, early=False)
    grid = triton.cdiv(nodes * group, config.block_m), batch * kv_heads, triton.cdiv(value_dim, columns)
    prompt_kernel[grid](
        rotated, key_cache, value_cache, call.scales, call.table, lengths, positions, call.sinks, call.slopes, out,
        *rotated.stride()[:3], positions.stride(0), nodes, call.slots, *_factors(call),
        GROUP=group, BLOCK_M=config.block_m, PRECISION=precision(q.dtype, q.device),
        **_order(call, config), **_constants(call, columns), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out


def _order(call: AttentionCall, config: Tuning) -> dict:
    """The constants that decide in which order keys are summed: chunks and spans."""
    first = first_log2(max(config.least, config.block_n), call.window)
    return {
        "CHUNK": config.block_n, "FIRST": first, "MOST": config.most if call.window is None else 0,
        "WINDOW": call.window,
    }  # fmt: skip


def _launch_tree(call: AttentionCall, config: Tuning, out: Tensor | None = None) -> Tensor:
    """Append the tree to the cache, then attend to the cache. Kernels begin early if they can (`launching`). out: where
    the result goes; None makes it."""
    q, _, _, key_cache, value_cache, lengths, ancestors, positions, *_ = call
    batch, heads, nodes, _ = q.shape
    kv_heads, value_dim = key_cache.shape[1], value_cache.shape[3]
    block_m, chunk, whole, group = config.block_m, config.block_n, config.whole, heads // kv_heads

    # The tail tiles, the spans, and memory for their partial softmaxes (see `partial_softmax`).
    per_tile, columns = nodes_per_tile(group), min(triton.next_power_of_2(value_dim), MOST_COLUMNS)
    tiles = tail_tiles(ancestors, per_tile) if call.tiles is None else call.tiles
    tails = (triton.cdiv(nodes, per_tile) if tiles is None else nodes) * triton.cdiv(per_tile * group, block_m)
    order = _order(call, config)
    spans = 2 if whole else most_spans(call.slots, order["FIRST"], config.most, call.window)
    tail_parts = triton.cdiv(chunk - 1 + nodes, chunk)
    parts = q.new_empty(batch * kv_heads, tail_parts + spans, nodes * group, value_dim, dtype=torch.float32)
    sums = q.new_empty(batch * kv_heads, tail_parts + spans, 2, nodes * group, dtype=torch.float32)
    out = call.empty_output() if out is None else out
    early = launches_early(q.device) and tiles is call.tiles  # a table made here may not be read early
    shared = {**order, "GROUP": group, "PARTS": tail_parts, "EARLY": early, "WHOLE": whole, "launch_pdl": early}

    # The three launches.
    programs = (1 if whole else spans) * triton.cdiv(nodes * group, block_m) + tails
    rotated = _append(call, min(triton.next_power_of_2(nodes), 4), 1, early)
    tree_kernel[(batch * kv_heads, programs, triton.cdiv(value_dim, columns))](
        rotated, key_cache, value_cache, call.scales, call.table, lengths, tiles, positions, call.slopes, parts, sums,
        *rotated.stride()[:3], positions.stride(0), nodes, call.slots, spans, *_factors(call),
        BLOCK_M=block_m, PER_TILE=per_tile, COLUMNS=COLUMNS, PRECISION=precision(q.dtype, q.device), **shared,
        **_constants(call, columns), num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    merge_spans_kernel[(nodes * heads, batch)](
        lengths, positions, call.sinks, out, parts, sums, positions.stride(0), nodes, spans, HEADS=heads,
        DV=value_dim, BLOCK_DV=triton.next_power_of_2(value_dim), **shared, num_warps=1,
    )  # fmt: skip
    return out


on_gpu(tree_attention)(from_arguments(launch))
