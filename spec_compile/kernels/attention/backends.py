"""Backends that need no other package: "triton" (our kernels), "sdpa" (the reference) and "flex".

"sdpa" is plain PyTorch; on a GPU it reads the whole capacity of the cache. "flex" is PyTorch's FlexAttention, with
block masks that are computed from the lengths on the device; Inductor makes one kernel of it inside a compiled region.
If rounds are not compiled, "flex" runs unfused, which is slow and holds all scores in memory.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    _apply_kernel_options,
    _identity,
    flex_attention,
)  # fmt: skip

from ...graph import LayerSpec, ModelGraph, calls
from .. import HALF, ops
from ..card import FP8, card_of, multiplied_bytes
from .base import ALL, TAKEN, AttentionCall, Backend, Use, attention_calls, attention_function, plain_attention
from .flashinfer import add_sinks
from .tail_tiles import nodes_per_tile, tail_tiles

# "triton": our own kernels (`tree_attention`). They rotate, and have all features but chunks of positions.


def load_triton(use: Use) -> Callable:
    """The op; ValueError for an FP8 cache on a GPU that has no FP8."""
    from . import tree_attention  # noqa: F401

    if use.fp8 and (here := torch.cuda.get_device_capability()) < FP8:
        numbers = "{}.{}, got {}.{}".format(*FP8, *here)
        name = "fp8_per_token_head" if use.scaled else "fp8"
        raise ValueError(f"kv_cache_dtype: {name!r} needs a GPU of compute capability {numbers}; pass 'auto'")
    return torch.ops.spec_compile.tree_attention.default


def share_tiles(graph: ModelGraph) -> str:
    """Compute tail tiles once: one `tail_tiles` for all layers with the same ancestors and query heads a KV head."""
    tables: dict[tuple, fx.Node] = {}
    first = calls(graph.gm)[0]  # here its kernel is not between two kernels that are launched early
    for node, layer in zip(attention_calls(graph), graph.layers):
        ancestors, size = node.kwargs["ancestors"], nodes_per_tile(layer.heads // layer.kv_heads)
        if ancestors is not None and (ancestors, size) not in tables:
            with graph.gm.graph.inserting_before(first):
                tables[ancestors, size] = graph.gm.graph.call_function(tail_tiles, (ancestors, size))
        node.update_kwarg("tiles", tables.get((ancestors, size)))
    return ""


def why_no_room(layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The shared memory that the smallest tiles need, of queries and a chunk of keys and values, if it is lacking."""
    memory = card_of(device).memory
    if not memory:
        return None
    from .tree_attention import least_memory

    need = least_memory(layer.key_dim, layer.value_dim, multiplied_bytes(dtype, device))
    if need <= memory:
        return None
    return f"{need} bytes of shared memory for heads of {layer.key_dim} (the GPU has {memory})"


HAS = ALL - {"chunk"}
TRITON = Backend(
    "triton", load_triton, frozenset({"cuda"}), frozenset({*HALF, torch.float32}), HAS, HAS, HAS, takes=TAKEN,
    fp8=True, scaled=True, prompts_captured=True, room=why_no_room, prepare=share_tiles,
)  # fmt: skip


