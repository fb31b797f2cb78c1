"""Backend "triton": our own kernels (`tree_attention`). It rotates, and has all features but chunks of positions."""

from collections.abc import Callable

import torch
from torch import fx

from ...graph import LayerSpec, ModelGraph, calls
from .. import HALF
from ..card import FP8, card_of, multiplied_bytes
from .base import ALL, Backend, Use
from .call import SPECIAL, attention_calls
from .tail_tiles import nodes_per_tile, tail_tiles


def load(use: Use) -> Callable:
    from . import tree_attention  # noqa: F401

    if use.fp8 and (here := torch.cuda.get_device_capability()) < FP8:
        numbers = "{}.{}, got {}.{}".format(*FP8, *here)
        name = "fp8_per_token_head" if use.scaled else "fp8"
        raise ValueError(f"kv_cache_dtype: {name!r} needs a GPU of compute capability {numbers}; pass 'auto'")
    return torch.ops.spec_compile.tree_attention.default


def prepare(graph: ModelGraph) -> str:
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


def room(layer: LayerSpec, dtype: torch.dtype, device: torch.device) -> str | None:
    """The shared memory that the smallest tiles need: of queries, and of a chunk of keys and values."""
    memory = card_of(device).memory
    if not memory:
        return None
    from .tree_attention import least_memory

    need = least_memory(layer.key_dim, layer.value_dim, multiplied_bytes(dtype, device))
    if need <= memory:
        return None
    return f"{need} bytes of shared memory for heads of {layer.key_dim} (the GPU has {memory})"


HAS = ALL - {"chunk"}
BACKEND = Backend(
    "triton", load, frozenset({"cuda"}), frozenset({*HALF, torch.float32}), HAS, HAS, HAS, takes=SPECIAL,
    fp8=True, scaled=True, prompts_captured=True, room=room, prepare=prepare,
)  # fmt: skip
