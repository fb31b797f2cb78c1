"""Backends that need no other package: "triton", our kernels, and "sdpa", the reference.

"sdpa" is plain PyTorch; on a GPU it reads the whole capacity of the cache.
"""

from collections.abc import Callable

import torch
from torch import Tensor, fx

from ...graph import LayerSpec, ModelGraph, calls
from .. import HALF, ops
from ..card import FP8, card_of, multiplied_bytes
from .base import ALL, TAKEN, AttentionCall, Backend, Use, attention_calls, attention_function, plain_attention
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