def attend_to_committed(
    q: Tensor, key_cache: Tensor, value_cache: Tensor, scales: Tensor | None, lengths: Tensor, max_kv_len: int,
    scale: float, softcap: float | None, window: int | None, table: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of queries that have no slots to the committed slots of a cache, which is only read. -> [B, R, H, Dv].

    q: [B, H, R, Dk]; R queries a row, rotated, which see the same slots and not each other.
    key_cache, value_cache, scales, table: as in `AttentionCall`; none is written.
    lengths: [B] int64; committed slots. A row without any sees slot 0, whatever that holds.
    max_kv_len: slots that may be committed; on a GPU all are looked at.
    window: how many of the last committed slots are seen; None for all.

    All queries are asked in the place of the last committed token, as heads of a block of that one token, which is in
    the cache already: with H = 4, Hkv = 2 and R = 3 it has 12 heads, of which the first 6 read KV head 0.
    """
    batch, heads, rows, size = q.shape
    last = (lengths - 1).clamp(min=0)
    call = AttentionCall(
        q.reshape(batch, heads * rows, 1, size), None, None, key_cache, value_cache, last, None, last[:, None], None,
        scale, softcap, window, scales, table=table,
    )  # fmt: skip
    out = torch.ops.spec_compile.tree_attention(*call) if q.is_cuda else plain_attention(call, max_kv_len)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2)


# "sdpa".


@attention_function
def sdpa(call: AttentionCall, mask: Tensor | None = None) -> Tensor:
    """`plain_attention` to all slots. Shapes depend on no value, so a CUDA graph can hold it."""
    return plain_attention(call, call.slots, mask)


def share_masks(graph: ModelGraph) -> str:
    """On a CPU, compute masks once: one `ops.tree_mask` of `max_kv_len` slots for all layers that see the same keys.

    On a GPU every call makes its own mask of all slots, because no shape may depend on a value there.
    """
    if graph.device.type != "cpu":
        return ""
    (max_kv_len,) = (node for node in graph.gm.graph.nodes if node.op == "placeholder" and node.target == "max_kv_len")
    masks: dict[tuple, fx.Node] = {}
    for node, layer in zip(attention_calls(graph), graph.layers):
        chunk, slopes = (node.kwargs.get(name) for name in ("chunk", "slopes"))
        seen, group = (node.kwargs["ancestors"], layer.window, chunk, slopes), layer.heads // layer.kv_heads
        if (seen, group) not in masks:
            block = (node.kwargs[name] for name in ("positions", "lengths", "ancestors"))
            with graph.gm.graph.inserting_before(node):
                mask = graph.gm.graph.call_function(
                    ops.tree_mask, (*block, max_kv_len, layer.window, group, graph.dtype, chunk, slopes)
                )
            masks[seen, group] = mask
        node.update_kwarg("mask", masks[seen, group])
    return f", {len(masks)} masks"


SDPA = Backend(
    "sdpa", lambda use: sdpa, frozenset({"cpu", "cuda"}), frozenset({*HALF, torch.float32, torch.float64}),
    ALL, ALL, ALL, scaled=True, prepare=share_masks,
)  # fmt: skip


# "flex".


BLOCK = 128
"""Slots of a block; a block of the cache is skipped or computed as a unit."""
QUERIES = 1 << 15
"""Queries that share a list of blocks: all of them, so that no shape depends on their number."""
OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
"""One kernel for any number of queries; the decoding kernel would be chosen by the number at compilation."""


@attention_function
def flex(call: AttentionCall) -> Tensor:
    """The call. -> [B, N, H, Dv]. Values in unseen slots of a computed block must be finite."""
    q, k, v, key_cache, value_cache, lengths, ancestors, positions, sinks, scale, softcap, window, *_ = call
    ops.append_block(key_cache, value_cache, None, k, v, lengths, call.table)
    keys, values = ops.as_read(key_cache, value_cache, None, call.slots, q.dtype, call.table)

    def capped(score, batch, head, node, slot):
        return torch.tanh(score / softcap) * softcap

    blocks = block_mask(call.slots, lengths, ancestors, positions, window)
    inputs = q, keys, values, None if softcap is None else capped, blocks, scale
    aux = None if sinks is None else AuxRequest(lse=True)
    if not torch.compiler.is_dynamo_compiling() and get_proxy_mode() is not None:
        out, sums = _traced(*inputs, aux)
    else:
        out = flex_attention(*inputs, q.shape[1] != k.shape[1], kernel_options=OPTIONS, return_aux=aux)
        out, sums = (out, None) if aux is None else (out[0], out[1].lse)
    out = out.transpose(1, 2)
    return out if sinks is None else add_sinks(out, sums.transpose(1, 2), sinks)


def block_mask(
    slots: int, lengths: Tensor, ancestors: Tensor | None, positions: Tensor, window: int | None
) -> BlockMask:
    """`ops.tree_mask` as FlexAttention takes it, computed on the device without waiting for it.

    It has a function `seen` of indices, the blocks of the cache that are seen completely (none with a window), and the
    blocks where a slot may be seen. 300 committed slots and 5 nodes with BLOCK = 128: blocks 0 and 1 are seen
    completely, and block 2 (slots 256 .. 383) in part.
    """
    # The tensors that the mask reads.
    nodes, device = positions.shape[1], positions.device
    places = torch.arange(slots, device=device).expand(len(lengths), -1)
    own = lengths[:, None] + torch.arange(nodes, device=device)
    read = [lengths]
    read += [] if ancestors is None else [ancestors]
    read += [] if window is None else [positions, places.scatter(1, own, positions)]  # positions of nodes and of slots

    def seen(batch, head, node, slot, lengths, *more):
        index = slot - lengths[batch]  # the slot's node; negative: a committed slot
        if ancestors is None:
            visible = index <= node
        else:
            bit = (more[0][batch, node] >> index.clamp(0, 63)) & 1
            visible = (index < 0) | ((index < 64) & (bit != 0))
        if window is not None:
            of_nodes, of_slots = more[-2:]
            visible = visible & (of_nodes[batch, node] - of_slots[batch, slot] < window)
        return visible

    # The first block that is seen, and the blocks that are seen completely.
    blocks = (slots + BLOCK - 1) // BLOCK
    if window is None:
        first = lengths // BLOCK
        every = torch.arange(blocks, device=device, dtype=torch.int32).expand(len(lengths), -1)
        whole = _dense(first.int()), _dense(every.contiguous())
    else:
        first = (torch.minimum(positions.amin(1), lengths) - window + 1).clamp(min=0) // BLOCK
        whole = None, None

    # The blocks from there to the block's end.
    count = (lengths + nodes + BLOCK - 1) // BLOCK - first
    indices = (first[:, None] + torch.arange(blocks, device=device)).clamp(max=blocks - 1)
    mask = BlockMask.from_kv_blocks(
        _dense(count.int()), _dense(indices.int()), *whole, BLOCK_SIZE=(QUERIES, BLOCK),
        mask_mod=lambda batch, head, node, slot: seen(batch, head, node, slot, *read), seq_lengths=(nodes, slots),
        compute_q_blocks=False,
    )  # fmt: skip
    mask.seen, mask.read = seen, tuple(read)
    return mask


def _traced(
    q: Tensor, keys: Tensor, values: Tensor, cap: Callable | None, mask: BlockMask, scale: float, aux: AuxRequest | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The outputs [B, H, N, Dv] and, if `aux` asks for them, the logarithms of the sums [B, H, N], by the operator that
    FlexAttention calls. A trace without Dynamo needs the tensors that the mask reads as separate arguments."""
    options = _apply_kernel_options(q, keys, values, False, OPTIONS, aux)
    out, sums, *_ = torch.ops.higher_order.flex_attention(
        q, keys, values, cap or _identity, (*mask.as_tuple()[:-1], mask.seen), scale, options, (), mask.read
    )
    return out, sums * math.log(2)


def _dense(x: Tensor) -> Tensor:
    """x [B] or [B, L] as [B, 1, 1] or [B, 1, 1, L] with the strides of a contiguous tensor.

    FlexAttention's kernels rely on these strides; torch 2.11's Inductor would choose others for dimensions of size 1.
    """
    row = x.stride(0)
    return x.as_strided((x.shape[0], 1, 1, *x.shape[1:]), (row, row, row, *x.stride()[1:]))


FLEX = Backend(
    "flex", lambda use: flex, frozenset({"cuda"}), frozenset({*HALF, torch.float32}),
    uncompiled=False,  # it makes scalars on the host
    sizes=frozenset(range(16, 257)),
)  # fmt: skip
